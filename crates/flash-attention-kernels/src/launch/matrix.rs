//! Launch of the kernels with cooperative matrix products.

use super::backward::{Backward, Results};
use super::sequences::Blocks;
use super::{Call, Launch};
use crate::error::AttentionError;
use crate::fragment::operands::{ForwardOutputsLaunch, GradientsLaunch};
use crate::fragment::role::Role;
use crate::matrix::{self, MatrixTile};
use crate::tensor::TensorView;
use crate::tiling::{self, Kernel, Stage};
use cubecl::ir::AddressType;
use cubecl::prelude::*;

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
        // SAFETY: views have been checked against their buffers. The kernel reads and writes no row or column beyond the last one.
        unsafe {
            matrix::forward::forward::launch_unchecked(
                self.client,
                count,
                CubeDim::new_2d(tile.plane as u32, tile.planes as u32),
                addresses.max(route.addresses()),
                self.width(&[o]),
                self.qkv(),
                self.scores(Stage::Forward, &route),
                ForwardOutputsLaunch::new(o.arg(), lse.arg()),
                grid,
                tiling::matrix::blueprint(self.device, p, Role::Forward, tile),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }

    fn check_matrix(&self, role: Role, tile: MatrixTile) -> Result<(), AttentionError> {
        tiling::matrix::check(self.device, self.problem, role, tile)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Matrix.name(), why })
    }
}

impl<'a> Backward<'a> {
    /// The launch that computes `dq`, or `dk` and `dv`.
    pub(super) fn matrix(&self, results: Results<'a>, tile: MatrixTile) -> Result<Launch<'a>, AttentionError> {
        let Backward { call, saved, scratch, addresses } = *self;
        let role = results.role();
        call.check_matrix(role, tile)?;
        let (grid, count) = self.rows_grid(&results, tile.rows())?;
        let of = if role.is_transposed() { Blocks::Keys } else { Blocks::Queries };
        Ok(Box::new(move || {
            let route = call.route(of, tile.rows(), tile.columns);
            // SAFETY: as for the forward.
            unsafe {
                matrix::gradient::gradient::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_2d(tile.plane as u32, tile.planes as u32),
                    addresses.max(route.addresses()),
                    call.width(&results.views(saved)),
                    call.sides(saved, scratch, role.is_transposed()),
                    call.scores(Stage::Backward, &route),
                    GradientsLaunch::new(results.dqk().into(), results.dv.map(|dv| dv.arg()).into()),
                    grid,
                    tiling::matrix::blueprint(call.device, call.problem, role, tile),
                    [call.dtype(), call.mask_type()],
                );
            }
        }))
    }
}
