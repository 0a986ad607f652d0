//! `cargo run --release -p nanogpt -- --data input.txt` trains a GPT on the bytes of a text, and then generates text.
//!
//! `q` closes the dashboard. Without a terminal, lines of progress are printed instead.

use burn::config::Config;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::OptimizerRecord;
use burn::store::ModuleRecord;
use burn::tensor::Tensor;
use burn_train::checkpoint::Checkpoint;
use clap::Parser;
use example_support::device::{self, Kind};
use nanogpt::train::{TrainConfig, train};
use std::error::Error;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Trains a GPT with flash attention in burn-train. Defaults of sizes depend on the device.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto")]
    device: String,
    /// A text to train on, byte by byte [default: the documents of this workspace].
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Number of epochs, each with a validation and a checkpoint.
    #[arg(long)]
    epochs: Option<NonZeroUsize>,
    /// Directory for metrics, logs and checkpoints.
    #[arg(long, default_value = "runs/nanogpt")]
    out_dir: PathBuf,
    /// Continue after this epoch; the checkpoints of the last two epochs and of the best one are kept.
    #[arg(long, value_name = "EPOCH")]
    resume: Option<usize>,
    /// Windows of text in a batch.
    #[arg(long, conflicts_with = "resume")]
    batch_size: Option<NonZeroUsize>,
    /// Longest context, in bytes.
    #[arg(long, conflicts_with = "resume")]
    block_size: Option<NonZeroUsize>,
    /// Number of blocks.
    #[arg(long, conflicts_with = "resume")]
    n_layer: Option<NonZeroUsize>,
    /// Number of attention heads.
    #[arg(long, conflicts_with = "resume")]
    n_head: Option<NonZeroUsize>,
    /// Channels of the residual stream.
    #[arg(long, conflicts_with = "resume")]
    n_embd: Option<NonZeroUsize>,
    /// Dropout rate.
    #[arg(long, conflicts_with = "resume")]
    dropout: Option<f64>,
    /// Highest learning rate.
    #[arg(long, conflicts_with = "resume")]
    learning_rate: Option<f64>,
}

/// Enough text to see that the model learns. The end, which is used for validation, is prose.
const DOCUMENTS: &[&str] = &[
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../docs/upstream.md"),
    include_str!("../../../docs/benchmark.md"),
    include_str!("../../../docs/coming-from-pytorch.md"),
    include_str!("../../../docs/gpt.md"),
    include_str!("../../../docs/kernels.md"),
    include_str!("../../../docs/lab-notebook.md"),
    include_str!("../../../docs/performance.md"),
    include_str!("../../../docs/reliability.md"),
];

fn main() -> ExitCode {
    let Err(error) = run(&Args::parse()) else { return ExitCode::SUCCESS };
    // Errors of Burn and CubeCL are reports of many lines.
    let noise = ["An error happened", "Caused by", "skipped ", "Backtrace", "No backtrace", "Asked at"];
    let error = error.to_string();
    let lines = error.lines().map(|line| line.trim().trim_end_matches(':'));
    let lines = lines.filter(|line| !line.is_empty() && !noise.iter().any(|noise| line.starts_with(noise)));
    eprintln!("error: {}", lines.collect::<Vec<_>>().join(": "));
    ExitCode::from(2)
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let found = device::choose(&args.device)?;
    let config = match args.resume {
        None => new_config(args, found.kind)?,
        Some(epoch) => saved_config(args, epoch)?,
    };
    if args.resume.is_some() && !device::default_exists() {
        let backend = found.id.split(':').next().unwrap_or_default();
        return Err(format!(
            "Burn loads an optimizer through its default device, which does not exist; set BURN_DEVICE={backend}"
        )
        .into());
    }
    let text = match &config.data {
        Some(path) => fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?,
        None => DOCUMENTS.concat().into_bytes(),
    };
    let (bytes, needed) = (text.len(), 10 * (config.model.block_size + 1));
    if bytes < needed {
        return Err(format!(
            "the text has {bytes} bytes, but --block-size {} needs {needed}; choose a smaller one",
            config.model.block_size
        )
        .into());
    }
    println!("device     {}", found.id);
    println!("attention  {}", config.model.attention_plan(config.batch_size, &found.device)?);

    fs::create_dir_all(&args.out_dir)
        .and_then(|()| config.save(args.out_dir.join("config.json")))
        .map_err(|error| format!("cannot write to {}: {error}", args.out_dir.display()))?;
    let model = train(&config, &text, &found.device, &args.out_dir, args.resume)?;

    let newline = Tensor::from_data([[i32::from(b'\n')]], &found.device);
    let sample = model.generate(newline, 300, 0.8).try_into_data()?;
    let bytes: Vec<u8> = sample.iter::<i32>().map(|byte| byte as u8).collect();
    println!("{}", String::from_utf8_lossy(&bytes));
    Ok(())
}

