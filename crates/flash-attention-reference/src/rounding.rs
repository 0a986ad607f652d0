//! The roundings of kernels.

use crate::dtype::rounded;
use flash_attention_kernels::Dtype;
use std::borrow::Cow;

/// Roundings of a kernel, one method for each place where it rounds. Everything else is computed in f64.
pub(crate) trait Rounding: Copy + Sync {
    /// Whether `delta` is `dout·o` of the rounded output. Otherwise it is `Σ p∘dp`.
    const READS_OUTPUT: bool;

    /// An input, rounded as a factor of a matrix product.
    fn factors<'a>(&self, values: &'a [f64]) -> Cow<'a, [f64]>;

    /// A probability or the gradient of a score, rounded as a factor of a matrix product.
    fn operand(&self, value: f64) -> f64;

    /// A probability, rounded as the forward multiplies it: as an exponential relative to a score near the row's highest. `highest` is the
    /// probability of that highest score.
    fn weight(&self, p: f64, highest: f64) -> f64;

    /// Standard deviation of an operand's rounding error.
    fn deviation(&self, value: f64) -> f64;

    /// Standard deviation of the rounding error of a written element.
    fn writing(&self, value: f64) -> f64;

    /// An element of the output or of a gradient, rounded to the dtype of the inputs.
    fn written(&self, value: f64) -> f64;
}

/// The oracle's rounding: none.
#[derive(Clone, Copy)]
pub(crate) struct Exact;

impl Rounding for Exact {
    const READS_OUTPUT: bool = false;

    fn factors<'a>(&self, values: &'a [f64]) -> Cow<'a, [f64]> {
        Cow::Borrowed(values)
    }

    fn operand(&self, value: f64) -> f64 {
        value
    }

    fn weight(&self, p: f64, _highest: f64) -> f64 {
        p
    }

    fn deviation(&self, _value: f64) -> f64 {
        0.0
    }

    fn writing(&self, _value: f64) -> f64 {
        0.0
    }

    fn written(&self, value: f64) -> f64 {
        value
    }
}

/// Type to which the factors of a kernel's matrix products are rounded.
///
/// ```
/// use flash_attention_reference::Operands;
///
/// // Kernels without matrix instructions multiply in f32, whatever the dtype of the inputs is.
/// assert_ne!(Operands::F32, Operands::Inputs);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operands {
    /// Not rounded: products are computed in f32.
    F32,
    /// TF32, ties away from zero. The inputs are rounded to TF32 as well.
    Tf32,
    /// The dtype of the inputs.
    Inputs,
}

/// Roundings of a kernel. It computes in f32. It rounds probabilities before multiplying them by `v` and `dout`, and gradients of scores
/// before multiplying them by `k` and `q`. It writes outputs and gradients in the dtype of the inputs. Its backward reads the rounded
/// output.
///
/// ```
/// use flash_attention_kernels::Dtype;
/// use flash_attention_reference::{Emulation, Operands};
///
/// let tensor_cores = Emulation { dtype: Dtype::BF16, operands: Operands::Inputs };
/// assert_eq!(tensor_cores.unit(), 2f64.powi(-8));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulation {
    /// The dtype of the inputs, the output and their gradients.
    pub dtype: Dtype,
    /// Type to which factors of matrix products are rounded.
    pub operands: Operands,
}

impl Emulation {
    /// Largest relative rounding error of the dtype.
    pub fn unit(&self) -> f64 {
        2f64.powi(-self.digits())
    }

    /// Bits of the dtype's significand.
    fn digits(&self) -> i32 {
        match self.dtype {
            Dtype::F32 => 24,
            Dtype::F16 => 11,
            Dtype::BF16 => 8,
        }
    }
}

/// Mean of `1 / m²` over significands `m` from 1 to 2, if every octave has equally many numbers: `3 / (8 ln 2)`.
const SIGNIFICANDS: f64 = 0.541_010_640_333_613_1;

