//! Caches for decoding: keys and values of a layer, and the outputs so far.

use crate::kv_cache::operands::Operands;
use crate::kv_cache::{KvCache, KvCacheConfig, Lengths, try_flash_attention_with_kvcache};
use crate::options::FlashAttentionOptions;
use burn::tensor::Tensor;
use flash_attention_kernels::{AttentionError, KvStorage};

/// Positions that memory is allocated for at the first step, if the user gave no capacity.
const CAPACITY: usize = 64;

/// Keys and values of a layer of self-attention: a [`KvCache`], which is created at the first step, because its sizes are those of the
/// keys.
#[derive(Debug)]
pub(super) struct LayerKvCache {
    cache: Option<KvCache>,
    /// Positions that memory is allocated for at the first step.
    capacity: usize,
    storage: KvStorage,
}

impl LayerKvCache {
    /// Without memory until the first step.
    pub fn with_capacity(capacity: usize) -> Self {
        LayerKvCache { cache: None, capacity, storage: KvStorage::Elements }
    }

    /// Sets how the memory that the first step allocates stores keys and values.
    pub fn set_storage(&mut self, storage: KvStorage) {
        self.storage = storage;
    }

    /// Appends keys and values of new positions, and computes their queries' attention over all positions so far. An error leaves the cache
    /// as it was.
    pub fn attend(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        options: &FlashAttentionOptions,
    ) -> Result<Tensor<4>, AttentionError> {
        if let Some(cache) = &mut self.cache {
            return try_flash_attention_with_kvcache(q, k, v, cache, options);
        }
        let [batch, heads, new, head_dim] = k.dims();
        let config = KvCacheConfig::new(batch, heads, head_dim, self.capacity.max(new))
            .with_dtype(Some(k.dtype().into()))
            .with_storage(Some(self.storage))
            .with_grows(true);
        let mut cache = config.try_init(&k.device())?;
        let out = try_flash_attention_with_kvcache(q, k, v, &mut cache, options)?;
        self.cache = Some(cache);
        Ok(out)
    }

    /// Number of positions; of the longest sequence, if lengths differ.
    pub fn max_len(&self) -> usize {
        self.cache.as_ref().map_or(0, KvCache::max_len)
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if let Some(cache) = &mut self.cache {
            cache.truncate(len);
        }
    }
}

impl Default for LayerKvCache {
    fn default() -> Self {
        Self::with_capacity(CAPACITY)
    }
}

/// A deep copy: keys and values are written in place, so that two caches cannot share them.
impl Clone for LayerKvCache {
    fn clone(&self) -> Self {
        LayerKvCache { cache: self.cache.as_ref().map(KvCache::duplicate), ..*self }
    }
}

/// Keys and values `[batch, heads, seq_k, d]` of a memory, as at the first step.
#[derive(Clone, Debug, Default)]
pub(super) struct MemoryKeysValues(Option<(Tensor<4>, Tensor<4>)>);

impl MemoryKeysValues {
    /// Computes attention over the memory, whose keys and values are computed at the first call. An error at the first call leaves none.
    pub fn attend(
        &mut self,
        compute: impl FnOnce() -> (Tensor<4>, Tensor<4>),
        attend: impl FnOnce(Tensor<4>, Tensor<4>) -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let (keys, values) = self.0.clone().unwrap_or_else(compute);
        let out = attend(keys.clone(), values.clone())?;
        self.0 = Some((keys, values));
        Ok(out)
    }

    /// Number of positions, if there has been a call.
    pub fn len(&self) -> Option<usize> {
        self.0.as_ref().map(|(keys, _)| keys.dims()[2])
    }
}

/// Part of a cache that can return to an earlier state.
pub(super) trait Restore {
    /// What tells an earlier state from a later one.
    type State;

    /// The state now.
    fn state(&self) -> Self::State;

    /// Returns to an earlier state.
    fn restore(&mut self, state: Self::State);
}

impl Restore for LayerKvCache {
    type State = Option<Lengths>;

    fn state(&self) -> Option<Lengths> {
        self.cache.as_ref().map(KvCache::mark)
    }

    fn restore(&mut self, state: Option<Lengths>) {
        match (state, &mut self.cache) {
            (Some(lengths), Some(cache)) => cache.rewind(lengths),
            (_, cache) => *cache = None,
        }
    }
}

/// Takes a step through the caches of all layers. If a layer refuses it, the layers before it forget it.
pub(super) fn all_or_none<C: Restore, T>(
    caches: &mut [C],
    step: impl FnOnce(&mut [C]) -> Result<T, AttentionError>,
) -> Result<T, AttentionError> {
    let states: Vec<C::State> = caches.iter().map(C::state).collect();
    let result = step(caches);
    if result.is_err() {
        caches.iter_mut().zip(states).for_each(|(cache, state)| cache.restore(state));
    }
    result
}

/// Outputs `[batch, seq, d_model]` of the positions so far, which burn-nn's contract returns at each call.
#[derive(Clone, Debug, Default)]
pub(super) struct Outputs(Option<Tensor<3>>);

