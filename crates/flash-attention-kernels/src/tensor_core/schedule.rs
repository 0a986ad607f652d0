//! The tile scheduler: which consumer group computes which work tile, in which order.
//!
//! The grid is persistent: only as many thread blocks are launched as run concurrently. Each has one or two consumer groups,
//! and each consumer group computes one work tile after another.
//!
//! A work tile is a block of queries of a head. If there are too few blocks, it is such a block with one split of its keys. If
//! transposed, it is a block of keys, and queries and keys exchange their roles in this file; a split is then one of the query heads of
//! a group. Work tiles are numbered such that
//! - head groups come one after the other, where the keys and values of a head group fit the L2 cache together, and
//! - within a head group the longest work tiles come first (with causal attention, the last block of queries or the first block
//!   of keys), alternating between the heads.
//!
//! With several sequences, work tiles are the blocks of their [schedule](mod@crate::sequences), in its order, alternating
//! between the heads. With a block mask, the order by length is [computed on the device](fn@crate::blocks::order).
//!
//! The number of a consumer group's first work tile is the group's own number. The others are taken from a global counter, so
//! that the group that finishes first takes the next one. (FlashAttention-3, arXiv:2407.08608, section 3; longest first: Graham
//! 1969.)
//!
//! # Blocks of keys that add to `dQ` in order
//!
//! They come in chunks of consecutive blocks. All heads' first chunks come first, and within a chunk the last block, which with
//! causal attention sees the fewest queries. Each block visits tiles of queries in ascending order and adds to a tile after the
//! blocks with smaller numbers. Causal blocks of a chunk then start at different tiles, each where the blocks before it have been
//! already. As many blocks as run at a time are in the chunks of a head group.
//!
//! First work tiles are taken from the counter, too. A work tile waits only for work tiles with smaller numbers, which running
//! thread blocks have taken before, and the smallest unfinished number waits for none.

use super::Blueprint;
use crate::blocks::{TileSize, Visits, block_in_order, visits};
use crate::extras::Extras;
use crate::mask::{Band, Blocks};
use crate::ptx::take_ticket;
use cubecl::prelude::*;

/// Division by an invariant number, as a multiplication and a shift. (Granlund and Montgomery, "Division by invariant integers
/// using multiplication", 1994, section 4.)
///
/// ```
/// use flash_attention_kernels::tensor_core::Divisor;
///
/// assert_eq!(Divisor::new(7).divide(50), 7);
/// ```
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct Divisor {
    /// The divisor.
    pub divisor: u32,
    /// `2^32 (2^shift − divisor) / divisor + 1`.
    pub multiplier: u32,
    /// The base-2 logarithm of the divisor, rounded up.
    pub shift: u32,
}

impl Divisor {
    /// Prepares a divisor, which must not be 0.
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

/// Numbering of work tiles. The host prepares the multipliers of the divisors, because decoding is on the critical path: one
/// warp decodes each work tile of a consumer group while the group's warpgroups may wait for it.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug)]
#[expand(derive(Clone, Copy))]
pub struct TileScheduler {
    /// Number of work tiles, below 2^31.
    pub num_tiles: u32,
    /// Number of blocks of queries of a head.
    pub blocks: u32,
    /// Number of queries by which the first block starts before query 0: [`Band::ahead()`].
    pub ahead: u32,
    /// Number of heads of `q` in all batches.
    pub heads: u32,
    /// Number of work tiles of a head group.
    pub head_group_tiles: Divisor,
    /// Number of heads in a head group.
    pub head_group: Divisor,
    /// Number of heads in the last head group, which may have fewer.
    pub last_head_group: Divisor,
    /// Number of heads of `q` in a batch.
    pub num_heads_q: Divisor,
    /// Number of query heads that share a key/value head.
    pub group_size: Divisor,
    /// Number of splits of the keys, or of a group's query heads.
    pub num_splits: Divisor,
    /// Batch size.
    pub batches: u32,
    /// Number of blocks of a chunk.
    pub chunk: Divisor,
    /// Number of work tiles of the chunks of all heads.
    pub chunk_tiles: Divisor,
}

/// Coordinate of a work tile: batch, head, block and split.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone))]
pub struct TileCoordinate {
    /// Batch.
    pub batch: u32,
    /// Head of the resident rows.
    pub head: u32,
    /// Number of the block: among the head's blocks, longest first, or in the schedule.
    pub nth: u32,
    /// Number of the split.
    pub split: u32,
}

/// A work tile: a block of queries of a head, and the tiles of keys that it sees.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone))]
pub struct WorkTile {
    /// Batch.
    pub batch: u32,
    /// Batch of the outputs, in which splits are stored one after the other.
    pub batch_out: u32,
    /// Number of the block among those of all heads and batches.
    pub block: u32,
    /// Query head.
    pub head: u32,
    /// Key/value head of the streamed tiles.
    pub head_kv: u32,
    /// First query. In the first block it may be before query 0: a negative number in 32 bits.
    pub q_start: u32,
    /// First key of the last tile. With a block mask, the position of that tile's list entry.
    pub k_last: u32,
    /// Number of tiles; at least 1.
    pub steps: u32,
    /// Whether nothing is visible, so that the single tile must be hidden.
    pub fully_masked: bool,
    /// The band of the block's sequence.
    pub band: Band,
}

impl TileScheduler {
    /// The scheduler of `blocks` blocks of queries for each head of `[batch, num_heads_q]`. The first block starts `ahead`
    /// queries before query 0. `head_group` is the number of heads in a head group, and `num_splits` the number of splits of
    /// the keys or of a group's query heads.
    pub fn new(
        blocks: u32,
        ahead: u32,
        batch: u32,
        num_heads_q: u32,
        group_size: u32,
        head_group: u32,
        num_splits: u32,
    ) -> Self {
        let heads = batch * num_heads_q;
        let head_group = head_group.min(heads);
        TileScheduler {
            num_tiles: blocks * heads * num_splits,
            blocks,
            ahead,
            heads,
            head_group_tiles: Divisor::new(head_group * blocks * num_splits),
            head_group: Divisor::new(head_group),
            last_head_group: Divisor::new((heads - 1) % head_group + 1),
            num_heads_q: Divisor::new(num_heads_q),
            group_size: Divisor::new(group_size),
            num_splits: Divisor::new(num_splits),
            batches: batch,
            chunk: Divisor::new(blocks),
            chunk_tiles: Divisor::new(blocks * heads),
        }
    }

