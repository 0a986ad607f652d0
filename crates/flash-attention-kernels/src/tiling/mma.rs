//! Tiles of the `mma.sync` kernels, chosen by the shared memory of a thread block: 227 KiB on Hopper, 163 KiB on sm_80 and sm_87,
//! 99 KiB on other GPUs from Ampere on.

#[cfg(feature = "autotune")]
use super::Gradient;
use super::hopper::{self, head_group};
use super::{Device, MmaTiles};
use crate::dtype::Dtype;
use crate::fragment::Role;
use crate::mma::{MmaBlueprint, MmaTile, Products};
use crate::problem::{AttentionProblem, Precision};

/// Tiles of the forward. The first row is chosen that fits the larger head dimension and the shared memory.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S       of   shared memory
/// 64        1 × 2                         64    2 × 32 + 2 × 32       255  48 KiB
/// 128       1 × 2                         64    2 × 64 + 2 × 32       255  96 KiB
/// 192       2 × 1                         64    96 + 32               255  144 KiB
/// 192       1 × 1                         32    96 + 16               255  72 KiB
/// 256       2 × 1                         64    128 + 32              255  192 KiB
/// 256       1 × 1                         64    128 + 32              255  160 KiB
/// 256       1 × 1                         32    128 + 16              255  96 KiB
/// ```
///
/// With one group, reading operands from shared memory takes as long as the products; with two groups, half as long. With four
/// warps, a multiprocessor has room for two thread blocks: one computes products while the other one computes exponentials.
const FORWARD: [(usize, MmaTile); 7] = [
    (64, shape(1, 2, 64)),
    (128, shape(1, 2, 64)),
    (192, shape(2, 1, 64)),
    (192, shape(1, 1, 32)),
    (256, shape(2, 1, 64)),
    (256, shape(1, 1, 64)),
    (256, shape(1, 1, 32)),
];

/// Tiles of `dq`, chosen in the same way.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: dQ, S, dP    of   shared memory
/// 64        1 × 2                         64    2 × (32 + 32 + 32)      255  64 KiB
/// 128       1 × 2                         32    2 × (64 + 16 + 16)      255  96 KiB
/// 192       2 × 1                         64    96 + 32 + 32            255  192 KiB
/// 192       1 × 1                         32    96 + 16 + 16            255  96 KiB
/// 256       2 × 1                         32    128 + 16 + 16           255  192 KiB
/// 256       1 × 1                         32    128 + 16 + 16           255  128 KiB
/// 256       1 × 1                         16    128 + 8 + 8             255  96 KiB
/// ```
const DQ: [(usize, MmaTile); 7] = [
    (64, shape(1, 2, 64)),
    (128, shape(1, 2, 32)),
    (192, shape(2, 1, 64)),
    (192, shape(1, 1, 32)),
    (256, shape(2, 1, 32)),
    (256, shape(1, 1, 32)),
    (256, shape(1, 1, 16)),
];

/// Tiles of `dk` and `dv`, chosen in the same way. For head dimensions above 128, each takes its own launch.
///
/// ```text
/// head_dim  keys: warpgroups × groups  queries  registers: dK + dV, S, dP   of   shared memory
/// 64        1 × 2                      32       2 × (64 + 16 + 16)          255  49 KiB
/// 128       2 × 1                      64       128 + 32 + 32               255  129 KiB
/// 128       1 × 1                      64       128 + 32 + 32               255  97 KiB
/// 192       2 × 1                      64       96 + 32 + 32                255  193 KiB
/// 192       1 × 1                      32       96 + 16 + 16                255  97 KiB
/// 256       2 × 1                      32       128 + 16 + 16               255  193 KiB
/// 256       1 × 1                      32       128 + 16 + 16               255  129 KiB
/// 256       1 × 1                      16       128 + 8 + 8                 255  97 KiB
/// ```
const DKDV: [(usize, MmaTile); 8] = [
    (64, shape(1, 2, 32)),
    (128, shape(2, 1, 64)),
    (128, shape(1, 1, 64)),
    (192, shape(2, 1, 64)),
    (192, shape(1, 1, 32)),
    (256, shape(2, 1, 32)),
    (256, shape(1, 1, 32)),
    (256, shape(1, 1, 16)),
];

/// Tiles of the forward in f32 with split tf32 products, chosen in the same way.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S    shared memory
/// 64        1 × 2                         32    2 × (32 + 16)      64 KiB
/// 128       1 × 1                         32    64 + 16            96 KiB
/// 192       2 × 1                         32    96 + 16            192 KiB
/// 192       1 × 1                         16    96 + 8             96 KiB
/// 256       1 × 1                         32    128 + 16           192 KiB
/// 256       1 × 1                         16    128 + 8            128 KiB
/// ```
///
/// Rows have twice the bytes of 16-bit elements. With three products instead of one, reads of operands are not the limit. Registers
/// are: they hold the weights twice.
const FORWARD_SPLIT: [(usize, MmaTile); 6] = [
    (64, shape(1, 2, 32)),
    (128, shape(1, 1, 32)),
    (192, shape(2, 1, 32)),
    (192, shape(1, 1, 16)),
    (256, shape(1, 1, 32)),
    (256, shape(1, 1, 16)),
];

