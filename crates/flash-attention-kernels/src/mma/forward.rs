//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head, or of all query heads of a
//! group, or for each split of its keys.
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
//!
//! Few queries leave most of 64 rows empty. The four warps of a warpgroup then share 16 rows and divide the keys of each tile among them;
//! their attentions are combined in the end ([`merge`](super::merge)).

use super::e4m3::missing;
use super::merge::merge_warps;
use super::ops::{copies_commit, copies_wait, multiply_columns, multiply_rows};
use super::output::write_rows;
use super::scales::*;
use super::tiles::*;
use super::visits::VisitedTile;
use super::{MmaBlueprint, Products};
use crate::fragment::{Scores, filled};
use crate::ptx::{load_shared, shared_address};
use crate::tensor_core::combine::{Combination, combine_last};
use crate::tensor_core::*;
use cubecl::prelude::*;

/// Computes `o` and the bits of `lse` from Q, K and V, or those of the splits of the keys. If this kernel
/// [combines](MmaBlueprint::combines) them, the results are written to `combination`, which is unused otherwise.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: Sources<E, N>,
    inputs: Scores<E, M, NB, NM>,
    outputs: &mut Outputs,
    combination: &mut Combination,
    scheduler: TileScheduler,
    #[comptime] blueprint: MmaBlueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (extras, exponent) = (inputs.score.extras, inputs.score.exponent);
    let bounded = comptime!(inputs.band.bounded_above || inputs.band.bounded_below);
    let (tile, scores, products) = comptime!((blueprint.tile, blueprint.scores, blueprint.products));
    let (groups, tile_k, dtype) = comptime!((tile.groups, tile.tile_k, scores.dtype));
    // The columns of a tile that a warp computes.
    let (of_warp, warps_k) = comptime!((scores.of_warp(), tile.warps_k));
    let columns = comptime!(scores.columns());
    let (k_bytes, v_bytes) = comptime!((scores.k_bytes() as u32, scores.v_bytes() as u32));
    // Whether anything is hidden besides keys past the last one.
    let hides = comptime!(scores.hides(bounded));
    // Whether a row may see its first key in any tile. The first tile may have no keys for some of the warps that divide it.
    let anywhere = comptime!(warps_k > 1 || scores.hides_pairs() || scores.sparse && (bounded || scores.varlen));
    if CUBE_POS as u32 >= scheduler.len(&extras) {
        terminate!();
    }

    // -- shared memory: Q of each group, tiles of K, tiles of V
    let shared = Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / dtype.size()), 1024usize);
    let q_at = shared_address::<E>(&shared[0..1024]);
    let k_at = q_at + comptime!((scores.tile.warpgroups * scores.q_bytes()) as u32);
    let v_at = k_at + comptime!(tile.stages as u32 * k_bytes);
    let scales_at = v_at + comptime!(tile.stages as u32 * v_bytes);
    let tiles = KeyTiles { k: k_at, v: v_at, scales: scales_at };
    let factors_at = scales_at + comptime!((tile.stages * scores.scales_bytes()) as u32);

    // -- the work tile
    let work = scheduler.work_tile(CUBE_POS as u32, 0u32, &inputs.band, &extras, scores);
    let band = work.band;
    let batch = work.batch as usize;
    let block = BlockRows::of(&work, scheduler.group_size, scores);
    let lane = UNIT_POS % 32;
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let (warpgroup, of_warpgroup) = (warp / 4, warp % 4);
    // Of the block.
    let first_row = warpgroup * comptime!((groups * tile.warpgroup_rows()) as u32);
    let (warp_row, warp_column) = if comptime!(warps_k > 1) {
        (0u32.runtime(), of_warpgroup * comptime!(of_warp.tile.tile_k as u32))
    } else {
        (of_warpgroup * 16, 0u32.runtime())
    };
    let (fully_masked, steps) = (work.fully_masked, work.steps);
    let mut visited = VisitedTile::new(work.k_last, &extras, scores);
    let edges = band.edges(work.q_start, work.k_last, comptime!(tile.tile_q() as u32), comptime!(tile_k as u32));

    // -- the first copies
    // Tiles that are on the way while one is multiplied.
    let ahead = comptime!(tile.stages as u32 - 1);
    // In e4m3, pages of these and of the next one, all read before any is waited for. With a block mask, which tiles they are is not known yet.
    let mut pages_of = Sequence::<u32>::new();
    #[unroll]
    for nth in 0..comptime!(if scores.sparse { 0 } else { tile.stages as u32 }) {
        pages_of.push(pages_of_tile(&extras, &work, visited.start_after(nth, scores), blueprint));
    }
    let head_dim = comptime!(scores.head_dim);
    #[unroll]
    for group in 0..comptime!(scores.tile.warpgroups as u32) {
        let first = comptime!(group * tile.warpgroup_rows() as u32).runtime();
        let to = q_at + comptime!(group * scores.q_bytes() as u32);
        let rows = CopiedRows { batch, head: work.head as usize, first, to };
        copy_block_rows(&sources.q, &rows, block, &band, head_dim, blueprint);
    }
    if comptime!(scores.sparse) {
        let start = visited.start(scores);
        copy_keys(&sources, &extras, &work, start, pages_of_tile(&extras, &work, start, blueprint), tiles, blueprint);
    } else {
        copy_keys(&sources, &extras, &work, visited.start(scores), *pages_of.index(0), tiles, blueprint);
    }
    copies_commit();
    #[unroll]
    for nth in 1..ahead {
        if nth < steps {
            let (start, to) = (visited.start_after(nth, scores), tiles.stage(nth.runtime(), scores));
            copy_keys(&sources, &extras, &work, start, *pages_of.index(nth as usize), to, blueprint);
        }
        copies_commit();
    }

    // Factors of keys and values in e4m3, and of each group's two rows of Q.
    let has_scales = comptime!(matches!(products, Products::E4m3 { .. }));
    let missing = comptime!(if let Products::E4m3 { instruction } = products { missing(instruction) } else { 1.0 });
    let mut unit = ValueUnit::first();
    let mut row_factors = Sequence::<Sequence<f32>>::new();
    if comptime!(has_scales) {
        copies_wait(comptime!(tile.stages - 2));
        sync_cube();
        order_queries(q_at, factors_at, blueprint);
        sync_cube();
        #[unroll]
        for group in 0..groups {
            let mut of_group = Sequence::<f32>::new();
            #[unroll]
            for half in 0..comptime!(if blueprint.factor_bytes() > 0 { 2u32 } else { 0 }) {
                let first = first_row + comptime!(group as u32 * tile.warpgroup_rows() as u32 + 8 * half);
                of_group.push(f32::reinterpret(load_shared(factors_at + (first + warp_row + lane / 4) * 4)));
            }
            row_factors.push(of_group);
        }
    }

    // -- addresses from which this thread reads operands
    let of_rows = comptime!(blueprint.rows_of(scores.q_bytes(), head_dim));
    let of_columns = comptime!(blueprint.columns_of(columns));
    let q_lane = q_at
        + warpgroup * comptime!((groups * scores.q_bytes()) as u32)
        + warp_row * comptime!(LINE as u32)
        + lane_of_rows(lane);
    let k_lane = k_at + warp_column * comptime!(LINE as u32) + lane_of_columns(lane);
    // Of the warp's keys.
    let scales_at = scales_at + warp_column / comptime!(SCALED_KEYS as u32) * 4;
    let v_lane = v_at + warp_column * comptime!(LINE as u32) + lane_of_sums(lane, products);

    let mut s = registers(groups, comptime!(of_warp.tile.tile_k / 2));
    let mut acc = registers(groups, comptime!(columns / 2));
    let mut softmax = Sequence::<OnlineSoftmax>::new();
    #[unroll]
    for _ in 0..groups {
        softmax.push(OnlineSoftmax::uninitialised());
    }
    let mut stage = 0u32;
    // Pages of the tile that is copied next, read a step before.
    let mut pages = 0u32.runtime();
    if comptime!(!scores.sparse) {
        pages = *pages_of.index(ahead as usize);
    }
    for step in 0..steps {
        // This tile has been copied, and all warps have finished the previous one.
        copies_wait(comptime!(tile.stages - 2));
        sync_cube();
        let entry_ahead = visited.entry_ahead(&extras, scores);
        // The stage of the previous tile is free.
        let free = select(stage == 0, ahead, stage - 1);
        if step + ahead < steps {
            let to = tiles.stage(free, scores);
            if comptime!(scores.sparse) {
                let first = visited.start_ahead(entry_ahead, scores);
                let of_tile = pages_of_tile(&extras, &work, first, blueprint);
                copy_keys(&sources, &extras, &work, first, of_tile, to, blueprint);
            } else {
                copy_keys(&sources, &extras, &work, visited.start_after(ahead, scores), pages, to, blueprint);
            }
        }
        copies_commit();
        if comptime!(!scores.sparse) {
            pages = pages_of_tile(&extras, &work, visited.start_after(comptime!(ahead + 1), scores), blueprint);
        }

        // -- S
        let scales = scales_at + stage * comptime!(scores.scales_bytes() as u32);
        multiply_rows(&mut s, q_lane, k_lane + stage * k_bytes, of_rows);
        let mut of_values = Sequence::<f32>::new();
        if comptime!(has_scales) {
            let of_keys = load_scales(scales, comptime!(of_warp.tile.tile_k), missing);
            #[unroll]
            for group in 0..groups {
                scale_keys(s.index_mut(group), &of_keys, row_factors.index(group), comptime!(of_warp.tile.tile_k));
            }
            let scales = scales + comptime!(scores.scales_bytes() as u32 / 2);
            let scales = load_scales(scales, comptime!(of_warp.tile.tile_k), missing);
            unit.factors(&scales, &mut acc, &mut of_values, columns);
        }

        // -- P
        let mut visit = visited.visit(step < edges.lead || step >= edges.tail, scores);
        if comptime!(warps_k > 1) {
            visit.start += warp_column;
        }
        let mut p = Sequence::<u32>::new();
        #[unroll]
        for group in 0..groups {
            let row = first_row + comptime!((group * tile.warpgroup_rows()) as u32);
            let of_group = s.index_mut(group);
            let of_tile = if comptime!(scores.pack_gqa || warps_k > 1) {
                ScoreTile::of_block(work.batch, &block, row + warp_row + lane / 4, band, &visit)
            } else {
                ScoreTile::new(work.batch, work.head, band, work.q_start + row, &visit, 0u32.runtime(), 0usize)
            };
            let _ = apply_score_mod(of_group, &inputs, &of_tile, of_warp);
            if !visit.fully_visible || fully_masked {
                apply_mask(of_group, &of_tile, fully_masked, comptime!(of_warp.tile.tile_k));
            }
            let rows = softmax.index_mut(group);
            if step == 0 {
                rows.first(of_group, exponent, comptime!(hides || warps_k > 1), of_warp);
            } else {
                // Without a mask, a row sees its first key in an edge tile. A block mask may skip that tile.
                if comptime!(anywhere) || comptime!(hides) && (!visit.fully_visible || fully_masked) {
                    rows.set_reference_max(of_group, exponent, of_warp);
                }
                let taken = rows.update(of_group, exponent, of_warp);
                rows.rescale_o(&taken, of_group, acc.index_mut(group), of_warp);
            }
            if comptime!(has_scales) {
                scale_keys(s.index_mut(group), &of_values, &Sequence::new(), comptime!(of_warp.tile.tile_k));
            }
            let kept = KeepMask::of(&extras.dropout, &of_tile, of_warp);
            fragments_of(s.index(group), &kept, &mut p, comptime!(of_warp.tile.tile_k), comptime!(scores.weights()));
        }

        // -- O
        multiply_columns(&mut acc, &p, v_lane + stage * v_bytes, of_columns);
        stage = select(stage == ahead, 0u32, stage + 1);
        visited.advance(entry_ahead, scores);
    }

    if comptime!(has_scales) {
        unit.apply(&mut acc, columns);
    }

    // -- O / l and lse
    let first = first_row + warp_row;
    if comptime!(warps_k > 1) {
        merge_warps(&mut softmax, &mut acc, k_at, blueprint);
        if warp == 0 {
            write_rows(&sources, &inputs, outputs, &softmax, &acc, &work, &block, first, blueprint);
        }
        if comptime!(blueprint.combines()) {
            combine_last(&*outputs, combination, &extras, &scheduler, &work, &block, q_at, scores);
        }
    } else {
        write_rows(&sources, &inputs, outputs, &softmax, &acc, &work, &block, first, blueprint);
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
