//! The command-line program.

use crate::checkpoint::Checkpoint;
use crate::compare;
use crate::config::{AttentionKind, Config};
use crate::data::{self, Stream, Text, rng};
use crate::device::{self, AtRest};
use crate::error::Error;
use crate::files::write_atomically;
use crate::flags::Given;
use crate::generate::{self, Sampling, Writer};
use crate::model::{self, Gpt};
use crate::probe;
use crate::run::Run;
use crate::tokenizer::Tokenizer;
use crate::train::{self, Outcome, Start};
use crate::weights::Weights;
use burn_flash_attention::KvStorage;
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::io::Write;
use std::iter::repeat_n;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Trains a GPT with flash attention, shows that it learns, and lets it generate text.
///
/// Without flags it trains on the best GPU, or else on the CPU, on this repository's own sources. Defaults depend on the device. All output
/// is written to runs/NAME.
#[derive(Parser, Debug)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: TrainArgs,
}

/// Flags of training.
#[derive(clap::Args, Debug)]
struct TrainArgs {
    /// Name of the run [default: the first free gpt-N; with --resume the latest run].
    #[arg(long)]
    name: Option<String>,
    /// Continue a run from its latest checkpoint.
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    config: Given<Config>,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Continues a text, with a run's model or with GPT-2's weights.
    Generate(generate::Args),
    /// Trains the same model with each implementation of attention at several contexts: loss, step time, tokens/s, peak memory.
    ///
    /// A measurement that fails or takes too long has the reason in its row and does not end the others; the exit code is 0.
    Compare(compare::Args),
    /// Runs one measurement; started by `compare`.
    #[command(hide = true)]
    CompareWorker,
}

/// Runs the program and returns its exit code: 2 after an error, described in one sentence or by clap, and 130 after an interruption.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        None => train(&cli.train),
        Some(Command::Generate(args)) => generate(&args),
        Some(Command::Compare(args)) => compare::run(&args).map(|()| ExitCode::SUCCESS),
        Some(Command::CompareWorker) => compare::work().map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(2)
    })
}

fn train(args: &TrainArgs) -> Result<ExitCode, Error> {
    // -- the run: its configuration, its device, its text
    let resumed = match args.resume {
        true => {
            let run = Run::find(args.name.as_deref())?;
            let checkpoint = Checkpoint::load(&run.latest())?;
            let saved = &checkpoint.header.config;
            let config = saved.resume(args.config.over(saved.clone()), &run.directory)?;
            Some((config, run, checkpoint))
        }
        false => None,
    };
    let asked = resumed.as_ref().map_or_else(|| args.config.over(Config::default()), |(config, ..)| config.clone());
    let all = device::choose_all(&asked.device, &asked.devices)?;
    all.iter().for_each(|found| println!("device     {found}"));
    let devices: Vec<_> = all.iter().map(|found| found.device.clone().autodiff()).collect();
    let _at_rest = AtRest(devices.clone());
    let found = &all[0];
    let try_dtype = |config: &Config| all.iter().try_for_each(|found| probe::check(found, config.dtype));
    let (config, run, text, start) = match resumed {
        Some((config, run, checkpoint)) => {
            try_dtype(&config)?;
            let path = config.data.clone().unwrap_or(run.text());
            let text = read(&path, &config)?;
            checkpoint.check_text(text.hash())?;
            (config, run, text, Start::Checkpoint(Box::new(checkpoint)))
        }
        None => {
            let heads = args.config.has("heads").then_some(asked.heads);
            let weights = asked.weights.as_ref().map(|path| Weights::open(path, heads)).transpose()?;
            let config = Config::new(&args.config, found, weights.as_ref().map(|weights| weights.shape))?;
            try_dtype(&config)?;
            let (run, text) = match &config.data {
                Some(path) => {
                    let text = read(path, &config)?;
                    (Run::create(args.name.as_deref())?, text)
                }
                None => {
                    let text = Text::new(data::own_sources()?, ".".as_ref(), config.tokenizer, config.context)?;
                    let text = if config.pack { text.packed(config.tokenizer)? } else { text };
                    let run = Run::create(args.name.as_deref())?;
                    write_atomically(&run.text(), &[&text.bytes])?;
                    (run, text)
                }
            };
            (config, run, text, weights.map_or(Start::Random, Start::Weights))
        }
    };
    let device = found.device.clone();
    let toml = toml::to_string(&config).expect("a configuration is a table of plain values");
    write_atomically(&run.config(), &[toml.as_bytes()])?;

    let unit = config.tokenizer.unit();
    println!("attention  {}", model::attention_plan(&config, &device)?);
    println!("model      {}", model_in_words(&config));
    println!("text       {} {unit}s to train on, {} to validate with", text.train().len(), text.validation().len());
    if let Some([train, validation]) = text.documents() {
        println!("documents  {train} to train on, {validation} to validate with");
    }
    println!("run        {}", run.directory.display());
    match &start {
        Start::Random => {}
        Start::Weights(weights) => println!("weights    {}", weights.path.display()),
        Start::Checkpoint(checkpoint) => println!("resume     at step {} of {}", checkpoint.header.step, config.steps),
    }

    // -- training
    let stop = stop_on_signal();
    let outcome = train::train(&config, &text, &run, start, &devices, &stop)?;
    if let Outcome::Interrupted(step) = outcome {
        println!("stopped at step {step} with a checkpoint; go on with --resume");
        return Ok(ExitCode::from(130));
    }

    // -- results: the best model's loss, and a text by it
    let best = Checkpoint::load(&run.best())?;
    let step = best.header.step;
    let model = best.model(Gpt::zeros(&config, &device))?;
    // Not the batches by which the best model was selected, whose loss is biased.
    let loss = train::evaluate(&model, &text, &config, Stream::FinalBatch, &device)?;
    println!("best validation loss {loss:.4} nats per {unit}, over {} batches, at step {step}", config.eval_batches);
    println!("see {} and {}", run.picture().display(), run.losses().display());
    if config.sample_tokens > 0 {
        println!("\nit writes:");
        let storage = KvStorage::Elements;
        let writer = Writer { model: &model, tokenizer: config.tokenizer, context: config.context, storage };
        let prompt = ("", rng(config.seed, Stream::Sample, 0));
        writer.write(vec![prompt], config.sample_tokens, &Sampling::default(), |_, text| show(text))?;
        println!();
    }
    Ok(ExitCode::SUCCESS)
}

