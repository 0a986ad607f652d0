//! Judges whether a computed tensor is as close to the oracle's as a tensor computed with the same roundings.
//!
//! E are the errors of the computed tensor, and E₀ are those of the emulated one (or its [spread](crate::Expected::spread), if that is
//! larger), both against the oracle:
//!
//! ```text
//! largest      output     E ≤ 2 E₀ + 1e-5
//!              gradient   E ≤ 3 E₀ + 3e-4 max(1, |w|)       w: the largest of the gradient
//! mean         E ≤ 1.5 E₀
//! norm         E ≤ 1.5 E₀
//! each 64 rows root mean square of E ≤ 3 E₀
//! ```
//!
//! In half precision, the constant of a gradient is at most an eighth of `w`. Roundings are random: a root mean square over `n` rows has a
//! relative uncertainty of `1 / √(2n)`. E₀ is therefore multiplied by `1 + 2 / √n`.
//!
//! A bound must also be tight; see [`Comparison::binds`].

use flash_attention_kernels::Dtype;

use crate::error::BLOCK_ROWS;

/// Kind of a tensor, which determines its bounds.
///
/// ```
/// assert_ne!(flash_attention_reference::Judged::Output, flash_attention_reference::Judged::Gradient);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// The output.
    Output,
    /// A gradient.
    Gradient,
}

/// A computed tensor, the oracle's and an emulated one, in rows of `row_len` elements.
///
/// ```
/// use flash_attention_kernels::Dtype;
/// use flash_attention_reference::{Comparison, Judged, Unfit};
///
/// let (exact, emulated) = ([1.0, 2.0, 3.0, 4.0], [1.01, 1.99, 3.01, 3.98]);
/// let comparison = Comparison {
///     name: "dq",
///     judged: Judged::Gradient,
///     dtype: Dtype::BF16,
///     row_len: 2,
///     computed: &[0.99, 2.02, 2.99, 4.0],
///     exact: &exact,
///     emulated: &emulated,
///     spread: None,
/// };
/// assert!(comparison.judge().is_ok());
/// let flipped = Comparison { computed: &[-0.99, -2.02, -2.99, -4.0], ..comparison };
/// assert!(matches!(flipped.judge(), Err(Unfit::Largest { .. })));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Comparison<'a> {
    /// Name of the tensor in messages.
    pub name: &'a str,
    /// Kind of the tensor.
    pub judged: Judged,
    /// The dtype of the inputs.
    pub dtype: Dtype,
    /// Elements of a row.
    pub row_len: usize,
    /// The tensor to judge.
    pub computed: &'a [f64],
    /// The oracle's tensor.
    pub exact: &'a [f64],
    /// The tensor computed with the same roundings.
    pub emulated: &'a [f64],
    /// Standard deviations of the elements by rounding, if they are known.
    pub spread: Option<&'a [f64]>,
}

/// How close a tensor came to its bounds.
///
/// ```
/// # use flash_attention_kernels::Dtype;
/// # use flash_attention_reference::{Comparison, Judged};
/// # let (exact, emulated) = ([1.0, 2.0], [1.01, 1.99]);
/// let comparison = Comparison {
///     name: "o", judged: Judged::Output, dtype: Dtype::BF16, row_len: 1, computed: &exact, exact: &exact, emulated: &emulated, spread: None,
/// };
/// let verdict = comparison.judge()?;
/// assert_eq!(verdict.norm, 0.0);
/// // E₀ is 0.0063 of the whole, and counts 1 + 2 / √2 times.
/// assert!((verdict.rounding - 0.0153).abs() < 1e-4);
/// # Ok::<(), flash_attention_reference::Unfit>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Verdict {
    /// Norm of the error relative to the norm of E₀: about 1 if the tensor has the same roundings.
    pub norm: f64,
    /// Norm of E₀, with its multiplier, relative to the norm of the oracle's tensor. Infinite if the oracle's tensor is 0, or so small that
    /// f32 cannot represent it.
    pub rounding: f64,
}

