//! Judges results by relative errors in the norm over blocks of rows, with a bound for each dtype.
//!
//! Single rows are no measure. The gradient of a row can be thousands of times smaller than the terms that it sums, which cancel. Their
//! rounding error then dominates the row. In a block of 64 rows, such a row has only its own weight.
//!
//! `judge.py` does the same for PyTorch's results; `tests/judge.json` keeps the two consistent.

use flash_attention_kernels::Dtype;
use std::ops::Range;

/// Rows in a block.
pub const ROWS: usize = 64;
/// Blocks for each head.
pub const BLOCKS: usize = 4;
/// Root mean square up to which the oracle's result counts as zero: its own rounding error, for standard normal inputs.
const ZERO: f64 = 1e-9;
/// Largest number of scores, over the heads that share keys, for which two heads are compared.
const SCORES_OF_TWO_HEADS: usize = 1 << 28;
/// Largest number of scores for which gradients of keys are compared everywhere. Each needs the row of every query that sees the key.
const SCORES: usize = 1 << 32;

/// Up to `most` blocks of [`ROWS`] rows, spread evenly over a sequence. They cover a short sequence completely, and both ends of any.
pub fn blocks(len: usize, most: usize) -> Vec<Range<usize>> {
    let (count, rows) = (len.div_ceil(ROWS).min(most), len.min(ROWS));
    let starts = (0..count).map(|n| if count < 2 { 0 } else { n * (len - rows) / (count - 1) });
    starts.map(|start| start..start + rows).collect()
}

/// Part of a problem's results that is compared with the oracle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// Number of heads: the first and the last one, or the last one only.
    pub heads: usize,
    /// Blocks of queries.
    pub queries: Vec<Range<usize>>,
    /// Blocks of keys.
    pub keys: Vec<Range<usize>>,
}

/// Part that is compared for a problem with `group` query heads for each key/value head.
pub fn sampled(group: usize, seq_q: usize, seq_k: usize, causal: bool) -> Sampled {
    let scores = group * seq_q * seq_k;
    let heads = if scores <= SCORES_OF_TWO_HEADS { 2 } else { 1 };
    if scores <= SCORES {
        return Sampled { heads, queries: blocks(seq_q, BLOCKS), keys: blocks(seq_k, BLOCKS) };
    }
    // If causal, the last keys are seen by few queries. Other keys are seen by too many queries to sum over.
    let last = blocks(seq_k, BLOCKS).pop().filter(|_| causal);
    Sampled { heads, queries: blocks(seq_q, 2), keys: last.into_iter().collect() }
}

/// Relative error of a block in the norm: `‖found − right‖ / ‖right‖`. If `right` is zero, the root mean square of `found`. NaN stays NaN,
/// and is within no bound.
pub fn error_of_block(found: &[f64], right: &[f64]) -> f64 {
    assert_eq!(found.len(), right.len(), "a block must have as many numbers as the oracle's");
    let difference: f64 = found.iter().zip(right).map(|(found, right)| (found - right).powi(2)).sum();
    let size: f64 = right.iter().map(|x| x * x).sum();
    let count = right.len() as f64;
    if size <= ZERO.powi(2) * count { (difference / count.max(1.0)).sqrt() } else { (difference / size).sqrt() }
}

/// The largest error; NaN if one of them is NaN, and 0 if there are none.
pub fn worst(errors: impl IntoIterator<Item = f64>) -> f64 {
    errors.into_iter().fold(0.0, |worst: f64, error| if error > worst || error.is_nan() { error } else { worst })
}

/// Largest error of a correct result.
///
/// Rounding to nearest with unit roundoff u (2⁻⁸ in bf16, 2⁻¹¹ in f16 and tf32) gives an error of 0.42 u in the norm of normal random
/// numbers. A fused kernel rounds probabilities or their gradients, and its results: √2 · 0.42 u, which is 2.3e-3 in bf16. Separate
/// operations round scores, exponentials and more: up to 3 u. The bound is therefore 4 u in bf16, 1.6e-2, which a result scaled by 1.02
/// exceeds. In f16 and tf32 it is 8 u, 3.9e-3, because probabilities of long sequences are subnormal in f16. In f32, where results differ
/// by the order of sums and by the device's exponential, it is 1e-4.
///
/// `tf32`: whether f32 products may be rounded to tf32, as Burn's own are on CUDA.
pub fn bound(dtype: Dtype, tf32: bool) -> f64 {
    match dtype {
        Dtype::F32 if !tf32 => 1e-4,
        Dtype::F32 | Dtype::F16 => 2f64.powi(-8),
        Dtype::BF16 => 2f64.powi(-6),
    }
}

/// Verdict on a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within the bound.
    Right,
    /// Beyond the bound, but not shown to be wrong.
    Unconfirmed,
    /// Beyond the bound for every seed, while a second implementation was within it.
    Wrong,
}

