//! The only place that chooses kernels and tile shapes, from the properties that a device reports. Each kernel family has its own
//! file of tiles.

mod choice;
mod device;
pub(crate) mod few_rows;
pub(crate) mod hopper;
mod lists;
pub(crate) mod matrix;
pub(crate) mod mma;
mod plan;
mod portable;
pub(crate) mod recent;
pub(crate) mod rows;
mod splits;

pub use choice::{
    BackwardTiles, BiasGradient, FamilyTiles, FewRowsForward, Forward, Gradient, HopperForward, HopperGradient, Kernel,
    MmaForward, MmaTiles, PortableForward,
};
pub(crate) use device::{Case, check_dtype, cube_count, grid};
pub use device::{Device, element_type};
pub(crate) use hopper::stats_multiple;
#[cfg(feature = "cuda")]
pub(crate) use hopper::varies_by_pair;
pub(crate) use lists::ListShape;
pub(crate) use plan::split_columns;
pub use plan::{PassedOver, Plan, check, plan, plan_on, plan_with};
pub use portable::{Stage, shared_memory};
pub(crate) use portable::{blueprint, blueprint_beside, check_tile};
pub(crate) use splits::{COUNTER_BYTES, COUNTERS};

use crate::error::{AttentionError, Result};
use crate::fragment::Role;
use crate::hopper::{TURN_ROWS, TURN_WORDS, dq_accum_columns};
use crate::portable::dbias::Sums;
use crate::problem::AttentionProblem;
use crate::sequences;

/// Why kernels that only the feature `cuda` compiles cannot run without it.
pub(crate) const NOT_COMPILED: &str = "it was not compiled; enable the feature cuda";

/// The reason `why`, unless the condition holds.
fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

/// The first result that is no error, or else the last error. There is at least one result.
fn first<T>(mut found: impl Iterator<Item = Result<T, String>>) -> Result<T, String> {
    let mut why = String::new();
    found.find_map(|found| found.map_err(|reason| why = reason).ok()).ok_or(why)
}

/// The first row of a table that fits the larger head dimension.
fn row<T: Copy>(table: &[(usize, T)], problem: &AttentionProblem) -> Result<T, String> {
    let widest = problem.widest();
    let found = table.iter().find(|(head_dim, _)| widest <= *head_dim);
    found.map(|(_, row)| *row).ok_or_else(|| format!("head_dim {widest} is above {}", table[table.len() - 1].0))
}

/// Gradient kernels of a family: `dq`, then `dk` and `dv` together, or `dv` in a separate launch.
type Gradients = (Gradient, Gradient, Option<Gradient>);

/// The kernels that `of` gives for the roles of a backward.
fn gradients(together: bool, of: impl Fn(Role) -> Result<Gradient, String>) -> Result<Gradients, String> {
    let dkdv = |dk, dv| of(Role::DkDv { dk, dv });
    let dq = of(Role::Dq)?;
    Ok(if together { (dq, dkdv(true, true)?, None) } else { (dq, dkdv(true, false)?, Some(dkdv(false, true)?)) })
}

/// Chooses the forward: the most preferred kernel that supports the problem, or the requested one.
pub(crate) fn choose_forward(case: Case, asked: Option<Kernel>, passed_over: &mut Vec<PassedOver>) -> Result<Forward> {
    let [first, second] =
        if mma::decodes(case) { [Kernel::Mma, Kernel::Hopper] } else { [Kernel::Hopper, Kernel::Mma] };
    // Of the portable kernels, the one of few rows is preferred to matrix products.
    let few_rows = few_rows::wanted(case, asked);
    let kernels = [first, second, Kernel::Portable, Kernel::Matrix].into_iter();
    let kernels = kernels.filter(|kernel| asked.is_none_or(|asked| asked == *kernel));
    for kernel in kernels.filter(|kernel| few_rows || *kernel != Kernel::Portable) {
        let (found, of) = match kernel {
            Kernel::Hopper => (hopper::forward(case).map(Forward::Hopper), ""),
            Kernel::Mma => (mma::forward(case).map(Forward::Mma), ""),
            Kernel::Portable => (few_rows::choose(case).map(Forward::from), " of few rows"),
            _ => (matrix::choose(case, Role::Forward).map(Forward::Matrix), ""),
        };
        match found {
            Ok(forward) => return Ok(forward),
            Err(why) if asked.is_some_and(|asked| asked != Kernel::Portable) => return Err(kernel.unavailable(why)),
            Err(why) => passed_over.push(PassedOver { what: format!("forward {}{of}", kernel.name()), why }),
        }
    }
    if rows::wanted(case.device, asked) {
        return Ok(Forward::Rows(rows::tile(case, Role::Forward)));
    }
    Ok(portable::choose(case, Stage::Forward, passed_over)?.into())
}

