//! Predefined score modifications.

use super::{Pair, Partials, ScoreMod, Values, reciprocal};
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
