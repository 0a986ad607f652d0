//! The model and the text as burn-train takes them.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::transform::{SamplerDataset, SamplerDatasetOptions, SelectionDataset, WindowsDataset};
use burn::data::dataset::{Dataset, InMemDataset};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_train::{InferenceStep, SequenceOutput, TrainOutput, TrainStep};
use gpt::config::Config;
use gpt::data::Text;
use gpt::model::Gpt;
use std::sync::Arc;

/// The GPT. It is wrapped because Rust lets no crate implement another's traits for a third one's type.
#[derive(Module, Debug)]
pub struct LanguageModel {
    gpt: Gpt,
}

impl LanguageModel {
    /// The model as it is.
    pub fn new(gpt: Gpt) -> Self {
        Self { gpt }
    }

    /// What metrics are computed from: the loss, the logits and the tokens that were to be predicted.
    fn predict(&self, batch: Batch) -> SequenceOutput {
        let logits = self.gpt.forward(batch.inputs);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone().flatten(0, 1), batch.targets.clone().flatten(0, 1));
        SequenceOutput::new(loss, logits, None, batch.targets)
    }
}

impl TrainStep for LanguageModel {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> TrainOutput<SequenceOutput> {
        let output = self.predict(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for LanguageModel {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> SequenceOutput {
        self.predict(batch)
    }
}

/// Windows of text and the tokens that follow each token, both `[batch, context]`.
#[derive(Clone, Debug)]
pub struct Batch {
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
}

/// Makes batches of windows of one token more than the context.
struct WindowBatcher {
    context: usize,
}

impl Batcher<Vec<u32>, Batch> for WindowBatcher {
    fn batch(&self, windows: Vec<Vec<u32>>, device: &Device) -> Batch {
        let shape = [windows.len(), self.context + 1];
        let tokens: Vec<i32> = windows.into_iter().flatten().map(|token| token as i32).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, shape), device);
        Batch { inputs: tokens.clone().narrow(1, 0, self.context), targets: tokens.narrow(1, 1, self.context) }
    }
}

/// Training on random windows, `eval_interval` batches an epoch; validation on `eval_batches` batches of windows that are
/// spread over the text, the same ones in each epoch.
pub fn loaders(text: &Text, config: &Config, seed: u64) -> (Arc<dyn DataLoader<Batch>>, Arc<dyn DataLoader<Batch>>) {
    let windows = |tokens: &[u32]| WindowsDataset::new(InMemDataset::new(tokens.to_vec()), config.context + 1);

    let options = SamplerDatasetOptions::from(config.eval_interval * config.batch).with_seed(seed);
    let train = SamplerDataset::new(windows(text.train()), options);

    let validation = windows(text.validation());
    let (all, chosen) = (validation.len(), config.eval_batches * config.batch);
    let spread = (0..chosen).map(|index| index * all / chosen).collect();
    let validation = SelectionDataset::from_indices_checked(validation, spread);

    (loader(train, config), loader(validation, config))
}

fn loader(windows: impl Dataset<Vec<u32>> + 'static, config: &Config) -> Arc<dyn DataLoader<Batch>> {
    // The worker makes the next batch during the step.
    DataLoaderBuilder::new(WindowBatcher { context: config.context })
        .batch_size(config.batch)
        .num_workers(1)
        .build(windows)
}
