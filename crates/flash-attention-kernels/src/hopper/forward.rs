//! Forward: `o = softmax(scores) · v` and its log-sum-exp, a block of queries at a time.
//!
//! ```text
//! for each tile of keys that the queries see, the last first:
//!     S = Q Kᵀ, turned into scores      m' = max(m, rowmax S)      P = 2^(c (S − m'))        c = log2(e) · scale
//!     l = 2^(c (m − m'))·l + rowsum P   O = 2^(c (m − m'))·O + P V
//! o = O / l      lse = (c m + log2 l) / log2(e)
//! ```
//!
//! Each warpgroup has 64 queries of the block. Within a warpgroup, `S` of one tile and `P V` of the tile before are in flight
//! together, so that the softmax overlaps with products (FlashAttention-3, arXiv:2407.08608, section 3.2). With `ping_pong`,
//! the warpgroups also issue their products in turn, so that one's products run under the other's softmax (section 3.1).
//! [`OnlineSoftmax`] defines `m` and when it changes. The first product of the next work tile is issued together with the last
//! product of this one, and runs under its stores.
//!
//! Every branch must be warp-uniform, and the assembler must be able to see that: after a branch by `UNIT_POS`, or a shuffle
//! inside one, it guards every shuffle that follows. Products, and waits for them, belong to the whole warpgroup: they must not
//! be inside a branch that a single warp decides.

use super::layout::{Layout, Operand, columns_offset};
use super::memory::{FULLY_MASKED, Memory, WorkTileField};
use super::operands::{Schedule, Streams};
use super::pipeline::PipelineState;
use super::producer::{Producer, load_next};
use super::products::products;
use crate::fragment::Scores;
use crate::ptx::*;
use crate::softmax::lse_bits_log2;
use crate::tensor_core::*;
use cubecl::prelude::*;

