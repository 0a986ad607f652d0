//! Attention and its gradients in f64 on the host: naive, slow, and meant to be read.
//!
//! This is the oracle that the kernels are tested against. It shares only [`AttentionProblem`] and [`Band`] with them. Every score is
//! computed by itself, and the softmax takes two passes over a row. Tensors are contiguous slices, last dimension fastest.
//!
//! Let `t = softcap(softmax_scale · q·kᵀ)`, where `softcap(x) = c · tanh(x / c)`, or `x` without a softcap. Let `f` be the score function,
//! or `f(t) = t`:
//!
//! ```text
//! s = f(t) + bias − slope·|i − j| where the pair is visible, −∞ where mask, causality, window, function or block hide it
//! lse = log (Σⱼ exp(s) + exp(sink))        p = exp(s − lse)        o = (p∘z)·v
//! ```
//!
//! In `|i − j|`, `i` is the query's position among the keys. `z` is the factor of dropout. Blocks of a block mask count positions from the
//! beginning of the sequence. In a full block, mask and function are not evaluated.
//!
//! Users' functions compute in f32: `t` is rounded to f32 for `f`, and the results of `f` and its derivatives have the precision of f32.
//!
//! [`expected`] emulates the roundings of a kernel, and [`Comparison`] judges a kernel's result by it.
//!
//! A row that sees nothing, not even a sink, or only scores of −∞, has `o = 0` and `lse = −∞`, and adds nothing to any gradient. Hidden
//! keys and values are never read, so a NaN there does not spread.
//!
//! ```
//! use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
//! use flash_attention_reference::{Inputs, backward, forward, normal};
//!
//! let options = AttentionOptions { causal: true, ..Default::default() };
//! let problem = AttentionProblem::new(&[1, 4, 3, 8], &[1, 2, 5, 8], &[1, 2, 5, 8], Dtype::F32, options)?;
//! let (q, k, v) = (normal(4 * 3 * 8, 0), normal(2 * 5 * 8, 1), normal(2 * 5 * 8, 2));
//! let inputs = Inputs { q: &q, k: &k, v: &v, ..Default::default() };
//!
//! let output = forward(&problem, &inputs);
//! assert_eq!(output.o.len(), 4 * 3 * 8);
//! let gradients = backward(&problem, &inputs, &output.o, None);
//! assert_eq!(gradients.dk.len(), k.len());
//! # Ok::<(), flash_attention_kernels::AttentionError>(())
//! ```

mod backward;
mod dropout;
mod dtype;
mod emulation;
pub mod error;
mod forward;
mod judge;
pub mod mods;
mod pairs;
mod random;
mod rounding;
mod row;
mod sample;
mod tensors;

pub use backward::{Gradients, backward};
pub use dropout::kept;
pub use dtype::round_to;
pub use emulation::{Attention, Expected, expected};
pub use error::Error;
pub use forward::{Output, forward};
pub use judge::{Comparison, Judged, Unfit, Verdict};
pub use pairs::{Pair, pairs};
pub use random::normal;
pub use rounding::{Emulation, Operands};
pub use sample::{Sample, sample};
pub use tensors::Tensors;

use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::mods::TENSORS;
use std::ops::Range;

/// Input tensors of one attention call.
///
/// ```
/// use flash_attention_reference::Inputs;
///
/// // One query over two keys, the second hidden.
/// let inputs = Inputs { q: &[1.0], k: &[0.5, 0.5], v: &[3.0, 4.0], mask: Some(&[false, true]), ..Default::default() };
/// # assert_eq!(inputs.k.len(), inputs.v.len());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    /// `[batch, num_heads_q, seq_q, head_dim]`.
    pub q: &'a [f64],
    /// `[batch, num_heads_kv, seq_k, head_dim]`.
    pub k: &'a [f64],
    /// `[batch, num_heads_kv, seq_k, head_dim_v]`.
    pub v: &'a [f64],
    /// `problem.mask`, which broadcasts to `[batch, num_heads_q, seq_q, seq_k]`. `true` hides.
    pub mask: Option<&'a [bool]>,
    /// `problem.bias`, which broadcasts to `[batch, num_heads_q, seq_q, seq_k]`.
    pub bias: Option<&'a [f64]>,
    /// `problem.alibi_slopes`, `[batch | 1, num_heads_q]`.
    pub alibi_slopes: Option<&'a [f64]>,
    /// `[num_heads_q]`.
    pub sinks: Option<&'a [f64]>,
    /// Seed and position of dropout.
    pub dropout: Option<Dropout>,
    /// `[batch]`: number of queries of each batch that belong to its sequence, counted from the first.
    pub seq_lens_q: Option<&'a [usize]>,
    /// `[batch]`: number of keys of each batch that belong to its sequence, counted from the first.
    pub seq_lens_k: Option<&'a [usize]>,
    /// `[sequences + 1]`: first query of each packed sequence, counted through the batches, and the end of the last one.
    pub cu_seqlens_q: Option<&'a [usize]>,
    /// `[sequences + 1]`: first key of each packed sequence, counted through the batches, and the end of the last one.
    pub cu_seqlens_k: Option<&'a [usize]>,
    /// `problem.score_tensors`, which broadcast to `[batch, num_heads_q, seq_q, seq_k]`. Read as f32.
    pub score_tensors: [Option<&'a [f64]>; TENSORS],
    /// `problem.mask_tensors`, which broadcast to `[batch, num_heads_q, seq_q, seq_k]`. Read as f32.
    pub mask_tensors: [Option<&'a [f64]>; TENSORS],
    /// Block states of `problem.block_mask`: 0 hides a block, 1 evaluates mask and function, and any larger number shows the block whatever
    /// they say.
    pub block_mask: Option<&'a [u32]>,
}

/// What the draws of dropout depend on besides positions.
///
/// ```
/// use flash_attention_reference::Dropout;
///
/// // The third head of the first batch, by itself.
/// let alone = Dropout { seed: [7, 0], first: [0, 2] };
/// # assert_ne!(alone, Dropout { first: [0, 0], ..alone });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropout {
    /// The seed.
    pub seed: [u32; 2],
    /// Index of the first batch and the first head of these tensors among all.
    pub first: [usize; 2],
}

