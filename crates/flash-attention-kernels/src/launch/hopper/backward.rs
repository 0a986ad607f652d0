//! Launch of the gradient kernels for Hopper.

use super::{VECTOR_BYTES, rows_arg, rows_out, source_sides};
use crate::error::AttentionError;
use crate::fragment::role::Role;
use crate::hopper::operands::{ScheduleLaunch, StreamsLaunch};
use crate::hopper::{self, reduce};
use crate::launch::backward::{Results, Wanted, WantedBias};
use crate::launch::sequences::Blocks;
use crate::launch::{Call, Saved, Scratch};
use crate::tensor::TensorView;
use crate::tensor_core::delta::{self, DeltaBlueprint};
use crate::tensor_core::operands::GradientOutputsLaunch;
use crate::tensor_core::schedule::TileScheduler;
use crate::tensor_core::{HopperTile, WARPGROUP_ROWS};
use crate::tiling::{HopperGradient, cube_count, stats_multiple, stats_rows};
use cubecl::prelude::*;

impl Call<'_> {
    /// Checks everything that can fail in [`backward_hopper`](Self::backward_hopper).
    pub(in crate::launch) fn check_hopper_backward(
        &self,
        saved: &Saved,
        wanted: &[Wanted],
        bias: Option<WantedBias>,
    ) -> Result<(), AttentionError> {
        if wanted.is_empty() && bias.is_none() {
            return Ok(());
        }
        let inputs = &self.inputs;
        self.check_copies(&[&inputs.q, &inputs.k, &inputs.v, &saved.o, &saved.dout])?;
        for (results, tiles) in wanted {
            self.check_copies(&results.all().collect::<Vec<_>>())?;
            self.check_hopper(results.role(), tiles.tile, tiles.head_group, 1)?;
            let num_tiles = self.num_tiles(results, tiles);
            let max = i32::MAX as u64 - self.device.multiprocessors as u64;
            if num_tiles > max {
                return Err(AttentionError::Grid { kernel: "gradient", cubes: num_tiles, max });
            }
        }
        if let Some(bias) = bias {
            self.check_dbias_hopper(bias)?;
        }
        if wanted.iter().any(|(results, _)| results.role() == Role::All) {
            self.round_grid()?;
        }
        self.delta_hopper_grid().map(|_| ())
    }

    /// Computes the requested gradients, each by one launch.
    pub(in crate::launch) fn backward_hopper(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        wanted: &[Wanted],
        bias: Option<WantedBias>,
    ) -> Result<(), AttentionError> {
        if wanted.is_empty() && bias.is_none() {
            return Ok(());
        }
        let [q, k, v] = [&self.inputs.q, &self.inputs.k, &self.inputs.v].map(|view| self.readable(view));
        let inputs = [q?, k?, v?, self.readable(&saved.dout)?];
        let dq_accum = wanted.iter().find(|(results, _)| results.role() == Role::All).and(scratch.dq_accum.as_ref());
        self.delta_hopper(saved, &self.readable(&saved.o)?, &inputs[3], scratch, dq_accum)?;
        wanted.iter().try_for_each(|(results, tiles)| self.gradient(&inputs, scratch, results, tiles))?;
        bias.map_or(Ok(()), |bias| self.dbias_hopper(&inputs, scratch, bias))
    }

    /// Number of blocks of all heads.
    fn num_tiles(&self, results: &Results, tiles: &HopperGradient) -> u64 {
        let p = self.problem;
        let (rows, heads) =
            if results.role().is_transposed() { (p.seq_k, p.num_heads_kv) } else { (p.seq_q, p.num_heads_q) };
        let (blocks, batches) = self.blocks(rows, tiles.tile.tile_q());
        // At most one more block for each head, if the first block starts early.
        (blocks as u64 + 1) * (batches * heads) as u64
    }

    fn gradient(
        &self,
        [q, k, v, dout]: &[TensorView; 4],
        scratch: &Scratch,
        results: &Results,
        tiles: &HopperGradient,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let tile = tiles.tile;
        let role = results.role();
        let transposed = role.is_transposed();
        let blueprint = self.hopper_blueprint(role, tile, false);
        // Resident rows and streamed tiles, as `Role` defines them.
        let (rows, tiled, band, heads) = if transposed {
            ([k, v], [q, dout], p.band().transposed(), p.num_heads_kv)
        } else {
            ([q, dout], [k, v], p.band(), p.num_heads_q)
        };
        let ahead = if transposed { 0 } else { self.ahead(&band, tile.tile_q(), tile.tile_k) };
        let (blocks, _) = self.blocks((band.seq_q + ahead) as usize, tile.tile_q());
        let group = p.group_size() as u32;
        let scheduler =
            TileScheduler::new(blocks as u32, ahead, p.batch as u32, heads as u32, group, tiles.head_group as u32, 1);
        let cubes = (self.device.multiprocessors as u32).clamp(1, scheduler.num_tiles);

        let of = if transposed { Blocks::KeysTurned } else { Blocks::Queries };
        let route = self.route_in_order(of, tile.tile_q(), tile.tile_k);

        let size = p.dtype.size();
        let wanted_k = results.dk.or(results.dq);
        let [dk, dv] = [wanted_k, results.dv].map(|view| view.map(|view| self.writable(view, transposed)));
        // A gradient that is not requested is not written: its argument is any valid tensor.
        let any = dk.as_ref().or(dv.as_ref()).expect("one of them is wanted");
        let (dk_out, dv_out) = (dk.as_ref().unwrap_or(any), dv.as_ref().unwrap_or(any));
        let bias_map = self.inputs.bias.as_ref().filter(|_| blueprint.tiled_bias());
        let bias_map = bias_map.map(|bias| self.map(bias, if transposed { tile.tile_k } else { WARPGROUP_ROWS }));
        let (bias_width, mask_width) = self.pair_widths(transposed);
        let dq_accum = scratch.dq_accum.as_ref().unwrap_or(&scratch.stats);
        let spans = [dk_out, dv_out, rows[0], rows[1], tiled[0], tiled[1]].map(|view| view.span());
        let of_scratch = [scratch.stats.span(), dq_accum.span()];
        let addresses = self.addresses(spans.into_iter().chain(of_scratch)).max(route.addresses());
        // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
        unsafe {
            hopper::gradient::gradient::launch_unchecked(
                self.client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(tile.units() as u32),
                addresses,
                bias_width,
                mask_width,
                StreamsLaunch::new(
                    self.map(rows[0], WARPGROUP_ROWS),
                    Some(self.map(rows[1], WARPGROUP_ROWS)).into(),
                    self.map(tiled[0], tile.tile_k),
                    self.map(tiled[1], tile.tile_k),
                    bias_map.into(),
                    self.spread(),
                    Some(rows_arg(&scratch.stats, 1)).into(),
                ),
                source_sides([rows, tiled], size),
                self.score_args(&blueprint, &band, &route),
                GradientOutputsLaunch::new(rows_out(dk_out, size), rows_out(dv_out, size)),
                rows_arg(dq_accum, 1),
                ScheduleLaunch::new(scheduler.into_launch(), BufferArg::from_raw_parts(self.counter(), 1)),
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        for (computed, asked) in [(dk, wanted_k), (dv, results.dv)] {
            if let (Some(computed), Some(asked)) = (computed, asked) {
                self.written(&computed, asked)?;
            }
        }
        match (role, results.dq, &scratch.dq_accum) {
            (Role::All, Some(dq), Some(dq_accum)) => self.convert_dq([q, k, v, dout], scratch, dq_accum, dq, tile),
            _ => Ok(()),
        }
    }

    /// The grid of the kernel that converts `dq_accum` to `dq`.
    fn round_grid(&self) -> Result<CubeCount, AttentionError> {
        let cubes = stats_rows(self.problem).div_ceil((reduce::UNITS / 32 * reduce::WARP_ROWS) as usize);
        let (x, y, z) = cube_count(self.device, "convert_dq", cubes as u64)?;
        Ok(CubeCount::Static(x, y, z))
    }

    /// Converts `dq_accum`, to which the blocks of keys have added, to `dq`.
    fn convert_dq(
        &self,
        [q, k, v, dout]: [&TensorView; 4],
        scratch: &Scratch,
        dq_accum: &TensorView<2>,
        dq: &TensorView,
        tile: HopperTile,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let blueprint = self.hopper_blueprint(Role::Dq, tile, false);
        let (size, band) = (p.dtype.size(), p.band());
        let scheduler = TileScheduler::new(1, 0, p.batch as u32, p.num_heads_q as u32, p.group_size() as u32, 1, 1);
        let computed = self.writable(dq, false);
        let (bias_width, mask_width) = self.pair_widths(false);
        let route = self.route(Blocks::Queries, blueprint.tile.tile_q(), blueprint.tile.tile_k);
        let spans = [q, k, v, dout, &computed].map(|view| view.span());
        let of_scratch = [scratch.stats.span(), dq_accum.span()];
        let addresses = self.addresses(spans.into_iter().chain(of_scratch)).max(route.addresses());
        // SAFETY: views have been checked against their buffers. The kernel drops positions past the ends.
        unsafe {
            reduce::convert_dq::launch_unchecked(
                self.client,
                self.round_grid()?,
                CubeDim::new_1d(reduce::UNITS),
                addresses,
                bias_width,
                mask_width,
                rows_arg(dq_accum, 4),
                source_sides([[q, dout], [k, v]], size),
                self.score_args(&blueprint, &band, &route),
                GradientOutputsLaunch::new(rows_out(&computed, size), rows_out(&computed, size)),
                rows_arg(&scratch.stats, 1),
                scheduler.into_launch(),
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        self.written(&computed, dq)
    }

    pub(in crate::launch) fn delta_hopper_grid(&self) -> Result<CubeCount, AttentionError> {
        let rows = stats_rows(self.problem);
        let (x, y, z) = cube_count(self.device, "delta", rows as u64 / delta::ROWS as u64)?;
        Ok(CubeCount::Static(x, y, z))
    }

    /// Computes lse and delta of each query, in whole tiles, and sets `dq_accum` to 0, if there is one.
    pub(in crate::launch) fn delta_hopper(
        &self,
        saved: &Saved,
        o: &TensorView,
        dout: &TensorView,
        scratch: &Scratch,
        dq_accum: Option<&TensorView<2>>,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let dlse = saved.dlse.as_ref();
        let zeroed = dq_accum.unwrap_or(&scratch.stats);
        let rows = [saved.lse.span(), scratch.stats.span(), dlse.map_or(0, |dlse| dlse.span())];
        let spans = [o.span(), dout.span(), zeroed.span()].into_iter().chain(rows);
        // SAFETY: views have been checked against their buffers.
        unsafe {
            delta::delta::launch_unchecked(
                self.client,
                self.delta_hopper_grid()?,
                CubeDim::new_1d(delta::UNITS),
                self.addresses(spans),
                VECTOR_BYTES / p.dtype.size(),
                o.arg(),
                dout.arg(),
                saved.lse.arg(),
                dlse.map(|dlse| dlse.arg()).into(),
                rows_arg(&scratch.stats, 1),
                rows_arg(zeroed, 4),
                DeltaBlueprint {
                    head_dim_v: p.head_dim_v,
                    stats_multiple: stats_multiple(p),
                    varlen: p.is_varlen(),
                    zeros: dq_accum.map_or(0, |dq_accum| dq_accum.shape[1]),
                },
                self.dtype(),
            );
        }
        Ok(())
    }
}
