//! Building blocks of the matrix kernels: panels in shared memory, products on them, and rows on the board.
//!
//! ```text
//! panel     [columns, head_dim]       a tile of K or V, 16-bit, staged by all threads
//! board     [rows, columns]           f32: products, which threads read, and accumulators, which they scale or write to memory
//! weights   [rows, columns]           16-bit: P or dS, which the matrix units read
//! ```
//!
//! Each warp has its own `m` rows of the board and of the weights, so that it need not wait for other warps.

mod accumulator;
pub use accumulator::Accumulator;

use super::{Blueprint, MatrixTile};
use crate::fragment::{Quad, Rows, TileAt, WIDTH};
use crate::rounding::rounded;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Shared memory of a thread block.
#[derive(CubeType)]
pub struct Panels<E: Float> {
    /// The tile of K, or of Q in the kernel of `dk` and `dv`.
    pub k: Panel<E>,
    /// The tile of V, or of dO in the kernel of `dk` and `dv`.
    pub v: Panel<E>,
    /// Products and weights of all warps.
    pub board: Board<E>,
    /// For each warp, whether it staged a value that is not finite.
    flags: Shared<[u32]>,
}

/// A tile of rows, staged by all threads.
#[derive(CubeType)]
pub struct Panel<E: Float> {
    elements: Shared<[Quad<E>]>,
    #[cube(comptime)]
    head_dim: usize,
    #[cube(comptime)]
    tile: MatrixTile,
}

/// Each warp's rows of the products and of the weights.
#[derive(CubeType)]
pub struct Board<E: Float> {
    /// Products or accumulators, in f32.
    products: Shared<[Quad<f32>]>,
    /// `P` or `dS`, in 16 bits.
    weights: Shared<[Quad<E>]>,
    /// This thread.
    pub me: Place,
}

/// Position of a thread in its thread block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// The warp.
    pub plane: u32,
    /// The thread's number in the warp.
    pub lane: u32,
    #[cube(comptime)]
    tile: MatrixTile,
}

#[cube]
impl Place {
    /// The `nth` row that this thread works on, counted from the thread block's first row.
    pub fn row(&self, #[comptime] nth: usize) -> u32 {
        self.plane * comptime!(self.tile.m() as u32) + self.row_of_warp(nth)
    }

    /// The `nth` row that this thread works on, counted from the warp's first row.
    fn row_of_warp(&self, #[comptime] nth: usize) -> u32 {
        self.lane / comptime!(self.tile.sharers() as u32) + comptime!((nth * self.tile.plane) as u32)
    }

    /// The `nth` vector that this thread works on in a row.
    fn vector(&self, #[comptime] nth: usize) -> u32 {
        self.lane % comptime!(self.tile.sharers() as u32) + comptime!((nth * self.tile.sharers()) as u32)
    }

    /// Whether this thread works on the first column of its rows.
    pub fn is_first(&self) -> bool {
        self.vector(0usize) == 0
    }

    /// Row and column of the `n`-th element of this thread's `nth` row of a tile.
    pub fn pair(
        &self,
        at: &TileAt,
        #[comptime] nth: usize,
        #[comptime] n: usize,
        #[comptime] keys: bool,
    ) -> (u32, u32) {
        let column = self.vector(comptime!(n / WIDTH)) * comptime!(WIDTH as u32) + comptime!((n % WIDTH) as u32);
        if comptime!(keys) {
            (at.q_start + column, at.k_start + self.row(nth))
        } else {
            (at.q_start + self.row(nth), at.k_start + column)
        }
    }

    /// The first vector of this warp on the board.
    fn board(&self) -> usize {
        self.plane as usize * comptime!(self.tile.m() * self.tile.board_pitch())
    }

    /// The first vector of the `nth` row of this thread on the board.
    fn board_row(&self, #[comptime] nth: usize) -> usize {
        self.board() + self.row_of_warp(nth) as usize * comptime!(self.tile.board_pitch())
    }
}

