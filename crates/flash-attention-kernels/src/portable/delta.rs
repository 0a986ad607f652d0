//! What the backward needs of each row: `lse_i` and `delta_i = Σ_c dout_ic · o_ic − dlse_i`.
//!
//! With `P = exp(S − lse)` the softmax's gradient is `dS = P ∘ (dP − rowsum(P ∘ dP))`, and `rowsum(P ∘ dP)` equals
//! `rowsum(dout ∘ o)` (FlashAttention, arXiv:2205.14135, appendix B.2). A gradient of `lse` itself adds `P · dlse` to
//! `dS`, which is one more term of delta.
//!
//! Both are packed in one buffer, because the smallest devices bind few.

use super::tile::{Vec4, WIDTH, matrix};
use crate::softmax::lse_of_bits;
use cubecl::prelude::*;

/// Threads that share a row.
pub const UNITS_PER_ROW: usize = 8;
/// Rows of a thread block.
pub const ROWS: usize = 16;

/// `o, dout [B, H, Sq, Dv]`, `lse` (bits), `dlse [B, H, Sq]` to `stats [2, B · H · Sq]`: lse, then delta.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn delta<F: Float, N: Size>(
    o: &Tensor<Vector<F, N>>,
    dout: &Tensor<Vector<F, N>>,
    lse: &Tensor<u32>,
    dlse: ComptimeOption<&Tensor<f32>>,
    stats: &mut Tensor<f32>,
    heads: u32,
    seq_q: u32,
    #[comptime] head_dim_v: usize,
    #[define(F)] _type: ElemType,
) {
    let mut board = Shared::<[f32]>::new_slice(comptime!(ROWS * UNITS_PER_ROW));
    let rows = stats.shape(1);
    let lane = UNIT_POS as usize % UNITS_PER_ROW;
    let row = CUBE_POS * ROWS + UNIT_POS as usize / UNITS_PER_ROW;

    let (seq, head_count) = (seq_q as usize, heads as usize);
    let i = row % seq;
    let head = row / seq % head_count;
    let batch = row / seq / head_count;

    let mut sum = 0.0f32;
    if row < rows {
        let o_at = matrix(o, batch, head);
        let d_at = matrix(dout, batch, head);
        let o_row = o_at.base + i * o_at.row_stride;
        let d_row = d_at.base + i * d_at.row_stride;
        let width = N::value();
        for step in 0..comptime!(head_dim_v.div_ceil(width * UNITS_PER_ROW)) {
            let column = (step * UNITS_PER_ROW + lane) * width;
            if column < head_dim_v {
                if comptime!(width == WIDTH) {
                    let a = Vec4::cast_from(o[(o_row + column) / WIDTH]);
                    let b = Vec4::cast_from(dout[(d_row + column) / WIDTH]);
                    #[unroll]
                    for n in 0..WIDTH {
                        sum = fma(a.extract(n), b.extract(n), sum);
                    }
                } else {
                    let a = f32::cast_from(o[o_row + column * o_at.column_stride].extract(0usize));
                    let b = f32::cast_from(dout[d_row + column * d_at.column_stride].extract(0usize));
                    sum = fma(a, b, sum);
                }
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
        if let ComptimeOption::Some(dlse) = &dlse {
            total -= dlse[batch * dlse.stride(0) + head * dlse.stride(1) + i * dlse.stride(2)];
        }
        stats[row] = lse_of_bits(lse[batch * lse.stride(0) + head * lse.stride(1) + i * lse.stride(2)]);
        stats[rows + row] = total;
    }
}
