//! Oracle for some rows and keys of a problem too large to compute whole.

use crate::Inputs;
use crate::backward::ScoreGradients;
use crate::row::{Row, add_scaled, block_state, vector};
use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::blocks::EMPTY;
use rayon::prelude::*;

/// Number of partial sums that the rows are divided into.
const PARTS: usize = 64;

/// Output and gradients of some queries and keys of one key/value head.
///
/// ```
/// use flash_attention_reference::Sample;
///
/// // Nothing was asked for.
/// assert_eq!(Sample::default().dk.len(), 0);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// `head_dim_v` values for each query.
    pub o: Vec<f64>,
    /// One value for each query.
    pub lse: Vec<f64>,
    /// `head_dim` values for each query.
    pub dq: Vec<f64>,
    /// `head_dim` values for each key.
    pub dk: Vec<f64>,
    /// `head_dim_v` values for each key.
    pub dv: Vec<f64>,
    /// `seq_k` values for each query, summed over the batches: rows of the gradient of a bias `[1, num_heads_q, seq_q, seq_k]`. Empty for a
    /// bias of any other shape.
    pub dbias: Vec<f64>,
}

/// Output and gradients of `Σ dout∘o` for these queries of head `[batch, head]`, and for these keys of its key/value head. They are exact:
/// the gradients of the keys are summed over all queries of all heads that share them.
///
/// The cost is one step for each score in the rows of these queries and of all queries that see one of the keys. Each thread needs memory
/// for a row, and all together for 64 times the keys' gradients. The same call gives the same bits.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_reference::{Inputs, backward, forward, normal, sample};
///
/// let shape = [1, 2, 9, 4];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// let (q, k, v, dout) = (normal(72, 0), normal(72, 1), normal(72, 2), normal(72, 3));
/// let inputs = Inputs { q: &q, k: &k, v: &v, ..Default::default() };
/// let some = sample(&problem, &inputs, &dout, [0, 1], &[8], &[3]);
/// assert_eq!(some.o, forward(&problem, &inputs).o[68..]);
/// let whole = backward(&problem, &inputs, &dout, None).dk;
/// assert!(some.dk.iter().zip(&whole[48..]).all(|(some, whole)| (some - whole).abs() < 1e-12));
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
///
/// # Panics
///
/// If the length of an input does not match the problem, or a position is outside the problem.
pub fn sample(
    problem: &AttentionProblem,
    inputs: &Inputs,
    dout: &[f64],
    [b, h]: [usize; 2],
    queries: &[usize],
    keys: &[usize],
) -> Sample {
    inputs.check(problem);
    assert_eq!(dout.len(), problem.o_shape().iter().product::<usize>(), "length of dout");
    assert!(queries.iter().all(|&i| i < problem.seq_q) && keys.iter().all(|&j| j < problem.seq_k), "positions");
    let (head_dim, head_dim_v, group) = (problem.head_dim, problem.head_dim_v, problem.group_size());
    let h_kv = h / group;
    let scale = f64::from(problem.softmax_scale());
    let score_gradients =
        |row: &Row, at| ScoreGradients::exact(problem, inputs, row, vector(dout, problem.o_shape(), at), at);
    let [_, heads, rows, columns] = problem.scores_shape();
    let whole_bias = problem.bias == Some([1, heads, rows, columns]);

    let mut sample = Sample::default();
    let query = |&i: &usize| {
        let (mut o, mut dq, mut lse) = (vec![0.0; head_dim_v], vec![0.0; head_dim], f64::NEG_INFINITY);
        if let Some(row) = Row::new(problem, inputs, [b, h, i]) {
            let ds = score_gradients(&row, [b, h, i]).ds;
            for (n, &j) in row.keys.iter().enumerate() {
                add_scaled(&mut o, row.p[n] * row.z[n], vector(inputs.v, problem.v_shape(), [b, h_kv, j]));
                add_scaled(&mut dq, scale * ds[n], vector(inputs.k, problem.k_shape(), [b, h_kv, j]));
            }
            lse = row.lse;
        }
        let mut dbias = vec![0.0; if whole_bias { columns } else { 0 }];
        if whole_bias {
            for at in (0..problem.batch).map(|b| [b, h, i]) {
                let Some(row) = Row::new(problem, inputs, at) else { continue };
                let dt = score_gradients(&row, at).dt;
                row.keys.iter().zip(dt).for_each(|(&j, dt)| dbias[j] += dt);
            }
        }
        (o, dq, lse, dbias)
    };
    for (o, dq, lse, dbias) in queries.par_iter().map(query).collect::<Vec<_>>() {
        sample.o.extend(o);
        sample.dq.extend(dq);
        sample.lse.push(lse);
        sample.dbias.extend(dbias);
    }

    let zeros = || (vec![0.0; keys.len() * head_dim], vec![0.0; keys.len() * head_dim_v]);
    let rows = (h_kv * group..(h_kv + 1) * group).flat_map(|h| (0..problem.seq_q).map(move |i| [b, h, i]));
    // Skip rows that see none of the keys.
    let sees = |h: usize, i: usize, j: usize| {
        inputs.band(problem, b, i).sees(i as u32, j as u32) && block_state(problem, inputs, [b, h, i, j]) != EMPTY
    };
    let rows = rows.filter(|&[_, h, i]| keys.iter().any(|&j| sees(h, i, j)));
    let rows: Vec<_> = rows.collect();
    let sum = |rows: &[[usize; 3]]| {
        let (mut dk, mut dv) = zeros();
        for &at in rows {
            let Some(row) = Row::new(problem, inputs, at) else { continue };
            let ds = score_gradients(&row, at).ds;
            for (slot, key) in keys.iter().enumerate() {
                // The keys of a row are sorted.
                let Ok(n) = row.keys.binary_search(key) else { continue };
                let (q, dout) = (vector(inputs.q, problem.q_shape(), at), vector(dout, problem.o_shape(), at));
                add_scaled(&mut dk[slot * head_dim..][..head_dim], scale * ds[n], q);
                add_scaled(&mut dv[slot * head_dim_v..][..head_dim_v], row.p[n] * row.z[n], dout);
            }
        }
        (dk, dv)
    };
    // The order of the sums does not depend on the threads, so that the same call gives the same bits.
    let sums: Vec<_> = rows.par_chunks(rows.len().div_ceil(PARTS).max(1)).map(sum).collect();
    (sample.dk, sample.dv) = sums.into_iter().fold(zeros(), |(mut dk, mut dv), (more_dk, more_dv)| {
        add_scaled(&mut dk, 1.0, &more_dk);
        add_scaled(&mut dv, 1.0, &more_dv);
        (dk, dv)
    });
    sample
}
