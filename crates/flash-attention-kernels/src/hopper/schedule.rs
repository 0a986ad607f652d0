//! Which team computes which block of rows, and when.
//!
//! As many cubes as run at a time are started, of one team or more; each team computes one item after another. An item is
//! a block of queries of a head, or, where there are too few of them, that with a part of its keys; transposed it is a block
//! of keys, and what is said of queries and keys here is the other way round. Items are numbered so that
//! - heads come in sections whose keys and values fit the second-level cache together, and
//! - within a section the longest come first (of causal attention the last block of queries, or the first one of keys), heads
//!   taking turns.
//!
//! Of several sequences, items are the blocks of their [schedule](mod@crate::sequences), in its order, heads taking turns. With a block mask,
//! which are the longest is [found out on the device](fn@crate::blocks::order).
//!
//! A team's first item is that of its own number. The others it takes from a common counter, so that whoever is done
//! first takes the next.
//! (FlashAttention-3, arXiv:2407.08608, section 3; longest first: Graham 1969.)

use super::ops::take_ticket;
use super::{Blueprint, HopperTile};
use crate::blocks::{block_in_order, visits};
use crate::extras::Extras;
use crate::mask::Band;
use cubecl::prelude::*;

/// A number to divide by, as a multiplication and a shift.
/// (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994, section 4.)
///
/// ```
/// use flash_attention_kernels::hopper::schedule::Divisor;
///
/// assert_eq!(Divisor::new(7).divide(50), 7);
/// ```
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct Divisor {
    /// The number.
    pub divisor: u32,
    /// `2^32 (2^shift − divisor) / divisor + 1`.
    pub multiplier: u32,
    /// The base-2 logarithm of the number, rounded up.
    pub shift: u32,
}

impl Divisor {
    /// Of a number that is not 0.
    pub fn new(divisor: u32) -> Self {
        let shift = divisor.next_power_of_two().trailing_zeros();
        let multiplier = (((1u64 << shift) - divisor as u64) << 32) / divisor as u64 + 1;
        Divisor { divisor, multiplier: multiplier as u32, shift }
    }

    /// The launch argument.
    pub fn into_launch(self) -> DivisorLaunch {
        DivisorLaunch::new(self.divisor, self.multiplier, self.shift)
    }
}

#[cube]
impl Divisor {
    /// `x / divisor`, rounded down. For `x` below 2^31.
    pub fn divide(&self, x: u32) -> u32 {
        let high = (x as u64 * self.multiplier as u64) >> 32;
        (high as u32 + x) >> self.shift
    }

    /// `x % divisor`. For `x` below 2^31.
    pub fn modulo(&self, x: u32) -> u32 {
        x - self.divide(x) * self.divisor
    }
}

/// How items are numbered. Divisors come with multipliers that the host has prepared: one warp decodes every item of a
/// team, and its warpgroup waits for it.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct Walk {
    /// Items in all; fewer than 2^31.
    pub items: u32,
    /// Blocks of queries of a head.
    pub blocks: u32,
    /// How many queries before the first one the first block starts: [`Band::ahead()`].
    pub ahead: u32,
    /// Heads of `q` in all batches.
    pub heads: u32,
    /// Items of a section.
    pub of_section: Divisor,
    /// Heads in a section.
    pub section: Divisor,
    /// Heads in the last section, which may have fewer.
    pub last_section: Divisor,
    /// Heads of `q` in a batch.
    pub num_heads_q: Divisor,
    /// Query heads that share a key/value head.
    pub group_size: Divisor,
    /// Parts of the keys of a block.
    pub parts: Divisor,
    /// Batches.
    pub batches: u32,
}

/// Which block of which head an item is.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone))]
pub struct Spot {
    /// Batch.
    pub batch: u32,
    /// Head: of the rows that are kept.
    pub head: u32,
    /// Number among the head's blocks, the longest first; or in the schedule.
    pub nth: u32,
    /// Number of the part of its keys.
    pub part: u32,
}

/// A block of queries of a head, and the tiles of keys that it sees.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone))]
pub struct Item {
    /// Batch.
    pub batch: u32,
    /// Batch of the results: parts lie one behind the other there.
    pub batch_out: u32,
    /// Query head.
    pub head: u32,
    /// Key/value head: that of the tiles that stream by.
    pub head_kv: u32,
    /// First query; of the first block it may be before query 0, a negative number in 32 bits.
    pub q_start: u32,
    /// First key of the last tile, with which to begin; with a block mask, where the entry of the last tile lies.
    pub k_last: u32,
    /// Tiles; at least 1.
    pub steps: u32,
    /// There is nothing to see: the one tile must be hidden.
    pub blind: bool,
    /// The band of its sequence.
    pub band: Band,
}

impl Walk {
    /// The items of blocks of queries of `[batch, heads]`, the first of which starts `ahead` queries before the first one, with
    /// so many heads in a section and so many parts of the keys.
    pub fn new(
        blocks: u32,
        ahead: u32,
        batch: u32,
        num_heads_q: u32,
        group_size: u32,
        section: u32,
        parts: u32,
    ) -> Self {
        let heads = batch * num_heads_q;
        let section = section.min(heads);
        Walk {
            items: blocks * heads * parts,
            blocks,
            ahead,
            heads,
            of_section: Divisor::new(section * blocks * parts),
            section: Divisor::new(section),
            last_section: Divisor::new((heads - 1) % section + 1),
            num_heads_q: Divisor::new(num_heads_q),
            group_size: Divisor::new(group_size),
            parts: Divisor::new(parts),
            batches: batch,
        }
    }

