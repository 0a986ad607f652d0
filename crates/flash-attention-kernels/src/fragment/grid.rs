//! Which thread block computes which block of rows.

use crate::extras::Extras;
use crate::mask::Band;
use cubecl::prelude::*;

/// How thread blocks are numbered: block, then head, then batch; of several sequences, blocks are those of their schedule, of all batches.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Grid {
    /// Blocks of queries or of keys in a head.
    pub blocks: u32,
    /// Heads of `q`, or of `k`, whichever the kernel walks over.
    pub heads: u32,
    /// Batches.
    pub batches: u32,
    /// Query heads that share a key/value head.
    pub group_size: u32,
}

/// Where a thread block stands.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Position {
    /// The block.
    pub block: u32,
    /// The head.
    pub head: usize,
    /// The batch.
    pub batch: usize,
    /// A surplus thread block: grids are filled up to a product of three numbers that the device takes.
    pub is_none: bool,
}

/// A block of rows of a head, which a thread block computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Work {
    /// The first row.
    pub start: u32,
    /// The head.
    pub head: usize,
    /// The batch.
    pub batch: usize,
    /// Which positions of its sequence see each other.
    pub band: Band,
    /// There is none: no such block, or a surplus thread block.
    pub is_none: bool,
}

/// Rows of a head that a thread block writes: `start ..`, and none from `end` on.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Block {
    /// Batch.
    pub batch: usize,
    /// Head.
    pub head: usize,
    /// The first row.
    pub start: u32,
    /// The row after the last one of the sequence.
    pub end: u32,
}

#[cube]
impl Work {
    /// Its rows, which are queries or `keys`.
    pub fn rows(&self, #[comptime] keys: bool) -> Block {
        let end = if comptime!(keys) { self.band.after_keys() } else { self.band.after_queries() };
        Block { batch: self.batch, head: self.head, start: self.start, end }
    }
}

#[cube]
impl Grid {
    /// The work of the thread block at this position: blocks of so many rows, of queries or `keys`. Blocks whose rows see most, or are seen by most,
    /// go first where causal: the last queries, or the first keys.
    pub fn work(
        &self,
        position: usize,
        extras: &Extras,
        band: &Band,
        #[comptime] rows: u32,
        #[comptime] keys: bool,
    ) -> Work {
        let at = self.at(position);
        let nth = if comptime!(keys) { at.block } else { self.blocks - 1 - at.block };
        let is_none = at.is_none || at.block >= extras.blocks(self.blocks);
        let block = extras.block(select(is_none, 0u32, at.block), band, at.batch as u32, nth * rows);
        Work { start: block.start, head: at.head, batch: block.batch as usize, band: block.band, is_none }
    }

    /// Where the thread block at this position stands.
    pub fn at(&self, position: usize) -> Position {
        let of_batch = self.blocks as usize * self.heads as usize;
        let batch = position / of_batch;
        let within = position % of_batch;
        Position {
            block: (within % self.blocks as usize) as u32,
            head: within / self.blocks as usize,
            batch,
            is_none: batch >= self.batches as usize,
        }
    }
}
