//! Transposed accumulators: to shared memory, where they are operands of further products, and from there to the outputs.

use super::super::layout::Operand;
use super::super::memory::Memory;
use super::memory::WorkTileField;
use super::{PANELS, WARPGROUPS, WideBlueprint};
use crate::dtype::Dtype;
use crate::fragment::Scores;
use crate::ptx::*;
use crate::tensor_core::{
    GradientOutputs, GradientRows, KeepMask, LINE, RowsOut, SourceSides, TileScheduler, WARP_UNITS, WARPGROUP_UNITS,
    recompute_gradient,
};
use cubecl::prelude::*;

/// Bytes of eight lines.
const EIGHT: usize = 8 * LINE;

/// Offset at which thread `unit` writes accumulators with [`write_transposed()`]. Each thread addresses one of eight columns of the
/// accumulator, in the first or second eight columns, and the first or second eight of its warp's 16 rows. The swizzle permutes the
/// groups of eight rows by the column's number modulo 8.
#[cube]
pub fn lane_offset(unit: u32) -> u32 {
    let lane = unit % 32;
    let rows = (unit / 32 % 4 * 2 + lane / 8 % 2) ^ (lane % 8);
    lane / 16 * comptime!(EIGHT as u32) + lane % 8 * comptime!(LINE as u32) + rows * 16
}

/// Rounds an accumulator of 64 rows and `columns` columns, a multiple of 8, drops what is not `kept`, and writes it to shared memory
/// with a line of 64 rows for each column. `at` is the thread's own address, and `offset` is added to it.
#[cube]
pub fn write_transposed(
    at: u32,
    #[comptime] offset: usize,
    s: &Array<f32>,
    kept: &KeepMask,
    #[comptime] columns: usize,
    #[comptime] dtype: Dtype,
) {
    #[unroll]
    for i in 0..comptime!(columns.div_ceil(16)) {
        let mut words = Sequence::<u32>::new();
        #[unroll]
        for word in 0..comptime!((columns / 4 - 4 * i).min(4)) {
            let n = comptime!(8 * i + 2 * word);
            words.push(kept.apply_packed(pack(s[n], s[n + 1], dtype), comptime!(n / 2)));
        }
        store_transposed(at, comptime!(offset + 2 * EIGHT * i), &words);
    }
}

/// Multiplies an accumulator by a factor.
#[cube]
fn scale(sum: &mut Array<f32>, factor: f32, #[comptime] len: usize) {
    #[unroll]
    for n in 0..len {
        sum[n] *= factor;
    }
}

/// Writes a warpgroup's two panels of columns of dKᵀ or dVᵀ, multiplied by `factor`, over K or V.
#[cube]
pub fn write_sums(
    memory: &Memory<WideBlueprint>,
    sums: &mut Sequence<Array<f32>>,
    factor: f32,
    warp: u32,
    #[comptime] of: Operand,
) {
    let blueprint = comptime!(memory.blueprint);
    let panel = comptime!(blueprint.k_panel());
    let at = memory.tiles(of, warp / 4 * comptime!(2 * panel as u32) + lane_offset(UNIT_POS));
    #[unroll]
    for nth in 0..2usize {
        scale(sums.index_mut(nth), factor, comptime!(blueprint.keys / 2));
        write_transposed(
            at,
            comptime!(nth * panel),
            sums.index(nth),
            &KeepMask::none(),
            blueprint.keys,
            blueprint.scores.dtype,
        );
    }
}

/// Copies a key's row of eight columns for each thread from shared memory to `out`. Returns whether they are finite.
#[cube]
fn copy_row(
    memory: &Memory<WideBlueprint>,
    out: &mut RowsOut,
    at: usize,
    row: u32,
    live: bool,
    #[comptime] of: Operand,
    #[comptime] columns: usize,
) -> bool {
    let blueprint = comptime!(memory.blueprint);
    let lane = UNIT_POS % 32;
    let (panel, eight) = (lane / comptime!(32 / PANELS as u32), lane % comptime!(32 / PANELS as u32));
    let within = row * comptime!(LINE as u32) + (eight ^ (row % 8)) * 16;
    let words = load_shared_quad(memory.tiles(of, panel * comptime!(blueprint.k_panel() as u32) + within));
    let at = at + 2 * lane as usize;
    store_quad(&mut out.data[at..at + 1], &words, live && 8 * lane < comptime!(columns as u32));
    let mut trace = 0u32.runtime();
    #[unroll]
    for n in 0..4usize {
        // 0 times a non-finite number is NaN; −0 added to 0 is 0.
        trace = fma_packed(*words.index(n), 0u32.runtime(), trace, blueprint.scores.dtype);
    }
    trace == 0
}

/// Copies dK and dV of work tile `nth` from shared memory to the outputs, a warp one key at a time. With `hides`, keys that a hidden
/// NaN or infinity has reached are computed again.
#[cube]
pub fn store_keys<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    memory: &Memory<WideBlueprint>,
    nth: u32,
    warp: u32,
    sources: &SourceSides<E, N>,
    scores: &Scores<E, M, NB, NM>,
    outputs: &mut GradientOutputs,
    stats: &[u32],
    scheduler: &TileScheduler,
    #[comptime] hides: bool,
) {
    let blueprint = comptime!(memory.blueprint);
    let (columns_dk, columns_dv) = comptime!((blueprint.scores.columns_dk(), blueprint.scores.columns()));
    let (batch, head) = (memory.word(nth, WorkTileField::Batch), memory.word(nth, WorkTileField::HeadKv));
    let first = memory.word(nth, WorkTileField::KStart);
    let mut row = warp;
    while row < comptime!(blueprint.keys as u32) {
        let key = first + row;
        let live = scores.band.is_key(key);
        let dk_at = outputs.dqk.stride.at(batch as usize, head as usize, key);
        let dv_at = outputs.dv.stride.at(batch as usize, head as usize, key);
        let finite_k = copy_row(memory, &mut outputs.dqk, dk_at, row, live, Operand::K, columns_dk);
        let finite_v = copy_row(memory, &mut outputs.dv, dv_at, row, live, Operand::V, columns_dv);
        if comptime!(hides) && plane_any(live && !(finite_k && finite_v)) {
            // The stores of other threads to this row must come first.
            sync_plane();
            let group = scheduler.group_size.divisor;
            let mut of = GradientRows::new(batch as usize, head as usize, key, scores.band.transposed());
            of.set_columns(head * group, (head + 1) * group);
            recompute_gradient(sources, scores, outputs, stats, scheduler, &of, key, blueprint.of_keys());
        }
        row += comptime!((WARPGROUPS * WARPGROUP_UNITS / WARP_UNITS) as u32);
    }
}
