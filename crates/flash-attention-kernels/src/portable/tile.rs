//! Building blocks of the portable kernels: tiles staged in shared memory, and two products on them.
//!
//! A thread block of `units_q × units_k` threads holds a tile of scores in registers, `micro_q × micro_k` scores in each thread. It
//! goes through head_dim in chunks. Staged data is f32, in vectors of four.
//!
//! ```text
//! scores      [tile_q, tile_k]   S += A · Bᵀ     A [tile_q, chunk], B [tile_k, chunk] staged
//! accumulator [rows, head_dim]   O += P · V      P staged by the threads that computed it, V [cols, chunk_nn] staged
//! ```
//!
//! Thread `(y, x)` owns rows `y·micro_q ..` and columns `x·micro_k ..` of the scores. In each of its rows of the accumulator it owns the
//! vectors `x, x + units_k, …`.

mod staging;
pub use staging::{Ahead, RowOrder};
use staging::{put, round};

use super::Blueprint;
use crate::fragment::grid::Block;
use crate::fragment::rows::{Layout, Rows, Vec4, WIDTH, write_quad};
use cubecl::prelude::*;
use serde::Serialize;

/// Shapes of the tiles of one thread block. Only `tiling` chooses them.
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
    /// Whether the tiles can be divided evenly among the threads, in vectors of four.
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

    /// Vectors between the starts of rows in a panel of `columns` columns. It is one more than a row has, so that neighbouring rows start
    /// in different banks.
    pub fn pitch(columns: usize) -> usize {
        columns / WIDTH + 1
    }

    /// Vectors in the panel of `A`.
    pub fn panel_a(&self) -> usize {
        self.tile_q * Self::pitch(self.chunk)
    }

    /// Vectors in the panel of `B`, which later holds `V`. `rows_nn` is the number of rows of `V`.
    pub fn panel_b(&self, rows_nn: usize) -> usize {
        (self.tile_k * Self::pitch(self.chunk)).max(rows_nn * Self::pitch(self.chunk_nn()))
    }

    /// Vectors on the board, on which the threads of a row share partial results: one number for each thread and row.
    pub fn board(&self) -> usize {
        self.units_k * self.tile_q / WIDTH
    }

    /// Vectors that each thread loads of a chunk of `rows` rows and `columns` columns.
    fn share(&self, rows: usize, columns: usize) -> usize {
        (rows * columns / WIDTH).div_ceil(self.units())
    }

    /// Whether the next chunk is prefetched while the current one is multiplied. A thread's share waits in registers; a large share would
    /// take registers that are needed elsewhere.
    pub fn reads_ahead(&self) -> bool {
        self.share(self.tile_q, self.chunk) + self.share(self.tile_k, self.chunk) <= 8
    }

    /// Vectors that each thread accumulates for one of its rows over `head_dim` columns.
    pub fn groups(&self, head_dim: usize) -> usize {
        head_dim.div_ceil(self.chunk_nn())
    }
}

/// Position of a thread in its thread block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Unit {
    /// Along the queries.
    pub y: u32,
    /// Along the keys.
    pub x: u32,
}

/// Position of this thread.
#[cube]
pub fn unit(#[comptime] tile: TileShape) -> Unit {
    Unit { y: UNIT_POS / comptime!(tile.units_k as u32), x: UNIT_POS % comptime!(tile.units_k as u32) }
}

/// Panels in shared memory in which tiles are staged.
#[derive(CubeType)]
pub struct Panels {
    /// `A` of `S += A · Bᵀ`.
    pub a: Shared<[Vec4]>,
    /// `B` of `S += A · Bᵀ`, and `V` of `O += P · V`.
    pub b: Shared<[Vec4]>,
    /// `P` of `O += P · V`: probabilities or `dS`.
    pub p: Shared<[Vec4]>,
    /// Prefetched chunks.
    pub ahead: Ahead,
    /// Position of this thread.
    pub me: Unit,
}

#[cube]
impl Panels {
    /// Panels for a left operand of `p` vectors and a right operand of `depth` rows of the product `O += P · V`.
    pub fn new(#[comptime] p: usize, #[comptime] depth: usize, #[comptime] tile: TileShape) -> Panels {
        Panels {
            a: Shared::new_slice(comptime!(tile.panel_a())),
            b: Shared::new_slice(comptime!(tile.panel_b(depth))),
            p: Shared::new_slice(p),
            ahead: Ahead::new(depth, tile),
            me: unit(tile),
        }
    }
}

/// Sizes of a product `O += P · V`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of `P`.
    pub rows: usize,
    /// Columns of `P`, and rows of `V`.
    pub depth: usize,
    /// Columns of `V`.
    pub head_dim: usize,
}

/// `S += A · Bᵀ` over the staged chunk. Rows of `A` are staged in natural order, rows of `B` interleaved.
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

