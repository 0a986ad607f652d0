//! From a thread's products to scores.

use super::Blueprint;
use super::tile::Unit;
use crate::fragment::{ScalarScores, TileAt};
use crate::score::Factor;
use cubecl::prelude::*;

/// Turns products into scores; hidden pairs get [`HIDDEN`](crate::softmax::HIDDEN). `factors` receives the factors of the scores'
/// gradients.
#[cube]
pub fn apply_score_mod<F: Float, M: Numeric>(
    s: &mut Array<f32>,
    factors: &mut Array<f32>,
    scores: &ScalarScores<F, M>,
    at: &TileAt,
    me: Unit,
    #[comptime] blueprint: Blueprint,
) {
    let (tile, factor) = comptime!((blueprint.tile, blueprint.factor));
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    let first_row = at.q_start + me.y * comptime!(micro_q as u32);
    let first_column = at.k_start + me.x * comptime!(micro_k as u32);
    #[unroll]
    for n in 0..comptime!(tile.micro()) {
        let t = scores.score.of(s[n]);
        s[n] = t;
        if comptime!(factor != Factor::One) {
            let (row, column) =
                (first_row + comptime!((n / micro_k) as u32), first_column + comptime!((n % micro_k) as u32));
            factors[n] = scores.factor(t, at, row, column, factor);
        }
    }
    if scores.need_care(at) {
        #[unroll]
        for n in 0..comptime!(tile.micro()) {
            let (row, column) =
                (first_row + comptime!((n / micro_k) as u32), first_column + comptime!((n % micro_k) as u32));
            s[n] = scores.masked_score(s[n], at, row, column);
        }
    }
}
