//! Launch of the kernel that computes the states of a block mask.

use super::arguments::mods;
use super::sequences::bounds;
use super::{Argument, Inputs, addresses};
use crate::blocks::{CLASSIFIERS, classify};
use crate::error::AttentionError;
use crate::problem::{AttentionProblem, BlockMask, check_broadcast};
use crate::tensor::{AnyView, TensorView};
use crate::tiling::{self, recent};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Computes the states of the problem's block mask from its mask and `mask_mod`: `states [batch | 1, num_heads_q | 1, seq_q /
/// block_q, seq_k / block_k]`, u32, each [`EMPTY`](crate::blocks::EMPTY), [`PARTIAL`](crate::blocks::PARTIAL) or
/// [`FULL`](crate::blocks::FULL). With packed sequences they are `[sequences, num_heads_q | 1, …]`, and blocks count from the
/// start of each sequence. Causality, windows and lengths are ignored, because kernels apply them in any case.
///
/// Only the mask, the `mask_tensors` and the `cu_seqlens` of `inputs` are read. Errors name the argument at fault; in that case
/// nothing has been launched.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionProblem, Inputs, TensorView, block_states};
///
/// # fn f(
/// #     client: &cubecl::client::Client, problem: AttentionProblem, inputs: &mut Inputs,
/// # ) -> Result<AttentionProblem, flash_attention_kernels::AttentionError> {
/// let shape = [1, 1, problem.seq_q.div_ceil(128), problem.seq_k.div_ceil(128)];
/// let problem = problem.with_block_mask(&shape, 128, 128)?;
/// let states = TensorView::contiguous(client.empty(4 * shape.iter().product::<usize>()), shape);
/// block_states(client, &problem, inputs, &states)?;
/// inputs.block_mask = Some(states);
/// # Ok(problem)
/// # }
/// ```
pub fn block_states(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    states: &TensorView,
) -> Result<(), AttentionError> {
    problem.validate()?;
    let device = recent::device(client);
    let Some(mask) = problem.block_mask else {
        return Err(AttentionError::Unsupported {
            option: "block_mask",
            value: "none".into(),
            why: "the problem has no block mask; build it with with_block_mask",
        });
    };
    let BlockMask { blocks, .. } = mask;
    Argument::new("states", states, Some(blocks), 4).check_output(&device)?;
    let packed = problem.cu_seqlens.is_some();
    let of = if packed { [problem.batch, blocks[1], blocks[2], blocks[3]] } else { blocks };
    for tensor in inputs.masks(problem) {
        if let Some(shape) = tensor.stated {
            check_broadcast(tensor.name, shape, of, 2)?;
        }
    }
    let read = || inputs.masks(problem).into_iter().chain(inputs.ends(problem));
    read().try_for_each(|tensor| tensor.check(&device))?;
    if states.is_empty() {
        return Ok(());
    }
    let count = tiling::cube_count(&device, "block_states", states.len() as u64)?;
    let hiding = inputs.mask.as_ref();
    // SAFETY: views have been checked against their buffers.
    unsafe {
        classify::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(CLASSIFIERS as u32),
            addresses(read().filter_map(|tensor| tensor.view).chain([states as &dyn AnyView])),
            hiding.map(|mask| mask.tensor.broadcast_arg()).into(),
            states.arg(),
            mods(problem, inputs),
            bounds(problem, inputs),
            problem.band().into_launch(),
            mask.size(),
            packed,
            inputs.mask_type(),
        );
    }
    Ok(())
}
