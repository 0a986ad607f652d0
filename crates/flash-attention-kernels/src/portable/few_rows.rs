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
//! [reads several vectors](super::FewRowsTile::reads) before it uses the first one. With `R` rows, each element of K and V takes `R`
//! multiply-adds in f32 and at most one conversion.

use super::few_rows_tile::FewRowsBlueprint;
use crate::blocks::Visit;
use crate::fragment::{
    ForwardOutputs, Grid, Layout, Qkv, Rows, ScalarScores, TileAt, Vec4, WIDTH, filled, row_start, write_quad, zeros,
};
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
struct PackedRows {
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
    fn query(&self, row: u32) -> u32 {
        (self.first + row) / self.group
    }

    fn head(&self, row: u32) -> usize {
        (self.head + (self.first + row) % self.group) as usize
    }

    /// Whether the tile's row belongs to a query.
    fn exist(&self, row: u32) -> bool {
        self.first + row < self.all
    }
}

/// Shared memory of a thread block.
#[derive(CubeType)]
struct Board {
    /// Q, `[rows, columns]` in vectors of four columns.
    q: Shared<[Vec4]>,
    /// Partial sums of `Q Kᵀ`, `[lanes, rows / 4, tile_k]` in vectors of four rows. Then those of `O`.
    partial: Shared<[Vec4]>,
    /// S, then P, `[rows / 4, tile_k]` in vectors of four rows. Then `l`.
    p: Shared<[Vec4]>,
    /// Maxima or sums of the classes of keys, `[rows / 4, classes]` in vectors of four rows.
    folded: Shared<[Vec4]>,
    /// `1 / l` of each row.
    factors: Shared<[f32]>,
    #[cube(comptime)]
    blueprint: FewRowsBlueprint,
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
    #[unroll]
    for n in 0..WIDTH {
        let head = packed.head(four * WIDTH as u32 + comptime!(n as u32));
        heads.push(scores.head(batch, head, head_kv, band, false));
    }

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
        let values = at.keys(inputs.v);

        board.products(&at.keys(inputs.k));
        let mut ahead = Array::<Vec4>::new(comptime!(blueprint.values_at_once() * blueprint.groups()));
        read_values(&values, &mut ahead, 0u32, blueprint);
        sync_cube();

        // -- scores
        let mut s = board.sum_of_products();
        #[unroll]
        for n in 0..WIDTH {
            let query = packed.query(four * WIDTH as u32 + comptime!(n as u32));
            let t = scores.score.of(s.extract(n));
            s.insert(n, scores.masked_score(t, heads.index(n), query, start + column));
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
            board.accumulate(&values, &mut ahead, &mut acc, true);
        } else {
            board.accumulate(&values, &mut ahead, &mut acc, false);
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
    #[unroll]
    for four in 0..fours {
        if UNIT_POS == comptime!(four as u32) {
            let total = board.folded(four, false);
            #[unroll]
            for n in 0..WIDTH {
                let row = comptime!((four * WIDTH + n) as u32);
                let sum = total.extract(n);
                board.factors[comptime!(four * WIDTH + n)] = normalizer(sum);
                if packed.exist(row) {
                    let at = row_start(&*lse, batch, packed.head(row), packed.query(row));
                    lse[at] = lse_bits(m[four].extract(n), sum);
                }
            }
        }
    }
    board.store(outputs.o, batch, &packed, &acc);
}

#[cube]
impl Board {
    fn new(#[comptime] blueprint: FewRowsBlueprint) -> Board {
        let tile = comptime!(blueprint.tile);
        Board {
            q: Shared::new_slice(comptime!(blueprint.queries_len())),
            partial: Shared::new_slice(comptime!(blueprint.partial_len())),
            p: Shared::new_slice(comptime!(tile.units())),
            folded: Shared::new_slice(comptime!(tile.folded_len())),
            factors: Shared::new_slice(comptime!(tile.rows)),
            blueprint,
        }
    }

    /// Copies the queries of the block to shared memory as f32. Columns past the last one, and rows that belong to no query, are 0.
    fn stage_queries<F: Float, N: Size>(
        &mut self,
        q: &'static Tensor<Vector<F, N>>,
        batch: usize,
        packed: &PackedRows,
    ) {
        let (units, head_dim) = comptime!((self.blueprint.tile.units(), self.blueprint.head_dim));
        let columns = comptime!(self.blueprint.query_vectors());
        let all = comptime!(self.blueprint.queries_len());
        for step in 0..comptime!(all.div_ceil(units)) {
            let slot = UNIT_POS as usize + step * units;
            if slot < all {
                let row = (slot / columns) as u32;
                let mut value = Vec4::new(0.0f32);
                if packed.exist(row) {
                    let query = packed.query(row);
                    let rows = Rows::of(q, batch, packed.head(row), query, query + 1);
                    value = Vec4::cast_from(rows.read(query, slot % columns * comptime!(WIDTH), head_dim));
                }
                self.q[slot] = value;
            }
        }
    }

