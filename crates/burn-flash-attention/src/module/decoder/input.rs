//! Input of the decoder.

use super::Options;
use crate::module::{FlashMhaInput, combined};
use crate::options::FlashAttentionOptions;
use burn::tensor::{Bool, Tensor};

/// Input of a [`FlashTransformerDecoder`](super::FlashTransformerDecoder).
///
/// ```no_run
/// use burn::nn::attention::generate_autoregressive_mask;
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_flash_attention::FlashTransformerDecoderInput;
///
/// let device = Device::default();
/// let padding = Tensor::<2, Bool>::from_data([[false, false, true]], &device);
/// let zeros = |seq| Tensor::<3>::zeros([1, seq, 64], &device);
/// let input = FlashTransformerDecoderInput::new(zeros(5), zeros(3))
///     .memory_mask_pad(padding)
///     .target_mask_attn(generate_autoregressive_mask(1, 5, &device));
/// ```
#[derive(Clone, Debug)]
pub struct FlashTransformerDecoderInput {
    pub(super) target: Tensor<3>,
    pub(super) target_mask_pad: Option<Tensor<2, Bool>>,
    pub(super) target_mask_attn: Option<Tensor<3, Bool>>,
    pub(super) memory: Tensor<3>,
    pub(super) memory_mask_pad: Option<Tensor<2, Bool>>,
    pub(super) memory_mask_attn: Option<Tensor<3, Bool>>,
    pub(super) target_options: FlashAttentionOptions,
    pub(super) memory_options: FlashAttentionOptions,
}

impl FlashTransformerDecoderInput {
    /// Input with a target `[batch, seq_q, d_model]` and a memory `[batch, seq_k, d_model]`.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 64], &Device::default());
    /// let input = burn_flash_attention::FlashTransformerDecoderInput::new(zeros(5), zeros(3));
    /// ```
    pub fn new(target: Tensor<3>, memory: Tensor<3>) -> Self {
        FlashTransformerDecoderInput {
            target,
            target_mask_pad: None,
            target_mask_attn: None,
            memory,
            memory_mask_pad: None,
            memory_mask_attn: None,
            target_options: FlashAttentionOptions::new(),
            memory_options: FlashAttentionOptions::new(),
        }
    }

    /// Hides padding of the memory: `[batch, seq_k]`, `true` hides a position from all.
    ///
    /// ```no_run
    /// # use burn::tensor::{Bool, Device, Tensor};
    /// # let device = Device::default();
    /// # let input = burn_flash_attention::FlashTransformerDecoderInput::new(Tensor::zeros([1, 5, 64], &device), Tensor::zeros([1, 2, 64], &device));
    /// let input = input.memory_mask_pad(Tensor::<2, Bool>::from_data([[false, true]], &device));
    /// ```
    pub fn memory_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.memory_mask_pad = Some(mask_pad);
        self
    }

    /// Hides pairs of target and memory: `[batch, seq_q, seq_k]`, `true` hides a position of the memory from one of the target.
    ///
    /// ```no_run
    /// # use burn::tensor::{Bool, Device, Tensor};
    /// # let device = Device::default();
    /// # let input = burn_flash_attention::FlashTransformerDecoderInput::new(Tensor::zeros([1, 1, 64], &device), Tensor::zeros([1, 2, 64], &device));
    /// let input = input.memory_mask_attn(Tensor::<3, Bool>::from_data([[[false, true]]], &device));
    /// ```
    pub fn memory_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.memory_mask_attn = Some(mask_attn);
        self
    }

    /// Hides padding of the target: `[batch, seq_q]`, `true` hides a position from all.
    ///
    /// ```no_run
    /// # use burn::tensor::{Bool, Device, Tensor};
    /// # let device = Device::default();
    /// # let input = burn_flash_attention::FlashTransformerDecoderInput::new(Tensor::zeros([1, 2, 64], &device), Tensor::zeros([1, 3, 64], &device));
    /// let input = input.target_mask_pad(Tensor::<2, Bool>::from_data([[false, true]], &device));
    /// ```
    pub fn target_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.target_mask_pad = Some(mask_pad);
        self
    }

    /// Hides pairs of the target: `[batch, seq_q, seq_q]`, `true` hides the second position from the first.
    ///
    /// ```no_run
    /// # use burn::tensor::{Bool, Device, Tensor};
    /// # use burn::nn::attention::generate_autoregressive_mask;
    /// # let device = Device::default();
    /// # let input = burn_flash_attention::FlashTransformerDecoderInput::new(Tensor::zeros([1, 5, 64], &device), Tensor::zeros([1, 3, 64], &device));
    /// let input = input.target_mask_attn(generate_autoregressive_mask(1, 5, &device));
    /// ```
    pub fn target_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.target_mask_attn = Some(mask_attn);
        self
    }

    /// Sets the options of every layer's self-attention; see [`FlashMhaInput::options`](crate::FlashMhaInput::options).
    ///
    /// ```no_run
    /// # use burn::tensor::{Device, Tensor};
    /// # use burn_flash_attention::{AlibiSlopes, FlashAttentionOptions};
    /// # let device = Device::default();
    /// # let input = burn_flash_attention::FlashTransformerDecoderInput::new(Tensor::zeros([1, 5, 64], &device), Tensor::zeros([1, 3, 64], &device));
    /// let input = input.target_options(FlashAttentionOptions::new().with_alibi_slopes(AlibiSlopes::geometric(8, &device)));
    /// ```
    pub fn target_options(mut self, options: FlashAttentionOptions) -> Self {
        self.target_options = options;
        self
    }

    /// Sets the options of every layer's cross-attention; see [`FlashMhaInput::options`](crate::FlashMhaInput::options).
    ///
    /// ```no_run
    /// # use burn::tensor::{Device, Tensor};
    /// # use burn_flash_attention::FlashAttentionOptions;
    /// # let device = Device::default();
    /// # let input = burn_flash_attention::FlashTransformerDecoderInput::new(Tensor::zeros([1, 5, 64], &device), Tensor::zeros([1, 3, 64], &device));
    /// let input = input.memory_options(FlashAttentionOptions::new().with_softcap(30.0));
    /// ```
    pub fn memory_options(mut self, options: FlashAttentionOptions) -> Self {
        self.memory_options = options;
        self
    }

    /// The same as the inputs of a layer's attention, within the target and to the memory.
    pub(super) fn of_attention(&self) -> [FlashMhaInput; 2] {
        let (target, memory) = (self.target.clone(), self.memory.clone());
        let of_target = FlashMhaInput::self_attn(target.clone());
        let of_memory = FlashMhaInput::new(target, memory.clone(), memory);
        [
            of_target.with(self.target_mask_pad.clone(), self.target_mask_attn.clone(), self.target_options.clone()),
            of_memory.with(self.memory_mask_pad.clone(), self.memory_mask_attn.clone(), self.memory_options.clone()),
        ]
    }

    /// Options and masks together.
    pub(super) fn combined(&self) -> Options {
        let (target, memory) = (self.target_options.clone(), self.memory_options.clone());
        Options {
            target: combined(target, self.target_mask_pad.clone(), self.target_mask_attn.clone()),
            memory: combined(memory, self.memory_mask_pad.clone(), self.memory_mask_attn.clone()),
        }
    }
}
