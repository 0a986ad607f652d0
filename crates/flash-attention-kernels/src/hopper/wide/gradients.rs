//! The kernel. One step computes all gradients of a tile of 64 queries and the block of keys.
//!
//! Within a step, tensor cores are busy while the other units compute: `dP` runs under the exponentials, `dV` under the
//! computation of `dS`, `dK` under the additions of the first half of `dQ`, and `S` of the next tile under those of the second half.

use super::super::layout::{Operand, Region};
use super::super::memory::Memory;
use super::super::operands::{DqAccum, Schedule, Streams};
use super::super::pipeline::PipelineState;
use super::loads::Loader;
use super::memory::{EntryField, WorkTileField};
use super::products::Products;
use super::stores::{lane_offset, store_keys, write_sums, write_transposed};
use super::{WARPGROUPS, WideBlueprint};
use crate::blocks::Visit;
use crate::fragment::Scores;
use crate::hopper::dq_accum_columns;
use crate::hopper::reduce::ADDENDS;
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::*;
use cubecl::prelude::*;

/// Named barrier of all threads. Barrier 0 belongs to `sync_cube`.
const MEET: u32 = 1;

/// Waits until all threads of the thread block have arrived.
#[cube]
fn meet() {
    named_sync(MEET, comptime!((WARPGROUPS * WARPGROUP_UNITS) as u32));
}

/// Computes dK and dV, and adds dQ to `dq_accum`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn gradients<E: Float, M: Numeric, NB: Size, NM: Size>(
    streams: Streams<E>,
    sources: SourceSides<E, Const<8>>,
    inputs: Scores<E, M, NB, NM>,
    outputs: &mut GradientOutputs,
    dq_accum: DqAccum,
    schedule: Schedule,
    #[comptime] blueprint: WideBlueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (band, extras) = (inputs.band, inputs.score.extras);
    let (scheduler, stats) = (schedule.tiles, streams.stats.unwrap());
    let (scores, stages, keys) = comptime!((blueprint.scores, blueprint.stages, blueprint.keys));
    // Registers of a warpgroup's scores, and of a panel of its sums.
    let (s_len, sum_len) = comptime!((keys / 4, keys / 2));
    let hides = comptime!(scores.hides(band.bounded_above || band.bounded_below));

    // -- shared memory, barriers, descriptors
    let shared =
        Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / scores.dtype.size()), 1024usize);
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    let lane = UNIT_POS % 32;
    let memory = Memory::new(shared_address::<E>(&shared[0..1024]), UNIT_POS == 0, blueprint);
    let start = descriptor::<E>(&shared[0..1024], 16usize, 1024usize);
    let products = Products { start, warpgroup, memory };
    // This thread's first vector of a tile of `dq_accum` in the warpgroup's first panel.
    let addend =
        (warpgroup * comptime!(2 * WARPGROUP_ROWS as u32) + of_warpgroup * 16) * comptime!(PANEL as u32 / 4) + lane;

    // -- the first loads
    let mut loader = Loader::<E>::new(memory, streams, schedule, band, warp);
    loader.fill(blueprint);
    let mut state = PipelineState::first();
    let mut nth = 0u32;
    memory.await_slot(nth);
    let mut steps = memory.word(nth, WorkTileField::Steps);

    let mut sum_k = Sequence::<Array<f32>>::new();
    let mut sum_v = Sequence::<Array<f32>>::new();
    #[unroll]
    for _ in 0..2usize {
        sum_k.push(Array::<f32>::new(sum_len));
        sum_v.push(Array::<f32>::new(sum_len));
    }
    if steps != 0 {
        loader.keys(nth);
    }
    while steps != 0 {
        let block = Block { memory, products, nth, band };
        let mut s = Array::<f32>::new(s_len);
        mbarrier_wait(memory.full(Operand::K, 0u32), nth % 2);
        memory.await_tile(Operand::Q, &state);
        products.scores(&mut s, state.stage, Operand::Q);
        mbarrier_wait(memory.full(Operand::V, 0u32), nth % 2);
        block.scores(&mut s, &mut sum_v, &state, &inputs, true);

        for step in 0..steps {
            let memory = memory.opaque();
            // -- the first half of dQ, and dK
            let mut dq = Array::<f32>::new(ADDENDS);
            products.dq(&mut dq, 0usize);
            pin_all(&mut sum_k, sum_len);
            products.sums(&mut sum_k, state.stage, u32::cast_from(step > 0), Operand::Q);
            loader.refill(Operand::D, blueprint);
            let to = memory.entry(state.stage, EntryField::Row) as usize
                * comptime!(dq_accum_columns(scores.head_dim) / 4)
                + addend as usize;
            wgmma_wait(1usize);
            add(&dq_accum, to, &mut dq);

            // -- the second half of dQ
            let next = state.next(stages);
            let more = step + 1 < steps;
            // The branch of this wait keeps the assembler from moving the product above the additions, whose registers it uses.
            if more {
                memory.await_tile(Operand::Q, &next);
            }
            let mut dq = Array::<f32>::new(ADDENDS);
            products.dq(&mut dq, 1usize);
            if more {
                // -- S, P and dS of the next tile
                let mut s = Array::<f32>::new(s_len);
                products.scores(&mut s, next.stage, Operand::Q);
                wgmma_wait(1usize);
                pin_all(&mut sum_k, sum_len);
                mbarrier_release(memory.empty(Operand::Q, state.stage));
                add(&dq_accum, to + comptime!(WARPGROUP_ROWS * PANEL / 4), &mut dq);
                loader.refill(Operand::Q, blueprint);
                block.scores(&mut s, &mut sum_v, &next, &inputs, false);
            } else {
                wgmma_wait(0usize);
                pin_all(&mut sum_k, sum_len);
                mbarrier_release(memory.empty(Operand::Q, state.stage));
                add(&dq_accum, to + comptime!(WARPGROUP_ROWS * PANEL / 4), &mut dq);
                loader.refill(Operand::Q, blueprint);
            }
            state.advance(stages);
        }

        // -- results
        // All warps have multiplied with K and V, which the results replace.
        meet();
        write_sums(&memory, &mut sum_k, inputs.score.scale, warp, Operand::K);
        write_sums(&memory, &mut sum_v, extras.dropout.scale(), warp, Operand::V);
        meet();
        store_keys(&memory, nth, warp, &sources, &inputs, outputs, stats, &scheduler, hides);
        sync_async_proxy_shared();
        meet();
        nth += 1;
        memory.await_slot(nth);
        steps = memory.word(nth, WorkTileField::Steps);
        if steps != 0 {
            loader.keys(nth);
        }
    }
}

