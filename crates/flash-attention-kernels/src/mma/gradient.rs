//! Gradients: `dq`, one thread block for each block of queries, or `dk` and `dv`, one thread block for each block of keys.
//!
//! ```text
//! Dq      for each tile of keys that the queries see, the last first:
//!             S = Q Kᵀ    dP = dO Vᵀ    P = 2^(c S − lse)    dS = P ∘ (dP − delta)    dQ += dS K
//! DkDv    for each query head of the group and each tile of queries that see the keys, the last first:
//!             Sᵀ = K Qᵀ   dPᵀ = V dOᵀ   Pᵀ = 2^(c Sᵀ − lse)  dSᵀ = Pᵀ ∘ (dPᵀ − delta) dV += Pᵀ dO    dK += dSᵀ Q
//! ```
//!
//! Here lse is in base 2, `c = log2(e) · scale`, and dQ and dK are multiplied by the scale at the end. As for Hopper, `DkDv` is `Dq` with
//! queries and keys exchanged, and one more product. One warp takes each sum, in a fixed order. [`Role`](crate::fragment::Role)
//! tells what rows and columns are.

use super::forward::registers;
use super::ops::{copies_commit, copies_wait, multiply_columns, multiply_rows};
use super::tiles::{CopiedRows, copy_rows, copy_words, lane_of_columns, lane_of_rows, lane_of_sums};
use super::visits::{Cursor, VisitedTile, steps_of_heads};
use super::{MmaBlueprint, Products};
use crate::fragment::Scores;
use crate::mask::Band;
use crate::ptx::shared_address;
use crate::tensor_core::*;
use cubecl::prelude::*;

