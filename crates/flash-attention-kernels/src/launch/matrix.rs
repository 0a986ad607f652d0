//! Launches the kernels made of cooperative matrix products.

use super::sequences::Blocks;
use super::{Call, Saved, Scratch};
use crate::error::AttentionError;
use crate::matrix::{self, MatrixTile, Role};
use crate::portable::GridLaunch;
use crate::tensor::TensorView;
use crate::tiling::{self, Kernel, Stage};
use cubecl::ir::AddressType;
use cubecl::prelude::*;

/// A gradient's launch, checked: what it computes, tiles, thread blocks, and where `dq` or `dk`, and `dv` go.
pub(super) struct MatrixGradient<'a> {
    role: Role,
    tile: MatrixTile,
    grid: (GridLaunch, CubeCount),
    results: [Option<&'a TensorView>; 2],
}

impl Call<'_> {
    /// Computes `o` and `lse`.
    pub(super) fn forward_matrix(
        &self,
        o: &TensorView,
        lse: &TensorView<3>,
        tile: MatrixTile,
        addresses: AddressType,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        self.check_matrix(Role::Forward, tile)?;
        tiling::check_bindings(self.device, p, "forward", 5)?;
        let (grid, count) = self.query_grid("forward", tile.rows())?;
        let route = self.route(Blocks::Queries, tile.rows(), tile.columns);
        // SAFETY: views have been checked against their buffers; the kernel reads and writes no row or column beyond the last.
        unsafe {
            matrix::forward::forward::launch_unchecked(
                self.client,
                count,
                CubeDim::new_2d(tile.plane as u32, tile.planes as u32),
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
                tiling::matrix::blueprint(self.device, p, Role::Forward, tile),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }

    /// Whatever can fail of [`gradient_matrix`](Self::gradient_matrix).
    pub(super) fn check_gradient_matrix<'a>(
        &self,
        role: Role,
        tile: MatrixTile,
        results: [Option<&'a TensorView>; 2],
    ) -> Result<MatrixGradient<'a>, AttentionError> {
        let p = self.problem;
        self.check_matrix(role, tile)?;
        let kernel = if role.is_transposed() { "dkdv" } else { "dq" };
        tiling::check_bindings(self.device, p, kernel, 5 + results.iter().flatten().count())?;
        let (rows, transposed) = (tile.rows(), role.is_transposed());
        let grid = if transposed { self.key_grid(kernel, rows)? } else { self.query_grid(kernel, rows)? };
        Ok(MatrixGradient { role, tile, grid, results })
    }

    /// Computes `dq`, or `dk` and `dv`, from lse and delta in scratch.
    pub(super) fn gradient_matrix(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        MatrixGradient { role, tile, grid: (grid, count), results: [dk, dv] }: MatrixGradient,
        addresses: AddressType,
    ) {
        let p = self.problem;
        let (queries, keys) = ([&self.inputs.q, &saved.dout], [&self.inputs.k, &self.inputs.v]);
        let (rows, columns) = if role.is_transposed() { (keys, queries) } else { (queries, keys) };
        let views: Vec<_> = [Some(&saved.dout), dk, dv].into_iter().flatten().collect();
        let of = if role.is_transposed() { Blocks::Keys } else { Blocks::Queries };
        let route = self.route(of, tile.rows(), tile.columns);
        // SAFETY: as for the forward.
        unsafe {
            matrix::gradient::gradient::launch_unchecked(
                self.client,
                count,
                CubeDim::new_2d(tile.plane as u32, tile.planes as u32),
                addresses.max(route.addresses()),
                self.width(&views),
                rows[0].arg(),
                rows[1].arg(),
                columns[0].arg(),
                columns[1].arg(),
                self.portable_stats(scratch),
                self.mask().into(),
                self.bias().into(),
                dk.map(|dk| dk.arg()).into(),
                dv.map(|dv| dv.arg()).into(),
                self.score(Stage::Backward, &route),
                p.band().into_launch(),
                grid,
                tiling::matrix::blueprint(self.device, p, role, tile),
                [self.dtype(), self.mask_type()],
            );
        }
    }

    fn check_matrix(&self, role: Role, tile: MatrixTile) -> Result<(), AttentionError> {
        tiling::matrix::check(self.device, self.problem, role, tile)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Matrix.name(), why })
    }
}
