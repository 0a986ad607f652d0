//! Runs `gpt compare` as its users do, with a model small enough for a CPU.
#![cfg(feature = "flex")]

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A temporary directory with a text, for results.
struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let lines = (0..500).map(|line| format!("{line} and {} make {}.\n", line % 7, line + line % 7));
        fs::write(directory.path().join("text.txt"), lines.collect::<String>()).unwrap();
        Self { directory }
    }

    /// Runs a comparison on the CPU.
    fn compare(&self, arguments: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt"));
        command.current_dir(&self.directory).args(["compare", "--device", "flex", "--data", "text.txt"]);
        command.args(arguments.split_whitespace()).output().unwrap()
    }

    /// The output of a comparison of a small model.
    fn small(&self, arguments: &str) -> String {
        let size = "--layers 1 --heads 2 --width 32 --contexts 16,32 --tokens-per-step 64 --steps 4 --warmup 1";
        let output = self.compare(&format!("{size} {arguments}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn file(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// The rows of a CSV file, as maps from column names to values.
    fn rows(&self, path: &str) -> Vec<HashMap<String, String>> {
        csv::Reader::from_path(self.file(path)).unwrap().deserialize().map(Result::unwrap).collect()
    }
}

/// The cells of a printed table's rows.
fn cells(stdout: &str) -> Vec<Vec<&str>> {
    let lines = stdout.lines().filter(|line| line.starts_with("| ")).skip(2);
    lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

#[test]
fn all_kinds_are_measured_and_agree() {
    let place = Place::new();
    let stdout = place.small("--out results");

    let heading = stdout.lines().next().unwrap();
    for said in ["CPU with", "f32", "1 layers, 2 heads, width 32, vocabulary 256", "Burn 0.", "4 steps after 1"] {
        assert!(heading.contains(said), "the heading lacks {said:?}: {heading}");
    }
    assert!(stdout.contains("resident in the process"), "{stdout}");
    let shown: Vec<_> = cells(&stdout).into_iter().map(|row| [row[0], row[1], row[2]].map(str::to_string)).collect();
    let expected = [("16", "4"), ("32", "2")].into_iter().flat_map(|(context, batch)| {
        ["flash", "burn", "composed"].map(|kind| [context, batch, kind].map(str::to_string))
    });
    assert_eq!(shown, expected.collect::<Vec<_>>(), "{stdout}");

    let rows = place.rows("results/compare.csv");
    assert_eq!(rows.len(), 6);
    for row in &rows {
        let number = |column: &str| {
            row[column].parse::<f64>().unwrap_or_else(|_| panic!("{column} of {row:?} must be a number"))
        };
        assert!((1.0..7.0).contains(&number("loss")), "{row:?}");
        assert_eq!(row["reference"], "composed");
        assert!(number("loss_difference") <= 1e-3, "{row:?}");
        assert!(number("step_ms") > 0.0 && number("first_step_ms") > 0.0, "{row:?}");
        let expected = 64.0 / (number("step_ms") / 1e3);
        assert!((number("tokens_per_second") / expected - 1.0).abs() < 1e-2, "{row:?}");
        if cfg!(target_os = "linux") {
            assert!(number("peak_bytes") > 1e6, "{row:?}");
        }
        assert_eq!((row["seed"].as_str(), row["note"].as_str()), ("1337", ""));
    }
    assert!(rows.iter().filter(|row| row["attention"] == "composed").all(|row| row["loss_difference"] == "0.0"));
    assert!(rows[0]["plan"].starts_with("flash: "), "{}", rows[0]["plan"]);

    let svg = fs::read_to_string(place.file("results/compare.svg")).unwrap();
    for said in ["<svg", "tokens/s", "peak memory", "context, tokens", "flash", "burn", "composed"] {
        assert!(svg.contains(said), "{said}");
    }
}

#[test]
fn a_seed_means_the_same_losses() {
    let place = Place::new();
    let losses = |arguments: &str| -> Vec<String> {
        place.small(&format!("--attention flash {arguments}"));
        place.rows("runs/compare/compare.csv").into_iter().map(|row| row["loss"].clone()).collect()
    };
    let first = losses("--seed 1");
    assert_eq!(first.len(), 2);
    assert_eq!(losses("--seed 1"), first);
    assert_ne!(losses("--seed 2"), first);
}

#[test]
fn a_failed_measurement_says_why_and_stops_no_other() {
    let place = Place::new();
    let stdout = place.small("--limit 0");
    let shown = cells(&stdout);
    assert_eq!(shown.len(), 6, "{stdout}");
    assert!(shown.iter().all(|row| row[3..] == ["-", "-", "-", "-", "-", "over 0 s"]), "{stdout}");
    let rows = place.rows("runs/compare/compare.csv");
    assert!(rows.iter().all(|row| row["note"] == "over 0 s" && row["loss"].is_empty() && row["reference"].is_empty()));
    assert!(fs::read_to_string(place.file("runs/compare/compare.svg")).unwrap().starts_with("<svg"));
}

#[test]
fn bad_input_is_one_sentence() {
    let place = Place::new();
    fs::write(place.file("a-file"), "").unwrap();
    let fails = |arguments: &str, expected: &str| {
        let Output { status, stderr, .. } = place.compare(arguments);
        let stderr = String::from_utf8(stderr).unwrap();
        let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!((status.code(), lines.len()), (Some(2), 1), "{stderr}");
        assert!(lines[0].contains(expected), "the error {:?} lacks {expected:?}", lines[0]);
        assert!(!place.file("runs").exists(), "a refused call must write nothing");
    };
    fails("--contexts 16,0", "invalid value '0' for '--contexts <TOKENS>': 0 is not in 1..");
    fails("--contexts 16,many", "invalid value 'many'");
    fails("--contexts 100000", "a context of 100000 needs at least 1000010");
    fails("--steps 0", "invalid value '0' for '--steps <STEPS>'");
    fails("--tokens-per-step 0", "invalid value '0' for '--tokens-per-step <TOKENS_PER_STEP>'");
    fails("--batch 0", "invalid value '0' for '--batch <BATCH>'");
    fails("--batch 1 --tokens-per-step 64", "cannot be used with");
    fails("--heads 3", "--heads is 3; it must divide --width");
    fails("--contexts 16 --width 514 --heads 2", "head_dim");
    fails("--attention flash,slow", "invalid value 'slow'");
    fails("--contexts 16 --out a-file/results", "a-file/results");
}
