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
use staging::{Ahead, put, round};

use super::Blueprint;
use crate::fragment::{Block, Layout, Rows, Vec4, WIDTH, write_quad};
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
        [tile_q, tile_k, units_q, units_k, chunk].iter().all(|size| *size > 0)
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

    /// Scores that a thread owns, row by row.
    pub fn micro(&self) -> usize {
        self.micro_q() * self.micro_k()
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

/// Panels in shared memory in which tiles are staged.
#[derive(CubeType)]
pub struct Panels {
    /// `A` of `S += A · Bᵀ`.
    a: Shared<[Vec4]>,
    /// `B` of `S += A · Bᵀ`, and `V` of `O += P · V`.
    b: Shared<[Vec4]>,
    /// `P` of `O += P · V`: probabilities or `dS`.
    p: Shared<[Vec4]>,
    /// Prefetched chunks.
    ahead: Ahead,
    /// Position of this thread.
    pub me: Unit,
    /// Rows of `P`, and of the accumulators.
    #[cube(comptime)]
    rows: usize,
    /// Columns of `P`, and rows of `V`.
    #[cube(comptime)]
    depth: usize,
    #[cube(comptime)]
    blueprint: Blueprint,
}

#[cube]
impl Panels {
    /// Panels for the products `O += P · V` of these rows and depth.
    pub fn new(#[comptime] rows: usize, #[comptime] depth: usize, #[comptime] blueprint: Blueprint) -> Panels {
        let tile = comptime!(blueprint.tile);
        Panels {
            a: Shared::new_slice(comptime!(tile.panel_a())),
            b: Shared::new_slice(comptime!(tile.panel_b(depth))),
            p: Shared::new_slice(comptime!((rows * TileShape::pitch(depth)).max(1))),
            ahead: Ahead::new(depth, tile),
            me: Unit { y: UNIT_POS / comptime!(tile.units_k as u32), x: UNIT_POS % comptime!(tile.units_k as u32) },
            rows,
            depth,
            blueprint,
        }
    }

    /// Prefetches the first chunk of [`Panels::products`].
    pub fn ask_scores<F: Float, N: Size>(&mut self, a: &Rows<F, N>, b: &Rows<F, N>, #[comptime] head_dim: usize) {
        self.ahead.read_scores(a, b, 0usize, head_dim, true);
    }

    /// One tile of scores: `S = A · Bᵀ`, staged and multiplied chunk by chunk. The caller has [prefetched](Panels::ask_scores) the first
    /// chunk. Threads must be synchronised before the call, and are so after it.
    pub fn products<F: Float, N: Size>(
        &mut self,
        a: &Rows<F, N>,
        b: &Rows<F, N>,
        s: &mut Array<f32>,
        #[comptime] head_dim: usize,
    ) {
        let tile = comptime!(self.blueprint.tile);
        #[unroll]
        for n in 0..comptime!(tile.micro()) {
            s[n] = 0.0f32;
        }
        let chunks = comptime!(head_dim.div_ceil(tile.chunk));
        #[unroll]
        for chunk in 0..chunks {
            self.ahead.read_scores(a, b, chunk, head_dim, false);
            if comptime!(self.blueprint.tf32) {
                round(&mut self.ahead.a, tile.share(tile.tile_q, tile.chunk));
                round(&mut self.ahead.b, tile.share(tile.tile_k, tile.chunk));
            }
            put(&self.ahead.a, &mut self.a, tile.tile_q, tile.chunk, false, tile);
            put(&self.ahead.b, &mut self.b, tile.tile_k, tile.chunk, true, tile);
            sync_cube();
            if comptime!(chunk + 1 < chunks) {
                self.ahead.read_scores(a, b, comptime!(chunk + 1), head_dim, true);
            }
            self.dot(s);
            sync_cube();
        }
    }

    /// `S += A · Bᵀ` over the staged chunk. Rows of `A` are staged in natural order, rows of `B` interleaved.
    fn dot(&self, s: &mut Array<f32>) {
        let tile = comptime!(self.blueprint.tile);
        let pitch = comptime!(TileShape::pitch(tile.chunk));
        let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
        let a_row = self.me.y as usize * comptime!(micro_q * pitch);
        let b_row = self.me.x as usize * pitch;
        for c in 0..comptime!(tile.chunk / WIDTH) {
            let mut bs = Array::<Vec4>::new(micro_k);
            #[unroll]
            for j in 0..micro_k {
                bs[j] = self.b[b_row + comptime!(j * tile.units_k * pitch) + c];
            }
            #[unroll]
            for i in 0..micro_q {
                let av = self.a[a_row + comptime!(i * pitch) + c];
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

    /// Prefetches the first group of columns of [`Panels::accumulate`].
    pub fn ask_right<F: Float, N: Size>(&mut self, v: &Rows<F, N>, #[comptime] head_dim: usize) {
        self.ahead.read_right(v, 0usize, self.depth, head_dim, true);
    }

    /// `O += P · V` over all columns of `V`, staged group by group. The panel of `P` holds `[rows, depth]`, and `V` is `[depth, head_dim]`.
    /// The caller has [prefetched](Panels::ask_right) the first group.
    ///
    /// `careful`: an element of `P` that is zero adds nothing, even where `V` is not finite. In IEEE arithmetic `0 · NaN` is NaN, and a
    /// hidden key must not leak.
    pub fn accumulate<F: Float, N: Size>(
        &mut self,
        v: &Rows<F, N>,
        acc: &mut Array<Vec4>,
        careful: bool,
        #[comptime] head_dim: usize,
    ) {
        let (tile, depth) = comptime!((self.blueprint.tile, self.depth));
        #[unroll]
        for group in 0..comptime!(tile.groups(head_dim)) {
            self.ahead.read_right(v, group, depth, head_dim, false);
            put(&self.ahead.v, &mut self.b, depth, tile.chunk_nn(), false, tile);
            sync_cube();
            if comptime!(group + 1 < tile.groups(head_dim)) {
                self.ahead.read_right(v, comptime!(group + 1), depth, head_dim, true);
            }
            if careful {
                self.multiply(acc, group, true, head_dim);
            } else {
                self.multiply(acc, group, false, head_dim);
            }
            sync_cube();
        }
    }

    fn multiply(
        &self,
        acc: &mut Array<Vec4>,
        #[comptime] group: usize,
        #[comptime] careful: bool,
        #[comptime] head_dim: usize,
    ) {
        let (tile, depth) = comptime!((self.blueprint.tile, self.depth));
        let (micro, groups) = comptime!((self.rows / tile.units_q, tile.groups(head_dim)));
        let p_pitch = comptime!(TileShape::pitch(depth));
        let v_pitch = comptime!(TileShape::pitch(tile.chunk_nn()));
        let p_row = self.me.y as usize * comptime!(micro * p_pitch);
        let v_column = self.me.x as usize;
        for step in 0..comptime!(depth / WIDTH) {
            let mut vs = Array::<Vec4>::new(WIDTH);
            #[unroll]
            for lane in 0..WIDTH {
                vs[lane] = self.b[(step * WIDTH + lane) * v_pitch + v_column];
            }
            #[unroll]
            for i in 0..micro {
                let pv = self.p[p_row + comptime!(i * p_pitch) + step];
                let mut sum = acc[comptime!(i * groups + group)];
                #[unroll]
                for lane in 0..WIDTH {
                    let weight = pv.extract(lane);
                    let added = fma(Vec4::new(weight), vs[lane], sum);
                    sum = if comptime!(careful) { select(weight == 0.0f32, sum, added) } else { added };
                }
                acc[comptime!(i * groups + group)] = sum;
            }
        }
    }

    /// Writes this thread's elements of a `[tile_q, tile_k]` tile to the panel of `P`, transposed to `[tile_k, tile_q]` if `transposed`.
    pub fn share(&mut self, s: &Array<f32>, #[comptime] transposed: bool) {
        let tile = comptime!(self.blueprint.tile);
        let micro_k = comptime!(tile.micro_k());
        let (rows, columns) = comptime!(if transposed { (micro_k, tile.micro_q()) } else { (tile.micro_q(), micro_k) });
        let pitch = comptime!(TileShape::pitch(if transposed { tile.tile_q } else { tile.tile_k }));
        let (row, column) = if comptime!(transposed) { (self.me.x, self.me.y) } else { (self.me.y, self.me.x) };
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for quad in 0..comptime!(columns / WIDTH) {
                let mut value = Vec4::new(0.0f32);
                #[unroll]
                for lane in 0..WIDTH {
                    let j = comptime!(quad * WIDTH + lane);
                    value.insert(lane, s[comptime!(if transposed { j * micro_k + i } else { i * micro_k + j })]);
                }
                let at = (row as usize * rows + i) * pitch + column as usize * comptime!(columns / WIDTH) + quad;
                self.p[at] = value;
            }
        }
    }
    /// Writes this thread's accumulated rows of a block, each multiplied by its factor.
    pub fn store<F: Float, N: Size>(
        &self,
        tensor: &mut Tensor<Vector<F, N>>,
        block: &Block,
        acc: &Array<Vec4>,
        factors: &Array<Vec4>,
        #[comptime] head_dim: usize,
    ) {
        let tile = comptime!(self.blueprint.tile);
        let (micro, groups) = comptime!((self.rows / tile.units_q, tile.groups(head_dim)));
        let layout = Layout::of(&*tensor, block.batch, block.head);
        #[unroll]
        for i in 0..micro {
            let row = block.start + self.me.y * comptime!(micro as u32) + comptime!(i as u32);
            if row < block.end {
                let factor = factors[comptime!(i / WIDTH)].extract(comptime!(i % WIDTH));
                #[unroll]
                for group in 0..groups {
                    let first = comptime!(group * tile.chunk_nn()) + self.me.x as usize * WIDTH;
                    let value = acc[comptime!(i * groups + group)] * Vec4::new(factor);
                    write_quad(tensor, &layout, row, first, value, head_dim);
                }
            }
        }
    }
}
