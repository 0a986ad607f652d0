//! Launch of the forward.

use super::sequences::Blocks;
use super::{Call, Inputs, elementwise, output};
use crate::error::AttentionError;
use crate::fragment::operands::ForwardOutputsLaunch;
use crate::portable::tile::TileShape;
use crate::portable::{self, nothing};
use crate::problem::AttentionProblem;
use crate::score::Factor;
use crate::tensor::TensorView;
use crate::tiling::{self, Device, Forward, Stage};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;

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
    let kernel = tiling::choose_forward(&Device::of(client), problem, None, &mut Vec::new())?;
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
    let device = Device::of(client);
    let call = Call::new(client, &device, problem, inputs)?;
    output(&device, "o", o, problem.o_shape(), problem.dtype.size())?;
    output(&device, "lse", lse, problem.lse_shape(), 4)?;
    let addresses = call.addresses([o.span(), lse.span()]);
    if problem.rows() == 0 {
        return Ok(());
    }
    if problem.seq_k == 0 {
        let (o_count, o_dim) = elementwise(&device, "zeros", o.len())?;
        let (count, dim) = elementwise(&device, "empty_lse", lse.len())?;
        // SAFETY: `output` has checked that `o` is within its buffer. The kernel writes no element beyond the last one.
        unsafe { nothing::zeros::launch_unchecked(client, o_count, o_dim, addresses, o.arg(), call.dtype()) };
        // SAFETY: the same holds for `lse`. `Call::new` has checked that there are as many sinks as heads.
        unsafe { nothing::empty_lse::launch_unchecked(client, count, dim, addresses, lse.arg(), call.sinks().into()) };
        return Ok(());
    }
    let kernel = kernel.into();
    tiling::check_blocks(&device, problem, kernel.kernel(), kernel.list())?;
    match kernel {
        Forward::Portable(tile) => call.forward_portable(o, lse, tile, addresses)?,
        Forward::Matrix(tile) => call.forward_matrix(o, lse, tile, addresses)?,
        Forward::Rows(tile) => call.forward_rows(o, lse, tile, addresses)?,
        #[cfg(feature = "cuda")]
        Forward::Hopper(tiles) => call.forward_hopper(o, lse, tiles)?,
        #[cfg(feature = "cuda")]
        Forward::Mma(tiles) => call.forward_mma(o, lse, tiles)?,
        #[cfg(not(feature = "cuda"))]
        kernel @ (Forward::Hopper(_) | Forward::Mma(_)) => {
            let why = "it was not compiled: that takes the feature cuda".into();
            return Err(AttentionError::KernelUnavailable { kernel: kernel.kernel().name(), why });
        }
    }
    call.fill(o, Some(lse), false);
    Ok(())
}

impl Call<'_> {
    fn forward_portable(
        &self,
        o: &TensorView,
        lse: &TensorView<3>,
        tile: TileShape,
        addresses: AddressType,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        tiling::check_tile(self.device, p, &tile, Stage::Forward)?;
        tiling::check_bindings(self.device, p, "forward", 5)?;
        let (grid, count) = self.query_grid("forward", tile.tile_q)?;
        let route = self.route(Blocks::Queries, tile.tile_q, tile.tile_k);
        // SAFETY: views have been checked against their buffers. The kernel reads and writes no row or column beyond the last
        // one.
        unsafe {
            portable::forward::forward::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&[o]),
                self.qkv(),
                self.scores(Stage::Forward, &route),
                ForwardOutputsLaunch::new(o.arg(), lse.arg()),
                grid,
                tiling::blueprint(p, tile, Factor::One),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }
}
