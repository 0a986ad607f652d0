//! The charts that documents show, kept current by a test.

use super::{Allow, draw, save};
use crate::error::Error;
use crate::published::PICTURES;
use crate::results::{self, Timing};
use std::fs;
use std::path::{Path, PathBuf};

/// Draws the charts of documents anew from the results, into the folder of documents; with `check`, says instead whether they are
/// current. Gives those that were not.
///
/// # Errors
///
/// If a chart would show rows of ours that are not of one clean commit, unless it is marked as stale, and then if it shows none;
/// with `check`, if a chart is not current.
pub fn pictures(directory: &Path, documents: &Path, check: bool) -> Result<Vec<PathBuf>, Error> {
    let mut changed = Vec::new();
    for picture in &PICTURES {
        let (_, charts) = draw(directory, &[picture.results.into()], Allow::Any)?;
        let file = results::path::<Timing>(directory, picture.results);
        let same = charts.into_iter().filter(|chart| chart.name.ends_with(picture.picture));
        // Not that of peers that nothing of this repository ran beside.
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