/// Tiles of the forward in f32 with tf32 products, chosen in the same way. As many groups as fit are used, because reads of
/// operands take longest.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S    shared memory
/// 64        1 × 2                         64    2 × (32 + 32)      96 KiB
/// 128       2 × 2                         32    2 × (64 + 16)      192 KiB
/// 128       1 × 2                         32    2 × (64 + 16)      128 KiB
/// 128       1 × 1                         32    64 + 16            96 KiB
/// ```
///
/// Larger head dimensions use the rows of split products.
const FORWARD_TF32: [(usize, MmaTile); 8] = [
    (64, shape(1, 2, 64)),
    (128, shape(2, 2, 32)),
    (128, shape(1, 2, 32)),
    (128, shape(1, 1, 32)),
    FORWARD_SPLIT[2],
    FORWARD_SPLIT[3],
    FORWARD_SPLIT[4],
    FORWARD_SPLIT[5],
];

/// Tiles of the gradients in f32, chosen in the same way. The column of registers is for `dq`, and for `dk` and `dv` together up to
/// head_dim 128, or one of them above.
///
/// ```text
/// head_dim  rows: warpgroups × groups  tile  registers: dQ or dK + dV, S, dP   shared memory
/// 64        1 × 2                      32    2 × (32 or 64 + 16 + 16)          96 KiB
/// 128       2 × 1                      32    64 or 128 + 16 + 16               192 KiB
/// 128       1 × 1                      16    64 or 128 + 8 + 8                 96 KiB
/// 192       1 × 1                      32    96 + 16 + 16                      192 KiB
/// 192       1 × 1                      16    96 + 8 + 8                        144 KiB
/// 256       1 × 1                      16    128 + 8 + 8                       192 KiB
/// ```
const GRADIENTS_F32: [(usize, MmaTile); 6] = [
    (64, shape(1, 2, 32)),
    (128, shape(2, 1, 32)),
    (128, shape(1, 1, 16)),
    (192, shape(1, 1, 32)),
    (192, shape(1, 1, 16)),
    (256, shape(1, 1, 16)),
];

/// Largest head dimension for which `dk` and `dv` are computed together.
const TOGETHER: usize = 128;

const fn shape(warpgroups: usize, groups: usize, tile_k: usize) -> MmaTile {
    MmaTile { warpgroups, groups, tile_k }
}

/// The forward with `mma.sync`, or the reason why it cannot run.
pub fn forward(device: &Device, problem: &AttentionProblem) -> Result<MmaTiles, String> {
    let tile = choose(device, problem, Role::Forward)?;
    Ok(MmaTiles { tile, head_group: head_group(device, problem, &tile.tile(), false) })
}

/// Gradient kernels with `mma.sync`: `dq`, then `dk` and `dv` together, or `dv` in a separate launch.
#[allow(clippy::type_complexity)]
pub fn backward(device: &Device, problem: &AttentionProblem) -> Result<(MmaTiles, MmaTiles, Option<MmaTiles>), String> {
    let of = |role: Role| -> Result<MmaTiles, String> {
        let tile = choose(device, problem, role)?;
        Ok(MmaTiles { tile, head_group: head_group(device, problem, &tile.tile(), role.is_transposed()) })
    };
    let dkdv = |dk, dv| of(Role::DkDv { dk, dv });
    let dq = of(Role::Dq)?;
    if problem.head_dim.max(problem.head_dim_v) <= TOGETHER {
        return Ok((dq, dkdv(true, true)?, None));
    }
    Ok((dq, dkdv(true, false)?, Some(dkdv(false, true)?)))
}

/// The table of tiles for a role.
fn rows(problem: &AttentionProblem, role: Role) -> &'static [(usize, MmaTile)] {
    match (products(problem), role) {
        (Products::F16 | Products::BF16, Role::Forward) => &FORWARD,
        (Products::F16 | Products::BF16, Role::Dq) => &DQ,
        (Products::F16 | Products::BF16, _) => &DKDV,
        (Products::Split, Role::Forward) => &FORWARD_SPLIT,
        (Products::Tf32, Role::Forward) => &FORWARD_TF32,
        (Products::Split | Products::Tf32, _) => &GRADIENTS_F32,
    }
}

