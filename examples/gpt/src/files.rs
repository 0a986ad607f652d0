//! Files that are whole or not there.

use crate::error::Error;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// How many bytes are written at a time.
const CHUNK: usize = 1 << 16;

/// How far a file has come, for tests that end the process there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The file beside is there, and empty.
    Created,
    /// This many chunks are in it.
    Written(usize),
    /// Everything is in it.
    Complete,
    /// It is on the disk.
    Synced,
    /// It has the file's name.
    Renamed,
}

/// Writes a file beside `path`, with the extension `partial`, and then gives it the name: a kill, a full disk or a loss of
/// power leaves the old file or the new one.
///
/// # Errors
///
/// [`Error::Io`] when the file cannot be written; the old one is as it was.
///
/// ```
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("config.toml");
/// gpt::files::write_atomically(&path, &[b"width = ", b"64\n"])?;
/// assert_eq!(std::fs::read_to_string(&path)?, "width = 64\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write_atomically(path: &Path, parts: &[&[u8]]) -> Result<(), Error> {
    write_in_stages(path, parts, |_| {})
}

/// The same, and says how far it has come.
pub(crate) fn write_in_stages(path: &Path, parts: &[&[u8]], mut reached: impl FnMut(Stage)) -> Result<(), Error> {
    let temporary = path.with_extension("partial");
    let mut write = || {
        let mut file = File::create(&temporary)?;
        reached(Stage::Created);
        for (index, chunk) in parts.iter().flat_map(|part| part.chunks(CHUNK)).enumerate() {
            file.write_all(chunk)?;
            reached(Stage::Written(index + 1));
        }
        reached(Stage::Complete);
        file.sync_all()?;
        reached(Stage::Synced);
        fs::rename(&temporary, path)?;
        reached(Stage::Renamed);
        sync_directory(path)
    };
    write().map_err(|error| {
        // What came of it takes room on a disk that may be full.
        let _ = fs::remove_file(&temporary);
        Error::io(path)(error)
    })
}

/// A new name is on the disk when the directory is.
#[cfg(unix)]
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}

#[cfg(not(unix))]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}
