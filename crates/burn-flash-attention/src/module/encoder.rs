//! Transformer encoder, a replacement for burn-nn's.

use super::cache::{KeysValues, Outputs};
use super::multi_head::newest;
use super::{
    FlashMhaInput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, check_decodes, check_rate, combined, parted,
    unwrapped,
};
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay};
use burn::nn::activation::ActivationConfig;
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerEncoder, TransformerEncoderLayer,
};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig};
use burn::tensor::{Bool, Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashTransformerEncoder`].
///
/// ```
/// use burn_flash_attention::FlashTransformerEncoderConfig;
///
/// // 512 wide, 2,048 in the feed-forward network, 8 heads, 6 layers.
/// let config = FlashTransformerEncoderConfig::new(512, 2048, 8, 6).with_norm_first(true).with_attention_dropout(Some(0.0));
/// assert_eq!(config.dropout, 0.1);
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashTransformerEncoderConfig {
    /// Size of each input and output vector.
    pub d_model: usize,
    /// Size of the position-wise feed-forward network.
    pub d_ff: usize,
    /// Number of attention heads.
    pub n_heads: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Dropout rate in training, of residuals, the feed-forward network and, unless `attention_dropout` is set, attention weights. Default:
    /// 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Dropout rate of attention weights in training. Default: `dropout`
    #[config(default = "None")]
    pub attention_dropout: Option<f64>,
    /// Whether layer normalization comes before each sublayer instead of after it. Default: false
    #[config(default = false)]
    pub norm_first: bool,
    /// Adds 1 to the denominator of the softmax, so that a head may attend to nothing. Default: false
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Hides keys that come after the query, without a mask. Default: false
    #[config(default = false)]
    pub causal: bool,
    /// Initializer of the parameters.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Activation of the feed-forward network. Default: GELU
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
    /// Epsilon of layer normalization, added to the variance. Default: 1e-5
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
}

/// Transformer encoder (Attention Is All You Need, arXiv:1706.03762, section 3.1) with FlashAttention.
///
/// Parameters have the names and shapes of burn-nn's `TransformerEncoder`, so that its records load.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
///
/// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&Device::flex());
/// let x = Tensor::<3>::zeros([1, 5, 8], &Device::flex());
/// assert_eq!(encoder.forward(FlashTransformerEncoderInput::new(x)).dims(), [1, 5, 8]);
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct FlashTransformerEncoder {
    /// The layers.
    pub layers: Vec<FlashTransformerEncoderLayer>,
    /// Size of each input and output vector.
    pub d_model: usize,
    /// Size of the position-wise feed-forward network.
    pub d_ff: usize,
    /// Number of attention heads.
    pub n_heads: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Dropout rate.
    pub dropout: f64,
    /// Whether layer normalization comes before each sublayer.
    pub norm_first: bool,
    /// Whether 1 is added to the denominator of the softmax.
    pub quiet_softmax: bool,
}

impl ModuleDisplay for FlashTransformerEncoder {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("d_ff", &self.d_ff)
            .add("n_heads", &self.n_heads)
            .add("n_layers", &self.n_layers)
            .add("dropout", &self.dropout)
            .add("norm_first", &self.norm_first)
            .add("quiet_softmax", &self.quiet_softmax)
            .optional()
    }
}

/// A layer of a [`FlashTransformerEncoder`].
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn_flash_attention::FlashTransformerEncoderConfig;
///
/// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 3).init(&burn::tensor::Device::flex());
/// assert_eq!(encoder.layers[0].mha.n_heads, 2);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct FlashTransformerEncoderLayer {
    /// Self-attention.
    pub mha: FlashMultiHeadAttention,
    /// The position-wise feed-forward network.
    pub pwff: PositionWiseFeedForward,
    /// Normalizes before or after the feed-forward network.
    pub norm_1: LayerNorm,
    /// Normalizes before or after attention.
    pub norm_2: LayerNorm,
    /// Dropout of the residuals.
    pub dropout: Dropout,
    /// Whether normalization comes before each sublayer.
    pub norm_first: bool,
}

/// Input of a [`FlashTransformerEncoder`].
///
/// ```no_run
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_flash_attention::FlashTransformerEncoderInput;
///
/// let device = Device::default();
/// let padding = Tensor::<2, Bool>::from_data([[false, false, true]], &device);
/// let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, 3, 64], &device)).mask_pad(padding);
/// ```
#[derive(Clone, Debug)]
pub struct FlashTransformerEncoderInput {
    tensor: Tensor<3>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
    options: FlashAttentionOptions,
}

impl FlashTransformerEncoderInput {
    /// Input `[batch, seq, d_model]`.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let input = burn_flash_attention::FlashTransformerEncoderInput::new(Tensor::zeros([1, 3, 64], &Device::default()));
    /// ```
    pub fn new(tensor: Tensor<3>) -> Self {
        FlashTransformerEncoderInput { tensor, mask_pad: None, mask_attn: None, options: FlashAttentionOptions::new() }
    }

