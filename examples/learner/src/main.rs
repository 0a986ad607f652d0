//! `cargo run --release -p gpt-learner` trains the model of `examples/gpt` with burn-train, to show that flash attention
//! needs nothing there: neither the model nor burn-train knows of the other.
//!
//! [`training`] makes the model and the text what burn-train asks for; the rest is its dashboard, metrics, checkpoints and
//! schedule as any model uses them. `q` leaves the dashboard. Without a terminal there are lines of progress instead.

mod training;

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::composed::ComposedLrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{AdamWConfig, ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use burn_train::checkpoint::Checkpoint;
use burn_train::metric::{AccuracyMetric, IterationSpeedMetric, LearningRateMetric, LossMetric, PerplexityMetric};
use burn_train::{Learner, SupervisedTraining};
use clap::Parser;
use gpt::config::{Args, Config};
use gpt::data::{Text, own_sources};
use gpt::device::{self, AtRest, Found};
use gpt::error::{CheckpointProblem, Error as GptError, in_one_line};
use gpt::files::write_atomically;
use gpt::model::{Gpt, attention_plan};
use gpt::probe;
use std::error::Error;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use training::{LanguageModel, loaders};

/// Trains a GPT with flash attention in burn-train.
///
/// What is not given follows the device. An epoch is as many steps as gpt takes between two evaluations.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long)]
    device: Option<String>,
    /// A UTF-8 text to learn [default: the sources of this workspace].
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Epochs in all, each with a validation and a checkpoint.
    #[arg(long)]
    epochs: Option<NonZeroUsize>,
    /// Windows of text in a batch.
    #[arg(long)]
    batch: Option<usize>,
    /// Blocks of attention and MLP.
    #[arg(long)]
    layers: Option<usize>,
    /// Heads of attention.
    #[arg(long)]
    heads: Option<usize>,
    /// Channels of the residual stream.
    #[arg(long)]
    width: Option<usize>,
    /// Tokens that the model sees.
    #[arg(long)]
    context: Option<usize>,
    /// Where metrics, logs and checkpoints go.
    #[arg(long, default_value = "runs/learner")]
    directory: PathBuf,
    /// Continue after this epoch; there are checkpoints of the last two and of the best one.
    #[arg(long, value_name = "EPOCH")]
    resume: Option<NonZeroUsize>,
}

