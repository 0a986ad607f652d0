//! Checkpoints: everything that a run needs to continue, in one file that is written atomically.
//!
//! ```text
//! magic "BURN-GPT" | version u32 | checksum u64 of all that follows
//! length u64 | header, TOML
//! length u64 | model, burnpack
//! length u64 | first moments, burnpack
//! length u64 | second moments, burnpack
//! ```
//! Numbers are little-endian.

use crate::config::Config;
use crate::data::fnv1a;
use crate::error::{CheckpointProblem, Error};
use crate::files::{Stage, write_in_stages};
use crate::model::Gpt;
use crate::optimizer::{AdamW, LossScale};
use burn::module::Module;
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::Bytes;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"BURN-GPT";
const VERSION: u32 = 2;
const SECTIONS: usize = 4;

/// Everything but the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Number of the next step.
    pub step: usize,
    /// Number of the optimizer's updates.
    pub updates: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// Hash of the text, hexadecimal.
    pub text_hash: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    pub config: Config,
}

/// The lowest validation loss so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: usize,
    pub loss: f32,
}

/// A checkpoint in memory.
pub struct Checkpoint {
    pub header: Header,
    path: PathBuf,
    records: [ModuleRecord; 3],
}

impl Checkpoint {
    /// Writes the file atomically: if the process is killed, the old or the new file remains.
    ///
    /// # Errors
    ///
    /// If the file cannot be written; the old one is unchanged.
    pub fn save(path: &Path, header: &Header, model: &Gpt, optimizer: &AdamW) -> Result<(), Error> {
        Self::save_in_stages(path, header, model, optimizer, |_| {})
    }

    fn save_in_stages(
        path: &Path,
        header: &Header,
        model: &Gpt,
        optimizer: &AdamW,
        reached: impl FnMut(Stage),
    ) -> Result<(), Error> {
        let [first, second] = optimizer.records(model);
        let pack = |record: ModuleRecord| record.into_bytes().map_err(|error| problem(path, &error));
        let header = toml::to_string(header).expect("a header is a table of plain values");
        let sections = [model.valid().into_record(), first, second].map(pack);

        let mut body = Vec::new();
        let mut section = |bytes: &[u8]| {
            body.extend((bytes.len() as u64).to_le_bytes());
            body.extend(bytes);
        };
        section(header.as_bytes());
        for bytes in sections {
            section(&bytes?);
        }
        let checksum = fnv1a(&body).to_le_bytes();
        write_in_stages(path, &[MAGIC, &VERSION.to_le_bytes(), &checksum, &body], reached)
    }

    /// # Errors
    ///
    /// If the file cannot be read, is not a checkpoint, has another version or is damaged.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(Error::io(path))?;
        let problem = |problem| Error::Checkpoint { path: path.to_path_buf(), problem };
        let corrupt = |what: &str| problem(CheckpointProblem::Corrupt(what.to_string()));

        let mut rest = bytes.strip_prefix(MAGIC).ok_or_else(|| problem(CheckpointProblem::Foreign))?;
        let version = u32::from_le_bytes(*take(&mut rest).ok_or_else(|| corrupt("it ends too early"))?);
        if version != VERSION {
            return Err(problem(CheckpointProblem::Version { found: version, expected: VERSION }));
        }
        let checksum = u64::from_le_bytes(*take(&mut rest).ok_or_else(|| corrupt("it ends too early"))?);
        if fnv1a(rest) != checksum {
            return Err(corrupt("its checksum does not match"));
        }

        let mut sections = Vec::with_capacity(SECTIONS);
        while let Some(length) = take(&mut rest) {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let (section, after) = rest.split_at_checked(length).ok_or_else(|| corrupt("it ends too early"))?;
            sections.push(section);
            rest = after;
        }
        if !rest.is_empty() {
            return Err(corrupt("it ends too early"));
        }
        let Ok([header, records @ ..]) = <[&[u8]; SECTIONS]>::try_from(sections) else {
            return Err(corrupt("it has not four parts"));
        };
        let header = str::from_utf8(header).map_err(|error| corrupt(&error.to_string()))?;
        let header = toml::from_str(header).map_err(|error: toml::de::Error| corrupt(error.message()))?;
        let unpack = |bytes: &[u8]| ModuleRecord::from_bytes(Bytes::from_bytes_vec(bytes.to_vec()));
        let [model, first, second] = records.map(|bytes| unpack(bytes).map_err(|error| self::problem(path, &error)));
        Ok(Self { header, path: path.to_path_buf(), records: [model?, first?, second?] })
    }

    /// Restores the model.
    pub fn model(self, model: Gpt) -> Result<Gpt, Error> {
        let [record, ..] = self.records;
        model.try_load_record(record).map_err(|error| problem(&self.path, &error))
    }

    /// Restores the model and the optimizer.
    pub fn restore(self, model: Gpt) -> Result<(Gpt, AdamW), Error> {
        let problem = |error| problem(&self.path, &error);
        let [record, first, second] = self.records;
        let model = model.try_load_record(record).map_err(problem)?;
        let mut optimizer = AdamW::new(&model, &self.header.config);
        optimizer.load(&model, [first, second]).map_err(problem)?;
        optimizer.updates = self.header.updates;
        optimizer.loss_scale = self.header.loss_scale;
        Ok((model, optimizer))
    }

    pub fn check_text(&self, hash: u64) -> Result<(), Error> {
        if self.header.text_hash == format!("{hash:016x}") {
            return Ok(());
        }
        Err(Error::Checkpoint { path: self.path.clone(), problem: CheckpointProblem::OtherText })
    }
}

fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(taken)
}

fn problem(path: &Path, error: &RecordError) -> Error {
    Error::Checkpoint { path: path.to_path_buf(), problem: CheckpointProblem::Corrupt(error.to_string()) }
}

#[cfg(all(test, feature = "flex", unix))]
mod tests;
