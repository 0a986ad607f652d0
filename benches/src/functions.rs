//! Mask functions as users write them, each equivalent to an option.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use cubecl::prelude::*;
use flash_attention_kernels::mods::{MaskFn, MaskMod, Pair, Values};

/// The query's own key and those before it, `KEYS` in total.
pub(crate) struct Window<const KEYS: usize>;

#[cube]
impl<const KEYS: usize> MaskMod for Window<KEYS> {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.distance >= 0.0f32 && pair.distance < comptime!(KEYS as f32)
    }
}

/// Keys of the query's own document that are not later. `a` and `b` are the documents of query and key, from tensors `[1, 1, seq_q, 1]` and
/// `[1, 1, 1, seq_k]`.
pub(crate) struct Document;

#[cube]
impl MaskMod for Document {
    fn sees(pair: Pair, values: Values) -> bool {
        pair.distance >= 0.0f32 && values.a == values.b
    }
}

/// [`Window`] of this many keys, if that number is compiled.
pub(crate) fn window(keys: usize) -> Option<MaskFn> {
    match keys {
        128 => Some(MaskFn::of::<Window<128>>()),
        256 => Some(MaskFn::of::<Window<256>>()),
        1024 => Some(MaskFn::of::<Window<1024>>()),
        2048 => Some(MaskFn::of::<Window<2048>>()),
        _ => None,
    }
}
