//! Flags that override the defaults of a device, resumed runs, and files of earlier versions.

use super::{AttentionKind, Config, ModelShape};
use crate::device::{Found, choose};
use crate::flags::Given;
use crate::tokenizer::Tokenizer;
use clap::{Args, Command, FromArgMatches};
use std::path::Path;

fn cpu() -> Found {
    choose("flex").unwrap()
}

/// The flags of a command line.
fn given(line: &str) -> Given<Config> {
    let command = Given::<Config>::augment_args(Command::new("gpt").no_binary_name(true));
    Given::from_arg_matches(&command.get_matches_from(line.split_whitespace())).unwrap()
}

fn new(line: &str) -> Config {
    Config::new(&given(line), &cpu(), None).unwrap()
}

#[test]
fn defaults_follow_the_device_and_other_flags() {
    assert_eq!(new(""), Config::suited_to(&cpu()));
    let config = new("--layers 3 --alibi --sinks=false --devices 0,1 --data a.txt --tokenizer gpt2");
    let expected = Config {
        layers: 3,
        alibi: true,
        devices: vec![0, 1],
        data: Some("a.txt".into()),
        tokenizer: Tokenizer::Gpt2,
        vocabulary: Tokenizer::Gpt2.vocabulary(),
        ..Config::suited_to(&cpu())
    };
    assert_eq!(config, expected);
    assert_eq!(new("--lr 0.5").min_lr, 0.05);
    assert_eq!(new("--lr 0.5 --min-lr 1e-4").min_lr, 1e-4);
    assert_eq!(new("--steps 50").warmup, 5);
    assert_eq!(new("--steps 50 --warmup 30").warmup, 30);
}

#[test]
fn defaults_follow_the_weights() {
    let shape = ModelShape { layers: 3, heads: 2, width: 16, context: 12, vocabulary: 60_000 };
    let of_weights = |line: &str| Config::new(&given(line), &cpu(), Some(shape)).map_err(|error| error.to_string());
    let config = of_weights("--weights a.safetensors --context 8").unwrap();
    assert_eq!((config.layers, config.heads, config.width, config.context), (3, 2, 16, 8));
    assert_eq!((config.vocabulary, config.tokenizer, config.grad_accum), (60_000, Tokenizer::Gpt2, 32));
    assert_eq!(of_weights("--layers 2").unwrap_err(), "--layers is 2, but the weights' is 3; leave the flag out");
}

#[test]
fn options_that_several_devices_cannot_use_are_refused() {
    let says = |line: &str, expected: &str| {
        let error = Config::new(&given(line), &cpu(), None).unwrap_err().to_string();
        assert!(error.contains(expected), "the error {error:?} lacks {expected:?}");
    };
    assert_eq!(new("--devices 0,1 --batch 4").devices.len(), 2);
    says("--devices 0,1 --batch 3", "--batch is 3; it must be a multiple of the number of --devices");
    assert_eq!(new("--devices 0,1 --batch 4 --checkpointing").devices.len(), 2);
    says(
        "--devices 0,1 --batch 4 --checkpointing --dropout 0.1",
        "--dropout is 0.1; it must be 0 with --checkpointing on several devices",
    );
}

#[test]
fn a_resumed_run_keeps_its_options() {
    let saved = new("--layers 3 --lr 0.01");
    let resume = |line: &str| {
        let asked = given(line).over(saved.clone());
        saved.resume(asked, Path::new("runs/a")).map_err(|error| error.to_string())
    };
    assert_eq!(resume("").unwrap(), saved);
    assert_eq!(resume("--layers 3 --lr 1e-2 --attention flash").unwrap(), saved);
    let moved = resume("--device cuda --devices 1 --data b.txt").unwrap();
    assert_eq!(moved, Config { device: "cuda".into(), devices: vec![1], data: Some("b.txt".into()), ..saved.clone() });
    for (line, expected) in [
        ("--layers 4", "--layers is 4, but runs/a was started with 3; leave the flag out"),
        ("--lr 0.02", "--lr is 0.02, but runs/a was started with 0.01"),
        ("--attention composed", "--attention is composed, but runs/a was started with flash"),
        ("--grad-accum 2", "--grad-accum is 2, but runs/a was started with 1"),
        ("--weights a", "--weights is a, but runs/a was started with none"),
    ] {
        let error = resume(line).unwrap_err();
        assert!(error.starts_with(expected), "the error {error:?} lacks {expected:?}");
    }
}

/// Files written before `alibi`, `sinks`, `window`, `pack` and `devices` existed, and before flags and fields were unified.
#[test]
fn files_of_earlier_versions_load() {
    let first = r#"
        device = "cuda:0"
        tokenizer = "gpt2"
        attention = "composed"
        dtype = "bf16"
        layers = 12
        heads = 12
        width = 768
        context = 1024
        vocabulary = 50257
        batch = 16
        grad_accum = 2
        checkpointing = true
        steps = 24
        lr = 0.0006
        min_lr = 0.00006
        warmup = 10
        weight_decay = 0.1
        beta1 = 0.9
        beta2 = 0.99
        grad_clip = 1.0
        dropout = 0.0
        seed = 1337
        eval_interval = 12
        eval_batches = 200
        sample_tokens = 500
    "#;
    let config: Config = toml::from_str(first).unwrap();
    assert_eq!((config.attention, config.layers, config.lr), (AttentionKind::Composed, 12, 6e-4));
    assert_eq!((config.alibi, config.sinks, config.pack, config.window), (false, false, false, 0));
    assert!(config.devices.is_empty() && config.data.is_none() && config.weights.is_none());

    let later = r#"
        devices = [0, 1]
        data = "text.txt"
        weights = "model.safetensors"
        alibi = false
        sinks = false
        window = 128
        pack = true
    "#;
    let config: Config = toml::from_str(&[first, later].concat()).unwrap();
    assert_eq!((config.devices.as_slice(), config.window, config.pack), ([0, 1].as_slice(), 128, true));
    assert_eq!(config.weights.as_deref(), Some(Path::new("model.safetensors")));
    // A written file can be read again.
    assert_eq!(toml::from_str::<Config>(&toml::to_string(&config).unwrap()).unwrap(), config);
}

#[test]
fn a_file_has_the_names_of_earlier_versions() {
    let written = toml::to_string(&new("")).unwrap();
    let names: Vec<_> = written.lines().filter_map(|line| line.split(" = ").next()).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(
        sorted,
        "alibi attention batch beta1 beta2 checkpointing context device dropout dtype eval_batches eval_interval \
         grad_accum grad_clip heads layers lr min_lr pack sample_tokens seed sinks steps tokenizer vocabulary warmup \
         weight_decay width window"
            .split(' ')
            .filter(|name| !name.is_empty())
            .collect::<Vec<_>>()
    );
}
