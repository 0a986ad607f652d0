//! Stores of the gradient's blocks.

use super::super::{BiasBlueprint, BiasTile};
use super::BiasOut;
use super::scheduler::DbiasScheduler;
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::{exchange, vector_of_pair};
use cubecl::prelude::*;

/// A thread's two sums of one of its rows in the `nth` eight columns of the block, packed.
#[cube]
fn packed(
    sums: &Sequence<Array<f32>>,
    #[comptime] row: usize,
    #[comptime] nth: usize,
    #[comptime] blueprint: BiasBlueprint,
) -> u32 {
    let sum = sums.index(comptime!(8 * nth / blueprint.tile.tile_k));
    let n = comptime!(8 * nth % blueprint.tile.tile_k / 2 + 2 * row);
    pack(sum[n], sum[n + 1], blueprint.scores.dtype)
}

/// Writes one of a thread's two rows, in vectors if the rows of the output consist of vectors, else element by element. The row
/// starts at vector or element `at` of `out`. Writes nothing if not `live`. With vectors, neighbours exchange their words, so
/// that the four threads of a row write 32 contiguous bytes. All threads of the warp must call it.
#[cube]
pub fn store_row<E: Float>(
    sums: &Sequence<Array<f32>>,
    #[comptime] row: usize,
    out: &mut BiasOut<E>,
    at: usize,
    band: &Band,
    live: bool,
    k_start: u32,
    #[comptime] blueprint: BiasBlueprint,
) {
    let block_k = comptime!(blueprint.tile.block_k());
    if comptime!(blueprint.vectors) {
        let of_four = vector_of_pair();
        let at = at + (k_start / 4 + of_four) as usize;
        let to = &mut out.vectors[at..at + 1];
        #[unroll]
        for i in 0..comptime!(block_k / 16) {
            let first = packed(sums, row, comptime!(2 * i), blueprint);
            let second = packed(sums, row, comptime!(2 * i + 1), blueprint);
            let (low, high) = exchange(first, second);
            let is_key = band.is_key(k_start + comptime!(16 * i as u32) + of_four * 4);
            store_pair(to, comptime!(4 * i), low, high, live && is_key);
        }
    } else {
        let first = k_start + UNIT_POS % 4 * 2;
        #[unroll]
        for i in 0..comptime!(block_k / 8) {
            let packed = packed(sums, row, i, blueprint);
            #[unroll]
            for e in 0..2usize {
                let key = first + comptime!((8 * i + e) as u32);
                let at = at + key as usize * out.column;
                let to = &mut out.elements[at..at + 1];
                store_half(to, packed, comptime!(e == 1), live && band.is_key(key));
            }
        }
    }
}

/// Writes zeros to the blocks in which the band hides everything, 8 rows at a time.
#[cube]
pub fn fill_hidden<E: Float>(
    out: &mut BiasOut<E>,
    band: &Band,
    scheduler: &DbiasScheduler,
    warp: u32,
    #[comptime] blueprint: BiasBlueprint,
) {
    let tile = comptime!(blueprint.tile);
    let (at_once, of_block) = comptime!((8u32, BiasTile::TILE_Q as u32 / 8));
    let (warps, wide) = comptime!((BiasTile::WARPGROUPS as u32 * 4, if blueprint.vectors { 4u32 } else { 1u32 }));
    let lane = UNIT_POS % 32;
    let mut nth = CUBE_POS as u32 * warps + warp;
    while nth < scheduler.matrices * scheduler.q_blocks.divisor * of_block {
        let (block, part) = (nth / of_block, nth % of_block);
        let (matrix, row_block) = (scheduler.q_blocks.divide(block), scheduler.q_blocks.modulo(block));
        let (batch, head) = (scheduler.heads.divide(matrix), scheduler.heads.modulo(matrix));
        let seen = scheduler.seen(band, row_block, tile);
        let before = seen.start * comptime!(tile.block_k() as u32);
        let after = seen.end * comptime!(tile.block_k() as u32);
        for of_part in 0..at_once {
            let row = row_block * comptime!(BiasTile::TILE_Q as u32) + part * at_once + of_part;
            if band.is_query(row) {
                let at = out.rows.at(batch as usize, head as usize, row);
                #[unroll]
                for side in 0..2usize {
                    let mut key = if comptime!(side == 0) { lane * wide } else { after + lane * wide };
                    let end = if comptime!(side == 0) { before } else { band.seq_k };
                    while key < end {
                        if comptime!(blueprint.vectors) {
                            out.vectors[at + (key / 4) as usize] = Vector::<u32, Const<2>>::new(0u32);
                        } else {
                            out.elements[at + key as usize * out.column] = E::from_int(0);
                        }
                        key += 32 * wide;
                    }
                }
            }
        }
        nth += CUBE_COUNT as u32 * warps;
    }
}
