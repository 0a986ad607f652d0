//! Tensors that kernels on tensor cores read and write, each kind as one argument.

use cubecl::prelude::*;

/// Where the rows of `[B, H, S, …]` start. As arguments strides are constants; those of a tensor are read from memory.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Stride {
    /// From a batch to the next.
    pub batch: usize,
    /// From a head to the next.
    pub head: usize,
    /// From a row to the next.
    pub row: usize,
}

#[cube]
impl Stride {
    /// The start of a row.
    pub fn at(&self, batch: usize, head: usize, row: u32) -> usize {
        batch * self.batch + head * self.head + row as usize * self.row
    }
}

/// Where a row of a tensor `[B, H, S, …]` starts, in elements, by strides that are read from memory.
#[cube]
pub fn row_start<T: CubePrimitive>(tensor: &Tensor<T>, batch: usize, head: usize, row: u32) -> usize {
    batch * tensor.stride(0) + head * tensor.stride(1) + row as usize * tensor.stride(2)
}

/// A tensor `[B, H, S, D]` in vectors of 16 bytes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RowsIn<E: Float, N: Size> {
    /// Its vectors.
    pub data: &'static [Vector<E, N>],
    /// From row to row, in vectors.
    pub stride: Stride,
}

/// A result `[B, H, S, D]` in vectors of 8 bytes.
#[derive(CubeType, CubeLaunch)]
pub struct RowsOut {
    /// Its vectors.
    pub data: &'static mut [Vector<u32, Const<2>>],
    /// From row to row, in vectors.
    pub stride: Stride,
}

/// Bits of a log-sum-exp `[B, H, S]`.
#[derive(CubeType, CubeLaunch)]
pub struct LseOut {
    /// Its words.
    pub data: &'static mut [u32],
    /// From row to row.
    pub stride: Stride,
}

/// Operands of the forward, as rows that are computed again read them.
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

/// Results of the forward; of splits of the keys `o [P · B, H, Sq, Dv]` in f32 and `lse [P · B, H, Sq]`.
#[derive(CubeType, CubeLaunch)]
pub struct Outputs {
    /// `[B, H, Sq, Dv]`.
    pub o: RowsOut,
    /// `[B, H, Sq]`.
    pub lse: LseOut,
}

/// One side of the products of the backward: queries or keys.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SourceSide<E: Float, N: Size> {
    /// Q or K, `[B, H, S, D]`: operand of `S`.
    pub qk: RowsIn<E, N>,
    /// dO or V, `[B, H, S, Dv]`: operand of `dP`.
    pub dov: RowsIn<E, N>,
}

/// Operands of the backward: [`Role`](crate::fragment::role::Role) says what rows and columns are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SourceSides<E: Float, N: Size> {
    /// What is kept.
    pub rows: SourceSide<E, N>,
    /// What streams by.
    pub cols: SourceSide<E, N>,
}

/// Gradients of the rows. What is not wanted is not written.
#[derive(CubeType, CubeLaunch)]
pub struct GradientOutputs {
    /// That of Q or K.
    pub dqk: RowsOut,
    /// That of V.
    pub dv: RowsOut,
}
