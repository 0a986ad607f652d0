//! Transformer decoder, a replacement for burn-nn's.

mod decoding;
mod input;

pub use decoding::FlashTransformerDecoderAutoregressiveCache;
pub use input::FlashTransformerDecoderInput;

use super::settings::of_layer;
use super::{FlashMultiHeadAttention, FlashMultiHeadAttentionConfig, check_rate, parted, unwrapped};
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay};
use burn::nn::activation::ActivationConfig;
use burn::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoder, TransformerDecoderLayer,
};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashTransformerDecoder`].
///
/// ```
/// use burn_flash_attention::FlashTransformerDecoderConfig;
///
/// // 512 wide, 2,048 in the feed-forward network, 8 heads, 6 layers, no mask needed for causality.
/// let config = FlashTransformerDecoderConfig::new(512, 2048, 8, 6).with_causal(true).with_attention_dropout(Some(0.0));
/// assert_eq!(config.dropout, 0.1);
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashTransformerDecoderConfig {
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
    /// Hides positions of the target that come after the query, without a mask. Default: false
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
    /// Options of each layer's attention within the target: one for each layer, without tensors. Default: none
    #[config(default = "Vec::new()")]
    pub target_layer_options: Vec<FlashAttentionOptions>,
    /// Options of each layer's attention to the memory, likewise. Default: none
    #[config(default = "Vec::new()")]
    pub memory_layer_options: Vec<FlashAttentionOptions>,
}

