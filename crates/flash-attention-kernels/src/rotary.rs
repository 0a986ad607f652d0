//! Rotary position embedding (RoFormer, [arXiv:2104.09864](https://arxiv.org/abs/2104.09864), section 3.2): pairs of columns of each row are
//! rotated by the angles of the row's position, in one pass over memory.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::fragment::row_start;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

/// Columns of a head that are rotated as a pair.
///
/// ```
/// assert_eq!(flash_attention_kernels::RotaryLayout::default(), flash_attention_kernels::RotaryLayout::HalfSplit);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RotaryLayout {
    /// Columns `i` and `i + rotary_dim / 2`: GPT-NeoX, and checkpoints of Hugging Face.
    #[default]
    HalfSplit,
    /// Columns `2i` and `2i + 1`: RoFormer, checkpoints of Meta's Llama, and burn-nn's `RotaryEncoding`.
    Interleaved,
}

/// The product of the complex numbers `a + ib` and `cos + i sin`.
#[cube]
pub fn rotated(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a * cos - b * sin, b * cos + a * sin)
}

/// Cosines and sines, `[B | 1, 1, S, pairs]`.
#[derive(CubeType, CubeLaunch)]
pub struct Angles<N: Size> {
    pub cos: &'static Tensor<Vector<f32, N>>,
    pub sin: &'static Tensor<Vector<f32, N>>,
    /// −1 if rows are turned back, else 1.
    pub sign: f32,
}

/// Rotates the first `2 · pairs` columns of each row of `x [B, H, S, D]`, and copies the others. A thread rotates a vector of pairs, or
/// copies a vector.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn rotate<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    angles: Angles<N>,
    out: &mut Tensor<Vector<E, N>>,
    #[comptime] layout: RotaryLayout,
    #[define(E)] _type: ElemType,
) {
    let width = N::value();
    let (heads, rows, pairs) = (x.shape(1), x.shape(2), angles.cos.shape(3));
    // Vectors of pairs, and threads of a row.
    let turned = pairs / width;
    let of_row = x.shape(3) / width - turned;
    let (row, column) = (ABSOLUTE_POS / of_row, ABSOLUTE_POS % of_row);
    let (head, row) = (row / rows, row % rows);
    let (batch, head) = (head / heads, head % heads);
    if batch >= x.shape(0) {
        terminate!();
    }
    let from = row_start(x, batch, head, row as u32);
    let (to, to_stride) = (row_start(&*out, batch, head, row as u32), out.stride(3));
    if column >= turned {
        let column = (column + turned) * width;
        out[(to + column * to_stride) / width] = x[(from + column * x.stride(3)) / width];
    } else {
        let pair = column * width;
        let (first, second) = match layout {
            RotaryLayout::HalfSplit => (pair, pairs + pair),
            RotaryLayout::Interleaved => (2 * pair, 2 * pair + width),
        };
        let at = row_start(angles.cos, batch, 0usize, row as u32) + pair * angles.cos.stride(3);
        let cos = angles.cos[at / width];
        let at = row_start(angles.sin, batch, 0usize, row as u32) + pair * angles.sin.stride(3);
        let sin = angles.sin[at / width];
        let (first_from, second_from) = (from + first * x.stride(3), from + second * x.stride(3));
        let read = Columns::<E, N> { first: x[first_from / width], second: x[second_from / width] };
        let mut written = Columns::<E, N> { first: read.first, second: read.second };
        #[unroll]
        for nth in 0..width {
            let (a, b) = comptime!(match layout {
                RotaryLayout::HalfSplit => (nth, nth + width),
                RotaryLayout::Interleaved => (2 * nth, 2 * nth + 1),
            });
            let (value_a, value_b) =
                rotated(read.get(a), read.get(b), cos.extract(nth), sin.extract(nth) * angles.sign);
            written.set(a, value_a);
            written.set(b, value_b);
        }
        out[(to + first * to_stride) / width] = written.first;
        out[(to + second * to_stride) / width] = written.second;
    }
}

/// Two vectors of columns, numbered through both.
#[derive(CubeType)]
struct Columns<E: Float, N: Size> {
    first: Vector<E, N>,
    second: Vector<E, N>,
}

#[cube]
impl<E: Float, N: Size> Columns<E, N> {
    fn get(&self, #[comptime] column: usize) -> f32 {
        let width = N::value();
        if comptime!(column < width) {
            f32::cast_from(self.first.extract(column))
        } else {
            f32::cast_from(self.second.extract(comptime!(column - width)))
        }
    }

    fn set(&mut self, #[comptime] column: usize, value: f32) {
        let width = N::value();
        if comptime!(column < width) {
            self.first.insert(column, E::cast_from(value));
        } else {
            self.second.insert(comptime!(column - width), E::cast_from(value));
        }
    }
}
