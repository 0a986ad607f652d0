//! Tiles of the portable kernels.

use super::{Case, Device, Kernel, PassedOver};
use crate::error::{AttentionError, Result};
use crate::fragment::{Role, Vec4, WIDTH};
use crate::portable::Blueprint;
use crate::portable::dbias::Sums;
use crate::portable::tile::TileShape;
use crate::problem::AttentionProblem;
use crate::score::Factor;

const VEC4_BYTES: usize = size_of::<f32>() * WIDTH;
const _: fn(Vec4) = |_| ();

/// Tiles of the portable kernels. The first one that fits the device is chosen.
///
/// ```text
/// tile_q × tile_k  threads  micro  chunk  shared memory (forward)   where it fits
/// 64 × 64          8 × 16   8 × 4  64     56,320 bytes              CUDA
/// 64 × 64          16 × 16  4 × 4  32     48,128 bytes              desktop GPUs through Vulkan (48 KiB)
/// 64 × 32          16 × 8   4 × 4  32     25,088 bytes              integrated and Apple GPUs (32 KiB)
/// 32 × 32          8 × 8    4 × 4  32     14,848 bytes              what WebGPU promises everywhere (16 KiB)
/// ```
///
/// A micro tile of 8 × 4 reads 12 vectors for 128 multiply-adds. It is therefore bound by arithmetic and not by shared memory, and
/// leaves registers for several thread blocks on a multiprocessor. Through Vulkan, 4 × 4 was faster in the backward
/// (docs/performance.md).
const PORTABLE: [TileShape; 4] = [
    TileShape { tile_q: 64, tile_k: 64, units_q: 8, units_k: 16, chunk: 64 },
    TileShape { tile_q: 64, tile_k: 64, units_q: 16, units_k: 16, chunk: 32 },
    TileShape { tile_q: 64, tile_k: 32, units_q: 16, units_k: 8, chunk: 32 },
    TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 },
];

/// Largest number of vectors that a thread accumulates for `dk` and `dv` together. Beyond it registers run out, and `dk` and `dv`
/// take one launch each.
const MAX_ACCUMULATED: usize = 16;

/// Portable kernels, grouped by their use of shared memory.
///
/// ```
/// use flash_attention_kernels::{TileShape, tiling::{Stage, shared_memory}};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(shared_memory(&tile, Stage::Forward), 14848);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The forward.
    Forward,
    /// The backward.
    Backward,
}

/// Bytes of shared memory of a thread block with these tiles: the maximum over the kernels of the stage.
///
/// ```
/// use flash_attention_kernels::{TileShape, tiling::{Stage, shared_memory}};
///
/// let tile = TileShape { tile_q: 64, tile_k: 64, units_q: 16, units_k: 16, chunk: 32 };
/// assert!(shared_memory(&tile, Stage::Backward) <= 48 << 10);
/// ```
pub fn shared_memory(tile: &TileShape, stage: Stage) -> usize {
    let (q, k) = (tile.tile_q, tile.tile_k);
    let vectors = match stage {
        Stage::Forward => tile.panel_a() + tile.panel_b(k) + q * TileShape::pitch(k) + tile.board(),
        Stage::Backward => {
            let dq = tile.panel_b(k) + q * TileShape::pitch(k);
            let dkdv = tile.panel_b(q) + k * TileShape::pitch(q);
            let board = |sums| tile.sums_board(sums).div_ceil(WIDTH);
            let dbias = tile.panel_b(0) + 1 + board(Sums::Rows).max(board(Sums::Columns));
            tile.panel_a() + dq.max(dkdv).max(dbias)
        }
    };
    vectors * VEC4_BYTES
}

/// Checks that a thread block with these tiles fits the device; else returns the reason.
fn check(device: &Device, tile: &TileShape, stage: Stage) -> Result<(), String> {
    device.has_room(shared_memory(tile, stage), tile.units())
}

/// Checks tiles that the caller chose.
pub(crate) fn check_tile(case: Case, tile: &TileShape, stage: Stage) -> Result<()> {
    if !tile.is_consistent() {
        return Err(AttentionError::Unsupported {
            option: "tile",
            value: format!("{tile:?}"),
            why: "its threads must divide it into runs of a multiple of 4, and its chunk must be a multiple of 4",
        });
    }
    check(case.device, tile, stage).map_err(|_| no_tile_fits(case, tile, stage))
}

fn no_tile_fits(Case { device, problem }: Case, tile: &TileShape, stage: Stage) -> AttentionError {
    AttentionError::NoTileFits {
        head_dim: problem.widest(),
        tile_q: tile.tile_q,
        tile_k: tile.tile_k,
        needed: shared_memory(tile, stage),
        units: tile.units(),
        available: device.shared_memory,
        max_units: device.units,
    }
}

pub(super) fn choose(case: Case, stage: Stage, passed_over: &mut Vec<PassedOver>) -> Result<TileShape> {
    let name = if stage == Stage::Forward { "forward" } else { "backward" };
    for tile in PORTABLE {
        match check(case.device, &tile, stage) {
            Ok(()) => return Ok(tile),
            Err(why) => passed_over.push(PassedOver { what: format!("{name} {}×{}", tile.tile_q, tile.tile_k), why }),
        }
    }
    Err(no_tile_fits(case, &PORTABLE[PORTABLE.len() - 1], stage))
}

#[cfg(feature = "autotune")]
pub(super) fn fitting(device: &Device, stage: Stage) -> impl Iterator<Item = TileShape> {
    PORTABLE.into_iter().filter(move |tile| check(device, tile, stage).is_ok())
}

/// Whether `dk` and `dv` are computed together.
pub(super) fn together(case: Case, tile: &TileShape) -> bool {
    let rows = tile.tile_k / tile.units_q;
    let accumulated = rows * (tile.groups(case.problem.head_dim) + tile.groups(case.problem.head_dim_v));
    accumulated <= MAX_ACCUMULATED && case.check_bindings("dkdv", 7).is_ok()
}

/// [`blueprint()`] of a portable gradient kernel that runs next to kernels of another family. Scores are recomputed with the same
/// rounding as in these kernels and their forward.
pub(crate) fn blueprint_beside(
    kernel: Kernel,
    problem: &AttentionProblem,
    tile: TileShape,
    factor: Factor,
) -> Blueprint {
    let tf32 = kernel == Kernel::Mma && problem.rounds_to_tf32();
    Blueprint { tf32, factor, ..blueprint(problem, Role::Dq, tile) }
}

/// The blueprint of a kernel with these tiles.
pub(crate) fn blueprint(problem: &AttentionProblem, role: Role, tile: TileShape) -> Blueprint {
    let factor = if role.differentiates() { problem.factor_of_product() } else { Factor::One };
    Blueprint { role, tile, head_dim: problem.head_dim, head_dim_v: problem.head_dim_v, factor, tf32: false }
}
