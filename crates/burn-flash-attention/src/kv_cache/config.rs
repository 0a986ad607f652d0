//! Configuration of a cache, and what follows from it.

use super::stored::{self, Stored};
use super::{KvCache, Tensors};
use crate::checks::unwrapped;
use crate::problem::dtype;
use burn::config::Config;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, Dtype, KvStorage};

/// Configuration of a [`KvCache`].
///
/// ```
/// use burn::config::Config;
/// use burn::tensor::FloatDType;
/// use burn_flash_attention::KvCacheConfig;
///
/// // 8 heads of 128 elements, for 16 sequences of up to 4,096 positions: 256 MiB of keys and values in bf16.
/// let config = KvCacheConfig::new(16, 8, 128, 4096).with_dtype(Some(FloatDType::BF16));
/// assert_eq!(config.bytes_per_position() * 4096, 256 << 20);
/// let text = serde_json::to_string(&config)?;
/// assert_eq!(serde_json::from_str::<KvCacheConfig>(&text)?.capacity, 4096);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Config, Debug)]
#[non_exhaustive]
pub struct KvCacheConfig {
    /// Number of sequences.
    pub batch: usize,
    /// Number of key/value heads.
    pub num_heads_kv: usize,
    /// Dimension of a key: 1 to 256.
    pub head_dim: usize,
    /// Positions of each sequence that memory is allocated for.
    pub capacity: usize,
    /// Dimension of a value: 1 to 256. Default: `head_dim`
    #[config(default = "None")]
    pub head_dim_v: Option<usize>,
    /// Element type: f32, f16 or bf16. Default: the device's default for floats
    #[config(default = "None")]
    pub dtype: Option<FloatDType>,
    /// Whether a cache that is full doubles its capacity, which copies it, in place of an error. Default: false
    #[config(default = false)]
    pub grows: bool,
    /// How keys and values are stored. In e4m3 they take a byte each, in whole pages of 64 positions, and dimensions of heads are multiples of
    /// 4. `dtype` is then still that of queries and of new keys and values. Default: in `dtype`
    #[config(default = "None")]
    pub storage: Option<KvStorage>,
}

/// Positions of a page of a [`KvCache`] that has pages.
pub(super) const PAGE_SIZE: usize = 64;

impl KvCacheConfig {
    /// Creates an empty cache, whose memory is allocated at once.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_init`](Self::try_init) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_flash_attention::KvCacheConfig;
    ///
    /// let cache = KvCacheConfig::new(1, 8, 64, 1024).init(&Device::flex());
    /// assert_eq!((cache.max_len(), cache.capacity()), (0, 1024));
    /// # }
    /// ```
    #[track_caller]
    pub fn init(&self, device: &Device) -> KvCache {
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
    /// use burn_flash_attention::KvCacheConfig;
    ///
    /// let error = KvCacheConfig::new(1, 8, 512, 1024).try_init(&Device::flex()).unwrap_err();
    /// assert_eq!(error.to_string(), "head_dim is 512; it must be between 1 and 256");
    /// # }
    /// ```
    pub fn try_init(&self, device: &Device) -> Result<KvCache, AttentionError> {
        self.init_with(Setting::new(self.dtype, self.num_heads_kv, device)?)
    }

    pub(super) fn init_with(&self, setting: Setting) -> Result<KvCache, AttentionError> {
        let [k, v] = self.shapes(self.capacity);
        let q = [k[0], k[1], 1, k[3]];
        let problem = AttentionProblem::new(&q, &k, &v, setting.of_kernels, AttentionOptions::default())?;
        self.in_memory(problem)?;
        let [k, v] = self.memory_shapes().map(|shape| Stored::zeros(self.storage(), shape, &setting));
        let table = (self.storage() != KvStorage::Elements).then(|| {
            // Each sequence has its pages, and they are in order.
            let shape = [self.batch, self.max_pages()];
            let pages = TensorData::new((0..(shape[0] * shape[1]) as i32).collect(), shape);
            Tensor::from_data(pages, (&setting.device, DType::I32))
        });
        let tensors = Tensors { k, v, seq_lens: None };
        Ok(KvCache { tensors: Some(tensors), table, config: self.clone(), setting, len: 0 })
    }

    /// Bytes that one position of all sequences takes, keys and values, with `dtype` or else in f32. In e4m3, its part of the scales is
    /// counted, rounded up.
    ///
    /// ```
    /// assert_eq!(burn_flash_attention::KvCacheConfig::new(2, 8, 64, 1024).bytes_per_position(), 2 * 8 * (64 + 64) * 4);
    /// ```
    pub fn bytes_per_position(&self) -> usize {
        let element = DType::from(self.dtype.unwrap_or(FloatDType::F32));
        let of_page = self.shapes(PAGE_SIZE).map(|shape| stored::bytes(self.storage(), shape, element));
        of_page.iter().sum::<usize>().div_ceil(PAGE_SIZE)
    }

    /// How keys and values are stored.
    fn storage(&self) -> KvStorage {
        self.storage.unwrap_or_default()
    }

    /// Pages of a sequence, if there are pages.
    fn max_pages(&self) -> usize {
        self.capacity.div_ceil(PAGE_SIZE).max(1)
    }

    /// Shapes of keys and values in memory.
    fn memory_shapes(&self) -> [[usize; 4]; 2] {
        match self.storage() {
            KvStorage::Elements => self.shapes(self.capacity),
            _ => {
                self.shapes(PAGE_SIZE).map(|shape| [self.batch.max(1) * self.max_pages(), shape[1], shape[2], shape[3]])
            }
        }
    }

    /// The problem, with keys and values as they are in memory.
    pub(super) fn in_memory(&self, problem: AttentionProblem) -> Result<AttentionProblem, AttentionError> {
        if self.storage() == KvStorage::Elements {
            return Ok(problem);
        }
        let [[num_pages, ..], _] = self.memory_shapes();
        problem.with_page_table(&[self.batch, self.max_pages()], num_pages, PAGE_SIZE)?.with_kv_storage(self.storage())
    }

    /// Shapes of keys and values for this capacity.
    pub(super) fn shapes(&self, capacity: usize) -> [[usize; 4]; 2] {
        [self.head_dim, self.head_dim_v.unwrap_or(self.head_dim)]
            .map(|head_dim| [self.batch, self.num_heads_kv, capacity, head_dim])
    }
}

/// Where a cache is, and the type of its elements.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    /// Without autodiff: a cache holds no graph.
    pub device: Device,
    pub element: DType,
    /// The element type as kernels name it.
    pub of_kernels: Dtype,
}

impl Setting {
    /// The setting of a cache with so many key/value heads, of which there must be some.
    pub fn new(asked: Option<FloatDType>, num_heads_kv: usize, device: &Device) -> Result<Self, AttentionError> {
        let device = device.clone().inner();
        let element = asked.map_or_else(|| DType::from(device.settings().float_dtype), DType::from);
        let of_kernels = dtype("dtype", element)?;
        if num_heads_kv == 0 {
            return Err(AttentionError::Unsupported {
                option: "num_heads_kv",
                value: "0".into(),
                why: "a cache must have key/value heads",
            });
        }
        Ok(Setting { device, element, of_kernels })
    }
}
