//! Statistics of each row for the backward: `lse_i` and `delta_i = Σ_c dout_ic · o_ic − dlse_i`.
//!
//! With `P = exp(S − lse)` the softmax's gradient is `dS = P ∘ (dP − rowsum(P ∘ dP))`, and `rowsum(P ∘ dP)` equals
//! `rowsum(dout ∘ o)` (FlashAttention, arXiv:2205.14135, appendix B.2). A gradient of `lse` itself adds `P · dlse` to
//! `dS`, which is one more term of delta.
//!
//! Both are packed in one buffer, because the smallest devices bind few buffers.

use crate::fragment::{Rows, Vec4, WIDTH, row_start};
use crate::softmax::lse_of_bits;
use cubecl::prelude::*;

/// Threads that share a row.
pub const UNITS_PER_ROW: usize = 8;
/// Rows of a thread block.
pub const ROWS: usize = 16;

/// The forward's output and its gradient.
#[derive(CubeType, CubeLaunch)]
pub struct Outputs<F: Float, N: Size> {
    /// Output, `[B, H, Sq, Dv]`.
    pub o: &'static Tensor<Vector<F, N>>,
    /// Gradient of the output, `[B, H, Sq, Dv]`.
    pub dout: &'static Tensor<Vector<F, N>>,
}

/// Computes `stats [2, B, H, Sq]`, contiguous: lse, then delta. Reads `o, dout [B, H, Sq, Dv]`, the bits of `lse [B, H, Sq]`, and
/// `dlse [B, H, Sq]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<F: Float, N: Size>(
    outputs: Outputs<F, N>,
    lse: &Tensor<u32>,
    dlse: ComptimeOption<&Tensor<f32>>,
    stats: &mut Tensor<f32>,
    #[comptime] head_dim_v: usize,
    #[define(F)] _type: ElemType,
) {
    let mut board = Shared::<[f32]>::new_slice(comptime!(ROWS * UNITS_PER_ROW));
    let (heads, seq) = (stats.shape(2), stats.shape(3));
    let rows = stats.shape(1) * heads * seq;
    let lane = UNIT_POS as usize % UNITS_PER_ROW;
    let row = CUBE_POS * ROWS + UNIT_POS as usize / UNITS_PER_ROW;
    let i = row % seq;
    let head = row / seq % heads;
    let batch = row / seq / heads;

    let mut sum = 0.0f32;
    if row < rows {
        let o_rows = Rows::of(outputs.o, batch, head, 0u32, seq as u32);
        let d_rows = Rows::of(outputs.dout, batch, head, 0u32, seq as u32);
        for step in 0..comptime!(head_dim_v.div_ceil(WIDTH * UNITS_PER_ROW)) {
            let column = (step * UNITS_PER_ROW + lane) * WIDTH;
            let a = Vec4::cast_from(o_rows.read(i as u32, column, head_dim_v));
            let b = Vec4::cast_from(d_rows.read(i as u32, column, head_dim_v));
            #[unroll]
            for n in 0..WIDTH {
                sum = fma(a.extract(n), b.extract(n), sum);
            }
        }
    }
    board[UNIT_POS as usize] = sum;
    sync_cube();

    if row < rows && lane == 0 {
        let mut total = 0.0f32;
        #[unroll]
        for n in 0..UNITS_PER_ROW {
            total += board[UNIT_POS as usize + n];
        }
        #[comptime]
        if let ComptimeOption::Some(dlse) = dlse {
            total -= dlse[row_start(dlse, batch, head, i as u32)];
        }
        stats[row] = lse_of_bits(lse[row_start(lse, batch, head, i as u32)]);
        stats[rows + row] = total;
    }
}
