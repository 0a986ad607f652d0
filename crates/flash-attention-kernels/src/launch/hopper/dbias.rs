//! Launch of the gradient of a bias for Hopper.

use crate::error::{AttentionError, Result};
use crate::fragment::Role;
use crate::hopper::dbias::{BiasOutLaunch, DbiasScheduler};
use crate::hopper::{self, BiasBlueprint, BiasTile};
use crate::launch::Call;
use crate::launch::backward::Backward;
use crate::launch::route::Route;
use crate::launch::tensor_core::{GradientLaunch, OUT_BYTES, rows_arg, stride};
use crate::tensor::TensorView;
use crate::tensor_core::{Blueprint, Rows, WARPGROUP_ROWS};
use crate::tiling::varies_by_pair;
use cubecl::prelude::*;

impl Call<'_> {
    fn check_dbias_hopper(&self, dbias: &TensorView, tile: BiasTile) -> Result<()> {
        let p = self.problem;
        if !varies_by_pair(p) {
            return Err(AttentionError::Unsupported {
                option: "dbias",
                value: format!("{:?}", dbias.shape),
                why: "the Hopper kernel needs a bias that is not broadcast over queries or keys",
            });
        }
        let available = self.device.shared_memory;
        if !tile.is_consistent() || self.dbias_blueprint(dbias, tile).shared_memory() > available {
            return Err(AttentionError::Unsupported {
                option: "tile",
                value: format!("{tile:?}"),
                why: "tile_k must be 32, 64 or 128, a block a multiple of 64 keys, and stages at least 2 and fit in shared memory",
            });
        }
        // Blocks, and groups of 8 rows of them, are numbered in 31 bits, including the numbers past the end that the thread blocks
        // take.
        let blocks = (dbias.shape[0] * dbias.shape[1] * p.seq_q.div_ceil(BiasTile::TILE_Q)) as u64;
        let num_tiles = blocks * p.seq_k.div_ceil(tile.block_k()).max(BiasTile::TILE_Q / 8) as u64;
        let max = i32::MAX as u64 - 8 * self.device.multiprocessors as u64;
        if num_tiles > max { Err(AttentionError::Grid { kernel: "dbias", cubes: num_tiles, max }) } else { Ok(()) }
    }

    fn dbias_blueprint(&self, dbias: &TensorView, tile: BiasTile) -> BiasBlueprint {
        // The gradient of the bias is the gradient of the score itself.
        let scores = Blueprint { keeps_derivative: false, ..self.plain_blueprint(Role::Dq, tile.tile(), false) };
        let size = self.problem.dtype.size();
        let plain = BiasBlueprint { tile, scores, vectors: dbias.vectorizes(OUT_BYTES / size, size) };
        let tiled = BiasBlueprint { scores: Blueprint { bias: Some(Rows::Tiled), ..scores }, ..plain };
        if self.takes_tiles(tiled.shared_memory()) { tiled } else { plain }
    }
}

impl<'a> Backward<'a> {
    /// Prepares the launch that computes the gradient of the bias, from lse and delta in scratch.
    pub(in crate::launch) fn dbias_hopper(self, dbias: &'a TensorView, tile: BiasTile) -> Result<GradientLaunch<'a>> {
        let Backward { call, scratch, .. } = self;
        let p = call.problem;
        call.check_dbias_hopper(dbias, tile)?;
        let blueprint = call.dbias_blueprint(dbias, tile);
        Ok(Box::new(move |sources| {
            let (size, band) = (p.dtype.size(), p.band());
            let [bias_batch, bias_heads, ..] = dbias.shape;
            let [q, k, v, dout] = sources;
            let scheduler =
                DbiasScheduler::new(&band, tile, [bias_batch, bias_heads], [p.batch, p.num_heads_q, p.num_heads_kv]);
            let bias_map = call.bias_map(&blueprint.scores, WARPGROUP_ROWS);
            let (bias_width, mask_width) = call.pair_widths(false);
            let vector = if blueprint.vectors { OUT_BYTES / size } else { 1 };
            let addresses = call.addresses(&[q, k, v, dout, dbias, &scratch.stats]);
            // SAFETY: views have been checked against their buffers. The kernel clamps or drops positions past the ends.
            unsafe {
                hopper::dbias::dbias::launch_unchecked(
                    call.client,
                    CubeCount::Static(call.device.multiprocessors.max(1) as u32, 1, 1),
                    CubeDim::new_1d(tile.tile().units() as u32),
                    addresses,
                    bias_width,
                    mask_width,
                    call.streams((q, Some(dout)), [k, v], tile.tile_k, bias_map, Some(&scratch.stats)),
                    call.score_args(&blueprint.scores, &band, &Route::default()),
                    BiasOutLaunch::new(
                        rows_arg(dbias, OUT_BYTES / size),
                        rows_arg(dbias, 1),
                        stride(dbias, vector),
                        dbias.strides[3],
                    ),
                    BufferArg::from_raw_parts(call.counter(), 1),
                    scheduler.into_launch(),
                    blueprint,
                    call.dtypes(),
                );
            }
        }))
    }
}