fn generate(args: &generate::Args) -> Result<ExitCode, Error> {
    if args.cache != KvStorage::Elements && args.attention != AttentionKind::Flash {
        let (value, rule) = ("e4m3".to_string(), "it needs --attention flash");
        return Err(Error::Config { flag: "cache", value, rule });
    }
    let found = device::choose(&args.device)?;
    eprintln!("device     {found}");
    let device = found.device.clone();
    let _at_rest = AtRest(vec![device.clone()]);
    probe::check(&found, args.dtype)?;
    let computed_as = |config: Config| Config { attention: args.attention, dtype: args.dtype, ..config };
    let (model, config) = match &args.weights {
        Some(path) => {
            let weights = Weights::open(path, args.heads)?;
            let tokenizer = args.tokenizer.unwrap_or(Tokenizer::Gpt2);
            let suited = Config::suited_to(&found).suited_to_weights(weights.shape);
            let config = Config { tokenizer, weights: Some(path.clone()), ..suited }.checked(Some(weights.shape))?;
            let config = computed_as(config);
            (weights.load(Gpt::zeros(&config, &device), config.context)?, config)
        }
        None => {
            let run = Run::find(args.name.as_deref())?;
            let best = Checkpoint::load(&run.best())?;
            let config = computed_as(best.header.config.clone());
            (best.model(Gpt::zeros(&config, &device))?, config)
        }
    };
    let prompts = args.prompt.iter().flat_map(|prompt| repeat_n(prompt.as_str(), args.batch));
    let prompts: Vec<_> = prompts.zip((0..).map(|index| args.seed.wrapping_add(index))).collect();
    eprintln!("attention  {}", model::attention_plan(&Config { batch: prompts.len(), ..config.clone() }, &device)?);
    eprintln!("model      {}", model_in_words(&config));

    let (tokenizer, context, storage) = (config.tokenizer, config.context, args.cache);
    let writer = Writer { model: &model, tokenizer, context, storage };
    let seeded = prompts.iter().map(|(prompt, seed)| (*prompt, StdRng::seed_from_u64(*seed))).collect();
    let written = if let [(prompt, _)] = prompts[..] {
        show(prompt);
        let written = writer.write(seeded, args.tokens, &args.sampling, |_, text| show(text))?;
        show("\n");
        written
    } else {
        let mut texts: Vec<_> = prompts.iter().map(|(prompt, _)| prompt.to_string()).collect();
        let written = writer.write(seeded, args.tokens, &args.sampling, |index, text| texts[index].push_str(text))?;
        for (index, (text, (_, seed))) in texts.iter().zip(&prompts).enumerate() {
            show(&format!("--- text {} of {}, seed {seed} ---\n{text}\n", index + 1, texts.len()));
        }
        written
    };
    eprintln!("{written}");
    Ok(ExitCode::SUCCESS)
}

/// Prints text as it is generated. A closed pipe is not an error.
fn show(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn model_in_words(config: &Config) -> String {
    let Config { layers, heads, width, context, .. } = config;
    let dtype = config.dtype.name();
    format!("{layers} layers, {heads} heads, width {width}, context {context}, {dtype}")
}

/// The first Ctrl-C asks the training loop to save and stop; the second one ends the program.
fn stop_on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    let handler = move || {
        if asked.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    // Without a handler, Ctrl-C ends the program, and the latest checkpoint remains.
    let _ = ctrlc::set_handler(handler);
    stop
}

/// Reads a text, and splits it into documents if rows are packed.
fn read(path: &Path, config: &Config) -> Result<Text, Error> {
    let text = Text::read(path, config.tokenizer, config.context)?;
    if config.pack { text.packed(config.tokenizer) } else { Ok(text) }
}
