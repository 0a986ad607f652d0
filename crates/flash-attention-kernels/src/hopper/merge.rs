//! Parts of the keys, computed apart, put together.
//!
//! ```text
//! m = max_p lse_p      w_p = exp(lse_p − m) / Σ exp(lse_p − m)      o = Σ w_p o_p      lse = m + ln Σ exp(lse_p − m)
//! ```
//!
//! (Flash-Decoding, Dao et al. 2023.)

use super::ops::{ex2, lg2, reciprocal};
use crate::softmax::{HIDDEN, lse_bits_log2, lse_of_part};
use cubecl::prelude::*;

/// `parts [P · B, H, S, D]` in f32 and the bits of their `lse [P · B, H, S]` to `o [B, H, S, D]` and the bits of its
/// `lse [B, H, S]`; one cube for each row.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn merge<E: Float>(
    parts: &Tensor<f32>,
    part_lse: &Tensor<u32>,
    o: &mut Tensor<E>,
    lse: &mut Tensor<u32>,
    batches: u32,
    heads: u32,
    rows: u32,
    columns: u32,
    count: u32,
    #[define(E)] _type: ElemType,
) {
    let log2_e = comptime!(std::f32::consts::LOG2_E);
    if CUBE_POS as u32 >= batches * heads * rows {
        terminate!();
    }
    let row = CUBE_POS as u32 % rows;
    let head = CUBE_POS as u32 / rows;
    let batch = head / heads;
    let head = head % heads;
    let lse_at =
        batch as usize * part_lse.stride(0) + head as usize * part_lse.stride(1) + row as usize * part_lse.stride(2);
    let o_at = batch as usize * parts.stride(0) + head as usize * parts.stride(1) + row as usize * parts.stride(2);

    let mut m = HIDDEN.runtime();
    for part in 0..count {
        m = max(m, lse_of_part(part_lse[lse_at + (part * batches) as usize * part_lse.stride(0)]));
    }
    let mut l = 0.0f32.runtime();
    for part in 0..count {
        l += ex2((lse_of_part(part_lse[lse_at + (part * batches) as usize * part_lse.stride(0)]) - m) * log2_e);
    }
    let nothing = m == HIDDEN;
    let factor = select(nothing, 0.0f32, reciprocal(l));

    let write = batch as usize * o.stride(0) + head as usize * o.stride(1) + row as usize * o.stride(2);
    let stride = o.stride(3);
    let mut column = UNIT_POS;
    while column < columns {
        let mut sum = 0.0f32.runtime();
        for part in 0..count {
            let of_batch = (part * batches) as usize;
            let weight = ex2((lse_of_part(part_lse[lse_at + of_batch * part_lse.stride(0)]) - m) * log2_e) * factor;
            sum += weight * parts[o_at + of_batch * parts.stride(0) + column as usize];
        }
        o[write + column as usize * stride] = E::cast_from(sum);
        column += CUBE_DIM;
    }
    if UNIT_POS == 0 {
        let seen = select(nothing, 0.0f32, l);
        let at = batch as usize * lse.stride(0) + head as usize * lse.stride(1) + row as usize * lse.stride(2);
        lse[at] = lse_bits_log2(m * log2_e, seen, lg2(l));
    }
}