fn choose(device: &Device, problem: &AttentionProblem, role: Role) -> Result<MmaTile, String> {
    let rows = rows(problem, role);
    let widest = problem.head_dim.max(problem.head_dim_v);
    let mut why = format!("head_dim {widest} is above {}", rows[rows.len() - 1].0);
    for (_, tile) in rows.iter().filter(|(head_dim, _)| widest <= *head_dim) {
        match check(device, problem, role, *tile) {
            Ok(()) => return Ok(*tile),
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// The blueprint of a kernel, assuming that the rows of a mask or bias differ.
pub fn blueprint(problem: &AttentionProblem, role: Role, tile: MmaTile) -> MmaBlueprint {
    let scores = hopper::blueprint(problem, role, tile.tile(), false);
    MmaBlueprint { tile, scores, products: products(problem) }
}

/// The kind of matrix products.
pub fn products(problem: &AttentionProblem) -> Products {
    match (problem.dtype, problem.options.precision) {
        (Dtype::F16, _) => Products::F16,
        (Dtype::BF16, _) => Products::BF16,
        (Dtype::F32, Precision::Full) => Products::Split,
        (Dtype::F32, Precision::Tf32) => Products::Tf32,
    }
}

/// Checks that these tiles can be used with this number of heads in a head group; else returns the reason.
#[cfg(feature = "cuda")]
pub fn check_head_group(
    device: &Device,
    problem: &AttentionProblem,
    role: Role,
    tile: MmaTile,
    head_group: usize,
) -> Result<(), String> {
    if head_group == 0 {
        return Err("head_group is 0, and 1 is the least".into());
    }
    check(device, problem, role, tile)
}

/// Checks that these tiles can be used; else returns the reason.
pub fn check(device: &Device, problem: &AttentionProblem, role: Role, tile: MmaTile) -> Result<(), String> {
    if !cfg!(feature = "cuda") {
        return Err("it was not compiled: that takes the feature cuda".into());
    }
    if problem.block_mask.is_some() {
        return Err("it visits every tile: a block mask is for other kernels".into());
    }
    if !device.mma.contains(&problem.dtype) {
        return Err(format!("the device has no mma.sync of {} that inline PTX reaches", problem.dtype.name()));
    }
    if !tile.is_consistent() {
        return Err(format!("{tile:?}: rows that are copied at a time must divide tiles"));
    }
    let blueprint = blueprint(problem, role, tile);
    if role.is_transposed() && !blueprint.scores.stats_multiple.is_multiple_of(tile.tile_k) {
        return Err(format!("tiles of {} queries do not divide what scratch fills heads up to", tile.tile_k));
    }
    let (bytes, units) = (blueprint.shared_memory(), tile.units());
    if bytes > device.shared_memory || units > device.units {
        return Err(format!(
            "it takes {bytes} bytes of shared memory and {units} units, the device has {} and {}",
            device.shared_memory, device.units
        ));
    }
    Ok(())
}

/// All forward kernels whose tiles fit, in the order of the table.
#[cfg(feature = "autotune")]
pub fn forwards(device: &Device, problem: &AttentionProblem) -> Vec<MmaTiles> {
    let of = |tile: MmaTile| MmaTiles { tile, head_group: head_group(device, problem, &tile.tile(), false) };
    fitting(device, problem, Role::Forward).into_iter().map(of).collect()
}

/// Alternatives to the result of [`backward`]: the first tiles that fit each gradient, the second ones, and so on.
#[cfg(feature = "autotune")]
pub fn backwards(device: &Device, problem: &AttentionProblem) -> Vec<(Gradient, Gradient, Option<Gradient>)> {
    let of = |role: Role| {
        fitting(device, problem, role).into_iter().map(move |tile| {
            let head_group = head_group(device, problem, &tile.tile(), role.is_transposed());
            Gradient::Mma(MmaTiles { tile, head_group })
        })
    };
    let dkdv = |dk, dv| of(Role::DkDv { dk, dv });
    let dq = of(Role::Dq);
    if problem.head_dim.max(problem.head_dim_v) <= TOGETHER {
        return dq.zip(dkdv(true, true)).map(|(dq, dkdv)| (dq, dkdv, None)).collect();
    }
    dq.zip(dkdv(true, false)).zip(dkdv(false, true)).map(|((dq, dk), dv)| (dq, dk, Some(dv))).collect()
}

/// Tiles of the table that fit, without duplicates. Rows for larger head dimensions are valid for this one, too.
#[cfg(feature = "autotune")]
fn fitting(device: &Device, problem: &AttentionProblem, role: Role) -> Vec<MmaTile> {
    let widest = problem.head_dim.max(problem.head_dim_v);
    let mut tiles: Vec<MmaTile> = Vec::new();
    for (_, tile) in rows(problem, role).iter().filter(|(head_dim, _)| widest <= *head_dim) {
        if !tiles.contains(tile) && check(device, problem, role, *tile).is_ok() {
            tiles.push(*tile);
        }
    }
    tiles
}
