//! Tensors of an attention call that own their elements.

use crate::{Dropout, Inputs};
use flash_attention_kernels::mods::TENSORS;

/// Input tensors of one attention call with their elements, as [`Inputs`] borrows them.
///
/// ```
/// use flash_attention_reference::{Tensors, normal};
///
/// // Two queries over three keys.
/// let (q, k, v) = (normal(2 * 8, 0), normal(3 * 8, 1), normal(3 * 4, 2));
/// let tensors = Tensors { q, k, v, seq_lens_k: Some(vec![2]), ..Default::default() };
/// assert_eq!(tensors.inputs().seq_lens_k, Some(&[2][..]));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    /// As in [`Inputs::q`].
    pub q: Vec<f64>,
    /// As in [`Inputs::k`].
    pub k: Vec<f64>,
    /// As in [`Inputs::v`].
    pub v: Vec<f64>,
    /// As in [`Inputs::mask`].
    pub mask: Option<Vec<bool>>,
    /// As in [`Inputs::bias`].
    pub bias: Option<Vec<f64>>,
    /// As in [`Inputs::alibi_slopes`].
    pub alibi_slopes: Option<Vec<f64>>,
    /// As in [`Inputs::sinks`].
    pub sinks: Option<Vec<f64>>,
    /// As in [`Inputs::dropout`].
    pub dropout: Option<Dropout>,
    /// As in [`Inputs::seq_lens_q`].
    pub seq_lens_q: Option<Vec<usize>>,
    /// As in [`Inputs::seq_lens_k`].
    pub seq_lens_k: Option<Vec<usize>>,
    /// As in [`Inputs::cu_seqlens_q`].
    pub cu_seqlens_q: Option<Vec<usize>>,
    /// As in [`Inputs::cu_seqlens_k`].
    pub cu_seqlens_k: Option<Vec<usize>>,
    /// As in [`Inputs::score_tensors`].
    pub score_tensors: [Option<Vec<f64>>; TENSORS],
    /// As in [`Inputs::mask_tensors`].
    pub mask_tensors: [Option<Vec<f64>>; TENSORS],
    /// As in [`Inputs::block_mask`].
    pub block_mask: Option<Vec<u32>>,
}

impl Tensors {
    /// All of them, borrowed.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask: self.mask.as_deref(),
            bias: self.bias.as_deref(),
            alibi_slopes: self.alibi_slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            dropout: self.dropout,
            seq_lens_q: self.seq_lens_q.as_deref(),
            seq_lens_k: self.seq_lens_k.as_deref(),
            cu_seqlens_q: self.cu_seqlens_q.as_deref(),
            cu_seqlens_k: self.cu_seqlens_k.as_deref(),
            score_tensors: self.score_tensors.each_ref().map(Option::as_deref),
            mask_tensors: self.mask_tensors.each_ref().map(Option::as_deref),
            block_mask: self.block_mask.as_deref(),
        }
    }
}
