//! `dq` where every block of keys adds to it: [`Role::All`](crate::fragment::Role::All).
//!
//! ```text
//! each warpgroup   dSᵀ of its 64 keys                                        → shared memory
//! both             dS K over all 128 keys, 64 queries × 64 columns each       → added to `dq_accum` from registers
//! ```
//!
//! In a fixed order, blocks of keys add to a tile of queries in the order in which they are numbered as
//! [work tiles](crate::tensor_core::TileScheduler); the first one writes instead. The turns of [`DqAccum`] count the blocks that
//! have added. One warp of a thread block waits for its turn while the products of `S` and `dP` run, another one passes on the tile
//! of the step before while those of `dK` run. (FlashAttention-3's code has a semaphore for each
//! block of queries, too.) Without an order, blocks add as they come.
//!
//! `dq_accum` is f32 in the layout of the registers. The order is: head, tile of 64 queries, panel of 64 columns, 16 queries of
//! the tile, group of four registers; the innermost elements are the four registers of each of a warp's 32 threads. Additions
//! then read and write whole cache lines, and so does [`convert_dq()`], which converts `dq_accum` to `dq`.

use super::layout::Region;
use super::memory::{Memory, WorkTileField};
use super::operands::DqAccum;
use super::{TURN_ROWS, TURN_WORDS, dq_accum_columns};
use crate::fragment::Scores;
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::{
    Blueprint, GradientOutputs, GradientRows, PANEL, RowStatistics, SourceSides, TileScheduler, WARPGROUP_ROWS,
    stats_all, stats_at,
};
use cubecl::prelude::*;

/// Threads of a thread block of [`convert_dq()`] and [`sum_splits()`](fn@super::splits::sum_splits).
pub const UNITS: u32 = 256;
/// Rows of a warp of these kernels.
pub const WARP_ROWS: u32 = (WARPGROUP_ROWS / 4) as u32;
/// Registers of a panel that each thread adds.
pub const ADDENDS: usize = WARPGROUP_ROWS * PANEL / 128;
/// Named barrier of all threads. Barrier 0 belongs to `sync_cube`.
const WRITTEN: u32 = 1;
/// Warp that passes its thread block's turn on, and warp that waits for it. Neither of them loads. With their roles exchanged, a
/// backward takes up to 5% longer.
const PASSING_WARP: u32 = 3;
const WAITING_WARP: u32 = 7;

/// State of a warpgroup that adds to dQ.
#[derive(CubeType)]
pub struct Reducer {
    /// Index of the `dSᵀ` tile that is written next, 0 or 1.
    turn: u32,
    /// Descriptors of the first `dSᵀ` tile, and of the rows of K that the warpgroup multiplies it with.
    ds_columns: u64,
    k_columns: u64,
    /// Address at which this thread writes its part of the first tile.
    ds: u32,
    /// Index of this thread's first vector of `dq_accum` within a tile of queries.
    addend: u32,
    /// The number of the thread's warp.
    warp: u32,
    dq_accum: DqAccum,
    scheduler: TileScheduler,
    memory: Memory<Blueprint>,
}

#[cube]
impl Reducer {
    /// The initial state. `ds` is the first tile of `dSᵀ`, and `k` the first warpgroup's rows of K.
    pub fn new<E: CubePrimitive>(
        ds: &[E],
        k: &[E],
        dq_accum: DqAccum,
        scheduler: TileScheduler,
        memory: Memory<Blueprint>,
        warp: u32,
        #[comptime] blueprint: Blueprint,
    ) -> Reducer {
        let lane = UNIT_POS % 32;
        let warpgroup = warp / 4;
        let size = comptime!(blueprint.dtype.size());
        // A panel of dSᵀ: 64 queries of all keys.
        let ds_panel = comptime!((blueprint.tile.tile_q() * PANEL * size / 16) as u32);
        let k_panel = comptime!((WARPGROUP_ROWS * PANEL * size / 16) as u32);
        // The warpgroups share a tile of 128 queries by queries, and a tile of 64 queries by columns.
        let (ds_at, k_at) = if comptime!(blueprint.tile.tile_k > WARPGROUP_ROWS) {
            (warpgroup * ds_panel, 0u32.runtime())
        } else {
            (0u32.runtime(), warpgroup * k_panel)
        };
        let ds_columns = descriptor::<E>(ds, 1024usize, 1024usize) + u64::cast_from(ds_at);
        let k_columns = descriptor::<E>(k, 1024usize, 1024usize) + u64::cast_from(k_at);
        // Each thread addresses one of 16 keys, and the first or second eight of 16 queries. The swizzle permutes the groups of
        // eight by the key's number modulo 8.
        let key = warp * WARP_ROWS + lane % 16;
        let eight = (lane / 16) ^ (lane % 8);
        Reducer {
            turn: 0u32,
            ds_columns,
            k_columns,
            ds: memory.at(Region::Ds, key * comptime!((PANEL * size) as u32) + eight * 16),
            addend: warp * (WARP_ROWS * PANEL as u32 / 4) + lane,
            warp,
            dq_accum,
            scheduler,
            memory,
        }
    }

