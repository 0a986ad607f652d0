//! The producer: loads of K, V and the bias into their pipelines, ahead of the products and across work tiles.
//!
//! The first warp of the first warpgroup loads K, the first warp of the second one V, and the warp after it the bias.
//! Alternatively, a producer warp loads all of them.

use super::layout::{Layout, Operand, Region};
use super::memory::{CONTINUED, CONTINUES, CursorField, END, Memory, WorkTileField};
use super::operands::{Schedule, Streams};
use super::pipeline::PipelineState;
use crate::blocks::{entry_at, visit_of};
use crate::extras::Extras;
use crate::fragment::Role;
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::{Blueprint, HopperTile, PANEL, TileScheduler, WARPGROUP_ROWS, next_tile, stats_all, stats_at};
use cubecl::prelude::*;

/// Factor for each dimension of a bias: 0 if the bias repeats along it, else 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Spread {
    /// Factor of the batch.
    pub batch: u32,
    /// Factor of the query head.
    pub head: u32,
}

/// State of the producer. The cursors of the pipelines are in shared memory. Only `ahead`, the number of the work tile after
/// the current one, is in a register: it has been requested from the counter, and waiting for the answer would take longer than
/// anything else here.
#[derive(CubeType)]
pub struct Producer<E: Float> {
    memory: Memory<Blueprint>,
    streams: Streams<E>,
    scheduler: TileScheduler,
    num_tiles: u32,
    counter: &'static [u32],
    band: Band,
    extras: Extras,
    warp: u32,
    ahead: u32,
}

#[cube]
impl<E: Float> Producer<E> {
    /// The state before the first work tile, whose number is the consumer group's own unless blocks of keys add in order.
    pub fn new(
        memory: Memory<Blueprint>,
        streams: Streams<E>,
        schedule: Schedule,
        band: Band,
        extras: Extras,
        consumer_group: u32,
        warp: u32,
        #[comptime] tile: HopperTile,
    ) -> Producer<E> {
        let number = CUBE_POS as u32 * comptime!(tile.consumer_groups as u32) + consumer_group;
        let (scheduler, counter) = (schedule.tiles, schedule.counter);
        let num_tiles = scheduler.len(&extras);
        let mut ahead = number;
        if comptime!(memory.blueprint.ordered) && warp == comptime!(Operand::K.warp()) {
            ahead = next_tile(num_tiles, counter, memory.blueprint);
        }
        Producer::<E> { memory, streams, scheduler, num_tiles, counter, band, extras, warp, ahead }
    }

    /// Fills all stages at the start, unless a producer warp does.
    pub fn fill(&mut self, #[comptime] blueprint: Blueprint) {
        let stages = comptime!(blueprint.tile.stages);
        // In the forward, V is needed one step after K.
        let of_v = comptime!(if blueprint.role == Role::Forward { stages } else { stages + 1 });
        self.load_times(comptime!(stages + 1), of_v, blueprint);
        self.memory.await_slot(0u32);
        // Q and dO are loaded by a warp that has issued no other loads. Behind other loads they would arrive last, after the
        // stages of all multiprocessors.
        let (warpgroup, of_warpgroup) = (self.warp / 4, self.warp % 4);
        if of_warpgroup == 2 && self.memory.work_tile(0u32, WorkTileField::Steps) != 0 {
            load_resident(&self.streams, &self.memory, 0u32, warpgroup, Operand::Q);
            if comptime!(blueprint.differentiates()) {
                load_resident(&self.streams, &self.memory, 0u32, warpgroup, Operand::D);
            }
        }
    }

    /// Issues all loads of K, V and the bias by the producer warp, in the order in which the steps of the forward free the
    /// stages: V one step after K.
    pub fn run(&mut self, #[comptime] blueprint: Blueprint) {
        // The first call for each pipeline only enters the first work tile.
        self.load(Operand::K, blueprint);
        if comptime!(blueprint.tiled_bias()) {
            self.load(Operand::Bias, blueprint);
        }
        let mut left = self.memory.cursor(Operand::K, CursorField::Left);
        while left != END {
            self.load(Operand::K, blueprint);
            if comptime!(blueprint.tiled_bias()) {
                self.load(Operand::Bias, blueprint);
            }
            self.load(Operand::V, blueprint);
            left = self.memory.cursor(Operand::V, CursorField::Left);
        }
    }

