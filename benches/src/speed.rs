//! Times the kernels, called directly.
//!
//! One line a kernel: median, fastest and slowest of 7 batches, and TFLOP/s as the field counts them (causal counts half
//! the operations, the backward 2.5 times the forward's). Data are normal random numbers. `sweep` tries every tile shape
//! that the device takes in place of the one chosen.

use cubecl::client::Client;
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, BackwardTiles, Dtype, Gradients, Inputs, Saved, Scratch,
    TensorView, TileShape, backward_with, forward_with, plan,
};
use std::time::Instant;

const WARM_UP: usize = 2;
const BATCHES: usize = 7;

/// Tensors of one problem.
struct Data {
    inputs: Inputs,
    saved: Saved,
    gradients: Gradients,
    scratch: Scratch,
}

fn normal(client: &Client, shape: [usize; 4], dtype: Dtype, seed: u64) -> TensorView {
    // A table of normal numbers walked at random: cheap to make, and nothing like zeros.
    let table = flash_attention_reference::normal(1 << 14, seed);
    let mut state = seed | 1;
    let len: usize = shape.iter().product();
    let mut bytes = Vec::with_capacity(len * dtype.size());
    for _ in 0..len {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = table[(state >> 50) as usize];
        match dtype {
            Dtype::F32 => bytes.extend_from_slice(&(x as f32).to_le_bytes()),
            Dtype::F16 => bytes.extend_from_slice(&half::f16::from_f64(x).to_le_bytes()),
            Dtype::BF16 => bytes.extend_from_slice(&half::bf16::from_f64(x).to_le_bytes()),
        }
    }
    TensorView::contiguous(client.create_from_slice(&bytes), shape)
}

impl Data {
    fn new(client: &Client, p: &AttentionProblem) -> Self {
        let size = p.dtype.size();
        let empty =
            |shape: [usize; 4]| TensorView::contiguous(client.empty(shape.iter().product::<usize>() * size), shape);
        Data {
            inputs: Inputs {
                q: normal(client, p.q_shape(), p.dtype, 1),
                k: normal(client, p.k_shape(), p.dtype, 2),
                v: normal(client, p.v_shape(), p.dtype, 3),
                mask: None,
                bias: None,
            },
            saved: Saved {
                o: empty(p.o_shape()),
                lse: TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape()),
                dout: normal(client, p.o_shape(), p.dtype, 4),
                dlse: None,
            },
            gradients: Gradients {
                dq: Some(empty(p.q_shape())),
                dk: Some(empty(p.k_shape())),
                dv: Some(empty(p.v_shape())),
                dbias: None,
            },
            scratch: Scratch::empty(client, p),
        }
    }

    fn forward(&self, client: &Client, p: &AttentionProblem, tile: TileShape) -> Result<(), AttentionError> {
        forward_with(client, p, &self.inputs, &self.saved.o, &self.saved.lse, tile)
    }

    fn backward(
        &self,
        client: &Client,
        p: &AttentionProblem,
        gradients: &Gradients,
        tiles: BackwardTiles,
    ) -> Result<(), AttentionError> {
        backward_with(client, p, &self.inputs, &self.saved, gradients, &self.scratch, Some(tiles))
    }
}

/// First call in seconds; median, fastest and slowest of the rest in milliseconds.
fn time(client: &Client, run: impl Fn() -> Result<(), AttentionError>) -> Result<[f64; 4], AttentionError> {
    let sync = || cubecl::future::block_on(client.sync()).expect("the device to finish");
    sync();
    let start = Instant::now();
    run()?;
    sync();
    let first = start.elapsed().as_secs_f64();
    for _ in 0..WARM_UP {
        run()?;
    }
    sync();
    let start = Instant::now();
    run()?;
    sync();
    // Batches of about 50 ms.
    let launches = ((0.05 / start.elapsed().as_secs_f64()) as usize).clamp(1, 200);
    let mut times: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..launches {
                run()?;
            }
            sync();
            Ok(start.elapsed().as_secs_f64() * 1e3 / launches as f64)
        })
        .collect::<Result<_, AttentionError>>()?;
    times.sort_by(f64::total_cmp);
    Ok([first, times[BATCHES / 2], times[0], times[BATCHES - 1]])
}

