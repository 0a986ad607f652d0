//! Stages of shared memory: TMA fills them, products empty them, `mbarrier`s tell each of the other.
//!
//! Of K, of V and of a tiled bias there is a pipeline of stages each. The first warp of the first warpgroup loads K, that of the
//! second V and the one after it the bias, ahead of the products and over the borders of work tiles; or a warp that does nothing
//! else loads them all. A stage's barrier `full` completes when its bytes have come, `empty` when the last warp is done with them.

use super::delta::{stats_all, stats_at};
use super::ops::*;
use super::schedule::{TileScheduler, WorkTile};
use super::{Blueprint, HopperTile, PANEL, Role, SLOTS, WARP_UNITS, WARPGROUP_ROWS, WARPGROUP_UNITS, WORDS};
use crate::blocks::{Visit, entry_at, visit_of};
use crate::extras::Extras;
use crate::mask::Band;
use cubecl::prelude::*;

/// Where words of a work tile lie. The first four are what loading needs.
#[derive(Clone, Copy)]
pub enum WorkTileField {
    /// First key of the last tile, with which to begin.
    KLast,
    /// Tiles; 0 where there is no more work.
    Steps,
    /// Key/value head.
    HeadKv,
    /// Batch.
    Batch,
    /// Query head.
    Head,
    /// First query.
    QStart,
    /// [`FULLY_MASKED`], [`CONTINUED`], [`CONTINUES`].
    Flags,
    /// Batch of the results.
    BatchOut,
    /// The sequence, where there are several, and where its rows and its columns begin and end.
    Sequence,
    RowsBegin,
    RowsEnd,
    ColumnsBegin,
    ColumnsEnd,
}

/// There is nothing to see: the one tile must be hidden.
pub const FULLY_MASKED: u32 = 1;
/// It adds to what the work tile before has computed, of the same block: with another query head of its group.
pub const CONTINUED: u32 = 2;
/// The next one adds to it.
pub const CONTINUES: u32 = 4;

/// Where words of a cursor lie.
#[derive(Clone, Copy)]
enum CursorField {
    /// First key of the next tile, or where its entry lies. Tiles go from the last to the first.
    KStart,
    /// Tiles left in the work tile, the next one counted; 0 before the first work tile, [`END`] after the last.
    Left,
    /// Key/value head.
    Head,
    /// Batch.
    Batch,
    /// The stage of the next tile.
    Stage,
    /// The parity of its barriers' phase.
    Phase,
    /// How many work tiles have been entered.
    Nth,
    /// The number of the next work tile in its group.
    OfGroup,
}

/// No work tile is left.
const END: u32 = u32::MAX;

/// The pipelines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pipeline {
    /// Of K. It leads: who loads it finds out what there is to do.
    K,
    /// Of V.
    V,
    /// Of the bias.
    Bias,
}

impl Pipeline {
    /// The warp that loads: its warpgroup waits for it.
    fn warp(self) -> u32 {
        let of_warpgroup = (WARPGROUP_UNITS / WARP_UNITS) as u32;
        match self {
            Pipeline::K => 0,
            Pipeline::V => of_warpgroup,
            Pipeline::Bias => of_warpgroup + 1,
        }
    }

    /// Bytes of a stage.
    fn bytes(self, blueprint: Blueprint) -> u32 {
        let bytes = match self {
            Pipeline::K => blueprint.k_bytes(),
            Pipeline::V => blueprint.v_bytes(),
            Pipeline::Bias => blueprint.b_bytes(),
        };
        bytes as u32
    }

    /// Panels of a stage of K or V.
    fn panels(self, blueprint: Blueprint) -> u32 {
        (if self == Pipeline::V { blueprint.panels_v() } else { blueprint.panels() }) as u32
    }
}

/// A factor of 0 for each dimension that a bias repeats, else of 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Spread {
    /// Of the batch.
    pub batch: u32,
    /// Of the query head.
    pub head: u32,
}

