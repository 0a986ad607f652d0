//! The only place that chooses kernels and tile shapes, from the properties that a device reports. Each kernel family has its own
//! file of tiles.

mod choice;
mod device;
pub(crate) mod hopper;
mod lists;
pub(crate) mod matrix;
pub(crate) mod mma;
mod plan;
mod portable;
pub(crate) mod rows;

pub use choice::{
    BackwardTiles, BiasGradient, FamilyTiles, Forward, Gradient, HopperForward, HopperGradient, Kernel, MmaTiles,
};
pub use device::{Device, element_type};
pub(crate) use device::{check_bindings, check_dtype, cube_count, grid};
#[cfg(feature = "cuda")]
pub(crate) use hopper::varies_by_pair;
pub(crate) use hopper::{COUNTER_BYTES, COUNTERS, stats_multiple};
pub(crate) use lists::ListShape;
pub use plan::{PassedOver, Plan, plan, plan_on, plan_with};
pub use portable::{Stage, shared_memory};
pub(crate) use portable::{blueprint, blueprint_beside, check_tile};

use crate::blocks::BLOCK;
use crate::error::AttentionError;
use crate::fragment::Role;
use crate::hopper::dq_accum_columns;
use crate::portable::dbias::Sums;
use crate::problem::{AttentionProblem, BackwardOrder};
use crate::sequences;
use cubecl::prelude::CubeCount;

