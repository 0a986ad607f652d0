//! Launch of the gradient kernels for Hopper.

use super::splits::Splits;
use crate::error::Result;
use crate::fragment::Role;
use crate::hopper::operands::{DqAccumLaunch, ScheduleLaunch};
use crate::hopper::{self, reduce};
use crate::launch::backward::{Backward, Results, Scratch};
use crate::launch::tensor_core::{GradientLaunch, Outputs, Written, rows_arg, rows_out, sides, source_sides, sums_out};
use crate::tensor::TensorView;
use crate::tensor_core::{Blueprint, GradientOutputsLaunch, TileScheduler, WARPGROUP_ROWS};
use crate::tiling::{self, Gradient, HopperGradient, Kernel, cube_count, stats_rows};
use cubecl::prelude::*;

impl HopperGradient {
    /// Prepares the launch that computes these results: finds everything that can fail.
    pub(in crate::launch) fn gradient<'a>(
        self,
        backward: Backward<'a>,
        results: Results<'a>,
    ) -> Result<GradientLaunch<'a>> {
        let Backward { call, scratch, .. } = backward;
        let HopperGradient { tile, head_group, num_splits } = self;
        let (role, multiprocessors) = (results.role(), call.device.multiprocessors);
        let list = Gradient::Hopper(self).list(role.is_transposed());
        tiling::hopper::check(call.case(), role, tile, head_group, num_splits)
            .map_err(|why| Kernel::Hopper.unavailable(why))?;
        if tiling::hopper::is_wide(call.problem, role) {
            return self.wide_gradients(backward, results);
        }
        let blueprint = Blueprint { sums: results.sums, ..call.hopper_blueprint(role, tile, num_splits > 1) };
        let work = call.work(role, list, head_group, num_splits, multiprocessors as u64)?;
        let outputs = backward.outputs(&results)?;
        let splits = if num_splits > 1 { Some(Splits::new(backward, self)?) } else { None };
        let dq = results.dq.filter(|_| role == Role::All);
        let convert = dq.map(|dq| backward.convert_dq(dq, self)).transpose()?;
        Ok(Box::new(move |sources| {
            let keys = work.list.keys;
            let cubes = (multiprocessors as u32).clamp(1, work.scheduler.num_tiles);
            let route = call.route_in_order(work.list);
            let (size, written, [rows, cols]) = (call.problem.dtype.size(), outputs.write(call), sides(sources, keys));
            let (bias_width, mask_width) = call.pair_widths(keys);
            let bias_map = call.bias_map(&blueprint, if keys { tile.tile_k } else { WARPGROUP_ROWS });
            let of_splits =
                splits.as_ref().map(|splits| Written { gradients: splits.sums.clone(), sums: written.sums.clone() });
            let (sums, sum_size) = of_splits.as_ref().map_or((&written, size), |splits| (splits, size_of::<f32>()));
            let ([q, k, v, dout], [dqk, dv]) = (sources, &sums.gradients);
            let addresses = call.addresses(&[q, k, v, dout, dqk, dv, scratch.sums()]);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                hopper::gradient::gradient::launch_unchecked(
                    call.client,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(tile.units() as u32),
                    addresses.max(route.addresses()),
                    bias_width,
                    mask_width,
                    call.streams((rows[0], Some(rows[1])), cols, tile.tile_k, bias_map, Some(&scratch.stats)),
                    source_sides([rows, cols], size),
                    call.score_args(&blueprint, &work.band, &route),
                    Outputs::arg(sums, sum_size, call),
                    scratch.dq_arg(),
                    ScheduleLaunch::new(work.scheduler.into_launch(), BufferArg::from_raw_parts(call.counter(), 1)),
                    blueprint,
                    call.dtypes(),
                );
            }
            if let Some(splits) = splits {
                splits.add(backward, &written, sources);
            }
            outputs.finish(call, &written);
            if let Some(convert) = convert {
                convert(sources);
            }
        }))
    }
}

impl Scratch {
    /// `dq_accum`, or the statistics where no kernel adds to it. Those have fewer elements.
    pub(super) fn sums(&self) -> &TensorView<2> {
        self.dq_accum.as_ref().unwrap_or(&self.stats)
    }

    /// The launch argument of `dq_accum` and its turns.
    ///
    /// # Safety
    ///
    /// As `launch_unchecked`: the views have been checked against their buffers.
    pub(super) unsafe fn dq_arg(&self) -> DqAccumLaunch {
        let turns = self.dq_turns.as_ref().unwrap_or(&self.stats);
        // SAFETY: the caller guarantees it.
        unsafe { DqAccumLaunch::new(rows_arg(self.sums(), 4), rows_arg(turns, 1)) }
    }
}

impl<'a> Backward<'a> {
    /// Prepares the conversion of `dq_accum`, to which the blocks of keys have added, to `dq`.
    pub(super) fn convert_dq(self, dq: &'a TensorView, tiles: HopperGradient) -> Result<GradientLaunch<'a>> {
        let Backward { call, scratch, .. } = self;
        let p = call.problem;
        let cubes = stats_rows(p).div_ceil((reduce::UNITS / 32 * reduce::WARP_ROWS) as usize);
        let count = cube_count(call.device, "convert_dq", cubes as u64)?;
        let dq = call.aligned(dq)?;
        Ok(Box::new(move |sources| {
            let ordered = Role::All.adds_in_order(p);
            let blueprint = Blueprint { ordered, ..call.hopper_blueprint(Role::Dq, tiles.tile, false) };
            let (size, band) = (p.dtype.size(), p.band());
            let scheduler = TileScheduler::new(1, 0, p.batch as u32, p.num_heads_q as u32, p.group_size() as u32, 1, 1);
            let written = dq.write(call, false);
            let (bias_width, mask_width) = call.pair_widths(false);
            let route = call.route(Gradient::Hopper(tiles).list(false), false);
            let [q, k, v, dout] = sources;
            let addresses = call.addresses(&[q, k, v, dout, &written, scratch.sums()]);
            // SAFETY: views have been checked against their buffers. The kernel drops positions past the ends.
            unsafe {
                reduce::convert_dq::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(reduce::UNITS),
                    addresses.max(route.addresses()),
                    bias_width,
                    mask_width,
                    scratch.dq_arg(),
                    source_sides(sides(sources, false), size),
                    call.score_args(&blueprint, &band, &route),
                    GradientOutputsLaunch::new(
                        rows_out(&written, size),
                        rows_out(&written, size),
                        sums_out(&written, p.batch),
                    ),
                    rows_arg(&scratch.stats, 1),
                    scheduler.into_launch(),
                    blueprint,
                    call.dtypes(),
                );
            }
            dq.finish(call, &written);
        }))
    }
}
