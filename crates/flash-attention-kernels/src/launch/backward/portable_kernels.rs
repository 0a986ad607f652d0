//! Launches the portable kernels of the backward.

use super::super::Call;
use super::super::route::Route;
use super::super::sequences::Blocks;
use super::{DbiasGrids, Saved, Scratch};
use crate::error::AttentionError;
use crate::portable::GridLaunch;
use crate::portable::dbias::Sums;
use crate::portable::tile::{TileShape, WIDTH};
use crate::portable::{self, dbias, delta, dsinks};
use crate::problem::MAX_SEQ;
use crate::score::Factor;
use crate::tensor::TensorView;
use crate::tiling::{self, Stage};
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::*;

impl Call<'_> {
    /// lse and delta as the portable kernels keep them.
    pub(in crate::launch) fn portable_stats(&self, scratch: &Scratch) -> TensorArg {
        let rows = self.problem.rows();
        TensorView { handle: scratch.stats.handle.clone(), shape: [2, rows], strides: [rows, 1] }.arg()
    }

    pub(super) fn delta_grid(&self) -> Result<CubeCount, AttentionError> {
        let cubes = self.problem.rows().div_ceil(delta::ROWS) as u64;
        let (x, y, z) = tiling::cube_count(self.device, "delta", cubes)?;
        Ok(CubeCount::Static(x, y, z))
    }

    pub(super) fn dsinks_grid(&self) -> Result<CubeCount, AttentionError> {
        let (x, y, z) = tiling::cube_count(self.device, "dsinks", self.problem.num_heads_q as u64)?;
        Ok(CubeCount::Static(x, y, z))
    }

    pub(super) fn delta(&self, saved: &Saved, scratch: &Scratch, count: CubeCount, addresses: AddressType) {
        let p = self.problem;
        let vectorizes = |view: &TensorView| view.vectorizes(WIDTH, p.dtype.size());
        let width = if vectorizes(&saved.o) && vectorizes(&saved.dout) { WIDTH } else { 1 };
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            delta::delta::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d((delta::ROWS * delta::UNITS_PER_ROW) as u32),
                addresses,
                width,
                saved.o.arg(),
                saved.dout.arg(),
                saved.lse.arg(),
                saved.dlse.as_ref().map(|dlse| dlse.arg()).into(),
                self.portable_stats(scratch),
                p.num_heads_q as u32,
                p.seq_q as u32,
                p.head_dim_v,
                self.dtype(),
            );
        }
    }

    pub(super) fn dq(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dq: &TensorView,
        tile: TileShape,
        (grid, count): (GridLaunch, CubeCount),
        addresses: AddressType,
    ) {
        let route = self.route(Blocks::Queries, tile.tile_q, tile.tile_k);
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            portable::dq::dq::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&[&saved.dout, dq]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                dq.arg(),
                self.score(Stage::Backward, &route),
                self.problem.band().into_launch(),
                grid,
                tiling::blueprint(self.problem, tile, Factor::of_product(self.problem)),
                [self.dtype(), self.mask_type()],
            );
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn dkdv(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dk: Option<&TensorView>,
        dv: Option<&TensorView>,
        tile: TileShape,
        (grid, count): (GridLaunch, CubeCount),
        addresses: AddressType,
    ) {
        let views: Vec<_> = [Some(&saved.dout), dk, dv].into_iter().flatten().collect();
        let route = self.route(Blocks::Keys, tile.tile_k, tile.tile_q);
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            portable::dkdv::dkdv::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&views),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                dk.map(|dk| dk.arg()).into(),
                dv.map(|dv| dv.arg()).into(),
                self.score(Stage::Backward, &route),
                self.problem.band().into_launch(),
                grid,
                tiling::blueprint(self.problem, tile, Factor::of_product(self.problem)),
                [self.dtype(), self.mask_type()],
            );
        }
    }

    /// The gradient of the sinks, from lse and delta in scratch.
    pub(super) fn dsinks(&self, scratch: &Scratch, dsinks: &TensorView<1>, count: CubeCount, addresses: AddressType) {
        let (p, Some(sinks)) = (self.problem, &self.inputs.sinks) else { return };
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            dsinks::dsinks::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(dsinks::UNITS as u32),
                addresses,
                self.portable_stats(scratch),
                sinks.arg(),
                dsinks.arg(),
                p.batch as u32,
                p.num_heads_q as u32,
                p.seq_q as u32,
            );
        }
    }

    /// Where the gradient of the bias, or of slopes, is computed, and folded if it must be.
    pub(super) fn sums_grids(
        &self,
        kernel: &'static str,
        dbias: &TensorView,
        sums: Sums,
        tile: TileShape,
    ) -> Result<DbiasGrids, AttentionError> {
        let p = self.problem;
        let q_blocks = p.seq_q.div_ceil(tile.tile_q);
        let k_blocks = p.seq_k.div_ceil(tile.tile_k);
        let (blocks, heads, batches) = match sums {
            Sums::Tile => (q_blocks * k_blocks, dbias.shape[1], dbias.shape[0]),
            Sums::Columns => (k_blocks, p.num_heads_q, p.batch),
            Sums::Rows => (q_blocks, p.num_heads_q, p.batch),
        };
        let fold = match sums {
            Sums::Tile => None,
            Sums::Columns | Sums::Rows => {
                // A thread for each element, or a thread block where many terms are to be added.
                let terms = tiling::sums_len(sums, p) / dbias.len();
                let lanes = if terms < dbias::FOLD_UNITS { 1 } else { dbias::FOLD_UNITS };
                let cubes = (dbias.len() * lanes).div_ceil(dbias::FOLD_UNITS);
                let (x, y, z) = tiling::cube_count(self.device, "fold", cubes as u64)?;
                Some((lanes, CubeCount::Static(x, y, z)))
            }
        };
        Ok(DbiasGrids { sums, heads, batches, grid: self.grid(kernel, blocks, heads, batches)?, fold })
    }

    /// The gradient of the bias, or of what else the blueprint's factor is for, as a tensor of rank 4.
    pub(super) fn dbias(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        dbias: &TensorView,
        blueprint: portable::Blueprint,
        DbiasGrids { sums, heads, batches, grid: (grid, count), fold }: DbiasGrids,
        addresses: AddressType,
    ) {
        let p = self.problem;
        let (tile, factor) = (blueprint.tile, blueprint.factor);
        // What is folded afterwards is summed in scratch, which has been checked.
        let f32 = ElemType::Float(FloatKind::F32);
        let partial = scratch.bias_sums.as_ref().filter(|_| sums != Sums::Tile).map(|scratch| {
            let length = tiling::sums_len(sums, p) / (p.batch * p.num_heads_q);
            TensorView::contiguous(scratch.handle.clone(), [p.batch, p.num_heads_q, length])
        });
        let dtype = if factor == Factor::One { self.dtype() } else { f32 };
        let (out, out_type) = match &partial {
            Some(partial) => (partial.arg(), f32),
            None => (dbias.arg(), dtype),
        };
        // Sequences, not blocks of them: a thread block has a part of the bias, which may belong to several.
        let lists = match sums {
            Sums::Columns => self.lists(Blocks::Keys, tile.tile_k, tile.tile_q, false),
            Sums::Tile | Sums::Rows => self.lists(Blocks::Queries, tile.tile_q, tile.tile_k, false),
        };
        let route = Route { schedule: self.schedule(Blocks::Queries, MAX_SEQ), lists };
        // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            dbias::dbias::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses.max(route.addresses()),
                self.width(&[&saved.dout]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                saved.dout.arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                out,
                self.score(Stage::Backward, &route),
                p.band().into_launch(),
                grid,
                p.num_heads_q as u32,
                (p.batch / batches) as u32,
                (p.num_heads_q / heads) as u32,
                sums,
                blueprint,
                [self.dtype(), self.mask_type(), out_type],
            );
        }
        if let (Some(partial), Some((lanes, count))) = (&partial, fold) {
            let along = if sums == Sums::Columns { 3 } else { 2 };
            // SAFETY: views and scratch have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
            unsafe {
                dbias::fold::launch_unchecked(
                    self.client,
                    count,
                    CubeDim::new_1d(dbias::FOLD_UNITS as u32),
                    addresses,
                    partial.arg(),
                    dbias.arg(),
                    along,
                    lanes,
                    dtype,
                );
            }
        }
    }
}
