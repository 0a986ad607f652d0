//! Loads: tiles of Q and dO with their statistics, ahead of the products and across work tiles, and K and V of a work tile.

use super::super::layout::{Layout, Operand, Region};
use super::super::memory::Memory;
use super::super::operands::{Schedule, Streams};
use super::super::pipeline::PipelineState;
use super::super::producer::load_panels;
use super::memory::{CursorField, END, EntryField, WorkTileField};
use super::{PANELS, WideBlueprint};
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::{PANEL, TileScheduler, WARPGROUP_ROWS, next_tile, stats_all, stats_at};
use cubecl::prelude::*;

/// The warp that loads Q and decodes work tiles.
const WARP_Q: u32 = 0;
/// The warp that loads dO.
const WARP_D: u32 = 4;
/// The warps that load K and V.
const WARP_K: u32 = 2;
const WARP_V: u32 = 6;

/// The loads of a thread block. Each operand has its own warp. Only `ahead`, the number of the work tile after the last one
/// decoded, is in a register.
#[derive(CubeType)]
pub struct Loader<E: Float> {
    memory: Memory<WideBlueprint>,
    streams: Streams<E>,
    scheduler: TileScheduler,
    counter: &'static [u32],
    band: Band,
    warp: u32,
    ahead: u32,
}

#[cube]
impl<E: Float> Loader<E> {
    /// The state before the first work tile, whose number is that of the thread block.
    pub fn new(
        memory: Memory<WideBlueprint>,
        streams: Streams<E>,
        schedule: Schedule,
        band: Band,
        warp: u32,
    ) -> Loader<E> {
        let ahead = CUBE_POS as u32;
        Loader::<E> { memory, streams, scheduler: schedule.tiles, counter: schedule.counter, band, warp, ahead }
    }

    /// Fills all stages.
    pub fn fill(&mut self, #[comptime] blueprint: WideBlueprint) {
        if self.warp == WARP_Q {
            for _ in 0..comptime!(blueprint.stages + 1) {
                self.load(Operand::Q, blueprint);
            }
        }
        if self.warp == WARP_D {
            for _ in 0..blueprint.stages {
                self.load(Operand::D, blueprint);
            }
        }
    }

    /// Loads the next tile of Q or of dO into the stage that this step releases.
    pub fn refill(&mut self, #[comptime] of: Operand, #[comptime] blueprint: WideBlueprint) {
        if self.warp == comptime!(if of == Operand::Q { WARP_Q } else { WARP_D }) {
            self.load(of, blueprint);
        }
    }

    /// Loads K and V of work tile `nth`, which exists, once nothing else uses their memory.
    pub fn keys(&self, nth: u32) {
        if self.warp == WARP_K {
            self.resident(nth, Operand::K);
        }
        if self.warp == WARP_V {
            self.resident(nth, Operand::V);
        }
    }

    fn resident(&self, nth: u32, #[comptime] of: Operand) {
        let memory = self.memory.opaque();
        let bytes = comptime!(memory.blueprint.bytes(of));
        let full = memory.full(of, 0u32);
        let map = if comptime!(of == Operand::K) { self.streams.cols_qk } else { self.streams.cols_dov };
        let (batch, head) = (memory.word(nth, WorkTileField::Batch), memory.word(nth, WorkTileField::HeadKv));
        let key = memory.word(nth, WorkTileField::KStart);
        mbarrier_expect(full, bytes.runtime());
        load_panels(map, memory.tiles(of, 0u32), bytes, comptime!(PANELS as u32), full, batch, head, key);
    }

    /// Decodes the next work tile and publishes it in slot `nth`.
    fn decode(&mut self, nth: u32, #[comptime] blueprint: WideBlueprint) {
        let (keys, tile_q) = comptime!((blueprint.keys as u32, WARPGROUP_ROWS as u32));
        let memory = self.memory.opaque();
        let number = plane_broadcast(self.ahead, 0u32);
        if number < self.scheduler.num_tiles {
            let of = self.scheduler.coordinate(number, blueprint.scores);
            let k_start = of.nth * keys;
            let seen = self.band.q_blocks(k_start, tile_q, keys);
            let tiles = max(seen.count(), 1u32);
            memory.set_word(nth, WorkTileField::KStart, k_start);
            memory.set_word(nth, WorkTileField::Steps, tiles * self.scheduler.group_size.divisor);
            memory.set_word(nth, WorkTileField::Tiles, tiles);
            memory.set_word(nth, WorkTileField::QLast, seen.origin + (max(seen.end, 1u32) - 1) * tile_q);
            memory.set_word(nth, WorkTileField::HeadKv, of.head);
            memory.set_word(nth, WorkTileField::Batch, of.batch);
            memory.set_word(nth, WorkTileField::FullyMasked, u32::cast_from(seen.count() == 0));
            // K and V are loaded late. A prefetch to the L2 cache shortens that load.
            #[unroll]
            for panel in 0..comptime!(PANELS as u32) {
                let column = comptime!(panel * PANEL as u32);
                tma_prefetch(self.streams.cols_qk, of.batch, of.head, k_start, column);
                tma_prefetch(self.streams.cols_dov, of.batch, of.head, k_start, column);
            }
        } else {
            memory.set_word(nth, WorkTileField::Steps, 0u32);
        }
        memory.publish_slot(nth);
    }

