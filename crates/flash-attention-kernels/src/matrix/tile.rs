//! Building blocks of the matrix kernels: panels in shared memory, products on them, and rows on the board.
//!
//! ```text
//! panel     [columns, head_dim]       a tile of K or V, 16-bit, staged by all threads
//! board     [rows, columns]           f32: products, which threads read, and accumulators, which they scale or write to memory
//! weights   [rows, columns]           16-bit: P or dS, which the matrix units read
//! ```
//!
//! Each warp has its own `m` rows of the board and of the weights, so that it need not wait for other warps.

mod board;
pub use board::scale;
use board::{from_board, scale_board, to_board};

use super::{Blueprint, MatrixTile};
use crate::fragment::grid::Block;
use crate::fragment::rows::{Layout, Quad, Rows, WIDTH, write_quad};
use crate::rounding::rounded;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Shared memory of a thread block.
#[derive(CubeType)]
pub struct Panels<E: Float> {
    /// The tile of K, or of Q in the kernel of `dk` and `dv`.
    pub k: Shared<[Quad<E>]>,
    /// The tile of V, or of dO in the kernel of `dk` and `dv`.
    pub v: Shared<[Quad<E>]>,
    /// Boards of all warps, in f32.
    pub board: Shared<[Quad<f32>]>,
    /// Weights of all warps, in 16 bits.
    pub weights: Shared<[Quad<E>]>,
    /// For each warp, whether it staged a value that is not finite.
    pub flags: Shared<[u32]>,
}

#[cube]
impl<E: Float> Panels<E> {
    /// Shared memory for one tile.
    pub fn new(#[comptime] blueprint: Blueprint) -> Panels<E> {
        let tile = comptime!(blueprint.tile);
        let board = comptime!(tile.rows() * tile.board_pitch());
        Panels::<E> {
            k: Shared::new_slice(comptime!(tile.columns * tile.pitch(blueprint.head_dim))),
            v: Shared::new_slice(comptime!(tile.columns * tile.pitch(blueprint.head_dim_v))),
            board: Shared::new_slice(board),
            weights: Shared::new_slice(board),
            flags: Shared::new_slice(comptime!(tile.planes)),
        }
    }
}

/// Position of a thread in its thread block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// The warp.
    pub plane: u32,
    /// The thread's number in the warp.
    pub lane: u32,
}

#[cube]
impl Place {
    /// Position of this thread. Warps lie along y.
    pub fn here() -> Place {
        Place { plane: UNIT_POS_Y, lane: UNIT_POS_X }
    }

    /// The `nth` row that this thread works on, counted from the warp's first row.
    pub fn row(&self, #[comptime] nth: usize, #[comptime] tile: MatrixTile) -> u32 {
        self.lane / comptime!(tile.sharers() as u32) + comptime!((nth * tile.plane) as u32)
    }

    /// The `nth` vector that this thread works on in a row.
    pub fn vector(&self, #[comptime] nth: usize, #[comptime] tile: MatrixTile) -> u32 {
        self.lane % comptime!(tile.sharers() as u32) + comptime!((nth * tile.sharers()) as u32)
    }

    /// The first vector of this warp on the board.
    pub fn board(&self, #[comptime] tile: MatrixTile) -> usize {
        self.plane as usize * comptime!(tile.m() * tile.board_pitch())
    }
}

/// Copies `tile.columns` rows of a head, from `start` on, to a panel. Rows that do not exist become zeros. Returns whether this thread
/// copied a value that is not finite.
#[cube]
pub fn stage<E: Float, N: Size>(
    from: &Rows<E, N>,
    start: u32,
    panel: &mut Shared<[Quad<E>]>,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) -> bool {
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
            panel[row * pitch + within] = value;
        }
    }
    // All bits of the exponent are set in infinity and NaN.
    highest >= 0x7F80_0000u32
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

/// Tells the other warps whether this warp staged a value that is not finite. After a barrier, [`was_staged()`] returns whether any did.
#[cube]
pub fn tell_staged(dirty: bool, flags: &mut Shared<[u32]>, me: Place) {
    let any = plane_any(dirty);
    if me.lane == 0 {
        flags[me.plane as usize] = u32::cast_from(any);
    }
}

/// Whether any warp staged a value that is not finite.
#[cube]
pub fn was_staged(flags: &Shared<[u32]>, #[comptime] tile: MatrixTile) -> bool {
    let mut any = 0u32.runtime();
    #[unroll]
    for n in 0..comptime!(tile.planes) {
        any |= flags[n];
    }
    any != 0
}

