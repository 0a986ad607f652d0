//! Errors of a benchmark's command line or files, each described in one sentence.

use flash_attention_kernels::AttentionError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Reason why the benchmark stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A filter has a value that does not occur in the set.
    #[error("--{axis} is {value}, which no problem of the set {set} has; choose one of {known}")]
    Filter {
        /// The axis.
        axis: &'static str,
        /// The requested value.
        value: String,
        /// The set.
        set: &'static str,
        /// The values that occur.
        known: String,
    },
    /// A device that does not exist, or that this binary was built without.
    #[error("--device {name} cannot be used: {why}")]
    Device {
        /// The device's name on the command line.
        name: &'static str,
        /// Message of the runtime.
        why: String,
    },
    /// A file that the benchmark did not write.
    #[error("{} is not a file of results: its first line must be {expected}", file.display())]
    NotResults {
        /// The file.
        file: PathBuf,
        /// The columns that it should have.
        expected: String,
    },
    /// Results that do not exist.
    #[error("there are no results {}; check their name and --directory", directory.join(format!("{name}.csv")).display())]
    NoResults {
        /// The directory that was searched.
        directory: PathBuf,
        /// Their name.
        name: String,
    },
    /// A chart or table that would mix rows of ours from several commits.
    #[error(
        "{}: {what} would join rows of ours of several commits ({commits}); measure them again with one commit",
        file.display()
    )]
    MixedCommits {
        /// The file of results.
        file: PathBuf,
        /// The chart or table.
        what: String,
        /// The commits, and the rows from each.
        commits: String,
    },
    /// A published chart or table with rows of ours from a tree that differed from its commit.
    #[error(
        "{}: {what} would show rows of ours of {commit}, a tree that differed from its commit ({rows}); measure them again",
        file.display()
    )]
    UncleanRows {
        /// The file of results.
        file: PathBuf,
        /// The chart or table.
        what: String,
        /// The commit.
        commit: String,
        /// The rows.
        rows: String,
    },
    /// A chart or table that is marked as stale and is not.
    #[error(
        "{}: {what} is marked as stale, but its rows of ours are of one clean commit; remove the mark",
        file.display()
    )]
    NotStale {
        /// The file of results.
        file: PathBuf,
        /// The chart or table.
        what: String,
    },
    /// An attempt to publish with a binary from no clean commit, or results from such a binary.
    #[error(
        "published results must be of one clean commit, but this is {commit}; build from a clean commit, or pass --unclean"
    )]
    Unclean {
        /// The commit.
        commit: String,
    },
    /// A document whose tables cannot be found.
    #[error("{}: {why}", file.display())]
    Markers {
        /// The document.
        file: PathBuf,
        /// The problem with its markers.
        why: String,
    },
    /// A document whose tables differ from the results.
    #[error(
        "{} is not current: it differs from the results; write it with attention-bench tables or pictures",
        file.display()
    )]
    NotCurrent {
        /// The document.
        file: PathBuf,
    },
    /// A result file with an invalid line.
    #[error("{}: {source}", file.display())]
    Csv {
        /// The file.
        file: PathBuf,
        /// The error.
        source: csv::Error,
    },
    /// A file that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A problem that attention does not support, or that the device refuses.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Any other error, as a full sentence.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// An I/O error.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Error::Io { path: path.to_path_buf(), source }
    }

    /// An error in a CSV file.
    pub fn csv(file: &Path, source: csv::Error) -> Self {
        Error::Csv { file: file.to_path_buf(), source }
    }
}