/// A position in a pipeline: the stage, and the parity of its barriers' phase.
#[derive(CubeType, Clone)]
pub struct PipelineState {
    pub stage: u32,
    pub phase: u32,
}

#[cube]
impl PipelineState {
    /// The first.
    pub fn first() -> PipelineState {
        PipelineState { stage: 0u32, phase: 0u32 }
    }

    /// Moves on.
    pub fn advance(&mut self, #[comptime] stages: usize) {
        self.stage += 1;
        if self.stage == comptime!(stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1;
        }
    }

    /// The one after this.
    pub fn next(&self, #[comptime] stages: usize) -> PipelineState {
        let wraps = self.stage + 1 == comptime!(stages as u32);
        PipelineState { stage: select(wraps, 0u32, self.stage + 1), phase: self.phase ^ u32::cast_from(wraps) }
    }
}

/// Where things lie in shared memory, as addresses.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Memory {
    /// Rows of Q, one tile for each warpgroup.
    pub q: u32,
    /// Those of dO.
    pub d: u32,
    /// Tiles of K.
    pub k: u32,
    /// Tiles of V.
    pub v: u32,
    /// Tiles of the bias.
    pub b: u32,
    /// Tiles of `dSᵀ`.
    pub ds: u32,
    /// The log-sum-exp and delta of streamed tiles.
    pub lse: u32,
    pub delta: u32,
    /// Barriers of Q, K, V and the bias that complete when bytes have come.
    pub full_q: u32,
    pub full_k: u32,
    pub full_v: u32,
    pub full_b: u32,
    /// Barriers of Q and dO that complete when the warps that multiply with them are done, of the others when all are.
    pub empty_q: u32,
    pub empty_d: u32,
    pub empty_k: u32,
    pub empty_v: u32,
    pub empty_b: u32,
    /// Barriers of the slots: a work tile has been written.
    pub known: u32,
    /// The slots.
    pub slots: u32,
    /// The pipelines' cursors.
    cursors: u32,
    /// With a block mask, the entry of the tile in each stage of K.
    entries: u32,
}

