//! Charts in documents, which a test keeps current.

use super::{Allow, draw, save};
use crate::error::Error;
use crate::published::PICTURES;
use crate::results::{self, Timing};
use std::fs;
use std::path::{Path, PathBuf};

/// Draws the charts of documents from the results into the documents' directory. With `check`, only reports whether they are current.
/// Returns the charts that were not.
///
/// # Errors
///
/// If a chart would show rows of ours that are not from one clean commit, unless it is marked as stale; if a chart marked as stale shows
/// none of those; and, with `check`, if a chart is not current.
pub fn pictures(directory: &Path, documents: &Path, check: bool) -> Result<Vec<PathBuf>, Error> {
    let mut changed = Vec::new();
    for picture in &PICTURES {
        let (_, charts) = draw(directory, &[picture.results.into()], Allow::Any)?;
        let file = results::path::<Timing>(directory, picture.results);
        let same = charts.into_iter().filter(|chart| chart.name.ends_with(picture.picture));
        // Not the chart of peers that were timed without an implementation of this repository.
        let chart = same.max_by_key(|chart| !chart.commits.text().is_empty()).ok_or_else(|| {
            let why = format!("has no chart {}, which {} shows", picture.picture, picture.document);
            Error::Other(format!("{} {why}", file.display()))
        })?;
        let allow = if picture.stale { Allow::Stale } else { Allow::Clean };
        chart.commits.check(&file, picture.document, allow)?;
        let place = documents.join(picture.document);
        if fs::read_to_string(&place).is_ok_and(|old| old == chart.text) {
            continue;
        }
        if check {
            return Err(Error::NotCurrent { file: place });
        }
        save(&place, &chart.text)?;
        changed.push(place);
    }
    Ok(changed)
}
