//! Gradients of the bias, of slopes and of the tensors that score functions read. All of them are sums of `dT ∘ factor`, where
//! `dT = P ∘ (dout Vᵀ − delta)`. The factor is 1 for the bias, `−|i − j|` for slopes, and the function's derivative for its tensors.
//! The sum is over the dimensions in which the tensor is broadcast.
//!
//! Each thread block sums the tiles that it recomputes, so that no tensor of size `seq_q × seq_k` exists unless the bias has that size:
//!
//! ```text
//! bias varies with           each thread block goes through    and writes
//! query and key              batches and heads that share it   its tile of dbias
//! key, not query             the queries of its head           column sums  [B, H, Sk]
//! query, or neither          the keys of its head              row sums     [B, H, Sq]
//! ```
//!
//! The kernel [`fold()`] then adds up column or row sums over the batches, heads and positions that share an element.

use super::Blueprint;
use super::recompute::*;
use super::tile::*;
use crate::blocks::{TileSize, visits};
use crate::fragment::{Grid, ScalarScores, Sides, filled};
use crate::rounding::rounded_one;
use cubecl::prelude::*;
use serde::Serialize;

/// Sums that a thread block of [`dbias()`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Sums {
    /// One tile, summed over the batches and heads that share it.
    Tile,
    /// Sums of columns, over all queries.
    Columns,
    /// Sums of rows, over all keys.
    Rows,
}

/// Numbers of batches and heads that share a tile of a bias. One thread block adds them up. Both are 1 except for [`Sums::Tile`].
#[derive(CubeType, CubeLaunch)]
pub struct Sharers {
    /// Batches.
    pub batches: u32,
    /// Query heads.
    pub heads: u32,
}

/// Writes a tile of `dbias`, or column or row sums of one head, to `out`: `[bias batch, bias head, Sq, Sk]`, `[B, H, Sk]` or
/// `[B, H, Sq]`.
///
/// The blocks of `grid` are tiles, blocks of keys or blocks of queries, depending on `sums`. The blueprint's
/// [factor](crate::score::Factor) tells which gradient is computed.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dbias<F: Float, M: Numeric, O: Float, N: Size>(
    sides: Sides<F, N>,
    scores: ScalarScores<F, M>,
    out: &mut Tensor<O>,
    grid: Grid,
    sharers: Sharers,
    #[comptime] sums: Sums,
    #[comptime] blueprint: Blueprint,
    #[define(F, M, O)] _types: [ElemType; 3],
) {
    let tile = comptime!(blueprint.tile);
    let (tile_q, tile_k) = comptime!((tile.tile_q as u32, tile.tile_k as u32));
    let (micro, micro_q, micro_k) = comptime!((tile.micro(), tile.micro_q(), tile.micro_k()));
    let mut panels = Panels::new(0usize, 0usize, blueprint);
    let me = panels.me;
    let mut board = Shared::<[f32]>::new_slice(comptime!(tile.sums_board(sums)));
    let work = grid.at(CUBE_POS);
    if work.is_none {
        terminate!();
    }
    let (extras, whole) = (scores.score.extras, scores.band);
    let k_blocks = whole.seq_k.div_ceil(tile_k);
    let mut tile_gradient = TileGradient::new(blueprint);
    let own = comptime!(match sums {
        Sums::Tile => micro,
        Sums::Columns => micro_k,
        Sums::Rows => micro_q,
    });
    let mut total = filled::<f32>(0.0f32, own);

    // The first query and key of this thread block: it goes through one tile, all blocks of queries, or all blocks of keys.
    let (q_start, k_start) = match comptime!(sums) {
        Sums::Tile => (work.block / k_blocks * tile_q, work.block % k_blocks * tile_k),
        Sums::Columns => (0u32.runtime(), work.block * tile_k),
        Sums::Rows => (work.block * tile_q, 0u32.runtime()),
    };
    let size = comptime!(match sums {
        Sums::Columns => TileSize { rows: tile_k, columns: tile_q, keys: true },
        Sums::Tile | Sums::Rows => TileSize { rows: tile_q, columns: tile_k, keys: false },
    });
    let start = if comptime!(size.keys) { k_start } else { q_start };
    for member in 0..sharers.batches * sharers.heads {
        let batch = work.batch * sharers.batches as usize + (member / sharers.heads) as usize;
        let head = work.head * sharers.heads as usize + (member % sharers.heads) as usize;
        // All sequences of the schedule, or the only sequence of this batch.
        for nth in 0..extras.blocks(1u32) {
            let sequence = extras.block(nth, &whole, batch as u32, 0u32);
            let band = sequence.band;
            let of_head = scores.head(batch, head, head / grid.group_size as usize, band, false);
            let visits = visits(&extras, &band, batch, head, start, size);
            let mut first = 0u32.runtime();
            let mut after = visits.count;
            if comptime!(sums == Sums::Tile) {
                // Tiles of the bias need not be aligned with the tiles of a sequence.
                if comptime!(extras.is_sparse()) {
                    first = visits.find(k_start);
                    after = select(first < after, first + 1, first);
                } else {
                    after = u32::cast_from(band.meets(q_start, k_start, tile_q, tile_k));
                }
            }
            if comptime!(extras.is_varlen()) && sequence.batch != batch as u32 {
                after = first;
            }
            for nth in first..after {
                let mut visit = visits.tile(nth);
                if comptime!(sums == Sums::Tile) {
                    visit.start = k_start;
                    visit.fully_visible = band.fully_visible(q_start, k_start, tile_q, tile_k);
                }
                let at = of_head.tile(start, &visit, size.keys);
                tile_gradient.ask(&sides, &at, &mut panels);
                tile_gradient.recompute(&sides, &scores, &at, &mut panels, true);
                tile_gradient.multiply();
                #[unroll]
                for n in 0..micro {
                    let of = comptime!(match sums {
                        Sums::Tile => n,
                        Sums::Columns => n % micro_k,
                        Sums::Rows => n / micro_k,
                    });
                    total[of] += tile_gradient.ds[n];
                }
            }
        }
    }

    let at = work.batch * out.stride(0) + work.head * out.stride(1);
    if comptime!(sums == Sums::Tile) {
        let (of_row, of_column) = (out.stride(2), out.stride(3));
        #[unroll]
        for n in 0..micro {
            let row = q_start + me.y * comptime!(micro_q as u32) + comptime!((n / micro_k) as u32);
            let column = k_start + me.x * comptime!(micro_k as u32) + comptime!((n % micro_k) as u32);
            if row < whole.seq_q && column < whole.seq_k {
                out[at + row as usize * of_row + column as usize * of_column] = rounded_one::<O>(total[n]);
            }
        }
    } else {
        // Threads share their partial sums on the board, and then add up those of one position each.
        let (nth, part) = if comptime!(size.keys) { (me.x, me.y) } else { (me.y, me.x) };
        let end = if comptime!(size.keys) { whole.seq_k } else { whole.seq_q };
        let (rows, parts, units) =
            comptime!((size.rows as usize, if size.keys { tile.units_q } else { tile.units_k }, tile.units()));
        #[unroll]
        for n in 0..own {
            board[part as usize * rows + nth as usize * own + n] = total[n];
        }
        sync_cube();
        #[unroll]
        for step in 0..comptime!(rows.div_ceil(units)) {
            let position = UNIT_POS as usize + comptime!(step * units);
            let target = start as usize + position;
            if position < rows && target < end as usize {
                let mut sum = 0.0f32;
                for part in 0..parts {
                    sum += board[part * rows + position];
                }
                out[at + target] = rounded_one::<O>(sum);
            }
        }
    }
}

