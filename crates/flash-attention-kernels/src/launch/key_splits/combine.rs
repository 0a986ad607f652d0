//! Launch of the kernel that combines splits of the keys on NVIDIA GPUs.

use super::KeySplits;
use crate::error::Result;
use crate::fragment::Role;
use crate::launch::Call;
use crate::launch::route::Route;
use crate::launch::tensor_core::{rows_arg, rows_out, stride};
use crate::tensor::TensorView;
use crate::tensor_core::{LseOutLaunch, OutputsLaunch, combine};
use crate::tiling::{self, cube_count};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

/// The launch argument of an output in elements of `size` bytes, and of its log-sum-exp.
///
/// # Safety
///
/// As `launch_unchecked`: the views have been checked against their buffers.
pub(in crate::launch) unsafe fn outputs(o: &TensorView, lse: &TensorView<3>, size: usize) -> OutputsLaunch {
    // SAFETY: the caller guarantees it.
    unsafe { OutputsLaunch::new(rows_out(o, size), LseOutLaunch::new(rows_arg(lse, 1), stride(lse, 1))) }
}

impl Call<'_> {
    /// Checks the launches that combine splits of the keys besides the forward, and returns the grid of the combination.
    pub(in crate::launch) fn combination(&self, num_splits: usize) -> Result<CubeCount> {
        let p = self.problem;
        if self.leaves_rows(false) {
            cube_count(self.device, "fill", tiling::fill_cubes([num_splits * p.batch, p.num_heads_q, p.seq_q]))?;
        }
        cube_count(self.device, "combine", p.rows().div_ceil(combine::ROWS as usize) as u64)
    }

    /// Sets what no split writes: rows that belong to no sequence are combined with the others. Sinks are added when splits are
    /// combined.
    pub(in crate::launch) fn fill_splits(&self, splits: &KeySplits) {
        self.fill_with(&splits.o, Some(&splits.lse), None, false, ElemType::Float(FloatKind::F32));
    }

    /// Launches the combination into `o`, whose rows are aligned.
    pub(in crate::launch) fn combine(&self, splits: &KeySplits, count: CubeCount, o: &TensorView, lse: &TensorView<3>) {
        let p = self.problem;
        let addresses = self.addresses(&[&splits.o, &splits.lse, o, lse]);
        // SAFETY: views have been checked against their buffers. The views of the splits were allocated with their full length.
        unsafe {
            combine::combine::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(32 * combine::ROWS),
                addresses,
                outputs(&splits.o, &splits.lse, size_of::<f32>()),
                outputs(o, lse, p.dtype.size()),
                self.extras(Role::Forward, &Route::default()),
                (splits.lse.shape[0] / p.batch) as u32,
                p.batch as u32,
                p.num_heads_q as u32,
                p.seq_q as u32,
                p.head_dim_v,
                p.dtype,
            );
        }
    }
}
