//! Gradients: `dq`, a block of queries at a time, or `dk` and `dv`, a block of keys at a time.
//!
//! ```text
//! Dq      for each tile of keys that the queries see, the last first:
//!             S = Q Kᵀ    dP = dO Vᵀ    P = 2^(c S − lse)    dS = P ∘ (dP − delta)    dQ += dS K
//! DkDv    for each query head of the group and each tile of queries that see the keys, the last first:
//!             Sᵀ = K Qᵀ   dPᵀ = V dOᵀ   Pᵀ = 2^(c Sᵀ − lse)  dSᵀ = Pᵀ ∘ (dPᵀ − delta) dV += Pᵀ dO    dK += dSᵀ Q
//! All         as DkDv, the first tile first if blocks add in order, and                              dQ += dS K
//! Sums    as Dq or as DkDv, without dQ, dK and dV: only the sums of dT ∘ factor over the columns
//! ```
//!
//! lse is in base 2, `c = log2(e) · scale`, and the scale is applied at the end. (FlashAttention-2, arXiv:2307.08691, algorithm
//! 2.)
//!
//! `Dq`, `DkDv` and `All` are one kernel: `DkDv` is `Dq` with queries and keys exchanged and one more product. `P` and `dS` are
//! then operands as they are in registers, and every sum is taken by one consumer group in a fixed order.
//! [`Role`](crate::fragment::Role) defines rows and columns. Computing all three gradients at once takes five products
//! instead of seven, but every block of keys then adds to `dQ` in memory ([`reduce`](super::reduce)). If work tiles share the query
//! heads of a group, their `dK` and `dV` are added up afterwards ([`splits`](super::splits)).
//!
//! `Dq`, `DkDv` and `All` may compute the [sums](crate::tensor_core::RowSums) as well.
//!
//! Within a warpgroup, `S` and `dP` are in flight together, and `dV` runs under the computation of `dS` from `dP`. Everything
//! else overlaps with the products of the other warpgroup.

use super::layout::{Layout, Operand, Region, columns_offset};
use super::memory::{CONTINUED, CONTINUES, FULLY_MASKED, Memory, WorkTileField};
use super::operands::{DqAccum, Schedule, Streams};
use super::pipeline::PipelineState;
use super::producer::{Producer, load_next};
use super::products::products;
use super::reduce::{ADDENDS, Reducer};
use crate::dtype::Dtype;
use crate::fragment::Scores;
use crate::ptx::*;
use crate::tensor_core::*;
use cubecl::prelude::*;

/// A step with at least this much work hides the load of a tile. Work is the tile's width times the sum of both head dimensions.
const LATE_REFILL: usize = 64 * (128 + 128);