    /// Refills the stages that the step before has released. The forward calls it in each step that multiplies both K and V,
    /// the backward in each step except the first.
    pub fn refill(&mut self, #[comptime] blueprint: Blueprint) {
        self.load_times(1usize, 1usize, blueprint);
    }

    /// Loads `of_k` tiles of K and of the bias, and `of_v` tiles of V, each by its own warp, unless there is a producer warp.
    fn load_times(&mut self, #[comptime] of_k: usize, #[comptime] of_v: usize, #[comptime] blueprint: Blueprint) {
        if comptime!(!blueprint.tile.producer_warp) {
            if self.warp == comptime!(Operand::K.warp()) {
                self.load_each(of_k, Operand::K, blueprint);
            }
            if self.warp == comptime!(Operand::V.warp()) {
                self.load_each(of_v, Operand::V, blueprint);
            }
            if comptime!(blueprint.tiled_bias()) && self.warp == comptime!(Operand::Bias.warp()) {
                self.load_each(of_k, Operand::Bias, blueprint);
            }
        }
    }

    fn load_each(&mut self, #[comptime] count: usize, #[comptime] operand: Operand, #[comptime] blueprint: Blueprint) {
        if comptime!(count == 1) {
            self.load(operand, blueprint);
        } else {
            for _ in 0..count {
                self.load(operand, blueprint);
            }
        }
    }

