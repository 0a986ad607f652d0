//! Runs the program as its users do, with models small enough for a CPU.
#![cfg(all(feature = "flex", unix))]

mod common;

use common::{Place, fails, lines, start_and_wait, succeeds};
use gpt::device::{Strength, choose};
use std::fs;
use std::process::Command;

#[test]
fn learns_from_its_own_sources() {
    let place = Place::new();
    let size = "--layers 2 --heads 2 --width 64 --context 32 --batch 8 --steps 80 --lr 1e-2";
    let rest = "--device flex --name own --eval-interval 20 --eval-batches 4 --sample-tokens 50";
    let arguments: Vec<_> = size.split(' ').chain(rest.split(' ')).collect();
    let stdout = succeeds(place.command(&arguments));

    assert!(stdout.starts_with("device "), "{stdout}");
    for shown in ["attention  flash: host loops", "parameters ", "tokens/s", "best validation loss", "it writes:"] {
        assert!(stdout.contains(shown), "the output lacks {shown:?}: {stdout}");
    }
    let losses = place.train_losses("own");
    assert_eq!(losses.len(), 80);
    assert!(losses[0] > 5.0, "the first loss is {}", losses[0]);
    let end = losses[70..].iter().sum::<f32>() / 10.0;
    assert!(end < losses[0] - 1.5, "the loss went from {} to {end}", losses[0]);
    for file in ["config.toml", "loss.csv", "loss.svg", "latest.ckpt", "best.ckpt", "text.txt"] {
        assert!(place.file("own", file).exists(), "{file}");
    }
    assert!(fs::read_to_string(place.file("own", "loss.svg")).unwrap().starts_with("<svg"));
}

#[test]
fn resumes_bitwise_after_a_kill_and_after_an_interrupt() {
    let place = Place::new();
    let arguments = ["--steps", "300", "--eval-interval", "25", "--dropout", "0.1", "--grad-accum", "2"];
    succeeds(place.small("whole", &arguments));
    let whole = place.losses("whole");
    assert_eq!(whole.len(), 301);

    let mut killed = start_and_wait(place.small("killed", &arguments), &place.file("killed", "loss.csv"));
    killed.kill().unwrap();
    assert!(!killed.wait().unwrap().success(), "the run ended before it was killed");
    let stdout = succeeds(place.resume("killed"));
    assert!(stdout.contains("resume     at step"), "{stdout}");
    assert_eq!(place.losses("killed"), whole);

    let mut stopped = start_and_wait(place.small("stopped", &arguments), &place.file("stopped", "loss.csv"));
    let signal = Command::new("kill").args(["-INT", &stopped.id().to_string()]).status().unwrap();
    assert!(signal.success());
    assert_eq!(stopped.wait().unwrap().code(), Some(130));
    assert!(place.losses("stopped").len() < 300);
    // Without a name, the latest run is resumed.
    succeeds(place.command(&["--resume"]));
    assert_eq!(place.losses("stopped"), whole);
}

#[test]
fn attention_is_the_same_in_three_ways() {
    let place = Place::new();
    let arguments = |kind| ["--steps", "100", "--eval-interval", "100", "--attention", kind];
    for kind in ["flash", "burn", "composed"] {
        succeeds(place.small(kind, &arguments(kind)));
    }
    let composed = place.train_losses("composed");
    assert!(composed[99] < composed[0] - 1.0);
    for kind in ["flash", "burn"] {
        for (step, (loss, expected)) in place.train_losses(kind).into_iter().zip(&composed).enumerate() {
            assert!((loss - expected).abs() <= 1e-3, "{kind} at step {step}: the loss is {loss}, expected {expected}");
        }
    }
}

/// Two runs whose losses differ by rounding.
fn alike(place: &Place, one: &str, other: &str, tolerance: f32) {
    let losses = place.train_losses(one);
    assert!(losses[losses.len() - 1] < losses[0] - 1.0, "{one} does not learn");
    assert_eq!(losses.len(), place.train_losses(other).len());
    for (step, (loss, expected)) in place.train_losses(other).into_iter().zip(losses).enumerate() {
        assert!(
            (loss - expected).abs() <= tolerance,
            "{other} at step {step}: the loss is {loss}, expected {expected}"
        );
    }
}