/// Gradients of the rows: `dq`, or `dk` and `dv`. `stats` holds lse and delta of all queries, from
/// [`delta`](mod@crate::tensor_core::delta).
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn gradient<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: SourceSides<E, N>,
    inputs: Scores<E, M, NB, NM>,
    outputs: &mut GradientOutputs,
    stats: &[u32],
    scheduler: TileScheduler,
    #[comptime] blueprint: MmaBlueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (extras, exponent, scale) = (inputs.score.extras, inputs.score.exponent, inputs.score.scale);
    let bounded = comptime!(inputs.band.bounded_above || inputs.band.bounded_below);
    let (tile, scores, products) = comptime!((blueprint.tile, blueprint.scores, blueprint.products));
    let (groups, tile_k, dtype) = comptime!((tile.groups, tile.tile_k, scores.dtype));
    let s_len = comptime!(tile_k / 2);
    let (head_dim, head_dim_v) = comptime!((scores.head_dim, scores.head_dim_v));
    let (columns_dk, columns_dv) = comptime!((scores.columns_dk(), scores.columns()));
    let (differentiates, sums_values) = comptime!((scores.differentiates(), scores.sums_values()));
    let transposed = comptime!(scores.transposed());
    let (k_bytes, v_bytes) = comptime!((scores.k_bytes() as u32, scores.v_bytes() as u32));
    let stats_bytes = comptime!(scores.stats_bytes() as u32);
    let hides = comptime!(scores.hides(bounded));
    if CUBE_POS as u32 >= scheduler.len(&extras) {
        terminate!();
    }

    // -- shared memory: Q and dO of each group, two tiles each of K, V, lse and delta
    let shared = Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / dtype.size()), 1024usize);
    let q_at = shared_address::<E>(&shared[0..1024]);
    let d_at = q_at + comptime!((scores.tile.warpgroups * scores.q_bytes()) as u32);
    let k_at = d_at + comptime!((scores.tile.warpgroups * scores.d_bytes()) as u32);
    let v_at = k_at + comptime!(tile.stages as u32 * k_bytes);
    let lse_at = v_at + comptime!(tile.stages as u32 * v_bytes);
    let delta_at = lse_at + comptime!(tile.stages as u32 * stats_bytes);

    // -- the work tile
    let work = scheduler.work_tile(CUBE_POS as u32, 0u32, &inputs.band, &extras, scores);
    let band = work.band;
    let (batch, head) = (work.batch as usize, work.head as usize);
    let lane = UNIT_POS % 32;
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    let first_row = work.q_start + warpgroup * comptime!((groups * WARPGROUP_ROWS) as u32);
    let edges = band.edges(work.q_start, work.k_last, comptime!(tile.tile_q() as u32), comptime!(tile_k as u32));
    let group = if comptime!(transposed) { scheduler.group_size.divisor } else { 1u32.runtime() };

    // -- the first copies
    #[unroll]
    for nth in 0..comptime!(scores.tile.warpgroups as u32) {
        let first = work.q_start + comptime!(nth * WARPGROUP_ROWS as u32);
        let to = q_at + comptime!(nth * scores.q_bytes() as u32);
        copy_rows(&sources.rows.qk, &CopiedRows { batch, head, first, to }, &band, false, head_dim, blueprint);
        if comptime!(differentiates) {
            let to = d_at + comptime!(nth * scores.d_bytes() as u32);
            copy_rows(&sources.rows.dov, &CopiedRows { batch, head, first, to }, &band, false, head_dim_v, blueprint);
        }
    }
    let copies = Copies { k_at, v_at, lse_at, delta_at, batch: work.batch, band, scheduler };
    let first = VisitedTile::new(work.k_last, &extras, scores);
    copies.tile(&sources.cols, stats, work.head_kv, first.start(scores), 0u32, blueprint);

    // -- addresses from which this thread reads operands
    let of_s = comptime!(blueprint.rows_of(scores.q_bytes(), head_dim));
    let of_dp = comptime!(blueprint.rows_of(scores.d_bytes(), head_dim_v));
    let of_dk = comptime!(blueprint.columns_of(columns_dk));
    let of_dv = comptime!(blueprint.columns_of(columns_dv));
    let (columns, summed) = (lane_of_columns(lane), lane_of_sums(lane, products));
    let of_warp = of_warpgroup * comptime!(16u32 * 128) + lane_of_rows(lane);
    let q_lane = q_at + warpgroup * comptime!((groups * scores.q_bytes()) as u32) + of_warp;
    let d_lane = d_at + warpgroup * comptime!((groups * scores.d_bytes()) as u32) + of_warp;

    // lse and delta of this thread's rows, where rows are queries.
    let mut of_rows = Sequence::<RowStatistics>::new();
    #[unroll]
    for nth in 0..groups {
        let row = first_row + comptime!((nth * WARPGROUP_ROWS) as u32) + of_warpgroup * 16 + lane / 4;
        of_rows.push(RowStatistics::of(stats, work.batch, work.head, row, &band, &scheduler, scores));
    }

    let mut s = registers(groups, s_len);
    let mut ds = registers(groups, comptime!(if differentiates { s_len } else { 0 }));
    let mut sum_k = registers(groups, comptime!(if differentiates { columns_dk / 2 } else { 0 }));
    let mut sum_v = registers(groups, comptime!(if sums_values { columns_dv / 2 } else { 0 }));
    let mut stage = 0u32;
    let mut cursor = Cursor::new(&work, first);
    let all = steps_of_heads(&work, group, &extras, scores);
    for nth in 0..all {
        // This tile has been copied, and all warps have finished the previous one.
        copies_wait(0usize);
        sync_cube();
        let next = cursor.next(&work, group, &extras, scores);
        if nth + 1 < all {
            copies.tile(&sources.cols, stats, next.head, next.tile.start(scores), stage ^ 1, blueprint);
        }
        let k_tile = k_at + stage * k_bytes;
        let v_tile = v_at + stage * v_bytes;

        // -- S and dP
        multiply_rows(&mut s, q_lane, k_tile + columns, of_s);
        if comptime!(differentiates) {
            multiply_rows(&mut ds, d_lane, v_tile + columns, of_dp);
        }

        // -- P and dS
        let mut p = Sequence::<u32>::new();
        let mut g = Sequence::<u32>::new();
        let fully_masked = cursor.fully_masked(&work, scores);
        let visit = cursor.tile.visit(cursor.step < edges.lead || cursor.step >= edges.tail, scores);
        let head_q = if comptime!(transposed) { cursor.head } else { work.head };
        let of_stage = stage * stats_bytes + lane % 4 * 8;
        #[unroll]
        for of_group in 0..groups {
            let row = first_row + comptime!((of_group * WARPGROUP_ROWS) as u32);
            let s = s.index_mut(of_group);
            let of_tile = ScoreTile::new(work.batch, head_q, band, row, &visit, 0u32.runtime(), 0usize);
            let derivatives = apply_score_mod(s, &inputs, &of_tile, scores);
            if !visit.fully_visible || fully_masked {
                apply_mask(s, &of_tile, fully_masked, tile_k);
            }
            let of_rows = of_rows.index(of_group);
            let lse = tile_statistics(lse_at + of_stage, &of_rows.lse, scores);
            #[unroll]
            for n in 0..s_len {
                s[n] = probability_log2(s[n], exponent, *lse.index(n), scores.dtype);
            }
            let kept = KeepMask::of(&extras.dropout, &of_tile, scores);
            if comptime!(sums_values) {
                fragments_of(&*s, &kept, &mut p, tile_k, dtype);
            }
            if comptime!(differentiates) {
                let ds = ds.index_mut(of_group);
                let delta = tile_statistics(delta_at + of_stage, &of_rows.delta, scores);
                tile_backward(ds, &*s, &delta, &kept, &extras.dropout, s_len);
                if comptime!(scores.keeps_derivative) {
                    derivatives.multiply(ds, &*s, scores);
                } else if comptime!(scores.capped) {
                    softcap_backward(ds, &*s, &lse, &inputs, &of_tile, scores);
                }
                fragments_of(&*ds, &KeepMask::none(), &mut g, tile_k, dtype);
            }
        }

        // -- dV, and dQ or dK
        if comptime!(sums_values) {
            multiply_columns(&mut sum_v, &p, v_tile + summed, of_dv);
        }
        if comptime!(differentiates) {
            multiply_columns(&mut sum_k, &g, k_tile + summed, of_dk);
        }
        stage ^= 1;
        cursor.move_to(&next, scores);
    }

    // -- results
    #[unroll]
    for of_group in 0..groups {
        let first = first_row + comptime!((of_group * WARPGROUP_ROWS) as u32) + of_warpgroup * 16;
        let mut rows = GradientRows::new(batch, head, first, band);
        if comptime!(differentiates) {
            rows.store(sum_k.index(of_group), &mut outputs.dqk, 0usize, scale, head_dim, dtype);
            rows.check(sum_k.index(of_group), columns_dk);
        }
        if comptime!(sums_values) {
            rows.store(sum_v.index(of_group), &mut outputs.dv, 0usize, extras.dropout.scale(), head_dim_v, dtype);
            rows.check(sum_v.index(of_group), columns_dv);
        }
        // Split operands turn infinity into NaN.
        if comptime!(hides || products == Products::Split) {
            rows.set_columns(work.head_kv, work.head_kv + group);
            rows.recompute(of_rows.index(of_group), &sources, &inputs, outputs, stats, &scheduler, scores);
        }
    }
}

