//! Launch of the gradient kernels for Hopper.

use crate::error::AttentionError;
use crate::fragment::Role;
use crate::hopper::operands::ScheduleLaunch;
use crate::hopper::{self, reduce};
use crate::launch::Call;
use crate::launch::backward::{Backward, GradientKernel, Prepared, Results};
use crate::launch::sequences::Blocks;
use crate::launch::tensor_core::{Aligned, Outputs, Sources, rows_arg, rows_out, sides, source_sides};
use crate::tensor::{AnyView, TensorView};
use crate::tensor_core::{GradientOutputsLaunch, TileScheduler, WARPGROUP_ROWS};
use crate::tiling::{HopperGradient, cube_count, stats_rows};
use cubecl::prelude::*;

impl GradientKernel for HopperGradient {
    fn prepare<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<Prepared<'a>, AttentionError> {
        let Backward { call, scratch, .. } = backward;
        let HopperGradient { tile, head_group } = self;
        let role = results.role();
        call.check_hopper(role, tile, head_group, 1)?;
        let blueprint = call.hopper_blueprint(role, tile, false);
        let multiprocessors = call.device.multiprocessors;
        let work = call.work(role, (tile.tile_q(), tile.tile_k), head_group, 1, multiprocessors as u64)?;
        let outputs = backward.outputs(&results)?;
        let convert = match results.dq.filter(|_| role == Role::All) {
            Some(dq) => Some(ConvertDq::new(call, dq, self)?),
            None => None,
        };
        Ok(Prepared::TensorCore(Box::new(move |sources| {
            let keys = role.is_transposed();
            let cubes = (multiprocessors as u32).clamp(1, work.scheduler.num_tiles);
            let of = if keys { Blocks::KeysTurned } else { Blocks::Queries };
            let route = call.route_in_order(of, tile.tile_q(), tile.tile_k);
            let (size, written, sides) = (call.problem.dtype.size(), outputs.write(call), sides(sources, keys));
            let (bias_width, mask_width) = call.pair_widths(keys);
            let bias_map = call.bias_map(&blueprint, if keys { tile.tile_k } else { WARPGROUP_ROWS });
            let dq_accum = scratch.dq_accum.as_ref().unwrap_or(&scratch.stats);
            let spans = sources.iter().chain(&written).map(|view| view.span());
            let addresses = call.addresses(spans.chain([scratch.stats.span(), dq_accum.span()]));
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                hopper::gradient::gradient::launch_unchecked(
                    call.client,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(tile.units() as u32),
                    addresses.max(route.addresses()),
                    bias_width,
                    mask_width,
                    call.streams(sides, tile.tile_k, bias_map, rows_arg(&scratch.stats, 1)),
                    source_sides(sides, size),
                    call.score_args(&blueprint, &work.band, &route),
                    Outputs::arg(&written, size),
                    rows_arg(dq_accum, 1),
                    ScheduleLaunch::new(work.scheduler.into_launch(), BufferArg::from_raw_parts(call.counter(), 1)),
                    blueprint,
                    [call.dtype(), call.mask_type()],
                );
            }
            outputs.finish(call, &written);
            if let Some(convert) = convert {
                convert.launch(backward, sources);
            }
        })))
    }
}

/// Conversion of `dq_accum`, to which the blocks of keys have added, to `dq`.
struct ConvertDq<'a> {
    dq: Aligned<'a>,
    count: CubeCount,
    tiles: HopperGradient,
}

impl<'a> ConvertDq<'a> {
    fn new(call: &Call, dq: &'a TensorView, tiles: HopperGradient) -> Result<Self, AttentionError> {
        let cubes = stats_rows(call.problem).div_ceil((reduce::UNITS / 32 * reduce::WARP_ROWS) as usize);
        let count = cube_count(call.device, "convert_dq", cubes as u64)?;
        Ok(ConvertDq { dq: call.aligned(dq)?, count, tiles })
    }

    fn launch(self, Backward { call, scratch, .. }: Backward, sources: &Sources) {
        let Some(dq_accum) = &scratch.dq_accum else { return };
        let p = call.problem;
        let blueprint = call.hopper_blueprint(Role::Dq, self.tiles.tile, false);
        let (size, band) = (p.dtype.size(), p.band());
        let scheduler = TileScheduler::new(1, 0, p.batch as u32, p.num_heads_q as u32, p.group_size() as u32, 1, 1);
        let written = self.dq.write(call, false);
        let (bias_width, mask_width) = call.pair_widths(false);
        let route = call.route(Blocks::Queries, blueprint.tile.tile_q(), blueprint.tile.tile_k);
        let spans = sources.iter().chain([&written]).map(|view| view.span());
        let addresses = call.addresses(spans.chain([scratch.stats.span(), dq_accum.span()]));
        // SAFETY: views have been checked against their buffers. The kernel drops positions past the ends.
        unsafe {
            reduce::convert_dq::launch_unchecked(
                call.client,
                self.count,
                CubeDim::new_1d(reduce::UNITS),
                addresses.max(route.addresses()),
                bias_width,
                mask_width,
                rows_arg(dq_accum, 4),
                source_sides(sides(sources, false), size),
                call.score_args(&blueprint, &band, &route),
                GradientOutputsLaunch::new(rows_out(&written, size), rows_out(&written, size)),
                rows_arg(&scratch.stats, 1),
                scheduler.into_launch(),
                blueprint,
                [call.dtype(), call.mask_type()],
            );
        }
        self.dq.finish(call, &written);
    }
}
