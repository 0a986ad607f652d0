//! Decoding with the decoder: steps, and burn-nn's contract of whole prefixes.

use super::{FlashTransformerDecoder, FlashTransformerDecoderInput, Options};
use crate::checks::unwrapped;
use crate::module::cache::{LayerKvCache, MemoryKeysValues, Outputs, Restore, all_or_none};
use crate::module::steps::{check_layers, check_prefix, newest, newest_options};
use burn::tensor::Tensor;
use flash_attention_kernels::{AttentionError, KvStorage};

/// Cache of a [`FlashTransformerDecoder`] for decoding: for each layer keys and values of the target, which are written in place and have
/// no gradient, and of the memory. A clone is a deep copy of those of the target, with memory of its own.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// let decoder = burn_flash_attention::FlashTransformerDecoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
/// let cache = decoder.new_autoregressive_cache();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlashTransformerDecoderAutoregressiveCache {
    layers: Vec<LayerCache>,
    outputs: Outputs,
}

/// Keys and values of one layer: of the target so far, and of the memory.
#[derive(Clone, Debug, Default)]
struct LayerCache {
    target: LayerKvCache,
    memory: MemoryKeysValues,
}

impl Restore for LayerCache {
    type State = (<LayerKvCache as Restore>::State, MemoryKeysValues);

    fn state(&self) -> Self::State {
        (self.target.state(), self.memory.clone())
    }

    fn restore(&mut self, (target, memory): Self::State) {
        self.target.restore(target);
        self.memory = memory;
    }
}

impl FlashTransformerDecoderAutoregressiveCache {
    /// Sets how the memory that the first step allocates stores keys and values of the target. Memory that there is stays as it is.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, KvStorage};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(64, 128, 2, 2).init(&burn::tensor::Device::flex());
    /// let cache = decoder.new_autoregressive_cache().with_storage(KvStorage::E4m3);
    /// # }
    /// ```
    pub fn with_storage(mut self, storage: KvStorage) -> Self {
        self.layers.iter_mut().for_each(|layer| layer.target.set_storage(storage));
        self
    }

    /// Number of positions so far; of the longest sequence, if lengths differ.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let decoder = burn_flash_attention::FlashTransformerDecoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
    /// assert_eq!(decoder.new_autoregressive_cache().max_len(), 0);
    /// # }
    /// ```
    pub fn max_len(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.target.max_len())
    }

    /// Forgets the positions from `len` on, such as proposed tokens that were not accepted. The memory stays.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
    /// let mut cache = decoder.new_autoregressive_cache();
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &Device::flex());
    /// let input = FlashTransformerDecoderInput::new(zeros(4), zeros(7));
    /// decoder.forward_step(input, &mut cache);
    /// cache.truncate(2);
    /// assert_eq!(cache.max_len(), 2);
    /// # }
    /// ```
    pub fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.target.truncate(len));
        self.outputs.truncate(len);
    }
}

