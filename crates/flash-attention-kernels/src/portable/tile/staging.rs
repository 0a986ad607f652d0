//! Tiles on their way to shared memory.

use super::{Product, TileShape};
use crate::fragment::rows::{Rows, Vec4, WIDTH};
use crate::rounding::nearest_tf32;
use cubecl::prelude::*;

/// In which order the rows of a tile lie in its panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// As they come.
    Natural,
    /// Row `x · micro + n` at `n · units + x`: threads that read their `n`-th rows together read neighbours.
    Interleaved {
        /// Rows of a thread.
        micro: usize,
        /// Threads that share the panel.
        units: usize,
    },
}

/// What comes next of the tiles, on its way from memory: each thread holds its share in registers while the chunk before is
/// multiplied, as a load takes as long as many products. Where there is no [reading ahead](TileShape::reads_ahead), asking does
/// nothing, and what is needed is read when it is.
#[derive(CubeType)]
pub struct Ahead {
    /// Of `A`.
    pub a: Array<Vec4>,
    /// Of `B`.
    pub b: Array<Vec4>,
    /// Of `V`.
    pub v: Array<Vec4>,
}

#[cube]
impl Ahead {
    /// Room for a chunk of each; `rows_nn` is the height of `V`, 0 if there is none.
    pub fn new(#[comptime] rows_nn: usize, #[comptime] tile: TileShape) -> Ahead {
        Ahead {
            a: Array::new(comptime!(tile.share(tile.tile_q, tile.chunk))),
            b: Array::new(comptime!(tile.share(tile.tile_k, tile.chunk))),
            v: Array::new(comptime!(tile.share(rows_nn, tile.chunk_nn()).max(1))),
        }
    }

    /// Asks for a chunk of `A` and `B`.
    pub fn ask_scores<F: Float, N: Size>(
        &mut self,
        a: &Rows<F, N>,
        b: &Rows<F, N>,
        #[comptime] chunk: usize,
        #[comptime] head_dim: usize,
        #[comptime] tile: TileShape,
    ) {
        if comptime!(tile.reads_ahead()) {
            self.fetch_scores(a, b, chunk, head_dim, tile);
        }
    }

    /// Reads it.
    pub fn fetch_scores<F: Float, N: Size>(
        &mut self,
        a: &Rows<F, N>,
        b: &Rows<F, N>,
        #[comptime] chunk: usize,
        #[comptime] head_dim: usize,
        #[comptime] tile: TileShape,
    ) {
        let columns = comptime!(Columns { first: chunk * tile.chunk, count: tile.chunk, head_dim });
        fetch(a, &mut self.a, tile.tile_q, columns, tile.units());
        fetch(b, &mut self.b, tile.tile_k, columns, tile.units());
    }

    /// Asks for a group of columns of `V`.
    pub fn ask_right<F: Float, N: Size>(
        &mut self,
        v: &Rows<F, N>,
        #[comptime] group: usize,
        #[comptime] product: Product,
        #[comptime] tile: TileShape,
    ) {
        if comptime!(tile.reads_ahead()) {
            self.fetch_right(v, group, product, tile);
        }
    }

    /// Reads it.
    pub fn fetch_right<F: Float, N: Size>(
        &mut self,
        v: &Rows<F, N>,
        #[comptime] group: usize,
        #[comptime] product: Product,
        #[comptime] tile: TileShape,
    ) {
        let (count, head_dim) = comptime!((tile.chunk_nn(), product.head_dim));
        let columns = comptime!(Columns { first: group * count, count, head_dim });
        fetch(v, &mut self.v, product.depth, columns, tile.units());
    }
}

/// Columns that are staged at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Columns {
    /// The first.
    first: usize,
    /// How many.
    count: usize,
    /// How many the rows have.
    head_dim: usize,
}

/// Reads this thread's share of so many rows and columns, as f32. What lies past the end of the rows or columns becomes zero, so that
/// a product never meets uninitialised memory.
#[cube]
fn fetch<F: Float, N: Size>(
    from: &Rows<F, N>,
    share: &mut Array<Vec4>,
    #[comptime] rows: usize,
    #[comptime] columns: Columns,
    #[comptime] units: usize,
) {
    let width = comptime!(columns.count / WIDTH);
    let vectors = comptime!(rows * width);
    #[unroll]
    for step in 0..comptime!(vectors.div_ceil(units)) {
        let slot = UNIT_POS as usize + comptime!(step * units);
        let row = slot / width;
        let column = comptime!(columns.first) + slot % width * comptime!(WIDTH);
        let mut value = Vec4::new(0.0f32);
        if row < rows {
            value = Vec4::cast_from(from.read(from.start + row as u32, column, columns.head_dim));
        }
        share[step] = value;
    }
}

/// Rounds what has come to tf32.
#[cube]
pub fn round(share: &mut Array<Vec4>, #[comptime] len: usize) {
    #[unroll]
    for n in 0..len {
        let mut value = share[n];
        #[unroll]
        for lane in 0..WIDTH {
            value.insert(lane, nearest_tf32(value.extract(lane)));
        }
        share[n] = value;
    }
}

/// Puts what has come into its panel.
#[cube]
pub fn put(
    share: &Array<Vec4>,
    panel: &mut Shared<[Vec4]>,
    #[comptime] rows: usize,
    #[comptime] chunk: usize,
    #[comptime] order: RowOrder,
    #[comptime] units: usize,
) {
    let width = comptime!(chunk / WIDTH);
    let pitch = comptime!(TileShape::pitch(chunk));
    let vectors = comptime!(rows * width);
    #[unroll]
    for step in 0..comptime!(vectors.div_ceil(units)) {
        let slot = UNIT_POS as usize + comptime!(step * units);
        let row = slot / width;
        let within = slot % width;
        if comptime!((step + 1) * units <= vectors) || row < rows {
            let mut slot_row = row;
            match comptime!(order) {
                RowOrder::Natural => {}
                RowOrder::Interleaved { micro, units } => {
                    slot_row = (row % micro) * units + row / micro;
                }
            }
            panel[slot_row * pitch + within] = share[step];
        }
    }
}
