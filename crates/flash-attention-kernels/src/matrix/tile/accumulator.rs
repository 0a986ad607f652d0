//! Accumulated rows of a warp. They are scaled and written through the board.

use super::super::MatrixTile;
use super::{Board, Panel, product};
use crate::fragment::{Block, Layout, Quad, WIDTH, write_quad};
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Sums of the warp's rows, in products of `n` columns each.
#[derive(CubeType)]
pub struct Accumulator {
    sums: Sequence<Matrix<f32>>,
    #[cube(comptime)]
    head_dim: usize,
    #[cube(comptime)]
    tile: MatrixTile,
}

#[cube]
impl Accumulator {
    /// Zeros for `head_dim` columns.
    pub fn new(#[comptime] head_dim: usize, #[comptime] tile: MatrixTile) -> Accumulator {
        let mut sums = Sequence::<Matrix<f32>>::new();
        #[unroll]
        for _ in 0..comptime!(tile.padded(head_dim) / tile.n()) {
            sums.push(product(tile));
        }
        Accumulator { sums, head_dim, tile }
    }

    /// Adds `weights · panel`. If the panel is `dirty`, that is, holds a value that is not finite, a weight of 0 adds nothing: a hidden
    /// NaN must not leak.
    pub fn add<E: Float>(&mut self, board: &mut Board<E>, panel: &Panel<E>, dirty: bool) {
        if dirty {
            self.add_one_by_one(board, panel);
        } else {
            let tile = comptime!(self.tile);
            let [m, n, k] = comptime!(tile.shape);
            let pitch = comptime!(tile.pitch(self.head_dim));
            #[unroll]
            for step in 0..comptime!(tile.columns / k) {
                let from = board.me.board() + comptime!(step * k / WIDTH);
                // SAFETY: the matrix is loaded before it is multiplied.
                let mut row = unsafe { Matrix::<E>::uninitialized(MatrixIdent::A, m, n, k, MatrixLayout::RowMajor) };
                cmma::load(&mut row, &board.weights[from..from + 1], comptime!((tile.board_pitch() * WIDTH) as u32));
                #[unroll]
                for block in 0..comptime!(tile.padded(self.head_dim) / n) {
                    let from = comptime!(step * k * pitch + block * n / WIDTH);
                    // SAFETY: the next statement loads the matrix.
                    let mut column =
                        unsafe { Matrix::<E>::uninitialized(MatrixIdent::B, m, n, k, MatrixLayout::RowMajor) };
                    cmma::load(&mut column, &panel.elements[from..from + 1], comptime!((pitch * WIDTH) as u32));
                    let sum = self.sums.index(block);
                    cmma::execute(&row, &column, sum, sum);
                }
            }
        }
    }

    /// [`Accumulator::add`] for dirty panels: multiply-adds on the board, without those whose weight is 0.
    fn add_one_by_one<E: Float>(&mut self, board: &mut Board<E>, panel: &Panel<E>) {
        let (tile, me) = (comptime!(self.tile), board.me);
        let pitch = comptime!(tile.pitch(self.head_dim));
        #[unroll]
        for part in 0..comptime!(tile.padded(self.head_dim).div_ceil(tile.columns)) {
            self.copy(board, part, false);
            #[unroll]
            for nth in 0..comptime!(tile.rows_of_unit()) {
                let row = me.board_row(nth);
                for i in 0..comptime!(tile.vectors_of_unit() as u32) {
                    let vector =
                        (me.lane % comptime!(tile.sharers() as u32) + i * comptime!(tile.sharers() as u32)) as usize;
                    let mut sum = board.products[row + vector];
                    if comptime!(part * tile.columns) + vector * WIDTH < comptime!(tile.padded(self.head_dim)) {
                        for quad in 0..comptime!(tile.columns / WIDTH) {
                            let four = Quad::<f32>::cast_from(board.weights[row + quad]);
                            #[unroll]
                            for n in 0..WIDTH {
                                let weight = four.extract(n);
                                if weight != 0.0 {
                                    let at =
                                        (quad * WIDTH + n) * pitch + comptime!(part * tile.columns / WIDTH) + vector;
                                    sum += Quad::<f32>::new(weight) * Quad::<f32>::cast_from(panel.elements[at]);
                                }
                            }
                        }
                    }
                    board.products[row + vector] = sum;
                }
            }
            self.copy(board, part, true);
        }
    }

    /// Multiplies each row by its factor.
    pub fn scale<E: Float>(&mut self, board: &mut Board<E>, factors: &Array<f32>) {
        #[unroll]
        for part in 0..comptime!(self.tile.padded(self.head_dim).div_ceil(self.tile.columns)) {
            self.copy(board, part, false);
            board.scale(factors);
            self.copy(board, part, true);
        }
    }

    /// Writes the rows to their rows of a block, each multiplied by its factor.
    pub fn write<E: Float, N: Size>(
        &mut self,
        tensor: &mut Tensor<Vector<E, N>>,
        block: &Block,
        board: &mut Board<E>,
        factors: &Array<f32>,
    ) {
        let (tile, head_dim, me) = (comptime!(self.tile), comptime!(self.head_dim), board.me);
        let layout = Layout::of(&*tensor, block.batch, block.head);
        let width = comptime!(tile.columns / WIDTH);
        #[unroll]
        for part in 0..comptime!(head_dim.div_ceil(tile.columns)) {
            self.copy(board, part, false);
            board.scale(factors);
            sync_plane();
            // Neighbouring threads write neighbouring vectors.
            #[unroll]
            for step in 0..comptime!((tile.m() * width).div_ceil(tile.plane)) {
                let slot = me.lane as usize + comptime!(step * tile.plane);
                let (of_plane, within) = (slot / width, slot % width);
                let row = block.start + me.plane * comptime!(tile.m() as u32) + of_plane as u32;
                let column = comptime!(part * tile.columns) + within * WIDTH;
                if slot < comptime!(tile.m() * width) && row < block.end && column < head_dim {
                    let value = board.products[me.board() + of_plane * comptime!(tile.board_pitch()) + within];
                    write_quad(tensor, &layout, row, column, value, head_dim);
                }
            }
        }
    }

    /// Copies the `part`-th columns to the board, or `back` from the board. A part has as many columns as the board.
    fn copy<E: Float>(&mut self, board: &mut Board<E>, #[comptime] part: usize, #[comptime] back: bool) {
        let tile = comptime!(self.tile);
        let blocks = comptime!(tile.columns / tile.n());
        sync_plane();
        #[unroll]
        for block in 0..comptime!(blocks.min(tile.padded(self.head_dim) / tile.n() - part * blocks)) {
            let at = board.me.board() + comptime!(block * tile.n() / WIDTH);
            let stride = comptime!((tile.board_pitch() * WIDTH) as u32);
            let sum = self.sums.index_mut(comptime!(part * blocks + block));
            if comptime!(back) {
                cmma::load_with_layout(sum, &board.products[at..at + 1], stride, MatrixLayout::RowMajor);
            } else {
                cmma::store(&mut board.products[at..at + 1], &*sum, stride, MatrixLayout::RowMajor);
            }
        }
        sync_plane();
    }
}
