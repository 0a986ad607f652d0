//! Emulation of a correct kernel on the host: the oracle's mathematics with the roundings of the kernel, and the error that the kernel may
//! have.
//!
//! The roundings of factors, of the output and of results are those of [`Emulation`], applied one by one. Other f32 arithmetic of the
//! kernel is not emulated, because its order differs between kernels. It enters the *spread* instead: the standard deviation of an element
//! if all roundings of the terms of a sum are independent. The relative standard deviation of a probability `p = exp(s − lse)` is
//!
//! ```text
//! ε (4 + 2 |ln p| + |lse| + softmax_scale ‖q‖ ‖k‖)        ε = 2⁻²⁴
//! ```
//!
//! The terms are for the exponential, whose error Vulkan allows to grow with its argument (Vulkan 1.4, "Precision and Operation of SPIR-V
//! Instructions"), for the subtraction, and for the product. The standard deviation of `dp − delta` is `4 ε (‖dout‖ ‖v‖ + |delta|)`.
//!
//! The roundings of [`Emulation`] count in both results: as they happen in the emulated one, and as random draws between neighbours of the
//! dtype in the spread. For many numbers both give the same error. For few numbers, or for a sum that is exactly 0, the emulated error may
//! be 0 by chance. Only the spread then shows how much the rounding of the terms amounts to.

mod spread;

use crate::Inputs;
use crate::backward::{Gradients, HeadGradients, ScoreGradients, Share, dp, gather, rows_of};
use crate::forward::{Output, row_output};
use crate::rounding::{Emulation, Exact, Rounding};
use crate::row::{Derivatives, Row, add_scaled, add_squares, dot, vector};
use flash_attention_kernels::AttentionProblem;
use rayon::prelude::*;
use spread::{F32, RowPair};

/// Output and gradients of attention.
///
/// ```
/// use flash_attention_reference::Attention;
///
/// assert!(Attention::default().output.o.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attention {
    /// Result of the forward.
    pub output: Output,
    /// Result of the backward.
    pub gradients: Gradients,
}

/// Expected result of a kernel, and the error that its roundings cause.
///
/// ```
/// use flash_attention_reference::Expected;
///
/// let nothing = Expected::default();
/// assert_eq!(nothing.exact, nothing.emulated);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Expected {
    /// Result of the oracle.
    pub exact: Attention,
    /// Result with the kernel's roundings.
    pub emulated: Attention,
    /// Standard deviation of each element, caused by the kernel's roundings.
    pub spread: Attention,
}

/// Output and gradients of `Σ dout∘o + Σ dlse∘lse`: the oracle's, as [`forward`](crate::forward()) and [`backward`](crate::backward())
/// return them, and those of a kernel with these roundings.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_reference::{Emulation, Inputs, Operands, expected};
///
/// let kv = [1, 1, 2, 1];
/// let problem = AttentionProblem::new(&[1, 1, 1, 1], &kv, &kv, Dtype::BF16, AttentionOptions::default())?;
/// let inputs = Inputs { q: &[1.0], k: &[0.0, 1.0], v: &[0.0, 1.0], ..Default::default() };
/// let emulation = Emulation { dtype: Dtype::BF16, operands: Operands::Inputs };
/// let expected = expected(&problem, &inputs, &[1.0], None, emulation);
/// let [exact, emulated] = [&expected.exact, &expected.emulated].map(|of| of.output.o[0]);
/// assert_eq!((exact, emulated), (0.7310585786300049, 0.73046875));
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
///
/// # Panics
///
/// If the length of an input or gradient does not match the problem.
pub fn expected(
    problem: &AttentionProblem,
    inputs: &Inputs,
    dout: &[f64],
    dlse: Option<&[f64]>,
    emulation: Emulation,
) -> Expected {
    let mut expected = compared(problem, inputs, dout, dlse, emulation);
    let Expected { exact, spread, .. } = &mut expected;
    let spread_of = |squares: &mut [f64], exact: &[f64], writing: &dyn Fn(f64) -> f64| {
        for (square, exact) in squares.iter_mut().zip(exact) {
            *square = (*square + (F32 * exact).powi(2) + writing(*exact).powi(2)).sqrt();
        }
    };
    let (of_dtype, of_f32) = (|value: f64| emulation.writing(value), |_: f64| 0.0);
    spread_of(&mut spread.output.o, &exact.output.o, &of_dtype);
    spread_of(&mut spread.output.lse, &exact.output.lse, &of_f32);
    let (of, exact) = (&mut spread.gradients, &exact.gradients);
    spread_of(&mut of.dq, &exact.dq, &of_dtype);
    spread_of(&mut of.dk, &exact.dk, &of_dtype);
    spread_of(&mut of.dv, &exact.dv, &of_dtype);
    let [of_a, of_b] = &mut of.dscore_tensors;
    let [exact_a, exact_b] = &exact.dscore_tensors;
    for (of, exact, writing) in [
        (&mut of.dbias, &exact.dbias, &of_dtype as &dyn Fn(f64) -> f64),
        (&mut of.dalibi_slopes, &exact.dalibi_slopes, &of_f32),
        (&mut of.dsinks, &exact.dsinks, &of_f32),
        (of_a, exact_a, &of_f32),
        (of_b, exact_b, &of_f32),
    ] {
        if let (Some(of), Some(exact)) = (of, exact) {
            spread_of(of, exact, writing);
        }
    }
    expected
}

