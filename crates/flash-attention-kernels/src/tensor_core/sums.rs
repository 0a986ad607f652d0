//! Sums of `dT ∘ factor` over the columns of a block of rows: parts of the gradients of slopes, of tensors that `score_mod` reads and of
//! broadcast biases. [`fold()`](crate::portable::dbias::fold) adds them up.
//!
//! `dT` is in registers in any kernel that computes dQ or dK. A thread adds what it holds of its two rows, a factor at a time, and the
//! four threads of a row add up their parts at the end of the work tile. Each work tile has rows of one query head.

use super::Blueprint;
use super::operands::{SourceSides, SumsOut};
use super::recompute::{GradientRows, recompute_sum};
use super::schedule::TileScheduler;
use super::scores::ScoreTile;
use super::softmax::row_sum;
use crate::fragment::{Scores, filled};
use crate::ptx::pin;
use crate::score::Factor;
use cubecl::prelude::*;

/// Sums of a thread's two rows for each of the blueprint's [sums](Blueprint::sums).
#[derive(CubeType)]
pub struct RowSums {
    sums: Array<f32>,
}

#[cube]
impl RowSums {
    /// Sums of nothing.
    pub fn new(#[comptime] blueprint: Blueprint) -> RowSums {
        RowSums { sums: filled::<f32>(0.0f32, comptime!(2 * blueprint.sums.len())) }
    }

    /// Adds a tile of `dT`. `arguments` are those of `score_mod` if they are [kept](Blueprint::keeps_arguments).
    pub fn add<E: Float, M: Numeric, NB: Size, NM: Size>(
        &mut self,
        dt: &Array<f32>,
        arguments: &Array<f32>,
        scores: &Scores<E, M, NB, NM>,
        tile: &ScoreTile,
        #[comptime] blueprint: Blueprint,
    ) {
        #[unroll]
        for nth in 0..comptime!(blueprint.sums.len()) {
            let factor = comptime!(blueprint.sums.nth(nth));
            let tile = tile.opaque();
            #[unroll]
            for r in 0..2usize {
                // Even and odd columns apart: a single sum would be a long chain of dependent additions.
                let mut parts = filled::<f32>(0.0f32, 2usize);
                let distances = tile.distances(r);
                let between = tile.between(r, comptime!(blueprint.transposed()));
                #[unroll]
                for i in 0..comptime!(blueprint.tile.tile_k / 8) {
                    #[unroll]
                    for e in 0..2usize {
                        let n = comptime!(4 * i + 2 * r + e);
                        match comptime!(factor) {
                            Factor::One | Factor::Product => parts[e] += dt[n],
                            Factor::Slope => {
                                let offset = distances - comptime!((8 * i + e) as f32);
                                parts[e] = fma(min(offset, -offset), dt[n], parts[e]);
                            }
                            Factor::A | Factor::B => {
                                let place = tile.place(between, r, i, e, comptime!(blueprint.transposed()));
                                let argument = argument_of(arguments, n, blueprint);
                                let factor = scores.score.factor(argument, &place, &tile.band, factor);
                                // A hidden pair stays 0, even if its factor is not finite.
                                parts[e] += select(dt[n] == 0.0f32, 0.0f32, dt[n] * factor);
                            }
                        }
                    }
                }
                self.sums[comptime!(2 * nth + r)] += parts[0] + parts[1];
            }
        }
        // Without this, the compiler would defer the additions and keep copies of `dT` in registers.
        pin(&mut self.sums, comptime!(2 * blueprint.sums.len()));
    }

    /// Writes the sums of the warp's rows, whose columns belong to one head, and starts again at 0. Rows that a hidden NaN or infinity
    /// may have reached are recomputed if the kernel hides pairs. The whole warp must call it.
    pub fn write<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
        &mut self,
        out: &mut SumsOut,
        rows: &GradientRows,
        sources: &SourceSides<E, N>,
        scores: &Scores<E, M, NB, NM>,
        stats: &[u32],
        scheduler: &TileScheduler,
        #[comptime] blueprint: Blueprint,
    ) {
        let (lane, head_kv) = (UNIT_POS % 32, rows.first_kv);
        let hides = comptime!(blueprint.hides(scores.band.bounded_above || scores.band.bounded_below));
        let head = if comptime!(blueprint.transposed()) { head_kv as usize } else { rows.head };
        let mut again = filled::<bool>(false.runtime(), 2usize);
        #[unroll]
        for r in 0..2usize {
            let row = rows.first_row + lane / 4 + comptime!(8 * r as u32);
            let live = rows.band.is_query(row);
            #[unroll]
            for nth in 0..comptime!(blueprint.sums.len()) {
                let sum = row_sum(self.sums[comptime!(2 * nth + r)]);
                self.sums[comptime!(2 * nth + r)] = 0.0f32;
                again[r] = again[r] || live && sum * 0.0f32 != 0.0f32;
                if live && lane.is_multiple_of(4) {
                    let at = out.at(nth, rows.batch, head, row);
                    out.data[at] = sum;
                }
            }
        }
        if comptime!(hides) && plane_any(again[0] || again[1]) {
            for of_warp in 0..16u32 {
                let again = select(of_warp >= 8, again[1], again[0]);
                if plane_any(lane / 4 == of_warp % 8 && again) {
                    recompute_sum(sources, scores, out, stats, scheduler, rows, rows.first_row + of_warp, blueprint);
                }
            }
        }
    }
}

/// The argument of `score_mod` of register `n`. If it is not kept, the factor does not depend on it: the score function only adds.
#[cube]
fn argument_of(arguments: &Array<f32>, n: usize, #[comptime] blueprint: Blueprint) -> f32 {
    if comptime!(blueprint.keeps_arguments()) { arguments[n] } else { 0.0f32.runtime() }
}
