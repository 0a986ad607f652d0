//! Comparison of a score function's derivatives with differences of its values, on the host.

use super::{Pair, Partials, ScoreFn, Values};
use std::fmt;
use std::ops::Range;
use thiserror::Error;

/// Step of the differences: a part of the argument's size, and of 1 below 1.
const STEP: f32 = 1.0 / 128.0;
/// Largest error of a right derivative, in parts of its size: the third-order term of the differences.
const RELATIVE: f32 = 5e-3;
/// Largest error of a function's value, in parts of its size: a few roundings of f32.
const ROUNDING: f32 = 8.0 * f32::EPSILON;

/// Where [`check_score_mod`] evaluates a function: ranges of its arguments, and the number of samples.
///
/// ```
/// use flash_attention_kernels::mods::Samples;
///
/// // A function of which `a` is a logarithm, in its range.
/// let samples = Samples { a: -4.0..4.0, ..Samples::default() };
/// assert_eq!(samples.score, -8.0..8.0);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// Scores, before the function.
    pub score: Range<f32>,
    /// Values of the first tensor. By default they are positive, as a divisor must be.
    pub a: Range<f32>,
    /// Values of the second tensor. By default they are positive, too.
    pub b: Range<f32>,
    /// Number of batches or packed sequences.
    pub batch: u32,
    /// Number of query heads.
    pub num_heads_q: u32,
    /// Number of positions of queries and of keys.
    pub seq: u32,
    /// Number of samples.
    pub count: u32,
}

impl Default for Samples {
    fn default() -> Self {
        Samples { score: -8.0..8.0, a: 0.25..2.0, b: 0.25..2.0, batch: 2, num_heads_q: 4, seq: 256, count: 4096 }
    }
}

/// One of the derivatives of a score function, a field of [`Partials`].
///
/// ```
/// assert_eq!(flash_attention_kernels::mods::Derivative::A.to_string(), "a");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Derivative {
    /// [`Partials::score`].
    Score,
    /// [`Partials::a`].
    A,
    /// [`Partials::b`].
    B,
}

impl fmt::Display for Derivative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Derivative::Score => "score",
            Derivative::A => "a",
            Derivative::B => "b",
        })
    }
}

/// Why [`check_score_mod`] rejects a score function.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum DerivativeError {
    /// `backward` returns a derivative that is not that of `score`.
    #[error(
        "{function:?}: backward returns {derivative} = {returned}, but the differences of score are {} to {} (score {score}, {pair:?}, {values:?})", .measured[0], .measured[1]
    )]
    Wrong {
        /// The function.
        function: ScoreFn,
        /// The derivative at fault.
        derivative: Derivative,
        /// What `backward` returns.
        returned: f32,
        /// Differences of `score` before and after the sample, divided by their step, the smaller one first.
        measured: [f32; 2],
        /// Score of the sample.
        score: f32,
        /// Pair of the sample.
        pair: Pair,
        /// Values of the sample.
        values: Values,
    },
    /// `ADDITIVE` is true, but the derivative with respect to the score is not 1.
    #[error(
        "{function:?}: ADDITIVE is true, but backward returns score = {returned}, not 1 (score {score}, {pair:?}, {values:?})"
    )]
    NotAdditive {
        /// The function.
        function: ScoreFn,
        /// What `backward` returns.
        returned: f32,
        /// Score of the sample.
        score: f32,
        /// Pair of the sample.
        pair: Pair,
        /// Values of the sample.
        values: Values,
    },
    /// The function is not finite at any sample, so that nothing was compared.
    #[error("{function:?}: score is not finite at any of {count} samples; choose other ranges of samples")]
    NothingCompared {
        /// The function.
        function: ScoreFn,
        /// Number of samples.
        count: u32,
    },
}

/// A point at which a function is evaluated.
#[derive(Clone, Copy)]
struct Point {
    score: f32,
    pair: Pair,
    values: Values,
}

impl Point {
    /// The `nth` sample. Samples fill their ranges evenly: the additive recurrence of the generalised golden ratio, which solves
    /// `x⁸ = x + 1` for the seven arguments.
    fn nth(samples: &Samples, nth: u32) -> Self {
        const RATIO: f64 = 1.096_981_557_798_556_6;
        let part = |argument: i32| (0.5 + f64::from(nth) * RATIO.powi(-argument)).fract();
        let within = |range: &Range<f32>, argument| range.start + (range.end - range.start) * part(argument) as f32;
        let below = |size: u32, argument| (f64::from(size) * part(argument)) as u32;
        Point {
            score: within(&samples.score, 1),
            values: Values { a: within(&samples.a, 2), b: within(&samples.b, 3) },
            pair: Pair::of(
                below(samples.batch, 4),
                below(samples.num_heads_q, 5),
                below(samples.seq, 6),
                below(samples.seq, 7),
            ),
        }
    }

