//! Matrix products.

use super::few::{Dots, WeightedRows};
use pulp::Arch;

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

/// `c = scale · a · b`, or `c += scale · a · b` if `add`. `c` is row-major.
pub fn multiply(c: &mut [f32], add: bool, scale: f32, a: Matrix, b: Matrix) {
    /// Rows up to which packing `b` for the matrix routine costs more than it saves, as in decoding.
    const FEW: usize = 8;
    let (m, n) = (a.rows, b.cols);
    assert!(a.cols == b.rows && c.len() >= m * n, "the shapes of a matrix product must match");
    if m <= FEW && a.col_stride == 1 && (b.col_stride == 1 || b.row_stride == 1) {
        let c = &mut c[..m * n];
        if !add {
            c.fill(0.0);
        }
        return match b.col_stride {
            1 => Arch::new().dispatch(WeightedRows { c, scale, a: a.data, b: b.data, dim: n }),
            _ => Arch::new().dispatch(Dots { c, scale, a: a.data, b: b.data, dim: a.cols }),
        };
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