/// Reads a thread's part of its `nth` row of the board.
#[cube]
pub fn read_row(
    board: &Shared<[Quad<f32>]>,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] tile: MatrixTile,
) -> Array<f32> {
    let mut s = Array::<f32>::new(comptime!(tile.vectors_of_unit() * WIDTH));
    let row = me.board(tile) + me.row(nth, tile) as usize * comptime!(tile.board_pitch());
    #[unroll]
    for i in 0..comptime!(tile.vectors_of_unit()) {
        let quad = board[row + me.vector(i, tile) as usize];
        #[unroll]
        for n in 0..WIDTH {
            s[comptime!(i * WIDTH + n)] = quad.extract(n);
        }
    }
    s
}

/// Writes a thread's part of its `nth` row of weights, rounded to the element type, for the products that follow.
#[cube]
pub fn write_row<E: Float>(
    values: &Array<f32>,
    weights: &mut Shared<[Quad<E>]>,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] tile: MatrixTile,
) {
    let row = me.board(tile) + me.row(nth, tile) as usize * comptime!(tile.board_pitch());
    #[unroll]
    for i in 0..comptime!(tile.vectors_of_unit()) {
        let mut quad = Quad::<f32>::new(0.0f32);
        #[unroll]
        for n in 0..WIDTH {
            quad.insert(n, values[comptime!(i * WIDTH + n)]);
        }
        weights[row + me.vector(i, tile) as usize] = rounded::<E, Const<4>, Const<4>>(quad);
    }
}

/// Accumulators for the padded `head_dim`, `n` columns each, all zeros.
#[cube]
pub fn accumulator(#[comptime] head_dim: usize, #[comptime] tile: MatrixTile) -> Sequence<Matrix<f32>> {
    let mut acc = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(tile.padded(head_dim) / tile.n()) {
        acc.push(product(tile));
    }
    acc
}

/// Accumulator of one product, all zeros.
#[cube]
fn product(#[comptime] tile: MatrixTile) -> Matrix<f32> {
    let [m, n, k] = comptime!(tile.shape);
    Matrix::<f32>::from_value(MatrixIdent::Accumulator, m, n, k, MatrixLayout::Undefined, 0.0f32)
}

/// Loads the warp's rows of a block as left operands. The rows go through the panel `through`, tile by tile, and its contents are lost.
/// All threads must call this function.
#[cube]
pub fn operands<E: Float, N: Size>(
    block: &Rows<E, N>,
    through: &mut Shared<[Quad<E>]>,
    me: Place,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) -> Sequence<Matrix<E>> {
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
        let _ = stage(block, block.start + turn * comptime!(columns as u32), through, head_dim, tile);
        sync_cube();
        if me.plane / comptime!(planes as u32) == turn {
            let row = (me.plane % comptime!(planes as u32)) as usize * comptime!(m * pitch);
            #[unroll]
            for step in 0..comptime!(tile.padded(head_dim) / k) {
                let from = row + comptime!(step * k / WIDTH);
                cmma::load(rows.index_mut(step), &through[from..from + 1], comptime!((pitch * WIDTH) as u32));
            }
        }
    }
    rows
}

/// Writes `rows · panelᵀ` to the warp's board.
#[cube]
pub fn products<E: Float>(
    rows: &Sequence<Matrix<E>>,
    panel: &Shared<[Quad<E>]>,
    board: &mut Shared<[Quad<f32>]>,
    me: Place,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    let [m, n, k] = comptime!(tile.shape);
    let pitch = comptime!(tile.pitch(head_dim));
    #[unroll]
    for block in 0..comptime!(tile.columns / n) {
        let acc = product(tile);
        #[unroll]
        for step in 0..comptime!(tile.padded(head_dim) / k) {
            let from = comptime!(block * n * pitch + step * k / WIDTH);
            // SAFETY: the matrix is loaded before it is multiplied.
            let mut column = unsafe { Matrix::<E>::uninitialized(MatrixIdent::B, m, n, k, MatrixLayout::ColMajor) };
            cmma::load(&mut column, &panel[from..from + 1], comptime!((pitch * WIDTH) as u32));
            cmma::execute(rows.index(step), &column, &acc, &acc);
        }
        let to = me.board(tile) + comptime!(block * n / WIDTH);
        let stride = comptime!((tile.board_pitch() * WIDTH) as u32);
        cmma::store(&mut board[to..to + 1], &acc, stride, MatrixLayout::RowMajor);
    }
}