/// Copies of tiles: their destinations in shared memory, and the batch and band of their rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Copies {
    k_at: u32,
    v_at: u32,
    lse_at: u32,
    delta_at: u32,
    batch: u32,
    band: Band,
    scheduler: TileScheduler,
}

#[cube]
impl Copies {
    /// Starts the copy of a tile to a stage. All threads must call this function.
    fn tile<E: Float, N: Size>(
        &self,
        cols: &SourceSide<E, N>,
        stats: &[u32],
        head: u32,
        first: u32,
        stage: u32,
        #[comptime] blueprint: MmaBlueprint,
    ) {
        let scores = comptime!(blueprint.scores);
        let to = self.k_at + stage * comptime!(scores.k_bytes() as u32);
        let rows = CopiedRows { batch: self.batch as usize, head: head as usize, first, to };
        copy_rows(&cols.qk, &rows, &self.band, true, scores.head_dim, blueprint);
        let to = self.v_at + stage * comptime!(scores.v_bytes() as u32);
        let rows = CopiedRows { batch: self.batch as usize, head: head as usize, first, to };
        copy_rows(&cols.dov, &rows, &self.band, true, scores.head_dim_v, blueprint);
        if comptime!(scores.transposed()) {
            let count = comptime!(blueprint.tile.tile_k);
            let of_stage = stage * comptime!(scores.stats_bytes() as u32);
            let at = stats_at(&self.band, &self.scheduler, self.batch, head, first, scores);
            copy_words(stats, at, self.lse_at + of_stage, count);
            copy_words(stats, at + stats_all(&self.band, &self.scheduler, scores), self.delta_at + of_stage, count);
        }
        copies_commit();
    }
}
