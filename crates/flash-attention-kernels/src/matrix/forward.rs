//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each tile of keys that the queries see:
//!     S = Q Kᵀ → board, turned into scores by the threads of a row      m' = max(m, rowmax S)
//!     P = exp(S − m') → weights      l = exp(m − m')·l + rowsum P      O = exp(m − m')·O + P V
//! o = O / l      lse = m + ln l
//! ```
//!
//! `m` follows the maximum only when that has grown by more than `LAZY`, since rescaling O takes it across the board. (The
//! rescaling threshold is FlashAttention-4's.)

use super::tile::*;
use super::{Blueprint, MatrixTile, WIDTH};
use crate::blocks::visits;
use crate::mask::Band;
use crate::portable::Grid;
use crate::portable::scores::{TileAt, finish_score};
use crate::portable::tile::matrix;
use crate::rounding::rounded_one;
use crate::score::Score;
use crate::softmax::{HIDDEN, begin, lse_bits, normalizer, rounded_sum, weight};
use cubecl::prelude::*;

/// By how much a maximum may grow before what was computed with it is rescaled: weights stay below `e^8`, which f16 holds.
const LAZY: f32 = 8.0;

/// `q [B, H, Sq, D]`, `k [B, Hkv, Sk, D]`, `v [B, Hkv, Sk, Dv]` to `o [B, H, Sq, Dv]` and the bits of `lse [B, H, Sq]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn forward<E: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<E, N>>,
    k: &Tensor<Vector<E, N>>,
    v: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    o: &mut Tensor<Vector<E, N>>,
    lse: &mut Tensor<u32>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let tile = comptime!(blueprint.tile);
    let (rows, columns) = comptime!((tile.rows() as u32, tile.columns as u32));
    let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
    let me = Place::here();
    let mut panels = Panels::<E>::new(blueprint);
    let work = grid.work(CUBE_POS, &score.extras, &band, rows, false);
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let q_start = work.start;
    let head_kv = work.head / grid.group_size as usize;
    let q_at = matrix(q, work.batch, work.head);
    let k_at = matrix(k, work.batch, head_kv);
    let v_at = matrix(v, work.batch, head_kv);

    let queries = operands(q, &q_at, q_start, band.after_queries(), &mut panels.k, me, head_dim, tile);
    let mut acc = accumulator(head_dim_v, tile);
    let of_unit = comptime!(tile.rows_of_unit());
    let mut m = Array::<f32>::new(of_unit);
    let mut l = Array::<f32>::new(of_unit);
    let mut top = Array::<f32>::new(of_unit);
    let mut factors = Array::<f32>::new(of_unit);
    #[unroll]
    for nth in 0..of_unit {
        let (first, sum) = begin(&score, work.head, me.vector(0usize, tile) == 0);
        m[nth] = first;
        l[nth] = sum;
        top[nth] = HIDDEN.runtime();
    }
    let slope = score.extras.slope(work.batch, work.head);

    let (extras, batch, head) = (score.extras, work.batch, work.head);
    let visits = visits(&extras, &band, batch, head, q_start, rows, columns, false);
    for nth in 0..visits.count {
        let visit = visits.tile(nth, &extras, &band, rows, columns, false);
        let (k_start, fully_visible, masked) = (visit.start, visit.fully_visible, visit.masked);
        let at = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };

        // -- the tile
        sync_cube();
        let _ = stage(k, &k_at, k_start, band.after_keys(), &mut panels.k, head_dim, tile);
        let dirty = stage(v, &v_at, k_start, band.after_keys(), &mut panels.v, head_dim_v, tile);
        tell_staged(dirty, &mut panels.flags, me);
        sync_cube();
        let dirty = was_staged(&panels.flags, tile);

        // -- P, and the rows' new maxima and sums
        scores(&queries, &panels.k, &mut panels.board, me, head_dim, tile);
        sync_plane();
        let mut grown = false.runtime();
        #[unroll]
        for nth in 0..of_unit {
            let mut s = read_row(&panels.board, me, nth, tile);
            finish_row(
                &mut s,
                &score,
                &band,
                &mask,
                &bias,
                &at,
                !fully_visible || comptime!(blueprint.bias) || comptime!(blueprint.mask) && masked,
                me,
                nth,
                tile,
            );
            let highest = row_max(&s, tile);
            top[nth] = max(top[nth], highest);
            let grows = highest - m[nth] > LAZY;
            let highest = select(grows, highest, m[nth]);
            let factor = f32::exp(m[nth] - highest);
            grown = grown || grows && l[nth] > 0.0;
            factors[nth] = factor;
            m[nth] = highest;
            l[nth] = l[nth] * factor + weigh_row(&mut s, highest, &score, &at, me, nth, tile);
            write_row(&s, &mut panels.weights, me, nth, tile);
        }
        if comptime!(blueprint.apart) {
            if plane_any(grown) {
                scale(&mut acc, &mut panels.board, &factors, me, head_dim_v, tile);
            }
        } else {
            scale(&mut acc, &mut panels.board, &factors, me, head_dim_v, tile);
        }
        sync_plane();

        // -- O
        accumulate(&mut acc, &panels.weights, &panels.v, &mut panels.board, dirty, me, head_dim_v, tile);
    }

    // -- the sums of a row meet
    let lse_at = work.batch * lse.stride(0) + work.head * lse.stride(1);
    let lse_step = lse.stride(2);
    #[unroll]
    for nth in 0..of_unit {
        let total = row_sum(l[nth], tile);
        let largest = weight(top[nth], m[nth]);
        let rounded = rounded_sum(total, largest, f32::cast_from(rounded_one::<E>(largest)));
        factors[nth] = normalizer(rounded) * score.extras.dropout.scale();
        let row = q_start + me.plane * comptime!(tile.m() as u32) + me.row(nth, tile);
        let is_first = me.vector(0usize, tile) == 0;
        if is_first && band.is_query(row) {
            lse[lse_at + row as usize * lse_step] = lse_bits(m[nth], total);
        }
    }
    let o_at = matrix(&*o, work.batch, work.head);
    write(o, &o_at, q_start, band.after_queries(), &acc, &mut panels.board, &factors, me, head_dim_v, tile);
}

