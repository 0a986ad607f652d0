//! What the portable kernels are made of: tiles staged in shared memory, and the two products on them.
//!
//! A thread block of `units_q × units_k` threads holds a tile of scores in registers, `micro_q × micro_k` to a thread, and walks
//! over head_dim in chunks. Everything is f32 from the staging on, in vectors of four.
//!
//! ```text
//! scores      [tile_q, tile_k]   S += A · Bᵀ     A [tile_q, chunk], B [tile_k, chunk] staged
//! accumulator [rows, head_dim]   O += P · V      P staged by the threads that computed it, V [cols, chunk_nn] staged
//! ```
//!
//! Thread `(y, x)` owns rows `y·micro_q ..` and columns `x·micro_k ..` of the scores, and of the accumulator its rows and
//! the vectors `x, x + units_k, …` of each.

mod staging;
pub use staging::{Ahead, RowOrder};
use staging::{put, round};

use crate::rounding::{rounded, rounded_one};
use cubecl::prelude::*;
use serde::Serialize;

/// Four f32 values: one 128-bit access.
pub type Vec4 = Vector<f32, Const<4>>;

/// Width of [`Vec4`].
pub const WIDTH: usize = 4;

/// Shapes of the tiles of one thread block. Chosen in `tiling.rs` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct TileShape {
    /// Queries of a tile.
    pub tile_q: usize,
    /// Keys of a tile.
    pub tile_k: usize,
    /// Threads along the queries; `tile_q / units_q` rows each, a multiple of four.
    pub units_q: usize,
    /// Threads along the keys; `tile_k / units_k` columns each, a multiple of four.
    pub units_k: usize,
    /// Columns of head_dim staged at a time for `A · Bᵀ`; a multiple of four.
    pub chunk: usize,
}

impl TileShape {
    /// Whether threads share the tiles out evenly, in vectors.
    pub fn is_consistent(&self) -> bool {
        let TileShape { tile_q, tile_k, units_q, units_k, chunk } = *self;
        units_q > 0
            && units_k > 0
            && tile_q > 0
            && tile_k > 0
            && chunk > 0
            && tile_q % (WIDTH * units_q) == 0
            && tile_k % (WIDTH * units_k) == 0
            && tile_k % units_q == 0
            && chunk % WIDTH == 0
    }

    /// Threads of a thread block.
    pub fn units(&self) -> usize {
        self.units_q * self.units_k
    }

    /// Rows of scores that a thread owns.
    pub fn micro_q(&self) -> usize {
        self.tile_q / self.units_q
    }

    /// Columns of scores that a thread owns.
    pub fn micro_k(&self) -> usize {
        self.tile_k / self.units_k
    }

    /// Columns of head_dim staged at a time for `P · V`: one vector for each thread along a row.
    pub fn chunk_nn(&self) -> usize {
        self.units_k * WIDTH
    }

    /// Vectors between rows of a panel of `columns`: one more than fills it, so that neighbouring rows start in
    /// different banks.
    pub fn pitch(columns: usize) -> usize {
        columns / WIDTH + 1
    }

    /// Vectors in the panel that holds `A`.
    pub fn panel_a(&self) -> usize {
        self.tile_q * Self::pitch(self.chunk)
    }

    /// Vectors in the panel that holds `B`, and `V` after it. `rows_nn` is the height of `V`.
    pub fn panel_b(&self, rows_nn: usize) -> usize {
        (self.tile_k * Self::pitch(self.chunk)).max(rows_nn * Self::pitch(self.chunk_nn()))
    }

    /// Vectors on the board where the threads of a row share what each found: one number for each thread and row.
    pub fn board(&self) -> usize {
        self.units_k * self.tile_q / WIDTH
    }

    /// Vectors of a chunk of so many rows and columns that a thread brings.
    fn share(&self, rows: usize, columns: usize) -> usize {
        (rows * columns / WIDTH).div_ceil(self.units())
    }

    /// Whether the next chunk is on its way while one is multiplied. Where a thread's share of it is large, the registers that it
    /// waits in are missed elsewhere.
    pub fn reads_ahead(&self) -> bool {
        self.share(self.tile_q, self.chunk) + self.share(self.tile_k, self.chunk) <= 8
    }

    /// Vectors that each thread accumulates for one of its rows over `head_dim` columns.
    pub fn groups(&self, head_dim: usize) -> usize {
        head_dim.div_ceil(self.chunk_nn())
    }
}

/// Where a thread stands in its thread block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Unit {
    /// Along the queries.
    pub y: u32,
    /// Along the keys.
    pub x: u32,
}

