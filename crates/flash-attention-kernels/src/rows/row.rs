//! Rows of a thread in vectors of four f32, and their products with a column that they share.

use super::RowsTile;
use crate::fragment::{Block, Layout, Rows, Vec4, WIDTH, write_quad, zeros};
use cubecl::prelude::*;

/// Vectors in a row of `head_dim` elements.
pub fn vectors(head_dim: usize) -> usize {
    head_dim.div_ceil(WIDTH)
}

/// The `nth` row of this thread. Neighbouring threads have neighbouring rows.
#[cube]
pub fn row_of(start: u32, nth: u32, #[comptime] tile: RowsTile) -> u32 {
    start + nth * comptime!(tile.units as u32) + UNIT_POS
}

/// Reads a row as f32, padded with zeros.
#[cube]
pub fn read<F: Float, N: Size>(rows: &Rows<F, N>, row: u32, #[comptime] head_dim: usize) -> Array<Vec4> {
    let mut values = Array::<Vec4>::new(comptime!(vectors(head_dim)));
    let at = rows.at(row, head_dim);
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        values[n] = Vec4::cast_from(rows.read_at(&at, comptime!(n * WIDTH).runtime(), head_dim));
    }
    values
}

/// Reads the rows of this thread, one after the other. Rows after `last` are replaced by `last`.
///
/// Registers cannot be indexed at run time. In each step of the loop one vector is read, and every register selects whether to take it.
/// With a separate read for each register, compilers that turn each read into a loop would take longer than the kernel runs.
#[cube]
pub fn hold<F: Float, N: Size>(
    rows: &Rows<F, N>,
    last: u32,
    #[comptime] head_dim: usize,
    #[comptime] tile: RowsTile,
) -> Array<Vec4> {
    let registers = comptime!(tile.rows * vectors(head_dim));
    let mut held = zeros(registers);
    for register in 0..registers {
        let row = row_of(rows.start, (register / comptime!(vectors(head_dim))) as u32, tile);
        let n = register % comptime!(vectors(head_dim));
        let value = Vec4::cast_from(rows.read_within(min(row, last), n * WIDTH, head_dim));
        #[unroll]
        for own in 0..registers {
            held[own] = select(register == own, value, held[own]);
        }
    }
    held
}

/// Product of the `nth` row of `held` with a column.
#[cube]
pub fn dot(held: &Array<Vec4>, column: &Array<Vec4>, #[comptime] nth: usize, #[comptime] head_dim: usize) -> f32 {
    // Four partial sums, so that additions need not wait for each other.
    let mut sums = Vec4::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        sums = fma(held[comptime!(nth * vectors(head_dim) + n)], column[n], sums);
    }
    (sums.extract(0usize) + sums.extract(1usize)) + (sums.extract(2usize) + sums.extract(3usize))
}

/// Adds `factor` times a column to the `nth` accumulated row. `careful`: a factor of 0 adds nothing, even if the column is not finite.
#[cube]
pub fn add(
    acc: &mut Array<Vec4>,
    factor: f32,
    column: &Array<Vec4>,
    #[comptime] nth: usize,
    #[comptime] head_dim: usize,
    #[comptime] careful: bool,
) {
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        let sum = acc[comptime!(nth * vectors(head_dim) + n)];
        let added = fma(Vec4::new(factor), column[n], sum);
        acc[comptime!(nth * vectors(head_dim) + n)] =
            if comptime!(careful) { select(factor == 0.0f32, sum, added) } else { added };
    }
}

/// Multiplies the `nth` accumulated row by `factor`.
#[cube]
pub fn scale(acc: &mut Array<Vec4>, factor: f32, #[comptime] nth: usize, #[comptime] head_dim: usize) {
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        acc[comptime!(nth * vectors(head_dim) + n)] *= Vec4::new(factor);
    }
}

/// Writes the accumulated rows that exist, each multiplied by its factor.
#[cube]
pub fn write<F: Float, N: Size>(
    tensor: &mut Tensor<Vector<F, N>>,
    block: &Block,
    acc: &Array<Vec4>,
    factors: &Array<f32>,
    #[comptime] head_dim: usize,
    #[comptime] tile: RowsTile,
) {
    let layout = Layout::of(&*tensor, block.batch, block.head);
    let registers = comptime!(tile.rows * vectors(head_dim));
    for register in 0..registers {
        let row = row_of(block.start, (register / comptime!(vectors(head_dim))) as u32, tile);
        let n = register % comptime!(vectors(head_dim));
        let mut value = Vec4::new(0.0f32);
        #[unroll]
        for own in 0..registers {
            let scaled = acc[own] * Vec4::new(factors[comptime!(own / vectors(head_dim))]);
            value = select(register == own, scaled, value);
        }
        if row < block.end {
            write_quad(tensor, &layout, row, n * WIDTH, value, head_dim);
        }
    }
}
