//! Launch of the forward for Hopper.

use crate::error::AttentionError;
use crate::fragment::Role;
use crate::hopper;
use crate::hopper::operands::{ScheduleLaunch, StreamsLaunch};
use crate::launch::forward::{ForwardKernel, Outputs};
use crate::launch::route::Route;
use crate::launch::sequences::Blocks;
use crate::launch::tensor_core::{Aligned, rows_arg, rows_in, rows_out, stride};
use crate::launch::{Call, Launch};
use crate::tensor::{AnyView, TensorView};
use crate::tensor_core::{LseOutLaunch, OutputsLaunch, SourcesLaunch, WARPGROUP_ROWS};
use crate::tiling::{HopperForward, Stage, cube_count};
use cubecl::prelude::*;

/// Where the kernel writes.
enum Target<'a> {
    /// To the output.
    Output(Aligned<'a>),
    /// To f32 tensors `[P · B, H, S, D]` of `P` splits of the keys, which a second kernel combines.
    Splits {
        shape: [usize; 4],
        /// The grid of the kernel that fills rows of no sequence.
        fill: Option<CubeCount>,
        /// The grid of the second kernel.
        combine: (CubeCount, CubeDim),
    },
}

impl ForwardKernel for HopperForward {
    fn prepare_forward<'a>(
        self,
        call: &'a Call<'a>,
        Outputs { o, lse, .. }: Outputs<'a>,
    ) -> Result<Launch<'a>, AttentionError> {
        let HopperForward { tile, head_group, num_splits } = self;
        let p = call.problem;
        call.check_hopper(Role::Forward, tile, head_group, num_splits)?;
        let blueprint = call.hopper_blueprint(Role::Forward, tile, num_splits > 1);
        let (groups, multiprocessors) = (tile.consumer_groups as u64, call.device.multiprocessors as u64);
        let size = (tile.tile_q(), tile.tile_k);
        let work = call.work(Role::Forward, size, head_group, num_splits, multiprocessors * groups)?;
        let inputs = call.inputs;
        let [q, k, v] = [call.aligned(&inputs.q)?, call.aligned(&inputs.k)?, call.aligned(&inputs.v)?];
        let target = if num_splits > 1 {
            let shape = [num_splits * p.batch, p.num_heads_q, p.seq_q, blueprint.columns()];
            Target::Splits { shape, fill: call.splits_grid(shape)?, combine: call.combine_grid()? }
        } else {
            Target::Output(call.aligned(o)?)
        };
        Ok(Box::new(move || {
            let [q, k, v] = [q, k, v].map(|source| source.read(call));
            let (out, out_lse, out_size) = match &target {
                Target::Output(o) => (o.write(call, false), lse.clone(), p.dtype.size()),
                Target::Splits { shape, fill, .. } => {
                    let [batches, heads, rows, _] = *shape;
                    let empty = |len: usize| call.client.empty(size_of::<f32>() * len);
                    let split_o = TensorView::contiguous(empty(shape.iter().product()), *shape);
                    let split_lse = TensorView::contiguous(empty(batches * heads * rows), [batches, heads, rows]);
                    // Rows that belong to no sequence are combined with the others, and no split writes them.
                    call.fill_splits(fill.clone(), &split_o, &split_lse);
                    (split_o, split_lse, size_of::<f32>())
                }
            };
            let cubes = multiprocessors.clamp(1, (work.scheduler.num_tiles as u64).div_ceil(groups));
            let route = call.route_in_order(Blocks::Queries, tile.tile_q(), tile.tile_k);
            let size = p.dtype.size();
            let streams = StreamsLaunch::new(
                call.map(&q, WARPGROUP_ROWS),
                None.into(),
                call.map(&k, tile.tile_k),
                call.map(&v, tile.tile_k),
                call.bias_map(&blueprint, WARPGROUP_ROWS).into(),
                call.spread(),
                None.into(),
            );
            let (bias_width, mask_width) = call.pair_widths(false);
            let spans = [q.span(), k.span(), v.span(), out.span(), out_lse.span()];
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                hopper::forward::forward::launch_unchecked(
                    call.client,
                    CubeCount::Static(cubes as u32, 1, 1),
                    CubeDim::new_1d(tile.units() as u32),
                    call.addresses(spans).max(route.addresses()),
                    bias_width,
                    mask_width,
                    streams,
                    SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                    call.score_args(&blueprint, &work.band, &route),
                    OutputsLaunch::new(
                        rows_out(&out, out_size),
                        LseOutLaunch::new(rows_arg(&out_lse, 1), stride(&out_lse, 1)),
                    ),
                    ScheduleLaunch::new(work.scheduler.into_launch(), BufferArg::from_raw_parts(call.counter(), 1)),
                    blueprint,
                    [call.dtype(), call.mask_type()],
                );
            }
            match target {
                Target::Output(o) => o.finish(call, &out),
                Target::Splits { combine, .. } => call.combine(combine, (&out, &out_lse), (o, lse)),
            }
        }))
    }
}

impl Call<'_> {
    fn combine_grid(&self) -> Result<(CubeCount, CubeDim), AttentionError> {
        let rows = hopper::combine::ROWS;
        let cubes = (self.problem.rows() as u64).div_ceil(rows as u64);
        let count = cube_count(self.device, "combine", cubes)?;
        Ok((count, CubeDim::new_1d(32 * rows)))
    }

    /// Launches the combination of splits of the keys.
    fn combine(
        &self,
        (count, dim): (CubeCount, CubeDim),
        (split_o, split_lse): (&TensorView, &TensorView<3>),
        (o, lse): (&TensorView, &TensorView<3>),
    ) {
        let addresses = self.addresses([split_o.span(), split_lse.span(), o.span(), lse.span()]);
        // SAFETY: views have been checked against their buffers. The views of the splits were allocated with their full length.
        unsafe {
            hopper::combine::combine::launch_unchecked(
                self.client,
                count,
                dim,
                addresses,
                split_o.arg(),
                split_lse.arg(),
                o.arg(),
                lse.arg(),
                self.extras(Stage::Forward, &Route::default()),
                self.dtype(),
            );
        }
    }
}
