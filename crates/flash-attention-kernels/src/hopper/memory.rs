//! Shared memory of a consumer group: addresses of the pipelines' stages, their barriers, the decoded work tiles and the
//! producer's cursors.

use super::pipeline::{Pipeline, PipelineState};
use super::{SLOTS, WORDS};
use crate::blocks::{Visit, visit_of};
use crate::fragment::Role;
use crate::mask::Band;
use crate::ptx::*;
use crate::tensor_core::{Blueprint, RowStatistics, ScoreTile, TileScheduler, WARPGROUP_UNITS, WorkTile};
use cubecl::prelude::*;

/// Fields of a work tile in shared memory. The producer reads the first four.
#[derive(Clone, Copy)]
pub enum WorkTileField {
    /// First key of the last tile, which is processed first.
    KLast,
    /// Number of tiles; 0 after the last work tile.
    Steps,
    /// Key/value head.
    HeadKv,
    /// Batch.
    Batch,
    /// Query head.
    Head,
    /// First query.
    QStart,
    /// [`FULLY_MASKED`], [`CONTINUED`], [`CONTINUES`].
    Flags,
    /// Batch of the outputs.
    BatchOut,
    /// With several sequences: the sequence, and the ranges of its rows and columns.
    Sequence,
    RowsBegin,
    RowsEnd,
    ColumnsBegin,
    ColumnsEnd,
}

/// Flag: nothing is visible, and the single tile must be hidden.
pub const FULLY_MASKED: u32 = 1;
/// Flag: the work tile adds to the accumulators of the one before, which is the same block with another query head of the
/// group.
pub const CONTINUED: u32 = 2;
/// Flag: the next work tile adds to the accumulators of this one.
pub const CONTINUES: u32 = 4;

/// Fields of a producer's cursor in shared memory.
#[derive(Clone, Copy)]
pub enum CursorField {
    /// First key of the next tile, or the position of its list entry. Tiles are loaded from the last to the first.
    KStart,
    /// Tiles left in the work tile, including the next one; 0 before the first work tile, [`END`] after the last.
    Left,
    /// Key/value head.
    Head,
    /// Batch.
    Batch,
    /// Stage of the next tile.
    Stage,
    /// Parity of the phase of the stage's barriers.
    Phase,
    /// Number of work tiles entered.
    Nth,
    /// Number of the next work tile's query head in its group.
    OfGroup,
}

/// Value of [`CursorField::Left`] after the last work tile.
pub const END: u32 = u32::MAX;

/// Addresses in the shared memory of a consumer group.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Memory {
    /// Rows of Q, one tile of 64 for each warpgroup.
    pub q: u32,
    /// Rows of dO, one tile of 64 for each warpgroup.
    pub d: u32,
    /// Tiles of K.
    pub k: u32,
    /// Tiles of V.
    pub v: u32,
    /// Tiles of the bias.
    pub b: u32,
    /// Tiles of `dSᵀ`.
    pub ds: u32,
    /// lse and delta of streamed tiles.
    pub lse: u32,
    pub delta: u32,
    /// Barriers of Q, K, V and the bias that complete when the bytes have arrived.
    pub full_q: u32,
    pub full_k: u32,
    pub full_v: u32,
    pub full_b: u32,
    /// Barriers that complete when a buffer is released: those of Q and dO by the warps that multiply with them, the others by
    /// all warps.
    pub empty_q: u32,
    pub empty_d: u32,
    pub empty_k: u32,
    pub empty_v: u32,
    pub empty_b: u32,
    /// Barriers of the slots, which complete when a work tile has been written.
    pub known: u32,
    /// Slots of decoded work tiles.
    pub slots: u32,
    /// Cursors of the pipelines.
    pub cursors: u32,
    /// With a block mask, the list entry of the tile in each stage of K.
    pub entries: u32,
}

