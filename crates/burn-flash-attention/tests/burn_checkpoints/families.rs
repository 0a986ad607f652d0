//! Checkpoints of Hugging Face as decoders: what `config.json` means for each family, and the names of tensors.

use burn::module::{Initializer, Param};
use burn::nn::norm::{Normalization, NormalizationConfig};
use burn::nn::{Linear, RmsNorm, RmsNormConfig};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_flash_attention::{
    FlashDecoder, FlashDecoderConfig, FlashDecoderLayer, FlashDecoderLayerConfig, FlashSelfAttentionConfig,
    MlpActivation, MlpConfig, RotaryEmbeddingConfig, RotaryScaling,
};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub const FAMILIES: [&str; 7] = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"];

/// Device and element type of parameters.
type At = (Device, DType);

/// A folder of a model.
pub struct Checkpoint {
    config: Value,
    weights: Vec<u8>,
    expected: Vec<u8>,
}

impl Checkpoint {
    pub fn read(family: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints").join(family);
        let read = |name: &str| std::fs::read(Path::new(&folder).join(name)).unwrap();
        let config = serde_json::from_slice(&read("config.json")).unwrap();
        Checkpoint { config, weights: read("model.safetensors"), expected: read("expected.safetensors") }
    }

    /// Whether weights of norms lack a 1.
    fn is_gemma(&self) -> bool {
        self.config["model_type"].as_str().unwrap().starts_with("gemma")
    }

    pub fn integers(&self, name: &str) -> ([usize; 2], Vec<i32>) {
        let (shape, bytes) = view(&self.expected, name).unwrap();
        let values = bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
        (shape.try_into().unwrap(), values.collect())
    }

    pub fn expected<const D: usize>(&self, name: &str, device: &Device) -> Tensor<D> {
        let (shape, values) = floats(&self.expected, name).unwrap();
        let shape: [usize; D] = shape.try_into().unwrap();
        Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
    }

    pub fn expected_flat(&self, name: &str, device: &Device) -> Tensor<1> {
        let (_, values) = floats(&self.expected, name).unwrap_or_else(|| panic!("{name}"));
        Tensor::from_data(values.as_slice(), (device, DType::F32))
    }

    fn layers(&self) -> usize {
        self.size("num_hidden_layers")
    }

    fn size(&self, name: &str) -> usize {
        self.config[name].as_u64().unwrap() as usize
    }

    /// The decoder, with the checkpoint's weights in this type.
    pub fn model(&self, device: &Device, dtype: DType) -> FlashDecoder {
        let mut model = self.decoder().init(device);
        let at = &(device.clone(), dtype);
        let width = self.size("hidden_size");
        model.embedding.weight = Param::from_tensor(self.tensor("model.embed_tokens.weight", at));
        self.load_norm(&mut model.norm, "model.norm", at);
        if let Some(head) = &mut model.head {
            self.load(head, "lm_head", at);
        }
        assert_eq!(model.layers[0].attention.d_model(), width);
        for (nth, layer) in model.layers.iter_mut().enumerate() {
            let name = |part: &str| format!("model.layers.{nth}.{part}");
            for (linear, part) in linears(layer) {
                self.load(linear, &name(part), at);
            }
            for (norm, part) in head_norms(layer) {
                self.load_rms(norm, &name(part), at);
            }
            for (norm, part) in norms(layer) {
                self.load_norm(norm, &name(part), at);
            }
        }
        model
    }