    /// Each thread's part of `Q Kᵀ` for its keys, written to shared memory.
    fn products<F: Float, N: Size>(&mut self, keys: &Rows<F, N>) {
        let blueprint = comptime!(self.blueprint);
        let tile = comptime!(blueprint.tile);
        let (rows, of_thread, slots) = comptime!((tile.rows, tile.keys_of_thread(), tile.slots()));
        let (lane, slot) = (UNIT_POS as usize % tile.lanes, UNIT_POS as usize / tile.lanes);
        let at_once = comptime!(blueprint.columns_at_once());
        let columns = comptime!(blueprint.query_vectors());
        let mut sums = filled::<f32>(0.0f32, comptime!(rows * of_thread));
        for batch in 0..comptime!(blueprint.lane_vectors() / at_once) {
            let mut held = Array::<Vec4>::new(comptime!(at_once * of_thread));
            #[unroll]
            for c in 0..at_once {
                let quad = (batch * at_once + c) * tile.lanes + lane;
                #[unroll]
                for n in 0..of_thread {
                    let key = (slot + comptime!(n * slots)) as u32;
                    let ragged = comptime!(columns * WIDTH > blueprint.head_dim);
                    held[comptime!(c * of_thread + n)] =
                        read(keys, key, quad * comptime!(WIDTH), ragged, blueprint.head_dim);
                }
            }
            #[unroll]
            for c in 0..at_once {
                let quad = (batch * at_once + c) * tile.lanes + lane;
                #[unroll]
                for row in 0..rows {
                    let query = self.q[comptime!(row * columns) + quad];
                    #[unroll]
                    for n in 0..of_thread {
                        let key = held[comptime!(c * of_thread + n)];
                        let mut sum = sums[comptime!(row * of_thread + n)];
                        #[unroll]
                        for e in 0..WIDTH {
                            sum = fma(query.extract(e), key.extract(e), sum);
                        }
                        sums[comptime!(row * of_thread + n)] = sum;
                    }
                }
            }
        }
        #[unroll]
        for n in 0..of_thread {
            #[unroll]
            for four in 0..comptime!(rows / WIDTH) {
                let mut value = Vec4::new(0.0f32);
                #[unroll]
                for e in 0..WIDTH {
                    value.insert(e, sums[comptime!((four * WIDTH + e) * of_thread + n)]);
                }
                let at = lane * comptime!(tile.lane_pitch()) + comptime!(four * tile.tile_k + n * slots) + slot;
                self.partial[at] = value;
            }
        }
    }

    /// The products of this thread's key and its four rows.
    fn sum_of_products(&self) -> Vec4 {
        let tile = comptime!(self.blueprint.tile);
        let mut sum = Vec4::new(0.0f32);
        #[unroll]
        for lane in 0..tile.lanes {
            sum += self.partial[comptime!(lane * tile.lane_pitch()) + UNIT_POS as usize];
        }
        sum
    }

    /// Folds what `p` holds of each row to one number for each class of keys: the maximum if `highest`, else the sum.
    fn fold(&mut self, #[comptime] highest: bool) {
        let tile = comptime!(self.blueprint.tile);
        let classes = comptime!(tile.classes());
        if UNIT_POS < comptime!(tile.folded_len() as u32) {
            let (four, class) = (UNIT_POS as usize / classes, UNIT_POS as usize % classes);
            let at = four * comptime!(tile.tile_k) + class;
            let mut value = self.p[at];
            #[unroll]
            for n in 1..comptime!(tile.tile_k / classes) {
                let other = self.p[at + comptime!(n * classes)];
                value = if comptime!(highest) { max(value, other) } else { value + other };
            }
            self.folded[UNIT_POS as usize] = value;
        }
    }

    /// The maxima of four rows if `highest`, else their sums, from those of the classes.
    fn folded(&self, #[comptime] four: usize, #[comptime] highest: bool) -> Vec4 {
        let classes = comptime!(self.blueprint.tile.classes());
        let mut value = self.folded[comptime!(four * classes)];
        #[unroll]
        for class in 1..classes {
            let other = self.folded[comptime!(four * classes + class)];
            value = if comptime!(highest) { max(value, other) } else { value + other };
        }
        value
    }

