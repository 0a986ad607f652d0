//! Launch of the kernel that writes dropout's keep mask.

use super::{Argument, elementwise};
use crate::dropout::{self, DropoutLaunch, write_kept};
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use crate::tensor::{AnyView, TensorView};
use crate::tiling::recent;
use cubecl::client::Client;
use cubecl::ir::AddressType;

/// Writes the keep mask of the problem's dropout with this seed, `[2]`, 32 bits each: `kept [batch, num_heads_q, seq_q, seq_k]`,
/// u32, 1 for a kept pair, else 0. Attention itself never forms this tensor. The function is for tests and inspection.
///
/// Errors name the argument at fault; in that case nothing has been launched.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionProblem, TensorView, dropout_kept};
///
/// # fn f(client: &cubecl::client::Client, problem: &AttentionProblem) -> Result<(), flash_attention_kernels::AttentionError> {
/// let seed = TensorView::contiguous(client.create_from_slice(&[7, 0, 0, 0, 0, 0, 0, 0]), [2]);
/// let shape = problem.scores_shape();
/// let kept = TensorView::contiguous(client.empty(4 * shape.iter().product::<usize>()), shape);
/// dropout_kept(client, problem, &seed, &kept)
/// # }
/// ```
pub fn dropout_kept(
    client: &Client,
    problem: &AttentionProblem,
    seed: &TensorView<1>,
    kept: &TensorView,
) -> Result<(), AttentionError> {
    let device = recent::device(client);
    problem.validate()?;
    Argument::new("dropout_seed", seed, Some([2]), 4).check(&device)?;
    Argument::new("kept", kept, Some(problem.scores_shape()), 4).check_output(&device)?;
    if kept.is_empty() {
        return Ok(());
    }
    let (count, dim) = elementwise(&device, "dropout_kept", kept.len())?;
    let rate = problem.options.dropout;
    let launch = DropoutLaunch::new(Some(seed.arg()).into(), dropout::threshold(rate), dropout::factor(rate));
    let addresses = AddressType::from_len(kept.span() as usize);
    // SAFETY: views have been checked against their buffers.
    unsafe { write_kept::launch_unchecked(client, count, dim, addresses, kept.arg(), launch) };
    Ok(())
}
