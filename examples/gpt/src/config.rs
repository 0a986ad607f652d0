//! What a run is: flags on the command line, resolved into a configuration that is kept with the run.

use crate::device::{Found, Strength};
use crate::error::Error;
use crate::tokenizer::Tokenizer;
use burn::tensor::FloatDType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::{Path, PathBuf};

/// The flags of training.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long)]
    pub device: Option<String>,
    /// Train on several devices of that kind, by their numbers: each takes an equal part of every batch.
    #[arg(long, value_delimiter = ',', value_name = "N,N,…")]
    pub devices: Option<Vec<usize>>,
    /// A UTF-8 text to learn [default: the sources of this workspace].
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// How text becomes tokens [default: bytes; with --weights gpt2].
    #[arg(long)]
    pub tokenizer: Option<Tokenizer>,
    /// GPT-2's weights to begin with, a safetensors file in Hugging Face's layout, whose sizes the model takes.
    #[arg(long, value_name = "FILE")]
    pub weights: Option<PathBuf>,
    /// The run's name [default: the first free gpt-N; with --resume the latest run].
    #[arg(long)]
    pub name: Option<String>,
    /// Continue a run from its latest checkpoint.
    #[arg(long)]
    pub resume: bool,

    /// How attention is computed.
    #[arg(long)]
    pub attention: Option<AttentionKind>,
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
    /// Tokens that the model sees.
    #[arg(long)]
    pub context: Option<usize>,
    /// Tell positions by ALiBi's slopes, in place of learned embeddings.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub alibi: Option<bool>,
    /// Give each head a learned sink, so that it may attend to nothing.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub sinks: Option<bool>,
    /// Tokens that each token sees, itself counted; 0 is all before it.
    #[arg(long)]
    pub window: Option<usize>,

    /// Fill each row of a batch with whole documents, which see nothing of each other, in place of a window of running text.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub pack: Option<bool>,

    /// Windows of text in a batch.
    #[arg(long)]
    pub batch: Option<usize>,
    /// Batches whose gradients make one step.
    #[arg(long)]
    pub grad_accum: Option<usize>,
    /// Keep only what enters each block, and compute the block again in the backward pass: less memory, more time.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub checkpointing: Option<bool>,
    /// Updates of the model.
    #[arg(long)]
    pub steps: Option<usize>,
    /// The highest learning rate.
    #[arg(long)]
    pub lr: Option<f64>,
    /// The learning rate at the end [default: a tenth of --lr].
    #[arg(long)]
    pub min_lr: Option<f64>,
    /// Steps in which the learning rate rises.
    #[arg(long)]
    pub warmup: Option<usize>,
    /// Of matrices; embeddings, norms and biases do not decay.
    #[arg(long)]
    pub weight_decay: Option<f64>,
    /// AdamW's first coefficient.
    #[arg(long)]
    pub beta1: Option<f64>,
    /// AdamW's second coefficient.
    #[arg(long)]
    pub beta2: Option<f64>,
    /// The largest norm of the gradients; 0 is none.
    #[arg(long)]
    pub grad_clip: Option<f64>,
    /// After the embeddings, of attention's probabilities (but by Burn's operation), after its projection and after the MLP.
    #[arg(long)]
    pub dropout: Option<f64>,
    /// Same seed, same run.
    #[arg(long)]
    pub seed: Option<u32>,

    /// Steps between two evaluations, each with a checkpoint.
    #[arg(long)]
    pub eval_interval: Option<usize>,
    /// Batches of validation text in an evaluation, the last one too.
    #[arg(long)]
    pub eval_batches: Option<usize>,
    /// Tokens that the model writes at the end.
    #[arg(long)]
    pub sample_tokens: Option<usize>,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionKind {
    /// This repository's.
    Flash,
    /// Burn's own operation.
    Burn,
    /// Matrix products with a mask and a softmax between them.
    Composed,
}

/// What matrix products and attention are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// Single precision.
    F32,
    /// Half precision with the range of f32.
    Bf16,
    /// Half precision with more digits; its loss is scaled.
    F16,
}