/// `acc += weights · panel`. If the panel is `dirty`, that is, holds a value that is not finite, a weight of 0 adds nothing: a hidden NaN
/// must not leak.
#[cube]
pub fn accumulate<E: Float>(
    acc: &mut Sequence<Matrix<f32>>,
    weights: &Shared<[Quad<E>]>,
    panel: &Shared<[Quad<E>]>,
    board: &mut Shared<[Quad<f32>]>,
    dirty: bool,
    me: Place,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    if dirty {
        accumulate_one_by_one(acc, weights, panel, board, me, head_dim, tile);
    } else {
        let [m, n, k] = comptime!(tile.shape);
        let pitch = comptime!(tile.pitch(head_dim));
        #[unroll]
        for step in 0..comptime!(tile.columns / k) {
            let from = me.board(tile) + comptime!(step * k / WIDTH);
            // SAFETY: the matrix is loaded before it is multiplied.
            let mut row = unsafe { Matrix::<E>::uninitialized(MatrixIdent::A, m, n, k, MatrixLayout::RowMajor) };
            cmma::load(&mut row, &weights[from..from + 1], comptime!((tile.board_pitch() * WIDTH) as u32));
            #[unroll]
            for block in 0..comptime!(tile.padded(head_dim) / n) {
                let from = comptime!(step * k * pitch + block * n / WIDTH);
                // SAFETY: the next statement loads the matrix.
                let mut column = unsafe { Matrix::<E>::uninitialized(MatrixIdent::B, m, n, k, MatrixLayout::RowMajor) };
                cmma::load(&mut column, &panel[from..from + 1], comptime!((pitch * WIDTH) as u32));
                let sum = acc.index(block);
                cmma::execute(&row, &column, sum, sum);
            }
        }
    }
}

/// [`accumulate()`] for dirty panels: multiply-adds on the board, without those whose weight is 0.
#[cube]
fn accumulate_one_by_one<E: Float>(
    acc: &mut Sequence<Matrix<f32>>,
    weights: &Shared<[Quad<E>]>,
    panel: &Shared<[Quad<E>]>,
    board: &mut Shared<[Quad<f32>]>,
    me: Place,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    let pitch = comptime!(tile.pitch(head_dim));
    let first = me.board(tile);
    #[unroll]
    for part in 0..comptime!(tile.padded(head_dim).div_ceil(tile.columns)) {
        to_board(&*acc, board, me, part, head_dim, tile);
        #[unroll]
        for nth in 0..comptime!(tile.rows_of_unit()) {
            let row = first + me.row(nth, tile) as usize * comptime!(tile.board_pitch());
            for i in 0..comptime!(tile.vectors_of_unit() as u32) {
                let vector =
                    (me.lane % comptime!(tile.sharers() as u32) + i * comptime!(tile.sharers() as u32)) as usize;
                let mut sum = board[row + vector];
                if comptime!(part * tile.columns) + vector * WIDTH < comptime!(tile.padded(head_dim)) {
                    for quad in 0..comptime!(tile.columns / WIDTH) {
                        let four = Quad::<f32>::cast_from(weights[row + quad]);
                        #[unroll]
                        for n in 0..WIDTH {
                            let weight = four.extract(n);
                            if weight != 0.0 {
                                let at = (quad * WIDTH + n) * pitch + comptime!(part * tile.columns / WIDTH) + vector;
                                sum += Quad::<f32>::new(weight) * Quad::<f32>::cast_from(panel[at]);
                            }
                        }
                    }
                }
                board[row + vector] = sum;
            }
        }
        from_board(acc, &*board, me, part, head_dim, tile);
    }
}

/// Writes the warp's rows of the accumulator to its rows of a block, each multiplied by its factor.
#[cube]
pub fn write<E: Float, N: Size>(
    tensor: &mut Tensor<Vector<E, N>>,
    block: &Block,
    acc: &Sequence<Matrix<f32>>,
    board: &mut Shared<[Quad<f32>]>,
    factors: &Array<f32>,
    me: Place,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    let layout = Layout::of(&*tensor, block.batch, block.head);
    let width = comptime!(tile.columns / WIDTH);
    #[unroll]
    for part in 0..comptime!(head_dim.div_ceil(tile.columns)) {
        to_board(acc, board, me, part, head_dim, tile);
        scale_board(board, factors, me, tile);
        sync_plane();
        // Neighbouring threads write neighbouring vectors.
        #[unroll]
        for step in 0..comptime!((tile.m() * width).div_ceil(tile.plane)) {
            let slot = me.lane as usize + comptime!(step * tile.plane);
            let (of_plane, within) = (slot / width, slot % width);
            let row = block.start + me.plane * comptime!(tile.m() as u32) + of_plane as u32;
            let column = comptime!(part * tile.columns) + within * WIDTH;
            if slot < comptime!(tile.m() * width) && row < block.end && column < head_dim {
                let value = board[me.board(tile) + of_plane * comptime!(tile.board_pitch()) + within];
                write_quad(tensor, &layout, row, column, value, head_dim);
            }
        }
    }
}
