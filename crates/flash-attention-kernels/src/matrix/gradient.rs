//! Gradients: `dq`, one thread block for each block of queries of a head, or `dk` and `dv`, one for each block of keys.
//!
//! ```text
//! Dq      for each tile of keys that the queries see:
//!             S = Q Kᵀ    dP = dO Vᵀ    P = exp(S − lse)    dS = P ∘ (dP − delta) ∘ factor    dQ += dS K
//! DkDv    for each query head of the group and each tile of queries that see the keys:
//!             Sᵀ = K Qᵀ   dPᵀ = V dOᵀ   Pᵀ = exp(Sᵀ − lse)  dSᵀ = Pᵀ ∘ (dPᵀ − delta) ∘ factor
//!             dV += Pᵀ dO               dK += dSᵀ Q
//! ```
//!
//! `DkDv` is `Dq` with queries and keys exchanged, and one more product. Every sum is taken in a fixed order. (FlashAttention-2,
//! arXiv:2307.08691, algorithm 2.)

use super::forward::apply_score_mod;
use super::tile::*;
use super::{Blueprint, MatrixTile};
use crate::blocks::{TileSize, visits};
use crate::dropout::Dropout;
use crate::fragment::{Gradients, Grid, Rows, ScalarScores, Sides, Statistics, TileAt, WIDTH, filled};
use crate::score::Factor;
use crate::softmax::{softmax_backward, weight};
use cubecl::prelude::*;

/// Gradients of the rows: `dq`, or `dk` and `dv`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn gradient<E: Float, M: Numeric, N: Size>(
    sides: Sides<E, N>,
    scores: ScalarScores<E, M>,
    gradients: Gradients<E, N>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (tile, role) = comptime!((blueprint.tile, blueprint.role));
    let (transposed, differentiates) = comptime!((role.is_transposed(), role.differentiates()));
    let size = comptime!(TileSize { rows: tile.rows() as u32, columns: tile.columns as u32, keys: transposed });
    let mut panels = Panels::<E>::new(blueprint);
    let me = panels.board.me;
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, size.rows, transposed);
    if work.is_none {
        terminate!();
    }
    let (batch, band, block) = (work.batch, work.band, work.rows(transposed));
    let columns_end = if comptime!(transposed) { band.after_queries() } else { band.after_keys() };
    let with_dv = comptime!(gradients.dv.is_some());

    let rows = Rows::of(sides.rows.qk, batch, work.head, block.start, block.end);
    let keep = panels.k.operands(&rows);
    let keep_d = if comptime!(differentiates) {
        let rows = Rows::of(sides.rows.dov, batch, work.head, block.start, block.end);
        panels.v.operands(&rows)
    } else {
        Sequence::new()
    };
    let mut acc = Accumulator::new(comptime!(if differentiates { blueprint.head_dim } else { 0 }), tile);
    let mut acc_v = Accumulator::new(comptime!(if with_dv { blueprint.head_dim_v } else { 0 }), tile);

    let (first, after) = grid.streams(work.head, transposed);
    for stream in first..after {
        let (head, head_kv) = if comptime!(transposed) { (stream, work.head) } else { (work.head, stream) };
        let cols = Rows::of(sides.cols.qk, batch, stream, 0u32, columns_end);
        let cols_v = Rows::of(sides.cols.dov, batch, stream, 0u32, columns_end);
        let of_head = scores.head(batch, head, head_kv, band, false);
        let visits = visits(&extras, &band, batch, head, block.start, size);
        for nth in 0..visits.count {
            let visit = visits.tile(nth);
            let at = of_head.tile(block.start, &visit, transposed);

            let dirty = panels.stage(&cols, &cols_v, visit.start, true);

            // -- P, and dV
            panels.board.products(&keep, &panels.k);
            let of_unit = comptime!(tile.rows_of_unit());
            let mut weighed = Sequence::<Row>::new();
            #[unroll]
            for nth in 0..of_unit {
                let row = Row::weighed(panels.board.read_row(nth), &sides.stats, &scores, &at, me, nth, blueprint);
                if comptime!(with_dv) {
                    panels.board.write_row(&row.left(&extras.dropout, tile), nth);
                }
                weighed.push(row);
            }
            sync_plane();
            if comptime!(with_dv) {
                acc_v.add(&mut panels.board, &panels.v, dirty);
                sync_plane();
            }

            // -- dS, and dQ or dK
            if comptime!(differentiates) {
                panels.board.products(&keep_d, &panels.v);
                #[unroll]
                for nth in 0..of_unit {
                    let dp = panels.board.read_row(nth);
                    let row = weighed.index_mut(nth);
                    row.differentiate(&dp, &sides.stats, &extras.dropout, &at, me, nth, blueprint);
                    panels.board.write_row(&row.weights, nth);
                }
                sync_plane();
                acc.add(&mut panels.board, &panels.k, dirty);
            }
        }
    }

    #[comptime]
    if let ComptimeOption::Some(dqk) = gradients.dqk {
        acc.write(dqk, &block, &mut panels.board, &filled::<f32>(scores.score.scale, tile.rows_of_unit()));
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = gradients.dv {
        acc_v.write(dv, &block, &mut panels.board, &filled::<f32>(extras.dropout.scale(), tile.rows_of_unit()));
    }
}

