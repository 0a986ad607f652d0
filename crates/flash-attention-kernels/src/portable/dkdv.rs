//! Backward for keys and values, one thread block for each block of keys of a key/value head.
//!
//! ```text
//! for each query head of the group, for each block of its queries that sees the keys:
//!     dV += Pᵀ dout      dS = P ∘ (dout Vᵀ − delta) ∘ slope      dK += dSᵀ Q
//! dk = scale · dK      dv = dV
//! ```
//!
//! The heads of a group are summed here, in order, so that grouped heads need no repeated buffer and no atomics. Either
//! gradient may be left out.

use super::gradient::*;
use super::scores::TileAt;
use super::tile::*;
use super::{Blueprint, Grid};
use crate::blocks::visits;
use crate::mask::Band;
use crate::score::Score;
use cubecl::prelude::*;

/// `dk [B, Hkv, Sk, D]` and `dv [B, Hkv, Sk, Dv]` from the forward's inputs, `dout [B, H, Sq, Dv]` and
/// `stats [2, B · H · Sq]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn dkdv<F: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    dout: &Tensor<Vector<F, N>>,
    stats: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    dk: ComptimeOption<&mut Tensor<Vector<F, N>>>,
    dv: ComptimeOption<&mut Tensor<Vector<F, N>>>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let tile = comptime!(blueprint.tile);
    let (tile_q, tile_k) = comptime!((tile.tile_q as u32, tile.tile_k as u32));
    let (with_dk, with_dv) = comptime!((dk.is_some(), dv.is_some()));
    let rows = comptime!(tile.tile_k / tile.units_q);
    let me = unit(tile);
    let mut panels = Panels {
        a: Shared::new_slice(comptime!(tile.panel_a())),
        b: Shared::new_slice(comptime!(tile.panel_b(tile.tile_q))),
        p: Shared::new_slice(comptime!(tile.tile_k * TileShape::pitch(tile.tile_q))),
        ahead: Ahead::new(tile.tile_q, tile),
    };
    let work = grid.work(CUBE_POS, &score.extras, &band, tile_k, true);
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let k_start = work.start;
    let group_size = grid.group_size as usize;
    let heads_q = grid.heads as usize * group_size;

    let mut tile_gradient = TileGradient::new(blueprint);
    let mut acc_k = zeros(comptime!(if with_dk { rows * tile.groups(blueprint.head_dim) } else { 1 }));
    let mut acc_v = zeros(comptime!(if with_dv { rows * tile.groups(blueprint.head_dim_v) } else { 1 }));

    let extras = score.extras;
    for member in 0..group_size {
        let head = work.head * group_size + member;
        let slope = score.extras.slope(work.batch, head);
        let q_at = matrix(q, work.batch, head);
        let d_at = matrix(dout, work.batch, head);
        let stats_row = (work.batch * heads_q + head) * band.seq_q as usize;
        let visits = visits(&extras, &band, work.batch, head, k_start, tile_k, tile_q, true);
        let visit = visits.tile(0u32, &extras, &band, tile_k, tile_q, true);
        let (batch, q_start, masked) = (work.batch, visit.start, visit.masked);
        let first = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };
        ask(q, k, &band, &first, work.head, &mut panels, blueprint);
        for nth in 0..visits.count {
            let visit = visits.tile(nth, &extras, &band, tile_k, tile_q, true);
            let (q_start, fully_visible, masked) = (visit.start, visit.fully_visible, visit.masked);
            let at = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };
            let careful = !fully_visible || comptime!(blueprint.mask) && masked;
            recompute(
                q,
                k,
                v,
                dout,
                stats,
                &mask,
                &bias,
                &score,
                &band,
                &at,
                work.head,
                stats_row,
                fully_visible,
                &mut panels,
                &mut tile_gradient,
                me,
                with_dk,
                false,
                blueprint,
            );
            let next_start = visits.tile(nth + 1, &extras, &band, tile_k, tile_q, true).start;
            let next = TileAt { batch, head, q_start: next_start, k_start, slope, band, masked, transposed: false };
            if comptime!(with_dv) {
                let (depth, head_dim_v) = comptime!((tile.tile_q, blueprint.head_dim_v));
                panels.ahead.ask_right(dout, &d_at, q_start, band.after_queries(), 0usize, depth, head_dim_v, tile);
                share_transposed(&tile_gradient.p, &mut panels.p, me, tile);
                if comptime!(!with_dk) {
                    ask(q, k, &band, &next, work.head, &mut panels, blueprint);
                }
                accumulate(
                    &panels.p,
                    dout,
                    &d_at,
                    q_start,
                    band.after_queries(),
                    &mut panels.b,
                    &mut panels.ahead,
                    &mut acc_v,
                    careful,
                    me,
                    tile.tile_k,
                    tile.tile_q,
                    blueprint.head_dim_v,
                    tile,
                );
            }
            if comptime!(with_dk) {
                let (depth, head_dim) = comptime!((tile.tile_q, blueprint.head_dim));
                panels.ahead.ask_right(q, &q_at, q_start, band.after_queries(), 0usize, depth, head_dim, tile);
                tile_gradient.multiply(blueprint);
                share_transposed(&tile_gradient.ds, &mut panels.p, me, tile);
                ask(q, k, &band, &next, work.head, &mut panels, blueprint);
                accumulate(
                    &panels.p,
                    q,
                    &q_at,
                    q_start,
                    band.after_queries(),
                    &mut panels.b,
                    &mut panels.ahead,
                    &mut acc_k,
                    careful,
                    me,
                    tile.tile_k,
                    tile.tile_q,
                    blueprint.head_dim,
                    tile,
                );
            }
        }
    }

    #[comptime]
    if let ComptimeOption::Some(dk) = dk {
        let at = matrix(&*dk, work.batch, work.head);
        let factors = uniform(score.scale, rows);
        store(dk, &at, k_start, band.after_keys(), &acc_k, &factors, me, tile.tile_k, blueprint.head_dim, tile);
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = dv {
        let at = matrix(&*dv, work.batch, work.head);
        let factors = uniform(score.extras.dropout.scale(), rows);
        store(dv, &at, k_start, band.after_keys(), &acc_v, &factors, me, tile.tile_k, blueprint.head_dim_v, tile);
    }
}
