//! Key/value caches in pages.

mod allocator;
mod batch;

pub use batch::PagedBatch;

use super::stored::{self, Stored};
use super::{LOST, Setting};
use crate::checks::unwrapped;
use allocator::Allocator;
use burn::config::Config;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, KvStorage};
use std::fmt::{Display, Formatter};

/// Configuration of a [`PagedKvCache`].
///
/// ```
/// use burn::config::Config;
/// use burn::tensor::FloatDType;
/// use burn_flash_attention::PagedKvCacheConfig;
///
/// // 4,096 pages of 16 positions of 8 heads of 128 elements: 256 MiB of keys and values in bf16.
/// let config = PagedKvCacheConfig::new(4096, 8, 128).with_page_size(16).with_dtype(Some(FloatDType::BF16));
/// assert_eq!(config.bytes_per_page() * 4096, 256 << 20);
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<PagedKvCacheConfig>(&text)?.page_size, 16);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct PagedKvCacheConfig {
    /// Number of pages of all sequences.
    pub num_pages: usize,
    /// Number of key/value heads.
    pub num_heads_kv: usize,
    /// Dimension of a key: 1 to 256.
    pub head_dim: usize,
    /// Positions of a page: 16, 32, 64, 128 or 256. Default: 64
    #[config(default = 64)]
    pub page_size: usize,
    /// Dimension of a value: 1 to 256. Default: `head_dim`
    #[config(default = "None")]
    pub head_dim_v: Option<usize>,
    /// Element type: f32, f16 or bf16. Default: the device's default for floats
    #[config(default = "None")]
    pub dtype: Option<FloatDType>,
    /// How many positions before its own a query sees at most. Pages that no query will see any more are freed while sequences grow (a
    /// rolling cache). Calls must have a `window_left` of at most this. Default: all positions are kept
    #[config(default = "None")]
    pub window: Option<usize>,
    /// How keys and values are stored. In e4m3 they take a byte each, and dimensions of heads are multiples of 4. `dtype` is then still that of
    /// queries and of new keys and values. Default: in `dtype`
    #[config(default = "None")]
    pub storage: Option<KvStorage>,
}

impl PagedKvCacheConfig {
    /// Creates a cache without sequences, whose memory is allocated at once.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_flash_attention::PagedKvCacheConfig;
    ///
    /// let cache = PagedKvCacheConfig::new(100, 8, 64).init(&Device::flex());
    /// assert_eq!((cache.num_sequences(), cache.free_pages()), (0, 100));
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> PagedKvCache {
        unwrapped(self.try_init(device))
    }

    /// [`init`](Self::init) with a typed error instead of a panic.
    ///
    /// # Errors
    ///
    /// An [`AttentionError`] that names the setting and its value.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_flash_attention::PagedKvCacheConfig;
    ///
    /// let error = PagedKvCacheConfig::new(100, 8, 64).with_page_size(24).try_init(&Device::flex()).unwrap_err();
    /// assert_eq!(error.to_string(), "page_size is 24; it must be 16, 32, 64, 128 or 256");
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<PagedKvCache, AttentionError> {
        let setting = Setting::new(self.dtype, self.num_heads_kv, device)?;
        let q = [1, self.num_heads_kv, 1, self.head_dim];
        let [k, v] = self.pools().map(|[_, heads, _, head_dim]| [1, heads, 1, head_dim]);
        let problem = AttentionProblem::new(&q, &k, &v, setting.of_kernels, AttentionOptions::default())?;
        self.in_memory(problem, [1, 1])?;
        let [k, v] = self.pools().map(|shape| Stored::zeros(self.storage(), shape, &setting));
        let tensors = Some(Tensors { k, v });
        let allocator = Allocator::new(self.num_pages, self.page_size, self.window);
        Ok(PagedKvCache { tensors, config: self.clone(), setting, allocator, table: None, seq_lens: None })
    }