fn report(name: &str, flops: f64, timed: Result<[f64; 4], AttentionError>) {
    match timed {
        Ok([first, median, fastest, slowest]) => println!(
            "{name:<58} {median:9.3} ms ({fastest:.3}–{slowest:.3}) {:7.2} TFLOP/s, first call {first:.2} s",
            flops / median / 1e9
        ),
        Err(error) => println!("{name:<58} {error}"),
    }
}

/// Times the kernels in f32, causal and full.
pub fn run(device: &cubecl::Device, sweep: bool, tiny: bool) -> Result<(), Box<dyn std::error::Error>> {
    let client = device.client();
    println!("{}", client.name());
    let sizes = if tiny { [[1, 2, 256, 64]].to_vec() } else { [[4, 16, 4096, 128], [4, 32, 4096, 64]].to_vec() };
    for shape in sizes {
        for causal in [true, false] {
            let options = AttentionOptions { causal, ..Default::default() };
            let p = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, options)?;
            let plan = plan(&client, &p)?;
            println!("{shape:?} f32{} {plan}", if causal { " causal" } else { "" });
            let data = Data::new(&client, &p);
            let forward = if sweep { candidates() } else { vec![plan.forward] };
            let backward = if sweep { candidates() } else { vec![plan.backward] };
            for tile in forward {
                report(
                    &format!("forward {}", name(&tile)),
                    p.forward_flops(),
                    time(&client, || data.forward(&client, &p, tile)),
                );
            }
            data.forward(&client, &p, plan.forward)?;
            let only = |dq, dk, dv| {
                let keep = |wanted: bool, view: &Option<TensorView>| view.clone().filter(|_| wanted);
                let g = &data.gradients;
                Gradients { dq: keep(dq, &g.dq), dk: keep(dk, &g.dk), dv: keep(dv, &g.dv), dbias: None }
            };
            for tile in backward {
                let tiles = |dkdv_together| BackwardTiles { dq: tile, dkdv: tile, dkdv_together };
                if sweep {
                    for (what, gradients, together) in [
                        ("dq", only(true, false, false), true),
                        ("dk+dv", only(false, true, true), true),
                        ("dk, dv", only(false, true, true), false),
                    ] {
                        let timed = time(&client, || data.backward(&client, &p, &gradients, tiles(together)));
                        report(&format!("{what} {}", name(&tile)), p.backward_flops(), timed);
                    }
                } else {
                    let tiles = tiles(plan.dkdv_together);
                    let timed = time(&client, || data.backward(&client, &p, &data.gradients, tiles));
                    report(&format!("backward {}", name(&tile)), p.backward_flops(), timed);
                }
            }
        }
        if sweep {
            break;
        }
    }
    Ok(())
}

fn name(t: &TileShape) -> String {
    format!("{}×{} units {}×{} chunk {}", t.tile_q, t.tile_k, t.units_q, t.units_k, t.chunk)
}

fn candidates() -> Vec<TileShape> {
    let shapes = [
        (64, 64, 16, 16),
        (128, 64, 16, 16),
        (64, 128, 16, 16),
        (128, 128, 16, 16),
        (128, 64, 16, 8),
        (64, 64, 8, 16),
        (64, 64, 8, 8),
        (128, 32, 16, 8),
        (64, 32, 16, 8),
        (32, 32, 8, 8),
    ];
    let chunks = [16, 32, 64];
    shapes
        .into_iter()
        .flat_map(|(tile_q, tile_k, units_q, units_k)| {
            chunks.map(|chunk| TileShape { tile_q, tile_k, units_q, units_k, chunk })
        })
        .collect()
}
