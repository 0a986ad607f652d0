//! Decoding with multi-head attention: steps, and burn-nn's contract of whole prefixes.

use super::{FlashMhaInput, FlashMhaOutput, FlashMultiHeadAttention};
use crate::checks::{agree, unwrapped};
use crate::module::cache::{FlashMhaCache, LayerKvCache, MemoryKeysValues, MhaKeysValues};
use crate::module::steps::{check_decodes, check_prefix, newest, newest_options};
use crate::module::{combined, joined};
use crate::options::FlashAttentionOptions;
use burn::tensor::Tensor;
use flash_attention_kernels::AttentionError;

impl FlashMultiHeadAttention {
    /// Computes attention of new positions over all positions so far, whose keys and values are in the cache, or over a memory. Returns
    /// `[batch, new, d_model]`, the output of the new positions.
    ///
    /// # Shapes
    ///
    /// The input has the new positions only: a prompt at first, then one position, or several.
    ///
    /// - Self-attention ([`FlashMhaCache::autoregressive`]): query, key and value are `[batch, new, d_model]`. Key and value are appended to
    ///   the cache. The keys of masks, biases and tensors of functions are all positions so far, [`FlashMhaCache::max_len`] after the call:
    ///   [`mask_pad`](FlashMhaInput::mask_pad) is `[batch, max_len]`, [`mask_attn`](FlashMhaInput::mask_attn) `[batch, new, max_len]`.
    /// - Cross-attention ([`FlashMhaCache::autoregressive_cross_attention`]): the query is `[batch, new, d_model]`; key and value are the
    ///   memory, `[batch, seq_k, d_model]`. Those of the first call are kept.
    ///
    /// # Options
    ///
    /// Set causality, in the module or in the options, where several positions are new and the first must not see the last.
    /// [`seq_lens_q`](FlashAttentionOptions::seq_lens_q) is the number of new positions of each sequence, where prompts of different lengths
    /// share a batch: the rest is padding, which is not appended. Functions receive positions in the whole sequence. Refused are dropout,
    /// top-left alignment, `seq_lens_k`, packed sequences and block masks; over a memory also options that count positions.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_step`](Self::try_forward_step) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let attention = FlashMultiHeadAttentionConfig::new(8, 2).with_causal(true).init(&device);
    /// let new = |n| FlashMhaInput::self_attn(Tensor::zeros([2, n, 8], &device));
    /// let mut cache = FlashMhaCache::with_capacity(16);
    /// // Two prompts, of five and of three positions; then one position of each.
    /// let lens = FlashAttentionOptions::new().with_seq_lens_q(Tensor::<1, Int>::from_data([5, 3], &device));
    /// assert_eq!(attention.forward_step(new(5).options(lens), &mut cache).context.dims(), [2, 5, 8]);
    /// assert_eq!(attention.forward_step(new(1), &mut cache).context.dims(), [2, 1, 8]);
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_step(&self, input: FlashMhaInput, cache: &mut FlashMhaCache) -> FlashMhaOutput {
        unwrapped(self.try_forward_step(input, cache))
    }

    /// [`forward_step`](Self::forward_step) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value: the errors of [`try_forward`](Self::try_forward); options that
    /// have no meaning with a cache; and [`Tracked`](AttentionError::Tracked) in self-attention, if autodiff tracks the input or the
    /// module's parameters, since a cache has no gradient. [`Module::valid`](burn::module::Module::valid) gives the module without autodiff.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::module::Module;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{AttentionError, FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let trained = FlashMultiHeadAttentionConfig::new(8, 2).with_causal(true).init(&device);
    /// let mut cache = FlashMhaCache::autoregressive();
    /// let input = FlashMhaInput::self_attn(Tensor::zeros([1, 1, 8], &device));
    /// let error = trained.try_forward_step(input, &mut cache).unwrap_err();
    /// assert!(matches!(error, AttentionError::Tracked { .. }));
    /// let input = FlashMhaInput::self_attn(Tensor::zeros([1, 1, 8], &device.inner()));
    /// assert!(trained.valid().try_forward_step(input, &mut cache).is_ok());
    /// # }
    /// ```
    pub fn try_forward_step(
        &self,
        input: FlashMhaInput,
        cache: &mut FlashMhaCache,
    ) -> Result<FlashMhaOutput, AttentionError> {
        match &mut cache.keys_values {
            MhaKeysValues::OfTarget(cache) => {
                self.check_step(&input, cache)?;
                let options = combined(input.options, input.mask_pad, input.mask_attn);
                let context = self.attended_with_cache(input.query, input.key, input.value, options, cache)?;
                Ok(FlashMhaOutput { context })
            }
            MhaKeysValues::OfMemory(memory) => {
                self.check_step_over_memory(&input, memory)?;
                let options = combined(input.options, input.mask_pad, input.mask_attn);
                let context = self.attended_over_memory(input.query, input.key, input.value, options, memory)?;
                Ok(FlashMhaOutput { context })
            }
        }
    }

