//! Self-attention of models since Llama.

mod input;

pub use input::FlashSelfAttentionInput;

use super::rotary::{RotaryAngles, RotaryEmbedding, RotaryEmbeddingConfig};
use super::settings::with_settings;
use super::{check_not_0, check_number, check_options, check_rate, effective, heads, heads_kv, joined, unwrapped};
use crate::api::try_flash_attention;
use crate::checks::agree;
use crate::kv_cache::{AttentionCache, try_flash_attention_with_kvcache};
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashSelfAttention`].
///
/// ```
/// use burn_flash_attention::{FlashSelfAttentionConfig, RotaryEmbeddingConfig};
///
/// // A layer of Qwen3-8B: heads of another dimension than d_model / 32, norms of queries and keys.
/// let config = FlashSelfAttentionConfig::new(4096, 32)
///     .with_num_heads_kv(Some(8))
///     .with_head_dim(Some(128))
///     .with_qk_norm(Some(1e-6))
///     .with_rotary(Some(RotaryEmbeddingConfig::new(40960).with_base(1e6)));
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<FlashSelfAttentionConfig>(&text)?, config);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Config, Debug, PartialEq)]
#[non_exhaustive]
pub struct FlashSelfAttentionConfig {
    /// Size of each input and output vector.
    pub d_model: usize,
    /// Number of query heads.
    pub num_heads_q: usize,
    /// Number of key/value heads; divides `num_heads_q`. Default: `num_heads_q`
    #[config(default = "None")]
    pub num_heads_kv: Option<usize>,
    /// Size of a head's vectors. Default: `d_model / num_heads_q`
    #[config(default = "None")]
    pub head_dim: Option<usize>,
    /// Whether the layers of queries, keys and values have biases (Qwen2). Default: false
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Whether the output layer has a bias (gpt-oss). Default: false
    #[config(default = false)]
    pub output_bias: bool,
    /// Rotary embedding of queries and keys. Default: none
    #[config(default = "None")]
    pub rotary: Option<RotaryEmbeddingConfig>,
    /// Epsilon of an [`RmsNorm`] of each head's queries and keys, before rotation (Qwen3, Gemma 3; arXiv:2010.04245). Default: none
    #[config(default = "None")]
    pub qk_norm: Option<f64>,
    /// Hides keys that come after the query. Default: true
    #[config(default = true)]
    pub causal: bool,
    /// Keys seen before the query's own position (Mistral: window − 1). Default: all
    #[config(default = "None")]
    pub window_left: Option<usize>,
    /// Scores become `softcap · tanh(score / softcap)` (Gemma 2). Default: none
    #[config(default = "None")]
    pub softcap: Option<f32>,
    /// Factor on `q·kᵀ`. Default: `1/√head_dim`
    #[config(default = "None")]
    pub softmax_scale: Option<f32>,
    /// Whether each head has a learned sink (gpt-oss). Default: false
    #[config(default = false)]
    pub sinks: bool,
    /// Dropout rate of attention weights in training. Default: 0
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Initializer of the layers.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
}

