//! Forward of few rows, for decoding: the query heads of a group are rows of one tile, so that each key is read once for all of them, and
//! the keys are split among thread blocks. [`combine`](super::combine) puts the splits together.
//!
//! ```text
//! for each tile of keys of the split:
//!     S = Q Kᵀ    threads of a key: neighbours read neighbouring vectors of its row; their sums are added through shared memory
//!     scores      each thread has one key and four rows          m' = max(m, rowmax S)    P = exp(S − m')
//!     O = α O + P V    threads of a row of V: neighbours read neighbouring vectors; each group of threads has keys of its own
//! O = Σ groups, / l    lse = m + ln l
//! ```
//!
//! Decoding is limited by memory. Operands go from memory to registers, and only results of products go through shared memory. A thread
//! [reads several vectors](FewRowsTile::reads) before it uses the first one. With `R` rows, each element of K and V takes `R`
//! multiply-adds in f32 and at most one conversion.

mod board;
mod tile;

pub use tile::{FewRowsBlueprint, FewRowsTile};

use board::{Board, read_values};

use crate::blocks::Visit;
use crate::fragment::{ForwardOutputs, Grid, Qkv, ScalarScores, TileAt, Vec4, WIDTH, filled, row_start, zeros};
use crate::softmax::{HIDDEN, lse_bits, normalizer, weight};
use cubecl::prelude::*;

/// Numbering of thread blocks: the split of the keys varies fastest, then the block of rows, the key/value head and the batch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct SplitGrid {
    /// Splits of blocks of rows, key/value heads and batches.
    pub grid: Grid,
    /// Number of splits of the keys.
    pub num_splits: u32,
}

/// Rows of a block. Row `r` belongs to query `r / group` and to query head `r % group` of the group, both counted from the block's first
/// row. (PackGQA of FlashAttention-3: T. Dao, github.com/Dao-AILab/flash-attention, hopper/pack_gqa.h.)
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PackedRows {
    /// Number of the first row among those of all queries of the group.
    first: u32,
    /// Number of rows of all queries of the group.
    all: u32,
    /// Query heads of the group.
    group: u32,
    /// First query head of the group.
    head: u32,
}

#[cube]
impl PackedRows {
    /// The row's query. It is past the last one if the row belongs to none.
    pub fn query(&self, row: u32) -> u32 {
        (self.first + row) / self.group
    }

    /// The row's query head.
    pub fn head(&self, row: u32) -> usize {
        (self.head + (self.first + row) % self.group) as usize
    }

    /// Whether the tile's row belongs to a query.
    pub fn exist(&self, row: u32) -> bool {
        self.first + row < self.all
    }
}