/// One tile of scores: `S = A · Bᵀ`, staged and multiplied chunk by chunk. The caller has prefetched the first chunk with
/// [`Ahead::ask_scores`]. Threads must be synchronised before the call, and are so after it.
#[cube]
pub fn products<F: Float, N: Size>(
    a: &Rows<F, N>,
    b: &Rows<F, N>,
    panels: &mut Panels,
    s: &mut Array<f32>,
    #[comptime] head_dim: usize,
    #[comptime] blueprint: Blueprint,
) {
    let tile = comptime!(blueprint.tile);
    let order = comptime!(RowOrder::Interleaved { micro: tile.micro_k(), units: tile.units_k });
    #[unroll]
    for n in 0..comptime!(tile.micro_q() * tile.micro_k()) {
        s[n] = 0.0f32;
    }
    let chunks = comptime!(head_dim.div_ceil(tile.chunk));
    #[unroll]
    for chunk in 0..chunks {
        if comptime!(!tile.reads_ahead()) {
            panels.ahead.fetch_scores(a, b, chunk, head_dim, tile);
        }
        if comptime!(blueprint.tf32) {
            round(&mut panels.ahead.a, tile.share(tile.tile_q, tile.chunk));
            round(&mut panels.ahead.b, tile.share(tile.tile_k, tile.chunk));
        }
        put(&panels.ahead.a, &mut panels.a, tile.tile_q, tile.chunk, RowOrder::Natural, tile.units());
        put(&panels.ahead.b, &mut panels.b, tile.tile_k, tile.chunk, order, tile.units());
        sync_cube();
        if comptime!(chunk + 1 < chunks) {
            panels.ahead.ask_scores(a, b, comptime!(chunk + 1), head_dim, tile);
        }
        dot(&panels.a, &panels.b, s, panels.me, tile);
        sync_cube();
    }
}

/// `O += P · V` over all columns of `V`, staged group by group. The panel of `P` holds `[rows, depth]`, and `V` is `[depth, head_dim]`.
/// The caller has prefetched the first group with [`Ahead::ask_right`].
///
/// `careful`: an element of `P` that is zero adds nothing, even where `V` is not finite. In IEEE arithmetic `0 · NaN` is NaN, and a
/// hidden key must not leak.
#[cube]
pub fn accumulate<F: Float, N: Size>(
    v: &Rows<F, N>,
    panels: &mut Panels,
    acc: &mut Array<Vec4>,
    careful: bool,
    #[comptime] product: Product,
    #[comptime] tile: TileShape,
) {
    #[unroll]
    for group in 0..comptime!(tile.groups(product.head_dim)) {
        if comptime!(!tile.reads_ahead()) {
            panels.ahead.fetch_right(v, group, product, tile);
        }
        put(&panels.ahead.v, &mut panels.b, product.depth, tile.chunk_nn(), RowOrder::Natural, tile.units());
        sync_cube();
        if comptime!(group + 1 < tile.groups(product.head_dim)) {
            panels.ahead.ask_right(v, comptime!(group + 1), product, tile);
        }
        if careful {
            multiply(&*panels, acc, group, true, product, tile);
        } else {
            multiply(&*panels, acc, group, false, product, tile);
        }
        sync_cube();
    }
}

#[cube]
fn multiply(
    panels: &Panels,
    acc: &mut Array<Vec4>,
    #[comptime] group: usize,
    #[comptime] careful: bool,
    #[comptime] product: Product,
    #[comptime] tile: TileShape,
) {
    let micro = comptime!(product.rows / tile.units_q);
    let groups = comptime!(tile.groups(product.head_dim));
    let p_pitch = comptime!(TileShape::pitch(product.depth));
    let v_pitch = comptime!(TileShape::pitch(tile.chunk_nn()));
    let p_row = panels.me.y as usize * comptime!(micro * p_pitch);
    let v_column = panels.me.x as usize;
    for step in 0..comptime!(product.depth / WIDTH) {
        let mut vs = Array::<Vec4>::new(WIDTH);
        #[unroll]
        for lane in 0..WIDTH {
            vs[lane] = panels.b[(step * WIDTH + lane) * v_pitch + v_column];
        }
        #[unroll]
        for i in 0..micro {
            let pv = panels.p[p_row + comptime!(i * p_pitch) + step];
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

/// Writes this thread's accumulated rows of a block of `rows` rows, each multiplied by its factor.
#[cube]
pub fn store<F: Float, N: Size>(
    tensor: &mut Tensor<Vector<F, N>>,
    block: &Block,
    acc: &Array<Vec4>,
    factors: &Array<Vec4>,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile: TileShape,
) {
    let me = unit(tile);
    let micro = comptime!(rows / tile.units_q);
    let groups = comptime!(tile.groups(head_dim));
    let layout = Layout::of(&*tensor, block.batch, block.head);
    #[unroll]
    for i in 0..micro {
        let row = block.start + me.y * comptime!(micro as u32) + comptime!(i as u32);
        if row < block.end {
            let factor = factors[comptime!(i / WIDTH)].extract(comptime!(i % WIDTH));
            #[unroll]
            for group in 0..groups {
                let first = comptime!(group * tile.chunk_nn()) + me.x as usize * WIDTH;
                let value = acc[comptime!(i * groups + group)] * Vec4::new(factor);
                write_quad(tensor, &layout, row, first, value, head_dim);
            }
        }
    }
}

/// Factors of a thread's rows, all the same.
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
