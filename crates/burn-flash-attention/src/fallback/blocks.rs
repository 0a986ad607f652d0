//! Block masks on the host, with the states of [`flash_attention_kernels::blocks`].

use super::sequences::Sequences;
use super::tile::{Broadcast, TILE_K, TILE_Q, Tables, Tile};
use flash_attention_kernels::blocks::{BLOCK, EMPTY, FULL, PARTIAL};
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::mods::{Pair, Values};
use flash_attention_kernels::{AttentionProblem, BlockMask};
use rayon::prelude::*;

// A tile lies within one block, if each batch is one sequence.
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

    /// State of the block that contains a pair, whose positions count from the start of the sequence. Past the last block, pairs are
    /// hidden.
    pub fn at(&self, [sequence, h, i, j]: [usize; 4]) -> u32 {
        let BlockMask { blocks: [sequences, heads, of_q, of_k], block_q, block_k } = self.of;
        let (s, h) = (if sequences == 1 { 0 } else { sequence }, if heads == 1 { 0 } else { h });
        let (q, k) = (i / block_q, j / block_k);
        if q < of_q && k < of_k { self.states[((s * heads + h) * of_q + q) * of_k + k] } else { EMPTY }
    }

    /// State of the blocks that a tile belongs to; `None` if they differ, as they may where several sequences begin in the tensors.
    pub fn of(&self, tile: Tile, sequences: Option<&Sequences>) -> Option<u32> {
        let Tile { b, h, q_start, queries, k_start, cols, .. } = tile;
        let Some(sequences) = sequences else { return Some(self.at([b, h, q_start, k_start])) };
        let mut state = None;
        for band in sequences.of(b) {
            let part = |from: usize, len: usize, [begin, end]: [u32; 2]| {
                let (begin, end) = (begin as usize, end as usize);
                from.max(begin) - begin..(from + len).min(end).max(begin) - begin
            };
            let (queries, keys) =
                (part(q_start, queries, [band.begin_q, band.end_q]), part(k_start, cols, [band.begin_k, band.end_k]));
            if queries.is_empty() || keys.is_empty() {
                continue;
            }
            for q in queries.start / self.of.block_q..queries.end.div_ceil(self.of.block_q) {
                for k in keys.start / self.of.block_k..keys.end.div_ceil(self.of.block_k) {
                    let of = self.at([band.sequence as usize, h, q * self.of.block_q, k * self.of.block_k]);
                    if state.is_some_and(|state| state != of) {
                        return None;
                    }
                    state = Some(of);
                }
            }
        }
        // Nothing of the tile belongs to a sequence.
        Some(state.unwrap_or(EMPTY))
    }
}

/// State of each block, computed from the mask and `mask_mod` of the problem. Blocks count from the start of each of `sequences`, if there are
/// some.
pub fn classify(
    problem: &AttentionProblem,
    of: BlockMask,
    mask: Option<&Broadcast<u8>>,
    tables: &Tables<'_>,
    sequences: Option<&Sequences>,
) -> Vec<i32> {
    let BlockMask { blocks: [numbers, heads, of_q, of_k], block_q, block_k } = of;
    // Batch and band of each sequence.
    let all: Vec<Option<(usize, Band)>> = match sequences {
        Some(sequences) => (0..numbers).map(|number| sequences.numbered(number)).collect(),
        None => (0..numbers).map(|b| Some((b, problem.band()))).collect(),
    };
    let state = |n: usize| {
        let (number, h) = (n / of_k / of_q / heads, n / of_k / of_q % heads);
        let Some((b, band)) = all[number] else { return EMPTY as i32 };
        let [begin_q, end_q, begin_k, end_k] =
            [band.begin_q, band.end_q, band.begin_k, band.end_k].map(|position| position as usize);
        let (first_i, first_j) = (begin_q + n / of_k % of_q * block_q, begin_k + n % of_k * block_k);
        let sees = |i: usize, j: usize| {
            let at = [b, h, i, j];
            let pair = Pair::of(number as u32, h as u32, (i - begin_q) as u32, (j - begin_k) as u32);
            let [value_a, value_b] = tables.each_ref().map(|table| table.as_ref().map_or(0.0, |table| table.at(at)));
            let values = Values { a: value_a, b: value_b };
            let shown = problem.options.mask_mod.is_none_or(|function| function.sees(pair, values));
            shown && mask.is_none_or(|mask| mask.at(at) == 0)
        };
        let (mut any, mut all) = (false, true);
        for i in first_i..end_q.min(first_i + block_q) {
            for j in first_j..end_k.min(first_j + block_k) {
                let seen = sees(i, j);
                (any, all) = (any || seen, all && seen);
            }
            if any && !all {
                return PARTIAL as i32;
            }
        }
        (if any { FULL } else { EMPTY }) as i32
    };
    (0..numbers * heads * of_q * of_k).into_par_iter().map(state).collect()
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
