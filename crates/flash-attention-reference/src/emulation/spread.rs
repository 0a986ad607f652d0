//! Variances that one row contributes to the [spread](super), with roundings as random draws.

use super::{Call, OfRow};
use crate::backward::{Share, distances, row_shares};
use crate::rounding::Rounding;
use crate::row::{Derivatives, Row, add_squares, dot, vector};

/// Half the distance between 1 and the next f32.
const EPSILON: f64 = 1.0 / (1u64 << 24) as f64;

/// Relative error of f32 results: sums of many numbers, reciprocals, hyperbolic tangents.
pub(super) const F32: f64 = 16.0 * EPSILON;

/// A row computed exactly, and from rounded factors if they are rounded.
pub(super) struct RowPair<'a> {
    pub row: &'a Row,
    pub rounded: Option<(&'a Row, &'a OfRow)>,
    pub exact: &'a OfRow,
    /// Gradients of the exact row's probabilities.
    pub dp: &'a [f64],
    pub derivatives: &'a Derivatives,
    /// Batch, head and position.
    pub at: [usize; 3],
}

/// Errors of a score's gradient in one row.
#[derive(Clone, Copy)]
struct OfScore {
    /// Standard deviation of the error of this score alone.
    alone: f64,
    /// Error that all scores of the row share through `delta`. Sums over the row add it with its sign.
    common: f64,
}

impl OfScore {
    fn times(self, factor: f64) -> Self {
        OfScore { alone: factor * self.alone, common: factor * self.common }
    }

    fn deviation(self) -> f64 {
        root([self.alone, self.common])
    }

    /// Variance of the sum.
    fn variance(all: &[OfScore]) -> f64 {
        let common: f64 = all.iter().map(|of| of.common).sum();
        all.iter().map(|of| of.alone.powi(2)).sum::<f64>() + common.powi(2)
    }
}

