//! Reading of folders: shards, older forms of `config.json`, and what is refused.
#![cfg(feature = "flex")]

mod common;

use burn::tensor::{DType, Device, Tensor};
use burn_flash_attention::{FlashAttentionOptions, FlashDecoder, RotaryScaling};
use common::{Expected, copy, folder, model};
use llama::checkpoint::Checkpoint;
use llama::config::ModelConfig;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// Logits of the tokens of a checkpoint.
fn logits(model: &FlashDecoder, name: &str) -> Tensor<3> {
    let tokens = Expected::of(name).tokens(&Device::flex());
    model.forward(tokens, &FlashAttentionOptions::new())
}

/// The model of a folder, in f32, or the sentence of its error.
fn open(folder: &Path) -> Result<FlashDecoder, String> {
    Checkpoint::open(folder).and_then(|it| it.model(&Device::flex(), DType::F32)).map_err(|error| error.to_string())
}

/// Changes the `config.json` of a folder.
fn configure(folder: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, serde_json::to_vec(&config).unwrap()).unwrap();
}

/// A tensor of a file: name, element type, shape and bytes.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

fn tensors(folder: &Path) -> Vec<Stored> {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |(name, view): (String, TensorView)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec());
    file.tensors().into_iter().map(stored).collect()
}

