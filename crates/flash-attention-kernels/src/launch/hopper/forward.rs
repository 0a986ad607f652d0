//! Launches the forward for Hopper.

use super::{OUT_BYTES, VECTOR_BYTES, rows_arg, stride};
use crate::error::AttentionError;
use crate::hopper::forward::StridesLaunch;
use crate::hopper::schedule::Walk;
use crate::hopper::{self, Role, WARPGROUP_ROWS};
use crate::launch::Call;
use crate::launch::route::Route;
use crate::launch::sequences::Blocks;
use crate::tensor::TensorView;
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
        self.check_hopper(Role::Forward, tiles.tile, tiles.section, tiles.parts)?;
        let blueprint = self.hopper_blueprint(Role::Forward, tiles.tile, tiles.parts > 1);
        let ahead = self.ahead(&p.band(), tiles.tile.tile_q(), tiles.tile.tile_k);
        let (blocks, batches) = self.blocks(p.seq_q + ahead as usize, tiles.tile.tile_q());
        let items = blocks as u64 * (batches * p.num_heads_q) as u64 * tiles.parts as u64;
        let max = i32::MAX as u64 - self.device.multiprocessors as u64 * tiles.tile.teams as u64;
        if items > max {
            return Err(AttentionError::Grid { kernel: "forward", cubes: items, max });
        }
        self.check_copies(&[&self.inputs.q, &self.inputs.k, &self.inputs.v])?;
        let part_shape = [tiles.parts * p.batch, p.num_heads_q, p.seq_q, blueprint.columns()];
        let mut fill = None;
        if tiles.parts > 1 {
            self.merge_grid()?;
            fill = self.parts_grid(part_shape)?;
        } else {
            self.check_copies(&[o])?;
        }

        // Nothing can fail from here on.
        let q = self.readable(&self.inputs.q)?;
        let k = self.readable(&self.inputs.k)?;
        let v = self.readable(&self.inputs.v)?;
        let (out, out_lse, out_size) = if tiles.parts > 1 {
            let [batches, heads, rows, _] = part_shape;
            let parts = self.client.empty(size_of::<f32>() * part_shape.iter().product::<usize>());
            let parts = TensorView::contiguous(parts, part_shape);
            let part_lse = self.client.empty(size_of::<f32>() * batches * heads * rows);
            let part_lse = TensorView::contiguous(part_lse, [batches, heads, rows]);
            // Rows that belong to no sequence are put together with the others, and no part writes them.
            self.fill_parts(fill, &parts, &part_lse);
            (parts, part_lse, size_of::<f32>())
        } else {
            (self.writable(o, false), lse.clone(), p.dtype.size())
        };

        let walk = Walk::new(
            blocks as u32,
            ahead,
            p.batch as u32,
            p.num_heads_q as u32,
            p.group_size() as u32,
            tiles.section as u32,
            tiles.parts as u32,
        );
        let cubes = (self.device.multiprocessors as u64).clamp(1, items.div_ceil(tiles.tile.teams as u64));
        let route = self.route_in_order(Blocks::Queries, tiles.tile.tile_q(), tiles.tile.tile_k);
        let vector = VECTOR_BYTES / p.dtype.size();
        let strides = StridesLaunch::new(
            stride(&q, vector),
            stride(&k, vector),
            stride(&v, vector),
            stride(&out, OUT_BYTES / out_size),
            stride(&out_lse, 1),
        );
        let bias_map = match &self.inputs.bias {
            Some(bias) if blueprint.tiled_bias() => self.map(bias, WARPGROUP_ROWS),
            _ => self.map(&k, tiles.tile.tile_k),
        };
        let ((mask, mask_width), (bias, bias_width)) = self.pairs();
        let spans = [q.span(), k.span(), v.span(), out.span(), out_lse.span()];
        let addresses = self.addresses(spans).max(route.addresses());
        // SAFETY: views have been checked against their buffers; the kernel clamps or drops what lies past the ends.
        unsafe {
            hopper::forward::forward::launch_unchecked(
                self.client,
                CubeCount::Static(cubes as u32, 1, 1),
                CubeDim::new_1d(tiles.tile.units() as u32),
                addresses,
                bias_width,
                mask_width,
                self.map(&q, WARPGROUP_ROWS),
                self.map(&k, tiles.tile.tile_k),
                self.map(&v, tiles.tile.tile_k),
                bias_map,
                mask.into(),
                bias.into(),
                rows_arg(&out, OUT_BYTES / out_size),
                rows_arg(&out_lse, 1),
                BufferArg::from_raw_parts(self.counter(), 1),
                rows_arg(&q, vector),
                rows_arg(&k, vector),
                rows_arg(&v, vector),
                strides,
                self.factors(&blueprint, &route),
                p.band().into_launch(),
                walk.into_launch(),
                self.spread(),
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        if tiles.parts > 1 { self.merge(&out, &out_lse, o, lse, tiles.parts) } else { self.written(&out, o) }
    }

    fn merge_grid(&self) -> Result<(CubeCount, CubeDim), AttentionError> {
        let rows = hopper::merge::ROWS;
        let cubes = (self.problem.rows() as u64).div_ceil(rows as u64);
        let (x, y, z) = cube_count(self.device, "merge", cubes)?;
        Ok((CubeCount::Static(x, y, z), CubeDim::new_1d(32 * rows)))
    }

    /// Puts parts of the keys together.
    fn merge(
        &self,
        parts: &TensorView,
        part_lse: &TensorView<3>,
        o: &TensorView,
        lse: &TensorView<3>,
        count: usize,
    ) -> Result<(), AttentionError> {
        let (grid, dim) = self.merge_grid()?;
        let addresses = self.addresses([parts.span(), part_lse.span(), o.span(), lse.span()]);
        let [batches, heads, rows, columns] = o.shape.map(|n| n as u32);
        // SAFETY: views have been checked against their buffers, those of the parts are as long as they say.
        unsafe {
            hopper::merge::merge::launch_unchecked(
                self.client,
                grid,
                dim,
                addresses,
                parts.arg(),
                part_lse.arg(),
                o.arg(),
                lse.arg(),
                self.extras(Stage::Forward, &Route::default()),
                batches,
                heads,
                rows,
                columns,
                count as u32,
                self.dtype(),
            );
        }
        Ok(())
    }
}
