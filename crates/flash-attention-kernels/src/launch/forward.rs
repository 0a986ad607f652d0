//! Launch of the forward.

use super::{Argument, Call, Inputs, elementwise};
use crate::error::AttentionError;
use crate::portable::nothing;
use crate::problem::AttentionProblem;
use crate::tensor::TensorView;
use crate::tiling::{self, Forward, PortableForward, recent};
use cubecl::client::Client;
use cubecl::ir::AddressType;

/// Computes `o` and `lse`.
///
/// `o` is `[batch, num_heads_q, seq_q, head_dim_v]`, with the dtype of `q`. `lse` is the natural logarithm of the sum of
/// exponentials of each row's scores, `[batch, num_heads_q, seq_q]`, f32. A row that sees no key gets `o = 0` and `lse = −∞`,
/// or the `lse` of its sink alone. (FlashAttention-2, arXiv:2307.08691, algorithm 1.)
///
/// Returns the kernel that was launched, with its tiles. Errors name the argument at fault; in that case nothing has been
/// launched.
pub fn forward(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    o: &TensorView,
    lse: &TensorView<3>,
) -> Result<Forward, AttentionError> {
    problem.validate()?;
    let kernel = recent::forward(&recent::device(client), problem)?;
    forward_with(client, problem, inputs, o, lse, kernel)?;
    Ok(kernel)
}

/// [`forward`] with a kernel and tiles chosen by the caller.
pub fn forward_with(
    client: &Client,
    problem: &AttentionProblem,
    inputs: &Inputs,
    o: &TensorView,
    lse: &TensorView<3>,
    kernel: impl Into<Forward>,
) -> Result<(), AttentionError> {
    let device = recent::device(client);
    let call = Call::new(client, &device, problem, inputs)?;
    Argument::new("o", o, Some(problem.o_shape()), problem.dtype.size()).check_output(&device)?;
    Argument::new("lse", lse, Some(problem.lse_shape()), 4).check_output(&device)?;
    let addresses = call.addresses(&[o, lse]);
    if problem.rows() == 0 {
        return Ok(());
    }
    if problem.seq_k == 0 {
        let (o_count, o_dim) = elementwise(&device, "zeros", o.len())?;
        let (count, dim) = elementwise(&device, "empty_lse", lse.len())?;
        // SAFETY: `check_output` has found that `o` is within its buffer. The kernel writes no element beyond the last one.
        unsafe { nothing::zeros::launch_unchecked(client, o_count, o_dim, addresses, o.arg(), call.dtype()) };
        // SAFETY: the same holds for `lse`. `Call::new` has checked that there are as many sinks as heads.
        unsafe { nothing::empty_lse::launch_unchecked(client, count, dim, addresses, lse.arg(), call.sinks().into()) };
        return Ok(());
    }
    let kernel = kernel.into();
    tiling::check_blocks(call.case(), kernel.kernel(), kernel.list(false))?;
    let outputs = Outputs { o, lse, addresses };
    let launch = match kernel {
        Forward::Portable(PortableForward::Tiles(tile)) => tile.forward(&call, outputs),
        Forward::Portable(PortableForward::FewRows(plan)) => plan.forward(&call, outputs),
        Forward::Matrix(tile) => tile.forward(&call, outputs),
        Forward::Rows(tile) => tile.forward(&call, outputs),
        #[cfg(feature = "cuda")]
        Forward::Hopper(tiles) => tiles.forward(&call, outputs),
        #[cfg(feature = "cuda")]
        Forward::Mma(tiles) => tiles.forward(&call, outputs),
        #[cfg(not(feature = "cuda"))]
        Forward::Hopper(_) | Forward::Mma(_) => Err(kernel.kernel().unavailable(tiling::NOT_COMPILED.into())),
    }?;
    launch();
    call.fill(o, Some(lse), false);
    Ok(())
}

/// Outputs of the forward.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a> {
    /// `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub o: &'a TensorView,
    /// `[batch, num_heads_q, seq_q]`.
    pub lse: &'a TensorView<3>,
    /// The address type that reaches every element of inputs and outputs.
    pub addresses: AddressType,
}
