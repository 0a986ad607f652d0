//! Rows of an accumulator: their use as operands of the next product, and their stores to memory.
//!
//! A warpgroup's accumulator `[64, n]` is distributed over the registers of its threads in groups of eight columns. Thread `u`
//! of a warp holds columns `2 (u % 4)` and `2 (u % 4) + 1` of each group, of rows `u / 4` and `u / 4 + 8` of the warp's 16
//! rows. Element `4 i + 2 r + e` of its registers is row `r`, group `i`, column `e`. Four threads share a row.

use super::Blueprint;
use super::dropout::KeepMask;
use super::operands::RowsOut;
use crate::dtype::Dtype;
use crate::ptx::*;
use cubecl::prelude::*;

/// Rounds and packs an accumulator, and drops what is not `kept`. The result is the A operand of the next product, in the same
/// registers.
#[cube]
pub fn to_fragments(s: &Array<f32>, kept: &KeepMask, p: &mut Sequence<Array<u32>>, #[comptime] blueprint: Blueprint) {
    #[unroll]
    for i in 0..comptime!(blueprint.tile.tile_k / 16) {
        let fragment = p.index_mut(i);
        #[unroll]
        for e in 0..4usize {
            let n = comptime!(8 * i + 2 * e);
            fragment[e] = kept.apply_packed(pack(s[n], s[n + 1], blueprint.dtype), comptime!(n / 2));
        }
    }
}

/// Registers for the operand that [`to_fragments()`] packs a tile's accumulator into.
#[cube]
pub fn fragments(#[comptime] blueprint: Blueprint) -> Sequence<Array<u32>> {
    let mut fragments = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime!(blueprint.tile.tile_k / 16) {
        fragments.push(Array::<u32>::new(4usize));
    }
    fragments
}

/// [`to_fragments()`] as one sequence of words. f32 is not packed, and a fragment then has eight keys, those in even columns
/// first: the order of the keys within a product is free.
#[cube]
pub fn fragments_of(
    s: &Array<f32>,
    kept: &KeepMask,
    p: &mut Sequence<u32>,
    #[comptime] tile_k: usize,
    #[comptime] dtype: Dtype,
) {
    if comptime!(dtype == Dtype::F32) {
        #[unroll]
        for i in 0..comptime!(tile_k / 8) {
            #[unroll]
            for e in 0..2usize {
                #[unroll]
                for row in 0..2usize {
                    let n = comptime!(4 * i + 2 * row + e);
                    p.push(u32::reinterpret(kept.apply(s[n], n)));
                }
            }
        }
    } else {
        #[unroll]
        for e in 0..comptime!(tile_k / 4) {
            p.push(kept.apply_packed(pack(s[comptime!(2 * e)], s[comptime!(2 * e + 1)], dtype), e));
        }
    }
}

/// One of a thread's two rows of an accumulator, multiplied by `factor` and packed to 16 bits: one word for each group of eight
/// columns.
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

/// Index of the 4-column vector that a thread writes within two groups of eight columns of a row. Even threads write a vector
/// of the first group, odd threads one of the second.
#[cube]
pub fn vector_of_pair() -> u32 {
    let lane = UNIT_POS % 32;
    lane % 2 * 2 + lane % 4 / 2
}

/// Exchanges words with the neighbouring thread and returns the vector of [`vector_of_pair()`]. `first` and `second` are this
/// thread's words of the two groups. All threads of the warp must call it.
#[cube]
pub fn exchange(first: u32, second: u32) -> (u32, u32) {
    let odd = UNIT_POS % 2 == 1;
    let got = plane_shuffle_xor(select(odd, first, second), 1u32);
    (select(odd, got, first), select(odd, second, got))
}

/// Writes a packed row to `out` from vector `at` on, in vectors of 4 columns; writes nothing if not `live`. Neighbours exchange
/// their words, so that the four threads of a row write 32 contiguous bytes. All threads of the warp must call it.
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

/// Writes one of a thread's two rows of an accumulator, multiplied by `factor`, to `out` in f32, from vector `at` on, in
/// vectors of 2 columns; writes nothing if not `live`. `columns` is a multiple of 4.
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
        // The last group may have only its first four columns.
        let live = if comptime!(8 * (i + 1) > columns) { live && UNIT_POS % 4 < 2 } else { live };
        store_pair(to, comptime!(4 * i), u32::reinterpret(o[e] * factor), u32::reinterpret(o[e + 1] * factor), live);
    }
}

/// Writes one of a thread's two rows of an accumulator whose even columns, of each 16, are in the first of two groups of eight and whose
/// odd ones are in the second, multiplied by `factor`, in the element type `dtype`. A thread has four consecutive columns of each 16.
#[cube]
pub fn store_interleaved_row(
    o: &Array<f32>,
    #[comptime] row: usize,
    factor: f32,
    out: &mut RowsOut,
    at: usize,
    live: bool,
    #[comptime] columns: usize,
    #[comptime] dtype: Dtype,
) {
    let of_thread = comptime!(if dtype == Dtype::F32 { 2usize } else { 1usize });
    let at = at + (UNIT_POS % 4) as usize * of_thread;
    let to = &mut out.data[at..at + 1];
    #[unroll]
    for i in 0..comptime!(columns / 16) {
        let (even, odd) = comptime!((8 * i + 2 * row, 8 * i + 4 + 2 * row));
        let (a, b) = (o[even] * factor, o[odd] * factor);
        let (c, d) = (o[comptime!(even + 1)] * factor, o[comptime!(odd + 1)] * factor);
        let first = comptime!(4 * of_thread * i);
        if comptime!(dtype == Dtype::F32) {
            store_pair(to, first, u32::reinterpret(a), u32::reinterpret(b), live);
            store_pair(to, comptime!(first + 1), u32::reinterpret(c), u32::reinterpret(d), live);
        } else {
            store_pair(to, first, pack(a, b, dtype), pack(c, d, dtype), live);
        }
    }
}

/// Writes one of a thread's two rows of an accumulator, multiplied by `factor`, in the element type `dtype`. The row has `wide`
/// columns, padded to 16-byte vectors. See [`store_row()`] and [`store_row_f32()`].
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
