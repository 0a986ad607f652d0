//! Launch of the kernels with `mma.sync`.

mod backward;

use super::Call;
use super::hopper::{VECTOR_BYTES, rows_arg, rows_in, rows_out, stride};
use super::sequences::Blocks;
use crate::error::AttentionError;
use crate::fragment::role::Role;
use crate::mask::Band;
use crate::mma::{MmaBlueprint, MmaTile, forward};
use crate::tensor::TensorView;
use crate::tensor_core::operands::{LseOutLaunch, OutputsLaunch, SourcesLaunch};
use crate::tensor_core::schedule::TileScheduler;
use crate::tiling::{self, Kernel, MmaForward};
use cubecl::prelude::*;

impl Call<'_> {
    /// The blueprint of a kernel, or an error if it cannot run with these tiles.
    fn mma_blueprint(&self, role: Role, tile: MmaTile, head_group: usize) -> Result<MmaBlueprint, AttentionError> {
        tiling::mma::check_head_group(self.device, self.problem, role, tile, head_group)
            .map_err(|why| AttentionError::KernelUnavailable { kernel: Kernel::Mma.name(), why })?;
        let scores = self.plain_blueprint(role, tile.tile(), false);
        Ok(MmaBlueprint { tile, scores, products: tiling::mma::products(self.problem) })
    }

    /// The tile scheduler for blocks of rows of `heads` heads, and the grid.
    fn mma_scheduler(
        &self,
        kernel: &'static str,
        band: &Band,
        heads: usize,
        head_group: usize,
        tile: MmaTile,
        transposed: bool,
    ) -> Result<(TileScheduler, CubeCount), AttentionError> {
        let p = self.problem;
        let ahead = if transposed { 0 } else { self.ahead(band, tile.tile_q(), tile.tile_k) };
        let (blocks, batches) = self.blocks((band.seq_q + ahead) as usize, tile.tile_q());
        let (num_tiles, max) = (blocks as u64 * (batches * heads) as u64, i32::MAX as u64);
        if num_tiles > max {
            return Err(AttentionError::Grid { kernel, cubes: num_tiles, max });
        }
        let (x, y, z) = tiling::cube_count(self.device, kernel, num_tiles)?;
        let group = p.group_size() as u32;
        let scheduler =
            TileScheduler::new(blocks as u32, ahead, p.batch as u32, heads as u32, group, head_group as u32, 1);
        Ok((scheduler, CubeCount::Static(x, y, z)))
    }

    /// Computes `o` and `lse`.
    pub(super) fn forward_mma(
        &self,
        o: &TensorView,
        lse: &TensorView<3>,
        MmaForward { tile, head_group }: MmaForward,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let blueprint = self.mma_blueprint(Role::Forward, tile, head_group)?;
        let band = p.band();
        let (scheduler, count) = self.mma_scheduler("forward", &band, p.num_heads_q, head_group, tile, false)?;
        tiling::check_bindings(self.device, p, "forward", 5)?;
        self.check_copies(&[&self.inputs.q, &self.inputs.k, &self.inputs.v, o])?;

        // Nothing can fail from here on.
        let q = self.readable(&self.inputs.q)?;
        let k = self.readable(&self.inputs.k)?;
        let v = self.readable(&self.inputs.v)?;
        let out = self.writable(o, false);
        let route = self.route(Blocks::Queries, tile.tile_q(), tile.tile_k);
        let size = p.dtype.size();
        let (bias_width, mask_width) = self.pair_widths(false);
        let spans = [q.span(), k.span(), v.span(), out.span(), lse.span()];
        let addresses = self.addresses(spans).max(route.addresses());
        // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
        unsafe {
            forward::forward::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(tile.units() as u32),
                addresses,
                VECTOR_BYTES / size,
                bias_width,
                mask_width,
                SourcesLaunch::new(rows_in(&q, size), rows_in(&k, size), rows_in(&v, size)),
                self.score_args(&blueprint.scores, &band, &route),
                OutputsLaunch::new(rows_out(&out, size), LseOutLaunch::new(rows_arg(lse, 1), stride(lse, 1))),
                scheduler.into_launch(),
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        self.written(&out, o)
    }
}