#[cube]
impl Memory {
    /// The layout of a consumer group's memory from `base` on, and its barriers made. All threads must call it.
    pub fn new(base: u32, #[comptime] blueprint: Blueprint) -> Memory {
        let stages = comptime!(blueprint.tile.stages as u32);
        let warpgroups = comptime!(blueprint.tile.warpgroups as u32);
        let q = base;
        let d = q + comptime!(warpgroups * blueprint.q_bytes() as u32);
        let k = d + comptime!(warpgroups * blueprint.d_bytes() as u32);
        let v = k + comptime!(stages * blueprint.k_bytes() as u32);
        let b = v + comptime!(stages * blueprint.v_bytes() as u32);
        let ds = b + comptime!(stages * blueprint.b_bytes() as u32);
        let lse = ds + comptime!(2 * blueprint.ds_bytes() as u32);
        let delta = lse + comptime!(stages * blueprint.stats_bytes() as u32);
        let full_q = delta + comptime!(stages * blueprint.stats_bytes() as u32);
        let empty_q = full_q + comptime!(8 * warpgroups);
        let empty_d = empty_q + comptime!(8 * warpgroups);
        let full_k = empty_d + comptime!(8 * warpgroups);
        let full_v = full_k + comptime!(8 * stages);
        let full_b = full_v + comptime!(8 * stages);
        let empty_k = full_b + comptime!(8 * stages);
        let empty_v = empty_k + comptime!(8 * stages);
        let empty_b = empty_v + comptime!(8 * stages);
        let known = empty_b + comptime!(8 * stages);
        let slots = known + comptime!(8 * SLOTS as u32);
        let cursors = slots + comptime!(4 * (SLOTS * WORDS) as u32);
        let entries = cursors + comptime!(4 * (3 * WORDS) as u32);
        let units = comptime!(warpgroups * WARPGROUP_UNITS as u32);
        let within = UNIT_POS % units;
        let mut first = within == 0;
        if comptime!(blueprint.tile.producer_warp) {
            first = first && UNIT_POS < comptime!(blueprint.tile.consumer_groups as u32 * units);
        }
        if first {
            #[unroll]
            for i in 0..warpgroups {
                mbarrier_init(full_q + comptime!(8 * i), 1u32);
                mbarrier_init(
                    empty_q + comptime!(8 * i),
                    comptime!(if blueprint.reduces() { 4 * warpgroups } else { 4 }),
                );
                mbarrier_init(empty_d + comptime!(8 * i), 4u32);
            }
            #[unroll]
            for i in 0..stages {
                mbarrier_init(full_k + comptime!(8 * i), 1u32);
                mbarrier_init(full_v + comptime!(8 * i), 1u32);
                mbarrier_init(full_b + comptime!(8 * i), 1u32);
                // One arrival of each warp.
                mbarrier_init(empty_k + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_v + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_b + comptime!(8 * i), comptime!(4 * warpgroups));
            }
            #[unroll]
            for i in 0..comptime!(SLOTS as u32) {
                mbarrier_init(known + comptime!(8 * i), 1u32);
            }
            #[unroll]
            for i in 0..comptime!(3 * WORDS as u32) {
                store_shared(cursors + comptime!(4 * i), 0u32);
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        Memory {
            q,
            d,
            k,
            v,
            b,
            ds,
            lse,
            delta,
            full_q,
            full_k,
            full_v,
            full_b,
            empty_q,
            empty_d,
            empty_k,
            empty_v,
            empty_b,
            known,
            slots,
            cursors,
            entries,
        }
    }

    /// Waits until the `nth` work tile of this consumer group is known.
    pub fn await_work_tile(&self, nth: u32) {
        mbarrier_wait(self.known + nth % comptime!(SLOTS as u32) * 8, (nth / comptime!(SLOTS as u32)) % 2);
    }

    /// A word of the `nth` work tile, which is known. Read when it is needed: registers are what this kernel lacks.
    pub fn work_tile(&self, nth: u32, #[comptime] word: WorkTileField) -> u32 {
        load_shared(
            self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32) + comptime!(4 * word as u32),
        )
    }

    /// The query head of the `nth` work tile.
    pub fn query_head(&self, nth: u32, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.transposed()) {
            self.work_tile(nth, WorkTileField::HeadKv)
        } else {
            self.work_tile(nth, WorkTileField::Head)
        }
    }

    fn write_work_tile(&self, nth: u32, work: &WorkTile, flags: u32) {
        let at = self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
        store_shared(at + comptime!(4 * WorkTileField::KLast as u32), work.k_last);
        store_shared(at + comptime!(4 * WorkTileField::Steps as u32), work.steps);
        store_shared(at + comptime!(4 * WorkTileField::HeadKv as u32), work.head_kv);
        store_shared(at + comptime!(4 * WorkTileField::Batch as u32), work.batch);
        store_shared(at + comptime!(4 * WorkTileField::Head as u32), work.head);
        store_shared(at + comptime!(4 * WorkTileField::QStart as u32), work.q_start);
        store_shared(at + comptime!(4 * WorkTileField::Flags as u32), u32::cast_from(work.fully_masked) | flags);
        store_shared(at + comptime!(4 * WorkTileField::BatchOut as u32), work.batch_out);
        if comptime!(work.band.varlen) {
            store_shared(at + comptime!(4 * WorkTileField::Sequence as u32), work.band.sequence);
            store_shared(at + comptime!(4 * WorkTileField::RowsBegin as u32), work.band.begin_q);
            store_shared(at + comptime!(4 * WorkTileField::RowsEnd as u32), work.band.end_q);
            store_shared(at + comptime!(4 * WorkTileField::ColumnsBegin as u32), work.band.begin_k);
            store_shared(at + comptime!(4 * WorkTileField::ColumnsEnd as u32), work.band.end_k);
        }
    }

