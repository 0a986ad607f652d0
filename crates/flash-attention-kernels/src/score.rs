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

use crate::dropout::Dropout;
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

/// What there may be beside products, mask and bias.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Extras {
    /// Slopes `[batch | 1, H]`.
    pub slopes: ComptimeOption<&'static Tensor<f32>>,
    /// Sinks `[H]`.
    pub sinks: ComptimeOption<&'static Tensor<f32>>,
    /// Of probabilities.
    pub dropout: Dropout,
    /// How many of the queries are a sequence, `[B]`; the first ones.
    pub lens_q: ComptimeOption<&'static Tensor<u32>>,
    /// How many of the keys.
    pub lens_k: ComptimeOption<&'static Tensor<u32>>,
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

impl Extras {
    /// Whether sequences may end before tensors do.
    pub fn is_ragged(&self) -> bool {
        self.lens_q.is_some() || self.lens_k.is_some()
    }
}

impl ExtrasExpand {
    /// [`Extras::is_ragged`], while a kernel is made.
    pub fn is_ragged(&self) -> bool {
        self.lens_q.is_some() || self.lens_k.is_some()
    }
}

#[cube]
impl Extras {
    /// The band of a batch's sequence.
    pub fn band(&self, band: &Band, batch: usize) -> Band {
        let ragged = comptime!(self.is_ragged());
        let mut len_q = band.seq_q;
        #[comptime]
        if let ComptimeOption::Some(lens) = &self.lens_q {
            len_q = lens[batch * lens.stride(0)];
        }
        let mut len_k = band.seq_k;
        #[comptime]
        if let ComptimeOption::Some(lens) = &self.lens_k {
            len_k = lens[batch * lens.stride(0)];
        }
        if comptime!(ragged) { band.of(len_q, len_k) } else { *band }
    }

    /// The slope of a head, 0 if there is none.
    pub fn slope(&self, batch: usize, head: usize) -> f32 {
        let mut slope = 0.0f32.runtime();
        #[comptime]
        if let ComptimeOption::Some(slopes) = &self.slopes {
            slope = slopes[batch * slopes.stride(0) + head * slopes.stride(1)];
        }
        slope
    }

    /// The sink of a head, if there is one; else `otherwise`.
    pub fn sink(&self, head: usize, otherwise: f32) -> f32 {
        let mut sink = otherwise;
        #[comptime]
        if let ComptimeOption::Some(sinks) = &self.sinks {
            sink = sinks[head * sinks.stride(0)];
        }
        sink
    }
}

/// The derivative of a score by its slope: `−|i − j|`.
#[cube]
pub fn distance(band: &Band, i: u32, j: u32) -> f32 {
    let offset = f32::cast_from(band.offset(i, j));
    min(offset, -offset)
}
