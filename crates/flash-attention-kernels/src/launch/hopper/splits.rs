//! Launch of the sum of `dk` and `dv` over splits of a group's query heads.

use crate::error::Result;
use crate::fragment::Role;
use crate::hopper::reduce::{UNITS, WARP_ROWS};
use crate::hopper::splits::{self, SplitSumsLaunch};
use crate::launch::backward::Backward;
use crate::launch::tensor_core::{Outputs, Sources, Written, rows_arg, sides, source_sides, stride};
use crate::tensor::TensorView;
use crate::tensor_core::{RowsInLaunch, TileScheduler};
use crate::tiling::{self, Gradient, HopperGradient, cube_count};
use cubecl::prelude::*;

/// What the splits write, and the grid of the kernel that adds it up.
pub(super) struct Splits {
    /// Sums of dk and dv, `[P · B, Hkv, Sk, D or Dv]` in f32 for `P` splits.
    pub sums: [TensorView; 2],
    tiles: HopperGradient,
    count: CubeCount,
}

impl Splits {
    /// Checks the launch, and allocates what the splits write.
    pub fn new(backward: Backward, tiles: HopperGradient) -> Result<Splits> {
        let (call, p) = (backward.call, backward.call.problem);
        let warps = p.batch * p.num_heads_kv * p.seq_k.div_ceil(WARP_ROWS as usize);
        let count = cube_count(call.device, "sum_splits", warps.div_ceil(UNITS as usize / 32) as u64)?;
        let shapes = tiling::hopper::split_sums_shapes(p, tiles.num_splits);
        Ok(Splits { sums: shapes.map(|shape| TensorView::empty_words(call.client, shape)), tiles, count })
    }

    /// Launches the sum.
    pub fn add(self, backward: Backward, written: &Written, sources: &Sources) {
        let (call, scratch) = (backward.call, backward.scratch);
        let p = call.problem;
        let blueprint = call.hopper_blueprint(Role::All, self.tiles.tile, false);
        let (size, band) = (p.dtype.size(), p.band().transposed());
        let (batch, heads, group) = (p.batch as u32, p.num_heads_kv as u32, p.group_size() as u32);
        let scheduler = TileScheduler::new(1, 0, batch, heads, group, 1, 1);
        let (bias_width, mask_width) = call.pair_widths(true);
        let route = call.route(Gradient::Hopper(self.tiles).list(true), true);
        let [q, k, v, dout] = sources;
        let ([dk, dv], [to_dk, to_dv]) = (&self.sums, &written.gradients);
        let addresses = call.addresses(&[q, k, v, dout, to_dk, to_dv, dk, dv, &scratch.stats]);
        // SAFETY: views have been checked against their buffers, and those of the splits were allocated with their full length. The kernel
        // clamps or drops positions past the ends.
        unsafe {
            let of = |view: &TensorView| RowsInLaunch::new(rows_arg(view, 2), stride(view, 2));
            splits::sum_splits::launch_unchecked(
                call.client,
                self.count,
                CubeDim::new_1d(UNITS),
                addresses.max(route.addresses()),
                bias_width,
                mask_width,
                SplitSumsLaunch::new(of(dk), of(dv), self.tiles.num_splits as u32, batch),
                source_sides(sides(sources, true), size),
                call.score_args(&blueprint, &band, &route),
                Outputs::arg(written, size, call),
                rows_arg(&scratch.stats, 1),
                scheduler.into_launch(),
                blueprint,
                call.dtypes(),
            );
        }
    }
}
