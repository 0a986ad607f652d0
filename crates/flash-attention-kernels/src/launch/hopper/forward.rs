//! Launch of the forward for Hopper.

use crate::error::Result;
use crate::fragment::Role;
use crate::hopper;
use crate::hopper::operands::ScheduleLaunch;
use crate::launch::forward::Outputs;
use crate::launch::key_splits::outputs;
use crate::launch::tensor_core::rows_in;
use crate::launch::{Call, Launch};
use crate::tensor_core::{SourcesLaunch, WARPGROUP_ROWS};
use crate::tiling::{self, Forward, HopperForward, Kernel};
use cubecl::prelude::*;

impl HopperForward {
    /// Prepares the launch that computes `o` and `lse`: finds everything that can fail.
    pub(in crate::launch) fn forward<'a>(
        self,
        call: &'a Call<'a>,
        Outputs { o, lse, .. }: Outputs<'a>,
    ) -> Result<Launch<'a>> {
        let HopperForward { tile, head_group, num_splits } = self;
        tiling::hopper::check(call.case(), Role::Forward, tile, head_group, num_splits)
            .map_err(|why| Kernel::Hopper.unavailable(why))?;
        let blueprint = call.hopper_blueprint(Role::Forward, tile, num_splits > 1);
        let (groups, multiprocessors) = (tile.consumer_groups as u64, call.device.multiprocessors as u64);
        let list = Forward::Hopper(self).list(false);
        let work = call.work(Role::Forward, list, head_group, num_splits, multiprocessors * groups)?;
        let ([q, k, v], aligned) = (call.aligned_inputs()?, call.aligned(o)?);
        let combination = (num_splits > 1).then(|| call.combination(num_splits)).transpose()?;
        Ok(Box::new(move || {
            let splits = call.key_splits(num_splits, blueprint.columns());
            let [q, k, v] = [q, k, v].map(|source| source.read(call));
            let out = aligned.write(call, false);
            let (written, written_lse, written_size) = match &splits {
                None => (&out, lse, call.problem.dtype.size()),
                Some(splits) => {
                    call.fill_splits(splits);
                    (&splits.o, &splits.lse, size_of::<f32>())
                }
            };
            let cubes = multiprocessors.clamp(1, (work.scheduler.num_tiles as u64).div_ceil(groups));
            let route = call.route_in_order(work.list);
            let size = call.problem.dtype.size();
            let bias_map = call.bias_map(&blueprint, WARPGROUP_ROWS);
            let (bias_width, mask_width) = call.pair_widths(false);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                hopper::forward::forward::launch_unchecked(
                    call.client,
                    CubeCount::Static(cubes as u32, 1, 1),
                    CubeDim::new_1d(tile.units() as u32),
                    call.addresses(&[&q, &k, &v, written, written_lse]).max(route.addresses()),
                    bias_width,
                    mask_width,
                    call.streams((&q, None), [&k, &v], tile.tile_k, bias_map, None),
                    SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                    call.score_args(&blueprint, &work.band, &route),
                    outputs(written, written_lse, written_size),
                    ScheduleLaunch::new(work.scheduler.into_launch(), BufferArg::from_raw_parts(call.counter(), 1)),
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
