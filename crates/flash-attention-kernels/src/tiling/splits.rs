//! Number of splits of the keys, for heads and blocks of queries that are too few to keep the device busy. (Flash-Decoding, Dao et al.
//! 2023.)

use crate::problem::AttentionProblem;

/// Number of counters of a stream, which launches use one after the other, and bytes of each counter. A launch with splits of the keys
/// needs one for each block of queries of a head: with more of them than this, keys are not split.
pub const COUNTERS: usize = 4096;
pub const COUNTER_BYTES: usize = 4;

/// Fixed cost of a work tile, in units of the time of one tile of keys.
const ITEM: usize = 3;
/// Cost of combining splits of the keys: a fixed cost in tiles, and the number of bytes written and read again in the time of one
/// tile.
const COMBINE: usize = 4;
const COMBINED: usize = 4 << 20;
/// Largest number of splits that the kernels for NVIDIA GPUs are given.
pub(super) const MAX_SPLITS: usize = 64;
/// Numbers of splits that are considered.
const SPLITS: [usize; 14] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];

/// Work tiles before keys are split, and what computes them.
pub(super) struct SplitWork {
    /// Consumer groups or thread blocks that run at a time.
    pub workers: usize,
    /// Heads of all batches: query heads, or key/value heads if the query heads of a group are packed.
    pub heads: usize,
    /// Queries of a block.
    pub tile_q: usize,
    /// Keys of a tile.
    pub tile_k: usize,
    /// Largest number of splits.
    pub max_splits: usize,
}

/// Number of splits of the keys that minimises the estimated time. Times are in tiles of keys; a consumer group computes a tile in
/// about 1.4 µs.
pub(super) fn choose(problem: &AttentionProblem, of: &SplitWork) -> usize {
    let SplitWork { workers, heads, tile_q, tile_k, max_splits } = *of;
    let blocks = problem.seq_q.div_ceil(tile_q);
    // With this many blocks, a worker that finishes early finds more work. With a block mask, only the device knows the length of a
    // block.
    if heads * blocks >= 4 * workers || problem.block_mask.is_some() {
        return 1;
    }
    let band = problem.band();
    let mut tiles: Vec<usize> = (0..blocks)
        .map(|block| {
            let (first, count) = (block * tile_q, tile_q.min(problem.seq_q - block * tile_q));
            band.k_blocks(first as u32, count as u32, tile_k as u32).count() as usize
        })
        .collect();
    tiles.sort_unstable_by_key(|tiles| std::cmp::Reverse(*tiles));
    let longest = tiles.first().copied().unwrap_or(0);
    let time = |num_splits: usize| {
        let of_item = |tiles: usize| tiles.div_ceil(num_splits) + ITEM;
        let each = tiles.iter().map(|tiles| heads * num_splits * of_item(*tiles)).sum::<usize>().div_ceil(workers);
        // If n · `workers` + 1 work tiles are at least this long, one of the workers computes n + 1 of them.
        let items = blocks * heads * num_splits;
        let rounds = (0..items).step_by(workers).enumerate();
        let most = rounds.map(|(n, nth)| (n + 1) * of_item(tiles[nth / (heads * num_splits)])).max();
        let bytes = 2 * size_of::<f32>() * num_splits * problem.rows() * problem.head_dim_v;
        let combine = if num_splits == 1 { 0 } else { COMBINE + bytes / COMBINED };
        each.max(most.unwrap_or(0)) + combine
    };
    SPLITS
        .into_iter()
        .filter(|num_splits| *num_splits == 1 || 2 * num_splits <= longest && *num_splits <= max_splits)
        .min_by_key(|num_splits| time(*num_splits))
        .unwrap_or(1)
}
