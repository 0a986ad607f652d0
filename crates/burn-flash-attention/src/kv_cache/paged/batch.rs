//! The sequences of a paged cache that a call appends to.

use super::super::operands::{Operands, Taken, check_new};
use super::super::{AttentionCache, LOST, call};
use super::{PagedKvCache, Resident, SequenceId, Stored, Tensors};
use crate::api::posed_over;
use crate::backend::{CacheLengths, CacheTensors};
use crate::options::FlashAttentionOptions;
use crate::plan::AttentionPlan;
use crate::tensors::OptionalInt;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use flash_attention_kernels::{AttentionError, AttentionProblem};
use std::collections::HashSet;

/// Sequences of a [`PagedKvCache`], as the cache of a call: batch `b` of the tensors is sequence `b`. Made by [`PagedKvCache::batch`].
#[derive(Debug)]
pub struct PagedBatch<'a> {
    cache: &'a mut PagedKvCache,
    /// Sequences, each with the number of its new positions.
    sequences: Vec<(SequenceId, usize)>,
    /// Their lengths before.
    lens: Vec<usize>,
}

impl PagedKvCache {
    /// The sequences of a call, each with the number of its new positions: the first ones of its batch in `q`, `k` and `v`. The rest is
    /// padding, is not appended, and has output 0.
    ///
    /// # Errors
    ///
    /// [`NoSequence`](AttentionError::NoSequence) if there is none of a name, and an error if a sequence is named twice.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, PagedKvCacheConfig, flash_attention_with_kvcache};
    ///
    /// let device = Device::flex();
    /// let mut cache = PagedKvCacheConfig::new(10, 2, 16).init(&device);
    /// let (a, b) = (cache.add(), cache.add());
    /// // Two prompts, of 9 and of 4 tokens, in tensors of 9 positions.
    /// let zeros = |heads| Tensor::<4>::zeros([2, heads, 9, 16], &device);
    /// let options = FlashAttentionOptions::new().with_causal(true);
    /// flash_attention_with_kvcache(zeros(4), zeros(2), zeros(2), &mut cache.batch(&[(a, 9), (b, 4)])?, &options);
    /// assert_eq!((cache.len(a)?, cache.len(b)?), (9, 4));
    /// assert!(cache.batch(&[(a, 1), (a, 1)]).is_err());
    /// # }
    /// # Ok::<(), burn_flash_attention::AttentionError>(())
    /// ```
    pub fn batch(&mut self, sequences: &[(SequenceId, usize)]) -> Result<PagedBatch<'_>, AttentionError> {
        let (mut named, mut lens) = (HashSet::new(), Vec::with_capacity(sequences.len()));
        for (sequence, _) in sequences {
            lens.push(self.len(*sequence)?);
            if !named.insert(sequence) {
                return Err(AttentionError::Unsupported {
                    option: "sequences",
                    value: format!("sequence {sequence} twice"),
                    why: "new positions are appended to each sequence once; fork it for another continuation",
                });
            }
        }
        Ok(PagedBatch { cache: self, sequences: sequences.to_vec(), lens })
    }
}

impl PagedBatch<'_> {
    /// The kernels, tiles and memory that [`flash_attention_with_kvcache`](crate::flash_attention_with_kvcache) would use for these
    /// arguments. Runs nothing.
    ///
    /// # Errors
    ///
    /// The [`AttentionError`] that [`try_flash_attention_with_kvcache`](crate::try_flash_attention_with_kvcache) would return, except for
    /// pages that run out.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::{FlashAttentionOptions, PagedKvCacheConfig};
    ///
    /// let mut cache = PagedKvCacheConfig::new(10, 2, 16).init(&Device::flex());
    /// let sequence = cache.add();
    /// let zeros = |heads| Tensor::<4>::zeros([1, heads, 1, 16], &Device::flex());
    /// let batch = cache.batch(&[(sequence, 1)])?;
    /// let plan = batch.plan(&zeros(8), &zeros(2), &zeros(2), &FlashAttentionOptions::new())?;
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

    /// Length of the longest sequence after the call.
    fn longest(&self) -> usize {
        self.lens.iter().zip(&self.sequences).map(|(len, (_, new))| len + new).max().unwrap_or(0)
    }

    /// Whether the host's one number is not the length of all sequences before a call with `new` positions, and of their new positions.
    fn varies(&self, new: usize) -> bool {
        self.differ() || self.is_padded(new)
    }

    /// Whether the sequences have different lengths before the call.
    fn differ(&self) -> bool {
        self.lens.iter().any(|len| *len != self.lens[0])
    }

    /// Whether a sequence has fewer new positions than the tensors.
    fn is_padded(&self, new: usize) -> bool {
        self.sequences.iter().any(|(_, of_sequence)| *of_sequence != new)
    }

    fn ids(&self) -> Vec<SequenceId> {
        self.sequences.iter().map(|(sequence, _)| *sequence).collect()
    }

    /// Checks options that a paged cache has its own demands on.
    fn check_options(&self, options: &FlashAttentionOptions) -> Result<(), AttentionError> {
        if let Some(lens) = &options.seq_lens_q {
            return Err(AttentionError::Unsupported {
                option: "seq_lens_q",
                value: format!("a tensor of shape {:?}", lens.dims()),
                why: "the batch of a paged cache has the number of new positions of each sequence",
            });
        }
        let Some(window) = self.cache.config.window else { return Ok(()) };
        match options.window_left {
            Some(left) if left <= window => Ok(()),
            left => Err(AttentionError::Unsupported {
                option: "window_left",
                value: left.map_or_else(|| "none".into(), |left| left.to_string()),
                why: "the cache forgets positions outside its own window, so that no larger one can be seen",
            }),
        }
    }

    /// Integers on the device of the cache.
    fn integers<const D: usize>(&self, values: Vec<i32>, shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::from_data(TensorData::new(values, shape), (&self.cache.device(), DType::I32))
    }

    /// Lengths before the call, `[batch]`: those that the last call of the same sequences left, if there was one.
    fn lens_on_device(&self) -> Tensor<1, Int> {
        let kept = self.cache.seq_lens.as_ref().filter(|lens| lens.sequences == self.ids());
        let values = || self.lens.iter().map(|len| *len as i32).collect();
        kept.map_or_else(|| self.integers(values(), [self.lens.len()]), |lens| lens.tensor.clone())
    }

    /// The page table, `[batch, max_pages]`.
    fn table(&self) -> Tensor<2, Int> {
        let pages = |(sequence, _): &(SequenceId, usize)| {
            self.cache.allocator.get(*sequence).map_or(&[][..], |sequence| &sequence.pages)
        };
        let columns = self.sequences.iter().map(|sequence| pages(sequence).len()).max().unwrap_or(0).max(1);
        let mut values = Vec::with_capacity(self.sequences.len() * columns);
        for (row, sequence) in self.sequences.iter().enumerate() {
            values.extend(pages(sequence).iter().map(|page| *page as i32));
            values.resize((row + 1) * columns, 0);
        }
        self.integers(values, [self.sequences.len(), columns])
    }
}

