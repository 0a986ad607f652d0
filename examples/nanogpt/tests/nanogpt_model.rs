//! Tests of the model on the CPU.
#![cfg(feature = "flex")]

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Distribution, Int, Tensor};
use nanogpt::model::{CausalSelfAttention, Gpt, GptConfig};

fn config(dropout: f64) -> GptConfig {
    GptConfig { block_size: 12, vocab_size: 50, n_layer: 2, n_head: 3, n_embd: 24, dropout }
}

/// Two different sequences of the same length.
fn tokens(device: &Device) -> Tensor<2, Int> {
    Tensor::<1, Int>::arange(0..24, device).mul_scalar(7).remainder_scalar(50).reshape([2, 12])
}

fn largest<const D: usize>(x: Tensor<D>) -> f32 {
    x.abs().max().into_scalar::<f32>()
}

#[test]
fn a_token_changes_no_logits_before_it() {
    let device = Device::flex();
    let model = Gpt::new(&config(0.0), &device);
    let idx = tokens(&device);
    let later = Tensor::<2, Int>::full([2, 4], 3, &device);
    let changed = idx.clone().slice_assign([0..2, 8..12], later);
    let difference = model.forward(changed) - model.forward(idx);
    assert_eq!(difference.dims(), [2, 12, 50]);
    assert!(largest(difference.clone().narrow(1, 0, 8)) < 1e-6);
    assert!(largest(difference.narrow(1, 8, 1)) > 1e-3);
}

/// nanoGPT's attention without flash attention.
fn composed(layer: &CausalSelfAttention, n_head: usize, x: Tensor<3>) -> Tensor<3> {
    let [batch, seq, n_embd] = x.dims();
    let heads = layer.c_attn.forward(x).chunk(3, 2).into_iter();
    let heads: Vec<Tensor<4>> =
        heads.map(|part| part.reshape([batch, seq, n_head, n_embd / n_head]).swap_dims(1, 2)).collect();
    let scores = heads[0].clone().matmul(heads[1].clone().transpose()) / ((n_embd / n_head) as f64).sqrt();
    let hidden = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &scores.device()).unsqueeze::<4>();
    let y = softmax(scores.mask_fill(hidden, f32::NEG_INFINITY), 3).matmul(heads[2].clone());
    layer.c_proj.forward(y.swap_dims(1, 2).reshape([batch, seq, n_embd]))
}

#[test]
fn attention_is_composed_attention_and_so_are_its_gradients() {
    let device = Device::flex().autodiff();
    let layer = CausalSelfAttention::new(&config(0.0), &device);
    // Large inputs, so that probabilities are far from equal.
    let x = Tensor::<3>::random([2, 12, 24], Distribution::Normal(0.0, 10.0), &device);
    let [(flash, flash_dx), (reference, reference_dx)] = [true, false].map(|flash| {
        let x = x.clone().require_grad();
        let y = if flash { layer.forward(x.clone()) } else { composed(&layer, 3, x.clone()) };
        let gradients = y.clone().powi_scalar(2).sum().backward();
        (y.inner(), x.grad(&gradients).unwrap())
    });
    assert!(largest(reference.clone()) > 0.01 && largest(reference_dx.clone()) > 0.001);
    assert!(largest(flash - reference) < 1e-5);
    assert!(largest(flash_dx - reference_dx) < 1e-5);
}

#[test]
fn a_new_model_predicts_all_tokens_alike_and_every_parameter_learns() {
    let device = Device::flex().autodiff();
    let model = Gpt::new(&config(0.0), &device);
    let idx = tokens(&device);
    let targets = idx.clone().add_scalar(1).remainder_scalar(50);
    let (logits, loss) = model.forward_loss(idx, targets);
    assert_eq!(logits.dims(), [2, 12, 50]);
    let gradients = loss.clone().backward();
    let loss = loss.into_scalar::<f32>();
    assert!((loss - 50f32.ln()).abs() < 0.1, "{loss}");
    // Parameters: two embeddings, a norm, and in each block two norms and four linear layers, each with weight and bias.
    let gradients = burn::optim::GradientsParams::from_grads(gradients, &model);
    assert_eq!(gradients.len(), 2 + 2 + 2 * (2 * 2 + 4 * 2));
}

#[test]
fn dropout_is_for_training_alone() {
    let [training, validation] = [Device::flex().autodiff(), Device::flex()].map(|device| {
        let layer = CausalSelfAttention::new(&config(0.5), &device);
        let x = Tensor::<3>::random([2, 12, 24], Distribution::Normal(0.0, 1.0), &device);
        largest((layer.forward(x.clone()) - composed(&layer, 3, x)).without_autodiff())
    });
    assert!(training > 1e-4, "{training}");
    assert!(validation < 1e-5, "{validation}");
}

#[test]
fn samples_continue_the_prompt_beyond_the_context() {
    let device = Device::flex();
    let model = Gpt::new(&config(0.0), &device);
    let idx = tokens(&device);
    // At this low temperature the likeliest token is drawn.
    let sample = model.generate(idx.clone(), 2, 1e-5);
    assert_eq!(sample.dims(), [2, 14]);
    let likeliest = |idx| model.forward(idx).narrow(1, 11, 1).argmax(2).reshape([2, 1]);
    let first: Tensor<2, Int> = likeliest(idx.clone());
    let window = Tensor::cat(vec![idx.clone().narrow(1, 1, 11), first.clone()], 1);
    let expected = Tensor::cat(vec![idx.clone(), first, likeliest(window)], 1);
    assert_eq!(sample.into_data(), expected.into_data());

    // At a high temperature all tokens are drawn.
    let sample = model.generate(idx, 200, 100.0).into_data();
    let drawn: std::collections::BTreeSet<i64> = sample.iter::<i64>().collect();
    assert!(drawn.len() > 40 && drawn.iter().all(|token| (0..50).contains(token)), "{drawn:?}");
}
