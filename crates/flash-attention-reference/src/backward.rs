//! Gradients of `o` and `lse` (FlashAttention-2, arXiv:2307.08691, section 2.3.2, extended by softcap, score functions, bias, slopes,
//! sinks, dropout and the gradient of `lse`):
//!
//! ```text
//! dv = (p∘z)ᵀ·dout                      dp = dout·vᵀ ∘ z
//! delta = Σⱼ p∘dp − dlse                (Σⱼ p∘dp is dout·o)
//! dt = p∘(dp − delta)                   dbias = dt, summed over the dimensions that bias broadcasts over
//! ds = dt∘∂f/∂t∘(1 − (t / softcap)²)    the derivatives of the function and of softcap · tanh
//! dq = softmax_scale · ds·k             dk = softmax_scale · dsᵀ·q
//! dslope = Σ dt∘(−|i − j|)              dsink = Σ p_sink · (0 − delta)
//! da = dt∘∂f/∂a                         summed as dbias is; db likewise
//! ```
//!
//! `dk` and `dv` are summed over the query heads that share a key/value head.

use crate::Inputs;
use crate::rounding::{Exact, Rounding};
use crate::row::{Derivatives, Row, add_scaled, broadcast_index, distance, dot, slope_index, vector};
use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::mods::TENSORS;
use rayon::prelude::*;

/// Gradients of the inputs.
///
/// ```
/// use flash_attention_reference::Gradients;
///
/// // Attention to a single key does not depend on the score.
/// let single = Gradients { dq: vec![0.0], dk: vec![0.0], dv: vec![1.0], ..Default::default() };
/// # assert_eq!(single.dq, single.dk);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// `[batch, num_heads_q, seq_q, head_dim]`.
    pub dq: Vec<f64>,
    /// `[batch, num_heads_kv, seq_k, head_dim]`.
    pub dk: Vec<f64>,
    /// `[batch, num_heads_kv, seq_k, head_dim_v]`.
    pub dv: Vec<f64>,
    /// Shape of `problem.bias`, if there is one.
    pub dbias: Option<Vec<f64>>,
    /// Shape of `problem.alibi_slopes`, if there are any.
    pub dalibi_slopes: Option<Vec<f64>>,
    /// `[num_heads_q]`, if there are sinks.
    pub dsinks: Option<Vec<f64>>,
    /// Shapes of `problem.score_tensors`, where there are any.
    pub dscore_tensors: [Option<Vec<f64>>; TENSORS],
}

/// Gradients of `Σ dout∘o + Σ dlse∘lse`, with `dout [batch, num_heads_q, seq_q, head_dim_v]` and `dlse [batch, num_heads_q, seq_q]`. `dlse`
/// is not read where `lse` is −∞.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_reference::{Inputs, backward};
///
/// // Two equal keys: each value has half of the gradient, and the larger one pulls the query towards its key.
/// let kv = [1, 1, 2, 1];
/// let problem = AttentionProblem::new(&[1, 1, 1, 1], &kv, &kv, Dtype::F32, AttentionOptions::default())?;
/// let inputs = Inputs { q: &[2.0], k: &[0.0, 0.0], v: &[1.0, 3.0], ..Default::default() };
/// let gradients = backward(&problem, &inputs, &[1.0], None);
/// assert_eq!(gradients.dv, [0.5, 0.5]);
/// assert_eq!(gradients.dk, [-1.0, 1.0]);
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
///
/// # Panics
///
/// If the length of an input or gradient does not match the problem.
pub fn backward(problem: &AttentionProblem, inputs: &Inputs, dout: &[f64], dlse: Option<&[f64]>) -> Gradients {
    inputs.check(problem);
    assert_eq!(dout.len(), problem.o_shape().iter().product::<usize>(), "length of dout");
    assert!(dlse.is_none_or(|dlse| dlse.len() == problem.rows()), "length of dlse");

    let heads: Vec<HeadGradients> = (0..problem.batch * problem.num_heads_kv)
        .into_par_iter()
        .map(|head| {
            let at = [head / problem.num_heads_kv, head % problem.num_heads_kv];
            backward_head(problem, inputs, dout, dlse, at)
        })
        .collect();
    gather(problem, heads.iter())
}

fn backward_head(
    problem: &AttentionProblem,
    inputs: &Inputs,
    dout: &[f64],
    dlse: Option<&[f64]>,
    [b, h_kv]: [usize; 2],
) -> HeadGradients {
    let mut head = HeadGradients::new(problem);
    for (h, i) in rows_of(problem, h_kv) {
        let at = [b, h, i];
        let Some(row) = Row::new(problem, inputs, at) else { continue };
        let dout = vector(dout, problem.o_shape(), at);
        let dlse = dlse.map_or(0.0, |dlse| dlse[(b * problem.num_heads_q + h) * problem.seq_q + i]);
        let dp = dp(problem, inputs, &row, dout, at);
        let gradients = ScoreGradients::new(&row, &dp, dot(&row.p, &dp) - dlse, &row.derivatives(problem, inputs, at));
        let share = Share::of_row(problem, inputs, &row, &gradients, at, Exact);
        head.add(problem, [inputs.q, inputs.k, dout], &row.keys, &share, at, add_scaled);
    }
    head
}

