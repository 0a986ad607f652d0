//! Host time of small calls: planning, launching, and the way through Burn, beside operations of Burn's and of CubeCL's own.

use crate::case::{Case, Pass};
use crate::data::Data;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Tensors as Kernels;
use crate::problems::Problems;
use crate::timing::sync;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_flash_attention::{
    FlashAttentionOptions, KvCache, KvCacheConfig, PagedKvCache, PagedKvCacheConfig, SequenceId, flash_attention,
    flash_attention_with_kvcache,
};
use cubecl::prelude::{CubeCount, CubeDim};
use cubecl_runtime::execution::{ProcessMode, ProcessModeOverride, StatisticsCollector};
use flash_attention_kernels::tiling::{Device as Properties, plan_on};
use flash_attention_kernels::{
    AttentionProblem, BackwardTiles, CacheAppend, Dtype, Forward, KvStorage, TensorView, append_to_cache, check,
    forward, plan,
};
use serde_json::json;
use std::cell::RefCell;
use std::process::{Command, Stdio};
use std::time::Instant;

/// What to time.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    problems: Problems,
    /// Number of calls of each row.
    #[arg(long, default_value_t = 2000)]
    calls: usize,
    /// Looks kernels up as usual, but discards launches: shows what the host does on a machine where kernels run slowly.
    #[arg(long)]
    discard: bool,
    /// Also times PyTorch, if python3 has it and it sees a GPU.
    #[arg(long)]
    peers: bool,
    /// Times only rows whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
    /// Device, whose feature must be enabled; by default the best one compiled in.
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
}

/// The script that times PyTorch, embedded for machines without the repository.
const PEER: &str = include_str!("../host_peer.py");

/// Number of calls between two waits for the device. With a full queue, a call would wait for it.
const TURNS: usize = 4;

/// A kernel that does nothing, launched with as many tensors as a plain forward.
mod launched {
    use cubecl::prelude::*;

    #[cube(launch_unchecked)]
    pub fn nothing(q: &Tensor<f32>, k: &Tensor<f32>, v: &Tensor<f32>, o: &mut Tensor<f32>, lse: &mut Tensor<f32>) {
        if q.len() + k.len() + v.len() == 0 {
            o[0] = 0.0;
            lse[0] = 0.0;
        }
    }
}

/// Positions of a page, and those that a paged cache has room for beside the keys of a case.
const PAGE: usize = 64;
const SPARE: usize = 1024;

/// Everything that calls of a case need.
struct Calls {
    device: Device,
    client: cubecl::client::Client,
    problem: AttentionProblem,
    tiles: (Forward, BackwardTiles),
    kernels: Kernels,
    options: FlashAttentionOptions,
    /// `q`, `k` and `v` that autodiff does not track.
    plain: [Tensor<4>; 3],
    /// And those that it tracks.
    tracked: [Tensor<4>; 3],
    /// Queries of the `seq_q` newest positions, and their keys and values.
    queries: Tensor<4>,
    newest: [Tensor<4>; 2],
    /// A cache of the positions before them, which each call appends them to.
    cache: RefCell<KvCache>,
    /// The same in pages, and its sequences. Calls append further positions, so that the page table stays as it is in most of them.
    paged: RefCell<PagedKvCache>,
    sequences: Vec<(SequenceId, usize)>,
    /// The cache of the kernels.
    append: CacheAppend,
    /// The device as the planner sees it.
    planner: Properties,
    /// Views for the kernel that does nothing.
    views: [TensorView<1>; 5],
}

/// A call in the table.
struct Row {
    name: &'static str,
    call: fn(&Calls) -> Result<(), Error>,
    /// Whether it leaves a graph of autodiff behind, which must be freed after each call.
    leaves_graph: bool,
}

const fn row(name: &'static str, call: fn(&Calls) -> Result<(), Error>) -> Row {
    Row { name, call, leaves_graph: false }
}

