//! Pairs that dropout keeps: Philox4x32-7 (Salmon et al., SC 2011), written from the paper and not from the kernels.
//!
//! Query `i` and key `j` of a head belong to the block `(i / 16, j / 16)`, and within it to the cell `(i % 8, j % 8 / 2)`. The 8 pairs of a
//! cell share one draw of 128 bits, 16 bits each, the lowest first, in the order of `(j / 8 % 2, i / 8 % 2, j % 2)`.

use flash_attention_kernels::AttentionProblem;
use rayon::prelude::*;

/// Whether each pair is kept, `[batch, num_heads_q, seq_q, seq_k]`, at the dropout rate of the problem.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
///
/// let options = AttentionOptions { dropout: 0.25, ..Default::default() };
/// let shape = [1, 2, 64, 8];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, options)?;
/// let kept = flash_attention_reference::kept(&problem, [7, 0]);
/// let share = kept.iter().filter(|kept| **kept).count() as f64 / kept.len() as f64;
/// assert!((share - 0.75).abs() < 0.02);
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
pub fn kept(problem: &AttentionProblem, seed: [u32; 2]) -> Vec<bool> {
    let [batch, heads, seq_q, seq_k] = problem.scores_shape();
    let rows = (0..batch * heads * seq_q).into_par_iter();
    rows.flat_map_iter(|row| {
        let (b, h, i) = (row / seq_q / heads, row / seq_q % heads, row % seq_q);
        (0..seq_k).map(move |j| keeps(problem, seed, [b, h, i, j]))
    })
    .collect()
}

/// Whether the pair `at = [batch, head, i, j]` is kept.
pub(crate) fn keeps(problem: &AttentionProblem, seed: [u32; 2], at: [usize; 4]) -> bool {
    f64::from(draw(seed, at)) >= 65536.0 - keeping(problem) * 65536.0
}

/// Probability of keeping a pair, rounded to a multiple of 1 / 65536.
pub(crate) fn keeping(problem: &AttentionProblem) -> f64 {
    1.0 - (f64::from(problem.options.dropout) * 65536.0).round().min(65535.0) / 65536.0
}

/// The 16 random bits of a pair.
fn draw(seed: [u32; 2], [b, h, i, j]: [usize; 4]) -> u16 {
    let cell = i % 8 * 4 + j % 8 / 2;
    let counter = [j / 16 * 32 + cell, i / 16, h, b].map(|n| n as u32);
    let place = [j / 8 % 2, i / 8 % 2, j % 2].into_iter().fold(0, |place, bit| 2 * place + bit);
    let bits = philox(counter, seed).into_iter().rev().fold(0u128, |bits, word| bits << 32 | u128::from(word));
    (bits >> (16 * place)) as u16
}

/// Seven rounds of Philox4x32 (section 4.3 of the paper), with the multipliers and the Weyl sequences of its table 3.
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let product = |word: u32, multiplier: u64| {
        let product = u64::from(word) * multiplier;
        ((product >> 32) as u32, product as u32)
    };
    (0..7u32).fold(counter, |[c0, c1, c2, c3], round| {
        let k0 = key[0].wrapping_add(round.wrapping_mul(0x9E37_79B9));
        let k1 = key[1].wrapping_add(round.wrapping_mul(0xBB67_AE85));
        let ((high0, low0), (high1, low1)) = (product(c0, 0xD251_1F53), product(c2, 0xCD9E_8D57));
        [high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0]
    })
}
