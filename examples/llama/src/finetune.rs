//! Fine-tuning of adapters with burn-train.

use crate::documents::{Batch, Row, RowBatcher};
use crate::error::Error;
use crate::loss::cross_entropy;
use burn::backend::ExecutionError;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::GradientClipping;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_flash_attention::FlashDecoder;
use burn_train::metric::{Adaptor, ItemLazy, LearningRateMetric, LossInput, LossMetric};
use burn_train::{InferenceStep, Learner, LearningResult, SupervisedTraining, TrainOutput, TrainStep};
use std::path::PathBuf;
use std::sync::Arc;

/// How a model is fine-tuned.
#[derive(clap::Args, Clone, Debug)]
pub struct Finetuning {
    /// Tokens of a row, into which documents are packed.
    #[arg(long, default_value_t = 1024)]
    pub context: usize,
    /// Rows in a batch.
    #[arg(long, default_value_t = 1)]
    pub batch_size: usize,
    /// Passes over the rows, each with a validation.
    #[arg(long, default_value_t = 1)]
    pub epochs: usize,
    /// Highest learning rate. It falls to a tenth along half a cosine.
    #[arg(long, default_value_t = 2e-4)]
    pub learning_rate: f64,
    /// Positions whose logits exist at a time.
    #[arg(long, default_value_t = 1024)]
    pub chunk: usize,
    /// Seed of adapters and of the order of rows.
    #[arg(long, default_value_t = 1337)]
    pub seed: u64,
    /// Recomputes in the backward what limits memory.
    #[arg(long)]
    pub checkpointing: bool,
    /// Where adapters, metrics and logs are written.
    #[arg(long, value_name = "DIR", default_value = "runs/llama")]
    pub out_dir: PathBuf,
}

/// A model in training.
#[derive(Module, Debug)]
struct Trained {
    model: FlashDecoder,
    chunk: usize,
}

/// The loss of a batch.
struct Loss(Tensor<1>);

impl ItemLazy for Loss {
    fn sync(self) -> Result<Self, ExecutionError> {
        self.0.device().flush()?;
        Ok(Loss(self.0.without_autodiff()))
    }
}

impl Adaptor<LossInput> for Loss {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.0.clone())
    }
}

impl Trained {
    /// The value and the objective of a batch.
    fn loss(&self, batch: &Batch) -> crate::loss::ChunkedLoss {
        // A step of burn-train returns no error; `Finetuning::run` has checked what depends on sizes.
        let hidden = self.model.try_hidden(batch.tokens.clone(), &batch.options());
        let hidden = hidden.unwrap_or_else(|error| panic!("{error}"));
        cross_entropy(&self.model, hidden, &batch.targets, self.chunk)
    }
}

impl TrainStep for Trained {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> TrainOutput<Loss> {
        let loss = self.loss(&batch);
        TrainOutput::new(self, loss.objective.backward(), Loss(loss.value))
    }
}

impl InferenceStep for Trained {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        Loss(self.loss(&batch).value)
    }
}

impl Finetuning {
    /// Trains what is not frozen of a model on a device with autodiff, and returns it without autodiff. The last tenth of the rows is for
    /// validation.
    ///
    /// # Errors
    ///
    /// [`Error::Flag`] if there are fewer than two rows; [`Error::Attention`] if the model cannot compute a row; [`Error::Training`] if the
    /// device or the disk fails.
    pub fn run(&self, model: FlashDecoder, rows: Vec<Row>) -> Result<FlashDecoder, Error> {
        if rows.len() < 2 {
            let why = format!("the documents fill {} rows of it, and one is needed for validation", rows.len());
            return Err(Error::Flag { flag: "context", value: self.context.to_string(), why });
        }
        let device = model.embedding.weight.device();
        let first = burn::data::dataloader::batcher::Batcher::batch(&self.batcher(), vec![rows[0].clone()], &device);
        model.valid().try_hidden(first.tokens.clone().inner(), &first.options())?;

        let (train, validation) = rows.split_at(rows.len() - rows.len().div_ceil(10));
        let steps = train.len().div_ceil(self.batch_size) * self.epochs;
        let schedule = CosineAnnealingLrSchedulerConfig::new(self.learning_rate, steps.max(1))
            .with_min_lr(self.learning_rate / 10.0)
            .init()
            .map_err(Error::Training)?;
        let optimizer = ModuleOptimizer::from(AdamWConfig::new().with_weight_decay(0.0).build())
            .with_grad_clipping(GradientClipping::Norm(1.0));
        let learner = Learner::new(Trained { model, chunk: self.chunk }, optimizer, schedule);
        let mut training =
            SupervisedTraining::new(&self.out_dir, self.loader(train, true), self.loader(validation, false))
                .metrics((LossMetric::new(),))
                .metric_train_numeric(LearningRateMetric::new())
                .num_epochs(self.epochs)
                .summary();
        if self.checkpointing {
            training = training.gradient_checkpointing();
        }
        let LearningResult { model, renderer, error, .. } = training.launch(learner);
        // Closes the dashboard, which restores the terminal.
        drop(renderer);
        error.map_or(Ok(model.model), |error| Err(Error::Training(error.to_string())))
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// [`Error::Flag`]
    pub fn check(&self) -> Result<(), Error> {
        let wrong = |flag, value: String, why: String| Err(Error::Flag { flag, value, why });
        for (flag, value, least) in [
            ("context", self.context, 2),
            ("batch-size", self.batch_size, 1),
            ("epochs", self.epochs, 1),
            ("chunk", self.chunk, 1),
        ] {
            if value < least {
                return wrong(flag, value.to_string(), format!("it must be at least {least}"));
            }
        }
        if self.out_dir.join("adapter_config.json").exists() {
            return wrong("out-dir", self.out_dir.display().to_string(), "it already has an adapter".to_string());
        }
        match self.learning_rate > 0.0 && self.learning_rate <= 1.0 {
            true => Ok(()),
            false => {
                wrong("learning-rate", self.learning_rate.to_string(), "it must be above 0 and at most 1".to_string())
            }
        }
    }

    fn batcher(&self) -> RowBatcher {
        RowBatcher { context: self.context }
    }

    fn loader(&self, rows: &[Row], shuffled: bool) -> Arc<dyn DataLoader<Batch>> {
        let builder = DataLoaderBuilder::new(self.batcher()).batch_size(self.batch_size).num_workers(1);
        let builder = if shuffled { builder.shuffle(self.seed) } else { builder };
        builder.build(InMemDataset::new(rows.to_vec()))
    }
}
