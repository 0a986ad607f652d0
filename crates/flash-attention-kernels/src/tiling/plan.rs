//! The plan: chosen kernels, tiles and memory, and the alternatives that were passed over.

use super::{
    BackwardTiles, BiasGradient, COUNTER_BYTES, COUNTERS, Case, Device, FewRowsForward, Forward, Gradient,
    HopperForward, HopperGradient, Kernel, ListShape, MmaForward, PortableForward, bias_sums_len, blocks,
    check_backward_blocks, check_blocks, check_dtype, check_sequences, choose_backward, choose_forward, cube_count,
    dq_accum_len, few_rows, recent, scratch_floats, split_sums_len, stats_rows,
};
use crate::error::{AttentionError, Result};
use crate::hopper::BiasTile;
use crate::portable::tile::TileShape;
use crate::problem::AttentionProblem;
use crate::tensor_core::WARPGROUP_ROWS;
use cubecl::client::Client;
use serde::Serialize;
use std::fmt;
use std::rc::Rc;

/// An alternative that was passed over, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PassedOver {
    /// The alternative.
    pub what: String,
    /// The reason.
    pub why: String,
}

/// The plan of a call: kernels, tiles and memory.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, plan};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [4, 16, 4096, 128];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// println!("{}", plan(client, &problem)?); // forward portable 64×64, backward portable 64×64 …
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// The forward kernel.
    pub forward: Forward,
    /// The backward kernels.
    pub backward: BackwardTiles,
    /// Bytes that training keeps from forward to backward besides inputs and output: `lse`.
    pub saved_bytes: u64,
    /// Bytes of scratch that the forward allocates: partial outputs and their lse, if keys are split.
    pub forward_scratch_bytes: u64,
    /// Bytes of scratch that the backward allocates.
    pub scratch_bytes: u64,
    /// Bytes that stay allocated between calls: the counters of a stream, from which Hopper thread blocks take work tiles and by which splits of the keys know the last one, and the
    /// lists that a block mask caches for this problem.
    pub kept_bytes: u64,
    /// More preferred alternatives, and the reasons why they cannot run.
    pub passed_over: Vec<PassedOver>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tile_q, tile_k) = (self.forward.tile_q(), self.forward.tile_k());
        write!(f, "forward {} {tile_q}×{tile_k}", self.forward.kernel().name())?;
        match self.forward {
            Forward::Mma(MmaForward { pack_gqa: true, .. }) => write!(f, " of packed heads")?,
            Forward::Portable(PortableForward::FewRows(_)) => write!(f, " of few rows")?,
            _ => {}
        }
        if let num_splits @ 2.. = num_splits(&self.forward) {
            write!(f, " in {num_splits} splits")?;
        }
        let BackwardTiles { dq, dkdv, dv, fused, dbias, dalibi_slopes, dscore_tensors } = self.backward;
        let of = |gradient: &Gradient, keys| {
            let ListShape { rows, columns, .. } = gradient.list(keys);
            let (tile_q, tile_k) = if keys { (columns, rows) } else { (rows, columns) };
            format!("{} {tile_q}×{tile_k}", gradient.kernel().name())
        };
        write!(f, ", dq {}", of(&dq, false))?;
        write!(f, ", dk {} {}", if dv.is_some() { "alone" } else { "and dv" }, of(&dkdv, true))?;
        if let Some(dv) = dv {
            write!(f, ", dv {}", of(&dv, true))?;
        }
        if let Some(HopperGradient { tile, num_splits, .. }) = fused {
            // Where the sums of dk and dv do not fit in registers together, this kernel has tiles of 64 queries and `tile_k` keys.
            let (tile_q, tile_k) =
                if dv.is_some() { (WARPGROUP_ROWS, tile.tile_k) } else { (tile.tile_k, tile.tile_q()) };
            write!(f, ", all three {} {tile_q}×{tile_k}", Kernel::Hopper.name())?;
            if num_splits > 1 {
                write!(f, " in {num_splits} splits")?;
            }
        }
        if let BiasGradient::Hopper(tile) = dbias {
            write!(f, ", dbias {} {}×{}", dbias.kernel().name(), BiasTile::TILE_Q, tile.block_k())?;
        }
        let [of_a, of_b] = dscore_tensors;
        let dbias = Some(dbias).filter(|dbias| matches!(dbias, BiasGradient::Sums { .. }));
        let of_scores = [("dalibi_slopes", dalibi_slopes), ("dscore_tensors[0]", of_a), ("dscore_tensors[1]", of_b)];
        for (name, of) in [("dbias", dbias)].into_iter().chain(of_scores) {
            match of {
                Some(BiasGradient::Portable(TileShape { tile_q, tile_k, .. })) => {
                    write!(f, ", {name} {} {tile_q}×{tile_k}", Kernel::Portable.name())?;
                }
                Some(BiasGradient::Sums { keys, alone }) => {
                    let with = match (alone, keys) {
                        (true, _) => "alone",
                        (false, false) => "with dq",
                        (false, true) => "with dk",
                    };
                    write!(f, ", {name} {} {with}", Kernel::Hopper.name())?;
                }
                Some(BiasGradient::Hopper(_)) | None => {}
            }
        }
        let scratch = self.forward_scratch_bytes.max(self.scratch_bytes);
        write!(f, ", {} bytes saved, {scratch} bytes of scratch", self.saved_bytes)?;
        if self.kept_bytes > 0 {
            write!(f, ", {} bytes kept", self.kept_bytes)?;
        }
        for PassedOver { what, why } in &self.passed_over {
            write!(f, "; not {what}: {why}")?;
        }
        Ok(())
    }
}

