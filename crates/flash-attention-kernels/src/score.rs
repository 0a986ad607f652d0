//! From `q·kᵀ` to a score, each step beside its derivative.
//!
//! ```text
//! t = softcap · tanh(scale · q·kᵀ / softcap)      dt/d(q·kᵀ) = scale · (1 − (t / softcap)²)
//! score = t + bias where seen, else hidden        d score/d bias = 1
//! ```
//!
//! The softcap is Gemma 2's (arXiv:2408.00118, section 2).

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use cubecl::prelude::*;

/// Scale and softcap of the scores.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Score {
    /// Factor on `q·kᵀ`.
    pub scale: f32,
    /// The cap, where `capped`.
    pub softcap: f32,
    /// Whether there is a cap.
    #[cube(comptime)]
    pub capped: bool,
}

#[cube]
impl Score {
    /// The score of a product `q·kᵀ`, before mask and bias.
    pub fn of(&self, product: f32) -> f32 {
        let scaled = product * self.scale;
        if comptime!(self.capped) { self.softcap * f32::tanh(scaled / self.softcap) } else { scaled }
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
