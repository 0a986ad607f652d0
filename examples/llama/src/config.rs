//! `config.json` of a checkpoint: what it means for a decoder.

use crate::error::Error;
use crate::families::{COMMON, FAMILIES, Family, Windows};
use burn::nn::RmsNormConfig;
use burn::nn::norm::NormalizationConfig;
use burn_flash_attention::{
    FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpActivation, MlpConfig,
    RotaryEmbeddingConfig, RotaryScaling,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// A model as its `config.json` describes it.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The family of the model.
    pub family: &'static Family,
    /// The decoder.
    pub decoder: FlashDecoderConfig,
    /// Tokens that end a text, if `config.json` names any.
    pub eos: Vec<u32>,
}

/// A token or several, as `eos_token_id` is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Tokens {
    One(u32),
    Several(Vec<u32>),
}

/// The settings of `config.json`, over the defaults of transformers.
#[derive(Deserialize)]
struct Settings {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    hidden_act: String,
    hidden_activation: Option<String>,
    tie_word_embeddings: bool,
    attention_bias: bool,
    mlp_bias: bool,
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<Rope>,
    rope_theta: f64,
    rope_local_base_freq: Option<f64>,
    partial_rotary_factor: Option<f64>,
    sliding_window: Option<usize>,
    use_sliding_window: bool,
    max_window_layers: usize,
    sliding_window_pattern: usize,
    layer_types: Option<Vec<String>>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    use_bidirectional_attention: Option<bool>,
    eos_token_id: Option<Tokens>,
}

/// `rope_parameters`: of all layers, or of each kind of layers.
#[derive(Deserialize)]
struct RopeParameters {
    full_attention: Option<Rope>,
    sliding_attention: Option<Rope>,
    #[serde(flatten)]
    of_all: Rope,
}

/// Frequencies of rotary embedding. Older files say `type` for `rope_type`; some say both.
#[derive(Clone, Default, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    r#type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    partial_rotary_factor: Option<f64>,
}

impl ModelConfig {
    /// Reads a `config.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] and [`Error::Damaged`]; [`Error::Unsupported`], which names the setting and its value, for an unknown `model_type`,
    /// `rope_type`, activation or kind of layers, for quantized weights, and for a mixture of experts.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let kind = "configuration of a model";
        let text = fs::read(path).map_err(Error::io(path))?;
        let given: Map<String, Value> = serde_json::from_slice(&text).map_err(Error::damaged(path, kind))?;
        let unsupported = |name, value: &Value, why: String| Error::Unsupported {
            path: path.to_path_buf(),
            name,
            value: value.to_string(),
            why,
        };
        let model_type = given.get("model_type").unwrap_or(&Value::Null);
        let name = model_type.as_str().unwrap_or_default();
        let experts = "mixtures of experts are not";
        let Some(family) = FAMILIES.iter().find(|family| family.model_type == name) else {
            let known: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
            let mixture = name == "mixtral" || name.ends_with("_moe");
            let why = if mixture { experts.to_string() } else { format!("it must be one of {}", known.join(", ")) };
            return Err(unsupported("model_type", model_type, why));
        };
        let mut all: Map<String, Value> = serde_json::from_str(COMMON).expect("constants are JSON");
        let of_family: Map<String, Value> = serde_json::from_str(family.defaults).expect("constants are JSON");
        all.extend(of_family);
        all.extend(given);
        for name in ["num_local_experts", "num_experts"] {
            if let Some(count) = all.get(name).filter(|count| count.as_u64().is_some_and(|count| count > 0)) {
                return Err(unsupported(name, count, experts.to_string()));
            }
        }
        if let Some(quantization) = all.get("quantization_config").filter(|value| !value.is_null()) {
            let why = "weights must be f32, f16 or bf16".to_string();
            return Err(unsupported("quantization_config", &quantization["quant_method"], why));
        }
        let settings = serde_json::from_value(Value::Object(all)).map_err(Error::damaged(path, kind))?;
        Reader { family, settings, path: path.to_path_buf() }.model()
    }
}

