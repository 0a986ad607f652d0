//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each key that queries of the block see:
//!     s = Q k      m' = max(m, s)      p = exp(s − m')      l = exp(m − m')·l + p      O = exp(m − m')·O + p v
//! o = O / l        lse = m + ln l
//! ```

use super::Blueprint;
use super::row::*;
use crate::blocks::runs;
use crate::mask::Band;
use crate::portable::Grid;
use crate::portable::gradient::zeros;
use crate::portable::scores::{TileAt, finish_score};
use crate::portable::tile::matrix;
use crate::score::Score;
use crate::softmax::{begin, lse_bits, normalizer, weight};
use cubecl::prelude::*;

/// `q [B, H, Sq, D]`, `k [B, Hkv, Sk, D]`, `v [B, Hkv, Sk, Dv]` to `o [B, H, Sq, Dv]` and the bits of `lse [B, H, Sq]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn forward<F: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    o: &mut Tensor<Vector<F, N>>,
    lse: &mut Tensor<u32>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, careful) = comptime!((blueprint.tile, blueprint.careful));
    let rows = comptime!(tile.rows);
    let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
    let work = grid.work(CUBE_POS, &score.extras, &band, comptime!(tile.block() as u32), false);
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let start = work.start;
    let head_kv = work.head / grid.group_size as usize;
    let k_at = matrix(k, work.batch, head_kv);
    let v_at = matrix(v, work.batch, head_kv);

    let held = hold(q, &matrix(q, work.batch, work.head), start, &band, head_dim, tile);
    let mut acc = zeros(comptime!(rows * vectors(head_dim_v)));
    let mut s = Array::<f32>::new(rows);
    let mut m = Array::<f32>::new(rows);
    let mut l = Array::<f32>::new(rows);
    #[unroll]
    for nth in 0..rows {
        let (first, sum) = begin(&score, work.head, true.runtime());
        m[nth] = first;
        l[nth] = sum;
    }

    let slope = score.extras.slope(work.batch, work.head);
    let (extras, batch, head) = (score.extras, work.batch, work.head);
    let runs = runs(&extras, &band, batch, head, start, comptime!(tile.block() as u32));
    for nth_run in 0..runs.count {
        let run = runs.run(nth_run, &extras, &band, comptime!(tile.block() as u32));
        let masked = run.masked;
        let at = TileAt { batch, head, q_start: start, k_start: 0u32, slope, band, masked, transposed: false };
        for j in run.from..run.to {
            let key = read(k, &k_at, j, head_dim);
            #[unroll]
            for nth in 0..rows {
                let t = score.of(dot(&held, &key, nth, head_dim));
                let row = row_of(start, comptime!(nth as u32).runtime(), tile);
                let seen = finish(t, &score, &band, &mask, &bias, &at, row, j, careful);
                let highest = max(m[nth], seen);
                let alpha = f32::exp(m[nth] - highest);
                let p = weight(seen, highest);
                m[nth] = highest;
                l[nth] = fma(l[nth], alpha, p);
                let kept = score.extras.dropout.keeps_of(&at.band, at.batch as u32, at.head as u32, row, j, false);
                s[nth] = score.extras.dropout.apply(p, kept);
                scale(&mut acc, alpha, nth, head_dim_v);
            }
            let value = read(v, &v_at, j, head_dim_v);
            #[unroll]
            for nth in 0..rows {
                add(&mut acc, s[nth], &value, nth, head_dim_v, careful);
            }
        }
    }

    let lse_at = work.batch * lse.stride(0) + work.head * lse.stride(1);
    let lse_step = lse.stride(2);
    #[unroll]
    for nth in 0..rows {
        let row = row_of(start, comptime!(nth as u32).runtime(), tile);
        if band.is_query(row) {
            lse[lse_at + row as usize * lse_step] = lse_bits(m[nth], l[nth]);
        }
        l[nth] = normalizer(l[nth]) * score.extras.dropout.scale();
    }
    let o_at = matrix(&*o, work.batch, work.head);
    write(o, &o_at, start, &band, &acc, &l, head_dim_v, tile);
}

/// The score of a pair, [`HIDDEN`](crate::softmax::HIDDEN) where it is not seen.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn finish<F: Float, M: Numeric>(
    t: f32,
    score: &Score,
    band: &Band,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<F>>,
    at: &TileAt,
    row: u32,
    column: u32,
    #[comptime] careful: bool,
) -> f32 {
    let mut value = t;
    if comptime!(careful || bias.is_some() || score.differs()) {
        value = finish_score(t, score, band, mask, bias, at, row, column);
    }
    value
}