    /// Computes attention step by step by burn-nn's contract: each call receives the whole prefix and returns the output for all of it. A
    /// call is a [step](Self::forward_step) with the positions that the prefix has more than the one before, whose outputs are appended to those
    /// so far. Masks, biases and tensors of functions have the prefix's shape; only their rows of new positions are read. Earlier positions
    /// keep their keys, values and outputs, even if the input changes.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_cache`](Self::try_forward_cache) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let attention = FlashMultiHeadAttentionConfig::new(8, 2).init(&Device::flex());
    /// let zeros = |seq| Tensor::<3>::zeros([1, seq, 8], &Device::flex());
    /// // A decoder's positions over an encoder's seven.
    /// let mut cache = FlashMhaCache::autoregressive_cross_attention();
    /// for len in 1..4 {
    ///     let output = attention.forward_cache(FlashMhaInput::new(zeros(len), zeros(7), zeros(7)), &mut cache);
    ///     assert_eq!(output.context.dims(), [1, len, 8]);
    /// }
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_cache(&self, input: FlashMhaInput, cache: &mut FlashMhaCache) -> FlashMhaOutput {
        unwrapped(self.try_forward_cache(input, cache))
    }

    /// [`forward_cache`](Self::forward_cache) that returns an error instead of panicking. The cache is then unchanged.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the argument at fault and its value: the errors of
    /// [`try_forward_step`](Self::try_forward_step); `seq_lens_q`; prefixes without new positions; and a cache that steps were taken with.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let attention = FlashMultiHeadAttentionConfig::new(8, 2).init(&Device::flex());
    /// let prefix = |len| FlashMhaInput::self_attn(Tensor::zeros([1, len, 8], &Device::flex()));
    /// let mut cache = FlashMhaCache::autoregressive();
    /// attention.forward_cache(prefix(3), &mut cache);
    /// let error = attention.try_forward_cache(prefix(2), &mut cache).unwrap_err();
    /// assert!(error.to_string().starts_with("prefix = 2 positions is not supported"));
    /// # }
    /// ```
    pub fn try_forward_cache(
        &self,
        input: FlashMhaInput,
        cache: &mut FlashMhaCache,
    ) -> Result<FlashMhaOutput, AttentionError> {
        self.check(&input, 0)?;
        let ([batch, seq_q, _], [_, seq_k, _]) = (input.query.dims(), input.key.dims());
        check_prefix(&input.options, [batch, self.n_heads, seq_q, seq_k])?;
        let new = match &cache.keys_values {
            MhaKeysValues::OfTarget(keys_values) => {
                agree("key", &input.key.dims(), (1, "seq_k"), ("query", seq_q))?;
                let decoded = cache.outputs.decoded(seq_q, Some(keys_values.max_len()))?;
                let (key, value) = (newest(input.key.clone(), decoded), newest(input.value.clone(), decoded));
                FlashMhaInput { key, value, ..input.newest_queries(decoded) }
            }
            MhaKeysValues::OfMemory(_) => input.newest_queries(cache.outputs.decoded(seq_q, None)?),
        };
        let FlashMhaOutput { context } = self.try_forward_step(new, cache)?;
        Ok(FlashMhaOutput { context: cache.outputs.grown(context) })
    }

    /// Checks a step of self-attention.
    pub(in crate::module) fn check_step(
        &self,
        input: &FlashMhaInput,
        cache: &LayerKvCache,
    ) -> Result<(), AttentionError> {
        self.check(input, cache.max_len())?;
        agree("key", &input.key.dims(), (1, "seq_k"), ("query", input.query.dims()[1]))?;
        check_decodes(&self.configured(input.options.clone())?, false)
    }

    /// Checks a step over a memory.
    pub(in crate::module) fn check_step_over_memory(
        &self,
        input: &FlashMhaInput,
        memory: &MemoryKeysValues,
    ) -> Result<(), AttentionError> {
        self.check(input, 0)?;
        if let Some(len) = memory.len() {
            agree("key", &input.key.dims(), (1, "seq_k"), ("the cache", len))?;
        }
        check_decodes(&self.configured(input.options.clone())?, true)
    }

    /// Output of new positions over all positions so far. A mask has a row for each new position.
    pub(in crate::module) fn attended_with_cache(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        options: FlashAttentionOptions,
        cache: &mut LayerKvCache,
    ) -> Result<Tensor<3>, AttentionError> {
        let (key, value) = self.keys_values(key, value);
        let (query, options) = self.queries(query, options)?;
        Ok(joined(cache.attend(query, key, value, &options)?, &self.output))
    }

    /// Output of new positions over a memory that stays as in the first call. This has a gradient.
    pub(in crate::module) fn attended_over_memory(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        options: FlashAttentionOptions,
        memory: &mut MemoryKeysValues,
    ) -> Result<Tensor<3>, AttentionError> {
        let attend = |key, value| self.attended_over(query, (key, value), options);
        memory.attend(|| self.keys_values(key, value), attend)
    }
}

impl FlashMhaInput {
    /// The queries of a prefix after the first `decoded`, and their rows of masks and options.
    fn newest_queries(self, decoded: usize) -> Self {
        FlashMhaInput {
            query: newest(self.query, decoded),
            mask_attn: self.mask_attn.map(|mask| newest(mask, decoded)),
            options: newest_options(self.options, decoded),
            ..self
        }
    }
}