/// Verdict on another implementation's result. `errors` holds the largest error for each seed that was tried; `confirmed` tells whether a
/// second implementation was right for all of them.
pub fn verdict(errors: &[f64], confirmed: bool, bound: f64) -> Verdict {
    let within = |error: &f64| *error <= bound;
    match errors {
        [first, ..] if within(first) => Verdict::Right,
        [_, _, ..] if confirmed && !errors.iter().any(within) => Verdict::Wrong,
        _ => Verdict::Unconfirmed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_attention_reference::normal;
    use half::bf16;

    #[test]
    fn blocks_reach_both_ends_and_all_of_what_is_short() {
        for len in [0, 1, 3, 17, 63, 64, 65, 113, 203, 255, 256, 257, 1000, 16384] {
            let blocks = blocks(len, BLOCKS);
            assert!(blocks.iter().all(|block| block.len() == len.min(ROWS)), "{len}: {blocks:?}");
            let seen = |i: &usize| blocks.iter().any(|block| block.contains(i));
            let all = (0..len).all(|i| seen(&i));
            assert_eq!(all, len <= ROWS * BLOCKS, "{len}: {blocks:?}");
            assert!(len == 0 || seen(&0) && seen(&(len - 1)), "{len}: {blocks:?}");
        }
    }

    #[test]
    fn of_long_sequences_keys_are_sampled_where_few_queries_see_them() {
        let causal = sampled(1, 1 << 20, 1 << 20, true);
        let last = (1 << 20) - 64..1 << 20;
        assert_eq!((causal.heads, causal.queries), (1, vec![0..64, last.clone()]));
        assert_eq!(causal.keys, [last]);
        assert!(sampled(1, 1 << 20, 1 << 20, false).keys.is_empty());
        assert_eq!(sampled(8, 16384, 16384, false).keys.len(), BLOCKS);
    }

    /// A gradient of 64 rows, one of which is tiny, as computed in bf16: every row is rounded, and in the tiny row the rounding error of
    /// the cancelling terms is a third of the row.
    fn with_a_tiny_row() -> [Vec<f64>; 2] {
        let mut right = normal(64 * 32, 3);
        right[..32].iter_mut().for_each(|x| *x *= 2e-3);
        let noise = normal(64 * 32, 4);
        let found = right.iter().zip(&noise).enumerate();
        let found = found.map(|(n, (x, noise))| {
            let summed = if n < 32 { x + 7e-4 * noise } else { *x };
            bf16::from_f64(summed).to_f64()
        });
        [found.collect(), right]
    }

    #[test]
    fn a_tiny_row_of_a_right_gradient_is_no_fault() {
        let [found, right] = with_a_tiny_row();
        // The earlier measure: that row by itself.
        let alone = error_of_block(&found[..32], &right[..32]);
        assert!(alone > 0.3, "{alone}");
        let error = error_of_block(&found, &right);
        assert!((1e-3..3e-3).contains(&error), "{error}");
        assert_eq!(verdict(&[error], false, bound(Dtype::BF16, false)), Verdict::Right);
    }

    #[test]
    fn the_same_gradient_scaled_by_a_fiftieth_negated_or_zero_is_one() {
        let [found, right] = with_a_tiny_row();
        for (factor, least) in [(1.02, 0.0199), (0.98, 0.0199), (-1.0, 1.99), (0.0, 1.0)] {
            let found: Vec<f64> = found.iter().map(|x| x * factor).collect();
            let error = error_of_block(&found, &right);
            assert!(error >= least, "{factor}: {error}");
            for (dtype, tf32) in [(Dtype::BF16, false), (Dtype::F16, false), (Dtype::F32, true), (Dtype::F32, false)] {
                assert!(error > bound(dtype, tf32), "{factor}: {dtype:?}");
                assert_eq!(verdict(&[error, error], true, bound(dtype, tf32)), Verdict::Wrong);
            }
        }
    }

    #[test]
    fn a_block_of_zeros_is_measured_by_what_was_found() {
        assert_eq!(error_of_block(&[0.0, 0.0], &[0.0, 1e-17]), 1e-17 / 2f64.sqrt());
        assert_eq!(error_of_block(&[3.0, 4.0], &[0.0, 0.0]), 12.5f64.sqrt());
        assert!(error_of_block(&[f64::NAN, 1.0], &[1.0, 1.0]).is_nan());
        assert!(worst([0.5, f64::NAN, 0.75]).is_nan() && worst([]) == 0.0);
    }

    #[test]
    fn a_verdict_takes_two_seeds_and_a_second_implementation() {
        let of = |errors: &[f64], confirmed| verdict(errors, confirmed, 0.01);
        assert_eq!(of(&[0.01], false), Verdict::Right);
        assert_eq!(of(&[0.35], true), Verdict::Unconfirmed);
        assert_eq!(of(&[0.35, 0.002], true), Verdict::Unconfirmed);
        assert_eq!(of(&[0.35, 0.4], false), Verdict::Unconfirmed);
        assert_eq!(of(&[0.35, 0.4], true), Verdict::Wrong);
        assert_eq!(of(&[f64::NAN, f64::NAN], true), Verdict::Wrong);
        assert_eq!(of(&[], true), Verdict::Unconfirmed);
    }
}
