//! Launches what writes out which pairs dropout keeps.

use super::{elementwise, input, output};
use crate::dropout::{self, DropoutLaunch, write_kept};
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use crate::tensor::TensorView;
use crate::tiling::Device;
use cubecl::client::Client;
use cubecl::ir::AddressType;

/// Writes which pairs the problem's dropout keeps with this seed, `[2]`, 32 bits each, as 1 or 0: `kept [batch, num_heads_q, seq_q,
/// seq_k]`, u32. What attention forms nowhere, for tests and for the curious.
///
/// Errors name the argument at fault; nothing has been launched then.
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
    let device = Device::of(client);
    problem.validate()?;
    input(&device, "dropout_seed", seed, [2], 4)?;
    output(&device, "kept", kept, problem.scores_shape(), 4)?;
    if kept.is_empty() {
        return Ok(());
    }
    let (count, dim) = elementwise(&device, "dropout_kept", kept.len())?;
    let rate = problem.options.dropout;
    let launch = DropoutLaunch::new(Some(seed.arg()).into(), dropout::threshold(rate), dropout::factor(rate));
    // SAFETY: views have been checked against their buffers.
    unsafe {
        write_kept::launch_unchecked(
            client,
            count,
            dim,
            AddressType::from_len(kept.span() as usize),
            kept.arg(),
            launch,
        )
    };
    Ok(())
}
