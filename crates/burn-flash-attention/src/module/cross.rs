//! Cross-attention between different widths, a replacement for burn-nn's.

use super::cache::MemoryKeysValues;
use super::settings::{check_settings, with_settings};
use super::steps::check_decodes;
use super::{check_not_0, check_options, check_rate, combined, effective, heads, heads_kv, joined, unwrapped};
use crate::api::try_flash_attention;
use crate::checks::agree;
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Score of hidden keys in burn-nn's module. It leaves them a weight of 0 in every element type.
const MIN_FLOAT: f64 = -1.0e4;

/// Configuration of a [`FlashCrossAttention`].
///
/// ```
/// use burn_flash_attention::FlashCrossAttentionConfig;
///
/// // 8 heads over a context of another width, which share 2 heads of keys and values.
/// let config = FlashCrossAttentionConfig::new(512, 384, 8, 2, 64).with_dropout(0.0);
/// assert_eq!(config.d_context, 384);
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashCrossAttentionConfig {
    /// Size of each query vector.
    pub d_model: usize,
    /// Size of each context vector.
    pub d_context: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads; divides `n_heads`.
    pub n_heads_kv: usize,
    /// Size of a head's query and key vectors.
    pub d_head: usize,
    /// Dropout of the attention weights in training. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Score of hidden keys in burn-nn. Here hidden keys always have weight 0, which is equivalent to a score of at most the default;
    /// higher values are refused. Default: -1.0e4
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// Adds 1 to the denominator of the softmax, so that a head may attend to nothing. Default: false
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Options of every call, as a softcap or a scale. They have no tensors. Default: none
    #[config(default = "FlashAttentionOptions::new()")]
    pub options: FlashAttentionOptions,
}

/// Attention of queries to a context of another width, with possibly fewer key/value heads than query heads.
///
/// Parameters have the names and shapes of burn-nn's `CrossAttention`, so that its records load. Differences: key/value heads are not
/// repeated, no attention matrix is formed, and dropout has another random stream. Where a context is hidden entirely, attention gives
/// zeros (burn-nn gives the mean of the hidden values).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::FlashCrossAttentionConfig;
///
/// let attention = FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&Device::flex());
/// let (query, context) = (Tensor::zeros([1, 3, 16], &Device::flex()), Tensor::zeros([1, 5, 12], &Device::flex()));
/// assert_eq!(attention.forward(query, context, None).dims(), [1, 3, 16]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct FlashCrossAttention {
    /// `d_model` to `n_heads · d_head`.
    pub query: Linear,
    /// `d_context` to `n_heads_kv · d_head`.
    pub key: Linear,
    /// `d_context` to `n_heads_kv · d_head`.
    pub value: Linear,
    /// `n_heads · d_head` to `d_model`.
    pub output: Linear,
    /// Dropout of attention weights in training.
    pub dropout: Dropout,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads.
    pub n_heads_kv: usize,
    /// Size of a head's query and key vectors.
    pub d_head: usize,
    /// Whether 1 is added to the denominator of the softmax.
    pub quiet_softmax: bool,
    /// Options of every call.
    #[module(skip)]
    pub options: FlashAttentionOptions,
}

/// Cache of a [`FlashCrossAttention`] for a constant context: its keys and values. Clones share them, since they are never written.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashCrossAttentionCache, FlashCrossAttentionConfig};
///
/// let attention = FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&Device::flex());
/// let context = Tensor::<3>::zeros([1, 5, 12], &Device::flex());
/// let mut cache = FlashCrossAttentionCache::new();
/// for _ in 0..2 {
///     let query = Tensor::zeros([1, 1, 16], &Device::flex());
///     let out = attention.forward_cache(query, context.clone(), None, &mut cache);
///     assert_eq!(out.dims(), [1, 1, 16]);
/// }
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct FlashCrossAttentionCache(MemoryKeysValues);

impl FlashCrossAttentionCache {
    /// An empty cache.
    ///
    /// ```
    /// let cache = burn_flash_attention::FlashCrossAttentionCache::new();
    /// ```
    pub fn new() -> Self {
        Self::default()
    }
}

