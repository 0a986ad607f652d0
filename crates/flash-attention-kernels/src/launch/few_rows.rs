//! Launch of the portable forward of few rows, and of the kernel that combines splits of the keys.

use super::forward::Outputs;
use super::key_splits::KeySplits;
use super::route::Route;
use super::{Call, Launch, elementwise};
use crate::error::Result;
use crate::fragment::{ForwardOutputsLaunch, Role, WIDTH};
use crate::portable::combine::{SplitsLaunch, combine};
use crate::portable::few_rows::{self, SplitGridLaunch};
use crate::tensor::TensorView;
use crate::tiling::{self, FewRowsForward, Kernel};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

impl FewRowsForward {
    /// Prepares the launch that computes `o` and `lse`: finds everything that can fail.
    pub(super) fn forward<'a>(self, call: &'a Call<'a>, outputs: Outputs<'a>) -> Result<Launch<'a>> {
        let p = call.problem;
        tiling::few_rows::check(call.case(), self).map_err(|why| Kernel::Portable.unavailable(why))?;
        call.case().check_bindings("forward", tiling::few_rows::bindings(p))?;
        let FewRowsForward { tile, num_splits } = self;
        let blueprint = tiling::few_rows::blueprint(p, self);
        let sizes = [tiling::few_rows::cubes_of_head(p, self), p.num_heads_kv, p.batch];
        let (grid, count) = call.grid("forward", sizes)?;
        let vectors = p.rows() * p.head_dim_v.div_ceil(WIDTH);
        let combination = (num_splits > 1).then(|| elementwise(call.device, "combine", vectors)).transpose()?;
        let Outputs { o, lse, addresses } = outputs;
        Ok(Box::new(move || {
            let splits = call.key_splits(num_splits, tiling::split_columns(p));
            let (to, to_lse, to_type) = match &splits {
                None => (o, lse, call.dtype()),
                Some(splits) => (&splits.o, &splits.lse, ElemType::Float(FloatKind::F32)),
            };
            let route = Route { lengths: p.is_varlen(), ..Route::default() };
            let [dtype, mask_type] = call.dtypes();
            // SAFETY: views have been checked against their buffers, and those of the splits were allocated with their full length. The kernel
            // reads and writes no row or column beyond the last one.
            unsafe {
                few_rows::forward::launch_unchecked(
                    call.client,
                    count,
                    CubeDim::new_1d(tile.units() as u32),
                    call.addresses(&[o, to, to_lse]).max(addresses),
                    call.width([to]),
                    call.qkv(),
                    call.scores(Role::Forward, &route, &p.band(), true),
                    ForwardOutputsLaunch::new(to.arg(), to_lse.arg()),
                    SplitGridLaunch::new(grid, num_splits as u32),
                    blueprint,
                    [dtype, mask_type, to_type],
                );
            }
            if let (Some(splits), Some(grid)) = (&splits, combination) {
                call.combine_portably(splits, grid, o, lse);
            }
        }))
    }
}

impl Call<'_> {
    /// Launches the combination of splits of the keys into `o` and `lse`.
    fn combine_portably(
        &self,
        splits: &KeySplits,
        (count, dim): (CubeCount, CubeDim),
        o: &TensorView,
        lse: &TensorView<3>,
    ) {
        let p = self.problem;
        // SAFETY: as for the forward.
        unsafe {
            combine::launch_unchecked(
                self.client,
                count,
                dim,
                self.addresses(&[&splits.o, &splits.lse, o, lse]),
                self.width([o]),
                SplitsLaunch::new(splits.o.arg(), splits.lse.arg(), (splits.lse.shape[0] / p.batch) as u32),
                ForwardOutputsLaunch::new(o.arg(), lse.arg()),
                self.sinks().into(),
                p.head_dim_v,
                self.dtype(),
            );
        }
    }
}
