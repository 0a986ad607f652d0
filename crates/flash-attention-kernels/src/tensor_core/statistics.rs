//! Reads base-2 lse and delta of each query in gradient kernels. [`delta`](mod@super::delta) writes them.

use super::Blueprint;
use super::schedule::TileScheduler;
use crate::fragment::{Role, filled};
use crate::mask::Band;
use crate::ptx::{load_shared, load_shared_pair};
use cubecl::prelude::*;

/// Rows of lse and delta of a head in scratch: whole tiles, and one tile more with several sequences, whose tiles may start
/// anywhere.
#[cube]
pub fn stats_rows(seq_q: u32, #[comptime] multiple: usize, #[comptime] varlen: bool) -> u32 {
    let spare = comptime!(if varlen { multiple as u32 } else { 0 });
    seq_q.div_ceil(comptime!(multiple as u32)) * comptime!(multiple as u32) + spare
}

/// Number of queries, and number of query heads in a batch.
#[cube]
fn queries(band: &Band, scheduler: &TileScheduler, #[comptime] blueprint: Blueprint) -> (u32, u32) {
    if comptime!(blueprint.transposed()) {
        // The queries are the keys of the transposed band.
        (band.seq_k, scheduler.num_heads_q.divisor * scheduler.group_size.divisor)
    } else {
        (band.seq_q, scheduler.num_heads_q.divisor)
    }
}

/// Position of a query's lse in the statistics.
#[cube]
pub fn stats_at(
    band: &Band,
    scheduler: &TileScheduler,
    batch: u32,
    head: u32,
    query: u32,
    #[comptime] blueprint: Blueprint,
) -> usize {
    let (seq_q, heads) = queries(band, scheduler, blueprint);
    (batch as usize * heads as usize + head as usize)
        * stats_rows(seq_q, blueprint.stats_multiple, blueprint.varlen) as usize
        + query as usize
}

/// Offset from the lse of a query to its delta.
#[cube]
pub fn stats_all(band: &Band, scheduler: &TileScheduler, #[comptime] blueprint: Blueprint) -> usize {
    let (seq_q, heads) = queries(band, scheduler, blueprint);
    scheduler.batches as usize * heads as usize * stats_rows(seq_q, blueprint.stats_multiple, blueprint.varlen) as usize
}

/// lse and delta of a thread's two rows, if rows are queries.
#[derive(CubeType)]
pub struct RowStatistics {
    pub lse: Array<f32>,
    pub delta: Array<f32>,
}

#[cube]
impl RowStatistics {
    /// Statistics of rows `row` and `row + 8`.
    pub fn of(
        stats: &[u32],
        batch: u32,
        head: u32,
        row: u32,
        band: &Band,
        scheduler: &TileScheduler,
        #[comptime] blueprint: Blueprint,
    ) -> RowStatistics {
        let mut lse = filled::<f32>(0.0f32, 2usize);
        let mut delta = filled::<f32>(0.0f32, 2usize);
        if comptime!(!blueprint.transposed() && blueprint.role != Role::Forward) {
            let all = stats_all(band, scheduler, blueprint);
            #[unroll]
            for r in 0..2usize {
                let query = band.query_within(row + comptime!(8 * r as u32));
                let at = stats_at(band, scheduler, batch, head, query, blueprint);
                lse[r] = f32::reinterpret(stats[at]);
                delta[r] = f32::reinterpret(stats[all + at]);
            }
        }
        RowStatistics { lse, delta }
    }
}

/// lse or delta for each register of a tile's accumulator. It is that of the register's row in `rows` or, if transposed,
/// that of its column, which is in shared memory from `at` on.
#[cube]
pub fn tile_statistics(at: u32, rows: &Array<f32>, #[comptime] blueprint: Blueprint) -> Sequence<f32> {
    let mut all = Sequence::<f32>::new();
    #[unroll]
    for i in 0..comptime!(blueprint.tile.tile_k / 8) {
        if comptime!(blueprint.transposed()) {
            let (even, odd) = if comptime!(blueprint.varlen) {
                let at = at + comptime!((32 * i) as u32);
                (f32::reinterpret(load_shared(at)), f32::reinterpret(load_shared(at + 4)))
            } else {
                let pair = load_shared_pair(at, 32 * i);
                (*pair.index(0usize), *pair.index(1usize))
            };
            #[unroll]
            for n in 0..4usize {
                all.push(if comptime!(n % 2 == 0) { even } else { odd });
            }
        } else {
            #[unroll]
            for n in 0..4usize {
                all.push(rows[comptime!(n / 2)]);
            }
        }
    }
    all
}