/// Rows of the query heads that share a key/value head: head and position.
pub(crate) fn rows_of(problem: &AttentionProblem, h_kv: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (group, seq_q) = (problem.group_size(), problem.seq_q);
    (h_kv * group..(h_kv + 1) * group).flat_map(move |h| (0..seq_q).map(move |i| (h, i)))
}

/// Combines the contributions of all key/value heads, in order, to the gradients.
pub(crate) fn gather<'a>(
    problem: &AttentionProblem,
    heads: impl Iterator<Item = &'a HeadGradients> + Clone,
) -> Gradients {
    let summed = |shape: [usize; 4], shares: fn(&HeadGradients) -> &[(usize, f64)]| {
        let mut sums = vec![0.0; shape.iter().product()];
        for &(index, share) in heads.clone().flat_map(shares) {
            sums[index] += share;
        }
        sums
    };
    let dbias = problem.bias.map(|shape| summed(shape, |head| &head.dbias));
    let [of_a, of_b] = problem.score_tensors;
    let dscore_tensors = [
        of_a.map(|shape| summed(shape, |head| &head.dscore_tensors[0])),
        of_b.map(|shape| summed(shape, |head| &head.dscore_tensors[1])),
    ];
    let dalibi_slopes = problem.alibi_slopes.map(|shape| {
        let mut dslopes = vec![0.0; shape.iter().product()];
        for &(b, h, dslope, _) in heads.clone().flat_map(|head| &head.of_heads) {
            dslopes[slope_index(shape, b, h)] += dslope;
        }
        dslopes
    });
    let dsinks = problem.sinks.then(|| {
        let mut dsinks = vec![0.0; problem.num_heads_q];
        for &(_, h, _, dsink) in heads.clone().flat_map(|head| &head.of_heads) {
            dsinks[h] += dsink;
        }
        dsinks
    });
    Gradients {
        dq: heads.clone().flat_map(|head| &head.dq).copied().collect(),
        dk: heads.clone().flat_map(|head| &head.dk).copied().collect(),
        dv: heads.flat_map(|head| &head.dv).copied().collect(),
        dbias,
        dalibi_slopes,
        dsinks,
        dscore_tensors,
    }
}

/// Contribution of one key/value head, with the query heads that share it, to the gradients.
pub(crate) struct HeadGradients {
    /// `[group_size, seq_q, head_dim]`.
    dq: Vec<f64>,
    /// `[seq_k, head_dim]`.
    dk: Vec<f64>,
    /// `[seq_k, head_dim_v]`.
    dv: Vec<f64>,
    /// Index into the bias and the number to add there; empty if there is no bias.
    dbias: Vec<(usize, f64)>,
    /// Likewise for the tensors of the score function.
    dscore_tensors: [Vec<(usize, f64)>; TENSORS],
    /// For each row: batch, head, and its contributions to the gradients of its slope and its sink.
    of_heads: Vec<(usize, usize, f64, f64)>,
}

impl HeadGradients {
    pub fn new(problem: &AttentionProblem) -> Self {
        HeadGradients {
            dq: vec![0.0; problem.group_size() * problem.seq_q * problem.head_dim],
            dk: vec![0.0; problem.seq_k * problem.head_dim],
            dv: vec![0.0; problem.seq_k * problem.head_dim_v],
            dbias: Vec::new(),
            dscore_tensors: [Vec::new(), Vec::new()],
            of_heads: Vec::new(),
        }
    }

    /// Adds the contribution of the row `[b, h, i]`, which sees these keys. `q` and `k` are the whole tensors, `dout` is the row's.
    /// `add(y, a, x)` adds `a · x` to `y`.
    pub fn add(
        &mut self,
        problem: &AttentionProblem,
        [q, k, dout]: [&[f64]; 3],
        keys: &[usize],
        share: &Share,
        [b, h, i]: [usize; 3],
        add: fn(&mut [f64], f64, &[f64]),
    ) {
        let (group, head_dim, head_dim_v) = (problem.group_size(), problem.head_dim, problem.head_dim_v);
        let q = vector(q, problem.q_shape(), [b, h, i]);
        let dq = &mut self.dq[(h % group * problem.seq_q + i) * head_dim..][..head_dim];
        for (n, &j) in keys.iter().enumerate() {
            add(dq, share.scores[n], vector(k, problem.k_shape(), [b, h / group, j]));
            add(&mut self.dk[j * head_dim..][..head_dim], share.scores[n], q);
            add(&mut self.dv[j * head_dim_v..][..head_dim_v], share.weights[n], dout);
        }
        self.of_heads.push((b, h, share.slope, share.sink));
        self.dbias.extend_from_slice(&share.bias);
        for (all, of_row) in self.dscore_tensors.iter_mut().zip(&share.tensors) {
            all.extend_from_slice(of_row);
        }
    }
}

