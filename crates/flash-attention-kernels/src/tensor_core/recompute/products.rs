//! Products of a row with keys.

use super::super::Blueprint;
use super::super::operands::Sources;
use super::LostRow;
use crate::dtype::Dtype;
use crate::ptx::{mma_step, pack};
use crate::rounding::nearest_tf32;
use cubecl::prelude::*;

/// The product of two rows of `wide` elements, which start at these vectors of so many each.
#[cube]
pub fn dot<E: Float, N: Size>(
    a: &[Vector<E, N>],
    a_at: usize,
    b: &[Vector<E, N>],
    b_at: usize,
    #[comptime] wide: usize,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let (vector, tf32) = comptime!((blueprint.vector(), blueprint.tf32));
    let (whole, rest) = comptime!((wide / vector, wide % vector));
    let mut sum = 0.0f32.runtime();
    for i in 0..whole {
        sum = dot_vectors(a[a_at + i], b[b_at + i], vector, tf32, sum);
    }
    if comptime!(rest > 0) {
        sum = dot_vectors(a[a_at + whole], b[b_at + whole], rest, tf32, sum);
    }
    sum
}

/// `sum` and the products of the first `len` elements of two vectors.
#[cube]
pub fn dot_vectors<E: Float, N: Size>(
    a: Vector<E, N>,
    b: Vector<E, N>,
    #[comptime] len: usize,
    #[comptime] tf32: bool,
    sum: f32,
) -> f32 {
    let mut sum = sum;
    #[unroll]
    for e in 0..len {
        let (a, b) = (f32::cast_from(a.extract(e)), f32::cast_from(b.extract(e)));
        sum = if comptime!(tf32) { fma(nearest_tf32(a), nearest_tf32(b), sum) } else { fma(a, b, sum) };
    }
    sum
}

/// The products of a row with the warp's 32 keys from `first` on, of which each thread gets that of its own, in half precision. By a whole
/// warp.
///
/// The backward recomputes scores by matrix products. Multiply-adds round differently, and the difference of a score near 10⁴ would be a
/// relative error of its probability: so the log-sum-exp of a row is made of matrix products, too.
#[cube]
pub fn products_with_keys<E: Float, N: Size>(
    sources: &Sources<E, N>,
    of: &LostRow,
    first: u32,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let lane = UNIT_POS % 32;
    let (q, k) = (sources.q.data, sources.k.data);
    let q_at = sources.q.stride.at(of.batch, of.head, of.row);
    // Of every eight of the keys, the one that this thread reads.
    let mut rows = Sequence::<usize>::new();
    #[unroll]
    for eight in 0..4u32 {
        let key = of.band.key_within(first + comptime!(8 * eight) + lane / 4, 1u32);
        rows.push(sources.k.stride.at(of.batch, of.head_kv, key));
    }
    let low = products_with_eights(q, q_at, k, *rows.index(0usize), *rows.index(1usize), blueprint);
    let high = products_with_eights(q, q_at, k, *rows.index(2usize), *rows.index(3usize), blueprint);
    // The first column of row `r` of a product is in thread `4 (r % 8)`, in its first register or its third.
    let from = 4 * (lane % 8);
    let of_low = select(lane % 16 < 8, plane_shuffle(low[0], from), plane_shuffle(low[2], from));
    let of_high = select(lane % 16 < 8, plane_shuffle(high[0], from), plane_shuffle(high[2], from));
    select(lane < 16, of_low, of_high)
}

/// The products of two eights of keys with a row: `m16 n8`, whose first column they are, and the others 0. `first_at`, `second_at`: the
/// keys that this thread reads.
#[cube]
pub fn products_with_eights<E: Float, N: Size>(
    q: &[Vector<E, N>],
    q_at: usize,
    k: &[Vector<E, N>],
    first_at: usize,
    second_at: usize,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let (wide, dtype) = comptime!((blueprint.head_dim, blueprint.dtype));
    let (whole, rest) = comptime!((wide / 16, wide % 16));
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        sums[i] = 0.0f32;
    }
    for step in 0..whole {
        let (first, second) =
            (words_of(k, first_at + 2 * step, 16usize, dtype), words_of(k, second_at + 2 * step, 16usize, dtype));
        mma_step(&mut sums, first, second, as_column(words_of(q, q_at + 2 * step, 16usize, dtype)), dtype);
    }
    if comptime!(rest > 0) {
        let (first, second) =
            (words_of(k, first_at + 2 * whole, rest, dtype), words_of(k, second_at + 2 * whole, rest, dtype));
        mma_step(&mut sums, first, second, as_column(words_of(q, q_at + 2 * whole, rest, dtype)), dtype);
    }
    sums
}

/// Words of a row as those of the first of a second operand's eight columns, and 0 as those of the others.
#[cube]
pub fn as_column(row: (u32, u32)) -> (u32, u32) {
    let first = UNIT_POS % 32 < 4;
    (select(first, row.0, 0u32), select(first, row.1, 0u32))
}

/// Of a step of 16 columns of a row, of which `len` count, the two words that a thread gives a product: of its columns in each eight.
#[cube]
pub fn words_of<E: Float, N: Size>(
    row: &[Vector<E, N>],
    at: usize,
    #[comptime] len: usize,
    #[comptime] dtype: Dtype,
) -> (u32, u32) {
    let second = if comptime!(len > 8) { word_of(row[at + 1], comptime!(len - 8), dtype) } else { 0u32.runtime() };
    (word_of(row[at], comptime!(len.min(8)), dtype), second)
}

/// Columns `2 (u % 4)` and the next of eight, of which `len` count, in thread `u`.
#[cube]
pub fn word_of<E: Float, N: Size>(eight: Vector<E, N>, #[comptime] len: usize, #[comptime] dtype: Dtype) -> u32 {
    let quarter = UNIT_POS % 4;
    let mut word = 0u32.runtime();
    #[unroll]
    for pair in 0..comptime!(len.div_ceil(2)) {
        let low = f32::cast_from(eight.extract(comptime!(2 * pair)));
        let mut high = 0.0f32.runtime();
        if comptime!(2 * pair + 1 < len) {
            high = f32::cast_from(eight.extract(comptime!(2 * pair + 1)));
        }
        word = select(quarter == comptime!(pair as u32), pack(low, high, dtype), word);
    }
    word
}
