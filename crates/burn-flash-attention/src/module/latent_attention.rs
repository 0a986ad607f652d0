//! Latent attention (MLA) of DeepSeek's models.

use super::rotary::{RotaryEmbedding, RotaryEmbeddingConfig};
use super::self_attention::FlashSelfAttentionInput;
use super::settings::with_settings;
use super::{check_not_0, check_number, check_options, check_rate, effective, heads, joined, unwrapped};
use crate::api::try_flash_attention;
use crate::checks::agree;
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashLatentAttention`].
///
/// ```
/// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig, RotaryLayout};
///
/// // DeepSeek-V3.
/// let rotary = RotaryEmbeddingConfig::new(4096).with_layout(RotaryLayout::Interleaved);
/// let config = FlashLatentAttentionConfig::new(7168, 128, rotary).with_q_lora_rank(Some(1536));
/// assert_eq!((config.kv_lora_rank, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim), (512, 192, 128));
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<FlashLatentAttentionConfig>(&text)?.q_lora_rank, Some(1536));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashLatentAttentionConfig {
    /// Size of each input and output vector.
    pub d_model: usize,
    /// Number of heads.
    pub num_heads: usize,
    /// Rotary embedding of `qk_rope_head_dim` columns of queries and keys.
    pub rotary: RotaryEmbeddingConfig,
    /// Size of the latent vector of queries. `None`: queries are projected from the input. Default: none
    #[config(default = "None")]
    pub q_lora_rank: Option<usize>,
    /// Size of the latent vector of keys and values. Default: 512
    #[config(default = 512)]
    pub kv_lora_rank: usize,
    /// Columns of a head's queries and keys without positions. Default: 128
    #[config(default = 128)]
    pub qk_nope_head_dim: usize,
    /// Columns of a head's queries and keys with rotary embedding. Keys have one for all heads. Default: 64
    #[config(default = 64)]
    pub qk_rope_head_dim: usize,
    /// Size of a head's values. Default: 128
    #[config(default = 128)]
    pub v_head_dim: usize,
    /// Factor on `q·kᵀ`. Default: `(qk_nope_head_dim + qk_rope_head_dim)^−½`
    #[config(default = "None")]
    pub softmax_scale: Option<f32>,
    /// Epsilon of the norms of latent vectors. Default: 1e-6
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
    /// Dropout rate of attention weights in training. Default: 0
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Initializer of the parameters.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
}

/// Causal multi-head latent attention (MLA; DeepSeek-V2, [arXiv:2405.04434](https://arxiv.org/abs/2405.04434), section 2.1, equations 9 to 19) in
/// its form for training: keys and values of all heads are computed from a latent vector of each position, and attention has queries and keys of
/// 192 columns and values of 128.
///
/// ```text
/// c = norm(W_DKV x)      k = [W_UK c, rotated W_KR x]      v = W_UV c
/// d = norm(W_DQ x)       q = [W_UQ d, rotated W_QR d]      out = W_O attention(q, k, v)
/// ```
///
/// Parameters have the shapes of DeepSeek's checkpoints, transposed as Burn's are: `query_down`, `query_norm` and `query_up` are `q_a_proj`,
/// `q_a_layernorm` and `q_b_proj`, or `query_up` alone is `q_proj`; `latent`, `latent_norm` and `latent_up` are `kv_a_proj_with_mqa`,
/// `kv_a_layernorm` and `kv_b_proj`.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig};
///
/// let device = Device::flex();
/// let config = FlashLatentAttentionConfig::new(32, 4, RotaryEmbeddingConfig::new(64))
///     .with_kv_lora_rank(16)
///     .with_qk_nope_head_dim(12)
///     .with_qk_rope_head_dim(4)
///     .with_v_head_dim(8);
/// let attention = config.init(&device);
/// let x = Tensor::<3>::random([2, 10, 32], Distribution::Default, &device);
/// assert_eq!(attention.forward(x).dims(), [2, 10, 32]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct FlashLatentAttention {
    /// `d_model` to `q_lora_rank`.
    pub query_down: Option<Linear>,
    /// Norm of the latent vector of queries.
    pub query_norm: Option<RmsNorm>,
    /// `q_lora_rank`, or `d_model`, to `num_heads · (qk_nope_head_dim + qk_rope_head_dim)`.
    pub query_up: Linear,
    /// `d_model` to `kv_lora_rank + qk_rope_head_dim`: the latent vector of keys and values, and the rotated columns of keys.
    pub latent: Linear,
    /// Norm of the latent vector of keys and values.
    pub latent_norm: RmsNorm,
    /// `kv_lora_rank` to `num_heads · (qk_nope_head_dim + v_head_dim)`.
    pub latent_up: Linear,
    /// `num_heads · v_head_dim` to `d_model`.
    pub output: Linear,
    /// Rotary embedding of the last columns of queries and keys.
    pub rotary: RotaryEmbedding,
    /// Dropout of attention weights in training.
    pub dropout: Dropout,
    /// Number of heads.
    pub num_heads: usize,
    /// Columns of a head's queries and keys without positions.
    pub qk_nope_head_dim: usize,
    /// Columns of a head's queries and keys with rotary embedding.
    pub qk_rope_head_dim: usize,
    /// Factor on `q·kᵀ`.
    #[module(skip)]
    pub softmax_scale: Option<f32>,
}

