//! The gradients of `o` and `lse` (FlashAttention-2, arXiv:2307.08691, section 2.3.2, with softcap, bias, slopes, sinks, dropout
//! and the gradient of `lse` added):
//!
//! ```text
//! dv = (p∘z)ᵀ·dout                      dp = dout·vᵀ ∘ z
//! delta = Σⱼ p∘dp − dlse                (Σⱼ p∘dp is dout·o)
//! dt = p∘(dp − delta)                   dbias = dt, summed over the dimensions that bias broadcasts over
//! ds = dt∘(1 − (t / softcap)²)          the derivative of softcap · tanh
//! dq = softmax_scale · ds·k             dk = softmax_scale · dsᵀ·q
//! dslope = Σ dt∘(−|i − j|)              dsink = Σ p_sink · (0 − delta)
//! ```
//!
//! `dk` and `dv` sum over the query heads that share their head.

use crate::Inputs;
use crate::row::{Row, add_scaled, broadcast_index, distance, dot, slope_index, vector};
use flash_attention_kernels::AttentionProblem;
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

    let dbias = problem.bias.map(|shape| {
        let mut dbias = vec![0.0; shape.iter().product()];
        for &(index, dt) in heads.iter().flat_map(|head| &head.dbias) {
            dbias[index] += dt;
        }
        dbias
    });
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
        of_heads: Vec::new(),
    };
    for (n, i) in (0..group_size).flat_map(|n| (0..seq_q).map(move |i| (n, i))) {
        let h = h_kv * group_size + n;
        let Some(row) = Row::new(problem, inputs, [b, h, i]) else { continue };
        let q = vector(inputs.q, problem.q_shape(), [b, h, i]);
        let dout = vector(dout, problem.o_shape(), [b, h, i]);
        let dlse = dlse.map_or(0.0, |dlse| dlse[(b * problem.num_heads_q + h) * seq_q + i]);

        let band = inputs.band(problem, b, i);
        let ScoreGradients { dt, ds, delta } = score_gradients(problem, inputs, &row, dout, dlse, [b, h_kv]);
        let dslope: f64 = row.keys.iter().zip(&dt).map(|(&j, dt)| -dt * distance(&band, i, j)).sum();
        head.of_heads.push((b, h, dslope, -row.sink * delta));
        let dq = &mut head.dq[(n * seq_q + i) * head_dim..][..head_dim];
        for (n, &j) in row.keys.iter().enumerate() {
            if let Some(shape) = problem.bias {
                head.dbias.push((broadcast_index(shape, [b, h, i, j]), dt[n]));
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
    /// Before the softcap.
    pub ds: Vec<f64>,
    /// What they are relative to.
    pub delta: f64,
}

/// Those of a row; `dout` is the row's own.
pub(crate) fn score_gradients(
    problem: &AttentionProblem,
    inputs: &Inputs,
    row: &Row,
    dout: &[f64],
    dlse: f64,
    [b, h_kv]: [usize; 2],
) -> ScoreGradients {
    let value = |j| vector(inputs.v, problem.v_shape(), [b, h_kv, j]);
    let dp: Vec<f64> = row.keys.iter().zip(&row.z).map(|(&j, z)| z * dot(dout, value(j))).collect();
    let delta = dot(&row.p, &dp) - dlse;
    let dt: Vec<f64> = row.p.iter().zip(&dp).map(|(p, dp)| p * (dp - delta)).collect();
    let ds = match problem.options.softcap {
        Some(cap) => dt.iter().zip(&row.t).map(|(dt, t)| dt * (1.0 - (t / f64::from(cap)).powi(2))).collect(),
        None => dt.clone(),
    };
    ScoreGradients { dt, ds, delta }
}
