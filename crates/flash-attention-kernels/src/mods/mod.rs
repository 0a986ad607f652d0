//! Functions of scores and of visibility that users write in Rust, compiled into the kernels.
//!
//! ```text
//! s_ij = f(t_ij; pair, a, b)      t = softcap(scale · q·kᵀ)      dt = ds · ∂f/∂t      da = Σ ds · ∂f/∂a
//! seen_ij = band and mask and g(pair, a, b)
//! ```
//!
//! `a` and `b` are what the user's tensors hold for the pair. Bias and slopes are added to what `f` returns.
//! (FlexAttention, arXiv:2412.05496, section 3, of which these are `score_mod` and `mask_mod`.)
//!
//! A function is a `#[cube]` implementation of [`ScoreMod`] or [`MaskMod`], which is at once an ordinary one; [`ScoreFn`] and [`MaskFn`]
//! carry it as a value. On the host `as` converts numbers, and not CubeCL's `cast_from`. There is [mathematics](exp) for it, which is
//! fast on every device.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod masks;
mod math;

pub use masks::{Causal, CausalDocument, Dilated, Document, PrefixLm, SlidingGlobal};
pub use math::{exp, ln, reciprocal, tanh};

mod arguments;
pub use arguments::*;

mod combinators;
pub use combinators::*;

use cubecl::prelude::*;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::any::{TypeId, type_name};
use std::fmt;
use std::hash::{Hash, Hasher};

/// Tensors that a function may read.
pub const TENSORS: usize = 2;

/// A pair of query and key. Positions count from where their sequence begins.
///
/// ```
/// use flash_attention_kernels::mods::Pair;
///
/// assert_eq!(Pair::of(0, 3, 7, 9), Pair { batch: 0, head: 3, i: 7, j: 9, distance: -2.0 });
/// ```
#[derive(CubeType, Clone, Copy, Debug, PartialEq)]
#[expand(derive(Clone, Copy))]
pub struct Pair {
    /// The sequence: its number where several are packed, else its batch.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// The query.
    pub i: u32,
    /// The key.
    pub j: u32,
    /// `i − j`, to calculate with: a conversion for each pair would cost more than what is done with it.
    pub distance: f32,
}

impl Pair {
    /// That of a query and a key.
    pub fn of(batch: u32, head: u32, i: u32, j: u32) -> Self {
        Pair { batch, head, i, j, distance: (i as i32 - j as i32) as f32 }
    }
}

/// What the user's tensors hold for a pair; 0 where there are fewer.
///
/// ```
/// use flash_attention_kernels::mods::Values;
///
/// assert_eq!(Values::default(), Values { a: 0.0, b: 0.0 });
/// ```
#[derive(CubeType, Clone, Copy, Debug, Default, PartialEq)]
#[expand(derive(Clone, Copy))]
pub struct Values {
    /// The first one.
    pub a: f32,
    /// The second.
    pub b: f32,
}

/// Derivatives of a score that a [`ScoreMod`] has made.
///
/// ```
/// use flash_attention_kernels::mods::Partials;
///
/// // Of score + a · distance, two keys behind the query.
/// let of = Partials { score: 1.0, a: 2.0, b: 0.0 };
/// assert_eq!(of.score, 1.0);
/// ```
#[derive(CubeType, Clone, Copy, Debug, PartialEq)]
#[expand(derive(Clone, Copy))]
pub struct Partials {
    /// By the score that it was made of.
    pub score: f32,
    /// By [`Values::a`].
    pub a: f32,
    /// By [`Values::b`].
    pub b: f32,
}

/// A score made of a score.
///
/// ```
/// use cubecl::prelude::*;
/// use flash_attention_kernels::mods::{Pair, Partials, ScoreFn, ScoreMod, Values};
///
/// /// ALiBi: `a` is the slope of a head, of a tensor `[1, heads, 1, 1]`.
/// struct Alibi;
///
/// #[cube]
/// impl ScoreMod for Alibi {
///     const ADDITIVE: bool = true;
///
///     fn score(score: f32, pair: Pair, values: Values) -> f32 {
///         score - values.a * f32::abs(pair.distance)
///     }
///
///     fn backward(_score: f32, pair: Pair, _values: Values) -> Partials {
///         Partials { score: 1.0f32, a: -f32::abs(pair.distance), b: 0.0f32 }
///     }
/// }
///
/// let alibi = ScoreFn::of::<Alibi>();
/// assert_eq!(alibi.score(1.0, Pair::of(0, 0, 7, 5), Values { a: 0.25, b: 0.0 }), 0.5);
/// ```
#[cube]
pub trait ScoreMod: 'static + Send + Sync {
    /// Whether [`Partials::score`] is 1 whatever the score: what is known need not be kept.
    const ADDITIVE: bool;

    /// The score of a pair.
    fn score(score: f32, pair: Pair, values: Values) -> f32;

    /// Its derivatives at the same place.
    fn backward(score: f32, pair: Pair, values: Values) -> Partials;
}

