//! Decoder-only transformers: Llama, Qwen, Gemma, Mistral.

mod layer;
mod mlp;
mod steps;

pub use layer::{FlashDecoderLayer, FlashDecoderLayerConfig};
pub use mlp::{Mlp, MlpActivation, MlpConfig};
pub use steps::FlashDecoderCache;

use super::rotary::{RotaryAngles, RotaryEmbedding};
use super::self_attention::FlashSelfAttentionInput;
use super::{check_number, unwrapped};
use crate::options::FlashAttentionOptions;
use burn::config::Config;
use burn::module::Module;
use burn::nn::norm::Normalization;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, module::linear};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashDecoder`].
///
/// ```
/// use burn_flash_attention::{
///     FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig, RotaryEmbeddingConfig,
/// };
///
/// // Mistral 7B 0.1.
/// let attention = FlashSelfAttentionConfig::new(4096, 32)
///     .with_num_heads_kv(Some(8))
///     .with_window_left(Some(4095))
///     .with_rotary(Some(RotaryEmbeddingConfig::new(32768)));
/// let layer = FlashDecoderLayerConfig::new(attention, MlpConfig::new(14336));
/// let config = FlashDecoderConfig::new(32000, vec![layer; 32]);
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<FlashDecoderConfig>(&text)?.layers.len(), 32);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashDecoderConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// The layers: at least one, all of the same `d_model`. Each has its own options, as alternating windows.
    pub layers: Vec<FlashDecoderLayerConfig>,
    /// Whether the head has the embedding's weights. Default: false
    #[config(default = false)]
    pub tied_head: bool,
    /// Factor on embedded tokens (Gemma: `√d_model`). Default: none
    #[config(default = "None")]
    pub embedding_scale: Option<f32>,
    /// Logits become `softcap · tanh(logit / softcap)` (Gemma 2). Default: none
    #[config(default = "None")]
    pub logit_softcap: Option<f32>,
}

/// Decoder-only transformer: an embedding of tokens, layers, a norm, and a head.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_flash_attention::{
///     FlashAttentionOptions, FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig,
///     RotaryEmbeddingConfig,
/// };
///
/// let device = Device::flex();
/// let attention = FlashSelfAttentionConfig::new(16, 2).with_rotary(Some(RotaryEmbeddingConfig::new(64)));
/// let layer = FlashDecoderLayerConfig::new(attention, MlpConfig::new(32));
/// let model = FlashDecoderConfig::new(100, vec![layer; 2]).with_tied_head(true).init(&device);
/// let tokens = Tensor::<2, Int>::from_data([[5, 7, 42]], &device);
/// assert_eq!(model.forward(tokens, &FlashAttentionOptions::new()).dims(), [1, 3, 100]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct FlashDecoder {
    /// Embedding of tokens.
    pub embedding: Embedding,
    /// The layers.
    pub layers: Vec<FlashDecoderLayer>,
    /// Norm before the head.
    pub norm: Normalization,
    /// `d_model` to `vocab_size`. `None`: the embedding's weights.
    pub head: Option<Linear>,
    /// Factor on embedded tokens.
    #[module(skip)]
    pub embedding_scale: Option<f32>,
    /// Cap of logits.
    #[module(skip)]
    pub logit_softcap: Option<f32>,
}

impl FlashDecoderConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer; 2]).init(&burn::tensor::Device::flex());
    /// assert_eq!(model.embedding.weight.dims(), [100, 16]);
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashDecoder {
        unwrapped(self.try_init(device))
    }

    /// [`init`](Self::init) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Those of [`FlashSelfAttentionConfig::try_init`](crate::FlashSelfAttentionConfig::try_init); no layers, layers of different
    /// `d_model`, and a softcap that is not above 0.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let error = burn_flash_attention::FlashDecoderConfig::new(100, vec![]).try_init(&burn::tensor::Device::flex()).unwrap_err();
    /// assert!(error.to_string().starts_with("layers = 0 is not supported"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashDecoder, AttentionError> {
        let Some(first) = self.layers.first() else {
            let why = "a decoder has at least one";
            return Err(AttentionError::Unsupported { option: "layers", value: "0".to_string(), why });
        };
        let d_model = first.attention.d_model;
        if let Some(other) = self.layers.iter().find(|layer| layer.attention.d_model != d_model) {
            let value = format!("{} after {d_model}", other.attention.d_model);
            let why = "the layers of a decoder have the same";
            return Err(AttentionError::Unsupported { option: "d_model", value, why });
        }
        let softcap = self.logit_softcap.map(f64::from);
        softcap.map_or(Ok(()), |value| check_number("logit_softcap", value, value > 0.0, "finite and above 0"))?;
        let mut layers = Vec::<FlashDecoderLayer>::new();
        for config in &self.layers {
            let mut config = config.clone();
            // Layers with the same rotary embedding share its memory.
            let head_dim = config.attention.head_dim_of();
            let of_config = |rotary: &&RotaryEmbedding| {
                config.attention.rotary.as_ref().is_some_and(|config| rotary.is_of(config, head_dim))
            };
            let shared = layers.iter().filter_map(|layer| layer.attention.rotary.as_ref()).find(of_config).cloned();
            if shared.is_some() {
                config.attention.rotary = None;
            }
            let mut layer = config.try_init(device)?;
            layer.attention.rotary = shared.or(layer.attention.rotary);
            layers.push(layer);
        }
        Ok(FlashDecoder {
            embedding: EmbeddingConfig::new(self.vocab_size, d_model).init(device),
            layers,
            norm: first.norm.clone().with_num_features(d_model).init(device),
            head: (!self.tied_head).then(|| LinearConfig::new(d_model, self.vocab_size).with_bias(false).init(device)),
            embedding_scale: self.embedding_scale,
            logit_softcap: self.logit_softcap,
        })
    }
}

