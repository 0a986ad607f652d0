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
    let (batch, head) = (head / heads, head % heads);
    let lse_at = at(part_lse, batch, head, row);
    let o_at = at(parts, batch, head, row);
    let (lse_part, o_part) = (batches as usize * part_lse.stride(0), batches as usize * parts.stride(0));

    let mut m = HIDDEN.runtime();
    for part in 0..count as usize {
        m = max(m, lse_of_part(part_lse[lse_at + part * lse_part]));
    }
    let mut l = 0.0f32.runtime();
    for part in 0..count as usize {
        l += ex2((lse_of_part(part_lse[lse_at + part * lse_part]) - m) * log2_e);
    }
    let nothing = m == HIDDEN;
    let factor = select(nothing, 0.0f32, reciprocal(l));

    let write = at(&*o, batch, head, row);
    let stride = o.stride(3);
    let mut column = UNIT_POS;
    while column < columns {
        let mut sum = 0.0f32.runtime();
        for part in 0..count as usize {
            let weight = ex2((lse_of_part(part_lse[lse_at + part * lse_part]) - m) * log2_e) * factor;
            sum += weight * parts[o_at + part * o_part + column as usize];
        }
        o[write + column as usize * stride] = E::cast_from(sum);
        column += CUBE_DIM;
    }
    if UNIT_POS == 0 {
        let seen = select(nothing, 0.0f32, l);
        let at = at(&*lse, batch, head, row);
        lse[at] = lse_bits_log2(m * log2_e, seen, lg2(l));
    }
}

/// Where a row starts.
#[cube]
fn at<T: CubePrimitive>(tensor: &Tensor<T>, batch: u32, head: u32, row: u32) -> usize {
    batch as usize * tensor.stride(0) + head as usize * tensor.stride(1) + row as usize * tensor.stride(2)
}