impl TileShape {
    /// f32 values on the board, on which the threads of a thread block share partial sums.
    pub fn sums_board(&self, sums: Sums) -> usize {
        match sums {
            Sums::Tile => 1,
            Sums::Columns => self.units_q * self.tile_k,
            Sums::Rows => self.units_k * self.tile_q,
        }
    }
}

/// Threads of a thread block of [`fold()`].
pub const FOLD_UNITS: usize = 256;

/// Terms that a thread of [`fold()`] adds up at a time, so that it waits for several loads together.
const FOLDED: usize = 4;

/// Number of threads that share an element of [`fold()`] with so many terms: a power of two, at most [`FOLD_UNITS`].
pub fn fold_lanes(terms: usize) -> usize {
    (terms / (4 * FOLDED)).max(1).next_power_of_two().min(FOLD_UNITS)
}

/// Adds up `sums [B, H, L]`, contiguous, to `dbias`: an element is the sum over the batches, heads and positions that share it.
/// `lanes` threads share an element. `along` is the dimension of `dbias` that `L` belongs to, 2 or 3.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn fold<O: Float>(
    sums: &Tensor<f32>,
    dbias: &mut Tensor<O>,
    #[comptime] along: usize,
    #[comptime] lanes: usize,
    #[define(O)] _type: ElemType,
) {
    let mut board = Shared::<[f32]>::new_slice(FOLD_UNITS);
    let lane = UNIT_POS as usize % lanes;
    let element = CUBE_POS * comptime!(FOLD_UNITS / lanes) + UNIT_POS as usize / lanes;
    let (of_batch, of_head, of_position) = (dbias.shape(0), dbias.shape(1), dbias.shape(along));
    let (heads, length) = (sums.shape(1), sums.shape(2));
    let exists = element < of_batch * of_head * of_position;

    // In each dimension, `dbias` either has the size of `sums`, or size 1, in which case all of `sums` is added up.
    let batches_each = sums.shape(0) / of_batch;
    let heads_each = heads / of_head;
    let positions_each = length / of_position;
    let position = element % of_position;
    let head = element / of_position % of_head;
    let batch = element / of_position / of_head;

    let mut parts = filled::<f32>(0.0f32, FOLDED);
    if exists {
        let terms = batches_each * heads_each * positions_each;
        let mut first = lane;
        while first < terms {
            #[unroll]
            for n in 0..FOLDED {
                let term = min(first + comptime!(n * lanes), terms - 1);
                let p = position * positions_each + term % positions_each;
                let h = head * heads_each + term / positions_each % heads_each;
                let b = batch * batches_each + term / positions_each / heads_each;
                let sum = sums[(b * heads + h) * length + p];
                parts[n] += select(first + comptime!(n * lanes) < terms, sum, 0.0f32);
            }
            first += comptime!(FOLDED * lanes);
        }
    }
    let unit = UNIT_POS as usize;
    board[unit] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    #[unroll]
    for halving in 0..comptime!(lanes.ilog2()) {
        let half = comptime!(lanes >> (halving + 1));
        sync_cube();
        if lane < half {
            board[unit] += board[unit + half];
        }
    }
    if exists && lane == 0 {
        let offset = batch * dbias.stride(0) + head * dbias.stride(1) + position * dbias.stride(along);
        dbias[offset] = rounded_one::<O>(board[unit]);
    }
}
