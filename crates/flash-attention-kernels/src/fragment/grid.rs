//! Numbering of thread blocks, and the block of rows that each computes.

use crate::extras::Extras;
use crate::mask::Band;
use cubecl::prelude::*;

/// Numbering of thread blocks: the block varies fastest, then the head, then the batch. With several sequences, blocks are entries of
/// the schedule, which covers all batches.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Grid {
    /// Blocks of queries or of keys of a head.
    pub blocks: u32,
    /// Query heads, or key/value heads where the blocks are blocks of keys.
    pub heads: u32,
    /// Batches.
    pub batches: u32,
    /// Query heads that share a key/value head.
    pub group_size: u32,
}

/// Coordinates of a thread block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Position {
    /// Number of the block.
    pub block: u32,
    /// Head.
    pub head: usize,
    /// Batch.
    pub batch: usize,
    /// Whether the thread block is surplus: a grid is rounded up to a product of three sizes that the device accepts.
    pub is_none: bool,
}

/// Block of rows of a head that a thread block computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Work {
    /// First row.
    pub start: u32,
    /// Head.
    pub head: usize,
    /// Batch.
    pub batch: usize,
    /// Band of the sequence: which positions see each other.
    pub band: Band,
    /// Whether there is nothing to compute: the block does not exist, or the thread block is surplus.
    pub is_none: bool,
}

/// Rows of a head that a thread block writes, from `start` on and before `end`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Block {
    /// Batch.
    pub batch: usize,
    /// Head.
    pub head: usize,
    /// First row.
    pub start: u32,
    /// Row after the last one of the sequence.
    pub end: u32,
}

#[cube]
impl Work {
    /// The block's rows, which are queries, or keys if `keys`.
    pub fn rows(&self, #[comptime] keys: bool) -> Block {
        let end = if comptime!(keys) { self.band.after_keys() } else { self.band.after_queries() };
        Block { batch: self.batch, head: self.head, start: self.start, end }
    }
}

#[cube]
impl Grid {
    /// Work of the thread block number `position`, in blocks of `rows` queries, or keys if `keys`. The last queries or the first keys
    /// come first: under a causal mask they have the most visible pairs.
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

    /// Heads of the columns of a head's rows, from the first one up to, not including, the second number: the query heads of a
    /// key/value head if `keys`, else the key/value head of a query head.
    pub fn streams(&self, head: usize, #[comptime] keys: bool) -> (usize, usize) {
        let group_size = self.group_size as usize;
        if comptime!(keys) {
            (head * group_size, (head + 1) * group_size)
        } else {
            (head / group_size, head / group_size + 1)
        }
    }

    /// Coordinates of the thread block number `position`.
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