fn main() -> ExitCode {
    match train(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn train(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let (config, found) = configure(cli)?;
    let text = match &config.data {
        Some(path) => Text::read(path, config.tokenizer, config.context)?,
        None => Text::new(own_sources()?, ".".as_ref(), config.tokenizer, config.context)?,
    };
    let (begun, epochs) = (cli.resume.map_or(0, NonZeroUsize::get), config.steps / config.eval_interval);
    if begun >= epochs {
        return Err(format!("--resume is {begun}, the last of {epochs} epochs; choose more --epochs").into());
    }
    println!("device     {found}");
    probe::check(&found, config.dtype)?;
    println!("attention  {}", attention_plan(&config, &found.device)?);
    save_config(cli, &config)?;

    // From here on it is burn-train. A run that goes on has other windows and other dropout than before.
    let seed = u64::from(config.seed) + begun as u64;
    let device = found.device.autodiff();
    let _at_rest = AtRest(vec![device.clone()]);
    device.seed(seed);
    let model = LanguageModel::new(Gpt::new(&config, &device));
    let learner = Learner::new(model, optimizer(&config), schedule(&config)?);
    let (train, validation) = loaders(&text, &config, seed);
    let mut training = SupervisedTraining::new(&cli.directory, train, validation)
        .metrics((LossMetric::new(), PerplexityMetric::new(), AccuracyMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .metric_train_numeric(IterationSpeedMetric::new())
        .with_default_checkpointers()
        .num_epochs(epochs)
        .summary();
    if begun > 0 {
        training = training.checkpoint(begun);
    }
    training.launch(learner).error.map_or(Ok(()), |error| Err(in_one_line(&error).into()))
}

/// What the run is and where it computes: a new one's flags, or what was saved with the checkpoints.
fn configure(cli: &Cli) -> Result<(Config, Found), Box<dyn Error>> {
    let args = Args {
        device: cli.device.clone(),
        data: cli.data.clone(),
        batch: cli.batch,
        layers: cli.layers,
        heads: cli.heads,
        width: cli.width,
        context: cli.context,
        ..Args::default()
    };
    let (mut config, found) = match cli.resume {
        None => {
            let found = device::choose(cli.device.as_deref().unwrap_or("auto"))?;
            (Config::new(&args, &found, None)?, found)
        }
        Some(epoch) => {
            let config = saved_config(&cli.directory, epoch)?.resume(&args, &cli.directory)?;
            check_checkpoint(&cli.directory, epoch)?;
            let found = device::choose(&config.device)?;
            if !device::burn_default_is_there() {
                let backend = found.id.split(':').next().unwrap_or_default();
                return Err(format!(
                    "Burn loads an optimizer by way of its default device, which is not there; set BURN_DEVICE={backend}"
                )
                .into());
            }
            (config, found)
        }
    };
    if let Some(epochs) = cli.epochs {
        config.steps = epochs.get() * config.eval_interval;
    }
    Ok((config, found))
}

/// Burn's AdamW. It clips each parameter's gradient by that parameter's norm, and decays every parameter.
fn optimizer(config: &Config) -> ModuleOptimizer {
    let clipping = (config.grad_clip > 0.0).then_some(GradientClippingConfig::Norm(config.grad_clip as f32));
    AdamWConfig::new()
        .with_beta_1(config.beta1 as f32)
        .with_beta_2(config.beta2 as f32)
        .with_weight_decay(config.weight_decay as f32)
        .with_grad_clipping(clipping)
        .init()
}

/// Half a cosine over all steps, times a line up over the first ones.
fn schedule(config: &Config) -> Result<ModuleLrScheduler, String> {
    let warmup = config.warmup.max(1);
    ComposedLrSchedulerConfig::new()
        .linear(LinearLrSchedulerConfig::new(1.0 / (warmup + 1) as f64, 1.0, warmup))
        .cosine(CosineAnnealingLrSchedulerConfig::new(config.lr, config.steps).with_min_lr(config.min_lr))
        .init()
}

/// Keeps the configuration with the checkpoints, whose model has its sizes.
fn save_config(cli: &Cli, config: &Config) -> Result<(), Box<dyn Error>> {
    let directory = &cli.directory;
    let has_checkpoint = fs::read_dir(directory.join("checkpoint")).is_ok_and(|mut files| files.next().is_some());
    if cli.resume.is_none() && has_checkpoint {
        let run = directory.display();
        return Err(
            format!("{run} holds a run already; continue it with --resume, or choose another --directory").into()
        );
    }
    let path = directory.join("config.toml");
    fs::create_dir_all(directory).map_err(GptError::io(directory))?;
    Ok(write_atomically(&path, &[toml::to_string(config)?.as_bytes()])?)
}

fn saved_config(directory: &Path, epoch: NonZeroUsize) -> Result<Config, Box<dyn Error>> {
    let checkpoint = directory.join(format!("checkpoint/model-{epoch}.bpk"));
    if !checkpoint.exists() {
        return Err(format!("--resume is {epoch}, but there is no {}", checkpoint.display()).into());
    }
    let path = directory.join("config.toml");
    let text = fs::read_to_string(&path).map_err(GptError::io(&path))?;
    toml::from_str(&text).map_err(|error| format!("{} is damaged: {}", path.display(), error.message()).into())
}

/// Reads what burn-train saved after an epoch, since it panics where it cannot.
fn check_checkpoint(directory: &Path, epoch: NonZeroUsize) -> Result<(), GptError> {
    fn check<R: Checkpoint>(path: PathBuf) -> Result<(), GptError> {
        R::load(path.clone()).map(drop).map_err(|error| {
            let problem = CheckpointProblem::Corrupt(in_one_line(&error));
            GptError::Checkpoint { path, problem }
        })
    }
    let file = |name: &str| directory.join(format!("checkpoint/{name}-{epoch}.bpk"));
    check::<ModuleRecord>(file("model"))?;
    check::<OptimizerRecord>(file("optim"))?;
    check::<LrSchedulerRecord>(file("scheduler"))
}
