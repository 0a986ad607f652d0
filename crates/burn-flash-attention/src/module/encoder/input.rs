//! Input of the encoder.

use crate::module::FlashMhaInput;
use crate::options::FlashAttentionOptions;
use burn::tensor::{Bool, Tensor};

/// Input of a [`FlashTransformerEncoder`](super::FlashTransformerEncoder).
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
    pub(super) tensor: Tensor<3>,
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) mask_attn: Option<Tensor<3, Bool>>,
    pub(super) options: FlashAttentionOptions,
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

    /// The same as the input of a layer's attention.
    pub(super) fn of_attention(&self) -> FlashMhaInput {
        let FlashTransformerEncoderInput { tensor, mask_pad, mask_attn, options } = self.clone();
        FlashMhaInput::self_attn(tensor).with(mask_pad, mask_attn, options)
    }
}
