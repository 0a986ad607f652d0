//! Calls without queries, keys, batch or sequences, through every entry point: results are empty or zero, gradients have the inputs'
//! shapes.

mod common;

use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flash_attention::mods::{Causal, MaskFn};
use burn_flash_attention::{
    BlockMask, FlashAttentionOptions, attention, flash_attention, flash_attention_varlen, flash_attention_with_lse,
    plan,
};
use common::targets;

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Default, device).require_grad()
}

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, device)
}

/// Asserts that a gradient has the input's shape and is 0 everywhere.
fn assert_no_gradient<const D: usize>(what: &str, input: &Tensor<D>, gradients: &burn::tensor::Gradients) {
    let gradient = input.grad(gradients).unwrap_or_else(|| panic!("{what} has no gradient"));
    assert_eq!(gradient.dims(), input.dims(), "{what}");
    assert!(gradient.into_data().iter::<f32>().all(|x| x == 0.0), "{what}");
}

/// Varlen calls without queries or without keys.
#[test]
fn varlen_without_queries_or_keys() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for (total_q, total_k) in [(0, 6), (5, 0), (0, 0)] {
            let (q, k, v) =
                (random([total_q, 4, 8], &device), random([total_k, 2, 8], &device), random([total_k, 2, 16], &device));
            let sinks = random([4], &device);
            let ends = |total: usize| ints(&[0, total as i32 / 2, total as i32], &device);
            for options in [
                FlashAttentionOptions::new(),
                FlashAttentionOptions::new().with_causal(true).with_window_left(2),
                FlashAttentionOptions::new().with_sinks(sinks.clone()),
            ] {
                let out =
                    flash_attention_varlen(q.clone(), k.clone(), v.clone(), ends(total_q), ends(total_k), &options);
                assert_eq!(out.dims(), [total_q, 4, 16]);
                assert!(out.clone().into_data().iter::<f32>().all(|x| x == 0.0), "{total_q} queries, {total_k} keys");
                let gradients = out.sum().backward();
                assert_no_gradient("q", &q, &gradients);
                assert_no_gradient("k", &k, &gradients);
                assert_no_gradient("v", &v, &gradients);
            }
        }
    }
}

/// Batches without queries or keys, with each option for sequence lengths, and with empty masks and biases.
#[test]
fn batches_without_queries_or_keys() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for (batch, seq_q, seq_k) in [(0, 5, 6), (2, 0, 6), (2, 5, 0), (2, 0, 0)] {
            let q = random([batch, 4, seq_q, 8], &device);
            let k = random([batch, 2, seq_k, 8], &device);
            let v = random([batch, 2, seq_k, 16], &device);
            let lens = |seq: usize| Tensor::<1, Int>::full([batch], seq as i32, &device);
            let ends = |seq: usize| ints(&(0..=batch).map(|n| (n * seq) as i32).collect::<Vec<_>>(), &device);
            let bias = random([batch, 4, seq_q, seq_k], &device);
            let mask = bias.clone().inner().lower_elem(0.5);
            let new = FlashAttentionOptions::new;
            for (name, options) in [
                ("plain", new()),
                ("lengths", new().with_causal(true).with_seq_lens_q(lens(seq_q)).with_seq_lens_k(lens(seq_k))),
                ("lengths of keys, bias", new().with_seq_lens_k(lens(seq_k)).with_bias(bias.clone())),
                ("packed", new().with_cu_seqlens_q(ends(seq_q)).with_cu_seqlens_k(ends(seq_k))),
                ("sinks, mask", new().with_sinks(random([4], &device)).with_mask(Tensor::from_inner(mask.clone()))),
                ("function", new().with_mask_mod(MaskFn::of::<Causal>(), [])),
            ] {
                assert!(plan(&q, &k, &v, &options).is_ok(), "{name}");
                let (out, lse) = flash_attention_with_lse(q.clone(), k.clone(), v.clone(), &options);
                assert_eq!((out.dims(), lse.dims()), ([batch, 4, seq_q, 16], [batch, 4, seq_q]), "{name}");
                assert!(out.clone().into_data().iter::<f32>().all(|x| x == 0.0), "{name}");
                let gradients = out.sum().backward();
                assert_no_gradient(name, &q, &gradients);
                assert_no_gradient(name, &k, &gradients);
                assert_no_gradient(name, &v, &gradients);
            }
            let dropped_in = attention(q.clone(), k.clone(), v.clone(), None, None, Default::default());
            assert_eq!(dropped_in.dims(), [batch, 4, seq_q, 16]);
        }
    }
}

/// A block mask without blocks.
#[test]
fn block_masks_without_queries_or_keys() {
    for target in targets() {
        let device = &target.device;
        for (seq_q, seq_k) in [(0, 130), (130, 0), (0, 0)] {
            let options = FlashAttentionOptions::new().with_causal(true);
            let blocks = BlockMask::of(&options, [1, 1], [seq_q, seq_k], [128, 128], device);
            let zeros = |seq| Tensor::<4>::zeros([1, 2, seq, 16], device);
            let out = flash_attention(zeros(seq_q), zeros(seq_k), zeros(seq_k), &options.with_block_mask(blocks));
            assert_eq!(out.dims(), [1, 2, seq_q, 16]);
            assert!(out.into_data().iter::<f32>().all(|x| x == 0.0));
        }
    }
}
