//! Input and output of multi-head attention.

use crate::options::FlashAttentionOptions;
use burn::tensor::{Bool, Tensor};

/// Input of a [`FlashMultiHeadAttention`](super::FlashMultiHeadAttention).
///
/// ```no_run
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_flash_attention::FlashMhaInput;
///
/// // A decoder's 3 positions over an encoder's 5, the last of which is padding.
/// let device = Device::default();
/// let (decoder, encoder) = (Tensor::<3>::zeros([1, 3, 64], &device), Tensor::<3>::zeros([1, 5, 64], &device));
/// let padding = Tensor::<2, Bool>::from_data([[false, false, false, false, true]], &device);
/// let input = FlashMhaInput::new(decoder, encoder.clone(), encoder).mask_pad(padding);
/// ```
#[derive(Clone, Debug)]
pub struct FlashMhaInput {
    pub(super) query: Tensor<3>,
    pub(super) key: Tensor<3>,
    pub(super) value: Tensor<3>,
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) mask_attn: Option<Tensor<3, Bool>>,
    pub(super) options: FlashAttentionOptions,
}

/// Output of a [`FlashMultiHeadAttention`](super::FlashMultiHeadAttention). Unlike burn-nn's, it has no attention weights.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{FlashMhaInput, FlashMultiHeadAttentionConfig};
///
/// let attention = FlashMultiHeadAttentionConfig::new(8, 2).init(&Device::flex());
/// let output = attention.forward(FlashMhaInput::self_attn(Tensor::zeros([1, 3, 8], &Device::flex())));
/// assert_eq!(output.context.dims(), [1, 3, 8]);
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FlashMhaOutput {
    /// `[batch, seq_q, d_model]`.
    pub context: Tensor<3>,
}

impl FlashMhaInput {
    /// Input of self-attention over `[batch, seq, d_model]`.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let input = burn_flash_attention::FlashMhaInput::self_attn(Tensor::zeros([1, 3, 64], &Device::default()));
    /// ```
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Input of attention from a query `[batch, seq_q, d_model]` to a key and a value `[batch, seq_k, d_model]`.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 64], &Device::default());
    /// let input = burn_flash_attention::FlashMhaInput::new(zeros(3), zeros(5), zeros(5));
    /// ```
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        FlashMhaInput { query, key, value, mask_pad: None, mask_attn: None, options: FlashAttentionOptions::new() }
    }

    /// Hides padding: `[batch, seq_k]`, `true` hides a key from every query.
    ///
    /// ```no_run
    /// use burn::tensor::{Bool, Device, Tensor};
    /// use burn_flash_attention::FlashMhaInput;
    ///
    /// let device = Device::default();
    /// let padding = Tensor::<2, Bool>::from_data([[false, true]], &device);
    /// let input = FlashMhaInput::self_attn(Tensor::zeros([1, 2, 64], &device)).mask_pad(padding);
    /// ```
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Hides pairs: `[batch, seq_q, seq_k]`, `true` hides a key from a query.
    ///
    /// ```no_run
    /// use burn::nn::attention::generate_autoregressive_mask;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::FlashMhaInput;
    ///
    /// let device = Device::default();
    /// let mask = generate_autoregressive_mask(1, 8, &device);
    /// let input = FlashMhaInput::self_attn(Tensor::zeros([1, 8, 64], &device)).mask_attn(mask);
    /// ```
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    /// Sets further options of attention: windows, slopes, sinks, functions, a bias, block masks, packed sequences. Attention is causal if
    /// the module or the options say so, and a pair is hidden if any mask hides it. The dropout rate stays the module's.
    /// [`forward_step`](super::FlashMultiHeadAttention::forward_step) tells which options have a meaning with a cache.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{AlibiSlopes, FlashAttentionOptions, FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let attention = FlashMultiHeadAttentionConfig::new(64, 4).with_causal(true).init(&device);
    /// let options = FlashAttentionOptions::new().with_window_left(127).with_alibi_slopes(AlibiSlopes::geometric(4, &device));
    /// let input = FlashMhaInput::self_attn(Tensor::zeros([1, 10, 64], &device)).options(options);
    /// assert_eq!(attention.forward(input).context.dims(), [1, 10, 64]);
    /// # }
    /// ```
    pub fn options(mut self, options: FlashAttentionOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets masks and options.
    pub(in crate::module) fn with(
        self,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
        options: FlashAttentionOptions,
    ) -> Self {
        FlashMhaInput { mask_pad, mask_attn, options, ..self }
    }
}
