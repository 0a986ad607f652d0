//! Entry points, layouts, randomness and graphs.

use super::dtypes;
use crate::common::*;
use burn::tensor::ops::{AttentionModuleOptions, CausalAlignment};
use burn::tensor::{Device, Distribution, Tensor, Tolerance};
use burn_flash_attention::{FlashAttentionOptions, flash_attention, flash_attention_with_lse};
use flash_attention_kernels::{AttentionOptions, Dtype};

/// Without a seed in the options, each call takes a seed from Burn's generator, and the backward drops the same pairs as the forward.
#[test]
fn dropout_draws_from_burns_generator() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = |n| Tensor::<4>::random([2, 2, n, 16], Distribution::Default, &device);
        let (q, k, v, dout) = (random(70), random(90), random(90).require_grad(), random(70));
        let options = FlashAttentionOptions::new().with_dropout(0.3);
        let run = || flash_attention(q.clone(), k.clone(), v.clone(), &options);
        let (first, second) = (run(), run());
        let differ = (first.clone() - second).abs().sum().into_scalar::<f32>();
        assert!(differ > 1.0, "{}: two calls dropped the same pairs", target.name);
        // The output is linear in v.
        let gradients = (first.clone() * dout.clone()).sum().backward();
        let of_values = (v.grad(&gradients).unwrap() * v.clone().inner()).sum().into_scalar::<f32>();
        let of_output = (first * dout).sum().into_scalar::<f32>();
        assert!(
            (of_values - of_output).abs() < 1e-3 * (1.0 + of_output.abs()),
            "⟨v, dv⟩ is {of_values}, ⟨out, dout⟩ is {of_output}"
        );
    }
}

#[test]
fn lse_alone_out_alone_and_both() {
    for target in targets() {
        for dtype in dtypes(&target) {
            let options = AttentionOptions { causal: true, ..Default::default() };
            // The first rows see no key, so their lse is −∞.
            let data = Data::random(problem([1, 2, 2, 70, 50, 16, 16], dtype, options), 6);
            for loss in [Loss::OUT, Loss::LSE, Loss::BOTH] {
                for checkpointing in [false, true] {
                    check(&data, &target, How { loss, checkpointing, ..How::default() });
                }
            }
        }
    }
}

#[test]
fn strided_inputs_are_taken_as_they_are() {
    for target in targets() {
        for layout in [Layout::HeadsInner, Layout::Transposed, Layout::Offset] {
            let problem = problem([2, 4, 2, 65, 66, 16, 16], Dtype::F32, AttentionOptions::default());
            let data = Data::random(problem.with_bias(&[2, 1, 65, 66]).unwrap(), 7);
            check(&data, &target, How { layout, loss: Loss::BOTH, ..How::default() });
        }
    }
}

#[test]
fn expanded_flipped_and_expanded_gradients() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, &device);
        let q = random([2, 4, 9, 8]).flip([2]);
        let k = random([1, 1, 9, 8]).expand([2, 4, 9, 8]);
        let v = random([2, 4, 1, 8]).expand([2, 4, 9, 8]);
        let (q, k, v) = (q.detach().require_grad(), k.detach().require_grad(), v.detach().require_grad());
        let run = |ours: bool| {
            let options = AttentionModuleOptions::default();
            let out = if ours {
                burn_flash_attention::attention(q.clone(), k.clone(), v.clone(), None, None, options)
            } else {
                burn::tensor::module::attention_fallback(q.clone(), k.clone(), v.clone(), None, None, options)
            };
            // The gradient of a sum is an expanded number.
            let gradients = out.clone().sum().backward();
            [out.detach(), q.grad(&gradients).unwrap(), k.grad(&gradients).unwrap(), v.grad(&gradients).unwrap()]
        };
        for (ours, burns) in run(true).into_iter().zip(run(false)) {
            ours.into_data().assert_approx_eq::<f32>(&burns.into_data(), burns_own(&target));
        }
    }
}

#[test]
fn drop_in_for_burns_attention() {
    for target in targets() {
        let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &target.device);
        let (q, k, v) = (random([2, 4, 20, 16]), random([2, 2, 30, 16]), random([2, 2, 30, 8]));
        // All keys of each batch's first row are hidden.
        let mask = random([2, 1, 20, 30]).greater_elem(0.3);
        let first = Tensor::<4>::ones([2, 1, 1, 30], &target.device).greater_elem(0.0);
        let mask = mask.slice_assign([0..2, 0..1, 0..1, 0..30], first).expand([2, 4, 20, 30]);
        let bias = random([1, 4, 20, 30]).expand([2, 4, 20, 30]);
        for n in 0..32 {
            let options = AttentionModuleOptions {
                scale: (n & 1 != 0).then_some(0.3),
                softcap: (n & 2 != 0).then_some(4.0),
                is_causal: n & 4 != 0,
                causal_alignment: if n & 8 != 0 { CausalAlignment::TopLeft } else { CausalAlignment::BottomRight },
            };
            let (mask, bias) = ((n & 16 != 0).then(|| mask.clone()), (n & 1 != 0).then(|| bias.clone()));
            let ours =
                burn_flash_attention::attention(q.clone(), k.clone(), v.clone(), mask.clone(), bias.clone(), options);
            let burns = burn::tensor::module::attention(q.clone(), k.clone(), v.clone(), mask, bias, options);
            ours.into_data().assert_approx_eq::<f32>(&burns.into_data(), burns_own(&target));
        }
    }
}

