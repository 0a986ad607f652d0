//! Launch of the forward for Hopper.

use super::{rows_arg, rows_in, rows_out, stride};
use crate::error::AttentionError;
use crate::fragment::role::Role;
use crate::hopper;
use crate::hopper::operands::{ScheduleLaunch, StreamsLaunch};
use crate::launch::Call;
use crate::launch::route::Route;
use crate::launch::sequences::Blocks;
use crate::tensor::TensorView;
use crate::tensor_core::WARPGROUP_ROWS;
use crate::tensor_core::operands::{LseOutLaunch, OutputsLaunch, SourcesLaunch};
use crate::tensor_core::schedule::TileScheduler;
use crate::tiling::{HopperForward, Stage, cube_count};
use cubecl::prelude::*;

impl Call<'_> {
    /// Computes `o` and `lse`.
    pub(in crate::launch) fn forward_hopper(
        &self,
        o: &TensorView,
        lse: &TensorView<3>,
        tiles: HopperForward,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        self.check_hopper(Role::Forward, tiles.tile, tiles.head_group, tiles.num_splits)?;
        let blueprint = self.hopper_blueprint(Role::Forward, tiles.tile, tiles.num_splits > 1);
        let ahead = self.ahead(&p.band(), tiles.tile.tile_q(), tiles.tile.tile_k);
        let (blocks, batches) = self.blocks(p.seq_q + ahead as usize, tiles.tile.tile_q());
        let num_tiles = blocks as u64 * (batches * p.num_heads_q) as u64 * tiles.num_splits as u64;
        let max = i32::MAX as u64 - self.device.multiprocessors as u64 * tiles.tile.consumer_groups as u64;
        if num_tiles > max {
            return Err(AttentionError::Grid { kernel: "forward", cubes: num_tiles, max });
        }
        self.check_copies(&[&self.inputs.q, &self.inputs.k, &self.inputs.v])?;
        let split_shape = [tiles.num_splits * p.batch, p.num_heads_q, p.seq_q, blueprint.columns()];
        let mut fill = None;
        if tiles.num_splits > 1 {
            self.combine_grid()?;
            fill = self.splits_grid(split_shape)?;
        } else {
            self.check_copies(&[o])?;
        }

        // Nothing can fail from here on.
        let q = self.readable(&self.inputs.q)?;
        let k = self.readable(&self.inputs.k)?;
        let v = self.readable(&self.inputs.v)?;
        let (out, out_lse, out_size) = if tiles.num_splits > 1 {
            let [batches, heads, rows, _] = split_shape;
            let split_o = self.client.empty(size_of::<f32>() * split_shape.iter().product::<usize>());
            let split_o = TensorView::contiguous(split_o, split_shape);
            let split_lse = self.client.empty(size_of::<f32>() * batches * heads * rows);
            let split_lse = TensorView::contiguous(split_lse, [batches, heads, rows]);
            // Rows that belong to no sequence are combined with the others, and no split writes them.
            self.fill_splits(fill, &split_o, &split_lse);
            (split_o, split_lse, size_of::<f32>())
        } else {
            (self.writable(o, false), lse.clone(), p.dtype.size())
        };

        let scheduler = TileScheduler::new(
            blocks as u32,
            ahead,
            p.batch as u32,
            p.num_heads_q as u32,
            p.group_size() as u32,
            tiles.head_group as u32,
            tiles.num_splits as u32,
        );
        let cubes =
            (self.device.multiprocessors as u64).clamp(1, num_tiles.div_ceil(tiles.tile.consumer_groups as u64));
        let route = self.route_in_order(Blocks::Queries, tiles.tile.tile_q(), tiles.tile.tile_k);
        let size = p.dtype.size();
        let bias_map =
            self.inputs.bias.as_ref().filter(|_| blueprint.tiled_bias()).map(|bias| self.map(bias, WARPGROUP_ROWS));
        let streams = StreamsLaunch::new(
            self.map(&q, WARPGROUP_ROWS),
            None.into(),
            self.map(&k, tiles.tile.tile_k),
            self.map(&v, tiles.tile.tile_k),
            bias_map.into(),
            self.spread(),
            None.into(),
        );
        let (bias_width, mask_width) = self.pair_widths(false);
        let spans = [q.span(), k.span(), v.span(), out.span(), out_lse.span()];
        let addresses = self.addresses(spans).max(route.addresses());
        // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
        unsafe {
            hopper::forward::forward::launch_unchecked(
                self.client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_1d(tiles.tile.units() as u32),
                addresses,
                bias_width,
                mask_width,
                streams,
                SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                self.score_args(&blueprint, &p.band(), &route),
                OutputsLaunch::new(
                    rows_out(&out, out_size),
                    LseOutLaunch::new(rows_arg(&out_lse, 1), stride(&out_lse, 1)),
                ),
                ScheduleLaunch::new(scheduler.into_launch(), BufferArg::from_raw_parts(self.counter(), 1)),
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        if tiles.num_splits > 1 { self.combine(&out, &out_lse, o, lse) } else { self.written(&out, o) }
    }

    fn combine_grid(&self) -> Result<(CubeCount, CubeDim), AttentionError> {
        let rows = hopper::combine::ROWS;
        let cubes = (self.problem.rows() as u64).div_ceil(rows as u64);
        let (x, y, z) = cube_count(self.device, "combine", cubes)?;
        Ok((CubeCount::Static(x, y, z), CubeDim::new_1d(32 * rows)))
    }

    /// Launches the combination of splits of the keys.
    fn combine(
        &self,
        split_o: &TensorView,
        split_lse: &TensorView<3>,
        o: &TensorView,
        lse: &TensorView<3>,
    ) -> Result<(), AttentionError> {
        let (grid, dim) = self.combine_grid()?;
        let addresses = self.addresses([split_o.span(), split_lse.span(), o.span(), lse.span()]);
        // SAFETY: views have been checked against their buffers. The views of the splits were allocated with their full length.
        unsafe {
            hopper::combine::combine::launch_unchecked(
                self.client,
                grid,
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
        Ok(())
    }
}
