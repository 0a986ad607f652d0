//! Parts of the keys, computed apart, put together.
//!
//! ```text
//! m = max_p lse_p      w_p = exp(lse_p − m) / Σ exp(lse_p − m)      o = Σ w_p o_p      lse = m + ln Σ exp(lse_p − m)
//! ```
//!
//! with the sink, if there is one, as one more part, of which `o = 0`. (Flash-Decoding, Dao et al. 2023.)

use super::forward::row_start;
use super::ops::{ex2, lg2, reciprocal};
use crate::extras::Extras;
use crate::softmax::{HIDDEN, lse_bits_log2, lse_of_part};
use cubecl::prelude::*;

/// Rows of a cube: one for each warp.
pub const ROWS: u32 = 4;

/// `parts [P · B, H, S, D]` in f32, in vectors of four, and the bits of their `lse [P · B, H, S]` to `o [B, H, S, D]` and the
/// bits of its `lse [B, H, S]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn merge<E: Float>(
    parts: &Tensor<Vector<f32, Const<4>>>,
    part_lse: &Tensor<u32>,
    o: &mut Tensor<E>,
    lse: &mut Tensor<u32>,
    extras: Extras,
    batches: u32,
    heads: u32,
    rows: u32,
    columns: u32,
    count: u32,
    #[define(E)] _type: ElemType,
) {
    let log2_e = comptime!(std::f32::consts::LOG2_E);
    let number = CUBE_POS as u32 * ROWS + UNIT_POS / 32;
    if number >= batches * heads * rows {
        terminate!();
    }
    let (row, head) = (number % rows, number / rows);
    let (batch, head) = (head / heads, head % heads);
    let lse_at = row_start(part_lse, batch as usize, head as usize, row);
    let o_at = row_start(parts, batch as usize, head as usize, row);
    let (lse_part, o_part) = (batches as usize * part_lse.stride(0), batches as usize * parts.stride(0));

    let sink = extras.sink(head as usize, HIDDEN.runtime());
    let mut m = sink;
    for part in 0..count as usize {
        m = max(m, lse_of_part(part_lse[lse_at + part * lse_part]));
    }
    let mut l = select(sink == HIDDEN, 0.0f32, ex2((sink - m) * log2_e));
    for part in 0..count as usize {
        l += ex2((lse_of_part(part_lse[lse_at + part * lse_part]) - m) * log2_e);
    }
    let nothing = m == HIDDEN;
    let factor = select(nothing, 0.0f32, reciprocal(l));

    let write = row_start(&*o, batch as usize, head as usize, row);
    let stride = o.stride(3);
    let lane = UNIT_POS % 32;
    let mut column = lane * 4;
    while column < columns {
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        for part in 0..count as usize {
            let weight = ex2((lse_of_part(part_lse[lse_at + part * lse_part]) - m) * log2_e) * factor;
            let of_part = parts[(o_at + part * o_part + column as usize) / 4];
            sum += of_part * Vector::<f32, Const<4>>::new(weight);
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