/// Slopes, sinks, a window, packing and dropout each change the loss, and a resumed run keeps them.
#[test]
fn learns_with_slopes_sinks_windows_and_dropout() {
    let place = Place::new();
    let all: &[(&str, &[&str])] = &[
        ("alibi", &["--alibi"]),
        ("sinks", &["--sinks"]),
        ("window", &["--window", "6"]),
        ("dropout", &["--dropout", "0.1"]),
        ("pack", &["--pack"]),
        ("all", &["--alibi", "--sinks", "--window", "9", "--dropout", "0.05", "--pack", "--checkpointing"]),
    ];
    fs::write(place.directory.path().join("text.txt"), lines("\n\n")).unwrap();
    let rest = ["--steps", "60", "--eval-interval", "30"];
    let mut ends = Vec::new();
    for (name, flags) in all {
        let stdout = succeeds(place.small(name, &[flags, &rest[..]].concat()));
        assert!(stdout.contains("it writes:"), "{name}: {stdout}");
        let losses = place.train_losses(name);
        let end = losses[50..].iter().sum::<f32>() / 10.0;
        assert!(end < losses[0] - 1.5, "{name}: the loss went from {} to {end}", losses[0]);
        assert!(!ends.contains(&end), "{name} does not change the loss");
        ends.push(end);
    }
    fails(place.small("no", &["--pack", "--attention", "burn"]), "--pack is true; it needs --attention flash");
    // A text without blank lines is one document.
    fs::write(place.directory.path().join("text.txt"), lines("\n")).unwrap();
    fails(place.small("no", &["--pack"]), "the text has 1 documents of two tokens or more");
    fs::write(place.directory.path().join("text.txt"), lines("\n\n")).unwrap();
    // A resumed run keeps its options.
    let stdout = succeeds(place.resume("all"));
    assert!(stdout.contains("it writes:"), "{stdout}");
    fails(place.command(&["--resume", "--name", "all", "--window", "8"]), "--window");
    fails(place.small("no", &["--alibi", "--attention", "composed"]), "--alibi is true; it needs --attention flash");
    fails(place.small("no", &["--window", "4", "--attention", "burn"]), "--window is 4; it needs --attention flash");
}

/// Needs two GPUs of one backend. Without them it prints a message and passes.
#[test]
fn several_devices_learn_what_one_learns() {
    let Some(backend) = ["cuda", "rocm", "vulkan"].into_iter().find(|name| choose(&format!("{name}:1")).is_ok()) else {
        return eprintln!("skipped: there are fewer than two GPUs");
    };
    let place = Place::new();
    let run = |name: &str, more: &[&str]| {
        let size =
            "--layers 2 --heads 2 --width 64 --context 32 --batch 4 --lr 3e-3 --eval-batches 4 --sample-tokens 0";
        let steps = "--steps 100 --eval-interval 50 --grad-accum 2 --data text.txt";
        let mut command = place.command(&["--device", backend, "--name", name]);
        command.args(size.split(' ')).args(steps.split(' ')).args(more);
        succeeds(command)
    };
    run("one", &["--devices", "0"]);
    let stdout = run("two", &["--devices", "0,1"]);
    assert_eq!(stdout.matches("device     ").count(), 2, "{stdout}");
    run("blocks", &["--devices", "1,0", "--checkpointing"]);
    alike(&place, "one", "two", 2e-2);
    alike(&place, "one", "blocks", 2e-2);
}

#[test]
fn checkpointing_changes_no_loss() {
    let place = Place::new();
    let steps = ["--steps", "100", "--eval-interval", "100"];
    succeeds(place.small("whole", &steps));
    succeeds(place.small("blocks", &[&steps[..], &["--checkpointing"]].concat()));
    alike(&place, "whole", "blocks", 1e-3);
}

#[test]
fn learns_in_half_precision() {
    let place = Place::new();
    for dtype in ["bf16", "f16"] {
        succeeds(place.small(dtype, &["--steps", "100", "--eval-interval", "100", "--dtype", dtype]));
        let losses = place.train_losses(dtype);
        assert!(losses[99] < losses[0] - 1.0, "{dtype}: the loss went from {} to {}", losses[0], losses[99]);
    }
}