/// The preset for the device, overridden by the given flags.
fn new_config(args: &Args, kind: Kind) -> Result<TrainConfig, String> {
    let preset = if kind == Kind::Discrete { TrainConfig::large() } else { TrainConfig::small() };
    let mut config = TrainConfig { data: args.data.clone(), ..preset };
    let model = &mut config.model;
    for (field, flag) in [
        (&mut config.epochs, args.epochs),
        (&mut config.batch_size, args.batch_size),
        (&mut model.block_size, args.block_size),
        (&mut model.n_layer, args.n_layer),
        (&mut model.n_head, args.n_head),
        (&mut model.n_embd, args.n_embd),
    ] {
        *field = flag.map_or(*field, NonZeroUsize::get);
    }
    model.dropout = args.dropout.unwrap_or(model.dropout);
    config.learning_rate = args.learning_rate.unwrap_or(config.learning_rate);
    if !model.n_embd.is_multiple_of(model.n_head) {
        return Err(format!("--n-head is {}; it must divide --n-embd, {}", model.n_head, model.n_embd));
    }
    if !(0.0..1.0).contains(&model.dropout) {
        return Err(format!("--dropout is {}; it must be at least 0 and below 1", model.dropout));
    }
    if !(config.learning_rate > 0.0 && config.learning_rate <= 1.0) {
        return Err(format!("--learning-rate is {}; it must be above 0 and at most 1", config.learning_rate));
    }
    let run = args.out_dir.display();
    match fs::read_dir(args.out_dir.join("checkpoint")).is_ok_and(|mut files| files.next().is_some()) {
        true => Err(format!("{run} already has a run; continue it with --resume, or choose another --out-dir")),
        false => Ok(config),
    }
}

/// Reads the run's saved configuration. Also reads the checkpoint once, because burn-train panics if it cannot.
fn saved_config(args: &Args, epoch: usize) -> Result<TrainConfig, String> {
    fn check<R: Checkpoint>(path: &Path) -> Result<(), String> {
        R::load(path.to_path_buf())
            .map(drop)
            .map_err(|error| format!("the checkpoint {} is damaged: {error}", path.display()))
    }
    let file = |name: &str| args.out_dir.join(format!("checkpoint/{name}-{epoch}.bpk"));
    if !file("model").exists() {
        return Err(format!("--resume is {epoch}, but there is no {}", file("model").display()));
    }
    let path = args.out_dir.join("config.json");
    let mut config = TrainConfig::load(&path).map_err(|error| format!("{} is damaged: {error}", path.display()))?;
    check::<ModuleRecord>(&file("model"))?;
    check::<OptimizerRecord>(&file("optim"))?;
    check::<LrSchedulerRecord>(&file("scheduler"))?;
    config.epochs = args.epochs.map_or(config.epochs, NonZeroUsize::get);
    config.data = args.data.clone().or(config.data);
    match epoch < config.epochs {
        true => Ok(config),
        false => Err(format!("--resume is {epoch}, the last of {} epochs; choose more --epochs", config.epochs)),
    }
}
