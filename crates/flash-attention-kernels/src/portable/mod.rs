//! Exact attention on any CubeCL device: fused multiply-adds, shared memory, barriers, and nothing else.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod dbias;
pub mod delta;
pub mod dkdv;
pub mod dq;
pub mod dsinks;
pub mod forward;
pub mod gradient;
pub mod nothing;
pub mod scores;
pub mod tile;

use crate::extras::Extras;
use crate::mask::Band;
use crate::score::Factor;
use cubecl::prelude::*;
use serde::Serialize;
use tile::TileShape;

/// What the portable kernels are specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// Shapes of tiles.
    pub tile: TileShape,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// What gradients of scores are multiplied by.
    pub factor: Factor,
    /// Whether a mask or a function can hide pairs.
    pub mask: bool,
    /// Whether there is an additive bias.
    pub bias: bool,
    /// Whether factors of scores are rounded to tf32.
    pub tf32: bool,
}

impl Blueprint {
    /// Length of the array of factors; 1 where there is none, as no array is empty.
    pub fn factors(&self) -> usize {
        if self.factor != Factor::One { self.tile.micro_q() * self.tile.micro_k() } else { 1 }
    }
}

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
