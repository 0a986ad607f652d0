//! Score functions and mask functions for tests. Kernels, host loops and the oracle compute them alike.
//!
//! Together they use everything that a function may use: positions, heads, sequences, both tensors, and a derivative that is not 1.
//!
//! ```
//! use flash_attention_kernels::mods::{Pair, ScoreFn, Values};
//! use flash_attention_reference::mods::Sloped;
//!
//! let sloped = ScoreFn::of::<Sloped>();
//! assert_eq!(sloped.score(1.0, Pair::of(0, 0, 9, 1), Values { a: 2.0, b: 0.0 }), 0.0);
//! ```

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::random::normal;
use cubecl::prelude::*;
use flash_attention_kernels::mods::{MaskMod, Pair, Partials, ScoreMod, Values, reciprocal, tanh};

/// Lowers scores with the distance, more in each following head, and raises them in every other sequence: `t − (head + 1) · |i − j| / 64 +
/// (batch mod 2) / 4`. Additive, without tensors.
///
/// ```
/// use flash_attention_kernels::mods::{Pair, ScoreFn, Values};
/// use flash_attention_reference::mods::Relative;
///
/// let relative = ScoreFn::of::<Relative>();
/// assert_eq!(relative.score(1.0, Pair::of(1, 0, 0, 32), Values::default()), 0.75);
/// ```
pub struct Relative;

#[cube]
impl ScoreMod for Relative {
    const ADDITIVE: bool = true;

    fn score(score: f32, pair: Pair, _values: Values) -> f32 {
        let slope = (pair.head + 1) as f32 * 0.015625f32;
        score - slope * f32::abs(pair.distance) + (pair.batch % 2) as f32 * 0.25f32
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: 0.0f32, b: 0.0f32 }
    }
}

/// Slopes from a tensor: `t − a · |i − j| / 16`. Additive.
///
/// ```
/// use flash_attention_kernels::mods::{Pair, ScoreFn, Values};
/// use flash_attention_reference::mods::Sloped;
///
/// let sloped = ScoreFn::of::<Sloped>();
/// assert_eq!(sloped.backward(0.0, Pair::of(0, 0, 0, 8), Values::default()).a, -0.5);
/// ```
pub struct Sloped;

#[cube]
impl ScoreMod for Sloped {
    const ADDITIVE: bool = true;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        score - values.a * f32::abs(pair.distance) * 0.0625f32
    }

    fn backward(_score: f32, pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: -f32::abs(pair.distance) * 0.0625f32, b: 0.0f32 }
    }
}

/// A softcap with a gain from a tensor, and a step at the diagonal: `3 tanh(t / 3) · (1 + a) + b · d / (16 + |d|)`, where `d = i − j`. Its
/// derivative depends on the score and on `a`.
///
/// ```
/// use flash_attention_kernels::mods::{Pair, ScoreFn, Values};
/// use flash_attention_reference::mods::Bent;
///
/// let bent = ScoreFn::of::<Bent>();
/// assert!(!bent.additive());
/// let of = bent.backward(0.0, Pair::of(0, 0, 20, 4), Values { a: 0.5, b: 1.0 });
/// assert_eq!((of.score, of.a, of.b), (1.5, 0.0, 0.5));
/// ```
pub struct Bent;

#[cube]
impl ScoreMod for Bent {
    const ADDITIVE: bool = false;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        let step = pair.distance * reciprocal(16.0f32 + f32::abs(pair.distance));
        3.0f32 * tanh(score * comptime!(1.0f32 / 3.0)) * (1.0f32 + values.a) + values.b * step
    }

    fn backward(score: f32, pair: Pair, values: Values) -> Partials {
        let bent = tanh(score * comptime!(1.0f32 / 3.0));
        Partials {
            score: (1.0f32 - bent * bent) * (1.0f32 + values.a),
            a: 3.0f32 * bent,
            b: pair.distance * reciprocal(16.0f32 + f32::abs(pair.distance)),
        }
    }
}

/// Shows keys at most seven positions before or after the query, and every fourth key, which differ between heads and sequences (Sparse
/// Transformers, arXiv:1904.10509, section 4.2). Without tensors.
///
/// ```
/// use flash_attention_kernels::mods::{MaskFn, Pair, Values};
/// use flash_attention_reference::mods::Strided;
///
/// let strided = MaskFn::of::<Strided>();
/// let sees = |j| strided.sees(Pair::of(0, 1, 20, j), Values::default());
/// assert_eq!([5, 6, 13, 14, 27, 28].map(sees), [true, false, true, true, true, false]);
/// ```
pub struct Strided;

#[cube]
impl MaskMod for Strided {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.j % 4 == (pair.head + pair.batch) % 4 || f32::abs(pair.distance) < 8.0f32
    }
}

/// Document number of each of `len` positions: randomly 0 or 1.
///
/// ```
/// let documents = flash_attention_reference::mods::documents(100, 7);
/// assert!(documents.contains(&0.0) && documents.contains(&1.0));
/// ```
pub fn documents(len: usize, seed: u64) -> Vec<f64> {
    normal(len, seed).into_iter().map(|x| f64::from(u8::from(x > 0.0))).collect()
}
