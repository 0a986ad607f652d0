//! Runs the program as its users do, without a terminal and with a model small enough for a CPU.
#![cfg(feature = "flex")]

use example_support::device::{Kind, choose};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A temporary directory with a text, for the run.
fn place() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let lines = (0..2000).map(|line| format!("{line} and {} make {}.\n", line % 7, line + line % 7));
    fs::write(directory.path().join("text.txt"), lines.collect::<String>()).unwrap();
    directory
}

fn nanogpt(place: &TempDir, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nanogpt"));
    // Burn's default device may not exist on this machine.
    command.current_dir(place).env("BURN_DEVICE", "flex").args(arguments.split_whitespace()).output().unwrap()
}

/// A new run of two epochs.
fn small(place: &TempDir, arguments: &str) -> Output {
    let size = "--n-layer 1 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8";
    nanogpt(place, &format!("--device flex --data text.txt {size} --learning-rate 0.01 --epochs 2 {arguments}"))
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
    place.path().join("runs/nanogpt")
}

/// A metric for each step of an epoch. Lines of its file are `value,count`.
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
    assert!(said.contains("attention  host loops"), "{said}");
    assert!(said.contains("Learner Summary"), "{said}");
    // The sample is printed last and consists of characters of the text.
    let sample = &said.as_bytes()[said.len() - 250..];
    let known = sample.iter().filter(|byte| b"0123456789 andmke.\n".contains(byte)).count();
    assert!(known > 225, "only {known} of 250 sampled characters are in the text: {said}");

    let first = metric(&run, "train", 1, "Loss");
    let last = metric(&run, "train", 2, "Loss");
    assert!(mean(&last[last.len() - 10..]) < first[0] - 1.0, "the loss went from {} to {last:?}", first[0]);
    let validation = [1, 2].map(|epoch| mean(&metric(&run, "valid", epoch, "Loss")));
    assert!(validation[1] < validation[0], "{validation:?}");
    let rates = metric(&run, "train", 1, "Learning_Rate");
    assert!(rates[0] < rates[29] && rates[29] > rates[49], "{rates:?}");
    for name in ["model", "optim", "scheduler"] {
        let checkpoint = run.join(format!("checkpoint/{name}-2.bpk"));
        assert!(checkpoint.exists(), "{}", checkpoint.display());
    }

    // Sizes are the run's. The third epoch starts where the second one ended.
    fails(&nanogpt(&place, "--resume 2"), "--resume is 2, the last of 2 epochs");
    let conflict = "'--resume <EPOCH>' cannot be used with '--n-embd <N_EMBD>'";
    fails(&nanogpt(&place, "--resume 2 --epochs 3 --n-embd 64"), conflict);
    fs::remove_dir_all(run.join("train/epoch-2")).unwrap();
    succeeds(&nanogpt(&place, "--resume 2 --epochs 3"));
    assert!(!run.join("train/epoch-2").exists(), "the second epoch must not be trained again");
    let resumed = metric(&run, "train", 3, "Loss");
    assert!(resumed[0] < mean(&last[..10]), "the loss is {} after {last:?}", resumed[0]);
    assert!(mean(&metric(&run, "valid", 3, "Loss")) < validation[0]);
    // The rate is two thirds of the way down the cosine of 150 steps, from 1e-2 to 1e-3. A new schedule would start at 3e-4.
    let rate = metric(&run, "train", 3, "Learning_Rate")[0];
    assert!((rate - 3.25e-3).abs() < 2e-4, "{rate}");
}

