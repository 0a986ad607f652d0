//! Speed and memory of a model's shape, with random weights.

use crate::config::ModelConfig;
use crate::documents::{self, RowBatcher};
use crate::error::Error;
use crate::loss::cross_entropy;
use burn::data::dataloader::batcher::Batcher;
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_attention::{FlashAttentionOptions, FlashDecoder};
use example_support::memory::{Peak, peak};
use serde::Serialize;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::time::Instant;

/// Measures the speed of a model's shape, with random weights.
#[derive(clap::Args, Clone, Debug)]
pub struct Bench {
    /// The config.json of the model.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Tokens of a sequence; in decode, of each sequence's cache before the first step.
    #[arg(long, default_value_t = 1024)]
    pub context: usize,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// What a step is.
    #[arg(long, default_value = "train")]
    pub mode: Mode,
    /// Recomputes in the backward what limits memory.
    #[arg(long)]
    pub checkpointing: bool,
    /// Positions whose logits exist at a time in training.
    #[arg(long, default_value_t = 1024)]
    pub chunk: usize,
    /// Steps before the first that counts.
    #[arg(long, default_value_t = 3)]
    pub warmup: usize,
    /// Steps that count.
    #[arg(long, default_value_t = 10)]
    pub steps: usize,
    /// A file to which the result is appended.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
}

/// What is measured.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forward, backward and AdamW of all weights.
    Train,
    /// One token of each sequence over the cache.
    Decode,
}

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Tokens of all sequences in the median step.
    pub tokens_per_second: f64,
    /// Peak memory of one more step, if it can be measured.
    pub peak: Option<Peak>,
}

/// A result in a file, whose columns are those of `benches/llama_peer.py`.
#[derive(Serialize)]
struct Row {
    implementation: &'static str,
    mode: String,
    context: usize,
    batch: usize,
    checkpointing: bool,
    tokens_per_second: f64,
    peak_gib: Option<f64>,
}

impl Bench {
    /// Appends a result to the file of `--csv`, if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written.
    pub fn append(&self, measured: &Measured) -> Result<(), Error> {
        let Some(path) = &self.csv else { return Ok(()) };
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path))?;
        let empty = file.metadata().map_err(Error::io(path))?.len() == 0;
        let mut table = csv::WriterBuilder::new().has_headers(empty).from_writer(file);
        let row = Row {
            implementation: "ours",
            mode: format!("{:?}", self.mode).to_lowercase(),
            context: self.context,
            batch: self.batch,
            checkpointing: self.checkpointing,
            tokens_per_second: measured.tokens_per_second,
            peak_gib: measured.peak.map(|peak| peak.bytes as f64 / (1u64 << 30) as f64),
        };
        let written = table.serialize(row).map_err(std::io::Error::from).and_then(|()| table.flush());
        written.map_err(Error::io(path))
    }

    /// Runs the steps.
    ///
    /// # Errors
    ///
    /// Those of [`ModelConfig::read`]; [`Error::Flag`] for sizes of 0; [`Error::Attention`] for a context that the model does not have;
    /// [`Error::Execution`] if the device fails.
    pub fn run(&self, device: &Device, dtype: DType) -> Result<Measured, Error> {
        let sizes = [("context", self.context), ("batch", self.batch), ("chunk", self.chunk), ("steps", self.steps)];
        if let Some((flag, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(Error::Flag { flag, value: "0".to_string(), why: "it must be at least 1".to_string() });
        }
        let config = ModelConfig::read(&self.config)?;
        let device = match (self.mode, self.checkpointing) {
            (Mode::Decode, _) => device.clone(),
            (Mode::Train, false) => device.clone().autodiff(),
            (Mode::Train, true) => device.clone().autodiff().gradient_checkpointing(),
        };
        let model = config.decoder.try_init(&device)?.map(&mut Cast(dtype));
        let ((mut times, peak), tokens) = match self.mode {
            Mode::Train => (self.train(model, &device)?, self.batch * self.context),
            Mode::Decode => (self.decode(&model, &device)?, self.batch),
        };
        times.sort_by(f64::total_cmp);
        Ok(Measured { tokens_per_second: tokens as f64 / times[times.len() / 2], peak })
    }

    fn train(&self, model: FlashDecoder, device: &Device) -> Result<Steps, Error> {
        let row = documents::Row { tokens: (0..self.context as u32).map(|at| at % 97).collect(), starts: vec![0] };
        let batch = RowBatcher { context: self.context }.batch(vec![row; self.batch], device);
        let mut optimizer = ModuleOptimizer::from(AdamWConfig::new().build());
        self.times(device, model, |model| {
            let hidden = model.try_hidden(batch.tokens.clone(), &FlashAttentionOptions::new())?;
            let loss = cross_entropy(&model, hidden, &batch.targets, self.chunk);
            let gradients = GradientsParams::from_grads(loss.objective.backward(), &model);
            let model = optimizer.step(1e-5, model, gradients);
            // What has failed on the device, as an allocation, shows where a result is read.
            let updated = model.embedding.weight.val().inner().slice([0..1, 0..1]).reshape([1]).cast(DType::F32);
            for value in [loss.value, updated] {
                let value = value.try_into_scalar::<f32>().map_err(Error::execution)?;
                if !value.is_finite() {
                    return Err(Error::execution(format!("a step gave {value}")));
                }
            }
            Ok(model)
        })
    }

    fn decode(&self, model: &FlashDecoder, device: &Device) -> Result<Steps, Error> {
        let mut cache = model.new_cache(self.batch, self.context + self.warmup + self.steps + 1)?;
        let options = FlashAttentionOptions::new();
        for begin in (0..self.context).step_by(512) {
            let new = Tensor::<2, Int>::zeros([self.batch, 512.min(self.context - begin)], device);
            model.try_hidden_step(new, &mut cache.layers, &options)?;
        }
        let token = Tensor::<2, Int>::zeros([self.batch, 1], device);
        self.times(device, cache, |mut cache| {
            // The token is read back, as it is where text is generated.
            let logits = model.try_forward_step(token.clone(), &mut cache, &options)?;
            logits.argmax(2).try_into_data().map(|_| cache).map_err(Error::execution)
        })
    }

    /// Times the steps from one state to the next, and observes one more.
    fn times<S>(
        &self,
        device: &Device,
        mut state: S,
        mut step: impl FnMut(S) -> Result<S, Error>,
    ) -> Result<Steps, Error> {
        let mut step = |state| {
            let begun = Instant::now();
            let state = step(state)?;
            device.sync().map_err(Error::execution)?;
            Ok::<_, Error>((state, begun.elapsed().as_secs_f64()))
        };
        device.sync().map_err(Error::execution)?;
        let mut times = Vec::new();
        for nth in 0..self.warmup + self.steps {
            let (next, time) = step(state)?;
            times.extend((nth >= self.warmup).then_some(time));
            state = next;
        }
        // Observing takes time.
        let mut last = Ok(());
        let peak = peak(device, || last = step(state).map(drop));
        last.map(|()| (times, peak))
    }
}

/// Seconds of the steps that count, and the peak memory of one more.
type Steps = (Vec<f64>, Option<Peak>);

/// Casts parameters to an element type.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        Param::from_tensor(param.into_value().detach().cast(self.0).detach())
    }
}
