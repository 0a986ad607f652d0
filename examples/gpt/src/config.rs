//! Configuration of a run: flags on the command line, combined with defaults and saved with the run.

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

/// Implementation of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionKind {
    /// This repository's flash attention.
    Flash,
    /// Burn's own operation.
    Burn,
    /// Matrix products, with a mask and a softmax between them.
    Composed,
}

impl AttentionKind {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            AttentionKind::Flash => "flash",
            AttentionKind::Burn => "burn",
            AttentionKind::Composed => "composed",
        }
    }
}

/// Element type of matrix products and attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// Single precision.
    F32,
    /// Half precision with the range of f32.
    Bf16,
    /// Half precision with more digits and a smaller range; the loss is scaled.
    F16,
}

impl Dtype {
    /// The dtype in Burn.
    pub fn float(self) -> FloatDType {
        match self {
            Dtype::F32 => FloatDType::F32,
            Dtype::Bf16 => FloatDType::BF16,
            Dtype::F16 => FloatDType::F16,
        }
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        }
    }
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Context length in tokens.
    pub context: usize,
    /// Number of different tokens.
    pub vocabulary: usize,
}

/// Everything that determines what a run computes. Each field is a flag of the same name.
///
/// Saved with a run and in its checkpoints. A new field needs a default for files that were written before.
#[derive(clap::Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th [default: auto].
    #[arg(long)]
    pub device: String,
    /// Train on several devices of this kind, given by their numbers. Each takes an equal part of every batch.
    #[arg(long, value_delimiter = ',', value_name = "N,N,…")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<usize>,
    /// A UTF-8 text to train on [default: the sources of this workspace].
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Tokenizer [default: bytes; with --weights gpt2].
    #[arg(long)]
    pub tokenizer: Tokenizer,
    /// GPT-2's weights to start from: a safetensors file in Hugging Face's layout, which determines the model's sizes.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,

    /// Implementation of attention.
    #[arg(long)]
    pub attention: AttentionKind,
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
    /// Context length in tokens.
    #[arg(long, value_parser = count())]
    pub context: usize,
    /// Encode positions by ALiBi slopes instead of learned embeddings.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    #[serde(default)]
    pub alibi: bool,
    /// Give each head a learned sink, so that it can attend to nothing.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    #[serde(default)]
    pub sinks: bool,
    /// Number of tokens that each token sees, including itself; 0 means all before it.
    #[arg(long)]
    #[serde(default)]
    pub window: usize,

    /// Fill each row of a batch with whole documents that do not see each other, instead of a window of running text.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    #[serde(default)]
    pub pack: bool,
    /// Number of different tokens: the tokenizer's, or the weights'. Not a flag.
    #[arg(skip)]
    pub vocabulary: usize,

    /// Windows of text in a batch.
    #[arg(long, value_parser = count())]
    pub batch: usize,
    /// Number of batches whose gradients are accumulated for one step.
    #[arg(long, value_parser = count())]
    pub grad_accum: usize,
    /// Keep only the input of each block, and compute the block again in the backward: less memory, more time.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = ArgAction::Set)]
    pub checkpointing: bool,
    /// Number of updates of the model.
    #[arg(long)]
    pub steps: usize,
    /// Highest learning rate.
    #[arg(long, value_parser = positive)]
    pub lr: f64,
    /// Learning rate at the end [default: a tenth of --lr].
    #[arg(long, value_parser = non_negative)]
    pub min_lr: f64,
    /// Number of steps in which the learning rate rises.
    #[arg(long)]
    pub warmup: usize,
    /// Weight decay of matrices; embeddings, norms and biases do not decay.
    #[arg(long, value_parser = non_negative)]
    pub weight_decay: f64,
    /// Coefficient of AdamW's first moment.
    #[arg(long, value_parser = fraction)]
    pub beta1: f64,
    /// Coefficient of AdamW's second moment.
    #[arg(long, value_parser = fraction)]
    pub beta2: f64,
    /// Maximum norm of the gradients; 0 turns clipping off.
    #[arg(long, value_parser = non_negative)]
    pub grad_clip: f64,
    /// Dropout rate after the embeddings, of attention probabilities (except with Burn's operation), after attention's projection and after
    /// the MLP.
    #[arg(long, value_parser = fraction)]
    pub dropout: f64,
    /// Random seed; the same seed gives the same run.
    #[arg(long)]
    pub seed: u32,

    /// Number of steps between evaluations, each of which saves a checkpoint.
    #[arg(long, value_parser = count())]
    pub eval_interval: usize,
    /// Number of validation batches in an evaluation, including the last one.
    #[arg(long, value_parser = count())]
    pub eval_batches: usize,
    /// Number of tokens to generate at the end.
    #[arg(long)]
    pub sample_tokens: usize,
}

/// Fields that may differ when a run is resumed: where it computes, and where its text is.
const FREE: [&str; 3] = ["device", "devices", "data"];

impl Config {
    /// A new run: the given flags, and otherwise the defaults for the device, or for weights of this shape.
    ///
    /// # Errors
    ///
    /// For the first flag that does not fit another flag or the weights.
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

    /// Sets the vocabulary of the tokenizer, or of the weights, and checks the configuration.
    ///
    /// # Errors
    ///
    /// For the first field that does not fit another field or the weights. clap has checked each flag by itself.
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

    /// Configuration of a resumed run, which is the saved one. The flags, from which `asked` was made, may repeat it, choose a device, or
    /// give the text's new location.
    ///
    /// # Errors
    ///
    /// For the first other field in which `asked` differs.
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

    /// Values of the fields by name. Fields that are absent in the file are absent here.
    fn fields(&self) -> toml::Table {
        toml::Table::try_from(self).expect("a configuration is a table of plain values")
    }

    /// Checks that the model has the sizes of its weights. Its context may be shorter.
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
        check(flash || !self.alibi, "alibi", &self.alibi, "it needs --attention flash")?;
        check(flash || !self.sinks, "sinks", &self.sinks, "it needs --attention flash")?;
        check(flash || self.window == 0, "window", &self.window, "it needs --attention flash")?;
        check(flash || !self.pack, "pack", &self.pack, "it needs --attention flash")?;
        check(
            new || !self.alibi,
            "alibi",
            &self.alibi,
            "it cannot be used with --weights, which have position embeddings",
        )?;
        check(new || !self.sinks, "sinks", &self.sinks, "it cannot be used with --weights, which have no sinks")?;
        // All devices share one random state, so the dropout of a recomputed block would differ.
        let repeats = !self.checkpointing || devices == 1 || self.dropout == 0.0;
        check(repeats, "dropout", &self.dropout, "it must be 0 with --checkpointing on several devices")?;
        check(self.min_lr <= self.lr, "min-lr", &self.min_lr, "it must not be above --lr")
    }

    /// Rises linearly, then falls as half a cosine.
    pub fn learning_rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let done = (step - self.warmup) as f64 / self.steps.saturating_sub(self.warmup).max(1) as f64;
        self.min_lr + 0.5 * (1.0 + (std::f64::consts::PI * done).cos()) * (self.lr - self.min_lr)
    }
}

/// A value as given on the command line.
fn in_words(value: Option<&toml::Value>) -> String {
    match value {
        None => "none".to_string(),
        Some(toml::Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
