//! Keys and values in pages: blocks of memory that each hold as many positions of one sequence, in any order (PagedAttention,
//! arXiv:2309.06180, section 4).
//!
//! A pool is `k [pages, Hkv, page_size, D]` and `v [pages, Hkv, page_size, Dv]`. A page table has the page of each block of `page_size`
//! positions of a sequence. Kernels compute with positions. Only where they read a key do they look its page up, which takes the place of
//! the batch.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

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

    /// A page of the pool. One that does not exist counts as the last one.
    pub fn existing(&self, page: u32) -> u32 {
        min(page, self.num_pages - 1)
    }

    /// Where a key is.
    pub fn place(&self, batch: usize, key: u32) -> KeyPlace {
        self.place_in(self.existing(self.page(batch, key)), key)
    }

    /// Where a key is whose page is known.
    pub fn place_in(&self, page: u32, key: u32) -> KeyPlace {
        KeyPlace { batch: page as usize, row: key % comptime!(self.page_size) }
    }

    /// Word of the scale in a page of a head in [e4m3](mod@crate::e4m3).
    pub fn scale_at(&self, #[comptime] head_dim: usize) -> comptime_type!(usize) {
        comptime!(self.page_size as usize * head_dim / 4)
    }
}
