//! Loads of tiles and rows to shared memory.

use super::super::layout::{Layout, Operand, Region};
use super::super::memory::Memory;
use super::super::operands::Streams;
use super::super::pipeline::PipelineState;
use super::super::producer::load_panels;
use super::super::{BiasBlueprint, BiasTile};
use super::memory::{WARP_BIAS, WARP_D, WARP_K, WARP_Q, WARP_V, WorkTileField};
use super::scheduler::DbiasScheduler;
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::{PANEL, WARPGROUP_ROWS, stats_rows};
use cubecl::prelude::*;

/// Stage, and parity of its phase, of a turn's rows.
#[cube]
pub fn row_state(turn: u32, #[comptime] tile: BiasTile) -> (u32, u32) {
    let stages = comptime!(tile.row_stages as u32);
    (turn % stages, turn / stages % 2)
}

/// The pipeline position of the tile `stages − 1` after the one at `state`. It uses the stage of the tile before the one at
/// `state`.
#[cube]
pub fn before(state: &PipelineState, #[comptime] tile: BiasTile) -> PipelineState {
    let first = state.stage == 0;
    PipelineState {
        stage: select(first, comptime!(tile.stages as u32), state.stage) - 1,
        phase: state.phase ^ u32::cast_from(!first),
    }
}

/// The loads of a thread block. Each kind of load has its own warp, and the other warps do nothing. A load waits until its
/// turn has been posted, and until all warps that read the stage have released it. If there is no such turn, nothing is loaded.
#[derive(CubeType)]
pub struct Loader<E: Float> {
    pub streams: Streams<E>,
    pub scheduler: DbiasScheduler,
    pub band: Band,
    pub warp: u32,
}

#[cube]
impl<E: Float> Loader<E> {
    /// Loads a tile of K and a tile of V: the `nth` after the first tile of turn `turn`, which may belong to a later turn.
    pub fn tiles(&self, memory: &Memory<BiasBlueprint>, turn: u32, #[comptime] nth: usize, state: &PipelineState) {
        if self.warp == WARP_K {
            self.tile(memory, turn, nth, state, Operand::K);
        }
        if self.warp == WARP_V {
            self.tile(memory, turn, nth, state, Operand::V);
        }
    }

    fn tile(
        &self,
        memory: &Memory<BiasBlueprint>,
        turn: u32,
        #[comptime] nth: usize,
        state: &PipelineState,
        #[comptime] operand: Operand,
    ) {
        let blueprint = comptime!(memory.blueprint);
        let (tile, bytes, panels) =
            comptime!((blueprint.tile, blueprint.bytes(operand), operand.panels(&blueprint.scores)));
        let turn = turn + comptime!((nth / tile.tiles) as u32);
        memory.await_slot(turn);
        if memory.word(turn, WorkTileField::Flags) != 0 {
            let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::HeadKv));
            let key = memory.word(turn, WorkTileField::KStart) + comptime!((nth % tile.tiles * tile.tile_k) as u32);
            let (to, full) = memory.refill(operand, state.stage, state.phase, 0u32);
            let map = if comptime!(operand == Operand::K) { self.streams.cols_qk } else { self.streams.cols_dov };
            load_panels(map, to, bytes, panels, full, batch, head, key);
        }
    }

    /// Loads the warpgroup's rows of Q and their lse, or of dO and their delta, for a turn.
    pub fn rows(&self, memory: &Memory<BiasBlueprint>, turn: u32, #[comptime] operand: Operand) {
        let (warp, of_stats) =
            comptime!(if operand == Operand::D { (WARP_D, Region::Delta) } else { (WARP_Q, Region::Lse) });
        if self.warp % 4 == warp {
            let (blueprint, scores) = comptime!((memory.blueprint, memory.blueprint.scores));
            let (bytes, panels) = comptime!((blueprint.bytes(operand), operand.panels(&scores)));
            let stats_bytes = comptime!(blueprint.stats_bytes());
            memory.await_slot(turn);
            if memory.word(turn, WorkTileField::Flags) != 0 {
                let (stage, phase) = row_state(turn, blueprint.tile);
                let warpgroup = self.warp / 4;
                let nth = stage * comptime!(BiasTile::WARPGROUPS as u32) + warpgroup;
                let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::Head));
                let row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
                let stats_to = memory.at(of_stats, nth * comptime!(stats_bytes as u32));
                // The rows of a head are padded to whole blocks in the statistics.
                let of_head = stats_rows(opaque(self.band.seq_q), scores.stats_multiple, false) as usize;
                let heads = opaque(self.scheduler.num_heads_q) as usize;
                let mut from = (batch as usize * heads + head as usize) * of_head + row as usize;
                if comptime!(operand == Operand::D) {
                    from += self.scheduler.batches as usize * heads * of_head;
                }
                let (to, full) = memory.refill(operand, nth, phase, comptime!(stats_bytes as u32));
                let map = if comptime!(operand == Operand::D) {
                    self.streams.rows_dov.unwrap()
                } else {
                    self.streams.rows_qk
                };
                load_panels(map, to, bytes, panels, full, batch, head, row);
                bulk_load(self.streams.stats.unwrap(), from, stats_bytes, stats_to, full);
            }
        }
    }

    /// Loads the warpgroup's rows of a group of the bias's columns. `turn` is the first turn of the block, and `nth` the number
    /// of the block.
    pub fn bias(&self, memory: &Memory<BiasBlueprint>, turn: u32, nth: u32, #[comptime] group: usize) {
        if self.warp % 4 == WARP_BIAS {
            let blueprint = comptime!(memory.blueprint);
            let (bytes, panels) = comptime!((blueprint.group_bytes() as u32, (blueprint.group_b() / PANEL) as u32));
            memory.await_slot(turn);
            if memory.word(turn, WorkTileField::Flags) != 0 {
                let warpgroup = self.warp / 4;
                let of_cube = warpgroup * comptime!(blueprint.groups_b() as u32) + comptime!(group as u32);
                let (batch, head) =
                    (memory.word(turn, WorkTileField::BiasBatch), memory.word(turn, WorkTileField::BiasHead));
                let row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
                let column = memory.word(turn, WorkTileField::KStart) + comptime!((group * blueprint.group_b()) as u32);
                let (to, full) = memory.refill(Operand::Bias, of_cube, nth % 2, 0u32);
                #[unroll]
                for panel in 0..panels {
                    let to = to + comptime!(panel * bytes / panels);
                    let column = column + comptime!(panel * PANEL as u32);
                    tma_load(self.streams.bias.unwrap(), to, full, batch, head, row, column);
                }
            }
        }
    }
}