    /// Enters the next work tile and returns the number of its tiles. The producer of K decodes the work tile and publishes it
    /// to the others.
    fn enter(&mut self, #[comptime] operand: Operand, #[comptime] blueprint: Blueprint) -> u32 {
        let nth = self.memory.cursor(operand, CursorField::Nth);
        if comptime!(operand == Operand::K) {
            let number = plane_broadcast(self.ahead, 0u32);
            if number < self.num_tiles {
                let mut of_group = 0u32;
                let mut flags = 0u32;
                if comptime!(blueprint.transposed()) {
                    of_group = self.memory.cursor(operand, CursorField::OfGroup);
                    let last = of_group + 1 == self.scheduler.heads_of_block(blueprint);
                    flags = select(of_group == 0, 0u32, CONTINUED) | select(last, 0u32, CONTINUES);
                    self.memory.set_cursor(operand, CursorField::OfGroup, select(last, 0u32, of_group + 1));
                }
                let work = self.scheduler.work_tile(number, of_group, &self.band, &self.extras, blueprint);
                self.memory.write_work_tile(nth, &work, flags);
                // Shared memory holds one Q and one dO only. A prefetch to the L2 cache shortens their later load.
                #[unroll]
                for tile in 0..comptime!(blueprint.tile.warpgroups as u32) {
                    let row = work.q_start + comptime!(tile * WARPGROUP_ROWS as u32);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.panels() as u32) {
                        tma_prefetch(self.streams.rows_qk, work.batch, work.head, row, comptime!(panel * PANEL as u32));
                    }
                    if comptime!(blueprint.differentiates()) {
                        #[unroll]
                        for panel in 0..comptime!(blueprint.panels_v() as u32) {
                            let map = self.streams.rows_dov.unwrap();
                            tma_prefetch(map, work.batch, work.head, row, comptime!(panel * PANEL as u32));
                        }
                    }
                }
            } else {
                self.memory.set_work_tile(nth, WorkTileField::Steps, 0u32);
            }
            self.memory.publish_slot(nth);
        } else {
            self.memory.await_slot(nth);
        }
        // Read together, because each read has a latency of about 30 cycles.
        let k_last = self.memory.work_tile(nth, WorkTileField::KLast);
        let steps = self.memory.work_tile(nth, WorkTileField::Steps);
        let head = if comptime!(operand == Operand::Bias) {
            self.memory.query_head(nth) * self.streams.spread.head
        } else {
            self.memory.work_tile(nth, WorkTileField::HeadKv)
        };
        let mut batch = self.memory.work_tile(nth, WorkTileField::Batch);
        if comptime!(operand == Operand::Bias) {
            batch *= self.streams.spread.batch;
        }
        let k_start = if comptime!(blueprint.ordered) {
            k_last - (max(steps, 1u32) - 1) * comptime!(blueprint.tile.tile_k as u32)
        } else {
            k_last
        };
        self.memory.set_cursor(operand, CursorField::KStart, k_start);
        self.memory.set_cursor(operand, CursorField::Head, head);
        self.memory.set_cursor(operand, CursorField::Batch, batch);
        self.memory.set_cursor(operand, CursorField::Nth, nth + 1);
        select(steps == 0, END, steps)
    }

    /// Loads the next tile, if there is one, as soon as all warps have released its stage, and advances. A cursor that is in no
    /// work tile yet only enters the first one.
    fn load(&mut self, #[comptime] operand: Operand, #[comptime] blueprint: Blueprint) {
        let map = match comptime!(operand) {
            Operand::K => self.streams.cols_qk,
            Operand::V => self.streams.cols_dov,
            _ => self.streams.bias.unwrap(),
        };
        let next = self.memory.cursor(operand, CursorField::KStart);
        let mut left = self.memory.cursor(operand, CursorField::Left);
        let head = self.memory.cursor(operand, CursorField::Head);
        let batch = self.memory.cursor(operand, CursorField::Batch);
        let mut state = PipelineState {
            stage: self.memory.cursor(operand, CursorField::Stage),
            phase: self.memory.cursor(operand, CursorField::Phase),
        };
        if left != END {
            if left > 0 {
                let bytes = comptime!(blueprint.bytes(operand));
                let to = self.memory.tiles(operand, state.stage * bytes);
                let full = self.memory.full(operand, state.stage);
                // The first load of a stage waits for the phase before the first one, which counts as completed.
                mbarrier_wait(self.memory.empty(operand, state.stage), state.phase ^ 1);
                let k_start = if comptime!(blueprint.sparse) {
                    let entry = entry_at(&self.extras, next);
                    if comptime!(operand == Operand::K) {
                        store_shared(self.memory.at(Region::Entries, state.stage * 4), entry);
                    }
                    visit_of(entry).start
                } else {
                    next
                };
                let with_stats = comptime!(operand != Operand::Bias && blueprint.transposed());
                let stats_bytes = comptime!(if with_stats { blueprint.stats_bytes() as u32 } else { 0 });
                mbarrier_expect(full, comptime!(bytes + stats_bytes));
                if comptime!(with_stats) {
                    let region = comptime!(if operand == Operand::K { Region::Lse } else { Region::Delta });
                    let mut from = stats_at(&self.band, &self.scheduler, batch, head, k_start, blueprint);
                    if comptime!(operand == Operand::V) {
                        from += stats_all(&self.band, &self.scheduler, blueprint);
                    }
                    // Copies start at multiples of 16 bytes.
                    let from = if comptime!(blueprint.varlen) { from / 4 * 4 } else { from };
                    let stats_to = self.memory.at(region, state.stage * stats_bytes);
                    bulk_load(self.streams.stats.unwrap(), from, blueprint.stats_bytes(), stats_to, full);
                }
                if comptime!(operand == Operand::Bias && blueprint.transposed()) {
                    // One panel of keys for each warpgroup.
                    let first_key =
                        self.memory.work_tile(self.memory.cursor(operand, CursorField::Nth) - 1, WorkTileField::QStart);
                    #[unroll]
                    for panel in 0..comptime!(blueprint.tile.warpgroups as u32) {
                        let at = to + comptime!(panel * bytes / blueprint.tile.warpgroups as u32);
                        tma_load(map, at, full, batch, head, k_start, first_key + comptime!(panel * PANEL as u32));
                    }
                } else if comptime!(operand == Operand::Bias) {
                    let first_row =
                        self.memory.work_tile(self.memory.cursor(operand, CursorField::Nth) - 1, WorkTileField::QStart);
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
                    load_panels(map, to, bytes, operand.panels(&blueprint), full, batch, head, k_start);
                }
                state.advance(blueprint.tile.stages);
                self.memory.set_cursor(operand, CursorField::Stage, state.stage);
                self.memory.set_cursor(operand, CursorField::Phase, state.phase);
                let step = comptime!(if blueprint.sparse { 1 } else { blueprint.tile.tile_k as u32 });
                let after = if comptime!(blueprint.ordered) { next + step } else { next - step };
                self.memory.set_cursor(operand, CursorField::KStart, after);
                left -= 1;
            }
            if left == 0 {
                left = self.enter(operand, blueprint);
            }
            self.memory.set_cursor(operand, CursorField::Left, left);
            // The ticket is taken as late as its answer still arrives in time: a group that takes a work tile early may be busy
            // for long before it starts it.
            if comptime!(operand == Operand::K) && left == 1 {
                // The next query head of the same group has the same number and needs no ticket.
                let mut of_group = 0u32;
                if comptime!(blueprint.transposed()) {
                    of_group = self.memory.cursor(operand, CursorField::OfGroup);
                }
                if of_group == 0 {
                    self.ahead = next_tile(self.num_tiles, self.counter, blueprint);
                }
            }
        }
    }
}