/// Why a tensor is not close enough.
///
/// ```
/// let unfit = flash_attention_reference::Unfit::Length { name: "dq".into(), computed: 3, exact: 4 };
/// assert_eq!(unfit.to_string(), "dq has 3 elements, the oracle's 4");
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// The number of elements is wrong.
    #[error("{name} has {computed} elements, the oracle's {exact}")]
    Length {
        /// Name of the tensor.
        name: String,
        /// Number of elements that it has.
        computed: usize,
        /// Number of elements that it should have.
        exact: usize,
    },
    /// An element is infinite or NaN where the oracle's is not, or finite where the oracle's is not.
    #[error("{name}: element {at} is {computed}, the oracle has {exact}")]
    NotFinite {
        /// Name of the tensor.
        name: String,
        /// Index of the element.
        at: usize,
        /// Its value.
        computed: f64,
        /// The oracle's value.
        exact: f64,
    },
    /// The largest error exceeds its bound.
    #[error(
        "{name}: element {at} is {computed}, the oracle has {exact}: more than {bound:.3e} off, with {emulated:.3e} by rounding"
    )]
    Largest {
        /// Name of the tensor.
        name: String,
        /// Index of the element.
        at: usize,
        /// Its value.
        computed: f64,
        /// The oracle's value.
        exact: f64,
        /// Largest error allowed.
        bound: f64,
        /// Largest error caused by rounding.
        emulated: f64,
    },
    /// An average error, over the tensor or over a block of rows, exceeds its bound.
    #[error("{name}: {measure} of the error is {computed:.3e}, {:.2} times what rounding makes ({emulated:.3e}): the most is {times:.2}",
        computed / emulated)]
    Average {
        /// Name of the tensor.
        name: String,
        /// Which average it is.
        measure: String,
        /// Its value.
        computed: f64,
        /// Its value with rounding alone.
        emulated: f64,
        /// Largest multiple of that value allowed.
        times: f64,
    },
    /// The bounds would accept a faulty tensor.
    #[error("{name}: {fault} passes, with a rounding of {rounding:.3e} of the whole")]
    Unnoticed {
        /// Name of the tensor.
        name: String,
        /// The fault.
        fault: &'static str,
        /// [`Verdict::rounding`].
        rounding: f64,
    },
}

/// Faults that the bounds must reject: name, factor of the tensor, and largest [rounding](Verdict::rounding) up to which the fault must be
/// rejected.
const FAULTS: [(&str, f64, f64); 3] =
    [("1.02 times the tensor", 1.02, 0.01), ("its negative", -1.0, 0.5), ("nothing in its place", 0.0, 0.4)];

/// Errors that count as 0: f32 underflows below about 10⁻³⁸, where f64 still has probabilities of 10⁻¹⁰⁰.
const UNDERFLOW: f64 = 1e-30;

