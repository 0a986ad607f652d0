//! Tiles on their way to shared memory.

use super::{Matrix, TileShape, Vec4, WIDTH};
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
    #[allow(clippy::too_many_arguments)]
    pub fn ask_scores<F: Float, N: Size>(
        &mut self,
        a: &Tensor<Vector<F, N>>,
        a_at: &Matrix,
        a_start: u32,
        a_end: u32,
        b: &Tensor<Vector<F, N>>,
        b_at: &Matrix,
        b_start: u32,
        b_end: u32,
        #[comptime] chunk: usize,
        #[comptime] head_dim: usize,
        #[comptime] tile: TileShape,
    ) {
        if comptime!(tile.reads_ahead()) {
            self.fetch_scores(a, a_at, a_start, a_end, b, b_at, b_start, b_end, chunk, head_dim, tile);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub fn fetch_scores<F: Float, N: Size>(
        &mut self,
        a: &Tensor<Vector<F, N>>,
        a_at: &Matrix,
        a_start: u32,
        a_end: u32,
        b: &Tensor<Vector<F, N>>,
        b_at: &Matrix,
        b_start: u32,
        b_end: u32,
        #[comptime] chunk: usize,
        #[comptime] head_dim: usize,
        #[comptime] tile: TileShape,
    ) {
        let (column, width) = comptime!((chunk * tile.chunk, tile.chunk));
        fetch(a, a_at, a_start, a_end, &mut self.a, tile.tile_q, column, head_dim, width, tile.units());
        fetch(b, b_at, b_start, b_end, &mut self.b, tile.tile_k, column, head_dim, width, tile.units());
    }

    /// Asks for a group of columns of `V`, `depth` rows.
    #[allow(clippy::too_many_arguments)]
    pub fn ask_right<F: Float, N: Size>(
        &mut self,
        v: &Tensor<Vector<F, N>>,
        v_at: &Matrix,
        v_start: u32,
        v_end: u32,
        #[comptime] group: usize,
        #[comptime] depth: usize,
        #[comptime] head_dim: usize,
        #[comptime] tile: TileShape,
    ) {
        if comptime!(tile.reads_ahead()) {
            self.fetch_right(v, v_at, v_start, v_end, group, depth, head_dim, tile);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub fn fetch_right<F: Float, N: Size>(
        &mut self,
        v: &Tensor<Vector<F, N>>,
        v_at: &Matrix,
        v_start: u32,
        v_end: u32,
        #[comptime] group: usize,
        #[comptime] depth: usize,
        #[comptime] head_dim: usize,
        #[comptime] tile: TileShape,
    ) {
        let (column, width) = comptime!((group * tile.chunk_nn(), tile.chunk_nn()));
        fetch(v, v_at, v_start, v_end, &mut self.v, depth, column, head_dim, width, tile.units());
    }
}

/// Reads this thread's share of rows `start .. start + rows` and columns `column .. column + chunk`, as f32. What lies past `end`
/// or `columns` becomes zero, so that a product never meets uninitialised memory.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn fetch<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    at: &Matrix,
    start: u32,
    end: u32,
    share: &mut Array<Vec4>,
    #[comptime] rows: usize,
    #[comptime] column: usize,
    #[comptime] columns: usize,
    #[comptime] chunk: usize,
    #[comptime] units: usize,
) {
    let per_read = N::value();
    let width = comptime!(chunk / WIDTH);
    let vectors = comptime!(rows * width);
    #[unroll]
    for step in 0..comptime!(vectors.div_ceil(units)) {
        let slot = UNIT_POS as usize + comptime!(step * units);
        let row = slot / width;
        let within = slot % width;
        let first = comptime!(column) + within * comptime!(WIDTH);
        let mut value = Vec4::new(0.0f32);
        let i = start as usize + row;
        if row < rows && i < end as usize && first < columns {
            let offset = at.base + i * at.row_stride;
            if comptime!(per_read == WIDTH) {
                value = Vec4::cast_from(tensor[(offset + first) / WIDTH]);
            } else {
                #[unroll]
                for lane in 0..WIDTH {
                    if first + lane < columns {
                        let element = tensor[offset + (first + lane) * at.column_stride];
                        value.insert(lane, f32::cast_from(element.extract(0usize)));
                    }
                }
            }
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
