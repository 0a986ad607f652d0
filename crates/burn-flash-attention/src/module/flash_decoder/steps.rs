//! Steps of a decoder over caches.

use super::{FlashDecoder, FlashDecoderLayer};
use crate::kv_cache::operands::Operands;
use crate::kv_cache::{AttentionCache, KvCache, KvCacheConfig, PagedKvCache, PagedKvCacheConfig};
use crate::module::self_attention::FlashSelfAttentionInput;
use crate::module::steps::check_layers;
use crate::module::unwrapped;
use crate::options::FlashAttentionOptions;
use burn::tensor::{Int, Tensor};
use flash_attention_kernels::AttentionError;

/// Keys and values of the layers of a [`FlashDecoder`].
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_flash_attention::{FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
///
/// let device = Device::flex();
/// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
/// let model = FlashDecoderConfig::new(100, vec![layer; 2]).init(&device);
/// let cache = model.new_cache(4, 128)?;
/// assert_eq!((cache.layers.len(), cache.max_len()), (2, 0));
/// # }
/// # Ok::<(), burn_flash_attention::AttentionError>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct FlashDecoderCache {
    /// The cache of each layer.
    pub layers: Vec<KvCache>,
}

impl FlashDecoderCache {
    /// Length of the longest sequence, as [`KvCache::max_len`].
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
    /// let mut cache = model.new_cache(1, 128)?;
    /// model.forward_step(Tensor::<2, Int>::from_data([[5, 7, 42]], &device), &mut cache, &FlashAttentionOptions::new());
    /// assert_eq!(cache.max_len(), 3);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn max_len(&self) -> usize {
        self.layers.first().map_or(0, KvCache::max_len)
    }
}

