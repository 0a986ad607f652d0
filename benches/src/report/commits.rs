//! Commits of the rows of ours in a chart or table. Rows from several commits are refused.

use super::model::{OURS, distinct};
use crate::error::Error;
use crate::results::{Memory, TileTiming, Timing};
use std::path::Path;

/// Rows that a chart or table may show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allow {
    /// Rows of ours from one commit, or from a tree that differed from it: for reports of one's own measurements.
    OneCommit,
    /// Rows of ours from one clean commit: for documents.
    Clean,
    /// Only rows of ours that are not from one clean commit. A mark as stale therefore has to be removed once they are measured again.
    Stale,
    /// Any rows.
    Any,
}

/// Commits of rows of ours, each with its passes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commits(Vec<(String, Vec<String>, usize)>);

impl Commits {
    /// Commits of the rows of ours among these.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a Timing>) -> Self {
        let ours = rows.into_iter().filter(|row| OURS.contains(&row.r#impl.as_str()));
        Self::grouped(ours.map(|row| (row.commit.as_str(), row.pass.as_str())))
    }

    /// Commits of the rows of ours among memory measurements.
    pub fn of_memory<'a>(rows: impl IntoIterator<Item = &'a Memory>) -> Self {
        let ours = rows.into_iter().filter(|row| OURS.contains(&row.r#impl.as_str()));
        Self::grouped(ours.map(|row| (row.commit.as_str(), row.pass.as_str())))
    }

    /// Commits of sweeps, which measure our kernels only.
    pub fn of_tiles<'a>(rows: impl IntoIterator<Item = &'a TileTiming>) -> Self {
        Self::grouped(rows.into_iter().map(|row| (row.commit.as_str(), row.kernel.as_str())))
    }

    /// Groups rows by commit, with the names that tell them apart.
    fn grouped<'a>(rows: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let rows: Vec<(&str, &str)> = rows.collect();
        let of = |commit: &str| {
            let same = || rows.iter().filter(|(of, _)| *of == commit);
            (commit.to_string(), distinct(same().map(|(_, name)| name.to_string())), same().count())
        };
        Commits(distinct(rows.iter().map(|(commit, _)| *commit)).into_iter().map(of).collect())
    }

    /// Text as in `ours: 68bb77a1e3+ (forward), f044676fbd (backward)`. With many commits it lists the commits only; without any it is
    /// empty.
    pub fn text(&self) -> String {
        let of = |(commit, passes, _): &(String, Vec<String>, usize)| match self.0.len() {
            2 | 3 => format!("{commit} ({})", passes.join(", ")),
            _ => commit.clone(),
        };
        let all: Vec<String> = self.0.iter().map(of).collect();
        if all.is_empty() { String::new() } else { format!("ours: {}", all.join(", ")) }
    }

    fn rows(&self) -> String {
        let of = |(commit, passes, rows): &(String, Vec<String>, usize)| {
            format!("{commit} has {rows} rows ({})", passes.join(", "))
        };
        self.0.iter().map(of).collect::<Vec<_>>().join("; ")
    }

    /// Refuses the chart or table `what` of a file if it shows rows that are not allowed.
    pub fn check(&self, file: &Path, what: &str, allow: Allow) -> Result<(), Error> {
        let (file, what) = (file.to_path_buf(), what.to_string());
        let unclean = self.0.iter().find(|(commit, ..)| commit.ends_with('+') || commit == "unknown");
        match (allow, unclean) {
            (Allow::OneCommit | Allow::Clean, _) if self.0.len() > 1 => {
                Err(Error::MixedCommits { file, what, commits: self.rows() })
            }
            (Allow::Clean, Some((commit, ..))) => {
                Err(Error::UncleanRows { file, what, commit: commit.clone(), rows: self.rows() })
            }
            (Allow::Stale, None) if self.0.len() < 2 => Err(Error::NotStale { file, what }),
            _ => Ok(()),
        }
    }
}
