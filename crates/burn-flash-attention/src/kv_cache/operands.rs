//! What a call of attention takes from a cache, and gives back.

use super::{KvCache, KvCacheConfig, LOST, Lengths, PAGE_SIZE, Setting, Stored, Tensors};
use crate::api::posed_over;
use crate::backend::{CacheLengths, CacheTensors};
use crate::checks::{agree, same_device};
use crate::options::FlashAttentionOptions;
use crate::tensors::OptionalInt;
use burn::backend::Dispatch;
use burn::tensor::{Device, Int, Tensor};
use flash_attention_kernels::{AttentionError, AttentionProblem};

/// A cache as an operand of a call.
pub trait Operands {
    /// The lengths of the sequences at one time.
    type Mark;

    /// The lengths now.
    fn mark(&self) -> Self::Mark;

    /// Forgets the positions that were appended since.
    fn rewind(&mut self, mark: Self::Mark);

    /// The problem that these arguments pose together with the cache, and the device without autodiff. Changes nothing.
    fn posed(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        options: &FlashAttentionOptions,
    ) -> Result<(Device, AttentionProblem), AttentionError>;

    /// Length of the longest sequence, or more.
    fn max_len(&self) -> usize;

    /// Lengths of the sequences, `[batch]`, if they may differ.
    fn differing_lens(&self) -> Option<Tensor<1, Int>>;

    /// Makes room for `new` positions of each sequence, and hands the tensors out. An error leaves the cache as it was.
    fn take(&mut self, new: usize) -> Result<Taken, AttentionError>;

    /// Takes the tensors back, with the new positions.
    fn put(&mut self, tensors: CacheTensors<Dispatch>, new: usize);
}

/// What a call takes.
pub struct Taken {
    pub tensors: CacheTensors<Dispatch>,
    pub lengths: CacheLengths,
    /// Number of new positions of each sequence, `[batch]`, if the cache knows it and they differ.
    pub new_lens: Option<Tensor<1, Int>>,
}

/// Checks new positions of `batch` sequences against a cache of keys and values of these shapes, whatever their first and third dimensions
/// are.
pub(super) fn check_new(
    [q, k, v]: [&Tensor<4>; 3],
    setting: &Setting,
    [k_cache, v_cache]: [[usize; 4]; 2],
    (batch_of, batch): (&'static str, usize),
) -> Result<(), AttentionError> {
    let [_, _, new, _] = q.dims();
    same_device("the cache", &setting.device, &q.device())?;
    for (argument, tensor, cached) in [("k", k, k_cache), ("v", v, v_cache)] {
        let (shape, [_, heads, _, head_dim]) = (tensor.dims(), cached);
        let head_dim_of = if argument == "k" { "head_dim" } else { "head_dim_v" };
        agree(argument, &shape, (0, "batch"), (batch_of, batch))?;
        agree(argument, &shape, (1, "num_heads_kv"), ("the cache", heads))?;
        agree(argument, &shape, (3, head_dim_of), ("the cache", head_dim))?;
        agree(argument, &shape, (2, "seq_k"), ("q", new))?;
    }
    if q.dtype() != setting.element {
        let (dtype, expected) = (setting.element.name().to_string(), q.dtype().name().to_string());
        return Err(AttentionError::MixedDtypes { argument: "the cache", dtype, expected });
    }
    Ok(())
}

impl Operands for KvCache {
    type Mark = Lengths;

    fn mark(&self) -> Lengths {
        Lengths { seq_lens: self.tensors().seq_lens.clone(), max_len: self.len }
    }

    fn rewind(&mut self, mark: Lengths) {
        self.tensors_mut().seq_lens = mark.seq_lens;
        self.len = mark.max_len;
    }

    fn posed(
        &self,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        options: &FlashAttentionOptions,
    ) -> Result<(Device, AttentionProblem), AttentionError> {
        let [_, _, new, _] = q.dims();
        let shapes = self.config.shapes(self.len.saturating_add(new));
        check_new([q, k, v], &self.setting, shapes, ("the cache", self.config.batch))?;
        let config = KvCacheConfig { capacity: self.capacity_for(new)?, ..self.config.clone() };
        let (device, problem) = posed_over(q, k, v, shapes, options)?;
        let varies = self.tensors().seq_lens.is_some() || options.seq_lens_q.is_some();
        let problem = if varies { problem.with_seq_lens_k(&[self.config.batch])? } else { problem };
        Ok((device, config.in_memory(problem)?))
    }

    fn max_len(&self) -> usize {
        self.len
    }

    fn differing_lens(&self) -> Option<Tensor<1, Int>> {
        self.tensors().seq_lens.clone()
    }

    fn take(&mut self, new: usize) -> Result<Taken, AttentionError> {
        self.reserve(self.capacity_for(new)?)?;
        let Tensors { k, v, seq_lens } = self.tensors.take().unwrap_or_else(|| panic!("{LOST}"));
        let tensors = CacheTensors {
            k: k.into_backend(),
            v: v.into_backend(),
            seq_lens: OptionalInt::from_option(seq_lens.map(Tensor::into_dispatch)),
            page_table: OptionalInt::from_option(self.table.clone().map(Tensor::into_dispatch)),
            page_copies: OptionalInt::None,
        };
        let lengths = CacheLengths { before: self.len, after: self.len + new, page_size: PAGE_SIZE };
        Ok(Taken { tensors, lengths, new_lens: None })
    }

    fn put(&mut self, CacheTensors { k, v, seq_lens, .. }: CacheTensors<Dispatch>, new: usize) {
        let (k, v) = (Stored::from_backend(k), Stored::from_backend(v));
        self.tensors = Some(Tensors { k, v, seq_lens: seq_lens.into_option().map(Tensor::from_dispatch) });
        self.len += new;
    }
}
