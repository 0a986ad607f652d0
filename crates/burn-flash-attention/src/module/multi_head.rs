//! Multi-head attention, a replacement for burn-nn's.

mod decoding;
mod input;

pub use input::{FlashMhaInput, FlashMhaOutput};

use super::settings::{check_settings, with_settings};
use super::{check_options, check_rate, combined, effective, heads, heads_kv, joined, unwrapped};
use crate::api::try_flash_attention;
use crate::checks::agree;
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay};
use burn::nn::attention::MultiHeadAttention;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashMultiHeadAttention`].
///
/// ```
/// use burn_flash_attention::FlashMultiHeadAttentionConfig;
///
/// // 32 heads of q that share 8 heads of k and v.
/// let config = FlashMultiHeadAttentionConfig::new(4096, 32).with_n_kv_heads(Some(8)).with_causal(true);
/// assert_eq!(config.n_heads, 32);
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashMultiHeadAttentionConfig {
    /// Size of each input and output vector.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads; divides `n_heads`. Default: `n_heads`.
    #[config(default = "None")]
    pub n_kv_heads: Option<usize>,
    /// Hides keys that come after the query, with bottom-right alignment. Default: false
    #[config(default = false)]
    pub causal: bool,
    /// Dropout rate of attention weights in training. Default: 0
    #[config(default = 0.0)]
    pub dropout: f64,
    /// Has no effect, as in burn-nn. Default: -1.0e4
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// Adds 1 to the denominator of the softmax, so that a head may attend to nothing. Default: false
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Initializer of the parameters.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Whether the key layer has a bias. Default: true
    #[config(default = true)]
    pub key_bias: bool,
    /// Whether the value layer has a bias. Default: true
    #[config(default = true)]
    pub value_bias: bool,
    /// Whether the query layer has a bias. Default: true
    #[config(default = true)]
    pub query_bias: bool,
    /// Whether the output layer has a bias. Default: true
    #[config(default = true)]
    pub output_bias: bool,
    /// Options of every call, as windows, a softcap or a scale. They have no tensors. Default: none
    #[config(default = "FlashAttentionOptions::new()")]
    pub options: FlashAttentionOptions,
}

/// Multi-head attention (Attention Is All You Need, arXiv:1706.03762, section 3.2.2) that forms no attention matrix.
///
/// Parameters have the names and shapes of [`MultiHeadAttention`]'s, so that its records load. Differences: attention weights are not
/// returned, since they are never formed; dropout has another random stream; there may be fewer key/value heads than query heads; and
/// causality needs no mask.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashMhaInput, FlashMultiHeadAttentionConfig};
///
/// let device = Device::flex();
/// let attention = FlashMultiHeadAttentionConfig::new(64, 4).with_causal(true).init(&device);
/// let x = Tensor::<3>::random([2, 10, 64], Distribution::Default, &device);
/// assert_eq!(attention.forward(FlashMhaInput::self_attn(x)).context.dims(), [2, 10, 64]);
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct FlashMultiHeadAttention {
    /// `d_model` to `n_heads · d_k`.
    pub query: Linear,
    /// `d_model` to `n_kv_heads · d_k`.
    pub key: Linear,
    /// `d_model` to `n_kv_heads · d_k`.
    pub value: Linear,
    /// `n_heads · d_k` to `d_model`.
    pub output: Linear,
    /// Dropout of attention weights in training.
    pub dropout: Dropout,
    /// Size of each input and output vector.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads.
    pub n_kv_heads: usize,
    /// Size of a head's query and key vectors.
    pub d_k: usize,
    /// Whether keys that come after the query are hidden.
    pub causal: bool,
    /// Whether 1 is added to the denominator of the softmax.
    pub quiet_softmax: bool,
    /// Options of every call.
    #[module(skip)]
    pub options: FlashAttentionOptions,
}

impl ModuleDisplay for FlashMultiHeadAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("n_heads", &self.n_heads)
            .add("n_kv_heads", &self.n_kv_heads)
            .add("d_k", &self.d_k)
            .add("causal", &self.causal)
            .add("quiet_softmax", &self.quiet_softmax)
            .optional()
    }
}

impl FlashMultiHeadAttentionConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashMultiHeadAttentionConfig::new(64, 4);
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).d_k, 16);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashMultiHeadAttention {
        unwrapped(self.try_init(device))
    }

    /// Creates a module with new parameters, or returns an error: for heads that do not divide, or an invalid dropout rate.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the setting and its value.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashMultiHeadAttentionConfig::new(64, 4).with_n_kv_heads(Some(3));
    /// let error = config.try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().contains("num_heads_kv, 3"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashMultiHeadAttention, AttentionError> {
        let n_kv_heads = heads_kv(self.n_heads, self.n_kv_heads)?;
        if !self.d_model.is_multiple_of(self.n_heads) {
            return Err(AttentionError::Unsupported {
                option: "d_model",
                value: self.d_model.to_string(),
                why: "it must be a multiple of n_heads",
            });
        }
        check_rate("dropout", self.dropout)?;
        check_settings("options", &self.options)?;
        let d_k = self.d_model / self.n_heads;
        let linear = |d_input, d_output, bias| {
            LinearConfig::new(d_input, d_output).with_initializer(self.initializer.clone()).with_bias(bias).init(device)
        };
        Ok(FlashMultiHeadAttention {
            query: linear(self.d_model, self.d_model, self.query_bias),
            key: linear(self.d_model, n_kv_heads * d_k, self.key_bias),
            value: linear(self.d_model, n_kv_heads * d_k, self.value_bias),
            output: linear(self.d_model, self.d_model, self.output_bias),
            dropout: DropoutConfig::new(self.dropout).init(),
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            d_k,
            causal: self.causal,
            quiet_softmax: self.quiet_softmax,
            options: self.options.clone(),
        })
    }
}

