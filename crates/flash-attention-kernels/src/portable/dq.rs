//! Backward for the queries, one thread block for each block of queries of a head.
//!
//! ```text
//! for each block of keys that the queries see:      dS = P ∘ (dout Vᵀ − delta) ∘ slope      dQ += dS K
//! dq = scale · dQ
//! ```

use super::gradient::*;
use super::scores::TileAt;
use super::tile::*;
use super::{Blueprint, Grid};
use crate::blocks::visits;
use crate::mask::Band;
use crate::score::Score;
use cubecl::prelude::*;

/// `dq [B, H, Sq, D]` from the forward's inputs, `dout [B, H, Sq, Dv]` and `stats [2, B · H · Sq]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn dq<F: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    dout: &Tensor<Vector<F, N>>,
    stats: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    dq: &mut Tensor<Vector<F, N>>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let tile = comptime!(blueprint.tile);
    let (tile_q, tile_k) = comptime!((tile.tile_q as u32, tile.tile_k as u32));
    let me = unit(tile);
    let mut panels = Panels {
        a: Shared::new_slice(comptime!(tile.panel_a())),
        b: Shared::new_slice(comptime!(tile.panel_b(tile.tile_k))),
        p: Shared::new_slice(comptime!(tile.tile_q * TileShape::pitch(tile.tile_k))),
        ahead: Ahead::new(tile.tile_k, tile),
    };
    let work = grid.work(CUBE_POS, &score.extras, &band, tile_q, false);
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let q_start = work.start;
    let head_kv = work.head / grid.group_size as usize;
    let k_at = matrix(k, work.batch, head_kv);
    let stats_row = (work.batch * grid.heads as usize + work.head) * band.seq_q as usize;

    let slope = score.extras.slope(work.batch, work.head);
    let mut tile_gradient = TileGradient::new(blueprint);
    let mut acc = zeros(comptime!(tile.micro_q() * tile.groups(blueprint.head_dim)));

    let extras = score.extras;
    let (batch, head) = (work.batch, work.head);
    let visits = visits(&extras, &band, batch, head, q_start, tile_q, tile_k, false);
    let visit = visits.tile(0u32, &extras, &band, tile_q, tile_k, false);
    let (k_start, masked) = (visit.start, visit.masked);
    let first = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };
    ask(q, k, &band, &first, head_kv, &mut panels, blueprint);
    for nth in 0..visits.count {
        let visit = visits.tile(nth, &extras, &band, tile_q, tile_k, false);
        let (k_start, fully_visible, masked) = (visit.start, visit.fully_visible, visit.masked);
        let at = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };
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
            head_kv,
            stats_row,
            fully_visible,
            &mut panels,
            &mut tile_gradient,
            me,
            true,
            false,
            blueprint,
        );
        panels.ahead.ask_right(k, &k_at, k_start, band.after_keys(), 0usize, tile.tile_k, blueprint.head_dim, tile);
        tile_gradient.multiply(blueprint);
        share(&tile_gradient.ds, &mut panels.p, me, tile);
        let next_start = visits.tile(nth + 1, &extras, &band, tile_q, tile_k, false).start;
        let next = TileAt { batch, head, q_start, k_start: next_start, slope, band, masked, transposed: false };
        ask(q, k, &band, &next, head_kv, &mut panels, blueprint);
        accumulate(
            &panels.p,
            k,
            &k_at,
            k_start,
            band.after_keys(),
            &mut panels.b,
            &mut panels.ahead,
            &mut acc,
            !fully_visible || comptime!(blueprint.mask) && masked,
            me,
            tile.tile_q,
            tile.tile_k,
            blueprint.head_dim,
            tile,
        );
    }

    let dq_at = matrix(&*dq, work.batch, work.head);
    let factors = uniform(score.scale, comptime!(tile.micro_q()));
    store(dq, &dq_at, q_start, band.after_queries(), &acc, &factors, me, tile.tile_q, blueprint.head_dim, tile);
}