/// A sequence of a call.
pub(crate) struct Sequence {
    /// Number of the sequence.
    pub number: usize,
    /// Its queries within their batch.
    pub q: Range<usize>,
    /// Its keys within their batch.
    pub k: Range<usize>,
}

impl Inputs<'_> {
    /// The sequence that query `i` of a batch belongs to, whose keys it may see. `None` if it belongs to no sequence.
    pub(crate) fn sequence(&self, problem: &AttentionProblem, b: usize, i: usize) -> Option<Sequence> {
        let (seq_q, seq_k) = (problem.seq_q, problem.seq_k);
        let (Some(cu_q), Some(cu_k)) = (self.cu_seqlens_q, self.cu_seqlens_k) else {
            let end = |lens: Option<&[usize]>, all: usize| lens.map_or(all, |lens| lens[b].min(all));
            let sequence = Sequence { number: b, q: 0..end(self.seq_lens_q, seq_q), k: 0..end(self.seq_lens_k, seq_k) };
            return sequence.q.contains(&i).then_some(sequence);
        };
        // A sequence ends at the latest with the batch in which it begins.
        let within = |ends: &[usize], seq: usize| {
            let begin = ends[0].min(problem.batch * seq);
            // If a tensor has no queries or keys, everything is in the first batch.
            let batch = begin.checked_div(seq).map_or(0, |batch| batch.min(problem.batch - 1));
            let begin = begin - batch * seq;
            (batch, begin..(begin + ends[1] - ends[0]).min(seq))
        };
        let sequences = cu_q.windows(2).zip(cu_k.windows(2)).enumerate();
        let mut of_query = sequences.filter_map(|(number, (q, k))| {
            let ((batch_q, q), (batch_k, k)) = (within(q, seq_q), within(k, seq_k));
            let k = if batch_k == batch_q { k } else { 0..0 };
            (batch_q == b && q.contains(&i)).then_some(Sequence { number, q, k })
        });
        of_query.next()
    }

    /// The band of query `i` of a batch: the keys that it sees by position.
    pub(crate) fn band(&self, problem: &AttentionProblem, b: usize, i: usize) -> Band {
        let band = problem.band();
        match self.sequence(problem, b, i) {
            Some(Sequence { number, q, k }) if problem.is_varlen() => {
                let [number, q0, q1, k0, k1] = [number, q.start, q.end, k.start, k.end].map(|n| n as u32);
                band.of(number, q0, q1, k0, k1)
            }
            Some(_) => band,
            None => band.of(0, 0, 0, 0, 0),
        }
    }

    /// Checks that the tensors' lengths match the problem, because an oracle that reads wrong elements would be worse than none.
    fn check(&self, problem: &AttentionProblem) {
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        assert_eq!(self.q.len(), len(problem.q_shape()), "length of q");
        assert_eq!(self.k.len(), len(problem.k_shape()), "length of k");
        assert_eq!(self.v.len(), len(problem.v_shape()), "length of v");
        assert_eq!(self.mask.map(<[bool]>::len), problem.mask.map(len), "length of mask");
        assert_eq!(self.bias.map(<[f64]>::len), problem.bias.map(len), "length of bias");
        let slopes = problem.alibi_slopes.map(|[batch, heads]| batch * heads);
        assert_eq!(self.alibi_slopes.map(<[f64]>::len), slopes, "length of alibi_slopes");
        assert_eq!(self.sinks.map(<[f64]>::len), problem.sinks.then_some(problem.num_heads_q), "length of sinks");
        let lens = |stated: bool| stated.then_some(problem.batch);
        assert_eq!(self.seq_lens_q.map(<[usize]>::len), lens(problem.seq_lens_q), "length of seq_lens_q");
        assert_eq!(self.seq_lens_k.map(<[usize]>::len), lens(problem.seq_lens_k), "length of seq_lens_k");
        let ends = problem.cu_seqlens.map(|sequences| sequences + 1);
        assert_eq!(self.cu_seqlens_q.map(<[usize]>::len), ends, "length of cu_seqlens_q");
        assert_eq!(self.cu_seqlens_k.map(<[usize]>::len), ends, "length of cu_seqlens_k");
        let lens = |tensors: [Option<&[f64]>; TENSORS]| tensors.map(|tensor| tensor.map(<[f64]>::len));
        let stated = |shapes: [Option<[usize; 4]>; TENSORS]| shapes.map(|shape| shape.map(len));
        assert_eq!(lens(self.score_tensors), stated(problem.score_tensors), "lengths of score_tensors");
        assert_eq!(lens(self.mask_tensors), stated(problem.mask_tensors), "lengths of mask_tensors");
        let blocks = problem.block_mask.map(|mask| len(mask.blocks));
        assert_eq!(self.block_mask.map(<[u32]>::len), blocks, "length of block_mask");
        assert_eq!(self.dropout.is_some(), problem.options.dropout > 0.0, "whether there is dropout");
    }
}
