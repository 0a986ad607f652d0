//! Slots and cursor in shared memory: the turns.

use super::super::layout::{Layout, Operand, Region};
use super::super::memory::{Memory, MemoryExpand};
use super::super::{BiasBlueprint, BiasTile};
use super::scheduler::{Block, DbiasScheduler};
use crate::mask::Band;
use crate::ptx::*;
use cubecl::prelude::*;

/// Fields of a slot, which describes one turn: a batch and head that shares a block.
#[derive(Clone, Copy)]
pub enum WorkTileField {
    /// [`TURN`], [`LAST`]; 0 after the last turn.
    Flags,
    /// First query.
    QStart,
    /// First key.
    KStart,
    /// Batch.
    Batch,
    /// Query head.
    Head,
    /// Key/value head.
    HeadKv,
    /// Batch of the bias.
    BiasBatch,
    /// Head of the bias.
    BiasHead,
}

/// The warp that loads K and posts turns.
pub const WARP_K: u32 = 0;

/// The warp that loads V.
pub const WARP_V: u32 = 4;

/// The warp of each warpgroup that loads the warpgroup's rows of a bias.
pub const WARP_BIAS: u32 = 1;

/// The warp of each warpgroup that loads its rows of Q.
pub const WARP_Q: u32 = 2;

/// The warp of each warpgroup that loads its rows of dO.
pub const WARP_D: u32 = 3;

/// Flag: the slot holds a turn.
pub const TURN: u32 = 1;

/// Flag: the turn is the last one of its block.
pub const LAST: u32 = 2;

/// Fields of the cursor over the blocks.
#[derive(Clone, Copy)]
pub enum CursorField {
    /// The block's number.
    Number,
    /// [`Block::matrix`].
    Matrix,
    /// [`Block::row`].
    Row,
    /// [`Block::nth`].
    Nth,
    /// Number of batches and heads that share the block and have not been posted yet; 0 before the first block.
    Left,
}

#[cube]
impl Memory<BiasBlueprint> {
    /// Waits until tile `nth` of an operand has been released in the phase before the one of parity `phase`. Then makes its
    /// barrier expect the tile, and `others` bytes besides. Returns the addresses of the tile and of the barrier.
    pub fn refill(&self, #[comptime] of: Operand, nth: u32, phase: u32, #[comptime] others: u32) -> (u32, u32) {
        let bytes = comptime!(self.blueprint.bytes(of));
        let full = self.full(of, nth);
        let to = self.tiles(of, nth * bytes);
        // The first load waits for the phase before the first one, which counts as completed.
        mbarrier_wait(self.empty(of, nth), phase ^ 1);
        mbarrier_expect(full, comptime!(bytes + others).runtime());
        (to, full)
    }

    /// A field of turn `turn`, which must have been posted.
    pub fn word(&self, turn: u32, #[comptime] word: WorkTileField) -> u32 {
        load_shared(self.slot(turn, comptime!(word as usize)))
    }

    pub fn set_word(&self, turn: u32, #[comptime] word: WorkTileField, value: u32) {
        store_shared(self.slot(turn, comptime!(word as usize)), value);
    }

    pub fn cursor(&self, #[comptime] word: CursorField) -> u32 {
        load_shared(self.at_constant(Region::Cursors, comptime!(4 * word as u32)))
    }

    pub fn set_cursor(&self, #[comptime] word: CursorField, value: u32) {
        store_shared(self.at_constant(Region::Cursors, comptime!(4 * word as u32)), value);
    }

    /// Posts turn `turn`: the next head of the current block or, after its last one, the first head of block `next`. Returns
    /// whether the turn is the last one of its block. One warp calls it.
    pub fn post(&self, turn: u32, next: u32, scheduler: &DbiasScheduler, band: &Band) -> bool {
        let tile = comptime!(self.blueprint.tile);
        let group = opaque(scheduler.group_batches) * scheduler.group_heads.divisor;
        let mut left = self.cursor(CursorField::Left);
        let mut matrix = self.cursor(CursorField::Matrix);
        let mut row = self.cursor(CursorField::Row);
        let mut nth = self.cursor(CursorField::Nth);
        let number = self.cursor(CursorField::Number);
        // All threads must have read the cursor before one writes it.
        sync_plane();
        let enters = left == 0;
        let ends = enters && next >= scheduler.num_tiles;
        if enters && !ends {
            let block = scheduler.after(&Block { matrix, row, nth }, next - number, band, tile);
            matrix = block.matrix;
            row = block.row;
            nth = block.nth;
            self.set_cursor(CursorField::Number, next);
            self.set_cursor(CursorField::Matrix, matrix);
            self.set_cursor(CursorField::Row, row);
            self.set_cursor(CursorField::Nth, nth);
            left = group;
        }
        let member = group - left;
        let last = left == 1;
        let of_batch = scheduler.group_heads.divide(member);
        let (bias_batch, bias_head) = (scheduler.heads.divide(matrix), scheduler.heads.modulo(matrix));
        let head = bias_head * scheduler.group_heads.divisor + scheduler.group_heads.modulo(member);
        let seen = scheduler.seen(band, row, tile);
        self.set_word(turn, WorkTileField::Flags, select(ends, 0u32, select(last, TURN | LAST, TURN)));
        self.set_word(turn, WorkTileField::QStart, row * comptime!(BiasTile::TILE_Q as u32));
        self.set_word(turn, WorkTileField::KStart, (seen.start + nth) * comptime!(tile.block_k() as u32));
        self.set_word(turn, WorkTileField::Batch, bias_batch * scheduler.group_batches + of_batch);
        self.set_word(turn, WorkTileField::Head, head);
        self.set_word(turn, WorkTileField::HeadKv, scheduler.group_size.divide(head));
        self.set_word(turn, WorkTileField::BiasBatch, bias_batch);
        self.set_word(turn, WorkTileField::BiasHead, bias_head);
        self.set_cursor(CursorField::Left, select(ends, 0u32, left - 1));
        self.publish_slot(turn);
        last
    }
}
