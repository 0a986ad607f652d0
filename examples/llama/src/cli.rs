//! The program's commands.

use crate::bench::Bench;
use crate::checkpoint::Checkpoint;
use crate::device::Place;
use crate::documents::{pack, read};
use crate::error::Error;
use crate::finetune::Finetuning;
use crate::generate::Generation;
use crate::lora::{AdapterConfig, merge};
use crate::sample::Sampling;
use crate::text::{ChatTemplate, Message, Text};
use clap::{Args, Parser, Subcommand};
use example_support::memory::Peak;
use gpt::config::Dtype;
use gpt::device::AtRest;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Runs and fine-tunes language models of Hugging Face with flash attention.
#[derive(Parser)]
#[command(version)]
pub struct Cli {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: Command,
}

/// A command.
#[derive(Subcommand)]
enum Command {
    /// Continues texts or answers.
    Generate(Generate),
    /// Trains low-rank adapters on documents.
    Finetune(Finetune),
    /// Measures the speed of a model's shape, with random weights.
    Bench(Bench),
}

/// Continues texts or answers.
#[derive(Args)]
struct Generate {
    /// Folder of the model: config.json, model.safetensors or shards, tokenizer.json.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A text to continue. Given several times, all texts are one batch and printed at the end. [default: standard input]
    #[arg(long)]
    prompt: Vec<String>,
    /// Prompts are messages of a user, which the model's chat template turns into texts.
    #[arg(long)]
    chat: bool,
    /// A message of the system before each prompt.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Folder of adapters that finetune has written.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    sampling: Sampling,
    /// Random seed; the same seed gives the same text.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Number of tokens, if a text does not end before.
    #[arg(long, default_value_t = 200)]
    max_tokens: usize,
}

/// Trains low-rank adapters on documents.
#[derive(Args)]
struct Finetune {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A document, or a JSONL file whose lines are objects with a `text`. May be given several times.
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<PathBuf>,
    /// Rank of the adapters.
    #[arg(long, default_value_t = 16)]
    rank: usize,
    /// Adapters count alpha/rank times.
    #[arg(long, default_value_t = 32.0)]
    alpha: f64,
    /// Layers that get adapters: of q, k, v, o, gate, up, down.
    #[arg(long, value_delimiter = ',', default_value = "q,k,v,o,gate,up,down")]
    targets: Vec<String>,
    #[command(flatten)]
    finetuning: Finetuning,
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    ///
    /// Those of the command.
    pub fn run(self) -> Result<(), Error> {
        match self.command {
            Command::Generate(generate) => generate.run(&self.place),
            Command::Finetune(finetune) => finetune.run(&self.place),
            Command::Bench(bench) => {
                let (device, dtype) = self.place.choose()?;
                let _at_rest = AtRest(vec![device.clone()]);
                let measured = bench.run(&device, dtype)?;
                println!("tokens/s   {:.1}", measured.tokens_per_second);
                if let Some(Peak { bytes, .. }) = measured.peak {
                    println!("memory     {:.1} MiB at most", bytes as f64 / (1u64 << 20) as f64);
                }
                bench.append(&measured)
            }
        }
    }
}

impl Generate {
    fn run(self, place: &Place) -> Result<(), Error> {
        let checkpoint = Checkpoint::open(&self.model)?;
        let text = Text::of_folder(&self.model)?;
        let prompts = self.prompts(&text)?;
        let (device, dtype) = place.choose()?;
        let _at_rest = AtRest(vec![device.clone()]);
        let mut model = checkpoint.model(&device, dtype)?;
        if let Some(adapter) = &self.adapter {
            merge(&mut model, adapter)?;
        }
        let Generate { sampling, seed, max_tokens, .. } = self;
        let generation = Generation { sampling, seed, max_tokens, eos: checkpoint.config.eos };
        let begun = Instant::now();
        let mut stream = text.tokenizer.decode_stream(true);
        let alone = prompts.len() == 1;
        let texts = generation.run(&model, &prompts, |_, token| match alone {
            true => show(&stream.step(token).map_err(text.broken())?.unwrap_or_default()),
            false => Ok(()),
        })?;
        let seconds = begun.elapsed().as_secs_f64();
        if !alone {
            for (nth, tokens) in texts.iter().enumerate() {
                show(&format!("== {}\n{}\n", nth + 1, text.decode(tokens)?))?;
            }
        }
        let count: usize = texts.iter().map(Vec::len).sum();
        eprintln!("\n{count} tokens, {:.1} tokens/s with the prompt", count as f64 / seconds);
        Ok(())
    }

    /// The tokens of the prompts.
    fn prompts(&self, text: &Text) -> Result<Vec<Vec<u32>>, Error> {
        let mut prompts = self.prompt.clone();
        if prompts.is_empty() {
            let mut input = String::new();
            io::stdin().read_to_string(&mut input).map_err(Error::io(Path::new("standard input")))?;
            prompts.push(input.trim_end_matches('\n').to_string());
        }
        if !self.chat {
            return prompts.iter().map(|prompt| text.encode(prompt, true)).collect();
        }
        let template = ChatTemplate::of_folder(&self.model)?;
        let message = |role: &str, content: &String| Message { role: role.to_string(), content: content.clone() };
        let render = |prompt| {
            let system = self.system.iter().map(|system| message("system", system));
            let messages: Vec<_> = system.chain([message("user", prompt)]).collect();
            text.encode(&template.render(&messages)?, false)
        };
        prompts.iter().map(render).collect()
    }
}

/// Prints at once.
fn show(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::io(Path::new("standard output")))
}

impl Finetune {
    fn run(self, place: &Place) -> Result<(), Error> {
        let Finetune { finetuning, .. } = &self;
        finetuning.check()?;
        if place.dtype == Dtype::F16 {
            let why = "gradients are too small for it; choose bf16 or f32".to_string();
            return Err(Error::Flag { flag: "dtype", value: "f16".to_string(), why });
        }
        let adapters = AdapterConfig::new(self.rank, self.alpha, &self.targets)?;
        let checkpoint = Checkpoint::open(&self.model)?;
        let text = Text::of_folder(&self.model)?;
        let eos = checkpoint.config.eos.first().copied();
        let files = self.data.iter().map(|path| read(path, &text, eos)).collect::<Result<Vec<_>, _>>()?;
        let documents: Vec<_> = files.into_iter().flatten().collect();
        let rows = pack(&documents, finetuning.context);
        let (device, dtype) = place.choose()?;
        let _at_rest = AtRest(vec![device.clone()]);
        let device = match finetuning.checkpointing {
            true => device.autodiff().gradient_checkpointing(),
            false => device.autodiff(),
        };
        device.seed(finetuning.seed);
        let model = adapters.attach(checkpoint.model(&device, dtype)?);
        eprintln!("documents  {}, in {} rows of {} tokens", documents.len(), rows.len(), finetuning.context);
        let model = finetuning.run(model, rows)?;
        adapters.save(&model, &finetuning.out_dir)?;
        eprintln!("adapter    {}", finetuning.out_dir.display());
        Ok(())
    }
}