/// A thread's part of a row of the tile.
#[derive(CubeType)]
struct Row {
    /// `P`, then `dS`.
    weights: Array<f32>,
    /// Factors of the gradients of scores, if there are any.
    factors: Array<f32>,
    /// Which elements dropout keeps, if there is dropout.
    kept: Array<bool>,
}

#[cube]
impl Row {
    /// Probabilities `P` from the products `s`.
    fn weighed<E: Float, M: Numeric>(
        s: Array<f32>,
        stats: &Statistics,
        scores: &ScalarScores<E, M>,
        at: &TileAt,
        me: Place,
        #[comptime] nth: usize,
        #[comptime] blueprint: Blueprint,
    ) -> Row {
        let dropout = &scores.score.extras.dropout;
        let len = comptime!(blueprint.tile.vectors_of_unit() * WIDTH);
        let mut weights = s;
        let factors = apply_score_mod(&mut weights, scores, at, me, nth, blueprint);
        let mut kept = Array::<bool>::new(comptime!(if dropout.seed.is_some() { len } else { 1 }));
        #[unroll]
        for n in 0..len {
            let (i, j) = me.pair(at, nth, n, blueprint.role.is_transposed());
            let lse = stats.lse(at.batch, at.head, at.band.query_within(i));
            weights[n] = weight(weights[n], select(at.band.is_query(i), lse, f32::MAX));
            if comptime!(dropout.seed.is_some()) {
                kept[n] = dropout.keeps_of(&at.band, at.batch as u32, at.head as u32, i, j, false);
            }
        }
        Row { weights, factors, kept }
    }

    /// Weights after dropout, without the factor `1 / (1 − p)`.
    fn left(&self, dropout: &Dropout, #[comptime] tile: MatrixTile) -> Array<f32> {
        let len = comptime!(tile.vectors_of_unit() * WIDTH);
        let mut left = Array::<f32>::new(len);
        #[unroll]
        for n in 0..len {
            left[n] = self.weights[n];
            if comptime!(dropout.seed.is_some()) {
                left[n] = dropout.apply(self.weights[n], self.kept[n]);
            }
        }
        left
    }

    /// Turns `P` into `dS`, from the row of `dP`.
    fn differentiate(
        &mut self,
        dp: &Array<f32>,
        stats: &Statistics,
        dropout: &Dropout,
        at: &TileAt,
        me: Place,
        #[comptime] nth: usize,
        #[comptime] blueprint: Blueprint,
    ) {
        #[unroll]
        for n in 0..comptime!(blueprint.tile.vectors_of_unit() * WIDTH) {
            let (i, _) = me.pair(at, nth, n, blueprint.role.is_transposed());
            let delta = stats.delta(at.batch, at.head, at.band.query_within(i));
            let mut of_kept = dp[n];
            if comptime!(dropout.seed.is_some()) {
                of_kept = dropout.backward(dp[n], self.kept[n]);
            }
            let mut ds = softmax_backward(self.weights[n], of_kept, delta, true);
            if comptime!(blueprint.factor != Factor::One) {
                // A hidden pair stays 0, even if its factor is not finite.
                ds = select(ds == 0.0f32, 0.0f32, ds * self.factors[n]);
            }
            self.weights[n] = ds;
        }
    }
}