/// Causal self-attention with rotary embedding, grouped heads and what else models since Llama have between projections and attention.
///
/// ```text
/// q, k, v = x Wq, x Wk, x Wv        split into heads
/// q, k = rotary(norm(q)), rotary(norm(k))
/// out = attention(q, k, v) Wo
/// ```
///
/// A block of Llama, with burn-nn's norm and gated feed-forward network:
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashSelfAttention, FlashSelfAttentionConfig, RotaryEmbeddingConfig};
///
/// #[derive(Module, Debug)]
/// struct Block {
///     attention_norm: RmsNorm,
///     attention: FlashSelfAttention,
///     mlp_norm: RmsNorm,
///     gate_up: SwiGlu,
///     down: Linear,
/// }
///
/// impl Block {
///     fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         let x = x.clone() + self.attention.forward(self.attention_norm.forward(x));
///         let gated = self.gate_up.forward(self.mlp_norm.forward(x.clone()));
///         x + self.down.forward(gated)
///     }
/// }
///
/// let device = Device::flex();
/// // 4 query heads share 2 key/value heads.
/// let attention = FlashSelfAttentionConfig::new(64, 4)
///     .with_num_heads_kv(Some(2))
///     .with_rotary(Some(RotaryEmbeddingConfig::new(128).with_base(500_000.0)));
/// let block = Block {
///     attention_norm: RmsNormConfig::new(64).init(&device),
///     attention: attention.init(&device),
///     mlp_norm: RmsNormConfig::new(64).init(&device),
///     gate_up: SwiGluConfig::new(64, 96).init(&device),
///     down: LinearConfig::new(96, 64).with_bias(false).init(&device),
/// };
/// let x = Tensor::<3>::random([2, 10, 64], Distribution::Default, &device);
/// assert_eq!(block.forward(x).dims(), [2, 10, 64]);
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct FlashSelfAttention {
    /// `d_model` to `num_heads_q · head_dim`.
    pub query: Linear,
    /// `d_model` to `num_heads_kv · head_dim`.
    pub key: Linear,
    /// `d_model` to `num_heads_kv · head_dim`.
    pub value: Linear,
    /// `num_heads_q · head_dim` to `d_model`.
    pub output: Linear,
    /// Norm of each head's queries.
    pub query_norm: Option<RmsNorm>,
    /// Norm of each head's keys.
    pub key_norm: Option<RmsNorm>,
    /// `[num_heads_q]`: one more logit of each head, without a value.
    pub sinks: Option<Param<Tensor<1>>>,
    /// Rotary embedding of queries and keys.
    pub rotary: Option<RotaryEmbedding>,
    /// Dropout of attention weights in training.
    pub dropout: Dropout,
    /// Number of query heads.
    pub num_heads_q: usize,
    /// Number of key/value heads.
    pub num_heads_kv: usize,
    /// Whether keys that come after the query are hidden.
    pub causal: bool,
    /// Keys seen before the query's own position.
    #[module(skip)]
    pub window_left: Option<usize>,
    /// Cap of scores.
    #[module(skip)]
    pub softcap: Option<f32>,
    /// Factor on `q·kᵀ`.
    #[module(skip)]
    pub softmax_scale: Option<f32>,
}

impl ModuleDisplay for FlashSelfAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model())
            .add("num_heads_q", &self.num_heads_q)
            .add("num_heads_kv", &self.num_heads_kv)
            .add("head_dim", &self.head_dim())
            .add("causal", &self.causal)
            .optional()
    }
}

impl FlashSelfAttentionConfig {
    /// Creates a module with new parameters. Sinks are 0 at first.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashSelfAttentionConfig::new(64, 4).with_head_dim(Some(32));
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).query.weight.dims(), [64, 128]);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashSelfAttention {
        unwrapped(self.try_init(device))
    }

    /// [`init`](Self::init) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the setting and its value: heads that do not divide, rates and numbers out of range, and those of
    /// [`RotaryEmbeddingConfig::try_init`].
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashSelfAttentionConfig::new(64, 6);
    /// let error = config.try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().starts_with("d_model = 64 is not supported"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashSelfAttention, AttentionError> {
        let (num_heads_q, num_heads_kv) = (self.num_heads_q, heads_kv(self.num_heads_q, self.num_heads_kv)?);
        check_not_0([("num_heads_q", num_heads_q), ("head_dim", self.head_dim.unwrap_or(1))])?;
        if self.head_dim.is_none() && !self.d_model.is_multiple_of(num_heads_q) {
            return Err(AttentionError::Unsupported {
                option: "d_model",
                value: self.d_model.to_string(),
                why: "it must be a multiple of num_heads_q, or head_dim be set",
            });
        }
        check_rate("dropout", self.dropout)?;
        for (option, value) in [
            ("qk_norm", self.qk_norm),
            ("softcap", self.softcap.map(f64::from)),
            ("softmax_scale", self.softmax_scale.map(f64::from)),
        ] {
            value.map_or(Ok(()), |value| check_number(option, value, value > 0.0, "finite and above 0"))?;
        }
        let head_dim = self.head_dim_of();
        let linear = |d_input, d_output, bias| {
            LinearConfig::new(d_input, d_output).with_initializer(self.initializer.clone()).with_bias(bias).init(device)
        };
        let norm = || self.qk_norm.map(|epsilon| RmsNormConfig::new(head_dim).with_epsilon(epsilon).init(device));
        Ok(FlashSelfAttention {
            query: linear(self.d_model, num_heads_q * head_dim, self.qkv_bias),
            key: linear(self.d_model, num_heads_kv * head_dim, self.qkv_bias),
            value: linear(self.d_model, num_heads_kv * head_dim, self.qkv_bias),
            output: linear(num_heads_q * head_dim, self.d_model, self.output_bias),
            query_norm: norm(),
            key_norm: norm(),
            sinks: self.sinks.then(|| Initializer::Zeros.init([num_heads_q], device)),
            rotary: self.rotary.as_ref().map(|rotary| rotary.try_init(head_dim, device)).transpose()?,
            dropout: DropoutConfig::new(self.dropout).init(),
            num_heads_q,
            num_heads_kv,
            causal: self.causal,
            window_left: self.window_left,
            softcap: self.softcap,
            softmax_scale: self.softmax_scale,
        })
    }

    /// Size of a head's vectors, set or by default.
    pub(super) fn head_dim_of(&self) -> usize {
        self.head_dim.unwrap_or_else(|| self.d_model / self.num_heads_q.max(1))
    }
}

