//! Key/value caches for decoding.

mod call;
mod config;
pub(crate) mod operands;
mod paged;
mod stored;

pub use call::{
    flash_attention_with_kvcache, flash_attention_with_kvcache_and_lse, try_flash_attention_with_kvcache,
    try_flash_attention_with_kvcache_and_lse,
};
pub use config::KvCacheConfig;
pub use paged::{PagedBatch, PagedKvCache, PagedKvCacheConfig, SequenceId};

use crate::checks::{agree, same_device, unwrapped};
use crate::options::FlashAttentionOptions;
use crate::plan::AttentionPlan;
use burn::tensor::{DType, Device, Int, IntDType, Tensor};
use config::{PAGE_SIZE, Setting};
use flash_attention_kernels::{AttentionError, MAX_SEQ};
use stored::Stored;

/// A cache that [`flash_attention_with_kvcache`] appends to: a [`KvCache`], or the [`batch`](PagedKvCache::batch) of a [`PagedKvCache`].
///
/// ```
/// use burn_flash_attention::{AttentionCache, KvCache, PagedBatch};
///
/// fn is_cache<C: AttentionCache>() {}
/// is_cache::<KvCache>();
/// is_cache::<PagedBatch<'_>>();
/// ```
#[allow(private_bounds, reason = "what a call takes from a cache is this crate's own")]
pub trait AttentionCache: operands::Operands {}

impl AttentionCache for KvCache {}

/// Keys and values of the positions so far, in memory that is allocated once and written in place by
/// [`flash_attention_with_kvcache`].
///
/// The memory belongs to the cache alone: a cache cannot be cloned, and gives its tensors to nobody. [`duplicate`](KvCache::duplicate)
/// makes a copy. A cache has no gradient and lives on the device without autodiff.
///
/// Sequences of one cache may have different lengths. Lengths are then known to the device alone; the host knows a bound
/// ([`max_len`](KvCache::max_len)).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, KvCacheConfig, flash_attention_with_kvcache};
///
/// let device = Device::flex();
/// let mut cache = KvCacheConfig::new(2, 2, 16, 32).init(&device);
/// let options = FlashAttentionOptions::new().with_causal(true);
/// // A prompt of 5 tokens, then one token at a time.
/// for new in [5, 1, 1] {
///     let random = |heads| Tensor::<4>::random([2, heads, new, 16], Distribution::Default, &device);
///     let out = flash_attention_with_kvcache(random(4), random(2), random(2), &mut cache, &options);
///     assert_eq!(out.dims(), [2, 4, new, 16]);
/// }
/// assert_eq!(cache.max_len(), 7);
/// # }
/// ```
#[derive(Debug)]
pub struct KvCache {
    /// Absent while a call has them.
    tensors: Option<Tensors>,
    /// `[batch, max_pages]`, if keys and values are in pages: the pages of each sequence, which do not change.
    table: Option<Tensor<2, Int>>,
    /// As it was created, with the capacity that there is now.
    config: KvCacheConfig,
    setting: Setting,
    /// Length of the longest sequence, or more.
    len: usize,
}

/// The tensors of a cache.
#[derive(Debug)]
struct Tensors {
    k: Stored,
    v: Stored,
    /// `[batch]`, if the sequences may have different lengths.
    seq_lens: Option<Tensor<1, Int>>,
}

/// Lengths of a cache's sequences at one time. A call makes a new tensor of lengths, so that this one stays as it is.
#[derive(Debug)]
pub struct Lengths {
    seq_lens: Option<Tensor<1, Int>>,
    max_len: usize,
}

impl KvCache {
    fn tensors(&self) -> &Tensors {
        self.tensors.as_ref().unwrap_or_else(|| panic!("{LOST}"))
    }

    fn tensors_mut(&mut self) -> &mut Tensors {
        self.tensors.as_mut().unwrap_or_else(|| panic!("{LOST}"))
    }

    /// The configuration, with the capacity that there is now.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.config().num_heads_kv, 8);
    /// # }
    /// ```
    pub fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// Positions of each sequence that there is memory for.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.capacity(), 1024);
    /// # }
    /// ```
    pub fn capacity(&self) -> usize {
        self.config.capacity
    }

    /// Length of the longest sequence as far as the host knows it: exact if all sequences have got the same number of positions, else the
    /// sum of the largest numbers, which no sequence exceeds.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.max_len(), 0);
    /// # }
    /// ```
    pub fn max_len(&self) -> usize {
        self.len
    }

    /// Length of each sequence, `[batch]`, on the device of the cache.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(2, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.seq_lens().into_data().iter::<i32>().collect::<Vec<_>>(), [0, 0]);
    /// # }
    /// ```
    pub fn seq_lens(&self) -> Tensor<1, Int> {
        let all = || Tensor::full([self.config.batch], self.len as i32, (&self.setting.device, DType::I32));
        self.tensors().seq_lens.clone().unwrap_or_else(all)
    }

    /// The device of the cache.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex().autodiff());
    /// assert!(!cache.device().is_autodiff());
    /// # }
    /// ```
    pub fn device(&self) -> Device {
        self.setting.device.clone()
    }

