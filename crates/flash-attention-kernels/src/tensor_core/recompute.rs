//! Recomputation of single rows, key by key. A warp computes each row, slowly. Sums are f32. Two kinds of rows need it:
//!
//! - A hidden key has weight 0, but 0 times a value that is NaN or infinite is NaN. Products of whole tiles let such a value
//!   reach rows that must not see it. These rows are found by a non-finite O with a finite log-sum-exp. Rows that do see the
//!   value get the same non-finite result again. The same applies to gradients, where hidden rows of every operand count.
//! - Exponentials relative to a reference maximum overflow f32 if a score is more than 72 above all scores of the tiles before,
//!   which is far beyond the range in which a softmax distinguishes scores. These rows are found by a sum of +∞.

mod pairs;
mod products;

pub use pairs::{RecomputedPair, recompute_sum};

use super::Blueprint;
use super::operands::{GradientOutputs, KeyRow, LseOut, RowsOut, SourceSides, Sources};
use super::rows::store_row_of;
use super::schedule::{TileScheduler, visits_of_block};
use super::scores::{Exponent, score_of_pair};
use super::softmax::sink_log2;
use super::statistics::RowStatistics;
use crate::blocks::Visit;
use crate::dtype::Dtype;
use crate::e4m3::{KvStorage, decode_word};
use crate::extras::Extras;
use crate::fragment::{Scores, filled};
use crate::mask::Band;
use crate::mods::Place;
use crate::ptx::{ex2, fma_packed, lg2, load_words, pack};
use crate::softmax::{HIDDEN, Rescale, lse_bits_log2, raised};
use cubecl::prelude::*;
use pairs::recomputed_pair;
use products::{dot, products_with_keys};

/// Number of keys processed at a time: one for each thread of a warp.
const KEYS: u32 = 32;

/// Whether this thread's elements of one of its two rows of an accumulator are finite.
#[cube]
pub fn is_finite_row(sums: &Array<f32>, #[comptime] row: usize, #[comptime] columns: usize) -> bool {
    let mut trace = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(columns / 8) {
        trace = fma(sums[comptime!(4 * i + 2 * row)], 0.0f32, trace);
        trace = fma(sums[comptime!(4 * i + 2 * row + 1)], 0.0f32, trace);
    }
    trace == 0.0f32
}

/// Looks up a group of keys from `start` on, and among them this thread's, in the list of the row's block. In the result,
/// `fully_visible` tells whether the key is visited at all, and `masked` whether mask and `mask_mod` must be applied.
#[cube]
fn visit_of_run(
    extras: &Extras,
    band: &Band,
    batch: usize,
    head: usize,
    row: u32,
    start: u32,
    #[comptime] blueprint: Blueprint,
) -> Visit {
    if comptime!(blueprint.sparse) {
        let columns = comptime!(blueprint.tile.tile_k as u32);
        let visits = visits_of_block(extras, band, batch, head, row, blueprint);
        // Keys of a run may belong to several small tiles, or to two tiles if tiles begin where a sequence does.
        let several = comptime!(columns < KEYS || band.varlen);
        let key = if comptime!(several) { start + UNIT_POS % 32 } else { start };
        let first = band.first_key();
        let nth = visits.find(first + (key - first) / columns * columns);
        let visit = visits.tile(nth);
        Visit { start, fully_visible: nth < visits.count, masked: visit.masked }
    } else {
        Visit { start, fully_visible: true.runtime(), masked: true.runtime() }
    }
}

/// Whether this thread's elements of a packed row are finite.
#[cube]
pub fn is_finite(words: &Array<u32>, #[comptime] blueprint: Blueprint) -> bool {
    let mut trace = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(blueprint.columns() / 8) {
        // 0 times a non-finite number is NaN; −0 added to 0 is 0.
        trace = fma_packed(words[i], 0u32.runtime(), trace, blueprint.dtype);
    }
    trace == 0
}