impl FlashLatentAttentionConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig};
    ///
    /// let config = FlashLatentAttentionConfig::new(32, 2, RotaryEmbeddingConfig::new(64));
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).latent.weight.dims(), [32, 512 + 64]);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashLatentAttention {
        unwrapped(self.try_init(device))
    }

    /// [`init`](Self::init) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the setting and its value: sizes of 0, rates and numbers out of range, and those of
    /// [`RotaryEmbeddingConfig::try_init`].
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig};
    ///
    /// let config = FlashLatentAttentionConfig::new(32, 2, RotaryEmbeddingConfig::new(64)).with_kv_lora_rank(0);
    /// let error = config.try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().starts_with("kv_lora_rank = 0 is not supported"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashLatentAttention, AttentionError> {
        check_not_0([
            ("d_model", self.d_model),
            ("num_heads", self.num_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ])?;
        check_rate("dropout", self.dropout)?;
        for (option, value) in
            [("softmax_scale", self.softmax_scale.map(f64::from)), ("norm_epsilon", Some(self.norm_epsilon))]
        {
            value.map_or(Ok(()), |value| check_number(option, value, value > 0.0, "finite and above 0"))?;
        }
        let linear = |d_input, d_output| {
            let config = LinearConfig::new(d_input, d_output).with_bias(false);
            config.with_initializer(self.initializer.clone()).init(device)
        };
        let norm = |size| RmsNormConfig::new(size).with_epsilon(self.norm_epsilon).init(device);
        let qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim;
        Ok(FlashLatentAttention {
            query_down: self.q_lora_rank.map(|rank| linear(self.d_model, rank)),
            query_norm: self.q_lora_rank.map(norm),
            query_up: linear(self.q_lora_rank.unwrap_or(self.d_model), self.num_heads * qk_head_dim),
            latent: linear(self.d_model, self.kv_lora_rank + self.qk_rope_head_dim),
            latent_norm: norm(self.kv_lora_rank),
            latent_up: linear(self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)),
            output: linear(self.num_heads * self.v_head_dim, self.d_model),
            rotary: self.rotary.try_init(self.qk_rope_head_dim, device)?,
            dropout: DropoutConfig::new(self.dropout).init(),
            num_heads: self.num_heads,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            softmax_scale: self.softmax_scale,
        })
    }
}

impl FlashLatentAttention {
    /// Size of each input and output vector.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig};
    ///
    /// let config = FlashLatentAttentionConfig::new(32, 2, RotaryEmbeddingConfig::new(64));
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).d_model(), 32);
    /// # }
    /// ```
    pub fn d_model(&self) -> usize {
        self.latent.weight.dims()[0]
    }

    /// Computes attention within `[batch, seq, d_model]`. Returns the same shape. Positions are those of
    /// [`FlashSelfAttention::forward`](crate::FlashSelfAttention::forward).
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig};
    ///
    /// let attention = FlashLatentAttentionConfig::new(8, 2, RotaryEmbeddingConfig::new(64)).init(&Device::flex());
    /// assert_eq!(attention.forward(Tensor::ones([1, 5, 8], &Device::flex())).dims(), [1, 5, 8]);
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
    /// use burn_flash_attention::{FlashLatentAttentionConfig, RotaryEmbeddingConfig};
    ///
    /// let attention = FlashLatentAttentionConfig::new(8, 2, RotaryEmbeddingConfig::new(4)).init(&Device::flex());
    /// let error = attention.try_forward(Tensor::ones([1, 5, 8], &Device::flex())).unwrap_err();
    /// assert_eq!(error.to_string(), "positions is 5; sequences of at most 4 are supported");
    /// # }
    /// ```
    pub fn try_forward(&self, input: impl Into<FlashSelfAttentionInput>) -> Result<Tensor<3>, AttentionError> {
        let FlashSelfAttentionInput { x, angles, options } = input.into();
        let [batch, seq, _] = x.dims();
        agree("x", &x.dims(), (2, "d_model"), ("the module", self.d_model()))?;
        let settings = FlashAttentionOptions { causal: true, softmax_scale: self.softmax_scale, ..Default::default() };
        let options = with_settings(options, &settings)?;
        check_options(&options, [batch, self.num_heads, seq, seq], false, &self.dropout)?;
        let angles = angles.map_or_else(|| self.rotary.angles(0, seq), Ok)?;
        let (heads_of, nope, rope) = (self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim);

        let latent = match (&self.query_down, &self.query_norm) {
            (Some(down), Some(norm)) => norm.forward(down.forward(x.clone())),
            _ => x.clone(),
        };
        let q = heads(latent, &self.query_up, heads_of);
        let rotated = self.rotary.try_apply(q.clone().narrow(3, nope, rope), &angles)?;
        let q = Tensor::cat(vec![q.narrow(3, 0, nope), rotated], 3);

        let latent = self.latent.forward(x);
        let rank = latent.dims()[2] - rope;
        let rotated = latent.clone().narrow(2, rank, rope).reshape([batch, 1, seq, rope]);
        let rotated = self.rotary.try_apply(rotated, &angles)?.expand([batch, heads_of, seq, rope]);
        let kv = heads(self.latent_norm.forward(latent.narrow(2, 0, rank)), &self.latent_up, heads_of);
        let v_head_dim = kv.dims()[3] - nope;
        let k = Tensor::cat(vec![kv.clone().narrow(3, 0, nope), rotated], 3);
        let v = kv.narrow(3, nope, v_head_dim);

        let options = effective(options, &q, false, &self.dropout);
        Ok(joined(try_flash_attention(q, k, v, &options)?, &self.output))
    }
}