impl FlashDecoder {
    /// Logits of the token after each one: `[batch, seq]` to `[batch, seq, vocab_size]`. The options are those of each layer's attention,
    /// in addition to the module's.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{
    ///     FlashAttentionOptions, FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig,
    /// };
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer; 2]).init(&device);
    /// // Two documents in one row.
    /// let begins = Tensor::<1, Int>::from_data([0, 3, 5], &device);
    /// let options = FlashAttentionOptions::new().with_cu_seqlens_q(begins.clone()).with_cu_seqlens_k(begins);
    /// let tokens = Tensor::<2, Int>::from_data([[5, 7, 42, 5, 8]], &device);
    /// assert_eq!(model.forward(tokens, &options).dims(), [1, 5, 100]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward(&self, tokens: Tensor<2, Int>, options: &FlashAttentionOptions) -> Tensor<3> {
        unwrapped(self.try_forward(tokens, options))
    }

    /// [`forward`](Self::forward) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Those of [`FlashSelfAttention::try_forward`](crate::FlashSelfAttention::try_forward).
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{
    ///     FlashAttentionOptions, FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig,
    /// };
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer]).init(&device);
    /// let options = FlashAttentionOptions::new().with_dropout(0.1);
    /// let error = model.try_forward(Tensor::<2, Int>::zeros([1, 5], &device), &options).unwrap_err();
    /// assert!(error.to_string().starts_with("dropout = 0.1"));
    /// # }
    /// ```
    pub fn try_forward(
        &self,
        tokens: Tensor<2, Int>,
        options: &FlashAttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_hidden(tokens, options).map(|hidden| self.logits(hidden))
    }

    /// The normalized output of the last layer, `[batch, seq, d_model]`, of which [`logits`](Self::logits) may be computed in pieces: those of
    /// 131,072 tokens of 128,256 kinds take 67 GB.
    ///
    /// # Errors
    ///
    /// Those of [`try_forward`](Self::try_forward).
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{
    ///     FlashAttentionOptions, FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig,
    /// };
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer]).init(&device);
    /// let hidden = model.try_hidden(Tensor::<2, Int>::zeros([1, 5], &device), &FlashAttentionOptions::new())?;
    /// let last = model.logits(hidden.narrow(1, 4, 1));
    /// assert_eq!(last.dims(), [1, 1, 100]);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn try_hidden(
        &self,
        tokens: Tensor<2, Int>,
        options: &FlashAttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        let seq = tokens.dims()[1];
        let angles = self.angles(|rotary| rotary.angles(0, seq))?;
        let mut x = self.embedded(tokens);
        for (layer, angles) in self.layers.iter().zip(angles) {
            x = layer.try_forward(FlashSelfAttentionInput { x, angles, options: options.clone() })?;
        }
        Ok(self.norm.forward(x))
    }

    /// Logits of hidden vectors `[batch, seq, d_model]`.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer]).with_tied_head(true).init(&device);
    /// assert_eq!(model.logits(Tensor::zeros([1, 5, 16], &device)).dims(), [1, 5, 100]);
    /// # }
    /// ```
    pub fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let logits = match &self.head {
            Some(head) => head.forward(hidden),
            None => linear(hidden, self.embedding.weight.val().transpose(), None),
        };
        match self.logit_softcap {
            Some(softcap) => (logits / softcap).tanh() * softcap,
            None => logits,
        }
    }

    /// Angles of each layer, computed once for the layers with the same rotary embedding.
    fn angles(
        &self,
        of: impl Fn(&RotaryEmbedding) -> Result<RotaryAngles, AttentionError>,
    ) -> Result<Vec<Option<RotaryAngles>>, AttentionError> {
        let mut all = Vec::<Option<RotaryAngles>>::new();
        for layer in &self.layers {
            let angles_of = |rotary: &RotaryEmbedding| {
                let is_same = |earlier: &FlashDecoderLayer| {
                    earlier.attention.rotary.as_ref().is_some_and(|other| other.is_same(rotary))
                };
                let known = self.layers.iter().zip(&all).find(|(earlier, _)| is_same(earlier));
                known.map_or_else(|| of(rotary).map(Some), |(_, angles)| Ok(angles.clone()))
            };
            let angles = layer.attention.rotary.as_ref().map_or(Ok(None), angles_of)?;
            all.push(angles);
        }
        Ok(all)
    }

    fn embedded(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        match self.embedding_scale {
            Some(scale) => x * scale,
            None => x,
        }
    }
}
