//! Tiles of the `mma.sync` kernels, chosen by the shared memory of a thread block: 227 KiB on Hopper, 163 KiB on sm_80 and sm_87,
//! 99 KiB on other GPUs from Ampere on.

use super::hopper::{self, head_group};
use super::{Case, Gradient, MmaTiles, NOT_COMPILED, first, require, row};
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

/// Whether `dk` and `dv` are computed together.
pub fn together(problem: &AttentionProblem) -> bool {
    problem.widest() <= TOGETHER
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

/// The first tiles that fit, or the reason why the kernel cannot run.
pub fn choose(case: Case, role: Role) -> Result<MmaTiles, String> {
    row(rows(case.problem, role), case.problem)?;
    first(candidates(case, role))
}

/// Tiles that fit, in the order of the table and without duplicates.
#[cfg(feature = "autotune")]
pub fn fitting(case: Case, role: Role) -> Vec<MmaTiles> {
    let mut tiles = Vec::new();
    for tile in candidates(case, role).flatten() {
        if !tiles.contains(&tile) {
            tiles.push(tile);
        }
    }
    tiles
}

/// Tiles of the table, or the reasons why they cannot be used. Rows for larger head dimensions are valid for this one, too.
fn candidates(case: Case, role: Role) -> impl Iterator<Item = Result<MmaTiles, String>> {
    let rows = rows(case.problem, role).iter().filter(move |(head_dim, _)| case.problem.widest() <= *head_dim);
    rows.map(move |(_, tile)| {
        let head_group = head_group(case, &tile.tile(), role, 1);
        let tiles = MmaTiles { tile: *tile, head_group };
        check(case, role, tiles).map(|()| tiles)
    })
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

/// Checks that these tiles can be used; else returns the reason.
pub fn check(Case { device, problem }: Case, role: Role, tiles: MmaTiles) -> Result<(), String> {
    let MmaTiles { tile, head_group } = tiles;
    require(head_group > 0, || "head_group is 0; it must be at least 1".into())?;
    require(cfg!(feature = "cuda"), || NOT_COMPILED.into())?;
    require(device.mma.contains(&problem.dtype), || {
        format!("the device has no mma.sync for {} that inline PTX can use", problem.dtype.name())
    })?;
    require(tile.is_consistent(), || {
        format!("{tile:?} is inconsistent: the rows that are copied at a time must divide a tile")
    })?;
    let list = Gradient::Mma(tiles).list(role.is_transposed());
    require(problem.block_mask.is_none() || list.divides_blocks(), || {
        format!("tiles of {}×{} do not divide the blocks of a block mask", list.rows, list.columns)
    })?;
    list.check_words(problem)?;
    let blueprint = blueprint(problem, role, tile);
    require(!role.is_transposed() || blueprint.scores.stats_multiple.is_multiple_of(tile.tile_k), || {
        format!(
            "tiles of {} queries do not divide the multiple to which the scratch pads the rows of a head",
            tile.tile_k
        )
    })?;
    device.has_room(blueprint.shared_memory(), tile.units())
}
