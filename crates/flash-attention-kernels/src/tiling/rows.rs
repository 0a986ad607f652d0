//! Tiles of the kernels whose threads process whole rows.

use super::{Case, Device, Kernel, require};
use crate::blocks::BLOCK;
use crate::fragment::Role;
use crate::problem::AttentionProblem;
use crate::rows::{Blueprint, RowsTile};

/// Number of elements of a thread's rows, for each tensor. With more elements the kernels are faster, since each operand read
/// serves more rows, but compilation takes longer than that saves. At head_dim 64, with 512 instead of 256 elements, llvmpipe's
/// compiler takes 13 s instead of 4 s for forward and backward; the forward is 1.1 times as fast, and the backward is not faster.
const HELD: usize = 256;

/// Largest number of rows of a thread. The code of the softmax, which does not depend on head_dim, is unrolled for each row.
const MAX_ROWS: usize = 8;

/// Smallest number of blocks of a head, so that every core has some.
const BLOCKS: usize = 4;

/// Threads of a thread block if the warp size is unknown.
const UNITS: usize = 32;

/// Whether these kernels are chosen: if they are requested, or if no kernel is requested and the device is a CPU, whose warps are
/// vectors of a few lanes, without a GPU behind it.
pub fn wanted(device: &Device, asked: Option<Kernel>) -> bool {
    asked.map_or(!device.card && (1..=16).contains(&device.plane), |asked| asked == Kernel::Rows)
}

/// Whether `dk` and `dv` are computed together.
pub fn together(case: Case) -> bool {
    case.check_bindings("dkdv", 7).is_ok()
}

/// The tile of a kernel.
pub fn tile(Case { device, problem }: Case, role: Role) -> RowsTile {
    let length = if role.is_transposed() { problem.seq_k } else { problem.seq_q };
    let units = if device.plane > 0 { device.plane } else { UNITS }.min(device.units);
    // Blocks of rows must divide the blocks of a block mask.
    let most_rows = if problem.block_mask.is_some() { BLOCK / units.next_power_of_two() } else { MAX_ROWS };
    let held = HELD / problem.widest().max(1);
    let most = held.min(MAX_ROWS).min(most_rows).min(length / (BLOCKS * units));
    // The largest power of two that is not greater.
    RowsTile { units, rows: (most.max(1) + 1).next_power_of_two() / 2 }
}

/// The tile with half as many rows, if there are several, and with twice as many.
#[cfg(feature = "autotune")]
pub fn alternatives(tile: RowsTile) -> Vec<RowsTile> {
    [tile.rows / 2, tile.rows * 2].into_iter().filter(|rows| *rows > 0).map(|rows| RowsTile { rows, ..tile }).collect()
}

/// The blueprint of a kernel.
pub fn blueprint(problem: &AttentionProblem, role: Role, tile: RowsTile) -> Blueprint {
    let band = problem.band();
    Blueprint {
        role,
        tile,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        factor: problem.factor_of_product(),
        careful: band.bounded_below || band.bounded_above || problem.hides_pairs() || problem.is_varlen(),
    }
}

/// Checks that these tiles can be used; else returns the reason.
pub fn check(device: &Device, tile: RowsTile) -> Result<(), String> {
    let RowsTile { units, rows } = tile;
    require(units > 0 && rows > 0, || format!("units is {units} and rows is {rows}; both must be at least 1"))?;
    require(units <= device.units, || {
        format!("it needs {units} threads per thread block, but the device has {}", device.units)
    })
}
