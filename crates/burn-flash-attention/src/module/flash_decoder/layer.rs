//! A layer of a decoder.

use super::mlp::{Mlp, MlpConfig};
use crate::kv_cache::AttentionCache;
use crate::module::self_attention::{FlashSelfAttention, FlashSelfAttentionConfig, FlashSelfAttentionInput};
use crate::module::unwrapped;
use burn::config::Config;
use burn::module::Module;
use burn::nn::RmsNormConfig;
use burn::nn::norm::{Normalization, NormalizationConfig};
use burn::tensor::{Device, Tensor};
use flash_attention_kernels::AttentionError;

/// Configuration of a [`FlashDecoderLayer`].
///
/// ```
/// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig, RotaryEmbeddingConfig};
///
/// // A layer of Llama 2 7B.
/// let attention = FlashSelfAttentionConfig::new(4096, 32).with_rotary(Some(RotaryEmbeddingConfig::new(4096)));
/// let config = FlashDecoderLayerConfig::new(attention, MlpConfig::new(11008));
/// assert!(!config.sandwich);
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct FlashDecoderLayerConfig {
    /// Attention.
    pub attention: FlashSelfAttentionConfig,
    /// Feed-forward network.
    pub mlp: MlpConfig,
    /// Norms, whose number of features is that of the layer. Default: [`RmsNormConfig`] with an epsilon of 1e-5
    #[config(default = "NormalizationConfig::Rms(RmsNormConfig::new(0))")]
    pub norm: NormalizationConfig,
    /// Whether outputs of attention and of the feed-forward network are normalized, too, before they are added (Gemma 2, arXiv:2408.00118,
    /// section 2). Default: false
    #[config(default = false)]
    pub sandwich: bool,
}

/// A layer of a [`FlashDecoder`](super::FlashDecoder), whose norms come before attention and the feed-forward network:
///
/// ```text
/// x = x + attention(norm(x))
/// x = x + mlp(norm(x))
/// ```
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
///
/// let device = Device::flex();
/// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(8, 2), MlpConfig::new(24)).init(&device);
/// assert_eq!(layer.forward(Tensor::ones([2, 5, 8], &device)).dims(), [2, 5, 8]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct FlashDecoderLayer {
    /// Norm before attention.
    pub attention_norm: Normalization,
    /// Attention.
    pub attention: FlashSelfAttention,
    /// Norm of attention's output.
    pub attention_output_norm: Option<Normalization>,
    /// Norm before the feed-forward network.
    pub mlp_norm: Normalization,
    /// Feed-forward network.
    pub mlp: Mlp,
    /// Norm of the feed-forward network's output.
    pub mlp_output_norm: Option<Normalization>,
}

impl FlashDecoderLayerConfig {
    /// Creates a module with new parameters.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let config = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(8, 2), MlpConfig::new(24)).with_sandwich(true);
    /// assert!(config.init(&burn::tensor::Device::flex()).mlp_output_norm.is_some());
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> FlashDecoderLayer {
        unwrapped(self.try_init(device))
    }

    /// [`init`](Self::init) that returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Those of [`FlashSelfAttentionConfig::try_init`].
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let config = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(8, 3), MlpConfig::new(24));
    /// assert!(config.try_init(&burn::tensor::Device::flex()).unwrap_err().to_string().starts_with("d_model = 8"));
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<FlashDecoderLayer, AttentionError> {
        let d_model = self.attention.d_model;
        let norm = || self.norm.clone().with_num_features(d_model).init(device);
        Ok(FlashDecoderLayer {
            attention_norm: norm(),
            attention: self.attention.try_init(device)?,
            attention_output_norm: self.sandwich.then(norm),
            mlp_norm: norm(),
            mlp: self.mlp.init_with(d_model, &self.attention.initializer, device),
            mlp_output_norm: self.sandwich.then(norm),
        })
    }
}

impl FlashDecoderLayer {
    /// Computes the layer of `[batch, seq, d_model]`. Returns the same shape.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward`](Self::try_forward) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let device = Device::flex();
    /// let config = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(8, 2), MlpConfig::new(24));
    /// assert_eq!(config.init(&device).forward(Tensor::ones([1, 5, 8], &device)).dims(), [1, 5, 8]);
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
    /// Those of [`FlashSelfAttention::try_forward`].
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(8, 2), MlpConfig::new(24)).init(&device);
    /// let error = layer.try_forward(Tensor::ones([1, 5, 6], &device)).unwrap_err();
    /// assert!(error.to_string().starts_with("x has d_model 6"));
    /// # }
    /// ```
    pub fn try_forward(&self, input: impl Into<FlashSelfAttentionInput>) -> Result<Tensor<3>, AttentionError> {
        self.sublayers(input.into(), |input| self.attention.try_forward(input))
    }

    /// Computes the layer of new positions `[batch, new, d_model]` after those in the cache, as
    /// [`FlashSelfAttention::try_forward_step`] does.
    ///
    /// # Errors
    ///
    /// Those of [`FlashSelfAttention::try_forward_step`]. The cache is then unchanged.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashDecoderLayerConfig, FlashSelfAttentionConfig, KvCacheConfig, MlpConfig};
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(8, 2), MlpConfig::new(24)).init(&device);
    /// let mut cache = KvCacheConfig::new(1, 2, 4, 16).init(&device);
    /// layer.try_forward_step(Tensor::ones([1, 5, 8], &device), &mut cache)?;
    /// assert_eq!(layer.try_forward_step(Tensor::ones([1, 1, 8], &device), &mut cache)?.dims(), [1, 1, 8]);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn try_forward_step(
        &self,
        input: impl Into<FlashSelfAttentionInput>,
        cache: &mut impl AttentionCache,
    ) -> Result<Tensor<3>, AttentionError> {
        self.sublayers(input.into(), |input| self.attention.try_forward_step(input, cache))
    }

    fn sublayers(
        &self,
        input: FlashSelfAttentionInput,
        attend: impl FnOnce(FlashSelfAttentionInput) -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        // A norm asserts the size of its input.
        self.attention.check_width(&input.x)?;
        let normed = |norm: &Option<Normalization>, x: Tensor<3>| match norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        let x = input.x.clone();
        let attended = attend(FlashSelfAttentionInput { x: self.attention_norm.forward(input.x), ..input })?;
        let x = x + normed(&self.attention_output_norm, attended);
        let fed = self.mlp.forward(self.mlp_norm.forward(x.clone()));
        Ok(x + normed(&self.mlp_output_norm, fed))
    }
}
