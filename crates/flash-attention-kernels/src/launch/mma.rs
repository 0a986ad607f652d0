//! Launch of the kernels with `mma.sync`.

use super::backward::{Backward, GradientKernel, Prepared, Results};
use super::forward::{ForwardKernel, Outputs};
use super::sequences::Blocks;
use super::tensor_core::{self, VECTOR_BYTES, Work, rows_arg, rows_in, rows_out, sides, source_sides, stride};
use super::{Call, Launch};
use crate::error::AttentionError;
use crate::fragment::Role;
use crate::mma::{MmaBlueprint, MmaTile, forward, gradient};
use crate::tensor::AnyView;
use crate::tensor_core::{LseOutLaunch, OutputsLaunch, SourcesLaunch};
use crate::tiling::{self, Kernel, MmaTiles};
use cubecl::prelude::*;

impl Call<'_> {
    /// Blueprint, work tiles and grid of a kernel, or an error if it cannot run with these tiles.
    fn mma(
        &self,
        role: Role,
        tile: MmaTile,
        head_group: usize,
        bindings: usize,
    ) -> Result<(MmaBlueprint, Work, CubeCount), AttentionError> {
        tiling::mma::check_head_group(self.device, self.problem, role, tile, head_group)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Mma.name(), why })?;
        tiling::check_bindings(self.device, self.problem, role.kernel(), bindings)?;
        let scores = self.plain_blueprint(role, tile.tile(), false);
        let blueprint = MmaBlueprint { tile, scores, products: tiling::mma::products(self.problem) };
        let work = self.work(role, (tile.tile_q(), tile.tile_k), head_group, 1, 0)?;
        let count = tiling::cube_count(self.device, role.kernel(), work.scheduler.num_tiles as u64)?;
        Ok((blueprint, work, count))
    }
}

impl ForwardKernel for MmaTiles {
    fn prepare_forward<'a>(
        self,
        call: &'a Call<'a>,
        Outputs { o, lse, .. }: Outputs<'a>,
    ) -> Result<Launch<'a>, AttentionError> {
        let MmaTiles { tile, head_group } = self;
        let (blueprint, work, count) = call.mma(Role::Forward, tile, head_group, 5)?;
        let inputs = call.inputs;
        let [q, k, v] = [call.aligned(&inputs.q)?, call.aligned(&inputs.k)?, call.aligned(&inputs.v)?];
        let o = call.aligned(o)?;
        Ok(Box::new(move || {
            let [q, k, v] = [q, k, v].map(|source| source.read(call));
            let out = o.write(call, false);
            let route = call.route(Blocks::Queries, tile.tile_q(), tile.tile_k);
            let size = call.problem.dtype.size();
            let (bias_width, mask_width) = call.pair_widths(false);
            let spans = [q.span(), k.span(), v.span(), out.span(), lse.span()];
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                forward::forward::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(tile.units() as u32),
                    call.addresses(spans).max(route.addresses()),
                    VECTOR_BYTES / size,
                    bias_width,
                    mask_width,
                    SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                    call.score_args(&blueprint.scores, &work.band, &route),
                    OutputsLaunch::new(rows_out(&out, size), LseOutLaunch::new(rows_arg(lse, 1), stride(lse, 1))),
                    work.scheduler.into_launch(),
                    blueprint,
                    [call.dtype(), call.mask_type()],
                );
            }
            o.finish(call, &out);
        }))
    }
}

impl GradientKernel for MmaTiles {
    fn prepare<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<Prepared<'a>, AttentionError> {
        let Backward { call, scratch, .. } = backward;
        let MmaTiles { tile, head_group } = self;
        let role = results.role();
        let (blueprint, work, count) = call.mma(role, tile, head_group, 7)?;
        let outputs = backward.outputs(&results)?;
        Ok(Prepared::TensorCore(Box::new(move |sources| {
            let keys = role.is_transposed();
            let of = if keys { Blocks::KeysTurned } else { Blocks::Queries };
            let route = call.route(of, tile.tile_q(), tile.tile_k);
            let (size, written) = (call.problem.dtype.size(), outputs.write(call));
            let (bias_width, mask_width) = call.pair_widths(keys);
            let spans = sources.iter().chain(&written).map(|view| view.span());
            let addresses = call.addresses(spans.chain([scratch.stats.span()]));
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                gradient::gradient::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(tile.units() as u32),
                    addresses.max(route.addresses()),
                    VECTOR_BYTES / size,
                    bias_width,
                    mask_width,
                    source_sides(sides(sources, keys), size),
                    call.score_args(&blueprint.scores, &work.band, &route),
                    tensor_core::Outputs::arg(&written, size),
                    rows_arg(&scratch.stats, 1),
                    work.scheduler.into_launch(),
                    blueprint,
                    [call.dtype(), call.mask_type()],
                );
            }
            outputs.finish(call, &written);
        })))
    }
}
