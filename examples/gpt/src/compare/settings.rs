//! Settings of a comparison: flags, and defaults for the device.

use crate::config::{AttentionKind, Config, Dtype};
use crate::device::{Found, Strength};
use crate::error::Error;
use crate::flags::{Given, count};
use crate::probe;
use crate::tokenizer::Tokenizer;
use burn::tensor::FloatDType;
use std::path::{Path, PathBuf};

/// nanoGPT's learning rate for GPT-2.
const LEARNING_RATE: f64 = 6e-4;

/// Flags of a comparison.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Implementations of attention.
    #[arg(long, value_delimiter = ',', default_value = "flash,burn,composed")]
    pub attention: Vec<AttentionKind>,
    /// A UTF-8 text to learn [default: the sources of this workspace].
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    #[command(flatten)]
    pub settings: Given<Settings>,
    /// Windows of text in a batch [default: as many as fit --tokens-per-step, and at least 1].
    #[arg(long, conflicts_with = "tokens_per_step", value_parser = count())]
    pub batch: Option<usize>,
    /// Keep only the input of each block, and compute the block again in the backward.
    #[arg(long)]
    pub checkpointing: bool,
    /// Seed of weights and batches.
    #[arg(long, default_value_t = 1337)]
    pub seed: u32,
    /// Time limit of one measurement in seconds, including compilation and tuning.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub limit: u64,
    /// Directory for compare.csv and compare.svg; earlier ones are overwritten.
    #[arg(long, value_name = "DIR", default_value = "runs/compare")]
    pub out: PathBuf,
}

/// Flags whose defaults depend on the device.
#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Context lengths in tokens; a model is trained for each.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = count())]
    pub contexts: Vec<usize>,
    /// Tokenizer, which also determines the vocabulary.
    #[arg(long)]
    pub tokenizer: Tokenizer,
    /// Element type of matrix products and attention; everything else is f32.
    #[arg(long)]
    pub dtype: Dtype,
    /// Number of transformer blocks.
    #[arg(long, value_parser = count())]
    pub layers: usize,
    /// Number of attention heads.
    #[arg(long, value_parser = count())]
    pub heads: usize,
    /// Channels of the residual stream.
    #[arg(long, value_parser = count())]
    pub width: usize,
    /// Tokens in a batch, the same for every context.
    #[arg(long, value_parser = count())]
    pub tokens_per_step: usize,
    /// Number of timed steps.
    #[arg(long, value_parser = count())]
    pub steps: usize,
    /// Number of warm-up steps, which compile and tune.
    #[arg(long)]
    pub warmup: usize,
}

impl Args {
    /// For each context, a run for each implementation, which reads its text from this file.
    ///
    /// # Errors
    ///
    /// For the first flag that does not fit another flag.
    pub fn configs(&self, settings: &Settings, found: &Found, text: &Path) -> Result<Vec<Vec<Config>>, Error> {
        let config = |kind, context| self.config(settings, found, text, kind, context).checked(None);
        let of_context = |context: &usize| self.attention.iter().map(|kind| config(*kind, *context)).collect();
        settings.contexts.iter().map(of_context).collect()
    }

    /// A measurement is a normal run.
    fn config(&self, settings: &Settings, found: &Found, text: &Path, kind: AttentionKind, context: usize) -> Config {
        let suited = Config::suited_to(found);
        let steps = settings.warmup.saturating_add(settings.steps);
        Config {
            device: found.id.clone(),
            data: Some(text.to_path_buf()),
            tokenizer: settings.tokenizer,
            attention: kind,
            dtype: settings.dtype,
            layers: settings.layers,
            heads: settings.heads,
            width: settings.width,
            context,
            batch: self.batch.unwrap_or((settings.tokens_per_step / context).max(1)),
            grad_accum: 1,
            checkpointing: self.checkpointing,
            steps,
            lr: LEARNING_RATE,
            min_lr: LEARNING_RATE / 10.0,
            warmup: suited.warmup.min(steps / 10),
            // No implementation of attention drops anything in this comparison.
            dropout: 0.0,
            seed: self.seed,
            ..suited
        }
    }
}

impl Settings {
    /// The given flags, and the defaults for the device.
    ///
    /// # Errors
    ///
    /// If the device does not support the dtype.
    pub fn new(given: &Given<Self>, found: &Found) -> Result<Self, Error> {
        let settings = given.over(Self::suited_to(found));
        probe::check(found, settings.dtype)?;
        Ok(settings)
    }

    /// GPT-2's smallest model on a discrete GPU, and elsewhere a model that takes a minute or two.
    fn suited_to(found: &Found) -> Self {
        let half = found.device.supports_dtype(FloatDType::BF16);
        let gpu = Self {
            contexts: vec![1024, 4096, 16384],
            tokenizer: Tokenizer::Gpt2,
            dtype: if half { Dtype::Bf16 } else { Dtype::F32 },
            layers: 12,
            heads: 12,
            width: 768,
            tokens_per_step: 16384,
            steps: 10,
            warmup: 3,
        };
        let small = Self { tokenizer: Tokenizer::Bytes, dtype: Dtype::F32, ..gpu.clone() };
        match found.strength {
            Strength::Discrete => gpu,
            Strength::Integrated => Self {
                contexts: vec![256, 1024, 4096],
                layers: 4,
                heads: 4,
                width: 256,
                tokens_per_step: 4096,
                ..small
            },
            Strength::Cpu => Self {
                contexts: vec![128, 512, 2048],
                layers: 2,
                heads: 2,
                width: 64,
                tokens_per_step: 2048,
                steps: 5,
                warmup: 1,
                ..small
            },
            Strength::Software => Self {
                contexts: vec![32, 64, 128],
                layers: 1,
                heads: 2,
                width: 32,
                tokens_per_step: 128,
                steps: 2,
                warmup: 1,
                ..small
            },
        }
    }
}