impl Dtype {
    /// Burn's name for it.
    pub fn float(self) -> FloatDType {
        match self {
            Dtype::F32 => FloatDType::F32,
            Dtype::Bf16 => FloatDType::BF16,
            Dtype::F16 => FloatDType::F16,
        }
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        }
    }
}

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Blocks of attention and MLP.
    pub layers: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Tokens that the model sees.
    pub context: usize,
    /// Tokens that there are.
    pub vocabulary: usize,
}

/// Everything that decides what a run computes. The flags have the same names, and say more.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub device: String,
    /// Empty: that one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<usize>,
    /// None: the run's own copy of the sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    pub tokenizer: Tokenizer,
    /// Where the model came from; a checkpoint has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
    pub attention: AttentionKind,
    pub dtype: Dtype,
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub context: usize,
    #[serde(default)]
    pub alibi: bool,
    #[serde(default)]
    pub sinks: bool,
    #[serde(default)]
    pub window: usize,
    #[serde(default)]
    pub pack: bool,
    /// Tokens that there are: the tokenizer's, or as many as the weights know.
    pub vocabulary: usize,
    pub batch: usize,
    pub grad_accum: usize,
    pub checkpointing: bool,
    pub steps: usize,
    pub lr: f64,
    pub min_lr: f64,
    pub warmup: usize,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub grad_clip: f64,
    pub dropout: f64,
    pub seed: u32,
    pub eval_interval: usize,
    pub eval_batches: usize,
    pub sample_tokens: usize,
}

/// Does something with each field that is a flag of the same name.
macro_rules! for_each_flag {
    ($do:ident) => {
        $do!(
            tokenizer,
            attention,
            dtype,
            layers,
            heads,
            width,
            context,
            alibi,
            sinks,
            window,
            pack,
            batch,
            grad_accum,
            checkpointing,
            steps,
            lr,
            min_lr,
            warmup,
            weight_decay,
            beta1,
            beta2,
            grad_clip,
            dropout,
            seed,
            eval_interval,
            eval_batches,
            sample_tokens
        )
    };
}

impl Config {
    /// A new run: what was asked for, and otherwise what suits the device, or the weights of this shape.
    ///
    /// # Errors
    ///
    /// For the first flag that is out of range, or says otherwise than the weights.
    pub fn new(args: &Args, found: &Found, weights: Option<ModelShape>) -> Result<Self, Error> {
        let mut config = Self::suited_to(found);
        if let Some(shape) = weights {
            config = config.suited_to_weights(shape);
        }
        config.weights.clone_from(&args.weights);
        config.device = args.device.clone().unwrap_or_else(|| "auto".to_string());
        config.devices = args.devices.clone().unwrap_or_default();
        config.data.clone_from(&args.data);
        macro_rules! set {
            ($($field:ident),*) => { $(if let Some(value) = args.$field { config.$field = value; })* };
        }
        for_each_flag!(set);
        match weights {
            Some(shape) => config.check_weights(shape)?,
            None => config.vocabulary = config.tokenizer.vocabulary(),
        }
        if args.min_lr.is_none() {
            config.min_lr = config.lr / 10.0;
        }
        if args.warmup.is_none() {
            config.warmup = config.warmup.min(config.steps / 10);
        }
        config.validate()?;
        Ok(config)
    }

    /// The run of a checkpoint goes on as it began: flags may repeat what was, and choose a device or find the text again.
    ///
    /// # Errors
    ///
    /// For the first flag that says otherwise than the run.
    pub fn resume(mut self, args: &Args, run: &Path) -> Result<Self, Error> {
        macro_rules! compare {
            ($($field:ident),*) => { $(
                if let Some(given) = args.$field && given != self.$field {
                    return Err(Error::Contradiction {
                        flag: flag(stringify!($field)),
                        given: format!("{given:?}").to_lowercase(),
                        saved: format!("{:?}", self.$field).to_lowercase(),
                        run: run.to_path_buf(),
                    });
                }
            )* };
        }
        for_each_flag!(compare);
        if let Some(device) = &args.device {
            self.device.clone_from(device);
        }
        if let Some(devices) = &args.devices {
            self.devices.clone_from(devices);
            self.validate()?;
        }
        if args.data.is_some() {
            self.data.clone_from(&args.data);
        }
        Ok(self)
    }