/// [`expected`] for any rounding. Its spread holds variances of sums, without the error of the last rounding.
fn compared(
    problem: &AttentionProblem,
    inputs: &Inputs,
    dout: &[f64],
    dlse: Option<&[f64]>,
    rounding: impl Rounding,
) -> Expected {
    inputs.check(problem);
    assert_eq!(dout.len(), problem.o_shape().iter().product::<usize>(), "length of dout");
    assert!(dlse.is_none_or(|dlse| dlse.len() == problem.rows()), "length of dlse");
    let [q, k, v, d] = [inputs.q, inputs.k, inputs.v, dout].map(|values| rounding.factors(values));
    let call = Call {
        problem,
        inputs,
        factors: Inputs { q: &q, k: &k, v: &v, ..*inputs },
        dout,
        dout_factor: &d,
        dlse,
        rounding,
    };
    let heads: Vec<[Head; 3]> = (0..problem.batch * problem.num_heads_kv)
        .into_par_iter()
        .map(|head| call.head([head / problem.num_heads_kv, head % problem.num_heads_kv]))
        .collect();
    let attention = |nth: usize| {
        let heads = heads.iter().map(move |of: &[Head; 3]| &of[nth]);
        let output = Output {
            o: heads.clone().flat_map(|head| &head.o).copied().collect(),
            lse: heads.clone().flat_map(|head| &head.lse).copied().collect(),
        };
        Attention { output, gradients: gather(problem, heads.map(|head| &head.gradients)) }
    };
    let [exact, mut emulated, spread] = [0, 1, 2].map(attention);
    let Gradients { dq, dk, dv, dbias, .. } = &mut emulated.gradients;
    for values in [Some(dq), Some(dk), Some(dv), dbias.as_mut()].into_iter().flatten() {
        values.iter_mut().for_each(|value| *value = rounding.written(*value));
    }
    Expected { exact, emulated, spread }
}

/// One call with its rounding.
struct Call<'a, R> {
    problem: &'a AttentionProblem,
    inputs: &'a Inputs<'a>,
    /// The inputs, rounded as factors of products.
    factors: Inputs<'a>,
    dout: &'a [f64],
    dout_factor: &'a [f64],
    dlse: Option<&'a [f64]>,
    rounding: R,
}

/// Results of the query heads that share one key/value head.
struct Head {
    o: Vec<f64>,
    lse: Vec<f64>,
    gradients: HeadGradients,
}

/// Results of one row, rounded or exact.
struct OfRow {
    o: Vec<f64>,
    share: Share,
    gradients: ScoreGradients,
}

