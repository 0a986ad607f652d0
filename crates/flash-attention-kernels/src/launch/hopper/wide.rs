//! Launch of the kernel for Hopper that computes all gradients of wide heads.

use crate::error::Result;
use crate::fragment::Role;
use crate::hopper::operands::ScheduleLaunch;
use crate::hopper::wide::{WideBlueprint, gradients};
use crate::launch::backward::{Backward, Results};
use crate::launch::route::Route;
use crate::launch::tensor_core::{GradientLaunch, Outputs, sides, source_sides};
use crate::tensor_core::WARPGROUP_ROWS;
use crate::tiling::{HopperGradient, ListShape};
use cubecl::prelude::*;

impl HopperGradient {
    /// Prepares the launch that computes all three results, with tiles that have been checked.
    pub(super) fn wide_gradients<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<GradientLaunch<'a>> {
        let Backward { call, scratch, .. } = backward;
        let HopperGradient { tile, head_group, .. } = self;
        let multiprocessors = call.device.multiprocessors;
        let blueprint = WideBlueprint::new(tile, call.plain_blueprint(Role::Dq, tile, false));
        let list = ListShape { keys: true, rows: tile.tile_k, columns: WARPGROUP_ROWS };
        let work = call.work(Role::All, list, head_group, 1, multiprocessors as u64)?;
        let outputs = backward.outputs(&results)?;
        let convert = results.dq.map(|dq| backward.convert_dq(dq, self)).transpose()?;
        Ok(Box::new(move |sources| {
            let cubes = (multiprocessors as u32).clamp(1, work.scheduler.num_tiles);
            let (size, written, sides) = (call.problem.dtype.size(), outputs.write(call), sides(sources, true));
            let (bias_width, mask_width) = call.pair_widths(false);
            let ([q, k, v, dout], [dk, dv]) = (sources, &written.gradients);
            let addresses = call.addresses(&[q, k, v, dout, dk, dv, scratch.sums()]);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                gradients::gradients::launch_unchecked(
                    call.client,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(tile.units() as u32),
                    addresses,
                    bias_width,
                    mask_width,
                    call.streams((q, Some(dout)), [k, v], tile.tile_k, None, Some(&scratch.stats)),
                    source_sides(sides, size),
                    call.score_args(&blueprint.scores, &call.problem.band(), &Route::default()),
                    Outputs::arg(&written, size, call),
                    scratch.dq_arg(),
                    ScheduleLaunch::new(work.scheduler.into_launch(), BufferArg::from_raw_parts(call.counter(), 1)),
                    blueprint,
                    call.dtypes(),
                );
            }
            outputs.finish(call, &written);
            if let Some(convert) = convert {
                convert(sources);
            }
        }))
    }
}
