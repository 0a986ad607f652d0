//! Gradients: `dq`, one thread block for each block of queries of a head, or `dk` and `dv`, one for each block of keys.
//!
//! ```text
//! Dq      for each key that queries of the block see:
//!             s = Q k    dp = dO v    p = exp(s − lse)    ds = p ∘ (dp − delta) ∘ factor   dQ += ds k
//! DkDv    for each query head of the group and each of its queries that see keys of the block:
//!             s = K q    dp = V do    p = exp(s − lse)    ds = p ∘ (dp − delta) ∘ factor   dK += ds q    dV += p do
//! ```
//!
//! `DkDv` is `Dq` with queries and keys exchanged, and one more product. Band, mask and bias are passed with their sides exchanged as
//! well, so that a "query" of the band is always a row. Every sum is taken in a fixed order. (FlashAttention-2, arXiv:2307.08691,
//! algorithm 2.)

use super::Blueprint;
use super::forward::apply_score_mod;
use super::row::*;
use crate::blocks::{Visit, runs};
use crate::fragment::{Gradients, Grid, Rows, ScalarScores, Sides, filled, zeros};
use crate::score::Factor;
use crate::softmax::{softmax_backward, weight};
use cubecl::prelude::*;

/// Gradients of the rows: `dq`, or `dk` and `dv`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn gradient<F: Float, M: Numeric, N: Size>(
    sides: Sides<F, N>,
    scores: ScalarScores<F, M>,
    gradients: Gradients<F, N>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, role, careful) = comptime!((blueprint.tile, blueprint.role, blueprint.careful));
    let (transposed, differentiates) = comptime!((role.is_transposed(), role.differentiates()));
    let rows = comptime!(tile.rows);
    let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, comptime!(tile.block() as u32), transposed);
    if work.is_none {
        terminate!();
    }
    let (batch, start, band) = (work.batch, work.start, work.band);

    let last = band.seq_q - 1;
    let held = hold(&Rows::of(sides.rows.qk, batch, work.head, start, last), last, head_dim, tile);
    let held_d = if differentiates {
        hold(&Rows::of(sides.rows.dov, batch, work.head, start, last), last, head_dim_v, tile)
    } else {
        Array::new(1usize)
    };
    let with_dv = comptime!(gradients.dv.is_some());
    let mut acc = zeros(comptime!(if differentiates { rows * vectors(head_dim) } else { 1 }));
    let mut acc_v = zeros(comptime!(if with_dv { rows * vectors(head_dim_v) } else { 1 }));

    // Where rows are queries, their lse and delta are read once.
    let mut lse = Array::<f32>::new(rows);
    let mut delta = Array::<f32>::new(rows);
    if comptime!(!transposed) {
        #[unroll]
        for nth in 0..rows {
            let row = band.query_within(row_of(start, comptime!(nth as u32).runtime(), tile));
            lse[nth] = sides.stats.lse(batch, work.head, row);
            delta[nth] = sides.stats.delta(batch, work.head, row);
        }
    }

    let (first, after) = grid.streams(work.head, transposed);
    for stream in first..after {
        let head = if transposed { stream } else { work.head };
        let cols = Rows::of(sides.cols.qk, batch, stream, 0u32, band.after_keys());
        let cols_v = Rows::of(sides.cols.dov, batch, stream, 0u32, band.after_keys());
        let of_head = scores.head(batch, head, stream, band, transposed);
        let runs = runs(&extras, &band, batch, head, start, comptime!(tile.block() as u32));
        for nth_run in 0..runs.count {
            let run = runs.run(nth_run);
            let visit = Visit { start: run.from, fully_visible: false.runtime(), masked: run.masked };
            let at = of_head.tile(start, &visit, false);
            for j in run.from..run.to {
                if comptime!(transposed) {
                    let (of, mean) = (sides.stats.lse(batch, head, j), sides.stats.delta(batch, head, j));
                    #[unroll]
                    for nth in 0..rows {
                        lse[nth] = of;
                        delta[nth] = mean;
                    }
                }
                let column = read(&cols, j, head_dim);
                let column_v = read(&cols_v, j, head_dim_v);
                #[unroll]
                for nth in 0..rows {
                    let t = scores.score.of(dot(&held, &column, nth, head_dim));
                    let row = row_of(start, comptime!(nth as u32).runtime(), tile);
                    let p = weight(apply_score_mod(t, &scores, &at, row, j, careful), lse[nth]);
                    let kept = extras.dropout.keeps_of(&band, batch as u32, head as u32, row, j, transposed);
                    if comptime!(with_dv) {
                        add(&mut acc_v, extras.dropout.apply(p, kept), &column_v, nth, head_dim_v, careful);
                    }
                    if differentiates {
                        let dp = extras.dropout.backward(dot(&held_d, &column_v, nth, head_dim_v), kept);
                        let mut ds = softmax_backward(p, dp, delta[nth], true);
                        if comptime!(blueprint.factor != Factor::One) {
                            // A hidden pair stays 0, even if its factor is not finite.
                            let factor = scores.factor(t, &at, row, j, blueprint.factor);
                            ds = select(ds == 0.0f32, 0.0f32, ds * factor);
                        }
                        add(&mut acc, ds, &column, nth, head_dim, careful);
                    }
                }
            }
        }
    }

    let block = work.rows(false);
    #[comptime]
    if let ComptimeOption::Some(dqk) = gradients.dqk {
        write(dqk, &block, &acc, &filled::<f32>(scores.score.scale, rows), head_dim, tile);
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = gradients.dv {
        write(dv, &block, &acc_v, &filled::<f32>(extras.dropout.scale(), rows), head_dim_v, tile);
    }
}
