//! Atomic writing of files. burn-pack's `AtomicFile` leaves a file of another name behind whenever the process is killed.

use crate::error::Error;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Number of bytes written at a time.
const CHUNK: usize = 1 << 16;

/// Progress of writing a file, for tests that end the process at a certain stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The temporary file exists and is empty.
    Created,
    /// This number of chunks has been written.
    Written(usize),
    /// Everything has been written.
    Complete,
    /// The file has been synced to the disk.
    Synced,
    /// The file has been renamed.
    Renamed,
}

/// Writes a temporary file next to `path`, with the extension `partial`, and then renames it. If the process is killed, the disk is full or
/// the power fails, either the old or the new file exists in full.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written; the old one is unchanged.
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

/// [`write_atomically`] that reports its progress.
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
        // Remove the incomplete file, which takes space on a disk that may be full.
        let _ = fs::remove_file(&temporary);
        Error::io(path)(error)
    })
}

/// A rename is durable once the directory is synced.
#[cfg(unix)]
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory)?.sync_all()
}

#[cfg(not(unix))]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}
