//! Shared memory of a thread block of the forward of few rows, and what its threads compute with it.

use super::{FewRowsBlueprint, PackedRows};
use crate::fragment::{Layout, Rows, Vec4, WIDTH, filled, write_quad};
use cubecl::prelude::*;

/// Shared memory of a thread block.
#[derive(CubeType)]
pub struct Board {
    /// Q, `[rows, columns]` in vectors of four columns.
    q: Shared<[Vec4]>,
    /// Partial sums of `Q Kᵀ`, `[lanes, rows / 4, tile_k]` in vectors of four rows. Then those of `O`.
    partial: Shared<[Vec4]>,
    /// S, then P, `[rows / 4, tile_k]` in vectors of four rows. Then `l`.
    pub p: Shared<[Vec4]>,
    /// Maxima or sums of the classes of keys, `[rows / 4, classes]` in vectors of four rows.
    folded: Shared<[Vec4]>,
    /// `1 / l` of each row.
    pub factors: Shared<[f32]>,
    #[cube(comptime)]
    blueprint: FewRowsBlueprint,
}

#[cube]
impl Board {
    pub fn new(#[comptime] blueprint: FewRowsBlueprint) -> Board {
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
    pub fn stage_queries<F: Float, N: Size>(
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

    /// Each thread's part of `Q Kᵀ` for its keys of the tile that begins at `start`, written to shared memory.
    pub fn products<F: Float, N: Size>(&mut self, keys: &Rows<F, N>, start: u32) {
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
                    let key = start + (slot + comptime!(n * slots)) as u32;
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
    pub fn sum_of_products(&self) -> Vec4 {
        let tile = comptime!(self.blueprint.tile);
        let mut sum = Vec4::new(0.0f32);
        #[unroll]
        for lane in 0..tile.lanes {
            sum += self.partial[comptime!(lane * tile.lane_pitch()) + UNIT_POS as usize];
        }
        sum
    }

    /// Folds what `p` holds of each row to one number for each class of keys: the maximum if `highest`, else the sum.
    pub fn fold(&mut self, #[comptime] highest: bool) {
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
    pub fn folded(&self, four: usize, #[comptime] highest: bool) -> Vec4 {
        let classes = comptime!(self.blueprint.tile.classes());
        let at = four * classes;
        let mut value = self.folded[at];
        #[unroll]
        for class in 1..classes {
            let other = self.folded[at + class];
            value = if comptime!(highest) { max(value, other) } else { value + other };
        }
        value
    }

    /// `O += P V` over this thread's columns and its keys of the tile that begins at `start`. `ahead` holds the first vectors of V.
    ///
    /// `careful`: an element of `P` that is zero adds nothing, even where `V` is not finite.
    pub fn accumulate<F: Float, N: Size>(
        &self,
        values: &Rows<F, N>,
        start: u32,
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
                read_values(values, start, held, batch as u32, blueprint);
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
    pub fn store<O: Float, N: Size>(
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

/// Reads this thread's vectors of V of the `nth` batch of its keys of the tile that begins at `start`.
#[cube]
pub fn read_values<F: Float, N: Size>(
    values: &Rows<F, N>,
    start: u32,
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
        let key = start + of_group + (nth * comptime!(at_once as u32) + comptime!(n as u32)) * key_groups;
        #[unroll]
        for g in 0..groups {
            let ragged = comptime!((g + 1) * lanes * WIDTH > blueprint.head_dim_v);
            let column = (comptime!(g * lanes) + lane) * comptime!(WIDTH);
            held[comptime!(n * groups + g)] = read(values, key, column, ragged, blueprint.head_dim_v);
        }
    }
}

/// Reads four elements of a row as f32. A row past the last one is replaced by the last one, whose pairs are hidden, so that no
/// read depends on a branch. If `ragged`, columns past the last one are 0.
#[cube]
fn read<F: Float, N: Size>(
    rows: &Rows<F, N>,
    row: u32,
    column: usize,
    #[comptime] ragged: bool,
    #[comptime] head_dim: usize,
) -> Vec4 {
    let row = min(row, rows.end - 1);
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
