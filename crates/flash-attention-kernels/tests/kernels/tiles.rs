//! Tiles chosen by the caller that no kernel can run with. Each is a typed error that names the field and its value, and nothing is
//! launched.

use crate::common::*;
use flash_attention_kernels::tiling::Device;
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, BackwardOrder, BackwardTiles, BiasGradient, BiasTile, Dtype,
    Forward, Gradient, Gradients, HopperForward, HopperGradient, HopperTile, Inputs, MmaTile, MmaTiles, Saved, Scratch,
    TensorView, backward_with, forward_with,
};

const TILE: HopperTile =
    HopperTile { consumer_groups: 1, warpgroups: 2, tile_k: 128, stages: 2, ping_pong: false, producer_warp: false };

/// Tensors of a problem, to call the forward or the backward with.
struct Call {
    client: cubecl::client::Client,
    problem: AttentionProblem,
    inputs: Inputs,
    o: TensorView,
    lse: TensorView<3>,
}

impl Call {
    fn new(dtype: Dtype, head_dim: usize) -> Option<Self> {
        let client = client()?;
        let device = Device::of(&client);
        if !device.wgmma || !cfg!(feature = "cuda") {
            return None;
        }
        let shape = [1, 2, 256, head_dim];
        let problem = AttentionProblem::new(&shape, &shape, &shape, dtype, AttentionOptions::default()).unwrap();
        let tensor = || {
            let zeros = vec![0; dtype.size() * shape.iter().product::<usize>()];
            TensorView::contiguous(client.create_from_slice(&zeros), shape)
        };
        let inputs = Inputs::new(tensor(), tensor(), tensor());
        let (o, lse) = (tensor(), TensorView::contiguous(client.empty(4 * problem.rows()), problem.lse_shape()));
        Some(Call { client, problem, inputs, o, lse })
    }

    fn forward(&self, forward: impl Into<Forward>) -> Result<(), AttentionError> {
        forward_with(&self.client, &self.problem, &self.inputs, &self.o, &self.lse, forward)
    }

    fn backward(&self, tiles: BackwardTiles) -> Result<(), AttentionError> {
        let saved = Saved { o: self.o.clone(), lse: self.lse.clone(), dout: self.o.clone(), dlse: None };
        let gradients = Gradients {
            dq: Some(self.o.clone()),
            dk: Some(self.o.clone()),
            dv: Some(self.o.clone()),
            ..Default::default()
        };
        let plain = Scratch::empty(&self.client, &self.problem);
        let shape = [plain.stats.shape[1], self.problem.head_dim.next_multiple_of(64)];
        let dq_accum = Some(TensorView::contiguous(self.client.empty(4 * shape[0] * shape[1]), shape));
        let shape = [plain.stats.shape[1] / 64, 4];
        let dq_turns = Some(TensorView::contiguous(self.client.empty(4 * shape[0] * shape[1]), shape));
        let scratch = Scratch { dq_accum, dq_turns, ..plain };
        backward_with(&self.client, &self.problem, &self.inputs, &saved, &gradients, &scratch, Some(tiles))
    }

    /// The planned tiles, with this tile for dq, dk and dv.
    fn with_gradients(&self, tile: HopperTile, head_group: usize) -> BackwardTiles {
        let mut tiles = flash_attention_kernels::plan(&self.client, &self.problem).unwrap().backward;
        let of = Gradient::Hopper(HopperGradient { tile, head_group, num_splits: 1 });
        (tiles.dq, tiles.dkdv) = (of, of);
        tiles
    }
}

fn refused(error: Result<(), AttentionError>, words: &str) {
    match error {
        Err(AttentionError::KernelUnavailable { kernel, why }) => {
            assert!(["hopper", "mma"].contains(&kernel) && why.contains(words), "{words:?} is not in {why:?}");
        }
        other => panic!("{words}: {other:?}"),
    }
}

#[test]
fn hoppers_forward() {
    let Some(call) = Call::new(Dtype::BF16, 64) else { return };
    let of = |tile| HopperForward { tile, head_group: 1, num_splits: 1 };
    for (tile, words) in [
        (HopperTile { consumer_groups: 0, ..TILE }, "consumer_groups is 0"),
        (HopperTile { warpgroups: 1, ..TILE }, "warpgroups is 1; it must be at least 2"),
        (HopperTile { warpgroups: 0, ..TILE }, "warpgroups is 0"),
        (HopperTile { tile_k: 24, ..TILE }, "tile_k is 24"),
        (HopperTile { tile_k: 0, ..TILE }, "tile_k is 0"),
        (HopperTile { tile_k: 272, ..TILE }, "tile_k is 272"),
        (HopperTile { stages: 1, ..TILE }, "stages is 1"),
        (HopperTile { stages: 7, tile_k: 16, ..TILE }, "stages is 7"),
        (HopperTile { stages: 6, tile_k: 256, ..TILE }, "bytes of shared memory"),
        (HopperTile { consumer_groups: 8, ..TILE }, "consumer_groups × warpgroups is 16"),
        (HopperTile { consumer_groups: 5, tile_k: 16, ..TILE }, "threads"),
    ] {
        refused(call.forward(of(tile)), words);
    }
    refused(call.forward(HopperForward { head_group: 0, ..of(TILE) }), "head_group is 0");
    refused(call.forward(HopperForward { num_splits: 0, ..of(TILE) }), "num_splits is 0");
    // Values at each limit run.
    for tile in [
        HopperTile { stages: 6, tile_k: 16, ..TILE },
        HopperTile { tile_k: 256, ..TILE },
        HopperTile { tile_k: 16, ..TILE },
        HopperTile { stages: 6, tile_k: 32, producer_warp: true, ..TILE },
    ] {
        call.forward(of(tile)).unwrap_or_else(|error| panic!("{tile:?}: {error}"));
        let o = call.client.read_one_unchecked(call.o.handle.clone());
        assert!(o.iter().all(|byte| *byte == 0), "{tile:?}");
    }
    let single = Call::new(Dtype::F32, 64).unwrap();
    refused(single.forward(of(TILE)), "q is f32");
}

