//! Shared memory: slots of work tiles, cursors of the two pipelines, and what each stage of Q holds.

use super::super::layout::{Operand, Region};
use super::super::memory::{Memory, MemoryExpand};
use super::super::pipeline::PipelineState;
use super::{ENTRY_WORDS, WideBlueprint};
use crate::hopper::WORDS;
use crate::ptx::*;
use cubecl::prelude::*;

/// Fields of a slot: a block of keys of a key/value head, and the tiles of queries that see it.
#[derive(Clone, Copy)]
pub enum WorkTileField {
    /// First key.
    KStart,
    /// Number of tiles of all query heads of the group; 0 after the last work tile.
    Steps,
    /// Number of tiles of a query head.
    Tiles,
    /// First query of the last tile, which is visited first.
    QLast,
    /// Key/value head.
    HeadKv,
    /// Batch.
    Batch,
    /// Whether nothing is visible, so that the single tile of each head must be hidden: 0 or 1.
    FullyMasked,
}

/// Fields of a pipeline's cursor.
#[derive(Clone, Copy)]
pub enum CursorField {
    /// First query of the next tile.
    QStart,
    /// Tiles left of the query head, including the next one; 0 before the first work tile, [`END`] after the last.
    Left,
    /// Query heads left of the group, including the current one.
    HeadsLeft,
    /// Query head.
    Head,
    /// Batch.
    Batch,
    /// Stage of the next tile.
    Stage,
    /// Parity of the phase of the stage's barriers.
    Phase,
    /// Number of work tiles entered.
    Nth,
}

/// Value of [`CursorField::Left`] after the last work tile.
pub const END: u32 = u32::MAX;

/// What a stage of Q holds.
#[derive(Clone, Copy)]
pub enum EntryField {
    /// First query of the tile.
    QStart,
    /// Query head.
    Head,
    /// Position of the tile's first query in the statistics and in `dq_accum`.
    Row,
}

/// Offset of a word of the cursor of Q or dO.
fn cursor_offset(of: Operand, word: CursorField) -> u32 {
    4 * (of as usize * WORDS + word as usize) as u32
}

#[cube]
impl Memory<WideBlueprint> {
    /// A field of work tile `nth`, which must have been published.
    pub fn word(&self, nth: u32, #[comptime] word: WorkTileField) -> u32 {
        load_shared(self.slot(nth, comptime!(word as usize)))
    }

    pub fn set_word(&self, nth: u32, #[comptime] word: WorkTileField, value: u32) {
        store_shared(self.slot(nth, comptime!(word as usize)), value);
    }

    pub fn cursor(&self, #[comptime] of: Operand, #[comptime] word: CursorField) -> u32 {
        load_shared(self.at_constant(Region::Cursors, comptime!(cursor_offset(of, word))))
    }

    pub fn set_cursor(&self, #[comptime] of: Operand, #[comptime] word: CursorField, value: u32) {
        store_shared(self.at_constant(Region::Cursors, comptime!(cursor_offset(of, word))), value);
    }

    /// A field of the tile in a stage of Q, which must have arrived.
    pub fn entry(&self, stage: u32, #[comptime] word: EntryField) -> u32 {
        load_shared(self.at(Region::Entries, stage * comptime!(4 * ENTRY_WORDS as u32) + comptime!(4 * word as u32)))
    }

    pub fn set_entry(&self, stage: u32, #[comptime] word: EntryField, value: u32) {
        let at = self.at(Region::Entries, stage * comptime!(4 * ENTRY_WORDS as u32) + comptime!(4 * word as u32));
        store_shared(at, value);
    }

    /// lse or delta of a query of a stage's tile.
    pub fn statistic(&self, #[comptime] of: Region, stage: u32, query: u32) -> f32 {
        let at = stage * comptime!(self.blueprint.stats_bytes() as u32) + query * 4;
        f32::reinterpret(load_shared(self.at(of, at)))
    }

    /// Waits until the tile at a position of a pipeline has arrived.
    pub fn await_tile(&self, #[comptime] of: Operand, state: &PipelineState) {
        mbarrier_wait(self.full(of, state.stage), state.phase);
    }
}
