//! The text: of its tokens the first nine tenths are for training and the rest for validation.

use crate::error::Error;
use crate::tokenizer::Tokenizer;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A text, split.
pub struct Text {
    /// As it was read.
    pub bytes: Vec<u8>,
    tokens: Vec<u32>,
    /// Where validation begins.
    split: usize,
}

impl Text {
    /// Splits UTF-8 `bytes`, which must leave a window of `context` tokens and the token after it on either side.
    ///
    /// # Errors
    ///
    /// When the bytes, which came from `path`, are no text, or too short a one.
    pub fn new(bytes: Vec<u8>, path: &Path, tokenizer: Tokenizer, context: usize) -> Result<Self, Error> {
        let text = str::from_utf8(&bytes)
            .map_err(|error| Error::TextNotUtf8 { path: path.to_path_buf(), offset: error.valid_up_to() })?;
        let tokens = tokenizer.encode(text);
        let split = tokens.len() * 9 / 10;
        if tokens.len() - split < context + 1 || split < context + 1 {
            return Err(Error::TextTooShort { tokens: tokens.len(), context, needed: 10 * (context + 1) });
        }
        Ok(Self { bytes, tokens, split })
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, and as [`Text::new`].
    pub fn read(path: &Path, tokenizer: Tokenizer, context: usize) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|source| Error::TextMissing { path: path.to_path_buf(), source })?;
        Self::new(bytes, path, tokenizer, context)
    }

    /// The tokens to train on.
    pub fn train(&self) -> &[u32] {
        &self.tokens[..self.split]
    }

    /// The tokens to validate with.
    pub fn validation(&self) -> &[u32] {
        &self.tokens[self.split..]
    }

    /// Tells texts apart.
    pub fn hash(&self) -> u64 {
        fnv1a(&self.bytes)
    }
}

/// FNV-1a: finds accidents, not forgeries.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The sources and documents of this workspace, one after the other in the order of their paths.
///
/// # Errors
///
/// When there is no workspace here or where the program was compiled, or a file cannot be read.
pub fn own_sources() -> Result<Vec<u8>, Error> {
    let mut files = Vec::new();
    collect(&workspace_root()?, &mut files)?;
    let mut text = Vec::new();
    for file in files {
        let source = fs::read(&file).map_err(Error::io(&file))?;
        // A stray binary under a text's name should not keep anybody from training.
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

/// What a random number is for. Streams never meet, so no use of one shifts another.
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

/// A seed from the run's seed, the use and a step: with nothing else to remember, a run resumes exactly.
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

/// A generator for that use and step.
pub fn rng(seed: u32, stream: Stream, step: usize) -> StdRng {
    StdRng::seed_from_u64(derive_seed(seed, stream, step))
}

/// Random windows: inputs and the tokens that follow each, both `[share, context]`. Of a batch of `batch` windows these are
/// those numbered `share`, the same ones whoever takes the others.
pub fn random_batch(
    text: &[u32],
    batch: usize,
    share: Range<usize>,
    context: usize,
    rng: &mut StdRng,
    device: &Device,
) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let starts: Vec<usize> = (0..batch).map(|_| rng.random_range(0..text.len() - context)).collect();
    let starts = &starts[share];
    let windows = |offset: usize| {
        let tokens = |start: &usize| text[start + offset..][..context].iter().map(|token| *token as i32);
        let tokens: Vec<i32> = starts.iter().flat_map(tokens).collect();
        Tensor::from_data(TensorData::new(tokens, [starts.len(), context]), device)
    };
    (windows(0), windows(1))
}
