//! Which cube computes which block of queries, and when.
//!
//! As many cubes as run at a time are started; each computes one item after another. An item is a block of queries of a
//! head. Items are numbered so that
//! - heads come in sections whose keys and values fit the second-level cache together, and
//! - within a section the longest come first (of causal attention the last block of queries), heads taking turns.
//!
//! A cube's first item is that of its own number. The others it takes from a common counter, so that whoever is done
//! first takes the next.
//! (FlashAttention-3, arXiv:2407.08608, section 3; longest first: Graham 1969.)

use super::TILE_Q;
use super::ops::take_ticket;
use crate::mask::Band;
use cubecl::prelude::*;

/// How items are numbered.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct Walk {
    /// Items in all.
    pub items: u32,
    /// Blocks of queries of a head.
    pub blocks: u32,
    /// Heads of `q` in all batches.
    pub heads: u32,
    /// Heads of `q` in a batch.
    pub num_heads_q: u32,
    /// Query heads that share a key/value head.
    pub group_size: u32,
    /// Heads in a section.
    pub section: u32,
}

/// A block of queries of a head, and the tiles of keys that it sees.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone))]
pub struct Item {
    /// Batch.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// First query.
    pub q_start: u32,
    /// First key of the last tile, with which to begin.
    pub k_last: u32,
    /// Tiles; at least 1.
    pub steps: u32,
    /// There is nothing to see: the one tile must be hidden.
    pub blind: bool,
}

#[cube]
impl Walk {
    /// The number of this cube's next item; not below `items` if there is none.
    pub fn next(&self, counter: &[u32]) -> u32 {
        // Each item but the first ones is taken once, and each cube comes once for nothing: after `items` tickets the
        // counter is 0 again, ready for the next launch.
        CUBE_COUNT as u32 + take_ticket(counter, self.items - 1)
    }

    /// The item of that number.
    pub fn item(&self, number: u32, band: &Band, #[comptime] tile_k: u32) -> Item {
        let of_section = self.section * self.blocks;
        let first_head = number / of_section * self.section;
        let within = number % of_section;
        let heads = min(self.section, self.heads - first_head);
        let nth = within / heads;
        let head = first_head + within % heads;
        let q_start = (self.blocks - 1 - nth) * comptime!(TILE_Q as u32);

        let seen = band.k_blocks(q_start, comptime!(TILE_Q as u32), tile_k);
        Item {
            batch: head / self.num_heads_q,
            head: head % self.num_heads_q,
            q_start,
            k_last: (max(seen.end, 1u32) - 1) * tile_k,
            steps: max(seen.end - seen.start, 1u32),
            blind: seen.start == seen.end,
        }
    }
}