    /// The problem, with keys and values as they are in memory, and a page table of this shape.
    fn in_memory(&self, problem: AttentionProblem, table: [usize; 2]) -> Result<AttentionProblem, AttentionError> {
        problem.with_page_table(&table, self.num_pages, self.page_size)?.with_kv_storage(self.storage())
    }

    /// Bytes of a page, keys and values, with `dtype` or else in f32. In e4m3, with its scales.
    ///
    /// ```
    /// let config = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).with_page_size(32);
    /// assert_eq!(config.bytes_per_page(), 32 * 8 * (64 + 64) * 4);
    /// ```
    pub fn bytes_per_page(&self) -> usize {
        let element = DType::from(self.dtype.unwrap_or(FloatDType::F32));
        let of_page =
            |[_, heads, rows, head_dim]: [usize; 4]| stored::bytes(self.storage(), [1, heads, rows, head_dim], element);
        self.pools().map(of_page).iter().sum()
    }

    /// How keys and values are stored.
    fn storage(&self) -> KvStorage {
        self.storage.unwrap_or_default()
    }

    /// Shapes of keys and values.
    fn pools(&self) -> [[usize; 4]; 2] {
        [self.head_dim, self.head_dim_v.unwrap_or(self.head_dim)]
            .map(|head_dim| [self.num_pages, self.num_heads_kv, self.page_size, head_dim])
    }
}

/// A sequence of a [`PagedKvCache`]. No other sequence of the cache gets the same name, also after this one has been freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl Display for SequenceId {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Keys and values of any number of sequences, in pages of memory that is allocated once (PagedAttention, [Kwon et al.
/// 2023](https://arxiv.org/abs/2309.06180)).
///
/// A sequence has as many pages as its positions need, in any order: sequences of any lengths come and go, and less than a page of each is
/// wasted. [`fork`](Self::fork) makes a sequence that shares the pages of another one; the first of them that writes to a shared page gets
/// a copy of that page. [`batch`](Self::batch) names the sequences of a call of
/// [`flash_attention_with_kvcache`](crate::flash_attention_with_kvcache).
///
/// The memory belongs to the cache alone, as that of a [`KvCache`](crate::KvCache) does. Lengths are known to the host.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::{FlashAttentionOptions, PagedKvCacheConfig, flash_attention_with_kvcache};
///
/// let device = Device::flex();
/// let mut cache = PagedKvCacheConfig::new(10, 2, 16).with_page_size(16).init(&device);
/// let options = FlashAttentionOptions::new().with_causal(true);
/// let random = |heads, batch, new| Tensor::<4>::random([batch, heads, new, 16], Distribution::Default, &device);
/// // A prompt of 20 tokens, then two continuations of it, a token of each at a time.
/// let first = cache.add();
/// let prompt = &mut cache.batch(&[(first, 20)])?;
/// flash_attention_with_kvcache(random(4, 1, 20), random(2, 1, 20), random(2, 1, 20), prompt, &options);
/// let second = cache.fork(first)?;
/// assert_eq!(cache.free_pages(), 8);
/// for _ in 0..3 {
///     let both = &mut cache.batch(&[(first, 1), (second, 1)])?;
///     let out = flash_attention_with_kvcache(random(4, 2, 1), random(2, 2, 1), random(2, 2, 1), both, &options);
///     assert_eq!(out.dims(), [2, 4, 1, 16]);
/// }
/// // The full page of the prompt is still shared.
/// assert_eq!((cache.len(second)?, cache.free_pages()), (23, 7));
/// # }
/// # Ok::<(), burn_flash_attention::AttentionError>(())
/// ```
#[derive(Debug)]
pub struct PagedKvCache {
    /// Absent while a call has them.
    tensors: Option<Tensors>,
    config: PagedKvCacheConfig,
    setting: Setting,
    allocator: Allocator,
    /// The page table of the last call, on the device, if it is still that of its sequences.
    table: Option<Resident<2>>,
    /// The lengths of the last call's sequences, on the device, if they may differ.
    seq_lens: Option<Resident<1>>,
}

/// The tensors of a cache.
#[derive(Debug)]
struct Tensors {
    k: Stored,
    v: Stored,
}

