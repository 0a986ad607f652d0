//! Dropout of probabilities. Whether a pair is dropped depends only on seed, batch, head, query and key. The backward therefore
//! reproduces the decisions of the forward, whatever the tiles and the device.
//!
//! ```text
//! z_ij = 0 with probability p, else 1 / (1 − p)
//! o = (P ∘ Z) v        dv = (P ∘ Z)ᵀ dout        dP = (dout vᵀ) ∘ Z        dS = P ∘ (dP − delta)
//! ```
//!
//! `lse` includes all keys, and `delta = rowsum(P ∘ dP)` still equals `rowsum(dout ∘ o)`. (Srivastava et al. 2014.)
//!
//! The generator is Philox4x32-7, a counter-based generator (J. K. Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
//! SC 2011). One call gives 128 bits: 8 draws of 16 bits, for a *cell* of 8 pairs. A block of 16 queries by 16 keys consists of
//! 32 cells. A cell is the part of the block that one thread holds in an accumulator of tensor-core products
//! (`tensor_core::rows`):
//!
//! ```text
//! cell   4 (i % 8) + j % 8 / 2      of the block (i / 16, j / 16)
//! draw   4 (j / 8 % 2) + 2 (i / 8 % 2) + j % 2
//! ```

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::mask::Band;
use cubecl::prelude::*;

/// Rounds of Philox.
const ROUNDS: usize = 7;
/// Multipliers of the words, and increments of the key (Salmon et al., section 4.3).
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Number of values of a draw: the dropout rate is rounded to a multiple of `1 / 65536`.
const DRAWS: f64 = 65536.0;

/// Number of draws out of 65,536 that drop a pair, for a dropout rate.
///
/// ```
/// assert_eq!(flash_attention_kernels::dropout::threshold(0.25), 16384);
/// ```
pub fn threshold(probability: f32) -> u32 {
    (f64::from(probability) * DRAWS).round().min(DRAWS - 1.0) as u32
}

/// Scale applied to kept probabilities, `1 / (1 − p)`, where `p` is the rounded rate.
///
/// ```
/// assert_eq!(flash_attention_kernels::dropout::factor(0.5), 2.0);
/// ```
pub fn factor(probability: f32) -> f32 {
    (DRAWS / (DRAWS - f64::from(threshold(probability)))) as f32
}

/// The seed as two 32-bit words, low word first, as kernels take it.
///
/// ```
/// assert_eq!(flash_attention_kernels::dropout::seed(7 + (9 << 32)), [7, 9]);
/// ```
pub fn seed(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// Whether dropout keeps the pair of query `i` and key `j` of a head, computed on the host.
///
/// ```
/// use flash_attention_kernels::dropout::keeps;
///
/// // About half of all pairs.
/// let kept = (0..64).flat_map(|i| (0..64).map(move |j| keeps([1, 2], 0.5, [0, 0, i, j]))).filter(|kept| *kept).count();
/// assert!((1900..2200).contains(&kept));
/// ```
pub fn keeps(seed: [u32; 2], probability: f32, [batch, head, i, j]: [u32; 4]) -> bool {
    let cell = (i % 8) * 4 + j % 8 / 2;
    let words = philox_on_host([(j / 16) * 32 + cell, i / 16, head, batch], seed);
    let draw = (j / 8 % 2) * 4 + (i / 8 % 2) * 2 + j % 2;
    (words[draw as usize / 2] >> (16 * (draw % 2))) & 0xffff >= threshold(probability)
}

/// Philox, on the host.
fn philox_on_host(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let (x, y) = (u64::from(MULTIPLIERS[0]) * u64::from(c0), u64::from(MULTIPLIERS[1]) * u64::from(c2));
        (c0, c1, c2, c3) = ((y >> 32) as u32 ^ c1 ^ k0, y as u32, (x >> 32) as u32 ^ c3 ^ k1, x as u32);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [c0, c1, c2, c3]
}

/// Dropout as a kernel argument.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Dropout {
    /// The seed, `[2]`; absent without dropout.
    pub seed: ComptimeOption<&'static Tensor<u32>>,
    /// Number of draws out of 65,536 that drop a pair.
    pub threshold: u32,
    /// Scale applied to kept probabilities, `1 / (1 − p)`.
    pub factor: f32,
}

#[cube]
impl Dropout {
    /// The four random words of a cell. With `wide`, products of 32-bit numbers are single ones of 64 bits, which WGSL lacks.
    pub fn words(
        &self,
        batch: u32,
        head: u32,
        i_block: u32,
        j_block: u32,
        cell: u32,
        #[comptime] wide: bool,
    ) -> (u32, u32, u32, u32) {
        let mut c0 = j_block * 32 + cell;
        let mut c1 = i_block;
        let mut c2 = head;
        let mut c3 = batch;
        #[comptime]
        if let ComptimeOption::Some(seed) = &self.seed {
            let mut k0 = seed[0];
            let mut k1 = seed[1];
            #[unroll]
            for _ in 0..ROUNDS {
                let (high0, low0) = product(c0, comptime!(MULTIPLIERS[0]), wide);
                let (high1, low1) = product(c2, comptime!(MULTIPLIERS[1]), wide);
                c0 = high1 ^ c1 ^ k0;
                c1 = low1;
                c2 = high0 ^ c3 ^ k1;
                c3 = low0;
                k0 += comptime!(WEYL[0]);
                k1 += comptime!(WEYL[1]);
            }
        }
        (c0, c1, c2, c3)
    }