#[cube]
impl Memory {
    /// Lays out a consumer group's memory from `base` on and initialises its barriers. All threads must call it.
    pub fn new(base: u32, #[comptime] blueprint: Blueprint) -> Memory {
        let stages = comptime!(blueprint.tile.stages as u32);
        let warpgroups = comptime!(blueprint.tile.warpgroups as u32);
        let q = base;
        let d = q + comptime!(warpgroups * blueprint.q_bytes() as u32);
        let k = d + comptime!(warpgroups * blueprint.d_bytes() as u32);
        let v = k + comptime!(stages * blueprint.k_bytes() as u32);
        let b = v + comptime!(stages * blueprint.v_bytes() as u32);
        let ds = b + comptime!(stages * blueprint.b_bytes() as u32);
        let lse = ds + comptime!(2 * blueprint.ds_bytes() as u32);
        let delta = lse + comptime!(stages * blueprint.stats_bytes() as u32);
        let full_q = delta + comptime!(stages * blueprint.stats_bytes() as u32);
        let empty_q = full_q + comptime!(8 * warpgroups);
        let empty_d = empty_q + comptime!(8 * warpgroups);
        let full_k = empty_d + comptime!(8 * warpgroups);
        let full_v = full_k + comptime!(8 * stages);
        let full_b = full_v + comptime!(8 * stages);
        let empty_k = full_b + comptime!(8 * stages);
        let empty_v = empty_k + comptime!(8 * stages);
        let empty_b = empty_v + comptime!(8 * stages);
        let known = empty_b + comptime!(8 * stages);
        let slots = known + comptime!(8 * SLOTS as u32);
        let cursors = slots + comptime!(4 * (SLOTS * WORDS) as u32);
        let entries = cursors + comptime!(4 * (3 * WORDS) as u32);
        let units = comptime!(warpgroups * WARPGROUP_UNITS as u32);
        let within = UNIT_POS % units;
        let mut first = within == 0;
        if comptime!(blueprint.tile.producer_warp) {
            first = first && UNIT_POS < comptime!(blueprint.tile.consumer_groups as u32 * units);
        }
        if first {
            #[unroll]
            for i in 0..warpgroups {
                mbarrier_init(full_q + comptime!(8 * i), 1u32);
                mbarrier_init(
                    empty_q + comptime!(8 * i),
                    comptime!(if blueprint.reduces() { 4 * warpgroups } else { 4 }),
                );
                mbarrier_init(empty_d + comptime!(8 * i), 4u32);
            }
            #[unroll]
            for i in 0..stages {
                mbarrier_init(full_k + comptime!(8 * i), 1u32);
                mbarrier_init(full_v + comptime!(8 * i), 1u32);
                mbarrier_init(full_b + comptime!(8 * i), 1u32);
                // Each warp arrives once.
                mbarrier_init(empty_k + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_v + comptime!(8 * i), comptime!(4 * warpgroups));
                mbarrier_init(empty_b + comptime!(8 * i), comptime!(4 * warpgroups));
            }
            #[unroll]
            for i in 0..comptime!(SLOTS as u32) {
                mbarrier_init(known + comptime!(8 * i), 1u32);
            }
            #[unroll]
            for i in 0..comptime!(3 * WORDS as u32) {
                store_shared(cursors + comptime!(4 * i), 0u32);
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        Memory {
            q,
            d,
            k,
            v,
            b,
            ds,
            lse,
            delta,
            full_q,
            full_k,
            full_v,
            full_b,
            empty_q,
            empty_d,
            empty_k,
            empty_v,
            empty_b,
            known,
            slots,
            cursors,
            entries,
        }
    }

    /// Waits until work tile `nth` of this consumer group has been decoded.
    pub fn await_work_tile(&self, nth: u32) {
        mbarrier_wait(self.known + nth % comptime!(SLOTS as u32) * 8, (nth / comptime!(SLOTS as u32)) % 2);
    }

    /// A field of work tile `nth`, which must have been decoded. Fields are read when needed, because registers are scarce.
    pub fn work_tile(&self, nth: u32, #[comptime] word: WorkTileField) -> u32 {
        load_shared(
            self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32) + comptime!(4 * word as u32),
        )
    }

    /// The query head of work tile `nth`.
    pub fn query_head(&self, nth: u32, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.transposed()) {
            self.work_tile(nth, WorkTileField::HeadKv)
        } else {
            self.work_tile(nth, WorkTileField::Head)
        }
    }

    pub fn write_work_tile(&self, nth: u32, work: &WorkTile, flags: u32) {
        let at = self.slots + nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
        store_shared(at + comptime!(4 * WorkTileField::KLast as u32), work.k_last);
        store_shared(at + comptime!(4 * WorkTileField::Steps as u32), work.steps);
        store_shared(at + comptime!(4 * WorkTileField::HeadKv as u32), work.head_kv);
        store_shared(at + comptime!(4 * WorkTileField::Batch as u32), work.batch);
        store_shared(at + comptime!(4 * WorkTileField::Head as u32), work.head);
        store_shared(at + comptime!(4 * WorkTileField::QStart as u32), work.q_start);
        store_shared(at + comptime!(4 * WorkTileField::Flags as u32), u32::cast_from(work.fully_masked) | flags);
        store_shared(at + comptime!(4 * WorkTileField::BatchOut as u32), work.batch_out);
        if comptime!(work.band.varlen) {
            store_shared(at + comptime!(4 * WorkTileField::Sequence as u32), work.band.sequence);
            store_shared(at + comptime!(4 * WorkTileField::RowsBegin as u32), work.band.begin_q);
            store_shared(at + comptime!(4 * WorkTileField::RowsEnd as u32), work.band.end_q);
            store_shared(at + comptime!(4 * WorkTileField::ColumnsBegin as u32), work.band.begin_k);
            store_shared(at + comptime!(4 * WorkTileField::ColumnsEnd as u32), work.band.end_k);
        }
    }

