//! From `q·kᵀ` to a score: each step next to its derivative.
//!
//! ```text
//! t = softcap · tanh(scale · q·kᵀ / softcap)         dt/d(q·kᵀ) = scale · (1 − (t / softcap)²)
//! score = f(t) + bias − slope · |i − j|, if visible  d score/d bias = 1     d score/d slope = −|i − j|
//! ```
//!
//! `f` is the optional `score_mod` of the user: see [`mods`](crate::mods).
//!
//! The softcap is the one of Gemma 2 (arXiv:2408.00118, section 2). Slopes are ALiBi's (arXiv:2108.12409, section 3): one
//! number per head, multiplied by the distance between the key and the query's [position among the
//! keys](crate::mask::Band::offset()). A *sink* is one more logit in each row, with value vector 0 (gpt-oss; StreamingLLM,
//! arXiv:2309.17453, section 3.2).

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::extras::Extras;
use crate::mask::Band;
use crate::mods::Place;
use crate::softmax::HIDDEN;
use cubecl::prelude::*;
use serde::Serialize;

/// Parameters that turn a product `q·kᵀ` into a score, except mask and bias, and the dropout of probabilities. Quotients are
/// prepared on the host.
#[derive(CubeType, CubeLaunch)]
#[expand(derive(Clone))]
pub struct Score {
    /// Factor on `q·kᵀ`.
    pub scale: f32,
    /// The softcap, if `capped`.
    pub softcap: f32,
    /// `1 / softcap`.
    pub per_softcap: f32,
    /// `2 log2(e) scale / softcap`, so that `e^(2x) = 2^(inner · q·kᵀ)` for the argument `x` of the `tanh`.
    pub inner: f32,
    /// Factor from a score to its base-2 exponent.
    pub exponent: f32,
    /// Whether there is a softcap.
    #[cube(comptime)]
    pub capped: bool,
    /// Slopes, sinks, sequences, dropout and the user's functions.
    pub extras: Extras,
}

#[cube]
impl Score {
    /// The scaled and soft-capped product `q·kᵀ`: the score before `score_mod`, mask, bias and slope.
    pub fn of(&self, product: f32) -> f32 {
        let scaled = product * self.scale;
        if comptime!(self.capped) { self.softcap * f32::tanh(scaled * self.per_softcap) } else { scaled }
    }

    /// Applies `score_mod` to the result of [`Score::of`].
    pub fn modified(&self, t: f32, place: &Place, band: &Band) -> f32 {
        self.extras.mods.score_of(t, place, band)
    }

    /// Adds the ALiBi term `−slope · |i − j|`.
    pub fn biased(&self, score: f32, slope: f32, band: &Band, i: u32, j: u32) -> f32 {
        if comptime!(self.extras.slopes.is_some()) { fma(slope, distance(band, i, j), score) } else { score }
    }

    /// Initial maximum and sum of a row's online softmax. With a sink, the maximum is the sink, and the sum is 1 in the one
    /// thread of the row whose `counts` is set.
    pub fn begin(&self, head: usize, counts: bool) -> (f32, f32) {
        if comptime!(self.extras.sinks.is_some()) {
            (self.extras.sink(head, HIDDEN.runtime()), select(counts, 1.0f32, 0.0f32))
        } else {
            (HIDDEN.runtime(), 0.0f32.runtime())
        }
    }

    /// Derivative of the score with respect to the product `q·kᵀ`, without the factor `scale`. `t` is the result of
    /// [`Score::of`].
    pub fn derivative(&self, t: f32, place: &Place, band: &Band) -> f32 {
        let by_t = self.extras.mods.partials(t, place, band).score;
        if comptime!(self.capped) {
            let ratio = t * self.per_softcap;
            by_t * fma(-ratio, ratio, 1.0f32)
        } else {
            by_t
        }
    }
}

impl Score {
    /// Whether the score depends on the positions of the pair: whether there are slopes or functions.
    pub fn differs(&self) -> bool {
        self.extras.slopes.is_some() || self.extras.mods.exist()
    }
}

impl ScoreExpand {
    /// [`Score::differs`] while a kernel is compiled.
    pub fn differs(&self) -> bool {
        self.extras.slopes.is_some() || self.extras.mods.exist()
    }
}

/// Which factor multiplies the gradient of a score before it is summed into a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Factor {
    /// 1: for the bias, and for the product without softcap and `score_mod`.
    One,
    /// Derivative of the score with respect to the product.
    Product,
    /// Derivative of the score with respect to the slope.
    Slope,
    /// Derivative of the score with respect to the first tensor of `score_mod`.
    A,
    /// Derivative of the score with respect to the second tensor of `score_mod`.
    B,
}

/// Set of factors whose products with the gradients of scores a kernel sums. In the order of [`Factors::nth`].
///
/// ```
/// use flash_attention_kernels::score::{Factor, Factors};
///
/// let both = Factors::default().with(Factor::Slope).with(Factor::One);
/// assert_eq!(both.all().collect::<Vec<_>>(), [Factor::One, Factor::Slope]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Factors {
    bits: u8,
}

impl Factors {
    /// Factors of sums, in their order.
    const ORDER: [Factor; 4] = [Factor::One, Factor::Slope, Factor::A, Factor::B];

    /// The set with this factor, which is not [`Factor::Product`].
    pub fn with(self, factor: Factor) -> Self {
        let bit = Self::ORDER.iter().position(|of| *of == factor).expect("products have an accumulator instead");
        Factors { bits: self.bits | 1 << bit }
    }

    /// The factors of either set.
    pub fn and(self, other: Self) -> Self {
        Factors { bits: self.bits | other.bits }
    }

    /// The factors, in their order.
    pub fn all(self) -> impl Iterator<Item = Factor> {
        let bits = self.bits;
        Self::ORDER.into_iter().enumerate().filter(move |(bit, _)| bits & 1 << bit != 0).map(|(_, factor)| factor)
    }

    /// The factor with this number, which is below [`Factors::len`].
    pub fn nth(self, nth: usize) -> Factor {
        self.all().nth(nth).expect("there are fewer factors")
    }

    /// Number of factors.
    pub fn len(self) -> usize {
        self.bits.count_ones() as usize
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.bits == 0
    }

    /// Whether there is a derivative of `score_mod`.
    pub fn of_function(self) -> bool {
        self.all().any(|factor| matches!(factor, Factor::A | Factor::B))
    }
}

#[cube]
impl Score {
    /// The factor of a pair. `t` is the result of [`Score::of`].
    pub fn factor(&self, t: f32, place: &Place, band: &Band, #[comptime] factor: Factor) -> f32 {
        match comptime!(factor) {
            Factor::One => 1.0f32.runtime(),
            Factor::Product => self.derivative(t, place, band),
            Factor::Slope => distance(band, place.row, place.column),
            Factor::A => self.extras.mods.partials(t, place, band).a,
            Factor::B => self.extras.mods.partials(t, place, band).b,
        }
    }
}

/// Derivative of a score with respect to its slope: `−|i − j|`.
#[cube]
pub fn distance(band: &Band, i: u32, j: u32) -> f32 {
    let offset = f32::cast_from(band.offset(i, j));
    min(offset, -offset)
}
