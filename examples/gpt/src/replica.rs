//! Training on one or more devices: each has the whole model and a part of every batch.
//!
//! Burn's `DistributedContext` replaces each gradient by its mean over the devices during the backward (through NCCL on CUDA). Replicas
//! that start with equal weights therefore keep equal weights.

use crate::config::Config;
use crate::data::{Stream, Text, derive_seed, rng};
use crate::error::Error;
use crate::gradients::{at_once, block_by_block};
use crate::model::Gpt;
use crate::optimizer::AdamW;
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsAccumulator;
use burn::tensor::distributed::{DistributedConfig, DistributedContext, ReduceOperation};
use burn::tensor::{Device, Tensor};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::exit;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

/// A model and its optimizer on a device.
pub struct Replica<'a> {
    pub model: Gpt,
    pub optimizer: AdamW,
    config: &'a Config,
    text: &'a Text,
    device: Device,
    /// The replica's windows of each batch.
    share: Range<usize>,
}

impl<'a> Replica<'a> {
    /// The only replica. `device` has autodiff.
    pub fn new(model: Gpt, optimizer: AdamW, config: &'a Config, text: &'a Text, device: &Device) -> Self {
        Self { model, optimizer, config, text, device: device.clone(), share: 0..config.batch }
    }

    /// A replica with the index `index` among `of`, on a device with autodiff.
    fn copy(&self, index: usize, of: usize, device: &Device) -> Self {
        let windows = self.config.batch / of;
        let model = self.model.clone().fork(device).map(&mut MarkDistributed);
        let optimizer = self.optimizer.copy(&model, &device.clone().inner());
        let share = index * windows..(index + 1) * windows;
        Self { model, optimizer, device: device.clone(), share, ..*self }
    }

    /// Updates the model once. Returns the loss before the update, the mean over this replica's windows, on the device.
    ///
    /// # Errors
    ///
    /// The errors of [`AdamW::step`].
    pub fn step(&mut self, step: usize) -> Result<Tensor<1>, Error> {
        let Config { seed, context, batch, grad_accum, .. } = *self.config;
        self.device.seed(derive_seed(seed, Stream::Dropout, step));
        let rng = &mut rng(seed, Stream::TrainBatch, step);
        let mut gradients = GradientsAccumulator::new();
        let mut losses = Vec::with_capacity(grad_accum);
        for index in 0..grad_accum {
            let rows = self.text.train_batch(batch, self.share.clone(), context, rng, &self.device);
            let scale = f64::from(self.optimizer.scale()) / grad_accum as f64;
            let (loss, gradient) = if self.config.checkpointing {
                let parts = self.config.layers + 1;
                let part_seed = |part| derive_seed(seed, Stream::Dropout, (step * grad_accum + index) * parts + part);
                block_by_block(&self.model, rows, scale, part_seed)
            } else {
                at_once(&self.model, &rows, scale)
            };
            losses.push(loss / grad_accum as f64);
            gradients.accumulate(&self.model, gradient);
        }
        let learning_rate = self.config.learning_rate(step);
        self.model = self.optimizer.step(self.model.clone(), gradients.grads(), learning_rate, self.config)?;
        Ok(Tensor::cat(losses, 0).sum())
    }
}

/// Replicas that perform each step together.
pub struct Team<'a> {
    /// The first replica, on this thread.
    pub main: Replica<'a>,
    others: Vec<Worker>,
    /// Keeps the context alive as long as the team.
    _context: Option<DistributedContext>,
}

/// A replica in its own thread, because a backward waits for the backwards of the other devices.
struct Worker {
    steps: Sender<usize>,
    losses: Receiver<Result<Tensor<1>, Error>>,
}

impl<'a> Team<'a> {
    /// Creates a replica for each device, which have autodiff. `main` is the replica of the first device.
    pub fn start<'scope>(scope: &'scope Scope<'scope, '_>, main: Replica<'a>, devices: &[Device]) -> Self
    where
        'a: 'scope,
    {
        if devices.len() < 2 {
            return Self { main, others: Vec::new(), _context: None };
        }
        let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
        let context = DistributedContext::init(devices.to_vec(), config);
        let copy = |index: usize| main.copy(index, devices.len(), &devices[index]);
        let others = (1..devices.len()).map(|index| Worker::start(scope, copy(index))).collect();
        Self { main: copy(0), others, _context: Some(context) }
    }

    /// Updates every replica once. Returns the loss of each before the update, on its device.
    ///
    /// # Errors
    ///
    /// The errors of [`AdamW::step`], for the first device that failed.
    pub fn step(&mut self, step: usize) -> Result<Vec<Tensor<1>>, Error> {
        for worker in &self.others {
            worker.steps.send(step).expect("a worker waits for steps");
        }
        let loss = self.main.step(step);
        let others = self.others.iter().map(|worker| worker.losses.recv().expect("a worker answers each step"));
        [loss].into_iter().chain(others).collect()
    }
}

impl Worker {
    fn start<'scope>(scope: &'scope Scope<'scope, '_>, mut replica: Replica<'scope>) -> Self {
        let (steps, asked) = channel();
        let (answer, losses) = channel();
        scope.spawn(move || {
            let work = || {
                for step in asked {
                    // The receiver is gone if training ended with an error.
                    let _ = answer.send(replica.step(step));
                }
            };
            // The other devices would wait for this one's gradients forever. The panic's message has been printed.
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                exit(101);
            }
        });
        Self { steps, losses }
    }
}

/// Marks parameters so that their gradients are averaged over all devices.
struct MarkDistributed;

impl ModuleMapper for MarkDistributed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
    }
}