/// Whether a query sees a key.
///
/// ```
/// use cubecl::prelude::*;
/// use flash_attention_kernels::mods::{MaskFn, MaskMod, Pair, Values};
///
/// /// Keys of the query's own document, or the first ones: `a` and `b` are the documents of query and key, of tensors
/// /// `[batch, 1, seq_q, 1]` and `[batch, 1, 1, seq_k]`.
/// struct Document;
///
/// #[cube]
/// impl MaskMod for Document {
///     fn sees(pair: Pair, values: Values) -> bool {
///         pair.j < 4 || values.a == values.b
///     }
/// }
///
/// let document = MaskFn::of::<Document>();
/// assert!(document.sees(Pair::of(0, 0, 90, 3), Values { a: 1.0, b: 0.0 }));
/// assert!(!document.sees(Pair::of(0, 0, 90, 4), Values { a: 1.0, b: 0.0 }));
/// ```
#[cube]
pub trait MaskMod: 'static + Send + Sync {
    /// Whether it does.
    fn sees(pair: Pair, values: Values) -> bool;
}

type Float32 = NativeExpand<f32>;
type Bool = NativeExpand<bool>;

/// A [`ScoreMod`] as a value: on the host a function, to a kernel being made what it is compiled to.
///
/// It serializes as its name, for who reads, but cannot be read back.
#[derive(Clone, Copy)]
pub struct ScoreFn {
    id: TypeId,
    name: &'static str,
    additive: bool,
    score: fn(f32, Pair, Values) -> f32,
    backward: fn(f32, Pair, Values) -> Partials,
    expand_score: fn(&Scope, Float32, PairExpand, ValuesExpand) -> Float32,
    expand_backward: fn(&Scope, Float32, PairExpand, ValuesExpand) -> PartialsExpand,
}

impl ScoreFn {
    /// That of a type: see [`ScoreMod`].
    pub fn of<F: ScoreMod>() -> Self {
        ScoreFn {
            id: TypeId::of::<F>(),
            name: type_name::<F>(),
            additive: F::ADDITIVE,
            score: F::score,
            backward: F::backward,
            expand_score: F::__expand_score,
            expand_backward: F::__expand_backward,
        }
    }

    /// [`ScoreMod::ADDITIVE`].
    pub fn additive(&self) -> bool {
        self.additive
    }

    /// [`ScoreMod::score`].
    pub fn score(&self, score: f32, pair: Pair, values: Values) -> f32 {
        (self.score)(score, pair, values)
    }

    /// [`ScoreMod::backward`].
    pub fn backward(&self, score: f32, pair: Pair, values: Values) -> Partials {
        (self.backward)(score, pair, values)
    }

    #[doc(hidden)]
    pub fn __expand_score_method(&self, scope: &Scope, of: Float32, pair: PairExpand, values: ValuesExpand) -> Float32 {
        (self.expand_score)(scope, of, pair, values)
    }

    #[doc(hidden)]
    pub fn __expand_backward_method(
        &self,
        scope: &Scope,
        of: Float32,
        pair: PairExpand,
        values: ValuesExpand,
    ) -> PartialsExpand {
        (self.expand_backward)(scope, of, pair, values)
    }
}

/// A [`MaskMod`] as a value: see [`ScoreFn`].
#[derive(Clone, Copy)]
pub struct MaskFn {
    id: TypeId,
    name: &'static str,
    sees: fn(Pair, Values) -> bool,
    expand_sees: fn(&Scope, PairExpand, ValuesExpand) -> Bool,
}

impl MaskFn {
    /// That of a type: see [`MaskMod`].
    pub fn of<F: MaskMod>() -> Self {
        MaskFn { id: TypeId::of::<F>(), name: type_name::<F>(), sees: F::sees, expand_sees: F::__expand_sees }
    }

    /// [`MaskMod::sees`].
    pub fn sees(&self, pair: Pair, values: Values) -> bool {
        (self.sees)(pair, values)
    }

    #[doc(hidden)]
    pub fn __expand_sees_method(&self, scope: &Scope, pair: PairExpand, values: ValuesExpand) -> Bool {
        (self.expand_sees)(scope, pair, values)
    }
}

/// What both have in common: they are what their type is.
macro_rules! function {
    ($name:ident) => {
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.id == other.id
            }
        }

        impl Eq for $name {}

        impl Hash for $name {
            fn hash<H: Hasher>(&self, state: &mut H) {
                self.id.hash(state);
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = String::deserialize(deserializer)?;
                Err(D::Error::custom(format!("the function {name} is code, which cannot be read: set it again")))
            }
        }
    };
}

function!(ScoreFn);
function!(MaskFn);