    /// Hides padding: `[batch, seq]`, `true` hides a position from all.
    ///
    /// ```no_run
    /// use burn::tensor::{Bool, Device, Tensor};
    /// use burn_flash_attention::FlashTransformerEncoderInput;
    ///
    /// let device = Device::default();
    /// let padding = Tensor::<2, Bool>::from_data([[false, true]], &device);
    /// let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, 2, 64], &device)).mask_pad(padding);
    /// ```
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Hides pairs: `[batch, seq, seq]`, `true` hides the second position from the first.
    ///
    /// ```no_run
    /// use burn::nn::attention::generate_autoregressive_mask;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::FlashTransformerEncoderInput;
    ///
    /// let device = Device::default();
    /// let mask = generate_autoregressive_mask(1, 8, &device);
    /// let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, 8, 64], &device)).mask_attn(mask);
    /// ```
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    /// Sets the attention options of every layer; see [`FlashMhaInput::options`](crate::FlashMhaInput::options).
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// // Two documents in one row, of four and of six tokens.
    /// let device = Device::flex();
    /// let begins = Tensor::<1, Int>::from_data([0, 4, 10], &device);
    /// let options = FlashAttentionOptions::new().with_cu_seqlens_q(begins.clone()).with_cu_seqlens_k(begins);
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 3).with_causal(true).init(&device);
    /// let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, 10, 8], &device)).options(options);
    /// assert_eq!(encoder.forward(input).dims(), [1, 10, 8]);
    /// # }
    /// ```
    pub fn options(mut self, options: FlashAttentionOptions) -> Self {
        self.options = options;
        self
    }
}

/// Cache of a [`FlashTransformerEncoder`] for decoding.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// let encoder = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
/// let cache = encoder.new_autoregressive_cache();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlashTransformerEncoderAutoregressiveCache {
    layers: Vec<KeysValues>,
    outputs: Outputs,
}

impl FlashTransformerEncoderConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 2, 3);
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).layers.len(), 3);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashTransformerEncoder {
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
    /// let config = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 3, 2);
    /// let error = config.try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().contains("d_model"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashTransformerEncoder, AttentionError> {
        check_rate("dropout", self.dropout)?;
        let layer = || -> Result<_, AttentionError> {
            let norm = || LayerNormConfig::new(self.d_model).with_epsilon(self.layer_norm_eps).init(device);
            Ok(FlashTransformerEncoderLayer {
                mha: FlashMultiHeadAttentionConfig::new(self.d_model, self.n_heads)
                    .with_initializer(self.initializer.clone())
                    .with_dropout(self.attention_dropout.unwrap_or(self.dropout))
                    .with_quiet_softmax(self.quiet_softmax)
                    .with_causal(self.causal)
                    .try_init(device)?,
                pwff: PositionWiseFeedForwardConfig::new(self.d_model, self.d_ff)
                    .with_initializer(self.initializer.clone())
                    .with_dropout(self.dropout)
                    .with_activation(self.activation.clone())
                    .init(device),
                norm_1: norm(),
                norm_2: norm(),
                dropout: DropoutConfig::new(self.dropout).init(),
                norm_first: self.norm_first,
            })
        };
        Ok(FlashTransformerEncoder {
            layers: (0..self.n_layers).map(|_| layer()).collect::<Result<_, _>>()?,
            d_model: self.d_model,
            d_ff: self.d_ff,
            n_heads: self.n_heads,
            n_layers: self.n_layers,
            dropout: self.dropout,
            norm_first: self.norm_first,
            quiet_softmax: self.quiet_softmax,
        })
    }
}

