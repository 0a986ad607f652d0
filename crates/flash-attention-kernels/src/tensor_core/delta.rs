//! Statistics of each query for the backward: `lse` in base 2, and `delta_i = Σ_c dout_ic · o_ic − dlse_i`.
//!
//! The formula is that [of the portable kernels](crate::portable::delta). The layout is the one that gradient kernels load in
//! tiles of queries: the rows of a head are padded to whole tiles, with rows whose probabilities are 0.

use super::statistics::stats_rows;
use crate::fragment::row_start;
use crate::softmax::{lse_log2, lse_of_bits};
use cubecl::prelude::*;

/// Threads that share a row.
const UNITS_PER_ROW: u32 = 8;
/// Threads of a thread block.
pub const UNITS: u32 = 128;
/// Rows of a thread block.
pub const ROWS: u32 = UNITS / UNITS_PER_ROW;

/// Everything the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaBlueprint {
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// The rows of a head are padded to a multiple of this.
    pub stats_multiple: usize,
    /// Whether there are several sequences, so that tiles may begin anywhere.
    pub varlen: bool,
    /// What is set to 0.
    pub zeros: Zeros,
}

/// Words that [`delta()`] sets to 0, in vectors of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Zeros {
    /// Number of words that come one after the other: a multiple of 4.
    pub words: usize,
    /// Number of padded rows that have as many.
    pub rows: usize,
}

/// Computes lse and delta from `o, dout [B, H, Sq, Dv]` in 16-byte vectors, `lse` (bits) and `dlse [B, H, Sq]`. Writes them to
/// `stats [2, B · H, padded Sq]` as bits: lse, then delta. Also sets `zeroed [B · H · padded Sq / rows, words]` to 0, of which
/// [`Zeros`] has the sizes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn delta<E: Float, N: Size>(
    o: &Tensor<Vector<E, N>>,
    dout: &Tensor<Vector<E, N>>,
    lse: &Tensor<u32>,
    dlse: ComptimeOption<&Tensor<f32>>,
    stats: &mut [u32],
    zeroed: &mut [Vector<f32, Const<4>>],
    #[comptime] blueprint: DeltaBlueprint,
    #[define(E)] _type: ElemType,
) {
    let (head_dim_v, zeros) = comptime!((blueprint.head_dim_v, blueprint.zeros));
    let (batches, heads, seq_q) = (o.shape(0) as u32, o.shape(1) as u32, o.shape(2) as u32);
    let width = o.vector_size();
    let rows = stats_rows(seq_q, blueprint.stats_multiple, blueprint.varlen);
    let (of_row, nth) = (UNIT_POS % UNITS_PER_ROW, UNIT_POS / UNITS_PER_ROW);
    // Blocks of a head's rows are consecutive, and so are heads and batches: the rows of a thread block belong to one head.
    let blocks = rows / ROWS;
    let (head, block) = (CUBE_POS / blocks as usize, CUBE_POS % blocks as usize);
    let row = block as u32 * ROWS + nth;
    let all = (batches * heads) as usize;
    if head >= all {
        terminate!();
    }
    let (batch, of_batch) = (head / heads as usize, head % heads as usize);
    let to = head * rows as usize + row as usize;
    let vectors = comptime!(zeros.words / 4);
    #[unroll]
    for step in 0..comptime!(vectors.div_ceil(UNITS_PER_ROW as usize)) {
        let vector = comptime!(step * UNITS_PER_ROW as usize) + of_row as usize;
        if to.is_multiple_of(zeros.rows) && vector < vectors {
            zeroed[to / zeros.rows * vectors + vector] = Vector::new(0.0f32);
        }
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
                    // Elements past the last column are undefined.
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
            if let ComptimeOption::Some(dlse) = dlse {
                of_delta -= dlse[row_start(dlse, batch, of_batch, row)];
            }
            // A query that sees nothing has no gradient, whatever its output is.
            of_delta = select(of_lse == f32::MAX, 0.0f32, of_delta);
        }
        stats[to] = u32::reinterpret(of_lse);
        stats[all * rows as usize + to] = u32::reinterpret(of_delta);
    }
}