#[cube]
impl<E: Float> Panels<E> {
    /// Shared memory for one tile.
    pub fn new(#[comptime] blueprint: Blueprint) -> Panels<E> {
        let tile = comptime!(blueprint.tile);
        let board = comptime!(tile.rows() * tile.board_pitch());
        Panels::<E> {
            k: Panel::new(blueprint.head_dim, tile),
            v: Panel::new(blueprint.head_dim_v, tile),
            board: Board::<E> {
                products: Shared::new_slice(board),
                weights: Shared::new_slice(board),
                // Warps lie along y.
                me: Place { plane: UNIT_POS_Y, lane: UNIT_POS_X, tile },
            },
            flags: Shared::new_slice(comptime!(tile.planes)),
        }
    }

    /// Stages a tile of both panels' rows, from `start` on. Returns whether any thread copied a value that is not finite to the second
    /// panel, or to either if `both`.
    pub fn stage<N: Size>(&mut self, k: &Rows<E, N>, v: &Rows<E, N>, start: u32, #[comptime] both: bool) -> bool {
        sync_cube();
        let of_k = self.k.stage(k, start);
        let of_v = self.v.stage(v, start);
        let dirty = plane_any(if comptime!(both) { of_k || of_v } else { of_v });
        if self.board.me.lane == 0 {
            self.flags[self.board.me.plane as usize] = u32::cast_from(dirty);
        }
        sync_cube();
        let mut any = 0u32.runtime();
        #[unroll]
        for n in 0..comptime!(self.k.tile.planes) {
            any |= self.flags[n];
        }
        any != 0
    }
}

#[cube]
impl<E: Float> Panel<E> {
    fn new(#[comptime] head_dim: usize, #[comptime] tile: MatrixTile) -> Panel<E> {
        Panel::<E> { elements: Shared::new_slice(comptime!(tile.columns * tile.pitch(head_dim))), head_dim, tile }
    }

    /// Copies `tile.columns` rows of a head, from `start` on. Rows that do not exist become zeros. Returns whether this thread copied a
    /// value that is not finite.
    fn stage<N: Size>(&mut self, from: &Rows<E, N>, start: u32) -> bool {
        let (tile, head_dim) = comptime!((self.tile, self.head_dim));
        let pitch = comptime!(tile.pitch(head_dim));
        let width = comptime!(tile.padded(head_dim) / WIDTH);
        let vectors = comptime!(tile.columns * width);
        let units = comptime!(tile.units());
        let me = (UNIT_POS_Y * comptime!(tile.plane as u32) + UNIT_POS_X) as usize;
        let mut highest = 0u32.runtime();
        #[unroll]
        for step in 0..comptime!(vectors.div_ceil(units)) {
            let slot = me + comptime!(step * units);
            if comptime!((step + 1) * units <= vectors) || slot < vectors {
                let row = slot / width;
                let within = slot % width;
                let value = from.read(start + row as u32, within * WIDTH, head_dim);
                highest = max(highest, magnitude(value));
                self.elements[row * pitch + within] = value;
            }
        }
        // All bits of the exponent are set in infinity and NaN.
        highest >= 0x7F80_0000u32
    }

    /// Loads the warp's rows of a block as left operands. The rows go through this panel, tile by tile, and its contents are lost. All
    /// threads must call this function.
    pub fn operands<N: Size>(&mut self, block: &Rows<E, N>) -> Sequence<Matrix<E>> {
        let (tile, head_dim) = comptime!((self.tile, self.head_dim));
        let [m, n, k] = comptime!(tile.shape);
        let pitch = comptime!(tile.pitch(head_dim));
        let mut rows = Sequence::<Matrix<E>>::new();
        #[unroll]
        for _ in 0..comptime!(tile.padded(head_dim) / k) {
            // SAFETY: the matrix is loaded before it is multiplied.
            rows.push(unsafe { Matrix::<E>::uninitialized(MatrixIdent::A, m, n, k, MatrixLayout::RowMajor) });
        }
        // Rows go through the panel in turns of `columns` rows, which are the rows of `planes` warps.
        let columns = comptime!(tile.columns);
        let (turns, planes) = comptime!((tile.rows().div_ceil(columns), (columns / m).max(1)));
        for turn in 0..comptime!(turns as u32) {
            sync_cube();
            let _ = self.stage(block, block.start + turn * comptime!(columns as u32));
            sync_cube();
            if UNIT_POS_Y / comptime!(planes as u32) == turn {
                let row = (UNIT_POS_Y % comptime!(planes as u32)) as usize * comptime!(m * pitch);
                #[unroll]
                for step in 0..comptime!(tile.padded(head_dim) / k) {
                    let from = row + comptime!(step * k / WIDTH);
                    let stride = comptime!((pitch * WIDTH) as u32);
                    cmma::load(rows.index_mut(step), &self.elements[from..from + 1], stride);
                }
            }
        }
        rows
    }
}