    /// What `config.json` means.
    fn decoder(&self) -> FlashDecoderConfig {
        let config = &self.config;
        let family = config["model_type"].as_str().unwrap();
        let gemma = self.is_gemma();
        let number = |name: &str| config[name].as_f64();
        let epsilon = number("rms_norm_eps").unwrap();
        let scale = number("query_pre_attn_scalar").filter(|_| gemma).map(|scalar| scalar.powf(-0.5) as f32);
        let window = config["sliding_window"].as_u64().map(|window| window as usize - 1);
        let softcap = number("attn_logit_softcapping").map(|softcap| softcap as f32);
        let layer = |nth: usize| {
            // Without a list, all layers are the same: Mistral's have windows.
            let kind = config["layer_types"][nth].as_str();
            let slides = kind.map_or(family == "mistral", |kind| kind == "sliding_attention");
            let parameters = &config["rope_parameters"];
            let own = kind.map(|kind| &parameters[kind]).filter(|own| !own.is_null());
            let attention = FlashSelfAttentionConfig::new(self.size("hidden_size"), self.size("num_attention_heads"))
                .with_num_heads_kv(Some(self.size("num_key_value_heads")))
                .with_head_dim(Some(self.size("head_dim")))
                .with_qkv_bias(family == "qwen2")
                .with_rotary(Some(self.rotary(own.unwrap_or(parameters))))
                .with_qk_norm(["qwen3", "gemma3_text"].contains(&family).then_some(epsilon))
                .with_softcap(softcap)
                .with_softmax_scale(scale)
                .with_window_left(window.filter(|_| slides))
                .with_initializer(Initializer::Zeros);
            let activation = if gemma { MlpActivation::GeluApproximate } else { MlpActivation::Silu };
            let mlp = MlpConfig::new(self.size("intermediate_size")).with_activation(activation);
            FlashDecoderLayerConfig::new(attention, mlp)
                .with_norm(NormalizationConfig::Rms(RmsNormConfig::new(0).with_epsilon(epsilon)))
                .with_sandwich(gemma)
        };
        FlashDecoderConfig::new(self.size("vocab_size"), (0..self.layers()).map(layer).collect())
            .with_tied_head(config["tie_word_embeddings"].as_bool().unwrap())
            .with_embedding_scale(gemma.then(|| (self.size("hidden_size") as f32).sqrt()))
            .with_logit_softcap(number("final_logit_softcapping").map(|softcap| softcap as f32))
    }

    fn rotary(&self, parameters: &Value) -> RotaryEmbeddingConfig {
        let number = |name: &str| parameters[name].as_f64().unwrap_or_else(|| panic!("{name}"));
        let scaling = match parameters["rope_type"].as_str().unwrap() {
            "default" => RotaryScaling::None,
            "llama3" => RotaryScaling::Llama3 {
                factor: number("factor"),
                low_freq_factor: number("low_freq_factor"),
                high_freq_factor: number("high_freq_factor"),
                original_max_position_embeddings: number("original_max_position_embeddings") as usize,
            },
            other => panic!("rope_type {other}"),
        };
        let config = RotaryEmbeddingConfig::new(self.size("max_position_embeddings"));
        config.with_base(number("rope_theta")).with_scaling(scaling)
    }

    fn tensor<const D: usize>(&self, name: &str, at: &At) -> Tensor<D> {
        let (shape, values) = floats(&self.weights, name).unwrap_or_else(|| panic!("{name}"));
        let shape: [usize; D] = shape.try_into().unwrap();
        Tensor::from_data(TensorData::new(values, shape), (&at.0, at.1))
    }

    fn load(&self, linear: &mut Linear, name: &str, at: &At) {
        let weight = self.tensor::<2>(&format!("{name}.weight"), at).transpose();
        assert_eq!(weight.dims(), linear.weight.dims(), "{name}");
        linear.weight = Param::from_tensor(weight);
        if let Some(bias) = &mut linear.bias {
            *bias = Param::from_tensor(self.tensor(&format!("{name}.bias"), at));
        }
    }

    fn load_rms(&self, norm: &mut RmsNorm, name: &str, at: &At) {
        let weight: Tensor<1> = self.tensor(&format!("{name}.weight"), at);
        norm.gamma = Param::from_tensor(if self.is_gemma() { weight + 1.0 } else { weight });
    }

    fn load_norm(&self, norm: &mut Normalization, name: &str, at: &At) {
        match norm {
            Normalization::Rms(norm) => self.load_rms(norm, name, at),
            other => panic!("{other:?}"),
        }
    }
}

