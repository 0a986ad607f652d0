//! Tiles of the kernels whose threads hold whole rows.

use super::{Device, Kernel};
use crate::blocks::BLOCK;
use crate::fragment::role::Role;
use crate::problem::AttentionProblem;
use crate::rows::{Blueprint, RowsTile};

/// Elements of the rows of a thread, of each tensor. More are faster — what is read serves more rows — but compilers take longer than
/// they save: with 512 in place of 256, at head_dim 64, llvmpipe's takes 13 s in place of 4 for forward and backward, of which the
/// one is 1.1 times as fast and the other not at all.
const HELD: usize = 256;

/// Rows of a thread at most: what does not depend on head_dim, the softmax, is written out for each.
const MAX_ROWS: usize = 8;

/// Blocks of a head at least, so that there are some for each core.
const BLOCKS: usize = 4;

/// Threads of a thread block where a warp's size is not known.
const UNITS: usize = 32;

/// Whether they are to run: where they are asked for, or nothing is and the device is a processor, whose warps are vectors of a
/// few lanes, with no card behind it.
pub fn wanted(device: &Device, asked: Option<Kernel>) -> bool {
    asked.map_or(!device.card && (1..=16).contains(&device.plane), |asked| asked == Kernel::Rows)
}

/// How they compute `dq`; `dk`, and `dv` with it; and `dv`, if it takes a launch of its own.
pub fn backward(device: &Device, problem: &AttentionProblem) -> (RowsTile, RowsTile, Option<RowsTile>) {
    let dkdv = |dk, dv| tile(device, problem, Role::DkDv { dk, dv });
    let dq = tile(device, problem, Role::Dq);
    match super::check_bindings(device, problem, "dkdv", 7) {
        Ok(()) => (dq, dkdv(true, true), None),
        Err(_) => (dq, dkdv(true, false), Some(dkdv(false, true))),
    }
}

/// Tiles of a kernel.
pub fn tile(device: &Device, problem: &AttentionProblem, role: Role) -> RowsTile {
    let length = if role.is_transposed() { problem.seq_k } else { problem.seq_q };
    let units = if device.plane > 0 { device.plane } else { UNITS }.min(device.units);
    // Blocks of rows divide those of a block mask.
    let most_rows = if problem.block_mask.is_some() { BLOCK / units.next_power_of_two() } else { MAX_ROWS };
    let held = HELD / problem.head_dim.max(problem.head_dim_v).max(1);
    let most = held.min(MAX_ROWS).min(most_rows).min(length / (BLOCKS * units));
    // The power of two that is no more.
    RowsTile { units, rows: (most.max(1) + 1).next_power_of_two() / 2 }
}

/// The same with half as many rows, where there are several, and with twice as many.
#[cfg(feature = "autotune")]
pub fn alternatives(tile: RowsTile) -> Vec<RowsTile> {
    [tile.rows / 2, tile.rows * 2].into_iter().filter(|rows| *rows > 0).map(|rows| RowsTile { rows, ..tile }).collect()
}

/// What a kernel is specialised for.
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

/// Why these tiles cannot be used, if they cannot.
pub fn check(device: &Device, tile: RowsTile) -> Result<(), String> {
    let RowsTile { units, rows } = tile;
    if units == 0 || rows == 0 {
        return Err(format!("it takes units and rows, not {units} and {rows}"));
    }
    if units > device.units {
        return Err(format!("it takes {units} units, the device has {}", device.units));
    }
    Ok(())
}
