//! Combines splits of the keys, which were computed separately.
//!
//! ```text
//! m = max_p lse_p      w_p = exp(lse_p − m) / Σ exp(lse_p − m)      o = Σ w_p o_p      lse = m + ln Σ exp(lse_p − m)
//! ```
//!
//! A sink counts as one more split with `o = 0`. (Flash-Decoding, Dao et al. 2023.)

use crate::extras::Extras;
use crate::fragment::row_start;
use crate::ptx::{ex2, lg2, reciprocal};
use crate::softmax::{HIDDEN, lse_bits_log2, lse_of_split};
use cubecl::prelude::*;

/// Rows of a thread block, one for each warp.
pub const ROWS: u32 = 4;

/// Combines `split_o [P · B, H, S, D]` in f32, in vectors of four, and the bits of `split_lse [P · B, H, S]` into `o [B, H, S,
/// D]` and the bits of `lse [B, H, S]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn combine<E: Float>(
    split_o: &Tensor<Vector<f32, Const<4>>>,
    split_lse: &Tensor<u32>,
    o: &mut Tensor<E>,
    lse: &mut Tensor<u32>,
    extras: Extras,
    #[define(E)] _type: ElemType,
) {
    let (batches, heads) = (o.shape(0) as u32, o.shape(1) as u32);
    let (rows, columns) = (o.shape(2) as u32, o.shape(3) as u32);
    let count = split_o.shape(0) / o.shape(0);
    let log2_e = comptime!(std::f32::consts::LOG2_E);
    let number = CUBE_POS as u32 * ROWS + UNIT_POS / 32;
    if number >= batches * heads * rows {
        terminate!();
    }
    let (row, head) = (number % rows, number / rows);
    let (batch, head) = (head / heads, head % heads);
    let lse_at = row_start(split_lse, batch as usize, head as usize, row);
    let o_at = row_start(split_o, batch as usize, head as usize, row);
    let (lse_split, o_split) = (batches as usize * split_lse.stride(0), batches as usize * split_o.stride(0));

    let sink = extras.sink(head as usize, HIDDEN.runtime());
    let mut m = sink;
    for split in 0..count {
        m = max(m, lse_of_split(split_lse[lse_at + split * lse_split]));
    }
    let mut l = select(sink == HIDDEN, 0.0f32, ex2((sink - m) * log2_e));
    for split in 0..count {
        l += ex2((lse_of_split(split_lse[lse_at + split * lse_split]) - m) * log2_e);
    }
    let nothing = m == HIDDEN;
    let factor = select(nothing, 0.0f32, reciprocal(l));

    let write = row_start(&*o, batch as usize, head as usize, row);
    let stride = o.stride(3);
    let lane = UNIT_POS % 32;
    let mut column = lane * 4;
    while column < columns {
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        for split in 0..count {
            let weight = ex2((lse_of_split(split_lse[lse_at + split * lse_split]) - m) * log2_e) * factor;
            let of_split = split_o[(o_at + split * o_split + column as usize) / 4];
            sum += of_split * Vector::<f32, Const<4>>::new(weight);
        }
        #[unroll]
        for e in 0..4usize {
            let column = column + comptime!(e as u32);
            if column < columns {
                o[write + column as usize * stride] = E::cast_from(sum.extract(e));
            }
        }
        column += 128;
    }
    if lane == 0 {
        let seen = select(nothing, 0.0f32, l);
        let at = row_start(&*lse, batch as usize, head as usize, row);
        lse[at] = lse_bits_log2(m * log2_e, seen, lg2(l));
    }
}
