//! Recomputation of a tile in the backward kernels: the probabilities `P` and the gradient of the scores.
//!
//! ```text
//! P = exp(S − lse)      dP = dout Vᵀ ∘ Z      dT = P ∘ (dP − delta)      dS = dT ∘ factor
//! ```
//!
//! `dT` is the gradient of the scores that enter the softmax, and so of the bias. `dS` is the gradient of `scale · q·kᵀ`, or of the
//! other quantity that the [factor](crate::score::Factor) stands for. `Z` is the factor of [dropout](crate::dropout): 0 or `1 / (1 − p)`.
//! In this file `P` after dropout lacks the factor `1 / (1 − p)`.

use super::Blueprint;
use super::scores::apply_score_mod;
use super::tile::*;
use crate::fragment::{ScalarScores, Sides, Stored, TileAt, WIDTH};
use crate::score::Factor;
use crate::softmax::{softmax_backward, weight};
use cubecl::prelude::*;

/// A thread's elements of the tile, `micro_q × micro_k` in each array.
#[derive(CubeType)]
pub struct TileGradient {
    /// Probabilities after dropout, without the factor `1 / (1 − p)`.
    pub p: Array<f32>,
    /// `dT`, then `dS`.
    pub ds: Array<f32>,
    /// Factors from `dT` to `dS`, if there are any.
    factors: Array<f32>,
    #[cube(comptime)]
    blueprint: Blueprint,
}

#[cube]
impl TileGradient {
    /// Uninitialised arrays for one tile.
    pub fn new(#[comptime] blueprint: Blueprint) -> TileGradient {
        let size = comptime!(blueprint.tile.micro());
        let factors = Array::new(comptime!(blueprint.factors()));
        TileGradient { p: Array::new(size), ds: Array::new(size), factors, blueprint }
    }

    /// Prefetches the first chunk that [`TileGradient::recompute`] reads.
    pub fn ask<F: Float, N: Size>(&self, sides: &Sides<F, N>, at: &TileAt, panels: &mut Panels) {
        let (queries, keys) = sides.queries_and_keys(comptime!(self.blueprint.role.is_transposed()));
        panels.ask_scores(
            &at.queries(queries.qk),
            &at.keys(Stored::new_Elements(keys.qk)),
            comptime!(self.blueprint.head_dim),
        );
    }

    /// Multiplies `dT` by the factors, which gives `dS`.
    pub fn multiply(&mut self) {
        if comptime!(self.blueprint.factor != Factor::One) {
            #[unroll]
            for n in 0..comptime!(self.blueprint.tile.micro()) {
                // A hidden pair stays 0, even if its factor is not finite.
                self.ds[n] = select(self.ds[n] == 0.0f32, 0.0f32, self.ds[n] * self.factors[n]);
            }
        }
    }

    /// Recomputes `P`, and `dT` if the kernel differentiates. The caller has prefetched the first chunk with
    /// [`TileGradient::ask`]. `anywhere`: the tile may start at a key that is not aligned with the tiles of its sequence.
    pub fn recompute<F: Float, M: Numeric, N: Size>(
        &mut self,
        sides: &Sides<F, N>,
        scores: &ScalarScores<F, M>,
        at: &TileAt,
        panels: &mut Panels,
        #[comptime] anywhere: bool,
    ) {
        let blueprint = comptime!(self.blueprint);
        let (queries, keys) = sides.queries_and_keys(comptime!(blueprint.role.is_transposed()));
        let tile = comptime!(blueprint.tile);
        let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
        let differentiates = comptime!(blueprint.role.differentiates());
        let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
        let me = panels.me;
        let (q, k) = (at.queries(queries.qk), at.keys(Stored::new_Elements(keys.qk)));
        panels.products(&q, &k, &mut self.p, head_dim);
        let (dout, v) = (at.queries(queries.dov), at.keys(Stored::new_Elements(keys.dov)));
        if comptime!(differentiates) {
            panels.ask_scores(&dout, &v, head_dim_v);
        }
        apply_score_mod(&mut self.p, &mut self.factors, scores, at, me, blueprint);
        if comptime!(differentiates) {
            panels.products(&dout, &v, &mut self.ds, head_dim_v);
        }
        let dropout = &scores.score.extras.dropout;
        #[unroll]
        for i in 0..micro_q {
            let row = at.q_start + me.y * comptime!(micro_q as u32) + comptime!(i as u32);
            let mut lse = f32::MAX.runtime();
            let mut delta = 0.0f32;
            if at.band.is_query(row) {
                lse = sides.stats.lse(at.batch, at.head, row);
                if comptime!(differentiates) {
                    delta = sides.stats.delta(at.batch, at.head, row);
                }
            }
            #[unroll]
            for quad in 0..comptime!(micro_k / WIDTH) {
                let column = at.k_start + me.x * comptime!(micro_k as u32) + comptime!((quad * WIDTH) as u32);
                let kept = dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, row, column, anywhere);
                #[unroll]
                for j in 0..WIDTH {
                    let n = comptime!(i * micro_k + quad * WIDTH + j);
                    let keeps = kept & comptime!(1u32 << j) != 0;
                    let p = weight(self.p[n], lse);
                    self.p[n] = dropout.apply(p, keeps);
                    if comptime!(differentiates) {
                        self.ds[n] = softmax_backward(p, dropout.backward(self.ds[n], keeps), delta, true);
                    }
                }
            }
        }
    }
}
