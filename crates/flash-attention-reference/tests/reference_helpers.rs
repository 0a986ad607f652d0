//! Rounding, random numbers and error measures.

use flash_attention_kernels::Dtype;
use flash_attention_reference::{Error, normal, round_to};

fn rounded(value: f64, dtype: Dtype) -> f64 {
    let mut values = [value];
    round_to(&mut values, dtype);
    values[0]
}

#[test]
fn rounding_is_to_the_nearest_and_ties_go_to_even() {
    for (dtype, digits) in [(Dtype::F32, 24), (Dtype::F16, 11), (Dtype::BF16, 8)] {
        let ulp = 2f64.powi(1 - digits);
        for (value, expected) in [
            (1.0 + 0.4 * ulp, 1.0),
            (1.0 + 0.6 * ulp, 1.0 + ulp),
            (1.0 + 0.5 * ulp, 1.0),
            (1.0 + 1.5 * ulp, 1.0 + 2.0 * ulp),
            (-1.0 - 0.6 * ulp, -1.0 - ulp),
            (0.0, 0.0),
            (f64::NEG_INFINITY, f64::NEG_INFINITY),
        ] {
            assert_eq!(rounded(value, dtype), expected, "{value} to {dtype:?}");
        }
        assert!(rounded(f64::NAN, dtype).is_nan());
    }
}

#[test]
fn rounding_keeps_to_the_range_of_the_type() {
    assert_eq!(rounded(65504.0, Dtype::F16), 65504.0);
    assert_eq!(rounded(65520.0, Dtype::F16), f64::INFINITY);
    assert_eq!(rounded(65536.0, Dtype::BF16), 65536.0);
    assert_eq!(rounded(1e39, Dtype::F32), f64::INFINITY);
    assert_eq!(rounded(2f64.powi(-24), Dtype::F16), 2f64.powi(-24)); // the smallest number of f16
    assert_eq!(rounded(2f64.powi(-26), Dtype::F16), 0.0);
}

#[test]
fn rounding_twice_changes_nothing() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let mut once = normal(1000, 0);
        round_to(&mut once, dtype);
        let mut twice = once.clone();
        round_to(&mut twice, dtype);
        assert_eq!(once, twice);
        assert_ne!(once, normal(1000, 0));
    }
}

#[test]
fn normal_has_mean_zero_and_variance_one() {
    let values = normal(100_000, 3);
    let mean = values.iter().sum::<f64>() / 1e5;
    let variance = values.iter().map(|x| x * x).sum::<f64>() / 1e5;
    // Standard deviations of the two are 0.003 and 0.0045.
    assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "the mean is {mean}, the variance {variance}");
    assert_eq!(values[..10], normal(10, 3));
}

#[test]
fn errors_are_measured_in_blocks_of_64_rows() {
    let oracle = vec![0.0; 65 * 3];
    let mut computed = oracle.clone();
    computed[0] = -8.0;
    computed[64 * 3 + 1] = 3.0;
    let error = Error::between(&computed, &oracle, 3);
    assert_eq!(error.max, 8.0);
    assert_eq!(error.mean, 11.0 / 195.0);
    assert_eq!(error.block_rms, [(64.0f64 / 192.0).sqrt(), 3f64.sqrt()]);
}

#[test]
fn nan_and_infinity_are_infinite_errors_unless_the_oracle_has_them() {
    use f64 as f;
    let max = |computed, oracle| {
        let error = Error::between(&[0.0, computed], &[0.0, oracle], 1);
        assert_eq!((error.mean, error.block_rms[0] == 0.0), (error.max, error.max == 0.0));
        error.max
    };
    for x in [f::NAN, f::INFINITY, f::NEG_INFINITY] {
        assert_eq!(max(x, x), 0.0);
        assert_eq!(max(x, 1.0), f::INFINITY);
        assert_eq!(max(1.0, x), f::INFINITY);
    }
    assert_eq!(max(f::NAN, f::INFINITY), f::INFINITY);
    assert_eq!(max(f::INFINITY, f::NAN), f::INFINITY);
    assert_eq!(max(f::INFINITY, f::NEG_INFINITY), f::INFINITY);
}

#[test]
fn no_elements_are_no_error() {
    let error = Error::between(&[], &[], 4);
    assert_eq!((error.max, error.mean, error.block_rms), (0.0, 0.0, vec![]));
}
