//! Gradients: `dq`, one thread block for each block of queries of a head, or `dk` and `dv`, one for each block of keys of a key/value
//! head.
//!
//! ```text
//! Dq      for each block of keys that the queries see:
//!             dS = P ∘ (dout Vᵀ − delta) ∘ factor     dQ += dS K
//! DkDv    for each query head of the group, for each block of its queries that sees the keys:
//!             dV += Pᵀ dout      dS as above          dK += dSᵀ Q
//! ```
//!
//! The query heads of a group are summed in this kernel, in order. Grouped heads therefore need no buffer of repeated heads and no
//! atomics.

use super::Blueprint;
use super::recompute::*;
use super::tile::*;
use crate::blocks::{TileSize, visits};
use crate::fragment::{Gradients, Grid, ScalarScores, Sides, Stored, Vec4, WIDTH, filled, zeros};
use cubecl::prelude::*;

/// Gradients of the rows: `dq`, or `dk` and `dv`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn gradient<F: Float, M: Numeric, N: Size>(
    sides: Sides<F, N>,
    scores: ScalarScores<F, M>,
    gradients: Gradients<F, N>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, head_dim, head_dim_v) = comptime!((blueprint.tile, blueprint.head_dim, blueprint.head_dim_v));
    let (keys, differentiates) = comptime!((blueprint.role.is_transposed(), blueprint.role.differentiates()));
    let (rows, depth) = comptime!(if keys { (tile.tile_k, tile.tile_q) } else { (tile.tile_q, tile.tile_k) });
    let size = comptime!(TileSize { rows: rows as u32, columns: depth as u32, keys });
    let with_dv = comptime!(gradients.dv.is_some());
    let micro = comptime!(rows / tile.units_q);
    let mut panels = Panels::new(rows, depth, blueprint);
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, size.rows, keys);
    if work.is_none {
        terminate!();
    }
    let (queries, of_keys) = sides.queries_and_keys(keys);
    let mut tile_gradient = TileGradient::new(blueprint);
    let mut acc = zeros(comptime!(if differentiates { micro * tile.groups(head_dim) } else { 1 }));
    let mut acc_v = zeros(comptime!(if with_dv { micro * tile.groups(head_dim_v) } else { 1 }));

    let (first, after) = grid.streams(work.head, keys);
    for stream in first..after {
        let (head, head_kv) = if comptime!(keys) { (stream, work.head) } else { (work.head, stream) };
        let of_head = scores.head(work.batch, head, head_kv, work.band, false);
        let visits = visits(&extras, &work.band, work.batch, head, work.start, size);
        tile_gradient.ask(&sides, &of_head.tile(work.start, &visits.tile(0u32), keys), &mut panels);
        for nth in 0..visits.count {
            let at = of_head.tile(work.start, &visits.tile(nth), keys);
            let next = of_head.tile(work.start, &visits.tile(nth + 1), keys);
            let hide = scores.hide(&at);
            tile_gradient.recompute(&sides, &scores, &at, &mut panels, false);
            if comptime!(with_dv) {
                let dout = at.queries(queries.dov);
                panels.ask_right(&dout, head_dim_v);
                panels.share(&tile_gradient.p, true);
                if comptime!(!differentiates) {
                    tile_gradient.ask(&sides, &next, &mut panels);
                }
                panels.accumulate(&dout, &mut acc_v, hide, head_dim_v);
            }
            if comptime!(differentiates) {
                let right =
                    if comptime!(keys) { at.queries(queries.qk) } else { at.keys(Stored::new_Elements(of_keys.qk)) };
                panels.ask_right(&right, head_dim);
                tile_gradient.multiply();
                panels.share(&tile_gradient.ds, keys);
                tile_gradient.ask(&sides, &next, &mut panels);
                panels.accumulate(&right, &mut acc, hide, head_dim);
            }
        }
    }

    let block = work.rows(keys);
    let quads = comptime!(micro.div_ceil(WIDTH));
    #[comptime]
    if let ComptimeOption::Some(dqk) = gradients.dqk {
        panels.store(dqk, &block, &acc, &filled::<Vec4>(Vec4::new(scores.score.scale), quads), head_dim);
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = gradients.dv {
        panels.store(dv, &block, &acc_v, &filled::<Vec4>(Vec4::new(extras.dropout.scale()), quads), head_dim_v);
    }
}
