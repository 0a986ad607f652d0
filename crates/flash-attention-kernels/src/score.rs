//! From `q·kᵀ` to a score, each step beside its derivative.
//!
//! ```text
//! t = softcap · tanh(scale · q·kᵀ / softcap)      dt/d(q·kᵀ) = scale · (1 − (t / softcap)²)
//! score = t + bias − slope · |i − j| where seen   d score/d bias = 1     d score/d slope = −|i − j|
//! ```
//!
//! The softcap is Gemma 2's (arXiv:2408.00118, section 2), slopes are those of ALiBi (arXiv:2108.12409, section 3): a number for
//! each head, and the distance from where the query [stands among the keys](crate::mask::Band::offset()). A *sink* is the score of
//! one more key that every row sees and whose value is 0 (gpt-oss; StreamingLLM, arXiv:2309.17453, section 3.2).

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::extras::Extras;
use crate::mask::Band;
use cubecl::prelude::*;

/// What makes scores of products, and weights of scores, but for mask and bias.
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
    /// The rest.
    pub extras: Extras,
}

#[cube]
impl Score {
    /// The score of a product `q·kᵀ`, before mask and bias.
    pub fn of(&self, product: f32) -> f32 {
        let scaled = product * self.scale;
        if comptime!(self.capped) { self.softcap * f32::tanh(scaled / self.softcap) } else { scaled }
    }

    /// What the head's slope makes of the distance of a pair.
    pub fn biased(&self, score: f32, slope: f32, band: &Band, i: u32, j: u32) -> f32 {
        if comptime!(self.extras.slopes.is_some()) { fma(slope, distance(band, i, j), score) } else { score }
    }

    /// Derivative of [`Score::of`] but for the factor `scale`, from its result.
    pub fn derivative(&self, t: f32) -> f32 {
        if comptime!(self.capped) {
            let ratio = t / self.softcap;
            1.0f32 - ratio * ratio
        } else {
            1.0f32.runtime()
        }
    }
}

/// The derivative of a score by its slope: `−|i − j|`.
#[cube]
pub fn distance(band: &Band, i: u32, j: u32) -> f32 {
    let offset = f32::cast_from(band.offset(i, j));
    min(offset, -offset)
}
