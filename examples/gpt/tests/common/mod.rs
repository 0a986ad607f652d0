//! Runs the program in a directory of its own, as its users do.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A temporary directory with a text, in which runs are saved.
pub struct Place {
    pub directory: TempDir,
}

/// A text of 2,000 lines that end with `.` and `end`.
pub fn lines(end: &str) -> String {
    (0..2000).map(|line| format!("{line} and {} make {}.{end}", line % 7, line + line % 7)).collect()
}

impl Place {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("text.txt"), lines("\n")).unwrap();
        Self { directory }
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt"));
        command.current_dir(&self.directory).args(arguments);
        command
    }

    /// A small run on the CPU.
    pub fn small(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = self.command(&["--device", "flex", "--data", "text.txt", "--name", name]);
        let size =
            "--layers 2 --heads 2 --width 32 --context 16 --batch 4 --lr 1e-2 --eval-batches 4 --sample-tokens 20";
        command.args(size.split(' ')).args(arguments);
        command
    }

    pub fn resume(&self, name: &str) -> Command {
        self.command(&["--resume", "--name", name])
    }

    pub fn file(&self, name: &str, file: &str) -> PathBuf {
        self.directory.path().join("runs").join(name).join(file)
    }

    /// Step, training loss, validation loss and learning rate, as text: equal texts are equal bits.
    pub fn losses(&self, name: &str) -> Vec<[String; 4]> {
        let mut reader = csv::Reader::from_path(self.file(name, "loss.csv")).unwrap();
        reader.records().map(|row| std::array::from_fn(|column| row.as_ref().unwrap()[column].to_string())).collect()
    }

    pub fn train_losses(&self, name: &str) -> Vec<f32> {
        self.losses(name).iter().filter_map(|row| row[1].parse().ok()).collect()
    }
}

pub fn succeeds(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts exit code 2 and one error line that contains `expected`.
pub fn fails(mut command: Command, expected: &str) {
    let Output { status, stderr, .. } = command.output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    // Drivers may print lines of their own. The program's error is one line.
    let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ") && !line.contains("XDG_")).collect();
    assert_eq!(status.code(), Some(2), "{stderr}");
    assert_eq!(lines.len(), 1, "{stderr}");
    assert!(lines[0].contains(expected), "the error {:?} lacks {expected:?}", lines[0]);
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// Starts a run and returns when its losses have 50 lines. By then it has saved a checkpoint.
pub fn start_and_wait(mut command: Command, losses: &Path) -> Child {
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while fs::read_to_string(losses).map_or(0, |text| text.lines().count()) < 50 {
        assert!(begun.elapsed() < Duration::from_secs(300), "the losses have fewer than 50 lines after 300 s");
        sleep(Duration::from_millis(2));
    }
    child
}
