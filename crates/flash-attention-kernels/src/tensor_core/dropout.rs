//! Dropout on an accumulator in registers, whose layout [`rows`](super::rows) describes. The random draws are defined in
//! [`crate::dropout`].

use super::Blueprint;
use super::scores::ScoreTile;
use crate::dropout::Dropout;
use crate::ptx::{byte_signs, bytes_of, opaque};
use cubecl::prelude::*;

/// The highest bits of the halves of a word, and those of its bytes.
const HALVES: u32 = 0x8000_8000;
const BYTES: u32 = 0x8080_8080;

/// Groups of eight columns in a word of a keep mask.
const GROUPS: usize = 8;

/// Keep mask of a thread's registers of a tile: the word `n / 32` has a bit for register `n`, which is bit `7 − n / 4 % 8` of byte
/// `n % 4`. A shift by the number of a group of eight columns thus moves the bits of its four registers to the signs of the four
/// bytes. Bits beyond the tile are undefined. Without dropout there are no words.
#[derive(CubeType, Clone)]
pub struct KeepMask {
    words: Sequence<u32>,
    /// Whether there is dropout.
    #[cube(comptime)]
    pub drops: bool,
}

#[cube]
impl KeepMask {
    /// The mask of values that are not dropped.
    pub fn none() -> KeepMask {
        KeepMask { words: Sequence::new(), drops: false }
    }

    /// Draws the mask of a tile. All threads of the warp must call it.
    ///
    /// A thread draws one [cell](crate::dropout) of each 16 × 16 block, or a half of the first or the last one, if tiles are no
    /// whole blocks of columns. If transposed, a thread holds halves of two cells: those of two queries, for its own keys, which are
    /// either even or odd. It draws the cell of one of the queries, the thread four lanes away that of the other one.
    pub fn of(dropout: &Dropout, tile: &ScoreTile, #[comptime] blueprint: Blueprint) -> KeepMask {
        let transposed = comptime!(blueprint.transposed());
        let tile_k = comptime!(blueprint.tile.tile_k);
        let groups = comptime!(if dropout.seed.is_some() { 2 * tile_k.div_ceil(16) } else { 0 });
        let (band, head) = (&tile.band, tile.head);
        let row_block = (tile.first_row - band.first_query()) / 16 + UNIT_POS / 32 % 4;
        let k_start = tile.k_start - band.first_key();
        let sequence = band.number(tile.batch);
        let lane = UNIT_POS % 32;
        let threshold = dropout.threshold | dropout.threshold << 16;
        let mut words = Sequence::<u32>::new();
        #[unroll]
        for word in 0..comptime!(groups.div_ceil(GROUPS)) {
            let count = comptime!((groups - GROUPS * word).min(GROUPS));
            let mut bits = 0u32.runtime();
            // The last group comes first: each one moves those before it by a bit.
            #[unroll]
            for nth in 0..comptime!(count / 2) {
                let block = comptime!((GROUPS * word + count) / 2 - 1 - nth);
                let column_block = k_start / 16 + comptime!(block as u32);
                // The words of the left and of the right group of eight columns. The second word of a group is that of the lower rows.
                let (left, below_left, right, below_right) = if comptime!(transposed) {
                    let cell = (lane % 4 * 2 + lane / 4 % 2) * 4 + lane / 8;
                    let (w0, w1, w2, w3) = dropout.words(sequence, head, column_block, row_block, cell, true);
                    (w0, w2, w1, w3)
                } else {
                    dropout.words(sequence, head, row_block, column_block, lane, true)
                };
                let right = kept_draws(right, below_right, threshold);
                let left = kept_draws(left, below_left, threshold);
                bits = if comptime!(nth == 0) { right } else { insert(bits, right) };
                bits = insert(bits, left);
            }
            if comptime!(tile_k % 16 != 0) {
                // A tile of few columns may start in the middle of a block, whose left group is not part of it.
                bits <<= k_start % 16 / 8;
            }
            words.push(if comptime!(transposed) {
                // Bytes alternate between even and odd keys, and are to alternate between the two queries.
                let others = plane_shuffle_xor(bits, 4u32);
                bytes_of(bits, others, select((lane / 4).is_multiple_of(2), 0x6240u32, 0x3715u32))
            } else {
                // Otherwise the compiler would keep what the bits were compared from instead.
                opaque(bits)
            });
        }
        KeepMask { words, drops: comptime!(groups > 0) }
    }

    /// The value of register `n`, or 0 if its pair is dropped.
    pub fn apply(&self, value: f32, #[comptime] n: usize) -> f32 {
        if comptime!(self.drops) {
            let bit = comptime!(1u32 << (8 * (n % 4) + 7 - n / 4 % GROUPS));
            select(*self.words.index(comptime!(n / 32)) & bit != 0, value, 0.0f32)
        } else {
            value
        }
    }

    /// [`KeepMask::apply`] for the first `len` registers.
    pub fn apply_all(&self, values: &mut Array<f32>, #[comptime] len: usize) {
        if comptime!(self.drops) {
            // The bits of a byte one after the other: the assembler converts several of them to predicates at a time.
            #[unroll]
            for byte in 0..4usize {
                #[unroll]
                for group in 0..comptime!(len / 4) {
                    let n = comptime!(4 * group + byte);
                    values[n] = self.apply(values[n], n);
                }
            }
        }
    }

    /// [`KeepMask::apply`] for the registers `2 pair` and `2 pair + 1`, packed to 16 bits each.
    pub fn apply_packed(&self, packed: u32, #[comptime] pair: usize) -> u32 {
        if comptime!(self.drops) {
            let group = *self.words.index(comptime!(pair / 16)) << comptime!((pair / 2 % GROUPS) as u32);
            packed & byte_signs(group, comptime!(if pair.is_multiple_of(2) { 0x9988u32 } else { 0xBBAAu32 }))
        } else {
            packed
        }
    }
}

/// Compares the four draws of two words with the threshold, which is in both halves of `threshold`. The highest bits of the bytes
/// tell whether they are kept; the other ones are undefined.
#[cube]
fn kept_draws(first: u32, second: u32, threshold: u32) -> u32 {
    bytes_of(at_least(first, threshold), at_least(second, threshold), 0x7531u32)
}

/// Whether the halves of `x` are at least those of `y`, in the highest bits of the halves. The other bits are undefined.
#[cube]
fn at_least(x: u32, y: u32) -> u32 {
    // Differences of the lower 15 bits, without borrows between the halves.
    let lower = (x | HALVES) - (y & comptime!(!HALVES));
    let differs = x ^ y;
    (differs & x) | ((differs ^ comptime!(u32::MAX)) & lower)
}

/// Inserts the highest bits of the bytes of `first` before those of `bits`.
#[cube]
fn insert(bits: u32, first: u32) -> u32 {
    (first & BYTES) | ((bits >> 1) & comptime!(!BYTES))
}

/// Turns gradients of dropped and scaled probabilities into gradients of probabilities, if there is dropout.
#[cube]
pub fn dropout_backward(dp: &mut Array<f32>, kept: &KeepMask, dropout: &Dropout, #[comptime] len: usize) {
    if comptime!(kept.drops) {
        kept.apply_all(dp, len);
        #[unroll]
        for n in 0..len {
            dp[n] *= dropout.factor;
        }
    }
}
