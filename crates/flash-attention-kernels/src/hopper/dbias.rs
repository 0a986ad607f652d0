//! The gradient of a bias with an element for each pair of query and key, computed block by block.
//!
//! ```text
//! for each block of 128 queries and some tiles of keys, for each batch and head that share it, for each tile:
//!     S = Q Kᵀ    dP = dO Vᵀ    P = 2^(c S' − lse)    dB += P ∘ (dP − delta)
//! ```
//!
//! `S'` is the score with softcap, bias and mask, lse is in base 2, and `c = log2(e)`. The sum is kept in registers, and is
//! taken in a fixed order. (FlashAttention-2, arXiv:2307.08691, algorithm 2: the gradient is the `dS` of that algorithm.)
//!
//! The kernel is bound by memory: the sums leave few registers, and the loads for two products are those of a forward of twice
//! the size. Rows of Q and dO stay in shared memory for all tiles of a block, and the block of the bias stays for all batches
//! and heads that share it. Tiles of K and V are streamed. Loads run ahead across heads and blocks: one warp decides which head
//! of which block comes next (a *turn*), and posts it to the others in slots of shared memory.
//!
//! ```text
//! warp of warpgroup   0                    1                    2          3
//! 0                   posts turns; K       its rows of a bias   its Q      its dO
//! 1                   V                    its rows of a bias   its Q      its dO
//! ```
//!
//! Blocks in which the band hides everything are no turns. They are filled with zeros at the end.

mod loads;
mod memory;
mod scheduler;
mod stores;

pub use scheduler::{Block, DbiasScheduler, DbiasSchedulerCompilationArg, DbiasSchedulerLaunch};

use super::layout::{Operand, Region};
use super::memory::Memory;
use super::operands::Streams;
use super::pipeline::PipelineState;
use super::products::products;
use super::{BiasBlueprint, BiasTile};
use crate::blocks::Visit;
use crate::fragment::{Scores, filled};
use crate::ptx::*;
use crate::softmax::add_softmax_backward;
use crate::tensor_core::{
    KeepMask, ScoreTile, Stride, WARPGROUP_ROWS, apply_mask, apply_score_mod, dropout_backward, probability_log2,
};
use cubecl::prelude::*;
use loads::{Loader, before, row_state};
use memory::{LAST, WARP_K, WorkTileField};
use stores::{fill_hidden, store_row};

/// Output for the gradient of the bias, `[1 | B, 1 | H, Sq, Sk]`.
#[derive(CubeType, CubeLaunch)]
pub struct BiasOut<E: Float> {
    /// The output in 8-byte vectors, used if its rows consist of such vectors.
    pub vectors: &'static mut [Vector<u32, Const<2>>],
    /// The output as elements, used otherwise.
    pub elements: &'static mut [E],
    /// Strides of rows, in vectors or elements as written.
    pub rows: Stride,
    /// Distance from one element of a row to the next.
    pub column: usize,
}