/// Chooses the forward: the most preferred kernel that supports the problem, or the requested one.
pub(crate) fn choose_forward(
    device: &Device,
    problem: &AttentionProblem,
    asked: Option<Kernel>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<Forward, AttentionError> {
    for kernel in [Kernel::Hopper, Kernel::Mma, Kernel::Matrix] {
        if asked.is_some_and(|asked| asked != kernel) {
            continue;
        }
        let found = match kernel {
            Kernel::Hopper => hopper::forward(device, problem).map(Forward::Hopper),
            Kernel::Mma => mma::forward(device, problem).map(Forward::Mma),
            _ => matrix::forward(device, problem).map(Forward::Matrix),
        };
        match found {
            Ok(forward) => return Ok(forward),
            Err(why) if asked == Some(kernel) => {
                return Err(AttentionError::KernelUnavailable { kernel: kernel.name(), why });
            }
            Err(why) => passed_over.push(PassedOver { what: format!("forward {}", kernel.name()), why }),
        }
    }
    if rows::wanted(device, asked) {
        return Ok(Forward::Rows(rows::tile(device, problem, Role::Forward)));
    }
    Ok(Forward::Portable(portable::choose(device, problem, Stage::Forward, passed_over)?))
}

/// Chooses the backward: the most preferred kernels that support the problem, or the requested ones.
pub(crate) fn choose_backward(
    device: &Device,
    problem: &AttentionProblem,
    asked: Option<Kernel>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<BackwardTiles, AttentionError> {
    let mut pass_over = |kernel: Kernel, why| {
        passed_over.push(PassedOver { what: format!("backward {}", kernel.name()), why });
    };
    let asked_for = |kernel| asked.is_none_or(|asked| asked == kernel);
    let hopper = asked_for(Kernel::Hopper).then(|| hopper::backward(device, problem));
    let hopper = hopper.and_then(|found| found.map_err(|why| pass_over(Kernel::Hopper, why)).ok());
    let gradients = [Kernel::Mma, Kernel::Matrix].into_iter().filter(|kernel| hopper.is_none() && asked_for(*kernel));
    let gradients = gradients.into_iter().find_map(|kernel| {
        let found = match kernel {
            Kernel::Mma => mma::backward(device, problem).map(|found| of(found, Gradient::Mma)),
            _ => matrix::backward(device, problem).map(|found| of(found, Gradient::Matrix)),
        };
        found.map_err(|why| pass_over(kernel, why)).ok()
    });
    let rows = || rows::wanted(device, asked).then(|| of(rows::backward(device, problem), Gradient::Rows));
    let gradients = gradients.or_else(rows);
    let tile = portable::choose(device, problem, Stage::Backward, passed_over)?;
    let dalibi_slopes = problem.alibi_slopes.map(|_| tile);
    let reads = problem.score_tensors.iter().any(Option::is_some);
    let dscore_tensors = reads.then_some(tile);
    Ok(match (hopper, gradients) {
        (Some((dq, dkdv, dv)), _) => {
            let dbias = hopper::dbias(problem).map(BiasGradient::Hopper).unwrap_or_else(|why| {
                if problem.bias.is_some() {
                    passed_over.push(PassedOver { what: format!("dbias {}", Kernel::Hopper.name()), why });
                }
                BiasGradient::Portable(tile)
            });
            let fused = match problem.options.backward_order {
                BackwardOrder::Deterministic => None,
                BackwardOrder::Fast => hopper::fused(device, problem)
                    .map_err(|why| passed_over.push(PassedOver { what: "dq, dk and dv together".into(), why }))
                    .ok(),
            };
            BackwardTiles { dq, dkdv, dv, fused, dbias, dalibi_slopes, dscore_tensors }
        }
        (None, Some((dq, dkdv, dv))) => {
            BackwardTiles { dq, dkdv, dv, dalibi_slopes, dscore_tensors, ..BackwardTiles::portable(tile, true) }
        }
        (None, None) => {
            let portable = BackwardTiles::portable(tile, portable::together(device, problem, &tile));
            BackwardTiles { dalibi_slopes, dscore_tensors, ..portable }
        }
    })
}

/// Gradient kernels of a family: `dq`, then `dk` and `dv` together, or `dv` in a separate launch.
fn of<T>(
    (dq, dkdv, dv): (T, T, Option<T>),
    gradient: impl Fn(T) -> Gradient,
) -> (Gradient, Gradient, Option<Gradient>) {
    (gradient(dq), gradient(dkdv), dv.map(gradient))
}

/// Forward kernels worth timing against each other: the planned one first, then at most `limit − 1` others of its family, in the
/// order of its table. All of them can run on the device.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, Kernel};
/// use flash_attention_kernels::tiling::{Device, forward_candidates};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [1, 8, 1024, 64];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// for forward in forward_candidates(&Device::of(client), &problem, 3)? {
///     println!("{} of {} queries", forward.kernel().name(), forward.tile_q());
/// }
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "autotune")]
pub fn forward_candidates(
    device: &Device,
    problem: &AttentionProblem,
    limit: usize,
) -> Result<Vec<Forward>, AttentionError> {
    let planned = choose_forward(device, problem, None, &mut Vec::new())?;
    let others: Vec<Forward> = match planned {
        Forward::Hopper(planned) => {
            hopper::alternatives(device, problem, planned).into_iter().map(Forward::Hopper).collect()
        }
        Forward::Mma(_) => mma::forwards(device, problem).into_iter().map(Forward::Mma).collect(),
        Forward::Matrix(_) => {
            matrix::fitting(device, problem, Role::Forward).into_iter().map(Forward::Matrix).collect()
        }
        Forward::Rows(tile) => rows::alternatives(tile).into_iter().map(Forward::Rows).collect(),
        Forward::Portable(_) => portable::fitting(device, Stage::Forward).map(Forward::Portable).collect(),
    };
    let others = others
        .into_iter()
        .filter(|other| *other != planned && plan::check_forward_cubes(device, problem, other).is_ok());
    Ok(std::iter::once(planned).chain(others).take(limit).collect())
}

