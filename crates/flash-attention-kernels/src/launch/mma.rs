//! Launch of the kernels with `mma.sync`.

use super::backward::{Backward, Results};
use super::forward::Outputs;
use super::key_splits::outputs;
use super::tensor_core::{self, GradientLaunch, Work, rows_arg, rows_in, sides, source_sides};
use super::{Call, Launch};
use crate::error::Result;
use crate::fragment::Role;
use crate::mma::{MmaBlueprint, forward, gradient};
use crate::tensor_core::combine::CombinationLaunch;
use crate::tensor_core::{Blueprint, SourcesLaunch, VECTOR_BYTES};
use crate::tiling::{self, Gradient, Kernel, MmaForward, MmaTiles};
use cubecl::prelude::*;

impl Call<'_> {
    /// Blueprint, work tiles and grid of a kernel, or an error if it cannot run with these tiles.
    fn mma(&self, role: Role, plan: MmaForward, bindings: usize) -> Result<(MmaBlueprint, Work, CubeCount)> {
        tiling::mma::check(self.case(), role, plan).map_err(|why| Kernel::Mma.unavailable(why))?;
        self.case().check_bindings(role.kernel(), bindings)?;
        let MmaForward { tiles, num_splits, pack_gqa } = plan;
        let MmaTiles { tile, head_group } = tiles;
        let warps_k = tile.warps_k;
        let scores = Blueprint { pack_gqa, warps_k, ..self.plain_blueprint(role, tile.tile(), num_splits > 1) };
        let blueprint = MmaBlueprint { tile, scores, products: tiling::mma::products(self.case()) };
        let list = Gradient::Mma(tiles).list(role.is_transposed());
        let work = if pack_gqa {
            self.packed_work(list, head_group, num_splits)?
        } else {
            self.work(role, list, head_group, num_splits, 0)?
        };
        let count = tiling::cube_count(self.device, role.kernel(), work.scheduler.num_tiles as u64)?;
        Ok((blueprint, work, count))
    }
}

impl MmaForward {
    /// Prepares the launch that computes `o` and `lse`: finds everything that can fail.
    pub(super) fn forward<'a>(self, call: &'a Call<'a>, Outputs { o, lse, .. }: Outputs<'a>) -> Result<Launch<'a>> {
        let (blueprint, work, count) = call.mma(Role::Forward, self, 8)?;
        let ([q, k, v], aligned) = (call.aligned_inputs()?, call.aligned(o)?);
        let combines = self.combines();
        let launches = self.num_splits > 1 && !combines;
        let combination = launches.then(|| call.combination(self.num_splits)).transpose()?;
        Ok(Box::new(move || {
            let [q, k, v] = [q, k, v].map(|source| source.read(call));
            let (out, dtype) = (aligned.write(call, false), call.problem.dtype);
            let splits = call.key_splits(self.num_splits, blueprint.scores.columns());
            let (of_splits, lse_of_splits, size_of_splits) = match &splits {
                None => (&out, lse, dtype.size()),
                Some(splits) => (&splits.o, &splits.lse, size_of::<f32>()),
            };
            let counted = if combines { work.scheduler.num_tiles as usize / self.num_splits } else { 1 };
            // Without a combination, nothing is counted.
            let tickets = if combines { call.counters(counted) } else { lse.handle.clone() };
            if let Some(splits) = splits.as_ref().filter(|_| launches) {
                call.fill_splits(splits);
            }
            let route = call.route_of_few(work.list);
            let (size, kv_size) = (dtype.size(), call.problem.kv_size());
            let (bias_width, mask_width) = call.pair_widths(false);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                forward::forward::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(self.tiles.tile.units() as u32),
                    call.addresses(&[&q, &k, &v, &out, lse, of_splits, lse_of_splits]).max(route.addresses()),
                    VECTOR_BYTES / size,
                    bias_width,
                    mask_width,
                    SourcesLaunch::new(rows_in(&q, size), rows_in(&k, kv_size), rows_in(&v, kv_size)),
                    call.score_args(&blueprint.scores, &work.band, &route),
                    outputs(of_splits, lse_of_splits, size_of_splits),
                    CombinationLaunch::new(
                        outputs(&out, lse, dtype.size()),
                        BufferArg::from_raw_parts(tickets, counted),
                    ),
                    work.scheduler.into_launch(),
                    blueprint,
                    call.dtypes(),
                );
            }
            if let (Some(splits), Some(count)) = (&splits, combination) {
                call.combine(splits, count, &out, lse);
            }
            aligned.finish(call, &out);
        }))
    }
}

impl MmaTiles {
    /// Prepares the launch that computes these results: finds everything that can fail.
    pub(super) fn gradient<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<GradientLaunch<'a>> {
        let Backward { call, scratch, .. } = backward;
        let (blueprint, work, count) = call.mma(results.role(), self.into(), 7)?;
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
