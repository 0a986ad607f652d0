//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each tile of keys that the queries see, the last first, while the next one is copied:
//!     S = Q Kᵀ, turned into scores      m' = max(m, rowmax S)      P = 2^(c (S − m'))        c = log2(e) · scale
//!     l = 2^(c (m − m'))·l + rowsum P   O = 2^(c (m − m'))·O + P V
//! o = O / l      lse = (c m + log2 l) / log2(e)
//! ```
//!
//! `S`, `P` and `O` of a warp's queries never leave its registers (FlashAttention-2, arXiv:2307.08691, algorithm 1 and section 3.3).
//! [`OnlineSoftmax`] describes what `m` is exactly, and when it changes. The products of one thread block overlap with the softmax of
//! another one on the same multiprocessor. Tiles are therefore small enough for two thread blocks, where possible.

use super::ops::{copies_commit, copies_wait, multiply_columns, multiply_rows};
use super::tiles::{CopiedRows, copy_rows, lane_of_columns, lane_of_rows, lane_of_sums};
use super::visits::VisitedTile;
use super::{MmaBlueprint, MmaTile, Products};
use crate::fragment::{Scores, filled};
use crate::ptx::{lg2, shared_address};
use crate::softmax::lse_bits_log2;
use crate::tensor_core::*;
use cubecl::prelude::*;

