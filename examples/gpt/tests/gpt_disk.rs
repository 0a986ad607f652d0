//! Full disks: the error is one sentence, no checkpoint is lost, and the run can be resumed.
#![cfg(all(feature = "flex", target_os = "linux"))]

mod common;

use common::{Place, fails, start_and_wait, succeeds};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const STEPS: [&str; 4] = ["--steps", "200", "--eval-interval", "25"];

/// Redirects the next file for `path` to a full disk.
fn fill_up(path: &Path) {
    symlink("/dev/full", path.with_extension("partial")).unwrap();
}

/// A run that was killed past its first checkpoint, and the losses it would have had.
fn killed(place: &Place) -> Vec<[String; 4]> {
    succeeds(place.small("whole", &STEPS));
    let mut killed = start_and_wait(place.small("run", &STEPS), &place.file("run", "loss.csv"));
    killed.kill().unwrap();
    assert!(!killed.wait().unwrap().success(), "the run ended before it was killed");
    let _ = fs::remove_file(place.file("run", "latest.partial"));
    let _ = fs::remove_file(place.file("run", "best.partial"));
    place.losses("whole")
}

#[test]
fn a_full_disk_loses_no_checkpoint() {
    let place = Place::new();
    let whole = killed(&place);
    let checkpoints = || ["latest.ckpt", "best.ckpt"].map(|file| fs::read(place.file("run", file)).unwrap());
    for file in ["loss.csv", "latest.ckpt", "best.ckpt"] {
        let path = place.file("run", file);
        let before = checkpoints();
        fill_up(&path);
        fails(place.resume("run"), &format!("runs/run/{file}: No space left on device"));
        assert!(!path.with_extension("partial").is_symlink(), "{file}: the partial file must be removed");
        // The other checkpoint may have been saved in the meantime.
        let [latest, best] = checkpoints();
        assert!(latest == before[0] || file == "best.ckpt", "latest.ckpt must not change if {file} cannot be written");
        assert!(best == before[1] || file == "latest.ckpt", "best.ckpt must not change if {file} cannot be written");
    }
    succeeds(place.resume("run"));
    assert_eq!(place.losses("run"), whole);
}

/// Only a part of the checkpoint fits: the system limits the size of files.
#[test]
fn a_disk_that_fills_up_while_saving_loses_no_checkpoint() {
    let place = Place::new();
    let whole = killed(&place);
    let latest = place.file("run", "latest.ckpt");
    let before = fs::read(&latest).unwrap();
    let blocks = before.len() / 512 / 2;
    assert!(fs::metadata(place.file("run", "loss.csv")).unwrap().len() < 512 * blocks as u64);

    let gpt = env!("CARGO_BIN_EXE_gpt");
    let mut limited = Command::new("sh");
    limited.current_dir(&place.directory).args(["-c", r#"trap '' XFSZ; ulimit -f "$0"; exec "$@""#]);
    limited.args([&blocks.to_string(), gpt, "--resume", "--name", "run"]);
    fails(limited, ".ckpt: File too large");
    for partial in ["latest.partial", "best.partial"] {
        assert!(!place.file("run", partial).exists(), "{partial} must be removed");
    }
    assert!(fs::read(&latest).unwrap() == before);
    succeeds(place.resume("run"));
    assert_eq!(place.losses("run"), whole);
}

#[test]
fn a_run_that_cannot_be_written_at_all_says_so() {
    let place = Place::new();
    for file in ["config.toml", "loss.csv", "latest.ckpt"] {
        let name = file.split('.').next().unwrap();
        fs::create_dir_all(place.file(name, "")).unwrap();
        fill_up(&place.file(name, file));
        fails(place.small(name, &STEPS), &format!("runs/{name}/{file}: No space left on device"));
    }
    // A file has the name of the directory of runs.
    let other = Place::new();
    fs::write(other.directory.path().join("runs"), "no directory").unwrap();
    fails(other.small("run", &STEPS), "runs/run: ");
}
