//! Tiles of the kernels with cooperative matrix products, for the shapes that a device offers.

use super::{Case, first, require};
use crate::dtype::Dtype;
use crate::fragment::Role;
use crate::matrix::{Blueprint, MatrixTile};
use crate::problem::AttentionProblem;

/// Warps and columns of a tile. The first row that fits the device is chosen.
///
/// ```text
///                    shared memory of products of 16 × 16 × 16
/// warps   columns    head_dim 64    128           256
/// 8       64         72 KiB         88 KiB        120 KiB
/// 4       64         45 KiB         61 KiB        93 KiB
/// 8       32         39 KiB         47 KiB        63 KiB
/// 4       32         24 KiB         32 KiB        48 KiB
/// 4       16         14 KiB         18 KiB        26 KiB
/// ```
///
/// With more rows, more products share the staged operands. With more columns, there are fewer barriers. A CPU uses the last row:
/// the time of its compiler grows with the square of the unrolled code, to minutes for the first row.
const TILES: [(usize, usize); 5] = [(8, 64), (4, 64), (8, 32), (4, 32), (4, 16)];

/// Largest number of columns that a thread accumulates for `dk` and `dv` together. Beyond it registers run out, and `dk` and `dv`
/// take one launch each.
const MAX_ACCUMULATED: usize = 128;

/// Whether `dk` and `dv` are computed together.
pub fn together(problem: &AttentionProblem) -> bool {
    problem.head_dim + problem.head_dim_v <= MAX_ACCUMULATED
}

/// All tiles that fit, in the order of the table.
#[cfg(feature = "autotune")]
pub fn fitting(case: Case, role: Role) -> Vec<MatrixTile> {
    let Ok(chosen) = choose(case, role) else { return Vec::new() };
    let tiles = TILES.map(|(planes, columns)| MatrixTile { planes, columns, ..chosen });
    tiles.into_iter().filter(|tile| check(case, role, *tile).is_ok()).collect()
}

/// The blueprint of a kernel.
pub fn blueprint(Case { device, problem }: Case, role: Role, tile: MatrixTile) -> Blueprint {
    Blueprint {
        role,
        tile,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        factor: problem.factor_of_product(),
        apart: device.card,
    }
}

/// The first tiles that fit, or the reason why the kernel cannot run.
pub fn choose(case: Case, role: Role) -> Result<MatrixTile, String> {
    let Case { device, problem } = case;
    require(problem.dtype != Dtype::F32, || "it computes in f16 and bf16 only, and q is f32".into())?;
    require(device.plane > 0, || "the device does not report the number of threads of a subgroup".into())?;
    let offered = device.matrices.iter().filter(|(dtype, _)| *dtype == problem.dtype);
    let Some((_, shape)) = offered.min_by_key(|(_, [m, n, k])| m.abs_diff(16) + n.abs_diff(16) + k.abs_diff(16)) else {
        return Err(format!("the device offers no matrix products of {} summed in f32", problem.dtype.name()));
    };
    let tiles = if device.card { &TILES[..] } else { &TILES[TILES.len() - 1..] };
    first(tiles.iter().map(|&(planes, columns)| {
        let tile = MatrixTile { planes, plane: device.plane, columns, shape: *shape };
        check(case, role, tile).map(|()| tile)
    }))
}

/// Checks that these tiles can be used; else returns the reason.
pub fn check(case: Case, role: Role, tile: MatrixTile) -> Result<(), String> {
    let Case { device, problem } = case;
    let MatrixTile { plane, shape, .. } = tile;
    require(device.matrices.contains(&(problem.dtype, shape)) && plane == device.plane, || {
        format!("the device offers no matrix products of shape {shape:?} for subgroups of {plane} threads")
    })?;
    require(tile.is_consistent(), || {
        format!("subgroups of {plane} threads cannot distribute products of shape {shape:?}")
    })?;
    device.has_room(blueprint(case, role, tile).shared_memory(), tile.units())
}
