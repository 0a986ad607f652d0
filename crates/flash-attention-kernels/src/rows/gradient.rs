//! Gradients: `dq`, one thread block for each block of queries of a head, or `dk` and `dv`, one for each block of keys.
//!
//! ```text
//! Dq      for each key that queries of the block see:
//!             s = Q k    dp = dO v    p = exp(s − lse)    ds = p ∘ (dp − delta) ∘ factor   dQ += ds k
//! DkDv    for each query head of the group and each of its queries that see keys of the block:
//!             s = K q    dp = V do    p = exp(s − lse)    ds = p ∘ (dp − delta) ∘ factor   dK += ds q    dV += p do
//! ```
//!
//! The second is the first with queries and keys in each other's places and one product more; what each tensor is called here:
//! [`Role`](crate::matrix::Role). Band, mask and bias come with their sides exchanged as well, so that "query" always is a row.
//! (FlashAttention-2, arXiv:2307.08691, algorithm 2.) Every sum is taken in a fixed order.

use super::Blueprint;
use super::forward::finish;
use super::row::*;
use crate::blocks::runs;
use crate::mask::Band;
use crate::portable::Grid;
use crate::portable::gradient::zeros;
use crate::portable::scores::TileAt;
use crate::portable::tile::matrix;
use crate::score::{Factor, Score};
use crate::softmax::weight;
use cubecl::prelude::*;

/// Rows `q`, `d` and columns `k`, `v`, all `[B, H, S, D]` or `[…, Dv]` as [`Role`](crate::matrix::Role) names them, with
/// `stats [2, B · H · Sq]` to `dk`, of the shape of `q`, and `dv`, of that of `d`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn gradient<F: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<F, N>>,
    d: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    stats: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    dk: ComptimeOption<&mut Tensor<Vector<F, N>>>,
    dv: ComptimeOption<&mut Tensor<Vector<F, N>>>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, role, careful) = comptime!((blueprint.tile, blueprint.role, blueprint.careful));
    let (transposed, differentiates) = comptime!((role.is_transposed(), role.differentiates()));
    let rows = comptime!(tile.rows);
    let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
    let work = grid.work(CUBE_POS, &score.extras, &band, comptime!(tile.block() as u32), transposed);
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let start = work.start;
    let group_size = grid.group_size as usize;

    let held = hold(q, &matrix(q, work.batch, work.head), start, &band, head_dim, tile);
    let held_d = if differentiates {
        hold(d, &matrix(d, work.batch, work.head), start, &band, head_dim_v, tile)
    } else {
        Array::new(1usize)
    };
    let mut acc = zeros(comptime!(if differentiates { rows * vectors(head_dim) } else { 1 }));
    let mut acc_v = zeros(comptime!(if dv.is_some() { rows * vectors(head_dim_v) } else { 1 }));

    // Where queries are rows, each has its lse and delta for good.
    let stats_rows = stats.shape(1);
    let mut lse = Array::<f32>::new(rows);
    let mut delta = Array::<f32>::new(rows);
    if comptime!(!transposed) {
        let stats_row = (work.batch * grid.heads as usize + work.head) * band.seq_q as usize;
        #[unroll]
        for nth in 0..rows {
            let i = stats_row + band.query_within(row_of(start, comptime!(nth as u32).runtime(), tile)) as usize;
            lse[nth] = stats[i];
            delta[nth] = stats[stats_rows + i];
        }
    }

    // Heads that stream by: the query heads of a key head, or the key head of a query head.
    let streams = if transposed { group_size } else { 1usize.runtime() };
    let (extras, batch) = (score.extras, work.batch);
    for member in 0..streams {
        let stream = if transposed { work.head * group_size + member } else { work.head / group_size };
        let head = if transposed { stream } else { work.head };
        let k_at = matrix(k, work.batch, stream);
        let v_at = matrix(v, work.batch, stream);
        let stats_row = (work.batch * grid.heads as usize * group_size + head) * band.seq_k as usize;
        let slope = score.extras.slope(work.batch, head);
        let runs = runs(&extras, &band, batch, head, start, comptime!(tile.block() as u32));
        for nth_run in 0..runs.count {
            let run = runs.run(nth_run, &extras, &band, comptime!(tile.block() as u32));
            let masked = run.masked;
            let at = TileAt { batch, head, q_start: start, k_start: 0u32, slope, band, masked, transposed };
            for j in run.from..run.to {
                if comptime!(transposed) {
                    let i = stats_row + j as usize;
                    let (of, mean) = (stats[i], stats[stats_rows + i]);
                    #[unroll]
                    for nth in 0..rows {
                        lse[nth] = of;
                        delta[nth] = mean;
                    }
                }
                let column = read(k, &k_at, j, head_dim);
                let column_v = read(v, &v_at, j, head_dim_v);
                #[unroll]
                for nth in 0..rows {
                    let t = score.of(dot(&held, &column, nth, head_dim));
                    let row = row_of(start, comptime!(nth as u32).runtime(), tile);
                    let p = weight(finish(t, &score, &band, &mask, &bias, &at, row, j, careful), lse[nth]);
                    let dropout = &score.extras.dropout;
                    let kept = dropout.keeps_of(&band, work.batch as u32, head as u32, row, j, transposed);
                    if comptime!(dv.is_some()) {
                        add(&mut acc_v, score.extras.dropout.apply(p, kept), &column_v, nth, head_dim_v, careful);
                    }
                    if differentiates {
                        let dp = score.extras.dropout.backward(dot(&held_d, &column_v, nth, head_dim_v), kept);
                        let mut ds = p * (dp - delta[nth]);
                        if comptime!(blueprint.factor != Factor::One) {
                            ds *= score.factor(t, &at.place(row, j), &band, blueprint.factor);
                        }
                        // What is hidden has no gradient, whatever dO and V hold there.
                        add(&mut acc, select(p == 0.0f32, 0.0f32, ds), &column, nth, head_dim, careful);
                    }
                }
            }
        }
    }

    let mut factors = Array::<f32>::new(rows);
    #[comptime]
    if let ComptimeOption::Some(dk) = dk {
        #[unroll]
        for nth in 0..rows {
            factors[nth] = score.scale;
        }
        let at = matrix(&*dk, work.batch, work.head);
        write(dk, &at, start, &band, &acc, &factors, head_dim, tile);
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = dv {
        #[unroll]
        for nth in 0..rows {
            factors[nth] = score.extras.dropout.scale();
        }
        let at = matrix(&*dv, work.batch, work.head);
        write(dv, &at, start, &band, &acc_v, &factors, head_dim_v, tile);
    }
}
