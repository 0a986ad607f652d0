//! Launch of the kernels with `mma.sync`.

use super::backward::{Backward, Results};
use super::forward::Outputs;
use super::tensor_core::{
    self, GradientLaunch, VECTOR_BYTES, Work, rows_arg, rows_in, rows_out, sides, source_sides, stride,
};
use super::{Call, Launch};
use crate::error::Result;
use crate::fragment::Role;
use crate::mma::{MmaBlueprint, forward, gradient};
use crate::tensor_core::{LseOutLaunch, OutputsLaunch, SourcesLaunch};
use crate::tiling::{self, Gradient, Kernel, MmaTiles};
use cubecl::prelude::*;

impl Call<'_> {
    /// Blueprint, work tiles and grid of a kernel, or an error if it cannot run with these tiles.
    fn mma(&self, role: Role, tiles: MmaTiles, bindings: usize) -> Result<(MmaBlueprint, Work, CubeCount)> {
        tiling::mma::check(self.case(), role, tiles).map_err(|why| Kernel::Mma.unavailable(why))?;
        self.case().check_bindings(role.kernel(), bindings)?;
        let MmaTiles { tile, head_group } = tiles;
        let scores = self.plain_blueprint(role, tile.tile(), false);
        let blueprint = MmaBlueprint { tile, scores, products: tiling::mma::products(self.problem) };
        let work = self.work(role, Gradient::Mma(tiles).list(role.is_transposed()), head_group, 1, 0)?;
        let count = tiling::cube_count(self.device, role.kernel(), work.scheduler.num_tiles as u64)?;
        Ok((blueprint, work, count))
    }
}

impl MmaTiles {
    /// Prepares the launch that computes `o` and `lse`: finds everything that can fail.
    pub(super) fn forward<'a>(self, call: &'a Call<'a>, Outputs { o, lse, .. }: Outputs<'a>) -> Result<Launch<'a>> {
        let (blueprint, work, count) = call.mma(Role::Forward, self, 5)?;
        let ([q, k, v], o) = (call.aligned_inputs()?, call.aligned(o)?);
        Ok(Box::new(move || {
            let [q, k, v] = [q, k, v].map(|source| source.read(call));
            let out = o.write(call, false);
            let route = call.route_in_order(work.list);
            let size = call.problem.dtype.size();
            let (bias_width, mask_width) = call.pair_widths(false);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                forward::forward::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(self.tile.units() as u32),
                    call.addresses(&[&q, &k, &v, &out, lse]).max(route.addresses()),
                    VECTOR_BYTES / size,
                    bias_width,
                    mask_width,
                    SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                    call.score_args(&blueprint.scores, &work.band, &route),
                    OutputsLaunch::new(rows_out(&out, size), LseOutLaunch::new(rows_arg(lse, 1), stride(lse, 1))),
                    work.scheduler.into_launch(),
                    blueprint,
                    call.dtypes(),
                );
            }
            o.finish(call, &out);
        }))
    }

    /// Prepares the launch that computes these results: finds everything that can fail.
    pub(super) fn gradient<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<GradientLaunch<'a>> {
        let Backward { call, scratch, .. } = backward;
        let (blueprint, work, count) = call.mma(results.role(), self, 7)?;
        let outputs = backward.outputs(&results)?;
        Ok(Box::new(move |sources| {
            let keys = work.list.keys;
            let route = call.route_in_order(work.list);
            let (size, written) = (call.problem.dtype.size(), outputs.write(call));
            let (bias_width, mask_width) = call.pair_widths(keys);
            let ([q, k, v, dout], [dqk, dv]) = (sources, &written.gradients);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                gradient::gradient::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(self.tile.units() as u32),
                    call.addresses(&[q, k, v, dout, dqk, dv, &scratch.stats]).max(route.addresses()),
                    VECTOR_BYTES / size,
                    bias_width,
                    mask_width,
                    source_sides(sides(sources, keys), size),
                    call.score_args(&blueprint.scores, &work.band, &route),
                    tensor_core::Outputs::arg(&written, size, call),
                    rows_arg(&scratch.stats, 1),
                    work.scheduler.into_launch(),
                    blueprint,
                    call.dtypes(),
                );
            }
            outputs.finish(call, &written);
        }))
    }
}
