//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each tile of keys that the queries see:
//!     S = Q Kᵀ → board, turned into scores by the threads of a row      m' = max(m, rowmax S)
//!     P = exp(S − m') → weights      l = exp(m − m')·l + rowsum P      O = exp(m − m')·O + P V
//! o = O / l      lse = m + ln l
//! ```
//!
//! `m` is raised [lazily](Rescale::Lazily), because O goes through the board to be rescaled.

use super::tile::*;
use super::{Blueprint, MatrixTile};
use crate::blocks::{TileSize, visits};
use crate::dropout::Dropout;
use crate::fragment::{ForwardOutputs, Grid, Qkv, Rows, ScalarScores, TileAt, WIDTH, filled, row_start};
use crate::rounding::rounded_one;
use crate::score::Factor;
use crate::softmax::{HIDDEN, Rescale, lse_bits, normalizer, raised, rounded_sum, weight};
use cubecl::prelude::*;

/// Computes `o [B, H, Sq, Dv]` and the bits of `lse [B, H, Sq]` from Q, K and V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<E: Float, M: Numeric, N: Size>(
    inputs: Qkv<E, N>,
    scores: ScalarScores<E, M>,
    outputs: ForwardOutputs<E, N>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let tile = comptime!(blueprint.tile);
    let size = comptime!(TileSize { rows: tile.rows() as u32, columns: tile.columns as u32, keys: false });
    let mut panels = Panels::<E>::new(blueprint);
    let me = panels.board.me;
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, size.rows, false);
    if work.is_none {
        terminate!();
    }
    let (batch, head, band) = (work.batch, work.head, work.band);
    let head_kv = head / grid.group_size as usize;
    let of_head = scores.head(batch, head, head_kv, band, false);
    let (k, v) = (of_head.keys(inputs.k), of_head.keys(inputs.v));
    let q = Rows::of(inputs.q, batch, head, work.start, band.after_queries());

    let queries = panels.k.operands(&q);
    let mut acc = Accumulator::new(blueprint.head_dim_v, tile);
    let of_unit = comptime!(tile.rows_of_unit());
    let (first, sum) = scores.score.begin(head, me.is_first());
    let mut m = filled::<f32>(first, of_unit);
    let mut l = filled::<f32>(sum, of_unit);
    let mut top = filled::<f32>(HIDDEN.runtime(), of_unit);
    let mut factors = Array::<f32>::new(of_unit);

    let visits = visits(&extras, &band, batch, head, work.start, size);
    for nth in 0..visits.count {
        let at = of_head.tile(work.start, &visits.tile(nth), false);
        let dirty = panels.stage(&k, &v, at.k_start, false);

        // -- P, and new maxima and sums of the rows
        panels.board.products(&queries, &panels.k);
        let mut grown = false.runtime();
        #[unroll]
        for nth in 0..of_unit {
            let mut s = panels.board.read_row(nth);
            let _ = apply_score_mod(&mut s, &scores, &at, me, nth, blueprint);
            let highest = row_max(&s, tile);
            top[nth] = max(top[nth], highest);
            let highest = raised(m[nth], highest, Rescale::Lazily);
            let factor = f32::exp(m[nth] - highest);
            grown = grown || highest > m[nth] && l[nth] > 0.0;
            factors[nth] = factor;
            m[nth] = highest;
            l[nth] = l[nth] * factor + weigh_row(&mut s, highest, &extras.dropout, &at, me, nth, tile);
            panels.board.write_row(&s, nth);
        }
        if comptime!(blueprint.apart) {
            if plane_any(grown) {
                acc.scale(&mut panels.board, &factors);
            }
        } else {
            acc.scale(&mut panels.board, &factors);
        }
        sync_plane();

        // -- O
        acc.add(&mut panels.board, &panels.v, dirty);
    }

    // -- l of whole rows, lse and O / l
    let lse = outputs.lse;
    #[unroll]
    for nth in 0..of_unit {
        let total = row_sum(l[nth], tile);
        let largest = weight(top[nth], m[nth]);
        let rounded = rounded_sum(total, largest, f32::cast_from(rounded_one::<E>(largest)));
        factors[nth] = normalizer(rounded) * extras.dropout.scale();
        let row = work.start + me.row(nth);
        if me.is_first() && band.is_query(row) {
            let at = row_start(&*lse, batch, head, row);
            lse[at] = lse_bits(m[nth], total);
        }
    }
    acc.write(outputs.o, &work.rows(false), &mut panels.board, &factors);
}

/// Turns a thread's part of its `nth` row of products into scores; hidden pairs get [`HIDDEN`]. Returns the factors of the gradients of
/// the scores, if the kernel needs them.
#[cube]
pub fn apply_score_mod<E: Float, M: Numeric>(
    s: &mut Array<f32>,
    scores: &ScalarScores<E, M>,
    at: &TileAt,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] blueprint: Blueprint,
) -> Array<f32> {
    let (role, factor) = comptime!((blueprint.role, blueprint.factor));
    let (keys, has_factors) = comptime!((role.is_transposed(), role.differentiates() && factor != Factor::One));
    let len = comptime!(blueprint.tile.vectors_of_unit() * WIDTH);
    let mut factors = Array::<f32>::new(comptime!(if has_factors { len } else { 1 }));
    #[unroll]
    for n in 0..len {
        let t = scores.score.of(s[n]);
        s[n] = t;
        if comptime!(has_factors) {
            let (row, column) = me.pair(at, nth, n, keys);
            factors[n] = scores.factor(t, at, row, column, factor);
        }
    }
    if scores.need_care(at) {
        #[unroll]
        for n in 0..len {
            let (row, column) = me.pair(at, nth, n, keys);
            s[n] = scores.masked_score(s[n], at, row, column);
        }
    }
    factors
}

/// The highest score of a row, over all threads that share it.
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

/// The sum of `part` over the threads that share a row.
#[cube]
fn row_sum(part: f32, #[comptime] tile: MatrixTile) -> f32 {
    let mut sum = part;
    #[unroll]
    for step in 0..comptime!(tile.sharers().ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    sum
}

/// Turns a thread's part of its `nth` row of scores into weights, with dropout applied. Returns their sum before dropout.
#[cube]
fn weigh_row(
    s: &mut Array<f32>,
    highest: f32,
    dropout: &Dropout,
    at: &TileAt,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] tile: MatrixTile,
) -> f32 {
    let mut sum = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(tile.vectors_of_unit()) {
        let (row, first) = me.pair(at, nth, comptime!(i * WIDTH), false);
        let kept = dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, row, first, false);
        #[unroll]
        for n in 0..WIDTH {
            let e = comptime!(i * WIDTH + n);
            let w = weight(s[e], highest);
            sum += w;
            s[e] = dropout.apply(w, kept & comptime!(1u32 << n) != 0);
        }
    }
    sum
}
