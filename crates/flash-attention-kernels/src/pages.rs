//! Keys and values in pages: blocks of memory that each hold as many positions of one sequence, in any order (PagedAttention,
//! arXiv:2309.06180, section 4).
//!
//! A pool is `k [pages, Hkv, page_size, D]` and `v [pages, Hkv, page_size, Dv]`. A page table has the page of each block of `page_size`
//! positions of a sequence. Kernels compute with positions. Only where they read a key do they look its page up, which takes the place of
//! the batch.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::cache::CachedKeysValues;
use crate::fragment::row_start;
use cubecl::prelude::*;

/// The pages of all sequences of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PageTable {
    /// Pages `[B, max_pages]`.
    pub pages: &'static [u32],
    /// Distance from one sequence to the next.
    pub sequence_stride: usize,
    /// Distance from one page of a sequence to the next.
    pub page_stride: usize,
    /// Number of pages of the pool.
    pub num_pages: u32,
    /// Positions of a page.
    #[cube(comptime)]
    pub page_size: u32,
}

/// Where the row of a key is in a tensor `[batch or page, Hkv, row, D]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct KeyPlace {
    /// Batch, or page.
    pub batch: usize,
    /// Row.
    pub row: u32,
}

#[cube]
impl PageTable {
    /// The page of a position, as the table has it.
    pub fn page(&self, batch: usize, position: u32) -> u32 {
        let nth = (position / comptime!(self.page_size)) as usize;
        self.pages[batch * self.sequence_stride + nth * self.page_stride]
    }

    /// Where a key is. A page that does not exist counts as the last one.
    pub fn place(&self, batch: usize, key: u32) -> KeyPlace {
        let page = min(self.page(batch, key), self.num_pages - 1);
        KeyPlace { batch: page as usize, row: key % comptime!(self.page_size) }
    }
}

/// Copies whole pages of keys and values to others. `pairs [n, 2]` has the pages that are copied, each with the page that it is copied to;
/// a pair with a page that does not exist copies nothing. No page is copied to that another pair names. A thread copies a vector of K or
/// of V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn copy_pages<E: Float, N: Size>(pool: CachedKeysValues<E, N>, pairs: &Tensor<u32>, #[define(E)] _type: ElemType) {
    let width = N::value();
    let (heads, rows) = (pool.k.shape(1), pool.k.shape(2));
    let (of_k, of_v) = (pool.k.shape(3) / width, pool.v.shape(3) / width);
    let row = ABSOLUTE_POS / (of_k + of_v);
    let column = ABSOLUTE_POS % (of_k + of_v);
    let (head, row) = (row / rows, row % rows);
    let (pair, head) = (head / heads, head % heads);
    if pair >= pairs.shape(0) {
        terminate!();
    }
    let at = pair * pairs.stride(0);
    let (from, to) = (pairs[at] as usize, pairs[at + pairs.stride(1)] as usize);
    if from < pool.k.shape(0) && to < pool.k.shape(0) {
        if column < of_k {
            let at = row_start(&*pool.k, 0usize, head, row as u32) + column * width * pool.k.stride(3);
            copy_vector(pool.k, from, to, at);
        } else {
            let column = column - of_k;
            let at = row_start(&*pool.v, 0usize, head, row as u32) + column * width * pool.v.stride(3);
            copy_vector(pool.v, from, to, at);
        }
    }
}

/// Copies the vector at element `at` of a page to the same place of another page.
#[cube]
fn copy_vector<E: Float, N: Size>(tensor: &mut Tensor<Vector<E, N>>, from: usize, to: usize, at: usize) {
    let (width, stride) = (N::value(), tensor.stride(0));
    let copied = tensor[(from * stride + at) / width];
    tensor[(to * stride + at) / width] = copied;
}
