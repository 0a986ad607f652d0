//! Launch of the forward for Hopper.

use crate::error::Result;
use crate::fragment::Role;
use crate::hopper;
use crate::hopper::operands::ScheduleLaunch;
use crate::launch::forward::Outputs;
use crate::launch::route::Route;
use crate::launch::tensor_core::{rows_arg, rows_in, rows_out, stride};
use crate::launch::{Call, Launch};
use crate::tensor::TensorView;
use crate::tensor_core::{LseOutLaunch, OutputsLaunch, SourcesLaunch, WARPGROUP_ROWS};
use crate::tiling::{self, Forward, HopperForward, Kernel};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

/// What splits of the keys write, and the grid of the kernel that combines them.
struct Splits {
    /// `[P · B, H, S, D]` in f32 for `P` splits.
    o: TensorView,
    lse: TensorView<3>,
    combine: CubeCount,
}

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
        let splits = if num_splits > 1 { Some(call.splits(num_splits, blueprint.columns())?) } else { None };
        Ok(Box::new(move || {
            let [q, k, v] = [q, k, v].map(|source| source.read(call));
            let (out, out_lse, out_size) = match &splits {
                None => (aligned.write(call, false), lse, call.problem.dtype.size()),
                Some(splits) => {
                    // Rows that belong to no sequence are combined with the others, and no split writes them. Sinks are added when
                    // splits are combined.
                    let f32 = ElemType::Float(FloatKind::F32);
                    call.fill_with(&splits.o, Some(&splits.lse), None, false, f32);
                    (splits.o.clone(), &splits.lse, size_of::<f32>())
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
                    call.addresses(&[&q, &k, &v, &out, out_lse]).max(route.addresses()),
                    bias_width,
                    mask_width,
                    call.streams((&q, None), [&k, &v], tile.tile_k, bias_map, None),
                    SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                    call.score_args(&blueprint, &work.band, &route),
                    OutputsLaunch::new(
                        rows_out(&out, out_size),
                        LseOutLaunch::new(rows_arg(out_lse, 1), stride(out_lse, 1)),
                    ),
                    ScheduleLaunch::new(work.scheduler.into_launch(), BufferArg::from_raw_parts(call.counter(), 1)),
                    blueprint,
                    call.dtypes(),
                );
            }
            match splits {
                None => aligned.finish(call, &out),
                Some(splits) => call.combine(splits, o, lse),
            }
        }))
    }
}

impl Call<'_> {
    /// Checks the launches that splits of the keys take besides the forward, and allocates what the splits write.
    fn splits(&self, num_splits: usize, columns: usize) -> Result<Splits> {
        let p = self.problem;
        let lse = [num_splits * p.batch, p.num_heads_q, p.seq_q];
        if self.leaves_rows(false) {
            tiling::cube_count(self.device, "fill", tiling::fill_cubes(lse))?;
        }
        let combine = p.rows().div_ceil(hopper::combine::ROWS as usize);
        let combine = tiling::cube_count(self.device, "combine", combine as u64)?;
        let o = TensorView::empty_words(self.client, [lse[0], lse[1], lse[2], columns]);
        Ok(Splits { o, lse: TensorView::empty_words(self.client, lse), combine })
    }

    /// Launches the combination of splits of the keys.
    fn combine(&self, splits: Splits, o: &TensorView, lse: &TensorView<3>) {
        let addresses = self.addresses(&[&splits.o, &splits.lse, o, lse]);
        // SAFETY: views have been checked against their buffers. The views of the splits were allocated with their full length.
        unsafe {
            hopper::combine::combine::launch_unchecked(
                self.client,
                splits.combine,
                CubeDim::new_1d(32 * hopper::combine::ROWS),
                addresses,
                splits.o.arg(),
                splits.lse.arg(),
                o.arg(),
                lse.arg(),
                self.extras(Role::Forward, &Route::default()),
                self.dtype(),
            );
        }
    }
}