    /// Bytes of keys and values, used or not.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(2, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.bytes(), 2 * 8 * 1024 * (64 + 64) * 4);
    /// # }
    /// ```
    pub fn bytes(&self) -> usize {
        let Tensors { k, v, .. } = self.tensors();
        k.bytes() + v.bytes()
    }

    /// Forgets all positions. The memory stays.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// cache.clear();
    /// assert_eq!(cache.max_len(), 0);
    /// # }
    /// ```
    pub fn clear(&mut self) {
        self.tensors_mut().seq_lens = None;
        self.len = 0;
    }

    /// Forgets the positions from `len` on, of every sequence that has more.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// cache.truncate(100); // There is nothing to forget.
    /// assert_eq!(cache.max_len(), 0);
    /// # }
    /// ```
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            let tensors = self.tensors_mut();
            tensors.seq_lens = tensors.seq_lens.take().map(|lens| lens.clamp_max(len as i32));
            self.len = len;
        }
    }

    /// Sets the length of each sequence, `[batch]`, of which none is above `max_len`: what is left of the positions of a call, where tokens
    /// that were proposed have not been accepted. Only the device knows the lengths, which are clamped to `0..=max_len`.
    ///
    /// # Errors
    ///
    /// For another number of lengths than sequences, another device, and a `max_len` above [`max_len`](KvCache::max_len), since a sequence
    /// has no positions that were never appended.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::KvCacheConfig;
    ///
    /// let device = Device::flex();
    /// let mut cache = KvCacheConfig::new(2, 8, 64, 1024).init(&device);
    /// let error = cache.set_seq_lens(Tensor::<1, Int>::from_data([3, 5], &device), 5).unwrap_err();
    /// assert!(error.to_string().starts_with("max_len = 5 is not supported"));
    /// # }
    /// ```
    pub fn set_seq_lens(&mut self, seq_lens: Tensor<1, Int>, max_len: usize) -> Result<(), AttentionError> {
        agree("seq_lens", &seq_lens.dims(), (0, "batch"), ("the cache", self.config.batch))?;
        same_device("seq_lens", &seq_lens.device(), &self.device())?;
        if max_len > self.len {
            return Err(AttentionError::Unsupported {
                option: "max_len",
                value: max_len.to_string(),
                why: "sequences have no positions that were never appended; max_len() is how many they may have",
            });
        }
        self.tensors_mut().seq_lens = Some(seq_lens.inner().cast(IntDType::I32).clamp(0, max_len as i32));
        self.len = max_len;
        Ok(())
    }

    /// Makes room for `capacity` positions of each sequence, if there is less. This allocates new memory and copies the cache.
    ///
    /// # Errors
    ///
    /// For more positions or elements than attention takes.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// cache.reserve(2048)?;
    /// assert_eq!(cache.capacity(), 2048);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn reserve(&mut self, capacity: usize) -> Result<(), AttentionError> {
        if capacity <= self.config.capacity {
            return Ok(());
        }
        let larger = KvCacheConfig { capacity, ..self.config.clone() };
        *self = self.copied(&larger)?;
        Ok(())
    }

    /// A copy of the cache, with memory of its own.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::KvCacheConfig::new(1, 8, 64, 1024).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.duplicate().bytes(), cache.bytes());
    /// # }
    /// ```
    pub fn duplicate(&self) -> Self {
        unwrapped(self.copied(&self.config))
    }

    /// A copy in this configuration, which has as much capacity or more.
    fn copied(&self, config: &KvCacheConfig) -> Result<Self, AttentionError> {
        let Tensors { k, v, seq_lens } = self.tensors();
        let mut copy = config.init_with(self.setting.clone())?;
        copy.tensors = copy.tensors.map(|to| Tensors {
            k: to.k.with(k, config.batch),
            v: to.v.with(v, config.batch),
            seq_lens: seq_lens.clone(),
        });
        copy.len = self.len;
        Ok(copy)
    }

    /// The kernels, tiles and memory that [`flash_attention_with_kvcache`] would use for these arguments. Runs nothing.
    ///
    /// # Errors
    ///
    /// The [`AttentionError`] that [`try_flash_attention_with_kvcache`] would return.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, KvCacheConfig};
    ///
    /// let cache = KvCacheConfig::new(1, 2, 16, 8).init(&Device::flex());
    /// let zeros = |heads| Tensor::<4>::zeros([1, heads, 1, 16], &Device::flex());
    /// let plan = cache.plan(&zeros(8), &zeros(2), &zeros(2), &FlashAttentionOptions::new())?;
    /// assert!(plan.to_string().starts_with("host loops"));
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn plan(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        options: &FlashAttentionOptions,
    ) -> Result<AttentionPlan, AttentionError> {
        call::plan(self, q, k, v, options)
    }

    /// The capacity that the cache must have for `new` positions more: that which it has, or a larger one where it may grow.
    fn capacity_for(&self, new: usize) -> Result<usize, AttentionError> {
        let KvCacheConfig { capacity, grows, .. } = self.config;
        let needed = self.len.saturating_add(new);
        if needed <= capacity {
            return Ok(capacity);
        }
        if grows {
            return Ok(needed.max(capacity.saturating_mul(2).min(MAX_SEQ)));
        }
        Err(AttentionError::CacheFull { capacity, len: self.len, new })
    }
}

const LOST: &str = "an earlier call on this cache panicked, and took its memory with it";