    /// The band of work tile `nth`. `band` is the band of the options, without sequences.
    pub fn band(&self, nth: u32, band: &Band, #[comptime] varlen: bool) -> Band {
        if comptime!(varlen) {
            let (begin_q, end_q) =
                (self.work_tile(nth, WorkTileField::RowsBegin), self.work_tile(nth, WorkTileField::RowsEnd));
            let (begin_k, end_k) =
                (self.work_tile(nth, WorkTileField::ColumnsBegin), self.work_tile(nth, WorkTileField::ColumnsEnd));
            band.of(self.work_tile(nth, WorkTileField::Sequence), begin_q, end_q, begin_k, end_k)
        } else {
            *band
        }
    }

    /// The tile at a position of K's pipeline, which must have been loaded. With a block mask it comes from its list entry,
    /// else from `start` and `edge`.
    pub fn visit(&self, state: &PipelineState, start: u32, edge: bool, #[comptime] blueprint: Blueprint) -> Visit {
        if comptime!(blueprint.sparse) {
            visit_of(load_shared(self.entries + state.stage * 4), comptime!(blueprint.tile.tile_k as u32))
        } else {
            Visit { start, fully_visible: !edge, masked: true.runtime() }
        }
    }

    /// Waits for a tile of the tiled bias, which is in the same stage as the tile of K. Returns the address of the warpgroup's
    /// part.
    pub fn await_bias(&self, state: &PipelineState, warpgroup: u32, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.tiled_bias()) {
            mbarrier_wait(self.full_b + state.stage * 8, state.phase);
        }
        let of_warpgroup = comptime!((blueprint.b_bytes() / blueprint.tile.warpgroups) as u32);
        self.b + state.stage * comptime!(blueprint.b_bytes() as u32) + warpgroup * of_warpgroup
    }

    /// Releases a tile of a tiled bias.
    pub fn release_bias(&self, state: &PipelineState, #[comptime] blueprint: Blueprint) {
        if comptime!(blueprint.tiled_bias()) {
            // All threads of the warp must have read it.
            sync_plane();
            mbarrier_release(self.empty_b + state.stage * 8);
        }
    }

    /// The location of the scores of a work tile's rows with the tile of `visit`. Batch and head are only read if the scores
    /// depend on them.
    pub fn score_tile(
        &self,
        nth: u32,
        band: Band,
        first_row: u32,
        visit: &Visit,
        bias_tile: u32,
        #[comptime] drops: bool,
        #[comptime] blueprint: Blueprint,
    ) -> ScoreTile {
        let of_mods = comptime!(blueprint.modified || blueprint.mask_mod || blueprint.alibi || drops);
        let of_pairs = comptime!(blueprint.mask.is_some() || (blueprint.bias.is_some() && !blueprint.tiled_bias()));
        let (mut batch, mut head) = (0u32.runtime(), 0u32.runtime());
        if comptime!(of_mods || of_pairs) {
            batch = self.work_tile(nth, WorkTileField::Batch);
            head = self.query_head(nth, blueprint);
        }
        ScoreTile::new(batch, head, band, first_row, visit, bias_tile, 0usize)
    }

    /// lse and delta of a thread's rows `row` and `row + 8`, if rows are queries.
    pub fn row_statistics(
        &self,
        stats: &[u32],
        nth: u32,
        row: u32,
        band: &Band,
        scheduler: &TileScheduler,
        #[comptime] blueprint: Blueprint,
    ) -> RowStatistics {
        let (mut batch, mut head) = (0u32.runtime(), 0u32.runtime());
        if comptime!(blueprint.role == Role::Dq) {
            batch = self.work_tile(nth, WorkTileField::Batch);
            head = self.work_tile(nth, WorkTileField::Head);
        }
        RowStatistics::of(stats, batch, head, row, band, scheduler, blueprint)
    }

    /// Addresses of a pipeline's first stage and of its first barriers `full` and `empty`.
    pub fn pipeline(&self, #[comptime] pipeline: Pipeline) -> (u32, u32, u32) {
        match comptime!(pipeline) {
            Pipeline::K => (self.k, self.full_k, self.empty_k),
            Pipeline::V => (self.v, self.full_v, self.empty_v),
            Pipeline::Bias => (self.b, self.full_b, self.empty_b),
        }
    }

    pub fn cursor(&self, #[comptime] pipeline: Pipeline, #[comptime] word: CursorField) -> u32 {
        load_shared(self.cursors + comptime!(4 * (pipeline as usize * WORDS + word as usize) as u32))
    }

    pub fn set_cursor(&self, #[comptime] pipeline: Pipeline, #[comptime] word: CursorField, value: u32) {
        store_shared(self.cursors + comptime!(4 * (pipeline as usize * WORDS + word as usize) as u32), value);
    }
}