impl FlashCrossAttentionConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashCrossAttentionConfig::new(16, 12, 4, 2, 8);
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).key.weight.dims(), [12, 16]);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashCrossAttention {
        unwrapped(self.try_init(device))
    }

    /// Creates a module with new parameters, or returns an error: for heads that do not divide, an invalid dropout rate, or a `min_float`
    /// too high to hide keys.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the setting and its value.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).with_min_float(-1.0);
    /// let error = config.try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().contains("min_float"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashCrossAttention, AttentionError> {
        heads_kv(self.n_heads, Some(self.n_heads_kv))?;
        check_not_0([("n_heads", self.n_heads), ("d_head", self.d_head)])?;
        check_rate("dropout", self.dropout)?;
        check_settings("options", &self.options)?;
        if self.min_float.is_nan() || self.min_float > MIN_FLOAT {
            return Err(AttentionError::Unsupported {
                option: "min_float",
                value: self.min_float.to_string(),
                why: "hidden keys have a weight of 0 in this module; it must be -1.0e4 or less",
            });
        }
        let gain = 1.0 / (self.d_head as f64).sqrt();
        let linear = |d_input, d_output| {
            let initializer = Initializer::KaimingUniform { gain, fan_out_only: false };
            LinearConfig::new(d_input, d_output).with_initializer(initializer).init(device)
        };
        Ok(FlashCrossAttention {
            query: linear(self.d_model, self.n_heads * self.d_head),
            key: linear(self.d_context, self.n_heads_kv * self.d_head),
            value: linear(self.d_context, self.n_heads_kv * self.d_head),
            output: linear(self.n_heads * self.d_head, self.d_model),
            dropout: DropoutConfig::new(self.dropout).init(),
            n_heads: self.n_heads,
            n_heads_kv: self.n_heads_kv,
            d_head: self.d_head,
            quiet_softmax: self.quiet_softmax,
            options: self.options.clone(),
        })
    }
}