/// A row of the output to recompute, from key `first` up to, not including, key `after`. Its exponentials are relative to `m`,
/// and their sum is `l`. If `l` is +∞, both are recomputed too.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct LostRow {
    /// Batch.
    pub batch: usize,
    /// Batch of the outputs.
    pub batch_out: usize,
    /// Query head.
    pub head: usize,
    /// Key/value head.
    pub head_kv: usize,
    /// Query.
    pub row: u32,
    /// First key.
    pub first: u32,
    /// One past the last key.
    pub after: u32,
    /// Base-2 exponent that the exponentials are relative to.
    pub m: f32,
    /// Sum of the exponentials.
    pub l: f32,
    /// The band of the sequence.
    pub band: Band,
}

/// The score of the row and this thread's key as a base-2 exponent. It is not visible if the key is at or past `after`.
#[cube]
fn exponents<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: &Sources<E, N>,
    scores: &Scores<E, M, NB, NM>,
    of: &LostRow,
    key: u32,
    after: u32,
    masked: bool,
    #[comptime] blueprint: Blueprint,
) -> Exponent {
    let mut value = 0.0f32.runtime();
    let mut visible = false.runtime();
    let derivative = 1.0f32.runtime();
    let mut product = 0.0f32.runtime();
    if comptime!(blueprint.dtype != Dtype::F32) {
        product = products_with_keys(sources, &scores.score.extras, of, key - UNIT_POS % 32, blueprint);
    }
    if key < after && of.band.sees(of.row, key) {
        if comptime!(blueprint.dtype == Dtype::F32) {
            let q_at = sources.q.stride.at(of.batch, of.head, of.row);
            let k_at = sources.k.stride.of_key(&scores.score.extras, of.batch, of.head_kv, key);
            product = dot(sources.q.data, q_at, sources.k.data, k_at, blueprint.head_dim, blueprint);
        }
        let place = Place::new(of.batch as u32, of.head as u32, &of.band, of.row, key, false);
        let exponent = score_of_pair(product, scores, &place, masked, &of.band, blueprint);
        value = exponent.value;
        visible = exponent.visible;
    }
    Exponent { value, visible, derivative, argument: 0.0f32.runtime() }
}

/// Computes one row of `o`, and the bits of its `lse` if its sum was lost. The whole warp must call it.
#[cube]
pub fn recompute_row<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: &Sources<E, N>,
    scores: &Scores<E, M, NB, NM>,
    out: &mut RowsOut,
    lse: &mut LseOut,
    of: &LostRow,
    #[comptime] blueprint: Blueprint,
) {
    let lane = UNIT_POS % 32;
    let (extras, band) = (scores.score.extras, of.band);
    let (batch, head, row) = (of.batch, of.head, of.row);
    // Each thread holds eight columns of O.
    let mut o = filled::<f32>(0.0f32, 8usize);
    // Warp-uniform branches are decided by votes. The assembler then knows that the warp does not diverge, and guards no
    // shuffle here or in the caller's loop.
    let lost = of.l == f32::INFINITY;
    // A row with `l = 0` sees nothing, or only scores of −∞. Its exponentials, relative to −∞, would all be NaN.
    let after = select(of.l == 0.0f32, of.first, of.after);
    let mut of_row = of.m + lg2(of.l);
    // Maximum and sum over this thread's keys while they are recomputed. Thread 0 includes the sink.
    let sink = sink_log2(&extras, head as u32, comptime!(!blueprint.split_keys));
    let mut m = select(lane == 0, sink, HIDDEN);
    let mut l = select(m == HIDDEN, 0.0f32, 1.0f32);
    for round in select(lost, 0u32, 1u32)..2u32 {
        let mut start = of.first;
        while plane_any(start < after) {
            let key = start + lane;
            let visit = visit_of_run(&extras, &band, batch, head, row, start, blueprint);
            // Keys that are not visited are not visible.
            let after = select(visit.fully_visible, after, 0u32);
            let exponent = exponents(sources, scores, of, key, after, visit.masked, blueprint);
            let sees = exponent.visible;
            if round == 0 {
                let higher = select(sees, raised(m, exponent.value, Rescale::Always), m);
                let p = select(sees, ex2(exponent.value - higher), 0.0f32);
                l = fma(l, ex2(m - higher), p);
                m = higher;
            } else {
                let kept = extras.dropout.keeps_of(&band, batch as u32, head as u32, row, key, false);
                let p = select(sees, extras.dropout.apply(ex2(exponent.value - of_row), kept), 0.0f32);
                for n in 0..KEYS {
                    let p = plane_shuffle(p, n);
                    if plane_any(lane == n && sees) {
                        let (wide, storage) = comptime!((blueprint.head_dim_v, blueprint.storage));
                        let key = sources.v.key(&extras, batch, of.head_kv, start + n, wide, storage);
                        if comptime!(storage == KvStorage::E4m3) {
                            add_narrow_row(&mut o, p, sources.v.data, key, wide);
                        } else {
                            add_row(&mut o, p, sources.v.data, key.at, wide, blueprint.vector());
                        }
                    }
                }
            }
            start += KEYS;
        }
        if round == 0 {
            let highest = plane_max(m);
            l = plane_sum(l * ex2(m - highest));
            of_row = highest + lg2(l);
            if lane == 0 {
                let at = lse.stride.at(of.batch_out, head, row);
                lse.data[at] = lse_bits_log2(highest, l, lg2(l));
            }
        }
    }
    let at = out.stride.at(of.batch_out, head, row);
    write_row(&o, out, at, extras.dropout.scale(), blueprint.head_dim_v, blueprint);
}