/// The logits of this batch take 320 MB, more than a buffer of software Vulkan.
#[test]
fn a_device_that_fails_is_one_sentence() {
    let found = choose("wgpu");
    if !found.as_ref().is_ok_and(|found| found.strength == Strength::Software) {
        assert!(
            found.is_ok() || std::env::var("REQUIRE_WGPU").as_deref() != Ok("1"),
            "REQUIRE_WGPU=1, but there is no adapter"
        );
        return eprintln!("skipped: there is no software adapter");
    }
    let place = Place::new();
    let size = "--layers 1 --heads 1 --width 64 --context 64 --batch 5000 --steps 2 --eval-batches 1";
    let mut command = place.command(&["--device", "wgpu", "--data", "text.txt", "--name", "run"]);
    command.args(size.split(' '));
    fails(command, "error: the device failed: ");
    assert!(!place.file("run", "latest.ckpt").exists());
}

#[test]
fn bad_input_is_one_sentence() {
    let place = Place::new();
    let at = |name: &str, bytes: &[u8]| fs::write(place.directory.path().join(name), bytes).unwrap();
    at("short.txt", b"too short");
    at("latin.txt", &[b"na".as_slice(), &[0xef], b"ve".repeat(1000).as_slice()].concat());

    let small = |arguments: &[&str]| place.small("bad", arguments);
    fails(small(&["--data", "absent.txt"]), "the argument '--data <FILE>' cannot be used multiple times");
    fails(small(&["--heads", "3"]), "'--heads <HEADS>' cannot be used multiple times");
    fails(small(&["--steps", "many"]), "invalid value 'many'");
    fails(small(&["--stepz", "3"]), "--stepz");
    fails(small(&["--dropout", "1"]), "invalid value '1' for '--dropout <DROPOUT>': it must be from 0 to below 1");
    fails(small(&["--min-lr", "1"]), "--min-lr is 1.0; it must not be above --lr");
    fails(small(&["--grad-accum", "0"]), "invalid value '0' for '--grad-accum <GRAD_ACCUM>': 0 is not in 1..");

    let flex = |arguments: &[&str]| {
        let mut command = place.command(&["--device", "flex", "--name", "bad"]);
        command.args(arguments);
        command
    };
    fails(flex(&["--data", "absent.txt"]), "cannot read the text absent.txt");
    fails(flex(&["--data", "short.txt"]), "the text has 9 tokens");
    fails(flex(&["--data", "latin.txt"]), "is not UTF-8: the byte at 2");
    fails(flex(&["--heads", "3"]), "--heads is 3; it must divide --width");
    fails(flex(&["--heads", "0"]), "invalid value '0' for '--heads <HEADS>'");
    fails(flex(&["--devices", "0,1"]), "--device flex:1 does not exist");
    fails(flex(&["--devices", "0,0"]), "--devices has 0 twice");
    fails(flex(&["--layers", "1", "--width", "514", "--heads", "2"]), "head_dim");
    fails(place.command(&["--name", "../up", "--device", "flex"]), "--name");
    fails(place.command(&["--device", "abacus"]), "--device abacus is not in this build; choose one of auto");
    fails(place.command(&["--device", "flex:7"]), "--device flex:7 does not exist");
    fails(place.resume("nothing"), "there is no run to resume in runs/nothing");
}

#[test]
fn a_wrong_checkpoint_is_one_sentence() {
    let place = Place::new();
    succeeds(place.small("run", &["--steps", "2", "--eval-interval", "1"]));
    let latest = place.file("run", "latest.ckpt");
    let whole = fs::read(&latest).unwrap();
    let resume = |bytes: &[u8]| {
        fs::write(&latest, bytes).unwrap();
        place.resume("run")
    };
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };

    fails(place.small("run", &["--steps", "2"]), "runs/run already has a run");
    fails(resume(b"something else"), "was not written by this program");
    fails(resume(&whole[..10]), "is damaged: it ends too early");
    fails(resume(&whole[..whole.len() / 2]), "is damaged: its checksum does not match");
    fails(resume(&changed(whole.len() / 2)), "is damaged: its checksum does not match");
    fails(resume(&changed(8)), "has format version 2");
    let mut contradicting = resume(&whole);
    contradicting.args(["--layers", "3"]);
    fails(contradicting, "--layers is 3, but runs/run was started with 2");
    fs::write(place.directory.path().join("text.txt"), "another text. ".repeat(1000)).unwrap();
    fails(place.resume("run"), "was trained on another text");
}
