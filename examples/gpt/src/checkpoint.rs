//! Checkpoints: everything that a run needs to continue, in one file that is written atomically.
//!
//! ```text
//! magic "BURN-GPT" | version u32 | checksum u64 of all that follows
//! length u64 | header, TOML
//! burnpack: the tensors of the model, `0.…`, and of its first and second moments, `1.…` and `2.…`
//! ```
//! Numbers are little-endian. A burnpack by itself has no checksum.

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
const VERSION: u32 = 3;

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
    /// Tensors of the model and its moments.
    record: ModuleRecord,
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
        let header = toml::to_string(header).expect("a header is a table of plain values");
        let length = (header.len() as u64).to_le_bytes();
        let [first, second] = optimizer.moments(model);
        let record = [model.valid(), first, second].into_record();
        let tensors = record.into_bytes().map_err(|error| problem(path, &error))?;
        let body = [&length, header.as_bytes(), &tensors].concat();
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
        let too_short = || corrupt("it ends too early");

        let mut rest = bytes.strip_prefix(MAGIC).ok_or_else(|| problem(CheckpointProblem::Foreign))?;
        let version = u32::from_le_bytes(*take(&mut rest).ok_or_else(too_short)?);
        if version != VERSION {
            return Err(problem(CheckpointProblem::Version { found: version, expected: VERSION }));
        }
        let checksum = u64::from_le_bytes(*take(&mut rest).ok_or_else(too_short)?);
        if fnv1a(rest) != checksum {
            return Err(corrupt("its checksum does not match"));
        }
        let length = u64::from_le_bytes(*take(&mut rest).ok_or_else(too_short)?);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (header, tensors) = rest.split_at_checked(length).ok_or_else(too_short)?;
        let header = toml::from_slice(header).map_err(|error| corrupt(error.message()))?;
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(tensors.to_vec()));
        Ok(Self { header, path: path.to_path_buf(), record: record.map_err(|error| self::problem(path, &error))? })
    }

    /// Restores the model.
    pub fn model(self, model: Gpt) -> Result<Gpt, Error> {
        let restored = [model].try_load_record(self.record.allow_unused(true));
        let [model] = restored.map_err(|error| problem(&self.path, &error))?;
        Ok(model)
    }

    /// Restores the model and the optimizer.
    pub fn restore(self, model: Gpt) -> Result<(Gpt, AdamW), Error> {
        let moments = model.valid();
        let restored = [model, moments.clone(), moments].try_load_record(self.record);
        let [model, moments @ ..] = restored.map_err(|error| problem(&self.path, &error))?;
        Ok((model, AdamW::with_moments(&moments, self.header.updates, self.header.loss_scale)))
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
