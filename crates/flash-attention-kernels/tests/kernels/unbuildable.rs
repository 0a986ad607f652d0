//! Score functions that cannot be compiled.

use cubecl::prelude::*;
use flash_attention_kernels::mods::{Pair, Partials, ScoreMod, Values};

/// Score function that the compiler refuses, in the forward or, if `BACKWARD`, only in the backward.
pub struct Refused<const BACKWARD: bool>;

#[cube]
impl<const BACKWARD: bool> ScoreMod for Refused<BACKWARD> {
    const ADDITIVE: bool = false;

    fn score(score: f32, _pair: Pair, _values: Values) -> f32 {
        if comptime!(!BACKWARD) {
            push_validation_error(comptime!("no device computes this score".to_string()));
        }
        score
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        if comptime!(BACKWARD) {
            push_validation_error(comptime!("no device computes this derivative".to_string()));
        }
        Partials { score: 1.0f32, a: 0.0f32, b: 0.0f32 }
    }
}

/// Score function that panics: on a device when its kernel is expanded, on the CPU when it is called.
pub struct Panics;

fn unfinished() {
    panic!("this score was never finished");
}

#[cube]
impl ScoreMod for Panics {
    const ADDITIVE: bool = false;

    fn score(score: f32, _pair: Pair, _values: Values) -> f32 {
        comptime!(unfinished());
        score
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: 0.0f32, b: 0.0f32 }
    }
}
