//! Where one kernel computes all gradients of wide heads.

use super::super::require;
use crate::fragment::Role;
use crate::hopper::wide::WideBlueprint;
use crate::problem::AttentionProblem;
use crate::tensor_core::HopperTile;

/// Largest head dimension at which a thread holds the sums of dK and dV of a warpgroup's 64 keys.
const NARROW: usize = 128;

/// Whether the kernel of this role is the one that computes all three gradients of [wide heads](crate::hopper::wide).
pub(crate) fn is_wide(problem: &AttentionProblem, role: Role) -> bool {
    role == Role::All && problem.widest() > NARROW
}

/// Rows of a work tile: queries, or keys if transposed.
pub(super) fn rows_of_block(problem: &AttentionProblem, tile: &HopperTile, role: Role) -> usize {
    if is_wide(problem, role) { tile.tile_k } else { tile.tile_q() }
}

/// The blueprint of the kernel for wide heads, with the assumptions of [`blueprint()`](super::blueprint()).
pub(super) fn blueprint(problem: &AttentionProblem, tile: HopperTile) -> WideBlueprint {
    WideBlueprint::new(tile, super::blueprint(problem, Role::Dq, tile, false))
}

/// Checks that there is a kernel for wide heads with this tile.
pub(super) fn check(problem: &AttentionProblem, tile: HopperTile) -> Result<(), String> {
    let (head_dim, head_dim_v) = (problem.head_dim, problem.head_dim_v);
    require(problem.block_mask.is_none(), || "with a block mask, tiles do not divide its blocks".into())?;
    require(!Role::All.adds_in_order(problem), || {
        format!("head_dim {} is above {NARROW}, where blocks of keys add to dq in any order only", problem.widest())
    })?;
    require(blueprint(problem, tile).is_consistent(), || {
        format!(
            "head_dim and head_dim_v are {head_dim} and {head_dim_v}, and both must be at most {NARROW}, or both from 193 to 256"
        )
    })
}
