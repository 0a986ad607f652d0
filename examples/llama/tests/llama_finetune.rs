//! The loss in chunks, packed documents, and adapters.
#![cfg(feature = "flex")]

mod common;

use burn::data::dataloader::batcher::Batcher;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Gradients, Tensor};
use burn_flash_attention::{FlashAttentionOptions, FlashDecoder};
use common::{Expected, add_tokenizer, copy, model};
use llama::documents::{Batch, Row, RowBatcher, pack};
use llama::lora::{AdapterConfig, merge};
use llama::loss::cross_entropy;
use llama::parameters::{Slot, slots};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn device() -> Device {
    Device::flex().autodiff()
}

/// Gradients of all parameters that have one.
fn gradients(model: &FlashDecoder, gradients: &Gradients) -> Vec<(String, Tensor<1>)> {
    let mut model = model.clone();
    let gradient = |slot: Slot| match slot {
        Slot::Linear(weight) | Slot::Table(weight) => weight.grad(gradients).map(|gradient| gradient.reshape([-1])),
        Slot::Norm(vector) | Slot::Vector(vector) => vector.grad(gradients),
    };
    let all = slots(&mut model).into_iter().map(|(name, slot)| (name, gradient(slot)));
    all.filter_map(|(name, gradient)| gradient.map(|gradient| (name, gradient))).collect()
}

fn norm<const D: usize>(x: Tensor<D>) -> f32 {
    x.powi_scalar(2).sum().sqrt().into_scalar()
}

/// Tokens of a checkpoint as two documents.
fn documents(name: &str) -> Vec<Vec<u32>> {
    let tokens: Vec<u32> = Expected::of(name).tokens(&Device::flex()).into_data().iter().collect();
    vec![tokens[..24].to_vec(), tokens[24..].to_vec()]
}

fn batch(rows: &[Row], context: usize, device: &Device) -> Batch {
    RowBatcher { context }.batch(rows.to_vec(), device)
}

#[test]
fn the_loss_in_chunks_and_its_gradients_are_those_of_transformers() {
    // With a head of its own, a tied one, and a softcap.
    for name in ["llama2", "llama3", "gemma2"] {
        let expected = Expected::of(name);
        let model = model(name, &device(), DType::F32);
        let rows = pack(&documents(name), 24);
        assert_eq!(rows.len(), 2);
        let batch = batch(&rows, 24, &device());
        let value: f32 = expected.flat("loss", &Device::flex()).into_scalar();
        for chunk in [1, 7, 48, 100] {
            let hidden = model.try_hidden(batch.tokens.clone(), &batch.options()).unwrap();
            let loss = cross_entropy(&model, hidden, &batch.targets, chunk);
            let found: f32 = loss.value.into_scalar();
            assert!((found - value).abs() < 1e-4, "{name}: {found} instead of {value}");
            let found = gradients(&model, &loss.objective.backward());
            assert_eq!(found.len(), expected.count("grad."), "{name}");
            for (parameter, found) in found {
                let expected = expected.flat(&format!("grad.{parameter}"), &Device::flex());
                // Elements are in the order of the parameter, so that norms are compared, and the embedding and vectors by element.
                let (found_norm, size) = (norm(found.clone()), norm(expected.clone()));
                assert!((found_norm - size).abs() <= 1e-4 * size, "{name}: {parameter} in chunks of {chunk}");
                if !parameter.contains("proj") && !parameter.contains("lm_head") {
                    assert!(norm(found - expected) <= 1e-4 * size, "{name}: {parameter} in chunks of {chunk}");
                }
            }
        }
        let valid = model.valid();
        let inner = self::batch(&rows, 24, &Device::flex());
        let hidden = valid.try_hidden(inner.tokens.clone(), &inner.options()).unwrap();
        let found: f32 = cross_entropy(&valid, hidden, &inner.targets, 7).value.into_scalar();
        assert!((found - value).abs() < 1e-4, "{name}, without autodiff: {found} instead of {value}");
    }
}

