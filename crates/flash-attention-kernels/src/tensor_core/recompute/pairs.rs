//! Pairs of recomputed rows in gradients: probability and gradient of the score.

use super::super::Blueprint;
use super::super::operands::{SourceSides, SumsOut};
use super::super::schedule::TileScheduler;
use super::super::scores::score_of_pair;
use super::super::statistics::{stats_all, stats_at};
use super::products::dot;
use super::{GradientRows, KEYS, visit_of_run};
use crate::fragment::{Scores, filled};
use crate::mods::Place;
use crate::ptx::ex2;
use crate::softmax::softmax_backward;
use cubecl::prelude::*;

/// A pair of a recomputed row. If it is not visible, everything is 0.
#[derive(CubeType, Clone)]
pub struct RecomputedPair {
    /// Whether the row sees the column.
    pub visible: bool,
    /// Probability after dropout, without the factor `1 / (1 − p)`.
    pub p: f32,
    /// Gradient of the score, in kernels that compute `dS`.
    pub dt: f32,
    /// Derivative of softcap and `score_mod`, in kernels that accumulate dQ or dK.
    pub derivative: f32,
    /// The argument of `score_mod`.
    pub argument: f32,
}

/// The pair of a row and this thread's column of those from `start` up to, not including, `after`. Columns belong to head `head_kv`.
#[cube]
pub fn recomputed_pair<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: &SourceSides<E, N>,
    scores: &Scores<E, M, NB, NM>,
    stats: &[u32],
    scheduler: &TileScheduler,
    of: &GradientRows,
    head_kv: u32,
    row: u32,
    start: u32,
    after: u32,
    #[comptime] blueprint: Blueprint,
) -> RecomputedPair {
    let (extras, band, batch, head) = (scores.score.extras, of.band, of.batch, of.head);
    let (rows, cols) = (sources.rows, sources.cols);
    let key = start + UNIT_POS % 32;
    let mut visible = false.runtime();
    let mut p = 0.0f32.runtime();
    let mut dt = 0.0f32.runtime();
    let mut derivative = 0.0f32.runtime();
    let mut argument = 0.0f32.runtime();
    let head_q = if comptime!(blueprint.transposed()) { head_kv as usize } else { head };
    let visit = visit_of_run(&extras, &band, batch, head_q, row, start, blueprint);
    let sees = visit.fully_visible && band.sees(row, key);
    if key < after && sees {
        let query = if comptime!(blueprint.transposed()) { key } else { row };
        let at = stats_at(&band, scheduler, batch as u32, head_q as u32, query, blueprint);
        let row_at = rows.qk.stride.at(batch, head, row);
        let col_at = cols.qk.stride.at(batch, head_kv as usize, key);
        let product = dot(rows.qk.data, row_at, cols.qk.data, col_at, blueprint.head_dim, blueprint);
        let place = Place::new(batch as u32, head_q as u32, &band, row, key, blueprint.transposed());
        let exponent = score_of_pair(product, scores, &place, visit.masked, &band, blueprint);
        visible = exponent.visible;
        let kept = extras.dropout.keeps_of(&band, batch as u32, head_q as u32, row, key, blueprint.transposed());
        let probability = select(visible, ex2(exponent.value - f32::reinterpret(stats[at])), 0.0f32);
        p = extras.dropout.apply(probability, kept);
        derivative = exponent.derivative;
        argument = exponent.argument;
        if comptime!(blueprint.differentiates()) {
            let row_at = rows.dov.stride.at(batch, head, row);
            let col_at = cols.dov.stride.at(batch, head_kv as usize, key);
            let dp = dot(rows.dov.data, row_at, cols.dov.data, col_at, blueprint.head_dim_v, blueprint);
            let dp = extras.dropout.backward(dp, kept);
            let all = stats_all(&band, scheduler, blueprint);
            let delta = f32::reinterpret(stats[all + at]);
            dt = select(visible, softmax_backward(probability, dp, delta, false), 0.0f32);
        }
    }
    RecomputedPair { visible, p, dt, derivative, argument }
}

/// Computes one row's [sums](crate::tensor_core::RowSums) over the columns of the head that `of` has been set to. The whole warp must call it.
#[cube]
pub fn recompute_sum<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: &SourceSides<E, N>,
    scores: &Scores<E, M, NB, NM>,
    out: &mut SumsOut,
    stats: &[u32],
    scheduler: &TileScheduler,
    of: &GradientRows,
    row: u32,
    #[comptime] blueprint: Blueprint,
) {
    let (lane, head_kv) = (UNIT_POS % 32, of.first_kv);
    let (band, count) = (of.band, comptime!(blueprint.sums.len()));
    let head = if comptime!(blueprint.transposed()) { head_kv as usize } else { of.head };
    let mut sums = filled::<f32>(0.0f32, count);
    let seen = band.k_blocks(row, 1u32, KEYS);
    let after = seen.origin + seen.end * KEYS;
    let mut start = seen.origin + seen.start * KEYS;
    while plane_any(start < after) {
        let pair = recomputed_pair(sources, scores, stats, scheduler, of, head_kv, row, start, after, blueprint);
        let place = Place::new(of.batch as u32, head as u32, &band, row, start + lane, blueprint.transposed());
        let mut numbers = 0u32.runtime();
        #[unroll]
        for nth in 0..count {
            let factor = scores.score.factor(pair.argument, &place, &band, comptime!(blueprint.sums.nth(nth)));
            sums[nth] += select(pair.visible, pair.dt * factor, 0.0f32);
            numbers += u32::cast_from(sums[nth] <= f32::INFINITY);
        }
        start += KEYS;
        // If every sum is NaN, the result is final.
        if plane_any(numbers == 0) {
            start = after;
        }
    }
    #[unroll]
    for nth in 0..count {
        let sum = plane_sum(sums[nth]);
        if lane == 0 {
            let at = out.at(nth, of.batch, head, row);
            out.data[at] = sum;
        }
    }
}
