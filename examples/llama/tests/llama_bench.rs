//! The program's `bench`.
#![cfg(feature = "flex")]

mod common;

use common::folder;
use llama::config::ModelConfig;
use std::path::Path;
use std::process::{Command, Output};

fn bench(config: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llama"));
    command.env("BURN_DEVICE", "flex").args(["bench", "--device", "flex", "--config"]).arg(config);
    command.args(arguments.split(' ')).output().unwrap()
}

#[test]
fn the_program_measures() {
    let config = folder("gemma3").join("config.json");
    for arguments in ["--mode train --batch 2", "--mode train --checkpointing --dtype bf16", "--mode decode --batch 3"]
    {
        let arguments = format!("--context 40 --warmup 1 --steps 3 {arguments}");
        let output = bench(&config, &arguments);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        let rate: f64 = said.lines().find_map(|line| line.strip_prefix("tokens/s")).unwrap().trim().parse().unwrap();
        assert!(rate > 0.0 && rate.is_finite(), "{said}");
    }
    for (arguments, sentence) in [
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--context 257", "positions is 257; sequences of at most 256 are supported"),
    ] {
        let output = bench(&config, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(sentence), "{error}");
    }
}

/// Meta's numbers: 1.24 billion parameters.
#[test]
fn the_shape_of_llama_3_2_1b_has_its_parameters() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("shapes/llama-3.2-1b.json");
    let config = ModelConfig::read(&path).unwrap().decoder;
    // Counting initializes nothing.
    let model = config.try_init(&burn::tensor::Device::flex()).unwrap();
    assert_eq!(burn::module::Module::num_params(&model), 1_235_814_400);
}
