//! Loads of tiles and rows to shared memory.

use super::super::layout::{Layout, Operand, Region};
use super::super::operands::Streams;
use super::super::pipeline::PipelineState;
use super::super::producer::load_panels;
use super::super::{BiasBlueprint, BiasTile};
use super::memory::{Memory, WorkTileField};
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

/// Loads tile `nth` of K or V of a turn, once all warps have released the stage. Does nothing if there is no such turn. One
/// warp calls it.
#[cube]
pub fn load_tile<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    memory: &Memory,
    turn: u32,
    state: &PipelineState,
    #[comptime] nth: usize,
    #[comptime] operand: Operand,
    #[comptime] blueprint: BiasBlueprint,
) {
    let (bytes, panels) = comptime!((blueprint.bytes(operand), operand.panels(&blueprint.scores)));
    memory.await_turn(turn);
    if memory.word(turn, WorkTileField::Flags) != 0 {
        let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::HeadKv));
        let key = memory.word(turn, WorkTileField::KStart) + comptime!((nth * blueprint.tile.tile_k) as u32);
        let full = memory.full(operand) + state.stage * 8;
        let to = memory.tiles(operand) + state.stage * bytes;
        // The first load of a stage waits for the phase before the first one, which counts as completed.
        mbarrier_wait(memory.empty(operand) + state.stage * 8, state.phase ^ 1);
        mbarrier_expect(full, comptime!(bytes).runtime());
        load_panels(map, to, bytes, panels, full, batch, head, key);
    }
}

/// Loads a warpgroup's rows of Q and their lse, or of dO and their delta, for a turn, once the warpgroup's warps have released
/// the stage. Does nothing if there is no such turn. One warp calls it.
#[cube]
pub fn load_rows<E: Float>(
    streams: &Streams<E>,
    memory: &Memory,
    band: &Band,
    scheduler: &DbiasScheduler,
    turn: u32,
    warpgroup: u32,
    #[comptime] operand: Operand,
    #[comptime] blueprint: BiasBlueprint,
) {
    let scores = comptime!(blueprint.scores);
    let of_stats = comptime!(if operand == Operand::D { Region::Delta } else { Region::Lse });
    let (bytes, panels) = comptime!((blueprint.bytes(operand), operand.panels(&blueprint.scores)));
    let stats_bytes = comptime!(blueprint.stats_bytes());
    memory.await_turn(turn);
    if memory.word(turn, WorkTileField::Flags) != 0 {
        let (stage, phase) = row_state(turn, blueprint.tile);
        let nth = stage * comptime!(BiasTile::WARPGROUPS as u32) + warpgroup;
        let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::Head));
        let row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
        let full = memory.full(operand) + nth * 8;
        let to = memory.tiles(operand) + nth * bytes;
        let stats_to = memory.at(of_stats) + nth * comptime!(stats_bytes as u32);
        // The rows of a head are padded to whole blocks in the statistics.
        let of_head = stats_rows(opaque(band.seq_q), scores.stats_multiple, false) as usize;
        let heads = opaque(scheduler.num_heads_q) as usize;
        let mut from = (batch as usize * heads + head as usize) * of_head + row as usize;
        if comptime!(operand == Operand::D) {
            from += scheduler.batches as usize * heads * of_head;
        }
        mbarrier_wait(memory.empty(operand) + nth * 8, phase ^ 1);
        mbarrier_expect(full, comptime!(bytes + stats_bytes as u32).runtime());
        let map = if comptime!(operand == Operand::D) { streams.rows_dov.unwrap() } else { streams.rows_qk };
        load_panels(map, to, bytes, panels, full, batch, head, row);
        bulk_load(streams.stats.unwrap(), from, stats_bytes, stats_to, full);
    }
}

/// Loads a warpgroup's rows of a group of the bias's columns. `turn` is the first turn of the block, and `nth` the number of
/// the block. The load waits until the warpgroup's warps have released those of the block before. Does nothing if there is no
/// such turn. One warp calls it.
#[cube]
pub fn load_bias<E: Float>(
    streams: &Streams<E>,
    memory: &Memory,
    turn: u32,
    nth: u32,
    warpgroup: u32,
    #[comptime] group: usize,
    #[comptime] blueprint: BiasBlueprint,
) {
    let (bytes, panels) = comptime!((blueprint.group_bytes() as u32, (blueprint.group_b() / PANEL) as u32));
    memory.await_turn(turn);
    if memory.word(turn, WorkTileField::Flags) != 0 {
        let of_cube = warpgroup * comptime!(blueprint.groups_b() as u32) + comptime!(group as u32);
        let (batch, head) = (memory.word(turn, WorkTileField::BiasBatch), memory.word(turn, WorkTileField::BiasHead));
        let row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
        let column = memory.word(turn, WorkTileField::KStart) + comptime!((group * blueprint.group_b()) as u32);
        let full = memory.full(Operand::Bias) + of_cube * 8;
        let to = memory.tiles(Operand::Bias) + of_cube * bytes;
        mbarrier_wait(memory.empty(Operand::Bias) + of_cube * 8, (nth % 2) ^ 1);
        mbarrier_expect(full, bytes.runtime());
        #[unroll]
        for panel in 0..panels {
            let to = to + comptime!(panel * bytes / panels);
            tma_load(streams.bias.unwrap(), to, full, batch, head, row, column + comptime!(panel * PANEL as u32));
        }
    }
}
