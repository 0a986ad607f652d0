//! Reads base-2 lse and delta of each query in gradient kernels. [`delta`](mod@super::delta) writes them.

use super::Blueprint;
use super::schedule::TileScheduler;
use crate::fragment::Role;
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
    pub lse0: f32,
    pub lse1: f32,
    pub delta0: f32,
    pub delta1: f32,
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
        if comptime!(blueprint.role == Role::Dq) {
            let all = stats_all(band, scheduler, blueprint);
            let row0 = stats_at(band, scheduler, batch, head, band.query_within(row), blueprint);
            let row1 = stats_at(band, scheduler, batch, head, band.query_within(row + 8), blueprint);
            RowStatistics {
                lse0: f32::reinterpret(stats[row0]),
                lse1: f32::reinterpret(stats[row1]),
                delta0: f32::reinterpret(stats[all + row0]),
                delta1: f32::reinterpret(stats[all + row1]),
            }
        } else {
            let none = 0.0f32.runtime();
            RowStatistics { lse0: none, lse1: none, delta0: none, delta1: none }
        }
    }
}

/// lse or delta for each register of a tile's accumulator. It is `row0` or `row1` of the register's row or, if transposed, the
/// value of its column, which is in shared memory from `at` on.
#[cube]
pub fn tile_statistics(at: u32, row0: f32, row1: f32, #[comptime] blueprint: Blueprint) -> Sequence<f32> {
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
                all.push(if comptime!(n < 2) { row0 } else { row1 });
            }
        }
    }
    all
}