/// Computes `o` and the bits of `lse` of each split of the keys: `[P · B, H, Sq, Dv]` and `[P · B, H, Sq]` for `P` splits.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<F: Float, M: Numeric, O: Float, N: Size>(
    inputs: Qkv<F, N>,
    scores: ScalarScores<F, M>,
    outputs: ForwardOutputs<O, N>,
    grid: SplitGrid,
    #[comptime] blueprint: FewRowsBlueprint,
    #[define(F, M, O)] _types: [ElemType; 3],
) {
    let tile = comptime!(blueprint.tile);
    let (rows, tile_k, fours) = comptime!((tile.rows as u32, tile.tile_k as u32, tile.rows / WIDTH));
    let (group, num_splits) = (grid.grid.group_size, grid.num_splits);
    let work = grid.grid.at(CUBE_POS);
    if work.is_none {
        terminate!();
    }
    let (batch, head_kv) = (work.batch, work.head);
    let (block, split) = (work.block / num_splits, work.block % num_splits);
    let extras = scores.score.extras;
    // Every batch is one sequence.
    let band = extras.block(batch as u32, &scores.band, batch as u32, 0u32).band;
    let packed = PackedRows { first: block * rows, all: group * band.seq_q, group, head: head_kv as u32 * group };

    let mut board = Board::new(blueprint);
    board.stage_queries(inputs.q, batch, &packed);

    // -- this thread's four rows and key of each tile
    let (four, column) = (UNIT_POS / tile_k, UNIT_POS % tile_k);
    let mut heads = Sequence::<TileAt>::new();
    let mut queries = Sequence::<u32>::new();
    #[unroll]
    for n in 0..WIDTH {
        let row = four * WIDTH as u32 + comptime!(n as u32);
        heads.push(scores.head(batch, packed.head(row), head_kv, band, false));
        queries.push(packed.query(row));
    }
    let (keys, values) = (heads.index(0usize).keys(inputs.k), heads.index(0usize).keys(inputs.v));

    let mut m = filled::<Vec4>(Vec4::new(HIDDEN), fours);
    let mut l = Vec4::new(0.0f32);
    // A sink is added when splits are combined.
    if comptime!(!blueprint.is_split) {
        #[unroll]
        for row in 0..comptime!(tile.rows) {
            let (first, _) = scores.score.begin(packed.head(comptime!(row as u32)), true.runtime());
            let mut of_four = m[comptime!(row / WIDTH)];
            of_four.insert(comptime!(row % WIDTH), first);
            m[comptime!(row / WIDTH)] = of_four;
        }
        #[unroll]
        for n in 0..WIDTH {
            let (_, sum) = scores.score.begin(heads.index(n).head, column == 0);
            l.insert(n, sum);
        }
    }
    let mut acc = zeros(comptime!(tile.rows * blueprint.groups()));

    let first_query = packed.query(0u32);
    let last_query = packed.query(comptime!(rows - 1));
    let seen = band.k_blocks(first_query, rows, tile_k);
    let of_split = seen.count().div_ceil(num_splits);
    let from = min(seen.start + split * of_split, seen.end);
    let to = min(from + of_split, seen.end);
    sync_cube();
    for nth in from..to {
        let start = seen.origin + nth * tile_k;
        let fully_visible = band.all_see(first_query, last_query, start, tile_k);
        let visit = Visit { start, fully_visible, masked: true.runtime() };
        let at = heads.index(0usize).tile(first_query, &visit, false);

        board.products(&keys, start);
        let mut ahead = Array::<Vec4>::new(comptime!(blueprint.values_at_once() * blueprint.groups()));
        read_values(&values, start, &mut ahead, 0u32, blueprint);
        sync_cube();

        // -- scores
        let mut s = board.sum_of_products();
        #[unroll]
        for n in 0..WIDTH {
            let t = scores.score.of(s.extract(n));
            s.insert(n, scores.masked_score(t, heads.index(n), *queries.index(n), start + column));
        }

        // -- new maxima of the rows
        board.p[UNIT_POS as usize] = s;
        sync_cube();
        board.fold(true);
        sync_cube();
        let mut alpha = Array::<Vec4>::new(fours);
        let mut own = Vec4::new(0.0f32);
        let mut own_alpha = Vec4::new(0.0f32);
        #[unroll]
        for n in 0..fours {
            let highest = max(m[n], board.folded(n, true));
            alpha[n] = Vec4::exp(m[n] - highest);
            m[n] = highest;
            own = select(four == comptime!(n as u32), highest, own);
            own_alpha = select(four == comptime!(n as u32), alpha[n], own_alpha);
        }

        // -- P and l
        let mut p = Vec4::new(0.0f32);
        #[unroll]
        for n in 0..WIDTH {
            p.insert(n, weight(s.extract(n), own.extract(n)));
        }
        l = fma(l, own_alpha, p);
        board.p[UNIT_POS as usize] = p;
        sync_cube();

        // -- O
        #[unroll]
        for row in 0..comptime!(tile.rows) {
            let factor = alpha[comptime!(row / WIDTH)].extract(comptime!(row % WIDTH));
            #[unroll]
            for g in 0..comptime!(blueprint.groups()) {
                acc[comptime!(row * blueprint.groups() + g)] *= Vec4::new(factor);
            }
        }
        if scores.hide(&at) {
            board.accumulate(&values, start, &mut ahead, &mut acc, true);
        } else {
            board.accumulate(&values, start, &mut ahead, &mut acc, false);
        }
    }

    // -- lse and 1 / l
    let batch = if comptime!(blueprint.is_split) { split as usize * grid.grid.batches as usize + batch } else { batch };
    sync_cube();
    board.p[UNIT_POS as usize] = l;
    sync_cube();
    board.fold(false);
    sync_cube();
    let lse = outputs.lse;
    let four = UNIT_POS as usize;
    if four < fours {
        let total = board.folded(four, false);
        let mut highest = m[0];
        #[unroll]
        for n in 1..fours {
            highest = select(four == n, m[n], highest);
        }
        #[unroll]
        for n in 0..WIDTH {
            let nth = four * WIDTH + n;
            let (row, sum) = (nth as u32, total.extract(n));
            board.factors[nth] = normalizer(sum);
            if packed.exist(row) {
                let at = row_start(&*lse, batch, packed.head(row), packed.query(row));
                lse[at] = lse_bits(highest.extract(n), sum);
            }
        }
    }
    board.store(outputs.o, batch, &packed, &acc);
}
