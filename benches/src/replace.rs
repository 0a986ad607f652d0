//! Replaces older results by published ones.

use crate::error::Error;
use crate::publish::PROGRAMS;
use crate::published::TRAINING;
use crate::report::found;
use crate::results::{self, Accuracy, COPY, Call, MATMUL, Memory, Record, Timing};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Source and destination of the results.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Directory of new results, as written by `publish`.
    #[arg(long)]
    from: PathBuf,
    /// Directory of the results.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    directory: PathBuf,
    /// Also takes rows from a tree that differed from its commit.
    #[arg(long)]
    unclean: bool,
}

/// Replaces the result files of every name in the directory by its rows from one commit, the latest. Prints the destinations of the
/// results of programs.
pub fn run(options: &Options) -> Result<(), Error> {
    let names = found(&options.from)?;
    let mut commits = BTreeSet::new();
    for name in &names {
        let timings = results::read_if_there::<Timing>(&options.from, name)?;
        let memory = results::read_if_there::<Memory>(&options.from, name)?;
        commits.extend(timings.into_iter().map(|row| (row.run, row.commit)));
        commits.extend(memory.into_iter().map(|row| (row.run, row.commit)));
    }
    // Run names begin with their start time.
    let Some((_, commit)) = commits.pop_last() else {
        return Err(Error::NoResults { directory: options.from.clone(), name: "*".into() });
    };
    if commit.ends_with('+') && !options.unclean {
        return Err(Error::Unclean { commit });
    }
    for name in &names {
        let timings = results::read_if_there::<Timing>(&options.from, name)?;
        let kept = last_of_each(timings, |row: &Timing| row.commit == commit);
        if !kept.is_empty() {
            let runs: BTreeSet<&str> = kept.iter().map(|row| row.run.as_str()).collect();
            let calls = results::read_if_there::<Call>(&options.from, name)?;
            let errors = results::read_if_there::<Accuracy>(&options.from, name)?;
            write(options, name, &last_of_each(calls, |row| runs.contains(row.run.as_str())))?;
            write(options, name, &last_of_each(errors, |row| runs.contains(row.run.as_str())))?;
            write(options, name, &kept)?;
        }
        let memory = results::read_if_there::<Memory>(&options.from, name)?;
        let memory = last_of_each(memory, |row: &Memory| row.commit == commit);
        if !memory.is_empty() {
            write(options, name, &memory)?;
        }
        println!("{name}: {} rows of {commit}, {} of memory", kept.len(), memory.len());
    }
    for (_, file, place) in TRAINING.iter().flat_map(|(_, program)| program.writes) {
        let file = options.from.join(PROGRAMS).join(file);
        if file.exists() {
            println!("{} belongs in {place}", file.display());
        }
    }
    Ok(())
}

/// Key of a row: everything that is not a measurement.
trait About {
    fn about(&self) -> String;
}

macro_rules! about {
    ($($row:ty),*) => {$(
        impl About for $row {
            fn about(&self) -> String {
                // Each run measures its own rooflines, which its rates are compared with.
                let run = if [MATMUL, COPY].contains(&self.r#impl.as_str()) { &self.run } else { "" };
                format!("{} {} {run}", crate::session::key_of!(self), self.kernel)
            }
        }
    )*};
}
about!(Timing, Call, Accuracy, Memory);

/// The last of the wanted rows for each key.
fn last_of_each<R: About>(rows: Vec<R>, wanted: impl Fn(&R) -> bool) -> Vec<R> {
    let mut places = BTreeMap::new();
    let mut kept: Vec<Option<R>> = Vec::new();
    for row in rows.into_iter().filter(wanted) {
        if let Some(before) = places.insert(row.about(), kept.len()) {
            let before: usize = before;
            kept[before] = None;
        }
        kept.push(Some(row));
    }
    kept.into_iter().flatten().collect()
}

/// Replaces a file by these rows, completely or not at all.
fn write<R: Record>(options: &Options, name: &str, rows: &[R]) -> Result<(), Error> {
    let file = results::path::<R>(&options.directory, name);
    if rows.is_empty() {
        return match fs::remove_file(&file) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::io(&file, source)),
            _ => Ok(()),
        };
    }
    let fresh = fresh_beside(&file);
    let _ = fs::remove_file(&fresh);
    results::append(&fresh, rows)?;
    fs::rename(&fresh, &file).map_err(|source| Error::io(&file, source))
}

fn fresh_beside(file: &Path) -> PathBuf {
    file.with_extension("fresh")
}