impl FlashDecoder {
    /// Caches of all layers for `batch` sequences with memory for `capacity` positions of each, in the element type of the parameters, on
    /// their device without autodiff.
    ///
    /// # Errors
    ///
    /// Those of [`KvCacheConfig::try_init`].
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_flash_attention::{FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig};
    ///
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer]).init(&device);
    /// assert_eq!(model.new_cache(4, 128)?.layers[0].capacity(), 128);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<FlashDecoderCache, AttentionError> {
        let weight = self.embedding.weight.val();
        let of_layer = |layer: &FlashDecoderLayer| {
            let attention = &layer.attention;
            let config = KvCacheConfig::new(batch, attention.num_heads_kv, attention.head_dim(), capacity);
            config.with_dtype(Some(weight.dtype().into())).try_init(&weight.device())
        };
        Ok(FlashDecoderCache { layers: self.layers.iter().map(of_layer).collect::<Result<_, _>>()? })
    }

    /// Logits of the token after each new one, `[batch, new]` to `[batch, new, vocab_size]`, which go on after those in the cache. Options are
    /// those of [`FlashSelfAttention::forward_step`](crate::FlashSelfAttention::forward_step).
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_forward_step`](Self::try_forward_step) returns.
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
    /// let (mut cache, options) = (model.new_cache(1, 128)?, FlashAttentionOptions::new());
    /// let mut tokens = Tensor::<2, Int>::from_data([[5, 7, 42]], &device);
    /// for _ in 0..4 {
    ///     let logits = model.forward_step(tokens, &mut cache, &options);
    ///     let last = logits.dims()[1] - 1;
    ///     tokens = logits.narrow(1, last, 1).argmax(2).reshape([1, 1]);
    /// }
    /// assert_eq!(cache.max_len(), 6);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    #[track_caller]
    pub fn forward_step(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut FlashDecoderCache,
        options: &FlashAttentionOptions,
    ) -> Tensor<3> {
        unwrapped(self.try_forward_step(tokens, cache, options))
    }

    /// [`forward_step`](Self::forward_step) that returns an error instead of panicking. After an error of one layer, the caches of earlier ones
    /// are taken back to where they were.
    ///
    /// # Errors
    ///
    /// Those of [`FlashSelfAttention::try_forward_step`](crate::FlashSelfAttention::try_forward_step), and a cache with another number of
    /// layers.
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
    /// let mut cache = model.new_cache(1, 2)?;
    /// let tokens = Tensor::<2, Int>::zeros([1, 3], &device);
    /// let error = model.try_forward_step(tokens, &mut cache, &FlashAttentionOptions::new()).unwrap_err();
    /// assert!(error.to_string().starts_with("the cache has room for 2 positions"));
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn try_forward_step(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut FlashDecoderCache,
        options: &FlashAttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_hidden_step(tokens, &mut cache.layers, options).map(|hidden| self.logits(hidden))
    }

    /// Caches in pages of all layers, one for each, with `num_pages` pages in the element type of the parameters, on their device without
    /// autodiff. That of a layer with a window has it, and forgets pages that no window reaches.
    ///
    /// Sequences are added to all of them, and are named alike in each.
    ///
    /// # Errors
    ///
    /// Those of [`PagedKvCacheConfig::try_init`].
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::{
    ///     AttentionError, FlashAttentionOptions, FlashDecoderConfig, FlashDecoderLayerConfig, FlashSelfAttentionConfig, MlpConfig,
    ///     PagedKvCache,
    /// };
    ///
    /// # fn main() -> Result<(), AttentionError> {
    /// let device = Device::flex();
    /// let layer = FlashDecoderLayerConfig::new(FlashSelfAttentionConfig::new(16, 2), MlpConfig::new(32));
    /// let model = FlashDecoderConfig::new(100, vec![layer; 2]).init(&device);
    /// let mut caches = model.new_paged_caches(8)?;
    /// // Sequences come and go: a prompt of 3 tokens and one of 2.
    /// let [a, b] = [(); 2].map(|()| caches.iter_mut().map(PagedKvCache::add).last().expect("there are layers"));
    /// let tokens = Tensor::<2, Int>::from_data([[5, 7, 42], [9, 8, 0]], &device);
    /// let mut batch = caches.iter_mut().map(|cache| cache.batch(&[(a, 3), (b, 2)])).collect::<Result<Vec<_>, _>>()?;
    /// let hidden = model.try_hidden_step(tokens, &mut batch, &FlashAttentionOptions::new())?;
    /// assert_eq!(model.logits(hidden).dims(), [2, 3, 100]);
    /// assert_eq!(caches[1].len(b)?, 2);
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    pub fn new_paged_caches(&self, num_pages: usize) -> Result<Vec<PagedKvCache>, AttentionError> {
        let weight = self.embedding.weight.val();
        let of_layer = |layer: &FlashDecoderLayer| {
            let attention = &layer.attention;
            let config = PagedKvCacheConfig::new(num_pages, attention.num_heads_kv, attention.head_dim());
            let config = config.with_dtype(Some(weight.dtype().into())).with_window(attention.window_left);
            config.try_init(&weight.device())
        };
        self.layers.iter().map(of_layer).collect()
    }

    /// The hidden vectors of new tokens `[batch, new]`, `[batch, new, d_model]`, over a cache of each layer: those of a [`FlashDecoderCache`],
    /// or a [`batch`](PagedKvCache::batch) of each of [`new_paged_caches`](Self::new_paged_caches). [`logits`](Self::logits) may be computed of
    /// the last token alone.
    ///
    /// After an error of one layer, the caches of earlier ones are taken back to where they were.
    ///
    /// # Errors
    ///
    /// Those of [`try_forward_step`](Self::try_forward_step).
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
    /// let mut cache = model.new_cache(1, 128)?;
    /// let prompt = Tensor::<2, Int>::from_data([[5, 7, 42]], &device);
    /// let hidden = model.try_hidden_step(prompt, &mut cache.layers, &FlashAttentionOptions::new())?;
    /// assert_eq!(model.logits(hidden.narrow(1, 2, 1)).dims(), [1, 1, 100]);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn try_hidden_step(
        &self,
        tokens: Tensor<2, Int>,
        caches: &mut [impl AttentionCache],
        options: &FlashAttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        check_layers(self.layers.len(), caches.len())?;
        let new = tokens.dims()[1];
        let before: Vec<_> = caches.iter().map(Operands::mark).collect();
        let angles = self.angles(|rotary| rotary.angles_after(&caches[0], new))?;
        let layers = self.layers.iter().zip(&mut *caches).zip(angles);
        let computed = layers.into_iter().try_fold(self.embedded(tokens), |x, ((layer, cache), angles)| {
            layer.try_forward_step(FlashSelfAttentionInput { x, angles, options: options.clone() }, cache)
        });
        if computed.is_err() {
            caches.iter_mut().zip(before).for_each(|(cache, before)| cache.rewind(before));
        }
        Ok(self.norm.forward(computed?))
    }
}