/// A tensor on the device that belongs to the sequences of a batch.
#[derive(Debug)]
struct Resident<const D: usize> {
    sequences: Vec<SequenceId>,
    tensor: Tensor<D, Int>,
}

impl PagedKvCache {
    fn tensors(&self) -> &Tensors {
        self.tensors.as_ref().unwrap_or_else(|| panic!("{LOST}"))
    }

    /// The configuration.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.config().page_size, 64);
    /// # }
    /// ```
    pub fn config(&self) -> &PagedKvCacheConfig {
        &self.config
    }

    /// The device of the cache, without autodiff.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.device(), burn::tensor::Device::flex());
    /// # }
    /// ```
    pub fn device(&self) -> Device {
        self.setting.device.clone()
    }

    /// Bytes of keys and values, used or not.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.bytes(), 100 * cache.config().bytes_per_page());
    /// # }
    /// ```
    pub fn bytes(&self) -> usize {
        let Tensors { k, v } = self.tensors();
        k.bytes() + v.bytes()
    }

    /// Number of pages that no sequence has.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// assert_eq!(cache.free_pages(), 100);
    /// # }
    /// ```
    pub fn free_pages(&self) -> usize {
        self.allocator.free_pages()
    }

    /// Number of sequences.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// cache.add();
    /// assert_eq!(cache.num_sequences(), 1);
    /// # }
    /// ```
    pub fn num_sequences(&self) -> usize {
        self.allocator.num_sequences()
    }

    /// Adds a sequence without positions, which has no pages yet.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// let sequence = cache.add();
    /// assert_eq!(cache.len(sequence)?, 0);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn add(&mut self) -> SequenceId {
        self.allocator.add()
    }

    /// Adds a sequence with the positions of this one, and shares its pages. Copies nothing: the first of both that writes to a page gets a
    /// copy of it then.
    ///
    /// # Errors
    ///
    /// [`NoSequence`](AttentionError::NoSequence) if there is none of that name.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// let sequence = cache.add();
    /// let other = cache.fork(sequence)?;
    /// assert_ne!(sequence, other);
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId, AttentionError> {
        self.allocator.fork(sequence)
    }

    /// Removes a sequence, and frees the pages that no other one shares.
    ///
    /// # Errors
    ///
    /// [`NoSequence`](AttentionError::NoSequence) if there is none of that name.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::{AttentionError, PagedKvCacheConfig};
    ///
    /// let mut cache = PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// let sequence = cache.add();
    /// cache.free(sequence)?;
    /// assert_eq!(cache.free(sequence), Err(AttentionError::NoSequence { sequence: 0 }));
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn free(&mut self, sequence: SequenceId) -> Result<(), AttentionError> {
        self.allocator.free(sequence)
    }

    /// Number of positions of a sequence, with those that its window has left behind.
    ///
    /// # Errors
    ///
    /// [`NoSequence`](AttentionError::NoSequence) if there is none of that name.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// let sequence = cache.add();
    /// assert_eq!(cache.len(sequence), Ok(0));
    /// # }
    /// ```
    pub fn len(&self, sequence: SequenceId) -> Result<usize, AttentionError> {
        self.allocator.get(sequence).map(|sequence| sequence.len)
    }

    /// Forgets the positions of a sequence from `len` on, if it has more, such as those of proposed tokens that were not accepted.
    ///
    /// # Errors
    ///
    /// [`NoSequence`](AttentionError::NoSequence) if there is none of that name. With a window, an error if it has left behind positions
    /// that a query after `len` would see.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// let mut cache = burn_flash_attention::PagedKvCacheConfig::new(100, 8, 64).init(&burn::tensor::Device::flex());
    /// let sequence = cache.add();
    /// cache.truncate(sequence, 100)?; // There is nothing to forget.
    /// assert_eq!(cache.len(sequence), Ok(0));
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> Result<(), AttentionError> {
        if self.allocator.truncate(sequence, len)? {
            (self.table, self.seq_lens) = (None, None);
        }
        Ok(())
    }
}