/// The linear layers of a layer, with their names.
fn linears(layer: &mut FlashDecoderLayer) -> [(&mut Linear, &'static str); 7] {
    let (attention, mlp) = (&mut layer.attention, &mut layer.mlp);
    [
        (&mut attention.query, "self_attn.q_proj"),
        (&mut attention.key, "self_attn.k_proj"),
        (&mut attention.value, "self_attn.v_proj"),
        (&mut attention.output, "self_attn.o_proj"),
        (mlp.gate.as_mut().unwrap(), "mlp.gate_proj"),
        (&mut mlp.up, "mlp.up_proj"),
        (&mut mlp.down, "mlp.down_proj"),
    ]
}

/// The norms of queries and keys of a layer, if it has any, with their names.
fn head_norms(layer: &mut FlashDecoderLayer) -> Vec<(&mut RmsNorm, &'static str)> {
    let (query, key) = (layer.attention.query_norm.as_mut(), layer.attention.key_norm.as_mut());
    query.map(|norm| (norm, "self_attn.q_norm")).into_iter().chain(key.map(|norm| (norm, "self_attn.k_norm"))).collect()
}

/// The norms of a layer, with their names. With norms of outputs, that of attention has the name that the one before the feed-forward network
/// has without.
fn norms(layer: &mut FlashDecoderLayer) -> Vec<(&mut Normalization, &'static str)> {
    let sandwich = layer.mlp_output_norm.is_some();
    let before_mlp = if sandwich { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    let mut all = vec![(&mut layer.attention_norm, "input_layernorm"), (&mut layer.mlp_norm, before_mlp)];
    all.extend(layer.attention_output_norm.as_mut().map(|norm| (norm, "post_attention_layernorm")));
    all.extend(layer.mlp_output_norm.as_mut().map(|norm| (norm, "post_feedforward_layernorm")));
    all
}

/// The gradient of each tensor, in the checkpoint's order of elements.
pub fn gradients(checkpoint: &Checkpoint, model: &FlashDecoder, gradients: &Gradients) -> Vec<(String, Tensor<1>)> {
    let mut model = model.clone();
    let mut all = Vec::new();
    let flat = |weight: &Param<Tensor<2>>| weight.grad(gradients).unwrap().transpose().reshape([-1]);
    let of_linear = |all: &mut Vec<(String, Tensor<1>)>, linear: &Linear, name: String| {
        all.push((format!("{name}.weight"), flat(&linear.weight)));
        all.extend(linear.bias.iter().map(|bias| (format!("{name}.bias"), bias.grad(gradients).unwrap())));
    };
    let of_norm = |norm: &Normalization| match norm {
        Normalization::Rms(norm) => norm.gamma.grad(gradients).unwrap(),
        other => panic!("{other:?}"),
    };
    let embedding = model.embedding.weight.grad(gradients).unwrap().reshape([-1]);
    all.push(("model.embed_tokens.weight".to_string(), embedding));
    all.push(("model.norm.weight".to_string(), of_norm(&model.norm)));
    if let Some(head) = &model.head {
        of_linear(&mut all, head, "lm_head".to_string());
    }
    for (nth, layer) in model.layers.iter_mut().enumerate() {
        let name = |part: &str| format!("model.layers.{nth}.{part}");
        for (linear, part) in linears(layer) {
            of_linear(&mut all, linear, name(part));
        }
        let of_heads = head_norms(layer).into_iter();
        all.extend(of_heads.map(|(norm, part)| (name(&format!("{part}.weight")), norm.gamma.grad(gradients).unwrap())));
        all.extend(norms(layer).into_iter().map(|(norm, part)| (name(&format!("{part}.weight")), of_norm(norm))));
    }
    // None is missing.
    let expected = SafeTensors::deserialize(&checkpoint.expected).unwrap();
    let count = expected.names().iter().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(all.len(), count);
    all
}

/// Shape and bytes of a tensor of a safetensors file.
fn view<'a>(file: &'a [u8], name: &str) -> Option<(Vec<usize>, &'a [u8])> {
    let view = SafeTensors::deserialize(file).unwrap().tensor(name).ok()?;
    Some((view.shape().to_vec(), view.data()))
}

/// Shape and elements of a tensor in bf16 or f32.
fn floats(file: &[u8], name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
    let (shape, bytes) = view(file, name)?;
    let elements = shape.iter().product::<usize>();
    let values = if bytes.len() == 2 * elements {
        bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
    } else {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    Some((shape, values))
}
