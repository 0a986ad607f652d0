//! The directory of a run.

use crate::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

/// `runs/NAME`.
pub struct Run {
    pub directory: PathBuf,
}

impl Run {
    /// Creates a new run, which must not exist yet.
    pub fn create(name: Option<&str>) -> Result<Self, Error> {
        let run = match name {
            Some(name) => Self { directory: named(name)? },
            None => (1..)
                .map(|number| Self { directory: runs().join(format!("gpt-{number}")) })
                .find(|run| !run.directory.exists())
                .expect("numbers do not end"),
        };
        // A run without a checkpoint may be overwritten.
        if run.latest().exists() {
            return Err(Error::RunExists { run: run.directory });
        }
        fs::create_dir_all(&run.directory).map_err(Error::io(&run.directory))?;
        Ok(run)
    }

    /// Finds a run with a checkpoint: the one of this name, or the one that was active last.
    pub fn find(name: Option<&str>) -> Result<Self, Error> {
        let run = match name {
            Some(name) => Some(Self { directory: named(name)? }).filter(|run| run.latest().exists()),
            None => {
                let entries = fs::read_dir(runs()).into_iter().flatten().filter_map(Result::ok);
                let runs = entries.map(|entry| Self { directory: entry.path() });
                let last_written = |run: &Self| fs::metadata(run.latest()).and_then(|data| data.modified()).ok();
                runs.filter_map(|run| Some((last_written(&run)?, run)))
                    .max_by_key(|(time, _)| *time)
                    .map(|(_, run)| run)
            }
        };
        run.ok_or_else(|| Error::NoRun { runs: name.map_or(runs(), |name| runs().join(name)) })
    }

    pub fn config(&self) -> PathBuf {
        self.directory.join("config.toml")
    }

    /// Copy of the sources at the start of the run.
    pub fn text(&self) -> PathBuf {
        self.directory.join("text.txt")
    }

    pub fn losses(&self) -> PathBuf {
        self.directory.join("loss.csv")
    }

    pub fn picture(&self) -> PathBuf {
        self.directory.join("loss.svg")
    }

    pub fn latest(&self) -> PathBuf {
        self.directory.join("latest.ckpt")
    }

    pub fn best(&self) -> PathBuf {
        self.directory.join("best.ckpt")
    }
}

fn runs() -> PathBuf {
    PathBuf::from("runs")
}

fn named(name: &str) -> Result<PathBuf, Error> {
    let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
    if !is_plain {
        let rule = "it must be a name without separators, for a directory under runs";
        return Err(Error::Config { flag: "name", value: format!("{name:?}"), rule });
    }
    Ok(runs().join(name))
}
