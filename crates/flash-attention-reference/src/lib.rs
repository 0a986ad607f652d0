//! Attention and its gradients in f64 on the host: naive, slow, and meant to be read.
//!
//! This is the oracle that the kernels are tested against. It shares with them only [`AttentionProblem`] and
//! [`Band`]; every score is computed on its own, and the softmax takes two
//! passes over a row. Tensors are contiguous slices, last dimension fastest.
//!
//! With `t = softcap(softmax_scale · q·kᵀ)`, where `softcap(x) = c · tanh(x / c)` or `x` if there is no softcap:
//!
//! ```text
//! s = t + bias − slope·|i − j| where the pair is visible, −∞ where mask, causality or window hide it
//! lse = log (Σⱼ exp(s) + exp(sink))        p = exp(s − lse)        o = (p∘z)·v
//! ```
//!
//! `|i − j|` counts from where the query stands among the keys; `z` is what dropout multiplies by.
//!
//! A row that sees nothing, not even a sink, or only scores of −∞, has `o = 0` and `lse = −∞`, and no part in any gradient. Hidden keys
//! and values are never read, so NaN among them stays there.
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
pub mod error;
mod forward;
mod pairs;
mod random;
mod row;
mod sample;

pub use backward::{Gradients, backward};
pub use dropout::kept;
pub use dtype::round_to;
pub use error::Error;
pub use forward::{Output, forward};
pub use pairs::{Pair, pairs};
pub use random::normal;
pub use sample::{Sample, sample};

use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::mask::Band;

/// The tensors of one attention call.
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
    /// What dropout draws.
    pub dropout: Option<Dropout>,
    /// `[batch]`: how many of each one's queries, the first ones, are a sequence.
    pub seq_lens_q: Option<&'a [usize]>,
    /// `[batch]`: how many of its keys.
    pub seq_lens_k: Option<&'a [usize]>,
}

/// What draws of dropout depend on beside positions.
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
    /// Where these tensors' first batch and first head stand among all.
    pub first: [usize; 2],
}

impl Inputs<'_> {
    /// Which positions of a batch see each other.
    pub(crate) fn band(&self, problem: &AttentionProblem, b: usize) -> Band {
        let len = |lens: Option<&[usize]>, all: usize| lens.map_or(all, |lens| lens[b]) as u32;
        let band = problem.band();
        match problem.is_ragged() {
            true => band.of(len(self.seq_lens_q, problem.seq_q), len(self.seq_lens_k, problem.seq_k)),
            false => band,
        }
    }

    /// An oracle that reads the wrong elements is worse than none.
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
        assert_eq!(self.dropout.is_some(), problem.options.dropout > 0.0, "whether there is dropout");
    }
}