/// Makes a decoder of settings.
struct Reader {
    family: &'static Family,
    settings: Settings,
    path: PathBuf,
}

impl Reader {
    fn unsupported(&self, name: &'static str, value: impl ToString, why: &str) -> Error {
        Error::Unsupported { path: self.path.clone(), name, value: value.to_string(), why: why.to_string() }
    }

    fn missing(&self, name: &str) -> Error {
        let problem = format!("missing field `{name}` of the rotary embedding");
        Error::damaged(&self.path, "configuration of a model")(problem)
    }

    fn model(self) -> Result<ModelConfig, Error> {
        let Reader { family, settings, .. } = &self;
        if settings.use_bidirectional_attention == Some(true) {
            return Err(self.unsupported("use_bidirectional_attention", "true", "a decoder is causal"));
        }
        let layers = self.windowed()?.into_iter().map(|windowed| self.layer(windowed)).collect::<Result<_, _>>()?;
        let scale = family.embedding_scale.then(|| (settings.hidden_size as f32).sqrt());
        let decoder = FlashDecoderConfig::new(settings.vocab_size, layers)
            .with_tied_head(settings.tie_word_embeddings)
            .with_embedding_scale(scale)
            .with_logit_softcap(settings.final_logit_softcapping);
        let eos = settings.eos_token_id.clone().map_or(Vec::new(), Tokens::into_vec);
        Ok(ModelConfig { family, decoder, eos })
    }

    /// Whether each layer sees a window only.
    fn windowed(&self) -> Result<Vec<bool>, Error> {
        let settings = &self.settings;
        let count = settings.num_hidden_layers;
        let by_rule: Vec<_> = match self.family.windows {
            Windows::Never => return Ok(vec![false; count]),
            Windows::Every => return Ok(vec![true; count]),
            Windows::Late if !settings.use_sliding_window => return Ok(vec![false; count]),
            Windows::Late => (0..count).map(|nth| nth >= settings.max_window_layers).collect(),
            Windows::Pattern => {
                let pattern = settings.sliding_window_pattern;
                (0..count).map(|nth| !(nth + 1).is_multiple_of(pattern)).collect()
            }
        };
        let Some(kinds) = &settings.layer_types else { return Ok(by_rule) };
        if kinds.len() != count {
            let why = format!("num_hidden_layers is {count}");
            return Err(self.unsupported("layer_types", format!("{} kinds", kinds.len()), &why));
        }
        let by_name = |kind: &String| match kind.as_str() {
            "full_attention" => Ok(false),
            "sliding_attention" => Ok(true),
            other => Err(self.unsupported("layer_types", other, "kinds are full_attention and sliding_attention")),
        };
        kinds.iter().map(by_name).collect()
    }

    fn layer(&self, windowed: bool) -> Result<FlashDecoderLayerConfig, Error> {
        let Reader { family, settings, .. } = self;
        let window = match settings.sliding_window.filter(|_| windowed) {
            Some(0) => return Err(self.unsupported("sliding_window", 0, "a query sees at least itself")),
            window => window.map(|window| window - 1),
        };
        let epsilon = settings.rms_norm_eps;
        let attention = FlashSelfAttentionConfig::new(settings.hidden_size, settings.num_attention_heads)
            .with_num_heads_kv(settings.num_key_value_heads)
            .with_head_dim(settings.head_dim)
            .with_qkv_bias(settings.attention_bias)
            .with_output_bias(settings.attention_bias && family.output_bias)
            .with_rotary(Some(self.rotary(windowed)?))
            .with_qk_norm(family.qk_norm.then_some(epsilon))
            .with_sinks(family.sinks)
            .with_softcap(settings.attn_logit_softcapping)
            .with_softmax_scale(settings.query_pre_attn_scalar.map(|scalar| scalar.powf(-0.5) as f32))
            .with_window_left(window);
        let mlp =
            MlpConfig::new(settings.intermediate_size).with_activation(self.activation()?).with_bias(settings.mlp_bias);
        let norm = NormalizationConfig::Rms(RmsNormConfig::new(0).with_epsilon(epsilon));
        Ok(FlashDecoderLayerConfig::new(attention, mlp).with_norm(norm).with_sandwich(family.sandwich))
    }

