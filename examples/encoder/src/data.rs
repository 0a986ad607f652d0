//! Texts of different lengths with the class of each, as bytes.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fs;
use std::path::Path;

/// The token that each text begins with, whose output is classified.
pub const CLS: u16 = 256;
/// Number of tokens: bytes, and [`CLS`].
pub const VOCAB: usize = 257;

/// Fewest bytes of a text.
const SHORTEST: usize = 16;

/// Files of this workspace: in which language is a passage?
const FILES: [(&str, &str); 5] = [
    ("markdown", include_str!("../../../docs/lab-notebook.md")),
    ("python", include_str!("../../../benches/peers.py")),
    ("rust", include_str!("../../../crates/burn-flash-attention/src/options.rs")),
    ("svg", include_str!("../../../docs/h200.svg")),
    ("toml", include_str!("../../../tests/mutants/manifest.toml")),
];

/// Texts and their classes.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Tokens of each text, of which the first is [`CLS`].
    pub texts: Vec<Vec<u16>>,
    /// Class of each.
    pub classes: Vec<i32>,
}

impl Batch {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// Length of the longest text.
    pub fn longest(&self) -> usize {
        self.texts.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Classes with the bytes of each, of which the last tenth is for validation.
#[derive(Clone, Debug)]
pub struct Data {
    /// Names of the classes.
    pub names: Vec<String>,
    bytes: Vec<Vec<u8>>,
    max_len: usize,
}

impl Data {
    /// Files of this workspace, or of a folder with a folder of texts for each class. Texts have at most `max_len` tokens.
    ///
    /// # Errors
    ///
    /// If a folder cannot be read, there are fewer than two classes, or a class has too few bytes.
    pub fn read(folder: Option<&Path>, max_len: usize) -> Result<Self, String> {
        let classes = match folder {
            None => FILES.map(|(name, text)| (name.to_string(), text.as_bytes().to_vec())).to_vec(),
            Some(folder) => classes(folder)?,
        };
        if classes.len() < 2 {
            return Err(format!("there are {} classes of texts; a classifier needs at least 2", classes.len()));
        }
        if max_len <= SHORTEST {
            return Err(format!("--max-len is {max_len}; it must be above {SHORTEST}"));
        }
        for (name, bytes) in &classes {
            // A tenth holds a text of any length.
            if bytes.len() < 10 * max_len {
                let (len, least) = (bytes.len(), 10 * max_len);
                return Err(format!("the texts of {name} have {len} bytes, but --max-len {max_len} needs {least}"));
            }
        }
        let (names, bytes) = classes.into_iter().unzip();
        Ok(Data { names, bytes, max_len })
    }

    /// A batch of passages, whose lengths are uniform in their logarithm. The same seed draws the same batch.
    pub fn batch(&self, texts: usize, seed: u64, validation: bool) -> Batch {
        let mut random = StdRng::seed_from_u64(seed);
        let shortest = (SHORTEST as f64).ln();
        let longest = (self.max_len as f64).ln();
        let draw = |_| {
            let class = random.random_range(0..self.bytes.len());
            let bytes = &self.bytes[class];
            let (train, last) = bytes.split_at(bytes.len() * 9 / 10);
            let from = if validation { last } else { train };
            let len = random.random_range(shortest..longest).exp() as usize - 1;
            let at = random.random_range(0..=from.len() - len);
            let tokens = from[at..at + len].iter().map(|byte| u16::from(*byte));
            ([CLS].into_iter().chain(tokens).collect(), class as i32)
        };
        let (texts, classes) = (0..texts).map(draw).unzip();
        Batch { texts, classes }
    }
}

/// The classes of a folder, in the order of their names, with the bytes of all files of each.
fn classes(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let entries = |folder: &Path| {
        let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let mut paths: Vec<_> = entries
            .map_err(|error| format!("cannot read {}: {error}", folder.display()))?
            .into_iter()
            .map(|entry| entry.path())
            .collect();
        paths.sort();
        Ok::<_, String>(paths)
    };
    let mut classes = Vec::new();
    for class in entries(folder)?.into_iter().filter(|path| path.is_dir()) {
        let mut bytes = Vec::new();
        for file in entries(&class)?.into_iter().filter(|path| path.is_file()) {
            bytes.extend(fs::read(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?);
        }
        let name = class.file_name().unwrap_or_default().to_string_lossy().into_owned();
        classes.push((name, bytes));
    }
    Ok(classes)
}