/// The plan for this problem on this client's device.
pub fn plan(client: &Client, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    planned(client, problem, None).map(Rc::unwrap_or_clone)
}

/// Checks that there is a plan for this problem on this client's device: the errors of [`plan()`], without the plan. If the thread has
/// planned the problem recently, this allocates nothing.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionProblem, check};
///
/// # fn f(client: &cubecl::client::Client, problem: &AttentionProblem) {
/// assert!(check(client, problem).is_ok());
/// # }
/// ```
pub fn check(client: &Client, problem: &AttentionProblem) -> Result<(), AttentionError> {
    planned(client, problem, None).map(drop)
}

/// The plan for this problem with the requested kernel family, as far as the family has the kernels.
pub fn plan_with(client: &Client, problem: &AttentionProblem, forward: Kernel) -> Result<Plan, AttentionError> {
    planned(client, problem, Some(forward)).map(Rc::unwrap_or_clone)
}

/// The plan that the thread remembers, or else a new one.
fn planned(client: &Client, problem: &AttentionProblem, asked: Option<Kernel>) -> Result<Rc<Plan>> {
    let device = &recent::device(client);
    recent::plan(device, problem, asked, || allocatable(client, Case { device, problem }, asked))
}

/// The plan, after a check that the client's device can allocate buffers as large as those of the forward. If those of the backward
/// are too large, only the forward can run, and the plan says so. A client reports a failed allocation only when a result is read.
fn allocatable(client: &Client, case: Case, asked: Option<Kernel>) -> Result<Plan> {
    let problem = case.problem;
    let mut plan = plan_for(case, asked)?;
    let max = client.properties().memory.max_page_size;
    let check = |tensor: &'static str, bytes: u64| {
        if bytes <= max {
            return Ok(());
        }
        Err(AttentionError::Allocation { tensor, bytes, max: Some(max), device: case.device.name.clone() })
    };
    let bytes = |shape: [usize; 4]| shape.iter().map(|n| *n as u64).product::<u64>() * problem.dtype.size() as u64;
    check("o", bytes(problem.o_shape()))?;
    check("lse", plan.saved_bytes)?;
    check("the output of each split of the keys", 4 * split_floats(problem, &plan.forward))?;
    let largest = [
        ("dq", bytes(problem.q_shape())),
        ("dk", bytes(problem.k_shape())),
        ("dv", bytes(problem.v_shape())),
        ("dbias", problem.bias.map_or(0, bytes)),
        ("stats", 8 * stats_rows(problem) as u64),
        ("bias_sums", 4 * bias_sums_len(problem) as u64),
        ("dq_accum", 4 * dq_accum_len(case) as u64),
        ("dk and dv of each split of a group's query heads", 4 * split_sums_len(case) as u64),
    ];
    if let Err(error) = largest.into_iter().try_for_each(|(tensor, bytes)| check(tensor, bytes)) {
        plan.passed_over.push(PassedOver { what: "any backward".into(), why: error.to_string() });
    }
    Ok(plan)
}

/// The plan for this problem on such a device.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_kernels::tiling::{Device, plan_on};
///
/// let small = Device {
///     name: "the least that WebGPU promises".into(),
///     card: true,
///     shared_memory: 16 << 10,
///     units: 256,
///     bindings: 7,
///     cubes: (65535, 65535, 65535),
///     wide_addresses: false,
///     dtypes: vec![Dtype::F32],
///     multiprocessors: 0,
///     wgmma: false,
///     mma: Vec::new(),
///     plane: 0,
///     matrices: Vec::new(),
/// };
/// let shape = [1, 1, 128, 256];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// assert_eq!(plan_on(&small, &problem)?.forward.tile_q(), 32);
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
pub fn plan_on(device: &Device, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    plan_for(Case { device, problem }, None)
}

