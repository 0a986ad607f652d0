//! Latent attention, compared with DeepSeek-V3's of transformers, and with itself over packed sequences.

mod common;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flash_attention::{
    AttentionError, FlashAttentionOptions, FlashLatentAttention, FlashLatentAttentionConfig, FlashSelfAttentionInput,
    RotaryEmbeddingConfig, RotaryLayout,
};
use common::{close, random, targets};
use safetensors::SafeTensors;

const D_MODEL: usize = 20;

/// Files of `fixtures/latent_attention.py`.
const FIXTURES: [(Option<usize>, &[u8]); 2] = [
    (Some(8), include_bytes!("fixtures/latent_attention.safetensors")),
    (None, include_bytes!("fixtures/latent_attention_without_q_lora.safetensors")),
];

fn config(q_lora_rank: Option<usize>) -> FlashLatentAttentionConfig {
    let rotary = RotaryEmbeddingConfig::new(32).with_layout(RotaryLayout::Interleaved);
    FlashLatentAttentionConfig::new(D_MODEL, 3, rotary)
        .with_q_lora_rank(q_lora_rank)
        .with_kv_lora_rank(10)
        .with_qk_nope_head_dim(6)
        .with_qk_rope_head_dim(4)
        .with_v_head_dim(5)
}

fn tensor<const D: usize>(file: &SafeTensors, name: &str, device: &Device) -> Tensor<D> {
    let view = file.tensor(name).unwrap();
    let values = view.data().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
    let shape: [usize; D] = view.shape().try_into().unwrap();
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), shape), (device, DType::F32))
}

/// The linear layers, with the names of transformers.
fn linears(module: &mut FlashLatentAttention) -> Vec<(&mut Linear, &'static str)> {
    let up = if module.query_down.is_some() { "q_b_proj" } else { "q_proj" };
    let down = module.query_down.as_mut().map(|down| (down, "q_a_proj"));
    let others = [
        (&mut module.query_up, up),
        (&mut module.latent, "kv_a_proj_with_mqa"),
        (&mut module.latent_up, "kv_b_proj"),
        (&mut module.output, "o_proj"),
    ];
    down.into_iter().chain(others).collect()
}

#[test]
fn output_and_gradients_are_those_of_transformers() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for (q_lora_rank, bytes) in FIXTURES {
            let file = SafeTensors::deserialize(bytes).unwrap();
            let mut module = config(q_lora_rank).init(&device);
            for (linear, name) in linears(&mut module) {
                linear.weight = Param::from_tensor(tensor::<2>(&file, &format!("{name}.weight"), &device).transpose());
            }
            module.latent_norm.gamma = Param::from_tensor(tensor(&file, "kv_a_layernorm.weight", &device));
            if let Some(norm) = &mut module.query_norm {
                norm.gamma = Param::from_tensor(tensor(&file, "q_a_layernorm.weight", &device));
            }
            let x = tensor::<3>(&file, "x", &device).require_grad();
            let out = module.forward(x.clone());
            close(&target, "out", out.clone(), tensor(&file, "out", &device));

            let gradients = out.powi_scalar(2).mean().backward();
            let mut found = vec![
                ("x", x.grad(&gradients).unwrap().reshape([-1])),
                ("kv_a_layernorm.weight", module.latent_norm.gamma.grad(&gradients).unwrap()),
            ];
            let query_norm = module.query_norm.as_ref();
            found.extend(query_norm.map(|norm| ("q_a_layernorm.weight", norm.gamma.grad(&gradients).unwrap())));
            let mut found: Vec<_> = found.into_iter().map(|(name, grad)| (name.to_string(), grad)).collect();
            for (linear, name) in linears(&mut module) {
                let gradient = linear.weight.grad(&gradients).unwrap().transpose().reshape([-1]);
                found.push((format!("{name}.weight"), gradient));
            }
            // None is missing.
            assert_eq!(found.len(), file.names().iter().filter(|name| name.starts_with("grad.")).count());
            for (name, gradient) in found {
                let name = format!("grad.{name}");
                let shape = file.tensor(&name).unwrap().shape().to_vec();
                let expected: Tensor<1> = match shape.len() {
                    1 => tensor(&file, &name, &device),
                    2 => tensor::<2>(&file, &name, &device).reshape([-1]),
                    _ => tensor::<3>(&file, &name, &device).reshape([-1]),
                };
                let norm = |x: Tensor<1>| x.powi_scalar(2).sum().sqrt().into_scalar::<f32>();
                let error = norm(gradient - expected.clone()) / norm(expected);
                // Burn's products of f32 are rounded to tf32 on CUDA.
                let bound = if target.name == "cuda" { 5e-3 } else { 1e-5 };
                assert!(error < bound, "{name} on {}: {error}", target.name);
            }
        }
    }
}

#[test]
fn packed_sequences_equal_each_alone() {
    for target in targets() {
        let device = &target.device;
        let module = config(None).init(device);
        let x = random([1, 11, D_MODEL], device);
        let begins = Tensor::<1, Int>::from_data([0, 4, 11], device);
        let options = FlashAttentionOptions::new().with_cu_seqlens_q(begins.clone()).with_cu_seqlens_k(begins);
        let packed = module.forward(FlashSelfAttentionInput::new(x.clone()).options(options));
        for (first, len) in [(0, 4), (4, 7)] {
            let alone = module.forward(x.clone().narrow(1, first, len));
            close(&target, "packed", packed.clone().narrow(1, first, len), alone);
        }
    }
}

#[test]
fn a_trained_module_is_saved_with_its_config() {
    for target in targets() {
        let device = &target.device;
        let config = config(Some(8));
        let text = serde_json::to_string(&config).unwrap();
        let module = config.init(device);
        let again = serde_json::from_str::<FlashLatentAttentionConfig>(&text).unwrap().init(device);
        let folder = tempfile::tempdir().unwrap();
        module.clone().save_file(folder.path().join("module")).unwrap();
        let again = again.load_file(folder.path().join("module"));
        let x = random([1, 5, D_MODEL], device);
        close(&target, "loaded", again.forward(x.clone()), module.forward(x));
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let device = targets().remove(0).device;
    let module = config(None).with_softmax_scale(Some(0.2)).init(&device);
    let x = || random([1, 5, D_MODEL], &device);
    let options = FlashAttentionOptions::new().with_softmax_scale(0.3);
    let error = module.try_forward(FlashSelfAttentionInput::new(x()).options(options)).unwrap_err();
    assert!(matches!(error, AttentionError::Unsupported { option: "softmax_scale", .. }), "{error}");
    let options = FlashAttentionOptions::new().with_dropout(0.3);
    let error = module.try_forward(FlashSelfAttentionInput::new(x()).options(options)).unwrap_err();
    assert!(error.to_string().starts_with("dropout = 0.3"), "{error}");
    let error = module.try_forward(random([1, 5, 8], &device)).unwrap_err();
    assert!(error.to_string().starts_with("x has d_model 8"), "{error}");
    let error = module.try_forward(random([1, 33, D_MODEL], &device)).unwrap_err();
    assert!(error.to_string().starts_with("positions is 33"), "{error}");
    for (config, words) in [
        (config(Some(0)), "q_lora_rank = 0"),
        (config(None).with_qk_rope_head_dim(3), "rotary_dim = 3"),
        (config(None).with_dropout(1.0), "dropout = 1"),
        (config(None).with_norm_epsilon(-1.0), "norm_epsilon is -1"),
    ] {
        let error = config.try_init(&device).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}