impl FlashMultiHeadAttention {
    /// Computes attention.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let attention = FlashMultiHeadAttentionConfig::new(8, 2).init(&Device::flex());
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &Device::flex());
    /// let output = attention.forward(FlashMhaInput::new(zeros(3), zeros(5), zeros(5)));
    /// assert_eq!(output.context.dims(), [1, 3, 8]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward(&self, input: FlashMhaInput) -> FlashMhaOutput {
        unwrapped(self.try_forward(input))
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
    /// use burn_flash_attention::{FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let attention = FlashMultiHeadAttentionConfig::new(8, 2).init(&Device::flex());
    /// let wrong = FlashMhaInput::self_attn(Tensor::zeros([1, 3, 16], &Device::flex()));
    /// assert!(attention.try_forward(wrong).unwrap_err().to_string().starts_with("query has d_model 16"));
    /// # }
    /// ```
    pub fn try_forward(&self, input: FlashMhaInput) -> Result<FlashMhaOutput, AttentionError> {
        self.check(&input, 0)?;
        let options = combined(input.options, input.mask_pad, input.mask_attn);
        Ok(FlashMhaOutput { context: self.attended(input.query, input.key, input.value, options)? })
    }

    /// Keys and values `[batch, n_kv_heads, seq_k, d_k]` of the inputs.
    fn keys_values(&self, key: Tensor<3>, value: Tensor<3>) -> (Tensor<4>, Tensor<4>) {
        (heads(key, &self.key, self.n_kv_heads), heads(value, &self.value, self.n_kv_heads))
    }

    /// The options of a call with those that the module sets.
    fn configured(&self, options: FlashAttentionOptions) -> Result<FlashAttentionOptions, AttentionError> {
        let mut options = with_settings(options, &self.options)?;
        options.causal |= self.causal;
        Ok(options)
    }

    /// Queries `[batch, n_heads, seq_q, d_k]` of the input, and the options of attention with them.
    fn queries(
        &self,
        query: Tensor<3>,
        options: FlashAttentionOptions,
    ) -> Result<(Tensor<4>, FlashAttentionOptions), AttentionError> {
        let options = self.configured(options)?;
        let query = heads(query, &self.query, self.n_heads);
        let options = effective(options, &query, self.quiet_softmax, &self.dropout);
        Ok((query, options))
    }

    /// Output of queries over keys and values.
    fn attended_over(
        &self,
        query: Tensor<3>,
        (key, value): (Tensor<4>, Tensor<4>),
        options: FlashAttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        let (query, options) = self.queries(query, options)?;
        Ok(joined(try_flash_attention(query, key, value, &options)?, &self.output))
    }

    /// Output without a cache.
    pub(super) fn attended(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        options: FlashAttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        self.attended_over(query, self.keys_values(key, value), options)
    }

    /// Checks shapes and options, so that errors name the argument instead of panicking in a layer or mask. `cached`: keys in a cache, to
    /// which those of the input are appended.
    pub(super) fn check(&self, input: &FlashMhaInput, cached: usize) -> Result<(), AttentionError> {
        let [query, key, value] = [&input.query, &input.key, &input.value].map(|tensor| tensor.dims());
        let [batch, seq_q, _] = query;
        let seq_k = key[1];
        for (argument, shape) in [("query", query), ("key", key), ("value", value)] {
            agree(argument, &shape, (2, "d_model"), ("the module", self.d_model))?;
            agree(argument, &shape, (0, "batch"), ("query", batch))?;
        }
        agree("value", &value, (1, "seq_k"), ("key", seq_k))?;
        let expected_by = if cached == 0 { "key" } else { "the cache with the new positions" };
        let seq_k = cached + seq_k;
        if let Some(mask) = input.mask_pad.as_ref().map(|mask| mask.dims()) {
            agree("mask_pad", &mask, (0, "batch"), ("query", batch))?;
            agree("mask_pad", &mask, (1, "seq_k"), (expected_by, seq_k))?;
        }
        if let Some(mask) = input.mask_attn.as_ref().map(|mask| mask.dims()) {
            agree("mask_attn", &mask, (0, "batch"), ("query", batch))?;
            agree("mask_attn", &mask, (1, "seq_q"), ("query", seq_q))?;
            agree("mask_attn", &mask, (2, "seq_k"), (expected_by, seq_k))?;
        }
        let options = self.configured(input.options.clone())?;
        check_options(&options, [batch, self.n_heads, seq_q, seq_k], self.quiet_softmax, &self.dropout)
    }
}

/// Takes over the parameters of burn-nn's module.
impl From<MultiHeadAttention> for FlashMultiHeadAttention {
    fn from(module: MultiHeadAttention) -> Self {
        FlashMultiHeadAttention {
            query: module.query,
            key: module.key,
            value: module.value,
            output: module.output,
            dropout: module.dropout,
            d_model: module.d_model,
            n_heads: module.n_heads,
            n_kv_heads: module.n_heads,
            d_k: module.d_k,
            causal: false,
            quiet_softmax: module.quiet_softmax,
            options: FlashAttentionOptions::new(),
        }
    }
}
