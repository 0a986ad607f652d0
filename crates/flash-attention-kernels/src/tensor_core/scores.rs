//! From products in registers to scores: softcap, score_mod, bias, mask, band. [`rows`](super::rows) describes the layout of a
//! tile in registers.

mod pairs;

use super::{BlockRows, Blueprint, RowOf, Rows};
use crate::blocks::Visit;
use crate::dtype::Dtype;
use crate::fragment::Scores;
use crate::mask::Band;
use crate::mods::Place;
use crate::ptx::{ex2, lg2, multiply_rounded, multiply_subtract, opaque, pack, reciprocal, unpack};
use crate::score::Score;
use crate::softmax::UNSEEN;
use cubecl::prelude::*;
use pairs::{add_bias, hide_pairs};

/// Location of a warpgroup's tile of scores.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct ScoreTile {
    /// Batch.
    pub batch: u32,
    /// Query head: if heads are packed, that of the first of this thread's two rows.
    pub head: u32,
    /// The warpgroup's first row.
    pub first_row: u32,
    /// First column.
    pub k_start: u32,
    /// Whether mask and `mask_mod` must be applied.
    pub masked: bool,
    /// Address of the tile of a tiled bias in shared memory.
    pub bias_tile: u32,
    /// The band of the tile's sequence.
    pub band: Band,
    /// First of this thread's two rows.
    lane_row: u32,
    /// Row and head of the second one, if heads are packed.
    second: RowOf,
    /// Whether the query heads of a group are packed.
    #[cube(comptime)]
    packs: bool,
    /// First of this thread's columns.
    lane_column: u32,
    /// First 16 columns of the tile within the first panel of the bias, in units of 16 columns.
    #[cube(comptime)]
    pub sixteenth: usize,
}

#[cube]
impl ScoreTile {
    /// The tile of `visit` for the rows from `first_row` on, in this batch and query head.
    pub fn new(
        batch: u32,
        head: u32,
        band: Band,
        first_row: u32,
        visit: &Visit,
        bias_tile: u32,
        #[comptime] sixteenth: usize,
    ) -> ScoreTile {
        let lane_row = first_row + UNIT_POS / 32 % 4 * 16 + UNIT_POS % 32 / 4;
        let lane_column = visit.start + UNIT_POS % 4 * 2;
        ScoreTile {
            batch,
            head,
            first_row,
            k_start: visit.start,
            masked: visit.masked,
            bias_tile,
            band,
            lane_row,
            second: RowOf { query: lane_row, head },
            packs: false,
            lane_column,
            sixteenth,
        }
    }

    /// The tile of `visit` for 16 rows of a block, of which `lane` is the first one of this thread, in this batch.
    pub fn of_block(batch: u32, rows: &BlockRows, lane: u32, band: Band, visit: &Visit) -> ScoreTile {
        let (row, second) = (rows.at(lane), rows.at(lane + 8));
        ScoreTile {
            batch,
            head: row.head,
            first_row: row.query,
            k_start: visit.start,
            masked: visit.masked,
            bias_tile: 0u32.runtime(),
            band,
            lane_row: row.query,
            second,
            packs: comptime!(rows.packs),
            lane_column: visit.start + UNIT_POS % 4 * 2,
            sixteenth: 0usize,
        }
    }

    /// This thread's row `r`, 0 or 1.
    pub(super) fn row(&self, #[comptime] r: usize) -> u32 {
        if comptime!(self.packs && r == 1) { self.second.query } else { self.lane_row + comptime!(8 * r as u32) }
    }

    /// The query head of row `r`.
    pub(super) fn head_of(&self, #[comptime] r: usize) -> u32 {
        if comptime!(self.packs && r == 1) { self.second.head } else { self.head }
    }

    /// The same tile, whose distances the compiler computes again instead of keeping them in registers.
    pub(super) fn opaque(&self) -> ScoreTile {
        ScoreTile {
            batch: self.batch,
            head: self.head,
            first_row: self.first_row,
            k_start: self.k_start,
            masked: self.masked,
            bias_tile: self.bias_tile,
            band: self.band,
            lane_row: opaque(self.lane_row),
            second: self.second,
            packs: comptime!(self.packs),
            lane_column: self.lane_column,
            sixteenth: comptime!(self.sixteenth),
        }
    }