/// Writes a row of `wide` columns, multiplied by `factor`, to `out` from vector `at` on. Each thread holds eight columns.
#[cube]
fn write_row(
    o: &Array<f32>,
    out: &mut RowsOut,
    at: usize,
    factor: f32,
    #[comptime] wide: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (f32_out, dtype) = comptime!((blueprint.writes_f32(), blueprint.dtype));
    let columns = comptime!(wide.next_multiple_of(blueprint.vector()) as u32);
    let lane = UNIT_POS % 32;
    // Columns of an 8-byte vector.
    let of_vector = comptime!(if f32_out { 2usize } else { 4usize });
    let at = at + comptime!(8 / of_vector) * lane as usize;
    #[unroll]
    for nth in 0..comptime!(8 / of_vector) {
        let mut vector = Vector::<u32, Const<2>>::empty();
        #[unroll]
        for e in 0..2usize {
            if comptime!(f32_out) {
                vector.insert(e, u32::reinterpret(o[comptime!(2 * nth + e)] * factor));
            } else {
                let column = comptime!(4 * nth + 2 * e);
                vector.insert(e, pack(o[column] * factor, o[column + 1] * factor, dtype));
            }
        }
        if 8 * lane + comptime!((nth * of_vector) as u32) < columns {
            out.data[at + nth] = vector;
        }
    }
}

/// Whether all of this thread's columns below `wide` are NaN. Each thread holds eight columns.
#[cube]
fn is_lost(sums: &Array<f32>, #[comptime] wide: usize) -> bool {
    let column = 8 * (UNIT_POS % 32);
    let mut numbers = 0u32.runtime();
    #[unroll]
    for e in 0..8usize {
        let counts = column + comptime!(e as u32) < comptime!(wide as u32);
        numbers += select(counts, u32::cast_from(sums[e] <= f32::INFINITY), 0u32);
    }
    numbers == 0
}