    /// The numbering in chunks of at most `chunk` blocks. The last chunk has as many work tiles as the others: those past the last
    /// block see nothing.
    pub fn in_chunks(self, chunk: u32) -> Self {
        let chunk = chunk.clamp(1, self.blocks);
        let tiles = chunk * self.num_splits.divisor;
        TileScheduler {
            num_tiles: self.blocks.next_multiple_of(chunk) * self.num_splits.divisor * self.heads,
            head_group_tiles: Divisor::new(self.head_group.divisor * tiles),
            chunk: Divisor::new(chunk),
            chunk_tiles: Divisor::new(tiles * self.heads),
            ..self
        }
    }

    /// The launch argument.
    pub fn into_launch(self) -> TileSchedulerLaunch {
        TileSchedulerLaunch::new(
            self.num_tiles,
            self.blocks,
            self.ahead,
            self.heads,
            self.head_group_tiles.into_launch(),
            self.head_group.into_launch(),
            self.last_head_group.into_launch(),
            self.num_heads_q.into_launch(),
            self.group_size.into_launch(),
            self.num_splits.into_launch(),
            self.batches,
            self.chunk.into_launch(),
            self.chunk_tiles.into_launch(),
        )
    }
}

/// Takes the number of this consumer group's next work tile; at least `num_tiles` if none is left.
#[cube]
pub fn next_tile(num_tiles: u32, counter: &[u32], #[comptime] blueprint: Blueprint) -> u32 {
    let groups = CUBE_COUNT as u32 * comptime!(blueprint.tile.consumer_groups as u32);
    if comptime!(blueprint.ordered) {
        // Every work tile is taken once, and each consumer group takes one ticket in vain. After these tickets the counter is 0
        // again, ready for the next launch.
        take_ticket(counter, num_tiles + groups - 1)
    } else {
        // Here the first work tile of each consumer group is not taken, so that there are `num_tiles` tickets.
        groups + take_ticket(counter, num_tiles - 1)
    }
}

#[cube]
impl TileScheduler {
    /// Number of work tiles: that of the schedule, if there is one.
    pub fn len(&self, extras: &Extras) -> u32 {
        let mut num_tiles = self.num_tiles;
        if comptime!(extras.is_varlen()) {
            num_tiles = extras.blocks(0u32) * self.num_heads_q.divisor * self.num_splits.divisor;
        }
        num_tiles
    }

    /// The coordinate of work tile `number`.
    pub fn coordinate(&self, number: u32, #[comptime] blueprint: Blueprint) -> TileCoordinate {
        let is_split = comptime!(blueprint.is_split());
        if comptime!(blueprint.varlen) {
            let nth = self.num_heads_q.divide(number);
            let head = self.num_heads_q.modulo(number);
            let (nth, split) = self.split_of(nth, is_split);
            TileCoordinate { batch: 0u32.runtime(), head, nth, split }
        } else {
            let mut number = number;
            let mut after = 0u32;
            if comptime!(blueprint.ordered) {
                after = (self.chunk_tiles.divide(number) + 1) * self.chunk.divisor;
                number = self.chunk_tiles.modulo(number);
            }
            let first_head = self.head_group_tiles.divide(number) * self.head_group.divisor;
            let within = self.head_group_tiles.modulo(number);
            let mut nth = self.head_group.divide(within);
            let mut head = first_head + self.head_group.modulo(within);
            if self.heads - first_head < self.head_group.divisor {
                nth = self.last_head_group.divide(within);
                head = first_head + self.last_head_group.modulo(within);
            }
            let (of_block, split) = self.split_of(nth, is_split);
            nth = if comptime!(blueprint.ordered) { after - 1 - of_block } else { of_block };
            TileCoordinate { batch: self.num_heads_q.divide(head), head: self.num_heads_q.modulo(head), nth, split }
        }
    }

