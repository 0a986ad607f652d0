//! Launch of the portable kernels of the backward.

use super::super::route::Route;
use super::super::{Call, Launch};
use super::Backward;
use crate::error::Result;
use crate::fragment::{GridLaunch, Role, WIDTH};
use crate::portable::dbias::{SharersLaunch, Sums};
use crate::portable::tile::TileShape;
use crate::portable::{self, dbias, delta, dsinks};
use crate::problem::MAX_SEQ;
use crate::score::Factor;
use crate::tensor::TensorView;
use crate::tiling::{self, Gradient, Stage};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

impl<'a> Backward<'a> {
    /// The launch that computes `lse` and delta of each query.
    pub(super) fn delta(&self) -> Result<Launch<'a>> {
        let Backward { call, saved, scratch, addresses } = *self;
        let p = call.problem;
        let cubes = p.rows().div_ceil(delta::ROWS) as u64;
        let count = tiling::cube_count(call.device, "delta", cubes)?;
        let vectorizes = |view: &TensorView| view.vectorizes(WIDTH, p.dtype.size());
        let width = if vectorizes(&saved.o) && vectorizes(&saved.dout) { WIDTH } else { 1 };
        Ok(Box::new(move || {
            // SAFETY: views and scratch have been checked against their buffers. The kernel reads and writes no row or column
            // beyond the last one.
            unsafe {
                delta::delta::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d((delta::ROWS * delta::UNITS_PER_ROW) as u32),
                    addresses,
                    width,
                    delta::OutputsLaunch::new(saved.o.arg(), saved.dout.arg()),
                    saved.lse.arg(),
                    saved.dlse.as_ref().map(|dlse| dlse.arg()).into(),
                    call.stats(scratch),
                    p.head_dim_v,
                    call.dtype(),
                );
            }
        }))
    }

    /// The launch that computes the gradient of the sinks.
    pub(super) fn dsinks(&self, dsinks: &'a TensorView<1>) -> Result<Launch<'a>> {
        let Backward { call, scratch, addresses, .. } = *self;
        let count = tiling::cube_count(call.device, "dsinks", call.problem.num_heads_q as u64)?;
        let sinks = call.inputs.sinks.as_ref();
        Ok(Box::new(move || {
            let Some(sinks) = sinks else { return };
            // SAFETY: as above.
            unsafe {
                dsinks::dsinks::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(dsinks::UNITS as u32),
                    addresses,
                    call.stats(scratch),
                    sinks.arg(),
                    dsinks.arg(),
                );
            }
        }))
    }

    /// The launch that computes the gradient of the bias, or the gradient that the blueprint's factor selects, as a tensor of
    /// rank 4.
    pub(super) fn dbias(
        &self,
        kernel: &'static str,
        dbias: TensorView,
        sums: Sums,
        blueprint: portable::Blueprint,
    ) -> Result<Launch<'a>> {
        let Backward { call, saved, scratch, addresses } = *self;
        let p = call.problem;
        let (tile, factor) = (blueprint.tile, blueprint.factor);
        tiling::check_tile(call.case(), &tile, Stage::Backward)?;
        call.case().check_bindings(kernel, 6)?;
        let (grid, count, sharers) = sums_grid(call, kernel, &dbias, sums, tile)?;
        // Partial sums that are folded afterwards are in scratch, which has been checked.
        let partial = scratch.bias_sums.as_ref().filter(|_| sums != Sums::Tile).map(|scratch| {
            TensorView::contiguous(scratch.handle.clone(), [p.batch, p.num_heads_q, tiling::sums_len(sums, p)])
        });
        let f32 = ElemType::Float(FloatKind::F32);
        let dtype = if factor == Factor::One { call.dtype() } else { f32 };
        let along = if sums == Sums::Columns { 3 } else { 2 };
        let fold = partial.clone().map(|partial| self.fold(partial, dbias.clone(), along, dtype)).transpose()?;
        Ok(Box::new(move || {
            let (out, out_type) = match &partial {
                Some(partial) => (partial.arg(), f32),
                None => (dbias.arg(), dtype),
            };
            // The schedule lists sequences instead of blocks: a thread block computes a part of the bias, which may belong to
            // several sequences.
            let lists = call.lists(Gradient::Portable(tile).list(sums == Sums::Columns), false);
            let route = Route { schedule: call.schedule(false, false, MAX_SEQ), lists, lengths: false };
            // SAFETY: as above.
            unsafe {
                dbias::dbias::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(tile.units() as u32),
                    addresses.max(route.addresses()),
                    call.width([&saved.dout]),
                    call.sides(saved, scratch, false),
                    call.scores(Role::Dq, &route, &p.band(), true),
                    out,
                    grid,
                    sharers,
                    sums,
                    blueprint,
                    [call.dtype(), call.inputs.mask_type(), out_type],
                );
            }
            if let Some(fold) = fold {
                fold();
            }
        }))
    }

    /// The launch that adds up sums `[B, H, S]` to the gradient of a tensor of rank 4. `along` is the dimension that `S` belongs to.
    pub(super) fn fold(
        &self,
        sums: TensorView<3>,
        dbias: TensorView,
        along: usize,
        dtype: ElemType,
    ) -> Result<Launch<'a>> {
        let Backward { call, addresses, .. } = *self;
        let lanes = dbias::fold_lanes(sums.len() / dbias.len());
        let cubes = (dbias.len() * lanes).div_ceil(dbias::FOLD_UNITS);
        let count = tiling::cube_count(call.device, "fold", cubes as u64)?;
        Ok(Box::new(move || {
            // SAFETY: as above.
            unsafe {
                dbias::fold::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(dbias::FOLD_UNITS as u32),
                    addresses,
                    sums.arg(),
                    dbias.arg(),
                    along,
                    lanes,
                    dtype,
                );
            }
        }))
    }
}

/// The grid of thread blocks that sum a gradient of this shape, and the number of batches and heads that each of them sums
/// over.
fn sums_grid(
    call: &Call,
    kernel: &'static str,
    dbias: &TensorView,
    sums: Sums,
    tile: TileShape,
) -> Result<(GridLaunch, CubeCount, SharersLaunch)> {
    let p = call.problem;
    let (q_blocks, k_blocks) = (p.seq_q.div_ceil(tile.tile_q), p.seq_k.div_ceil(tile.tile_k));
    let (blocks, heads, batches) = match sums {
        Sums::Tile => (q_blocks * k_blocks, dbias.shape[1], dbias.shape[0]),
        Sums::Columns => (k_blocks, p.num_heads_q, p.batch),
        Sums::Rows => (q_blocks, p.num_heads_q, p.batch),
    };
    let (grid, count) = call.grid(kernel, [blocks, heads, batches])?;
    Ok((grid, count, SharersLaunch::new((p.batch / batches) as u32, (p.num_heads_q / heads) as u32)))
}