    /// Distance from the position of row `r` among the columns to the thread's first column, which slopes multiply.
    pub(super) fn distances(&self, #[comptime] r: usize) -> f32 {
        f32::cast_from(self.band.offset(self.row(r), self.lane_column))
    }

    /// Distance from row `r` to the thread's first column, as functions see it.
    pub(super) fn between(&self, #[comptime] r: usize, #[comptime] transposed: bool) -> f32 {
        Place::between(&self.band, self.row(r), self.lane_column, transposed)
    }

    /// The pair of the thread's row `r`, group of eight columns `i` and column `e` (0 or 1). `distance` is the distance from the
    /// row to the thread's first column.
    pub(super) fn place(
        &self,
        distance: f32,
        #[comptime] r: usize,
        #[comptime] i: usize,
        #[comptime] e: usize,
        #[comptime] transposed: bool,
    ) -> Place {
        Place {
            batch: self.batch,
            head: self.head_of(r),
            row: self.row(r),
            column: self.lane_column + comptime!((8 * i + e) as u32),
            distance: distance - comptime!((8 * i + e) as f32),
            transposed,
        }
    }
}

/// Derivatives of the modified scores with respect to the scaled products, one for each register of a tile, if they are
/// [kept](Blueprint::keeps_derivative). In half precision a word holds two.
#[derive(CubeType)]
pub struct ScoreDerivatives {
    words: Array<u32>,
    /// Arguments of `score_mod`, if they are [kept](Blueprint::keeps_arguments).
    pub arguments: Array<f32>,
}

/// Number of words for this number of registers.
fn derivative_words(blueprint: Blueprint, registers: usize) -> usize {
    match (blueprint.keeps_derivative, blueprint.dtype) {
        (false, _) => 0,
        (true, Dtype::F32) => registers,
        (true, _) => registers / 2,
    }
}

#[cube]
impl ScoreDerivatives {
    /// Multiplies the gradients `ds` by the derivatives. `p` are the probabilities: a hidden pair has gradient 0, even if the
    /// derivative of its `score_mod` is not finite.
    pub fn multiply(&self, ds: &mut Array<f32>, p: &Array<f32>, #[comptime] blueprint: Blueprint) {
        #[unroll]
        for n in 0..comptime!(blueprint.tile.tile_k / 2) {
            let derivative = if comptime!(blueprint.dtype == Dtype::F32) {
                f32::reinterpret(self.words[n])
            } else {
                unpack(self.words[comptime!(n / 2)], comptime!(n % 2 == 1), blueprint.dtype)
            };
            ds[n] = select(p[n] == 0.0f32, 0.0f32, ds[n] * derivative);
        }
    }
}

/// Turns a warpgroup's products of a tile into scores, which the softmax multiplies by `exponent`. The band is not applied yet.
/// Mask and `mask_mod` are applied only if the tile is `masked`.
#[cube]
pub fn apply_score_mod<E: Float, M: Numeric, NB: Size, NM: Size>(
    s: &mut Array<f32>,
    scores: &Scores<E, M, NB, NM>,
    tile: &ScoreTile,
    #[comptime] blueprint: Blueprint,
) -> ScoreDerivatives {
    let tile_k = comptime!(blueprint.tile.tile_k);
    if comptime!(blueprint.capped) {
        #[unroll]
        for i in 0..comptime!(tile_k / 2) {
            s[i] = capped(s[i], &scores.score);
        }
    } else if comptime!(blueprint.modified || blueprint.scores_are_scaled() && !blueprint.tiled_bias()) {
        #[unroll]
        for i in 0..comptime!(tile_k / 2) {
            s[i] *= scores.score.scale;
        }
    }
    let derivatives = modify(s, &scores.score, tile, blueprint);
    add_bias(s, scores, tile, blueprint);
    if comptime!(blueprint.sparse && blueprint.hides_pairs()) {
        if tile.masked {
            hide_pairs(s, scores, tile, blueprint);
        }
    } else {
        hide_pairs(s, scores, tile, blueprint);
    }
    derivatives
}

