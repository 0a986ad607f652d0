//! Decoding with the encoder: steps, and burn-nn's contract of whole prefixes.

use super::{FlashTransformerEncoder, FlashTransformerEncoderInput};
use crate::checks::unwrapped;
use crate::module::cache::{LayerKvCache, Outputs, all_or_none};
use crate::module::combined;
use crate::module::steps::{check_layers, check_prefix, newest, newest_options};
use burn::tensor::Tensor;
use flash_attention_kernels::{AttentionError, KvStorage};

/// Cache of a [`FlashTransformerEncoder`] for decoding: for each layer keys and values, which are written in place and have no gradient. A
/// clone is a deep copy, with memory of its own.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// let encoder = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
/// let cache = encoder.new_autoregressive_cache();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlashTransformerEncoderAutoregressiveCache {
    layers: Vec<LayerKvCache>,
    outputs: Outputs,
}

impl FlashTransformerEncoderAutoregressiveCache {
    /// Sets how the memory that the first step allocates stores keys and values. Memory that there is stays as it is.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, KvStorage};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(64, 128, 2, 2).init(&burn::tensor::Device::flex());
    /// let cache = encoder.new_autoregressive_cache().with_storage(KvStorage::E4m3);
    /// # }
    /// ```
    pub fn with_storage(mut self, storage: KvStorage) -> Self {
        self.layers.iter_mut().for_each(|layer| layer.set_storage(storage));
        self
    }

    /// Number of positions so far; of the longest sequence, if lengths differ.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let encoder = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
    /// assert_eq!(encoder.new_autoregressive_cache().max_len(), 0);
    /// # }
    /// ```
    pub fn max_len(&self) -> usize {
        self.layers.first().map_or(0, LayerKvCache::max_len)
    }

    /// Forgets the positions from `len` on, such as proposed tokens that were not accepted.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
    /// let mut cache = encoder.new_autoregressive_cache();
    /// let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, 4, 8], &Device::flex()));
    /// encoder.forward_step(input, &mut cache);
    /// cache.truncate(2);
    /// assert_eq!(cache.max_len(), 2);
    /// # }
    /// ```
    pub fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        self.outputs.truncate(len);
    }
}

