//! A model that calls Burn's attention (`before.rs`), moved to flash attention by one changed line (`after.rs`).
//!
//! Runs both with the same weights, forward and backward, and fails if they differ.

#[rustfmt::skip] // Sorting the imports would turn one changed line into two.
mod after;
mod before;

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Distribution, Tensor};
use std::process::ExitCode;

/// Outputs and gradients are of the order of 1; sums in another order differ by less than this.
const TOLERANCE: f32 = 1e-3;

fn main() -> ExitCode {
    for (before, after) in include_str!("before.rs").lines().zip(include_str!("after.rs").lines()) {
        if before != after {
            println!("- {before}\n+ {after}");
        }
    }
    let device = device();
    println!("on {:?}", device.clone().inner());

    // [batch, sequence, width]
    let x = Tensor::<3>::random([2, 100, 64], Distribution::Normal(0.0, 1.0), &device);
    let before = before::SelfAttention::new(64, 4, &device);
    let after = after::SelfAttention::new(64, 4, &device).load_record(before.clone().into_record());

    let expected = run(&x, |x| before.forward(x), [&before.qkv, &before.output]);
    let found = run(&x, |x| after.forward(x), [&after.qkv, &after.output]);
    let differences = expected.into_iter().zip(found).map(|((name, expected), (_, found))| {
        let size = expected.clone().abs().max().into_scalar::<f32>();
        let difference = (found - expected).abs().max().into_scalar::<f32>();
        println!("{name:<28} up to {size:<5.3} differs by at most {difference:.1e}");
        difference
    });
    // A NaN fails the comparison.
    let same = differences.map(|difference| difference <= TOLERANCE).fold(true, |all, within| all & within);
    println!("{} within {TOLERANCE:e}", if same { "the same" } else { "NOT the same" });
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The output, and the gradients of the input and the weights for the loss `Σ sin(i) · output_i`.
fn run(
    x: &Tensor<3>,
    forward: impl FnOnce(Tensor<3>) -> Tensor<3>,
    [qkv, output]: [&Linear; 2],
) -> [(&'static str, Tensor<3>); 4] {
    let x = x.clone().detach().require_grad();
    let out = forward(x.clone());
    let sines = Tensor::arange(0..out.shape().num_elements() as i64, &x.device()).float().sin();
    let gradients = (out.clone() * sines.reshape(out.dims())).sum().backward();
    let of = |linear: &Linear| linear.weight.val().grad(&gradients).expect("weights have gradients").unsqueeze();
    [
        ("output", out.inner()),
        ("gradient of the input", x.grad(&gradients).expect("the input has a gradient")),
        ("gradient of qkv's weight", of(qkv)),
        ("gradient of output's weight", of(output)),
    ]
}

/// The CPU, where Burn's own gradients of causal attention are correct (docs/benchmark.md), or a GPU if Flex is not compiled in.
fn device() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex().autodiff();
    #[cfg(not(feature = "flex"))]
    Device::default().autodiff()
}
