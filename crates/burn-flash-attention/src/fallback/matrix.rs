//! Rows of tensors, and matrix products.

use super::math::{self, vectorized};

/// `[batch, heads, seq, dim]`, contiguous.
pub struct Rows<'a> {
    data: &'a [f32],
    heads: usize,
    seq: usize,
    dim: usize,
}

/// Consecutive rows of one head.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    pub data: &'a [f32],
    pub dim: usize,
}

impl<'a> Rows<'a> {
    pub fn new(data: &'a [f32], [_, heads, seq, dim]: [usize; 4]) -> Self {
        Rows { data, heads, seq, dim }
    }

    /// `rows` rows of a head, from row `start` on.
    pub fn block(&self, b: usize, h: usize, start: usize, rows: usize) -> Block<'a> {
        let first = (b * self.heads + h) * self.seq + start;
        Block { data: &self.data[first * self.dim..][..rows * self.dim], dim: self.dim }
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
    // For so few rows, as in decoding, packing `b` for the matrix routine costs more than it saves.
    const FEW: usize = 4;
    let (m, n) = (a.rows, b.cols);
    assert!(a.cols == b.rows && c.len() >= m * n, "the shapes of a matrix product must match");
    if m <= FEW && a.col_stride == 1 {
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

/// `multiply` for few rows, one row of `a` at a time.
#[inline(always)]
fn multiply_rows(c: &mut [f32], add: bool, scale: f32, a: Matrix, b: Matrix) {
    for (c, a) in c.chunks_exact_mut(b.cols).zip(a.data.chunks_exact(a.cols)) {
        if !add {
            c.fill(0.0);
        }
        if b.col_stride == 1 {
            // Four rows of `b` at a time, so that `c` is loaded and stored once for all four.
            let weights = a.chunks(4).map(|a| std::array::from_fn(|n| a.get(n).map_or(0.0, |a| scale * a)));
            for (weights, rows) in weights.zip(b.data.chunks(4 * b.cols)) {
                add_rows(c, weights, rows);
            }
        } else {
            for (c, b) in c.iter_mut().zip(b.data.chunks_exact(b.rows)) {
                *c += scale * math::dot(a, b);
            }
        }
    }
}

/// `c += Σ weight · row`, over at most four rows.
#[inline(always)]
fn add_rows(c: &mut [f32], weights: [f32; 4], rows: &[f32]) {
    let n = c.len();
    if rows.len() == 4 * n {
        let ([r0, r1], [r2, r3]) = ([0, 1].map(|r| &rows[r * n..][..n]), [2, 3].map(|r| &rows[r * n..][..n]));
        for i in 0..n {
            c[i] += (weights[0] * r0[i] + weights[1] * r1[i]) + (weights[2] * r2[i] + weights[3] * r3[i]);
        }
    } else {
        for (weight, row) in weights.iter().zip(rows.chunks_exact(n)) {
            c.iter_mut().zip(row).for_each(|(c, x)| *c += weight * x);
        }
    }
}