/// Truncated files of a checkpoint, as a kill or a full disk leaves them. An earlier checkpoint is still valid.
#[test]
fn a_damaged_checkpoint_is_one_sentence() {
    let place = place();
    succeeds(&small(&place, ""));
    for name in ["model", "optim", "scheduler"] {
        let path = run(&place).join(format!("checkpoint/{name}-2.bpk"));
        let whole = fs::read(&path).unwrap();
        // The numbers of the schedule are in the header of the file, which ends with padding.
        let tensors = if name == "scheduler" { vec![] } else { vec![whole.len() / 2, whole.len() - 1] };
        for length in [0, 4, 11].into_iter().chain(tensors) {
            fs::write(&path, &whole[..length]).unwrap();
            let sentence = format!("the checkpoint runs/nanogpt/checkpoint/{name}-2.bpk is damaged: ");
            fails(&nanogpt(&place, "--resume 2 --epochs 3"), &sentence);
        }
        fs::remove_file(&path).unwrap();
        fails(&nanogpt(&place, "--resume 2 --epochs 3"), &format!("checkpoint/{name}-2.bpk"));
        fs::write(&path, &whole).unwrap();
    }
    succeeds(&nanogpt(&place, "--resume 1 --epochs 2"));
    succeeds(&nanogpt(&place, "--resume 2 --epochs 3"));
}

/// Only the schedule fits: the system limits the size of files.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_one_sentence() {
    let place = place();
    let limit = r#"trap '' XFSZ; ulimit -f 100; exec "$0" "$@""#;
    let mut command = Command::new("sh");
    command.current_dir(&place).env("BURN_DEVICE", "flex").args(["-c", limit, env!("CARGO_BIN_EXE_nanogpt")]);
    let arguments =
        "--device flex --data text.txt --n-layer 1 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8 --epochs 2";
    let output = command.args(arguments.split(' ')).output().unwrap();
    // The first file that fails is the model's or the optimizer's.
    fails(&output, "-1.bpk");
    fails(&output, "File too large");
    for name in ["model", "optim"] {
        let path = run(&place).join(format!("checkpoint/{name}-1.bpk"));
        assert!(!path.exists(), "the partial file {} must be removed", path.display());
    }
}

/// The logits of this batch take 320 MB, more than a buffer of software Vulkan.
#[test]
fn a_device_that_fails_is_one_sentence() {
    let found = choose("wgpu");
    if !found.as_ref().is_ok_and(|found| found.kind == Kind::Software) {
        assert!(
            found.is_ok() || std::env::var("REQUIRE_WGPU").as_deref() != Ok("1"),
            "REQUIRE_WGPU=1, but there is no adapter"
        );
        return eprintln!("skipped: there is no software adapter");
    }
    let place = place();
    let size = "--n-layer 1 --n-head 1 --n-embd 64 --block-size 64 --batch-size 5000 --epochs 1";
    let output = nanogpt(&place, &format!("--device wgpu --data text.txt {size}"));
    fails(&output, "can't allocate buffer");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error.lines().filter(|line| !line.contains("XDG_")).count(), 1, "{error}");
}

#[test]
fn bad_input_is_one_sentence() {
    let place = place();
    let directory = run(&place);
    fails(&nanogpt(&place, "--device abacus"), "--device abacus does not exist; it must be auto or one of ");
    fails(&nanogpt(&place, "--device flex --data absent.txt"), "cannot read absent.txt");
    fails(&nanogpt(&place, "--device flex --n-head 3"), "--n-head is 3; it must divide --n-embd");
    fails(&nanogpt(&place, "--device flex --dropout 1"), "--dropout is 1; it must be at least 0 and below 1");
    fails(&nanogpt(&place, "--device flex --learning-rate 0"), "--learning-rate is 0; it must be above 0");
    fails(&nanogpt(&place, "--device flex --block-size 100000"), "--block-size 100000 needs 1000010");
    fails(&nanogpt(&place, "--epochs 0"), "invalid value '0'");
    fails(&nanogpt(&place, "--resume 7"), "--resume is 7, but there is no runs/nanogpt/checkpoint/model-7.bpk");
    fails(&nanogpt(&place, "--device flex --n-layer 1 --n-head 2 --n-embd 514"), "head_dim");
    assert!(!directory.exists());

    let checkpoint = directory.join("checkpoint");
    fs::create_dir_all(&checkpoint).unwrap();
    for file in ["model-1.bpk", "../config.json"] {
        fs::write(checkpoint.join(file), "something else").unwrap();
    }
    fails(&small(&place, ""), "runs/nanogpt already has a run");
    fails(&nanogpt(&place, "--resume 1"), "runs/nanogpt/config.json is damaged");
}
