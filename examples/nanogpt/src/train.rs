//! Trains a [`Gpt`] on the bytes of a text with burn-train: data, optimizer, schedule, metrics and checkpoints.

use crate::model::{Gpt, GptConfig};
use burn::config::Config;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::transform::{SamplerDataset, SamplerDatasetOptions, SelectionDataset, WindowsDataset};
use burn::data::dataset::{Dataset, InMemDataset};
use burn::grad_clipping::GradientClipping;
use burn::lr_scheduler::composed::ComposedLrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::ParamGroup;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_train::metric::{LearningRateMetric, LossMetric, PerplexityMetric};
use burn_train::{InferenceStep, Learner, LearningResult, SequenceOutput, SupervisedTraining, TrainOutput, TrainStep};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everything that determines what a run computes. Saved with its checkpoints.
#[derive(Config, Debug)]
pub struct TrainConfig {
    /// Sizes of the model.
    pub model: GptConfig,
    /// Path of the text. `None`: the documents of this workspace.
    pub data: Option<PathBuf>,
    /// Windows of text in a batch.
    pub batch_size: usize,
    /// Number of epochs. Each ends with a validation and a checkpoint.
    pub epochs: usize,
    /// Number of batches in an epoch: nanoGPT's `eval_interval`.
    pub epoch_iters: usize,
    /// Number of batches in a validation.
    pub eval_iters: usize,
    /// Number of batches during which the learning rate rises.
    pub warmup_iters: usize,
    /// Highest learning rate. The last one is a tenth of it.
    #[config(default = 1e-3)]
    pub learning_rate: f64,
    /// Seed of weights, batches and dropout.
    #[config(default = 1337)]
    pub seed: u64,
}

impl TrainConfig {
    /// nanoGPT's character model.
    pub fn large() -> Self {
        let model = GptConfig { block_size: 256, vocab_size: 256, n_layer: 6, n_head: 6, n_embd: 384, dropout: 0.2 };
        Self::new(model, 64, 20, 250, 200, 100)
    }

    /// The smaller model that nanoGPT suggests for CPUs, for a minute or two.
    pub fn small() -> Self {
        let model = GptConfig { block_size: 64, vocab_size: 256, n_layer: 4, n_head: 4, n_embd: 128, dropout: 0.0 };
        Self::new(model, 12, 6, 50, 20, 30)
    }

    /// Half a cosine over all batches, times a linear rise over the first ones.
    fn schedule(&self) -> Result<ModuleLrScheduler, String> {
        let cosine = CosineAnnealingLrSchedulerConfig::new(self.learning_rate, self.epochs * self.epoch_iters);
        ComposedLrSchedulerConfig::new()
            .linear(LinearLrSchedulerConfig::new(1.0 / (self.warmup_iters + 1) as f64, 1.0, self.warmup_iters))
            .cosine(cosine.with_min_lr(self.learning_rate / 10.0))
            .init()
    }
}

/// AdamW, without weight decay of biases and norms. Burn clips each parameter's gradient by its own norm.
fn optimizer() -> ModuleOptimizer {
    let adamw = AdamWConfig::new().with_beta_1(0.9).with_beta_2(0.99);
    let clipping = GradientClipping::Norm(1.0);
    let vectors = ParamGroup::from_any_predicates(vec!["bias", "gamma", "beta"]);
    let decayed = ModuleOptimizer::from(adamw.clone().with_weight_decay(0.1).build());
    let vectors_adamw = adamw.with_weight_decay(0.0).build();
    decayed.with_grad_clipping(clipping.clone()).with_group(vectors, vectors_adamw, Some(clipping))
}

/// Windows of text, and the next byte after each byte, both `[batch, block_size]`.
#[derive(Clone, Debug)]
pub struct Batch {
    idx: Tensor<2, Int>,
    targets: Tensor<2, Int>,
}

/// Makes batches of windows that are one byte longer than the context.
struct WindowBatcher {
    block_size: usize,
}

impl Batcher<Vec<u8>, Batch> for WindowBatcher {
    fn batch(&self, windows: Vec<Vec<u8>>, device: &Device) -> Batch {
        let shape = [windows.len(), self.block_size + 1];
        let bytes: Vec<i32> = windows.into_iter().flatten().map(i32::from).collect();
        let bytes = Tensor::<2, Int>::from_data(TensorData::new(bytes, shape), device);
        Batch { idx: bytes.clone().narrow(1, 0, self.block_size), targets: bytes.narrow(1, 1, self.block_size) }
    }
}

/// Loaders for training, on random windows of the first nine tenths of the text, and for validation, on windows spread over the rest.
fn loaders(text: &[u8], config: &TrainConfig, seed: u64) -> [Arc<dyn DataLoader<Batch>>; 2] {
    let (train, validation) = text.split_at(text.len() * 9 / 10);
    let block_size = config.model.block_size;
    let windows = |text: &[u8]| WindowsDataset::new(InMemDataset::new(text.to_vec()), block_size + 1);

    let options = SamplerDatasetOptions::from(config.epoch_iters * config.batch_size).with_seed(seed);
    let train = SamplerDataset::new(windows(train), options);

    let validation = windows(validation);
    let (all, chosen) = (validation.len(), config.eval_iters * config.batch_size);
    let spread = (0..chosen).map(|index| index * all / chosen).collect();
    let validation = SelectionDataset::from_indices_checked(validation, spread);

    fn loader(windows: impl Dataset<Vec<u8>> + 'static, config: &TrainConfig) -> Arc<dyn DataLoader<Batch>> {
        let batcher = WindowBatcher { block_size: config.model.block_size };
        // The worker prepares the next batch during the step.
        DataLoaderBuilder::new(batcher).batch_size(config.batch_size).num_workers(1).build(windows)
    }
    [loader(train, config), loader(validation, config)]
}

impl Gpt {
    fn predict(&self, batch: Batch) -> SequenceOutput {
        let (logits, loss) = self.forward_loss(batch.idx, batch.targets.clone());
        SequenceOutput::new(loss, logits, None, batch.targets)
    }
}

impl TrainStep for Gpt {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> TrainOutput<SequenceOutput> {
        let output = self.predict(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Gpt {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> SequenceOutput {
        self.predict(batch)
    }
}

/// Trains a new model, or continues after the epoch `resume`, and returns the model without autodiff.
///
/// # Errors
///
/// If the device or the disk fails, or the schedule's numbers are out of range.
pub fn train(
    config: &TrainConfig,
    text: &[u8],
    device: &Device,
    out_dir: &Path,
    resume: Option<usize>,
) -> Result<Gpt, Box<dyn Error>> {
    // A resumed run draws different windows.
    let seed = config.seed + resume.unwrap_or(0) as u64;
    let device = device.clone().autodiff();
    device.seed(seed);
    let learner = Learner::new(Gpt::new(&config.model, &device), optimizer(), config.schedule()?);
    let [train, validation] = loaders(text, config, seed);
    let mut training = SupervisedTraining::new(out_dir, train, validation)
        .metrics((LossMetric::new(), PerplexityMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .with_default_checkpointers()
        .num_epochs(config.epochs)
        .summary();
    if let Some(epoch) = resume {
        training = training.checkpoint(epoch);
    }
    let LearningResult { model, renderer, error, .. } = training.launch(learner);
    // Closes the dashboard, which restores the terminal.
    drop(renderer);
    // Mesa compiles pipelines in its own threads: a process that exits meanwhile dies of SIGSEGV.
    let _ = device.sync();
    error.map_or(Ok(model), |error| Err(error.to_string().into()))
}
