//! Predefined score modifications. [`Then`](super::Then) chains them, and [`Swapped`](super::Swapped) lets one of two read the
//! other tensor.

use super::{Pair, Partials, ScoreMod, Values, ln, reciprocal, tanh};
use cubecl::prelude::*;

/// Scores divided by a temperature of their head, `score / a`. `a`, `[1, num_heads_q, 1, 1]`, is above 0. Learned temperatures
/// replace the factor `1/√head_dim` where queries and keys are normalised (QKNorm, arXiv:2010.04245, section 3; Swin V2,
/// arXiv:2111.09883, section 3.3).
///
/// ```
/// use flash_attention_kernels::mods::{Pair, ScoreFn, Temperature, Values};
///
/// let temperature = ScoreFn::of::<Temperature>();
/// let (pair, values) = (Pair::of(0, 0, 7, 5), Values { a: 2.0, b: 0.0 });
/// assert_eq!(temperature.score(3.0, pair, values), 1.5);
/// assert_eq!(temperature.backward(3.0, pair, values).a, -0.75);
/// ```
pub struct Temperature;

#[cube]
impl ScoreMod for Temperature {
    const ADDITIVE: bool = false;

    fn score(score: f32, _pair: Pair, values: Values) -> f32 {
        score * reciprocal(values.a)
    }

    fn backward(score: f32, _pair: Pair, values: Values) -> Partials {
        let inverse = reciprocal(values.a);
        Partials { score: inverse, a: -score * inverse * inverse, b: 0.0f32 }
    }
}

/// Softcap, `CAP · tanh(score / CAP)`, which keeps scores between `−CAP` and `CAP` (Gemma 2, arXiv:2408.00118, section 2). It
/// reads no tensors. It computes what the option `softcap` does, at any place of a chain of functions. `CAP` is at least 1;
/// 0 is taken as 1.
///
/// ```
/// use flash_attention_kernels::mods::{Pair, ScoreFn, Softcap, Values};
///
/// let softcap = ScoreFn::of::<Softcap<30>>();
/// assert_eq!(softcap.score(1e9, Pair::of(0, 0, 0, 0), Values::default()), 30.0);
/// assert_eq!(softcap.backward(0.0, Pair::of(0, 0, 0, 0), Values::default()).score, 1.0);
/// ```
pub struct Softcap<const CAP: u32>;

#[cube]
impl<const CAP: u32> ScoreMod for Softcap<CAP> {
    const ADDITIVE: bool = false;

    fn score(score: f32, _pair: Pair, _values: Values) -> f32 {
        let cap = comptime!(Ord::max(CAP, 1) as f32);
        // Multiply, because a division would be slow.
        cap * tanh(score * comptime!(1.0f32 / cap))
    }

    fn backward(score: f32, _pair: Pair, _values: Values) -> Partials {
        let capped = tanh(score * comptime!(1.0f32 / Ord::max(CAP, 1) as f32));
        Partials { score: 1.0f32 - capped * capped, a: 0.0f32, b: 0.0f32 }
    }
}

/// Logarithmic scaling with the number of keys up to the query, `score · a · ln(i + 1)`, so that attention over long sequences
/// does not fade (Scalable-Softmax, arXiv:2501.19399). `a`, `[1, num_heads_q, 1, 1]`, is the scale of each head. It is
/// meant for causal attention aligned top-left, where query `i` sees `i + 1` keys.
///
/// ```
/// use flash_attention_kernels::mods::{Pair, ScalableSoftmax, ScoreFn, Values};
///
/// let scalable = ScoreFn::of::<ScalableSoftmax>();
/// let (pair, values) = (Pair::of(0, 0, 7, 5), Values { a: 0.5, b: 0.0 });
/// assert!((scalable.score(3.0, pair, values) - 1.5 * 8f32.ln()).abs() < 1e-6);
/// assert!((scalable.backward(3.0, pair, values).a - 3.0 * 8f32.ln()).abs() < 1e-6);
/// ```
pub struct ScalableSoftmax;

#[cube]
impl ScoreMod for ScalableSoftmax {
    const ADDITIVE: bool = false;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        score * values.a * ln((pair.i + 1) as f32)
    }

    fn backward(score: f32, pair: Pair, values: Values) -> Partials {
        let keys = ln((pair.i + 1) as f32);
        Partials { score: values.a * keys, a: score * keys, b: 0.0f32 }
    }
}

