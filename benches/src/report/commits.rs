//! Of which commits the rows of ours in a chart or table are: of one, or it is refused.

use super::model::{OURS, distinct};
use crate::error::Error;
use crate::results::{Memory, TileTiming, Timing};
use std::path::Path;

/// What a chart or table may show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allow {
    /// Rows of ours of one commit, or of a tree that differed from it: a report of one's own measurements.
    OneCommit,
    /// Rows of ours of one clean commit: what documents show.
    Clean,
    /// Rows of ours that are not, until they are measured again; and no others, so that the mark goes when they are.
    Stale,
    /// Any rows.
    Any,
}

/// The commits of rows of ours, each with the passes that are of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commits(Vec<(String, Vec<String>, usize)>);

impl Commits {
    /// Of these rows, those of ours.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a Timing>) -> Self {
        let ours = rows.into_iter().filter(|row| OURS.contains(&row.r#impl.as_str()));
        Self::grouped(ours.map(|row| (row.commit.as_str(), row.pass.as_str())))
    }

    /// Of measurements of memory, those of ours.
    pub fn of_memory<'a>(rows: impl IntoIterator<Item = &'a Memory>) -> Self {
        let ours = rows.into_iter().filter(|row| OURS.contains(&row.r#impl.as_str()));
        Self::grouped(ours.map(|row| (row.commit.as_str(), row.pass.as_str())))
    }

    /// Of sweeps, which are of our kernels.
    pub fn of_tiles<'a>(rows: impl IntoIterator<Item = &'a TileTiming>) -> Self {
        Self::grouped(rows.into_iter().map(|row| (row.commit.as_str(), row.kernel.as_str())))
    }

    /// Rows as commits, each with what they are called where there are several.
    fn grouped<'a>(rows: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let rows: Vec<(&str, &str)> = rows.collect();
        let of = |commit: &str| {
            let same = || rows.iter().filter(|(of, _)| *of == commit);
            (commit.to_string(), distinct(same().map(|(_, name)| name.to_string())), same().count())
        };
        Commits(distinct(rows.iter().map(|(commit, _)| *commit)).into_iter().map(of).collect())
    }

    /// As in `ours: 68bb77a1e3+ (forward), f044676fbd (backward)`, or of many the commits alone; nothing where there are none.
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

    /// Refuses what is not allowed of the chart or table `what` of a file.
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
