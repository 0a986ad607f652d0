//! The gradients of `o` and `lse` (FlashAttention-2, arXiv:2307.08691, section 2.3.2, with softcap, functions of scores, bias, slopes,
//! sinks, dropout and the gradient of `lse` added):
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
//! `dk` and `dv` sum over the query heads that share their head.

use crate::Inputs;
use crate::row::{Row, add_scaled, broadcast_index, distance, dot, slope_index, vector};
use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::mods::TENSORS;
use rayon::prelude::*;

/// The gradients of the inputs.
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
    /// `problem.bias`, if there is one.
    pub dbias: Option<Vec<f64>>,
    /// `problem.alibi_slopes`, if there are any.
    pub dalibi_slopes: Option<Vec<f64>>,
    /// `[num_heads_q]`, if there are sinks.
    pub dsinks: Option<Vec<f64>>,
    /// `problem.score_tensors`, where there are any.
    pub dscore_tensors: [Option<Vec<f64>>; TENSORS],
}

/// The gradients of `Σ dout∘o + Σ dlse∘lse`, with `dout [batch, num_heads_q, seq_q, head_dim_v]` and
/// `dlse [batch, num_heads_q, seq_q]`. `dlse` is not read where `lse` is −∞.
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
/// If an input's or gradient's length is not what the problem says.
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

    let summed = |shape: [usize; 4], shares: fn(&HeadGradients) -> &[(usize, f64)]| {
        let mut sums = vec![0.0; shape.iter().product()];
        for &(index, share) in heads.iter().flat_map(shares) {
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
        for &(b, h, dslope, _) in heads.iter().flat_map(|head| &head.of_heads) {
            dslopes[slope_index(shape, b, h)] += dslope;
        }
        dslopes
    });
    let dsinks = problem.sinks.then(|| {
        let mut dsinks = vec![0.0; problem.num_heads_q];
        for &(_, h, _, dsink) in heads.iter().flat_map(|head| &head.of_heads) {
            dsinks[h] += dsink;
        }
        dsinks
    });
    Gradients {
        dq: heads.iter().flat_map(|head| &head.dq).copied().collect(),
        dk: heads.iter().flat_map(|head| &head.dk).copied().collect(),
        dv: heads.iter().flat_map(|head| &head.dv).copied().collect(),
        dbias,
        dalibi_slopes,
        dsinks,
        dscore_tensors,
    }
}

/// What one head of `k` and `v`, with the query heads that share it, adds to the gradients.
struct HeadGradients {
    /// `[group_size, seq_q, head_dim]`.
    dq: Vec<f64>,
    /// `[seq_k, head_dim]`.
    dk: Vec<f64>,
    /// `[seq_k, head_dim_v]`.
    dv: Vec<f64>,
    /// Index into the bias and what to add there; empty if there is no bias.
    dbias: Vec<(usize, f64)>,
    /// The same for the tensors of the function of scores.
    dscore_tensors: [Vec<(usize, f64)>; TENSORS],
    /// Of each row: batch, head, and what it adds to the gradients of its slope and of its sink.
    of_heads: Vec<(usize, usize, f64, f64)>,
}

