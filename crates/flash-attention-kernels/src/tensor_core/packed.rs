//! Packed query heads: the query heads of a group as rows of one tile, so that a thread block reads each key once for all of them.
//!
//! Row `r` of a block belongs to query `r / group` of the block and to query head `r % group` of the group. (PackGQA of
//! FlashAttention-3: T. Dao, github.com/Dao-AILab/flash-attention, hopper/pack_gqa.h.)

use super::schedule::Divisor;
use super::{Blueprint, WorkTile};
use cubecl::prelude::*;

/// Rows of a block of queries: of one query head, or of all those of a group.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct BlockRows {
    /// First query.
    first_query: u32,
    /// First query head.
    first_head: u32,
    /// Number of query heads.
    group: Divisor,
    /// Number of rows, if heads are packed.
    count: u32,
    /// One past the last query.
    after: u32,
    /// Whether the heads of a group are packed.
    #[cube(comptime)]
    pub(super) packs: bool,
}

/// A row's query and query head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RowOf {
    /// Query. One past the last query for a row of the tile that belongs to no query.
    pub query: u32,
    /// Query head.
    pub head: u32,
}

#[cube]
impl BlockRows {
    /// The rows of a work tile.
    pub fn of(work: &WorkTile, group: Divisor, #[comptime] blueprint: Blueprint) -> BlockRows {
        let tile_q = comptime!(blueprint.rows() as u32);
        BlockRows {
            first_query: work.q_start,
            first_head: work.head,
            group,
            count: tile_q / group.divisor * group.divisor,
            after: work.band.after_queries(),
            packs: comptime!(blueprint.pack_gqa),
        }
    }

    /// The row of this number.
    pub fn at(&self, row: u32) -> RowOf {
        if comptime!(self.packs) {
            let query = self.first_query + self.group.divide(row);
            RowOf { query: select(row < self.count, query, self.after), head: self.first_head + self.group.modulo(row) }
        } else {
            RowOf { query: self.first_query + row, head: self.first_head }
        }
    }
}
