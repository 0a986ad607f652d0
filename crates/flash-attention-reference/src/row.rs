//! One row of the attention matrix: scores and probabilities of one query over the keys that it sees.

use crate::dropout::{keeping, keeps};
use crate::{Dropout, Inputs};
use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::blocks::{EMPTY, PARTIAL};
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::mods::{Pair, TENSORS, Values};

/// Scores and probabilities of query `i` of one head.
pub(crate) struct Row {
    /// Positions of the visible keys, in order.
    pub keys: Vec<usize>,
    /// Their scores, after the softcap and before score function and bias.
    pub t: Vec<f64>,
    /// Their probabilities.
    pub p: Vec<f64>,
    /// Dropout's factor of each probability.
    pub z: Vec<f64>,
    /// Probability of the sink; 0 if there is none.
    pub sink: f64,
    /// `log Σ exp(score)`, including the sink.
    pub lse: f64,
}

impl Row {
    /// The row of query `at = [batch, head, i]`, or `None` if that query sees nothing.
    pub fn new(problem: &AttentionProblem, inputs: &Inputs, at: [usize; 3]) -> Option<Self> {
        let [b, h, i] = at;
        let band = inputs.band(problem, b, i);
        let hides = |j| match (problem.mask, inputs.mask) {
            (Some(shape), Some(mask)) => mask[broadcast_index(shape, [b, h, i, j])],
            _ => false,
        };
        let shows = |j| {
            problem.options.mask_mod.is_none_or(|function| {
                let at = [b, h, i, j];
                function.sees(pair(&band, at), values(problem.mask_tensors, inputs.mask_tensors, at))
            })
        };
        let sees = |&j: &usize| {
            band.sees(i as u32, j as u32)
                && match block_state(problem, inputs, [b, h, i, j]) {
                    EMPTY => false,
                    PARTIAL => !hides(j) && shows(j),
                    _ => true,
                }
        };
        let keys: Vec<usize> = (0..problem.seq_k).filter(sees).collect();

        let scale = f64::from(problem.softmax_scale());
        let q = vector(inputs.q, problem.q_shape(), at);
        let softcapped = |&j: &usize| {
            let x = scale * dot(q, vector(inputs.k, problem.k_shape(), [b, h / problem.group_size(), j]));
            match problem.options.softcap {
                Some(cap) => f64::from(cap) * (x / f64::from(cap)).tanh(),
                None => x,
            }
        };
        let t: Vec<f64> = keys.iter().map(softcapped).collect();

        let made = |(&j, &t): (&usize, &f64)| match problem.options.score_mod {
            Some(function) => {
                let at = [b, h, i, j];
                let values = values(problem.score_tensors, inputs.score_tensors, at);
                (j, f64::from(function.score(t as f32, pair(&band, at), values)))
            }
            None => (j, t),
        };
        let biased = |(j, t): (usize, f64)| match (problem.bias, inputs.bias) {
            (Some(shape), Some(bias)) => t + bias[broadcast_index(shape, [b, h, i, j])],
            _ => t,
        };
        let slope = problem.alibi_slopes.zip(inputs.alibi_slopes);
        let slope = slope.map_or(0.0, |(shape, slopes)| slopes[slope_index(shape, b, h)]);
        let sloped = |(&j, score): (&usize, f64)| score - slope * distance(&band, i, j);
        let scores: Vec<f64> = keys.iter().zip(keys.iter().zip(&t).map(made).map(biased)).map(sloped).collect();
        let sink = inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[h]);

        // Every score is tested, because the maximum ignores NaN.
        if scores.iter().all(|&score| score == f64::NEG_INFINITY) && sink == f64::NEG_INFINITY {
            return None;
        }
        let max = scores.iter().copied().fold(sink, f64::max);
        let exponentials: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let of_sink = (sink - max).exp();
        let sum: f64 = exponentials.iter().sum::<f64>() + of_sink;
        let p = exponentials.iter().map(|x| x / sum).collect();