/// Contribution of a row to the gradients.
pub(crate) struct Share {
    /// Factors of `dout` in the gradients of the visible values.
    pub weights: Vec<f64>,
    /// Factors of the query in the keys' gradients, and of the keys in the query's.
    pub scores: Vec<f64>,
    /// Index into the bias and the number to add there.
    pub bias: Vec<(usize, f64)>,
    /// Likewise for the tensors of the score function.
    pub tensors: [Vec<(usize, f64)>; TENSORS],
    /// Contribution to the gradient of the slope.
    pub slope: f64,
    /// Contribution to the gradient of the sink.
    pub sink: f64,
}

impl Share {
    /// Contribution of the row `at = [batch, head, i]`.
    pub fn of_row(
        problem: &AttentionProblem,
        inputs: &Inputs,
        row: &Row,
        gradients: &ScoreGradients,
        at: [usize; 3],
        rounding: impl Rounding,
    ) -> Self {
        let scale = f64::from(problem.softmax_scale());
        let ScoreGradients { dt, ds, delta, of_tensors } = gradients;
        let of = |shape, values: &[f64]| row_shares(shape, at, &row.keys, values, |values| values.iter().sum());
        let tensor = |nth: usize| problem.score_tensors[nth].map_or_else(Vec::new, |shape| of(shape, &of_tensors[nth]));
        let distances = distances(problem, inputs, row, at);
        Share {
            weights: row.p.iter().zip(&row.z).map(|(p, z)| rounding.operand(*p) * z).collect(),
            scores: ds.iter().map(|ds| scale * rounding.operand(*ds)).collect(),
            bias: problem.bias.map_or_else(Vec::new, |shape| of(shape, dt)),
            tensors: [tensor(0), tensor(1)],
            slope: distances.zip(dt).map(|(distance, dt)| -dt * distance).sum(),
            sink: -row.sink * delta,
        }
    }
}

/// Distances of the visible keys from a row.
pub(crate) fn distances(
    problem: &AttentionProblem,
    inputs: &Inputs,
    row: &Row,
    [b, _, i]: [usize; 3],
) -> impl Iterator<Item = f64> {
    let band = inputs.band(problem, b, i);
    row.keys.iter().map(move |&j| distance(&band, i, j))
}

/// Contribution of a row to a tensor that broadcasts to the scores, as indices and numbers: `values` for each key, or their `sum` if all
/// keys share an element.
pub(crate) fn row_shares<T: Copy>(
    shape: [usize; 4],
    [b, h, i]: [usize; 3],
    keys: &[usize],
    values: &[T],
    sum: impl Fn(&[T]) -> f64,
) -> Vec<(usize, f64)> {
    let chunk = if shape[3] == 1 { values.len().max(1) } else { 1 };
    let firsts = keys.iter().step_by(chunk);
    firsts.zip(values.chunks(chunk)).map(|(&j, of)| (broadcast_index(shape, [b, h, i, j]), sum(of))).collect()
}

/// Gradients of a row's scores.
pub(crate) struct ScoreGradients {
    /// Gradients of the scores that enter the softmax, for each visible key.
    pub dt: Vec<f64>,
    /// Gradients of the scores before score function and softcap.
    pub ds: Vec<f64>,
    /// Gradients of the elements of the score function's tensors, for each visible key; empty without a score function.
    pub of_tensors: [Vec<f64>; TENSORS],
    /// `delta`, which is subtracted from the gradients of the probabilities.
    pub delta: f64,
}

impl ScoreGradients {
    /// Computes them from the gradients `dp` of the row's probabilities.
    pub fn new(row: &Row, dp: &[f64], delta: f64, derivatives: &Derivatives) -> Self {
        let dt: Vec<f64> = row.p.iter().zip(dp).map(|(p, dp)| p * (dp - delta)).collect();
        let Derivatives { of_score, of_tensors } = derivatives;
        // A pair with weight 0, as under a score of −∞, has no gradient, whatever the derivative is.
        let times = |of: &Vec<f64>| {
            dt.iter().zip(of).map(|(dt, of)| if *dt == 0.0 { 0.0 } else { dt * of }).collect::<Vec<_>>()
        };
        let ds = of_score.as_ref().map_or_else(|| dt.clone(), times);
        let of_tensors = of_tensors.each_ref().map(times);
        ScoreGradients { dt, ds, delta, of_tensors }
    }

    /// Exact gradients of the row `at = [batch, head, i]`. `dout` is this row's.
    pub fn exact(problem: &AttentionProblem, inputs: &Inputs, row: &Row, dout: &[f64], at: [usize; 3]) -> Self {
        let dp = dp(problem, inputs, row, dout, at);
        Self::new(row, &dp, dot(&row.p, &dp), &row.derivatives(problem, inputs, at))
    }
}

/// Gradients of the probabilities of the row `at = [batch, head, i]`. `dout` is this row's.
pub(crate) fn dp(problem: &AttentionProblem, inputs: &Inputs, row: &Row, dout: &[f64], at: [usize; 3]) -> Vec<f64> {
    let [b, h, _] = at;
    let value = |j| vector(inputs.v, problem.v_shape(), [b, h / problem.group_size(), j]);
    row.keys.iter().zip(&row.z).map(|(&j, z)| z * dot(dout, value(j))).collect()
}