/// Computes `o` and the bits of `lse` from Q, K and V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: Sources<E, N>,
    inputs: Scores<E, M, NB, NM>,
    outputs: &mut Outputs,
    scheduler: TileScheduler,
    #[comptime] blueprint: MmaBlueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (extras, exponent) = (inputs.score.extras, inputs.score.exponent);
    let bounded = comptime!(inputs.band.bounded_above || inputs.band.bounded_below);
    let (tile, scores, products) = comptime!((blueprint.tile, blueprint.scores, blueprint.products));
    let (groups, tile_k, dtype) = comptime!((tile.groups, tile.tile_k, scores.dtype));
    let split = comptime!(products == Products::Split);
    let columns = comptime!(scores.columns());
    let (k_bytes, v_bytes) = comptime!((scores.k_bytes() as u32, scores.v_bytes() as u32));
    // Whether anything is hidden besides keys past the last one.
    let hides = comptime!(scores.hides(bounded));
    // Whether a row may see its first key in any tile.
    let anywhere = comptime!(scores.hides_pairs() || scores.sparse && (bounded || scores.varlen));
    if CUBE_POS as u32 >= scheduler.len(&extras) {
        terminate!();
    }

    // -- shared memory: Q of each group, two tiles of K, two of V
    let shared = Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / dtype.size()), 1024usize);
    let q_at = shared_address::<E>(&shared[0..1024]);
    let k_at = q_at + comptime!((scores.tile.warpgroups * scores.q_bytes()) as u32);
    let v_at = k_at + comptime!(MmaTile::STAGES as u32 * k_bytes);

    // -- the work tile
    let work = scheduler.work_tile(CUBE_POS as u32, 0u32, &inputs.band, &extras, scores);
    let band = work.band;
    let (batch, head, head_kv) = (work.batch as usize, work.head as usize, work.head_kv as usize);
    let lane = UNIT_POS % 32;
    let quarter = lane % 4;
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    let first_row = work.q_start + warpgroup * comptime!((groups * WARPGROUP_ROWS) as u32);
    let (fully_masked, steps) = (work.fully_masked, work.steps);
    let mut visited = VisitedTile::new(work.k_last, &extras, scores);
    let edges = band.edges(work.q_start, work.k_last, comptime!(tile.tile_q() as u32), comptime!(tile_k as u32));

    // -- the first copies
    let (head_dim, head_dim_v) = comptime!((scores.head_dim, scores.head_dim_v));
    #[unroll]
    for group in 0..comptime!(scores.tile.warpgroups as u32) {
        let first = work.q_start + comptime!(group * WARPGROUP_ROWS as u32);
        let to = q_at + comptime!(group * scores.q_bytes() as u32);
        copy_rows(&sources.q, &CopiedRows { batch, head, first, to }, &band, false, head_dim, blueprint);
    }
    let first = visited.start(scores);
    let rows = CopiedRows { batch, head: head_kv, first, to: k_at };
    copy_rows(&sources.k, &rows, &band, true, head_dim, blueprint);
    let rows = CopiedRows { batch, head: head_kv, first, to: v_at };
    copy_rows(&sources.v, &rows, &band, true, head_dim_v, blueprint);
    copies_commit();

    // -- addresses from which this thread reads operands
    let of_rows = comptime!(blueprint.rows_of(scores.q_bytes(), head_dim));
    let of_columns = comptime!(blueprint.columns_of(columns));
    let q_lane = q_at
        + warpgroup * comptime!((groups * scores.q_bytes()) as u32)
        + of_warpgroup * comptime!(16u32 * 128)
        + lane_of_rows(lane);
    let k_lane = k_at + lane_of_columns(lane);
    let v_lane = v_at + lane_of_sums(lane, products);

    let mut s = registers(groups, comptime!(tile_k / 2));
    let mut acc = registers(groups, comptime!(columns / 2));
    let mut softmax = Sequence::<OnlineSoftmax>::new();
    #[unroll]
    for _ in 0..groups {
        softmax.push(OnlineSoftmax::uninitialised());
    }
    let mut stage = 0u32;
    for step in 0..steps {
        // This tile has been copied, and all warps have finished the previous one.
        copies_wait(0usize);
        sync_cube();
        let entry_ahead = visited.entry_ahead(&extras, scores);
        let next = stage ^ 1;
        if step + 1 < steps {
            let first = visited.start_ahead(entry_ahead, scores);
            let rows = CopiedRows { batch, head: head_kv, first, to: k_at + next * k_bytes };
            copy_rows(&sources.k, &rows, &band, true, head_dim, blueprint);
            let rows = CopiedRows { batch, head: head_kv, first, to: v_at + next * v_bytes };
            copy_rows(&sources.v, &rows, &band, true, head_dim_v, blueprint);
            copies_commit();
        }

        // -- S
        multiply_rows(&mut s, q_lane, k_lane + stage * k_bytes, of_rows);

        // -- P
        let visit = visited.visit(step < edges.lead || step >= edges.tail, scores);
        let mut p = Sequence::<u32>::new();
        #[unroll]
        for group in 0..groups {
            let row = first_row + comptime!((group * WARPGROUP_ROWS) as u32);
            let of_group = s.index_mut(group);
            let of_tile = ScoreTile::new(work.batch, work.head, band, row, &visit, 0u32.runtime(), 0usize);
            let _ = apply_score_mod(of_group, &inputs, &of_tile, scores);
            if !visit.fully_visible || fully_masked {
                apply_mask(of_group, &of_tile, fully_masked, tile_k);
            }
            let rows = softmax.index_mut(group);
            if step == 0 {
                rows.first(of_group, exponent, hides, scores);
            } else {
                // Without a mask, a row sees its first key in an edge tile. A block mask may skip that tile.
                if comptime!(anywhere) || comptime!(hides) && (!visit.fully_visible || fully_masked) {
                    rows.set_reference_max(of_group, exponent, scores);
                }
                let taken = rows.update(of_group, exponent, scores);
                rows.rescale_o(&taken, of_group, acc.index_mut(group), scores);
            }
            let kept = KeepMask::of(&extras.dropout, &of_tile, scores);
            fragments_of(s.index(group), &kept, &mut p, tile_k, dtype);
        }

        // -- O
        multiply_columns(&mut acc, &p, v_lane + stage * v_bytes, of_columns);
        stage = next;
        visited.advance(entry_ahead, scores);
    }

    // -- O / l and lse
    let sinks = comptime!(extras.sinks.is_some());
    let of_sink = sink_log2(&extras, work.head, sinks);
    let mut again = 0u32.runtime();
    let mut m = Array::<f32>::new(comptime!(2 * groups));
    let mut l = Array::<f32>::new(comptime!(2 * groups));
    #[unroll]
    for group in 0..groups {
        let row = first_row + comptime!((group * WARPGROUP_ROWS) as u32) + of_warpgroup * 16 + lane / 4;
        #[unroll]
        for half in 0..2usize {
            let row = row + comptime!(8 * half as u32);
            let of_row = comptime!(2 * group + half);
            let rows = softmax.index(group);
            let end = RowEnd::of(rows.m[half], rows.l[half], rows.top[half], of_sink, exponent, sinks, scores);
            let sum = end.l;
            m[of_row] = end.m;
            l[of_row] = sum;
            let live = band.is_query(row);
            if quarter == 0 && live {
                let at = outputs.lse.stride.at(batch, head, row);
                outputs.lse.data[at] = lse_bits_log2(m[of_row], sum, lg2(sum));
            }
            let factor = normalizer_of(sum, end.factor, &extras);
            let of_group = acc.index(group);
            let at = outputs.o.stride.at(batch, head, row);
            store_row_of(of_group, half, factor, &mut outputs.o, at, live, scores.head_dim_v, dtype);
            // Rows to recompute: the sum left the range of f32, or a hidden value that is not finite reached the row.
            let mut lost = sum == f32::INFINITY;
            if comptime!(hides || split) {
                let finite = is_finite_row(of_group, half, columns);
                lost = lost || (sum <= f32::MAX && !finite);
            }
            // Split operands turn infinity into NaN.
            if comptime!(split) {
                let none = sum.is_nan();
                l[of_row] = select(none, f32::INFINITY, sum);
                lost = lost || none;
            }
            again |= select(live && lost, comptime!(1u32 << of_row), 0u32);
        }
    }
    if comptime!(hides || split || scores.uses_reference_max()) && plane_any(again != 0) {
        // Other threads' stores to these rows must come before those of the recomputation.
        sync_plane();
        let (first, after) = if comptime!(scores.sparse) {
            (0u32.runtime(), band.after_keys())
        } else {
            let after = work.k_last + comptime!(tile_k as u32);
            (after - steps * comptime!(tile_k as u32), after)
        };
        for nth in 0..comptime!(16 * groups as u32) {
            let (of_row, from) = (nth / 8, nth % 8);
            let mut of_m = m[0];
            let mut of_l = l[0];
            #[unroll]
            for other in 1..comptime!(2 * groups) {
                of_m = select(of_row == comptime!(other as u32), m[other], of_m);
                of_l = select(of_row == comptime!(other as u32), l[other], of_l);
            }
            let of_m = plane_shuffle(of_m, 4 * from);
            let of_l = plane_shuffle(of_l, 4 * from);
            if plane_any(lane / 4 == from && (again >> of_row) & 1 == 1) {
                let of_group = of_warpgroup * 16 + of_row % 2 * 8 + from;
                let row = first_row + of_row / 2 * comptime!(WARPGROUP_ROWS as u32) + of_group;
                let lost =
                    LostRow { batch, batch_out: batch, head, head_kv, row, first, after, m: of_m, l: of_l, band };
                recompute_row(&sources, &inputs, &mut outputs.o, &mut outputs.lse, &lost, scores);
            }
        }
    }
}

/// Registers of an accumulator for each group, all zeros.
#[cube]
pub fn registers(#[comptime] groups: usize, #[comptime] len: usize) -> Sequence<Array<f32>> {
    let mut all = Sequence::<Array<f32>>::new();
    #[unroll]
    for _ in 0..groups {
        all.push(filled::<f32>(0.0f32.runtime(), len));
    }
    all
}
