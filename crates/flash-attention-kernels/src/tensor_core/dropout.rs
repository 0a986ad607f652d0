//! Dropout on an accumulator in registers, whose layout [`rows`](super::rows) describes. The random draws are defined in
//! [`crate::dropout`].

use super::Blueprint;
use super::scores::ScoreTile;
use crate::dropout::Dropout;
use cubecl::prelude::*;

/// Keep mask of a thread's registers of a tile. Bit `n % 32` of word `n / 32` belongs to register `n`. Without dropout there
/// are no words. All threads of the warp must call it.
///
/// A thread holds one [cell](crate::dropout) of each 16 × 16 block, or a half of the first or the last one, if tiles are no whole
/// blocks of keys. If transposed, it holds parts of two cells, which two other
/// threads have drawn.
#[cube]
pub fn keep_mask(dropout: &Dropout, tile: &ScoreTile, #[comptime] blueprint: Blueprint) -> Sequence<u32> {
    let tile_k = comptime!(blueprint.tile.tile_k);
    let blocks = comptime!(if dropout.seed.is_some() { tile_k.div_ceil(16) } else { 0 });
    let (band, head) = (&tile.band, tile.head);
    let (first_row, k_start) = (tile.first_row - band.first_query(), tile.k_start - band.first_key());
    let sequence = band.number(tile.batch);
    let row_block = first_row / 16 + UNIT_POS / 32 % 4;
    let lane = UNIT_POS % 32;
    let mut words = Sequence::<u32>::new();
    #[unroll]
    for word in 0..comptime!(blocks.div_ceil(4)) {
        let mut bits = 0u32.runtime();
        #[unroll]
        for block in 0..comptime!((blocks - 4 * word).min(4)) {
            let column_block = k_start / 16 + comptime!((4 * word + block) as u32);
            let cell = if comptime!(blueprint.transposed()) {
                dropout.cell(sequence, head, column_block, row_block, lane)
            } else {
                dropout.cell(sequence, head, row_block, column_block, lane)
            };
            bits |= cell << comptime!(8 * block as u32);
        }
        if comptime!(tile_k % 16 != 0) {
            // A tile of few keys may start in the middle of a block, of which the last four bits are left.
            bits >>= k_start % 16 / 2;
        }
        if comptime!(blueprint.transposed()) {
            let drawn = bits;
            bits = 0u32.runtime();
            #[unroll]
            for e in 0..2u32 {
                // The draws for one of the thread's two queries in each group of eight, for even or odd keys as the thread's
                // key is.
                let of_query = plane_shuffle(drawn, (lane % 4 * 2 + e) * 4 + lane / 8) >> (lane / 4 % 2) & 0x5555_5555;
                // Draws are ordered by groups of eight keys, then of eight queries. Registers have the opposite order.
                let exchanged = (of_query & 0x0404_0404) << 2 | (of_query & 0x1010_1010) >> 2;
                bits |= (of_query & 0x4141_4141 | exchanged) << e;
            }
        }
        words.push(bits);
    }
    words
}

/// Whether register `n` is kept.
#[cube]
pub fn is_kept(words: &Sequence<u32>, #[comptime] n: usize) -> bool {
    *words.index(comptime!(n / 32)) & comptime!(1u32 << (n % 32)) != 0
}

/// A copy of a tile's weights, with dropout applied if there is dropout.
#[cube]
pub fn with_dropout(s: &Array<f32>, words: &Sequence<u32>, #[comptime] tile_k: usize) -> Array<f32> {
    let mut dropped = Array::<f32>::new(comptime!(tile_k / 2));
    #[unroll]
    for n in 0..comptime!(tile_k / 2) {
        dropped[n] = s[n];
    }
    apply_dropout(&mut dropped, words, tile_k);
    dropped
}

/// Applies dropout to a tile's weights in place, if there is dropout.
#[cube]
pub fn apply_dropout(s: &mut Array<f32>, words: &Sequence<u32>, #[comptime] tile_k: usize) {
    let drawn = comptime!(words.len());
    if comptime!(drawn > 0) {
        #[unroll]
        for n in 0..comptime!(tile_k / 2) {
            s[n] = select(is_kept(words, n), s[n], 0.0f32);
        }
    }
}

/// Turns gradients of dropped and scaled probabilities into gradients of probabilities, if there is dropout.
#[cube]
pub fn dropout_backward(ds: &mut Array<f32>, words: &Sequence<u32>, dropout: &Dropout, #[comptime] tile_k: usize) {
    let drawn = comptime!(words.len());
    if comptime!(drawn > 0) {
        #[unroll]
        for n in 0..comptime!(tile_k / 2) {
            ds[n] = dropout.backward(ds[n], is_kept(words, n));
        }
    }
}
