//! From the shapes and dtypes of Burn's tensors to the problem that they pose.

use burn::tensor::DType;
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, Dtype};

/// The kernels' name of a dtype, if attention is defined for it.
pub(crate) fn dtype(argument: &'static str, dtype: DType) -> Result<Dtype, AttentionError> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        other => Err(AttentionError::Dtype { argument, dtype: other.name().to_string() }),
    }
}

/// The problem, validated as far as that needs no device.
pub(crate) fn problem(
    [q, k, v]: [&[usize]; 3],
    mask: Option<&[usize]>,
    bias: Option<&[usize]>,
    dtype: Dtype,
    options: AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    let mut problem = AttentionProblem::new(q, k, v, dtype, options)?;
    if let Some(mask) = mask {
        problem = problem.with_mask(mask)?;
    }
    if let Some(bias) = bias {
        problem = problem.with_bias(bias)?;
    }
    Ok(problem)
}