/// Transformer decoder (Attention Is All You Need, arXiv:1706.03762, section 3.1) with FlashAttention.
///
/// Parameters have the names and shapes of burn-nn's `TransformerDecoder`, so that its records load.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
///
/// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
/// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &Device::flex());
/// assert_eq!(decoder.forward(FlashTransformerDecoderInput::new(zeros(5), zeros(7))).dims(), [1, 5, 8]);
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct FlashTransformerDecoder {
    /// The layers.
    pub layers: Vec<FlashTransformerDecoderLayer>,
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

impl ModuleDisplay for FlashTransformerDecoder {
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

/// A layer of a [`FlashTransformerDecoder`].
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn_flash_attention::FlashTransformerDecoderConfig;
///
/// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 3).init(&burn::tensor::Device::flex());
/// assert_eq!(decoder.layers[0].cross_attn.n_heads, 2);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct FlashTransformerDecoderLayer {
    /// Attention from the target to the memory.
    pub cross_attn: FlashMultiHeadAttention,
    /// Attention within the target.
    pub self_attn: FlashMultiHeadAttention,
    /// The position-wise feed-forward network.
    pub pwff: PositionWiseFeedForward,
    /// Normalizes before cross-attention, or after self-attention.
    pub norm_1: LayerNorm,
    /// Normalizes before the feed-forward network, or after cross-attention.
    pub norm_2: LayerNorm,
    /// Normalizes before self-attention, or after the feed-forward network.
    pub norm_3: LayerNorm,
    /// Dropout of the residuals.
    pub dropout: Dropout,
    /// Whether normalization comes before each sublayer.
    pub norm_first: bool,
}

/// Attention options of a layer, masks included.
#[derive(Clone)]
struct Options {
    target: FlashAttentionOptions,
    memory: FlashAttentionOptions,
}

impl FlashTransformerDecoderConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let config = burn_flash_attention::FlashTransformerDecoderConfig::new(8, 16, 2, 3);
    /// assert_eq!(config.init(&burn::tensor::Device::flex()).layers.len(), 3);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashTransformerDecoder {
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
    /// let config = burn_flash_attention::FlashTransformerDecoderConfig::new(8, 16, 2, 2).with_dropout(1.0);
    /// let error = config.try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().contains("dropout"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashTransformerDecoder, AttentionError> {
        check_rate("dropout", self.dropout)?;
        let attention = |causal, options| {
            FlashMultiHeadAttentionConfig::new(self.d_model, self.n_heads)
                .with_initializer(self.initializer.clone())
                .with_dropout(self.attention_dropout.unwrap_or(self.dropout))
                .with_quiet_softmax(self.quiet_softmax)
                .with_causal(causal)
                .with_n_kv_heads(self.n_kv_heads)
                .with_options(options)
                .try_init(device)
        };
        let layer = |nth| -> Result<_, AttentionError> {
            let of_target = of_layer("target_layer_options", &self.target_layer_options, nth, self.n_layers)?;
            let of_memory = of_layer("memory_layer_options", &self.memory_layer_options, nth, self.n_layers)?;
            let norm = || LayerNormConfig::new(self.d_model).with_epsilon(self.layer_norm_eps).init(device);
            Ok(FlashTransformerDecoderLayer {
                cross_attn: attention(false, of_memory)?,
                self_attn: attention(self.causal, of_target)?,
                pwff: PositionWiseFeedForwardConfig::new(self.d_model, self.d_ff)
                    .with_initializer(self.initializer.clone())
                    .with_dropout(self.dropout)
                    .with_activation(self.activation.clone())
                    .init(device),
                norm_1: norm(),
                norm_2: norm(),
                norm_3: norm(),
                dropout: DropoutConfig::new(self.dropout).init(),
                norm_first: self.norm_first,
            })
        };
        Ok(FlashTransformerDecoder {
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

impl FlashTransformerDecoder {
    /// Decodes the target. Returns `[batch, seq_q, d_model]`.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 1).init(&Device::flex());
    /// let zeros = |seq| Tensor::<3>::zeros([2, seq, 8], &Device::flex());
    /// assert_eq!(decoder.forward(FlashTransformerDecoderInput::new(zeros(3), zeros(4))).dims(), [2, 3, 8]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward(&self, input: FlashTransformerDecoderInput) -> Tensor<3> {
        unwrapped(self.try_forward(input))
    }

    /// [`forward`](Self::forward) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value. The target is called `query`, and the memory is the `key` of
    /// cross-attention.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 1).init(&Device::flex());
    /// let zeros = |batch| Tensor::<3>::zeros([batch, 3, 8], &Device::flex());
    /// let error = decoder.try_forward(FlashTransformerDecoderInput::new(zeros(2), zeros(1))).unwrap_err();
    /// assert!(error.to_string().starts_with("key has batch 1"));
    /// # }
    /// ```
    pub fn try_forward(&self, input: FlashTransformerDecoderInput) -> Result<Tensor<3>, AttentionError> {
        // Every layer is checked before any layer runs.
        let [of_target, of_memory] = input.of_attention();
        for layer in &self.layers {
            layer.self_attn.check(&of_target, 0)?;
            layer.cross_attn.check(&of_memory, 0)?;
        }
        let (options, memory) = (input.combined(), input.memory);
        let decode = |x, layer: &FlashTransformerDecoderLayer| {
            let Options { target: of_target, memory: of_memory } = options.clone();
            layer.sublayers(
                x,
                |x| layer.self_attn.attended(x.clone(), x.clone(), x, of_target),
                |x| layer.cross_attn.attended(x, memory.clone(), memory.clone(), of_memory),
            )
        };
        self.layers.iter().try_fold(input.target, decode)
    }
}

impl FlashTransformerDecoderLayer {
    /// Computes the layer, whose attention within the target and to the memory these functions compute from its normalized inputs.
    fn sublayers(
        &self,
        x: Tensor<3>,
        attend_target: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, AttentionError>,
        attend_memory: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let first = self.norm_first;
        let normed = if first { self.norm_3.forward(x.clone()) } else { x.clone() };
        let x = x + self.dropout.forward(attend_target(normed)?);

        let (normed, x) = parted(x, &self.norm_1, first);
        let x = x + self.dropout.forward(attend_memory(normed)?);

        let (normed, x) = parted(x, &self.norm_2, first);
        let x = x + self.dropout.forward(self.pwff.forward(normed));
        Ok(if first { x } else { self.norm_3.forward(x) })
    }
}

/// Takes over the parameters of burn-nn's module.
impl From<TransformerDecoder> for FlashTransformerDecoder {
    fn from(module: TransformerDecoder) -> Self {
        FlashTransformerDecoder {
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

impl From<TransformerDecoderLayer> for FlashTransformerDecoderLayer {
    fn from(layer: TransformerDecoderLayer) -> Self {
        FlashTransformerDecoderLayer {
            cross_attn: layer.cross_attn.into(),
            self_attn: layer.self_attn.into(),
            pwff: layer.pwff,
            norm_1: layer.norm_1,
            norm_2: layer.norm_2,
            norm_3: layer.norm_3,
            dropout: layer.dropout,
            norm_first: layer.norm_first,
        }
    }
}