/// Backward kernels worth timing against each other, in the same order. Each sums in a fixed order, unless the problem asks for
/// [`BackwardOrder::Fast`].
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_kernels::tiling::{Device, backward_candidates};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [1, 8, 1024, 64];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// assert!(backward_candidates(&Device::of(client), &problem, 3)?.iter().all(|tiles| tiles.fused.is_none()));
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "autotune")]
pub fn backward_candidates(
    device: &Device,
    problem: &AttentionProblem,
    limit: usize,
) -> Result<Vec<BackwardTiles>, AttentionError> {
    let planned = choose_backward(device, problem, None, &mut Vec::new())?;
    let gradients = |(dq, dkdv, dv)| BackwardTiles { dq, dkdv, dv, ..planned };
    let others: Vec<BackwardTiles> = match planned.dq {
        // The tables have one row for each head dimension. If any order of summation is allowed, there are two alternatives.
        Gradient::Hopper(_) => planned.fused.map(|_| BackwardTiles { fused: None, ..planned }).into_iter().collect(),
        Gradient::Mma(_) => mma::backwards(device, problem).into_iter().map(gradients).collect(),
        Gradient::Matrix(_) => matrix::backwards(device, problem).into_iter().map(gradients).collect(),
        Gradient::Rows(tile) => {
            let others = rows::alternatives(tile).into_iter().map(Gradient::Rows);
            others.map(|of| gradients((of, of, planned.dv.map(|_| of)))).collect()
        }
        Gradient::Portable(_) => portable::fitting(device, Stage::Backward)
            .map(|tile| BackwardTiles::portable(tile, portable::together(device, problem, &tile)))
            .map(|tiles| {
                let BackwardTiles { dalibi_slopes, dscore_tensors, .. } = planned;
                BackwardTiles { dalibi_slopes, dscore_tensors, ..tiles }
            })
            .collect(),
    };
    let others = others
        .into_iter()
        .filter(|other| *other != planned && plan::check_backward_cubes(device, problem, other).is_ok());
    Ok(std::iter::once(planned).chain(others).take(limit).collect())
}

/// The kernel that computes `dq`, `dk` and `dv` in one launch on such a device, whether or not it would be chosen.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionProblem, tiling::{Device, fused_on}};
///
/// # fn f(client: &cubecl::client::Client, problem: &AttentionProblem) {
/// if let Some(gradient) = fused_on(&Device::of(client), problem) {
///     println!("tiles of {} queries", gradient.tile.tile_k);
/// }
/// # }
/// ```
pub fn fused_on(device: &Device, problem: &AttentionProblem) -> Option<HopperGradient> {
    hopper::fusible(device, problem).ok().map(|(_, gradient)| gradient)
}

/// Number of f32 values of the backward's scratch: lse and delta of each row, partial sums for the gradients of bias, slopes and
/// score tensors, and `dq_accum`.
pub(crate) fn scratch_floats(device: &Device, problem: &AttentionProblem) -> usize {
    let columns = if adds_dq(device, problem) { dq_accum_columns(problem.head_dim) } else { 0 };
    (2 + columns) * stats_rows(problem) + bias_sums_len(problem)
}

/// Whether blocks of keys add to `dq`, which is then accumulated in f32 scratch.
pub(crate) fn adds_dq(device: &Device, problem: &AttentionProblem) -> bool {
    problem.options.backward_order == BackwardOrder::Fast && hopper::fused(device, problem).is_ok()
}

/// Number of rows of lse and delta in scratch. The rows of each head are padded, because some kernels load whole tiles, and tiles
/// of several sequences begin anywhere.
pub(crate) fn stats_rows(problem: &AttentionProblem) -> usize {
    let multiple = stats_multiple(problem);
    let spare = if problem.is_varlen() { multiple } else { 0 };
    problem.batch * problem.num_heads_q * (problem.seq_q.next_multiple_of(multiple) + spare)
}

/// The partial sums that the gradient of a bias of this shape consists of.
pub(crate) fn bias_sums(shape: &[usize; 4], problem: &AttentionProblem) -> Sums {
    // A dimension of 1 does not broadcast if the scores have the same.
    let varies = |dim: usize| shape[dim] == problem.scores_shape()[dim];
    match (varies(2), varies(3)) {
        (true, true) => Sums::Tile,
        (false, true) => Sums::Columns,
        (_, false) => Sums::Rows,
    }
}

