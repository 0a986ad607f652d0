//! Rows of an accumulator: as operands of the next product, and written to memory.
//!
//! A warpgroup's accumulator `[64, n]` lies in its threads' registers by eights of columns: thread `u` of a warp holds, of
//! rows `u / 4` and `u / 4 + 8` of the warp's 16, columns `2 (u % 4)` and the next of each eight. Element `4 i + 2 r + e`
//! of its registers is row `r`, eight `i`, column `e`. Four threads share a row.

use super::Blueprint;
use super::operands::RowsOut;
use crate::dtype::Dtype;
use crate::ptx::*;
use cubecl::prelude::*;

/// An accumulator's registers are, rounded and packed, those of the A operand of the next product.
#[cube]
pub fn to_fragments(s: &Array<f32>, p: &mut Sequence<Array<u32>>, #[comptime] blueprint: Blueprint) {
    #[unroll]
    for i in 0..comptime!(blueprint.tile.tile_k / 16) {
        let fragment = p.index_mut(i);
        #[unroll]
        for e in 0..4usize {
            fragment[e] = pack(s[comptime!(8 * i + 2 * e)], s[comptime!(8 * i + 2 * e + 1)], blueprint.dtype);
        }
    }
}

/// The same, one after the other. Of f32, which stays as it is, a fragment has eight keys: even ones first, as products do not care
/// in which order they are added up.
#[cube]
pub fn fragments_of(s: &Array<f32>, p: &mut Sequence<u32>, #[comptime] tile_k: usize, #[comptime] dtype: Dtype) {
    if comptime!(dtype == Dtype::F32) {
        #[unroll]
        for i in 0..comptime!(tile_k / 8) {
            #[unroll]
            for e in 0..2usize {
                #[unroll]
                for row in 0..2usize {
                    p.push(u32::reinterpret(s[comptime!(4 * i + 2 * row + e)]));
                }
            }
        }
    } else {
        #[unroll]
        for e in 0..comptime!(tile_k / 4) {
            p.push(pack(s[comptime!(2 * e)], s[comptime!(2 * e + 1)], dtype));
        }
    }
}

/// One of a thread's two rows of an accumulator, `factor` times, in 16 bits: a word for each eight of columns.
#[cube]
pub fn pack_row(
    o: &Array<f32>,
    #[comptime] row: usize,
    factor: f32,
    #[comptime] columns: usize,
    #[comptime] dtype: Dtype,
) -> Array<u32> {
    let eights = comptime!(columns / 8);
    let mut words = Array::<u32>::new(eights);
    #[unroll]
    for i in 0..eights {
        let e = comptime!(4 * i + 2 * row);
        words[i] = pack(o[e] * factor, o[e + 1] * factor, dtype);
    }
    words
}

/// Which vector of 4 columns a thread writes of two eights of a row: even threads one of the first, odd ones of the second.
#[cube]
pub fn vector_of_pair() -> u32 {
    let lane = UNIT_POS % 32;
    lane % 2 * 2 + lane % 4 / 2
}

/// That vector, of what this thread and its neighbour hold of the two eights: all must call it.
#[cube]
pub fn exchange(first: u32, second: u32) -> (u32, u32) {
    let odd = UNIT_POS % 2 == 1;
    let got = plane_shuffle_xor(select(odd, first, second), 1u32);
    (select(odd, got, first), select(odd, second, got))
}

/// Writes a packed row to `out` from vector `at` on: 4 columns a vector; nothing if not `live`. Neighbours exchange what they
/// hold, so that the four threads of a row write 32 bytes of it together: all must call it.
#[cube]
pub fn store_row(words: &Array<u32>, out: &mut RowsOut, at: usize, live: bool, #[comptime] columns: usize) {
    let at = at + vector_of_pair() as usize;
    let to = &mut out.data[at..at + 1];
    let odd = UNIT_POS % 2 == 1;
    let eights = comptime!(columns / 8);
    #[unroll]
    for i in 0..comptime!(eights.div_ceil(2)) {
        let paired = comptime!(2 * i + 1 < eights);
        let first = words[2 * i];
        let second = if comptime!(paired) { words[comptime!(2 * i + 1)] } else { 0u32.runtime() };
        let (low, high) = exchange(first, second);
        let live = if comptime!(paired) { live } else { live && !odd };
        store_pair(to, comptime!(4 * i), low, high, live);
    }
}

/// Writes one of a thread's two rows of an accumulator, `factor` times, in f32 to `out` from vector `at` on: 2 columns a vector, this
/// many, a multiple of 4; nothing if not `live`.
#[cube]
pub fn store_row_f32(
    o: &Array<f32>,
    #[comptime] row: usize,
    factor: f32,
    out: &mut RowsOut,
    at: usize,
    live: bool,
    #[comptime] columns: usize,
) {
    let at = at + (UNIT_POS % 4) as usize;
    let to = &mut out.data[at..at + 1];
    #[unroll]
    for i in 0..comptime!(columns.div_ceil(8)) {
        let e = comptime!(4 * i + 2 * row);
        // Of the last eight there may be the first half alone.
        let live = if comptime!(8 * (i + 1) > columns) { live && UNIT_POS % 4 < 2 } else { live };
        store_pair(to, comptime!(4 * i), u32::reinterpret(o[e] * factor), u32::reinterpret(o[e + 1] * factor), live);
    }
}

/// Writes one of a thread's two rows of an accumulator, `factor` times, in this element type, as a row of `wide` columns and what
/// fills them up to vectors of 16 bytes: see [`store_row()`] and [`store_row_f32()`].
#[cube]
pub fn store_row_of(
    o: &Array<f32>,
    #[comptime] row: usize,
    factor: f32,
    out: &mut RowsOut,
    at: usize,
    live: bool,
    #[comptime] wide: usize,
    #[comptime] dtype: Dtype,
) {
    if comptime!(dtype == Dtype::F32) {
        store_row_f32(o, row, factor, out, at, live, comptime!(wide.next_multiple_of(4)));
    } else {
        let columns = comptime!(wide.next_multiple_of(8));
        store_row(&pack_row(o, row, factor, columns, dtype), out, at, live, columns);
    }
}
