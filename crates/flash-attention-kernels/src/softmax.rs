//! The online softmax and its log-sum-exp: the only file that handles −∞ and rows that see nothing.
//!
//! ```text
//! m' = max(m, max_j s_j)    α = exp(m − m')    l' = α·l + Σ_j exp(s_j − m')    o' = α·o + Σ_j exp(s_j − m')·v_j
//! o = o / l                 lse = m + ln l     p_j = exp(s_j − lse)
//! ```
//!
//! A sink is one more logit of a row, with value vector 0: a row begins with `m = sink, l = 1`.
//!
//! (FlashAttention, arXiv:2205.14135, algorithm 1; FlashAttention-2, arXiv:2307.08691, section 3.1.)
//!
//! WGSL cannot write −∞ and its compilers may assume that there is none. A hidden score is therefore the lowest finite
//! number and recognised by comparison, a row that sees nothing is recognised by `l = 0`, and `lse = −∞` is written and
//! read by its bits.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use cubecl::prelude::*;

/// Score of a hidden pair, and maximum of a row that has seen nothing. No visible score is as low.
pub const HIDDEN: f32 = f32::MIN;

/// The score of a hidden pair where −∞ can be written: on CUDA.
pub const UNSEEN: f32 = f32::NEG_INFINITY;

/// The bits of −∞.
const NEGATIVE_INFINITY: u32 = 0xFF80_0000;

/// When the maximum that a row's exponentials are relative to is raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rescale {
    /// Whenever a score exceeds it.
    Always,
    /// Once a score exceeds it by more than [`LAZY`], so that most tiles need no rescaling of what was added up before. (The rescaling
    /// threshold is FlashAttention-4's.)
    Lazily,
}

/// Exponentials relative to a maximum that is raised lazily stay below `e^8`, or `2^8`, which f16 holds.
const LAZY: f32 = 8.0;

/// The maximum `m'` of a row with the maximum `m` after scores up to `highest`; `α` is `exp(m − m')`.
#[cube]
pub fn raised(m: f32, highest: f32, #[comptime] rescale: Rescale) -> f32 {
    match comptime!(rescale) {
        Rescale::Always => max(m, highest),
        Rescale::Lazily => select(highest - m > LAZY, highest, m),
    }
}

/// `exp(score − m)`, exactly 0 for a hidden score. A NaN is not hidden.
#[cube]
pub fn weight(score: f32, m: f32) -> f32 {
    select(score <= HIDDEN, 0.0f32, f32::exp(score - m))
}

/// Gradient of a score as the softmax sees it, `p (dp − delta)`. `guarded`: exactly 0 for a hidden score, whatever its key's value
/// holds; without a guard a value that is not finite leaves no number, for kernels that find such rows and compute them again.
///
/// (FlashAttention, arXiv:2205.14135, appendix B.2.)
#[cube]
pub fn softmax_backward(p: f32, dp: f32, delta: f32, #[comptime] guarded: bool) -> f32 {
    let ds = p * (dp - delta);
    if comptime!(guarded) { select(p == 0.0f32, 0.0f32, ds) } else { ds }
}

/// Adds [`softmax_backward()`], guarded, to a sum.
#[cube]
pub fn add_softmax_backward(sum: f32, p: f32, dp: f32, delta: f32) -> f32 {
    select(p == 0.0f32, sum, fma(p, dp - delta, sum))
}

/// The bits of the log-sum-exp of a row with maximum `m` and sum `l`; −∞ where it saw nothing.
#[cube]
pub fn lse_bits(m: f32, l: f32) -> u32 {
    let bits = u32::reinterpret(m + f32::ln(l));
    select(l == 0.0f32, NEGATIVE_INFINITY, bits)
}

/// `1 / log2(e)`, of the `log2(e)` that has been rounded to f32, as a sum of two f32.
const NATURAL: f32 = (1.0 / std::f32::consts::LOG2_E as f64) as f32;
const NATURAL_REST: f32 = (1.0 / std::f32::consts::LOG2_E as f64 - NATURAL as f64) as f32;

/// [`lse_bits()`] in base 2: of a maximum `m_log2 = m · log2(e)` and `log2 l`. It is rounded once, and the rounding of `log2(e)` is
/// undone: at large scores an error of lse is a relative error of all probabilities that the backward recomputes.
#[cube]
pub fn lse_bits_log2(m_log2: f32, l: f32, l_log2: f32) -> u32 {
    let rest = fma(m_log2, comptime!(NATURAL_REST), l_log2 * comptime!(NATURAL));
    let lse = fma(m_log2, comptime!(NATURAL), rest);
    // For an infinite score the correction would be NaN.
    let bits = u32::reinterpret(select(f32::abs(m_log2) <= f32::MAX, lse, m_log2));
    select(l == 0.0f32, NEGATIVE_INFINITY, bits)
}

/// A log-sum-exp in base 2, rounded as products with `log2(e)` are.
#[cube]
pub fn lse_log2(lse: f32) -> f32 {
    lse * comptime!(std::f32::consts::LOG2_E)
}

/// The log-sum-exp with these bits, [`HIDDEN`] where nothing was seen.
#[cube]
pub fn lse_of_split(bits: u32) -> f32 {
    let nothing = bits == NEGATIVE_INFINITY;
    select(nothing, HIDDEN, f32::reinterpret(select(nothing, 0u32, bits)))
}

/// The sum of a row's exponentials as the product `P V` adds them up, where each is rounded to the element type: `l`, their sum in
/// f32, corrected by the rounding error of the `largest` one, which is `rounded` there.
///
/// Divided by `l`, the output of a row with a single large probability would carry that error, up to half a unit in the last place
/// of the element type, and the backward's `dP − delta`, which is near 0 there, would consist of it. PyTorch's FlashAttention-2 has
/// the largest exponential be exactly 1 for this (`UNFUSE_FMA`), at the cost of one more instruction for each score.
#[cube]
pub fn rounded_sum(l: f32, largest: f32, rounded: f32) -> f32 {
    // Errors cancel if no exponential is large. A row that is out of range stays out of range.
    select(2.0f32 * largest >= l && l <= f32::MAX, l + (rounded - largest), l)
}

/// `1 / l`, or 0 for a row that saw nothing.
#[cube]
pub fn normalizer(l: f32) -> f32 {
    select(l == 0.0f32, 0.0f32, 1.0f32 / l)
}

/// The log-sum-exp with these bits, as the backward subtracts it: of a row that saw nothing the highest number, which
/// makes its probabilities `exp(score − lse)` exactly 0.
#[cube]
pub fn lse_of_bits(bits: u32) -> f32 {
    let nothing = bits == NEGATIVE_INFINITY;
    select(nothing, f32::MAX, f32::reinterpret(select(nothing, 0u32, bits)))
}