impl FlashTransformerEncoder {
    /// Encodes `[batch, seq, d_model]`.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 1).with_causal(true).init(&Device::flex());
    /// let input = FlashTransformerEncoderInput::new(Tensor::zeros([2, 3, 8], &Device::flex()));
    /// assert_eq!(encoder.forward(input).dims(), [2, 3, 8]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward(&self, input: FlashTransformerEncoderInput) -> Tensor<3> {
        unwrapped(self.try_forward(input))
    }

    /// [`forward`](Self::forward) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value. The encoder's input is called `query`.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 1).init(&Device::flex());
    /// let wrong = FlashTransformerEncoderInput::new(Tensor::zeros([2, 3, 9], &Device::flex()));
    /// assert!(encoder.try_forward(wrong).unwrap_err().to_string().starts_with("query has d_model 9"));
    /// # }
    /// ```
    pub fn try_forward(&self, input: FlashTransformerEncoderInput) -> Result<Tensor<3>, AttentionError> {
        self.check(&input)?;
        let options = combined(input.options, input.mask_pad, input.mask_attn);
        let step = |x, layer: &FlashTransformerEncoderLayer| layer.step(x, options.clone(), &mut KeysValues::default());
        self.layers.iter().try_fold(input.tensor, step)
    }

    /// Encodes step by step. Each call receives the whole prefix and returns the output for all of it. The first call computes the whole
    /// prefix, later calls its last position only. The result equals [`forward`](Self::forward)'s if later positions are hidden from
    /// earlier ones, by [`causal`](FlashTransformerEncoderConfig::causal) or by a mask.
    ///
    /// # Panics
    ///
    /// With the message of the error that
    /// [`try_forward_autoregressive_inference`](Self::try_forward_autoregressive_inference) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
    /// let mut cache = encoder.new_autoregressive_cache();
    /// for len in 1..4 {
    ///     let prefix = FlashTransformerEncoderInput::new(Tensor::zeros([1, len, 8], &Device::flex()));
    ///     assert_eq!(encoder.forward_autoregressive_inference(prefix, &mut cache).dims(), [1, len, 8]);
    /// }
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_autoregressive_inference(
        &self,
        input: FlashTransformerEncoderInput,
        cache: &mut FlashTransformerEncoderAutoregressiveCache,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_autoregressive_inference(input, cache))
    }

    /// [`forward_autoregressive_inference`](Self::forward_autoregressive_inference) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// The errors of [`try_forward`](Self::try_forward); prefixes that are not one position longer than in the previous call; and options
    /// that count positions from the first one.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&Device::flex());
    /// let prefix = |len| FlashTransformerEncoderInput::new(Tensor::zeros([1, len, 8], &Device::flex()));
    /// let mut cache = encoder.new_autoregressive_cache();
    /// encoder.forward_autoregressive_inference(prefix(4), &mut cache);
    /// assert!(encoder.try_forward_autoregressive_inference(prefix(4), &mut cache).is_err());
    /// # }
    /// ```
    pub fn try_forward_autoregressive_inference(
        &self,
        input: FlashTransformerEncoderInput,
        cache: &mut FlashTransformerEncoderAutoregressiveCache,
    ) -> Result<Tensor<3>, AttentionError> {
        self.check(&input)?;
        check_decodes(&input.options, false)?;
        let options = combined(input.options, input.mask_pad, newest(input.mask_attn, cache.outputs.len()));
        let mut x = cache.outputs.news("query", input.tensor)?;
        for (layer, memory) in self.layers.iter().zip(&mut cache.layers) {
            x = layer.step(x, options.clone(), memory)?;
        }
        Ok(cache.outputs.grown(x))
    }

    /// Creates an empty cache.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let encoder = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
    /// let cache = encoder.new_autoregressive_cache();
    /// # }
    /// ```
    pub fn new_autoregressive_cache(&self) -> FlashTransformerEncoderAutoregressiveCache {
        let layers = vec![KeysValues::default(); self.layers.len()];
        FlashTransformerEncoderAutoregressiveCache { layers, outputs: Outputs::default() }
    }

    /// Checks the input against every layer before any layer runs.
    fn check(&self, input: &FlashTransformerEncoderInput) -> Result<(), AttentionError> {
        let FlashTransformerEncoderInput { tensor, mask_pad, mask_attn, options } = input.clone();
        let input = FlashMhaInput::self_attn(tensor).with(mask_pad, mask_attn, options);
        self.layers.iter().try_for_each(|layer| layer.mha.check(&input))
    }
}

impl FlashTransformerEncoderLayer {
    /// Computes the layer for new positions, which attend to all positions so far.
    fn step(
        &self,
        x: Tensor<3>,
        options: FlashAttentionOptions,
        memory: &mut KeysValues,
    ) -> Result<Tensor<3>, AttentionError> {
        let normed = if self.norm_first { self.norm_2.forward(x.clone()) } else { x.clone() };
        let attended = self.mha.attended_grown(normed.clone(), normed.clone(), normed, options, memory)?;
        let x = x + self.dropout.forward(attended);

        let (normed, x) = parted(x, &self.norm_1, self.norm_first);
        let x = x + self.dropout.forward(self.pwff.forward(normed));
        Ok(if self.norm_first { x } else { self.norm_2.forward(x) })
    }
}

/// Takes over the parameters of burn-nn's module.
impl From<TransformerEncoder> for FlashTransformerEncoder {
    fn from(module: TransformerEncoder) -> Self {
        FlashTransformerEncoder {
            layers: module.layers.into_iter().map(Into::into).collect(),
            d_model: module.d_model,
            d_ff: module.d_ff,
            n_heads: module.n_heads,
            n_layers: module.n_layers,
            dropout: module.dropout,
            norm_first: module.norm_first,
            quiet_softmax: module.quiet_softmax,
        }
    }
}

impl From<TransformerEncoderLayer> for FlashTransformerEncoderLayer {
    fn from(layer: TransformerEncoderLayer) -> Self {
        FlashTransformerEncoderLayer {
            mha: layer.mha.into(),
            pwff: layer.pwff,
            norm_1: layer.norm_1,
            norm_2: layer.norm_2,
            dropout: layer.dropout,
            norm_first: layer.norm_first,
        }
    }
}