/// Standard deviation of a number drawn uniformly between two neighbours of a value.
fn between_neighbours(value: f64, digits: i32, lowest: i32) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let exponent = (value.abs().log2().floor() as i32).max(lowest);
    2f64.powi(exponent + 1 - digits) / 12f64.sqrt()
}

impl Rounding for Emulation {
    const READS_OUTPUT: bool = true;

    fn factors<'a>(&self, values: &'a [f64]) -> Cow<'a, [f64]> {
        match self.operands {
            Operands::Tf32 => Cow::Owned(values.iter().map(|value| tf32(*value)).collect()),
            Operands::F32 | Operands::Inputs => Cow::Borrowed(values),
        }
    }

    fn operand(&self, value: f64) -> f64 {
        match self.operands {
            Operands::F32 => value,
            Operands::Tf32 => tf32(value),
            Operands::Inputs => rounded(value, self.dtype),
        }
    }

    fn weight(&self, p: f64, highest: f64) -> f64 {
        if self.operands == Operands::F32 || highest <= 0.0 {
            return p;
        }
        // Dividing by a power of two keeps the significands. Dividing by the highest probability itself would make that one exact.
        let near = 2f64.powi(highest.log2().floor() as i32);
        self.operand(p / near) * near
    }

    /// The score that exponentials are relative to is not known, so a rounded significand may be any.
    fn deviation(&self, value: f64) -> f64 {
        let digits = match self.operands {
            Operands::F32 => return 0.0,
            Operands::Tf32 => 11,
            Operands::Inputs => self.digits(),
        };
        let relative = 2f64.powi(1 - digits) * (SIGNIFICANDS / 12.0).sqrt() * value.abs();
        let smallest = if self.dtype == Dtype::F16 { 2f64.powi(-24) / 12f64.sqrt() } else { 0.0 };
        if value == 0.0 { 0.0 } else { relative.max(smallest) }
    }

    fn writing(&self, value: f64) -> f64 {
        between_neighbours(value, self.digits(), if self.dtype == Dtype::F16 { -14 } else { -126 })
    }

    fn written(&self, value: f64) -> f64 {
        rounded(value, self.dtype)
    }
}

/// Nearest number with ten fraction bits, ties away from zero, as in `cvt.rna.tf32.f32` (PTX ISA 8.7, section 9.7.9.21).
fn tf32(value: f64) -> f64 {
    let value = value as f32;
    if !value.is_finite() {
        return f64::from(value);
    }
    f64::from(f32::from_bits((value.to_bits() + 0x1000) & !0x1fff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_has_eleven_digits_and_ties_go_away_from_zero() {
        let unit = 2f64.powi(-10);
        for (value, expected) in [
            (1.0 + 0.49 * unit, 1.0),
            (1.0 + 0.5 * unit, 1.0 + unit),
            (-1.0 - 0.5 * unit, -1.0 - unit),
            (1.0 + 1.5 * unit, 1.0 + 2.0 * unit),
            (0.0, 0.0),
            (f64::INFINITY, f64::INFINITY),
        ] {
            assert_eq!(tf32(value), expected, "{value}");
        }
    }

    #[test]
    fn the_error_of_writing_is_that_of_a_draw_between_neighbours() {
        for dtype in [Dtype::F16, Dtype::BF16] {
            let emulation = Emulation { dtype, operands: Operands::Inputs };
            // Numbers between 1 and 2 are equally spaced.
            let values: Vec<f64> = (0..10_000).map(|n| 1.0 + f64::from(n) * 0.999_97e-4).collect();
            let squares = values.iter().map(|value| (emulation.written(*value) - value).powi(2));
            let found = (squares.sum::<f64>() / values.len() as f64).sqrt();
            assert!((found / emulation.writing(1.5) - 1.0).abs() < 0.02, "{dtype:?}: {found}");
        }
    }
}
