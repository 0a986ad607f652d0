//! Decoders held against `transformers`: the checkpoints of `tests/checkpoints`, which its `make.py` wrote.
//!
//! Weights are bf16, and everything is computed in f32 by both. Logits must agree within 1e-3, gradients within 1e-4 of their norm, and
//! greedy continuations wherever the two best logits are further apart than logits may differ.

mod common;

use burn::tensor::{DType, Gradients, Tensor, TensorData, activation};
use burn_flash_attention::{FlashAttentionOptions, FlashDecoder};
use common::{CHECKPOINTS, Expected, Target, model, targets};
use llama::parameters::{Slot, slots};

/// Largest difference of logits, which are up to 20.
fn logit_bound(target: &Target) -> f32 {
    // Burn's products round their factors to tf32 there.
    if target.name == "cuda" { 0.1 } else { 1e-3 }
}

/// The gradient of each tensor, in the checkpoint's order of elements.
fn gradients(model: &FlashDecoder, gradients: &Gradients) -> Vec<(String, Tensor<1>)> {
    let mut model = model.clone();
    let gradient = |slot: Slot| match slot {
        Slot::Linear(weight) => weight.grad(gradients).unwrap().transpose().reshape([-1]),
        Slot::Table(weight) => weight.grad(gradients).unwrap().reshape([-1]),
        Slot::Norm(vector) | Slot::Vector(vector) => vector.grad(gradients).unwrap(),
    };
    slots(&mut model).into_iter().map(|(name, slot)| (name, gradient(slot))).collect()
}

#[test]
fn logits_and_gradients_are_those_of_transformers() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for family in CHECKPOINTS {
            let checkpoint = Expected::of(family);
            let model = model(family, &device, DType::F32);
            let tokens = checkpoint.tokens(&device);
            let [batch, seq] = tokens.dims();
            let logits = model.forward(tokens.clone(), &FlashAttentionOptions::new());
            let vocab = logits.dims()[2];

            let expected: Tensor<3> = checkpoint.floats("logits", &device);
            let difference = (logits.clone() - expected).abs().max().into_scalar::<f32>();
            assert!(difference <= logit_bound(&target), "{family} on {}: logits differ by {difference}", target.name);

            let rows = logits.narrow(1, 0, seq - 1).reshape([batch * (seq - 1), vocab]);
            let next = tokens.narrow(1, 1, seq - 1).reshape([batch * (seq - 1), 1]);
            let loss = activation::log_softmax(rows, 1).gather(1, next).mean().neg();
            let gradients = loss.backward();
            let bound = if target.name == "cuda" { 2e-2 } else { 1e-4 };
            let found = self::gradients(&model, &gradients);
            assert_eq!(found.len(), checkpoint.count("grad."), "{family}");
            for (name, found) in found {
                let expected = checkpoint.flat(&format!("grad.{name}"), &device.clone().inner());
                let norm = |x: Tensor<1>| x.powi_scalar(2).sum().sqrt().into_scalar::<f32>();
                let (error, size) = (norm(found - expected.clone()), norm(expected));
                assert!(error <= bound * size, "{family} on {}: {name} differs by {error} of {size}", target.name);
            }
        }
    }
}

/// Continues `tokens` by the best token of each step, and checks each against the expected one.
fn check_continuation(target: &Target, family: &str, checkpoint: &Expected, model: &FlashDecoder) {
    let device = &target.device;
    let prompt = checkpoint.tokens(device);
    let ([batch, seq], (shape, continuation)) = (prompt.dims(), checkpoint.integers("continuation"));
    let margins: Vec<f32> = checkpoint.floats::<2>("margins", device).into_data().iter().collect();
    let mut cache = model.new_cache(batch, seq + shape[1]).unwrap();
    let mut new = prompt;
    for step in 0..shape[1] {
        let logits = model.forward_step(new.clone(), &mut cache, &FlashAttentionOptions::new());
        let last = logits.dims()[1] - 1;
        let best = logits.narrow(1, last, 1).argmax(2).reshape([batch, 1]);
        let found: Vec<i32> = best.into_data().iter().collect();
        let expected: Vec<i32> = (0..batch).map(|row| continuation[row * shape[1] + step]).collect();
        for row in 0..batch {
            if margins[row * shape[1] + step] > 2.0 * logit_bound(target) {
                assert_eq!(found[row], expected[row], "{family} on {}: step {step} of row {row}", target.name);
            }
        }
        // Goes on from what transformers went on from.
        new = Tensor::from_data(TensorData::new(expected, [batch, 1]), device);
    }
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    for target in targets() {
        for family in CHECKPOINTS {
            let model = model(family, &target.device, DType::F32);
            check_continuation(&target, family, &Expected::of(family), &model);
        }
    }
}

/// Weights in bf16, through Burn's products in bf16.
#[test]
fn logits_in_bf16_are_near() {
    for target in targets().into_iter().filter(|target| target.name == "flex") {
        for family in CHECKPOINTS {
            let checkpoint = Expected::of(family);
            let model = model(family, &target.device, DType::BF16);
            let logits = model.forward(checkpoint.tokens(&target.device), &FlashAttentionOptions::new());
            assert_eq!(logits.dtype(), DType::BF16, "{family}");
            let expected: Tensor<3> = checkpoint.floats("logits", &target.device);
            let rms = |x: Tensor<3>| x.powi_scalar(2).mean().sqrt().into_scalar::<f32>();
            let error = rms(logits.cast(DType::F32) - expected.clone()) / rms(expected);
            assert!(error <= 2e-2, "{family}: {error}");
        }
    }
}