fn backward_head(
    problem: &AttentionProblem,
    inputs: &Inputs,
    dout: &[f64],
    dlse: Option<&[f64]>,
    [b, h_kv]: [usize; 2],
) -> HeadGradients {
    let (group_size, seq_q, head_dim, head_dim_v) =
        (problem.group_size(), problem.seq_q, problem.head_dim, problem.head_dim_v);
    let scale = f64::from(problem.softmax_scale());
    let mut head = HeadGradients {
        dq: vec![0.0; group_size * seq_q * head_dim],
        dk: vec![0.0; problem.seq_k * head_dim],
        dv: vec![0.0; problem.seq_k * head_dim_v],
        dbias: Vec::new(),
        dscore_tensors: [Vec::new(), Vec::new()],
        of_heads: Vec::new(),
    };
    for (n, i) in (0..group_size).flat_map(|n| (0..seq_q).map(move |i| (n, i))) {
        let h = h_kv * group_size + n;
        let Some(row) = Row::new(problem, inputs, [b, h, i]) else { continue };
        let q = vector(inputs.q, problem.q_shape(), [b, h, i]);
        let dout = vector(dout, problem.o_shape(), [b, h, i]);
        let dlse = dlse.map_or(0.0, |dlse| dlse[(b * problem.num_heads_q + h) * seq_q + i]);

        let band = inputs.band(problem, b, i);
        let gradients = score_gradients(problem, inputs, &row, dout, dlse, [b, h, i]);
        let ScoreGradients { dt, ds, delta, of_tensors } = gradients;
        let dslope: f64 = row.keys.iter().zip(&dt).map(|(&j, dt)| -dt * distance(&band, i, j)).sum();
        head.of_heads.push((b, h, dslope, -row.sink * delta));
        let dq = &mut head.dq[(n * seq_q + i) * head_dim..][..head_dim];
        for (n, &j) in row.keys.iter().enumerate() {
            if let Some(shape) = problem.bias {
                head.dbias.push((broadcast_index(shape, [b, h, i, j]), dt[n]));
            }
            for (nth, shape) in problem.score_tensors.into_iter().enumerate() {
                if let Some(shape) = shape {
                    let index = broadcast_index(shape, [b, h, i, j]);
                    head.dscore_tensors[nth].push((index, of_tensors[nth][n]));
                }
            }
            add_scaled(dq, scale * ds[n], vector(inputs.k, problem.k_shape(), [b, h_kv, j]));
            add_scaled(&mut head.dk[j * head_dim..][..head_dim], scale * ds[n], q);
            add_scaled(&mut head.dv[j * head_dim_v..][..head_dim_v], row.p[n] * row.z[n], dout);
        }
    }
    head
}

/// The gradients of a row's scores.
pub(crate) struct ScoreGradients {
    /// As the softmax sees them, for each of the keys that the row sees.
    pub dt: Vec<f64>,
    /// Before function and softcap.
    pub ds: Vec<f64>,
    /// By what the tensors of the function hold for each of the keys; empty if there is no function.
    pub of_tensors: [Vec<f64>; TENSORS],
    /// What they are relative to.
    pub delta: f64,
}

/// Those of the row `at = [batch, head, i]`; `dout` is the row's own.
pub(crate) fn score_gradients(
    problem: &AttentionProblem,
    inputs: &Inputs,
    row: &Row,
    dout: &[f64],
    dlse: f64,
    at: [usize; 3],
) -> ScoreGradients {
    let [b, h, _] = at;
    let value = |j| vector(inputs.v, problem.v_shape(), [b, h / problem.group_size(), j]);
    let dp: Vec<f64> = row.keys.iter().zip(&row.z).map(|(&j, z)| z * dot(dout, value(j))).collect();
    let delta = dot(&row.p, &dp) - dlse;
    let dt: Vec<f64> = row.p.iter().zip(&dp).map(|(p, dp)| p * (dp - delta)).collect();
    // What weighs nothing, as under a score of −∞, has no gradient whatever the derivative.
    let times = |dt: f64, derivative: f32| if dt == 0.0 { 0.0 } else { dt * f64::from(derivative) };
    let (mut ds, mut of_tensors) = (dt.clone(), [Vec::new(), Vec::new()]);
    if let Some(partials) = row.partials(problem, inputs, at) {
        ds = dt.iter().zip(&partials).map(|(dt, of)| times(*dt, of.score)).collect();
        of_tensors = [
            dt.iter().zip(&partials).map(|(dt, of)| times(*dt, of.a)).collect(),
            dt.iter().zip(&partials).map(|(dt, of)| times(*dt, of.b)).collect(),
        ];
    }
    if let Some(cap) = problem.options.softcap {
        ds.iter_mut().zip(&row.t).for_each(|(ds, t)| *ds *= 1.0 - (t / f64::from(cap)).powi(2));
    }
    ScoreGradients { dt, ds, delta, of_tensors }
}
