//! What can be wrong with a benchmark's command line or files, each kind one clear sentence.

use flash_attention_kernels::AttentionError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why the benchmark stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A filter names a value that its axis does not have in the set.
    #[error("--{axis} {value} leaves nothing of the set {set}, whose values are: {known}")]
    Filter {
        /// The axis.
        axis: &'static str,
        /// What was asked for.
        value: String,
        /// The set.
        set: &'static str,
        /// What there is.
        known: String,
    },
    /// A device that is not there, or that this binary was built without.
    #[error("--device {name}: {why}")]
    Device {
        /// The device's name on the command line.
        name: &'static str,
        /// What the runtime said.
        why: String,
    },
    /// A file that the benchmark did not write.
    #[error("{} is not a file of results: its first line should be {expected}", file.display())]
    NotResults {
        /// The file.
        file: PathBuf,
        /// The columns that it should have.
        expected: String,
    },
    /// Results that are not there.
    #[error("there are no results {}", directory.join(format!("{name}.csv")).display())]
    NoResults {
        /// Where they should be.
        directory: PathBuf,
        /// Their name.
        name: String,
    },
    /// A chart or a table that would show rows of ours of several commits as one.
    #[error("{}: {what} would join rows of ours of several commits: {commits}", file.display())]
    MixedCommits {
        /// The file of results.
        file: PathBuf,
        /// The chart or table.
        what: String,
        /// The commits, and which rows are of each.
        commits: String,
    },
    /// A published chart or table with rows of ours of a tree that differed from its commit.
    #[error("{}: {what} would show rows of ours of {commit}, a tree that differed from its commit: {rows}", file.display())]
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
    /// Something that is marked as stale and is not.
    #[error("{}: {what} is marked as stale, but its rows of ours are of one clean commit: take the mark away", file.display())]
    NotStale {
        /// The file of results.
        file: PathBuf,
        /// The chart or table.
        what: String,
    },
    /// A binary of no clean commit that was to publish, or results of such a one.
    #[error("what is published is of one clean commit, and this is {commit} (--unclean measures all the same)")]
    Unclean {
        /// The commit.
        commit: String,
    },
    /// A document whose tables cannot be found.
    #[error("{}: {why}", file.display())]
    Markers {
        /// The document.
        file: PathBuf,
        /// What is wrong with its markers.
        why: String,
    },
    /// A document whose tables differ from the results.
    #[error("{} is not current: its tables differ from the results, write them anew", file.display())]
    NotCurrent {
        /// The document.
        file: PathBuf,
    },
    /// A file of results with a line that cannot be understood.
    #[error("{}: {source}", file.display())]
    Csv {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        source: csv::Error,
    },
    /// A file that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A problem that attention is not defined for, or that the device refuses.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Anything else, said in full.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// An error of the file system.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Error::Io { path: path.to_path_buf(), source }
    }

    /// An error of a CSV file.
    pub fn csv(file: &Path, source: csv::Error) -> Self {
        Error::Csv { file: file.to_path_buf(), source }
    }
}