#[test]
fn a_frozen_head_takes_no_gradient() {
    let model = model("llama2", &device(), DType::F32);
    let adapters = AdapterConfig::new(2, 4.0, &["q".to_string()]).unwrap();
    let model = adapters.attach(model);
    let batch = batch(&pack(&documents("llama2"), 24), 24, &device());
    let hidden = model.try_hidden(batch.tokens.clone(), &batch.options()).unwrap();
    let all = cross_entropy(&model, hidden, &batch.targets, 10).objective.backward();
    assert!(gradients(&model, &all).is_empty());
    let adapter = model.layers[0].attention.query.weight.adapter().unwrap();
    // B is 0 at first, so that only B has a gradient that is not.
    assert!(norm(adapter.b.grad(&all).unwrap()) > 0.0 && norm(adapter.a.grad(&all).unwrap()) == 0.0);
    assert!(model.layers[0].attention.key.weight.adapter().is_none());
}

#[test]
fn documents_are_packed_without_losing_a_prediction() {
    let documents = [vec![1, 2, 3], vec![4, 5, 6, 7, 8, 9, 10], vec![11], vec![12, 13]];
    let rows = pack(&documents, 5);
    let row = |tokens: &[u32], starts: &[usize]| Row { tokens: tokens.to_vec(), starts: starts.to_vec() };
    let expected = [row(&[1, 2, 3, 4, 5], &[0, 3]), row(&[5, 6, 7, 8, 9], &[0]), row(&[9, 10, 12, 13], &[0, 2])];
    assert_eq!(rows, expected);
    let batch = batch(&rows, 5, &Device::flex());
    let weights: Vec<f32> = batch.targets.weights.into_data().iter().collect();
    let next: Vec<i32> = batch.targets.tokens.into_data().iter().collect();
    let predicted: Vec<_> =
        next.iter().zip(&weights).filter(|(_, weight)| **weight == 1.0).map(|(next, _)| *next).collect();
    // All tokens of documents, except the first ones, once.
    assert_eq!(predicted, [2, 3, 5, 6, 7, 8, 9, 10, 13]);
    assert_eq!(batch.targets.count, 9.0);
    let ends: Vec<i32> = batch.cu_seqlens.into_data().iter().collect();
    assert_eq!(ends, [0, 3, 5, 10, 12, 14, 15]);
    assert!(pack(&[vec![1], vec![]], 5).is_empty());
}

#[test]
fn packed_documents_do_not_see_each_other() {
    for name in ["llama3", "mistral", "gemma3", "gpt_oss"] {
        let model = model(name, &device(), DType::F32);
        let [a, b] = documents(name).try_into().unwrap();
        let documents = [a[..9].to_vec(), b, a[9..].to_vec()];
        let run = |documents: &[Vec<u32>]| {
            let rows = pack(documents, 52);
            assert_eq!(rows.len(), 1);
            let batch = batch(&rows, 52, &device());
            let hidden = model.try_hidden(batch.tokens.clone(), &batch.options()).unwrap();
            let loss = cross_entropy(&model, hidden, &batch.targets, 20);
            let sum = loss.value.into_scalar::<f32>() * batch.targets.count as f32;
            (sum, gradients(&model, &(loss.objective * batch.targets.count).backward()))
        };
        let (together, of_all) = run(&documents);
        let alone: Vec<_> = documents.iter().map(|document| run(std::slice::from_ref(document))).collect();
        let sum: f32 = alone.iter().map(|(sum, _)| sum).sum();
        assert!((together - sum).abs() <= 1e-4 * sum, "{name}: {together} and {sum}");
        for (nth, (parameter, found)) in of_all.into_iter().enumerate() {
            let expected = alone.iter().map(|(_, all)| all[nth].1.clone()).reduce(|a, b| a + b).unwrap();
            assert!(norm(found - expected.clone()) <= 1e-4 * norm(expected), "{name}: {parameter}");
        }
    }
}

