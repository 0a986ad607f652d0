//! Rows that are computed once more, key by key: by a warp each, in f32, slowly.
//!
//! - A hidden key has the exponential 0, and 0 times a value that is not finite is not a number: products of whole tiles let
//!   such a value reach rows that must not see it. That shows in O where the log-sum-exp is finite. Rows that do see the value
//!   get what it makes of them.
//! - Exponentials relative to an anchor leave the range of f32 where a score is more than 72 above all those of the tiles
//!   before, which is far beyond what a softmax makes a difference of. That shows in a sum of +∞.

use super::Blueprint;
use super::forward::Strides;
use super::ops::{ex2, fma_packed, lg2, pack};
use super::scores::{Exponent, Factors, exponent_of};
use crate::mask::Band;
use crate::softmax::{HIDDEN, lse_bits_log2};
use cubecl::prelude::*;

/// Keys at a time: one for each unit of a warp.
const KEYS: u32 = 32;

/// Whether what a unit holds of a packed row is finite.
#[cube]
pub fn is_finite(words: &Array<u32>, #[comptime] blueprint: Blueprint) -> bool {
    let mut trace = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(blueprint.columns() / 8) {
        // 0 times what is not finite is not a number; −0 added to 0 is 0.
        trace = fma_packed(words[i], 0u32.runtime(), trace, blueprint.dtype);
    }
    trace == 0
}

/// `sum` and the products of the first `len` elements of two vectors.
#[cube]
fn dot<E: Float>(a: Vector<E, Const<8>>, b: Vector<E, Const<8>>, #[comptime] len: usize, sum: f32) -> f32 {
    let mut sum = sum;
    #[unroll]
    for e in 0..len {
        sum = fma(f32::cast_from(a.extract(e)), f32::cast_from(b.extract(e)), sum);
    }
    sum
}

/// The score of a row and a unit's key as an exponent of 2; not visible if the key is `after` the last.
#[cube]
#[allow(clippy::too_many_arguments)]
fn exponents<E: Float, M: Numeric, NB: Size, NM: Size>(
    q: &[Vector<E, Const<8>>],
    k: &[Vector<E, Const<8>>],
    mask: &ComptimeOption<&Tensor<Vector<M, NM>>>,
    bias: &ComptimeOption<&Tensor<Vector<E, NB>>>,
    strides: &Strides,
    factors: &Factors,
    band: &Band,
    batch: usize,
    head: usize,
    head_kv: usize,
    row: u32,
    key: u32,
    after: u32,
    #[comptime] blueprint: Blueprint,
) -> Exponent {
    let mut value = 0.0f32.runtime();
    let mut visible = false.runtime();
    if key < after && band.sees(row, key) {
        let q_at = strides.q.at(batch, head, row);
        let k_at = strides.k.at(batch, head_kv, key);
        let (whole, rest) = comptime!((blueprint.head_dim / 8, blueprint.head_dim % 8));
        let mut product = 0.0f32.runtime();
        for i in 0..whole {
            product = dot(q[q_at + i], k[k_at + i], 8usize, product);
        }
        if comptime!(rest > 0) {
            product = dot(q[q_at + whole], k[k_at + whole], rest, product);
        }
        let exponent = exponent_of(product, factors, band, mask, bias, batch, head, row, key, blueprint);
        value = exponent.value;
        visible = exponent.visible;
    }
    Exponent { value, visible }
}

/// Computes one row of `out`, in vectors of 8 bytes, from `q`, `k`, `v`, in vectors of 16, for the keys from `first` on but
/// not `after`. Its exponentials are relative to `m`, their sum is `l`; if that is +∞, both are computed, too, and the bits of
/// `lse`. By a whole warp.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn recompute_row<E: Float, M: Numeric, NB: Size, NM: Size>(
    q: &[Vector<E, Const<8>>],
    k: &[Vector<E, Const<8>>],
    v: &[Vector<E, Const<8>>],
    mask: &ComptimeOption<&Tensor<Vector<M, NM>>>,
    bias: &ComptimeOption<&Tensor<Vector<E, NB>>>,
    out: &mut [Vector<u32, Const<2>>],
    lse: &mut [u32],
    strides: &Strides,
    factors: &Factors,
    band: &Band,
    batch: usize,
    batch_out: usize,
    head: usize,
    head_kv: usize,
    row: u32,
    first: u32,
    after: u32,
    m: f32,
    l: f32,
    #[comptime] blueprint: Blueprint,
) {
    let lane = UNIT_POS % 32;
    // A unit has eight columns of O. Of more units than there are eights, the others compute the last ones too.
    let eights = comptime!((blueprint.columns() / 8) as u32);
    let column = min(lane, eights - 1) as usize;
    let mut o = Array::<f32>::new(8usize);
    #[unroll]
    for e in 0..8usize {
        o[e] = 0.0f32;
    }
    // Branches that are the warp's, not a unit's, are decided by votes: the assembler then knows that the warp stays
    // together, and guards no shuffle, here or in the loop around.
    let lost = l == f32::INFINITY;
    let mut of_row = m + lg2(l);
    // Of this unit's keys, while they are looked for.
    let mut m = HIDDEN.runtime();
    let mut l = 0.0f32.runtime();
    for round in select(lost, 0u32, 1u32)..2u32 {
        let mut start = first;
        while plane_any(start < after) {
            let key = start + lane;
            let exponent =
                exponents(q, k, mask, bias, strides, factors, band, batch, head, head_kv, row, key, after, blueprint);
            let sees = exponent.visible;
            if round == 0 {
                let higher = select(sees, max(m, exponent.value), m);
                let p = select(sees, ex2(exponent.value - higher), 0.0f32);
                l = fma(l, ex2(m - higher), p);
                m = higher;
            } else {
                let p = select(sees, ex2(exponent.value - of_row), 0.0f32);
                for n in 0..KEYS {
                    let p = plane_shuffle(p, n);
                    if plane_any(lane == n && sees) {
                        let values = v[strides.v.at(batch, head_kv, start + n) + column];
                        #[unroll]
                        for e in 0..8usize {
                            o[e] = fma(p, f32::cast_from(values.extract(e)), o[e]);
                        }
                    }
                }
            }
            start += KEYS;
        }
        if round == 0 {
            let highest = plane_max(m);
            l = plane_sum(l * ex2(m - highest));
            of_row = highest + lg2(l);
            if lane == 0 {
                lse[strides.lse.at(batch_out, head, row)] = lse_bits_log2(highest, l, lg2(l));
            }
        }
    }
    // Columns of a vector of 8 bytes.
    let of_vector = comptime!(if blueprint.partial { 2usize } else { 4usize });
    let at = strides.o.at(batch_out, head, row) + comptime!(8 / of_vector) * column;
    #[unroll]
    for nth in 0..comptime!(8 / of_vector) {
        let mut vector = Vector::<u32, Const<2>>::empty();
        #[unroll]
        for e in 0..2usize {
            if comptime!(blueprint.partial) {
                vector.insert(e, u32::reinterpret(o[comptime!(2 * nth + e)]));
            } else {
                let column = comptime!(4 * nth + 2 * e);
                vector.insert(e, pack(o[column], o[column + 1], blueprint.dtype));
            }
        }
        if lane < eights {
            out[at + nth] = vector;
        }
    }
}
