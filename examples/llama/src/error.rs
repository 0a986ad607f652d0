//! Everything that can go wrong, each in one sentence that names the file or the flag.

use burn_flash_attention::AttentionError;
use std::path::{Path, PathBuf};

/// An error of this program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{} is not a readable {kind}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What it should be.
        kind: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A setting of `config.json` has a value that cannot be computed.
    #[error("{} has {name} = {value}, which is not supported: {why}", path.display())]
    Unsupported {
        /// `config.json`
        path: PathBuf,
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is supported.
        why: String,
    },
    /// A checkpoint lacks a tensor that its `config.json` asks for.
    #[error("{} lacks the tensor {name}", path.display())]
    MissingTensor {
        /// The file, or the folder of several.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
    },
    /// A checkpoint has a tensor that the model has no place for.
    #[error("{} holds the tensor {name}, which the model of its config.json does not have", path.display())]
    UnusedTensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
    },
    /// A tensor has another shape than `config.json` says.
    #[error("{} holds the tensor {name} of shape {shape:?}; it must be {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The shape that the model has.
        expected: Vec<usize>,
    },
    /// A tensor has an element type other than f32, f16 and bf16.
    #[error("{} holds the tensor {name} of {dtype}; f32, f16 and bf16 are supported", path.display())]
    ElementType {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its element type.
        dtype: String,
    },
    /// A flag has a value that cannot be used.
    #[error("--{flag} is {value}; {why}")]
    Flag {
        /// Name of the flag.
        flag: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        why: String,
    },
    /// There is no such device.
    #[error("{0}")]
    Device(String),
    /// Attention cannot be computed.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// The device failed.
    #[error("the device failed: {0}")]
    Execution(String),
    /// Training failed.
    #[error("training failed: {0}")]
    Training(String),
}

impl Error {
    /// A function from the system's error to an error that names the file.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        |source| Error::Io { path, source }
    }

    /// The error of a device that failed.
    pub(crate) fn execution(error: impl ToString) -> Self {
        Error::Execution(error.to_string())
    }

    /// A function from any error to one that says that a file is not what it should be.
    pub(crate) fn damaged<E: ToString>(path: &Path, kind: &'static str) -> impl FnOnce(E) -> Self + use<E> {
        let path = path.to_path_buf();
        move |error| Error::Damaged { path, kind, problem: error.to_string() }
    }
}
