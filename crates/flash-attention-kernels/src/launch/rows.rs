//! Launches the kernels whose threads hold whole rows.

use super::sequences::Blocks;
use super::{Call, Saved, Scratch};
use crate::blocks::RUN;
use crate::error::AttentionError;
use crate::matrix::Role;
use crate::portable::GridLaunch;
use crate::rows::{self, RowsTile};
use crate::tensor::TensorView;
use crate::tiling::{self, Kernel, Stage};
use cubecl::ir::AddressType;
use cubecl::prelude::*;

/// A gradient's launch, checked: what it computes, tiles, thread blocks, and where `dq` or `dk`, and `dv` go.
pub(super) struct RowsGradient<'a> {
    role: Role,
    tile: RowsTile,
    grid: (GridLaunch, CubeCount),
    results: [Option<&'a TensorView>; 2],
}

impl Call<'_> {
    /// Computes `o` and `lse`.
    pub(super) fn forward_rows(
        &self,
        o: &TensorView,
        lse: &TensorView<3>,
        tile: RowsTile,
        addresses: AddressType,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        self.check_rows(tile)?;
        tiling::check_bindings(self.device, p, "forward", 5)?;
        let (grid, count) = self.query_grid("forward", tile.block())?;
        let route = self.route(Blocks::Queries, tile.block(), RUN);
        // SAFETY: views have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            rows::forward::forward::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units as u32),
                addresses.max(route.addresses()),
                self.width(&[o]),
                self.inputs.q.arg(),
                self.inputs.k.arg(),
                self.inputs.v.arg(),
                self.mask().into(),
                self.bias().into(),
                o.arg(),
                lse.arg(),
                self.score(Stage::Forward, &route),
                p.band().into_launch(),
                grid,
                tiling::rows::blueprint(p, Role::Forward, tile),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }

    /// Whatever can fail of [`gradient_rows`](Self::gradient_rows).
    pub(super) fn check_gradient_rows<'a>(
        &self,
        role: Role,
        tile: RowsTile,
        results: [Option<&'a TensorView>; 2],
    ) -> Result<RowsGradient<'a>, AttentionError> {
        let p = self.problem;
        self.check_rows(tile)?;
        let kernel = if role.is_transposed() { "dkdv" } else { "dq" };
        tiling::check_bindings(self.device, p, kernel, 5 + results.iter().flatten().count())?;
        let (rows, transposed) = (tile.block(), role.is_transposed());
        let grid = if transposed { self.key_grid(kernel, rows)? } else { self.query_grid(kernel, rows)? };
        Ok(RowsGradient { role, tile, grid, results })
    }

    /// Computes `dq`, or `dk` and `dv`, from lse and delta in scratch.
    pub(super) fn gradient_rows(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        RowsGradient { role, tile, grid: (grid, count), results: [dk, dv] }: RowsGradient,
        addresses: AddressType,
    ) {
        let p = self.problem;
        let (queries, keys) = ([&self.inputs.q, &saved.dout], [&self.inputs.k, &self.inputs.v]);
        let (rows, columns) = if role.is_transposed() { (keys, queries) } else { (queries, keys) };
        let band = if role.is_transposed() { p.band().transposed() } else { p.band() };
        // Rows are keys there, and so are those of mask and bias.
        let turned =
            |view: &TensorView| if role.is_transposed() { view.transposed() } else { view.clone() }.broadcast_arg();
        let views: Vec<_> = [Some(&saved.dout), dk, dv].into_iter().flatten().collect();
        let of = if role.is_transposed() { Blocks::KeysTurned } else { Blocks::Queries };
        let route = self.route(of, tile.block(), RUN);
        // SAFETY: as for the forward.
        unsafe {
            rows::gradient::gradient::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units as u32),
                addresses.max(route.addresses()),
                self.width(&views),
                rows[0].arg(),
                rows[1].arg(),
                columns[0].arg(),
                columns[1].arg(),
                self.portable_stats(scratch),
                self.inputs.mask.as_ref().map(|mask| turned(&mask.tensor)).into(),
                self.inputs.bias.as_ref().map(turned).into(),
                dk.map(|dk| dk.arg()).into(),
                dv.map(|dv| dv.arg()).into(),
                self.score(Stage::Backward, &route),
                band.into_launch(),
                grid,
                tiling::rows::blueprint(p, role, tile),
                [self.dtype(), self.mask_type()],
            );
        }
    }

    fn check_rows(&self, tile: RowsTile) -> Result<(), AttentionError> {
        tiling::rows::check(self.device, tile)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Rows.name(), why })
    }
}
