//! Launch of the kernels for Hopper.

mod backward;
mod dbias;
mod forward;
mod splits;
mod wide;

use super::Call;
use super::tensor_core::{rows_arg, starts_aligned};
use crate::fragment::Role;
use crate::hopper::operands::StreamsLaunch;
use crate::hopper::producer::SpreadLaunch;
use crate::problem::AttentionProblem;
use crate::tensor::TensorView;
use crate::tensor_core::{Blueprint, HopperTile, PANEL, Rows, WARPGROUP_ROWS};
use crate::tiling::varies_by_pair;
use cubecl::prelude::*;

impl Call<'_> {
    /// The blueprint of a kernel. The bias is tiled if TMA can read it and its tiles fit shared memory.
    fn hopper_blueprint(&self, role: Role, tile: HopperTile, is_split: bool) -> Blueprint {
        let plain = self.plain_blueprint(role, tile, is_split);
        let tiled = Blueprint { bias: Some(Rows::Tiled), ..plain };
        if self.takes_tiles(tiled.shared_memory()) { tiled } else { plain }
    }

    /// Whether TMA can read the bias in tiles, and `bytes` of shared memory are available.
    fn takes_tiles(&self, bytes: usize) -> bool {
        let readable = self.inputs.bias.as_ref().is_some_and(|bias| is_tiled(bias, self.problem));
        readable && bytes <= self.device.shared_memory
    }

    /// The tensor map of the bias for a kernel that reads it in tiles, in boxes of `rows` rows.
    fn bias_map(&self, blueprint: &Blueprint, rows: usize) -> Option<TensorMapArg<Tiled>> {
        let bias = self.inputs.bias.as_ref().filter(|_| blueprint.tiled_bias())?;
        Some(self.map(bias, rows))
    }

    /// The streams of a kernel: resident rows of Q or K, and in the backward of dO or V, and tiles of `tile_k` columns.
    fn streams<E: Float>(
        &self,
        (qk, dov): (&TensorView, Option<&TensorView>),
        cols: [&TensorView; 2],
        tile_k: usize,
        bias: Option<TensorMapArg<Tiled>>,
        stats: Option<&TensorView<2>>,
    ) -> StreamsLaunch<E> {
        let rows = |view| self.map(view, WARPGROUP_ROWS);
        let varies = |dim: usize| u32::from(self.inputs.bias.as_ref().is_none_or(|bias| bias.shape[dim] != 1));
        // SAFETY: `launch` has checked that shape and strides stay within the buffer.
        let stats = stats.map(|view| unsafe { rows_arg(view, 1) });
        let [col_qk, col_dov] = cols.map(|view| self.map(view, tile_k));
        StreamsLaunch::new(
            rows(qk),
            dov.map(rows).into(),
            col_qk,
            col_dov,
            bias.into(),
            SpreadLaunch::new(varies(0), varies(1)),
            stats.into(),
        )
    }

    /// The tensor map of `[B, H, S, D]` with boxes of 64 columns by `rows` rows.
    fn map(&self, view: &TensorView, rows: usize) -> TensorMapArg<Tiled> {
        let mut view = view.clone();
        // The stride of a dimension of size 1 is irrelevant, but TMA validates it.
        for dim in 0..3 {
            if view.shape[dim] == 1 {
                view.strides[dim] = view.shape[3].next_multiple_of(PANEL);
            }
        }
        TensorMapArg::new(TiledArgs { tile_size: [1, 1, rows, PANEL].into() }, view.arg(), self.dtype())
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256)
    }
}

/// Whether TMA can read tiles of the problem's bias. With packed sequences it cannot: columns of tiles would start anywhere, and
/// TMA raises an illegal-instruction error for a start that is not at a multiple of 16 bytes.
fn is_tiled(view: &TensorView, problem: &AttentionProblem) -> bool {
    problem.cu_seqlens.is_none()
        && varies_by_pair(problem)
        && view.strides[3] == 1
        && starts_aligned(view, problem.dtype.size())
}