    /// What the rows of the `nth` work tile see, if `band` is what the options make of all.
    pub fn band(&self, nth: u32, band: &Band, #[comptime] varlen: bool) -> Band {
        if comptime!(varlen) {
            let (begin_q, end_q) =
                (self.work_tile(nth, WorkTileField::RowsBegin), self.work_tile(nth, WorkTileField::RowsEnd));
            let (begin_k, end_k) =
                (self.work_tile(nth, WorkTileField::ColumnsBegin), self.work_tile(nth, WorkTileField::ColumnsEnd));
            band.of(self.work_tile(nth, WorkTileField::Sequence), begin_q, end_q, begin_k, end_k)
        } else {
            *band
        }
    }

    /// What is known of the tile at a position of the pipeline of K, which has come: with a block mask, what its entry says, else this.
    pub fn visit(&self, state: &PipelineState, start: u32, edge: bool, #[comptime] blueprint: Blueprint) -> Visit {
        if comptime!(blueprint.sparse) {
            visit_of(load_shared(self.entries + state.stage * 4), comptime!(blueprint.tile.tile_k as u32))
        } else {
            Visit { start, fully_visible: !edge, masked: true.runtime() }
        }
    }

    /// Waits for a tile of a tiled bias, which is in the same stage as that of K; returns where a warpgroup's part of it
    /// lies.
    pub fn await_bias(&self, state: &PipelineState, warpgroup: u32, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.tiled_bias()) {
            mbarrier_wait(self.full_b + state.stage * 8, state.phase);
        }
        let of_warpgroup = comptime!((blueprint.b_bytes() / blueprint.tile.warpgroups) as u32);
        self.b + state.stage * comptime!(blueprint.b_bytes() as u32) + warpgroup * of_warpgroup
    }

    /// Lets a tile of a tiled bias be overwritten.
    pub fn release_bias(&self, state: &PipelineState, #[comptime] blueprint: Blueprint) {
        if comptime!(blueprint.tiled_bias()) {
            // All threads of the warp have read it.
            sync_plane();
            let lane = UNIT_POS % 32;
            if lane == 0 {
                mbarrier_arrive(self.empty_b + state.stage * 8);
            }
        }
    }

    /// The first stage of a pipeline, and its barriers `full` and `empty`.
    fn pipeline(&self, #[comptime] pipeline: Pipeline) -> (u32, u32, u32) {
        match comptime!(pipeline) {
            Pipeline::K => (self.k, self.full_k, self.empty_k),
            Pipeline::V => (self.v, self.full_v, self.empty_v),
            Pipeline::Bias => (self.b, self.full_b, self.empty_b),
        }
    }

    fn cursor(&self, #[comptime] pipeline: Pipeline, #[comptime] word: CursorField) -> u32 {
        load_shared(self.cursors + comptime!(4 * (pipeline as usize * WORDS + word as usize) as u32))
    }

    fn set_cursor(&self, #[comptime] pipeline: Pipeline, #[comptime] word: CursorField, value: u32) {
        store_shared(self.cursors + comptime!(4 * (pipeline as usize * WORDS + word as usize) as u32), value);
    }
}

/// What loading depends on. Where it stands lies in shared memory, but for the number of the work tile after the current one: that
/// has been asked for, and waiting for it would take longer than anything else here.
#[derive(CubeType)]
pub struct Producer {
    memory: Memory,
    scheduler: TileScheduler,
    band: Band,
    spread: Spread,
    extras: Extras,
    warp: u32,
    ahead: u32,
}