/// This thread.
#[cube]
pub fn unit(#[comptime] tile: TileShape) -> Unit {
    Unit { y: UNIT_POS / comptime!(tile.units_k as u32), x: UNIT_POS % comptime!(tile.units_k as u32) }
}

/// A `[rows, columns]` matrix inside a 4-dimensional tensor: one head of one batch.
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub struct Matrix {
    /// Offset of its first element, in elements.
    pub base: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns.
    pub column_stride: usize,
}

/// The matrix of one batch and head.
#[cube]
pub fn matrix<E: CubePrimitive>(tensor: &Tensor<E>, batch: usize, head: usize) -> Matrix {
    Matrix {
        base: batch * tensor.stride(0) + head * tensor.stride(1),
        row_stride: tensor.stride(2),
        column_stride: tensor.stride(3),
    }
}

/// `S += A · Bᵀ` over the staged chunk. `A` lies in natural order, `B` interleaved.
#[cube]
pub fn dot(a: &Shared<[Vec4]>, b: &Shared<[Vec4]>, s: &mut Array<f32>, me: Unit, #[comptime] tile: TileShape) {
    let pitch = comptime!(TileShape::pitch(tile.chunk));
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    let a_row = me.y as usize * comptime!(micro_q * pitch);
    let b_row = me.x as usize * pitch;
    for c in 0..comptime!(tile.chunk / WIDTH) {
        let mut bs = Array::<Vec4>::new(micro_k);
        #[unroll]
        for j in 0..micro_k {
            bs[j] = b[b_row + comptime!(j * tile.units_k * pitch) + c];
        }
        #[unroll]
        for i in 0..micro_q {
            let av = a[a_row + comptime!(i * pitch) + c];
            #[unroll]
            for j in 0..micro_k {
                let bv = bs[j];
                let mut sum = s[comptime!(i * micro_k + j)];
                #[unroll]
                for lane in 0..WIDTH {
                    sum = fma(av.extract(lane), bv.extract(lane), sum);
                }
                s[comptime!(i * micro_k + j)] = sum;
            }
        }
    }
}

/// One tile of scores: `S = A · Bᵀ`, staged and multiplied chunk by chunk. The first has been [asked for](Ahead::ask_scores).
/// Threads are in step before and after.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn scores<F: Float, N: Size>(
    a: &Tensor<Vector<F, N>>,
    a_at: &Matrix,
    a_start: u32,
    a_end: u32,
    b: &Tensor<Vector<F, N>>,
    b_at: &Matrix,
    b_start: u32,
    b_end: u32,
    panel_a: &mut Shared<[Vec4]>,
    panel_b: &mut Shared<[Vec4]>,
    ahead: &mut Ahead,
    s: &mut Array<f32>,
    me: Unit,
    #[comptime] head_dim: usize,
    #[comptime] tf32: bool,
    #[comptime] tile: TileShape,
) {
    let order = comptime!(RowOrder::Interleaved { micro: tile.micro_k(), units: tile.units_k });
    #[unroll]
    for n in 0..comptime!(tile.micro_q() * tile.micro_k()) {
        s[n] = 0.0f32;
    }
    let chunks = comptime!(head_dim.div_ceil(tile.chunk));
    #[unroll]
    for chunk in 0..chunks {
        if comptime!(!tile.reads_ahead()) {
            ahead.fetch_scores(a, a_at, a_start, a_end, b, b_at, b_start, b_end, chunk, head_dim, tile);
        }
        if comptime!(tf32) {
            round(&mut ahead.a, tile.share(tile.tile_q, tile.chunk));
            round(&mut ahead.b, tile.share(tile.tile_k, tile.chunk));
        }
        put(&ahead.a, panel_a, tile.tile_q, tile.chunk, RowOrder::Natural, tile.units());
        put(&ahead.b, panel_b, tile.tile_k, tile.chunk, order, tile.units());
        sync_cube();
        if comptime!(chunk + 1 < chunks) {
            let next = comptime!(chunk + 1);
            ahead.ask_scores(a, a_at, a_start, a_end, b, b_at, b_start, b_end, next, head_dim, tile);
        }
        dot(&*panel_a, &*panel_b, s, me, tile);
        sync_cube();
    }
}

