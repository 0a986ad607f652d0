//! Rows of a head in memory, read and written four elements at a time.

use crate::e4m3::decode_word;
use crate::pages::PageTable;
use crate::rounding::{rounded, rounded_one};
use cubecl::prelude::*;

/// Elements of a vector.
pub const WIDTH: usize = 4;

/// Four elements; in f32, one 128-bit access.
pub type Quad<E> = Vector<E, Const<4>>;

/// Four f32 values.
pub type Vec4 = Quad<f32>;

/// Location of one batch and head in a tensor `[B, H, S, D]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Layout {
    /// Offset of the first element, in elements.
    pub base: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns.
    pub column_stride: usize,
}

#[cube]
impl Layout {
    /// The layout of one batch and head.
    pub fn of<E: CubePrimitive>(tensor: &Tensor<E>, batch: usize, head: usize) -> Layout {
        Layout {
            base: batch * tensor.stride(0) + head * tensor.stride(1),
            row_stride: tensor.stride(2),
            column_stride: tensor.stride(3),
        }
    }
}

/// The start of a row of a tensor `[B, H, S, …]`, in elements. The strides are read from memory.
#[cube]
pub fn row_start<T: CubePrimitive>(tensor: &Tensor<T>, batch: usize, head: usize, row: u32) -> usize {
    batch * tensor.stride(0) + head * tensor.stride(1) + row as usize * tensor.stride(2)
}

/// Keys or values as they are stored, `T` if in the element type of the queries. Nothing of the other storage is compiled into a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub enum Stored<T: CubeType> {
    /// Elements, `[B, H, S, D]`, or `[num_pages, Hkv, page_size, D]` in pages.
    Elements(T),
    /// Pages in [e4m3](mod@crate::e4m3) as words, `[num_pages, Hkv, 1, words]`.
    E4m3(Words),
}

/// A tensor of words.
pub type Words = &'static Tensor<u32>;

/// Stored rows whose elements are read in vectors.
pub type StoredRows<E, N> = Stored<&'static Tensor<Vector<E, N>>>;

impl<T: CubeType<ExpandType: Copy>> Clone for StoredExpand<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: CubeType<ExpandType: Copy>> Copy for StoredExpand<T> {}

/// Rows of a head from `start` up to, not including, `end`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Rows<E: Float, N: Size> {
    /// What they are read from.
    stored: StoredRows<E, N>,
    /// Location of the head there.
    layout: Layout,
    /// The first row.
    pub start: u32,
    /// The row after the last one that may be read: the end of the sequence.
    pub end: u32,
    /// The pages of the rows, if they are in pages.
    pages: ComptimeOption<PagesOf>,
}

/// The pages of the rows of a batch.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct PagesOf {
    table: PageTable,
    batch: usize,
    /// Elements, or words, between pages.
    stride: usize,
}

/// Where a row is.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RowAt {
    /// Its start, in elements, or in words of e4m3.
    start: usize,
    /// The scale of its page in e4m3.
    scale: ComptimeOption<f32>,
}

#[cube]
impl<E: Float, N: Size> Rows<E, N> {
    /// Rows of one batch and head.
    pub fn of(tensor: &'static Tensor<Vector<E, N>>, batch: usize, head: usize, start: u32, end: u32) -> Rows<E, N> {
        let (stored, layout) = (StoredRows::<E, N>::new_Elements(tensor), Layout::of(tensor, batch, head));
        Rows::<E, N> { stored, layout, start, end, pages: ComptimeOption::new_None() }
    }

    /// Rows of keys of one batch and head, which may be in pages.
    pub fn of_keys(
        stored: StoredRows<E, N>,
        pages: ComptimeOption<PageTable>,
        batch: usize,
        head: usize,
        start: u32,
        end: u32,
    ) -> Rows<E, N> {
        if comptime!(pages.is_some()) {
            let (layout, stride) = match stored {
                Stored::Elements(tensor) => (Layout::of(tensor, 0usize, head), tensor.stride(0)),
                Stored::E4m3(words) => (Layout::of(words, 0usize, head), words.stride(0)),
            };
            let pages = PagesOf { table: pages.unwrap(), batch, stride };
            Rows::<E, N> { stored, layout, start, end, pages: ComptimeOption::new_Some(pages) }
        } else {
            let layout = match stored {
                Stored::Elements(tensor) => Layout::of(tensor, batch, head),
                Stored::E4m3(words) => Layout::of(words, batch, head),
            };
            Rows::<E, N> { stored, layout, start, end, pages: ComptimeOption::new_None() }
        }
    }

