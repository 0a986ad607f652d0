//! Order in which thread blocks compute the blocks of the bias.

use super::super::BiasTile;
use crate::mask::{Band, Blocks};
use crate::tensor_core::Divisor;
use cubecl::prelude::*;

/// Numbering of the blocks in which the band shows something: by matrix of the bias, block of queries, block of keys.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct DbiasScheduler {
    /// Number of blocks, below 2^31.
    pub num_tiles: u32,
    /// Number of matrices of the bias: its batches times its heads.
    pub matrices: u32,
    /// Number of blocks of queries.
    pub q_blocks: Divisor,
    /// Number of blocks of keys.
    pub k_blocks: Divisor,
    /// Number of heads of the bias.
    pub heads: Divisor,
    /// Number of batches that share a matrix.
    pub group_batches: u32,
    /// Number of heads that share a matrix.
    pub group_heads: Divisor,
    /// Number of query heads that share a key/value head.
    pub group_size: Divisor,
    /// Batch size.
    pub batches: u32,
    /// Number of heads of `q` in a batch.
    pub num_heads_q: u32,
}

/// A block of the bias.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq)]
#[expand(derive(Clone))]
pub struct Block {
    /// Number of the matrix, `batch · heads + head`.
    pub matrix: u32,
    /// Number of the block of queries.
    pub row: u32,
    /// Number of the block of keys, among those that the queries see.
    pub nth: u32,
}

impl DbiasScheduler {
    /// The scheduler for a bias `[bias_batch, bias_heads, Sq, Sk]` and queries of `[batch, num_heads_q]`.
    pub fn new(
        band: &Band,
        tile: BiasTile,
        [bias_batch, bias_heads]: [usize; 2],
        [batch, num_heads_q, num_heads_kv]: [usize; 3],
    ) -> Self {
        let (tile_q, block_k) = (BiasTile::TILE_Q as u32, tile.block_k() as u32);
        let q_blocks = band.seq_q.div_ceil(tile_q);
        let matrices = (bias_batch * bias_heads) as u32;
        let seen = |row| band.k_blocks(row * tile_q, tile_q, block_k).count();
        DbiasScheduler {
            num_tiles: matrices * (0..q_blocks).map(seen).sum::<u32>(),
            matrices,
            q_blocks: Divisor::new(q_blocks),
            k_blocks: Divisor::new(band.seq_k.div_ceil(block_k)),
            heads: Divisor::new(bias_heads as u32),
            group_batches: (batch / bias_batch) as u32,
            group_heads: Divisor::new((num_heads_q / bias_heads) as u32),
            group_size: Divisor::new((num_heads_q / num_heads_kv) as u32),
            batches: batch as u32,
            num_heads_q: num_heads_q as u32,
        }
    }

    /// The launch argument.
    pub fn into_launch(self) -> DbiasSchedulerLaunch {
        DbiasSchedulerLaunch::new(
            self.num_tiles,
            self.matrices,
            self.q_blocks.into_launch(),
            self.k_blocks.into_launch(),
            self.heads.into_launch(),
            self.group_batches,
            self.group_heads.into_launch(),
            self.group_size.into_launch(),
            self.batches,
            self.num_heads_q,
        )
    }
}

#[cube]
impl DbiasScheduler {
    /// The blocks of keys in which a block of queries sees anything.
    pub fn seen(&self, band: &Band, row: u32, #[comptime] tile: BiasTile) -> Blocks {
        let tile_q = comptime!(BiasTile::TILE_Q as u32);
        band.k_blocks(row * tile_q, tile_q, comptime!(tile.block_k() as u32))
    }

    /// The block `by` places after this one. It must exist.
    pub fn after(&self, block: &Block, by: u32, band: &Band, #[comptime] tile: BiasTile) -> Block {
        let mut matrix = block.matrix;
        let mut row = block.row;
        let mut nth = block.nth + by;
        if comptime!(band.bounded_above || band.bounded_below) {
            // The loop passes at most as many blocks as all thread blocks take at a time.
            let mut count = self.seen(band, row, tile).count();
            while nth >= count {
                nth -= count;
                row += 1;
                if row == self.q_blocks.divisor {
                    row = 0u32;
                    matrix += 1;
                }
                count = self.seen(band, row, tile).count();
            }
        } else {
            row += self.k_blocks.divide(nth);
            nth = self.k_blocks.modulo(nth);
            matrix += self.q_blocks.divide(row);
            row = self.q_blocks.modulo(row);
        }
        Block { matrix, row, nth }
    }
}