    fn activation(&self) -> Result<MlpActivation, Error> {
        match self.settings.hidden_activation.as_ref().unwrap_or(&self.settings.hidden_act).as_str() {
            "silu" | "swish" => Ok(MlpActivation::Silu),
            "gelu" => Ok(MlpActivation::Gelu),
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(MlpActivation::GeluApproximate),
            "relu" => Ok(MlpActivation::Relu),
            other => Err(self.unsupported("hidden_act", other, "it must be silu, gelu, gelu_pytorch_tanh or relu")),
        }
    }

    /// Rotary embedding of layers with or without a window.
    fn rotary(&self, windowed: bool) -> Result<RotaryEmbeddingConfig, Error> {
        let settings = &self.settings;
        let rope = match (&settings.rope_parameters, &settings.rope_scaling) {
            (Some(RopeParameters { full_attention: None, sliding_attention: None, of_all }), _) => of_all.clone(),
            (Some(RopeParameters { full_attention, sliding_attention, .. }), _) => {
                let (kind, own) = match windowed {
                    true => ("sliding_attention", sliding_attention),
                    false => ("full_attention", full_attention),
                };
                own.clone().ok_or_else(|| self.missing(kind))?
            }
            // The scaling of Gemma 3 is that of its layers without windows.
            (None, _) if windowed && settings.rope_local_base_freq.is_some() => {
                Rope { rope_theta: settings.rope_local_base_freq, ..Rope::default() }
            }
            (None, scaling) => scaling.clone().unwrap_or_default(),
        };
        if let Some(part) = rope.partial_rotary_factor.or(settings.partial_rotary_factor).filter(|part| *part != 1.0) {
            return Err(self.unsupported("partial_rotary_factor", part, "these families rotate whole heads"));
        }
        let base = rope.rope_theta.unwrap_or(settings.rope_theta);
        let scaling = self.scaling(&rope)?;
        Ok(RotaryEmbeddingConfig::new(settings.max_position_embeddings).with_base(base).with_scaling(scaling))
    }

    fn scaling(&self, rope: &Rope) -> Result<RotaryScaling, Error> {
        let needed = |name: &str, value: Option<f64>| value.ok_or_else(|| self.missing(name));
        let factor = || needed("factor", rope.factor);
        let original = rope.original_max_position_embeddings.unwrap_or(self.settings.max_position_embeddings);
        match rope.rope_type.as_deref().or(rope.r#type.as_deref()).unwrap_or("default") {
            "default" => Ok(RotaryScaling::None),
            "linear" => Ok(RotaryScaling::Linear { factor: factor()? }),
            "llama3" => Ok(RotaryScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: needed("low_freq_factor", rope.low_freq_factor)?,
                high_freq_factor: needed("high_freq_factor", rope.high_freq_factor)?,
                original_max_position_embeddings: original,
            }),
            "yarn" => {
                let factor = factor()?;
                let mscale = |mscale: f64| 0.1 * mscale * factor.max(1.0).ln() + 1.0;
                let ratio = rope.mscale.zip(rope.mscale_all_dim).map(|(one, all)| mscale(one) / mscale(all));
                Ok(RotaryScaling::Yarn {
                    factor,
                    beta_fast: rope.beta_fast.unwrap_or(32.0),
                    beta_slow: rope.beta_slow.unwrap_or(1.0),
                    original_max_position_embeddings: original,
                    attention_factor: rope.attention_factor.or(ratio),
                    truncate: rope.truncate.unwrap_or(true),
                })
            }
            other => Err(self.unsupported("rope_type", other, "it must be default, linear, llama3 or yarn")),
        }
    }
}

impl Tokens {
    /// The tokens as a list.
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Tokens::One(token) => vec![token],
            Tokens::Several(tokens) => tokens,
        }
    }
}
