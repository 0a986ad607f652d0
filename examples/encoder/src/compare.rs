//! Time and memory of training, before and after.

use crate::data::{Batch, Data};
use crate::packed::Packed;
use crate::padded::Padded;
use crate::train::{Classifier, Sizes, Trainer};
use burn::module::Module;
use burn::tensor::Device;
use example_support::memory::{Peak, peak};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Which of the two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub enum Kind {
    /// burn-nn's encoder on padded batches.
    Padded,
    /// Flash attention on packed batches.
    Packed,
}

/// What is measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The model.
    pub kind: Kind,
    /// Its sizes.
    pub sizes: Sizes,
    /// Texts of a batch.
    pub batch: usize,
    /// Number of steps that count.
    pub steps: u64,
    /// Steps before, which compile and tune.
    pub warmup: u64,
    /// Learning rate.
    pub learning_rate: f64,
}

/// Results of a measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Loss of each step before its update, in nats.
    pub losses: Vec<f32>,
    /// Median time of a step after the warm-up, in seconds.
    pub step: f64,
    /// Tokens of texts in a second, without padding: those of the steps that count, by their total time.
    pub tokens_per_second: f64,
    /// Positions that are computed for each token of a text.
    pub positions_per_token: f64,
    /// Peak memory, if it can be measured.
    pub peak: Option<Peak>,
}

impl Job {
    /// Runs the measurement. Both kinds begin with the same parameters and have the same batches.
    pub fn run(&self, data: &Data, device: &Device) -> Answer {
        device.seed(1);
        let padded = Padded::new(&self.sizes, device);
        match self.kind {
            Kind::Padded => self.measure(padded, data, device, Batch::longest),
            Kind::Packed => {
                let packed = Packed::new(&self.sizes, device).load_record(padded.into_record());
                self.measure(packed, data, device, |_| 0)
            }
        }
    }

    fn measure<C: Classifier>(
        &self,
        model: C,
        data: &Data,
        device: &Device,
        padded_to: impl Fn(&Batch) -> usize,
    ) -> Answer {
        let mut trainer = Trainer::new(model, self.learning_rate, device.clone());
        let (mut losses, mut times) = (Vec::new(), Vec::new());
        let (mut tokens, mut positions) = (0, 0);
        for step in 0..self.warmup + self.steps {
            let batch = data.batch(self.batch, step, false);
            let begun = Instant::now();
            // Reading the loss waits for the step.
            losses.push(trainer.step(&batch).into_scalar::<f32>());
            if step >= self.warmup {
                times.push(begun.elapsed().as_secs_f64());
                tokens += batch.tokens();
                positions += (padded_to(&batch) * self.batch).max(batch.tokens());
            }
        }
        // Of the longest batch, in a step more: measuring takes time.
        let batches = (0..self.steps).map(|step| data.batch(self.batch, step, false));
        let longest = batches.max_by_key(Batch::longest);
        let peak = peak(device, || {
            if let Some(batch) = &longest {
                trainer.step(batch).into_scalar::<f32>();
            }
        });
        let total: f64 = times.iter().sum();
        times.sort_by(f64::total_cmp);
        Answer {
            losses,
            step: times[times.len() / 2],
            tokens_per_second: tokens as f64 / total,
            positions_per_token: positions as f64 / tokens as f64,
            peak,
        }
    }
}
