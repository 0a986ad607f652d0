//! Combinations of functions.

use super::{MaskMod, Pair, Partials, ScoreMod, Values};
use cubecl::prelude::*;

/// Composition of two score modifications that read the same tensors: `B` is applied to the result of `A`. See also [`Swapped`].
///
/// ```
/// # use cubecl::prelude::*;
/// use flash_attention_kernels::mods::{Pair, Partials, ScoreFn, ScoreMod, Then, Values};
///
/// struct Twice;
///
/// #[cube]
/// impl ScoreMod for Twice {
///     const ADDITIVE: bool = false;
///     fn score(score: f32, _pair: Pair, _values: Values) -> f32 {
///         2.0f32 * score
///     }
///     fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
///         Partials { score: 2.0f32, a: 0.0f32, b: 0.0f32 }
///     }
/// }
///
/// let fourfold = ScoreFn::of::<Then<Twice, Twice>>();
/// assert_eq!(fourfold.backward(1.0, Pair::of(0, 0, 0, 0), Values::default()).score, 4.0);
/// ```
pub struct Then<A, B>(std::marker::PhantomData<(A, B)>);

#[cube]
impl<A: ScoreMod, B: ScoreMod> ScoreMod for Then<A, B> {
    const ADDITIVE: bool = A::ADDITIVE && B::ADDITIVE;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        B::score(A::score(score, pair, values), pair, values)
    }

    fn backward(score: f32, pair: Pair, values: Values) -> Partials {
        let first = A::backward(score, pair, values);
        let second = B::backward(A::score(score, pair, values), pair, values);
        Partials {
            score: second.score * first.score,
            a: second.score * first.a + second.a,
            b: second.score * first.b + second.b,
        }
    }
}

/// Intersection of two mask functions that read the same tensors: a pair is visible if both functions see it.
///
/// ```
/// # use cubecl::prelude::*;
/// use flash_attention_kernels::mods::{And, MaskFn, MaskMod, Not, Or, Pair, Values};
///
/// struct Causal;
///
/// #[cube]
/// impl MaskMod for Causal {
///     fn sees(pair: Pair, _values: Values) -> bool {
///         pair.j <= pair.i
///     }
/// }
///
/// let itself = MaskFn::of::<And<Causal, Not<And<Causal, Not<Or<Causal, Causal>>>>>>();
/// assert!(itself.sees(Pair::of(0, 0, 1, 1), Values::default()));
/// ```
pub struct And<A, B>(std::marker::PhantomData<(A, B)>);

#[cube]
impl<A: MaskMod, B: MaskMod> MaskMod for And<A, B> {
    fn sees(pair: Pair, values: Values) -> bool {
        let (first, second) = (A::sees(pair, values), B::sees(pair, values));
        first && second
    }
}

/// Union of two mask functions that read the same tensors: a pair is visible if either function sees it. See [`And`].
pub struct Or<A, B>(std::marker::PhantomData<(A, B)>);

#[cube]
impl<A: MaskMod, B: MaskMod> MaskMod for Or<A, B> {
    fn sees(pair: Pair, values: Values) -> bool {
        let (first, second) = (A::sees(pair, values), B::sees(pair, values));
        first || second
    }
}

/// Complement of a mask function: a pair is visible if the function does not see it. See [`And`].
pub struct Not<A>(std::marker::PhantomData<A>);

#[cube]
impl<A: MaskMod> MaskMod for Not<A> {
    fn sees(pair: Pair, values: Values) -> bool {
        !A::sees(pair, values)
    }
}

/// A function with its two tensors exchanged: it reads the second tensor as `a` and the first as `b`. In a combination, functions
/// that each read one tensor then read different ones.
///
/// ```
/// use flash_attention_kernels::mods::{Alibi, Bias, Pair, ScoreFn, Swapped, Then, Values};
///
/// // The slope of a head is `a`, and the bias is `b`.
/// let both = ScoreFn::of::<Then<Alibi, Swapped<Bias>>>();
/// let (pair, values) = (Pair::of(0, 0, 7, 5), Values { a: 0.25, b: 4.0 });
/// assert_eq!(both.score(1.0, pair, values), 4.5);
/// assert_eq!(both.backward(1.0, pair, values).b, 1.0);
/// ```
pub struct Swapped<F>(std::marker::PhantomData<F>);

#[cube]
impl<F: ScoreMod> ScoreMod for Swapped<F> {
    const ADDITIVE: bool = F::ADDITIVE;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        F::score(score, pair, Values { a: values.b, b: values.a })
    }

    fn backward(score: f32, pair: Pair, values: Values) -> Partials {
        let of = F::backward(score, pair, Values { a: values.b, b: values.a });
        Partials { score: of.score, a: of.b, b: of.a }
    }
}

#[cube]
impl<F: MaskMod> MaskMod for Swapped<F> {
    fn sees(pair: Pair, values: Values) -> bool {
        F::sees(pair, Values { a: values.b, b: values.a })
    }
}
