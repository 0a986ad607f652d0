//! The online softmax and its log-sum-exp. This is the only file that handles −∞ and fully masked rows.
//!
//! ```text
//! m' = max(m, max_j s_j)    α = exp(m − m')    l' = α·l + Σ_j exp(s_j − m')    o' = α·o + Σ_j exp(s_j − m')·v_j
//! o = o / l                 lse = m + ln l     p_j = exp(s_j − lse)
//! ```
//!
//! A sink is one more logit of a row, with value vector 0: the state of the row starts as `m = sink, l = 1`.
//!
//! (FlashAttention, arXiv:2205.14135, algorithm 1; FlashAttention-2, arXiv:2307.08691, section 3.1.)
//!
//! WGSL cannot express −∞, and WGSL compilers may assume that no infinity occurs. The score of a hidden pair is therefore the
//! lowest finite f32, and is recognised by comparison. A fully masked row is recognised by `l = 0`. `lse = −∞` is written and
//! read as an integer bit pattern.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use cubecl::prelude::*;

/// Score of a hidden pair, and maximum of a row that has not seen a key yet. Every visible score is higher.
pub const HIDDEN: f32 = f32::MIN;

/// Score of a hidden pair on CUDA, where −∞ can be written.
pub const UNSEEN: f32 = f32::NEG_INFINITY;

/// The bits of −∞.
const NEGATIVE_INFINITY: u32 = 0xFF80_0000;

/// When the maximum that the exponentials of a row are relative to is raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rescale {
    /// Whenever a score exceeds it.
    Always,
    /// When a score exceeds it by more than 8. Most tiles then need no rescaling of the accumulators. (The rescaling
    /// threshold is that of FlashAttention-4.)
    Lazily,
}

/// Threshold of lazy rescaling. Exponentials stay below `e^8`, or `2^8` in base 2, which f16 can represent.
const LAZY: f32 = 8.0;

/// The new maximum `m'` of a row with the current maximum `m`, after scores up to `highest`. The caller rescales by `α = exp(m
/// − m')`.
#[cube]
pub fn raised(m: f32, highest: f32, #[comptime] rescale: Rescale) -> f32 {
    match comptime!(rescale) {
        Rescale::Always => max(m, highest),
        Rescale::Lazily => select(highest - m > LAZY, highest, m),
    }
}

/// `exp(score − m)`, and exactly 0 for a hidden score. A NaN score is not hidden.
#[cube]
pub fn weight(score: f32, m: f32) -> f32 {
    select(score <= HIDDEN, 0.0f32, f32::exp(score - m))
}

/// Gradient of the softmax with respect to a score, `p (dp − delta)`.
///
/// With `guarded`, the result is exactly 0 for a hidden score, even if the value of its key is NaN or infinite. Without it,
/// such a value makes the result NaN; unguarded kernels detect the affected rows and recompute them.
///
/// (FlashAttention, arXiv:2205.14135, appendix B.2.)
#[cube]
pub fn softmax_backward(p: f32, dp: f32, delta: f32, #[comptime] guarded: bool) -> f32 {
    let ds = p * (dp - delta);
    if comptime!(guarded) { select(p == 0.0f32, 0.0f32, ds) } else { ds }
}

/// Adds [`softmax_backward()`], guarded, to `sum[n]`.
#[cube]
pub fn add_softmax_backward(sum: &mut Array<f32>, n: usize, p: f32, dp: f32, delta: f32) {
    sum[n] = select(p == 0.0f32, sum[n], fma(p, dp - delta, sum[n]));
}

/// The bits of the log-sum-exp of a row with maximum `m` and sum `l`; −∞ for a fully masked row.
#[cube]
pub fn lse_bits(m: f32, l: f32) -> u32 {
    let bits = u32::reinterpret(m + f32::ln(l));
    select(l == 0.0f32, NEGATIVE_INFINITY, bits)
}

/// `1 / log2(e)` as a sum of two f32, where `log2(e)` is the constant rounded to f32.
const NATURAL: f32 = (1.0 / std::f32::consts::LOG2_E as f64) as f32;
const NATURAL_REST: f32 = (1.0 / std::f32::consts::LOG2_E as f64 - NATURAL as f64) as f32;

/// [`lse_bits()`] from base-2 values: the maximum `m_log2 = m · log2(e)` and `l_log2 = log2(l)`.
///
/// The result is rounded once, and the rounding error of the f32 `log2(e)` is corrected. For large scores, an absolute error of
/// `lse` becomes a relative error of every probability that the backward recomputes.
#[cube]
pub fn lse_bits_log2(m_log2: f32, l: f32, l_log2: f32) -> u32 {
    let rest = fma(m_log2, comptime!(NATURAL_REST), l_log2 * comptime!(NATURAL));
    let lse = fma(m_log2, comptime!(NATURAL), rest);
    // For an infinite score the correction would give NaN.
    let bits = u32::reinterpret(select(f32::abs(m_log2) <= f32::MAX, lse, m_log2));
    select(l == 0.0f32, NEGATIVE_INFINITY, bits)
}

/// A natural log-sum-exp converted to base 2, rounded like every product with `log2(e)`.
#[cube]
pub fn lse_log2(lse: f32) -> f32 {
    lse * comptime!(std::f32::consts::LOG2_E)
}

/// The log-sum-exp with these bits; [`HIDDEN`] for a fully masked row.
#[cube]
pub fn lse_of_split(bits: u32) -> f32 {
    let nothing = bits == NEGATIVE_INFINITY;
    select(nothing, HIDDEN, f32::reinterpret(select(nothing, 0u32, bits)))
}

/// Sum of a row's exponentials consistent with the product `P V`, which uses exponentials rounded to the element type.
///
/// `l` is the sum in f32. It is corrected by the rounding error of the `largest` exponential, whose rounded value is `rounded`.
///
/// Without the correction, the output of a row with one dominant probability carries that rounding error, up to half a unit in
/// the last place of the element type. The difference `dP − delta` of the backward is near 0 in such a row and would consist of
/// the error. PyTorch's FlashAttention-2 avoids the error by making the largest exponential exactly 1 (`UNFUSE_FMA`), which
/// costs one more instruction per score.
#[cube]
pub fn rounded_sum(l: f32, largest: f32, rounded: f32) -> f32 {
    // Rounding errors cancel if no exponential dominates. A sum of +∞ stays +∞.
    select(2.0f32 * largest >= l && l <= f32::MAX, l + (rounded - largest), l)
}

/// `1 / l`, or 0 for a fully masked row.
#[cube]
pub fn normalizer(l: f32) -> f32 {
    select(l == 0.0f32, 0.0f32, 1.0f32 / l)
}

/// The log-sum-exp with these bits, for the backward. For a fully masked row it is the highest finite f32, so that every
/// probability `exp(score − lse)` is exactly 0.
#[cube]
pub fn lse_of_bits(bits: u32) -> f32 {
    let nothing = bits == NEGATIVE_INFINITY;
    select(nothing, f32::MAX, f32::reinterpret(select(nothing, 0u32, bits)))
}