        let keeping = keeping(problem);
        // Dropout in a sequence depends on the sequence's number and on positions within it.
        let from = inputs.sequence(problem, b, i).map_or([b, 0, 0], |of| [of.number, of.q.start, of.k.start]);
        let kept = |&j: &usize| {
            inputs.dropout.is_none_or(|Dropout { seed, first: [b0, h0] }| {
                keeps(problem, seed, [b0 + from[0], h0 + h, i - from[1], j - from[2]])
            })
        };
        let z = keys.iter().map(|j| if kept(j) { 1.0 / keeping } else { 0.0 }).collect();
        Some(Row { keys, t, p, z, sink: of_sink / sum, lse: max + sum.ln() })
    }

    /// Derivatives of the scores that enter the softmax. `at` is the row's position.
    pub fn derivatives(&self, problem: &AttentionProblem, inputs: &Inputs, [b, h, i]: [usize; 3]) -> Derivatives {
        let (function, cap) = (problem.options.score_mod, problem.options.softcap.map(f64::from));
        let capped = |t: f64| cap.map_or(1.0, |cap| 1.0 - (t / cap).powi(2));
        let mut all = Derivatives::default();
        if cap.is_some() || function.is_some() {
            all.of_score = Some(self.t.iter().map(|t| capped(*t)).collect());
        }
        let Some(function) = function else { return all };
        let band = inputs.band(problem, b, i);
        for (n, (&j, &t)) in self.keys.iter().zip(&self.t).enumerate() {
            let at = [b, h, i, j];
            let values = values(problem.score_tensors, inputs.score_tensors, at);
            let of = function.backward(t as f32, pair(&band, at), values);
            if let Some(of_score) = &mut all.of_score {
                of_score[n] *= f64::from(of.score);
            }
            all.of_tensors[0].push(f64::from(of.a));
            all.of_tensors[1].push(f64::from(of.b));
        }
        all
    }
}

/// Derivatives of a row's scores as they enter the softmax.
#[derive(Default)]
pub(crate) struct Derivatives {
    /// Derivatives by the scaled product of query and key. `None` if all are 1.
    pub of_score: Option<Vec<f64>>,
    /// Derivatives by the elements of the score function's tensors; empty without a score function.
    pub of_tensors: [Vec<f64>; TENSORS],
}

/// State of the block that a pair belongs to, which the band must show. Without a block mask, mask and function are evaluated everywhere.
pub(crate) fn block_state(problem: &AttentionProblem, inputs: &Inputs, [b, h, i, j]: [usize; 4]) -> u32 {
    let (Some(of), Some(states)) = (problem.block_mask, inputs.block_mask) else { return PARTIAL };
    // Blocks count from the beginning of the sequence. Past the last one, pairs are hidden.
    let [number, first_q, first_k] =
        inputs.sequence(problem, b, i).map_or([b, 0, 0], |of| [of.number, of.q.start, of.k.start]);
    let block = [(i - first_q) / of.block_q, (j - first_k) / of.block_k];
    if block[0] >= of.blocks[2] || block[1] >= of.blocks[3] {
        return EMPTY;
    }
    states[broadcast_index(of.blocks, [number, h, block[0], block[1]])]
}

/// A pair of one band, as functions see it.
fn pair(band: &Band, [b, h, i, j]: [usize; 4]) -> Pair {
    let (i, j) = band.positions(i as u32, j as u32, false);
    Pair::of(band.number(b as u32), h as u32, i, j)
}

/// Elements of a function's tensors that belong to a pair.
fn values(shapes: [Option<[usize; 4]>; TENSORS], tensors: [Option<&[f64]>; TENSORS], at: [usize; 4]) -> Values {
    let value = |nth: usize| match (shapes[nth], tensors[nth]) {
        (Some(shape), Some(tensor)) => tensor[broadcast_index(shape, at)] as f32,
        _ => 0.0,
    };
    Values { a: value(0), b: value(1) }
}

/// Distance of key `j` from the position of query `i` among the keys.
pub(crate) fn distance(band: &Band, i: usize, j: usize) -> f64 {
    f64::from(band.offset(i as u32, j as u32)).abs()
}

/// Index of a head's slope.
pub(crate) fn slope_index([batch, heads]: [usize; 2], b: usize, h: usize) -> usize {
    broadcast_index([batch, heads, 1, 1], [b, h, 0, 0])
}

/// The vector at `[batch, head, position]` of a contiguous tensor.
pub(crate) fn vector(values: &[f64], shape: [usize; 4], [b, h, position]: [usize; 3]) -> &[f64] {
    let start = ((b * shape[1] + h) * shape[2] + position) * shape[3];
    &values[start..start + shape[3]]
}

/// Index of the element that belongs to the score `[batch, head, i, j]`, in a contiguous tensor that broadcasts to the scores.
pub(crate) fn broadcast_index(shape: [usize; 4], at: [usize; 4]) -> usize {
    shape.iter().zip(at).fold(0, |index, (&size, position)| index * size + if size == 1 { 0 } else { position })
}

/// `a · b`, in eight partial sums that the processor computes in parallel.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    let mut sums = [0.0; 8];
    for (a, b) in a.zip(b) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// `y += a · x`.
pub(crate) fn add_scaled(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// `y += (a · x)²`.
pub(crate) fn add_squares(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += (a * x).powi(2);
    }
}