#[test]
fn a_saved_adapter_gives_the_same_logits() {
    let targets = ["q", "v", "down"].map(str::to_string);
    let adapters = AdapterConfig::new(3, 6.0, &targets).unwrap();
    let plain = model("llama3", &Device::flex(), DType::F32);
    let model = adapters.attach(model("llama3", &device(), DType::F32));
    let mut trained = model.clone();
    for layer in &mut trained.layers {
        for linear in [&mut layer.attention.query, &mut layer.attention.value, &mut layer.mlp.down] {
            linear.weight = moved(linear.weight.clone());
        }
    }
    let tokens = Expected::of("llama3").tokens(&Device::flex());
    let logits = |model: &FlashDecoder| model.forward(tokens.clone(), &FlashAttentionOptions::new());
    let expected = logits(&trained.valid());
    let directory = tempfile::tempdir().unwrap();
    adapters.save(&trained, directory.path()).unwrap();
    let mut merged = plain.clone();
    merge(&mut merged, directory.path()).unwrap();
    let difference = (logits(&merged) - expected.clone()).abs().max().into_scalar::<f32>();
    let change = (logits(&plain) - expected).abs().max().into_scalar::<f32>();
    assert!(difference < 1e-4 && change > 0.1, "{difference} after a change of {change}");

    // Of another model, another kind, and with more than it should have.
    let mut other = common::model("qwen2", &Device::flex(), DType::F32);
    let error = merge(&mut other, directory.path()).unwrap_err().to_string();
    assert!(
        error.contains("holds the tensor base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight of shape"),
        "{error}"
    );
    let path = directory.path().join("adapter_config.json");
    let config = fs::read_to_string(&path).unwrap();
    for (from, to, sentence) in [
        ("\"LORA\"", "\"IA3\"", "has peft_type = IA3, which is not supported"),
        ("\"use_dora\": false", "\"use_dora\": true", "has use_dora = true, which is not supported"),
        ("\"use_rslora\": false", "\"use_rslora\": true", "has use_rslora = true, which is not supported"),
        ("\"down_proj\"", "\"up_proj\"", "lacks the tensor base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"),
        (
            ",\n    \"down_proj\"",
            "",
            "holds the tensor base_model.model.model.layers.0.mlp.down_proj.lora_A.weight, which",
        ),
    ] {
        assert!(config.contains(from), "{from} in {config}");
        fs::write(&path, config.replace(from, to)).unwrap();
        let error = merge(&mut plain.clone(), directory.path()).unwrap_err().to_string();
        assert!(error.contains(sentence), "{error}");
    }
}

/// An adapted weight whose factors are as if trained: `B` is no longer 0.
fn moved(weight: Param<Tensor<2>>) -> Param<Tensor<2>> {
    struct Moved;
    impl ModuleMapper for Moved {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let is_factor = param.is_require_grad();
            param.map(|x| if is_factor { (x.inner() + 0.1).autodiff().require_grad() } else { x })
        }
    }
    Module::map(weight, &mut Moved)
}

fn llama(arguments: &[&str], folder: &Path, place: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llama"));
    // Burn's default device may not exist on this machine.
    command.current_dir(place).env("BURN_DEVICE", "flex").args(arguments).arg("--model").arg(folder);
    command.args(["--device", "flex"]).output().unwrap()
}