    /// `O += P V` over this thread's keys and columns. `ahead` holds the first vectors of V.
    ///
    /// `careful`: an element of `P` that is zero adds nothing, even where `V` is not finite.
    fn accumulate<F: Float, N: Size>(
        &self,
        values: &Rows<F, N>,
        held: &mut Array<Vec4>,
        acc: &mut Array<Vec4>,
        #[comptime] careful: bool,
    ) {
        let blueprint = comptime!(self.blueprint);
        let tile = comptime!(blueprint.tile);
        let (at_once, groups) = comptime!((blueprint.values_at_once(), blueprint.groups()));
        let key_groups = comptime!(blueprint.key_groups());
        let of_group = UNIT_POS as usize / comptime!(blueprint.value_lanes());
        for batch in 0..comptime!(tile.tile_k / key_groups / at_once) {
            if batch > 0 {
                read_values(values, held, batch as u32, blueprint);
            }
            #[unroll]
            for n in 0..at_once {
                let key = of_group + (batch * at_once + n) * key_groups;
                #[unroll]
                for four in 0..comptime!(tile.rows / WIDTH) {
                    let p = self.p[comptime!(four * tile.tile_k) + key];
                    #[unroll]
                    for e in 0..WIDTH {
                        let weight = p.extract(e);
                        #[unroll]
                        for g in 0..groups {
                            let at = comptime!((four * WIDTH + e) * groups + g);
                            let sum = acc[at];
                            let added = fma(Vec4::new(weight), held[comptime!(n * groups + g)], sum);
                            acc[at] = if comptime!(careful) { select(weight == 0.0f32, sum, added) } else { added };
                        }
                    }
                }
            }
        }
    }

    /// Adds the sums of the groups of threads, and writes the rows that belong to queries.
    fn store<O: Float, N: Size>(
        &mut self,
        o: &mut Tensor<Vector<O, N>>,
        batch: usize,
        packed: &PackedRows,
        acc: &Array<Vec4>,
    ) {
        let blueprint = comptime!(self.blueprint);
        let tile = comptime!(blueprint.tile);
        let (units, groups, lanes) = comptime!((tile.units(), blueprint.groups(), blueprint.value_lanes()));
        let columns = comptime!(lanes * groups);
        #[unroll]
        for four in 0..comptime!(tile.rows / WIDTH) {
            sync_cube();
            #[unroll]
            for n in 0..comptime!(WIDTH * groups) {
                self.partial[comptime!(n * units) + UNIT_POS as usize] = acc[comptime!(four * WIDTH * groups + n)];
            }
            sync_cube();
            for step in 0..comptime!((WIDTH * columns).div_ceil(units)) {
                let slot = UNIT_POS as usize + step * units;
                let (within, quad) = (slot / columns, slot % columns);
                let row = comptime!((four * WIDTH) as u32) + within as u32;
                if slot < comptime!(WIDTH * columns) && packed.exist(row) {
                    let at = (within * groups + quad / lanes) * units + quad % lanes;
                    let mut sum = self.partial[at];
                    #[unroll]
                    for n in 1..comptime!(blueprint.key_groups()) {
                        sum += self.partial[at + comptime!(n * lanes)];
                    }
                    let factor = self.factors[row as usize];
                    let layout = Layout::of(&*o, batch, packed.head(row));
                    let (query, column) = (packed.query(row), quad * comptime!(WIDTH));
                    write_quad(o, &layout, query, column, sum * Vec4::new(factor), blueprint.head_dim_v);
                }
            }
        }
    }
}

/// Reads this thread's vectors of V of the `nth` batch of its keys.
#[cube]
fn read_values<F: Float, N: Size>(
    values: &Rows<F, N>,
    held: &mut Array<Vec4>,
    nth: u32,
    #[comptime] blueprint: FewRowsBlueprint,
) {
    let (at_once, groups) = comptime!((blueprint.values_at_once(), blueprint.groups()));
    let lanes = comptime!(blueprint.value_lanes());
    let key_groups = comptime!(blueprint.key_groups() as u32);
    let (lane, of_group) = (UNIT_POS as usize % lanes, UNIT_POS / comptime!(lanes as u32));
    #[unroll]
    for n in 0..at_once {
        let key = of_group + (nth * comptime!(at_once as u32) + comptime!(n as u32)) * key_groups;
        #[unroll]
        for g in 0..groups {
            let ragged = comptime!((g + 1) * lanes * WIDTH > blueprint.head_dim_v);
            let column = (comptime!(g * lanes) + lane) * comptime!(WIDTH);
            held[comptime!(n * groups + g)] = read(values, key, column, ragged, blueprint.head_dim_v);
        }
    }
}

/// Reads four elements of the `nth` row as f32. A row past the last one is replaced by the last one, whose pairs are hidden, so that no
/// read depends on a branch. If `ragged`, columns past the last one are 0.
#[cube]
fn read<F: Float, N: Size>(
    rows: &Rows<F, N>,
    nth: u32,
    column: usize,
    #[comptime] ragged: bool,
    #[comptime] head_dim: usize,
) -> Vec4 {
    let row = min(rows.start + nth, rows.end - 1);
    if comptime!(ragged) {
        let mut value = Vec4::new(0.0f32);
        if column < head_dim {
            value = Vec4::cast_from(rows.read_within(row, column, head_dim));
        }
        value
    } else {
        Vec4::cast_from(rows.read_within(row, column, head_dim))
    }
}