/// Applies `score_mod`, if there is one, and keeps its derivatives if the blueprint asks for them.
#[cube]
fn modify(s: &mut Array<f32>, score: &Score, tile: &ScoreTile, #[comptime] blueprint: Blueprint) -> ScoreDerivatives {
    let tile_k = comptime!(blueprint.tile.tile_k);
    let mut words = Array::<u32>::new(comptime!(derivative_words(blueprint, tile_k / 2)));
    let mut arguments = Array::<f32>::new(comptime!(if blueprint.keeps_arguments() { tile_k / 2 } else { 0 }));
    if comptime!(blueprint.modified) {
        let band = &tile.band;
        let transposed = comptime!(blueprint.transposed());
        #[unroll]
        for r in 0..2usize {
            let distance = tile.between(r, transposed);
            #[unroll]
            for i in 0..comptime!(tile_k / 8) {
                let first = comptime!(4 * i + 2 * r);
                if comptime!(blueprint.keeps_derivative) {
                    let mut derivatives = Array::<f32>::new(2usize);
                    #[unroll]
                    for e in 0..2usize {
                        let place = tile.place(distance, r, i, e, transposed);
                        derivatives[e] = score.derivative(s[comptime!(first + e)], &place, band);
                    }
                    if comptime!(blueprint.dtype == Dtype::F32) {
                        words[first] = u32::reinterpret(derivatives[0]);
                        words[comptime!(first + 1)] = u32::reinterpret(derivatives[1]);
                    } else {
                        words[comptime!(first / 2)] = pack(derivatives[0], derivatives[1], blueprint.dtype);
                    }
                }
                #[unroll]
                for e in 0..2usize {
                    let place = tile.place(distance, r, i, e, transposed);
                    if comptime!(blueprint.keeps_arguments()) {
                        arguments[comptime!(first + e)] = s[comptime!(first + e)];
                    }
                    s[comptime!(first + e)] = score.modified(s[comptime!(first + e)], &place, band);
                }
            }
        }
    }
    ScoreDerivatives { words, arguments }
}

/// The probability `2^(exponent · score − lse)`, with lse in base 2.
///
/// Except for bf16, the product `exponent · score` is rounded before the subtraction, as the product in lse was. A rounding
/// difference would be visible in f16 probabilities at scores in the thousands. For the only key of a row, product and lse are
/// then equal if the scale is a power of two.
#[cube]
pub fn probability_log2(score: f32, exponent: f32, lse: f32, #[comptime] dtype: Dtype) -> f32 {
    if comptime!(dtype != Dtype::BF16) {
        ex2(multiply_rounded(score, exponent) - lse)
    } else {
        ex2(multiply_subtract(score, exponent, lse))
    }
}

/// Multiplies the gradients `ds` of scores by the softcap's derivative `1 − tanh²`. The capped product is recovered from the
/// probabilities `p = 2^(exponent · (capped + bias) − lse)`, because there are no registers to keep it. `lse` has one element
/// for each register.
#[cube]
pub fn softcap_backward<E: Float, M: Numeric, NB: Size, NM: Size>(
    ds: &mut Array<f32>,
    p: &Array<f32>,
    lse: &Sequence<f32>,
    scores: &Scores<E, M, NB, NM>,
    tile: &ScoreTile,
    #[comptime] blueprint: Blueprint,
) {
    let mut t = negative_capped(p, lse, comptime!(blueprint.tile.tile_k / 2));
    add_bias(&mut t, scores, tile, blueprint);
    #[unroll]
    for n in 0..comptime!(blueprint.tile.tile_k / 2) {
        let tanh = t[n] * scores.score.per_softcap;
        // A hidden pair has gradient 0, whatever its bias is.
        ds[n] = select(p[n] == 0.0f32, 0.0f32, fma(-tanh, tanh, 1.0f32) * ds[n]);
    }
}

/// `−(capped + bias)`, recovered from probabilities.
#[cube]
fn negative_capped(p: &Array<f32>, lse: &Sequence<f32>, #[comptime] len: usize) -> Array<f32> {
    let mut t = Array::<f32>::new(len);
    #[unroll]
    for n in 0..len {
        t[n] = -(lg2(max(p[n], f32::MIN_POSITIVE)) + *lse.index(n)) * comptime!(std::f32::consts::LN_2);
    }
    t
}

