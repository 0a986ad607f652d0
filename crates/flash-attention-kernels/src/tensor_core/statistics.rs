//! lse in base 2 and delta of each query, as gradients read them: see [`delta`](mod@super::delta).

use super::Blueprint;
use super::schedule::TileScheduler;
use crate::fragment::role::Role;
use crate::mask::Band;
use crate::ptx::{load_shared, load_shared_pair};
use cubecl::prelude::*;

/// Rows of lse and delta of a head: whole tiles of them, and one more where tiles begin anywhere.
#[cube]
pub fn stats_rows(seq_q: u32, #[comptime] multiple: usize, #[comptime] varlen: bool) -> u32 {
    let spare = comptime!(if varlen { multiple as u32 } else { 0 });
    seq_q.div_ceil(comptime!(multiple as u32)) * comptime!(multiple as u32) + spare
}

/// Queries, and their heads in a batch.
#[cube]
fn queries(band: &Band, scheduler: &TileScheduler, #[comptime] blueprint: Blueprint) -> (u32, u32) {
    if comptime!(blueprint.transposed()) {
        // What the band calls keys.
        (band.seq_k, scheduler.num_heads_q.divisor * scheduler.group_size.divisor)
    } else {
        (band.seq_q, scheduler.num_heads_q.divisor)
    }
}

/// Where a query's lse is.
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

/// How far behind it delta is.
#[cube]
pub fn stats_all(band: &Band, scheduler: &TileScheduler, #[comptime] blueprint: Blueprint) -> usize {
    let (seq_q, heads) = queries(band, scheduler, blueprint);
    scheduler.batches as usize * heads as usize * stats_rows(seq_q, blueprint.stats_multiple, blueprint.varlen) as usize
}

/// lse and delta of a thread's two rows, where rows are queries.
#[derive(CubeType)]
pub struct RowStatistics {
    pub lse0: f32,
    pub lse1: f32,
    pub delta0: f32,
    pub delta1: f32,
}

#[cube]
impl RowStatistics {
    /// Those of the first of the rows, and of the one 8 after it.
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

/// What belongs to each register of an accumulator of a tile: that of its row, or, transposed, that of its column, which shared
/// memory holds from `at` on.
#[cube]
pub fn statistics(at: u32, row0: f32, row1: f32, #[comptime] blueprint: Blueprint) -> Sequence<f32> {
    let mut all = Sequence::<f32>::new();
    #[unroll]
    for i in 0..comptime!(blueprint.tile.tile_k / 8) {
        if comptime!(blueprint.transposed()) {
            let at = at + comptime!((32 * i) as u32);
            let (even, odd) = if comptime!(blueprint.varlen) {
                (f32::reinterpret(load_shared(at)), f32::reinterpret(load_shared(at + 4)))
            } else {
                let pair = load_shared_pair(at);
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
