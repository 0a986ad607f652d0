//! Functions of scores and of visibility as users write them, each for something that is an option as well.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::case::SOFTCAP;
use cubecl::prelude::*;
use flash_attention_kernels::mods::{MaskFn, MaskMod, Pair, Partials, ScoreMod, Values, tanh};

/// ALiBi: `a` is the slope of a head, of a tensor `[1, heads, 1, 1]`.
pub(crate) struct Alibi;

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

/// [`SOFTCAP`]; divisions would be slow.
pub(crate) struct Softcap;

#[cube]
impl ScoreMod for Softcap {
    const ADDITIVE: bool = false;

    fn score(score: f32, _pair: Pair, _values: Values) -> f32 {
        comptime!(SOFTCAP) * tanh(score * comptime!(1.0 / SOFTCAP))
    }

    fn backward(score: f32, _pair: Pair, _values: Values) -> Partials {
        let capped = tanh(score * comptime!(1.0 / SOFTCAP));
        Partials { score: 1.0f32 - capped * capped, a: 0.0f32, b: 0.0f32 }
    }
}

/// The query's own key and those before it, `KEYS` of them in all.
pub(crate) struct Window<const KEYS: usize>;

#[cube]
impl<const KEYS: usize> MaskMod for Window<KEYS> {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.distance >= 0.0f32 && pair.distance < comptime!(KEYS as f32)
    }
}

/// Keys that are not later, of the query's own document: `a` and `b` are the documents of query and key, of tensors `[1, 1, seq_q, 1]` and
/// `[1, 1, 1, seq_k]`.
pub(crate) struct Document;

#[cube]
impl MaskMod for Document {
    fn sees(pair: Pair, values: Values) -> bool {
        pair.distance >= 0.0f32 && values.a == values.b
    }
}

/// [`Window`] of so many keys, if it is one of those that are compiled.
pub(crate) fn window(keys: usize) -> Option<MaskFn> {
    match keys {
        128 => Some(MaskFn::of::<Window<128>>()),
        256 => Some(MaskFn::of::<Window<256>>()),
        1024 => Some(MaskFn::of::<Window<1024>>()),
        2048 => Some(MaskFn::of::<Window<2048>>()),
        _ => None,
    }
}