fn plan_for(case: Case, asked: Option<Kernel>) -> Result<Plan> {
    let Case { device, problem } = case;
    problem.validate()?;
    check_dtype(device, problem.dtype)?;
    let mut passed_over = Vec::new();
    let forward = choose_forward(case, asked, &mut passed_over)?;
    let backward = choose_backward(case, asked, &mut passed_over)?;
    check_size(case, &forward, &backward)?;
    case.check_bindings("forward", 5)?;
    let of_keys = if backward.dv.is_some() { 6 } else { 7 };
    if let Err(error) = case.check_bindings("dq", 6).and(case.check_bindings("dkdv", of_keys)) {
        passed_over.push(PassedOver { what: "any backward".into(), why: error.to_string() });
    }
    Ok(Plan {
        forward,
        backward,
        saved_bytes: 4 * problem.rows() as u64,
        forward_scratch_bytes: 4 * forward_scratch_floats(problem, &forward),
        scratch_bytes: 4 * scratch_floats(case) as u64,
        kept_bytes: kept_bytes(problem, &forward, &backward),
        passed_over,
    })
}

/// Number of f32 values that splits of the keys leave to be combined: outputs and their lse.
fn forward_scratch_floats(problem: &AttentionProblem, forward: &Forward) -> u64 {
    let outputs = split_floats(problem, forward);
    outputs + outputs / split_columns(problem) as u64
}

/// Columns of the outputs of splits.
pub(crate) fn split_columns(problem: &AttentionProblem) -> usize {
    problem.head_dim_v.next_multiple_of(8)
}

/// Number of f32 values of the outputs of splits.
fn split_floats(problem: &AttentionProblem, forward: &Forward) -> u64 {
    match num_splits(forward) {
        1 => 0,
        num_splits => (num_splits * problem.rows() * split_columns(problem)) as u64,
    }
}

/// Number of splits of the keys.
fn num_splits(forward: &Forward) -> usize {
    match forward {
        Forward::Hopper(HopperForward { num_splits, .. })
        | Forward::Mma(MmaForward { num_splits, .. })
        | Forward::Portable(PortableForward::FewRows(FewRowsForward { num_splits, .. })) => *num_splits,
        _ => 1,
    }
}

/// Bytes of counters and of cached lists of a block mask, each list counted once. Lists are not cached if only the device knows the
/// lengths.
fn kept_bytes(problem: &AttentionProblem, forward: &Forward, backward: &BackwardTiles) -> u64 {
    let hopper = [forward.kernel(), backward.dq.kernel(), backward.dkdv.kernel()].contains(&Kernel::Hopper);
    let counts = hopper || matches!(forward, Forward::Mma(plan) if plan.combines());
    let counters = if counts { COUNTERS * COUNTER_BYTES } else { 0 };
    let mut lists = vec![forward.list(false), backward.dq.list(false), backward.dkdv.list(true)];
    lists.extend(backward.dv.map(|dv| dv.list(true)));
    lists.sort_unstable();
    lists.dedup();
    let kept = !problem.is_varlen();
    let words: u64 = lists.iter().filter(|_| kept).map(|list| list.len(problem)).sum();
    counters as u64 + 4 * words
}

/// Checks that the device can address every element, assuming contiguous tensors, and can launch every thread block.
fn check_size(case: Case, forward: &Forward, backward: &BackwardTiles) -> Result<()> {
    let Case { device, problem: p } = case;
    let [q, k, v, o] = [p.q_shape(), p.k_shape(), p.v_shape(), p.o_shape()].map(Some);
    for (argument, shape) in [("q", q), ("k", k), ("v", v), ("o", o), ("mask", p.mask), ("bias", p.bias)] {
        let reach = shape.map_or(0, |shape| shape.iter().map(|n| *n as u64).product());
        if reach > u32::MAX as u64 && !device.wide_addresses {
            return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
        }
    }
    check_sequences(case)?;
    check_blocks(case, forward.kernel(), forward.list(false))?;
    check_backward_blocks(case, backward)?;
    check_forward_cubes(case, forward)?;
    check_backward_cubes(case, backward)
}

/// Checks that the device can launch every thread block of the forward. Smaller tiles need more of them.
pub(super) fn check_forward_cubes(case: Case, forward: &Forward) -> Result<()> {
    if let Forward::Portable(PortableForward::FewRows(plan)) = forward {
        return few_rows::check_cubes(case, *plan);
    }
    check_cubes(case, "forward", forward.tile_q(), false)
}

/// Checks that the device can launch every thread block of the backward.
pub(super) fn check_backward_cubes(case: Case, backward: &BackwardTiles) -> Result<()> {
    check_cubes(case, "dq", backward.dq.list(false).rows, false)?;
    check_cubes(case, "dkdv", backward.dkdv.list(true).rows, true)
}

/// Checks that the device can launch a thread block for each block of `rows` queries, or keys if `keys`.
fn check_cubes(Case { device, problem }: Case, kernel: &'static str, rows: usize, keys: bool) -> Result<()> {
    let (length, heads) = problem.side(keys);
    let (blocks, batches) = blocks(problem, length, rows);
    cube_count(device, kernel, blocks as u64 * batches as u64 * heads as u64).map(|_| ())
}
