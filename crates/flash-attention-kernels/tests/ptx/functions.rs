//! Functions of scores and masks as users write them.

use cubecl::prelude::*;
use flash_attention_kernels::mods::{MaskMod, Pair, Partials, ScoreMod, Values, tanh};

/// ALiBi.
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

/// A softcap.
pub struct Softcap;

#[cube]
impl ScoreMod for Softcap {
    const ADDITIVE: bool = false;

    fn score(score: f32, _pair: Pair, _values: Values) -> f32 {
        50.0f32 * tanh(score * 0.02f32)
    }

    fn backward(score: f32, _pair: Pair, _values: Values) -> Partials {
        let tanh = tanh(score * 0.02f32);
        Partials { score: 1.0f32 - tanh * tanh, a: 0.0f32, b: 0.0f32 }
    }
}

/// Documents of queries and keys.
pub struct Document;

#[cube]
impl MaskMod for Document {
    fn sees(_pair: Pair, values: Values) -> bool {
        values.a == values.b
    }
}