impl Outputs {
    /// Number of positions.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |outputs| outputs.dims()[1])
    }

    /// How many positions of a prefix of `seq` have been computed. `cached`: positions whose keys are cached, in self-attention.
    ///
    /// # Errors
    ///
    /// If the prefix has no new positions, or if the cache has positions without outputs.
    pub fn decoded(&self, seq: usize, cached: Option<usize>) -> Result<usize, AttentionError> {
        let len = self.len();
        if cached.is_some_and(|cached| cached != len) {
            return Err(AttentionError::Unsupported {
                option: "cache",
                value: format!("{} positions, {len} of them with outputs", cached.unwrap_or_default()),
                why: "steps keep no outputs, so that those of a whole prefix cannot be returned; use one interface with a cache",
            });
        }
        if len > 0 && seq <= len {
            return Err(AttentionError::Unsupported {
                option: "prefix",
                value: format!("{seq} positions"),
                why: "the cache has as many or more; a prefix ends with new ones",
            });
        }
        Ok(len)
    }

    /// Appends the outputs of new positions, and returns those of the whole prefix.
    pub fn grown(&mut self, new: Tensor<3>) -> Tensor<3> {
        let all = match self.0.take() {
            Some(outputs) => Tensor::cat(vec![outputs, new], 1),
            None => new,
        };
        self.0.insert(all).clone()
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len() {
            self.0 = self.0.take().filter(|_| len > 0).map(|outputs| outputs.narrow(1, 0, len));
        }
    }
}

/// Cache of a [`FlashMultiHeadAttention`](crate::FlashMultiHeadAttention) for decoding; burn-nn's is `MhaCache`.
///
/// Keys and values of self-attention are written in place, into a [`KvCache`] that doubles its capacity when it is full. It has no gradient.
///
/// A clone is a deep copy of the keys and values of self-attention, with memory of its own.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
///
/// let device = Device::flex();
/// let attention = FlashMultiHeadAttentionConfig::new(8, 2).with_causal(true).init(&device);
/// let mut cache = FlashMhaCache::autoregressive();
/// // A prompt of three positions, then one at a time.
/// for new in [3, 1, 1] {
///     let x = Tensor::<3>::random([1, new, 8], Distribution::Default, &device);
///     assert_eq!(attention.forward_step(FlashMhaInput::self_attn(x), &mut cache).context.dims(), [1, new, 8]);
/// }
/// assert_eq!(cache.max_len(), 5);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlashMhaCache {
    pub(super) keys_values: MhaKeysValues,
    pub(super) outputs: Outputs,
}

/// Keys and values of self-attention or of cross-attention.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are few caches, and both variants are mostly handles of tensors")]
pub(super) enum MhaKeysValues {
    /// Of the positions so far.
    OfTarget(LayerKvCache),
    /// Of a memory.
    OfMemory(MemoryKeysValues),
}

impl FlashMhaCache {
    /// A cache for self-attention: keys and values grow with the queries.
    ///
    /// ```
    /// let cache = burn_flash_attention::FlashMhaCache::autoregressive();
    /// assert_eq!(cache.max_len(), 0);
    /// ```
    pub fn autoregressive() -> Self {
        Self::of(MhaKeysValues::OfTarget(LayerKvCache::default()))
    }

    /// A cache for self-attention whose first call allocates memory for `capacity` positions. More positions double it, which copies it.
    ///
    /// ```
    /// // As many positions as the model has: nothing is copied.
    /// let cache = burn_flash_attention::FlashMhaCache::with_capacity(4096);
    /// ```
    pub fn with_capacity(capacity: usize) -> Self {
        Self::of(MhaKeysValues::OfTarget(LayerKvCache::with_capacity(capacity)))
    }

    /// A cache for cross-attention: keys and values of the first call are kept.
    ///
    /// ```
    /// let cache = burn_flash_attention::FlashMhaCache::autoregressive_cross_attention();
    /// ```
    pub fn autoregressive_cross_attention() -> Self {
        Self::of(MhaKeysValues::OfMemory(MemoryKeysValues::default()))
    }

    /// Sets how the memory that the first step allocates stores keys and values of self-attention. Memory that there is stays as it is.
    ///
    /// ```
    /// use burn_flash_attention::{FlashMhaCache, KvStorage};
    ///
    /// let cache = FlashMhaCache::with_capacity(4096).with_storage(KvStorage::E4m3);
    /// ```
    pub fn with_storage(mut self, storage: KvStorage) -> Self {
        if let MhaKeysValues::OfTarget(cache) = &mut self.keys_values {
            cache.set_storage(storage);
        }
        self
    }

    fn of(keys_values: MhaKeysValues) -> Self {
        FlashMhaCache { keys_values, outputs: Outputs::default() }
    }

    /// Number of keys in the cache: of positions so far (of the longest sequence, if lengths differ), or of the memory.
    ///
    /// ```
    /// assert_eq!(burn_flash_attention::FlashMhaCache::with_capacity(64).max_len(), 0);
    /// ```
    pub fn max_len(&self) -> usize {
        match &self.keys_values {
            MhaKeysValues::OfTarget(cache) => cache.max_len(),
            MhaKeysValues::OfMemory(memory) => memory.len().unwrap_or(0),
        }
    }

    /// Forgets the positions from `len` on, such as proposed tokens that were not accepted. A memory stays.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashMhaCache, FlashMhaInput, FlashMultiHeadAttentionConfig};
    ///
    /// let attention = FlashMultiHeadAttentionConfig::new(8, 2).with_causal(true).init(&Device::flex());
    /// let mut cache = FlashMhaCache::autoregressive();
    /// attention.forward_step(FlashMhaInput::self_attn(Tensor::zeros([1, 4, 8], &Device::flex())), &mut cache);
    /// cache.truncate(2);
    /// assert_eq!(cache.max_len(), 2);
    /// # }
    /// ```
    pub fn truncate(&mut self, len: usize) {
        if let MhaKeysValues::OfTarget(cache) = &mut self.keys_values {
            cache.truncate(len);
        }
        self.outputs.truncate(len);
    }
}
