//! Comparison of results with those of composed operations and of the oracle.

use super::{Data, How, Results, Target, Tracked, composed, flash};
use burn::tensor::{Tensor, Tolerance};
use flash_attention_kernels::Dtype;
use flash_attention_reference::{self as reference, Comparison, Judged};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Tolerance for comparisons with Burn's operations in f32. On CUDA Burn's products round their factors to tf32.
pub fn burns_own(target: &Target) -> Tolerance<f32> {
    Tolerance::absolute(if target.name == "cuda" { 5e-3 } else { 1e-5 })
}

/// Asserts that our result is close to that of Burn's operations.
pub fn close<const D: usize>(target: &Target, what: &str, ours: Tensor<D>, burns: Tensor<D>) {
    let (ours, burns) = (ours.into_data(), burns.into_data());
    // The absolute bound of tf32 is for elements of about 1. Gradients of weights are larger sums.
    let squares = burns.iter::<f32>().map(|x| x * x).sum::<f32>();
    let rms = (squares / burns.num_elements().max(1) as f32).sqrt();
    let tolerance = if target.name == "cuda" { Tolerance::absolute(5e-3 * rms.max(1.0)) } else { burns_own(target) }
        .set_relative(1e-4);
    let compared = catch_unwind(AssertUnwindSafe(|| ours.assert_approx_eq::<f32>(&burns, tolerance)));
    assert!(compared.is_ok(), "{what} on {}: {ours}, expected {burns}", target.name);
}

/// Runs a case and checks its errors. In f32 they are compared with the errors of the same mathematics composed of Burn's operations:
/// outputs at most twice, gradients at most three times as large (plus a floor), mean errors 1.5 times, each block of 64 rows three times.
/// In half precision composed operations round intermediate results, so [`check_near`] is used instead.
pub fn check(data: &Data, target: &Target, how: How) {
    check_results(data, target, how, &flash(data, target, how));
}

/// [`check`] of outputs that were found in another way.
pub fn check_found(data: &Data, target: &Target, found: &Results) {
    check_results(data, target, How { tracked: Tracked::NONE, ..How::default() }, found);
}

fn check_results(data: &Data, target: &Target, how: How, found: &Results) {
    if data.problem.dtype != Dtype::F32 {
        return near(data, target, how, found);
    }
    let name = format!("{:?} {how:?} on {}", data.problem, target.name);
    compare(&name, data, found, &composed(data, target, how), &data.oracle(how));
}

/// Runs a case and asserts that its errors are within the bounds for a kernel's roundings, and that a gradient scaled by 1.02 would not be.
/// Also used for small problems, whose composed operations may happen to be exact.
pub fn check_near(data: &Data, target: &Target, how: How) {
    near(data, target, how, &flash(data, target, how));
}

fn near(data: &Data, target: &Target, how: How, found: &Results) {
    let problem = &data.problem;
    let kernel = target.expected_kernel(problem);
    let [exact, emulated, spread] = data.expected(how, kernel);
    let name = |what: &str| format!("{what} of {problem:?} {how:?} on {}", target.name);
    let all = [found, &exact, &emulated, &spread].map(|of| of.tensors(problem));
    for nth in 0..all[0].len() {
        let [(what, row_len, found), (_, _, exact), (_, _, emulated), (_, _, spread)] =
            all.each_ref().map(|of| of[nth]);
        assert_eq!(found.map(<[f64]>::len), exact.map(<[f64]>::len), "{}", name(what));
        let (Some(computed), Some(exact), Some(emulated)) = (found, exact, emulated) else { continue };
        let judged = if what == "out" { Judged::Output } else { Judged::Gradient };
        let (name, dtype) = (name(what), problem.dtype);
        let comparison = Comparison { name: &name, judged, dtype, row_len, computed, exact, emulated, spread };
        comparison.binds().unwrap_or_else(|unfit| panic!("{unfit}"));
    }
    close_lse(&name("lse"), problem.dtype, &found.lse, &exact.lse);
}

