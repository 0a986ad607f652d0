//! The tile that every backward kernel recomputes: the probabilities `P` and the scores' gradient.
//!
//! ```text
//! P = exp(S − lse)      dP = dout Vᵀ ∘ Z      dT = P ∘ (dP − delta)      dS = dT ∘ factor
//! ```
//!
//! `dT` is the gradient of the scores as the softmax sees them, and so of the bias; `dS` that of `scale · q·kᵀ`, or of what else the
//! [factor](crate::score::Factor) is for. `Z` is what
//! [dropout](crate::dropout) multiplies by, of which `P ∘ Z` lacks the factor here.

use super::Blueprint;
use super::scores::{TileAt, finish_scores};
use super::tile::*;
use crate::mask::Band;
use crate::score::{Factor, Score};
use crate::softmax::weight;
use cubecl::prelude::*;

/// A thread's share of the tile, `micro_q × micro_k` each.
#[derive(CubeType)]
pub struct TileGradient {
    /// Probabilities, those that are kept.
    pub p: Array<f32>,
    /// `dT`, then `dS`.
    pub ds: Array<f32>,
    /// What leads from the one to the other, if anything does.
    pub factors: Array<f32>,
}

#[cube]
impl TileGradient {
    /// Room for one.
    pub fn new(#[comptime] blueprint: Blueprint) -> TileGradient {
        let size = comptime!(blueprint.tile.micro_q() * blueprint.tile.micro_k());
        TileGradient { p: Array::new(size), ds: Array::new(size), factors: Array::new(comptime!(blueprint.factors())) }
    }

    /// Goes from `dT` to `dS`.
    pub fn multiply(&mut self, #[comptime] blueprint: Blueprint) {
        if comptime!(blueprint.factor != Factor::One) {
            #[unroll]
            for n in 0..comptime!(blueprint.tile.micro_q() * blueprint.tile.micro_k()) {
                // Where nothing is seen, whatever a function gives there.
                self.ds[n] = select(self.ds[n] == 0.0f32, 0.0f32, self.ds[n] * self.factors[n]);
            }
        }
    }
}

/// Panels in shared memory that the kernels of the backward stage tiles in.
#[derive(CubeType)]
pub struct Panels {
    /// For `A` of `A · Bᵀ`.
    pub a: Shared<[Vec4]>,
    /// For `B`, and for the right side of the products that accumulate.
    pub b: Shared<[Vec4]>,
    /// For `P` or `dS`, the left side of those.
    pub p: Shared<[Vec4]>,
    /// What comes into them next.
    pub ahead: Ahead,
}

/// Asks for what [`recompute()`] begins with.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn ask<F: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    band: &Band,
    at: &TileAt,
    head_kv: usize,
    panels: &mut Panels,
    #[comptime] blueprint: Blueprint,
) {
    let (q_at, k_at) = (matrix(q, at.batch, at.head), matrix(k, at.batch, head_kv));
    let (head_dim, tile) = comptime!((blueprint.head_dim, blueprint.tile));
    let ahead = &mut panels.ahead;
    ahead.ask_scores(
        q,
        &q_at,
        at.q_start,
        band.after_queries(),
        k,
        &k_at,
        at.k_start,
        band.after_keys(),
        0usize,
        head_dim,
        tile,
    );
}