impl<R: Rounding> Call<'_, R> {
    /// Results of one key/value head: exact, rounded, and the variances of the spread.
    fn head(&self, [b, h_kv]: [usize; 2]) -> [Head; 3] {
        let problem = self.problem;
        let mut heads: [Head; 3] =
            std::array::from_fn(|_| Head { o: Vec::new(), lse: Vec::new(), gradients: HeadGradients::new(problem) });
        let lengths = |values: &[f64], shape: [usize; 4]| {
            let rows = (0..shape[2]).map(|j| vector(values, shape, [b, h_kv, j]));
            rows.map(|row| dot(row, row).sqrt()).collect::<Vec<_>>()
        };
        let of_keys = lengths(self.inputs.k, problem.k_shape());
        let of_values = lengths(self.inputs.v, problem.v_shape());
        // Whether factors of products are rounded, so that rows have to be recomputed from rounded factors.
        let rounds_factors = !std::ptr::eq(self.factors.q, self.inputs.q);
        for (h, i) in rows_of(problem, h_kv) {
            let at = [b, h, i];
            let Some(row) = Row::new(problem, self.inputs, at) else {
                for (nth, head) in heads.iter_mut().enumerate() {
                    head.o.extend(vec![0.0; problem.head_dim_v]);
                    head.lse.push(if nth == 2 { 0.0 } else { f64::NEG_INFINITY });
                }
                continue;
            };
            let rounded_row = rounds_factors.then(|| Row::new(problem, &self.factors, at)).flatten();
            let emulated_row = rounded_row.as_ref().unwrap_or(&row);
            let derivatives = row.derivatives(problem, self.inputs, at);
            let of_rounded = rounded_row.as_ref().map(|row| row.derivatives(problem, &self.factors, at));
            let [dout, dout_factor] = [self.dout, self.dout_factor].map(|of| vector(of, problem.o_shape(), at));

            let dp_exact = dp(problem, self.inputs, &row, dout, at);
            let dp_rounded = rounds_factors.then(|| dp(problem, &self.factors, emulated_row, dout_factor, at));
            let exact = self.row(self.inputs, &row, &dp_exact, &derivatives, at, Exact);
            let emulated = self.row(
                &self.factors,
                emulated_row,
                dp_rounded.as_ref().unwrap_or(&dp_exact),
                of_rounded.as_ref().unwrap_or(&derivatives),
                at,
                self.rounding,
            );
            let all = RowPair {
                row: &row,
                rounded: rounded_row.as_ref().map(|rounded| (rounded, &emulated)),
                exact: &exact,
                dp: &dp_exact,
                derivatives: &derivatives,
                at,
            };
            let (of_o, spread) = self.spread(&all, [&of_keys, &of_values]);
            heads[0].gradients.add(
                problem,
                [self.inputs.q, self.inputs.k, dout],
                &row.keys,
                &exact.share,
                at,
                add_scaled,
            );
            heads[1].gradients.add(
                problem,
                [self.factors.q, self.factors.k, dout_factor],
                &row.keys,
                &emulated.share,
                at,
                add_scaled,
            );
            heads[2].gradients.add(problem, [self.inputs.q, self.inputs.k, dout], &row.keys, &spread, at, add_squares);

            for (head, (o, lse)) in heads.iter_mut().zip([
                (exact.o, row.lse),
                (emulated.o, emulated_row.lse),
                (of_o, (emulated_row.lse - row.lse).powi(2)),
            ]) {
                head.o.extend(o);
                head.lse.push(lse);
            }
        }
        heads
    }

    /// Computes the row `at = [batch, head, i]` from these inputs with this rounding.
    fn row(
        &self,
        inputs: &Inputs,
        row: &Row,
        dp: &[f64],
        derivatives: &Derivatives,
        at: [usize; 3],
        rounding: impl Rounding,
    ) -> OfRow {
        fn delta<R: Rounding>(_: R, row: &Row, dp: &[f64], dout: &[f64], o: &[f64]) -> f64 {
            if R::READS_OUTPUT { dot(dout, o) } else { dot(&row.p, dp) }
        }
        let [b, h, _] = at;
        let o = row_output(self.problem, inputs, row, [b, h], rounding);
        let dout = vector(self.dout, self.problem.o_shape(), at);
        let delta = delta(rounding, row, dp, dout, &o) - self.dlse(at);
        let gradients = ScoreGradients::new(row, dp, delta, derivatives);
        let share = Share::of_row(self.problem, inputs, row, &gradients, at, rounding);
        OfRow { o, share, gradients }
    }

    fn dlse(&self, [b, h, i]: [usize; 3]) -> f64 {
        let row = (b * self.problem.num_heads_q + h) * self.problem.seq_q + i;
        self.dlse.map_or(0.0, |dlse| dlse[row])
    }
}

#[cfg(test)]
mod tests;
