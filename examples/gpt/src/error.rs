//! Errors, each described in one sentence.

use burn_flash_attention::AttentionError;
use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Reason why a run could not start or continue. The program prints it and ends with exit code 2.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error("compare-worker has no valid job: {problem}; only compare starts it")]
    Job { problem: String },
    #[error("--{flag} is {value}; {rule}")]
    Config { flag: &'static str, value: String, rule: &'static str },
    #[error("--{flag} is {given}, but {run} was started with {saved}; leave the flag out, or start another run")]
    Contradiction { flag: String, given: String, saved: String, run: PathBuf },

    #[error("{path} {problem}")]
    Weights { path: PathBuf, problem: String },
    #[error("--{flag} is {given}, but the weights' is {weights}; leave the flag out")]
    NotTheWeights { flag: &'static str, given: usize, weights: usize },
    #[error("the weights have {weights} tokens, but the tokenizer has {tokens}; choose another --tokenizer")]
    Vocabulary { tokens: usize, weights: usize },

    #[error("--device {request} is not in this build; choose one of {known}")]
    UnknownDevice { request: String, known: String },
    #[error("--device {request} does not exist; this machine has {found}")]
    NoDevice { request: String, found: String },
    #[error("--devices has {number} twice; name each device once")]
    RepeatedDevice { number: usize },
    #[error("--dtype {dtype} is not supported by {device}; choose another --dtype or --device")]
    Dtype { dtype: &'static str, device: String },
    #[error(
        "Burn's {operation} in {dtype} is wrong on {device}: {from} gave {found:?}, expected {expected:?}; choose another --dtype or --device"
    )]
    WrongResult {
        operation: &'static str,
        dtype: &'static str,
        device: String,
        from: String,
        found: f32,
        expected: f32,
    },
    #[error("the device failed: {0}")]
    Device(String),
    #[error("attention cannot run: {0}")]
    Attention(#[from] AttentionError),

    #[error("cannot read the text {path}: {source}")]
    TextMissing { path: PathBuf, source: io::Error },
    #[error("the text {path} is not UTF-8: the byte at {offset} is not part of a character")]
    TextNotUtf8 { path: PathBuf, offset: usize },
    #[error(
        "the text has {tokens} tokens, but a context of {context} needs at least {needed}; use a longer text or a shorter context"
    )]
    TextTooShort { tokens: usize, context: usize, needed: usize },
    #[error(
        "the text has {documents} documents of two tokens or more, but --pack needs at least two; separate them with blank lines or <|endoftext|>"
    )]
    NoDocuments { documents: usize },
    #[error("there is no workspace whose sources could be the text; name a file with --data")]
    NoWorkspace,

    #[error("{run} already has a run; continue it with --resume, or choose another --name")]
    RunExists { run: PathBuf },
    #[error("there is no run to resume in {runs}; start one without --resume")]
    NoRun { runs: PathBuf },
    #[error("the checkpoint {path} {problem}")]
    Checkpoint { path: PathBuf, problem: CheckpointProblem },
    #[error("the loss at step {step} is {loss}; try a smaller --lr or another --dtype")]
    Diverged { step: usize, loss: f32 },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// Reason why a checkpoint cannot be used.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CheckpointProblem {
    #[error("was not written by this program")]
    Foreign,
    #[error("has format version {found}; this program reads version {expected}")]
    Version { found: u32, expected: u32 },
    #[error("is damaged: {0}")]
    Corrupt(String),
    #[error("was trained on another text; give the same one with --data, or start another run with --name")]
    OtherText,
}

impl Error {
    /// A failure of the device, [in one line](in_one_line).
    pub fn device(error: &dyn Display) -> Error {
        Error::Device(in_one_line(error))
    }

    /// For `map_err`: adds the file to an I/O error.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }
}

/// An error of Burn or CubeCL in one line, without backtraces and without the operations that were skipped after it.
///
/// ```
/// let said = "the kernel failed\nCaused by:\n  out of memory\nNo backtrace available\n";
/// assert_eq!(gpt::error::in_one_line(&said), "the kernel failed: out of memory");
/// ```
pub fn in_one_line(error: &dyn Display) -> String {
    let noise = ["An error happened", "Caused by:", "skipped ", "Backtrace:", "No backtrace", "Asked at:"];
    let text = error.to_string();
    let lines = text.lines().map(|line| line.trim().trim_end_matches(':'));
    let said = lines
        .filter(|line| !line.is_empty() && !noise.iter().any(|noise| line.starts_with(noise.trim_end_matches(':'))));
    said.collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn what_a_device_said_is_one_line() {
        let said = "An error happened during execution\nCaused by:\n  The bytes were never written\n  skipped `Reduce`\n\
                    Caused by:\n  can't allocate buffer of size: 327680000\nNo backtrace available\nAsked at:\n";
        assert_eq!(
            Error::device(&said).to_string(),
            "the device failed: The bytes were never written: can't allocate buffer of size: 327680000"
        );
    }
}