    /// Writes this warpgroup's packed `dSᵀ` to shared memory.
    pub fn write(&self, ds: &Sequence<Array<u32>>, #[comptime] blueprint: Blueprint) {
        let panel = comptime!((blueprint.tile.tile_q() * PANEL * blueprint.dtype.size()) as u32);
        let at = self.ds + self.turn * comptime!(blueprint.ds_bytes() as u32);
        #[unroll]
        for i in 0..comptime!(blueprint.tile.tile_k / 16) {
            let (of_panel, eights) = comptime!(((i / 4) as u32, (i % 4 * 32) as u32));
            store_tiles((at ^ eights) + of_panel * panel, ds.index(i));
        }
        sync_async_proxy_shared();
    }

    /// Issues `dS K` once both warpgroups have written their `dSᵀ`, and switches to the other tile.
    pub fn multiply(&mut self, dq: &mut Array<f32>, #[comptime] blueprint: Blueprint) {
        // With two tiles this one barrier suffices: a warp that arrives here has finished reading the tile before last.
        self.meet();
        let ds = self.ds_columns + u64::cast_from(self.turn * comptime!((blueprint.ds_bytes() / 16) as u32));
        // 16 keys are 16 lines.
        let rows = comptime!(blueprint.q_bytes() / 16);
        let steps = comptime!(
            (0..blueprint.tile.tile_q() / 16).map(|i| [i * 128, i / 4 * rows + i % 4 * 128]).collect::<Vec<_>>()
        );
        mma_shared(dq, ds, self.k_columns, steps, [true, true], PANEL, blueprint.dtype);
        self.turn ^= 1;
    }

    /// Row of `dq_accum` of the first query of the tile from `start` on.
    fn row(&self, nth: u32, band: &Band, start: u32) -> usize {
        let blueprint = comptime!(self.memory.blueprint);
        let (batch, head) = (self.memory.work_tile(nth, WorkTileField::Batch), self.memory.query_head(nth));
        stats_at(band, &self.scheduler, batch, head, start, blueprint)
    }

    /// Number of blocks of keys before that of work tile `nth` that add to the tile of queries from `start` on.
    fn blocks_before(&self, nth: u32, band: &Band, start: u32) -> u32 {
        let tile = comptime!(self.memory.blueprint.tile);
        let (rows, columns) = comptime!((tile.tile_q() as u32, tile.tile_k as u32));
        // In the band, keys are queries.
        let all = band.q_blocks(start, rows, columns);
        let block = (self.memory.work_tile(nth, WorkTileField::QStart) - all.origin) / rows;
        self.scheduler.blocks_before(block, &all)
    }

    /// Adds the product `dq` to the tile of queries from `start` on.
    pub fn add(&self, dq: &Array<f32>, nth: u32, band: &Band, start: u32) {
        let blueprint = comptime!(self.memory.blueprint);
        let row = self.row(nth, band, start);
        let to = row * comptime!(dq_accum_columns(blueprint.head_dim) / 4) + self.addend as usize;
        let to = &self.dq_accum.sums[to..to + 1];
        if comptime!(blueprint.ordered) {
            let first = self.blocks_before(nth, band, start) == 0;
            #[unroll]
            for i in 0..comptime!(ADDENDS / 4) {
                write_or_add_quad(to, dq, i, first);
            }
        } else {
            #[unroll]
            for i in 0..comptime!(ADDENDS / 4) {
                add_quad(to, dq, i);
            }
        }
    }

    /// Waits, in one warp, until the blocks of keys before this one have added to the tile of queries from `start` on. All warps
    /// know of it after [`multiply()`](Reducer::multiply).
    pub fn await_turn(&self, nth: u32, band: &Band, start: u32) {
        if self.warp == WAITING_WARP {
            let turn = self.row(nth, band, start) / TURN_ROWS * TURN_WORDS;
            await_turn(&self.dq_accum.turns[turn..turn + 1], self.blocks_before(nth, band, start));
        }
    }

    /// Waits until all warps have come here. The additions of all steps before then come before what any of them does next.
    pub fn meet(&self) {
        named_sync(WRITTEN, comptime!(self.memory.blueprint.tile.units() as u32));
    }

