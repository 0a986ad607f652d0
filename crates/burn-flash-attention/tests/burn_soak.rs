//! Memory does not grow over thousands of training steps.
//!
//! `FLASH_SOAK_STEPS` is the number of steps, 200 by default.

mod common;

use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flash_attention::{BlockMask, FlashAttentionOptions, flash_attention};
use common::{Target, random, targets};
use std::fs;

const BATCH: usize = 2;
const SEQ: usize = 20;
const HEADS: usize = 2;
const DIM: usize = 16;
const MODEL: usize = HEADS * DIM;

/// Projections of queries, keys, values and outputs, and sinks.
struct Model {
    projections: [Tensor<2>; 4],
    sinks: Tensor<1>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let std = 1.0 / (MODEL as f64).sqrt();
        let projection = || Tensor::random([MODEL, MODEL], Distribution::Normal(0.0, std), device).require_grad();
        Model {
            projections: [projection(), projection(), projection(), projection()],
            sinks: Tensor::zeros([HEADS], device).require_grad(),
        }
    }

    fn forward(&self, x: &Tensor<3>, options: &FlashAttentionOptions) -> Tensor<3> {
        let [wq, wk, wv, wo] = &self.projections;
        let of_heads =
            |w: &Tensor<2>| x.clone().matmul(w.clone().unsqueeze()).reshape([BATCH, SEQ, HEADS, DIM]).swap_dims(1, 2);
        let options = options.clone().with_sinks(self.sinks.clone());
        let out = flash_attention(of_heads(wq), of_heads(wk), of_heads(wv), &options);
        out.swap_dims(1, 2).reshape([BATCH, SEQ, MODEL]).matmul(wo.clone().unsqueeze())
    }

    /// A step of gradient descent. Returns the model after it and the loss before it.
    fn step(self, x: &Tensor<3>, y: &Tensor<3>, options: &FlashAttentionOptions) -> (Self, Tensor<1>) {
        fn descended<const D: usize>(parameter: Tensor<D>, gradients: &burn::tensor::Gradients) -> Tensor<D> {
            let gradient = parameter.grad(gradients).expect("every parameter must have a gradient");
            Tensor::from_inner(parameter.inner() - gradient * 0.1).require_grad()
        }
        let loss = (self.forward(x, options) - y.clone()).powi_scalar(2).mean();
        let gradients = loss.backward();
        let projections = self.projections.map(|parameter| descended(parameter, &gradients));
        let sinks = descended(self.sinks, &gradients);
        (Model { projections, sinks }, loss.inner())
    }
}

/// Memory at one moment, in bytes.
#[derive(Clone, Copy, Debug)]
struct Memory {
    /// Bytes in use and reserved on the device, if its allocator reports them.
    device: Option<[u64; 2]>,
    /// Resident memory of the process, if the system reports it.
    host: Option<u64>,
}

impl Memory {
    fn now(device: &Device) -> Self {
        device.sync().expect("the device must not have failed");
        let resident = || {
            let status = fs::read_to_string("/proc/self/status").ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
            Some(1024 * line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?)
        };
        let usage = device.memory_pool_usage();
        Memory { device: usage.map(|usage| [usage.bytes_in_use, usage.bytes_reserved]), host: resident() }
    }
}

/// Trains with several sets of options in turn and compares the memory after a quarter of the steps with that at the end.
fn soak(target: &Target, steps: usize) {
    let device = target.device.clone().autodiff();
    device.seed(7);
    let (x, y) = (random([BATCH, SEQ, MODEL], &device), random([BATCH, SEQ, MODEL], &device) * 0.3);
    let causal = FlashAttentionOptions::new().with_causal(true);
    let lens = Tensor::<1, Int>::from_data([20, 13], &device);
    let blocks = BlockMask::of(&causal, [1, 1], [SEQ, SEQ], [128, 128], &device);
    let options = [
        causal.clone().with_dropout(0.1),
        causal.clone().with_window_left(7).with_softcap(20.0),
        FlashAttentionOptions::new().with_seq_lens_k(lens),
        causal.with_block_mask(blocks),
    ];
    let mut model = Model::new(&device);
    let (mut losses, mut early) = (Vec::new(), None);
    for step in 0..steps {
        let (next, loss) = model.step(&x, &y, &options[step % options.len()]);
        model = next;
        if step % 50 == 0 || step + 1 == steps {
            losses.push(loss.into_scalar::<f32>());
        }
        if step + 1 == steps / 4 {
            early = Some(Memory::now(&device));
        }
    }
    let (early, late) = (early.expect("a quarter of the steps"), Memory::now(&device));
    println!("{}: {steps} steps, losses {losses:?}, {early:?} after a quarter, {late:?} at the end", target.name);
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(last.is_finite() && last < first, "{}: the loss was {first} and is {last}", target.name);
    let within = |what: &str, early: u64, late: u64, most: u64| {
        let grown = late.saturating_sub(early);
        assert!(grown < most, "{what} memory of {} grew by {grown} bytes in {steps} steps", target.name);
    };
    if let (Some(early), Some(late)) = (early.device, late.device) {
        // One leaked query tensor per step would be ten times this bound after 200 steps.
        within("used", early[0], late[0], 64 << 10);
        within("reserved", early[1], late[1], 1 << 20);
    }
    if let (Some(early), Some(late)) = (early.host, late.host) {
        within("resident", early, late, 16 << 20);
    }
}

#[test]
fn memory_does_not_grow_over_training_steps() {
    let steps = std::env::var("FLASH_SOAK_STEPS")
        .map_or(200, |steps| steps.parse().expect("FLASH_SOAK_STEPS must be a number of steps"));
    for target in targets() {
        soak(&target, steps);
    }
}
