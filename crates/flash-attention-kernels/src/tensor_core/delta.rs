//! What gradients need of each query: `lse` in base 2, and `delta_i = Σ_c dout_ic · o_ic − dlse_i`.
//!
//! As [for the portable kernels](crate::portable::delta), but in the layout that tiles of queries are loaded with: rows of a head
//! are filled up to whole tiles, with rows whose probabilities are 0.

use super::operands::row_start;
use super::statistics::stats_rows;
use crate::softmax::{lse_log2, lse_of_bits};
use cubecl::prelude::*;

/// Threads that share a row.
const UNITS_PER_ROW: u32 = 8;
/// Threads of a thread block.
pub const UNITS: u32 = 128;
/// Rows of a thread block.
pub const ROWS: u32 = UNITS / UNITS_PER_ROW;

/// What the kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaBlueprint {
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Rows of a head are filled up to a multiple of this.
    pub stats_multiple: usize,
    /// Whether tiles begin anywhere.
    pub varlen: bool,
    /// Columns of `dq_accum` that are made 0.
    pub zeros: usize,
}

/// `o, dout [B, H, Sq, Dv]` in vectors of 16 bytes, `lse` (bits), `dlse [B, H, Sq]` to `stats [2, B · H, Sq filled up]`: lse, then
/// delta, as bits. Makes `dq_accum [B · H, Sq filled up, zeros]`, in vectors of 16 bytes, 0 on the way: `zeros` columns of it.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<E: Float, N: Size>(
    o: &Tensor<Vector<E, N>>,
    dout: &Tensor<Vector<E, N>>,
    lse: &Tensor<u32>,
    dlse: ComptimeOption<&Tensor<f32>>,
    stats: &mut [u32],
    dq_accum: &mut [Vector<f32, Const<4>>],
    #[comptime] blueprint: DeltaBlueprint,
    #[define(E)] _type: ElemType,
) {
    let (head_dim_v, zeros) = comptime!((blueprint.head_dim_v, blueprint.zeros));
    let (batches, heads, seq_q) = (o.shape(0) as u32, o.shape(1) as u32, o.shape(2) as u32);
    let width = o.vector_size();
    let rows = stats_rows(seq_q, blueprint.stats_multiple, blueprint.varlen);
    let (of_row, nth) = (UNIT_POS % UNITS_PER_ROW, UNIT_POS / UNITS_PER_ROW);
    // Blocks of a head's rows follow one another, so do heads and batches: a thread block's rows are of one head.
    let blocks = rows / ROWS;
    let (head, block) = (CUBE_POS / blocks as usize, CUBE_POS % blocks as usize);
    let row = block as u32 * ROWS + nth;
    let all = (batches * heads) as usize;
    if head >= all {
        terminate!();
    }
    let (batch, of_batch) = (head / heads as usize, head % heads as usize);
    let to = head * rows as usize + row as usize;
    #[unroll]
    for step in 0..comptime!(zeros / (4 * UNITS_PER_ROW as usize)) {
        let vector = comptime!(step * UNITS_PER_ROW as usize) + of_row as usize;
        dq_accum[to * comptime!(zeros / 4) + vector] = Vector::new(0.0f32);
    }

    let mut sum = 0.0f32.runtime();
    if row < seq_q {
        let o_at = row_start(o, batch, of_batch, row) / width;
        let d_at = row_start(dout, batch, of_batch, row) / width;
        #[unroll]
        for step in 0..comptime!(head_dim_v.div_ceil(width * UNITS_PER_ROW as usize)) {
            let vector = comptime!(step * UNITS_PER_ROW as usize) + of_row as usize;
            if vector * width < head_dim_v {
                let a = o[o_at + vector];
                let b = dout[d_at + vector];
                #[unroll]
                for e in 0..width {
                    let product = f32::cast_from(a.extract(e)) * f32::cast_from(b.extract(e));
                    // What lies past the last column may be anything.
                    sum += if comptime!(head_dim_v.is_multiple_of(width)) {
                        product
                    } else {
                        select(vector * width + e < head_dim_v, product, 0.0f32)
                    };
                }
            }
        }
    }
    sum += plane_shuffle_xor(sum, 1u32);
    sum += plane_shuffle_xor(sum, 2u32);
    sum += plane_shuffle_xor(sum, 4u32);

    if of_row == 0 {
        let mut of_lse = f32::MAX.runtime();
        let mut of_delta = 0.0f32.runtime();
        if row < seq_q {
            of_lse = min(lse_log2(lse_of_bits(lse[row_start(lse, batch, of_batch, row)])), f32::MAX);
            of_delta = sum;
            #[comptime]
            if let ComptimeOption::Some(dlse) = &dlse {
                let from = batch * dlse.stride(0) + of_batch * dlse.stride(1) + row as usize * dlse.stride(2);
                of_delta -= dlse[from];
            }
            // A query that sees nothing has no gradient, whatever it holds.
            of_delta = select(of_lse == f32::MAX, 0.0f32, of_delta);
        }
        stats[to] = u32::reinterpret(of_lse);
        stats[all * rows as usize + to] = u32::reinterpret(of_delta);
    }
}