/// A bias, `score + a`, for use in a chain of functions; alone, the option `bias` is faster. `a` is `[batch | 1, num_heads_q | 1,
/// seq_q | 1, seq_k | 1]`. T5's relative bias is such a tensor (arXiv:1910.10683, section 2.1).
///
/// ```
/// use flash_attention_kernels::mods::{Bias, Pair, ScoreFn, Values};
///
/// let bias = ScoreFn::of::<Bias>();
/// assert_eq!(bias.score(1.0, Pair::of(0, 0, 7, 5), Values { a: 0.25, b: 0.0 }), 1.25);
/// ```
pub struct Bias;

#[cube]
impl ScoreMod for Bias {
    const ADDITIVE: bool = true;

    fn score(score: f32, _pair: Pair, values: Values) -> f32 {
        score + values.a
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: 1.0f32, b: 0.0f32 }
    }
}

/// ALiBi, `score − a · |i − j|` (arXiv:2108.12409, section 3). `a`, `[batch | 1, num_heads_q, 1, 1]`, is the slope of a head. It
/// computes what the option `alibi_slopes` does where queries and keys are aligned top-left, at any place of a chain of functions.
///
/// ```
/// use flash_attention_kernels::mods::{Alibi, Pair, ScoreFn, Values};
///
/// let alibi = ScoreFn::of::<Alibi>();
/// assert_eq!(alibi.score(1.0, Pair::of(0, 0, 9, 1), Values { a: 0.125, b: 0.0 }), 0.0);
/// ```
pub struct Alibi;

#[cube]
impl ScoreMod for Alibi {
    const ADDITIVE: bool = true;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        score - values.a * f32::abs(pair.distance)
    }

    fn backward(_score: f32, pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: -f32::abs(pair.distance), b: 0.0f32 }
    }
}

/// Relative position, `score + a · (i − j)`: FlexAttention's relative positional encoding (arXiv:2412.05496, section 3), with the
/// weight `a` of a head, `[1, num_heads_q, 1, 1]`. Unlike [`Alibi`] it tells keys before the query from those after it.
///
/// ```
/// use flash_attention_kernels::mods::{Pair, RelativePosition, ScoreFn, Values};
///
/// let relative = ScoreFn::of::<RelativePosition>();
/// let score = |i, j| relative.score(1.0, Pair::of(0, 0, i, j), Values { a: 0.5, b: 0.0 });
/// assert_eq!([score(7, 5), score(5, 7)], [2.0, 0.0]);
/// ```
pub struct RelativePosition;

#[cube]
impl ScoreMod for RelativePosition {
    const ADDITIVE: bool = true;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        score + values.a * pair.distance
    }

    fn backward(_score: f32, pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: pair.distance, b: 0.0f32 }
    }
}

/// Logarithmic decay with the distance, `score − a · ln(1 + b · |i − j|)` (KERPLE's logarithmic kernel, arXiv:2205.09921). `a` and `b`, `[1, num_heads_q, 1, 1]`, are above 0 and learned for each head.
///
/// ```
/// use flash_attention_kernels::mods::{Kerple, Pair, ScoreFn, Values};
///
/// let kerple = ScoreFn::of::<Kerple>();
/// let (pair, values) = (Pair::of(0, 0, 9, 1), Values { a: 2.0, b: 0.5 });
/// assert!((kerple.score(1.0, pair, values) - (1.0 - 2.0 * 5f32.ln())).abs() < 1e-6);
/// assert!((kerple.backward(1.0, pair, values).b + 2.0 * 8.0 / 5.0).abs() < 1e-6);
/// ```
pub struct Kerple;

#[cube]
impl ScoreMod for Kerple {
    const ADDITIVE: bool = true;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        score - values.a * ln(1.0f32 + values.b * f32::abs(pair.distance))
    }

    fn backward(_score: f32, pair: Pair, values: Values) -> Partials {
        let apart = f32::abs(pair.distance);
        let inside = 1.0f32 + values.b * apart;
        Partials { score: 1.0f32, a: -ln(inside), b: -values.a * apart * reciprocal(inside) }
    }
}