#[test]
fn hoppers_gradients() {
    let Some(call) = Call::new(Dtype::BF16, 64) else { return };
    for (tile, words) in [
        (HopperTile { warpgroups: 1, ..TILE }, "warpgroups is 1"),
        (HopperTile { warpgroups: 3, ..TILE }, "1 × 3"),
        (HopperTile { consumer_groups: 2, tile_k: 16, ..TILE }, "2 × 2"),
        (HopperTile { producer_warp: true, ..TILE }, "producer_warp is true"),
        (HopperTile { tile_k: 24, ..TILE }, "tile_k is 24"),
        (HopperTile { tile_k: 48, ..TILE }, "tile_k is 48"),
        (HopperTile { stages: 8, tile_k: 16, ..TILE }, "stages is 8"),
    ] {
        refused(call.backward(call.with_gradients(tile, 1)), words);
    }
    refused(call.backward(call.with_gradients(TILE, 0)), "head_group is 0");
    let mut fused = call.with_gradients(TILE, 1);
    fused.fused = Some(HopperGradient { tile: HopperTile { tile_k: 64, ..TILE }, head_group: 1, num_splits: 1 });
    refused(call.backward(fused), "64 × 64");
    let mut wide = Call::new(Dtype::BF16, 256).unwrap();
    wide.problem.options.backward_order = BackwardOrder::Fast;
    let keys = HopperTile { tile_k: 80, ..TILE };
    for (tile, words) in [
        (HopperTile { warpgroups: 3, ..keys }, "1 × 3"),
        (HopperTile { tile_k: 72, ..keys }, "tile_k is 72"),
        (HopperTile { tile_k: 96, ..keys }, "bytes of shared memory"),
        (HopperTile { stages: 3, ..keys }, "bytes of shared memory"),
    ] {
        let mut fused = wide.with_gradients(HopperTile { tile_k: 32, ..TILE }, 1);
        fused.fused = Some(HopperGradient { tile, head_group: 1, num_splits: 1 });
        refused(wide.backward(fused), words);
    }
    let single = Call::new(Dtype::F32, 64).unwrap();
    refused(single.backward(single.with_gradients(TILE, 1)), "q is f32");
}

#[test]
fn hoppers_gradient_of_a_bias() {
    let Some(Call { client, problem, inputs, o, lse }) = Call::new(Dtype::BF16, 64) else { return };
    let refused = |shape: [usize; 4], change: fn(&mut BiasTile), name: &str, words: &str| {
        let problem = problem.with_bias(&shape).unwrap();
        let bias = TensorView::contiguous(client.empty(2 * shape.iter().product::<usize>()), shape);
        let inputs = Inputs { bias: Some(bias.clone()), ..inputs.clone() };
        let saved = Saved { o: o.clone(), lse: lse.clone(), dout: o.clone(), dlse: None };
        let gradients = Gradients { dbias: Some(bias), ..Default::default() };
        let mut tile = BiasTile { tile_k: 64, tiles: 1, stages: 2, row_stages: 1 };
        change(&mut tile);
        let mut tiles = flash_attention_kernels::plan(&client, &problem).unwrap().backward;
        tiles.dbias = BiasGradient::Hopper(tile);
        let scratch = Scratch::empty(&client, &problem);
        match backward_with(&client, &problem, &inputs, &saved, &gradients, &scratch, Some(tiles)) {
            Err(AttentionError::Unsupported { option, value, .. }) if option == name && value.contains(words) => {}
            other => panic!("{name}, {words}: {other:?}"),
        }
    };
    refused([1, 2, 1, 256], |_| {}, "dbias", "[1, 2, 1, 256]");
    refused([1, 2, 256, 256], |tile| tile.tile_k = 48, "tile", "tile_k: 48");
    refused([1, 2, 256, 256], |tile| tile.stages = 1, "tile", "stages: 1");
    refused([1, 2, 256, 256], |tile| tile.stages = 64, "tile", "stages: 64");
}

#[test]
fn warps_products() {
    let Some(call) = Call::new(Dtype::BF16, 64) else { return };
    let tile = MmaTile { warpgroups: 1, groups: 2, tile_k: 64, warps_k: 1, stages: 2 };
    refused(call.forward(MmaTiles { tile, head_group: 0 }), "head_group is 0");
    refused(call.forward(MmaTiles { tile: MmaTile { tile_k: 24, ..tile }, head_group: 1 }), "must divide a tile");
    let few = MmaTile { warps_k: 4, ..tile };
    for inconsistent in [MmaTile { warpgroups: 2, ..few }, MmaTile { warps_k: 2, ..few }, MmaTile { tile_k: 32, ..few }]
    {
        refused(call.forward(MmaTiles { tile: inconsistent, head_group: 1 }), "inconsistent");
    }
    // No block mask may have blocks of 256 queries.
    let mut call = call;
    call.problem = call.problem.with_block_mask(&[1, 1, 2, 2], 128, 128).unwrap();
    call.inputs.block_mask = Some(TensorView::contiguous(call.client.empty(4 * 4), [1, 1, 2, 2]));
    let wide = MmaTile { warpgroups: 2, ..tile };
    match call.forward(MmaTiles { tile: wide, head_group: 1 }) {
        Err(AttentionError::Unsupported { option: "tile", value, .. }) if value == "256×64" => {}
        other => panic!("{other:?}"),
    }
}