impl FlashSelfAttention {
    /// Size of each input and output vector.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let attention = burn_flash_attention::FlashSelfAttentionConfig::new(64, 4).init(&burn::tensor::Device::flex());
    /// assert_eq!(attention.d_model(), 64);
    /// # }
    /// ```
    pub fn d_model(&self) -> usize {
        self.query.weight.dims()[0]
    }

    /// Size of a head's vectors.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let attention = burn_flash_attention::FlashSelfAttentionConfig::new(64, 4).init(&burn::tensor::Device::flex());
    /// assert_eq!(attention.head_dim(), 16);
    /// # }
    /// ```
    pub fn head_dim(&self) -> usize {
        self.query.weight.dims()[1] / self.num_heads_q
    }

    /// Computes attention within `[batch, seq, d_model]`. Returns the same shape.
    ///
    /// Positions are 0 to `seq − 1` in each batch, unless the input has [angles](FlashSelfAttentionInput::angles). Packed sequences need no
    /// others: scores depend on distances.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::FlashSelfAttentionConfig;
    ///
    /// let attention = FlashSelfAttentionConfig::new(8, 2).with_window_left(Some(4)).init(&Device::flex());
    /// assert_eq!(attention.forward(Tensor::zeros([2, 10, 8], &Device::flex())).dims(), [2, 10, 8]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward(&self, input: impl Into<FlashSelfAttentionInput>) -> Tensor<3> {
        unwrapped(self.try_forward(input))
    }

    /// [`forward`](Self::forward) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value: sizes that differ, positions past the last one of the rotary
    /// embedding, and options that the module sets itself.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashSelfAttentionConfig, RotaryEmbeddingConfig};
    ///
    /// let config = FlashSelfAttentionConfig::new(8, 2).with_rotary(Some(RotaryEmbeddingConfig::new(16)));
    /// let attention = config.init(&Device::flex());
    /// let error = attention.try_forward(Tensor::zeros([1, 17, 8], &Device::flex())).unwrap_err();
    /// assert_eq!(error.to_string(), "positions is 17; sequences of at most 16 are supported");
    /// # }
    /// ```
    pub fn try_forward(&self, input: impl Into<FlashSelfAttentionInput>) -> Result<Tensor<3>, AttentionError> {
        let FlashSelfAttentionInput { x, angles, options } = input.into();
        let [_, seq, _] = x.dims();
        let options = self.configured(&x, options, seq)?;
        let angles = self.angles(angles, |rotary| rotary.angles(0, seq))?;
        let ([q, k, v], options) = self.operands(x, angles, options)?;
        Ok(joined(try_flash_attention(q, k, v, &options)?, &self.output))
    }

    /// Computes attention of new positions, `[batch, new, d_model]`, over all positions so far, to whose cache their keys and values are
    /// appended: a prompt at first, then one position, or several. Returns `[batch, new, d_model]`.
    ///
    /// Positions go on from the length of each sequence in the cache. [`seq_lens_q`](FlashAttentionOptions::seq_lens_q) is the number of new
    /// positions of each sequence, where prompts of different lengths share a batch. Options are those of
    /// [`flash_attention_with_kvcache`](crate::flash_attention_with_kvcache).
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_step`](Self::try_forward_step) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashSelfAttentionConfig, KvCacheConfig, RotaryEmbeddingConfig};
    ///
    /// let device = Device::flex();
    /// let rotary = RotaryEmbeddingConfig::new(64);
    /// let attention = FlashSelfAttentionConfig::new(32, 4).with_num_heads_kv(Some(2)).with_rotary(Some(rotary)).init(&device);
    /// let mut cache = KvCacheConfig::new(1, 2, 8, 64).init(&device);
    /// for new in [5, 1, 1] {
    ///     let x = Tensor::<3>::zeros([1, new, 32], &device);
    ///     assert_eq!(attention.forward_step(x, &mut cache).dims(), [1, new, 32]);
    /// }
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_step(
        &self,
        input: impl Into<FlashSelfAttentionInput>,
        cache: &mut impl AttentionCache,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_step(input, cache))
    }

    /// [`forward_step`](Self::forward_step) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// The errors of [`try_forward`](Self::try_forward) and of
    /// [`try_flash_attention_with_kvcache`](crate::try_flash_attention_with_kvcache): a cache has no gradient, and
    /// [`Module::valid`](burn::module::Module::valid) gives the module without autodiff.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashSelfAttentionConfig, KvCacheConfig};
    ///
    /// let device = Device::flex();
    /// let attention = FlashSelfAttentionConfig::new(32, 4).init(&device);
    /// let mut cache = KvCacheConfig::new(1, 4, 8, 2).init(&device);
    /// let error = attention.try_forward_step(Tensor::zeros([1, 3, 32], &device), &mut cache).unwrap_err();
    /// assert!(error.to_string().starts_with("the cache has room for 2 positions"));
    /// # }
    /// ```
    pub fn try_forward_step(
        &self,
        input: impl Into<FlashSelfAttentionInput>,
        cache: &mut impl AttentionCache,
    ) -> Result<Tensor<3>, AttentionError> {
        let FlashSelfAttentionInput { x, angles, options } = input.into();
        let [_, new, _] = x.dims();
        let options = self.configured(&x, options, cache.max_len() + new)?;
        let angles = self.angles(angles, |rotary| rotary.angles_after(cache, new))?;
        let ([q, k, v], options) = self.operands(x, angles, options)?;
        Ok(joined(try_flash_attention_with_kvcache(q, k, v, cache, &options)?, &self.output))
    }

    /// Angles of the rotary embedding, if there is one: those of the input, or computed ones.
    fn angles(
        &self,
        given: Option<RotaryAngles>,
        computed: impl FnOnce(&RotaryEmbedding) -> Result<RotaryAngles, AttentionError>,
    ) -> Result<Option<RotaryAngles>, AttentionError> {
        match (&self.rotary, given) {
            (None, None) => Ok(None),
            (Some(_), Some(given)) => Ok(Some(given)),
            (Some(rotary), None) => computed(rotary).map(Some),
            (None, Some(_)) => Err(AttentionError::Unsupported {
                option: "angles",
                value: "set".to_string(),
                why: "the module has no rotary embedding",
            }),
        }
    }

    /// Queries, keys and values in heads, and the options of attention with them.
    fn operands(
        &self,
        x: Tensor<3>,
        angles: Option<RotaryAngles>,
        options: FlashAttentionOptions,
    ) -> Result<([Tensor<4>; 3], FlashAttentionOptions), AttentionError> {
        let placed = |linear, heads_of, norm: &Option<RmsNorm>| {
            let x = heads(x.clone(), linear, heads_of);
            let x = norm.as_ref().map_or(x.clone(), |norm| norm.forward(x));
            self.rotary.iter().zip(&angles).try_fold(x, |x, (rotary, angles)| rotary.try_apply(x, angles))
        };
        let q = placed(&self.query, self.num_heads_q, &self.query_norm)?;
        let k = placed(&self.key, self.num_heads_kv, &self.key_norm)?;
        let v = heads(x.clone(), &self.value, self.num_heads_kv);
        let options = effective(options, &q, false, &self.dropout);
        Ok(([q, k, v], options))
    }

    /// Options that the module sets.
    fn settings(&self) -> FlashAttentionOptions {
        FlashAttentionOptions {
            causal: self.causal,
            window_left: self.window_left,
            softcap: self.softcap,
            softmax_scale: self.softmax_scale,
            sinks: self.sinks.as_ref().map(|sinks| sinks.val()),
            ..FlashAttentionOptions::new()
        }
    }

    /// Checks shapes and options before anything runs, and adds the options that the module sets, which the call must leave out.
    fn configured(
        &self,
        x: &Tensor<3>,
        options: FlashAttentionOptions,
        seq_k: usize,
    ) -> Result<FlashAttentionOptions, AttentionError> {
        let [batch, seq, _] = x.dims();
        self.check_width(x)?;
        check_options(&options, [batch, self.num_heads_q, seq, seq_k], false, &self.dropout)?;
        with_settings(options, &self.settings())
    }

    /// Checks the size of the input's vectors.
    pub(super) fn check_width(&self, x: &Tensor<3>) -> Result<(), AttentionError> {
        agree("x", &x.dims(), (2, "d_model"), ("the module", self.d_model()))
    }
}
