//! Functions applied to each score, without calls and branches, so that compilers vectorize them.

use pulp::Arch;

/// Runs `f` with the widest vector instructions of this machine. Loops in `f` are compiled once for each instruction set, so every function
/// between here and the loop has to be inlined. Closures passed in are marked accordingly.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(f)
}

/// Number of partial sums and maxima. It is fixed, so that results do not depend on the machine's vector width.
const LANES: usize = 16;

/// eˣ within 2 ulp; 0 below −87. NaN stays NaN.
///
/// Cody and Waite's reduction, `x = n·ln 2 + r`, with the polynomial of the Cephes library.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5·2²³ leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    let y = (p * r * r + r + 1.0) * power;
    let y = if x < -87.0 { 0.0 } else { y };
    if x > 88.0 { f32::INFINITY } else { y }
}

/// tanh x within 2 ulp. NaN stays NaN.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3;
    p = p * z + 2.063_909e-2;
    p = p * z - 5.373_971_6e-2;
    p = p * z + 1.333_144_2e-1;
    p = p * z - 3.333_328e-1;
    let near = x + x * z * p;
    let a = if x.abs() > 10.0 { 10.0 } else { x.abs() };
    let far = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < 0.625 { near } else { far }
}

/// Maximum; −∞ for an empty row. NaN is ignored.
#[inline(always)]
pub fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = if x > *lane { x } else { *lane };
    }
    let mut half = LANES / 2;
    while half > 0 {
        for n in 0..half {
            lanes[n] = if lanes[n + half] > lanes[n] { lanes[n + half] } else { lanes[n] };
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of the lanes by halves, so that additions do not wait for each other.
#[inline(always)]
fn sum(lanes: [f32; LANES]) -> f32 {
    // Written out: compilers turn a loop over halves into scalar additions.
    let eight: [f32; 8] = std::array::from_fn(|n| lanes[n] + lanes[n + 8]);
    let four: [f32; 4] = std::array::from_fn(|n| eight[n] + eight[n + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Replaces each `x` by `exp(x − shift)` and returns the sum.
#[inline(always)]
pub fn exp_sum(row: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - shift);
            *lane += *x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *x = exp(*x - shift);
        *lane += *x;
    }
    sum(lanes)
}

/// Σ a·b.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(rest) {
        *lane += a * b;
    }
    sum(lanes)
}

/// Whether every number is finite.
#[inline(always)]
pub fn all_finite(row: &[f32]) -> bool {
    let largest = row.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
    largest < f32::INFINITY.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_tanh_are_those_of_f64_within_2_ulp() {
        let ulps =
            |got: f32, want: f64| (f64::from(got) - want).abs() / f64::from((want as f32).next_up() - want as f32);
        for n in -87_000..88_000 {
            let x = n as f32 / 1000.0;
            assert!(ulps(exp(x), f64::from(x).exp()) <= 2.0, "exp({x}) = {}", exp(x));
        }
        for n in -20_000..20_000 {
            let x = n as f32 / 1000.0 + 1e-4;
            assert!(ulps(tanh(x), f64::from(x).tanh()).abs() <= 3.0, "tanh({x}) = {}", tanh(x));
        }
    }

    #[test]
    fn what_is_not_a_number_stays_so_and_minus_infinity_is_zero() {
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert_eq!((exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (0.0, f32::INFINITY));
        assert_eq!((tanh(f32::NEG_INFINITY), tanh(f32::INFINITY)), (-1.0, 1.0));
        assert!(!all_finite(&[0.0, f32::NAN]) && !all_finite(&[f32::NEG_INFINITY]) && all_finite(&[f32::MAX, -0.0]));
    }

    #[test]
    fn sums_take_the_remainder_too() {
        let mut row: Vec<f32> = (0..37).map(|x| x as f32).collect();
        assert_eq!(max(&row), 36.0);
        assert_eq!(dot(&row, &row), (0..37).map(|x| (x * x) as f32).sum::<f32>());
        row.fill(1.0);
        assert_eq!(exp_sum(&mut row, 1.0), 37.0);
        assert_eq!(row, [1.0; 37]);
    }
}
