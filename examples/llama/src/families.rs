//! The families of models, each a description: what `config.json` leaves out, and what it never says.

/// What tells a family from another beside the settings of its `config.json`.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Settings where `config.json` has none, in JSON: those of the family's configuration class in transformers, if they differ from
    /// [`COMMON`].
    pub defaults: &'static str,
    /// Which layers see a window of `sliding_window` keys.
    pub windows: Windows,
    /// Whether `attention_bias` is meant for the output layer as well.
    pub output_bias: bool,
    /// Whether each head's queries and keys are normalized.
    pub qk_norm: bool,
    /// Whether each head has a sink.
    pub sinks: bool,
    /// Whether the outputs of attention and MLP are normalized.
    pub sandwich: bool,
    /// Whether embedded tokens are multiplied by `√hidden_size`.
    pub embedding_scale: bool,
    /// What weights of norms lack.
    pub norm_offset: f32,
}

/// Which layers of a model see a window of keys only, counted from 0. `layer_types` replaces `Pattern` and `Late`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// No layer.
    Never,
    /// Every layer.
    Every,
    /// All but the last one of each `sliding_window_pattern` layers.
    Pattern,
    /// With `use_sliding_window`, layers from `max_window_layers` on.
    Late,
}

/// Settings of all families where neither `config.json` nor the family has any.
pub const COMMON: &str = r#"{
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "attention_bias": false,
    "mlp_bias": false, "use_sliding_window": false, "max_window_layers": 28, "sliding_window_pattern": 2
}"#;

/// Llama 2 and 3, of which the others are variations.
const LLAMA: Family = Family {
    model_type: "llama",
    defaults: r#"{"max_position_embeddings": 2048}"#,
    windows: Windows::Never,
    output_bias: true,
    qk_norm: false,
    sinks: false,
    sandwich: false,
    embedding_scale: false,
    norm_offset: 0.0,
};

/// Gemma 2.
const GEMMA2: Family = Family {
    model_type: "gemma2",
    defaults: r#"{
        "tie_word_embeddings": true, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192
    }"#,
    windows: Windows::Pattern,
    sandwich: true,
    embedding_scale: true,
    norm_offset: 1.0,
    ..LLAMA
};

/// All families, by `model_type`.
pub const FAMILIES: [Family; 7] = [
    LLAMA,
    Family {
        model_type: "mistral",
        defaults: r#"{"sliding_window": 4096, "max_position_embeddings": 131072}"#,
        windows: Windows::Every,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        defaults: r#"{"attention_bias": true, "sliding_window": 4096, "max_position_embeddings": 32768}"#,
        windows: Windows::Late,
        output_bias: false,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        defaults: r#"{"head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768}"#,
        windows: Windows::Late,
        qk_norm: true,
        ..LLAMA
    },
    GEMMA2,
    Family {
        model_type: "gemma3_text",
        defaults: r#"{
            "tie_word_embeddings": true, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
            "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "max_position_embeddings": 131072
        }"#,
        qk_norm: true,
        ..GEMMA2
    },
    Family {
        model_type: "gpt_oss",
        defaults: r#"{
            "attention_bias": true, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "num_local_experts": 128, "max_position_embeddings": 131072, "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                "original_max_position_embeddings": 4096
            }
        }"#,
        windows: Windows::Pattern,
        sinks: true,
        ..LLAMA
    },
];
