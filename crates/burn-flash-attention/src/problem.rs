//! From the shapes and dtypes of Burn's tensors to the problem that they pose.

use crate::tensors::Tensors;
use burn::tensor::{DType, Tensor};
use flash_attention_kernels::mods::TENSORS;
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

/// The problem of these shapes, validated as far as that needs no device. `block_sizes`: queries and keys of a block of the block mask.
pub(crate) fn problem(
    [q, k, v]: [&[usize]; 3],
    shapes: &Tensors<Vec<usize>>,
    [block_q, block_k]: [usize; 2],
    dtype: Dtype,
    options: AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    let mut problem = AttentionProblem::new(q, k, v, dtype, options)?;
    if let Some(mask) = &shapes.mask {
        problem = problem.with_mask(mask)?;
    }
    if let Some(bias) = &shapes.bias {
        problem = problem.with_bias(bias)?;
    }
    if let Some(slopes) = &shapes.alibi_slopes {
        problem = problem.with_alibi_slopes(slopes)?;
    }
    if let Some(sinks) = &shapes.sinks {
        problem = problem.with_sinks(sinks)?;
    }
    if let Some(lens) = &shapes.seq_lens_q {
        problem = problem.with_seq_lens_q(lens)?;
    }
    if let Some(lens) = &shapes.seq_lens_k {
        problem = problem.with_seq_lens_k(lens)?;
    }
    if shapes.score_a.is_some() {
        problem = problem.with_score_tensors(&slices(&present(shapes.score_tensors())))?;
    }
    if shapes.mask_a.is_some() {
        problem = problem.with_mask_tensors(&slices(&present(shapes.mask_tensors())))?;
    }
    problem = with_cu_seqlens(problem, shapes.cu_seqlens_q.as_deref(), shapes.cu_seqlens_k.as_deref())?;
    // The shape of a block mask depends on the number of sequences.
    if let Some(states) = &shapes.block_mask {
        problem = problem.with_block_mask(states, block_q, block_k)?;
    }
    Ok(problem)
}

/// The problem with packed sequences, if both tensors are there.
pub(crate) fn with_cu_seqlens(
    problem: AttentionProblem,
    q: Option<&[usize]>,
    k: Option<&[usize]>,
) -> Result<AttentionProblem, AttentionError> {
    match (q, k) {
        (Some(q), Some(k)) => problem.with_cu_seqlens(q, k),
        (None, None) => Ok(problem),
        (q, _) => Err(AttentionError::Unsupported {
            option: if q.is_some() { "cu_seqlens_k" } else { "cu_seqlens_q" },
            value: "no tensor".into(),
            why: "cu_seqlens_q and cu_seqlens_k must be given together",
        }),
    }
}

fn present(shapes: [Option<&Vec<usize>>; TENSORS]) -> Vec<&Vec<usize>> {
    shapes.into_iter().flatten().collect()
}

/// The shapes of tensors.
pub(crate) fn dims(tensors: &[Tensor<4>]) -> Vec<[usize; 4]> {
    tensors.iter().map(Tensor::dims).collect()
}

/// Shapes, as problems take them.
pub(crate) fn slices<S: AsRef<[usize]>>(shapes: &[S]) -> Vec<&[usize]> {
    shapes.iter().map(AsRef::as_ref).collect()
}