impl FlashTransformerDecoder {
    /// Decodes new positions of the target, which attend to all positions so far and to the memory. Returns `[batch, new, d_model]`, the
    /// output of the new positions.
    ///
    /// # Shapes
    ///
    /// The target has the new positions only, `[batch, new, d_model]`: a prompt at first, then one position, or several. The memory,
    /// `[batch, seq_k, d_model]`, is that of the first call, which is kept. The keys of the target's masks, biases and tensors of functions
    /// are all positions so far, `max_len` of the cache after the call:
    /// [`target_mask_pad`](FlashTransformerDecoderInput::target_mask_pad) is `[batch, max_len]`,
    /// [`target_mask_attn`](FlashTransformerDecoderInput::target_mask_attn) `[batch, new, max_len]`, and
    /// [`memory_mask_attn`](FlashTransformerDecoderInput::memory_mask_attn) `[batch, new, seq_k]`. Options are those of
    /// [`FlashMultiHeadAttention::forward_step`](crate::FlashMultiHeadAttention::forward_step).
    ///
    /// The result equals [`forward`](Self::forward)'s if later positions of the target are hidden from earlier ones, by
    /// [`causal`](crate::FlashTransformerDecoderConfig::causal) or by a mask.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_step`](Self::try_forward_step) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
    /// let mut cache = decoder.new_autoregressive_cache();
    /// let memory = Tensor::<3>::zeros([1, 7, 8], &Device::flex());
    /// for new in [5, 1, 1] {
    ///     let target = Tensor::zeros([1, new, 8], &Device::flex());
    ///     let input = FlashTransformerDecoderInput::new(target, memory.clone());
    ///     assert_eq!(decoder.forward_step(input, &mut cache).dims(), [1, new, 8]);
    /// }
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_step(
        &self,
        input: FlashTransformerDecoderInput,
        cache: &mut FlashTransformerDecoderAutoregressiveCache,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_step(input, cache))
    }

    /// [`forward_step`](Self::forward_step) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// The errors of [`try_forward`](Self::try_forward); options that have no meaning with a cache; a cache of another decoder; and
    /// [`Tracked`](AttentionError::Tracked), if autodiff tracks the input or parameters, since a cache has no gradient.
    /// [`Module::valid`](burn::module::Module::valid) gives the module without autodiff.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{AttentionError, FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let device = Device::flex().autodiff();
    /// let trained = FlashTransformerDecoderConfig::new(8, 16, 2, 2).init(&device);
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &device);
    /// let input = FlashTransformerDecoderInput::new(zeros(1), zeros(7));
    /// let error = trained.try_forward_step(input, &mut trained.new_autoregressive_cache()).unwrap_err();
    /// assert!(matches!(error, AttentionError::Tracked { .. }));
    /// # }
    /// ```
    pub fn try_forward_step(
        &self,
        input: FlashTransformerDecoderInput,
        cache: &mut FlashTransformerDecoderAutoregressiveCache,
    ) -> Result<Tensor<3>, AttentionError> {
        check_layers(self.layers.len(), cache.layers.len())?;
        let [of_target, of_memory] = input.of_attention();
        for (layer, cache) in self.layers.iter().zip(&cache.layers) {
            layer.self_attn.check_step(&of_target, &cache.target)?;
            layer.cross_attn.check_step_over_memory(&of_memory, &cache.memory)?;
        }
        let (options, memory) = (input.combined(), input.memory);
        all_or_none(&mut cache.layers, |caches| {
            self.layers.iter().zip(caches).try_fold(
                input.target,
                |x, (layer, LayerCache { target: positions, memory: kept })| {
                    let Options { target: of_target, memory: of_memory } = options.clone();
                    let (self_attn, cross_attn, memory) = (&layer.self_attn, &layer.cross_attn, memory.clone());
                    layer.sublayers(
                        x,
                        |x| self_attn.attended_with_cache(x.clone(), x.clone(), x, of_target, positions),
                        |x| cross_attn.attended_over_memory(x, memory.clone(), memory, of_memory, kept),
                    )
                },
            )
        })
    }

    /// Decodes step by step by burn-nn's contract: each call receives the whole target so far and returns the output for all of it. A call is
    /// a [step](Self::forward_step) with the positions that the target has more than the one before, whose outputs are appended to those so
    /// far. The memory of the first call is kept. The result equals [`forward`](Self::forward)'s if later positions of the target are hidden
    /// from earlier ones, by [`causal`](crate::FlashTransformerDecoderConfig::causal) or by a mask.
    ///
    /// # Panics
    ///
    /// With the message of the error that
    /// [`try_forward_autoregressive_inference`](Self::try_forward_autoregressive_inference) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 2).with_causal(true).init(&Device::flex());
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &Device::flex());
    /// let mut cache = decoder.new_autoregressive_cache();
    /// for len in 1..4 {
    ///     let input = FlashTransformerDecoderInput::new(zeros(len), zeros(7));
    ///     assert_eq!(decoder.forward_autoregressive_inference(input, &mut cache).dims(), [1, len, 8]);
    /// }
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_autoregressive_inference(
        &self,
        input: FlashTransformerDecoderInput,
        cache: &mut FlashTransformerDecoderAutoregressiveCache,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_autoregressive_inference(input, cache))
    }

    /// [`forward_autoregressive_inference`](Self::forward_autoregressive_inference) that returns an error instead of panicking. The cache
    /// is then unchanged.
    ///
    /// # Errors
    ///
    /// The errors of [`try_forward_step`](Self::try_forward_step); `seq_lens_q`; targets without new positions; and a cache that steps were
    /// taken with.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashTransformerDecoderConfig, FlashTransformerDecoderInput};
    ///
    /// let decoder = FlashTransformerDecoderConfig::new(8, 16, 2, 2).init(&Device::flex());
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &Device::flex());
    /// let mut cache = decoder.new_autoregressive_cache();
    /// decoder.forward_autoregressive_inference(FlashTransformerDecoderInput::new(zeros(2), zeros(7)), &mut cache);
    /// let shorter = FlashTransformerDecoderInput::new(zeros(1), zeros(7));
    /// assert!(decoder.try_forward_autoregressive_inference(shorter, &mut cache).is_err());
    /// # }
    /// ```
    pub fn try_forward_autoregressive_inference(
        &self,
        input: FlashTransformerDecoderInput,
        cache: &mut FlashTransformerDecoderAutoregressiveCache,
    ) -> Result<Tensor<3>, AttentionError> {
        let ([batch, seq, _], seq_k) = (input.target.dims(), input.memory.dims()[1]);
        let [of_target, of_memory] = input.of_attention();
        for layer in &self.layers {
            layer.self_attn.check(&of_target, 0)?;
            layer.cross_attn.check(&of_memory, 0)?;
            check_prefix(&input.target_options, [batch, layer.self_attn.n_heads, seq, seq])?;
            check_prefix(&input.memory_options, [batch, layer.cross_attn.n_heads, seq, seq_k])?;
        }
        let decoded = cache.outputs.decoded(seq, cache.layers.first().map(|layer| layer.target.max_len()))?;
        let new = self.try_forward_step(input.newest(decoded), cache)?;
        Ok(cache.outputs.grown(new))
    }

    /// Creates an empty cache.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let decoder = burn_flash_attention::FlashTransformerDecoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
    /// let cache = decoder.new_autoregressive_cache();
    /// # }
    /// ```
    pub fn new_autoregressive_cache(&self) -> FlashTransformerDecoderAutoregressiveCache {
        let layers = self.layers.iter().map(|_| LayerCache::default()).collect();
        FlashTransformerDecoderAutoregressiveCache { layers, outputs: Outputs::default() }
    }

    /// Creates an empty cache whose first call allocates memory for `capacity` positions of the target in each layer. More positions double
    /// it, which copies it.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let decoder = burn_flash_attention::FlashTransformerDecoderConfig::new(8, 16, 2, 2).init(&burn::tensor::Device::flex());
    /// assert_eq!(decoder.new_autoregressive_cache_with_capacity(1024).max_len(), 0);
    /// # }
    /// ```
    pub fn new_autoregressive_cache_with_capacity(
        &self,
        capacity: usize,
    ) -> FlashTransformerDecoderAutoregressiveCache {
        let target = || LayerKvCache::with_capacity(capacity);
        let layers = self.layers.iter().map(|_| LayerCache { target: target(), ..Default::default() }).collect();
        FlashTransformerDecoderAutoregressiveCache { layers, outputs: Outputs::default() }
    }
}

impl FlashTransformerDecoderInput {
    /// The positions of a target after the first `decoded`, and their rows of masks and options.
    fn newest(self, decoded: usize) -> Self {
        FlashTransformerDecoderInput {
            target: newest(self.target, decoded),
            target_mask_attn: self.target_mask_attn.map(|mask| newest(mask, decoded)),
            memory_mask_attn: self.memory_mask_attn.map(|mask| newest(mask, decoded)),
            target_options: newest_options(self.target_options, decoded),
            memory_options: newest_options(self.memory_options, decoded),
            ..self
        }
    }
}