/// Loads a warpgroup's rows of Q or of dO for work tile `nth`. One of the warpgroup's warps calls it.
#[cube]
pub fn load_resident<E: Float>(
    streams: &Streams<E>,
    memory: &Memory<Blueprint>,
    nth: u32,
    warpgroup: u32,
    #[comptime] operand: Operand,
) {
    let blueprint = comptime!(memory.blueprint);
    let bytes = comptime!(blueprint.bytes(operand));
    let full = memory.full(Operand::Q, warpgroup);
    let (batch, head) = (memory.work_tile(nth, WorkTileField::Batch), memory.work_tile(nth, WorkTileField::Head));
    let row = memory.work_tile(nth, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
    if comptime!(operand == Operand::Q) {
        // Q and dO share one barrier.
        mbarrier_expect(full, comptime!(bytes + blueprint.bytes(Operand::D)));
    }
    let map = if comptime!(operand == Operand::Q) { streams.rows_qk } else { streams.rows_dov.unwrap() };
    let to = memory.tiles(operand, warpgroup * bytes);
    load_panels(map, to, bytes, operand.panels(&blueprint), full, batch, head, row);
}

/// Loads rows, panel by panel.
#[cube]
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

/// Loads a warpgroup's rows of Q or of dO for work tile `nth + 1`, once all warps have completed their last product with those
/// of work tile `nth`.
#[cube]
pub fn load_next<E: Float>(
    streams: &Streams<E>,
    memory: &Memory<Blueprint>,
    nth: u32,
    warp: u32,
    #[comptime] operand: Operand,
) {
    let (lane, warpgroup, of_warpgroup) = (UNIT_POS % 32, warp / 4, warp % 4);
    let empty = memory.empty(operand, warpgroup);
    if lane == 0 {
        // If dQ is accumulated in memory, all warps multiply with the rows of Q of every warpgroup.
        if comptime!(memory.blueprint.reduces() && operand == Operand::Q) {
            #[unroll]
            for of_other in 0..comptime!(memory.blueprint.tile.warpgroups as u32) {
                mbarrier_arrive(memory.empty(Operand::Q, of_other));
            }
        } else {
            mbarrier_arrive(empty);
        }
    }
    // The next work tile is decoded when the last tile of K of this one is loaded, which has happened.
    memory.await_slot(nth + 1);
    if of_warpgroup == 0 && memory.work_tile(nth + 1, WorkTileField::Steps) != 0 {
        mbarrier_wait(empty, nth % 2);
        load_resident(streams, memory, nth + 1, warpgroup, operand);
    }
}
