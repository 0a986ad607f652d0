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
use crate::fragment::{ScalarScores, Side, Statistics, TileAt, WIDTH};
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
    pub factors: Array<f32>,
}

#[cube]
impl TileGradient {
    /// Uninitialised arrays for one tile.
    pub fn new(#[comptime] blueprint: Blueprint) -> TileGradient {
        let size = comptime!(blueprint.tile.micro_q() * blueprint.tile.micro_k());
        TileGradient { p: Array::new(size), ds: Array::new(size), factors: Array::new(comptime!(blueprint.factors())) }
    }

    /// Multiplies `dT` by the factors, which gives `dS`.
    pub fn multiply(&mut self, #[comptime] blueprint: Blueprint) {
        if comptime!(blueprint.factor != Factor::One) {
            #[unroll]
            for n in 0..comptime!(blueprint.tile.micro_q() * blueprint.tile.micro_k()) {
                // A hidden pair stays 0, even if its factor is not finite.
                self.ds[n] = select(self.ds[n] == 0.0f32, 0.0f32, self.ds[n] * self.factors[n]);
            }
        }
    }
}

/// What [`Operands::recompute`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// Whether `dT` is computed in addition to `P`.
    pub ds: bool,
    /// Whether the tile may start at a key that is not aligned with the tiles of its sequence.
    pub anywhere: bool,
}

/// Operands of the backward.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Operands<F: Float, N: Size> {
    /// Q and dO.
    pub queries: Side<F, N>,
    /// K and V.
    pub keys: Side<F, N>,
    /// `lse` and delta of each query.
    pub stats: Statistics,
}

#[cube]
impl<F: Float, N: Size> Operands<F, N> {
    /// Prefetches the first chunk that [`Operands::recompute`] reads.
    pub fn ask(&self, at: &TileAt, panels: &mut Panels, #[comptime] blueprint: Blueprint) {
        panels.ask_scores(&at.queries(self.queries.qk), &at.keys(self.keys.qk), blueprint.head_dim);
    }

    /// Recomputes `P`, and `dT` if it is wanted. The caller has prefetched the first chunk with [`Operands::ask`].
    pub fn recompute<M: Numeric>(
        &self,
        scores: &ScalarScores<F, M>,
        at: &TileAt,
        panels: &mut Panels,
        tile_gradient: &mut TileGradient,
        #[comptime] wanted: Wanted,
        #[comptime] blueprint: Blueprint,
    ) {
        let tile = comptime!(blueprint.tile);
        let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
        let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
        let me = panels.me;
        let (q, k) = (at.queries(self.queries.qk), at.keys(self.keys.qk));
        panels.products(&q, &k, &mut tile_gradient.p, head_dim);
        let (dout, v) = (at.queries(self.queries.dov), at.keys(self.keys.dov));
        if comptime!(wanted.ds) {
            panels.ask_scores(&dout, &v, head_dim_v);
        }
        apply_score_mod(&mut tile_gradient.p, &mut tile_gradient.factors, scores, at, me, blueprint);
        if comptime!(wanted.ds) {
            panels.products(&dout, &v, &mut tile_gradient.ds, head_dim_v);
        }
        let dropout = &scores.score.extras.dropout;
        #[unroll]
        for i in 0..micro_q {
            let row = at.q_start + me.y * comptime!(micro_q as u32) + comptime!(i as u32);
            let mut lse = f32::MAX.runtime();
            let mut delta = 0.0f32;
            if at.band.is_query(row) {
                lse = self.stats.lse(at.batch, at.head, row);
                if comptime!(wanted.ds) {
                    delta = self.stats.delta(at.batch, at.head, row);
                }
            }
            #[unroll]
            for quad in 0..comptime!(micro_k / WIDTH) {
                let column = at.k_start + me.x * comptime!(micro_k as u32) + comptime!((quad * WIDTH) as u32);
                let kept =
                    dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, row, column, wanted.anywhere);
                #[unroll]
                for j in 0..WIDTH {
                    let n = comptime!(i * micro_k + quad * WIDTH + j);
                    let keeps = kept & comptime!(1u32 << j) != 0;
                    let p = weight(tile_gradient.p[n], lse);
                    tile_gradient.p[n] = dropout.apply(p, keeps);
                    if comptime!(wanted.ds) {
                        tile_gradient.ds[n] =
                            softmax_backward(p, dropout.backward(tile_gradient.ds[n], keeps), delta, true);
                    }
                }
            }
        }
    }
}
