//! Rounding to the kernels' element types.

use flash_attention_kernels::Dtype;
use half::{bf16, f16};

/// Rounds each value to the nearest one that `dtype` can represent, so that oracle and kernel start from the same inputs.
///
/// ```
/// use flash_attention_kernels::Dtype;
/// use flash_attention_reference::round_to;
///
/// let mut values = [0.1, 1.0, 1e9];
/// round_to(&mut values, Dtype::F16);
/// assert_eq!(values, [0.0999755859375, 1.0, f64::INFINITY]); // f16 ends at 65504
/// ```
pub fn round_to(values: &mut [f64], dtype: Dtype) {
    for value in values {
        *value = rounded(*value, dtype);
    }
}

/// Nearest number that `dtype` can represent.
pub(crate) fn rounded(value: f64, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(value as f32),
        Dtype::F16 => f16::from_f64(value).to_f64(),
        Dtype::BF16 => bf16::from_f64(value).to_f64(),
    }
}