    /// Passes the tile of queries from `start` on to the next block of keys, in one warp. The warps must have met since they
    /// added to it.
    pub fn pass_turn(&self, nth: u32, band: &Band, start: u32) {
        if self.warp == PASSING_WARP {
            let turn = self.row(nth, band, start) / TURN_ROWS * TURN_WORDS;
            pass_turn(&self.dq_accum.turns[turn..turn + 1]);
        }
    }
}

/// The rows of a head that a warp of [`convert_dq()`] or [`sum_splits()`](fn@super::splits::sum_splits) goes through.
#[derive(CubeType)]
pub struct WarpRows {
    /// Number of the head among those of all batches. If it is at least their number, the warp has no rows.
    pub of_all: u32,
    /// Batch.
    pub batch: u32,
    /// Head.
    pub head: u32,
    /// First row.
    pub first: u32,
}

#[cube]
impl WarpRows {
    /// The rows of this warp, where each head has `rows` rows, a multiple of [`WARP_ROWS`].
    pub fn of(rows: u32, scheduler: &TileScheduler) -> WarpRows {
        let warps = rows / WARP_ROWS;
        let number = CUBE_POS as u32 * comptime!(UNITS / 32) + plane_broadcast(UNIT_POS / 32, 0u32);
        let of_all = number / warps;
        let (batch, head) = (scheduler.num_heads_q.divide(of_all), scheduler.num_heads_q.modulo(of_all));
        WarpRows { of_all, batch, head, first: number % warps * WARP_ROWS }
    }
}

/// Converts `dq_accum`, multiplied by the scale, to `dq`. Queries that no block of keys has added to have no gradient. Rows that a
/// hidden NaN or infinity has reached are recomputed, as in [`gradient`](mod@crate::hopper::gradient). Each warp converts 16
/// queries.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn convert_dq<E: Float, M: Numeric, NB: Size, NM: Size>(
    dq_accum: DqAccum,
    sources: SourceSides<E, Const<8>>,
    scores: Scores<E, M, NB, NM>,
    outputs: &mut GradientOutputs,
    stats: &[u32],
    scheduler: TileScheduler,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (band, scale) = (scores.band, scores.score.scale);
    let lane = UNIT_POS % 32;
    // Rows of a head, padded to whole tiles.
    let of_head = (stats_all(&band, &scheduler, blueprint) / scheduler.heads as usize) as u32;
    let of_warp = WarpRows::of(of_head, &scheduler);
    if of_warp.of_all >= scheduler.heads {
        terminate!();
    }
    let (batch, head, first_row) = (of_warp.batch, of_warp.head, of_warp.first);
    let mut rows = GradientRows::new(batch as usize, head as usize, first_row, band);

    let panels = comptime!(blueprint.panels());
    // Number of vectors of a warp's rows of a panel, and of a panel of a tile of 64 queries.
    let (vectors, of_panel) = comptime!((ADDENDS / 4 * 32, WARPGROUP_ROWS * PANEL / 4));
    let row = (of_warp.of_all * of_head + first_row / 64 * 64) as usize;
    let at = row * comptime!(panels * PANEL / 4) + (first_row / WARP_ROWS % 4) as usize * vectors + lane as usize;
    let mut written = true.runtime();
    if comptime!(blueprint.ordered) {
        let of_tile = comptime!(blueprint.tile.tile_k);
        written = dq_accum.turns[row / of_tile * of_tile / TURN_ROWS * TURN_WORDS] > 0;
    }
    #[unroll]
    for panel in 0..panels {
        let columns = comptime!((blueprint.columns_dk() - panel * PANEL).min(PANEL));
        let mut sum = Array::<f32>::new(ADDENDS);
        #[unroll]
        for i in 0..comptime!(ADDENDS / 4) {
            let four = dq_accum.sums[at + comptime!(panel * of_panel + 32 * i)];
            #[unroll]
            for e in 0..4usize {
                sum[comptime!(4 * i + e)] = select(written, four.extract(e), 0.0f32);
            }
        }
        rows.store(&sum, &mut outputs.dqk, comptime!(panel * PANEL / 4), scale, columns, blueprint.dtype);
        rows.check(&sum, columns);
    }

    let of_rows = RowStatistics::of(stats, batch, head, first_row + lane / 4, &band, &scheduler, blueprint);
    let head_kv = scheduler.group_size.divide(head);
    rows.set_columns(head_kv, head_kv + 1);
    rows.recompute(&of_rows, &sources, &scores, outputs, stats, &scheduler, blueprint);
}
