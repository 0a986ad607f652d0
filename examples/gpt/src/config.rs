//! What a run is: flags on the command line, resolved into a configuration that is kept with the run.

mod defaults;

use crate::device::Found;
use crate::error::Error;
use crate::flags::{Given, count, fraction, non_negative, positive};
use crate::tokenizer::Tokenizer;
use burn::tensor::FloatDType;
use clap::{ArgAction, ValueEnum};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::{Path, PathBuf};

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

/// Everything that decides what a run computes, each field a flag of the same name.
///
/// Kept with a run and in its checkpoints: a field that is added has a default for files that were written before.
#[derive(clap::Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th [default: auto].
    #[arg(long)]
    pub device: String,
    /// Train on several devices of that kind, by their numbers: each takes an equal part of every batch.
    #[arg(long, value_delimiter = ',', value_name = "N,N,…")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<usize>,
    /// A UTF-8 text to learn [default: the sources of this workspace].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// How text becomes tokens [default: bytes; with --weights gpt2].
    #[arg(long)]
    pub tokenizer: Tokenizer,
    /// GPT-2's weights to begin with, a safetensors file in Hugging Face's layout, whose sizes the model takes.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,

    /// How attention is computed.
    #[arg(long)]
    pub attention: AttentionKind,
    /// What matrix products and attention are computed in; all else is f32.
    #[arg(long)]
    pub dtype: Dtype,
    /// Blocks of attention and MLP.
    #[arg(long, value_parser = count())]
    pub layers: usize,
    /// Heads of attention.
    #[arg(long, value_parser = count())]
    pub heads: usize,
    /// Channels of the residual stream.
    #[arg(long, value_parser = count())]
    pub width: usize,
    /// Tokens that the model sees.
    #[arg(long, value_parser = count())]
    pub context: usize,
    /// Tell positions by ALiBi's slopes, in place of learned embeddings.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    #[serde(default)]
    pub alibi: bool,
    /// Give each head a learned sink, so that it may attend to nothing.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    #[serde(default)]
    pub sinks: bool,
    /// Tokens that each token sees, itself counted; 0 is all before it.
    #[arg(long)]
    #[serde(default)]
    pub window: usize,

    /// Fill each row of a batch with whole documents, which see nothing of each other, in place of a window of running text.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    #[serde(default)]
    pub pack: bool,
    /// Tokens that there are: the tokenizer's, or as many as the weights know. No flag.
    #[arg(skip)]
    pub vocabulary: usize,

    /// Windows of text in a batch.
    #[arg(long, value_parser = count())]
    pub batch: usize,
    /// Batches whose gradients make one step.
    #[arg(long, value_parser = count())]
    pub grad_accum: usize,
    /// Keep only what enters each block, and compute the block again in the backward pass: less memory, more time.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    pub checkpointing: bool,
    /// Updates of the model.
    #[arg(long)]
    pub steps: usize,
    /// The highest learning rate.
    #[arg(long, value_parser = positive)]
    pub lr: f64,
    /// The learning rate at the end [default: a tenth of --lr].
    #[arg(long, value_parser = non_negative)]
    pub min_lr: f64,
    /// Steps in which the learning rate rises.
    #[arg(long)]
    pub warmup: usize,
    /// Of matrices; embeddings, norms and biases do not decay.
    #[arg(long, value_parser = non_negative)]
    pub weight_decay: f64,
    /// AdamW's first coefficient.
    #[arg(long, value_parser = fraction)]
    pub beta1: f64,
    /// AdamW's second coefficient.
    #[arg(long, value_parser = fraction)]
    pub beta2: f64,
    /// The largest norm of the gradients; 0 is none.
    #[arg(long, value_parser = non_negative)]
    pub grad_clip: f64,
    /// After the embeddings, of attention's probabilities (but by Burn's operation), after its projection and after the MLP.
    #[arg(long, value_parser = fraction)]
    pub dropout: f64,
    /// Same seed, same run.
    #[arg(long)]
    pub seed: u32,

    /// Steps between two evaluations, each with a checkpoint.
    #[arg(long, value_parser = count())]
    pub eval_interval: usize,
    /// Batches of validation text in an evaluation, the last one too.
    #[arg(long, value_parser = count())]
    pub eval_batches: usize,
    /// Tokens that the model writes at the end.
    #[arg(long)]
    pub sample_tokens: usize,
}

/// Fields in which a run that goes on may differ from what it was: where it computes, and where its text is.
const FREE: [&str; 3] = ["device", "devices", "data"];

impl Config {
    /// A new run: the given flags, and otherwise what suits the device, or the weights of this shape.
    ///
    /// # Errors
    ///
    /// For the first flag that does not fit another one or the weights.
    pub fn new(given: &Given<Self>, found: &Found, weights: Option<ModelShape>) -> Result<Self, Error> {
        let suited = Self::suited_to(found);
        let mut config = given.over(weights.map_or(suited.clone(), |shape| suited.suited_to_weights(shape)));
        if !given.has("min_lr") {
            config.min_lr = config.lr / 10.0;
        }
        if !given.has("warmup") {
            config.warmup = config.warmup.min(config.steps / 10);
        }
        config.checked(weights)
    }

    /// With the vocabulary of the tokenizer, or of the weights.
    ///
    /// # Errors
    ///
    /// For the first field that does not fit another one or the weights. Each flag by itself is checked by clap.
    pub fn checked(mut self, weights: Option<ModelShape>) -> Result<Self, Error> {
        match weights {
            Some(shape) => {
                self.check_weights(shape)?;
                self.vocabulary = shape.vocabulary;
            }
            None => self.vocabulary = self.tokenizer.vocabulary(),
        }
        self.validate()?;
        Ok(self)
    }

    /// The run of a checkpoint goes on as it began: flags, which make `asked` of it, may repeat what was, and choose a device
    /// or find the text again.
    ///
    /// # Errors
    ///
    /// For the first field in which `asked` is another run.
    pub fn resume(&self, asked: Self, run: &Path) -> Result<Self, Error> {
        let (saved, given) = (self.fields(), asked.fields());
        let differs = |(field, _): &(&String, _)| saved.get(*field) != given.get(*field);
        if let Some((field, value)) = given.iter().find(|field| !FREE.contains(&field.0.as_str()) && differs(field)) {
            return Err(Error::Contradiction {
                flag: field.replace('_', "-"),
                given: in_words(Some(value)),
                saved: in_words(saved.get(field)),
                run: run.to_path_buf(),
            });
        }
        asked.validate()?;
        Ok(asked)
    }

    /// Each field's value by its name. What is absent in the file is absent here.
    fn fields(&self) -> toml::Table {
        toml::Table::try_from(self).expect("a configuration is a table of plain values")
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
        let check = |ok: bool, flag: &'static str, value: &dyn Debug, rule: &'static str| match ok {
            true => Ok(()),
            false => Err(Error::Config { flag, value: format!("{value:?}"), rule }),
        };
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
        check(self.min_lr <= self.lr, "min-lr", &self.min_lr, "it must not be above --lr")
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

/// A value as on the command line.
fn in_words(value: Option<&toml::Value>) -> String {
    match value {
        None => "none".to_string(),
        Some(toml::Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