/// Computes the gradients of the rows. With `Role::All`, also adds dQ to `dq_accum`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn gradient<E: Float, M: Numeric, NB: Size, NM: Size>(
    streams: Streams<E>,
    sources: SourceSides<E, Const<8>>,
    scores: Scores<E, M, NB, NM>,
    outputs: &mut GradientOutputs,
    dq_accum: DqAccum,
    schedule: Schedule,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (extras, exponent, scale) = (scores.score.extras, scores.score.exponent, scores.score.scale);
    let (scheduler, stats) = (schedule.tiles, streams.stats.unwrap());
    let tile = comptime!(blueprint.tile);
    let dtype = comptime!(blueprint.dtype);
    let (tile_k, stages) = comptime!((tile.tile_k, tile.stages));
    let s_len = comptime!(tile_k / 2);
    let (columns_dk, columns_dv) = comptime!((blueprint.columns_dk(), blueprint.columns()));
    let (differentiates, sums_values) = comptime!((blueprint.differentiates(), blueprint.sums_values()));
    let (accumulates, sums) = comptime!((blueprint.accumulates(), !blueprint.sums.is_empty()));
    let (transposed, reduces) = comptime!((blueprint.transposed(), blueprint.reduces()));
    let varlen = comptime!(extras.is_varlen());
    let hides = comptime!(blueprint.hides(scores.band.bounded_above || scores.band.bounded_below));
    let drops = comptime!(extras.dropout.seed.is_some());
    // A warp that loads waits until the other warpgroup has released the stage. At the end of a step it has, even if it is half a step
    // behind, so that the warpgroups may compute in turn. With two stages, or if a step is short, the tile would arrive too late.
    // Warpgroups that add to dQ meet in every step.
    let work = comptime!(tile_k * (blueprint.head_dim + blueprint.head_dim_v));
    let refills_late = comptime!(accumulates && !reduces && stages > 2 && work >= LATE_REFILL);

    // -- shared memory, barriers, descriptors
    let shared = Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / dtype.size()), 1024usize);
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    let memory = Memory::of_group(shared_address::<E>(&shared[0..1024]), blueprint);
    let lane = UNIT_POS % 32;
    let quarter = lane % 4;
    // Descriptors count units of 16 bytes, and all of them are sums of this one and a constant: uniform registers are scarce.
    let start = descriptor::<E>(&shared[0..1024], 16usize, 1024usize);
    let q_rows = start + u64::cast_from(warpgroup * comptime!((blueprint.q_bytes() / 16) as u32));
    let d_rows = start + u64::cast_from(warpgroup * comptime!((blueprint.d_bytes() / 16) as u32));
    // Tiles are read by rows for S and dP, and by columns for the accumulated gradients.
    let (d_at, k_at, v_at) =
        comptime!((blueprint.units(Operand::D), blueprint.units(Operand::K), blueprint.units(Operand::V)));
    let by_columns = comptime!(columns_offset(tile_k));
    let k_stage = comptime!((blueprint.k_bytes() / 16) as u32);
    let v_stage = comptime!((blueprint.v_bytes() / 16) as u32);
    let ds_at = comptime!(if blueprint.reduces() { blueprint.offset(Region::Ds) as usize / dtype.size() } else { 0 });
    let (ds, k) = (&shared[ds_at..ds_at + 1024], &shared[0..1024]);
    let mut reducer = Reducer::new::<E>(ds, k, dq_accum, scheduler, memory, warp, blueprint);

    // -- the first loads
    let mut producer = Producer::<E>::new(memory, streams, schedule, scores.band, extras, 0u32, warp, tile);
    producer.fill(blueprint);
    let mut state = PipelineState::first();
    let mut nth = 0u32;
    let mut steps = memory.work_tile(0u32, WorkTileField::Steps);

    let mut sum_k = Array::<f32>::new(comptime!(if accumulates { columns_dk / 2 } else { 0 }));
    let mut sum_v = Array::<f32>::new(comptime!(if sums_values { columns_dv / 2 } else { 0 }));
    let mut row_sums = RowSums::new(blueprint);
    while steps != 0 {
        let band = memory.band(nth, &scores.band, varlen);
        let first_row = memory.work_tile(nth, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
        let row = first_row + of_warpgroup * 16 + lane / 4;
        let k_last = memory.work_tile(nth, WorkTileField::KLast);
        let edges = band.edges(first_row, k_last, comptime!(WARPGROUP_ROWS as u32), comptime!(tile_k as u32));
        let mut k_start =
            if comptime!(blueprint.ordered) { k_last - (steps - 1) * comptime!(tile_k as u32) } else { k_last };
        let flags = memory.work_tile(nth, WorkTileField::Flags);
        let fully_masked = flags & FULLY_MASKED != 0;
        let continued = flags & CONTINUED != 0;
        let of_rows = memory.row_statistics(stats, nth, row, &band, &scheduler);
        if comptime!(reduces) {
            #[unroll]
            for of_any in 0..comptime!(tile.warpgroups as u32) {
                mbarrier_wait(memory.full(Operand::Q, of_any), nth % 2);
            }
        } else {
            mbarrier_wait(memory.full(Operand::Q, warpgroup), nth % 2);
        }
        if comptime!(sums_values) {
            mbarrier_wait(memory.full(Operand::K, state.stage), state.phase);
        }

        for step in 0..steps {
            if comptime!(!sums_values) {
                mbarrier_wait(memory.full(Operand::K, state.stage), state.phase);
            }
            let from_last = if comptime!(blueprint.ordered) { steps - 1 - step } else { step };
            let edge = from_last < edges.lead || from_last >= edges.tail;
            let visit = memory.visit(&state, k_start, edge);

            // -- S and dP
            let mut s = Array::<f32>::new(s_len);
            let mut ds = Array::<f32>::new(comptime!(if differentiates { s_len } else { 0 }));
            let k_tile = start + u64::cast_from(state.stage * k_stage);
            let v_tile = start + u64::cast_from(state.stage * v_stage);
            products(&mut s, q_rows, k_tile + k_at, blueprint.head_dim, blueprint);
            mbarrier_wait(memory.full(Operand::V, state.stage), state.phase);
            if comptime!(differentiates) {
                products(&mut ds, d_rows + d_at, v_tile + v_at, blueprint.head_dim_v, blueprint);
            }
            // Drawn while the products run.
            let of_tile = memory.score_tile(nth, band, first_row, &visit, 0u32.runtime(), drops);
            let kept = KeepMask::of(&extras.dropout, &of_tile, blueprint);
            if comptime!(!refills_late) && nth + step != 0 {
                producer.refill(blueprint);
            }
            if comptime!(blueprint.ordered) && !fully_masked {
                reducer.await_turn(nth, &band, visit.start);
            }
            wgmma_wait(comptime!(usize::from(differentiates)));
            pin(&mut s, s_len);
            let last = step + 1 == steps;
            if comptime!(!reduces) && last {
                load_next(&streams, &memory, nth, warp, Operand::Q);
            }

            // -- P
            let tile_b = memory.await_bias(&state, warpgroup);
            let of_tile = memory.score_tile(nth, band, first_row, &visit, tile_b, drops);
            let derivatives = apply_score_mod(&mut s, &scores, &of_tile, blueprint);
            memory.keep_arguments(&derivatives.arguments);
            if !visit.fully_visible || fully_masked {
                apply_mask(&mut s, &of_tile, fully_masked, tile_k);
            }
            let of_stats = state.stage * comptime!(blueprint.stats_bytes() as u32)
                + 8 * quarter
                + stats_offset(visit.start, blueprint);
            let lse_at = memory.at(Region::Lse, of_stats);
            let lse = tile_statistics(lse_at, &of_rows.lse, blueprint);
            #[unroll]
            for n in 0..s_len {
                s[n] = probability_log2(s[n], exponent, *lse.index(n), blueprint.dtype);
            }
            let adds = u32::cast_from(step > 0 || continued);
            if comptime!(sums_values) {
                // dV runs under the computation of dS.
                let mut p = fragments(blueprint);
                to_fragments(&s, &kept, &mut p, blueprint);
                pin(&mut sum_v, comptime!(columns_dv / 2));
                mma_registers(&mut sum_v, &p, v_tile + comptime!(v_at + by_columns), adds, columns_dv, dtype);
            }
            pin(&mut s, s_len);
            let next = state.next(stages);

            // -- dS
            if comptime!(differentiates) {
                if comptime!(sums_values) {
                    wgmma_wait(1usize);
                } else {
                    // The branch of this wait keeps the assembler from moving the wait for dP above the exponentials. This V
                    // has already arrived; a wait for the next K might take as long as this step.
                    mbarrier_wait(memory.full(Operand::V, state.stage), state.phase);
                    wgmma_wait(0usize);
                }
                pin(&mut ds, s_len);
                if last {
                    load_next(&streams, &memory, nth, warp, Operand::D);
                }
                let delta_at = memory.at(Region::Delta, of_stats);
                let delta = tile_statistics(delta_at, &of_rows.delta, blueprint);
                tile_backward(&mut ds, &s, &delta, &kept, &extras.dropout, s_len);
                if comptime!(sums) {
                    let of_tile = memory.score_tile(nth, band, first_row, &visit, tile_b, drops);
                    let arguments = memory.kept_arguments(&derivatives.arguments);
                    row_sums.add(&ds, &arguments, &scores, &of_tile, blueprint);
                }
                if comptime!(blueprint.keeps_derivative) {
                    derivatives.multiply(&mut ds, &s, blueprint);
                } else if comptime!(blueprint.capped && accumulates) {
                    let of_tile = memory.score_tile(nth, band, first_row, &visit, tile_b, drops);
                    softcap_backward(&mut ds, &s, &lse, &scores, &of_tile, blueprint);
                }
                pin(&mut ds, s_len);
            }
            memory.release_bias(&state);
            if comptime!(sums_values) {
                // The branch keeps the wait for dV in its place, as above.
                if step + 1 < steps {
                    mbarrier_wait(memory.full(Operand::K, next.stage), next.phase);
                }
                wgmma_wait(0usize);
                pin(&mut sum_v, comptime!(columns_dv / 2));
            }
            mbarrier_release(memory.empty(Operand::V, state.stage));

            // -- dQ or dK, or both
            if comptime!(accumulates) {
                let mut g = fragments(blueprint);
                to_fragments(&ds, &KeepMask::none(), &mut g, blueprint);
                let mut dq = Array::<f32>::new(comptime!(if reduces { ADDENDS } else { 0 }));
                if comptime!(reduces) {
                    reducer.write(&g, blueprint);
                    reducer.multiply(&mut dq, blueprint);
                }
                pin(&mut sum_k, comptime!(columns_dk / 2));
                mma_registers(&mut sum_k, &g, k_tile + comptime!(k_at + by_columns), adds, columns_dk, dtype);
                if comptime!(refills_late) && nth + step != 0 {
                    producer.refill(blueprint);
                }
                if comptime!(blueprint.ordered) && step > 0 && !fully_masked {
                    // As late as here, where products are in flight while this warp waits for its fence.
                    reducer.pass_turn(nth, &band, visit.start - comptime!(tile_k as u32));
                }
                if comptime!(reduces) {
                    wgmma_wait(1usize);
                    pin(&mut dq, ADDENDS);
                    if comptime!(!blueprint.ordered) || !fully_masked {
                        reducer.add(&dq, nth, &band, visit.start);
                    }
                    // As above, so that dK runs under the additions. This K has already arrived. The barrier must belong to a
                    // stage that this warp has not released: the barrier of V may be two phases ahead, and a wait by parity
                    // would never end.
                    mbarrier_wait(memory.full(Operand::K, state.stage), state.phase);
                }
                wgmma_wait(0usize);
                pin(&mut sum_k, comptime!(columns_dk / 2));
                if comptime!(reduces) && last {
                    load_next(&streams, &memory, nth, warp, Operand::Q);
                }
            }
            mbarrier_release(memory.empty(Operand::K, state.stage));
            state.advance(stages);
            k_start = if comptime!(blueprint.ordered) {
                k_start + comptime!(tile_k as u32)
            } else {
                k_start - comptime!(tile_k as u32)
            };
        }

        if comptime!(blueprint.ordered) && !fully_masked {
            reducer.meet();
            reducer.pass_turn(nth, &band, k_last);
        }

        // -- results
        if comptime!(sums) {
            let batch = memory.work_tile(nth, WorkTileField::Batch) as usize;
            let head = memory.work_tile(nth, WorkTileField::Head) as usize;
            let mut rows = GradientRows::new(batch, head, first_row + of_warpgroup * 16, band);
            let stream = memory.work_tile(nth, WorkTileField::HeadKv);
            rows.set_columns(stream, stream + 1);
            row_sums.write(&mut outputs.sums, &rows, &sources, &scores, stats, &scheduler, blueprint);
        }
        if comptime!(accumulates || sums_values) && flags & CONTINUES == 0 {
            let split = comptime!(blueprint.split_group);
            let of_batch = comptime!(if split { WorkTileField::BatchOut } else { WorkTileField::Batch });
            let written = comptime!(if split { Dtype::F32 } else { dtype });
            let batch = memory.work_tile(nth, of_batch) as usize;
            let head = memory.work_tile(nth, WorkTileField::Head) as usize;
            let mut rows = GradientRows::new(batch, head, first_row + of_warpgroup * 16, band);
            if comptime!(accumulates) {
                rows.store(&sum_k, &mut outputs.dqk, 0usize, scale, columns_dk, written);
            }
            if comptime!(sums_values) {
                rows.store(&sum_v, &mut outputs.dv, 0usize, extras.dropout.scale(), columns_dv, written);
            }
            // Splits are checked after they have been added up.
            if comptime!(hides && !split) {
                if comptime!(accumulates) {
                    rows.check(&sum_k, columns_dk);
                }
                if comptime!(sums_values) {
                    rows.check(&sum_v, columns_dv);
                }
                let stream = memory.work_tile(nth, WorkTileField::HeadKv);
                let group = if comptime!(transposed) { scheduler.group_size.divisor } else { 1u32.runtime() };
                rows.set_columns(stream + 1 - group, stream + 1);
                rows.recompute(&of_rows, &sources, &scores, outputs, stats, &scheduler, blueprint);
            }
        }
        nth += 1;
        steps = memory.work_tile(nth, WorkTileField::Steps);
    }
}

/// Offset in bytes of a tile's statistics from the address that they were loaded to: loads begin at multiples of 16 bytes,
/// tiles of several sequences anywhere.
#[cube]
fn stats_offset(k_start: u32, #[comptime] blueprint: Blueprint) -> u32 {
    if comptime!(blueprint.varlen && blueprint.transposed()) { k_start % 4 * 4 } else { 0u32.runtime() }
}