/// Adds `factor` times eight columns of a row to `sums`. The row starts at vector `row` and has `wide` columns. Threads beyond
/// the last column add the last vector, and their result is never written.
#[cube]
fn add_row<E: Float, N: Size>(
    sums: &mut Array<f32>,
    factor: f32,
    rows: &[Vector<E, N>],
    row: usize,
    #[comptime] wide: usize,
    #[comptime] vector: usize,
) {
    let (each, last) = comptime!((8 / vector, wide.div_ceil(vector) - 1));
    let first = (UNIT_POS % 32) as usize * each;
    #[unroll]
    for nth in 0..each {
        let values = rows[row + min(first + nth, last)];
        #[unroll]
        for e in 0..vector {
            let n = comptime!(nth * vector + e);
            sums[n] = fma(factor, f32::cast_from(values.extract(e)), sums[n]);
        }
    }
}

/// [`add_row()`] of a row in e4m3.
#[cube]
fn add_narrow_row<E: Float, N: Size>(
    sums: &mut Array<f32>,
    factor: f32,
    rows: &[Vector<E, N>],
    row: KeyRow,
    #[comptime] wide: usize,
) {
    let lane = UNIT_POS % 32;
    let at = row.at + min((lane / 2) as usize, comptime!(wide / 16 - 1));
    let words = load_words(&rows[at..at + 1]);
    #[unroll]
    for half in 0..2usize {
        let word = select(lane % 2 == 1, *words.index(comptime!(2 + half)), *words.index(half));
        let values = decode_word(word, row.scale);
        #[unroll]
        for e in 0..4usize {
            let n = comptime!(4 * half + e);
            sums[n] = fma(factor, values.extract(e), sums[n]);
        }
    }
}

/// The 16 rows of a warp's accumulated gradients. Each thread holds parts of two.
#[derive(CubeType)]
pub struct GradientRows {
    /// Batch.
    pub batch: usize,
    /// Head of the rows.
    pub head: usize,
    /// First head of the columns: the first query head of the group, or the key/value head.
    pub first_kv: u32,
    /// One past the last head of the columns.
    pub after_kv: u32,
    /// First row of the warp.
    pub first_row: u32,
    /// The band of the sequence.
    pub band: Band,
    /// Whether this thread's elements of its two rows are finite.
    finite: Array<bool>,
}

#[cube]
impl GradientRows {
    /// The rows from `first_row` on, of which nothing has been stored.
    pub fn new(batch: usize, head: usize, first_row: u32, band: Band) -> GradientRows {
        let finite = filled::<bool>(true.runtime(), 2usize);
        let none = 0u32.runtime();
        GradientRows { batch, head, first_kv: none, after_kv: none, first_row, band, finite }
    }

    /// Sets the heads of the columns, which [`GradientRows::recompute`] reads. They are set last, because registers are scarce.
    pub fn set_columns(&mut self, first_kv: u32, after_kv: u32) {
        self.first_kv = first_kv;
        self.after_kv = after_kv;
    }

    /// Writes the rows that exist of an accumulator, multiplied by `factor`, to `out`, `offset` vectors after their first one.
    pub fn store(
        &self,
        sums: &Array<f32>,
        out: &mut RowsOut,
        offset: usize,
        factor: f32,
        #[comptime] wide: usize,
        #[comptime] dtype: Dtype,
    ) {
        let row = self.first_row + UNIT_POS % 32 / 4;
        let at = out.stride.at(self.batch, self.head, row) + offset;
        #[unroll]
        for r in 0..2usize {
            let (at, live) =
                (at + comptime!(8 * r) * out.stride.row, self.band.is_query(row + comptime!(8 * r as u32)));
            store_row_of(sums, r, factor, out, at, live, wide, dtype);
        }
    }

    /// Notes which rows of an accumulator of `columns` columns are not finite.
    pub fn check(&mut self, sums: &Array<f32>, #[comptime] columns: usize) {
        #[unroll]
        for r in 0..2usize {
            let finite = is_finite_row(sums, r, columns);
            self.finite[r] = self.finite[r] && finite;
        }
    }