    /// Enters the next work tile and returns the number of tiles of a query head.
    fn enter(&mut self, #[comptime] of: Operand, #[comptime] blueprint: WideBlueprint) -> u32 {
        let nth = self.memory.cursor(of, CursorField::Nth);
        if comptime!(of == Operand::Q) {
            self.decode(nth, blueprint);
        } else {
            self.memory.await_slot(nth);
        }
        let memory = self.memory.opaque();
        let group = self.scheduler.group_size.divisor;
        let steps = memory.word(nth, WorkTileField::Steps);
        let tiles = memory.word(nth, WorkTileField::Tiles);
        memory.set_cursor(of, CursorField::QStart, memory.word(nth, WorkTileField::QLast));
        memory.set_cursor(of, CursorField::Head, memory.word(nth, WorkTileField::HeadKv) * group);
        memory.set_cursor(of, CursorField::Batch, memory.word(nth, WorkTileField::Batch));
        memory.set_cursor(of, CursorField::HeadsLeft, group);
        memory.set_cursor(of, CursorField::Nth, nth + 1);
        select(steps == 0, END, tiles)
    }

    /// Loads the next tile, if there is one, as soon as all warps have released its stage, and advances.
    ///
    /// The cursor of Q enters the next work tile early, right after its last load in the one before; in no work tile yet, it only enters
    /// the first one. That of dO enters late: its loads come earlier in a step, where the decoded work tile is not published yet.
    fn load(&mut self, #[comptime] of: Operand, #[comptime] blueprint: WideBlueprint) {
        let memory = self.memory.opaque();
        let mut left = memory.cursor(of, CursorField::Left);
        if comptime!(of == Operand::D) && left == 0 {
            left = self.enter(of, blueprint);
        }
        let start = memory.cursor(of, CursorField::QStart);
        let mut heads = memory.cursor(of, CursorField::HeadsLeft);
        let head = memory.cursor(of, CursorField::Head);
        let batch = memory.cursor(of, CursorField::Batch);
        let mut state = PipelineState {
            stage: memory.cursor(of, CursorField::Stage),
            phase: memory.cursor(of, CursorField::Phase),
        };
        if left != END {
            if left > 0 {
                let (bytes, stats_bytes) = comptime!((blueprint.bytes(of), blueprint.stats_bytes()));
                let full = memory.full(of, state.stage);
                // The first load of a stage waits for the phase before the first one, which counts as completed.
                mbarrier_wait(memory.empty(of, state.stage), state.phase ^ 1);
                let of_keys = comptime!(blueprint.of_keys());
                let rows = self.band.transposed();
                let mut from = stats_at(&rows, &self.scheduler, batch, head, start, of_keys);
                if comptime!(of == Operand::Q) {
                    memory.set_entry(state.stage, EntryField::QStart, start);
                    memory.set_entry(state.stage, EntryField::Head, head);
                    memory.set_entry(state.stage, EntryField::Row, from as u32);
                } else {
                    from += stats_all(&rows, &self.scheduler, of_keys);
                }
                mbarrier_expect(full, comptime!(bytes + stats_bytes as u32).runtime());
                let region = comptime!(if of == Operand::Q { Region::Lse } else { Region::Delta });
                let stats_to = memory.at(region, state.stage * comptime!(stats_bytes as u32));
                bulk_load(self.streams.stats.unwrap(), from, stats_bytes, stats_to, full);
                let map =
                    if comptime!(of == Operand::Q) { self.streams.rows_qk } else { self.streams.rows_dov.unwrap() };
                let to = memory.tiles(of, state.stage * bytes);
                load_panels(map, to, bytes, comptime!(PANELS as u32), full, batch, head, start);
                state.advance(blueprint.stages);
                memory.set_cursor(of, CursorField::Stage, state.stage);
                memory.set_cursor(of, CursorField::Phase, state.phase);
                memory.set_cursor(of, CursorField::QStart, start - comptime!(WARPGROUP_ROWS as u32));
                left -= 1;
                heads -= u32::cast_from(left == 0);
                if left == 0 && heads > 0 {
                    let nth = memory.cursor(of, CursorField::Nth) - 1;
                    memory.set_cursor(of, CursorField::HeadsLeft, heads);
                    memory.set_cursor(of, CursorField::Head, head + 1);
                    memory.set_cursor(of, CursorField::QStart, memory.word(nth, WorkTileField::QLast));
                    left = memory.word(nth, WorkTileField::Tiles);
                }
            }
            if comptime!(of == Operand::Q) && left == 0 {
                left = self.enter(of, blueprint);
                heads = self.scheduler.group_size.divisor;
            }
            memory.set_cursor(of, CursorField::Left, left);
            // The ticket is taken as late as its answer still arrives in time.
            if comptime!(of == Operand::Q) && left == 1 && heads == 1 {
                self.ahead = next_tile(self.scheduler.num_tiles, self.counter, blueprint.scores);
            }
        } else {
            memory.set_cursor(of, CursorField::Left, left);
        }
    }
}
