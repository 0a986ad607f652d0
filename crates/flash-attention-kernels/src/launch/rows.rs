//! Launch of the kernels whose threads process whole rows.

use super::backward::{Backward, Results};
use super::sequences::Blocks;
use super::{Call, Launch};
use crate::blocks::RUN;
use crate::error::AttentionError;
use crate::fragment::operands::{ForwardOutputsLaunch, GradientsLaunch};
use crate::fragment::role::Role;
use crate::rows::{self, RowsTile};
use crate::tensor::TensorView;
use crate::tiling::{self, Kernel, Stage};
use cubecl::ir::AddressType;
use cubecl::prelude::*;

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
        // SAFETY: views have been checked against their buffers. The kernel reads and writes no row or column beyond the last one.
        unsafe {
            rows::forward::forward::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units as u32),
                addresses.max(route.addresses()),
                self.width(&[o]),
                self.qkv(),
                self.scores(Stage::Forward, &route),
                ForwardOutputsLaunch::new(o.arg(), lse.arg()),
                grid,
                tiling::rows::blueprint(p, Role::Forward, tile),
                [self.dtype(), self.mask_type()],
            );
        }
        Ok(())
    }

    fn check_rows(&self, tile: RowsTile) -> Result<(), AttentionError> {
        tiling::rows::check(self.device, tile)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Rows.name(), why })
    }
}

impl<'a> Backward<'a> {
    /// The launch that computes `dq`, or `dk` and `dv`.
    pub(super) fn rows(&self, results: Results<'a>, tile: RowsTile) -> Result<Launch<'a>, AttentionError> {
        let Backward { call, saved, scratch, addresses } = *self;
        let role = results.role();
        call.check_rows(tile)?;
        let (grid, count) = self.rows_grid(&results, tile.block())?;
        let of = if role.is_transposed() { Blocks::KeysTurned } else { Blocks::Queries };
        Ok(Box::new(move || {
            let route = call.route(of, tile.block(), RUN);
            let scores = if role.is_transposed() {
                call.scores_transposed(Stage::Backward, &route)
            } else {
                call.scores(Stage::Backward, &route)
            };
            // SAFETY: as for the forward.
            unsafe {
                rows::gradient::gradient::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(tile.units as u32),
                    addresses.max(route.addresses()),
                    call.width(&results.views(saved)),
                    call.sides(saved, scratch, role.is_transposed()),
                    scores,
                    GradientsLaunch::new(results.dqk().into(), results.dv.map(|dv| dv.arg()).into()),
                    grid,
                    tiling::rows::blueprint(call.problem, role, tile),
                    [call.dtype(), call.mask_type()],
                );
            }
        }))
    }
}