/// Losses of the steps of an epoch. Lines of the file are `value,count`.
fn losses(run: &Path, epoch: usize) -> Vec<f64> {
    let log = fs::read_to_string(run.join(format!("train/epoch-{epoch}/Loss.log"))).unwrap();
    log.lines().map(|line| line.split(',').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn the_program_learns_a_text_and_continues_it() {
    let (directory, place) = (copy("llama3"), tempfile::tempdir().unwrap());
    add_tokenizer(directory.path());
    // Words in a circle of 10, in documents of 40.
    let document =
        |first: usize| (first..first + 40).map(|at| format!("w{}", 10 + at % 10)).collect::<Vec<_>>().join(" ");
    let lines = (0..40).map(|nth| serde_json::json!({"text": document(nth)}).to_string());
    fs::write(place.path().join("text.jsonl"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let common =
        ["finetune", "--data", "text.jsonl", "--context", "64", "--batch-size", "2", "--rank", "8", "--chunk", "50"];
    for (out_dir, checkpointing) in [("plain", false), ("checkpointed", true)] {
        let mut arguments = [&common[..], &["--epochs", "6", "--learning-rate", "0.02", "--out-dir", out_dir]].concat();
        arguments.extend(checkpointing.then_some("--checkpointing"));
        let output = llama(&arguments, directory.path(), place.path());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let run = place.path().join(out_dir);
        let (first, last) = (losses(&run, 1)[0], *losses(&run, 6).last().unwrap());
        assert!(first > 5.0 && last < 1.0, "the loss went from {first} to {last}");

        let generate = ["generate", "--prompt", "w13 w14 w15 w16", "--temperature", "0", "--max-tokens", "6"];
        let plain = llama(&generate, directory.path(), place.path());
        let tuned = llama(&[&generate[..], &["--adapter", out_dir]].concat(), directory.path(), place.path());
        assert!(tuned.status.success(), "{}", String::from_utf8_lossy(&tuned.stderr));
        assert_eq!(String::from_utf8_lossy(&tuned.stdout).trim(), "w17 w18 w19 w10 w11 w12");
        assert_ne!(plain.stdout, tuned.stdout);
    }
    let plain = fs::read(place.path().join("plain/adapter_model.safetensors")).unwrap();
    let checkpointed = fs::read(place.path().join("checkpointed/adapter_model.safetensors")).unwrap();
    assert!(plain == checkpointed, "gradient checkpointing changes the adapters");
}

#[test]
fn flags_that_cannot_be_are_refused_in_one_sentence() {
    let (directory, place) = (copy("llama3"), tempfile::tempdir().unwrap());
    add_tokenizer(directory.path());
    fs::write(place.path().join("text.txt"), "w5 w6 w7").unwrap();
    fs::create_dir(place.path().join("old")).unwrap();
    fs::write(place.path().join("old/adapter_config.json"), "{}").unwrap();
    fs::write(place.path().join("bad.jsonl"), "{\"text\": \"w5\"}\n{\"words\": 5}").unwrap();
    for (arguments, sentence) in [
        ("--data text.txt", "--context is 1024; the documents fill 1 rows of it, and one is needed for validation"),
        ("--data text.txt --rank 0", "--rank is 0; it must be at least 1"),
        ("--data text.txt --context 1", "--context is 1; it must be at least 2"),
        ("--data text.txt --chunk 0", "--chunk is 0; it must be at least 1"),
        ("--data text.txt --learning-rate 2", "--learning-rate is 2; it must be above 0 and at most 1"),
        ("--data text.txt --alpha inf", "--alpha is inf; it must be finite"),
        ("--data text.txt --targets q,head", "--targets is head; layers are q, k, v, o, gate, up and down"),
        ("--data text.txt --dtype f16", "--dtype is f16; gradients are too small for it; choose bf16 or f32"),
        ("--data bad.jsonl", "bad.jsonl is not a readable JSONL file: line 2: missing field `text`"),
        ("--data none.txt", "none.txt: No such file"),
        ("--data text.txt --out-dir old", "--out-dir is old; it already has an adapter"),
    ] {
        let arguments: Vec<_> = ["finetune"].into_iter().chain(arguments.split(' ')).collect();
        let output = llama(&arguments, directory.path(), place.path());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.lines().last().unwrap().contains(sentence), "{error}");
    }
}