/// The bits of the largest magnitude of four elements, in f32.
#[cube]
fn magnitude<E: Float>(value: Quad<E>) -> u32 {
    let wide = Quad::<f32>::cast_from(value);
    let mut highest = 0u32.runtime();
    #[unroll]
    for n in 0..WIDTH {
        highest = max(highest, u32::reinterpret(wide.extract(n)) & 0x7FFF_FFFFu32);
    }
    highest
}

/// Accumulator of one product, all zeros.
#[cube]
fn product(#[comptime] tile: MatrixTile) -> Matrix<f32> {
    let [m, n, k] = comptime!(tile.shape);
    Matrix::<f32>::from_value(MatrixIdent::Accumulator, m, n, k, MatrixLayout::Undefined, 0.0f32)
}

#[cube]
impl<E: Float> Board<E> {
    /// Computes the warp's products `rows · panelᵀ`.
    pub fn products(&mut self, rows: &Sequence<Matrix<E>>, panel: &Panel<E>) {
        let tile = comptime!(panel.tile);
        let [m, n, k] = comptime!(tile.shape);
        let pitch = comptime!(tile.pitch(panel.head_dim));
        #[unroll]
        for block in 0..comptime!(tile.columns / n) {
            let acc = product(tile);
            #[unroll]
            for step in 0..comptime!(tile.padded(panel.head_dim) / k) {
                let from = comptime!(block * n * pitch + step * k / WIDTH);
                // SAFETY: the matrix is loaded before it is multiplied.
                let mut column = unsafe { Matrix::<E>::uninitialized(MatrixIdent::B, m, n, k, MatrixLayout::ColMajor) };
                cmma::load(&mut column, &panel.elements[from..from + 1], comptime!((pitch * WIDTH) as u32));
                cmma::execute(rows.index(step), &column, &acc, &acc);
            }
            let to = self.me.board() + comptime!(block * n / WIDTH);
            let stride = comptime!((tile.board_pitch() * WIDTH) as u32);
            cmma::store(&mut self.products[to..to + 1], &acc, stride, MatrixLayout::RowMajor);
        }
        sync_plane();
    }

    /// Reads this thread's part of its `nth` row of products.
    pub fn read_row(&self, #[comptime] nth: usize) -> Array<f32> {
        let vectors = comptime!(self.me.tile.vectors_of_unit());
        let mut s = Array::<f32>::new(comptime!(vectors * WIDTH));
        let row = self.me.board_row(nth);
        #[unroll]
        for i in 0..vectors {
            let quad = self.products[row + self.me.vector(i) as usize];
            #[unroll]
            for n in 0..WIDTH {
                s[comptime!(i * WIDTH + n)] = quad.extract(n);
            }
        }
        s
    }

    /// Writes this thread's part of its `nth` row of weights, rounded to the element type, for the products that follow.
    pub fn write_row(&mut self, values: &Array<f32>, #[comptime] nth: usize) {
        let row = self.me.board_row(nth);
        #[unroll]
        for i in 0..comptime!(self.me.tile.vectors_of_unit()) {
            let mut quad = Quad::<f32>::new(0.0f32);
            #[unroll]
            for n in 0..WIDTH {
                quad.insert(n, values[comptime!(i * WIDTH + n)]);
            }
            self.weights[row + self.me.vector(i) as usize] = rounded::<E, Const<4>, Const<4>>(quad);
        }
    }

    /// Multiplies each row of the products by its factor.
    fn scale(&mut self, factors: &Array<f32>) {
        #[unroll]
        for nth in 0..comptime!(self.me.tile.rows_of_unit()) {
            let row = self.me.board_row(nth);
            let factor = Quad::<f32>::new(factors[nth]);
            #[unroll]
            for i in 0..comptime!(self.me.tile.vectors_of_unit()) {
                self.products[row + self.me.vector(i) as usize] *= factor;
            }
        }
    }
}