    /// Where a row is that exists.
    pub fn at(&self, row: u32, #[comptime] head_dim: usize) -> RowAt {
        match self.stored {
            Stored::Elements(_) => {
                let start = if comptime!(self.pages.is_some()) {
                    let pages = self.pages.unwrap();
                    let place = pages.table.place(pages.batch, row);
                    self.layout.base + place.batch * pages.stride + place.row as usize * self.layout.row_stride
                } else {
                    self.layout.base + row as usize * self.layout.row_stride
                };
                RowAt { start, scale: ComptimeOption::new_None() }
            }
            Stored::E4m3(words) => {
                let pages = self.pages.unwrap();
                let place = pages.table.place(pages.batch, row);
                let page = self.layout.base + place.batch * pages.stride;
                let scale = f32::reinterpret(words[page + pages.table.scale_at(head_dim)]);
                let start = page + place.row as usize * comptime!(head_dim / WIDTH);
                RowAt { start, scale: ComptimeOption::new_Some(scale) }
            }
        }
    }

    /// Reads four elements of a row from `column` on. Elements beyond `head_dim`, and rows from `end` on, are zeros.
    pub fn read(&self, row: u32, column: usize, #[comptime] head_dim: usize) -> Quad<E> {
        let mut value = Quad::<E>::new(E::from_int(0));
        if row < self.end && column < head_dim {
            value = self.read_within(row, column, head_dim);
        }
        value
    }

    /// Reads four elements of a row from `column` on; the row and that column must exist.
    pub fn read_within(&self, row: u32, column: usize, #[comptime] head_dim: usize) -> Quad<E> {
        self.read_at(&self.at(row, head_dim), column, head_dim)
    }

    /// Reads four elements from `column` on, which must exist.
    pub fn read_at(&self, row: &RowAt, column: usize, #[comptime] head_dim: usize) -> Quad<E> {
        match self.stored {
            Stored::Elements(tensor) => {
                let width = N::value();
                if comptime!(width == WIDTH) {
                    Quad::<E>::cast_from(tensor[(row.start + column) / WIDTH])
                } else {
                    let mut value = Quad::<E>::new(E::from_int(0));
                    #[unroll]
                    for n in 0..WIDTH {
                        if column + n < head_dim {
                            let element = tensor[row.start + (column + n) * self.layout.column_stride];
                            value.insert(n, element.extract(0usize));
                        }
                    }
                    value
                }
            }
            Stored::E4m3(words) => {
                let word = words[row.start + column / WIDTH];
                Quad::<E>::cast_from(decode_word(word, row.scale.unwrap()))
            }
        }
    }
}

/// Writes four elements of a row that exists, rounded to the element type. Elements beyond `head_dim` are dropped.
#[cube]
pub fn write_quad<E: Float, N: Size>(
    tensor: &mut Tensor<Vector<E, N>>,
    layout: &Layout,
    row: u32,
    column: usize,
    value: Vec4,
    #[comptime] head_dim: usize,
) {
    let width = N::value();
    let offset = layout.base + row as usize * layout.row_stride;
    if comptime!(width == WIDTH) {
        if column < head_dim {
            tensor[(offset + column) / WIDTH] = rounded::<E, Const<4>, N>(value);
        }
    } else {
        #[unroll]
        for n in 0..WIDTH {
            if column + n < head_dim {
                let element = rounded_one::<E>(value.extract(n));
                tensor[offset + (column + n) * layout.column_stride] = Vector::<E, N>::new(element);
            }
        }
    }
}

/// An array of `len` equal elements, in registers.
#[cube]
pub fn filled<T: CubePrimitive>(value: T, #[comptime] len: usize) -> Array<T> {
    let mut all = Array::<T>::new(len);
    #[unroll]
    for n in 0..len {
        all[n] = value;
    }
    all
}

/// An array of `len` zero vectors, in registers.
#[cube]
pub fn zeros(#[comptime] len: usize) -> Array<Vec4> {
    filled::<Vec4>(Vec4::new(0.0f32), len)
}
