//! Shape of keys and values in pages, and its validation.

use super::{AttentionProblem, agree, check_length, ranked};
use crate::e4m3::KvStorage;
use crate::error::{AttentionError, Result};
use serde::{Deserialize, Serialize};

/// Shape of keys and values in [pages](mod@crate::pages): `k [num_pages, num_heads_kv, page_size, head_dim]` and `v [num_pages,
/// num_heads_kv, page_size, head_dim_v]`, with a page table `[batch, max_pages]`.
///
/// ```
/// use flash_attention_kernels::{KvStorage, PagedKv};
///
/// let pages = PagedKv { num_pages: 1000, page_size: 16, max_pages: 64, storage: KvStorage::Elements };
/// assert_eq!(pages.max_pages * pages.page_size, 1024); // positions of a sequence
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagedKv {
    /// Number of pages of the pool.
    pub num_pages: usize,
    /// Positions of a page: 16, 32, 64, 128 or 256.
    pub page_size: usize,
    /// Columns of the page table: the most pages that a sequence can have, at least 1.
    pub max_pages: usize,
    /// How keys and values are stored.
    pub storage: KvStorage,
}

impl PagedKv {
    /// Checks the numbers alone.
    pub(crate) fn check(&self) -> Result<()> {
        let PagedKv { num_pages, page_size, max_pages, storage: _ } = *self;
        let wrong = |option, value: usize, requirement| {
            Err(AttentionError::Option { option, value: value as f64, requirement })
        };
        if !matches!(page_size, 16 | 32 | 64 | 128 | 256) {
            return wrong("page_size", page_size, "16, 32, 64, 128 or 256");
        }
        for (option, value) in [("num_pages", num_pages), ("max_pages", max_pages)] {
            if value == 0 {
                return wrong(option, value, "at least 1");
            }
        }
        check_length("num_pages", num_pages)?;
        check_length("page_table", max_pages.saturating_mul(page_size))
    }
}

impl AttentionProblem {
    /// Puts keys and values into pages of `page_size` positions, of which a pool has `num_pages`. The shape is that of the page table,
    /// `[batch, max_pages]`: the pages of each sequence, in order. The `seq_k` of the problem is the length of the longest sequence.
    ///
    /// ```
    /// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
    ///
    /// // A token of each of two sequences of up to 1,000 positions, in pages of 16.
    /// let (q, kv) = ([2, 8, 1, 64], [2, 2, 1000, 64]);
    /// let problem = AttentionProblem::new(&q, &kv, &kv, Dtype::F32, AttentionOptions::default())?;
    /// let problem = problem.with_page_table(&[2, 63], 500, 16)?;
    /// assert_eq!(problem.k_shape(), [500, 2, 16, 64]);
    /// # Ok::<(), flash_attention_kernels::AttentionError>(())
    /// ```
    pub fn with_page_table(
        mut self,
        shape: &[usize],
        num_pages: usize,
        page_size: usize,
    ) -> Result<Self, AttentionError> {
        let shape = ranked::<2>("page_table", shape)?;
        agree("page_table", &shape, 0, "batch", "q", self.batch)?;
        self.pages = Some(PagedKv { num_pages, page_size, max_pages: shape[1], storage: KvStorage::Elements });
        self.validated()
    }

    /// Sets how keys and values in pages are stored.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] for [`KvStorage::E4m3`] without pages, or with a dimension of heads that is no multiple of 4.
    ///
    /// ```
    /// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, KvStorage};
    ///
    /// let (q, kv) = ([2, 8, 1, 64], [2, 2, 1000, 64]);
    /// let problem = AttentionProblem::new(&q, &kv, &kv, Dtype::BF16, AttentionOptions::default())?;
    /// let problem = problem.with_page_table(&[2, 63], 500, 16)?.with_kv_storage(KvStorage::E4m3)?;
    /// assert_eq!(problem.kv_size(), 1);
    /// # Ok::<(), flash_attention_kernels::AttentionError>(())
    /// ```
    pub fn with_kv_storage(mut self, storage: KvStorage) -> Result<Self, AttentionError> {
        match &mut self.pages {
            Some(pages) => pages.storage = storage,
            None if storage == KvStorage::Elements => {}
            None => {
                return Err(unsupported(
                    storage,
                    "only keys and values in pages are stored in another type than that of queries",
                ));
            }
        }
        self.validated()
    }

    /// How keys and values are stored.
    pub fn kv_storage(&self) -> KvStorage {
        self.pages.map_or(KvStorage::Elements, |pages| pages.storage)
    }

    /// Bytes of an element of keys and values.
    pub fn kv_size(&self) -> usize {
        self.kv_storage().size(self.dtype)
    }

    /// Checks the pages, if there are any.
    pub(super) fn check_pages(&self) -> Result<()> {
        let Some(pages) = self.pages else { return Ok(()) };
        pages.check()?;
        let whole = self.head_dim.is_multiple_of(4) && self.head_dim_v.is_multiple_of(4);
        if pages.storage == KvStorage::E4m3 && !whole {
            return Err(unsupported(pages.storage, "head_dim and head_dim_v must be multiples of 4"));
        }
        let (max_pages, needed) = (pages.max_pages, self.seq_k.div_ceil(pages.page_size));
        if max_pages < needed {
            return Err(AttentionError::Dimension {
                argument: "page_table",
                dimension: "max_pages",
                value: max_pages,
                shape: vec![self.batch, max_pages],
                expected_by: "seq_k",
                expected: needed,
            });
        }
        if let Some(sequences) = self.cu_seqlens {
            return Err(AttentionError::Unsupported {
                option: "cu_seqlens_k",
                value: format!("the bounds of {sequences} sequences"),
                why: "each batch is one sequence where keys are in pages; give seq_lens_k and seq_lens_q",
            });
        }
        Ok(())
    }
}

/// The error of a storage that cannot be used.
fn unsupported(storage: KvStorage, why: &'static str) -> AttentionError {
    AttentionError::Unsupported { option: "storage", value: format!("{storage:?}"), why }
}
