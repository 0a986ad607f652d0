//! `install()`, which replaces Burn's own attention. There is one test, because `install()` affects the process and must come before its
//! first operation.
#![cfg(all(feature = "wgpu", feature = "fusion"))]

mod common;

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor, Tolerance, module};
use burn_flash_attention::{Counts, install};
use common::{Target, random, targets};
use std::process::Command;
use std::time::Duration;
use wait_timeout::ChildExt;

/// Burn's own attention, composed of its operations so that it is not replaced.
fn composed(
    [q, k, v]: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    causal: bool,
) -> Tensor<4> {
    let [_, _, seq_q, head_dim] = q.dims();
    let seq_k = k.dims()[2];
    let mut scores = q.matmul(k.swap_dims(2, 3)) / (head_dim as f64).sqrt();
    if let Some(bias) = bias {
        scores = scores + bias;
    }
    if let Some(mask) = mask {
        scores = scores.mask_fill(mask, f32::NEG_INFINITY);
    }
    if causal {
        let hidden = Tensor::<2>::ones([seq_q, seq_k], &scores.device()).triu((seq_k - seq_q + 1) as i64);
        scores = scores.mask_fill(hidden.greater_elem(0.5).unsqueeze(), f32::NEG_INFINITY);
    }
    burn::tensor::activation::softmax(scores, 3).matmul(v)
}

fn close(target: &Target, what: &str, got: Tensor<4>, want: Tensor<4>) {
    eprintln!("{what}");
    // Gradients near zero are differences of large terms, so the error is relative to the largest gradient.
    let scale = want.clone().abs().max().into_scalar::<f32>().max(1.0);
    // On CUDA Burn's products round their factors to tf32 (2^-11), and gradients sum several such products.
    let absolute = if target.name == "cuda" { (3e-3 * scale).max(3e-2) } else { 1e-5 * scale };
    got.into_data().assert_approx_eq::<f32>(&want.into_data(), Tolerance::absolute(absolute));
}

/// A forward and a backward of Burn's attention, with `before` applied to the queries.
fn train(target: &Target, before: impl Fn(Tensor<4>) -> Tensor<4>) {
    let device = target.device.clone().autodiff();
    let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let data = [random([2, 3, 9, 16], &device), random([2, 3, 12, 16], &device), random([2, 3, 12, 16], &device)];
    let leaves = || data.clone().map(|x| x.detach().require_grad());
    let ([q, k, v], [of_q, of_k, of_v]) = (leaves(), leaves());
    let got = module::attention(before(q.clone()), k.clone(), v.clone(), None, None, causal);
    let want = composed([before(of_q.clone()), of_k.clone(), of_v.clone()], None, None, true);
    close(target, "out", got.clone(), want.clone());
    let (got, want) = ((got * 2.0 + 1.0).powi_scalar(2).sum(), (want * 2.0 + 1.0).powi_scalar(2).sum());
    let (got, want) = (got.backward(), want.backward());
    for (name, ours, burns) in [("dq", q, of_q), ("dk", k, of_k), ("dv", v, of_v)] {
        close(target, name, ours.grad(&got).unwrap(), burns.grad(&want).unwrap());
    }
}

/// Environment variable of the process that runs the test.
const ALONE: &str = "FLASH_TEST_ALONE";

/// Runs in a separate process, which is killed and started again if it hangs: CubeCL tunes Burn's own backward here, and has once waited
/// for a measurement forever (docs/upstream.md, "Without a program").
#[test]
fn burns_attention_is_caught_counted_and_given_back() {
    if std::env::var_os(ALONE).is_some() {
        return caught_counted_and_given_back();
    }
    for attempt in 1..=3 {
        let mut child = Command::new(std::env::current_exe().expect("the path of the test program"));
        child.args(["--exact", "burns_attention_is_caught_counted_and_given_back", "--nocapture"]).env(ALONE, "1");
        let mut child = child.spawn().expect("the test program must start again");
        if let Some(status) = child.wait_timeout(Duration::from_secs(400)).expect("the child must be waited for") {
            assert!(status.success(), "the test failed in its own process: {status}");
            return;
        }
        eprintln!("attempt {attempt} hangs and is killed");
        child.kill().and_then(|()| child.wait()).expect("the child must be killed");
    }
    panic!("three processes hang");
}

fn caught_counted_and_given_back() {
    let caught = install().expect("install() must succeed before the first operation");
    let Some(target) = targets().into_iter().find(|target| target.name != "flex") else { return };
    let device = &target.device;
    device.seed(0);
    let since = |before: &Counts, now: Counts| (now.forward - before.forward, now.backward - before.backward);

    // -- forwards, with every input of Burn's operation
    let [q, k, v] = [[1, 4, 7, 24], [1, 2, 10, 24], [1, 2, 10, 8]].map(|shape| random(shape, device));
    let repeated = |x: &Tensor<4>| {
        let [b, h, s, d] = x.dims();
        x.clone().reshape([b, h, 1, s, d]).expand([b, h, 2, s, d]).reshape([b, 2 * h, s, d])
    };
    let mask = random([1, 1, 7, 10], device).greater_elem(1.0);
    let bias = random([1, 4, 7, 10], device);
    for (masked, biased, is_causal) in [(false, false, false), (true, false, false), (true, true, true)] {
        let before = caught.counts();
        let (mask, bias) = (masked.then(|| mask.clone()), biased.then(|| bias.clone()));
        let options = AttentionModuleOptions { is_causal, ..Default::default() };
        let got = module::attention(q.clone(), k.clone(), v.clone(), mask.clone(), bias.clone(), options);
        let want = composed([q.clone(), repeated(&k), repeated(&v)], mask, bias, is_causal);
        close(&target, "forward", got, want);
        assert_eq!(since(&before, caught.counts()), (1, 0));
    }
    // The same tensor as q, k and v.
    let before = caught.counts();
    let x = random([1, 2, 5, 8], device);
    let got = module::attention(x.clone(), x.clone(), x.clone(), None, None, AttentionModuleOptions::default());
    close(&target, "self", got, composed([x.clone(), x.clone(), x], None, None, false));
    assert_eq!(since(&before, caught.counts()), (1, 0));

    // -- training, with different operations before attention
    let before = caught.counts();
    train(&target, |q| q);
    train(&target, |q| q * 1.5);
    train(&target, |q| (q * 1.5 + 0.1).tanh());
    train(&target, |q| q.swap_dims(2, 3).swap_dims(2, 3));
    assert_eq!(since(&before, caught.counts()), (4, 4));
    assert!(caught.counts().left.is_empty(), "{:?}", caught.counts());

    // -- unsupported calls run Burn's attention, and the reason is counted
    let before = caught.counts();
    let wide = random([1, 1, 4, 300], device);
    let options = AttentionModuleOptions::default();
    let got = module::attention(wide.clone(), wide.clone(), wide.clone(), None, None, options);
    close(&target, "wide", got, composed([wide.clone(), wide.clone(), wide], None, None, false));
    assert_eq!(since(&before, caught.counts()), (0, 0));
    let left = caught.counts().left;
    assert!(left.len() == 1 && left.iter().all(|(why, times)| why.contains("300") && *times == 1), "{left:?}");

    // -- dropped, installed twice, and one of the two dropped
    let before = caught.counts();
    drop(caught);
    train(&target, |q| q);
    let (first, second) = (install().unwrap(), install().unwrap());
    assert_eq!(since(&before, first.counts()), (0, 0));
    drop(first);
    train(&target, |q| q);
    assert_eq!(since(&before, second.counts()), (1, 1));
}
