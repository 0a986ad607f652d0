//! The training loop.

use crate::checkpoint::{Best, Checkpoint, Header};
use crate::config::Config;
use crate::data::{Stream, Text, rng};
use crate::error::Error;
use crate::losses::{Losses, Row};
use crate::model::Gpt;
use crate::optimizer::AdamW;
use crate::plot::plot;
use crate::replica::{Replica, Team};
use crate::run::Run;
use crate::weights::Weights;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Number of steps after which losses are read from the device.
const READ_LOSSES_EVERY: usize = 20;

/// How training ended.
#[derive(PartialEq)]
pub enum Outcome {
    Finished,
    /// Interrupted by the user, with a checkpoint at this step.
    Interrupted(usize),
}

/// Initial state of a training.
pub enum Start {
    /// Random weights.
    Random,
    /// Weights of GPT-2 or of a model of the same architecture.
    Weights(Weights),
    /// Checkpoint of the same run.
    Checkpoint(Box<Checkpoint>),
}

/// Trains on `devices`, which have autodiff, until the last step or until `stop`. The first device evaluates and saves.
pub fn train(
    config: &Config,
    text: &Text,
    run: &Run,
    from: Start,
    devices: &[Device],
    stop: &AtomicBool,
) -> Result<Outcome, Error> {
    let device = &devices[0];
    let text_hash = format!("{:016x}", text.hash());
    let (mut best, start) = match &from {
        Start::Checkpoint(checkpoint) => (checkpoint.header.best, checkpoint.header.step),
        _ => (None, 0),
    };
    let begun = |model| (model, AdamW::new(config));
    let (model, optimizer) = match from {
        Start::Random => begun(Gpt::new(config, device)),
        Start::Weights(weights) => begun(weights.load(Gpt::zeros(config, device), config.context)?),
        Start::Checkpoint(checkpoint) => checkpoint.restore(Gpt::zeros(config, device))?,
    };
    println!("parameters {}", model.num_params());
    let replica = Replica::new(model, optimizer, config, text, device);

    let mut losses = Losses::open(&run.losses(), start)?;
    let mut speed = Speed::start(config);
    let bar = ProgressBar::new(config.steps as u64).with_position(start as u64).with_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed} < {eta}] {msg}")
            .expect("the template is well-formed"),
    );

    thread::scope(|scope| {
        let mut team = Team::start(scope, replica, devices);
        for step in start..=config.steps {
            let save = |path: &Path, best, Replica { model, optimizer, .. }: &Replica| {
                let header = Header {
                    step,
                    best,
                    updates: optimizer.updates,
                    text_hash: text_hash.clone(),
                    loss_scale: optimizer.loss_scale.clone(),
                    config: config.clone(),
                };
                Checkpoint::save(path, &header, model, optimizer)
            };

            // -- evaluate and save
            let evaluates = step % config.eval_interval == 0 || step == config.steps;
            let validation_loss = if evaluates {
                losses.flush()?;
                speed.pause();
                let loss = evaluate(&team.main.model.valid(), text, config, Stream::ValidationBatch, device)?;
                let train_loss =
                    losses.recent(config.eval_interval).map_or("-".to_string(), |loss| format!("{loss:.4}"));
                bar.suspend(|| println!("step {step:>6}   training {train_loss:<6}   validation {loss:.4}   {speed}"));

                if best.is_none_or(|best: Best| loss < best.loss) {
                    best = Some(Best { step, loss });
                    save(&run.best(), best, &team.main)?;
                }
                save(&run.latest(), best, &team.main)?;
                speed.resume();
                Some(loss)
            } else {
                None
            };
            if step == config.steps {
                losses.finish(Row { step, train_loss: None, validation_loss, learning_rate: None })?;
                plot(&run.picture(), &losses.rows, config.steps, config.tokenizer.unit())?;
                break;
            }
            if evaluates {
                plot(&run.picture(), &losses.rows, config.steps, config.tokenizer.unit())?;
            }
            if stop.load(Ordering::Relaxed) {
                losses.flush()?;
                save(&run.latest(), best, &team.main)?;
                bar.abandon();
                return Ok(Outcome::Interrupted(step));
            }

            // -- forward, backward and update
            let train_losses = team.step(step)?;

            // -- report
            let learning_rate = Some(config.learning_rate(step));
            losses.push(Row { step, train_loss: None, validation_loss, learning_rate }, train_losses);
            if losses.num_pending() == READ_LOSSES_EVERY {
                losses.flush()?;
            }
            speed.count();
            bar.set_position(step as u64 + 1);
            let loss = losses.recent(READ_LOSSES_EVERY).map_or(String::new(), |loss| format!("loss {loss:.4}, "));
            bar.set_message(format!("{loss}{speed}"));
        }
        bar.finish();
        Ok(Outcome::Finished)
    })
}

/// Mean loss over random batches of validation text, the same batches each time.
///
/// # Errors
///
/// If the device failed.
pub fn evaluate(model: &Gpt, text: &Text, config: &Config, stream: Stream, device: &Device) -> Result<f32, Error> {
    let device = device.clone().inner();
    let batch_loss = |index| {
        let rng = &mut rng(config.seed, stream, index);
        model.loss(&text.validation_batch(config.batch, config.context, rng, &device))
    };
    let loss = Tensor::cat((0..config.eval_batches).map(batch_loss).collect(), 0).mean();
    loss.try_into_scalar().map_err(|error| Error::device(&error))
}

/// Training speed in tokens per second, without the time of evaluations.
struct Speed {
    tokens_per_step: usize,
    tokens: usize,
    seconds: f64,
    since: Instant,
}

impl Speed {
    fn start(config: &Config) -> Self {
        Self {
            tokens_per_step: config.batch * config.context * config.grad_accum,
            tokens: 0,
            seconds: 0.0,
            since: Instant::now(),
        }
    }

    fn count(&mut self) {
        self.tokens += self.tokens_per_step;
    }

    fn pause(&mut self) {
        self.seconds += self.since.elapsed().as_secs_f64();
    }

    /// Measures anew after each evaluation, so that compilation at the start is soon forgotten.
    fn resume(&mut self) {
        (self.tokens, self.seconds, self.since) = (0, 0.0, Instant::now());
    }
}

impl std::fmt::Display for Speed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = if self.seconds > 0.0 { self.seconds } else { self.since.elapsed().as_secs_f64() };
        match self.tokens {
            0 => Ok(()),
            tokens => write!(f, "{:.0} tokens/s", tokens as f64 / seconds),
        }
    }
}
