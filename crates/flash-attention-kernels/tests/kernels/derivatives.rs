//! `check_score_mod`, on the host: right derivatives pass, and each wrong one is named.

use cubecl::prelude::*;
use flash_attention_kernels::mods::{
    Alibi, Bias, Derivative, DerivativeError, Kerple, Pair, Partials, RelativePosition, Samples, ScalableSoftmax,
    ScoreFn, ScoreMod, Softcap, Swapped, Temperature, Then, Values, check_score_mod, tanh,
};
use flash_attention_reference::mods::{Bent, Relative, Sloped};

#[test]
fn derivatives_of_ready_made_functions_are_right() {
    let functions = [
        ScoreFn::of::<Temperature>(),
        ScoreFn::of::<Softcap<3>>(),
        ScoreFn::of::<ScalableSoftmax>(),
        ScoreFn::of::<Bias>(),
        ScoreFn::of::<Alibi>(),
        ScoreFn::of::<RelativePosition>(),
        ScoreFn::of::<Kerple>(),
        ScoreFn::of::<Swapped<Kerple>>(),
        ScoreFn::of::<Then<Softcap<5>, Temperature>>(),
        ScoreFn::of::<Then<Bent, Swapped<ScalableSoftmax>>>(),
        ScoreFn::of::<Relative>(),
        ScoreFn::of::<Sloped>(),
        ScoreFn::of::<Bent>(),
    ];
    let long = Samples { score: -100.0..100.0, seq: 1 << 17, ..Samples::default() };
    for function in functions {
        for samples in [&Samples::default(), &long] {
            check_score_mod(function, samples).unwrap();
        }
    }
}

/// `3 tanh(t / 3) · (1 + a) + b · d / 64`, with derivatives multiplied by these percentages.
struct Scaled<const SCORE: u32, const A: u32, const B: u32>;

#[cube]
impl<const SCORE: u32, const A: u32, const B: u32> ScoreMod for Scaled<SCORE, A, B> {
    const ADDITIVE: bool = false;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        3.0f32 * tanh(score * comptime!(1.0f32 / 3.0)) * (1.0f32 + values.a) + values.b * pair.distance * 0.015625f32
    }

    fn backward(score: f32, pair: Pair, values: Values) -> Partials {
        let bent = tanh(score * comptime!(1.0f32 / 3.0));
        Partials {
            score: comptime!(SCORE as f32 * 0.01) * (1.0f32 - bent * bent) * (1.0f32 + values.a),
            a: comptime!(A as f32 * 0.01) * 3.0f32 * bent,
            b: comptime!(B as f32 * 0.01) * pair.distance * 0.015625f32,
        }
    }
}

#[test]
fn each_wrong_derivative_is_named() {
    let of = |function: ScoreFn| match check_score_mod(function, &Samples::default()) {
        Ok(()) => None,
        Err(DerivativeError::Wrong { function: named, derivative, returned, measured, score, pair, values }) => {
            // What it reports is what the function returns there.
            let partials = function.backward(score, pair, values);
            let of = [(Derivative::Score, partials.score), (Derivative::A, partials.a), (Derivative::B, partials.b)];
            assert!(named == function && of.contains(&(derivative, returned)), "{derivative} {returned} of {of:?}");
            assert!(returned < measured[0] || returned > measured[1], "{returned} is within {measured:?}");
            Some(derivative)
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(of(ScoreFn::of::<Scaled<100, 100, 100>>()), None);
    assert_eq!(of(ScoreFn::of::<Scaled<102, 100, 100>>()), Some(Derivative::Score));
    assert_eq!(of(ScoreFn::of::<Scaled<98, 100, 100>>()), Some(Derivative::Score));
    assert_eq!(of(ScoreFn::of::<Scaled<100, 102, 100>>()), Some(Derivative::A));
    assert_eq!(of(ScoreFn::of::<Scaled<100, 0, 100>>()), Some(Derivative::A));
    assert_eq!(of(ScoreFn::of::<Scaled<100, 100, 98>>()), Some(Derivative::B));
    assert_eq!(of(ScoreFn::of::<Scaled<100, 100, 0>>()), Some(Derivative::B));
    let error = check_score_mod(ScoreFn::of::<Scaled<100, 0, 100>>(), &Samples::default()).unwrap_err().to_string();
    assert!(error.contains("Scaled<100, 0, 100>: backward returns a = "), "{error}");
}

/// `2t + a`, which is not additive, with this derivative.
struct Doubled<const RETURNED: u32>;

#[cube]
impl<const RETURNED: u32> ScoreMod for Doubled<RETURNED> {
    const ADDITIVE: bool = true;

    fn score(score: f32, _pair: Pair, values: Values) -> f32 {
        2.0f32 * score + values.a
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        Partials { score: comptime!(RETURNED as f32), a: 1.0f32, b: 0.0f32 }
    }
}

#[test]
fn a_function_that_is_not_additive_is_named() {
    let error = |function| check_score_mod(function, &Samples::default()).unwrap_err();
    let honest = error(ScoreFn::of::<Doubled<2>>());
    assert!(matches!(honest, DerivativeError::NotAdditive { returned: 2.0, .. }), "{honest}");
    let pretending = error(ScoreFn::of::<Doubled<1>>());
    assert!(
        matches!(pretending, DerivativeError::Wrong { derivative: Derivative::Score, returned: 1.0, .. }),
        "{pretending}"
    );
}

/// A kink at 0, a jump at 4, and −∞ after the query, where the derivative is NaN.
struct Kinked;

#[cube]
impl ScoreMod for Kinked {
    const ADDITIVE: bool = false;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        let jumped = select(score > 4.0f32, score + 1.0f32, f32::max(score, 0.0f32)) * values.a;
        select(pair.j > pair.i, f32::NEG_INFINITY, jumped)
    }

    fn backward(score: f32, pair: Pair, values: Values) -> Partials {
        let slope = select(score > 0.0f32, values.a, 0.0f32);
        let jumped = select(score > 4.0f32, score + 1.0f32, f32::max(score, 0.0f32));
        Partials { score: select(pair.j > pair.i, f32::NAN, slope), a: jumped, b: 0.0f32 }
    }
}

/// Hides all pairs.
struct Nothing;

#[cube]
impl ScoreMod for Nothing {
    const ADDITIVE: bool = false;

    fn score(_score: f32, _pair: Pair, _values: Values) -> f32 {
        f32::NEG_INFINITY
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        Partials { score: 0.0f32, a: 0.0f32, b: 0.0f32 }
    }
}

#[test]
fn kinks_and_hidden_pairs_are_not_faults() {
    // With many samples within a step of the kink and of the jump.
    for score in [-8.0..8.0, -0.02..0.02, 3.98..4.02] {
        check_score_mod(ScoreFn::of::<Kinked>(), &Samples { score, ..Samples::default() }).unwrap();
    }
    let error = check_score_mod(ScoreFn::of::<Nothing>(), &Samples::default()).unwrap_err();
    assert_eq!(error, DerivativeError::NothingCompared { function: ScoreFn::of::<Nothing>(), count: 4096 });
}