    /// nanoGPT's character model on a GPU, and smaller ones where that would take all day.
    fn suited_to(found: &Found) -> Self {
        let gpu = Self {
            device: String::new(),
            devices: Vec::new(),
            data: None,
            tokenizer: Tokenizer::Bytes,
            weights: None,
            attention: AttentionKind::Flash,
            dtype: Dtype::F32,
            layers: 6,
            heads: 6,
            width: 384,
            context: 256,
            alibi: false,
            sinks: false,
            window: 0,
            pack: false,
            vocabulary: Tokenizer::Bytes.vocabulary(),
            batch: 64,
            grad_accum: 1,
            checkpointing: false,
            steps: 5000,
            lr: 1e-3,
            min_lr: 1e-4,
            warmup: 100,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            grad_clip: 1.0,
            dropout: 0.2,
            seed: 1337,
            eval_interval: 250,
            eval_batches: 200,
            sample_tokens: 500,
        };
        match found.strength {
            Strength::Discrete => gpu,
            Strength::Integrated => Self {
                layers: 4,
                heads: 4,
                width: 256,
                context: 128,
                batch: 32,
                steps: 2000,
                dropout: 0.0,
                eval_batches: 50,
                ..gpu
            },
            Strength::Cpu => Self {
                layers: 4,
                heads: 4,
                width: 128,
                context: 64,
                batch: 12,
                steps: 300,
                warmup: 30,
                dropout: 0.0,
                eval_interval: 50,
                eval_batches: 20,
                sample_tokens: 300,
                ..gpu
            },
            Strength::Software => Self {
                layers: 2,
                heads: 2,
                width: 64,
                context: 32,
                batch: 8,
                steps: 100,
                warmup: 10,
                dropout: 0.0,
                eval_interval: 50,
                eval_batches: 5,
                sample_tokens: 100,
                ..gpu
            },
        }
    }

    /// Weights that have learned are to be changed little, and are large: nanoGPT's finetuning, in fewer steps.
    fn suited_to_weights(self, shape: ModelShape) -> Self {
        let ModelShape { layers, heads, width, context, vocabulary } = shape;
        Self {
            tokenizer: Tokenizer::Gpt2,
            layers,
            heads,
            width,
            context,
            vocabulary,
            batch: 1,
            grad_accum: 32,
            steps: 20,
            lr: 3e-5,
            min_lr: 3e-6,
            warmup: 2,
            dropout: 0.0,
            eval_interval: 5,
            eval_batches: 40,
            ..self
        }
    }

    /// A model has its weights' sizes, but may see fewer tokens.
    fn check_weights(&self, shape: ModelShape) -> Result<(), Error> {
        let differs = [
            ("layers", self.layers, shape.layers),
            ("heads", self.heads, shape.heads),
            ("width", self.width, shape.width),
        ];
        if let Some((flag, given, weights)) = differs.into_iter().find(|(_, given, weights)| given != weights) {
            return Err(Error::NotTheWeights { flag, given, weights });
        }
        if self.context > shape.context {
            return Err(Error::NotTheWeights { flag: "context", given: self.context, weights: shape.context });
        }
        let tokens = self.tokenizer.vocabulary();
        match tokens > shape.vocabulary {
            true => Err(Error::Vocabulary { tokens, weights: shape.vocabulary }),
            false => Ok(()),
        }
    }