impl FlashCrossAttention {
    /// Attends from `query [batch, seq_q, d_model]` to `context [batch, seq_k, d_context]`. `mask` is `[batch, seq_k]`; `true` hides a
    /// position of the context. Returns `[batch, seq_q, d_model]`.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Bool, Device, Tensor};
    ///
    /// let device = Device::flex();
    /// let attention = burn_flash_attention::FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&device);
    /// let padding = Tensor::<2, Bool>::from_data([[false, true]], &device);
    /// let out = attention.forward(Tensor::zeros([1, 3, 16], &device), Tensor::zeros([1, 2, 12], &device), Some(padding));
    /// assert_eq!(out.dims(), [1, 3, 16]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward(&self, query: Tensor<3>, context: Tensor<3>, mask: Option<Tensor<2, Bool>>) -> Tensor<3> {
        unwrapped(self.try_forward(query, context, mask))
    }

    /// [`forward`](Self::forward) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let device = Device::flex();
    /// let attention = burn_flash_attention::FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&device);
    /// let wrong = attention.try_forward(Tensor::zeros([1, 3, 16], &device), Tensor::zeros([1, 2, 16], &device), None);
    /// assert!(wrong.unwrap_err().to_string().starts_with("context has d_context 16"));
    /// # }
    /// ```
    pub fn try_forward(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_forward_with(query, context, mask, &FlashAttentionOptions::new(), None)
    }

    /// [`forward`](Self::forward) over the context of the first call with this cache, whose keys and values the cache keeps.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_cache`](Self::try_forward_cache) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashCrossAttentionCache, FlashCrossAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let attention = FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&device);
    /// let (query, context) = (Tensor::zeros([1, 3, 16], &device), Tensor::zeros([1, 5, 12], &device));
    /// let out = attention.forward_cache(query, context, None, &mut FlashCrossAttentionCache::new());
    /// assert_eq!(out.dims(), [1, 3, 16]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_cache(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
        cache: &mut FlashCrossAttentionCache,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_cache(query, context, mask, cache))
    }

    /// [`forward_cache`](Self::forward_cache) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value: the errors of [`try_forward`](Self::try_forward), and a
    /// context whose length differs from the first call's.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashCrossAttentionCache, FlashCrossAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let attention = FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&device);
    /// let (query, context) = (Tensor::<3>::zeros([1, 3, 16], &device), |len| Tensor::zeros([1, len, 12], &device));
    /// let mut cache = FlashCrossAttentionCache::new();
    /// attention.forward_cache(query.clone(), context(5), None, &mut cache);
    /// let error = attention.try_forward_cache(query, context(6), None, &mut cache).unwrap_err();
    /// assert!(error.to_string().starts_with("context has seq_k 6"));
    /// # }
    /// ```
    pub fn try_forward_cache(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
        cache: &mut FlashCrossAttentionCache,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_forward_with(query, context, mask, &FlashAttentionOptions::new(), Some(cache))
    }

    /// [`forward`](Self::forward), or with a cache [`forward_cache`](Self::forward_cache), with options of the call, as a bias or the lengths of
    /// sequences.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_with`](Self::try_forward_with) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, FlashCrossAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let attention = FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).init(&device);
    /// let (query, context) = (Tensor::zeros([2, 3, 16], &device), Tensor::zeros([2, 5, 12], &device));
    /// let lens = Tensor::<1, Int>::from_data([5, 2], &device);
    /// let options = FlashAttentionOptions::new().with_seq_lens_k(lens);
    /// assert_eq!(attention.forward_with(query, context, None, &options, None).dims(), [2, 3, 16]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_with(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
        options: &FlashAttentionOptions,
        cache: Option<&mut FlashCrossAttentionCache>,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_with(query, context, mask, options, cache))
    }

    /// [`forward_with`](Self::forward_with) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value: the errors of [`try_forward_cache`](Self::try_forward_cache),
    /// options that the module sets itself, and with a cache those that count positions of queries, as causality: each call begins at
    /// position 0 of the same context.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, FlashCrossAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let options = FlashAttentionOptions::new().with_softcap(30.0);
    /// let attention = FlashCrossAttentionConfig::new(16, 12, 4, 2, 8).with_options(options.clone()).init(&device);
    /// let (query, context) = (Tensor::zeros([2, 3, 16], &device), Tensor::zeros([2, 5, 12], &device));
    /// let error = attention.try_forward_with(query, context, None, &options, None).unwrap_err();
    /// assert_eq!(error.to_string(), "softcap = 30 is not supported: the module sets it; leave it out of the options");
    /// # }
    /// ```
    pub fn try_forward_with(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
        options: &FlashAttentionOptions,
        cache: Option<&mut FlashCrossAttentionCache>,
    ) -> Result<Tensor<3>, AttentionError> {
        let options = with_settings(options.clone(), &self.options)?;
        let (q, c) = (query.dims(), context.dims());
        agree("query", &q, (2, "d_model"), ("the module", self.query.weight.dims()[0]))?;
        agree("context", &c, (2, "d_context"), ("the module", self.key.weight.dims()[0]))?;
        agree("context", &c, (0, "batch"), ("query", q[0]))?;
        if let Some(mask) = mask.as_ref().map(|mask| mask.dims()) {
            agree("mask", &mask, (0, "batch"), ("query", q[0]))?;
            agree("mask", &mask, (1, "seq_k"), ("context", c[1]))?;
        }
        check_options(&options, [q[0], self.n_heads, q[1], c[1]], self.quiet_softmax, &self.dropout)?;
        if let Some(cache) = &cache {
            check_decodes(&options, true)?;
            cache.0.len().map_or(Ok(()), |len| agree("context", &c, (1, "seq_k"), ("the cache", len)))?;
        }
        let query = heads(query, &self.query, self.n_heads);
        let options = effective(combined(options, mask, None), &query, self.quiet_softmax, &self.dropout);
        let keys_values =
            || (heads(context.clone(), &self.key, self.n_heads_kv), heads(context, &self.value, self.n_heads_kv));
        let attend = |key, value| Ok(joined(try_flash_attention(query, key, value, &options)?, &self.output));
        match cache {
            Some(cache) => cache.0.attend(keys_values, attend),
            None => {
                let (key, value) = keys_values();
                attend(key, value)
            }
        }
    }
}