/// A warpgroup's half of a block of keys.
#[derive(CubeType)]
struct Block {
    memory: Memory<WideBlueprint>,
    products: Products,
    /// The number of the work tile.
    nth: u32,
    band: Band,
}

#[cube]
impl Block {
    /// Computes `dS` of a tile of queries, whose S is being computed, and writes it to shared memory. Adds to dV, of which the tile
    /// may be the `first` one.
    fn scores<E: Float, M: Numeric, NB: Size, NM: Size>(
        &self,
        s: &mut Array<f32>,
        sum_v: &mut Sequence<Array<f32>>,
        state: &PipelineState,
        inputs: &Scores<E, M, NB, NM>,
        #[comptime] first: bool,
    ) {
        let memory = self.memory.opaque();
        let (blueprint, scores) = comptime!((self.memory.blueprint, self.memory.blueprint.scores));
        let dtype = comptime!(scores.dtype);
        let (half, s_len, sum_len) = comptime!((blueprint.keys / 2, blueprint.keys / 4, blueprint.keys / 2));
        let (extras, exponent) = (inputs.score.extras, inputs.score.exponent);
        // This thread's first query of the tile, and the address at which it writes its part of Pᵀ and dSᵀ. They are computed for each
        // tile, because registers are scarce.
        let unit = opaque(UNIT_POS);
        let lane_row = unit / 32 % 4 * 16 + unit % 32 / 4;
        let of_half = self.products.warpgroup * comptime!((half * LINE) as u32);
        let tile_at = memory.at(Region::Ds, of_half + lane_offset(unit));

        // -- dP
        let mut ds = Array::<f32>::new(s_len);
        memory.await_tile(Operand::D, state);
        self.products.scores(&mut ds, state.stage, Operand::D);
        // Drawn while the products run. The branch of this wait keeps the assembler from drawing after it. This Q has already arrived.
        let of_tile = self.score_tile(&memory, state, inputs);
        let kept = KeepMask::of(&extras.dropout, &of_tile, scores);
        if comptime!(kept.drops) {
            memory.await_tile(Operand::Q, state);
        }
        wgmma_wait(1usize);
        pin(s, s_len);

        // -- P
        let of_tile = self.score_tile(&memory, state, inputs);
        let derivatives = apply_score_mod(s, inputs, &of_tile, scores);
        let fully_masked = memory.word(self.nth, WorkTileField::FullyMasked) != 0;
        let rows = comptime!(WARPGROUP_ROWS as u32);
        let visible = self.band.fully_visible(of_tile.first_row, of_tile.k_start, rows, comptime!(half as u32));
        if !visible || fully_masked {
            apply_mask(s, &of_tile, fully_masked, half);
        }
        let lse = statistics(&memory, Region::Lse, state, lane_row);
        let lse = tile_statistics(0u32, &lse, scores);
        #[unroll]
        for n in 0..s_len {
            s[n] = probability_log2(s[n], exponent, *lse.index(n), dtype);
        }
        if comptime!(!first) {
            // All warps have multiplied with dS of the step before: they have released its Q.
            let before = state.previous(blueprint.stages);
            mbarrier_wait(memory.empty(Operand::Q, before.stage), before.phase);
        }
        write_transposed(tile_at, 0usize, &*s, &kept, half, dtype);
        sync_async_proxy_shared();
        meet();

        // -- dV, which runs under the computation of dS
        pin_all(sum_v, sum_len);
        self.products.sums(sum_v, state.stage, comptime!(u32::from(!first)).runtime(), Operand::D);

        // -- dS
        pin(s, s_len);
        wgmma_wait(1usize);
        pin(&mut ds, s_len);
        let delta = statistics(&memory, Region::Delta, state, lane_row);
        let delta = tile_statistics(0u32, &delta, scores);
        tile_backward(&mut ds, &*s, &delta, &kept, &extras.dropout, s_len);
        if comptime!(scores.keeps_derivative) {
            derivatives.multiply(&mut ds, &*s, scores);
        } else if comptime!(scores.capped) {
            let of_tile = self.score_tile(&memory, state, inputs);
            softcap_backward(&mut ds, &*s, &lse, inputs, &of_tile, scores);
        }
        pin(&mut ds, s_len);
        // The branch of this wait keeps the assembler from moving the wait for dV above the computation of dS. This Q has already
        // arrived.
        memory.await_tile(Operand::Q, state);
        wgmma_wait(0usize);
        pin_all(sum_v, sum_len);
        mbarrier_release(memory.empty(Operand::D, state.stage));
        // All warps have multiplied with P.
        meet();
        write_transposed(tile_at, 0usize, &ds, &KeepMask::none(), half, dtype);
        sync_async_proxy_shared();
        meet();
    }

