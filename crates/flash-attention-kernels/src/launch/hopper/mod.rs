//! Launch of the kernels for Hopper.

mod backward;
mod counters;
mod dbias;
mod forward;

use super::Call;
use super::tensor_core::starts_aligned;
use crate::error::AttentionError;
use crate::fragment::Role;
use crate::hopper::operands::StreamsLaunch;
use crate::hopper::producer::SpreadLaunch;
use crate::problem::AttentionProblem;
use crate::tensor::TensorView;
use crate::tensor_core::{Blueprint, HopperTile, PANEL, Rows, WARPGROUP_ROWS};
use crate::tiling::{self, Kernel, varies_by_pair};
use cubecl::prelude::*;

impl Call<'_> {
    /// The blueprint of a kernel. The bias is tiled if TMA can read it and its tiles fit shared memory.
    fn hopper_blueprint(&self, role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
        let plain = self.plain_blueprint(role, tile, split_keys);
        let tiled = Blueprint { bias: Some(Rows::Tiled), ..plain };
        if self.takes_tiles(tiled.shared_memory()) { tiled } else { plain }
    }

    /// An error if a kernel of this role cannot run with these tiles.
    fn check_hopper(
        &self,
        role: Role,
        tile: HopperTile,
        head_group: usize,
        num_splits: usize,
    ) -> Result<(), AttentionError> {
        tiling::hopper::check(self.device, self.problem, role, tile, head_group, num_splits)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Hopper.name(), why })
    }

    /// Whether TMA can read the bias in tiles, and `bytes` of shared memory are available.
    fn takes_tiles(&self, bytes: usize) -> bool {
        let readable = self.inputs.bias.as_ref().is_some_and(|bias| is_tiled(bias, self.problem));
        readable && bytes <= self.device.shared_memory
    }

    /// Dimensions along which the bias repeats.
    fn spread(&self) -> SpreadLaunch {
        let repeats = |dim: usize| self.inputs.bias.as_ref().is_some_and(|bias| bias.shape[dim] == 1);
        SpreadLaunch::new(u32::from(!repeats(0)), u32::from(!repeats(1)))
    }

    /// The tensor map of the bias for a kernel that reads it in tiles, in boxes of `rows` rows.
    fn bias_map(&self, blueprint: &Blueprint, rows: usize) -> Option<TensorMapArg<Tiled>> {
        let bias = self.inputs.bias.as_ref().filter(|_| blueprint.tiled_bias())?;
        Some(self.map(bias, rows))
    }

    /// The streams of a gradient kernel: resident rows, and tiles of `tile_k` columns.
    fn streams<E: Float>(
        &self,
        [rows, cols]: [[&TensorView; 2]; 2],
        tile_k: usize,
        bias: Option<TensorMapArg<Tiled>>,
        stats: BufferArg,
    ) -> StreamsLaunch<E> {
        let [qk, dov] = rows.map(|view| self.map(view, WARPGROUP_ROWS));
        let [col_qk, col_dov] = cols.map(|view| self.map(view, tile_k));
        StreamsLaunch::new(qk, Some(dov).into(), col_qk, col_dov, bias.into(), self.spread(), Some(stats).into())
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