impl FlashTransformerEncoder {
    /// Encodes new positions, which attend to all positions so far. Returns `[batch, new, d_model]`, the output of the new positions.
    ///
    /// # Shapes
    ///
    /// The input has the new positions only, `[batch, new, d_model]`: a prompt at first, then one position, or several. The keys of masks,
    /// biases and tensors of functions are all positions so far, `max_len` of the cache after the call:
    /// [`mask_pad`](FlashTransformerEncoderInput::mask_pad) is `[batch, max_len]`,
    /// [`mask_attn`](FlashTransformerEncoderInput::mask_attn) `[batch, new, max_len]`. Options are those of
    /// [`FlashMultiHeadAttention::forward_step`](crate::FlashMultiHeadAttention::forward_step).
    ///
    /// The result equals [`forward`](Self::forward)'s if later positions are hidden from earlier ones, by
    /// [`causal`](crate::FlashTransformerEncoderConfig::causal) or by a mask.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_step`](Self::try_forward_step) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let encoder = FlashTransformerEncoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
    /// let mut cache = encoder.new_autoregressive_cache();
    /// for new in [5, 1, 1] {
    ///     let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, new, 8], &Device::flex()));
    ///     assert_eq!(encoder.forward_step(input, &mut cache).dims(), [1, new, 8]);
    /// }
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_step(
        &self,
        input: FlashTransformerEncoderInput,
        cache: &mut FlashTransformerEncoderAutoregressiveCache,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_step(input, cache))
    }

    /// [`forward_step`](Self::forward_step) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// The errors of [`try_forward`](Self::try_forward); options that have no meaning with a cache; a cache of another encoder; and
    /// [`Tracked`](AttentionError::Tracked), if autodiff tracks the input or parameters, since a cache has no gradient.
    /// [`Module::valid`](burn::module::Module::valid) gives the module without autodiff.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{AttentionError, FlashTransformerEncoderConfig, FlashTransformerEncoderInput};
    ///
    /// let device = Device::flex().autodiff();
    /// let trained = FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&device);
    /// let input = FlashTransformerEncoderInput::new(Tensor::zeros([1, 1, 8], &device));
    /// let error = trained.try_forward_step(input, &mut trained.new_autoregressive_cache()).unwrap_err();
    /// assert!(matches!(error, AttentionError::Tracked { .. }));
    /// # }
    /// ```
    pub fn try_forward_step(
        &self,
        input: FlashTransformerEncoderInput,
        cache: &mut FlashTransformerEncoderAutoregressiveCache,
    ) -> Result<Tensor<3>, AttentionError> {
        check_layers(self.layers.len(), cache.layers.len())?;
        let of_attention = input.of_attention();
        let mut layers = self.layers.iter().zip(&cache.layers);
        layers.try_for_each(|(layer, cache)| layer.mha.check_step(&of_attention, cache))?;
        let options = combined(input.options, input.mask_pad, input.mask_attn);
        all_or_none(&mut cache.layers, |caches| {
            self.layers.iter().zip(caches).try_fold(input.tensor, |x, (layer, cache)| {
                let options = options.clone();
                layer.sublayers(x, |x| layer.mha.attended_with_cache(x.clone(), x.clone(), x, options, cache))
            })
        })
    }

    /// Encodes step by step by burn-nn's contract: each call receives the whole prefix and returns the output for all of it. A call is a
    /// [step](Self::forward_step) with the positions that the prefix has more than the one before, whose outputs are appended to those so
    /// far. The result equals [`forward`](Self::forward)'s if later positions are hidden from earlier ones, by
    /// [`causal`](crate::FlashTransformerEncoderConfig::causal) or by a mask.
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

    /// [`forward_autoregressive_inference`](Self::forward_autoregressive_inference) that returns an error instead of panicking. The cache
    /// is then unchanged.
    ///
    /// # Errors
    ///
    /// The errors of [`try_forward_step`](Self::try_forward_step); `seq_lens_q`; prefixes without new positions; and a cache that steps were
    /// taken with.
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
        let [batch, seq, _] = input.tensor.dims();
        for layer in &self.layers {
            layer.mha.check(&input.of_attention(), 0)?;
            check_prefix(&input.options, [batch, layer.mha.n_heads, seq, seq])?;
        }
        let decoded = cache.outputs.decoded(seq, cache.layers.first().map(LayerKvCache::max_len))?;
        let new = self.try_forward_step(input.newest(decoded), cache)?;
        Ok(cache.outputs.grown(new))
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
        let layers = self.layers.iter().map(|_| LayerKvCache::default()).collect();
        FlashTransformerEncoderAutoregressiveCache { layers, outputs: Outputs::default() }
    }

    /// Creates an empty cache whose first call allocates memory for `capacity` positions in each layer. More positions double it, which
    /// copies it.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let encoder = burn_flash_attention::FlashTransformerEncoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
    /// assert_eq!(encoder.new_autoregressive_cache_with_capacity(1024).max_len(), 0);
    /// # }
    /// ```
    pub fn new_autoregressive_cache_with_capacity(
        &self,
        capacity: usize,
    ) -> FlashTransformerEncoderAutoregressiveCache {
        let layers = self.layers.iter().map(|_| LayerKvCache::with_capacity(capacity)).collect();
        FlashTransformerEncoderAutoregressiveCache { layers, outputs: Outputs::default() }
    }
}

impl FlashTransformerEncoderInput {
    /// The positions of a prefix after the first `decoded`, and their rows of masks and options.
    fn newest(self, decoded: usize) -> Self {
        FlashTransformerEncoderInput {
            tensor: newest(self.tensor, decoded),
            mask_attn: self.mask_attn.map(|mask| newest(mask, decoded)),
            options: newest_options(self.options, decoded),
            ..self
        }
    }
}