impl Comparison<'_> {
    /// Judges the tensor.
    ///
    /// # Errors
    ///
    /// The first bound that does not hold.
    pub fn judge(&self) -> Result<Verdict, Unfit> {
        self.judge_within(1.0)
    }

    /// [`judge`](Self::judge) with E₀ multiplied by `slack`.
    ///
    /// # Errors
    ///
    /// The first bound that does not hold.
    pub fn judge_within(&self, slack: f64) -> Result<Verdict, Unfit> {
        let name = || self.name.to_string();
        let (len, rows) = (self.exact.len(), self.exact.len() / self.row_len.max(1));
        if self.computed.len() != len {
            return Err(Unfit::Length { name: name(), computed: self.computed.len(), exact: len });
        }
        let errors = self.errors()?;
        let exacts = self.exact.iter().filter(|exact| exact.is_finite());
        let (largest, norm) = exacts.fold((0.0f64, 0.0), |(most, sum), x| (most.max(x.abs()), sum + x * x));

        let emulated = Averages::of(&errors.emulated).most(Averages::of_spread(&errors.spread));
        let computed = Averages::of(&errors.computed);
        let times = slack * allowance(rows);
        let (factor, constant) = match self.judged {
            Judged::Output => (2.0, 1e-5),
            Judged::Gradient if self.dtype == Dtype::F32 => (3.0, 3e-4 * largest.max(1.0)),
            Judged::Gradient => (3.0, (3e-4 * largest.max(1.0)).min(largest / 8.0)),
        };
        let bound = factor * times * emulated.largest + constant + UNDERFLOW;
        if let Some(at) = errors.computed.iter().position(|error| *error > bound) {
            let (computed, exact) = (self.computed[at], self.exact[at]);
            return Err(Unfit::Largest { name: name(), at, computed, exact, bound, emulated: emulated.largest });
        }
        let average = |measure: &str, computed: f64, emulated: f64, times: f64| {
            if computed <= times * emulated + UNDERFLOW {
                return Ok(());
            }
            Err(Unfit::Average { name: name(), measure: measure.to_string(), computed, emulated, times })
        };
        average("the mean", computed.mean, emulated.mean, 1.5 * times)?;
        average("the norm", computed.norm, emulated.norm, 1.5 * times)?;
        let block = BLOCK_ROWS * self.row_len;
        let chunks = |values: &[f64]| values.chunks(block.max(1)).map(Averages::of).collect::<Vec<_>>();
        let spreads = errors.spread.chunks(block.max(1)).map(Averages::of_spread);
        let spreads = spreads.chain(std::iter::repeat(Averages::default()));
        let blocks = chunks(&errors.computed).into_iter().zip(chunks(&errors.emulated)).zip(spreads);
        for (nth, ((computed, emulated), spread)) in blocks.enumerate() {
            let rows = (rows - nth * BLOCK_ROWS).min(BLOCK_ROWS);
            let emulated = emulated.most(spread).norm;
            average(&format!("the norm of block {nth}"), computed.norm, emulated, 3.0 * slack * allowance(rows))?;
        }
        let (of_computed, of_exact) = (computed.norm, norm.sqrt());
        Ok(Verdict {
            norm: if of_computed == 0.0 { 0.0 } else { of_computed / emulated.norm },
            rounding: if of_exact <= 1e3 * UNDERFLOW { f64::INFINITY } else { times * emulated.norm / of_exact },
        })
    }

    /// Judges the tensor, and then faulty versions of it: multiplied by 1.02, negated, and all zeros. Each of them must be rejected unless
    /// rounding hides it: where [`Verdict::rounding`] exceeds 0.01, 0.5, or 0.4, respectively.
    ///
    /// # Errors
    ///
    /// If the tensor is rejected, or a faulty version is accepted.
    pub fn binds(&self) -> Result<Verdict, Unfit> {
        self.binds_within(1.0)
    }

    /// [`binds`](Self::binds) with E₀ multiplied by `slack`.
    ///
    /// # Errors
    ///
    /// If the tensor is rejected, or a faulty version is accepted.
    pub fn binds_within(&self, slack: f64) -> Result<Verdict, Unfit> {
        let verdict = self.judge_within(slack)?;
        for (fault, times, most) in FAULTS {
            if verdict.rounding > most {
                continue;
            }
            let faulty: Vec<f64> = self.computed.iter().map(|x| if x.is_finite() { times * x } else { *x }).collect();
            if (Comparison { computed: &faulty, ..*self }).judge_within(slack).is_ok() {
                return Err(Unfit::Unnoticed { name: self.name.to_string(), fault, rounding: verdict.rounding });
            }
        }
        Ok(verdict)
    }

    /// Errors of each element. An element counts as correct if it is not finite and should not be.
    fn errors(&self) -> Result<Errors, Unfit> {
        let len = self.exact.len();
        let mut errors = Errors { computed: vec![0.0; len], emulated: vec![0.0; len], spread: Vec::new() };
        if let Some(spread) = self.spread {
            errors.spread = spread.to_vec();
        }
        for at in 0..len {
            let (computed, exact, emulated) = (self.computed[at], self.exact[at], self.emulated[at]);
            if computed.is_finite() && exact.is_finite() && emulated.is_finite() {
                errors.computed[at] = (computed - exact).abs();
                errors.emulated[at] = (emulated - exact).abs();
                continue;
            }
            let same = |other: f64| computed == other || computed.is_nan() && other.is_nan();
            // Where rounding gives infinity, the largest finite number is correct, too.
            let nearly = !emulated.is_finite() && exact.is_finite() && (computed - exact).abs() <= 0.01 * exact.abs();
            if !(same(exact) || same(emulated) || nearly) {
                return Err(Unfit::NotFinite { name: self.name.to_string(), at, computed, exact });
            }
            if let Some(spread) = errors.spread.get_mut(at) {
                *spread = 0.0;
            }
        }
        Ok(errors)
    }
}

struct Errors {
    computed: Vec<f64>,
    emulated: Vec<f64>,
    /// Empty if the spread is not known.
    spread: Vec<f64>,
}

/// Largest, mean and norm of errors.
#[derive(Clone, Copy, Default)]
struct Averages {
    largest: f64,
    mean: f64,
    norm: f64,
}

impl Averages {
    fn of(errors: &[f64]) -> Self {
        Averages {
            largest: errors.iter().copied().fold(0.0, f64::max),
            mean: errors.iter().sum::<f64>() / errors.len().max(1) as f64,
            norm: errors.iter().map(|x| x * x).sum::<f64>().sqrt(),
        }
    }

    /// Averages of normally distributed errors with these standard deviations.
    fn of_spread(spread: &[f64]) -> Self {
        let of = Self::of(spread);
        Averages { mean: of.mean * std::f64::consts::FRAC_2_PI.sqrt(), ..of }
    }

    fn most(self, other: Self) -> Self {
        Averages {
            largest: self.largest.max(other.largest),
            mean: self.mean.max(other.mean),
            norm: self.norm.max(other.norm),
        }
    }
}

/// Multiplier of E₀ for this number of rows.
fn allowance(rows: usize) -> f64 {
    1.0 + 2.0 / (rows.max(1) as f64).sqrt()
}