/// Computes `o` and the bits of `lse` from Q, K and V, or those of each split of the keys.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<E: Float, M: Numeric, NB: Size, NM: Size>(
    streams: Streams<E>,
    sources: Sources<E, Const<8>>,
    scores: Scores<E, M, NB, NM>,
    outputs: &mut Outputs,
    schedule: Schedule,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (extras, exponent) = (scores.score.extras, scores.score.exponent);
    let tile = comptime!(blueprint.tile);
    let (tile_k, stages) = comptime!((tile.tile_k, tile.stages));
    let s_len = comptime!(tile_k / 2);
    let (columns, dtype) = comptime!((blueprint.columns(), blueprint.dtype));
    let o_len = comptime!(columns / 2);
    // Whether anything is hidden besides the keys past the end.
    let varlen = comptime!(extras.is_varlen());
    let banded = comptime!(varlen || scores.band.bounded_above || scores.band.bounded_below);
    let sparse = comptime!(blueprint.sparse);
    let hides = comptime!(banded || sparse || blueprint.hides_pairs());
    let drops = comptime!(extras.dropout.seed.is_some());

    // -- shared memory, barriers, descriptors
    let group_bytes = comptime!(blueprint.total() as u32);
    let shared =
        Shared::<[E]>::new_aligned_slice(comptime!(blueprint.shared_memory() / blueprint.dtype.size()), 1024usize);

    let of_cube = plane_broadcast(UNIT_POS / 32, 0u32);
    let mut warp = of_cube;
    let mut consumer_group = 0u32;
    if comptime!(tile.consumer_groups > 1) {
        consumer_group = of_cube / comptime!(4 * tile.warpgroups as u32);
        warp = of_cube % comptime!(4 * tile.warpgroups as u32);
    }
    let mut loads = false.runtime();
    if comptime!(tile.producer_warp) {
        // Producer warps come after the warpgroups, one for each consumer group.
        let first = comptime!(4 * (tile.consumer_groups * tile.warpgroups) as u32);
        loads = of_cube >= first;
        consumer_group = select(loads, of_cube - first, consumer_group);
        warp = select(loads, comptime!(4 * tile.warpgroups as u32).runtime(), warp);
    }
    let warpgroup = warp / 4;
    let memory = Memory::of_group(shared_address::<E>(&shared[0..1024]) + consumer_group * group_bytes, blueprint);
    let lane = UNIT_POS % 32;
    let quarter = lane % 4;
    // Descriptors count units of 16 bytes, and all of them are sums of this one and a constant: uniform registers are scarce.
    let start = descriptor::<E>(&shared[0..1024], 16usize, 1024usize)
        + u64::cast_from(consumer_group * comptime!(group_bytes / 16));
    let q_tile = start + u64::cast_from(warpgroup * comptime!((blueprint.q_bytes() / 16) as u32));
    // K is read by rows, V by columns.
    let k_at = comptime!(blueprint.units(Operand::K));
    let v_at = comptime!(blueprint.units(Operand::V) + columns_offset(tile_k));
    let k_stage = comptime!((blueprint.k_bytes() / 16) as u32);
    let v_stage = comptime!((blueprint.v_bytes() / 16) as u32);

    // -- the first loads
    let mut producer = Producer::<E>::new(memory, streams, schedule, scores.band, extras, consumer_group, warp, tile);
    if comptime!(tile.producer_warp) && loads {
        producer.run(blueprint);
        terminate!();
    }
    producer.fill(blueprint);
    let mut steps = memory.work_tile(0u32, WorkTileField::Steps);
    let of_warpgroup = warp % 4;
    // Named barrier 0 is `sync_cube`'s.
    let barrier = 1 + consumer_group * comptime!(tile.warpgroups as u32);
    if warpgroup == comptime!(tile.warpgroups as u32 - 1) {
        pass_ping_pong(barrier, warpgroup, tile);
    }

    // Positions of the products in the pipelines. A stage that a step frees is refilled in the next step, so that no warpgroup
    // waits for the other.
    let mut k_state = PipelineState::first();
    let mut v_state = PipelineState::first();
    let mut nth = 0u32;

    // -- the first S; the first S of a later work tile is issued at the end of the work tile before it
    let mut s = Array::<f32>::new(s_len);
    if steps != 0 {
        mbarrier_wait(memory.full(Operand::Q, warpgroup), 0u32);
        mbarrier_wait(memory.full(Operand::K, 0u32), 0u32);
    }
    await_ping_pong(barrier, warpgroup, tile);
    products(&mut s, q_tile, start + k_at, blueprint.head_dim, blueprint);
    pass_ping_pong(barrier, warpgroup, tile);

    while steps != 0 {
        let band = memory.band(nth, &scores.band, varlen);
        let first_row = memory.work_tile(nth, WorkTileField::QStart) + warpgroup * comptime!(WARPGROUP_ROWS as u32);
        let mut k_start = memory.work_tile(nth, WorkTileField::KLast);
        let edges = band.edges(first_row, k_start, comptime!(WARPGROUP_ROWS as u32), comptime!(tile_k as u32));
        let visit = memory.visit(&k_state, k_start, edges.lead > 0 || edges.tail == 0);

        // -- the first tile
        wgmma_wait(0usize);
        pin(&mut s, s_len);
        mbarrier_release(memory.empty(Operand::K, k_state.stage));
        if steps == 1 {
            load_next(&streams, &memory, nth, warp, Operand::Q);
        }
        let tile_b = memory.await_bias(&k_state, warpgroup);
        let of_tile = memory.score_tile(nth, band, first_row, &visit, tile_b, drops);
        let _ = apply_score_mod(&mut s, &scores, &of_tile, blueprint);
        memory.release_bias(&k_state);
        k_state.advance(stages);
        let fully_masked = memory.work_tile(nth, WorkTileField::Flags) & FULLY_MASKED != 0;
        if !visit.fully_visible || fully_masked {
            apply_mask(&mut s, &of_tile, fully_masked, tile_k);
        }
        let mut rows = OnlineSoftmax::uninitialised();
        rows.first(&mut s, exponent, hides, blueprint);
        let mut p = fragments(blueprint);
        let kept = KeepMask::of(&extras.dropout, &of_tile, blueprint);
        to_fragments(&s, &kept, &mut p, blueprint);
        // Uninitialised: the first product overwrites it.
        let mut acc = Array::<f32>::new(o_len);
        if steps > 1 {
            mbarrier_wait(memory.full(Operand::K, k_state.stage), k_state.phase);
        }

        // -- the other tiles: S of this tile and P V of the one before are in flight together
        for step in 1..steps {
            k_start -= comptime!(tile_k as u32);
            let visit = memory.visit(&k_state, k_start, step < edges.lead || step >= edges.tail);
            await_ping_pong(barrier, warpgroup, tile);
            pin(&mut acc, o_len);
            let k_tile = start + u64::cast_from(k_state.stage * k_stage) + k_at;
            products(&mut s, q_tile, k_tile, blueprint.head_dim, blueprint);
            // V is waited for after S has been issued. The wait also ends a sequence of products for the assembler.
            mbarrier_wait(memory.full(Operand::V, v_state.stage), v_state.phase);
            let v_tile = start + u64::cast_from(v_state.stage * v_stage) + v_at;
            mma_registers(&mut acc, &p, v_tile, u32::cast_from(step > 1), columns, dtype);
            pass_ping_pong(barrier, warpgroup, tile);
            // Drawn while the products run.
            let of_tile = memory.score_tile(nth, band, first_row, &visit, 0u32.runtime(), drops);
            let kept = KeepMask::of(&extras.dropout, &of_tile, blueprint);
            producer.refill(blueprint);
            wgmma_wait(1usize);
            pin(&mut s, s_len);
            mbarrier_release(memory.empty(Operand::K, k_state.stage));
            if step + 1 == steps {
                load_next(&streams, &memory, nth, warp, Operand::Q);
            }

            let tile_b = memory.await_bias(&k_state, warpgroup);
            let of_tile = memory.score_tile(nth, band, first_row, &visit, tile_b, drops);
            let _ = apply_score_mod(&mut s, &scores, &of_tile, blueprint);
            memory.release_bias(&k_state);
            k_state.advance(stages);
            // Only with a band can a tile after the first one be at its edge. Without a mask, a row that begins to see keys
            // does so in such a tile.
            let anywhere = comptime!(blueprint.hides_pairs() || sparse && banded);
            if comptime!(banded || sparse) && !visit.fully_visible {
                apply_mask(&mut s, &of_tile, false.runtime(), tile_k);
                if comptime!(!anywhere) {
                    rows.set_reference_max(&mut s, exponent, blueprint);
                }
            }
            if comptime!(anywhere) {
                rows.set_reference_max(&mut s, exponent, blueprint);
            }
            let taken = rows.update(&mut s, exponent, blueprint);
            pin(&mut s, s_len);
            // The branch of this wait keeps the assembler from moving the wait for P V above the softmax.
            if step + 1 < steps {
                mbarrier_wait(memory.full(Operand::K, k_state.stage), k_state.phase);
            }
            wgmma_wait(0usize);
            pin(&mut acc, o_len);
            mbarrier_release(memory.empty(Operand::V, v_state.stage));
            v_state.advance(stages);
            rows.rescale_o(&taken, &mut s, &mut acc, blueprint);
            to_fragments(&s, &kept, &mut p, blueprint);
        }

        // -- the last P V. The first S of the next work tile runs under it and under the stores. After the last work tile, that
        // product reads stale shared memory, and its result is not used
        mbarrier_wait(memory.full(Operand::V, v_state.stage), v_state.phase);
        let next_steps = memory.work_tile(nth + 1, WorkTileField::Steps);
        if next_steps != 0 {
            mbarrier_wait(memory.full(Operand::Q, warpgroup), (nth + 1) % 2);
            mbarrier_wait(memory.full(Operand::K, k_state.stage), k_state.phase);
        }
        await_ping_pong(barrier, warpgroup, tile);
        pin(&mut acc, o_len);
        let v_tile = start + u64::cast_from(v_state.stage * v_stage) + v_at;
        mma_registers(&mut acc, &p, v_tile, u32::cast_from(steps > 1), columns, dtype);
        producer.refill(blueprint);
        let k_tile = start + u64::cast_from(k_state.stage * k_stage) + k_at;
        products(&mut s, q_tile, k_tile, blueprint.head_dim, blueprint);
        pass_ping_pong(barrier, warpgroup, tile);

        // -- O / l and lse
        let sinks = comptime!(!blueprint.split_keys && extras.sinks.is_some());
        let of_head = if comptime!(sinks) { memory.work_tile(nth, WorkTileField::Head) } else { 0u32.runtime() };
        let of_sink = sink_log2(&extras, of_head, sinks);
        let row = first_row + of_warpgroup * 16 + lane / 4;
        let out = memory.work_tile(nth, WorkTileField::BatchOut) as usize;
        let head = memory.work_tile(nth, WorkTileField::Head) as usize;
        let mut factors = Array::<f32>::new(2usize);
        let lse_at = outputs.lse.stride.at(out, head, row);
        #[unroll]
        for r in 0..2usize {
            let end = RowEnd::of(rows.m[r], rows.l[r], rows.top[r], of_sink, exponent, sinks, blueprint);
            rows.m[r] = end.m;
            rows.l[r] = end.l;
            factors[r] = normalizer_of(end.l, end.factor, &extras);
            if quarter == 0 && band.is_query(row + comptime!(8 * r as u32)) {
                let at = lse_at + comptime!(8 * r) * outputs.lse.stride.row;
                outputs.lse.data[at] = lse_bits_log2(end.m, end.l, lg2(end.l));
            }
        }
        wgmma_wait(1usize);
        pin(&mut acc, o_len);
        mbarrier_release(memory.empty(Operand::V, v_state.stage));
        v_state.advance(stages);
        // Rows to recompute: the sum of exponentials overflowed, or a hidden NaN or infinity has reached the row.
        let mut again = Array::<bool>::new(2usize);
        let o_at = outputs.o.stride.at(out, head, row);
        #[unroll]
        for r in 0..2usize {
            let live = band.is_query(row + comptime!(8 * r as u32));
            let at = o_at + comptime!(8 * r) * outputs.o.stride.row;
            let words = pack_row(&acc, r, factors[r], columns, dtype);
            if comptime!(blueprint.split_keys) {
                store_row_f32(&acc, r, factors[r], &mut outputs.o, at, live, columns);
            } else {
                store_row(&words, &mut outputs.o, at, live, columns);
            }
            let mut lost = rows.l[r] == f32::INFINITY;
            if comptime!(hides) {
                // Evaluated before the `&&`, which would become a branch.
                let finite = is_finite(&words, blueprint);
                lost = lost || (rows.l[r] <= f32::MAX && !finite);
            }
            again[r] = live && lost;
        }
        if comptime!(hides || blueprint.uses_reference_max()) && plane_any(again[0] || again[1]) {
            // The stores of other threads to these rows must come first.
            sync_plane();
            let batch = memory.work_tile(nth, WorkTileField::Batch) as usize;
            let head_kv = memory.work_tile(nth, WorkTileField::HeadKv) as usize;
            let (first_key, after) = if comptime!(sparse) {
                (0u32.runtime(), band.after_keys())
            } else {
                (k_start, memory.work_tile(nth, WorkTileField::KLast) + comptime!(tile_k as u32))
            };
            let first = first_row + of_warpgroup * 16;
            for of_warp in 0..16u32 {
                let upper = of_warp >= 8;
                let from = of_warp % 8;
                let m = plane_shuffle(select(upper, rows.m[1], rows.m[0]), 4 * from);
                let l = plane_shuffle(select(upper, rows.l[1], rows.l[0]), 4 * from);
                let again = select(upper, again[1], again[0]);
                if plane_any(lane / 4 == from && again) {
                    let row = first + of_warp;
                    let lost =
                        LostRow { batch, batch_out: out, head, head_kv, row, first: first_key, after, m, l, band };
                    recompute_row(&sources, &scores, &mut outputs.o, &mut outputs.lse, &lost, blueprint);
                }
            }
        }

        nth += 1;
        steps = next_steps;
    }
    wgmma_wait(0usize);
    pin(&mut s, s_len);
}

/// Waits until the previous warpgroup has issued its products. `barrier` is the first named barrier of the consumer group.
#[cube]
fn await_ping_pong(barrier: u32, warpgroup: u32, #[comptime] tile: HopperTile) {
    if comptime!(tile.ping_pong) {
        named_sync(barrier + warpgroup, comptime!(2 * WARPGROUP_UNITS as u32));
    }
}

/// Lets the next warpgroup issue its products.
#[cube]
fn pass_ping_pong(barrier: u32, warpgroup: u32, #[comptime] tile: HopperTile) {
    if comptime!(tile.ping_pong) {
        let next = (warpgroup + 1) % comptime!(tile.warpgroups as u32);
        named_arrive(barrier + next, comptime!(2 * WARPGROUP_UNITS as u32));
    }
}
