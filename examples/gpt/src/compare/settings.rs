//! What is compared: flags, and what suits the device where there is none.

use crate::config::{self, AttentionKind, Config, Dtype};
use crate::device::{Found, Strength};
use crate::error::Error;
use crate::probe;
use crate::tokenizer::Tokenizer;
use burn::tensor::FloatDType;
use std::path::{Path, PathBuf};

/// nanoGPT's for GPT-2.
const LEARNING_RATE: f64 = 6e-4;

/// The flags of a comparison.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Kinds of attention.
    #[arg(long, value_delimiter = ',', default_value = "flash,burn,composed")]
    pub attention: Vec<AttentionKind>,
    /// Tokens that the model sees, one model for each number.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    pub contexts: Vec<usize>,
    /// A UTF-8 text to learn [default: the sources of this workspace].
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// How text becomes tokens, and how many there are.
    #[arg(long)]
    pub tokenizer: Option<Tokenizer>,
    /// What matrix products and attention are computed in; all else is f32.
    #[arg(long)]
    pub dtype: Option<Dtype>,
    /// Blocks of attention and MLP.
    #[arg(long)]
    pub layers: Option<usize>,
    /// Heads of attention.
    #[arg(long)]
    pub heads: Option<usize>,
    /// Channels of the residual stream.
    #[arg(long)]
    pub width: Option<usize>,
    /// Windows of text in a batch [default: as many as --tokens-per-step has room for, and at least 1].
    #[arg(long, conflicts_with = "tokens_per_step")]
    pub batch: Option<usize>,
    /// Tokens in a batch, the same for every context.
    #[arg(long)]
    pub tokens_per_step: Option<usize>,
    /// Keep only what enters each block, and compute the block again in the backward pass.
    #[arg(long)]
    pub checkpointing: bool,
    /// Steps that are timed.
    #[arg(long)]
    pub steps: Option<usize>,
    /// Steps before those, which compile and tune.
    #[arg(long)]
    pub warmup: Option<usize>,
    /// Same seed, same weights and batches.
    #[arg(long, default_value_t = 1337)]
    pub seed: u32,
    /// Seconds that one measurement may take, compilation and tuning included.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub limit: u64,
    /// Where compare.csv and compare.svg are written, over earlier ones.
    #[arg(long, value_name = "DIR", default_value = "runs/compare")]
    pub out: PathBuf,
}

/// The flags, complete.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Settings {
    pub device: String,
    pub kinds: Vec<AttentionKind>,
    pub contexts: Vec<usize>,
    pub tokenizer: Tokenizer,
    pub dtype: Dtype,
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    /// As many as `tokens_per_step` has room for, if it is none.
    pub batch: Option<usize>,
    pub tokens_per_step: usize,
    pub checkpointing: bool,
    pub steps: usize,
    pub warmup: usize,
    pub seed: u32,
}

impl Settings {
    /// What was asked for, and otherwise what suits the device.
    ///
    /// # Errors
    ///
    /// For the first flag that is out of range, and for a dtype that the device has not.
    pub fn new(args: &Args, found: &Found) -> Result<Self, Error> {
        let suited = Self::suited_to(found);
        let settings = Self {
            device: found.id.clone(),
            kinds: args.attention.clone(),
            contexts: if args.contexts.is_empty() { suited.contexts } else { args.contexts.clone() },
            tokenizer: args.tokenizer.unwrap_or(suited.tokenizer),
            dtype: args.dtype.unwrap_or(suited.dtype),
            layers: args.layers.unwrap_or(suited.layers),
            heads: args.heads.unwrap_or(suited.heads),
            width: args.width.unwrap_or(suited.width),
            batch: args.batch,
            tokens_per_step: args.tokens_per_step.unwrap_or(suited.tokens_per_step),
            checkpointing: args.checkpointing,
            steps: args.steps.unwrap_or(suited.steps),
            warmup: args.warmup.unwrap_or(suited.warmup),
            seed: args.seed,
        };
        settings.validate()?;
        probe::check(found, settings.dtype)?;
        Ok(settings)
    }

    /// GPT-2's smallest model on a GPU of its own, and what ends in a minute or two elsewhere.
    fn suited_to(found: &Found) -> Self {
        let half = found.device.supports_dtype(FloatDType::BF16);
        let gpu = Self {
            device: String::new(),
            kinds: Vec::new(),
            contexts: vec![1024, 4096, 16384],
            tokenizer: Tokenizer::Gpt2,
            dtype: if half { Dtype::Bf16 } else { Dtype::F32 },
            layers: 12,
            heads: 12,
            width: 768,
            batch: None,
            tokens_per_step: 16384,
            checkpointing: false,
            steps: 10,
            warmup: 3,
            seed: 0,
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

    fn validate(&self) -> Result<(), Error> {
        let smallest = self.contexts.iter().copied().min().unwrap_or_default();
        for (flag, value) in [("contexts", smallest), ("tokens-per-step", self.tokens_per_step), ("steps", self.steps)]
        {
            if value == 0 {
                return Err(Error::Config { flag, value: value.to_string(), rule: "it must be at least 1" });
            }
        }
        Ok(())
    }

    /// For each context a run of each kind, which reads its text from this file.
    ///
    /// # Errors
    ///
    /// For the first flag that is out of range.
    pub fn configs(&self, found: &Found, text: &Path) -> Result<Vec<Vec<Config>>, Error> {
        let config = |kind, context| Config::new(&self.flags(kind, context, text), found, None);
        let of_context = |context: &usize| self.kinds.iter().map(|kind| config(*kind, *context)).collect();
        self.contexts.iter().map(of_context).collect()
    }

    /// The flags of training, by which a measurement is a run as any other.
    fn flags(&self, kind: AttentionKind, context: usize, text: &Path) -> config::Args {
        config::Args {
            device: Some(self.device.clone()),
            data: Some(text.to_path_buf()),
            tokenizer: Some(self.tokenizer),
            attention: Some(kind),
            dtype: Some(self.dtype),
            layers: Some(self.layers),
            heads: Some(self.heads),
            width: Some(self.width),
            context: Some(context),
            batch: Some(self.batch.unwrap_or((self.tokens_per_step / context).max(1))),
            grad_accum: Some(1),
            checkpointing: Some(self.checkpointing),
            steps: Some(self.warmup.saturating_add(self.steps)),
            lr: Some(LEARNING_RATE),
            // Attention itself drops nothing in any kind.
            dropout: Some(0.0),
            seed: Some(self.seed),
            ..config::Args::default()
        }
    }
}
