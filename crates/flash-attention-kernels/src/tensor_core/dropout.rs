//! Dropout on registers, which hold a tile as [`rows`](super::rows) says. What is drawn, and for which pairs: [`crate::dropout`].

use super::Blueprint;
use super::scores::ScoreTile;
use crate::dropout::Dropout;
use cubecl::prelude::*;

/// Which registers of a thread's tile dropout keeps: bit `n % 32` of word `n / 32` is that of the `n`-th. No words, if there is no
/// dropout. By whole warps.
///
/// A [cell](crate::dropout) is what a thread holds of 16 rows and columns. Transposed, a thread holds parts of two cells, which two other
/// threads have drawn.
#[cube]
pub fn keep_mask(dropout: &Dropout, tile: &ScoreTile, #[comptime] blueprint: Blueprint) -> Sequence<u32> {
    let blocks = comptime!(if dropout.seed.is_some() { blueprint.tile.tile_k / 16 } else { 0 });
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
        if comptime!(blueprint.transposed()) {
            let drawn = bits;
            bits = 0u32.runtime();
            #[unroll]
            for e in 0..2u32 {
                // Of the two queries that a thread has of each eight, this one's draws: of keys that are even, or odd.
                let of_query = plane_shuffle(drawn, (lane % 4 * 2 + e) * 4 + lane / 8) >> (lane / 4 % 2) & 0x5555_5555;
                // By keys, then by queries, each eight; registers come the other way round.
                let exchanged = (of_query & 0x0404_0404) << 2 | (of_query & 0x1010_1010) >> 2;
                bits |= (of_query & 0x4141_4141 | exchanged) << e;
            }
        }
        words.push(bits);
    }
    words
}

/// Whether the `n`-th register is kept.
#[cube]
pub fn is_kept(words: &Sequence<u32>, #[comptime] n: usize) -> bool {
    *words.index(comptime!(n / 32)) & comptime!(1u32 << (n % 32)) != 0
}

/// What dropout, of which there is some, leaves of a tile's weights.
#[cube]
pub fn with_dropout(s: &Array<f32>, words: &Sequence<u32>, #[comptime] tile_k: usize) -> Array<f32> {
    let mut dropped = Array::<f32>::new(comptime!(tile_k / 2));
    #[unroll]
    for n in 0..comptime!(tile_k / 2) {
        dropped[n] = select(is_kept(words, n), s[n], 0.0f32);
    }
    dropped
}

/// The same in their place, if there is any dropout.
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

/// Gradients of probabilities from those of the dropped and scaled ones.
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
