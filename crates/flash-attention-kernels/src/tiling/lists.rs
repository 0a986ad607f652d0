//! Sizes of the lists of a block mask, and checks that kernels can address every entry.

use super::{Case, cube_count};
use crate::blocks::{HEADER, TileSize};
use crate::error::{AttentionError, Result};
use crate::problem::AttentionProblem;

/// Shape of the lists that a kernel uses: blocks of `rows` queries, or of keys if `keys`, and tiles of `columns` columns of the
/// other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListShape {
    /// Whether rows are keys.
    pub keys: bool,
    /// Rows of a block.
    pub rows: usize,
    /// Columns of a tile.
    pub columns: usize,
}

impl ListShape {
    /// The size as a kernel parameter.
    pub fn size(self) -> TileSize {
        TileSize { rows: self.rows as u32, columns: self.columns as u32, keys: self.keys }
    }

    /// `[batch | 1, num_heads_q | 1, blocks, HEADER + tiles]` words; `None` without a block mask.
    pub fn shape(self, problem: &AttentionProblem) -> Option<[usize; 4]> {
        let mask = problem.block_mask?;
        let (along, across) = if self.keys { (problem.seq_k, problem.seq_q) } else { (problem.seq_q, problem.seq_k) };
        // With lengths, each batch has its own lists.
        let batch = if problem.is_varlen() { problem.batch } else { mask.blocks[0] };
        Some([batch, mask.blocks[1], along.div_ceil(self.rows), HEADER + across.div_ceil(self.columns).max(1)])
    }

    /// Total number of words; 0 without a block mask.
    pub fn len(self, problem: &AttentionProblem) -> u64 {
        self.shape(problem).map_or(0, |shape| shape.iter().map(|n| *n as u64).product())
    }

    /// Checks that the device can address every word and launch a thread block for each block. `max` is the largest number of words
    /// that the kernel can address.
    pub fn check(self, Case { device, problem }: Case, max: u64) -> Result<()> {
        let Some([batch, heads, blocks, _]) = self.shape(problem) else { return Ok(()) };
        let reach = self.len(problem);
        if reach > max || reach > u32::MAX as u64 && !device.wide_addresses {
            let device = device.name.clone();
            return Err(AttentionError::AddressSpace { argument: "block_mask (its lists of tiles)", reach, device });
        }
        cube_count(device, "block_lists", (batch * heads * blocks) as u64).map(|_| ())
    }
}