#[cube]
impl Producer {
    /// Before the first work tile, which is that of the consumer group's own number.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        memory: Memory,
        scheduler: TileScheduler,
        band: Band,
        spread: Spread,
        extras: Extras,
        consumer_group: u32,
        warp: u32,
        #[comptime] tile: HopperTile,
    ) -> Producer {
        let number = CUBE_POS as u32 * comptime!(tile.consumer_groups as u32) + consumer_group;
        let scheduler = scheduler.scheduled(&extras);
        Producer { memory, scheduler, band, spread, extras, warp, ahead: number }
    }

    /// The first loads: all stages, where no warp does nothing else. Cursors enter a work tile the first time. `stats`: lse and delta of
    /// each query, where they come with its tiles.
    #[allow(clippy::too_many_arguments)]
    pub fn fill<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        b: &TensorMap<E, Tiled>,
        stats: &[u32],
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        if comptime!(!blueprint.tile.producer_warp) {
            let stages = comptime!(blueprint.tile.stages);
            if self.warp == comptime!(Pipeline::K.warp()) {
                for _ in 0..stages + 1 {
                    self.load(q, d, k, stats, counter, Pipeline::K, blueprint);
                }
            }
            if self.warp == comptime!(Pipeline::V.warp()) {
                // In the forward, V is wanted a step after K.
                for _ in 0..comptime!(if blueprint.role == Role::Forward { stages } else { stages + 1 }) {
                    self.load(q, d, v, stats, counter, Pipeline::V, blueprint);
                }
            }
            if comptime!(blueprint.tiled_bias()) && self.warp == comptime!(Pipeline::Bias.warp()) {
                for _ in 0..stages + 1 {
                    self.load(q, d, b, stats, counter, Pipeline::Bias, blueprint);
                }
            }
        }
        self.memory.await_work_tile(0u32);
        // By a warp that loads nothing else now: what is asked for last comes last, after the stages of all multiprocessors.
        let (warpgroup, of_warpgroup) = (self.warp / 4, self.warp % 4);
        if of_warpgroup == 2 && self.memory.work_tile(0u32, WorkTileField::Steps) != 0 {
            load_resident(q, &self.memory, 0u32, warpgroup, ResidentOperand::Q, blueprint);
            if comptime!(blueprint.differentiates()) {
                load_resident(d, &self.memory, 0u32, warpgroup, ResidentOperand::D, blueprint);
            }
        }
    }

    /// All loads of K, V and the bias, by a warp that does nothing else; of the forward, in the order in which its steps free the
    /// stages, V one after K.
    #[allow(clippy::too_many_arguments)]
    pub fn run<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        b: &TensorMap<E, Tiled>,
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        // The first call of each only enters the first work tile.
        self.load(q, q, k, counter, counter, Pipeline::K, blueprint);
        if comptime!(blueprint.tiled_bias()) {
            self.load(q, q, b, counter, counter, Pipeline::Bias, blueprint);
        }
        let mut left = self.memory.cursor(Pipeline::K, CursorField::Left);
        while left != END {
            self.load(q, q, k, counter, counter, Pipeline::K, blueprint);
            if comptime!(blueprint.tiled_bias()) {
                self.load(q, q, b, counter, counter, Pipeline::Bias, blueprint);
            }
            self.load(q, q, v, counter, counter, Pipeline::V, blueprint);
            left = self.memory.cursor(Pipeline::V, CursorField::Left);
        }
    }

    /// Fills the stages that the step before has freed: in the forward once in each step that multiplies both K and V, else in
    /// each but the very first.
    #[allow(clippy::too_many_arguments)]
    pub fn refill<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        k: &TensorMap<E, Tiled>,
        v: &TensorMap<E, Tiled>,
        b: &TensorMap<E, Tiled>,
        stats: &[u32],
        counter: &[u32],
        #[comptime] blueprint: Blueprint,
    ) {
        if comptime!(!blueprint.tile.producer_warp) {
            if self.warp == comptime!(Pipeline::K.warp()) {
                self.load(q, d, k, stats, counter, Pipeline::K, blueprint);
            }
            if self.warp == comptime!(Pipeline::V.warp()) {
                self.load(q, d, v, stats, counter, Pipeline::V, blueprint);
            }
            if comptime!(blueprint.tiled_bias()) && self.warp == comptime!(Pipeline::Bias.warp()) {
                self.load(q, d, b, stats, counter, Pipeline::Bias, blueprint);
            }
        }
    }

    /// Enters the next work tile, and returns how many tiles are left to load. K leads: it finds out which work tile that is and tells
    /// everybody.
    fn enter<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        #[comptime] pipeline: Pipeline,
        #[comptime] blueprint: Blueprint,
    ) -> u32 {
        let nth = self.memory.cursor(pipeline, CursorField::Nth);
        if comptime!(pipeline == Pipeline::K) {
            let number = plane_broadcast(self.ahead, 0u32);
            if number < self.scheduler.num_tiles {
                let mut of_group = 0u32;
                let mut flags = 0u32;
                if comptime!(blueprint.transposed()) {
                    of_group = self.memory.cursor(pipeline, CursorField::OfGroup);
                    let last = of_group + 1 == self.scheduler.group_size.divisor;
                    flags = select(of_group == 0, 0u32, CONTINUED) | select(last, 0u32, CONTINUES);
                    self.memory.set_cursor(pipeline, CursorField::OfGroup, select(last, 0u32, of_group + 1));
                }
                let work = self.scheduler.work_tile(number, of_group, &self.band, &self.extras, blueprint);
                self.memory.write_work_tile(nth, &work, flags);
                // There is room for one Q and one dO only, but they need not come from far then.
                #[unroll]
                for tile in 0..comptime!(blueprint.tile.warpgroups as u32) {
                    let row = work.q_start + comptime!(tile * WARPGROUP_ROWS as u32);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.panels() as u32) {
                        tma_prefetch(q, work.batch, work.head, row, comptime!(panel * PANEL as u32));
                    }
                    #[unroll]
                    for panel in 0..comptime!(if blueprint.differentiates() { blueprint.panels_v() as u32 } else { 0 })
                    {
                        tma_prefetch(d, work.batch, work.head, row, comptime!(panel * PANEL as u32));
                    }
                }
            } else {
                let slot = self.memory.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
                store_shared(slot + comptime!(4 * WorkTileField::Steps as u32), 0u32);
            }
            let lane = UNIT_POS % 32;
            if lane == 0 {
                mbarrier_arrive(self.memory.known + nth % comptime!(SLOTS as u32) * 8);
            }
        } else {
            self.memory.await_work_tile(nth);
        }
        // All at once: each read waits some 30 cycles.
        let k_last = self.memory.work_tile(nth, WorkTileField::KLast);
        let steps = self.memory.work_tile(nth, WorkTileField::Steps);
        let head = if comptime!(pipeline == Pipeline::Bias) {
            self.memory.query_head(nth, blueprint) * self.spread.head
        } else {
            self.memory.work_tile(nth, WorkTileField::HeadKv)
        };
        let mut batch = self.memory.work_tile(nth, WorkTileField::Batch);
        if comptime!(pipeline == Pipeline::Bias) {
            batch *= self.spread.batch;
        }
        self.memory.set_cursor(pipeline, CursorField::KStart, k_last);
        self.memory.set_cursor(pipeline, CursorField::Head, head);
        self.memory.set_cursor(pipeline, CursorField::Batch, batch);
        self.memory.set_cursor(pipeline, CursorField::Nth, nth + 1);
        select(steps == 0, END, steps)
    }

    /// Loads the next tile, once all warps are done with what its stage held, and moves on; not if there is none. A cursor that
    /// is in no work tile yet only enters the first one.
    #[allow(clippy::too_many_arguments)]
    fn load<E: CubePrimitive>(
        &mut self,
        q: &TensorMap<E, Tiled>,
        d: &TensorMap<E, Tiled>,
        map: &TensorMap<E, Tiled>,
        stats: &[u32],
        counter: &[u32],
        #[comptime] pipeline: Pipeline,
        #[comptime] blueprint: Blueprint,
    ) {
        let next = self.memory.cursor(pipeline, CursorField::KStart);
        let mut left = self.memory.cursor(pipeline, CursorField::Left);
        let head = self.memory.cursor(pipeline, CursorField::Head);
        let batch = self.memory.cursor(pipeline, CursorField::Batch);
        let mut state = PipelineState {
            stage: self.memory.cursor(pipeline, CursorField::Stage),
            phase: self.memory.cursor(pipeline, CursorField::Phase),
        };
        if left != END {
            if left > 0 {
                let bytes = comptime!(pipeline.bytes(blueprint));
                let (start, full, empty) = self.memory.pipeline(pipeline);
                let to = start + state.stage * bytes;
                let full = full + state.stage * 8;
                // A stage's first load waits for the phase before the first, which counts as over.
                mbarrier_wait(empty + state.stage * 8, state.phase ^ 1);
                let k_start = if comptime!(blueprint.sparse) {
                    let entry = entry_at(&self.extras, next);
                    if comptime!(pipeline == Pipeline::K) {
                        store_shared(self.memory.entries + state.stage * 4, entry);
                    }
                    visit_of(entry, comptime!(blueprint.tile.tile_k as u32)).start
                } else {
                    next
                };
                let with_stats = comptime!(pipeline != Pipeline::Bias && blueprint.transposed());
                let stats_bytes = comptime!(if with_stats { blueprint.stats_bytes() as u32 } else { 0 });
                mbarrier_expect(full, comptime!(bytes + stats_bytes));
                if comptime!(with_stats) {
                    let to = if comptime!(pipeline == Pipeline::K) { self.memory.lse } else { self.memory.delta };
                    let of_lse = stats_at(&self.band, &self.scheduler, batch, head, k_start, blueprint);
                    let from = if comptime!(pipeline == Pipeline::K) {
                        of_lse
                    } else {
                        of_lse + stats_all(&self.band, &self.scheduler, blueprint)
                    };
                    // Copies start at multiples of 16 bytes.
                    let from = if comptime!(blueprint.varlen) { from / 4 * 4 } else { from };
                    bulk_load(stats, from, blueprint.stats_bytes(), to + state.stage * stats_bytes, full);
                }
                if comptime!(pipeline == Pipeline::Bias && blueprint.transposed()) {
                    // A panel of keys for each warpgroup.
                    let first_key = self
                        .memory
                        .work_tile(self.memory.cursor(pipeline, CursorField::Nth) - 1, WorkTileField::QStart);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.tile.warpgroups as u32) {
                        let at = to + comptime!(panel * bytes / blueprint.tile.warpgroups as u32);
                        tma_load(map, at, full, batch, head, k_start, first_key + comptime!(panel * PANEL as u32));
                    }
                } else if comptime!(pipeline == Pipeline::Bias) {
                    let first_row = self
                        .memory
                        .work_tile(self.memory.cursor(pipeline, CursorField::Nth) - 1, WorkTileField::QStart);
                    let panels = comptime!(blueprint.panels_b() as u32);
                    let panel_bytes = comptime!(bytes / (panels * blueprint.tile.warpgroups as u32));
                    #[unroll]
                    for tile in 0..comptime!(blueprint.tile.warpgroups as u32) {
                        let row = first_row + comptime!(tile * WARPGROUP_ROWS as u32);
                        #[unroll]
                        for panel in 0..panels {
                            let at = to + comptime!((tile * panels + panel) * panel_bytes);
                            tma_load(map, at, full, batch, head, row, k_start + comptime!(panel * PANEL as u32));
                        }
                    }
                } else {
                    load_panels(map, to, bytes, pipeline.panels(blueprint), full, batch, head, k_start);
                }
                state.advance(blueprint.tile.stages);
                self.memory.set_cursor(pipeline, CursorField::Stage, state.stage);
                self.memory.set_cursor(pipeline, CursorField::Phase, state.phase);
                let step = comptime!(if blueprint.sparse { 1 } else { blueprint.tile.tile_k as u32 });
                self.memory.set_cursor(pipeline, CursorField::KStart, next - step);
                left -= 1;
            }
            if left == 0 {
                left = self.enter(q, d, pipeline, blueprint);
            }
            self.memory.set_cursor(pipeline, CursorField::Left, left);
            // As late as the answer still comes in time: who takes a work tile early may be busy for long before it.
            if comptime!(pipeline == Pipeline::K) && left == 1 {
                // Another query head of the same group is no other number.
                let mut of_group = 0u32;
                if comptime!(blueprint.transposed()) {
                    of_group = self.memory.cursor(pipeline, CursorField::OfGroup);
                }
                if of_group == 0 {
                    self.ahead = self.scheduler.next(counter, blueprint.tile);
                }
            }
        }
    }
}

