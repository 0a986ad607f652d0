//! Tensors that kernels on tensor cores read and write, grouped into arguments.

use super::VECTOR_BYTES;
use crate::e4m3::KvStorage;
use crate::extras::Extras;
use crate::ptx::load_words;
use cubecl::prelude::*;

/// Strides of the rows of `[B, H, S, …]`. As arguments, strides are constants of the launch; the strides of a tensor are read
/// from memory.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Stride {
    /// Distance from one batch to the next.
    pub batch: usize,
    /// Distance from one head to the next.
    pub head: usize,
    /// Distance from one row to the next.
    pub row: usize,
}

#[cube]
impl Stride {
    /// The start of a row.
    pub fn at(&self, batch: usize, head: usize, row: u32) -> usize {
        batch * self.batch + head * self.head + row as usize * self.row
    }

    /// The start of the row of a key, which may be in a page.
    pub fn of_key(&self, extras: &Extras, batch: usize, head: usize, key: u32) -> usize {
        let place = extras.place(batch, key);
        self.at(place.batch, head, place.row)
    }
}

/// Row of a key in K or V.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct KeyRow {
    /// Its first vector.
    pub at: usize,
    /// Factor of its elements, if they are stored with one.
    pub scale: f32,
}

/// An input `[B, H, S, D]` in 16-byte vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RowsIn<E: Float, N: Size> {
    /// The vectors.
    pub data: &'static [Vector<E, N>],
    /// Strides in vectors.
    pub stride: Stride,
}

#[cube]
impl<E: Float, N: Size> RowsIn<E, N> {
    /// The row of a key, which may be in a page, in K or V with `wide` columns.
    pub fn key(
        &self,
        extras: &Extras,
        batch: usize,
        head: usize,
        key: u32,
        #[comptime] wide: usize,
        #[comptime] storage: KvStorage,
    ) -> KeyRow {
        if comptime!(storage == KvStorage::E4m3) {
            let place = extras.place(batch, key);
            let page = self.stride.at(place.batch, head, 0u32);
            let of_scale = page + scale_at(extras, wide);
            let words = load_words(&self.data[of_scale..of_scale + 1]);
            KeyRow { at: page + place.row as usize * self.stride.row, scale: f32::reinterpret(*words.index(0usize)) }
        } else {
            KeyRow { at: self.stride.of_key(extras, batch, head, key), scale: 1.0f32.runtime() }
        }
    }
}

/// Vector of the scale in a page of a head with `wide` columns in e4m3.
#[cube]
pub fn scale_at(extras: &Extras, #[comptime] wide: usize) -> usize {
    let words = extras.pages.unwrap().scale_at(wide);
    comptime!(words * 4 / VECTOR_BYTES).runtime()
}

/// An output `[B, H, S, D]` in 8-byte vectors.
#[derive(CubeType, CubeLaunch)]
pub struct RowsOut {
    /// The vectors.
    pub data: &'static mut [Vector<u32, Const<2>>],
    /// Strides in vectors.
    pub stride: Stride,
}

/// Output for the bits of the log-sum-exp, `[B, H, S]`.
#[derive(CubeType, CubeLaunch)]
pub struct LseOut {
    /// The words.
    pub data: &'static mut [u32],
    /// Strides in words.
    pub stride: Stride,
}

/// Operands of the forward, for rows that are recomputed.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Sources<E: Float, N: Size> {
    /// `[B, H, Sq, D]`.
    pub q: RowsIn<E, N>,
    /// `[B, Hkv, Sk, D]`.
    pub k: RowsIn<E, N>,
    /// `[B, Hkv, Sk, Dv]`.
    pub v: RowsIn<E, N>,
}

/// Outputs of the forward. For `P` splits of the keys they are `o [P · B, H, Sq, Dv]` in f32 and `lse [P · B, H, Sq]`.
#[derive(CubeType, CubeLaunch)]
pub struct Outputs {
    /// `[B, H, Sq, Dv]`.
    pub o: RowsOut,
    /// `[B, H, Sq]`.
    pub lse: LseOut,
}

/// One side of the backward's products: queries or keys.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SourceSide<E: Float, N: Size> {
    /// Q or K, `[B, H, S, D]`: operand of `S`.
    pub qk: RowsIn<E, N>,
    /// dO or V, `[B, H, S, Dv]`: operand of `dP`.
    pub dov: RowsIn<E, N>,
}

/// Operands of the backward. [`Role`](crate::fragment::Role) defines rows and columns.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SourceSides<E: Float, N: Size> {
    /// Operands of the rows, which a work tile keeps.
    pub rows: SourceSide<E, N>,
    /// Operands of the columns, whose tiles are streamed.
    pub cols: SourceSide<E, N>,
}

/// Output for [sums](super::RowSums) of rows, `[number of sums, B, H, S]`, where heads are query heads.
#[derive(CubeType, CubeLaunch)]
pub struct SumsOut {
    /// The sums.
    pub data: &'static mut [f32],
    /// Strides of rows.
    pub stride: Stride,
    /// Distance from one sum of a row to the next.
    pub next: usize,
}

#[cube]
impl SumsOut {
    /// The place of the `nth` sum of a row.
    pub fn at(&self, #[comptime] nth: usize, batch: usize, head: usize, row: u32) -> usize {
        nth * self.next + self.stride.at(batch, head, row)
    }
}

/// Gradients of the rows. A gradient that is not requested is not written.
#[derive(CubeType, CubeLaunch)]
pub struct GradientOutputs {
    /// Gradient of Q or K.
    pub dqk: RowsOut,
    /// Gradient of V.
    pub dv: RowsOut,
    /// Sums, if there are any.
    pub sums: SumsOut,
}
