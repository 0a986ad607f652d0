//! The text. The first nine tenths of its tokens are for training, the rest for validation.

use crate::error::Error;
use crate::tokenizer::Tokenizer;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A text, split for training and validation.
pub struct Text {
    /// The text as read.
    pub bytes: Vec<u8>,
    tokens: Vec<u32>,
    /// Index of the first validation token.
    split: usize,
    /// The documents, and the number of training documents, if rows are packed.
    documents: Option<(Vec<Vec<u32>>, usize)>,
}

/// Separator of documents. If the text has none, blank lines separate them.
const END_OF_TEXT: &str = "<|endoftext|>";

impl Text {
    /// Splits UTF-8 `bytes`. Both parts must have at least `context` tokens and one more.
    ///
    /// # Errors
    ///
    /// If the bytes, which come from `path`, are not UTF-8, or the text is too short.
    pub fn new(bytes: Vec<u8>, path: &Path, tokenizer: Tokenizer, context: usize) -> Result<Self, Error> {
        let text = str::from_utf8(&bytes)
            .map_err(|error| Error::TextNotUtf8 { path: path.to_path_buf(), offset: error.valid_up_to() })?;
        let tokens = tokenizer.encode(text);
        let split = tokens.len() * 9 / 10;
        if tokens.len() - split < context + 1 || split < context + 1 {
            return Err(Error::TextTooShort { tokens: tokens.len(), context, needed: 10 * (context + 1) });
        }
        Ok(Self { bytes, tokens, split, documents: None })
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, and the errors of [`Text::new`].
    pub fn read(path: &Path, tokenizer: Tokenizer, context: usize) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|source| Error::TextMissing { path: path.to_path_buf(), source })?;
        Self::new(bytes, path, tokenizer, context)
    }

    /// Splits the text into documents, which are separated by `<|endoftext|>`, or by blank lines if it has none. The first nine tenths of
    /// the documents are for training. Documents of fewer than two tokens are left out, as nothing can be learned from them.
    ///
    /// # Errors
    ///
    /// If there are fewer than two documents.
    pub fn packed(mut self, tokenizer: Tokenizer) -> Result<Self, Error> {
        let text = str::from_utf8(&self.bytes).expect("it was one when it was split");
        let separator = if text.contains(END_OF_TEXT) { END_OF_TEXT } else { "\n\n" };
        let pieces = text.split(separator).map(|piece| tokenizer.encode(piece));
        let documents: Vec<_> = pieces.filter(|tokens| tokens.len() > 1).collect();
        if documents.len() < 2 {
            return Err(Error::NoDocuments { documents: documents.len() });
        }
        let split = (documents.len() * 9 / 10).max(1);
        self.documents = Some((documents, split));
        Ok(self)
    }

    /// The rows `share` of a training batch of `batch` rows of `context` tokens. The rows do not depend on how the batch is shared out.
    pub fn train_batch(
        &self,
        batch: usize,
        share: Range<usize>,
        context: usize,
        rng: &mut StdRng,
        device: &Device,
    ) -> Batch {
        match &self.documents {
            Some((documents, split)) => packed_batch(&documents[..*split], batch, share, context, rng, device),
            None => random_batch(self.train(), batch, share, context, rng, device),
        }
    }

    /// A batch for validation.
    pub fn validation_batch(&self, batch: usize, context: usize, rng: &mut StdRng, device: &Device) -> Batch {
        match &self.documents {
            Some((documents, split)) => packed_batch(&documents[*split..], batch, 0..batch, context, rng, device),
            None => random_batch(self.validation(), batch, 0..batch, context, rng, device),
        }
    }

    /// Numbers of training and validation documents, if rows are packed.
    pub fn documents(&self) -> Option<[usize; 2]> {
        self.documents.as_ref().map(|(documents, split)| [*split, documents.len() - split])
    }

    /// Training tokens.
    pub fn train(&self) -> &[u32] {
        &self.tokens[..self.split]
    }

    /// Validation tokens.
    pub fn validation(&self) -> &[u32] {
        &self.tokens[self.split..]
    }

    /// Hash that distinguishes texts.
    pub fn hash(&self) -> u64 {
        fnv1a(&self.bytes)
    }
}

/// FNV-1a: detects accidental changes, not deliberate ones.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Concatenates the sources and documents of this workspace, in the order of their paths.
///
/// # Errors
///
/// If neither the current directory nor the directory of compilation is in a workspace, or a file cannot be read.
pub fn own_sources() -> Result<Vec<u8>, Error> {
    let mut files = Vec::new();
    collect(&workspace_root()?, &mut files)?;
    let mut text = Vec::new();
    for file in files {
        let source = fs::read(&file).map_err(Error::io(&file))?;
        // Skip stray binary files with the extension of a text.
        if std::str::from_utf8(&source).is_ok() {
            text.extend(source);
            text.push(b'\n');
        }
    }
    Ok(text)
}

fn workspace_root() -> Result<PathBuf, Error> {
    let is_workspace = |path: &Path| {
        fs::read_to_string(path.join("Cargo.toml")).is_ok_and(|manifest| manifest.contains("[workspace]"))
    };
    let here = std::env::current_dir().map_err(Error::io("."))?;
    let compiled_from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    here.ancestors()
        .map(Path::to_path_buf)
        .chain([compiled_from])
        .find(|path| is_workspace(path))
        .ok_or(Error::NoWorkspace)
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let mut entries =
        fs::read_dir(directory).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(Error::io(directory))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let kind = entry.file_type().map_err(Error::io(&path))?;
        if kind.is_dir() && !name.starts_with('.') && name != "target" && name != "runs" {
            collect(&path, files)?;
        } else if kind.is_file() && path.extension().is_some_and(|ext| ["rs", "md", "toml"].iter().any(|e| ext == *e)) {
            files.push(path);
        }
    }
    Ok(())
}

