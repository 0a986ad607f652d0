//! Shared memory: addresses of the pipelines' stages, their barriers, slots and cursors. The slots of a consumer group hold
//! decoded work tiles, and each pipeline of its producer has a cursor.

use super::layout::{Layout, Operand, Region};
use super::pipeline::PipelineState;
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
    /// First key of the last tile. It is visited first, or last if blocks of keys add to dQ in order.
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
    /// First key of the next tile, or the position of its list entry.
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

/// Shared memory: its base address, and the blueprint that defines its layout.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Memory<B: Layout> {
    base: u32,
    #[cube(comptime)]
    pub blueprint: B,
}

#[cube]
impl<B: Layout> Memory<B> {
    /// Initialises the barriers, and the cursors to zeros. Of the threads that share the memory, one is `first`. All threads
    /// must call it.
    pub fn new(base: u32, first: bool, #[comptime] blueprint: B) -> Memory<B> {
        let memory = Memory::<B> { base, blueprint };
        if first {
            // Arrivals: one for the bytes of a load, and one of each warp for a release.
            #[unroll]
            for nth in 0..5usize {
                let (of, count) = comptime!((blueprint.tiles()[nth].0, blueprint.tiles()[nth].1));
                memory.init_barriers(comptime!(Region::Full(of)), count, 1usize);
                memory.init_barriers(comptime!(Region::Empty(of)), count, comptime!(4 * blueprint.readers(of)));
            }
            memory.init_barriers(Region::Known, SLOTS, 1usize);
            #[unroll]
            for i in 0..comptime!(blueprint.words()[0] as u32) {
                store_shared(memory.at_constant(Region::Cursors, comptime!(4 * i)), 0u32);
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        memory
    }

    /// Initialises an array of `mbarrier`s with this number of arrivals.
    fn init_barriers(&self, #[comptime] region: Region, #[comptime] count: usize, #[comptime] arrivals: usize) {
        #[unroll]
        for i in 0..comptime!(count as u32) {
            mbarrier_init(self.at_constant(region, comptime!(8 * i)), comptime!(arrivals as u32).runtime());
        }
    }

    /// The same memory, whose addresses the compiler computes again instead of keeping them in registers.
    pub fn opaque(&self) -> Memory<B> {
        Memory::<B> { base: opaque(self.base), blueprint: self.blueprint }
    }

    /// Address of a byte of a region. The constant is added last. It is then part of the instruction that uses the address, and
    /// needs no register.
    pub fn at(&self, #[comptime] region: Region, byte: u32) -> u32 {
        self.base + byte + comptime!(self.blueprint.offset(region))
    }

    /// Address of a constant byte of a region.
    pub fn at_constant(&self, #[comptime] region: Region, #[comptime] byte: u32) -> u32 {
        self.base + comptime!(self.blueprint.offset(region) + byte)
    }

    /// Address of a byte of an operand's tiles.
    pub fn tiles(&self, #[comptime] of: Operand, byte: u32) -> u32 {
        self.at(comptime!(Region::Tiles(of)), byte)
    }

    /// Descriptor of tile `nth` of an operand, from that of the first region.
    pub fn descriptor(&self, start: u64, nth: u32, #[comptime] of: Operand) -> u64 {
        let blueprint = comptime!(self.blueprint);
        // Descriptors count in units of 16 bytes.
        let (bytes, offset) = comptime!((blueprint.bytes(of) / 16, blueprint.offset(Region::Tiles(of)) / 16));
        start + u64::cast_from(nth * bytes + offset)
    }

    /// Address of the `nth` barrier that completes when a tile has arrived.
    pub fn full(&self, #[comptime] of: Operand, nth: u32) -> u32 {
        self.at(comptime!(Region::Full(of)), nth * 8)
    }

    /// Address of the `nth` barrier that completes when a tile has been released.
    pub fn empty(&self, #[comptime] of: Operand, nth: u32) -> u32 {
        self.at(comptime!(Region::Empty(of)), nth * 8)
    }

    /// Address of a word of slot `nth`. Slots are numbered without end, and used in turn.
    pub fn slot(&self, nth: u32, #[comptime] word: usize) -> u32 {
        let slot = nth % comptime!(SLOTS as u32) * comptime!(4 * WORDS as u32);
        self.base + slot + comptime!(self.blueprint.offset(Region::Slots) + 4 * word as u32)
    }

    /// Publishes slot `nth`, which the warp has written.
    pub fn publish_slot(&self, nth: u32) {
        mbarrier_release(self.at(Region::Known, nth % comptime!(SLOTS as u32) * 8));
    }

    /// Waits until slot `nth` has been published.
    pub fn await_slot(&self, nth: u32) {
        mbarrier_wait(self.at(Region::Known, nth % comptime!(SLOTS as u32) * 8), (nth / comptime!(SLOTS as u32)) % 2);
    }
}

/// Offset of a word of a producer's cursor.
fn cursor_offset(of: Operand, word: CursorField) -> u32 {
    4 * ((of as usize - Operand::K as usize) * WORDS + word as usize) as u32
}

/// Bytes of a vector of 16 bytes of each thread.
fn vectors(blueprint: Blueprint) -> usize {
    blueprint.tile.warpgroups * WARPGROUP_UNITS * 16
}

#[cube]
impl Memory<Blueprint> {
    /// The memory of a consumer group. All threads must call it.
    pub fn of_group(base: u32, #[comptime] blueprint: Blueprint) -> Memory<Blueprint> {
        let tile = comptime!(blueprint.tile);
        let units = comptime!((tile.warpgroups * WARPGROUP_UNITS) as u32);
        let within = UNIT_POS % units;
        let mut first = within == 0;
        if comptime!(tile.producer_warp) {
            first = first && UNIT_POS < comptime!(tile.consumer_groups as u32 * units);
        }
        Memory::new(base, first, blueprint)
    }

    /// A field of work tile `nth`, which must have been decoded. Fields are read when needed, because registers are scarce.
    pub fn work_tile(&self, nth: u32, #[comptime] word: WorkTileField) -> u32 {
        load_shared(self.slot(nth, comptime!(word as usize)))
    }

    pub fn set_work_tile(&self, nth: u32, #[comptime] word: WorkTileField, value: u32) {
        store_shared(self.slot(nth, comptime!(word as usize)), value);
    }

    /// The query head of work tile `nth`.
    pub fn query_head(&self, nth: u32) -> u32 {
        if comptime!(self.blueprint.transposed()) {
            self.work_tile(nth, WorkTileField::HeadKv)
        } else {
            self.work_tile(nth, WorkTileField::Head)
        }
    }

    pub fn write_work_tile(&self, nth: u32, work: &WorkTile, flags: u32) {
        self.set_work_tile(nth, WorkTileField::KLast, work.k_last);
        self.set_work_tile(nth, WorkTileField::Steps, work.steps);
        self.set_work_tile(nth, WorkTileField::HeadKv, work.head_kv);
        self.set_work_tile(nth, WorkTileField::Batch, work.batch);
        self.set_work_tile(nth, WorkTileField::Head, work.head);
        self.set_work_tile(nth, WorkTileField::QStart, work.q_start);
        self.set_work_tile(nth, WorkTileField::Flags, u32::cast_from(work.fully_masked) | flags);
        self.set_work_tile(nth, WorkTileField::BatchOut, work.batch_out);
        if comptime!(work.band.varlen) {
            self.set_work_tile(nth, WorkTileField::Sequence, work.band.sequence);
            self.set_work_tile(nth, WorkTileField::RowsBegin, work.band.begin_q);
            self.set_work_tile(nth, WorkTileField::RowsEnd, work.band.end_q);
            self.set_work_tile(nth, WorkTileField::ColumnsBegin, work.band.begin_k);
            self.set_work_tile(nth, WorkTileField::ColumnsEnd, work.band.end_k);
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
    pub fn visit(&self, state: &PipelineState, start: u32, edge: bool) -> Visit {
        if comptime!(self.blueprint.sparse) {
            let entry = load_shared(self.at(Region::Entries, state.stage * 4));
            visit_of(entry)
        } else {
            Visit { start, fully_visible: !edge, masked: true.runtime() }
        }
    }

    /// Waits for a tile of the tiled bias, which is in the same stage as the tile of K. Returns the address of the warpgroup's
    /// part.
    pub fn await_bias(&self, state: &PipelineState, warpgroup: u32) -> u32 {
        let blueprint = comptime!(self.blueprint);
        if comptime!(blueprint.tiled_bias()) {
            mbarrier_wait(self.full(Operand::Bias, state.stage), state.phase);
        }
        let of_warpgroup = comptime!((blueprint.b_bytes() / blueprint.tile.warpgroups) as u32);
        self.tiles(Operand::Bias, state.stage * comptime!(blueprint.b_bytes() as u32) + warpgroup * of_warpgroup)
    }

    /// Releases a tile of a tiled bias.
    pub fn release_bias(&self, state: &PipelineState) {
        if comptime!(self.blueprint.tiled_bias()) {
            // All threads of the warp must have read it.
            sync_plane();
            mbarrier_release(self.empty(Operand::Bias, state.stage));
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
    ) -> ScoreTile {
        let blueprint = comptime!(self.blueprint);
        let of_mods = comptime!(blueprint.modified || blueprint.mask_mod || blueprint.alibi || drops);
        let of_pairs = comptime!(blueprint.mask.is_some() || (blueprint.bias.is_some() && !blueprint.tiled_bias()));
        let (mut batch, mut head) = (0u32.runtime(), 0u32.runtime());
        if comptime!(of_mods || of_pairs) {
            batch = self.work_tile(nth, WorkTileField::Batch);
            head = self.query_head(nth);
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
    ) -> RowStatistics {
        let blueprint = comptime!(self.blueprint);
        let (mut batch, mut head) = (0u32.runtime(), 0u32.runtime());
        if comptime!(!blueprint.transposed() && blueprint.role != Role::Forward) {
            batch = self.work_tile(nth, WorkTileField::Batch);
            head = self.work_tile(nth, WorkTileField::Head);
        }
        RowStatistics::of(stats, batch, head, row, band, scheduler, blueprint)
    }

    /// Keeps the thread's arguments of `score_mod` in shared memory, if the blueprint has memory for them.
    pub fn keep_arguments(&self, arguments: &Array<f32>) {
        let blueprint = comptime!(self.blueprint);
        if comptime!(blueprint.argument_bytes() > 0) {
            #[unroll]
            for nth in 0..comptime!(blueprint.tile.tile_k / 8) {
                let offset = comptime!(blueprint.offset(Region::Arguments) as usize + nth * vectors(blueprint));
                store_shared_floats(self.base + UNIT_POS * 16, offset, arguments, nth);
            }
        }
    }

    /// The arguments of `score_mod`, which are `in_registers` unless they have been [kept](Memory::keep_arguments) in shared memory.
    pub fn kept_arguments(&self, in_registers: &Array<f32>) -> Array<f32> {
        let blueprint = comptime!(self.blueprint);
        let mut arguments =
            Array::<f32>::new(comptime!(if blueprint.keeps_arguments() { blueprint.tile.tile_k / 2 } else { 0 }));
        if comptime!(blueprint.argument_bytes() > 0) {
            #[unroll]
            for nth in 0..comptime!(blueprint.tile.tile_k / 8) {
                let offset = comptime!(blueprint.offset(Region::Arguments) as usize + nth * vectors(blueprint));
                let four = load_shared_floats(self.base + UNIT_POS * 16, offset);
                #[unroll]
                for n in 0..4usize {
                    arguments[comptime!(4 * nth + n)] = *four.index(n);
                }
            }
        } else if comptime!(blueprint.keeps_arguments()) {
            #[unroll]
            for n in 0..comptime!(blueprint.tile.tile_k / 2) {
                arguments[n] = in_registers[n];
            }
        }
        arguments
    }

    pub fn cursor(&self, #[comptime] of: Operand, #[comptime] word: CursorField) -> u32 {
        load_shared(self.at_constant(Region::Cursors, comptime!(cursor_offset(of, word))))
    }

    pub fn set_cursor(&self, #[comptime] of: Operand, #[comptime] word: CursorField, value: u32) {
        store_shared(self.at_constant(Region::Cursors, comptime!(cursor_offset(of, word))), value);
    }
}
