//! Tiles of the kernels with cooperative matrix products, for the shapes that a device offers.

use super::Device;
#[cfg(feature = "autotune")]
use super::Gradient;
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

/// The forward with cooperative matrix products, or the reason why it cannot run.
pub fn forward(device: &Device, problem: &AttentionProblem) -> Result<MatrixTile, String> {
    choose(device, problem, Role::Forward)
}

/// Gradient kernels with cooperative matrix products: `dq`, then `dk` and `dv` together, or `dv` in a separate launch.
#[allow(clippy::type_complexity)]
pub fn backward(
    device: &Device,
    problem: &AttentionProblem,
) -> Result<(MatrixTile, MatrixTile, Option<MatrixTile>), String> {
    let role = |dk, dv| Role::DkDv { dk, dv };
    let dq = choose(device, problem, Role::Dq)?;
    if problem.head_dim + problem.head_dim_v <= MAX_ACCUMULATED {
        return Ok((dq, choose(device, problem, role(true, true))?, None));
    }
    Ok((dq, choose(device, problem, role(true, false))?, Some(choose(device, problem, role(false, true))?)))
}

/// All tiles that fit, in the order of the table.
#[cfg(feature = "autotune")]
pub fn fitting(device: &Device, problem: &AttentionProblem, role: Role) -> Vec<MatrixTile> {
    let Ok(first) = choose(device, problem, role) else { return Vec::new() };
    let tiles = TILES.map(|(planes, columns)| MatrixTile { planes, columns, ..first });
    tiles.into_iter().filter(|tile| check(device, problem, role, *tile).is_ok()).collect()
}

/// Alternatives to the result of [`backward`]: the first tiles that fit each gradient, the second ones, and so on.
#[cfg(feature = "autotune")]
pub fn backwards(device: &Device, problem: &AttentionProblem) -> Vec<(Gradient, Gradient, Option<Gradient>)> {
    let of = |role| fitting(device, problem, role).into_iter().map(Gradient::Matrix);
    let dkdv = |dk, dv| of(Role::DkDv { dk, dv });
    let dq = of(Role::Dq);
    if problem.head_dim + problem.head_dim_v <= MAX_ACCUMULATED {
        return dq.zip(dkdv(true, true)).map(|(dq, dkdv)| (dq, dkdv, None)).collect();
    }
    dq.zip(dkdv(true, false)).zip(dkdv(false, true)).map(|((dq, dk), dv)| (dq, dk, Some(dv))).collect()
}

/// The blueprint of a kernel.
pub fn blueprint(device: &Device, problem: &AttentionProblem, role: Role, tile: MatrixTile) -> Blueprint {
    Blueprint {
        role,
        tile,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        factor: problem.factor_of_product(),
        apart: device.card,
    }
}

fn choose(device: &Device, problem: &AttentionProblem, role: Role) -> Result<MatrixTile, String> {
    if problem.dtype == Dtype::F32 {
        return Err("it computes in f16 and bf16, not f32".into());
    }
    if device.plane == 0 {
        return Err("the device does not say how many units a plane has".into());
    }
    let offered = device.matrices.iter().filter(|(dtype, _)| *dtype == problem.dtype);
    let Some((_, shape)) = offered.min_by_key(|(_, [m, n, k])| m.abs_diff(16) + n.abs_diff(16) + k.abs_diff(16)) else {
        return Err(format!("the device offers no matrix products of {} summed in f32", problem.dtype.name()));
    };
    let tiles = if device.card { &TILES[..] } else { &TILES[TILES.len() - 1..] };
    let mut refusal = String::new();
    for &(planes, columns) in tiles {
        let tile = MatrixTile { planes, plane: device.plane, columns, shape: *shape };
        match check(device, problem, role, tile) {
            Ok(()) => return Ok(tile),
            Err(why) => refusal = why,
        }
    }
    Err(refusal)
}

/// Checks that these tiles can be used; else returns the reason.
pub fn check(device: &Device, problem: &AttentionProblem, role: Role, tile: MatrixTile) -> Result<(), String> {
    if !device.matrices.contains(&(problem.dtype, tile.shape)) || tile.plane != device.plane {
        return Err(format!("the device offers no products of {:?} by planes of {}", tile.shape, tile.plane));
    }
    if !tile.is_consistent() {
        return Err(format!("planes of {} units cannot divide products of {:?} among them", tile.plane, tile.shape));
    }
    let (bytes, units) = (blueprint(device, problem, role, tile).shared_memory(), tile.units());
    if bytes > device.shared_memory || units > device.units {
        return Err(format!(
            "it takes {bytes} bytes of shared memory and {units} units, the device has {} and {}",
            device.shared_memory, device.units
        ));
    }
    Ok(())
}