/// Use of a random number. Each use has its own stream, so that no use affects another.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum Stream {
    Weights,
    TrainBatch,
    Dropout,
    ValidationBatch,
    FinalBatch,
    Sample,
}

/// Derives a seed from the run's seed, the use and the step. A resumed run therefore needs no other state to continue exactly.
pub fn derive_seed(seed: u32, stream: Stream, step: usize) -> u64 {
    // SplitMix64's finalizer.
    let mix = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let golden = 0x9e37_79b9_7f4a_7c15_u64;
    let stream = mix(u64::from(seed) ^ golden.wrapping_mul(stream as u64 + 1));
    mix(stream ^ golden.wrapping_mul(step as u64 + 1))
}

/// Random generator for a use and a step.
pub fn rng(seed: u32, stream: Stream, step: usize) -> StdRng {
    StdRng::seed_from_u64(derive_seed(seed, stream, step))
}

/// Rows of tokens.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[batch, context]`.
    pub tokens: Tensor<2, Int>,
    /// The next token after each, `[batch, context]`.
    pub targets: Tensor<2, Int>,
    /// Documents in the rows, if rows are packed.
    pub documents: Option<Documents>,
}

/// Documents packed one after the other, which do not see each other.
#[derive(Clone, Debug)]
pub struct Documents {
    /// Beginning of each document, counted through the rows, and end of the last one: `[documents + 1]`.
    pub ends: Tensor<1, Int>,
    /// Position of each token in its document, `[batch, context]`.
    pub positions: Tensor<2, Int>,
}

/// Random windows of the text: the windows `share` of a batch of `batch`.
fn random_batch(
    text: &[u32],
    batch: usize,
    share: Range<usize>,
    context: usize,
    rng: &mut StdRng,
    device: &Device,
) -> Batch {
    let starts: Vec<usize> = (0..batch).map(|_| rng.random_range(0..text.len() - context)).collect();
    let starts = &starts[share];
    let windows = |offset: usize| {
        let tokens = |start: &usize| text[start + offset..][..context].iter().map(|token| *token as i32);
        rows(starts.iter().flat_map(tokens).collect(), context, device)
    };
    Batch { tokens: windows(0), targets: windows(1), documents: None }
}

/// Rows of random documents. Documents are whole, except for the last one of each row, which is cut, and documents longer than a row, of
/// which a part is taken. A document's last token is never an input, because no token follows it.
fn packed_batch(
    documents: &[Vec<u32>],
    batch: usize,
    share: Range<usize>,
    context: usize,
    rng: &mut StdRng,
    device: &Device,
) -> Batch {
    let (mut tokens, mut targets, mut positions, mut ends) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for row in 0..batch {
        let mut left = context;
        while left > 0 {
            let document = &documents[rng.random_range(0..documents.len())];
            let inputs = document.len() - 1;
            let first = rng.random_range(0..=inputs.saturating_sub(context));
            let count = inputs.min(left);
            left -= count;
            if share.contains(&row) {
                tokens.extend(document[first..first + count].iter().map(|token| *token as i32));
                targets.extend(document[first + 1..=first + count].iter().map(|token| *token as i32));
                positions.extend(0..count as i32);
                ends.push(tokens.len() as i32);
            }
        }
    }
    let ends = Tensor::from_data(&ends[..], device);
    let [tokens, targets, positions] = [tokens, targets, positions].map(|values| rows(values, context, device));
    Batch { tokens, targets, documents: Some(Documents { ends, positions }) }
}

/// Numbers as a tensor with rows of `context`.
fn rows(values: Vec<i32>, context: usize, device: &Device) -> Tensor<2, Int> {
    let count = values.len() / context;
    Tensor::from_data(TensorData::new(values, [count, context]), device)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn numbers<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
        tensor.into_data().convert::<i32>().try_to_vec().unwrap()
    }

    #[test]
    fn rows_are_documents_one_behind_the_other() {
        // Each token tells its document and its position in it.
        let documents: Vec<Vec<u32>> =
            [9, 2, 40, 5].iter().enumerate().map(|(n, len)| (0..*len).map(|i| 100 * n as u32 + i).collect()).collect();
        let device = Device::flex();
        let batch = packed_batch(&documents, 6, 2..5, 16, &mut StdRng::seed_from_u64(3), &device);
        let (tokens, targets) = (numbers(batch.tokens), numbers(batch.targets));
        assert_eq!(tokens.len(), 3 * 16);
        assert!(tokens.iter().zip(&targets).all(|(token, target)| token + 1 == *target));
        let Documents { ends, positions } = batch.documents.unwrap();
        let (ends, positions) = (numbers(ends), numbers(positions));
        assert_eq!((ends[0], ends[ends.len() - 1]), (0, 48));
        for ends in ends.windows(2) {
            let of = ends[0] as usize..ends[1] as usize;
            assert!(of.start < of.end && of.start / 16 == (of.end - 1) / 16, "the document {of:?} must be in one row");
            assert!(tokens[of.clone()].windows(2).all(|pair| pair[0] + 1 == pair[1]), "{of:?} must be one document");
            assert!(positions[of.clone()].iter().enumerate().all(|(i, position)| i as i32 == *position));
        }
        // The rows do not depend on how the batch is shared out.
        let whole = packed_batch(&documents, 6, 0..6, 16, &mut StdRng::seed_from_u64(3), &device);
        assert_eq!(numbers(whole.tokens)[2 * 16..5 * 16], tokens);
    }
}