#[test]
fn the_same_bits_every_time() {
    for target in targets() {
        let problem = problem([2, 4, 2, 130, 130, 16, 16], Dtype::F32, AttentionOptions::default());
        let data = Data::random(problem.with_bias(&[1, 4, 130, 1]).unwrap(), 8);
        let how = How { loss: Loss::BOTH, ..How::default() };
        let first = flash(&data, &target, how);
        for _ in 0..3 {
            assert_eq!(flash(&data, &target, how), first, "on {}", target.name);
        }
    }
}

#[test]
fn a_head_alone_is_bitwise_the_one_in_the_batch() {
    for target in targets() {
        let options = AttentionOptions { causal: true, ..Default::default() };
        let whole = Data::random(problem([3, 4, 4, 70, 140, 8, 8], Dtype::F32, options), 9);
        let all = flash(&whole, &target, How::default());
        let (q_len, k_len) = (70 * 8, 140 * 8);
        for head in [0, 5, 11] {
            let (q, k) = (head * q_len..(head + 1) * q_len, head * k_len..(head + 1) * k_len);
            let mut one = Data::random(problem([1, 1, 1, 70, 140, 8, 8], Dtype::F32, options), 0);
            one.tensors.q = whole.tensors.q[q.clone()].to_vec();
            one.tensors.k = whole.tensors.k[k.clone()].to_vec();
            one.tensors.v = whole.tensors.v[k.clone()].to_vec();
            one.dout = whole.dout[q.clone()].to_vec();
            let alone = flash(&one, &target, How::default());
            assert_eq!(alone.out, all.out[q.clone()]);
            assert_eq!(alone.dq.unwrap(), all.dq.as_ref().unwrap()[q]);
            assert_eq!(alone.dk.unwrap(), all.dk.as_ref().unwrap()[k.clone()]);
            assert_eq!(alone.dv.unwrap(), all.dv.as_ref().unwrap()[k]);
        }
    }
}

/// Gradients of a small graph with memory-bound operations before and after attention, which checkpointing recomputes.
fn graph(device: &Device, detach: &str) -> Option<[Vec<f64>; 2]> {
    let x = tensor(&flash_attention_reference::normal(2 * 9 * 8, 1), [1, 2, 9, 8], Dtype::F32, device).require_grad();
    let w = tensor(&flash_attention_reference::normal(2 * 9 * 8, 2), [1, 2, 9, 8], Dtype::F32, device).require_grad();
    let (out, lse) = flash_attention_with_lse(
        x.clone() * 1.5,
        (x.clone() + 0.25).tanh(),
        x.clone() * w.clone(),
        &FlashAttentionOptions::new().with_causal(true),
    );
    let (out, lse) = match detach {
        "out" => (out.detach(), lse),
        "lse" => (out, lse.detach()),
        "both" => (out.detach(), lse.detach()),
        _ => (out, lse),
    };
    let mixed = (out.clone() * 2.0 + 1.0).tanh() * out.clone() + (lse.clone() * 0.5).unsqueeze_dim(3);
    let loss = (mixed.exp() * lse.unsqueeze_dim(3)).sum() + out.sum();
    if !loss.is_require_grad() {
        let gradients = loss.backward();
        return x.grad(&gradients).map(|dx| [read(dx), vec![]]);
    }
    let gradients = loss.backward();
    Some([read(x.grad(&gradients)?), read(w.grad(&gradients)?)])
}

#[test]
fn checkpointing_changes_nothing() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for detach in ["", "out", "lse"] {
            let plain = graph(&device, detach).unwrap();
            let checkpointed = graph(&device.clone().gradient_checkpointing(), detach).unwrap();
            for (plain, checkpointed) in plain.iter().zip(&checkpointed) {
                // Relative to the largest gradient, because the loss is an exponential of the output.
                let largest = plain.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
                let far = plain.iter().zip(checkpointed).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / largest;
                assert!(
                    far < 1e-5,
                    "gradients with and without checkpointing differ by {far} with {detach} detached on {}",
                    target.name
                );
            }
        }
    }
}

#[test]
fn a_graph_is_used_once_like_any_of_burns() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let q = Tensor::<4>::random([1, 1, 5, 4], Distribution::Default, &device).require_grad();
        let options = FlashAttentionOptions::new();
        // Two losses that each use both outputs, and one backward of their sum.
        let (out, lse) = flash_attention_with_lse(q.clone(), q.clone(), q.clone(), &options);
        let twice = q.grad(&(out.clone().sum() + out.sum() + lse.clone().sum() + lse.sum()).backward()).unwrap();
        let (out, lse) = flash_attention_with_lse(q.clone(), q.clone(), q.clone(), &options);
        let once = q.grad(&(out.sum() + lse.sum()).backward()).unwrap();
        twice.into_data().assert_approx_eq::<f32>(&(once * 2.0).into_data(), Tolerance::absolute(1e-5));
        // Burn refuses a second backward through the same node.
        let (out, lse) = flash_attention_with_lse(q.clone(), q.clone(), q.clone(), &options);
        out.sum().backward();
        let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lse.sum().backward()));
        assert!(again.is_err());
        // No input is tracked.
        let out = flash_attention(q.clone().detach(), q.clone().detach(), q.detach(), &options);
        assert!(!out.is_require_grad());
    }
}