/// Number of blocks of `tile` rows, and the number of batches that each have as many blocks. With several sequences, an upper bound
/// for all sequences together, and 1.
pub(crate) fn blocks(problem: &AttentionProblem, rows: usize, tile: usize) -> (usize, usize) {
    match problem.num_sequences() {
        Some(number) => ((problem.batch * rows / tile + number).max(1), 1),
        None => (rows.div_ceil(tile), problem.batch),
    }
}

/// Grids of the kernels for several sequences: of the schedule, and of the fill of queries and of keys.
pub(crate) fn sequence_grids(device: &Device, problem: &AttentionProblem) -> Result<[CubeCount; 3], AttentionError> {
    Ok([
        cube_count(device, "schedule", problem.num_sequences().unwrap_or(0) as u64)?,
        fill_grid(device, [problem.batch, problem.num_heads_q, problem.seq_q])?,
        fill_grid(device, [problem.batch, problem.num_heads_kv, problem.seq_k])?,
    ])
}

/// Grid of the kernel that fills a tensor of this many batches, heads and rows.
pub(crate) fn fill_grid(device: &Device, [batches, heads, rows]: [usize; 3]) -> Result<CubeCount, AttentionError> {
    cube_count(device, "fill", (batches * heads * rows.div_ceil(sequences::UNITS)) as u64)
}

/// Checks that the blocks of a block mask, if there is one, consist of whole tiles, and that a kernel of this family can address
/// its lists.
pub(crate) fn check_blocks(
    device: &Device,
    problem: &AttentionProblem,
    kernel: Kernel,
    list: ListShape,
) -> Result<(), AttentionError> {
    let ListShape { rows, columns, .. } = list;
    if problem.block_mask.is_none() {
        return Ok(());
    }
    if rows == 0 || columns == 0 || !BLOCK.is_multiple_of(rows) || !BLOCK.is_multiple_of(columns) {
        return Err(AttentionError::Unsupported {
            option: "tile",
            value: format!("{rows}×{columns}"),
            why: "where there is a block mask, tiles divide 128 queries and keys",
        });
    }
    list.check(device, problem, if kernel == Kernel::Hopper { hopper::MAX_LIST } else { u64::MAX })
}

/// [`check_blocks`] for every kernel of a backward.
pub(crate) fn check_backward_blocks(
    device: &Device,
    problem: &AttentionProblem,
    tiles: &BackwardTiles,
) -> Result<(), AttentionError> {
    let fused = tiles.fused.map(Gradient::Hopper);
    let gradients = [(Some(tiles.dq), false), (Some(tiles.dkdv), true), (tiles.dv, true), (fused, true)];
    for (gradient, keys) in gradients.into_iter().filter_map(|(gradient, keys)| Some((gradient?, keys))) {
        check_blocks(device, problem, gradient.kernel(), gradient.list(keys))?;
    }
    // The kernels for the gradients of bias, slopes and score tensors use lists of either side.
    for tile in tiles.portables() {
        for keys in [false, true] {
            check_blocks(device, problem, Kernel::Portable, Gradient::Portable(tile).list(keys))?;
        }
    }
    Ok(())
}

/// Length of the buffer of these partial sums.
pub(crate) fn sums_len(sums: Sums, problem: &AttentionProblem) -> usize {
    match sums {
        Sums::Tile => 0,
        Sums::Columns => problem.batch * problem.num_heads_q * problem.seq_k,
        Sums::Rows => problem.rows(),
    }
}

/// Length of the buffer of partial sums that the gradients of bias, slopes and score tensors are folded from, one after the other.
pub(crate) fn bias_sums_len(problem: &AttentionProblem) -> usize {
    let of_bias = problem.bias.map_or(0, |shape| sums_len(bias_sums(&shape, problem), problem));
    let of_slopes = problem.alibi_slopes.map_or(0, |_| sums_len(Sums::Rows, problem));
    let of_tensors = problem.score_tensors.into_iter().flatten();
    let of_tensors = of_tensors.map(|shape| sums_len(bias_sums(&shape, problem), problem)).max();
    of_bias.max(of_slopes).max(of_tensors.unwrap_or(0))
}
