//! What has been chosen, in words, and what was passed over.

use super::{
    BackwardTiles, BiasGradient, Device, Forward, HopperForward, HopperGradient, Kernel, check_bindings, check_dtype,
    choose_backward, choose_forward, cube_count, scratch_floats,
};
use crate::error::AttentionError;
use crate::hopper::BiasTile;
use crate::problem::AttentionProblem;
use cubecl::client::Client;
use serde::Serialize;
use std::fmt;

/// A choice that was passed over, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PassedOver {
    /// What was passed over.
    pub what: String,
    /// Why.
    pub why: String,
}

/// What will run: kernels, tiles and memory.
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
pub struct Plan {
    /// The forward.
    pub forward: Forward,
    /// The backward.
    pub backward: BackwardTiles,
    /// Bytes that training keeps from forward to backward beside inputs and output: `lse`.
    pub saved_bytes: u64,
    /// Bytes of scratch that the backward allocates.
    pub scratch_bytes: u64,
    /// What would have been preferred, and why it cannot run.
    pub passed_over: Vec<PassedOver>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tile_q, tile_k) = (self.forward.tile_q(), self.forward.tile_k());
        write!(f, "forward {} {tile_q}×{tile_k}", self.forward.kernel().name())?;
        if let Forward::Hopper(HopperForward { parts: parts @ 2.., .. }) = self.forward {
            write!(f, " in {parts} parts")?;
        }
        let BackwardTiles { dq, dkdv, dv, fused, dbias, dalibi_slopes, dscore_tensors } = self.backward;
        let (dq_rows, dq_tile) = dq.blocks(false);
        let (dkdv_rows, dkdv_tile) = dkdv.blocks(true);
        write!(f, ", dq {} {dq_rows}×{dq_tile}", dq.kernel().name())?;
        write!(
            f,
            ", dk {} {} {dkdv_tile}×{dkdv_rows}",
            if dv.is_some() { "alone" } else { "and dv" },
            dkdv.kernel().name()
        )?;
        if let Some(dv) = dv {
            let (rows, tile) = dv.blocks(true);
            write!(f, ", dv {} {tile}×{rows}", dv.kernel().name())?;
        }
        if let Some(HopperGradient { tile, .. }) = fused {
            write!(f, ", all three {} {}×{} in any order", Kernel::Hopper.name(), tile.tile_k, tile.tile_q())?;
        }
        if let BiasGradient::Hopper(tile) = dbias {
            write!(f, ", dbias {} {}×{}", dbias.kernel().name(), BiasTile::TILE_Q, tile.block_k())?;
        }
        for (name, tile) in [("dalibi_slopes", dalibi_slopes), ("dscore_tensors", dscore_tensors)] {
            if let Some(tile) = tile {
                write!(f, ", {name} {} {}×{}", Kernel::Portable.name(), tile.tile_q, tile.tile_k)?;
            }
        }
        write!(f, ", {} bytes saved, {} bytes of scratch", self.saved_bytes, self.scratch_bytes)?;
        for PassedOver { what, why } in &self.passed_over {
            write!(f, "; not {what}: {why}")?;
        }
        Ok(())
    }
}

/// What will run for this problem on this client's device.
pub fn plan(client: &Client, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    plan_on(&Device::of(client), problem)
}

/// What will run if it must be this kernel, as far as that has the parts.
pub fn plan_with(client: &Client, problem: &AttentionProblem, forward: Kernel) -> Result<Plan, AttentionError> {
    plan_for(&Device::of(client), problem, Some(forward))
}

/// What would run for this problem on such a device.
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
    plan_for(device, problem, None)
}

fn plan_for(device: &Device, problem: &AttentionProblem, asked: Option<Kernel>) -> Result<Plan, AttentionError> {
    problem.validate()?;
    check_dtype(device, problem.dtype)?;
    let mut passed_over = Vec::new();
    let forward = choose_forward(device, problem, asked, &mut passed_over)?;
    let backward = choose_backward(device, problem, asked, &mut passed_over)?;
    check_size(device, problem, &forward, &backward)?;
    check_bindings(device, problem, "forward", 5)?;
    if let Err(error) = check_bindings(device, problem, "dq", 6) {
        passed_over.push(PassedOver { what: "any backward".into(), why: error.to_string() });
    }
    Ok(Plan {
        forward,
        backward,
        saved_bytes: 4 * problem.rows() as u64,
        scratch_bytes: 4 * scratch_floats(device, problem) as u64,
        passed_over,
    })
}

/// Checks that the device reaches every element, were the tensors contiguous, and can start every cube.
fn check_size(
    device: &Device,
    problem: &AttentionProblem,
    forward: &Forward,
    backward: &BackwardTiles,
) -> Result<(), AttentionError> {
    let shapes =
        [("q", problem.q_shape()), ("k", problem.k_shape()), ("v", problem.v_shape()), ("o", problem.o_shape())];
    let extras = [("mask", problem.mask), ("bias", problem.bias)];
    for (argument, shape) in
        shapes.into_iter().chain(extras.into_iter().filter_map(|(name, shape)| Some((name, shape?))))
    {
        let reach = shape.iter().map(|n| *n as u64).product();
        if reach > u32::MAX as u64 && !device.wide_addresses {
            return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
        }
    }
    check_forward_cubes(device, problem, forward)?;
    check_backward_cubes(device, problem, backward)
}

/// Checks that the device can start every cube: smaller tiles take more.
pub(super) fn check_forward_cubes(
    device: &Device,
    problem: &AttentionProblem,
    forward: &Forward,
) -> Result<(), AttentionError> {
    let blocks = problem.seq_q.div_ceil(forward.tile_q());
    check_cubes(device, "forward", blocks, problem.batch * problem.num_heads_q)
}

/// Likewise of the backward.
pub(super) fn check_backward_cubes(
    device: &Device,
    problem: &AttentionProblem,
    backward: &BackwardTiles,
) -> Result<(), AttentionError> {
    let (dq, dkdv) = (backward.dq.blocks(false).0, backward.dkdv.blocks(true).0);
    check_cubes(device, "dq", problem.seq_q.div_ceil(dq), problem.batch * problem.num_heads_q)?;
    check_cubes(device, "dkdv", problem.seq_k.div_ceil(dkdv), problem.batch * problem.num_heads_kv)
}

fn check_cubes(device: &Device, kernel: &'static str, blocks: usize, heads: usize) -> Result<(), AttentionError> {
    cube_count(device, kernel, (blocks as u64 * heads as u64).max(1)).map(|_| ())
}
