//! The problem: sizes, element type and options of one attention call, and their validation.

mod options;
pub use options::*;

mod blocks;
mod checks;
mod pages;
pub use blocks::BlockMask;
pub use pages::PagedKv;

use crate::dtype::Dtype;
use crate::error::{AttentionError, Result};
use crate::mask::Band;
use crate::mods::TENSORS;
use crate::score::Factor;
pub(crate) use checks::agree;
pub use checks::check_broadcast;
use checks::{check_elements, check_length, ranked};
use serde::{Deserialize, Serialize};

/// Largest head dimension that any kernel supports.
pub const MAX_HEAD_DIM: usize = 256;
/// Longest sequence. The limit keeps sums and differences of positions within 32-bit integers.
pub const MAX_SEQ: usize = (1 << 30) - 1;

/// Largest number of elements of `q`, `k`, `v` and the output. It is more than any device addresses, and small enough that the
/// bytes of scratch fit 64 bits.
pub const MAX_ELEMENTS: u64 = 1 << 50;

/// Largest number of elements of a mask, a bias or a tensor of a function.
pub const MAX_PAIRS: u64 = 1 << 60;

/// One attention call: `o = softmax(scores) · v` over `q [batch, num_heads_q, seq_q, head_dim]`,
/// `k [batch, num_heads_kv, seq_k, head_dim]` and `v [batch, num_heads_kv, seq_k, head_dim_v]`.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
///
/// let q = [2, 8, 1024, 64];
/// let kv = [2, 2, 1024, 64];
/// let problem = AttentionProblem::new(&q, &kv, &kv, Dtype::F32, AttentionOptions::default())?;
/// assert_eq!(problem.group_size(), 4);
/// assert_eq!(problem.softmax_scale(), 0.125);
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AttentionProblem {
    /// Batch size.
    pub batch: usize,
    /// Number of heads of `q`; a multiple of `num_heads_kv`.
    pub num_heads_q: usize,
    /// Number of heads of `k` and `v`.
    pub num_heads_kv: usize,
    /// Queries per batch.
    pub seq_q: usize,
    /// Keys per batch.
    pub seq_k: usize,
    /// Dimension of a query and of a key: 1 to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Dimension of a value: 1 to [`MAX_HEAD_DIM`].
    pub head_dim_v: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of the boolean mask (true hides). Each dimension is 1 or that of the scores.
    pub mask: Option<[usize; 4]>,
    /// Shape of the additive bias. Each dimension is 1 or that of the scores.
    pub bias: Option<[usize; 4]>,
    /// Shape of the ALiBi slopes, `[batch | 1, num_heads_q]`.
    pub alibi_slopes: Option<[usize; 2]>,
    /// Whether there are sinks, `[num_heads_q]`.
    pub sinks: bool,
    /// Whether a tensor `[batch]` gives the number of valid queries of each batch. The queries after them see nothing.
    pub seq_lens_q: bool,
    /// Whether a tensor `[batch]` gives the number of valid keys of each batch. The keys after them are hidden.
    pub seq_lens_k: bool,
    /// Number of packed sequences in all batches. Sequences do not see each other. `None`: each batch is one sequence.
    pub cu_seqlens: Option<usize>,
    /// Shapes of the tensors that `score_mod` reads. Each dimension is 1 or that of the scores.
    pub score_tensors: [Option<[usize; 4]>; TENSORS],
    /// Shapes of the tensors that `mask_mod` reads. Each dimension is 1 or that of the scores.
    pub mask_tensors: [Option<[usize; 4]>; TENSORS],
    /// Shape of the block mask, if there is one.
    pub block_mask: Option<BlockMask>,
    /// Pages of keys and values, if they are in pages.
    pub pages: Option<PagedKv>,
    /// Options that are numbers or functions.
    pub options: AttentionOptions,
}

/// Names of the functions' tensors in error messages.
pub(crate) const SCORE_TENSORS: [&str; TENSORS] = ["score_tensors[0]", "score_tensors[1]"];
pub(crate) const MASK_TENSORS: [&str; TENSORS] = ["mask_tensors[0]", "mask_tensors[1]"];

