//! Launch of the families whose kernels read and write tensors as they are: portable, cooperative matrix products, whole rows.

use super::backward::{Backward, GradientKernel, Prepared, Results};
use super::forward::{ForwardKernel, Outputs};
use super::sequences::Blocks;
use super::{Call, Inputs, Launch};
use crate::error::AttentionError;
use crate::fragment::{ForwardOutputsLaunch, GradientsLaunch, GridLaunch, QkvLaunch, Role, ScoresLaunch, SidesLaunch};
use crate::matrix::{self, MatrixTile};
use crate::portable::{self, tile::TileShape};
use crate::rows::{self, RowsTile};
use crate::tiling::{self, Forward, Gradient, Kernel, ListShape, Stage};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;

/// What the launches of these families differ in, besides the kernel.
struct Direct<B> {
    /// Rows of a thread block and columns of a tile.
    list: ListShape,
    dim: CubeDim,
    blueprint: B,
}

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
        Direct { list, dim, blueprint }: Direct<B>,
        kernel: KernelFn<E, M, QkvLaunch<E, N>, ForwardOutputsLaunch<E, N>, B>,
    ) -> Result<Launch<'a>, AttentionError> {
        call.case().check_bindings("forward", 5)?;
        let (grid, count) = call.rows_grid("forward", list.rows, false)?;
        let Outputs { o, lse, addresses } = self;
        let Inputs { q, k, v, .. } = call.inputs;
        Ok(Box::new(move || {
            let route = call.route(Blocks::Queries, list.rows, list.columns);
            // SAFETY: views have been checked against their buffers. Kernels read and write no row or column beyond the last one.
            unsafe {
                kernel(
                    call.client,
                    count,
                    dim,
                    addresses.max(route.addresses()),
                    call.width([o]),
                    QkvLaunch::new(q.arg(), k.arg(), v.arg()),
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
    /// Prepares the launch of a gradient kernel. Its band and scores are those of its rows if `of` is
    /// [`KeysTurned`](Blocks::KeysTurned).
    fn direct<E: Float + 'a, M: Numeric + 'a, N: Size + 'a, B: 'a>(
        self,
        results: Results<'a>,
        of: Blocks,
        Direct { list, dim, blueprint }: Direct<B>,
        kernel: KernelFn<E, M, SidesLaunch<E, N>, GradientsLaunch<E, N>, B>,
    ) -> Result<Prepared<'a>, AttentionError> {
        let Backward { call, saved, scratch, addresses } = self;
        let role = results.role();
        call.case().check_bindings(role.kernel(), 5 + results.all().count())?;
        let (grid, count) = call.rows_grid(role.kernel(), list.rows, role.is_transposed())?;
        Ok(Prepared::Direct(Box::new(move || {
            let route = call.route(of, list.rows, list.columns);
            let band = call.problem.band();
            let band = if of == Blocks::KeysTurned { band.transposed() } else { band };
            // SAFETY: as for the forward.
            unsafe {
                kernel(
                    call.client,
                    count,
                    dim,
                    addresses.max(route.addresses()),
                    call.width(results.all().chain([&saved.dout])),
                    call.sides(saved, scratch, role.is_transposed()),
                    call.scores(role, &route, &band, true),
                    GradientsLaunch::new(results.dqk().into(), results.dv.map(|dv| dv.arg()).into()),
                    grid,
                    blueprint,
                    call.dtypes(),
                );
            }
        })))
    }
}

impl TileShape {
    /// What launches a kernel of this role.
    fn direct(self, call: &Call, role: Role, list: ListShape) -> Result<Direct<portable::Blueprint>, AttentionError> {
        let stage = if role == Role::Forward { Stage::Forward } else { Stage::Backward };
        tiling::check_tile(call.case(), &self, stage)?;
        let blueprint = tiling::blueprint(call.problem, role, self);
        Ok(Direct { list, dim: CubeDim::new_1d(self.units() as u32), blueprint })
    }
}

impl MatrixTile {
    fn direct(self, call: &Call, role: Role, list: ListShape) -> Result<Direct<matrix::Blueprint>, AttentionError> {
        tiling::matrix::check(call.case(), role, self).map_err(|why| Kernel::Matrix.unavailable(why))?;
        let blueprint = tiling::matrix::blueprint(call.case(), role, self);
        Ok(Direct { list, dim: CubeDim::new_2d(self.plane as u32, self.planes as u32), blueprint })
    }
}

impl RowsTile {
    fn direct(self, call: &Call, role: Role, list: ListShape) -> Result<Direct<rows::Blueprint>, AttentionError> {
        tiling::rows::check(call.device, self).map_err(|why| Kernel::Rows.unavailable(why))?;
        let blueprint = tiling::rows::blueprint(call.problem, role, self);
        Ok(Direct { list, dim: CubeDim::new_1d(self.units as u32), blueprint })
    }
}

/// Launches of a family. With rows of keys, its kernel of gradients takes blocks and scores of this kind.
macro_rules! family {
    ($tile:ident, $name:ident, $family:ident, $of_keys:ident) => {
        impl ForwardKernel for $tile {
            fn prepare_forward<'a>(
                self,
                call: &'a Call<'a>,
                outputs: Outputs<'a>,
            ) -> Result<Launch<'a>, AttentionError> {
                let direct = self.direct(call, Role::Forward, Forward::$name(self).list(false))?;
                outputs.direct(call, direct, $family::forward::forward::launch_unchecked)
            }
        }

        impl GradientKernel for $tile {
            fn prepare<'a>(self, backward: Backward<'a>, results: Results<'a>) -> Result<Prepared<'a>, AttentionError> {
                let keys = results.role().is_transposed();
                let direct = self.direct(backward.call, results.role(), Gradient::$name(self).list(keys))?;
                let of = if keys { Blocks::$of_keys } else { Blocks::Queries };
                backward.direct(results, of, direct, $family::gradient::gradient::launch_unchecked)
            }
        }
    };
}

family!(TileShape, Portable, portable, Keys);
family!(MatrixTile, Matrix, matrix, Keys);
family!(RowsTile, Rows, rows, KeysTurned);