    /// The argument of a derivative.
    fn argument(&mut self, of: Derivative) -> &mut f32 {
        match of {
            Derivative::Score => &mut self.score,
            Derivative::A => &mut self.values.a,
            Derivative::B => &mut self.values.b,
        }
    }

    /// The function's value here.
    fn value(&self, function: ScoreFn) -> f32 {
        function.score(self.score, self.pair, self.values)
    }

    /// The differences of a function before and after this point, the smaller one first, and how much rounding may change them.
    /// `None` if the function is not finite there.
    fn differences(mut self, function: ScoreFn, of: Derivative) -> Option<([f32; 2], f32)> {
        let x = *self.argument(of);
        let step = STEP * x.abs().max(1.0);
        let arguments = [x - step, x, x + step];
        let values = arguments.map(|x| {
            *self.argument(of) = x;
            self.value(function)
        });
        let largest = values.into_iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let between = |n: usize| (values[n + 1] - values[n]) / (arguments[n + 1] - arguments[n]);
        let (before, after) = (between(0), between(1));
        let rounding = ROUNDING * largest / step;
        values.iter().all(|value| value.is_finite()).then(|| ([before.min(after), before.max(after)], rounding))
    }
}

/// Compares the derivatives that a score function returns with differences of its values, at `samples`. The function runs on the
/// host, as it does in the backward of Flex and in the oracle.
///
/// A derivative must lie between the differences before and after the sample, up to 0.5% and f32's rounding: a function with a
/// kink or a jump may return the derivative of either side. An error of a derivative that is smaller than that at every sample is
/// not found, nor one outside the ranges. Samples at which the function is not finite are left out, because pairs with score −∞
/// have no gradient.
///
/// # Errors
///
/// A [`DerivativeError`] names the function, the derivative, the sample and both values.
///
/// ```
/// use cubecl::prelude::*;
/// use flash_attention_kernels::mods::{
///     Alibi, Derivative, DerivativeError, Pair, Partials, Samples, ScoreFn, ScoreMod, Values, check_score_mod,
/// };
///
/// check_score_mod(ScoreFn::of::<Alibi>(), &Samples::default())?;
///
/// struct Wrong;
///
/// #[cube]
/// impl ScoreMod for Wrong {
///     const ADDITIVE: bool = false;
///
///     fn score(score: f32, _pair: Pair, values: Values) -> f32 {
///         score * values.a
///     }
///
///     fn backward(score: f32, _pair: Pair, values: Values) -> Partials {
///         Partials { score: values.a, a: -score, b: 0.0f32 }
///     }
/// }
///
/// let error = check_score_mod(ScoreFn::of::<Wrong>(), &Samples::default()).unwrap_err();
/// assert!(matches!(error, DerivativeError::Wrong { derivative: Derivative::A, .. }));
/// # Ok::<(), DerivativeError>(())
/// ```
pub fn check_score_mod(function: ScoreFn, samples: &Samples) -> Result<(), DerivativeError> {
    let mut compared = false;
    for point in (0..samples.count).map(|nth| Point::nth(samples, nth)) {
        let Point { score, pair, values } = point;
        if !point.value(function).is_finite() {
            continue;
        }
        let Partials { score: of_score, a, b } = function.backward(score, pair, values);
        if function.additive() && of_score != 1.0 {
            return Err(DerivativeError::NotAdditive { function, returned: of_score, score, pair, values });
        }
        for (derivative, returned) in [(Derivative::Score, of_score), (Derivative::A, a), (Derivative::B, b)] {
            let Some((measured, rounding)) = point.differences(function, derivative) else { continue };
            compared = true;
            let slack = rounding + RELATIVE * measured[0].abs().max(measured[1].abs());
            if !(measured[0] - slack..=measured[1] + slack).contains(&returned) {
                return Err(DerivativeError::Wrong { function, derivative, returned, measured, score, pair, values });
            }
        }
    }
    if compared { Ok(()) } else { Err(DerivativeError::NothingCompared { function, count: samples.count }) }
}
