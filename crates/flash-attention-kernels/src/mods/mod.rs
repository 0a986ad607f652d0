//! The user's `score_mod` and `mask_mod`, written in Rust and compiled into the kernels.
//!
//! ```text
//! s_ij = f(t_ij; pair, a, b)      t = softcap(scale · q·kᵀ)      dt = ds · ∂f/∂t      da = Σ ds · ∂f/∂a
//! visible_ij = band and mask and g(pair, a, b)
//! ```
//!
//! `a` and `b` are the elements of the user's tensors for the pair. Bias and slopes are added to the result of `f`.
//! (FlexAttention, arXiv:2412.05496, section 3, calls these functions `score_mod` and `mask_mod`.)
//!
//! A function is a `#[cube]` implementation of [`ScoreMod`] or [`MaskMod`], which also runs on the host. [`ScoreFn`] and
//! [`MaskFn`] hold such a function as a value. For the host, convert numbers with `as` and not with CubeCL's `cast_from`. The
//! module provides [mathematical functions](exp) that are fast on every device.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod check;
mod masks;
mod math;
mod scores;

pub use check::{Derivative, DerivativeError, Samples, check_score_mod};
pub use masks::{
    Causal, CausalDocument, CausalWindow, Chunked, Dilated, Document, FirstKeys, Neighborhood, PrefixLm, SlidingGlobal,
    SlidingWindow, Stride,
};
pub use math::{exp, ln, reciprocal, tanh};
pub use scores::{Alibi, Bias, Kerple, RelativePosition, ScalableSoftmax, Softcap, Temperature};

mod arguments;
pub use arguments::*;

mod combinators;
pub use combinators::*;

use cubecl::prelude::*;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::any::{TypeId, type_name};
use std::fmt;
use std::hash::{Hash, Hasher};

/// Number of tensors that a function may read.
pub const TENSORS: usize = 2;

/// A pair of query and key. Positions count from the beginning of their sequence.
///
/// ```
/// use flash_attention_kernels::mods::Pair;
///
/// assert_eq!(Pair::of(0, 3, 7, 9), Pair { batch: 0, head: 3, i: 7, j: 9, distance: -2.0 });
/// ```
#[derive(CubeType, Clone, Copy, Debug, PartialEq)]
#[expand(derive(Clone, Copy))]
pub struct Pair {
    /// The number of the sequence if sequences are packed, else the batch.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Position of the query.
    pub i: u32,
    /// Position of the key.
    pub j: u32,
    /// `i − j` as f32, for use in arithmetic. Converting the integers for each pair would cost more than a typical function.
    pub distance: f32,
}

impl Pair {
    /// The pair of query `i` and key `j`.
    pub fn of(batch: u32, head: u32, i: u32, j: u32) -> Self {
        Pair { batch, head, i, j, distance: (i as i32 - j as i32) as f32 }
    }
}

/// Elements of the user's tensors for a pair; 0 for an absent tensor.
///
/// ```
/// use flash_attention_kernels::mods::Values;
///
/// assert_eq!(Values::default(), Values { a: 0.0, b: 0.0 });
/// ```
#[derive(CubeType, Clone, Copy, Debug, Default, PartialEq)]
#[expand(derive(Clone, Copy))]
pub struct Values {
    /// Element of the first tensor.
    pub a: f32,
    /// Element of the second tensor.
    pub b: f32,
}

/// Derivatives of the result of a [`ScoreMod`].
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
    /// Derivative with respect to the input score.
    pub score: f32,
    /// Derivative with respect to [`Values::a`].
    pub a: f32,
    /// Derivative with respect to [`Values::b`].
    pub b: f32,
}

/// A score modification: a function from a score to a score.
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
    /// Whether [`Partials::score`] is 1 for every score. Kernels then need not keep the derivative.
    const ADDITIVE: bool;

    /// The modified score of a pair.
    fn score(score: f32, pair: Pair, values: Values) -> f32;

    /// The derivatives of [`ScoreMod::score`] for the same arguments. [`check_score_mod`] compares them with differences.
    fn backward(score: f32, pair: Pair, values: Values) -> Partials;
}

/// A mask function: whether a query sees a key.
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
    /// Whether the query of the pair sees its key.
    fn sees(pair: Pair, values: Values) -> bool;
}

type Float32 = NativeExpand<f32>;
type Bool = NativeExpand<bool>;

/// A [`ScoreMod`] as a value. It can be called on the host, and expands into the code of a kernel that is being compiled.
///
/// It is serialized as its name, for human readers, and cannot be deserialized.
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
    /// The function that the type `F` implements: see [`ScoreMod`].
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
    /// The function that the type `F` implements: see [`MaskMod`].
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

/// Traits that both have. A function is identified by its type.
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
