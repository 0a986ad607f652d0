//! Products of one row with keys.

use super::super::Blueprint;
use super::super::operands::{KeyRow, Sources};
use super::LostRow;
use crate::dtype::Dtype;
use crate::e4m3::{KvStorage, decode_word};
use crate::extras::Extras;
use crate::fragment::filled;
use crate::ptx::{load_words, mma_step, pack};
use crate::rounding::nearest_tf32;
use cubecl::prelude::*;

/// The dot product of two rows of `wide` elements, which start at vectors `a_at` and `b_at`.
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

/// `sum` plus the dot product of the first `len` elements of two vectors.
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

/// The products of a row with 32 keys from `first` on, in half precision. Each thread gets the product with its own key. The
/// whole warp must call it.
///
/// The backward recomputes scores by matrix products. Multiply-adds round differently, and at scores near 10⁴ the difference
/// would be a relative error of the probability. The log-sum-exp of a recomputed row is therefore made of matrix products, too.
#[cube]
pub fn products_with_keys<E: Float, N: Size>(
    sources: &Sources<E, N>,
    extras: &Extras,
    of: &LostRow,
    first: u32,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let lane = UNIT_POS % 32;
    let (q, k) = (sources.q.data, sources.k.data);
    let q_at = sources.q.stride.at(of.batch, of.head, of.row);
    // The key that this thread reads in each group of eight.
    let mut rows = Sequence::<KeyRow>::new();
    #[unroll]
    for eight in 0..4u32 {
        let key = of.band.key_within(first + comptime!(8 * eight) + lane / 4, 1u32);
        rows.push(sources.k.key(extras, of.batch, of.head_kv, key, blueprint.head_dim, blueprint.storage));
    }
    let low = products_with_eights(q, q_at, k, *rows.index(0usize), *rows.index(1usize), blueprint);
    let high = products_with_eights(q, q_at, k, *rows.index(2usize), *rows.index(3usize), blueprint);
    // The first column of row `r` of a product is in thread `4 (r % 8)`, in its first or third register.
    let from = 4 * (lane % 8);
    let of_low = select(lane % 16 < 8, plane_shuffle(low[0], from), plane_shuffle(low[2], from));
    let of_high = select(lane % 16 < 8, plane_shuffle(high[0], from), plane_shuffle(high[2], from));
    select(lane < 16, of_low, of_high)
}

/// The products of two groups of eight keys with a row: the first column of an `m16 n8` product, whose other columns are 0.
/// `first_key` and `second_key` are the keys that this thread reads.
#[cube]
pub fn products_with_eights<E: Float, N: Size>(
    q: &[Vector<E, N>],
    q_at: usize,
    k: &[Vector<E, N>],
    first_key: KeyRow,
    second_key: KeyRow,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let (wide, dtype) = comptime!((blueprint.head_dim, blueprint.dtype));
    let (whole, rest) = comptime!((wide / 16, wide % 16));
    let mut sums = filled::<f32>(0.0f32, 4usize);
    for step in 0..whole {
        let first = words_of_key(k, first_key, step, 16usize, blueprint);
        let second = words_of_key(k, second_key, step, 16usize, blueprint);
        mma_step(&mut sums, first, second, as_column(words_of(q, q_at + 2 * step, 16usize, dtype)), dtype);
    }
    if comptime!(rest > 0) {
        let first = words_of_key(k, first_key, whole, rest, blueprint);
        let second = words_of_key(k, second_key, whole, rest, blueprint);
        mma_step(&mut sums, first, second, as_column(words_of(q, q_at + 2 * whole, rest, dtype)), dtype);
    }
    sums
}

/// Words of a B operand whose first column is the row, and whose other seven columns are 0.
#[cube]
pub fn as_column(row: (u32, u32)) -> (u32, u32) {
    let first = UNIT_POS % 32 < 4;
    (select(first, row.0, 0u32), select(first, row.1, 0u32))
}

/// [`words_of()`] of a key, in the product step of this number.
#[cube]
fn words_of_key<E: Float, N: Size>(
    k: &[Vector<E, N>],
    key: KeyRow,
    step: usize,
    #[comptime] len: usize,
    #[comptime] blueprint: Blueprint,
) -> (u32, u32) {
    if comptime!(blueprint.storage == KvStorage::E4m3) {
        let at = key.at + step;
        let words = load_words(&k[at..at + 1]);
        let high = UNIT_POS % 4 >= 2;
        let first = pair_of(select(high, *words.index(1usize), *words.index(0usize)), key.scale, blueprint.dtype);
        let second = pair_of(select(high, *words.index(3usize), *words.index(2usize)), key.scale, blueprint.dtype);
        (first, second)
    } else {
        words_of(k, key.at + 2 * step, len, blueprint.dtype)
    }
}

/// Two of the four columns in e4m3 of a word: the last ones in odd threads.
#[cube]
fn pair_of(word: u32, scale: f32, #[comptime] dtype: Dtype) -> u32 {
    let four = decode_word(word, scale);
    let (low, high) = (
        pack(four.extract(0usize), four.extract(1usize), dtype),
        pack(four.extract(2usize), four.extract(3usize), dtype),
    );
    select(UNIT_POS % 2 == 1, high, low)
}

/// The two words that a thread contributes to a product step of 16 columns, of which `len` are valid: one from each group of
/// eight.
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

/// The word of thread `u`: columns `2 (u % 4)` and `2 (u % 4) + 1` of a group of eight, of which `len` are valid.
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
