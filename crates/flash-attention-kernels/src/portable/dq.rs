//! Gradient of the queries, one thread block for each block of queries of a head.
//!
//! ```text
//! for each block of keys that the queries see:      dS = P ∘ (dout Vᵀ − delta) ∘ factor     dQ += dS K
//! dq = scale · dQ
//! ```

use super::Blueprint;
use super::gradient::*;
use super::tile::*;
use crate::blocks::{TileSize, visits};
use crate::fragment::grid::Grid;
use crate::fragment::operands::BackwardOperands;
use crate::fragment::rows::zeros;
use crate::fragment::scores::Scores;
use cubecl::prelude::*;

/// Computes `dq [B, H, Sq, D]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dq<F: Float, M: Numeric, N: Size>(
    operands: BackwardOperands<F, N>,
    scores: Scores<F, M>,
    dq: &mut Tensor<Vector<F, N>>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, head_dim) = comptime!((blueprint.tile, blueprint.head_dim));
    let size = comptime!(TileSize { rows: tile.tile_q as u32, columns: tile.tile_k as u32, keys: false });
    let mut panels = Panels::new(comptime!(tile.tile_q * TileShape::pitch(tile.tile_k)), tile.tile_k, tile);
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, size.rows, false);
    if work.is_none {
        terminate!();
    }
    let of_head = scores.head(work.batch, work.head, work.head / grid.group_size as usize, work.band, false);
    let mut tile_gradient = TileGradient::new(blueprint);
    let mut acc = zeros(comptime!(tile.micro_q() * tile.groups(head_dim)));

    let visits = visits(&extras, &work.band, work.batch, work.head, work.start, size);
    ask(&operands, &of_head.tile(work.start, &visits.tile(0u32), false), &mut panels, blueprint);
    for nth in 0..visits.count {
        let at = of_head.tile(work.start, &visits.tile(nth), false);
        let wanted = comptime!(Wanted { ds: true, anywhere: false });
        recompute(&operands, &scores, &at, &mut panels, &mut tile_gradient, wanted, blueprint);
        let k = operands.inputs.k_rows(&at);
        let product = comptime!(Product { rows: tile.tile_q, depth: tile.tile_k, head_dim });
        panels.ahead.ask_right(&k, 0usize, product, tile);
        tile_gradient.multiply(blueprint);
        share(&tile_gradient.ds, &mut panels.p, panels.me, tile);
        ask(&operands, &of_head.tile(work.start, &visits.tile(nth + 1), false), &mut panels, blueprint);
        accumulate(&k, &mut panels, &mut acc, scores.hide(&at), product, tile);
    }

    let factors = uniform(scores.score.scale, comptime!(tile.micro_q()));
    store(dq, &work.rows(false), &acc, &factors, tile.tile_q, head_dim, tile);
}
