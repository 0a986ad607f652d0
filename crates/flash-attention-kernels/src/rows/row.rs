//! Rows of a thread, in vectors of four f32, and products with a column that all of them share.

use super::RowsTile;
use crate::fragment::grid::Block;
use crate::fragment::rows::{Layout, Rows, Vec4, WIDTH, write_quad, zeros};
use cubecl::prelude::*;

/// Vectors of a row.
pub fn vectors(head_dim: usize) -> usize {
    head_dim.div_ceil(WIDTH)
}

/// The `nth` row of this thread. Neighbouring threads have neighbouring rows.
#[cube]
pub fn row_of(start: u32, nth: u32, #[comptime] tile: RowsTile) -> u32 {
    start + nth * comptime!(tile.units as u32) + UNIT_POS
}

/// A row as f32, zeros behind its last element.
#[cube]
pub fn read<F: Float, N: Size>(rows: &Rows<F, N>, row: u32, #[comptime] head_dim: usize) -> Array<Vec4> {
    let mut values = Array::<Vec4>::new(comptime!(vectors(head_dim)));
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        values[n] = Vec4::cast_from(rows.read_within(row, comptime!(n * WIDTH).runtime(), head_dim));
    }
    values
}

/// The rows of this thread, one after the other. In place of rows that do not exist stands the last one, `last`.
///
/// Registers cannot be numbered at run time, so each takes what is its own of all that is read: a read for each register would
/// take compilers that make a loop of it longer than the kernel runs.
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

/// The product of the `nth` of the rows that are held with a column.
#[cube]
pub fn dot(held: &Array<Vec4>, column: &Array<Vec4>, #[comptime] nth: usize, #[comptime] head_dim: usize) -> f32 {
    // Four sums, so that additions need not wait for each other.
    let mut sums = Vec4::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        sums = fma(held[comptime!(nth * vectors(head_dim) + n)], column[n], sums);
    }
    (sums.extract(0usize) + sums.extract(1usize)) + (sums.extract(2usize) + sums.extract(3usize))
}

/// Adds a column times `factor` to the `nth` of the rows that are added up. `careful`: a factor of zero adds nothing.
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
        if comptime!(careful) {
            acc[comptime!(nth * vectors(head_dim) + n)] = select(factor == 0.0f32, sum, added);
        } else {
            acc[comptime!(nth * vectors(head_dim) + n)] = added;
        }
    }
}

/// Multiplies the `nth` of the rows that are added up.
#[cube]
pub fn scale(acc: &mut Array<Vec4>, factor: f32, #[comptime] nth: usize, #[comptime] head_dim: usize) {
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        acc[comptime!(nth * vectors(head_dim) + n)] *= Vec4::new(factor);
    }
}

/// Writes the rows that were added up, each times its factor, those that exist.
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