/// Applies the band to a warpgroup's tile. With `fully_masked`, everything is hidden.
#[cube]
pub fn apply_mask(s: &mut Array<f32>, tile: &ScoreTile, fully_masked: bool, #[comptime] tile_k: usize) {
    #[unroll]
    for r in 0..2usize {
        let run = tile.band.run(tile.row(r), tile.lane_column, fully_masked);
        #[unroll]
        for word in 0..comptime!((tile_k / 8).div_ceil(16)) {
            // Bits are converted to predicates several at a time.
            let pairs = run.pairs(comptime!(16 * word as u32));
            #[unroll]
            for i in 0..comptime!((tile_k / 8 - 16 * word).min(16)) {
                #[unroll]
                for e in 0..2usize {
                    let n = comptime!(4 * (16 * word + i) + 2 * r + e);
                    s[n] = select(pairs & comptime!(1u32 << (2 * i + e)) != 0, s[n], UNSEEN);
                }
            }
        }
    }
}

/// A score as a base-2 exponent.
#[derive(CubeType, Clone)]
pub struct Exponent {
    /// The exponent.
    pub value: f32,
    /// Whether neither mask nor `mask_mod` hides the pair.
    pub visible: bool,
    /// Derivative of softcap and `score_mod`, in kernels that compute `dS`.
    pub derivative: f32,
    /// The argument of `score_mod`.
    pub argument: f32,
}

/// The score of one pair from its product, computed as [`apply_score_mod()`] does for a tile. The band is not applied. Mask and
/// `mask_mod` are applied if `masked`.
#[cube]
pub fn score_of_pair<E: Float, M: Numeric, NB: Size, NM: Size>(
    product: f32,
    scores: &Scores<E, M, NB, NM>,
    place: &Place,
    masked: bool,
    band: &Band,
    #[comptime] blueprint: Blueprint,
) -> Exponent {
    let score = &scores.score;
    let t = if comptime!(blueprint.capped) {
        capped(product, score)
    } else if comptime!(blueprint.scores_are_scaled()) {
        product * score.scale
    } else {
        product
    };
    let derivative =
        if comptime!(blueprint.accumulates()) { score.derivative(t, place, band) } else { 1.0f32.runtime() };
    let slope = score.extras.slope(place.batch as usize, place.head as usize);
    let value = scores.composed(t, slope, place, band) * score.exponent;
    // Evaluated before the `||`: CubeCL would turn a call after it into a branch.
    let shown = scores.show(place, band);
    Exponent { value, visible: shown || !masked, derivative, argument: t }
}

/// The score of a product with softcap: `softcap · tanh x`, with `tanh x = 1 − 2 / (1 + e^(2x))`.
#[cube]
fn capped(product: f32, score: &Score) -> f32 {
    let e2x = ex2(product * score.inner);
    fma(-2.0f32 * score.softcap, reciprocal(1.0f32 + e2x), score.softcap)
}

/// Two neighbouring elements of a row of a mask or bias: a single read if rows allow vectors of two. `rows`: how the rows
/// differ.
#[cube]
fn pair_of<T: Numeric, N: Size>(
    tensor: &Tensor<Vector<T, N>>,
    row: usize,
    band: &Band,
    column: u32,
    #[comptime] rows: Option<Rows>,
    #[comptime] blueprint: Blueprint,
) -> Vector<T, Const<2>> {
    let width = tensor.vector_size();
    let mut pair = Vector::<T, Const<2>>::empty();
    if comptime!(blueprint.transposed() && rows == Some(Rows::Same)) {
        let read = tensor[row].extract(0usize);
        #[unroll]
        for e in 0..2usize {
            pair.insert(e, read);
        }
    } else if comptime!(width == 2) {
        let first = band.key_within(column, 2u32);
        let read = tensor[(row + first as usize) / 2];
        #[unroll]
        for e in 0..2usize {
            pair.insert(e, read.extract(e));
        }
    } else {
        let along = comptime!(if blueprint.transposed() { 2 } else { 3 });
        #[unroll]
        for e in 0..2usize {
            let key = band.key_within(column + comptime!(e as u32), 1u32);
            pair.insert(e, tensor[row + key as usize * tensor.stride(along)].extract(0usize));
        }
    }
    pair
}
