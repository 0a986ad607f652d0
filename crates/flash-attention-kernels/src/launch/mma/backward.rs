//! Launch of the gradient kernels with `mma.sync`.

use crate::error::AttentionError;
use crate::launch::backward::WantedMma;
use crate::launch::hopper::{VECTOR_BYTES, rows_arg, rows_out, source_sides};
use crate::launch::sequences::Blocks;
use crate::launch::{Call, Saved, Scratch};
use crate::mask::Band;
use crate::mma::{MmaBlueprint, gradient};
use crate::tensor::TensorView;
use crate::tensor_core::operands::GradientOutputsLaunch;
use crate::tensor_core::schedule::TileScheduler;
use crate::tiling;
use cubecl::prelude::*;

/// A validated launch of a gradient kernel.
struct Prepared {
    blueprint: MmaBlueprint,
    band: Band,
    scheduler: TileScheduler,
    count: CubeCount,
}

impl Call<'_> {
    /// Checks everything that can fail in [`backward_mma`](Self::backward_mma).
    pub(in crate::launch) fn check_mma_backward(
        &self,
        saved: &Saved,
        wanted: &[WantedMma],
    ) -> Result<(), AttentionError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let inputs = &self.inputs;
        self.check_copies(&[&inputs.q, &inputs.k, &inputs.v, &saved.o, &saved.dout])?;
        for one in wanted {
            let results = &one.0;
            self.check_copies(&results.all().collect::<Vec<_>>())?;
            tiling::check_bindings(self.device, self.problem, "gradient", 7)?;
            self.prepare(one)?;
        }
        self.delta_hopper_grid().map(|_| ())
    }

    /// Computes the requested gradients, each by one launch.
    pub(in crate::launch) fn backward_mma(
        &self,
        saved: &Saved,
        scratch: &Scratch,
        wanted: &[WantedMma],
    ) -> Result<(), AttentionError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let [q, k, v] = [&self.inputs.q, &self.inputs.k, &self.inputs.v].map(|view| self.readable(view));
        let inputs = [q?, k?, v?, self.readable(&saved.dout)?];
        self.delta_hopper(saved, &self.readable(&saved.o)?, &inputs[3], scratch, None)?;
        wanted.iter().try_for_each(|one| self.gradient_mma(&inputs, scratch, one))
    }

    fn prepare(&self, (results, tiles): &WantedMma) -> Result<Prepared, AttentionError> {
        let p = self.problem;
        let role = results.role();
        let transposed = role.is_transposed();
        let blueprint = self.mma_blueprint(role, tiles.tile, tiles.head_group)?;
        let (kernel, band, heads) =
            if transposed { ("dkdv", p.band().transposed(), p.num_heads_kv) } else { ("dq", p.band(), p.num_heads_q) };
        let (scheduler, count) = self.mma_scheduler(kernel, &band, heads, tiles.head_group, tiles.tile, transposed)?;
        Ok(Prepared { blueprint, band, scheduler, count })
    }

    fn gradient_mma(
        &self,
        [q, k, v, dout]: &[TensorView; 4],
        scratch: &Scratch,
        wanted: &WantedMma,
    ) -> Result<(), AttentionError> {
        let p = self.problem;
        let results = &wanted.0;
        let Prepared { blueprint, band, scheduler, count } = self.prepare(wanted)?;
        // Resident rows and streamed tiles, as `Role` defines them.
        let transposed = results.role().is_transposed();
        let (rows, tiled) = if transposed { ([k, v], [q, dout]) } else { ([q, dout], [k, v]) };
        let of = if transposed { Blocks::KeysTurned } else { Blocks::Queries };
        let route = self.route(of, blueprint.tile.tile_q(), blueprint.tile.tile_k);
        let size = p.dtype.size();
        let wanted_k = results.dk.or(results.dq);
        let [dk, dv] = [wanted_k, results.dv].map(|view| view.map(|view| self.writable(view, transposed)));
        // A gradient that is not requested is not written: its argument is any valid tensor.
        let any = dk.as_ref().or(dv.as_ref()).expect("one of them is wanted");
        let (dk_out, dv_out) = (dk.as_ref().unwrap_or(any), dv.as_ref().unwrap_or(any));
        let (bias_width, mask_width) = self.pair_widths(transposed);
        let spans = [rows[0], rows[1], tiled[0], tiled[1], dk_out, dv_out].map(|view| view.span());
        let addresses = self.addresses(spans.into_iter().chain([scratch.stats.span()])).max(route.addresses());
        // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
        unsafe {
            gradient::gradient::launch_unchecked(
                self.client,
                count,
                CubeDim::new_1d(blueprint.tile.units() as u32),
                addresses,
                VECTOR_BYTES / size,
                bias_width,
                mask_width,
                source_sides([rows, tiled], size),
                self.score_args(&blueprint.scores, &band, &route),
                GradientOutputsLaunch::new(rows_out(dk_out, size), rows_out(dv_out, size)),
                rows_arg(&scratch.stats, 1),
                scheduler.into_launch(),
                blueprint,
                [self.dtype(), self.mask_type()],
            );
        }
        for (computed, asked) in [(dk, wanted_k), (dv, results.dv)] {
            if let (Some(computed), Some(asked)) = (computed, asked) {
                self.written(&computed, asked)?;
            }
        }
        Ok(())
    }
}
