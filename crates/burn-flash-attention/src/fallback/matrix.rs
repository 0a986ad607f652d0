//! Rows of tensors, and matrix products.

use super::math::vectorized;

/// `[batch, heads, seq, dim]`. The rows of a head lie one after the other, and heads anywhere.
pub struct Rows<'a> {
    data: &'a [f32],
    /// Distance between neighbours along the batch and the heads.
    strides: [usize; 2],
    dim: usize,
}

/// Consecutive rows of one head.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    pub data: &'a [f32],
    pub dim: usize,
}

impl<'a> Rows<'a> {
    /// Rows of a contiguous tensor of this shape.
    pub fn contiguous(data: &'a [f32], [_, heads, seq, dim]: [usize; 4]) -> Self {
        Rows::new(data, [heads * seq * dim, seq * dim], dim)
    }

    /// Rows of `dim` elements, from the start of `data`.
    pub fn new(data: &'a [f32], strides: [usize; 2], dim: usize) -> Self {
        Rows { data, strides, dim }
    }

    /// `rows` rows of a head, from row `start` on.
    pub fn block(&self, b: usize, h: usize, start: usize, rows: usize) -> Block<'a> {
        let first = b * self.strides[0] + h * self.strides[1] + start * self.dim;
        Block { data: &self.data[first..][..rows * self.dim], dim: self.dim }
    }
}

/// Operand of a matrix product.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    pub rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Matrix { data: &data[..rows * cols], rows, cols, row_stride: cols, col_stride: 1 }
    }

    pub fn at(&self, row: usize, col: usize) -> f32 {
        self.data[row * self.row_stride + col * self.col_stride]
    }

    pub fn transposed(self) -> Self {
        let Matrix { data, rows, cols, row_stride, col_stride } = self;
        Matrix { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

impl<'a> Block<'a> {
    pub fn matrix(self) -> Matrix<'a> {
        Matrix::new(self.data, self.data.len() / self.dim, self.dim)
    }

    pub fn transposed(self) -> Matrix<'a> {
        self.matrix().transposed()
    }
}

/// `c = scale · a · b`, or `c += scale · a · b` if `add`. `c` is row-major.
pub fn multiply(c: &mut [f32], add: bool, scale: f32, a: Matrix, b: Matrix) {
    // For so few rows, as in decoding, packing a row-major `b` for the matrix routine costs more than it saves.
    const FEW: usize = 4;
    let (m, n) = (a.rows, b.cols);
    assert!(a.cols == b.rows && c.len() >= m * n, "the shapes of a matrix product must match");
    if m <= FEW && a.col_stride == 1 && b.col_stride == 1 {
        return vectorized(
            #[inline(always)]
            || multiply_rows(c, add, scale, a, b),
        );
    }
    // SAFETY: each matrix spans `rows · cols` dense elements, row-major or column-major, and the asserts and constructors have checked that
    // they exist. `c` is borrowed mutably, so it overlaps neither.
    unsafe {
        gemm::gemm(
            m,
            n,
            a.cols,
            c.as_mut_ptr(),
            1,
            n as isize,
            add,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `multiply` for few rows, one row of `a` at a time. `b` is row-major.
#[inline(always)]
fn multiply_rows(c: &mut [f32], add: bool, scale: f32, a: Matrix, b: Matrix) {
    /// Rows of `b` at a time, so that `c` is loaded and stored once for all of them.
    const ROWS: usize = 8;
    for (c, a) in c.chunks_exact_mut(b.cols).zip(a.data.chunks_exact(a.cols)) {
        if !add {
            c.fill(0.0);
        }
        let weights = a.chunks_exact(ROWS);
        let (last, rows) = (weights.remainder(), b.data.chunks(ROWS * b.cols));
        for (weights, rows) in weights.zip(rows) {
            let weights: [f32; ROWS] = std::array::from_fn(|n| scale * weights[n]);
            let rows: [&[f32]; ROWS] = std::array::from_fn(|n| &rows[n * b.cols..][..b.cols]);
            let product = |n: usize, i: usize| weights[n] * rows[n][i];
            let two = |n: usize, i: usize| product(n, i) + product(n + 1, i);
            for (i, c) in c.iter_mut().enumerate() {
                *c += (two(0, i) + two(2, i)) + (two(4, i) + two(6, i));
            }
        }
        for (weight, row) in last.iter().zip(b.data[(a.len() - last.len()) * b.cols..].chunks_exact(b.cols)) {
            c.iter_mut().zip(row).for_each(|(c, x)| *c += scale * weight * x);
        }
    }
}