/// Which of the rows that are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ResidentOperand {
    /// Those of Q.
    Q,
    /// Those of dO.
    D,
}

/// Loads a warpgroup's rows of Q, or of dO, of the `nth` work tile. By one warp of it.
#[cube]
pub fn load_resident<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    nth: u32,
    warpgroup: u32,
    #[comptime] operand: ResidentOperand,
    #[comptime] blueprint: Blueprint,
) {
    let (q_bytes, d_bytes) = comptime!((blueprint.q_bytes() as u32, blueprint.d_bytes() as u32));
    let full = memory.full_q + warpgroup * 8;
    let (batch, head) = (memory.work_tile(nth, WorkTileField::Batch), memory.work_tile(nth, WorkTileField::Head));
    let row = memory.work_tile(nth, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
    if comptime!(operand == ResidentOperand::Q) {
        // One barrier is that of both.
        mbarrier_expect(full, comptime!(q_bytes + d_bytes));
        let to = memory.q + warpgroup * q_bytes;
        load_panels(map, to, q_bytes, blueprint.panels() as u32, full, batch, head, row);
    } else {
        let to = memory.d + warpgroup * d_bytes;
        load_panels(map, to, d_bytes, blueprint.panels_v() as u32, full, batch, head, row);
    }
}

/// Loads rows, panel after panel.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn load_panels<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    to: u32,
    #[comptime] bytes: u32,
    #[comptime] panels: u32,
    full: u32,
    batch: u32,
    head: u32,
    row: u32,
) {
    #[unroll]
    for panel in 0..panels {
        let at = to + comptime!(panel * bytes / panels);
        tma_load(map, at, full, batch, head, row, comptime!(panel * PANEL as u32).runtime());
    }
}

