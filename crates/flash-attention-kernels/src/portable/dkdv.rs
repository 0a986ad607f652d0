//! Gradients of keys and values, one thread block for each block of keys of a key/value head.
//!
//! ```text
//! for each query head of the group, for each block of its queries that sees the keys:
//!     dV += Pᵀ dout      dS = P ∘ (dout Vᵀ − delta) ∘ factor     dK += dSᵀ Q
//! dk = scale · dK      dv = dV
//! ```
//!
//! The query heads of a group are summed in this kernel, in order. Grouped heads therefore need no buffer of repeated heads and no
//! atomics. Either gradient may be left out.

use super::Blueprint;
use super::gradient::*;
use super::tile::*;
use crate::blocks::{TileSize, visits};
use crate::fragment::grid::Grid;
use crate::fragment::operands::BackwardOperands;
use crate::fragment::rows::zeros;
use crate::fragment::scores::Scores;
use cubecl::prelude::*;

/// Computes `dk [B, Hkv, Sk, D]` and `dv [B, Hkv, Sk, Dv]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dkdv<F: Float, M: Numeric, N: Size>(
    operands: BackwardOperands<F, N>,
    scores: Scores<F, M>,
    dk: ComptimeOption<&mut Tensor<Vector<F, N>>>,
    dv: ComptimeOption<&mut Tensor<Vector<F, N>>>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (tile, head_dim, head_dim_v) = comptime!((blueprint.tile, blueprint.head_dim, blueprint.head_dim_v));
    let size = comptime!(TileSize { rows: tile.tile_k as u32, columns: tile.tile_q as u32, keys: true });
    let (with_dk, with_dv) = comptime!((dk.is_some(), dv.is_some()));
    let rows = comptime!(tile.tile_k / tile.units_q);
    let mut panels = Panels::new(comptime!(tile.tile_k * TileShape::pitch(tile.tile_q)), tile.tile_q, tile);
    let extras = scores.score.extras;
    let work = grid.work(CUBE_POS, &extras, &scores.band, size.rows, true);
    if work.is_none {
        terminate!();
    }
    let group_size = grid.group_size as usize;
    let mut tile_gradient = TileGradient::new(blueprint);
    let mut acc_k = zeros(comptime!(if with_dk { rows * tile.groups(head_dim) } else { 1 }));
    let mut acc_v = zeros(comptime!(if with_dv { rows * tile.groups(head_dim_v) } else { 1 }));

    for member in 0..group_size {
        let head = work.head * group_size + member;
        let of_head = scores.head(work.batch, head, work.head, work.band, false);
        let visits = visits(&extras, &work.band, work.batch, head, work.start, size);
        ask(&operands, &of_head.tile(work.start, &visits.tile(0u32), true), &mut panels, blueprint);
        for nth in 0..visits.count {
            let at = of_head.tile(work.start, &visits.tile(nth), true);
            let next = of_head.tile(work.start, &visits.tile(nth + 1), true);
            let hide = scores.hide(&at);
            let wanted = comptime!(Wanted { ds: with_dk, anywhere: false });
            recompute(&operands, &scores, &at, &mut panels, &mut tile_gradient, wanted, blueprint);
            if comptime!(with_dv) {
                let dout = operands.dout_rows(&at);
                let product = comptime!(Product { rows: tile.tile_k, depth: tile.tile_q, head_dim: head_dim_v });
                panels.ahead.ask_right(&dout, 0usize, product, tile);
                share_transposed(&tile_gradient.p, &mut panels.p, panels.me, tile);
                if comptime!(!with_dk) {
                    ask(&operands, &next, &mut panels, blueprint);
                }
                accumulate(&dout, &mut panels, &mut acc_v, hide, product, tile);
            }
            if comptime!(with_dk) {
                let q = operands.inputs.q_rows(&at);
                let product = comptime!(Product { rows: tile.tile_k, depth: tile.tile_q, head_dim });
                panels.ahead.ask_right(&q, 0usize, product, tile);
                tile_gradient.multiply(blueprint);
                share_transposed(&tile_gradient.ds, &mut panels.p, panels.me, tile);
                ask(&operands, &next, &mut panels, blueprint);
                accumulate(&q, &mut panels, &mut acc_k, hide, product, tile);
            }
        }
    }

    let block = work.rows(true);
    #[comptime]
    if let ComptimeOption::Some(dk) = dk {
        store(dk, &block, &acc_k, &uniform(scores.score.scale, rows), tile.tile_k, head_dim, tile);
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = dv {
        store(dv, &block, &acc_v, &uniform(extras.dropout.scale(), rows), tile.tile_k, head_dim_v, tile);
    }
}
