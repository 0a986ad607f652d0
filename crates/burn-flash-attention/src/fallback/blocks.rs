//! Block masks on the host, with the states of [`flash_attention_kernels::blocks`].

use super::tile::{Broadcast, TILE_K, TILE_Q, Tables, Tile};
use flash_attention_kernels::blocks::{BLOCK, EMPTY, FULL, PARTIAL};
use flash_attention_kernels::mods::{Pair, Values};
use flash_attention_kernels::{AttentionProblem, BlockMask};
use rayon::prelude::*;

// A tile lies within one block.
const _: () = assert!(BLOCK.is_multiple_of(TILE_Q) && BLOCK.is_multiple_of(TILE_K));

/// Block states of a call.
pub struct States {
    of: BlockMask,
    /// Contiguous.
    states: Vec<u32>,
}

impl States {
    pub fn new(of: BlockMask, states: Vec<u32>) -> Self {
        States { of, states }
    }

    /// State of the block that contains a tile.
    pub fn of(&self, tile: Tile) -> u32 {
        let BlockMask { blocks: [batch, heads, of_q, of_k], block_q, block_k } = self.of;
        let (b, h) = (if batch == 1 { 0 } else { tile.b }, if heads == 1 { 0 } else { tile.h });
        self.states[((b * heads + h) * of_q + tile.q_start / block_q) * of_k + tile.k_start / block_k]
    }
}

/// State of each block, computed from the mask and `mask_mod` of the problem.
pub fn classify(
    problem: &AttentionProblem,
    of: BlockMask,
    mask: Option<&Broadcast<u8>>,
    tables: &Tables<'_>,
) -> Vec<i32> {
    let BlockMask { blocks: [batch, heads, of_q, of_k], block_q, block_k } = of;
    let sees = |at: [usize; 4]| {
        let [b, h, i, j] = at.map(|n| n as u32);
        let [value_a, value_b] = tables.each_ref().map(|table| table.as_ref().map_or(0.0, |table| table.at(at)));
        let shown = problem
            .options
            .mask_mod
            .is_none_or(|function| function.sees(Pair::of(b, h, i, j), Values { a: value_a, b: value_b }));
        shown && mask.is_none_or(|mask| mask.at(at) == 0)
    };
    let state = |n: usize| {
        let (b, h) = (n / of_k / of_q / heads, n / of_k / of_q % heads);
        let (first_i, first_j) = (n / of_k % of_q * block_q, n % of_k * block_k);
        let (mut any, mut all) = (false, true);
        for i in first_i..problem.seq_q.min(first_i + block_q) {
            for j in first_j..problem.seq_k.min(first_j + block_k) {
                let seen = sees([b, h, i, j]);
                (any, all) = (any || seen, all && seen);
            }
            if any && !all {
                return PARTIAL as i32;
            }
        }
        (if any { FULL } else { EMPTY }) as i32
    };
    (0..batch * heads * of_q * of_k).into_par_iter().map(state).collect()
}

#[cfg(test)]
mod tests {
    use super::super::rows::{Elements, Rows};
    use super::super::tile::{Attention, Optional};
    use super::*;
    use flash_attention_kernels::{AttentionOptions, Dtype};

    /// Tiles of empty blocks are skipped, so that they cost no time.
    #[test]
    fn tiles_of_empty_blocks_are_not_visited() {
        let (q, kv) = ([1, 2, 300, 8], [1, 2, 390, 8]);
        let problem = AttentionProblem::new(&q, &kv, &kv, Dtype::F32, AttentionOptions::default()).unwrap();
        let problem = problem.with_block_mask(&[1, 2, 2, 4], 256, 128).unwrap();
        let states = [[[1, 0, 2, 0], [0, 1, 0, 0]], [[0, 0, 0, 0], [2, 9, 2, 1]]];
        let states = States::new(problem.block_mask.unwrap(), states.as_flattened().as_flattened().to_vec());
        let options = Optional { states: Some(&states), ..Optional::default() };
        let kv = [(); 2].map(|()| Rows::contiguous(Elements::F32(&[]), [0; 4]));
        let attention = Attention::new(&problem, Rows::contiguous(&[], [0; 4]), kv, options);
        let keys = |h, q_block| attention.k_blocks(0, h, q_block).collect::<Vec<_>>();
        // A tile has 64 queries: the first block has four tiles, the last one has one.
        for q_block in 0..4 {
            assert_eq!((keys(0, q_block), keys(1, q_block)), (vec![0, 2], vec![]));
        }
        assert_eq!((keys(0, 4), keys(1, 4)), (vec![1], vec![0, 1, 2, 3]));
        let queries = |h, k_block| attention.q_blocks(0, h, k_block).collect::<Vec<_>>();
        assert_eq!([0, 1, 2, 3].map(|k| queries(0, k)), [vec![0, 1, 2, 3], vec![4], vec![0, 1, 2, 3], vec![]]);
        assert_eq!(queries(1, 1), [4]);
    }
}