pub fn compare(name: &str, data: &Data, flash: &Results, composed: &Results, oracle: &Results) {
    let problem = &data.problem;
    let (d, dv) = (problem.head_dim, problem.head_dim_v);
    let bias_row = problem.bias.map_or(1, |shape| shape[3].max(1));
    within(&format!("out, {name}"), [&flash.out, &composed.out, &oracle.out], dv, 2.0, 1e-5);
    for (what, row, [flash, composed, oracle]) in [
        ("dq", d, [&flash.dq, &composed.dq, &oracle.dq]),
        ("dk", d, [&flash.dk, &composed.dk, &oracle.dk]),
        ("dv", dv, [&flash.dv, &composed.dv, &oracle.dv]),
        ("dbias", bias_row, [&flash.dbias, &composed.dbias, &oracle.dbias]),
    ] {
        assert_eq!(flash.is_some(), oracle.is_some(), "whether there is a {what} (left) and should be (right), {name}");
        if let (Some(flash), Some(composed), Some(oracle)) = (flash, composed, oracle) {
            within(&format!("{what}, {name}"), [flash, composed, oracle], row, 3.0, 3e-4);
        }
    }
    // These gradients have few elements, each a sum over many pairs, so only their largest error is compared, relative to the
    // largest element.
    for (what, [flash, composed, oracle]) in [
        ("dalibi_slopes", [&flash.dslopes, &composed.dslopes, &oracle.dslopes]),
        ("dsinks", [&flash.dsinks, &composed.dsinks, &oracle.dsinks]),
        ("da", [&flash.dtensors[0], &composed.dtensors[0], &oracle.dtensors[0]]),
        ("db", [&flash.dtensors[1], &composed.dtensors[1], &oracle.dtensors[1]]),
    ] {
        assert_eq!(flash.is_some(), oracle.is_some(), "whether there is a {what} (left) and should be (right), {name}");
        if let (Some(flash), Some(composed), Some(oracle)) = (flash, composed, oracle) {
            let [ours, theirs] = [flash, composed].map(|found| reference::Error::between(found, oracle, 1).max);
            let size = oracle.iter().fold(1.0f64, |size, x| size.max(x.abs()));
            assert!(ours <= 3.0 * theirs + 1e-4 * size, "{what}, {name}: largest error {ours}, composed {theirs}");
        }
    }
    close_lse(&format!("lse, {name}"), problem.dtype, &flash.lse, &oracle.lse);
}

fn close_lse(name: &str, dtype: Dtype, found: &[f64], oracle: &[f64]) {
    assert_eq!(found.len(), oracle.len(), "{name}: length");
    let tolerance = if dtype == Dtype::F32 { 1e-5 } else { 1e-3 };
    for (row, (found, oracle)) in found.iter().zip(oracle).enumerate() {
        let near = (found - oracle).abs() <= tolerance * (1.0 + oracle.abs());
        assert!(near || found == oracle, "{name}: row {row} is {found}, the oracle has {oracle}");
    }
}

fn within(what: &str, [flash, composed, oracle]: [&[f64]; 3], row: usize, factor: f64, floor: f64) {
    let ours = reference::Error::between(flash, oracle, row);
    let theirs = reference::Error::between(composed, oracle, row);
    assert!(ours.max <= factor * theirs.max + floor, "{what}: largest error {}, composed {}", ours.max, theirs.max);
    // One unit in the last place of f32 is always allowed, because the composed operations may be exact.
    let rms = (oracle.iter().map(|x| x * x).sum::<f64>() / oracle.len().max(1) as f64).sqrt();
    let unit = f64::from(f32::EPSILON) * rms.max(1.0);
    // Skipped: gradients that are mathematically 0 (a bias that shifts whole rows, a single key) are pure rounding error, and the
    // mean of few elements is random.
    if rms < 1e-9 || oracle.len() < 32 {
        return;
    }
    assert!(ours.mean <= 1.5 * theirs.mean + unit, "{what}: mean error {}, composed {}", ours.mean, theirs.mean);
    for (block, (ours, theirs)) in ours.block_rms.iter().zip(&theirs.block_rms).enumerate() {
        assert!(*ours <= 3.0 * theirs + unit, "{what}: block {block} has error {ours}, composed {theirs}");
    }
}