const ROWS: [Row; 16] = [
    row("check", |of| Ok(check(&of.client, &of.problem)?)),
    row("plan", |of| Ok(plan(&of.client, &of.problem).map(drop)?)),
    row("plan, without memory of earlier calls", |of| Ok(plan_on(&of.planner, &of.problem).map(drop)?)),
    row("kernels: forward, planned", |of| {
        let Kernels { inputs, saved, .. } = &of.kernels;
        Ok(forward(&of.client, &of.problem, inputs, &saved.o, &saved.lse).map(drop)?)
    }),
    row("kernels: forward, tiles given", |of| of.kernels.forward(&of.client, &of.problem, of.tiles.0)),
    row("kernels: append to a cache", |of| Ok(append_to_cache(&of.client, of.problem.dtype, &of.append)?)),
    row("kernels: backward, tiles and scratch given", |of| {
        of.kernels.backward(&of.client, &of.problem, &of.kernels.gradients, of.tiles.1)
    }),
    row("Burn: forward", |of| {
        of.attention(&of.plain);
        Ok(())
    }),
    row("Burn: forward with a key/value cache", |of| {
        of.step();
        Ok(())
    }),
    row("Burn: forward with a cache in pages of 64", |of| of.paged_step().map(drop)),
    Row {
        leaves_graph: true,
        ..row("Burn: forward, tracked", |of| {
            of.attention(&of.tracked);
            Ok(())
        })
    },
    row("Burn: forward and backward", |of| {
        of.attention(&of.tracked).sum().backward();
        Ok(())
    }),
    row("CubeCL's own: a launch with five tensors", |of| {
        of.launch();
        Ok(())
    }),
    row("CubeCL's own: an allocation", |of| {
        of.client.empty(1 << 12);
        Ok(())
    }),
    row("Burn's own: q + q", |of| {
        let _ = of.plain[0].clone() + of.plain[0].clone();
        Ok(())
    }),
    row("Burn's own: q + q, forward and backward", |of| {
        (of.tracked[0].clone() + of.tracked[0].clone()).sum().backward();
        Ok(())
    }),
];

impl Calls {
    fn new(device: &cubecl::Device, case: Case) -> Result<Self, Error> {
        let (client, data) = (device.client(), Data::new(case, 0)?);
        let problem = data.problem;
        let plan = plan(&client, &problem)?;
        let dtype = match case.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
        };
        let device = Device::new(device.clone());
        let random = |device: &Device| {
            let of = |shape: [usize; 4]| Tensor::random(shape, Distribution::Default, (device, dtype));
            [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(of)
        };
        let plain = random(&device);
        let options = FlashAttentionOptions::new().with_causal(problem.options.causal);
        // The newest positions follow after all others. As many as there are keys, at most.
        let AttentionProblem { batch, num_heads_kv, seq_q, seq_k, head_dim, head_dim_v, .. } = problem;
        let new = seq_q.min(seq_k);
        let config = KvCacheConfig::new(batch, num_heads_kv, head_dim, seq_k).with_dtype(Some(dtype.into()));
        let mut cache = config.with_head_dim_v(Some(head_dim_v)).init(&device);
        let pages = batch * (seq_k + SPARE).div_ceil(PAGE);
        let config = PagedKvCacheConfig::new(pages, num_heads_kv, head_dim).with_page_size(PAGE);
        let config = config.with_head_dim_v(Some(head_dim_v)).with_dtype(Some(dtype.into()));
        let mut paged = config.init(&device);
        let sequences: Vec<_> = (0..batch).map(|_| (paged.add(), new)).collect();
        let [q, k, v] = &plain;
        let first = |x: &Tensor<4>, from, len| x.clone().narrow(2, from, len);
        if seq_k > new {
            let before = seq_k - new;
            let shape = [batch, problem.num_heads_q, before, head_dim];
            let q = Tensor::random(shape, Distribution::Default, (&device, dtype));
            let (k, v) = (first(k, 0, before), first(v, 0, before));
            flash_attention_with_kvcache(q.clone(), k.clone(), v.clone(), &mut cache, &options);
            let prompt: Vec<_> = sequences.iter().map(|(sequence, _)| (*sequence, before)).collect();
            flash_attention_with_kvcache(q, k, v, &mut paged.batch(&prompt)?, &options);
        }
        let newest = [first(k, seq_k - new, new), first(v, seq_k - new, new)];
        let queries = first(q, 0, new);
        let empty = |length, head_dim| {
            let bytes = problem.dtype.size() * batch * num_heads_kv * length * head_dim;
            TensorView::contiguous(client.empty(bytes), [batch, num_heads_kv, length, head_dim])
        };
        let append = CacheAppend {
            k: empty(new, head_dim),
            v: empty(new, head_dim_v),
            k_cache: empty(seq_k, head_dim),
            v_cache: empty(seq_k, head_dim_v),
            page_table: None,
            storage: KvStorage::Elements,
            start: seq_k - new,
            seq_lens: None,
            new_lens: None,
            seq_lens_after: None,
        };
        Ok(Calls {
            newest,
            queries,
            cache: RefCell::new(cache),
            paged: RefCell::new(paged),
            sequences,
            append,
            kernels: Kernels::new(&client, &data, Pass::Both)?,
            tiles: (plan.forward, plan.backward),
            options,
            plain,
            tracked: random(&device.clone().autodiff()).map(Tensor::require_grad),
            views: std::array::from_fn(|_| TensorView::contiguous(client.empty(4), [1])),
            planner: Properties::of(&client),
            device,
            client,
            problem,
        })
    }

    fn attention(&self, [q, k, v]: &[Tensor<4>; 3]) -> Tensor<4> {
        flash_attention(q.clone(), k.clone(), v.clone(), &self.options)
    }

