//! Sweep over the tile shapes of every kernel: time, registers, bytes moved.

use crate::case::{Case, Pass};
use crate::data::{Data, Results};
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Tensors;
use crate::oracle::Oracle;
use crate::part::Part;
use crate::results::{self, Moved, TileTiming};
use crate::run::{Run, round};
use crate::timing::{Work, device_time, sync};
use cubecl::client::Client;
use flash_attention_kernels::tiling::{Stage, shared_memory};
use flash_attention_kernels::{
    AttentionProblem, BackwardTiles, Dtype, Forward, Gradient, PortableForward, TileShape, plan_with,
};
use indicatif::ProgressBar;
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;

/// What to sweep, and where to write the results.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Device, whose feature must be enabled; by default the best one compiled in.
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// Head dimensions.
    #[arg(long, value_delimiter = ',', default_value = "64,128")]
    head_dim: Vec<usize>,
    /// Sequence length in tokens.
    #[arg(long, default_value_t = 4096)]
    seq: usize,
    /// Batch size.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Number of heads.
    #[arg(long, default_value_t = 16)]
    heads: usize,
    /// Tile sizes to keep.
    #[arg(long, value_delimiter = ',', value_parser = SIZES.map(|(name, ..)| name))]
    only: Vec<String>,
    /// Reads registers and bytes moved from Nsight Compute, which must be installed (CUDA only).
    #[arg(long)]
    profile: bool,
    /// Results are appended to NAME-tiles.csv; by default `sweep` and the device.
    #[arg(long)]
    name: Option<String>,
    /// Directory of the results.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    directory: PathBuf,
    /// Launches every kernel once and measures nothing, for the profiler.
    #[arg(long, hide = true)]
    once: bool,
}

impl Part {
    fn stage(self) -> Stage {
        match self {
            Part::Forward => Stage::Forward,
            Part::Dq | Part::Dkdv | Part::Fused | Part::Dbias => Stage::Backward,
        }
    }
}

/// Candidate tiles: name of the size, queries and keys, and threads along each.
type Size = (&'static str, [usize; 2], &'static [[usize; 2]]);
const SIZES: [Size; 8] = [
    ("128x128", [128, 128], &[[16, 16]]),
    ("128x64", [128, 64], &[[16, 16], [16, 8]]),
    ("64x128", [64, 128], &[[16, 16]]),
    ("64x64", [64, 64], &[[16, 16], [8, 16], [8, 8]]),
    ("128x32", [128, 32], &[[16, 8]]),
    ("64x32", [64, 32], &[[16, 8]]),
    ("32x64", [32, 64], &[[8, 16]]),
    ("32x32", [32, 32], &[[8, 8]]),
];

/// Tile shapes of these sizes, or all shapes if no size is named.
fn candidates(only: &[String]) -> Vec<TileShape> {
    let kept = SIZES.iter().filter(|(name, ..)| only.is_empty() || only.iter().any(|only| only == name));
    let of_size = |(_, [tile_q, tile_k], units): &Size| {
        let shape = |[units_q, units_k]: [usize; 2], chunk| TileShape {
            tile_q: *tile_q,
            tile_k: *tile_k,
            units_q,
            units_k,
            chunk,
        };
        units.iter().flat_map(|units| [16, 32, 64].map(|chunk| shape(*units, chunk))).collect::<Vec<_>>()
    };
    kept.flat_map(of_size).collect()
}

/// One problem on the device.
struct Bench {
    client: Client,
    problem: AttentionProblem,
    tensors: Tensors,
}

impl Bench {
    fn call(&self, part: Part, tile: TileShape, together: bool) -> Result<(), Error> {
        if part == Part::Forward {
            return self.tensors.forward(&self.client, &self.problem, tile);
        }
        let tiles = BackwardTiles::portable(tile, together);
        self.tensors.backward(&self.client, &self.problem, &part.wanted(&self.tensors), tiles)
    }

    fn results(&self, part: Part) -> Results {
        self.tensors.results(&self.client, self.problem.dtype, &part.wanted(&self.tensors))
    }
}

/// The kernel family that is swept.
const PORTABLE: flash_attention_kernels::Kernel = flash_attention_kernels::Kernel::Portable;

/// What the profiler measured for one launch.
#[derive(Clone, Copy, Debug)]
struct Seen {
    registers: u32,
    dram_bytes: u64,
    l2_bytes: u64,
}

