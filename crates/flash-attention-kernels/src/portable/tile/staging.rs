//! Staging of tiles: read from memory into registers, then written to shared memory.

use super::TileShape;
use crate::fragment::{Rows, Vec4, WIDTH};
use crate::rounding::nearest_tf32;
use cubecl::prelude::*;

/// Prefetched chunks. Each thread holds its share of the next chunk in registers while the current chunk is multiplied, because a load
/// takes as long as many products. Without [prefetching](TileShape::reads_ahead), a chunk is read when it is needed.
#[derive(CubeType)]
pub struct Ahead {
    /// Share of a chunk of `A`.
    pub a: Array<Vec4>,
    /// Share of a chunk of `B`.
    pub b: Array<Vec4>,
    /// Share of a chunk of `V`.
    pub v: Array<Vec4>,
    #[cube(comptime)]
    tile: TileShape,
}

#[cube]
impl Ahead {
    /// Registers for a chunk of each operand. `rows_nn` is the number of rows of `V`, 0 if there is no `V`.
    pub fn new(#[comptime] rows_nn: usize, #[comptime] tile: TileShape) -> Ahead {
        Ahead {
            a: Array::new(comptime!(tile.share(tile.tile_q, tile.chunk))),
            b: Array::new(comptime!(tile.share(tile.tile_k, tile.chunk))),
            v: Array::new(comptime!(tile.share(rows_nn, tile.chunk_nn()).max(1))),
            tile,
        }
    }

    /// Reads a chunk of `A` and `B`, if this is the time for it: `early` with prefetching.
    pub fn read_scores<F: Float, N: Size>(
        &mut self,
        a: &Rows<F, N>,
        b: &Rows<F, N>,
        #[comptime] chunk: usize,
        #[comptime] head_dim: usize,
        #[comptime] early: bool,
    ) {
        let tile = comptime!(self.tile);
        if comptime!(tile.reads_ahead() == early) {
            fetch(a, &mut self.a, tile.tile_q, chunk, tile.chunk, head_dim, tile.units());
            fetch(b, &mut self.b, tile.tile_k, chunk, tile.chunk, head_dim, tile.units());
        }
    }

    /// Reads a group of columns of `V`, if this is the time for it.
    pub fn read_right<F: Float, N: Size>(
        &mut self,
        v: &Rows<F, N>,
        #[comptime] group: usize,
        #[comptime] depth: usize,
        #[comptime] head_dim: usize,
        #[comptime] early: bool,
    ) {
        let tile = comptime!(self.tile);
        if comptime!(tile.reads_ahead() == early) {
            fetch(v, &mut self.v, depth, group, tile.chunk_nn(), head_dim, tile.units());
        }
    }
}

/// Reads this thread's share of the `nth` chunk, which has `rows` rows and `columns` columns, as f32. Elements past the last row or column become zero, so that a
/// product never reads uninitialised memory.
#[cube]
fn fetch<F: Float, N: Size>(
    from: &Rows<F, N>,
    share: &mut Array<Vec4>,
    #[comptime] rows: usize,
    #[comptime] nth: usize,
    #[comptime] columns: usize,
    #[comptime] head_dim: usize,
    #[comptime] units: usize,
) {
    let width = comptime!(columns / WIDTH);
    let vectors = comptime!(rows * width);
    #[unroll]
    for step in 0..comptime!(vectors.div_ceil(units)) {
        let slot = UNIT_POS as usize + comptime!(step * units);
        let row = slot / width;
        let column = comptime!(nth * columns) + slot % width * comptime!(WIDTH);
        // As `Rows::read`, but with one branch for all conditions.
        let at = from.start + row as u32;
        let mut exists = at < from.end && column < head_dim;
        if comptime!((step + 1) * units > vectors) {
            exists = exists && row < rows;
        }
        let mut value = Vec4::new(0.0f32);
        if exists {
            value = Vec4::cast_from(from.read_within(at, column, head_dim));
        }
        share[step] = value;
    }
}

/// Rounds a thread's share to tf32.
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

/// Writes a thread's share to its panel. The rows are in the order of the tensor or, for the `B` of `A · Bᵀ`, `interleaved`: row
/// `x · micro_k + n` is stored at `n · units_k + x`, so that threads that read their `n`-th rows at the same time read neighbouring
/// rows.
#[cube]
pub fn put(
    share: &Array<Vec4>,
    panel: &mut Shared<[Vec4]>,
    #[comptime] rows: usize,
    #[comptime] chunk: usize,
    #[comptime] interleaved: bool,
    #[comptime] tile: TileShape,
) {
    let units = comptime!(tile.units());
    let width = comptime!(chunk / WIDTH);
    let pitch = comptime!(TileShape::pitch(chunk));
    let vectors = comptime!(rows * width);
    #[unroll]
    for step in 0..comptime!(vectors.div_ceil(units)) {
        let slot = UNIT_POS as usize + comptime!(step * units);
        let row = slot / width;
        let within = slot % width;
        if comptime!((step + 1) * units <= vectors) || row < rows {
            let row = if comptime!(interleaved) {
                (row % comptime!(tile.micro_k())) * comptime!(tile.units_k) + row / comptime!(tile.micro_k())
            } else {
                row
            };
            panel[row * pitch + within] = share[step];
        }
    }
}
