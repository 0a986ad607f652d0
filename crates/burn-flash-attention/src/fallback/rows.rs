//! Rows of tensors, read as f32.

use super::cache::Pages;
use super::math::vectorized;
use super::matrix::Matrix;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements of a tensor, in its own dtype.
#[derive(Clone, Copy)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    /// Those of pages, whose rows lie anywhere.
    Pages(&'a Pages),
}

/// `[batch, heads, seq, dim]`: a slice of f32, or [`Elements`]. The rows of a head lie one after the other, and heads anywhere.
pub struct Rows<T> {
    elements: T,
    /// Distance between neighbours along the batch and the heads.
    strides: [usize; 2],
    dim: usize,
}

/// Consecutive rows, dense and in f32.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    pub data: &'a [f32],
    pub dim: usize,
}

impl<T> Rows<T> {
    /// Rows of `dim` elements, from the first of `elements` on.
    pub fn new(elements: T, strides: [usize; 2], dim: usize) -> Self {
        Rows { elements, strides, dim }
    }

    /// Rows of a contiguous tensor of this shape.
    pub fn contiguous(elements: T, [_, heads, seq, dim]: [usize; 4]) -> Self {
        Rows::new(elements, [heads * seq * dim, seq * dim], dim)
    }

    /// Place of the first element of a row.
    fn place(&self, b: usize, h: usize, row: usize) -> usize {
        b * self.strides[0] + h * self.strides[1] + row * self.dim
    }
}

impl<'a> Rows<&'a [f32]> {
    /// `rows` rows of a head, from row `start` on.
    pub fn block(&self, b: usize, h: usize, start: usize, rows: usize) -> Block<'a> {
        Block { data: &self.elements[self.place(b, h, start)..][..rows * self.dim], dim: self.dim }
    }
}

impl<'a> Rows<Elements<'a>> {
    /// `rows` rows of a head, from row `start` on: f32 where it lies, all else widened into `wide`.
    pub fn widened<'s>(&self, b: usize, h: usize, start: usize, rows: usize, wide: &'s mut Vec<f32>) -> Block<'s>
    where
        'a: 's,
    {
        let len = rows * self.dim;
        let data = match self.elements {
            Elements::F32(data) => &data[self.place(b, h, start)..][..len],
            _ => {
                if wide.len() < len {
                    wide.resize(len, 0.0);
                }
                self.widen(b, h, start, &mut wide[..len]);
                &wide[..len]
            }
        };
        Block { data, dim: self.dim }
    }

    /// Writes the rows of a head from `start` on to `to`.
    pub fn widen(&self, b: usize, h: usize, start: usize, to: &mut [f32]) {
        match self.elements {
            Elements::Pages(pages) => pages.read(b, h, start, to),
            elements => elements.widen(self.place(b, h, start), to),
        }
    }
}

impl Elements<'_> {
    /// Writes the elements from `first` on to `to`, in f32.
    pub fn widen(self, first: usize, to: &mut [f32]) {
        match self {
            Elements::Pages(_) => unreachable!("pages are read by sequence and position"),
            Elements::F32(data) => to.copy_from_slice(&data[first..][..to.len()]),
            Elements::F16(data) => data[first..][..to.len()].convert_to_f32_slice(to),
            // The function for slices branches at every NaN.
            Elements::BF16(data) => vectorized(
                #[inline(always)]
                || {
                    to.iter_mut()
                        .zip(&data[first..])
                        .for_each(|(to, x)| *to = f32::from_bits(u32::from(x.to_bits()) << 16))
                },
            ),
        }
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
