//! The program as its users run it, without a terminal and with a model small enough for a CPU.
#![cfg(feature = "flex")]

use gpt::device::{Strength, choose};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A directory with a text, where the run goes.
fn place() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let lines = (0..2000).map(|line| format!("{line} and {} make {}.\n", line % 7, line + line % 7));
    fs::write(directory.path().join("text.txt"), lines.collect::<String>()).unwrap();
    directory
}

fn learner(place: &TempDir, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt-learner"));
    // The default device need not be there.
    command.current_dir(place).env("BURN_DEVICE", "flex").args(arguments.split_whitespace()).output().unwrap()
}

/// A new run of two epochs.
fn small(place: &TempDir, arguments: &str) -> Output {
    let size = "--layers 1 --heads 2 --width 32 --context 16 --batch 8";
    learner(place, &format!("--device flex --data text.txt {size} --epochs 2 {arguments}"))
}

fn succeeds(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn fails(output: &Output, sentence: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(sentence), "{error}");
    assert!(!error.contains("panicked"), "{error}");
}

fn run(place: &TempDir) -> PathBuf {
    place.path().join("runs/learner")
}

/// A metric of each step of an epoch; its file has `value,count` in a line.
fn metric(run: &Path, split: &str, epoch: usize, name: &str) -> Vec<f64> {
    let path = run.join(format!("{split}/epoch-{epoch}/{name}.log"));
    let log = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    log.lines().map(|line| line.split(',').next().unwrap().parse().unwrap()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn learns_and_goes_on_from_a_checkpoint() {
    let place = place();
    let run = run(&place);
    let said = succeeds(&small(&place, ""));
    assert!(said.contains("attention  flash: "), "{said}");
    assert!(said.contains("Learner Summary"), "{said}");

    let first = metric(&run, "train", 1, "Loss");
    let last = metric(&run, "train", 2, "Loss");
    assert!(mean(&last[last.len() - 10..]) < first[0] - 1.0, "from {} to {last:?}", first[0]);
    let validation = [1, 2].map(|epoch| mean(&metric(&run, "valid", epoch, "Loss")));
    assert!(validation[1] < validation[0], "{validation:?}");
    let rates = metric(&run, "train", 1, "Learning_Rate");
    assert!(rates[0] < rates[29] && rates[29] > rates[49], "{rates:?}");
    for name in ["model", "optim", "scheduler"] {
        let checkpoint = run.join(format!("checkpoint/{name}-2.bpk"));
        assert!(checkpoint.exists(), "{}", checkpoint.display());
    }

    // Sizes are the run's; the third epoch begins where the second ended, not anew.
    fails(&learner(&place, "--resume 2"), "--resume is 2, the last of 2 epochs");
    fails(&learner(&place, "--resume 2 --epochs 3 --width 64"), "--width is 64, but runs/learner was started with 32");
    succeeds(&learner(&place, "--resume 2 --epochs 3"));
    let resumed = metric(&run, "train", 3, "Loss");
    assert!(resumed[0] < mean(&last[..10]), "{} after {last:?}", resumed[0]);
    assert!(mean(&metric(&run, "valid", 3, "Loss")) < validation[0]);
    let rates = metric(&run, "train", 3, "Learning_Rate");
    assert!(rates[0] < 5e-4, "{rates:?}");
}

/// What a kill or a full disk leaves, of each of the files of a checkpoint; an earlier one is still good.
#[test]
fn a_damaged_checkpoint_is_one_sentence() {
    let place = place();
    succeeds(&small(&place, ""));
    for name in ["model", "optim", "scheduler"] {
        let path = run(&place).join(format!("checkpoint/{name}-2.bpk"));
        let whole = fs::read(&path).unwrap();
        // The schedule's few numbers are in the head, and padding follows.
        let tensors = if name == "scheduler" { vec![] } else { vec![whole.len() / 2, whole.len() - 1] };
        for length in [0, 4, 11].into_iter().chain(tensors) {
            fs::write(&path, &whole[..length]).unwrap();
            let sentence = format!("the checkpoint runs/learner/checkpoint/{name}-2.bpk is damaged: ");
            fails(&learner(&place, "--resume 2 --epochs 3"), &sentence);
        }
        fs::remove_file(&path).unwrap();
        fails(&learner(&place, "--resume 2 --epochs 3"), &format!("checkpoint/{name}-2.bpk"));
        fs::write(&path, &whole).unwrap();
    }
    succeeds(&learner(&place, "--resume 1 --epochs 2"));
    succeeds(&learner(&place, "--resume 2 --epochs 3"));
}

/// Room for the schedule alone: the system refuses what is above a limit on the size of files.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_one_sentence() {
    let place = place();
    let limit = r#"trap '' XFSZ; ulimit -f 100; exec "$0" "$@""#;
    let mut command = Command::new("sh");
    command.current_dir(&place).env("BURN_DEVICE", "flex").args(["-c", limit, env!("CARGO_BIN_EXE_gpt-learner")]);
    let arguments = "--device flex --data text.txt --layers 1 --heads 2 --width 32 --context 16 --batch 8 --epochs 2";
    let output = command.args(arguments.split(' ')).output().unwrap();
    // The model or the optimizer, whichever comes first.
    fails(&output, "-1.bpk");
    fails(&output, "File too large");
    for name in ["model", "optim"] {
        let path = run(&place).join(format!("checkpoint/{name}-1.bpk"));
        assert!(!path.exists(), "{} is there, in part", path.display());
    }
}

/// Software Vulkan has no buffer of 320 MB, which the logits of such a batch take.
#[test]
fn a_device_that_fails_is_one_sentence() {
    let found = choose("wgpu");
    if !found.as_ref().is_ok_and(|found| found.strength == Strength::Software) {
        assert!(found.is_ok() || std::env::var("REQUIRE_WGPU").as_deref() != Ok("1"), "an adapter was required");
        return eprintln!("skipped: there is no software adapter");
    }
    let place = place();
    let size = "--layers 1 --heads 1 --width 64 --context 64 --batch 5000 --epochs 1";
    let output = learner(&place, &format!("--device wgpu --data text.txt {size}"));
    fails(&output, "can't allocate buffer");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error.lines().filter(|line| !line.contains("XDG_")).count(), 1, "{error}");
}

#[test]
fn bad_input_is_one_sentence() {
    let place = place();
    let directory = run(&place);
    fails(&learner(&place, "--device abacus"), "--device abacus is not known to this build");
    fails(&learner(&place, "--device flex --data absent.txt"), "cannot read the text absent.txt");
    fails(&learner(&place, "--device flex --heads 3"), "--heads is 3; it must divide --width");
    fails(&learner(&place, "--epochs 0"), "invalid value '0'");
    fails(&learner(&place, "--resume 7"), "--resume is 7, but there is no runs/learner/checkpoint/model-7.bpk");
    fails(&learner(&place, "--device flex --layers 1 --heads 2 --width 514"), "head_dim");
    assert!(!directory.exists());

    let checkpoint = directory.join("checkpoint");
    fs::create_dir_all(&checkpoint).unwrap();
    for file in ["model-1.bpk", "../config.toml"] {
        fs::write(checkpoint.join(file), "something else").unwrap();
    }
    fails(&small(&place, ""), "runs/learner holds a run already");
    fails(&learner(&place, "--resume 1"), "runs/learner/config.toml is damaged");
}
