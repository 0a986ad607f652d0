//! Packed copies of tensors whose rows do not start at multiples of 16 bytes, and which neither TMA nor 16-byte vectors can
//! read.

use crate::fragment::row_start;
use cubecl::prelude::*;

/// Copies `from` to `to`, both `[B, H, S, D]`, and sets the columns of `to` from `columns` up to `padded` to 0, because rows
/// are read in vectors. Each thread block copies one row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn copy<E: Float>(
    from: &Tensor<E>,
    to: &mut Tensor<E>,
    batches: u32,
    heads: u32,
    rows: u32,
    columns: u32,
    padded: u32,
    #[define(E)] _type: ElemType,
) {
    if CUBE_POS as u32 >= batches * heads * rows {
        terminate!();
    }
    let row = CUBE_POS as u32 % rows;
    let head = CUBE_POS as u32 / rows;
    let batch = head / heads;
    let head = head % heads;
    let mut column = UNIT_POS;
    let read = row_start(from, batch as usize, head as usize, row);
    let write = row_start(&*to, batch as usize, head as usize, row);
    let stride = to.stride(3);
    while column < padded {
        let mut value = E::from_int(0);
        if column < columns {
            value = from[read + column as usize * from.stride(3)];
        }
        to[write + column as usize * stride] = value;
        column += CUBE_DIM;
    }
}