    /// The location of the scores. Batch and head are only read if the scores depend on them.
    fn score_tile<E: Float, M: Numeric, NB: Size, NM: Size>(
        &self,
        memory: &Memory<WideBlueprint>,
        state: &PipelineState,
        inputs: &Scores<E, M, NB, NM>,
    ) -> ScoreTile {
        let scores = comptime!(self.memory.blueprint.scores);
        let drops = comptime!(inputs.score.extras.dropout.seed.is_some());
        let (mut batch, mut head) = (0u32.runtime(), 0u32.runtime());
        if comptime!(scores.modified || scores.alibi || drops || scores.hides_pairs()) {
            batch = memory.word(self.nth, WorkTileField::Batch);
            head = memory.entry(state.stage, EntryField::Head);
        }
        // Read again instead of kept, because registers are scarce.
        let half = comptime!(self.memory.blueprint.keys as u32 / 2);
        let start = memory.word(self.nth, WorkTileField::KStart) + self.products.warpgroup * half;
        let visit = Visit { start, fully_visible: true.runtime(), masked: true.runtime() };
        let first_row = memory.entry(state.stage, EntryField::QStart);
        ScoreTile::new(batch, head, self.band, first_row, &visit, 0u32.runtime(), 0usize)
    }
}

/// lse or delta of a thread's two rows of a tile.
#[cube]
fn statistics(memory: &Memory<WideBlueprint>, #[comptime] of: Region, state: &PipelineState, row: u32) -> Array<f32> {
    let mut both = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        both[r] = memory.statistic(of, state.stage, row + comptime!(8 * r as u32));
    }
    both
}

/// Adds 64 columns of dQ, whose product is complete, to `dq_accum` from vector `at` on.
#[cube]
fn add(dq_accum: &DqAccum, at: usize, dq: &mut Array<f32>) {
    pin(dq, ADDENDS);
    let to = &dq_accum.sums[at..at + 1];
    #[unroll]
    for i in 0..comptime!(ADDENDS / 4) {
        add_quad(to, &*dq, i);
    }
}

/// Pins a warpgroup's two panels of sums.
#[cube]
fn pin_all(sums: &mut Sequence<Array<f32>>, #[comptime] len: usize) {
    #[unroll]
    for nth in 0..2usize {
        pin(sums.index_mut(nth), len);
    }
}