    /// Whether dropout keeps the pair of query `i` and key `j` of a head.
    pub fn keeps(&self, batch: u32, head: u32, i: u32, j: u32) -> bool {
        let mut kept = true.runtime();
        if comptime!(self.seed.is_some()) {
            let (w0, w1, w2, w3) = self.words(batch, head, i / 16, j / 16, i % 8 * 4 + j % 8 / 2, false);
            let word = select(j / 8 % 2 == 1, select(i / 8 % 2 == 1, w3, w2), select(i / 8 % 2 == 1, w1, w0));
            kept = (word >> (j % 2 * 16)) & 0xffff >= self.threshold;
        }
        kept
    }

    /// Whether dropout keeps the pairs of query `i` with keys `j` to `j + 3`, one bit each. `j` is a multiple of 4.
    pub fn keeps_four(&self, batch: u32, head: u32, i: u32, j: u32) -> u32 {
        let mut kept = 15u32.runtime();
        if comptime!(self.seed.is_some()) {
            kept = 0u32.runtime();
            #[unroll]
            for nth in 0..2u32 {
                let cell = i % 8 * 4 + j % 8 / 2 + nth;
                let (w0, w1, w2, w3) = self.words(batch, head, i / 16, j / 16, cell, false);
                let word = select(j / 8 % 2 == 1, select(i / 8 % 2 == 1, w3, w2), select(i / 8 % 2 == 1, w1, w0));
                kept |= self.pair(word) << comptime!(2 * nth);
            }
        }
        kept
    }

    /// [`Dropout::keeps`] for row `i` and column `j` of this band in a batch. With `transposed`, rows are keys. Draws depend on
    /// the number of the sequence and on positions relative to its beginning.
    pub fn keeps_of(&self, band: &Band, batch: u32, head: u32, i: u32, j: u32, #[comptime] transposed: bool) -> bool {
        let (i, j) = (i - band.first_query(), j - band.first_key());
        if comptime!(transposed) {
            self.keeps(band.number(batch), head, j, i)
        } else {
            self.keeps(band.number(batch), head, i, j)
        }
    }

    /// [`Dropout::keeps_four`] for row `i` and columns `j` to `j + 3` of this band. Unless `anywhere`, `j` is a multiple of 4
    /// after the first key of the sequence.
    pub fn keeps_four_of(&self, band: &Band, batch: u32, head: u32, i: u32, j: u32, #[comptime] anywhere: bool) -> u32 {
        if comptime!(band.varlen && anywhere && self.seed.is_some()) {
            let mut kept = 0u32.runtime();
            #[unroll]
            for nth in 0..4u32 {
                kept |= u32::cast_from(self.keeps_of(band, batch, head, i, j + nth, false)) << nth;
            }
            kept
        } else {
            self.keeps_four(band.number(batch), head, i - band.first_query(), j - band.first_key())
        }
    }

    /// Scale applied to sums of kept probabilities; 1 without dropout.
    pub fn scale(&self) -> f32 {
        if comptime!(self.seed.is_some()) { self.factor } else { 1.0f32.runtime() }
    }

    /// A probability after dropout, not yet scaled.
    pub fn apply(&self, weight: f32, kept: bool) -> f32 {
        if comptime!(self.seed.is_some()) { select(kept, weight, 0.0f32) } else { weight }
    }

    /// Gradient of a probability, given the gradient of the probability after dropout and scaling.
    pub fn backward(&self, gradient: f32, kept: bool) -> f32 {
        if comptime!(self.seed.is_some()) { select(kept, gradient * self.factor, 0.0f32) } else { gradient }
    }

    /// Keep mask of the two draws of a word.
    fn pair(&self, word: u32) -> u32 {
        u32::cast_from(word & 0xffff >= self.threshold) | (u32::cast_from(word >> 16 >= self.threshold) << 1)
    }
}

/// High and low word of the product of two 32-bit numbers.
#[cube]
fn product(a: u32, #[comptime] b: u32, #[comptime] wide: bool) -> (u32, u32) {
    if comptime!(wide) {
        let product = u64::cast_from(a) * comptime!(u64::from(b));
        (u32::cast_from(product >> 32), u32::cast_from(product))
    } else {
        (u32::mul_hi(b.runtime(), a), a * b)
    }
}

/// Writes the keep mask, 1 or 0 for each pair: `out [B, H, Sq, Sk]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn write_kept(out: &mut Tensor<u32>, dropout: Dropout) {
    if ABSOLUTE_POS < out.len() {
        let (row, j) = (ABSOLUTE_POS / out.shape(3), ABSOLUTE_POS % out.shape(3));
        let (head, i) = (row / out.shape(2), row % out.shape(2));
        let (batch, head) = (head / out.shape(1), head % out.shape(1));
        let kept = dropout.keeps(batch as u32, head as u32, i as u32, j as u32);
        let at = batch * out.stride(0) + head * out.stride(1) + i * out.stride(2) + j * out.stride(3);
        out[at] = u32::cast_from(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of Random123 for Philox4x32-7.
    #[test]
    fn known_answers() {
        let answers = [
            ([0; 4], [0; 2], [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a],
            ),
        ];
        for (counter, key, words) in answers {
            assert_eq!(philox_on_host(counter, key), words);
        }
    }
}