    fn validate(&self) -> Result<(), Error> {
        let check = |ok: bool, field: &'static str, value: &dyn Debug, rule: &'static str| match ok {
            true => Ok(()),
            false => Err(Error::Config { flag: flag(field), value: format!("{value:?}"), rule }),
        };
        for (field, value) in [
            ("layers", self.layers),
            ("heads", self.heads),
            ("width", self.width),
            ("context", self.context),
            ("batch", self.batch),
            ("grad_accum", self.grad_accum),
            ("eval_interval", self.eval_interval),
            ("eval_batches", self.eval_batches),
        ] {
            check(value > 0, field, &value, "it must be at least 1")?;
        }
        check(self.width.is_multiple_of(self.heads), "heads", &self.heads, "it must divide --width")?;
        let devices = self.devices.len().max(1);
        check(
            self.batch.is_multiple_of(devices),
            "batch",
            &self.batch,
            "it must be a multiple of the number of --devices",
        )?;
        let (flash, new) = (self.attention == AttentionKind::Flash, self.weights.is_none());
        check(flash || !self.alibi, "alibi", &self.alibi, "it takes --attention flash")?;
        check(flash || !self.sinks, "sinks", &self.sinks, "it takes --attention flash")?;
        check(flash || self.window == 0, "window", &self.window, "it takes --attention flash")?;
        check(flash || !self.pack, "pack", &self.pack, "it takes --attention flash")?;
        check(new || !self.alibi, "alibi", &self.alibi, "GPT-2's weights have embeddings of positions")?;
        check(new || !self.sinks, "sinks", &self.sinks, "GPT-2's weights have none")?;
        // Random numbers on all devices come from one state: a block's dropout would not be the same twice.
        let repeats = !self.checkpointing || devices == 1 || self.dropout == 0.0;
        check(repeats, "dropout", &self.dropout, "it must be 0 with --checkpointing on several devices")?;
        for (field, value) in [("dropout", self.dropout), ("beta1", self.beta1), ("beta2", self.beta2)] {
            check((0.0..1.0).contains(&value), field, &value, "it must be from 0 to below 1")?;
        }
        for (field, value) in
            [("min_lr", self.min_lr), ("weight_decay", self.weight_decay), ("grad_clip", self.grad_clip)]
        {
            check(value.is_finite() && value >= 0.0, field, &value, "it must be a finite number, 0 or above")?;
        }
        check(self.lr.is_finite() && self.lr > 0.0, "lr", &self.lr, "it must be a finite number above 0")?;
        check(self.min_lr <= self.lr, "min_lr", &self.min_lr, "it must not be above --lr")
    }

    /// Up in a line, then down in a half cosine.
    pub fn learning_rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let done = (step - self.warmup) as f64 / self.steps.saturating_sub(self.warmup).max(1) as f64;
        self.min_lr + 0.5 * (1.0 + (std::f64::consts::PI * done).cos()) * (self.lr - self.min_lr)
    }
}

/// A field's name as a flag.
fn flag(field: &'static str) -> &'static str {
    match field {
        "grad_accum" => "grad-accum",
        "min_lr" => "min-lr",
        "weight_decay" => "weight-decay",
        "grad_clip" => "grad-clip",
        "eval_interval" => "eval-interval",
        "eval_batches" => "eval-batches",
        "sample_tokens" => "sample-tokens",
        field => field,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::{Args, Config};
    use crate::device::choose;

    #[test]
    fn what_several_devices_cannot_do_is_said() {
        let found = choose("flex").unwrap();
        let new = |args: Args| Config::new(&args, &found, None).map(|config| config.devices.len());
        let two = Args { devices: Some(vec![0, 1]), batch: Some(4), ..Args::default() };
        let says = |args: Args, expected: &str| {
            let error = new(args).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} does not say: {expected}");
        };
        assert_eq!(new(two.clone()).unwrap(), 2);
        says(Args { batch: Some(3), ..two.clone() }, "--batch is 3; it must be a multiple of the number of --devices");
        let blocks = Args { checkpointing: Some(true), ..two };
        assert_eq!(new(blocks.clone()).unwrap(), 2);
        says(
            Args { dropout: Some(0.1), ..blocks },
            "--dropout is 0.1; it must be 0 with --checkpointing on several devices",
        );
    }
}
