//! Sizes of the lists of a block mask, and checks that kernels can address every entry.

use super::{Case, Kernel, cube_count, require};
use crate::blocks::{BLOCK, HEADER, TileSize};
use crate::error::{AttentionError, Result};
use crate::problem::AttentionProblem;

/// Largest number of words that the kernels of Hopper and of `mma.sync` can address, which is with 32 bits.
const MAX_WORDS: u64 = u32::MAX as u64;

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

    /// `[sequences | 1, num_heads_q | 1, blocks, HEADER + tiles]` words; `None` without a block mask. Without packed sequences, each
    /// batch is one sequence.
    pub fn shape(self, problem: &AttentionProblem) -> Option<[usize; 4]> {
        let mask = problem.block_mask?;
        let [_, _, blocks_q, blocks_k] = mask.blocks;
        // The states of packed sequences may have fewer blocks than the tensors: as many as the longest sequence.
        let queries = problem.seq_q.min(blocks_q * mask.block_q);
        let keys = problem.seq_k.min(blocks_k * mask.block_k);
        let (along, across) = if self.keys { (keys, queries) } else { (queries, keys) };
        // Sequences of different lengths have lists of their own.
        let sequences = problem.num_sequences().map_or(mask.blocks[0], |sequences| sequences.max(1));
        Some([sequences, mask.blocks[1], along.div_ceil(self.rows), HEADER + across.div_ceil(self.columns).max(1)])
    }

    /// Total number of words; 0 without a block mask.
    pub fn len(self, problem: &AttentionProblem) -> u64 {
        self.shape(problem).map_or(0, |shape| shape.iter().map(|n| *n as u64).product())
    }

    /// Whether the blocks of any block mask consist of whole tiles.
    pub fn divides_blocks(self) -> bool {
        BLOCK.is_multiple_of(self.rows) && BLOCK.is_multiple_of(self.columns)
    }

    /// Checks that a kernel of Hopper or of `mma.sync` can address every word; else returns the reason.
    pub fn check_words(self, problem: &AttentionProblem) -> Result<(), String> {
        let words = self.len(problem);
        require(words <= MAX_WORDS, || {
            format!("the lists of the block mask have {words} words; at most {MAX_WORDS} are supported")
        })
    }

    /// Checks that the device can address every word and launch a thread block for each block, and that a kernel of this family can
    /// address every word.
    pub fn check(self, Case { device, problem }: Case, kernel: Kernel) -> Result<()> {
        let max = if matches!(kernel, Kernel::Hopper | Kernel::Mma) { MAX_WORDS } else { u64::MAX };
        let Some([batch, heads, blocks, _]) = self.shape(problem) else { return Ok(()) };
        let reach = self.len(problem);
        if reach > max || reach > u32::MAX as u64 && !device.wide_addresses {
            let device = device.name.clone();
            return Err(AttentionError::AddressSpace { argument: "block_mask (its lists of tiles)", reach, device });
        }
        cube_count(device, "block_lists", (batch * heads * blocks) as u64).map(|_| ())
    }
}