/// Turns a thread's part of its `nth` row of products into scores, hidden ones into [`HIDDEN`].
#[cube]
#[allow(clippy::too_many_arguments)]
fn finish_row<E: Float, M: Numeric>(
    s: &mut Array<f32>,
    score: &Score,
    band: &Band,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<E>>,
    at: &TileAt,
    careful: bool,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] tile: MatrixTile,
) {
    #[unroll]
    for n in 0..comptime!(tile.vectors_of_unit() * WIDTH) {
        s[n] = score.of(s[n]);
    }
    if careful || comptime!(score.differs()) {
        let row = at.q_start + me.plane * comptime!(tile.m() as u32) + me.row(nth, tile);
        #[unroll]
        for i in 0..comptime!(tile.vectors_of_unit()) {
            let first = at.k_start + me.vector(i, tile) * comptime!(WIDTH as u32);
            #[unroll]
            for n in 0..WIDTH {
                let e = comptime!(i * WIDTH + n);
                s[e] = finish_score(s[e], score, band, mask, bias, at, row, first + comptime!(n as u32));
            }
        }
    }
}

/// The highest score of a row.
#[cube]
fn row_max(s: &Array<f32>, #[comptime] tile: MatrixTile) -> f32 {
    let mut highest = HIDDEN.runtime();
    #[unroll]
    for n in 0..comptime!(tile.vectors_of_unit() * WIDTH) {
        highest = max(highest, s[n]);
    }
    #[unroll]
    for step in 0..comptime!(tile.sharers().ilog2()) {
        highest = max(highest, plane_shuffle_xor(highest, comptime!(1u32 << step)));
    }
    highest
}

/// The sum of what the threads of a row have.
#[cube]
fn row_sum(part: f32, #[comptime] tile: MatrixTile) -> f32 {
    let mut sum = part;
    #[unroll]
    for step in 0..comptime!(tile.sharers().ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    sum
}

/// Turns a thread's part of its `nth` row of scores into weights, those that are kept; returns the sum of all.
#[cube]
fn weigh_row(
    s: &mut Array<f32>,
    highest: f32,
    score: &Score,
    at: &TileAt,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] tile: MatrixTile,
) -> f32 {
    let mut sum = 0.0f32.runtime();
    let row = at.q_start + me.plane * comptime!(tile.m() as u32) + me.row(nth, tile);
    #[unroll]
    for i in 0..comptime!(tile.vectors_of_unit()) {
        let first = at.k_start + me.vector(i, tile) * comptime!(WIDTH as u32);
        let kept = score.extras.dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, row, first, false);
        #[unroll]
        for n in 0..WIDTH {
            let e = comptime!(i * WIDTH + n);
            let w = weight(s[e], highest);
            sum += w;
            s[e] = score.extras.dropout.apply(w, kept & comptime!(1u32 << n) != 0);
        }
    }
    sum
}