/// Computes the gradient of the bias.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dbias<E: Float, M: Numeric, NB: Size, NM: Size>(
    streams: Streams<E>,
    inputs: Scores<E, M, NB, NM>,
    out: &mut BiasOut<E>,
    counter: &[u32],
    scheduler: DbiasScheduler,
    #[comptime] blueprint: BiasBlueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (band, extras, exponent) = (inputs.band, inputs.score.extras, inputs.score.exponent);
    let (tile, scores) = comptime!((blueprint.tile, blueprint.scores));
    let (tile_k, tiles, stages) = comptime!((tile.tile_k, tile.tiles, tile.stages));
    let (row_stages, ahead) = comptime!((tile.row_stages, tile.ahead()));
    let s_len = comptime!(tile_k / 2);
    let bounded = comptime!(band.bounded_above || band.bounded_below);

    // -- shared memory, barriers, descriptors
    let shared =
        Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / scores.dtype.size()), 1024usize);
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    let lane = UNIT_POS % 32;
    let base = shared_address::<E>(&shared[0..1024]);
    let memory = Memory::new(base, UNIT_POS == 0, blueprint);
    let start = descriptor::<E>(&shared[0..1024], 16usize, 1024usize);
    let q_rows = memory.descriptor(start, warpgroup, Operand::Q);
    let d_rows = memory.descriptor(start, warpgroup, Operand::D);

    // -- the first loads
    let loader = Loader::<E> { streams, scheduler, band, warp };
    let mut next = CUBE_POS as u32;
    if warp == WARP_K {
        #[unroll]
        for turn in 0..comptime!(ahead as u32 + 1) {
            let number = plane_broadcast(next, 0u32);
            if memory.post(turn.runtime(), number, &scheduler, &band) {
                next = CUBE_COUNT as u32 + take_ticket(counter, opaque(scheduler.num_tiles) - 1);
            }
        }
    }
    let mut first = PipelineState::first();
    #[unroll]
    for nth in 0..comptime!(stages - 1) {
        loader.tiles(&memory, 0u32.runtime(), nth, &first);
        first.advance(stages);
    }
    #[unroll]
    for group in 0..comptime!(blueprint.groups_b()) {
        loader.bias(&memory, 0u32.runtime(), 0u32.runtime(), group);
    }
    #[unroll]
    for turn in 0..comptime!(row_stages as u32) {
        loader.rows(&memory, turn.runtime(), Operand::Q);
        loader.rows(&memory, turn.runtime(), Operand::D);
    }

    let mut sums = Sequence::<Array<f32>>::new();
    #[unroll]
    for _ in 0..tiles {
        sums.push(filled::<f32>(0.0f32, s_len));
    }
    let mut state = PipelineState::first();
    let mut turn = 0u32;
    // Number of blocks completed.
    let mut done = 0u32;
    memory.await_slot(0u32.runtime());
    while memory.word(turn, WorkTileField::Flags) != 0 {
        let memory = memory.opaque();
        let (stage, phase) = row_state(turn, tile);
        let of_stage = stage * comptime!(BiasTile::WARPGROUPS as u32);
        let rows_at = of_stage + warpgroup;
        let q_stage = u64::cast_from(of_stage * comptime!((scores.q_bytes() / 16) as u32));
        let d_stage = u64::cast_from(of_stage * comptime!((scores.d_bytes() / 16) as u32));
        mbarrier_wait(memory.full(Operand::Q, rows_at), phase);
        mbarrier_wait(memory.full(Operand::K, state.stage), state.phase);
        let of_row = rows_at * comptime!(blueprint.stats_bytes() as u32) + of_warpgroup * 64 + lane / 4 * 4;
        let lse0 = f32::reinterpret(load_shared(memory.at(Region::Lse, of_row)));
        let lse1 = f32::reinterpret(load_shared(memory.at(Region::Lse, of_row + 32)));
        // A non-finite lse must not make the probability of a hidden pair NaN. The score of a hidden pair is −∞: with any
        // finite lse its probability is 0.
        let lse0 = select(lse0 * 0.0f32 == 0.0f32, lse0, f32::MIN);
        let lse1 = select(lse1 * 0.0f32 == 0.0f32, lse1, f32::MIN);

        #[unroll]
        for of_turn in 0..tiles {
            let memory = memory.opaque();
            // -- S and dP
            let mut s = Array::<f32>::new(s_len);
            let mut ds = Array::<f32>::new(s_len);
            let k_tile = memory.descriptor(start, state.stage, Operand::K);
            let v_tile = memory.descriptor(start, state.stage, Operand::V);
            products(&mut s, q_rows + q_stage, k_tile, scores.head_dim, scores);
            if comptime!(of_turn == 0) {
                mbarrier_wait(memory.full(Operand::D, rows_at), phase);
            }
            mbarrier_wait(memory.full(Operand::V, state.stage), state.phase);
            products(&mut ds, d_rows + d_stage, v_tile, scores.head_dim_v, scores);

            // -- loads into the stage of the tile before this one
            loader.tiles(&memory, turn, comptime!(of_turn + stages - 1), &before(&state, tile));
            wgmma_wait(1usize);
            pin(&mut s, s_len);
            mbarrier_release(memory.empty(Operand::K, state.stage));
            if comptime!(of_turn + 1 == tiles) {
                mbarrier_release(memory.empty(Operand::Q, rows_at));
                loader.rows(&memory, turn + comptime!(row_stages as u32), Operand::Q);
            }

            // -- P
            let group = comptime!(of_turn * tile_k / blueprint.group_b());
            let group_at = warpgroup * comptime!(blueprint.groups_b() as u32) + comptime!(group as u32);
            if comptime!(scores.tiled_bias()) {
                mbarrier_wait(memory.full(Operand::Bias, group_at), done % 2);
            }
            let tile_b = memory.tiles(Operand::Bias, group_at * comptime!(blueprint.group_bytes() as u32));
            let sixteenth = comptime!(of_turn * tile_k % blueprint.group_b() / 16);
            // Slots are read again when needed, because this kernel is short of registers.
            let first_row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
            let first_key = memory.word(turn, WorkTileField::KStart) + comptime!((of_turn * tile_k) as u32);
            let (batch, head) = (memory.word(turn, WorkTileField::Batch), memory.word(turn, WorkTileField::Head));
            let visit = Visit { start: first_key, fully_visible: true.runtime(), masked: true.runtime() };
            let of_tile = ScoreTile::new(batch, head, band, first_row, &visit, tile_b, sixteenth);
            let _ = apply_score_mod(&mut s, &inputs, &of_tile, scores);
            if comptime!(bounded) {
                // Pairs past the ends of the sequences need no masking: they are not written.
                if !band.fully_visible(first_row, first_key, comptime!(WARPGROUP_ROWS as u32), comptime!(tile_k as u32))
                {
                    apply_mask(&mut s, &of_tile, false.runtime(), tile_k);
                }
            }
            #[unroll]
            for n in 0..s_len {
                let lse = if comptime!(n % 4 < 2) { lse0 } else { lse1 };
                s[n] = probability_log2(s[n], exponent, lse, scores.dtype);
            }
            pin(&mut s, s_len);
            let kept = KeepMask::of(&extras.dropout, &of_tile, scores);
            let leaves_group = comptime!(scores.tiled_bias() && (of_turn + 1) * tile_k % blueprint.group_b() == 0);
            if comptime!(leaves_group) && memory.word(turn, WorkTileField::Flags) & LAST != 0 {
                // All threads of the warp must have read it.
                sync_plane();
                mbarrier_release(memory.empty(Operand::Bias, group_at));
                loader.bias(&memory, turn + 1, done + 1, group);
            }

            // -- dS
            let empty_v = memory.empty(Operand::V, state.stage);
            state.advance(stages);
            // The branch of this wait keeps the assembler from moving the wait for dP above the exponentials.
            if comptime!(of_turn + 1 < tiles) {
                mbarrier_wait(memory.full(Operand::K, state.stage), state.phase);
            } else {
                memory.await_slot(turn + 1);
            }
            wgmma_wait(0usize);
            pin(&mut ds, s_len);
            mbarrier_release(empty_v);
            let delta0 = f32::reinterpret(load_shared(memory.at(Region::Delta, of_row)));
            let delta1 = f32::reinterpret(load_shared(memory.at(Region::Delta, of_row + 32)));
            if comptime!(of_turn + 1 == tiles) {
                // All threads of the warp must have read delta.
                sync_plane();
                mbarrier_release(memory.empty(Operand::D, rows_at));
                loader.rows(&memory, turn + comptime!(row_stages as u32), Operand::D);
            }
            dropout_backward(&mut ds, &kept, &extras.dropout, s_len);
            let sum = sums.index_mut(of_turn);
            #[unroll]
            for n in 0..s_len {
                let delta = if comptime!(n % 4 < 2) { delta0 } else { delta1 };
                // A hidden pair has gradient 0, whatever dO and V hold there.
                add_softmax_backward(sum, n, s[n], ds[n], delta);
            }
            // Without this, the compiler would defer the addition to the next tile and keep its operands in registers.
            pin(sum, s_len);
            // At the point where the fewest registers are in use.
            if comptime!(of_turn == 0) && warp == WARP_K {
                let number = plane_broadcast(next, 0u32);
                if memory.post(turn + comptime!(ahead as u32 + 1), number, &scheduler, &band) {
                    next = CUBE_COUNT as u32 + take_ticket(counter, opaque(scheduler.num_tiles) - 1);
                }
            }
        }

        // -- results
        if memory.word(turn, WorkTileField::Flags) & LAST != 0 {
            let first_row = memory.word(turn, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
            let k_start = memory.word(turn, WorkTileField::KStart);
            let row = first_row + of_warpgroup * 16 + lane / 4;
            let (bias_batch, bias_head) =
                (memory.word(turn, WorkTileField::BiasBatch), memory.word(turn, WorkTileField::BiasHead));
            #[unroll]
            for r in 0..2usize {
                let row = row + comptime!(8 * r as u32);
                let at = out.rows.at(bias_batch as usize, bias_head as usize, row);
                let live = band.is_query(row);
                store_row(&sums, r, out, at, &band, live, k_start, blueprint);
            }
            #[unroll]
            for nth in 0..tiles {
                clear(sums.index_mut(nth), s_len);
            }
            done += 1;
        }
        turn += 1;
    }

    // -- zeros for the blocks that the band hides
    if comptime!(bounded) {
        fill_hidden(out, &band, &scheduler, warp, blueprint);
    }
}

/// Sets an accumulator to zeros.
#[cube]
fn clear(sum: &mut Array<f32>, #[comptime] len: usize) {
    #[unroll]
    for n in 0..len {
        sum[n] = 0.0f32;
    }
}