impl AttentionCache for PagedBatch<'_> {}

impl Operands for PagedBatch<'_> {
    type Mark = Vec<usize>;

    fn mark(&self) -> Vec<usize> {
        self.lens.clone()
    }

    fn rewind(&mut self, mark: Vec<usize>) {
        for ((sequence, _), len) in self.sequences.iter().zip(&mark) {
            // A window of the next position reaches no page that was forgotten before these lengths.
            let truncated = self.cache.truncate(*sequence, *len);
            debug_assert!(truncated.is_ok(), "{truncated:?}");
        }
        self.lens = mark;
    }

    fn posed(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        options: &FlashAttentionOptions,
    ) -> Result<(Device, AttentionProblem), AttentionError> {
        self.check_options(options)?;
        let config = &self.cache.config;
        let ([_, _, new, _], batch) = (q.dims(), self.sequences.len());
        check_new([q, k, v], &self.cache.setting, config.pools(), ("the batch of sequences", batch))?;
        for (sequence, of_sequence) in &self.sequences {
            if *of_sequence > new {
                return Err(AttentionError::Unsupported {
                    option: "sequences",
                    value: format!("{of_sequence} new positions of sequence {sequence}"),
                    why: "q, k and v have fewer",
                });
            }
        }
        let seq_k = self.longest();
        let shapes = config.pools().map(|[_, heads, _, head_dim]| [batch, heads, seq_k, head_dim]);
        let (device, mut problem) = posed_over(q, k, v, shapes, options)?;
        if self.is_padded(new) {
            problem = problem.with_seq_lens_q(&[batch])?;
        }
        if self.varies(new) {
            problem = problem.with_seq_lens_k(&[batch])?;
        }
        let max_pages = seq_k.div_ceil(config.page_size).max(1);
        Ok((device, config.in_memory(problem, [batch, max_pages])?))
    }

    fn max_len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or_default()
    }

    fn differing_lens(&self) -> Option<Tensor<1, Int>> {
        self.differ().then(|| self.lens_on_device())
    }

    fn take(&mut self, new: usize) -> Result<Taken, AttentionError> {
        let reserved = self.cache.allocator.reserve(&self.sequences)?;
        let (ids, batch) = (self.ids(), self.sequences.len());
        let of_batch = |sequences: &[SequenceId]| sequences == ids;
        let (varies, padded) = (self.varies(new), self.is_padded(new));
        let kept = self.cache.table.take().filter(|table| !reserved.changed && of_batch(&table.sequences));
        let table = kept.map_or_else(|| self.table(), |table| table.tensor);
        let lens = varies.then(|| self.lens_on_device());
        self.cache.seq_lens = None;
        let new_lens = self.sequences.iter().map(|(_, of_sequence)| *of_sequence as i32);
        let new_lens = padded.then(|| self.integers(new_lens.collect(), [batch]));
        let copies = (!reserved.copies.is_empty()).then(|| {
            let pairs = reserved.copies.as_flattened().iter().map(|page| *page as i32);
            self.integers(pairs.collect(), [reserved.copies.len(), 2])
        });
        self.cache.table = Some(Resident { sequences: ids, tensor: table.clone() });
        let Tensors { k, v } = self.cache.tensors.take().unwrap_or_else(|| panic!("{LOST}"));
        let tensors = CacheTensors {
            k: k.into_backend(),
            v: v.into_backend(),
            seq_lens: OptionalInt::from_option(lens.map(Tensor::into_dispatch)),
            page_table: OptionalInt::Some(table.into_dispatch()),
            page_copies: OptionalInt::from_option(copies.map(Tensor::into_dispatch)),
        };
        let before = self.lens.first().copied().unwrap_or(0);
        let lengths = CacheLengths { before, after: self.longest(), page_size: self.cache.config.page_size };
        Ok(Taken { tensors, lengths, new_lens })
    }

    fn put(&mut self, CacheTensors { k, v, seq_lens, .. }: CacheTensors<Dispatch>, _new: usize) {
        self.cache.tensors = Some(Tensors { k: Stored::from_backend(k), v: Stored::from_backend(v) });
        self.cache.allocator.appended(&self.sequences);
        self.lens.iter_mut().zip(&self.sequences).for_each(|(len, (_, new))| *len += new);
        let lens = seq_lens.into_option().map(Tensor::from_dispatch);
        self.cache.seq_lens = lens.map(|tensor| Resident { sequences: self.ids(), tensor });
    }
}
