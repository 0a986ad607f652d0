//! The shape of a block mask, and its checks.

use super::{AttentionProblem, MAX_SEQ, SCORE_TENSORS};
use crate::blocks::BLOCK;
use crate::error::{AttentionError, Result};
use serde::{Deserialize, Serialize};

/// Shape of a block mask.
///
/// ```
/// use flash_attention_kernels::BlockMask;
///
/// let mask = BlockMask { blocks: [1, 8, 32, 32], block_q: 128, block_k: 128 };
/// assert_eq!(mask.blocks[2] * mask.block_q, 4096);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockMask {
    /// Number of blocks, `[batch | 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`. The divisions round up. With packed
    /// sequences `[sequences | 1, num_heads_q | 1, nq, nk]`, where `nq` and `nk` are at most the same and pairs past the last block
    /// are hidden.
    pub blocks: [usize; 4],
    /// Queries of a block, a multiple of 128.
    pub block_q: usize,
    /// Keys of a block, a multiple of 128.
    pub block_k: usize,
}

impl AttentionProblem {
    /// Checks block sizes, the number of blocks, and what packed sequences exclude.
    pub(super) fn check_block_mask(&self, mask: BlockMask) -> Result<()> {
        for (option, value) in [("block_q", mask.block_q), ("block_k", mask.block_k)] {
            if value == 0 || !value.is_multiple_of(BLOCK) || value > MAX_SEQ {
                let requirement = "a multiple of 128, so that the tiles of kernels divide blocks";
                return Err(AttentionError::Option { option, value: value as f64, requirement });
            }
        }
        let (seq_q, seq_k) = (self.seq_q.div_ceil(mask.block_q), self.seq_k.div_ceil(mask.block_k));
        let sequences = self.cu_seqlens.unwrap_or(self.batch);
        let expected = [sequences, self.num_heads_q, seq_q, seq_k];
        for (dimension, value) in mask.blocks.into_iter().enumerate() {
            let most = expected[dimension];
            let fits = match dimension {
                0 | 1 => value == most || value == 1,
                // As many blocks as the longest packed sequence has, which only the device knows.
                _ if self.cu_seqlens.is_some() => (most.min(1)..=most).contains(&value),
                _ => value == most,
            };
            if !fits {
                return Err(AttentionError::Blocks { shape: mask.blocks, expected, dimension, value });
            }
        }
        self.check_packed_block_mask()
    }

    /// The kernels that sum gradients of biases, slopes and score tensors count tiles from the start of the tensors, and cannot
    /// read lists that count from the start of each sequence.
    fn check_packed_block_mask(&self) -> Result<()> {
        if self.cu_seqlens.is_none() {
            return Ok(());
        }
        let [score_a, score_b] = self.score_tensors;
        let slopes = self.alibi_slopes.map(|[batch, heads]| [batch, heads, 1, 1]);
        let summed =
            [("bias", self.bias), ("alibi_slopes", slopes), (SCORE_TENSORS[0], score_a), (SCORE_TENSORS[1], score_b)];
        match summed.into_iter().find_map(|(option, shape)| Some((option, shape?))) {
            None => Ok(()),
            Some((option, shape)) => Err(AttentionError::Unsupported {
                option,
                value: format!("a tensor {shape:?}"),
                why: "a block mask of packed sequences cannot be combined with it; use a mask function without a block mask",
            }),
        }
    }
}