fn write(path: &Path, tensors: &[Stored]) {
    let views = tensors.iter().map(|it| (it.0.as_str(), TensorView::new(it.1, it.2.clone(), &it.3).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

/// Changes the tensors of a folder.
fn rewrite(folder: &Path, change: impl FnOnce(&mut Vec<Stored>)) {
    let mut all = tensors(folder);
    change(&mut all);
    write(&folder.join("model.safetensors"), &all);
}

fn assert_same(a: Tensor<3>, b: Tensor<3>) {
    assert_eq!(a.into_data(), b.into_data());
}

#[test]
fn shards_are_the_file_in_parts() {
    let directory = copy("llama3");
    let place = directory.path();
    let all = tensors(place);
    let (first, second) = all.split_at(all.len() / 2);
    let mut files = Map::new();
    for (name, part) in [("model-1.safetensors", first), ("model-2.safetensors", second)] {
        write(&place.join(name), part);
        files.extend(part.iter().map(|it| (it.0.clone(), json!(name))));
    }
    fs::remove_file(place.join("model.safetensors")).unwrap();
    let index = place.join("model.safetensors.index.json");
    fs::write(&index, json!({"weight_map": files}).to_string()).unwrap();
    assert_same(
        logits(&open(place).unwrap(), "llama3"),
        logits(&model("llama3", &Device::flex(), DType::F32), "llama3"),
    );

    // A tensor that is in the other shard.
    files.insert(first[0].0.clone(), json!("model-2.safetensors"));
    fs::write(&index, json!({"weight_map": files}).to_string()).unwrap();
    let error = open(place).unwrap_err();
    assert_eq!(error, format!("{} lacks the tensor {}", place.join("model-2.safetensors").display(), first[0].0));
    fs::remove_file(place.join("model-2.safetensors")).unwrap();
    assert!(open(place).unwrap_err().contains("model-2.safetensors: "));
}

#[test]
fn element_types_of_files_are_the_same_numbers() {
    let expected = logits(&model("qwen2", &Device::flex(), DType::F32), "qwen2");
    let directory = copy("qwen2");
    rewrite(directory.path(), |all| {
        for (_, dtype, _, bytes) in all {
            // Any bf16 is the upper half of an f32.
            *bytes = bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
            *dtype = Dtype::F32;
        }
    });
    assert_same(logits(&open(directory.path()).unwrap(), "qwen2"), expected);
    let checkpoint = Checkpoint::open(&folder("qwen2")).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(checkpoint.model(&Device::flex(), dtype).unwrap().embedding.weight.dtype(), dtype);
    }
}

/// What transformers 4 wrote, for the same model.
#[test]
fn older_configurations_mean_the_same() {
    let same = |name: &str, change: &dyn Fn(&mut Map<String, Value>)| {
        let directory = copy(name);
        configure(directory.path(), |config| {
            config.remove("rope_parameters");
            change(config);
        });
        let expected = logits(&model(name, &Device::flex(), DType::F32), name);
        assert_same(logits(&open(directory.path()).unwrap(), name), expected);
    };
    same("llama2", &|config| {
        for name in ["num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype"] {
            config.remove(name);
        }
        config.insert("rope_scaling".into(), Value::Null);
    });
    same("llama3", &|config| {
        config.insert("rope_theta".into(), json!(500_000.0));
        let scaling = json!({"rope_type": "llama3", "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16});
        config.insert("rope_scaling".into(), scaling);
    });
    // Without head_dim, which is hidden_size / num_attention_heads there.
    same("qwen2", &|config| {
        config.remove("head_dim");
        config.remove("layer_types");
        config.insert("sliding_window".into(), json!(4));
    });
    same("gemma2", &|config| {
        config.remove("tie_word_embeddings");
        config.remove("layer_types");
    });
    same("gemma3", &|config| {
        config.remove("tie_word_embeddings");
        config.remove("layer_types");
        config.insert("rope_theta".into(), json!(1_000_000.0));
        config.insert("rope_local_base_freq".into(), json!(10_000.0));
    });
    same("gpt_oss", &|config| {
        config.remove("attention_bias");
        config.remove("layer_types");
        let scaling = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 64});
        config.insert("rope_scaling".into(), scaling);
    });
}

#[test]
fn settings_of_windows_and_scaling() {
    let decoder = |name: &str, change: &dyn Fn(&mut Map<String, Value>)| {
        let directory = copy(name);
        configure(directory.path(), change);
        ModelConfig::read(&directory.path().join("config.json")).unwrap().decoder
    };
    let windows = |name: &str, change: &dyn Fn(&mut Map<String, Value>)| -> Vec<_> {
        decoder(name, change).layers.iter().map(|layer| layer.attention.window_left).collect()
    };
    assert_eq!(windows("mistral", &|_| ()), [Some(8), Some(8)]);
    assert_eq!(windows("mistral", &|config| drop(config.insert("sliding_window".into(), Value::Null))), [None, None]);
    let late = |config: &mut Map<String, Value>| {
        config.remove("layer_types");
        config.insert("sliding_window".into(), json!(6));
        config.insert("use_sliding_window".into(), json!(true));
        config.insert("max_window_layers".into(), json!(1));
    };
    assert_eq!(windows("qwen3", &late), [None, Some(5)]);
    let third = |config: &mut Map<String, Value>| {
        config.remove("layer_types");
        config.insert("sliding_window_pattern".into(), json!(3));
    };
    assert_eq!(windows("gemma3", &third), [Some(8), Some(8), None, Some(8)]);

    // Qwen2.5 of 131,072 positions: the names of older files.
    let yarn = decoder("qwen2", &|config| {
        config.remove("rope_parameters");
        config.insert("rope_scaling".into(), json!({"type": "yarn", "factor": 4.0}));
    });
    let scaling = yarn.layers[0].attention.rotary.as_ref().unwrap().scaling;
    let expected = RotaryScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 256,
        attention_factor: None,
        truncate: true,
    };
    assert_eq!(scaling, expected);
}

#[test]
fn what_a_configuration_asks_for_in_vain_is_named() {
    let refuses_of = |family: &str, name: &str, value: Value, sentence: &str| {
        let directory = copy(family);
        configure(directory.path(), |config| drop(config.insert(name.into(), value)));
        let error = open(directory.path()).unwrap_err();
        let path = directory.path().join("config.json");
        assert_eq!(error, format!("{} {sentence}", path.display()));
    };
    let refuses = |name: &str, value: Value, sentence: &str| refuses_of("llama2", name, value, sentence);
    let known = "llama, mistral, qwen2, qwen3, gemma2, gemma3_text, gpt_oss";
    refuses(
        "model_type",
        json!("phi3"),
        &format!("has model_type = \"phi3\", which is not supported: it must be one of {known}"),
    );
    for mixture in ["mixtral", "qwen3_moe"] {
        let sentence = format!("has model_type = \"{mixture}\", which is not supported: mixtures of experts are not");
        refuses("model_type", json!(mixture), &sentence);
    }
    refuses(
        "model_type",
        json!("gpt_oss"),
        "has num_local_experts = 128, which is not supported: mixtures of experts are not",
    );
    refuses("num_experts", json!(8), "has num_experts = 8, which is not supported: mixtures of experts are not");
    let quantized = "has quantization_config = \"mxfp4\", which is not supported: weights must be f32, f16 or bf16";
    refuses("quantization_config", json!({"quant_method": "mxfp4"}), quantized);
    let rope = "has rope_type = dynamic, which is not supported: it must be default, linear, llama3 or yarn";
    refuses("rope_parameters", json!({"rope_type": "dynamic", "rope_theta": 1e4}), rope);
    let factor = "is not a readable configuration of a model: missing field `factor` of the rotary embedding";
    refuses("rope_parameters", json!({"rope_type": "linear", "rope_theta": 1e4}), factor);
    let kind = "is not a readable configuration of a model: missing field `full_attention` of the rotary embedding";
    refuses("rope_parameters", json!({"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}), kind);
    let part = "has partial_rotary_factor = 0.5, which is not supported: these families rotate whole heads";
    refuses("partial_rotary_factor", json!(0.5), part);
    let act = "has hidden_act = tanh, which is not supported: it must be silu, gelu, gelu_pytorch_tanh or relu";
    refuses("hidden_act", json!("tanh"), act);
    let kinds =
        "has layer_types = chunked_attention, which is not supported: kinds are full_attention and sliding_attention";
    refuses_of(
        "gemma2",
        "layer_types",
        json!(["full_attention", "chunked_attention", "full_attention", "full_attention"]),
        kinds,
    );
    let count = "has layer_types = 1 kinds, which is not supported: num_hidden_layers is 4";
    refuses_of("gemma2", "layer_types", json!(["full_attention"]), count);
    let window = "has sliding_window = 0, which is not supported: a query sees at least itself";
    refuses_of("gemma2", "sliding_window", json!(0), window);
    let both = "has use_bidirectional_attention = true, which is not supported: a decoder is causal";
    refuses("use_bidirectional_attention", json!(true), both);

    let directory = copy("llama2");
    configure(directory.path(), |config| drop(config.remove("hidden_size")));
    assert!(open(directory.path()).unwrap_err().ends_with("missing field `hidden_size`"));
    configure(directory.path(), |config| drop(config.insert("hidden_size".into(), json!(32))));
    configure(directory.path(), |config| drop(config.insert("num_key_value_heads".into(), json!(3))));
    assert_eq!(open(directory.path()).unwrap_err(), "num_heads_q is 4, which is not a multiple of num_heads_kv, 3");
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let refuses = |change: &dyn Fn(&mut Vec<Stored>), sentence: &str| {
        let directory = copy("llama2");
        rewrite(directory.path(), change);
        let error = open(directory.path()).unwrap_err();
        assert_eq!(error, format!("{} {sentence}", directory.path().join("model.safetensors").display()));
    };
    let name = "model.layers.1.mlp.up_proj.weight";
    let lost = |all: &mut Vec<Stored>| all.retain(|it| it.0 != name);
    refuses(&lost, &format!("lacks the tensor {name}"));
    let more = |all: &mut Vec<Stored>| all.push(("model.extra".into(), Dtype::F32, vec![1], vec![0; 4]));
    refuses(&more, "holds the tensor model.extra, which the model of its config.json does not have");
    let turned = |all: &mut Vec<Stored>| all.iter_mut().filter(|it| it.0 == name).for_each(|it| it.2.reverse());
    refuses(&turned, &format!("holds the tensor {name} of shape [32, 48]; it must be [48, 32]"));
    let integers = |all: &mut Vec<Stored>| all.iter_mut().filter(|it| it.0 == name).for_each(|it| it.1 = Dtype::I16);
    refuses(&integers, &format!("holds the tensor {name} of I16; f32, f16 and bf16 are supported"));

    // Buffers of older files, and a tied head that is there once more, are no fault.
    let directory = copy("llama3");
    rewrite(directory.path(), |all| {
        all.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Dtype::F32, vec![1], vec![0; 4]));
        all.push(("lm_head.weight".into(), Dtype::F32, vec![1], vec![0; 4]));
    });
    open(directory.path()).unwrap();

    fs::write(directory.path().join("model.safetensors"), "no").unwrap();
    assert!(open(directory.path()).unwrap_err().contains("model.safetensors is not a readable safetensors file: "));
    fs::write(directory.path().join("config.json"), "no").unwrap();
    assert!(open(directory.path()).unwrap_err().contains("config.json is not a readable configuration of a model: "));
}

#[test]
fn ends_of_texts_are_those_of_the_generation_configuration() {
    let directory = copy("llama2");
    assert_eq!(Checkpoint::open(directory.path()).unwrap().config.eos, [2]);
    let path = directory.path().join("generation_config.json");
    for (text, eos) in
        [(r#"{"eos_token_id": [7, 9]}"#, vec![7, 9]), ("{}", vec![2]), (r#"{"eos_token_id": 5}"#, vec![5])]
    {
        fs::write(&path, text).unwrap();
        assert_eq!(Checkpoint::open(directory.path()).unwrap().config.eos, eos);
    }
}
