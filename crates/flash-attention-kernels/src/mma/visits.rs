//! Tiles of columns that a thread block visits: those of a head from the last one to the first one and, where rows are keys, those of
//! each query head of the group in turn. With a block mask they are the entries of [lists](mod@crate::blocks), of which each query head
//! has its own.

use crate::blocks::{Visit, entry_at, visit_of};
use crate::extras::Extras;
use crate::tensor_core::{Blueprint, WorkTile, visits_of_block};
use cubecl::prelude::*;

/// A tile of columns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct VisitedTile {
    /// First column; with a block mask, the position of the list entry.
    at: u32,
    /// List entry. Unused without a block mask.
    entry: u32,
}

#[cube]
impl VisitedTile {
    /// The tile whose first column or, with a block mask, list entry is at this position.
    pub fn new(at: u32, extras: &Extras, #[comptime] scores: Blueprint) -> VisitedTile {
        let entry = if comptime!(scores.sparse) { entry_at(extras, at) } else { 0u32.runtime() };
        VisitedTile { at, entry }
    }

    /// Moves on to the next tile of the head, whose `entry_ahead` has been read.
    pub fn advance(&mut self, entry_ahead: u32, #[comptime] scores: Blueprint) {
        self.at -= comptime!(step(&scores));
        self.entry = entry_ahead;
    }

    /// List entry of the next tile of the head. After the last tile, an arbitrary word: a list has two words before its entries.
    pub fn entry_ahead(&self, extras: &Extras, #[comptime] scores: Blueprint) -> u32 {
        if comptime!(scores.sparse) { entry_at(extras, self.at - 1) } else { 0u32.runtime() }
    }

    /// First column of the next tile of the head, whose entry has been read.
    pub fn start_ahead(&self, entry_ahead: u32, #[comptime] scores: Blueprint) -> u32 {
        VisitedTile { at: self.at - comptime!(step(&scores)), entry: entry_ahead }.start(scores)
    }

    /// First column of the `nth` tile of the head after this one. There must be no block mask.
    pub fn start_after(&self, #[comptime] nth: u32, #[comptime] scores: Blueprint) -> u32 {
        self.at - comptime!(nth * scores.tile.tile_k as u32)
    }

    /// First column.
    pub fn start(&self, #[comptime] scores: Blueprint) -> u32 {
        if comptime!(scores.sparse) { visit_of(self.entry).start } else { self.at }
    }

    /// The visit. Without a block mask, `edge` tells whether the band may hide something.
    pub fn visit(&self, edge: bool, #[comptime] scores: Blueprint) -> Visit {
        if comptime!(scores.sparse) {
            visit_of(self.entry)
        } else {
            Visit { start: self.at, fully_visible: !edge, masked: true.runtime() }
        }
    }
}

/// Distance from the position of a tile to that of the next one, which comes before it.
fn step(scores: &Blueprint) -> u32 {
    if scores.sparse { 1 } else { scores.tile.tile_k as u32 }
}

/// A tile of columns of a head.
#[derive(CubeType)]
pub struct Cursor {
    /// Number of the tile among those of the head. Unused with a block mask.
    pub step: u32,
    /// Head of the columns.
    pub head: u32,
    /// With a block mask, number of list entries left in the head, with that of this tile; 0 if the head has none.
    left: u32,
    /// The tile.
    pub tile: VisitedTile,
}

/// The tile after a [`Cursor`].
#[derive(CubeType)]
pub struct NextTile {
    /// Head of the columns.
    pub head: u32,
    /// The tile.
    pub tile: VisitedTile,
    /// Whether it is the first one of its head.
    first: bool,
    /// List entries left.
    left: u32,
}

#[cube]
impl Cursor {
    /// At the first tile that a work tile visits.
    pub fn new(work: &WorkTile, tile: VisitedTile) -> Cursor {
        let left = select(work.fully_masked, 0u32, work.steps);
        Cursor { step: 0u32.runtime(), head: work.head_kv, left, tile }
    }

    /// Whether the rows see nothing of the head, so that its single tile must be hidden.
    pub fn fully_masked(&self, work: &WorkTile, #[comptime] scores: Blueprint) -> bool {
        if comptime!(scores.sparse) { self.left == 0 } else { work.fully_masked }
    }

    /// The next tile: if this is the last one of its head, the first one of the next head. After the last one of the `group` heads, the
    /// tile is arbitrary.
    pub fn next(&self, work: &WorkTile, group: u32, extras: &Extras, #[comptime] scores: Blueprint) -> NextTile {
        if comptime!(scores.sparse) {
            let first = self.left <= 1;
            let head = select(first, self.head + 1, self.head);
            let mut left = self.left - 1;
            let mut at = self.tile.at - comptime!(step(&scores));
            if comptime!(scores.transposed()) && first {
                let existing = min(head, work.head_kv + group - 1) as usize;
                let visits = visits_of_block(extras, &work.band, work.batch as usize, existing, work.q_start, scores);
                left = visits.count;
                at = visits.last();
            }
            NextTile { head, tile: VisitedTile::new(at, extras, scores), first, left }
        } else {
            let first = self.step + 1 == work.steps;
            let head = select(first, self.head + 1, self.head);
            let at = select(first, work.k_last, self.tile.at - comptime!(step(&scores)));
            NextTile { head, tile: VisitedTile::new(at, extras, scores), first, left: 0u32.runtime() }
        }
    }

    /// Moves on to the next tile.
    pub fn move_to(&mut self, next: &NextTile, #[comptime] scores: Blueprint) {
        if comptime!(scores.sparse) {
            self.left = next.left;
        } else {
            self.step = select(next.first, 0u32, self.step + 1);
        }
        self.head = next.head;
        self.tile.at = next.tile.at;
        self.tile.entry = next.tile.entry;
    }
}

/// Number of tiles of all heads that a work tile visits, if `group` heads of columns share the rows.
#[cube]
pub fn steps_of_heads(work: &WorkTile, group: u32, extras: &Extras, #[comptime] scores: Blueprint) -> u32 {
    if comptime!(scores.sparse && scores.transposed()) {
        let mut all = 0u32.runtime();
        for nth in 0..group {
            let head = (work.head_kv + nth) as usize;
            all +=
                max(visits_of_block(extras, &work.band, work.batch as usize, head, work.q_start, scores).count, 1u32);
        }
        all
    } else {
        work.steps * group
    }
}
