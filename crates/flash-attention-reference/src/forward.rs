//! `o = softmax(scores) · v`, row by row.

use crate::Inputs;
use crate::rounding::{Exact, Rounding};
use crate::row::{Row, add_scaled, vector};
use flash_attention_kernels::AttentionProblem;
use rayon::prelude::*;

/// Result of attention.
///
/// ```
/// use flash_attention_reference::Output;
///
/// // A row that sees no key.
/// let fully_masked = Output { o: vec![0.0; 64], lse: vec![f64::NEG_INFINITY] };
/// # assert_eq!(fully_masked.lse[0].exp(), 0.0);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub o: Vec<f64>,
    /// Natural logarithm of each row's sum of exponentials: `[batch, num_heads_q, seq_q]`.
    pub lse: Vec<f64>,
}

/// Attention by its definition: the softmax of the scores, times `v`.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_reference::{Inputs, forward};
///
/// // Two equal keys: half of each value.
/// let kv = [1, 1, 2, 1];
/// let problem = AttentionProblem::new(&[1, 1, 1, 1], &kv, &kv, Dtype::F32, AttentionOptions::default())?;
/// let inputs = Inputs { q: &[0.0], k: &[5.0, 5.0], v: &[1.0, 3.0], ..Default::default() };
/// let output = forward(&problem, &inputs);
/// assert!((output.o[0] - 2.0).abs() < 1e-12);
/// assert!((output.lse[0] - 2.0f64.ln()).abs() < 1e-12);
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
///
/// # Panics
///
/// If the length of an input does not match the problem.
pub fn forward(problem: &AttentionProblem, inputs: &Inputs) -> Output {
    inputs.check(problem);
    let rows: Vec<(Vec<f64>, f64)> =
        (0..problem.rows()).into_par_iter().map(|row| forward_row(problem, inputs, row)).collect();
    let (o, lse): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    Output { o: o.concat(), lse }
}

/// `o` and `lse` of one of `batch · num_heads_q · seq_q` rows.
fn forward_row(problem: &AttentionProblem, inputs: &Inputs, row: usize) -> (Vec<f64>, f64) {
    let (b, h, i) =
        (row / problem.seq_q / problem.num_heads_q, row / problem.seq_q % problem.num_heads_q, row % problem.seq_q);
    match Row::new(problem, inputs, [b, h, i]) {
        Some(row) => (row_output(problem, inputs, &row, [b, h], Exact), row.lse),
        None => (vec![0.0; problem.head_dim_v], f64::NEG_INFINITY),
    }
}

/// `o` of a row of this batch and head.
pub(crate) fn row_output(
    problem: &AttentionProblem,
    inputs: &Inputs,
    row: &Row,
    [b, h]: [usize; 2],
    rounding: impl Rounding,
) -> Vec<f64> {
    let highest = row.p.iter().copied().fold(row.sink, f64::max);
    let mut o = vec![0.0; problem.head_dim_v];
    for ((&j, &p), &z) in row.keys.iter().zip(&row.p).zip(&row.z) {
        let weight = rounding.weight(p, highest) * z;
        add_scaled(&mut o, weight, vector(inputs.v, problem.v_shape(), [b, h / problem.group_size(), j]));
    }
    o.iter_mut().for_each(|o| *o = rounding.written(*o));
    o
}