/// Chooses the backward: the most preferred kernels that support the problem, or the requested ones.
pub(crate) fn choose_backward(
    case: Case,
    asked: Option<Kernel>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<BackwardTiles> {
    let problem = case.problem;
    let kernels = [Kernel::Hopper, Kernel::Mma, Kernel::Matrix, Kernel::Rows];
    let found = kernels.into_iter().filter(|kernel| asked.is_none_or(|asked| asked == *kernel)).find_map(|kernel| {
        let found = match kernel {
            Kernel::Hopper => hopper::backward(case),
            Kernel::Mma => gradients(mma::together(problem), |role| mma::choose(case, role).map(Gradient::Mma)),
            Kernel::Matrix => {
                gradients(matrix::together(problem), |role| matrix::choose(case, role).map(Gradient::Matrix))
            }
            _ if !rows::wanted(case.device, asked) => return None,
            _ => gradients(rows::together(case), |role| Ok(Gradient::Rows(rows::tile(case, role)))),
        };
        let what = format!("backward {}", kernel.name());
        found.map_err(|why| passed_over.push(PassedOver { what, why })).ok()
    });
    let tile = portable::choose(case, Stage::Backward, passed_over)?;
    let mut tiles = match found {
        Some((dq, dkdv, dv)) => BackwardTiles { dq, dkdv, dv, ..BackwardTiles::portable(tile, true) },
        None => BackwardTiles::portable(tile, portable::together(case, &tile)),
    };
    let on_hopper = matches!((tiles.dq, tiles.dkdv), (Gradient::Hopper(_), Gradient::Hopper(_)));
    let [dbias, dalibi_slopes, score_a, score_b] =
        if on_hopper { hopper::sums(problem, &tiles) } else { Default::default() };
    let or_portable = |of: Option<BiasGradient>| of.unwrap_or(BiasGradient::Portable(tile));
    tiles.dalibi_slopes = problem.alibi_slopes.map(|_| or_portable(dalibi_slopes));
    let [shape_a, shape_b] = problem.score_tensors;
    tiles.dscore_tensors = [shape_a.map(|_| or_portable(score_a)), shape_b.map(|_| or_portable(score_b))];
    if on_hopper {
        match hopper::dbias(problem) {
            Ok(tile) => tiles.dbias = BiasGradient::Hopper(tile),
            Err(_) if dbias.is_some() => tiles.dbias = or_portable(dbias),
            Err(why) if problem.bias.is_some() => {
                passed_over.push(PassedOver { what: format!("dbias {}", Kernel::Hopper.name()), why });
            }
            Err(_) => {}
        }
        let pass_over = |why| passed_over.push(PassedOver { what: "dq, dk and dv together".into(), why });
        tiles.fused = hopper::fused(case).map_err(pass_over).ok();
    }
    Ok(tiles)
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
    let case = Case { device, problem };
    let planned = choose_forward(case, None, &mut Vec::new())?;
    let others: Vec<Forward> = match planned {
        Forward::Hopper(planned) => hopper::alternatives(case, planned).into_iter().map(Forward::Hopper).collect(),
        Forward::Mma(planned) => mma::alternatives(case, planned).into_iter().map(Forward::Mma).collect(),
        Forward::Matrix(_) => matrix::fitting(case, Role::Forward).into_iter().map(Forward::Matrix).collect(),
        Forward::Rows(tile) => rows::alternatives(tile).into_iter().map(Forward::Rows).collect(),
        Forward::Portable(PortableForward::FewRows(planned)) => {
            few_rows::alternatives(case, planned).into_iter().map(Forward::from).collect()
        }
        Forward::Portable(_) => portable::fitting(device, Stage::Forward).map(Forward::from).collect(),
    };
    Ok(candidates(planned, others, limit, |other| plan::check_forward_cubes(case, other)))
}

/// The planned kernels, then at most `limit − 1` others whose thread blocks the device can launch.
#[cfg(feature = "autotune")]
fn candidates<T: Copy + PartialEq>(
    planned: T,
    others: Vec<T>,
    limit: usize,
    check: impl Fn(&T) -> Result<()>,
) -> Vec<T> {
    let others = others.into_iter().filter(|other| *other != planned && check(other).is_ok());
    std::iter::once(planned).chain(others).take(limit).collect()
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
    let case = Case { device, problem };
    let planned = choose_backward(case, None, &mut Vec::new())?;
    // The first tiles that fit each gradient, the second ones, and so on.
    let zipped = |of: &dyn Fn(Role) -> Vec<Gradient>| {
        let dkdv = |dk, dv| of(Role::DkDv { dk, dv }).into_iter();
        let dq = of(Role::Dq).into_iter();
        let tiles = |dq, dkdv, dv| BackwardTiles { dq, dkdv, dv, ..planned };
        if planned.dv.is_none() {
            return dq.zip(dkdv(true, true)).map(|(dq, dkdv)| tiles(dq, dkdv, None)).collect();
        }
        dq.zip(dkdv(true, false)).zip(dkdv(false, true)).map(|((dq, dk), dv)| tiles(dq, dk, Some(dv))).collect()
    };
    let others: Vec<BackwardTiles> = match planned.dq {
        // The tables have one row for each head dimension: there are two alternatives at most.
        Gradient::Hopper(_) => planned.fused.map(|_| BackwardTiles { fused: None, ..planned }).into_iter().collect(),
        Gradient::Mma(_) => zipped(&|role| mma::fitting(case, role).into_iter().map(Gradient::Mma).collect()),
        Gradient::Matrix(_) => zipped(&|role| matrix::fitting(case, role).into_iter().map(Gradient::Matrix).collect()),
        Gradient::Rows(tile) => {
            let others = rows::alternatives(tile).into_iter().map(Gradient::Rows);
            others.map(|of| BackwardTiles { dq: of, dkdv: of, dv: planned.dv.map(|_| of), ..planned }).collect()
        }
        Gradient::Portable(_) => portable::fitting(device, Stage::Backward)
            .map(|tile| BackwardTiles {
                dalibi_slopes: planned.dalibi_slopes,
                dscore_tensors: planned.dscore_tensors,
                ..BackwardTiles::portable(tile, portable::together(case, &tile))
            })
            .collect(),
    };
    Ok(candidates(planned, others, limit, |other| plan::check_backward_cubes(case, other)))
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
    hopper::fusible(Case { device, problem }).ok().map(|(_, gradient)| gradient)
}

/// Number of f32 values of the backward's scratch: lse and delta of each row, partial sums for the gradients of bias, slopes and
/// score tensors, `dq_accum` with its turns, and `dk` and `dv` of splits of a group's query heads.
pub(crate) fn scratch_floats(case: Case) -> usize {
    let of_hopper = dq_accum_len(case) + dq_turns_len(case) + split_sums_len(case);
    2 * stats_rows(case.problem) + of_hopper + bias_sums_len(case.problem)
}

/// Length of `dq_accum` in scratch; 0 if no kernel adds to it.
fn dq_accum_len(case: Case) -> usize {
    if adds_dq(case) { dq_accum_shape(case.problem).iter().product() } else { 0 }
}

/// Shape of `dq_accum` in scratch.
pub(crate) fn dq_accum_shape(problem: &AttentionProblem) -> [usize; 2] {
    [stats_rows(problem), dq_accum_columns(problem.head_dim)]
}

/// Length of the turns of `dq_accum` in scratch; 0 if no kernel adds to it in a fixed order.
fn dq_turns_len(case: Case) -> usize {
    if adds_dq(case) && Role::All.adds_in_order(case.problem) {
        dq_turns_shape(case.problem).iter().product()
    } else {
        0
    }
}

/// Number of f32 values that splits of a group's query heads write; 0 if there are none.
fn split_sums_len(case: Case) -> usize {
    let splits = hopper::fused(case).map_or(1, |fused| fused.num_splits);
    let shapes = hopper::split_sums_shapes(case.problem, splits);
    if splits > 1 { shapes.iter().map(|shape| shape.iter().product::<usize>()).sum() } else { 0 }
}

/// Shape of the turns of `dq_accum` in scratch.
pub(crate) fn dq_turns_shape(problem: &AttentionProblem) -> [usize; 2] {
    [stats_rows(problem) / TURN_ROWS, TURN_WORDS]
}

/// Whether blocks of keys add to `dq`, which is then accumulated in f32 scratch.
pub(crate) fn adds_dq(case: Case) -> bool {
    hopper::fused(case).is_ok()
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

/// Whether the gradient of a tensor of this shape, which consists of these sums, can be folded from sums of queries or of `keys`.
pub(crate) fn takes_sums(sums: Sums, shape: &[usize; 4], keys: bool) -> bool {
    match sums {
        Sums::Tile => false,
        Sums::Columns => keys,
        // Without a dimension of queries, either will do.
        Sums::Rows => !keys || shape[2] == 1,
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

/// Checks that the device can launch the kernels for several sequences, if there are any: the schedule, and the fill of queries and
/// of keys.
pub(crate) fn check_sequences(Case { device, problem }: Case) -> Result<()> {
    let Some(number) = problem.num_sequences() else { return Ok(()) };
    cube_count(device, "schedule", number as u64)?;
    for (rows, heads) in [problem.side(false), problem.side(true)] {
        cube_count(device, "fill", fill_cubes([problem.batch, heads, rows]))?;
    }
    Ok(())
}

/// Number of thread blocks that fill a tensor of this many batches, heads and rows.
pub(crate) fn fill_cubes([batches, heads, rows]: [usize; 3]) -> u64 {
    (batches * heads * rows.div_ceil(sequences::UNITS)) as u64
}

/// Checks that the blocks of a block mask, if there is one, consist of whole tiles, and that a kernel of this family can address
/// its lists.
pub(crate) fn check_blocks(case: Case, kernel: Kernel, list: ListShape) -> Result<()> {
    let ListShape { rows, columns, .. } = list;
    if case.problem.block_mask.is_none() {
        return Ok(());
    }
    if !list.divides_blocks() {
        return Err(AttentionError::Unsupported {
            option: "tile",
            value: format!("{rows}×{columns}"),
            why: "where there is a block mask, tiles divide 128 queries and keys",
        });
    }
    list.check(case, kernel)
}

/// [`check_blocks`] for every kernel of a backward.
pub(crate) fn check_backward_blocks(case: Case, tiles: &BackwardTiles) -> Result<()> {
    let fused = tiles.fused.map(Gradient::Hopper);
    let gradients = [(Some(tiles.dq), false), (Some(tiles.dkdv), true), (tiles.dv, true), (fused, true)];
    // The kernels for the gradients of bias, slopes and score tensors use lists of either side.
    let portables = tiles.portables().map(Gradient::Portable).flat_map(|of| [(of, false), (of, true)]);
    let gradients = gradients.into_iter().filter_map(|(gradient, keys)| Some((gradient?, keys)));
    gradients.chain(portables).try_for_each(|(of, keys)| check_blocks(case, of.kernel(), of.list(keys)))
}

/// Number of these partial sums of a head.
pub(crate) fn sums_len(sums: Sums, problem: &AttentionProblem) -> usize {
    match sums {
        Sums::Tile => 0,
        Sums::Columns => problem.seq_k,
        Sums::Rows => problem.seq_q,
    }
}

/// Shape of the partial sums that the gradients of bias, slopes and score tensors are folded from; `None` if there are none.
pub(crate) fn bias_sums_shape(problem: &AttentionProblem) -> Option<[usize; 3]> {
    let tensors = problem.score_tensors.into_iter().chain([problem.bias]).flatten();
    let sums = tensors.map(|shape| bias_sums(&shape, problem)).chain(problem.alibi_slopes.map(|_| Sums::Rows));
    let number = sums.filter(|sums| *sums != Sums::Tile).count();
    // The sums of a tensor that is broadcast over queries and keys may be those of either.
    let length = problem.seq_q.max(problem.seq_k);
    Some([number * problem.batch, problem.num_heads_q, length]).filter(|shape| !shape.contains(&0))
}

/// Number of these partial sums.
fn bias_sums_len(problem: &AttentionProblem) -> usize {
    bias_sums_shape(problem).map_or(0, |shape| shape.iter().product())
}
