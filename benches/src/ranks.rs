//! Attention of one sequence over several GPUs, beside one GPU.

use crate::error::Error;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_flash_attention::sequence_parallel::{
    Collectives, Sharding, local_group, try_ring_attention, try_ulysses_attention,
};
use burn_flash_attention::{FlashAttentionOptions, try_flash_attention};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// How long a rank waits for the others: they compile kernels.
const TIMEOUT: Duration = Duration::from_secs(300);

/// What is measured: causal attention in bf16 on CUDA devices 0 and on.
#[derive(Args)]
pub struct Options {
    /// Number of GPUs.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Lengths of the whole sequence.
    #[arg(long, value_delimiter = ',', default_value = "16384,65536,131072")]
    seq: Vec<usize>,
    /// Query heads.
    #[arg(long, default_value_t = 32)]
    heads_q: usize,
    /// Key/value heads.
    #[arg(long, default_value_t = 8)]
    heads_kv: usize,
    /// Size of a head's vectors.
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Calls that count.
    #[arg(long, default_value_t = 7)]
    iterations: usize,
    /// File for the rows.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// A way to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Method {
    /// One GPU.
    One,
    /// Exchange of heads.
    Ulysses,
    /// Keys and values travel.
    Ring,
}

/// A measured row.
#[derive(Serialize)]
struct Row {
    method: Method,
    gpus: usize,
    seq: usize,
    forward_ms: f64,
    forward_backward_ms: f64,
    /// Largest difference from one GPU's output, relative to its largest element.
    difference: f32,
}

/// Measures all methods, and prints and writes the rows.
pub fn run(options: &Options) -> Result<(), Error> {
    let mut rows = Vec::new();
    println!(
        "{:<8} {:>4} {:>8} {:>12} {:>20} {:>11}",
        "method", "gpus", "seq", "forward ms", "forward+backward ms", "difference"
    );
    for seq in &options.seq {
        let mut expected = None;
        for method in [Method::One, Method::Ulysses, Method::Ring] {
            let (row, out) = measure(options, method, *seq, expected.as_ref())?;
            println!(
                "{:<8} {:>4} {seq:>8} {:>12.3} {:>20.3} {:>11.1e}",
                format!("{method:?}").to_lowercase(),
                row.gpus,
                row.forward_ms,
                row.forward_backward_ms,
                row.difference
            );
            expected.get_or_insert(out);
            rows.push(row);
        }
    }
    let Some(path) = &options.csv else { return Ok(()) };
    let written = csv::Writer::from_path(path).and_then(|mut table| {
        rows.iter().try_for_each(|row| table.serialize(row))?;
        Ok(table.flush()?)
    });
    written.map_err(|source| Error::csv(path, source))
}

/// Times a method, and returns its output in one piece.
fn measure(
    options: &Options,
    method: Method,
    seq: usize,
    expected: Option<&Tensor<4>>,
) -> Result<(Row, Tensor<4>), Error> {
    let gpus = if method == Method::One { 1 } else { options.world };
    let sharding = if method == Method::Ring { Sharding::Zigzag } else { Sharding::Contiguous };
    let first = Device::cuda(0);
    first.seed(7);
    let random = |heads| {
        let shape = [1, heads, seq, options.head_dim];
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (&first, DType::BF16))
    };
    let qkv = [random(options.heads_q), random(options.heads_kv), random(options.heads_kv)];
    let failed = |error: &dyn std::fmt::Display| Error::Other(error.to_string());
    let mut shares: Vec<Vec<Tensor<4>>> = (0..gpus).map(|_| Vec::new()).collect();
    for tensor in qkv {
        let of_ranks = sharding.shard(tensor, 2, gpus).map_err(|error| failed(&error))?;
        for (rank, (share, all)) in of_ranks.into_iter().zip(&mut shares).enumerate() {
            all.push(share.to_device(&Device::cuda(rank)));
        }
    }
    let barrier = Barrier::new(gpus);
    let ranks: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = shares
            .into_iter()
            .zip(local_group(gpus, TIMEOUT))
            .map(|(share, collectives)| {
                let barrier = &barrier;
                scope.spawn(move || times(method, share, collectives, options.iterations, barrier))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank has panicked".to_string())?).collect()
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>, String>>().map_err(|error| failed(&error))?;
    let slowest = |of: fn(&Timed) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
    let (forward_ms, forward_backward_ms) = (slowest(|rank| rank.forward), slowest(|rank| rank.both));
    let outs = ranks.into_iter().map(|rank| rank.out.to_device(&first)).collect();
    let out = sharding.unshard(outs, 2).map_err(|error| failed(&error))?;
    let largest = |x: Tensor<4>| x.cast(DType::F32).abs().max().into_scalar::<f32>();
    let difference = expected.map_or(0.0, |expected| {
        largest(out.clone().cast(DType::F32) - expected.clone().cast(DType::F32)) / largest(expected.clone())
    });
    Ok((Row { method, gpus, seq, forward_ms, forward_backward_ms, difference }, out))
}

/// Median milliseconds of a rank, and its output.
struct Timed {
    forward: f64,
    both: f64,
    out: Tensor<4>,
}

fn times(
    method: Method,
    share: Vec<Tensor<4>>,
    collectives: Arc<dyn Collectives>,
    iterations: usize,
    barrier: &Barrier,
) -> Result<Timed, String> {
    let attention = FlashAttentionOptions::new().with_causal(true);
    let call = |[q, k, v]: [Tensor<4>; 3]| match method {
        Method::One => try_flash_attention(q, k, v, &attention).map_err(|error| error.to_string()),
        Method::Ulysses => try_ulysses_attention(q, k, v, &attention, &collectives).map_err(|error| error.to_string()),
        Method::Ring => try_ring_attention(q, k, v, &attention, &collectives).map_err(|error| error.to_string()),
    };
    let [q, k, v] = [0, 1, 2].map(|nth: usize| share[nth].clone());
    let device = q.device();
    let median = |run: &dyn Fn() -> Result<Tensor<4>, String>| {
        let mut found = Vec::new();
        let mut out = None;
        // The first two compile and tune.
        for nth in 0..iterations + 2 {
            device.sync().map_err(|error| error.to_string())?;
            barrier.wait();
            let begun = Instant::now();
            out = Some(run()?);
            device.sync().map_err(|error| error.to_string())?;
            if nth >= 2 {
                found.push(1e3 * begun.elapsed().as_secs_f64());
            }
        }
        found.sort_by(f64::total_cmp);
        out.map(|out| (found[found.len() / 2], out)).ok_or_else(|| "there are no iterations".to_string())
    };
    let (forward, out) = median(&|| call([q.clone(), k.clone(), v.clone()]))?;
    let (both, _) = median(&|| {
        let tracked = [&q, &k, &v].map(|x| Tensor::from_inner(x.clone()).require_grad());
        let out = call(tracked.clone())?;
        let gradients = (out.clone() * Tensor::from_inner(q.clone())).sum().backward();
        let dk = tracked[1].grad(&gradients).ok_or("keys have no gradient")?;
        Ok(dk)
    })?;
    Ok(Timed { forward, both, out })
}