impl<R: Rounding> Call<'_, R> {
    /// Variances of the row's output, and the row's contribution to the gradients' variances: standard deviations for the factors of keys
    /// and query, and variances for all else.
    pub(super) fn spread(&self, pair: &RowPair, [of_keys, of_values]: [&[f64]; 2]) -> (Vec<f64>, Share) {
        let (problem, row, at) = (self.problem, pair.row, pair.at);
        let length = |values: &[f64], shape| {
            let row = vector(values, shape, at);
            dot(row, row).sqrt()
        };
        let of_q = f64::from(problem.softmax_scale()) * length(self.inputs.q, problem.q_shape());
        let of_dout = length(self.dout, problem.o_shape());
        let of_p: Vec<f64> =
            (row.keys.iter().zip(&row.p)).map(|(&j, &p)| of_exponential(p, row.lse, of_q * of_keys[j])).collect();

        // -- the output and delta
        let weights = row.p.iter().zip(&row.z).zip(&of_p).enumerate().map(|(n, ((&p, z), of_p))| {
            let moved = pair.rounded.map_or(0.0, |(rounded, _)| rounded.p[n] - p);
            z * root([p * of_p, self.rounding.deviation(p), moved])
        });
        let weights: Vec<f64> = weights.collect();
        let mut of_o = vec![0.0; problem.head_dim_v];
        let [b, h, _] = at;
        for (&j, &weight) in row.keys.iter().zip(&weights) {
            add_squares(&mut of_o, weight, vector(self.inputs.v, problem.v_shape(), [b, h / problem.group_size(), j]));
        }
        let dout = vector(self.dout, problem.o_shape(), at);
        let written = of_o
            .iter()
            .zip(&pair.exact.o)
            .map(|(variance, o)| variance + self.rounding.writing(*o).powi(2) + (F32 * o).powi(2));
        let of_delta = written.zip(dout).map(|(variance, dout)| variance * dout * dout).sum::<f64>().sqrt();

        // -- gradients of scores
        let size_of_delta = pair.exact.gradients.delta.abs() + self.dlse(at).abs();
        let of_dt = row.keys.iter().zip(&row.p).enumerate().map(|(n, (&j, p))| {
            let difference = row.z[n] * of_dout * of_values[j] + pair.dp[n].abs() + size_of_delta;
            let alone = of_p[n] * pair.exact.gradients.dt[n].abs() + 4.0 * EPSILON * p * difference;
            OfScore { alone, common: p * of_delta }
        });
        let of_dt: Vec<OfScore> = of_dt.collect();
        let moved = |n: usize| pair.rounded.map_or(0.0, |(_, of)| of.gradients.ds[n] - pair.exact.gradients.ds[n]);
        let scores = of_dt.iter().enumerate().map(|(n, of)| {
            let (dt, ds) = (pair.exact.gradients.dt[n], pair.exact.gradients.ds[n]);
            // Near 1, the error of a hyperbolic tangent is as large as its distance from 1, on which the derivative depends. This error multiplies
            // `dt` as computed: if `dt` is exactly 0, it multiplies the error of `dt`.
            let (derivative, of_derivative) = (pair.derivatives.of_score.as_ref())
                .map_or((1.0, 0.0), |all| (all[n], F32 * (dt.abs() + of.deviation())));
            let of_ds = root([of.times(derivative).deviation(), of_derivative, moved(n)]);
            f64::from(problem.softmax_scale()) * root([of_ds, self.rounding.deviation(ds)])
        });

        // -- their sums
        let variances = |shape: Option<[usize; 4]>, of: &[OfScore], moved: [&[(usize, f64)]; 2]| {
            let Some(shape) = shape else { return Vec::new() };
            let mut all = row_shares(shape, at, &row.keys, of, OfScore::variance);
            for ((_, variance), ((_, to), (_, from))) in all.iter_mut().zip(moved[0].iter().zip(moved[1])) {
                *variance += (to - from).powi(2);
            }
            all
        };
        // Without rounded factors, both are the exact row's.
        let exact = &pair.exact.share;
        let rounded = pair.rounded.map_or(exact, |(_, of)| &of.share);
        let tensor = |nth: usize| {
            let of = pair.derivatives.of_tensors[nth].iter().zip(&of_dt).zip(&pair.exact.gradients.dt);
            let of = of.map(|((factor, of), dt)| {
                let of = of.times(*factor);
                OfScore { alone: root([of.alone, factor * F32 * dt]), ..of }
            });
            let of: Vec<OfScore> = of.collect();
            variances(problem.score_tensors[nth], &of, [&exact.tensors[nth], &rounded.tensors[nth]])
        };
        let of_slope = distances(problem, self.inputs, row, at).zip(&of_dt).map(|(distance, of)| of.times(distance));
        let of_sink = of_exponential(row.sink, row.lse, 0.0) * size_of_delta + 4.0 * EPSILON * size_of_delta;
        let spread = Share {
            scores: scores.collect(),
            bias: variances(problem.bias, &of_dt, [&exact.bias, &rounded.bias]),
            tensors: [tensor(0), tensor(1)],
            slope: OfScore::variance(&of_slope.collect::<Vec<_>>()) + (rounded.slope - exact.slope).powi(2),
            sink: row.sink.powi(2) * (of_delta.powi(2) + of_sink.powi(2)) + (rounded.sink - exact.sink).powi(2),
            weights,
        };
        (of_o, spread)
    }
}

/// Standard deviation of a sum of independent errors.
fn root<const N: usize>(deviations: [f64; N]) -> f64 {
    deviations.iter().map(|deviation| deviation * deviation).sum::<f64>().sqrt()
}

/// Relative error of `p = exp(s − lse)`, where `product` is the product of the vectors' lengths.
fn of_exponential(p: f64, lse: f64, product: f64) -> f64 {
    // Probabilities that underflow are 0.
    let logarithm = p.max(f64::MIN_POSITIVE).ln().abs();
    EPSILON * (4.0 + 2.0 * logarithm + lse.abs() + product)
}
