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

/// Shapes of the tensors that there may be beside `q`, `k` and `v`.
#[derive(Default)]
pub(crate) struct Shapes {
    pub mask: Option<Vec<usize>>,
    pub bias: Option<Vec<usize>>,
    pub alibi_slopes: Option<Vec<usize>>,
    pub sinks: Option<Vec<usize>>,
    pub seq_lens_q: Option<Vec<usize>>,
    pub seq_lens_k: Option<Vec<usize>>,
    pub cu_seqlens_q: Option<Vec<usize>>,
    pub cu_seqlens_k: Option<Vec<usize>>,
    pub score_tensors: Vec<Vec<usize>>,
    pub mask_tensors: Vec<Vec<usize>>,
    /// With the sizes of a block.
    pub block_mask: Option<(Vec<usize>, [usize; 2])>,
}

/// The problem, validated as far as that needs no device.
pub(crate) fn problem(
    [q, k, v]: [&[usize]; 3],
    shapes: Shapes,
    dtype: Dtype,
    options: AttentionOptions,
) -> Result<AttentionProblem, AttentionError> {
    let mut problem = AttentionProblem::new(q, k, v, dtype, options)?;
    if let Some(mask) = shapes.mask {
        problem = problem.with_mask(&mask)?;
    }
    if let Some(bias) = shapes.bias {
        problem = problem.with_bias(&bias)?;
    }
    if let Some(slopes) = shapes.alibi_slopes {
        problem = problem.with_alibi_slopes(&slopes)?;
    }
    if let Some(sinks) = shapes.sinks {
        problem = problem.with_sinks(&sinks)?;
    }
    if let Some(lens) = shapes.seq_lens_q {
        problem = problem.with_seq_lens_q(&lens)?;
    }
    if let Some(lens) = shapes.seq_lens_k {
        problem = problem.with_seq_lens_k(&lens)?;
    }
    if !shapes.score_tensors.is_empty() {
        problem = problem.with_score_tensors(&slices(&shapes.score_tensors))?;
    }
    if !shapes.mask_tensors.is_empty() {
        problem = problem.with_mask_tensors(&slices(&shapes.mask_tensors))?;
    }
    if let Some((states, [block_q, block_k])) = shapes.block_mask {
        problem = problem.with_block_mask(&states, block_q, block_k)?;
    }
    match (shapes.cu_seqlens_q, shapes.cu_seqlens_k) {
        (Some(q), Some(k)) => problem = problem.with_cu_seqlens(&q, &k)?,
        (None, None) => {}
        (q, _) => {
            return Err(AttentionError::Unsupported {
                option: if q.is_some() { "cu_seqlens_k" } else { "cu_seqlens_q" },
                value: "no tensor".into(),
                why: "queries and keys are packed alike: cu_seqlens_q and cu_seqlens_k come together",
            });
        }
    }
    Ok(problem)
}

fn slices(shapes: &[Vec<usize>]) -> Vec<&[usize]> {
    shapes.iter().map(Vec::as_slice).collect()
}
