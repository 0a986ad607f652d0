//! Gradients of the loss: of the whole model at once, or block by block.
//!
//! Block by block is gradient checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174): only the
//! input of each block is kept, and the backward computes a block again before its gradient. The loss is computed over [`LOSS_TOKENS`]
//! tokens at a time, because logits are wider than anything else.

use crate::data::Batch;
use crate::model::Gpt;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Gradients, Int, Tensor};

/// Number of tokens whose logits exist at a time.
const LOSS_TOKENS: usize = 8192;

/// Mean loss over a batch, without autodiff, and its gradients times `scale`.
pub fn at_once(model: &Gpt, batch: &Batch, scale: f64) -> (Tensor<1>, GradientsParams) {
    let loss = model.loss(batch);
    let gradients = (loss.clone() * scale).backward();
    (loss.inner(), GradientsParams::from_grads(gradients, model))
}

/// The same, block by block. `seed` returns a seed for each part of the model, so that dropout is the same in both computations of a block.
pub fn block_by_block(
    model: &Gpt,
    batch: Batch,
    scale: f64,
    seed: impl Fn(usize) -> u64,
) -> (Tensor<1>, GradientsParams) {
    let Batch { tokens, targets, documents } = batch;
    let device = &tokens.device();
    let parts = model.blocks().len() + 1;
    let part = |index: usize, x: Tensor<3>| {
        device.seed(seed(index));
        match index {
            0 => model.embed(tokens.clone(), documents.as_ref().map(|documents| documents.positions.clone())),
            index => model.blocks()[index - 1].forward(x, documents.as_ref()),
        }
    };

    // -- forward, keeping the input of each part
    let nothing = Tensor::zeros([0, 0, 0], device);
    let mut passed = vec![nothing];
    for index in 0..parts {
        passed.push(part(index, passed[index].clone()).detach());
    }

    // -- backward, from the loss to the embedding
    let mut sum = Sum { model, gradients: GradientsAccumulator::new() };
    let (loss, mut slope) = sum.head(passed.pop().expect("a part was run"), targets, scale);
    for index in (0..parts).rev() {
        let x = passed.pop().expect("every part has its input").require_grad();
        let y = part(index, x.clone());
        // The gradient of this sum with respect to y is the slope; the chain rule gives the other gradients.
        let mut gradients = (y * Tensor::from_inner(slope)).sum().backward();
        // The embedding has no gradient with respect to its input, which are tokens.
        slope = x.grad_remove(&mut gradients).unwrap_or_else(|| x.inner());
        sum.add(gradients);
    }
    (loss, sum.gradients.grads())
}

struct Sum<'a> {
    model: &'a Gpt,
    gradients: GradientsAccumulator<Gpt>,
}

impl Sum<'_> {
    fn add(&mut self, gradients: Gradients) {
        self.gradients.accumulate(self.model, GradientsParams::from_grads(gradients, self.model));
    }

    /// Mean loss for the output of the last block, and its gradient with respect to that output times `scale`, both without autodiff.
    fn head(&mut self, x: Tensor<3>, targets: Tensor<2, Int>, scale: f64) -> (Tensor<1>, Tensor<3>) {
        let shape @ [batch, context, width] = x.dims();
        let tokens = batch * context;
        let x = x.reshape([1, tokens, width]);
        let targets = targets.reshape([1, tokens]);
        let (mut losses, mut slopes) = (Vec::new(), Vec::new());
        for from in (0..tokens).step_by(LOSS_TOKENS) {
            let count = LOSS_TOKENS.min(tokens - from);
            let x = x.clone().narrow(1, from, count).detach().require_grad();
            let targets = targets.clone().narrow(1, from, count);
            let loss = self.model.head_loss(x.clone(), targets) * (count as f64 / tokens as f64);
            losses.push(loss.clone().inner());
            let mut gradients = (loss * scale).backward();
            slopes.push(x.grad_remove(&mut gradients).expect("the loss depends on its input"));
            self.add(gradients);
        }
        (Tensor::cat(losses, 0).sum(), Tensor::cat(slopes, 1).reshape(shape))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::{at_once, block_by_block};
    use crate::config::Config;
    use crate::data::Batch;
    use crate::device;
    use crate::model::Gpt;
    use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
    use burn::optim::GradientsParams;
    use burn::tensor::{Distribution, Tensor};

    /// Squared norm of the gradients: the slope of the loss along them.
    struct Slope<'a>(&'a GradientsParams, f32);

    impl ModuleVisitor for Slope<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1 += self.0.get::<D>(param.id).unwrap().square().sum().into_scalar::<f32>();
        }
    }

    struct Move<'a>(&'a GradientsParams, f32);

    impl ModuleMapper for Move<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            let moved = tensor.inner() + self.0.get::<D>(id).unwrap() * self.1;
            Param::from_mapped_value(id, Tensor::from_inner(moved).require_grad(), mapper)
        }
    }

    fn model(dropout: f64) -> (Gpt, Batch) {
        let found = device::choose("flex").unwrap();
        let config = Config { layers: 2, heads: 2, width: 16, dropout, ..Config::suited_to(&found) };
        let device = found.device.autodiff();
        device.seed(5);
        let tokens = || Tensor::random([2, config.context], Distribution::Uniform(0.0, 256.0), &device);
        (Gpt::new(&config, &device), Batch { tokens: tokens(), targets: tokens(), documents: None })
    }

    /// In one test, because all tests share the state of the random numbers.
    #[test]
    fn block_by_block_is_at_once() {
        without_dropout();
        dropout_falls_alike_both_times();
    }

    fn without_dropout() {
        let (model, batch) = model(0.0);
        let (loss, all) = at_once(&model, &batch, 3.0);
        let (same, blocks) = block_by_block(&model, batch, 3.0, |part| part as u64);
        assert!((loss.into_scalar::<f32>() - same.into_scalar::<f32>()).abs() < 1e-5);
        struct Same<'a>(&'a GradientsParams, &'a GradientsParams);
        impl ModuleVisitor for Same<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let (one, other) = (self.0.get::<D>(param.id).unwrap(), self.1.get::<D>(param.id).unwrap());
                let largest = one.clone().abs().max().into_scalar::<f32>();
                let error = (one - other).abs().max().into_scalar::<f32>();
                assert!(error <= 1e-5 * largest.max(1e-3), "the error is {error}, the largest gradient {largest}");
            }
        }
        model.visit(&mut Same(&all, &blocks));
    }

    /// If the second dropout were different, the slope would be completely wrong.
    fn dropout_falls_alike_both_times() {
        let (model, batch) = model(0.3);
        let run = |model: &Gpt| block_by_block(model, batch.clone(), 1.0, |part| 7 + part as u64);
        let gradients = run(&model).1;
        let mut slope = Slope(&gradients, 0.0);
        model.visit(&mut slope);
        let slope = slope.1;

        let step = 1e-3 / slope.sqrt();
        let moved = |by| run(&model.clone().map(&mut Move(&gradients, by))).0.into_scalar::<f32>();
        let measured = (moved(step) - moved(-step)) / (2.0 * step);
        assert!((measured - slope).abs() < 0.02 * slope.abs(), "the measured slope is {measured}, expected {slope}");
    }
}
