//! Input of self-attention.

use crate::module::rotary::RotaryAngles;
use crate::options::FlashAttentionOptions;
use burn::tensor::Tensor;

/// Input of a [`FlashSelfAttention`](super::FlashSelfAttention): `[batch, seq, d_model]`, and what belongs to one call.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, FlashSelfAttentionConfig, FlashSelfAttentionInput};
///
/// let device = Device::flex();
/// let attention = FlashSelfAttentionConfig::new(8, 2).init(&device);
/// // Two documents in one row, of six and of four tokens.
/// let begins = Tensor::<1, Int>::from_data([0, 6, 10], &device);
/// let options = FlashAttentionOptions::new().with_cu_seqlens_q(begins.clone()).with_cu_seqlens_k(begins);
/// let input = FlashSelfAttentionInput::new(Tensor::zeros([1, 10, 8], &device)).options(options);
/// assert_eq!(attention.forward(input).dims(), [1, 10, 8]);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlashSelfAttentionInput {
    pub(in crate::module) x: Tensor<3>,
    pub(in crate::module) angles: Option<RotaryAngles>,
    pub(in crate::module) options: FlashAttentionOptions,
}

impl FlashSelfAttentionInput {
    /// Input without options.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let x = Tensor::<3>::zeros([1, 10, 64], &Device::default());
    /// let input = burn_flash_attention::FlashSelfAttentionInput::new(x);
    /// ```
    pub fn new(x: Tensor<3>) -> Self {
        FlashSelfAttentionInput { x, angles: None, options: FlashAttentionOptions::new() }
    }

    /// Sets options of attention, in addition to those of the module.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{BackwardOrder, FlashAttentionOptions, FlashSelfAttentionInput};
    ///
    /// let x = Tensor::<3>::zeros([1, 10, 64], &Device::default());
    /// let fast = FlashAttentionOptions::new().with_backward_order(BackwardOrder::Fast);
    /// let input = FlashSelfAttentionInput::new(x).options(fast);
    /// ```
    pub fn options(mut self, options: FlashAttentionOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the angles of the rotary embedding, of other positions than counted ones, or computed once for all layers of a model.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashSelfAttentionConfig, FlashSelfAttentionInput, RotaryEmbeddingConfig};
    ///
    /// let device = Device::flex();
    /// let rotary = RotaryEmbeddingConfig::new(16);
    /// let config = FlashSelfAttentionConfig::new(8, 2).with_rotary(Some(rotary.clone()));
    /// let layers = [config.init(&device), config.init(&device)];
    /// let angles = rotary.init(layers[0].head_dim(), &device).angles(0, 10)?;
    /// let mut x = Tensor::<3>::ones([1, 10, 8], &device);
    /// for layer in &layers {
    ///     x = layer.forward(FlashSelfAttentionInput::new(x).angles(angles.clone()));
    /// }
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn angles(mut self, angles: RotaryAngles) -> Self {
        self.angles = Some(angles);
        self
    }
}

impl From<Tensor<3>> for FlashSelfAttentionInput {
    fn from(x: Tensor<3>) -> Self {
        Self::new(x)
    }
}
