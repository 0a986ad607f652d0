//! Rows of a thread, in vectors of four f32, and products with a column that all of them share.

use super::RowsTile;
use crate::mask::Band;
use crate::portable::gradient::zeros;
use crate::portable::tile::{Matrix, Vec4, WIDTH};
use crate::rounding::{rounded, rounded_one};
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

/// The `n`-th vector of a row as f32, zeros behind its last element.
#[cube]
fn read_vector<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    at: &Matrix,
    row: u32,
    n: usize,
    #[comptime] head_dim: usize,
) -> Vec4 {
    let per_read = N::value();
    let offset = at.base + row as usize * at.row_stride;
    if comptime!(per_read == WIDTH) {
        Vec4::cast_from(tensor[offset / WIDTH + n])
    } else {
        let mut value = Vec4::new(0.0f32);
        #[unroll]
        for lane in 0..WIDTH {
            if n * WIDTH + lane < head_dim {
                let element = tensor[offset + (n * WIDTH + lane) * at.column_stride];
                value.insert(lane, f32::cast_from(element.extract(0usize)));
            }
        }
        value
    }
}

/// A row as f32, zeros behind its last element.
#[cube]
pub fn read<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    at: &Matrix,
    row: u32,
    #[comptime] head_dim: usize,
) -> Array<Vec4> {
    let mut values = Array::<Vec4>::new(comptime!(vectors(head_dim)));
    #[unroll]
    for n in 0..comptime!(vectors(head_dim)) {
        values[n] = read_vector(tensor, at, row, n, head_dim);
    }
    values
}

/// The rows of this thread, one after the other. In place of rows that do not exist stands the last one.
///
/// Registers cannot be numbered at run time, so each takes what is its own of all that is read: a read for each register would
/// take compilers that make a loop of it longer than the kernel runs.
#[cube]
pub fn hold<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    at: &Matrix,
    start: u32,
    band: &Band,
    #[comptime] head_dim: usize,
    #[comptime] tile: RowsTile,
) -> Array<Vec4> {
    let registers = comptime!(tile.rows * vectors(head_dim));
    let mut held = zeros(registers);
    for register in 0..registers {
        let row = row_of(start, (register / comptime!(vectors(head_dim))) as u32, tile);
        let n = register % comptime!(vectors(head_dim));
        let value = read_vector(tensor, at, band.query_within(row), n, head_dim);
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
#[allow(clippy::too_many_arguments)]
pub fn write<F: Float, N: Size>(
    tensor: &mut Tensor<Vector<F, N>>,
    at: &Matrix,
    start: u32,
    band: &Band,
    acc: &Array<Vec4>,
    factors: &Array<f32>,
    #[comptime] head_dim: usize,
    #[comptime] tile: RowsTile,
) {
    let per_write = N::value();
    let registers = comptime!(tile.rows * vectors(head_dim));
    for register in 0..registers {
        let row = row_of(start, (register / comptime!(vectors(head_dim))) as u32, tile);
        let n = register % comptime!(vectors(head_dim));
        let mut value = Vec4::new(0.0f32);
        #[unroll]
        for own in 0..registers {
            let scaled = acc[own] * Vec4::new(factors[comptime!(own / vectors(head_dim))]);
            value = select(register == own, scaled, value);
        }
        if band.is_query(row) {
            let offset = at.base + row as usize * at.row_stride;
            if comptime!(per_write == WIDTH) {
                tensor[offset / WIDTH + n] = rounded::<F, Const<4>, N>(value);
            } else {
                #[unroll]
                for lane in 0..WIDTH {
                    if n * WIDTH + lane < head_dim {
                        let element = rounded_one::<F>(value.extract(lane));
                        tensor[offset + (n * WIDTH + lane) * at.column_stride] = Vector::<F, N>::new(element);
                    }
                }
            }
        }
    }
}
