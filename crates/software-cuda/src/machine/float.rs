//! Floating-point operations of PTX that Rust lacks: half precision, flushing of subnormals, minima and maxima, approximations.

/// NaN that f32 arithmetic returns.
const NAN: f32 = f32::from_bits(0x7FFF_FFFF);

/// f16 as f32.
#[inline(always)]
pub fn from_f16(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7FFF) << 13;
    // The biases of the exponents differ by 112. Multiplying by 2¹¹² adds that and also normalizes subnormals.
    let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let bits = if half & 0x7C00 == 0x7C00 { magnitude | 0x7F80_0000 } else { finite };
    f32::from_bits(bits | u32::from(half & 0x8000) << 16)
}

/// f32 as f16, rounded to nearest even.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // For a subnormal result, the sum aligns the last bit and rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let normal = magnitude.wrapping_add(0xC800_0FFF).wrapping_add(magnitude >> 13 & 1) >> 13;
    let half = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let half = if magnitude >= 0x4780_0000 { 0x7C00 } else { half };
    if magnitude > 0x7F80_0000 { 0x7FFF } else { (half | bits >> 16 & 0x8000) as u16 }
}

/// bf16 as f32.
#[inline(always)]
pub fn from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// f32 as bf16, rounded to nearest even.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF).wrapping_add(bits >> 16 & 1) >> 16;
    if x.is_nan() { 0x7FFF } else { rounded as u16 }
}

/// f32 as bf16, rounded towards zero.
#[inline(always)]
pub fn cut_to_bf16(x: f32) -> u16 {
    if x.is_nan() { 0x7FFF } else { (x.to_bits() >> 16) as u16 }
}

/// f64 as f16, rounded once: the intermediate f32 is rounded to odd.
pub fn f64_to_f16(x: f64) -> u16 {
    let nearest = x as f32;
    let inexact = f64::from(nearest) != x && nearest.is_finite();
    if !inexact {
        return to_f16(nearest);
    }
    let bits = nearest.to_bits();
    let cut = if f64::from(nearest).abs() > x.abs() { bits - 1 } else { bits };
    to_f16(f32::from_bits(cut | 1))
}

/// f32 as tf32, ties away from zero.
#[inline(always)]
pub fn to_tf32(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits & 0x7F80_0000 == 0x7F80_0000 {
        return if x.is_nan() { 0x7FFF_FFFF } else { bits };
    }
    bits.wrapping_add(0x1000) & 0xFFFF_E000
}

/// e4m3 as f16, which represents all of its numbers.
#[inline(always)]
pub fn e4m3_to_f16(code: u8) -> u16 {
    let magnitude = code & 0x7F;
    let value = match (magnitude >> 3, magnitude & 7) {
        (15, 7) => f32::NAN,
        (0, fraction) => f32::from(fraction) * 2f32.powi(-9),
        (exponent, fraction) => f32::from(8 + fraction) * 2f32.powi(i32::from(exponent) - 10),
    };
    to_f16(if code & 0x80 == 0 { value } else { -value })
}

/// Replaces a subnormal number by zero.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7F80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// Minimum, with `-0` below `0`. A NaN is ignored if the other number is none.
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    let smaller = if a < b { a } else { b };
    let smaller = if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { smaller };
    let smaller = if b.is_nan() { a } else { smaller };
    if a.is_nan() && b.is_nan() { NAN } else { smaller }
}

/// Maximum, with `0` above `-0`. A NaN is ignored if the other number is none.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    let larger = if a > b { a } else { b };
    let larger = if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { larger };
    let larger = if b.is_nan() { a } else { larger };
    if a.is_nan() && b.is_nan() { NAN } else { larger }
}

/// Minimum, or NaN if one of the numbers is NaN.
#[inline(always)]
pub fn min_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { NAN } else { min(a, b) }
}

/// Maximum, or NaN if one of the numbers is NaN.
#[inline(always)]
pub fn max_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { NAN } else { max(a, b) }
}