/// Sweeps the kernels, in f32 and causal.
pub fn run(options: &Options) -> Result<(), Error> {
    let name = options.device.unwrap_or_else(DeviceName::best);
    let device = name.open()?;
    let client = device.client();
    let run = Run::new(name.name());
    let results = options.name.clone().unwrap_or_else(|| format!("sweep-{}", name.name()));
    let tiles_file = results::path::<TileTiming>(&options.directory, &results);
    let bytes_file = results::path::<Moved>(&options.directory, &results);
    let device_name = client.properties().identity.name.clone();
    let seen = if options.profile { profile(options)? } else { HashMap::new() };

    let candidates = candidates(&options.only);
    let bar = ProgressBar::new((options.head_dim.len() * Part::EVERYWHERE.len() * candidates.len()) as u64);
    for head_dim in options.head_dim.iter().copied() {
        let case = Case::new(Dtype::F32, [options.batch, options.heads, options.seq, head_dim], true);
        let data = Data::new(case, 0)?;
        let tensors = Tensors::new(&client, &data, Pass::Both)?;
        let bench = Bench { client: client.clone(), problem: data.problem, tensors };
        let plan = plan_with(&client, &bench.problem, PORTABLE)?;
        let (Forward::Portable(PortableForward::Tiles(forward)), Gradient::Portable(backward)) =
            (plan.forward, plan.backward.dq)
        else {
            return Err(Error::Other(format!("the portable kernel is not planned: {plan}")));
        };
        let together = plan.backward.dv.is_none();
        bench.call(Part::Forward, forward, false)?;
        if options.once {
            println!("{head_dim} {} first", Part::Forward.name());
        }
        let oracle = (!options.once).then(|| Oracle::new(&data, true));
        for part in Part::EVERYWHERE {
            let chosen = if part == Part::Forward { forward } else { backward };
            for tile in candidates.iter().copied() {
                let Some(oracle) = &oracle else {
                    // Shapes that do not fit are not launched, so they are missing in the profiler's list.
                    if bench.call(part, tile, together).is_ok() {
                        let launches = if part == Part::Dkdv && !together { 2 } else { 1 };
                        (0..launches).for_each(|_| println!("{head_dim} {} {}", part.name(), label(&tile)));
                    }
                    continue;
                };
                let seen = seen.get(&(head_dim, part.name(), label(&tile))).copied();
                let timed = time(&bench, oracle, part, tile, together);
                let row = |median: Option<f64>, note: String| TileTiming {
                    run: run.id.clone(),
                    date: run.date.clone(),
                    commit: run.commit.clone(),
                    device: device_name.clone(),
                    runtime: run.runtime.clone(),
                    kernel: format!("{} {}", PORTABLE.name(), part.name()),
                    dtype: case.dtype.name().into(),
                    batch: case.batch,
                    heads_q: case.heads_q,
                    seq_q: case.seq_q,
                    head_dim,
                    causal: case.causal,
                    tile_q: tile.tile_q,
                    tile_k: tile.tile_k,
                    shape: format!("{}×{} units, chunk {}", tile.units_q, tile.units_k, tile.chunk),
                    median_ms: median.map(round),
                    tflops: median.map(|ms| round(part.flops(&bench.problem) / ms / 1e9)),
                    shared_bytes: Some(shared_memory(&tile, part.stage()) as u64),
                    registers: seen.map(|seen| seen.registers),
                    chosen: tile == chosen,
                    note,
                };
                let row = match timed {
                    Ok(median) => row(Some(median), String::new()),
                    Err(error) => row(None, error.to_string()),
                };
                results::append(&tiles_file, &[row])?;
                if let Some(Seen { registers, dram_bytes, l2_bytes }) = seen.filter(|_| part != Part::Dkdv) {
                    let moved = Moved {
                        run: run.id.clone(),
                        device: device_name.clone(),
                        kernel: format!("{} {}", PORTABLE.name(), part.name()),
                        dtype: case.dtype.name().into(),
                        batch: case.batch,
                        heads_q: case.heads_q,
                        seq_q: case.seq_q,
                        head_dim,
                        causal: case.causal,
                        tile_q: tile.tile_q,
                        dram_bytes,
                        l2_bytes,
                        model_bytes: model_bytes(&bench.problem, tile.tile_q),
                        registers: Some(registers),
                    };
                    results::append(&bytes_file, &[moved])?;
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    if options.once {
        sync(&client)?;
    } else {
        println!("written: {}", tiles_file.display());
    }
    Ok(())
}

/// One kernel with one tile shape.
struct Kernel<'a> {
    bench: &'a Bench,
    part: Part,
    tile: TileShape,
    together: bool,
}

impl Work for Kernel<'_> {
    fn call(&mut self, _turn: usize) -> Result<(), Error> {
        self.bench.call(self.part, self.tile, self.together)
    }

    fn finish(&self) -> Result<(), Error> {
        sync(&self.bench.client)
    }

    fn stream(&self) -> Option<&Client> {
        Some(&self.bench.client)
    }
}

fn time(bench: &Bench, oracle: &Oracle, part: Part, tile: TileShape, together: bool) -> Result<f64, Error> {
    bench.call(part, tile, together)?;
    let errors = oracle.errors(&bench.results(part));
    if !errors.are_right(Dtype::F32, false) {
        return Err(Error::Other(format!("wrong result: relative error {:.1e}", errors.worst())));
    }
    Ok(device_time(&mut Kernel { bench, part, tile, together })?.median())
}

fn label(tile: &TileShape) -> String {
    let TileShape { tile_q, tile_k, units_q, units_k, chunk } = tile;
    format!("{tile_q}x{tile_k}-{units_q}x{units_k}-{chunk}")
}

/// Bytes moved by the IO model of FlashAttention: queries and outputs once, and the visible keys and values once for each block of queries
/// (causal: half of them, and half a block).
fn model_bytes(p: &AttentionProblem, tile_q: usize) -> u64 {
    let blocks = p.seq_q.div_ceil(tile_q) as f64;
    let passes = if p.options.causal { (blocks + 1.0) / 2.0 } else { blocks };
    let width = (p.head_dim + p.head_dim_v) as f64;
    let heads = (p.batch * p.num_heads_q) as f64;
    (heads * width * (p.seq_q as f64 + passes * p.seq_k as f64) * p.dtype.size() as f64) as u64
}

/// Launches measured by the profiler, by head dimension, kernel and tile.
type Launches = HashMap<(usize, &'static str, String), Seen>;

/// Launches every kernel once under Nsight Compute.
fn profile(options: &Options) -> Result<Launches, Error> {
    const METRICS: [&str; 3] = ["launch__registers_per_thread", "dram__bytes.sum", "lts__t_sectors_srcunit_tex.sum"];
    let other = |what: String| Error::Other(format!("the profiler ncu failed: {what}"));
    let program = std::env::current_exe().map_err(|error| other(error.to_string()))?;
    let head_dims: Vec<String> = options.head_dim.iter().map(usize::to_string).collect();
    let output = Command::new("ncu")
        .args(["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"])
        .args(["--metrics", &METRICS.join(",")])
        .arg(program)
        .args(["sweep", "--once", "--device", options.device.unwrap_or_else(DeviceName::best).name()])
        .args(["--head-dim", &head_dims.join(",")])
        .args(["--seq", &options.seq.to_string(), "--batch", &options.batch.to_string()])
        .args(["--heads", &options.heads.to_string()])
        .args(options.only.iter().flat_map(|tile| ["--only", tile]))
        .output()
        .map_err(|error| {
            other(format!("it cannot be started ({error}); install Nsight Compute, or leave out --profile"))
        })?;
    let text = String::from_utf8_lossy(&output.stdout);
    // This program prints the names of its launches in the same output as the profiler's table.
    let launched: Vec<(usize, &'static str, String)> = text.lines().filter_map(launch).collect();
    let table = text.lines().skip_while(|line| !line.starts_with("\"ID\"")).collect::<Vec<_>>().join("\n");
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(table.as_bytes());
    let header = reader.headers().map_err(|error| other(error.to_string()))?.clone();
    let column = |name: &str| {
        let found = header.iter().position(|column| column == name);
        found.ok_or_else(|| {
            other(format!("its table has no column {name}: {}", text.chars().take(400).collect::<String>()))
        })
    };
    let (kernel, metrics) = (column("Kernel Name")?, METRICS.map(column));
    let [registers, dram, sectors] = metrics;
    let (registers, dram, sectors) = (registers?, dram?, sectors?);
    let mut seen = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| other(error.to_string()))?;
        let name = record.get(kernel).unwrap_or_default();
        let number = |column: usize| record.get(column).and_then(|text| text.replace(',', "").parse::<f64>().ok());
        // The line of units has no kernel, and delta has no tiles.
        let ours = Part::EVERYWHERE.iter().any(|part| name.contains(part.name())) && !name.contains("delta");
        if let (true, Some(registers), Some(dram), Some(sectors)) =
            (ours, number(registers), number(dram), number(sectors))
        {
            seen.push(Seen { registers: registers as u32, dram_bytes: dram as u64, l2_bytes: 32 * sectors as u64 });
        }
    }
    if seen.len() != launched.len() {
        return Err(other(format!("it profiled {} launches of {}", seen.len(), launched.len())));
    }
    Ok(launched.into_iter().zip(seen).collect())
}

/// Parses the name of a launch from a line of `--once`.
fn launch(line: &str) -> Option<(usize, &'static str, String)> {
    let mut words = line.split(' ');
    let (head_dim, part, tile) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
    let part = Part::EVERYWHERE.into_iter().find(|known| known.name() == part)?;
    Some((head_dim, part.name(), tile.into()))
}
