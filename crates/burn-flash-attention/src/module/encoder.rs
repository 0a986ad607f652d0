//! Transformer encoder, a replacement for burn-nn's.

mod decoding;
mod input;

pub use decoding::FlashTransformerEncoderAutoregressiveCache;
pub use input::FlashTransformerEncoderInput;

use super::settings::of_layer;
use super::{FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, check_rate, combined, parted, unwrapped};
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay};
use burn::nn::activation::ActivationConfig;
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerEncoder, TransformerEncoderLayer,
};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Tensor};
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
    /// Number of key/value heads; divides `n_heads`. Default: `n_heads`
    #[config(default = "None")]
    pub n_kv_heads: Option<usize>,
    /// Options of each layer's attention, as alternating windows: one for each layer, without tensors. Default: none
    #[config(default = "Vec::new()")]
    pub layer_options: Vec<FlashAttentionOptions>,
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
        let layer = |nth| -> Result<_, AttentionError> {
            let options = of_layer("layer_options", &self.layer_options, nth, self.n_layers)?;
            let norm = || LayerNormConfig::new(self.d_model).with_epsilon(self.layer_norm_eps).init(device);
            Ok(FlashTransformerEncoderLayer {
                mha: FlashMultiHeadAttentionConfig::new(self.d_model, self.n_heads)
                    .with_initializer(self.initializer.clone())
                    .with_dropout(self.attention_dropout.unwrap_or(self.dropout))
                    .with_quiet_softmax(self.quiet_softmax)
                    .with_causal(self.causal)
                    .with_n_kv_heads(self.n_kv_heads)
                    .with_options(options)
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
            layers: (0..self.n_layers).map(layer).collect::<Result<_, _>>()?,
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
        // Every layer is checked before any layer runs.
        let of_attention = input.of_attention();
        self.layers.iter().try_for_each(|layer| layer.mha.check(&of_attention, 0))?;
        let options = combined(input.options, input.mask_pad, input.mask_attn);
        let encode = |x, layer: &FlashTransformerEncoderLayer| {
            layer.sublayers(x, |x| layer.mha.attended(x.clone(), x.clone(), x, options.clone()))
        };
        self.layers.iter().try_fold(input.tensor, encode)
    }
}

impl FlashTransformerEncoderLayer {
    /// Computes the layer, whose attention `attend` computes from its normalized input.
    fn sublayers(
        &self,
        x: Tensor<3>,
        attend: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let normed = if self.norm_first { self.norm_2.forward(x.clone()) } else { x.clone() };
        let x = x + self.dropout.forward(attend(normed)?);

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