/// Loads a warpgroup's rows of Q, or of dO, of the work tile after the `nth`, once all warps are past their last product with those of this
/// one.
#[cube]
pub fn load_next<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    nth: u32,
    warp: u32,
    #[comptime] operand: ResidentOperand,
    #[comptime] blueprint: Blueprint,
) {
    let (lane, warpgroup, of_warpgroup) = (UNIT_POS % 32, warp / 4, warp % 4);
    let of_both = if comptime!(operand == ResidentOperand::Q) { memory.empty_q } else { memory.empty_d };
    let empty = of_both + warpgroup * 8;
    if lane == 0 {
        // Where dQ is added up, all warps multiply with every warpgroup's rows of Q.
        if comptime!(blueprint.reduces() && operand == ResidentOperand::Q) {
            #[unroll]
            for of_other in 0..comptime!(blueprint.tile.warpgroups as u32) {
                mbarrier_arrive(memory.empty_q + comptime!(8 * of_other));
            }
        } else {
            mbarrier_arrive(empty);
        }
    }
    // It becomes known when the last tile of K of this one is loaded, which has been.
    memory.await_work_tile(nth + 1);
    if of_warpgroup == 0 && memory.work_tile(nth + 1, WorkTileField::Steps) != 0 {
        mbarrier_wait(empty, nth % 2);
        load_resident(map, memory, nth + 1, warpgroup, operand, blueprint);
    }
}
