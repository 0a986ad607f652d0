//! The report: a page of charts and tables from result files, and the tables and charts of documents.

mod bars;
mod chart;
mod commits;
mod figures;
mod lines;
mod model;
mod numbers;
mod page;
mod pictures;
mod studies;
mod tables;
mod tiles;

use crate::error::Error;
use model::{Results, Roofs};
use page::Alone;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub use commits::{Allow, Commits};
pub use pictures::pictures;
pub use tables::write_tables;

/// Writes the page of these results (of all results in the directory, if none is named), and the charts in files of their own. Returns the
/// files written.
///
/// # Errors
///
/// If results cannot be read, or a chart would show rows of ours that are not allowed.
pub fn write(
    directory: &Path,
    names: &[String],
    out: &Path,
    pictures: Option<&Path>,
    allow: Allow,
) -> Result<Vec<PathBuf>, Error> {
    let names = if names.is_empty() { found(directory)? } else { names.to_vec() };
    let (html, charts) = draw(directory, &names, allow)?;
    let mut files = vec![out.to_path_buf()];
    save(out, &html)?;
    if let Some(folder) = pictures {
        for Alone { name, text, .. } in charts {
            let file = folder.join(name);
            save(&file, &text)?;
            files.push(file);
        }
    }
    Ok(files)
}

/// The page of these results, and the charts for files of their own.
fn draw(directory: &Path, names: &[String], allow: Allow) -> Result<(String, Vec<Alone>), Error> {
    let mut all = names.iter().map(|name| Results::read(directory, name)).collect::<Result<Vec<_>, _>>()?;
    all.sort_by_key(|results| results.timings.is_empty());
    let mut roofs = Roofs::default();
    all.iter().for_each(|results| roofs.add(&results.timings));
    page::page(directory, &all, &roofs, allow)
}

/// Names of all results in a directory.
pub(crate) fn found(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = fs::read_dir(directory).map_err(|source| Error::io(directory, source))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let file = entry.map_err(|source| Error::io(directory, source))?.file_name();
        if let Some(stem) = file.to_str().and_then(|file| file.strip_suffix(".csv")) {
            let parts = ["-calls", "-errors", "-memory", "-tiles", "-bytes"];
            names.insert(parts.iter().find_map(|part| stem.strip_suffix(part)).unwrap_or(stem).to_string());
        }
    }
    if names.is_empty() {
        return Err(Error::NoResults { directory: directory.into(), name: "*".into() });
    }
    Ok(names.into_iter().collect())
}

fn save(file: &Path, text: &str) -> Result<(), Error> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    }
    fs::write(file, text).map_err(|source| Error::io(file, source))
}