/// Recomputes `P`, and `dT` where `with_ds`. What it begins with has been [asked for](ask()). `anywhere`: the tile need not begin where
/// tiles of its sequence do.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn recompute<F: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    dout: &Tensor<Vector<F, N>>,
    stats: &Tensor<f32>,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<F>>,
    score: &Score,
    band: &Band,
    at: &TileAt,
    head_kv: usize,
    stats_row: usize,
    fully_visible: bool,
    panels: &mut Panels,
    tile_gradient: &mut TileGradient,
    me: Unit,
    #[comptime] with_ds: bool,
    #[comptime] anywhere: bool,
    #[comptime] blueprint: Blueprint,
) {
    let tile = comptime!(blueprint.tile);
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    let q_at = matrix(q, at.batch, at.head);
    let k_at = matrix(k, at.batch, head_kv);
    scores(
        q,
        &q_at,
        at.q_start,
        band.after_queries(),
        k,
        &k_at,
        at.k_start,
        band.after_keys(),
        &mut panels.a,
        &mut panels.b,
        &mut panels.ahead,
        &mut tile_gradient.p,
        me,
        blueprint.head_dim,
        blueprint.tf32,
        tile,
    );
    let d_at = matrix(dout, at.batch, at.head);
    let v_at = matrix(v, at.batch, head_kv);
    if comptime!(with_ds) {
        let (head_dim_v, ahead) = (comptime!(blueprint.head_dim_v), &mut panels.ahead);
        ahead.ask_scores(
            dout,
            &d_at,
            at.q_start,
            band.after_queries(),
            v,
            &v_at,
            at.k_start,
            band.after_keys(),
            0usize,
            head_dim_v,
            tile,
        );
    }
    finish_scores(
        &mut tile_gradient.p,
        &mut tile_gradient.factors,
        score,
        band,
        mask,
        bias,
        at,
        !fully_visible || comptime!(blueprint.bias) || comptime!(blueprint.mask) && at.masked,
        me,
        blueprint.factor,
        tile,
    );
    if comptime!(with_ds) {
        scores(
            dout,
            &d_at,
            at.q_start,
            band.after_queries(),
            v,
            &v_at,
            at.k_start,
            band.after_keys(),
            &mut panels.a,
            &mut panels.b,
            &mut panels.ahead,
            &mut tile_gradient.ds,
            me,
            blueprint.head_dim_v,
            blueprint.tf32,
            tile,
        );
    }
    let rows = stats.shape(1);
    #[unroll]
    for i in 0..micro_q {
        let row = at.q_start + me.y * comptime!(micro_q as u32) + comptime!(i as u32);
        let mut lse = f32::MAX.runtime();
        let mut delta = 0.0f32;
        if band.is_query(row) {
            lse = stats[stats_row + row as usize];
            if comptime!(with_ds) {
                delta = stats[rows + stats_row + row as usize];
            }
        }
        #[unroll]
        for quad in 0..comptime!(micro_k / WIDTH) {
            let column = at.k_start + me.x * comptime!(micro_k as u32) + comptime!((quad * WIDTH) as u32);
            let kept =
                score.extras.dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, row, column, anywhere);
            #[unroll]
            for j in 0..WIDTH {
                let n = comptime!(i * micro_k + quad * WIDTH + j);
                let keeps = kept & comptime!(1u32 << j) != 0;
                let p = weight(tile_gradient.p[n], lse);
                tile_gradient.p[n] = score.extras.dropout.apply(p, keeps);
                if comptime!(with_ds) {
                    let dp = score.extras.dropout.backward(tile_gradient.ds[n], keeps);
                    // What is hidden has no gradient, whatever dout and v hold there.
                    tile_gradient.ds[n] = select(p == 0.0f32, 0.0f32, p * (dp - delta));
                }
            }
        }
    }
}

/// Writes a thread's share of a `[tile_q, tile_k]` tile to its panel.
#[cube]
pub fn share(s: &Array<f32>, panel: &mut Shared<[Vec4]>, me: Unit, #[comptime] tile: TileShape) {
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    let pitch = comptime!(TileShape::pitch(tile.tile_k));
    #[unroll]
    for i in 0..micro_q {
        #[unroll]
        for quad in 0..comptime!(micro_k / WIDTH) {
            let mut value = Vec4::new(0.0f32);
            #[unroll]
            for lane in 0..WIDTH {
                value.insert(lane, s[comptime!(i * micro_k + quad * WIDTH + lane)]);
            }
            let row = me.y as usize * micro_q + i;
            panel[row * pitch + me.x as usize * comptime!(micro_k / WIDTH) + quad] = value;
        }
    }
}

/// Writes a thread's share of a `[tile_q, tile_k]` tile to its panel as `[tile_k, tile_q]`.
#[cube]
pub fn share_transposed(s: &Array<f32>, panel: &mut Shared<[Vec4]>, me: Unit, #[comptime] tile: TileShape) {
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    let pitch = comptime!(TileShape::pitch(tile.tile_q));
    #[unroll]
    for j in 0..micro_k {
        #[unroll]
        for quad in 0..comptime!(micro_q / WIDTH) {
            let mut value = Vec4::new(0.0f32);
            #[unroll]
            for lane in 0..WIDTH {
                value.insert(lane, s[comptime!((quad * WIDTH + lane) * micro_k + j)]);
            }
            let row = me.x as usize * micro_k + j;
            panel[row * pitch + me.y as usize * comptime!(micro_q / WIDTH) + quad] = value;
        }
    }
}

/// An accumulator of zeros.
#[cube]
pub fn zeros(#[comptime] size: usize) -> Array<Vec4> {
    let mut acc = Array::<Vec4>::new(size);
    #[unroll]
    for n in 0..size {
        acc[n] = Vec4::new(0.0f32);
    }
    acc
}