    /// Attention of the newest positions over the cache, which then forgets them.
    fn step(&self) -> Tensor<4> {
        let [k, v] = self.newest.clone();
        let mut cache = self.cache.borrow_mut();
        let before = cache.max_len();
        let out = flash_attention_with_kvcache(self.queries.clone(), k, v, &mut *cache, &self.options);
        cache.truncate(before);
        out
    }

    /// Attention of the newest positions over the pages, which keep them until there are too many.
    fn paged_step(&self) -> Result<Tensor<4>, Error> {
        let [k, v] = self.newest.clone();
        let (mut cache, most) = (self.paged.borrow_mut(), self.problem.seq_k + SPARE);
        for (sequence, new) in &self.sequences {
            if cache.len(*sequence)? + new > most {
                cache.truncate(*sequence, self.problem.seq_k - new)?;
            }
        }
        let mut batch = cache.batch(&self.sequences)?;
        Ok(flash_attention_with_kvcache(self.queries.clone(), k, v, &mut batch, &self.options))
    }

    fn launch(&self) {
        let [q, k, v, o, lse] = self.views.clone().map(|TensorView { handle, shape, strides }| {
            // SAFETY: the buffer has one element.
            unsafe { cubecl::prelude::TensorArg::from_raw_parts(handle, strides.into(), shape.into()) }
        });
        let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(32));
        // SAFETY: the kernel writes nothing.
        unsafe { launched::nothing::launch_unchecked(&self.client, count, dim, q, k, v, o, lse) };
    }

    fn finish(&self) -> Result<(), Error> {
        self.device.sync().map_err(|error| Error::Other(format!("the device failed: {error}")))?;
        sync(&self.client)
    }

    /// Median time until a call returns, and time of each of many calls in a row until all are done, in microseconds. The latter is what
    /// the slowest thread of the host takes for a call, or the device if it is slower.
    fn times(&self, calls: usize, row: &Row) -> Result<(f64, Option<f64>), Error> {
        let mut alone = Vec::with_capacity(calls);
        for turn in 0..calls {
            if turn % TURNS == 0 {
                self.finish()?;
            }
            let start = Instant::now();
            (row.call)(self)?;
            alone.push(start.elapsed().as_secs_f64() * 1e6);
            if row.leaves_graph && turn % TURNS == TURNS - 1 {
                // The backward of any node frees the graphs that nothing refers to.
                (self.tracked[0].clone() + self.tracked[0].clone()).sum().backward();
            }
        }
        self.finish()?;
        alone.sort_by(f64::total_cmp);
        let alone = alone[calls / 2];
        if row.leaves_graph {
            return Ok((alone, None));
        }
        let start = Instant::now();
        (0..calls).try_for_each(|_| (row.call)(self))?;
        self.finish()?;
        Ok((alone, Some(start.elapsed().as_secs_f64() * 1e6 / calls as f64)))
    }
}

fn line(name: &str, alone: f64, each: Option<f64>) {
    println!("{name:<46} {alone:>12.2} {:>14}", each.map_or("–".into(), |each| format!("{each:.2}")));
}

/// Prints a table for each problem.
pub fn run(options: &Options) -> Result<(), Error> {
    let device = options.device.unwrap_or_else(DeviceName::best);
    let cases = options.problems.cases(device)?;
    let device = device.open()?;
    for case in cases {
        let of = Calls::new(&device, case)?;
        println!("\n{case}\n{:<46} {:>12} {:>14}", "µs", "to return", "each of many");
        let rows = ROWS.iter().filter(|row| row.name.contains(&options.only));
        // Kernels are compiled, and caches filled, by launches that run.
        for row in rows.clone() {
            (0..TURNS).try_for_each(|_| (row.call)(&of))?;
            of.finish()?;
        }
        let statistics = StatisticsCollector::new();
        let discard = options.discard.then(|| ProcessModeOverride::new(ProcessMode::CompileAndAutotune, &statistics));
        for row in rows {
            let (alone, each) = of.times(options.calls, row)?;
            line(row.name, alone, each);
        }
        drop(discard);
        if options.peers {
            peers(case, options.calls)?;
        }
    }
    Ok(())
}

/// Prints the rows of PyTorch, or why there are none.
fn peers(case: Case, calls: usize) -> Result<(), Error> {
    let Case { dtype, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v, causal, .. } = case;
    let of = json!({
        "dtype": dtype.name(), "batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q, "seq_k": seq_k,
        "head_dim": head_dim, "head_dim_v": head_dim_v, "causal": causal, "calls": calls,
    });
    let output = Command::new("python3").args(["-c", PEER, &of.to_string()]).stderr(Stdio::inherit()).output();
    let Ok(output) = output else {
        println!("PyTorch is not timed: python3 cannot be started");
        return Ok(());
    };
    for said in String::from_utf8_lossy(&output.stdout).lines() {
        let (name, alone, each): (String, f64, f64) =
            serde_json::from_str(said).map_err(|error| Error::Other(format!("PyTorch's answer {said:?}: {error}")))?;
        line(&name, alone, Some(each));
    }
    Ok(())
}
