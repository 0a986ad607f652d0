//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each key that queries of the block see:
//!     s = Q k      m' = max(m, s)      p = exp(s − m')      l = exp(m − m')·l + p      O = exp(m − m')·O + p v
//! o = O / l        lse = m + ln l
//! ```

use super::Blueprint;
use super::row::*;
use crate::blocks::{Visit, runs};
use crate::fragment::{ForwardOutputs, Grid, Qkv, Rows, ScalarScores, TileAt, filled, row_start, zeros};
use crate::softmax::{Rescale, lse_bits, normalizer, raised, weight};
use cubecl::prelude::*;

/// Computes `o [B, H, Sq, Dv]` and the bits of `lse [B, H, Sq]` from Q, K and V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<F: Float, M: Numeric, N: Size>(
    inputs: Qkv<F, N>,
    scores: ScalarScores<F, M>,
    outputs: ForwardOutputs<F, N>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, careful) = comptime!((blueprint.tile, blueprint.careful));
    let rows = comptime!(tile.rows);
    let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, comptime!(tile.block() as u32), false);
    if work.is_none {
        terminate!();
    }
    let (batch, head, start, band) = (work.batch, work.head, work.start, work.band);
    let head_kv = head / grid.group_size as usize;
    let of_head = scores.head(batch, head, head_kv, band, false);
    let (k, v) = (of_head.keys(inputs.k), of_head.keys(inputs.v));
    let q = Rows::of(inputs.q, batch, head, start, band.after_queries());

    let held = hold(&q, band.seq_q - 1, head_dim, tile);
    let mut acc = zeros(comptime!(rows * vectors(head_dim_v)));
    let mut s = Array::<f32>::new(rows);
    let (first, sum) = scores.score.begin(head, true.runtime());
    let mut m = filled::<f32>(first, rows);
    let mut l = filled::<f32>(sum, rows);

    let runs = runs(&extras, &band, batch, head, start, comptime!(tile.block() as u32));
    for nth_run in 0..runs.count {
        let run = runs.run(nth_run);
        let visit = Visit { start: run.from, fully_visible: false.runtime(), masked: run.masked };
        let at = of_head.tile(start, &visit, false);
        for j in run.from..run.to {
            let key = read(&k, j, head_dim);
            #[unroll]
            for nth in 0..rows {
                let t = scores.score.of(dot(&held, &key, nth, head_dim));
                let row = row_of(start, comptime!(nth as u32).runtime(), tile);
                let seen = apply_score_mod(t, &scores, &at, row, j, careful);
                let highest = raised(m[nth], seen, Rescale::Always);
                let alpha = f32::exp(m[nth] - highest);
                let p = weight(seen, highest);
                m[nth] = highest;
                l[nth] = fma(l[nth], alpha, p);
                let kept = extras.dropout.keeps_of(&band, batch as u32, head as u32, row, j, false);
                s[nth] = extras.dropout.apply(p, kept);
                scale(&mut acc, alpha, nth, head_dim_v);
            }
            let value = read(&v, j, head_dim_v);
            #[unroll]
            for nth in 0..rows {
                add(&mut acc, s[nth], &value, nth, head_dim_v, careful);
            }
        }
    }

    let lse = outputs.lse;
    #[unroll]
    for nth in 0..rows {
        let row = row_of(start, comptime!(nth as u32).runtime(), tile);
        if band.is_query(row) {
            let at = row_start(&*lse, batch, head, row);
            lse[at] = lse_bits(m[nth], l[nth]);
        }
        l[nth] = normalizer(l[nth]) * extras.dropout.scale();
    }
    write(outputs.o, &work.rows(false), &acc, &l, head_dim_v, tile);
}

/// Score of a pair, from `t`, the result of [`Score::of`](crate::score::Score::of). Hidden pairs get
/// [`HIDDEN`](crate::softmax::HIDDEN).
#[cube]
pub fn apply_score_mod<F: Float, M: Numeric>(
    t: f32,
    scores: &ScalarScores<F, M>,
    at: &TileAt,
    row: u32,
    column: u32,
    #[comptime] careful: bool,
) -> f32 {
    let mut value = t;
    if comptime!(careful || scores.bias.is_some() || scores.score.differs()) {
        value = scores.masked_score(t, at, row, column);
    }
    value
}