    /// The launch argument.
    pub fn into_launch(self) -> WalkLaunch {
        WalkLaunch::new(
            self.items,
            self.blocks,
            self.ahead,
            self.heads,
            self.of_section.into_launch(),
            self.section.into_launch(),
            self.last_section.into_launch(),
            self.num_heads_q.into_launch(),
            self.group_size.into_launch(),
            self.parts.into_launch(),
            self.batches,
        )
    }
}

#[cube]
impl Walk {
    /// The walk over the blocks of a schedule, if there is one.
    pub fn scheduled(&self, extras: &Extras) -> Walk {
        let mut items = self.items;
        if comptime!(extras.is_ragged()) {
            items = extras.blocks(0u32) * self.num_heads_q.divisor * self.parts.divisor;
        }
        Walk {
            items,
            blocks: self.blocks,
            ahead: self.ahead,
            heads: self.heads,
            of_section: self.of_section,
            section: self.section,
            last_section: self.last_section,
            num_heads_q: self.num_heads_q,
            group_size: self.group_size,
            parts: self.parts,
            batches: self.batches,
        }
    }

    /// The number of this team's next item; not below `items` if there is none.
    pub fn next(&self, counter: &[u32], #[comptime] tile: HopperTile) -> u32 {
        // Each item but the first ones is taken once, and each team that had a first one comes once for nothing: after
        // `items` tickets the counter is 0 again, ready for the next launch.
        CUBE_COUNT as u32 * comptime!(tile.teams as u32) + take_ticket(counter, self.items - 1)
    }

    /// Where the item of that number is.
    fn spot(&self, number: u32, #[comptime] partial: bool, #[comptime] ragged: bool) -> Spot {
        if comptime!(ragged) {
            let nth = self.num_heads_q.divide(number);
            let head = self.num_heads_q.modulo(number);
            let (nth, part) = self.parts_of(nth, partial);
            Spot { batch: 0u32.runtime(), head, nth, part }
        } else {
            let first_head = self.of_section.divide(number) * self.section.divisor;
            let within = self.of_section.modulo(number);
            let mut nth = self.section.divide(within);
            let mut head = first_head + self.section.modulo(within);
            if self.heads - first_head < self.section.divisor {
                nth = self.last_section.divide(within);
                head = first_head + self.last_section.modulo(within);
            }
            let (nth, part) = self.parts_of(nth, partial);
            Spot { batch: self.num_heads_q.divide(head), head: self.num_heads_q.modulo(head), nth, part }
        }
    }

    /// A block's number, and a part's, from that of the part among all of them.
    fn parts_of(&self, nth: u32, #[comptime] partial: bool) -> (u32, u32) {
        if comptime!(partial) { (self.parts.divide(nth), self.parts.modulo(nth)) } else { (nth, 0u32.runtime()) }
    }

    /// The item of that number. Transposed, the heads are those of keys, and the item is one for each query head of the group: `of_group`
    /// is that one's number in it.
    pub fn item(
        &self,
        number: u32,
        of_group: u32,
        band: &Band,
        extras: &Extras,
        #[comptime] blueprint: Blueprint,
    ) -> Item {
        let (partial, transposed, tile) = comptime!((blueprint.partial, blueprint.transposed(), blueprint.tile));
        let (tile_q, tile_k) = comptime!((tile.tile_q() as u32, tile.tile_k as u32));
        let spot = self.spot(number, partial, blueprint.ragged);
        let (head, part) = (spot.head, spot.part);
        let nth = if comptime!(extras.is_sparse() && !blueprint.ragged) {
            // Of a group's query heads the first one's order is that of all.
            let of_head = if comptime!(transposed) { head * self.group_size.divisor } else { head };
            block_in_order(extras, spot.batch as usize, of_head as usize, spot.nth)
        } else if comptime!(transposed) {
            spot.nth
        } else {
            self.blocks - 1 - spot.nth
        };
        let start = ((nth * tile_q) as i32 - self.ahead as i32) as u32;
        let block = extras.block(spot.nth, band, spot.batch, start);
        let (q_start, band) = (block.start, block.band);

        let seen = band.k_blocks(q_start, tile_q, tile_k);
        let (mut start, mut end) = (seen.start, seen.end);
        if comptime!(partial) {
            let of_part = self.parts.divide(end - start + self.parts.divisor - 1);
            start = min(seen.start + part * of_part, seen.end);
            end = min(start + of_part, seen.end);
        }
        let head_kv = if comptime!(transposed) {
            head * self.group_size.divisor + of_group
        } else {
            self.group_size.divide(head)
        };
        let mut k_last = seen.origin + (max(end, 1u32) - 1) * tile_k;
        let mut tiles = end - start;
        if comptime!(extras.is_sparse()) {
            let head_q = if comptime!(transposed) { head_kv } else { head };
            let of_head = head_q as usize;
            let visits = visits(extras, &band, block.batch as usize, of_head, q_start, tile_q, tile_k, false);
            k_last = visits.last();
            tiles = visits.count;
        }
        Item {
            batch: block.batch,
            batch_out: part * self.batches + block.batch,
            head,
            head_kv,
            q_start,
            k_last,
            steps: max(tiles, 1u32),
            blind: tiles == 0,
            band,
        }
    }
}