    /// Number of the blocks `all` of a head that come before `block`, which is one of them, where blocks come in chunks.
    pub fn blocks_before(&self, block: u32, all: &Blocks) -> u32 {
        let chunk = self.chunk.divide(block) * self.chunk.divisor;
        let of_chunk = min(all.end, chunk + self.chunk.divisor) - 1 - block;
        max(chunk, all.start) - all.start + of_chunk
    }

    /// Numbers of block and split, from the number of a split among all splits of all blocks.
    fn split_of(&self, nth: u32, #[comptime] is_split: bool) -> (u32, u32) {
        if comptime!(is_split) {
            (self.num_splits.divide(nth), self.num_splits.modulo(nth))
        } else {
            (nth, 0u32.runtime())
        }
    }

    /// Number of query heads of a group that a thread block goes through for one block of keys, if transposed.
    pub fn heads_of_block(&self, #[comptime] blueprint: Blueprint) -> u32 {
        if comptime!(blueprint.split_group) {
            self.num_splits.divide(self.group_size.divisor)
        } else {
            self.group_size.divisor
        }
    }

    /// The work tile of this number. If transposed, the heads are key/value heads, and there is one work tile for each query head of the
    /// group, or of its split: `of_group` is the number of that query head in the group or split. If the query heads of a group are
    /// packed, the heads are key/value heads as well, a block has as many queries as fit a tile with all heads of the group, and the
    /// work tile's query head is the first of them.
    pub fn work_tile(
        &self,
        number: u32,
        of_group: u32,
        band: &Band,
        extras: &Extras,
        #[comptime] blueprint: Blueprint,
    ) -> WorkTile {
        let (split_keys, transposed, tile) = comptime!((blueprint.split_keys, blueprint.transposed(), blueprint.tile));
        let (tile_q, tile_k) = comptime!((blueprint.rows() as u32, tile.tile_k as u32));
        let coordinate = self.coordinate(number, blueprint);
        let (head, split) = (coordinate.head, coordinate.split);
        let nth = if comptime!(extras.is_sparse() && !blueprint.varlen) {
            // All query heads of a group use the order of the first one.
            let of_head = if comptime!(transposed) { head * self.group_size.divisor } else { head };
            block_in_order(extras, coordinate.batch as usize, of_head as usize, coordinate.nth)
        } else if comptime!(transposed) {
            coordinate.nth
        } else {
            self.blocks - 1 - coordinate.nth
        };
        let queries = if comptime!(blueprint.pack_gqa) { tile_q / self.group_size.divisor } else { tile_q.runtime() };
        let start = ((nth * queries) as i32 - self.ahead as i32) as u32;
        let block = extras.block(coordinate.nth, band, coordinate.batch, start);
        let (q_start, band) = (block.start, block.band);

        let seen = band.k_blocks(q_start, tile_q, tile_k);
        let (mut start, mut end) = (seen.start, seen.end);
        if comptime!(split_keys) {
            let of_split = self.num_splits.divide(end - start + self.num_splits.divisor - 1);
            start = min(seen.start + split * of_split, seen.end);
            end = min(start + of_split, seen.end);
        }
        let head_kv = if comptime!(transposed) {
            head * self.group_size.divisor + split * self.heads_of_block(blueprint) + of_group
        } else if comptime!(blueprint.pack_gqa) {
            head
        } else {
            self.group_size.divide(head)
        };
        let head = if comptime!(blueprint.pack_gqa) { head * self.group_size.divisor } else { head };
        if comptime!(blueprint.ordered) {
            end = select(nth < self.blocks, end, start);
        }
        let mut k_last = seen.origin + (max(end, 1u32) - 1) * tile_k;
        let mut tiles = end - start;
        if comptime!(extras.is_sparse()) {
            let head_q = if comptime!(transposed) { head_kv } else { head };
            let visits = visits_of_block(extras, &band, block.batch as usize, head_q as usize, q_start, blueprint);
            k_last = visits.last();
            tiles = visits.count;
        }
        WorkTile {
            batch: block.batch,
            batch_out: split * self.batches + block.batch,
            block: (coordinate.batch * self.num_heads_q.divisor + coordinate.head) * self.blocks + coordinate.nth,
            head,
            head_kv,
            q_start,
            k_last,
            steps: max(tiles, 1u32),
            fully_masked: tiles == 0,
            band,
        }
    }
}

/// The list of tiles that a block of rows visits, which contains `row`, in this batch and query head. There must be a block mask.
#[cube]
pub fn visits_of_block(
    extras: &Extras,
    band: &Band,
    batch: usize,
    head: usize,
    row: u32,
    #[comptime] blueprint: Blueprint,
) -> Visits {
    let (rows, columns) = comptime!((blueprint.tile.tile_q() as u32, blueprint.tile.tile_k as u32));
    // Nothing in a list tells whether its rows are keys.
    visits(extras, band, batch, head, row, comptime!(TileSize { rows, columns, keys: false }))
}
