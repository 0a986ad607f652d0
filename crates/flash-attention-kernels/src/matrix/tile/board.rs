//! Accumulators on the board.

use super::super::MatrixTile;
use super::Place;
use crate::fragment::rows::{Quad, WIDTH};
use cubecl::cmma::{self, Matrix, MatrixLayout};
use cubecl::prelude::*;

/// Writes the `part`-th columns of the accumulator to the board. A part has as many columns as the board.
#[cube]
pub fn to_board(
    acc: &Sequence<Matrix<f32>>,
    board: &mut Shared<[Quad<f32>]>,
    me: Place,
    #[comptime] part: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    let blocks = comptime!(tile.columns / tile.n());
    sync_plane();
    #[unroll]
    for block in 0..comptime!(blocks.min(tile.padded(head_dim) / tile.n() - part * blocks)) {
        let to = me.board(tile) + comptime!(block * tile.n() / WIDTH);
        let stride = comptime!((tile.board_pitch() * WIDTH) as u32);
        let sum = acc.index(comptime!(part * blocks + block));
        cmma::store(&mut board[to..to + 1], sum, stride, MatrixLayout::RowMajor);
    }
    sync_plane();
}

/// Reads the `part`-th columns of the accumulator back from the board.
#[cube]
pub fn from_board(
    acc: &mut Sequence<Matrix<f32>>,
    board: &Shared<[Quad<f32>]>,
    me: Place,
    #[comptime] part: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    let blocks = comptime!(tile.columns / tile.n());
    sync_plane();
    #[unroll]
    for block in 0..comptime!(blocks.min(tile.padded(head_dim) / tile.n() - part * blocks)) {
        let from = me.board(tile) + comptime!(block * tile.n() / WIDTH);
        let stride = comptime!((tile.board_pitch() * WIDTH) as u32);
        let sum = acc.index_mut(comptime!(part * blocks + block));
        cmma::load_with_layout(sum, &board[from..from + 1], stride, MatrixLayout::RowMajor);
    }
    sync_plane();
}

/// Multiplies each row on the board by its factor.
#[cube]
pub fn scale_board(board: &mut Shared<[Quad<f32>]>, factors: &Array<f32>, me: Place, #[comptime] tile: MatrixTile) {
    #[unroll]
    for nth in 0..comptime!(tile.rows_of_unit()) {
        let row = me.board(tile) + me.row(nth, tile) as usize * comptime!(tile.board_pitch());
        let factor = Quad::<f32>::new(factors[nth]);
        #[unroll]
        for i in 0..comptime!(tile.vectors_of_unit()) {
            board[row + me.vector(i, tile) as usize] *= factor;
        }
    }
}

/// Multiplies each row of the accumulator by its factor.
#[cube]
pub fn scale(
    acc: &mut Sequence<Matrix<f32>>,
    board: &mut Shared<[Quad<f32>]>,
    factors: &Array<f32>,
    me: Place,
    #[comptime] head_dim: usize,
    #[comptime] tile: MatrixTile,
) {
    #[unroll]
    for part in 0..comptime!(tile.padded(head_dim).div_ceil(tile.columns)) {
        to_board(&*acc, board, me, part, head_dim, tile);
        scale_board(board, factors, me, tile);
        from_board(acc, &*board, me, part, head_dim, tile);
    }
}
