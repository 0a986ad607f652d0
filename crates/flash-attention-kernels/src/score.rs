//! From `q·kᵀ` to a score, each step beside its derivative.
//!
//! ```text
//! t = softcap · tanh(scale · q·kᵀ / softcap)         dt/d(q·kᵀ) = scale · (1 − (t / softcap)²)
//! score = f(t) + bias − slope · |i − j| where seen   d score/d bias = 1     d score/d slope = −|i − j|
//! ```
//!
//! `f` is the score function, if there is one: [`mods`](crate::mods).
//!
//! The softcap is Gemma 2's (arXiv:2408.00118, section 2), slopes are those of ALiBi (arXiv:2108.12409, section 3): a number for
//! each head, times the distance from the query's [position among the keys](crate::mask::Band::offset()). A *sink* is one more
//! logit in each row, with value vector 0 (gpt-oss; StreamingLLM, arXiv:2309.17453, section 3.2).

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::extras::Extras;
use crate::mask::Band;
use crate::mods::Place;
use crate::softmax::HIDDEN;
use cubecl::prelude::*;
use serde::Serialize;

/// Composition of scores from products, without mask and bias, and dropout of probabilities.
#[derive(CubeType, CubeLaunch)]
#[expand(derive(Clone))]
pub struct Score {
    /// Factor on `q·kᵀ`.
    pub scale: f32,
    /// The cap, where `capped`.
    pub softcap: f32,
    /// Whether there is a cap.
    #[cube(comptime)]
    pub capped: bool,
    /// Slopes, sinks, sequences, dropout and functions.
    pub extras: Extras,
}

#[cube]
impl Score {
    /// The score of a product `q·kᵀ`, before mask and bias.
    pub fn of(&self, product: f32) -> f32 {
        let scaled = product * self.scale;
        if comptime!(self.capped) { self.softcap * f32::tanh(scaled / self.softcap) } else { scaled }
    }

    /// The score function, applied to the result of [`Score::of`].
    pub fn modified(&self, t: f32, place: &Place, band: &Band) -> f32 {
        self.extras.mods.score_of(t, place, band)
    }

    /// The slope's contribution, `−slope · |i − j|`.
    pub fn biased(&self, score: f32, slope: f32, band: &Band, i: u32, j: u32) -> f32 {
        if comptime!(self.extras.slopes.is_some()) { fma(slope, distance(band, i, j), score) } else { score }
    }

    /// Initial maximum and sum of a row's online softmax, in one of the threads that share it: those of its sink, if there is one.
    pub fn begin(&self, head: usize, counts: bool) -> (f32, f32) {
        if comptime!(self.extras.sinks.is_some()) {
            (self.extras.sink(head, HIDDEN.runtime()), select(counts, 1.0f32, 0.0f32))
        } else {
            (HIDDEN.runtime(), 0.0f32.runtime())
        }
    }

    /// Derivative with respect to the product, without the factor `scale`, from the result of [`Score::of`].
    pub fn derivative(&self, t: f32, place: &Place, band: &Band) -> f32 {
        let by_t = self.extras.mods.partials(t, place, band).score;
        if comptime!(self.capped) {
            let ratio = t / self.softcap;
            by_t * (1.0f32 - ratio * ratio)
        } else {
            by_t
        }
    }
}

impl Score {
    /// Whether slopes or a score function make the score depend on the pair.
    pub fn differs(&self) -> bool {
        self.extras.slopes.is_some() || self.extras.mods.exist()
    }
}

impl ScoreExpand {
    /// The same at compile time of a kernel.
    pub fn differs(&self) -> bool {
        self.extras.slopes.is_some() || self.extras.mods.exist()
    }
}

/// Factor of the gradient of a score, for each gradient that is summed from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Factor {
    /// 1: for the bias, and for the product without softcap and score function.
    One,
    /// Derivative with respect to the product.
    Product,
    /// Derivative with respect to the slope.
    Slope,
    /// Derivative with respect to the first tensor of the score function.
    A,
    /// Derivative with respect to the second one.
    B,
}

#[cube]
impl Score {
    /// The factor of a pair, from the result of [`Score::of`].
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
