//! Launch of the families whose kernels read and write tensors as they are: portable, cooperative matrix products, whole rows.

use super::backward::{Backward, Results};
use super::forward::Outputs;
use super::{Call, Launch};
use crate::error::Result;
use crate::fragment::{ForwardOutputsLaunch, GradientsLaunch, GridLaunch, QkvLaunch, Role, ScoresLaunch, SidesLaunch};
use crate::matrix::{self, MatrixTile};
use crate::portable::{self, tile::TileShape};
use crate::rows::{self, RowsTile};
use crate::tiling::{self, Forward, Gradient, Kernel, ListShape, Stage};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;

/// The launch of a kernel with inputs `I`, outputs `O` and blueprint `B`.
type KernelFn<E, M, I, O, B> = unsafe fn(
    &Client,
    CubeCount,
    CubeDim,
    AddressType,
    usize,
    I,
    ScoresLaunch<E, M, Const<1>, Const<1>>,
    O,
    GridLaunch,
    B,
    [ElemType; 2],
);

impl<'a> Outputs<'a> {
    /// Prepares the launch of a forward kernel.
    fn direct<E: Float + 'a, M: Numeric + 'a, N: Size + 'a, B: 'a>(
        self,
        call: &'a Call<'a>,
        list: ListShape,
        (dim, blueprint): (CubeDim, B),
        kernel: KernelFn<E, M, QkvLaunch<E, N>, ForwardOutputsLaunch<E, N>, B>,
    ) -> Result<Launch<'a>> {
        call.case().check_bindings("forward", 5)?;
        let (grid, count) = call.rows_grid("forward", list.rows, false)?;
        let Outputs { o, lse, addresses } = self;
        Ok(Box::new(move || {
            let route = call.route(list, false);
            // SAFETY: views have been checked against their buffers. Kernels read and write no row or column beyond the last one.
            unsafe {
                kernel(
                    call.client,
                    count,
                    dim,
                    addresses.max(route.addresses()),
                    call.width([o]),
                    call.qkv(),
                    call.scores(Role::Forward, &route, &call.problem.band(), true),
                    ForwardOutputsLaunch::new(o.arg(), lse.arg()),
                    grid,
                    blueprint,
                    call.dtypes(),
                );
            }
        }))
    }
}

impl<'a> Backward<'a> {
    /// Prepares the launch of a gradient kernel. `transposed`: its band and scores are those of its rows, even if rows are keys.
    fn direct<E: Float + 'a, M: Numeric + 'a, N: Size + 'a, B: 'a>(
        self,
        results: Results<'a>,
        list: ListShape,
        (dim, blueprint): (CubeDim, B),
        transposed: bool,
        kernel: KernelFn<E, M, SidesLaunch<E, N>, GradientsLaunch<E, N>, B>,
    ) -> Result<Launch<'a>> {
        let Backward { call, saved, scratch, addresses } = self;
        let role = results.role();
        call.case().check_bindings(role.kernel(), 5 + results.all().count())?;
        let (grid, count) = call.rows_grid(role.kernel(), list.rows, list.keys)?;
        Ok(Box::new(move || {
            let route = call.route(list, transposed);
            let band = call.problem.band();
            let band = if transposed && list.keys { band.transposed() } else { band };
            // SAFETY: as for the forward.
            unsafe {
                kernel(
                    call.client,
                    count,
                    dim,
                    addresses.max(route.addresses()),
                    call.width(results.all().chain([&saved.dout])),
                    call.sides(saved, scratch, list.keys),
                    call.scores(role, &route, &band, true),
                    GradientsLaunch::new(results.dqk().into(), results.dv.map(|dv| dv.arg()).into()),
                    grid,
                    blueprint,
                    call.dtypes(),
                );
            }
        }))
    }
}

impl TileShape {
    /// Size of a thread block and blueprint of a kernel of this role.
    fn direct(self, call: &Call, role: Role) -> Result<(CubeDim, portable::Blueprint)> {
        let stage = if role == Role::Forward { Stage::Forward } else { Stage::Backward };
        tiling::check_tile(call.case(), &self, stage)?;
        Ok((CubeDim::new_1d(self.units() as u32), tiling::blueprint(call.problem, role, self)))
    }
}

impl MatrixTile {
    fn direct(self, call: &Call, role: Role) -> Result<(CubeDim, matrix::Blueprint)> {
        tiling::matrix::check(call.case(), role, self).map_err(|why| Kernel::Matrix.unavailable(why))?;
        let dim = CubeDim::new_2d(self.plane as u32, self.planes as u32);
        Ok((dim, tiling::matrix::blueprint(call.case(), role, self)))
    }
}

impl RowsTile {
    fn direct(self, call: &Call, role: Role) -> Result<(CubeDim, rows::Blueprint)> {
        tiling::rows::check(call.device, self).map_err(|why| Kernel::Rows.unavailable(why))?;
        Ok((CubeDim::new_1d(self.units as u32), tiling::rows::blueprint(call.problem, role, self)))
    }
}

/// Launches of a family. `$transposed`: the band of its kernel of gradients is transposed if rows are keys.
macro_rules! family {
    ($tile:ident, $name:ident, $family:ident, $transposed:literal) => {
        impl $tile {
            /// Prepares the launch that computes `o` and `lse`: finds everything that can fail.
            pub(super) fn forward<'a>(self, call: &'a Call<'a>, outputs: Outputs<'a>) -> Result<Launch<'a>> {
                let (list, kernel) = (Forward::from(self).list(false), $family::forward::forward::launch_unchecked);
                outputs.direct(call, list, self.direct(call, Role::Forward)?, kernel)
            }

            /// Prepares the launch that computes these results: finds everything that can fail.
            pub(super) fn gradient<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<Launch<'a>> {
                let (role, kernel) = (results.role(), $family::gradient::gradient::launch_unchecked);
                let list = Gradient::$name(self).list(role.is_transposed());
                backward.direct(results, list, self.direct(backward.call, role)?, $transposed, kernel)
            }
        }
    };
}

family!(TileShape, Portable, portable, false);
family!(MatrixTile, Matrix, matrix, false);
family!(RowsTile, Rows, rows, true);