/// `O += P · V` over all of `V`'s columns, staged chunk by chunk. `p` holds `[rows, depth]`, `V` is `[depth, head_dim]`; its
/// first columns have been [asked for](Ahead::ask_right).
///
/// `careful`: an element of `p` that is zero adds nothing, whatever stands in `V`. IEEE arithmetic would make NaN of
/// `0 · NaN`, and a hidden key must not leak.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn accumulate<F: Float, N: Size>(
    p: &Shared<[Vec4]>,
    v: &Tensor<Vector<F, N>>,
    v_at: &Matrix,
    v_start: u32,
    v_end: u32,
    panel: &mut Shared<[Vec4]>,
    ahead: &mut Ahead,
    acc: &mut Array<Vec4>,
    careful: bool,
    me: Unit,
    #[comptime] rows: usize,
    #[comptime] depth: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile: TileShape,
) {
    let micro = comptime!(rows / tile.units_q);
    #[unroll]
    for group in 0..comptime!(tile.groups(head_dim)) {
        if comptime!(!tile.reads_ahead()) {
            ahead.fetch_right(v, v_at, v_start, v_end, group, depth, head_dim, tile);
        }
        put(&ahead.v, panel, depth, tile.chunk_nn(), RowOrder::Natural, tile.units());
        sync_cube();
        if comptime!(group + 1 < tile.groups(head_dim)) {
            ahead.ask_right(v, v_at, v_start, v_end, comptime!(group + 1), depth, head_dim, tile);
        }
        if careful {
            multiply(p, &*panel, acc, me, group, true, micro, depth, head_dim, tile);
        } else {
            multiply(p, &*panel, acc, me, group, false, micro, depth, head_dim, tile);
        }
        sync_cube();
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply(
    p: &Shared<[Vec4]>,
    panel: &Shared<[Vec4]>,
    acc: &mut Array<Vec4>,
    me: Unit,
    #[comptime] group: usize,
    #[comptime] careful: bool,
    #[comptime] micro: usize,
    #[comptime] depth: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile: TileShape,
) {
    let groups = comptime!(tile.groups(head_dim));
    let p_pitch = comptime!(TileShape::pitch(depth));
    let v_pitch = comptime!(TileShape::pitch(tile.chunk_nn()));
    let p_row = me.y as usize * comptime!(micro * p_pitch);
    let v_column = me.x as usize;
    for step in 0..comptime!(depth / WIDTH) {
        let mut vs = Array::<Vec4>::new(WIDTH);
        #[unroll]
        for lane in 0..WIDTH {
            vs[lane] = panel[(step * WIDTH + lane) * v_pitch + v_column];
        }
        #[unroll]
        for i in 0..micro {
            let pv = p[p_row + comptime!(i * p_pitch) + step];
            let mut sum = acc[comptime!(i * groups + group)];
            #[unroll]
            for lane in 0..WIDTH {
                let weight = pv.extract(lane);
                let added = fma(Vec4::new(weight), vs[lane], sum);
                if comptime!(careful) {
                    sum = select(weight == 0.0f32, sum, added);
                } else {
                    sum = added;
                }
            }
            acc[comptime!(i * groups + group)] = sum;
        }
    }
}

/// Writes a thread's accumulated rows, each multiplied by its factor.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn store<F: Float, N: Size>(
    tensor: &mut Tensor<Vector<F, N>>,
    at: &Matrix,
    start: u32,
    end: u32,
    acc: &Array<Vec4>,
    factors: &Array<Vec4>,
    me: Unit,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile: TileShape,
) {
    let per_write = N::value();
    let micro = comptime!(rows / tile.units_q);
    let groups = comptime!(tile.groups(head_dim));
    #[unroll]
    for i in 0..micro {
        let row = start + me.y * comptime!(micro as u32) + comptime!(i as u32);
        if row < end {
            let factor = factors[comptime!(i / WIDTH)].extract(comptime!(i % WIDTH));
            let offset = at.base + row as usize * at.row_stride;
            #[unroll]
            for group in 0..groups {
                let first = comptime!(group * tile.chunk_nn()) + me.x as usize * WIDTH;
                let value = acc[comptime!(i * groups + group)] * Vec4::new(factor);
                if comptime!(per_write == WIDTH) {
                    if first < head_dim {
                        tensor[(offset + first) / WIDTH] = rounded::<F, Const<4>, N>(value);
                    }
                } else {
                    #[unroll]
                    for lane in 0..WIDTH {
                        if first + lane < head_dim {
                            let element = rounded_one::<F>(value.extract(lane));
                            tensor[offset + (first + lane) * at.column_stride] = Vector::<F, N>::new(element);
                        }
                    }
                }
            }
        }
    }
}

/// The same factor for each of a thread's rows.
#[cube]
pub fn uniform(factor: f32, #[comptime] micro: usize) -> Array<Vec4> {
    let quads = comptime!(micro.div_ceil(WIDTH));
    let mut factors = Array::<Vec4>::new(quads);
    #[unroll]
    for n in 0..quads {
        factors[n] = Vec4::new(factor);
    }
    factors
}