    /// Recomputes the stored rows that a hidden NaN or infinity has reached, as the gradient kernels compute them. Rows whose own lse or
    /// delta is not finite are left as they are. The whole warp must call it.
    pub fn recompute<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
        &self,
        of_rows: &RowStatistics,
        sources: &SourceSides<E, N>,
        scores: &Scores<E, M, NB, NM>,
        out: &mut GradientOutputs,
        stats: &[u32],
        scheduler: &TileScheduler,
        #[comptime] blueprint: Blueprint,
    ) {
        let lane = UNIT_POS % 32;
        let mut again = Array::<bool>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let live = self.band.is_query(self.first_row + lane / 4 + comptime!(8 * r as u32));
            let (lse, delta) = (of_rows.lse[r], of_rows.delta[r]);
            again[r] = live && !self.finite[r] && lse * delta * 0.0f32 == 0.0f32;
        }
        if plane_any(again[0] || again[1]) {
            // The stores of other threads to these rows must come first.
            sync_plane();
            for of_warp in 0..16u32 {
                let again = select(of_warp >= 8, again[1], again[0]);
                if plane_any(lane / 4 == of_warp % 8 && again) {
                    let row = self.first_row + of_warp;
                    recompute_gradient(sources, scores, out, stats, scheduler, self, row, blueprint);
                }
            }
        }
    }
}

/// Computes one row of the gradients. The whole warp must call it.
#[cube]
pub fn recompute_gradient<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: &SourceSides<E, N>,
    scores: &Scores<E, M, NB, NM>,
    out: &mut GradientOutputs,
    stats: &[u32],
    scheduler: &TileScheduler,
    of: &GradientRows,
    row: u32,
    #[comptime] blueprint: Blueprint,
) {
    let (accumulates, sums_values) = comptime!((blueprint.accumulates(), blueprint.sums_values()));
    let (extras, band, cols) = (scores.score.extras, of.band, sources.cols);
    let (batch, head) = (of.batch, of.head);
    let lane = UNIT_POS % 32;
    let mut sum_k = filled::<f32>(0.0f32, 8usize);
    let mut sum_v = filled::<f32>(0.0f32, 8usize);
    let seen = band.k_blocks(row, 1u32, KEYS);
    for head_kv in of.first_kv..of.after_kv {
        let after = seen.origin + seen.end * KEYS;
        let mut start = seen.origin + seen.start * KEYS;
        while plane_any(start < after) {
            let pair = recomputed_pair(sources, scores, stats, scheduler, of, head_kv, row, start, after, blueprint);
            let ds = select(pair.visible, pair.dt * pair.derivative, 0.0f32);
            for n in 0..KEYS {
                let (p, ds) = (plane_shuffle(pair.p, n), plane_shuffle(ds, n));
                if plane_any(lane == n && pair.visible) {
                    if comptime!(accumulates) {
                        let at = cols.qk.stride.at(batch, head_kv as usize, start + n);
                        add_row(&mut sum_k, ds, cols.qk.data, at, blueprint.head_dim, blueprint.vector());
                    }
                    if comptime!(sums_values) {
                        let at = cols.dov.stride.at(batch, head_kv as usize, start + n);
                        add_row(&mut sum_v, p, cols.dov.data, at, blueprint.head_dim_v, blueprint.vector());
                    }
                }
            }
            start += KEYS;
            // If every element is NaN, the result is final. Without this exit, every row of an all-NaN tensor would be
            // recomputed in full.
            let lost = (comptime!(!accumulates) || is_lost(&sum_k, blueprint.head_dim))
                && (comptime!(!sums_values) || is_lost(&sum_v, blueprint.head_dim_v));
            if plane_all(lost) {
                start = after;
            }
        }
    }
    if comptime!(accumulates) {
        let at = out.dqk.stride.at(batch, head, row);
        write_row(&sum_k, &mut out.dqk, at, scores.score.scale, blueprint.head_dim, blueprint);
    }
    if comptime!(sums_values) {
        let at = out.dv.stride.at(batch, head, row);
        write_row(&sum_v, &mut out.dv, at, extras.dropout.scale(), blueprint.head_dim_v, blueprint);
    }
}
