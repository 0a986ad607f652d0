//! Groups of tensors that kernels read or write, each passed as one argument.

use super::rows::StoredRows;
use cubecl::prelude::*;

/// Operands of the forward.
#[derive(CubeType, CubeLaunch)]
pub struct Qkv<E: Float, N: Size> {
    /// `[B, H, Sq, D]`.
    pub q: &'static Tensor<Vector<E, N>>,
    /// `[B, Hkv, Sk, D]`.
    pub k: StoredRows<E, N>,
    /// `[B, Hkv, Sk, Dv]`.
    pub v: StoredRows<E, N>,
}

/// Results of the forward.
#[derive(CubeType, CubeLaunch)]
pub struct ForwardOutputs<E: Float, N: Size> {
    /// `[B, H, Sq, Dv]`.
    pub o: &'static mut Tensor<Vector<E, N>>,
    /// Bits of the log-sum-exp, `[B, H, Sq]`.
    pub lse: &'static mut Tensor<u32>,
}

/// Queries or keys, as one side of the backward's products. One kernel serves `dq` as well as `dk` and `dv`, with the sides exchanged.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Side<E: Float, N: Size> {
    /// Q or K, `[B, H, S, D]`: operand of `S = Q Kᵀ`.
    pub qk: &'static Tensor<Vector<E, N>>,
    /// dO or V, `[B, H, S, Dv]`: operand of `dP = dO Vᵀ`.
    pub dov: &'static Tensor<Vector<E, N>>,
}

/// Operands of a backward kernel that exchanges sides: a thread block keeps the rows, and the columns stream by.
#[derive(CubeType, CubeLaunch)]
pub struct Sides<E: Float, N: Size> {
    /// The side that a thread block keeps.
    pub rows: Side<E, N>,
    /// The side that streams by.
    pub cols: Side<E, N>,
    /// `lse` and delta of each query.
    pub stats: Statistics,
}

/// Gradients of the rows of a backward kernel that exchanges sides.
#[derive(CubeType, CubeLaunch)]
pub struct Gradients<E: Float, N: Size> {
    /// Gradient of Q or K.
    pub dqk: ComptimeOption<&'static mut Tensor<Vector<E, N>>>,
    /// Gradient of V, where rows are keys.
    pub dv: ComptimeOption<&'static mut Tensor<Vector<E, N>>>,
}

/// Statistics of each query for the backward, `[2, B, H, Sq]`: `lse`, then delta.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Statistics {
    /// The tensor.
    pub tensor: &'static Tensor<f32>,
}

#[cube]
impl<E: Float, N: Size> Sides<E, N> {
    /// The side of the queries and that of the keys. Rows are queries, or keys if `keys`.
    pub fn queries_and_keys(&self, #[comptime] keys: bool) -> (Side<E, N>, Side<E, N>) {
        if comptime!(keys) { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }
}

#[cube]
impl Statistics {
    /// `lse` of a query of a head.
    pub fn lse(&self, batch: usize, head: usize, query: u32) -> f32 {
        self.tensor[self.at(batch, head, query)]
    }

    /// Delta of a query of a head.
    pub fn delta(&self, batch: usize, head: usize, query: u32) -> f32 {
        self.tensor[self.tensor.stride(0) + self.at(batch, head, query)]
    }

    fn at(&self, batch: usize, head: usize, query: u32) -> usize {
        batch * self.tensor.stride(1) + head * self.tensor.stride(2) + query as usize
    }
}