/// `a · b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// `2^x` with an error of about 2^-23, without a call.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // Beyond these bounds the result is 0 or infinity. NaN stays NaN.
    let clamped = if x > 200.0 { 200.0 } else { x };
    let clamped = if clamped < -200.0 { -200.0 } else { clamped };
    // Adding 1.5 · 2^23 rounds to an integer, which is then in the low bits.
    let shifted = clamped + 12_582_912.0;
    let whole = shifted.to_bits().wrapping_sub(12_582_912f32.to_bits()) as i32;
    let rest = f64::from(clamped - (shifted - 12_582_912.0)) * std::f64::consts::LN_2;
    let mut sum = 1.0 / 40_320.0;
    for factor in [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = f64::mul_add(sum, rest, factor);
    }
    let power = f64::from_bits(((whole + 1023) as u64) << 52);
    let result = (sum * power) as f32;
    if x.is_nan() { NAN } else { result }
}

/// `log2 x`.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    let bits = f64::from(x).to_bits();
    // The mantissa lies between √½ and √2.
    let shifted = bits.wrapping_sub(0x3FE6_A09E_667F_3BCD);
    let exponent = (shifted as i64 >> 52) as i32;
    let mantissa = f64::from_bits(bits.wrapping_sub(((exponent as i64) << 52) as u64));
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 1.0 / 15.0;
    for factor in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        sum = f64::mul_add(sum, square, factor);
    }
    let result = (f64::from(exponent) + 2.0 * std::f64::consts::LOG2_E * s * sum) as f32;
    let result = if x == f32::INFINITY { x } else { result };
    let result = if x == 0.0 { f32::NEG_INFINITY } else { result };
    if x < 0.0 || x.is_nan() { NAN } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_comes_back() {
        for half in 0..=u16::MAX {
            if from_f16(half).is_nan() {
                assert_eq!(to_f16(from_f16(half)), 0x7FFF);
            } else {
                assert_eq!(to_f16(from_f16(half)), half);
                assert_eq!(f64_to_f16(f64::from(from_f16(half))), half);
            }
            if !from_bf16(half).is_nan() {
                assert_eq!(to_bf16(from_bf16(half)), half);
            }
        }
    }

    #[test]
    fn halves_round_to_even() {
        assert_eq!(from_f16(0x0001), 2f32.powi(-24));
        for (x, half) in [(65519.0, 0x7BFF), (65520.0, 0x7C00), (1.0 + 2f32.powi(-11), 0x3C00), (2f32.powi(-25), 0)] {
            assert_eq!(to_f16(x), half, "{x}");
        }
        assert_eq!(to_f16(1.0 + 3.0 * 2f32.powi(-11)), 0x3C02);
        assert_eq!(to_f16(3.0 * 2f32.powi(-25)), 2);
        assert_eq!(to_f16(-1e-30), 0x8000);
        assert_eq!(to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82);
    }

    #[test]
    fn approximations_are_close() {
        for n in -30_000..25_600 {
            let x = n as f32 / 200.0;
            let want = f64::from(x).exp2();
            assert!((f64::from(exp2(x)) - want).abs() <= want * 2f64.powi(-23) + 1e-45, "{x}");
            let y = want as f32;
            if y > 0.0 {
                let want = f64::from(y).log2();
                assert!((f64::from(log2(y)) - want).abs() <= want.abs() * 2f64.powi(-23), "{y}");
            }
        }
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!([exp2(f32::INFINITY), exp2(128.0)], [f32::INFINITY; 2]);
        assert!(exp2(f32::NAN).is_nan() && log2(-1.0).is_nan());
        assert_eq!(log2(0.0), f32::NEG_INFINITY);
        assert_eq!(log2(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn minima_pass_nan_over() {
        assert_eq!(min(f32::NAN, 1.0), 1.0);
        assert_eq!(max(1.0, f32::NAN), 1.0);
        assert!(min_nan(1.0, f32::NAN).is_nan() && max_nan(f32::NAN, 1.0).is_nan());
        assert!(min(0.0, -0.0).is_sign_negative() && max(-0.0, 0.0).is_sign_positive());
    }
}