fn tensors(
    option: &'static str,
    names: [&'static str; TENSORS],
    shapes: &[&[usize]],
) -> Result<[Option<[usize; 4]>; TENSORS]> {
    if shapes.len() > TENSORS {
        let value = format!("{} tensors", shapes.len());
        return Err(AttentionError::Unsupported {
            option,
            value,
            why: "a function reads at most two tensors, a and b",
        });
    }
    let mut tensors = [None; TENSORS];
    for (nth, shape) in shapes.iter().enumerate() {
        tensors[nth] = Some(ranked(names[nth], shape)?);
    }
    Ok(tensors)
}

impl AttentionProblem {
    /// Builds and validates the problem for tensors of these shapes, without mask, bias or other optional tensors.
    pub fn new(
        q: &[usize],
        k: &[usize],
        v: &[usize],
        dtype: Dtype,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let (q, k, v) = (ranked::<4>("q", q)?, ranked::<4>("k", k)?, ranked::<4>("v", v)?);
        agree("k", &k, 0, "batch", "q", q[0])?;
        agree("v", &v, 0, "batch", "q", q[0])?;
        agree("v", &v, 1, "num_heads_kv", "k", k[1])?;
        agree("v", &v, 2, "seq_k", "k", k[2])?;
        agree("k", &k, 3, "head_dim", "q", q[3])?;
        let problem = AttentionProblem {
            batch: q[0],
            num_heads_q: q[1],
            num_heads_kv: k[1],
            seq_q: q[2],
            seq_k: k[2],
            head_dim: q[3],
            head_dim_v: v[3],
            dtype,
            mask: None,
            bias: None,
            alibi_slopes: None,
            sinks: false,
            seq_lens_q: false,
            seq_lens_k: false,
            cu_seqlens: None,
            score_tensors: [None; TENSORS],
            mask_tensors: [None; TENSORS],
            block_mask: None,
            pages: None,
            options,
        };
        problem.validated()
    }

    /// Adds a boolean mask of this shape.
    pub fn with_mask(mut self, shape: &[usize]) -> Result<Self, AttentionError> {
        self.mask = Some(ranked("mask", shape)?);
        self.validated()
    }

    /// Adds an additive bias of this shape.
    pub fn with_bias(mut self, shape: &[usize]) -> Result<Self, AttentionError> {
        self.bias = Some(ranked("bias", shape)?);
        self.validated()
    }

    /// Adds ALiBi slopes of this shape, `[batch | 1, num_heads_q]`: `−slope · |i − j|` is added to each score, where `i` is the
    /// position of the query among the keys (ALiBi, arXiv:2108.12409).
    pub fn with_alibi_slopes(mut self, shape: &[usize]) -> Result<Self, AttentionError> {
        self.alibi_slopes = Some(ranked("alibi_slopes", shape)?);
        self.validated()
    }

    /// Adds sinks of this shape, `[num_heads_q]`: each row has one more logit, with value vector 0.
    pub fn with_sinks(mut self, shape: &[usize]) -> Result<Self, AttentionError> {
        agree("sinks", &ranked::<1>("sinks", shape)?, 0, "num_heads_q", "q", self.num_heads_q)?;
        self.sinks = true;
        self.validated()
    }

    /// Adds query lengths of this shape, `[batch]`: the number of valid queries of each batch.
    pub fn with_seq_lens_q(mut self, shape: &[usize]) -> Result<Self, AttentionError> {
        self.check_lens("seq_lens_q", shape)?;
        self.seq_lens_q = true;
        self.validated()
    }

    /// Adds key lengths of this shape, `[batch]`: the number of valid keys of each batch.
    pub fn with_seq_lens_k(mut self, shape: &[usize]) -> Result<Self, AttentionError> {
        self.check_lens("seq_lens_k", shape)?;
        self.seq_lens_k = true;
        self.validated()
    }

    /// Adds packed sequences. Both shapes are `[sequences + 1]`: the tensors hold the first query and the first key of each
    /// sequence, counted through all batches, followed by the end of the last sequence.
    pub fn with_cu_seqlens(mut self, q: &[usize], k: &[usize]) -> Result<Self, AttentionError> {
        let (q, k) = (ranked::<1>("cu_seqlens_q", q)?, ranked::<1>("cu_seqlens_k", k)?);
        agree("cu_seqlens_k", &k, 0, "sequences + 1", "cu_seqlens_q", q[0])?;
        let Some(sequences) = q[0].checked_sub(1) else {
            return Err(AttentionError::Unsupported {
                option: "cu_seqlens_q",
                value: "[]".into(),
                why: "it must have sequences + 1 elements: the start of each sequence, and the end of the last one",
            });
        };
        self.cu_seqlens = Some(sequences);
        self.validated()
    }

    /// Adds at most two tensors that the `score_mod` of the options reads.
    pub fn with_score_tensors(mut self, shapes: &[&[usize]]) -> Result<Self, AttentionError> {
        self.score_tensors = tensors("score_tensors", SCORE_TENSORS, shapes)?;
        self.validated()
    }

    /// Adds at most two tensors that the `mask_mod` of the options reads.
    pub fn with_mask_tensors(mut self, shapes: &[&[usize]]) -> Result<Self, AttentionError> {
        self.mask_tensors = tensors("mask_tensors", MASK_TENSORS, shapes)?;
        self.validated()
    }

    /// Adds a block mask of this shape, `[batch | 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`, with divisions
    /// rounded up. [`BlockMask::blocks`] says what the shape is with packed sequences, which must have been added before.
    /// [`blocks`](mod@crate::blocks) defines the block states.
    pub fn with_block_mask(mut self, shape: &[usize], block_q: usize, block_k: usize) -> Result<Self, AttentionError> {
        self.block_mask = Some(BlockMask { blocks: ranked("block_mask", shape)?, block_q, block_k });
        self.validated()
    }

    fn validated(self) -> Result<Self> {
        self.validate().map(|()| self)
    }

    fn check_lens(&self, argument: &'static str, shape: &[usize]) -> Result<()> {
        agree(argument, &ranked::<1>(argument, shape)?, 0, "batch", "q", self.batch)
    }

    /// Whether a mask or `mask_mod` can hide pairs that are visible by position.
    pub fn hides_pairs(&self) -> bool {
        self.mask.is_some() || self.options.mask_mod.is_some()
    }

    /// Whether sequences are packed or shorter than the tensors.
    pub fn is_varlen(&self) -> bool {
        self.num_sequences().is_some()
    }

    /// Number of sequences, if the problem has packed sequences or lengths.
    pub fn num_sequences(&self) -> Option<usize> {
        self.cu_seqlens.or((self.seq_lens_q || self.seq_lens_k).then_some(self.batch))
    }

    /// Checks everything that does not depend on the device.
    pub fn validate(&self) -> Result<(), AttentionError> {
        let (num_heads_q, num_heads_kv) = (self.num_heads_q, self.num_heads_kv);
        // Without key/value heads, there are no query heads either.
        if !num_heads_q.is_multiple_of(num_heads_kv) {
            return Err(AttentionError::HeadsNotGrouped { num_heads_q, num_heads_kv });
        }
        for (argument, value) in [("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)] {
            if value == 0 || value > MAX_HEAD_DIM {
                return Err(AttentionError::HeadDim { argument, value, min: 1, max: MAX_HEAD_DIM });
            }
        }
        check_length("seq_q", self.seq_q)?;
        check_length("seq_k", self.seq_k)?;
        let shapes = [("q", self.q_shape()), ("k", self.k_shape()), ("v", self.v_shape()), ("o", self.o_shape())];
        for (argument, shape) in shapes {
            check_elements(argument, shape, MAX_ELEMENTS)?;
        }
        let [score_a, score_b] = self.score_tensors;
        let [mask_a, mask_b] = self.mask_tensors;
        let (scores, masks) = (self.options.score_mod.is_some(), self.options.mask_mod.is_some());
        for (argument, shape, is_read) in [
            (SCORE_TENSORS[0], score_a, scores),
            (SCORE_TENSORS[1], score_b, scores),
            (MASK_TENSORS[0], mask_a, masks),
            (MASK_TENSORS[1], mask_b, masks),
            ("mask", self.mask, true),
            ("bias", self.bias, true),
        ] {
            let Some(shape) = shape else { continue };
            if !is_read {
                return Err(AttentionError::Unsupported {
                    option: argument,
                    value: format!("a tensor {shape:?}"),
                    why: "no function reads it; set score_mod or mask_mod",
                });
            }
            check_broadcast(argument, shape, self.scores_shape(), 4)?;
            check_elements(argument, shape, MAX_PAIRS)?;
        }
        if let Some(shape) = self.alibi_slopes {
            agree("alibi_slopes", &shape, 1, "num_heads_q", "q", self.num_heads_q)?;
            if shape[0] != 1 {
                agree("alibi_slopes", &shape, 0, "batch", "q", self.batch)?;
            }
        }
        if let Some(mask) = self.block_mask {
            self.check_block_mask(mask)?;
        }
        if let Some(sequences) = self.cu_seqlens {
            if self.seq_lens_q || self.seq_lens_k {
                return Err(AttentionError::Unsupported {
                    option: if self.seq_lens_q { "seq_lens_q" } else { "seq_lens_k" },
                    value: "a tensor".into(),
                    why: "cu_seqlens_q and cu_seqlens_k already define the ends of sequences",
                });
            }
            check_length("cu_seqlens_q", sequences)?;
            check_length("batch * seq_q", self.batch * self.seq_q)?;
            check_length("batch * seq_k", self.batch * self.seq_k)?;
        }
        self.check_pages()?;
        self.options.validate()
    }

    /// `[batch, num_heads_q, seq_q, seq_k]`: the shape that mask and bias broadcast to. No tensor of this shape is allocated.
    pub fn scores_shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads_q, self.seq_q, self.seq_k]
    }

    /// `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub fn o_shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads_q, self.seq_q, self.head_dim_v]
    }

    /// `[batch, num_heads_q, seq_q]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.num_heads_q, self.seq_q]
    }

    /// `[batch, num_heads_q, seq_q, head_dim]`.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads_q, self.seq_q, self.head_dim]
    }

    /// `[batch, num_heads_kv, seq_k, head_dim]`, or `[num_pages, num_heads_kv, page_size, head_dim]` with pages.
    pub fn k_shape(&self) -> [usize; 4] {
        self.shape_of_keys(self.head_dim)
    }

    /// `[batch, num_heads_kv, seq_k, head_dim_v]`, or `[num_pages, num_heads_kv, page_size, head_dim_v]` with pages.
    pub fn v_shape(&self) -> [usize; 4] {
        self.shape_of_keys(self.head_dim_v)
    }

    fn shape_of_keys(&self, columns: usize) -> [usize; 4] {
        let (batch, rows) = self.pages.map_or((self.batch, self.seq_k), |pages| (pages.num_pages, pages.page_size));
        [batch, self.num_heads_kv, rows, columns]
    }

    /// Number of rows of scores: `batch · num_heads_q · seq_q`.
    pub fn rows(&self) -> usize {
        self.batch * self.num_heads_q * self.seq_q
    }

    /// Number of query heads that share a key/value head.
    pub fn group_size(&self) -> usize {
        self.num_heads_q.checked_div(self.num_heads_kv).unwrap_or(1)
    }

    /// Whether factors of products of matrix instructions are f32 that are rounded to tf32.
    pub(crate) fn rounds_to_tf32(&self) -> bool {
        self.dtype == Dtype::F32 && self.options.precision == Precision::Tf32
    }

    /// The larger head dimension.
    pub(crate) fn widest(&self) -> usize {
        self.head_dim.max(self.head_dim_v)
    }

    /// Length and number of heads of the queries, or of the keys if `keys`.
    pub(crate) fn side(&self, keys: bool) -> (usize, usize) {
        if keys { (self.seq_k, self.num_heads_kv) } else { (self.seq_q, self.num_heads_q) }
    }

    /// The factor on `q·kᵀ`: the option, or `1/√head_dim`.
    pub fn softmax_scale(&self) -> f32 {
        self.options.softmax_scale.unwrap_or_else(|| (1.0 / (self.head_dim as f64).sqrt()) as f32)
    }

    /// The factor by which the gradient of a score is multiplied to give the gradient of the product.
    pub(crate) fn factor_of_product(&self) -> Factor {
        let multiplies = self.options.score_mod.is_some_and(|function| !function.additive());
        if self.options.softcap.is_some() || multiplies { Factor::Product } else { Factor::One }
    }

    /// Visibility by position: causality, windows and the lengths of the tensors.
    pub fn band(&self) -> Band {
        Band::new(self.seq_q, self.seq_k, &self.options)
    }

    /// Floating-point operations of the forward as the literature counts them: `4 · batch · heads · pairs · head_dim` (two
    /// products of two operations). A causal problem counts half of all pairs (FlashAttention-2, arXiv:2307.08691, section
    /// 4.1). A problem with a window counts the visible pairs.
    pub fn forward_flops(&self) -> f64 {
        let AttentionOptions { causal, window_left, window_right, .. } = self.options;
        let pairs = if window_left.is_some() || window_right.is_some() {
            self.band().pairs() as f64
        } else {
            self.seq_q as f64 * self.seq_k as f64 * if causal { 0.5 } else { 1.0 }
        };
        2.0 * self.batch as f64 * self.num_heads_q as f64 * pairs * (self.head_dim + self.head_dim_v) as f64
    }

    /// Floating-point operations of the backward: 2.5 times the forward's.
    pub fn backward_flops(&self) -> f64 {
        2.5 * self.forward_flops()
    }
}
