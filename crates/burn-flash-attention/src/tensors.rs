//! The tensors that attention may take beside `q`, `k` and `v`: one list of them, and what is generated from it.

#![allow(dead_code, reason = "ExtensionType derives a struct for fusion whose plain fields are never read")]

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
use flash_attention_kernels::BlockLists;
use flash_attention_kernels::mods::TENSORS;

/// Tensors that may be absent: backend extensions take no `Option`.
macro_rules! optional {
    ($($(#[$doc:meta])* $Optional:ident: $Tensor:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, ExtensionType)]
        #[cfg_attr(feature = "fusion", extension_type(fusion))]
        pub enum $Optional<B: Backend> {
            Some($Tensor<B>),
            None,
        }

        impl<B: Backend> $Optional<B> {
            pub fn from_option(tensor: Option<$Tensor<B>>) -> Self {
                tensor.map_or(Self::None, Self::Some)
            }

            pub fn into_option(self) -> Option<$Tensor<B>> {
                match self {
                    Self::Some(tensor) => Some(tensor),
                    Self::None => None,
                }
            }
        }
    )*};
}

optional! {
    /// A float tensor that may be absent.
    OptionalFloat: FloatTensor;
    /// A boolean tensor that may be absent.
    OptionalBool: BoolTensor;
    /// An integer tensor that may be absent.
    OptionalInt: IntTensor;
}

impl<B: Backend> From<Option<FloatTensor<B>>> for OptionalFloat<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        Self::from_option(tensor)
    }
}

/// Generates [`Extras`] and [`Tensors`]. An entry is a field, the argument that error messages name, and the kind of the tensor.
macro_rules! optional_tensors {
    ($($(#[$doc:meta])* $field:ident: $argument:literal, $Optional:ident;)*) => {
        /// The tensors that a backend's attention may take beside `q`, `k` and `v`.
        #[derive(Clone, Debug, ExtensionType)]
        #[cfg_attr(feature = "fusion", extension_type(fusion))]
        pub struct Extras<B: Backend> {
            $(
                $(#[$doc])*
                #[extension_type]
                pub $field: $Optional<B>,
            )*
            /// Queries and keys of a block of `block_mask`; 0 without one.
            pub block_sizes: [usize; 2],
            /// The lists of visited tiles that calls have made of `block_mask`.
            pub block_lists: BlockLists,
        }

        /// A `T` for each tensor of [`Extras`]: the tensor, its shape, or whatever [`map`](Tensors::map) makes of it.
        #[derive(Clone, Debug)]
        pub struct Tensors<T> {
            $(
                $(#[$doc])*
                pub $field: Option<T>,
            )*
        }

        impl<T> Default for Tensors<T> {
            fn default() -> Self {
                Tensors { $($field: None),* }
            }
        }

        impl<T> Tensors<T> {
            /// Applies `f` to each.
            pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Tensors<U> {
                Tensors { $($field: self.$field.map(&mut f)),* }
            }

            /// References to each.
            pub fn each_ref(&self) -> Tensors<&T> {
                Tensors { $($field: self.$field.as_ref()),* }
            }

            /// The present ones, each with the name of its argument.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, &T)> {
                let all = [$(($argument, self.$field.as_ref())),*];
                all.into_iter().filter_map(|(argument, tensor)| Some((argument, tensor?)))
            }
        }

        impl<B: Backend> Extras<B> {
            /// Extras of these tensors, for a backend whose tensors of all kinds are one type.
            pub fn new<T>(tensors: Tensors<T>, block_sizes: [usize; 2], block_lists: BlockLists) -> Self
            where
                T: Into<FloatTensor<B>> + Into<BoolTensor<B>> + Into<IntTensor<B>>,
            {
                Extras {
                    $($field: $Optional::from_option(tensors.$field.map(Into::into)),)*
                    block_sizes,
                    block_lists,
                }
            }

            /// The tensors, for a backend whose tensors of all kinds are one type, and what the block mask has beside.
            #[cfg(any(feature = "cube", feature = "flex"))]
            pub fn into_tensors<T>(self) -> (Tensors<T>, [usize; 2], BlockLists)
            where
                FloatTensor<B>: Into<T>,
                BoolTensor<B>: Into<T>,
                IntTensor<B>: Into<T>,
            {
                let tensors = Tensors { $($field: self.$field.into_option().map(Into::into)),* };
                (tensors, self.block_sizes, self.block_lists)
            }

            /// Extras of another backend, whose float tensors `float` makes of these; all others are the same in both.
            pub fn map_floats<C: Backend>(
                self,
                mut float: impl FnMut(FloatTensor<B>) -> FloatTensor<C>,
            ) -> Extras<C>
            where
                BoolTensor<B>: Into<BoolTensor<C>>,
                IntTensor<B>: Into<IntTensor<C>>,
            {
                Extras {
                    $($field: self.$field.map_float(&mut float),)*
                    block_sizes: self.block_sizes,
                    block_lists: self.block_lists,
                }
            }
        }
    };
}

optional_tensors! {
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, true hides.
    mask: "mask", OptionalBool;
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, of the dtype of `q`.
    bias: "bias", OptionalFloat;
    /// `[batch | 1, num_heads_q]`, f32.
    alibi_slopes: "alibi_slopes", OptionalFloat;
    /// `[num_heads_q]`, f32.
    sinks: "sinks", OptionalFloat;
    /// `[2]`, of 32 bits each.
    dropout_seed: "dropout_seed", OptionalInt;
    /// `[batch]`, of 32 bits each.
    seq_lens_q: "seq_lens_q", OptionalInt;
    /// `[batch]`, of 32 bits each.
    seq_lens_k: "seq_lens_k", OptionalInt;
    /// `[sequences + 1]`, of 32 bits each.
    cu_seqlens_q: "cu_seqlens_q", OptionalInt;
    /// `[sequences + 1]`, of 32 bits each.
    cu_seqlens_k: "cu_seqlens_k", OptionalInt;
    /// The first tensor of the score function: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, f32.
    score_a: "score_tensors[0]", OptionalFloat;
    /// Its second tensor, of the same form.
    score_b: "score_tensors[1]", OptionalFloat;
    /// The first tensor of the mask function, of the same form.
    mask_a: "mask_tensors[0]", OptionalFloat;
    /// Its second tensor, of the same form.
    mask_b: "mask_tensors[1]", OptionalFloat;
    /// `[batch | 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`, of 32 bits each.
    block_mask: "block_mask", OptionalInt;
}

impl<T> Tensors<T> {
    /// The tensors of the score function.
    pub fn score_tensors(&self) -> [Option<&T>; TENSORS] {
        [self.score_a.as_ref(), self.score_b.as_ref()]
    }

    /// The tensors of the mask function.
    pub fn mask_tensors(&self) -> [Option<&T>; TENSORS] {
        [self.mask_a.as_ref(), self.mask_b.as_ref()]
    }
}

impl<B: Backend> OptionalFloat<B> {
    fn map_float<C: Backend>(self, float: &mut impl FnMut(FloatTensor<B>) -> FloatTensor<C>) -> OptionalFloat<C> {
        OptionalFloat::from_option(self.into_option().map(float))
    }
}

impl<B: Backend> OptionalBool<B> {
    fn map_float<C: Backend>(self, _float: &mut impl FnMut(FloatTensor<B>) -> FloatTensor<C>) -> OptionalBool<C>
    where
        BoolTensor<B>: Into<BoolTensor<C>>,
    {
        OptionalBool::from_option(self.into_option().map(Into::into))
    }
}

impl<B: Backend> OptionalInt<B> {
    fn map_float<C: Backend>(self, _float: &mut impl FnMut(FloatTensor<B>) -> FloatTensor<C>) -> OptionalInt<C>
    where
        IntTensor<B>: Into<IntTensor<C>>,
    {
        OptionalInt::from_option(self.into_option().map(Into::into))
    }
}

/// Tensors of [`Extras`] that have gradients: bias, slopes, sinks, and those of the score function.
pub const TRACKED: usize = 3 + TENSORS;

impl<B: Backend> Extras<B> {
    /// The tensors that have gradients.
    pub fn tracked(&self) -> [Option<FloatTensor<B>>; TRACKED] {
        [&self.bias, &self.alibi_slopes, &self.sinks, &self.score_a, &self.score_b]
            .map(|tensor| tensor.clone().into_option())
    }

    /// These tensors in place of those that have gradients, in the order of [`tracked`](Extras::tracked).
    pub fn with_tracked(self, tracked: [Option<FloatTensor<B>>; TRACKED]) -> Self {
        let [bias, alibi_slopes, sinks, score_a, score_b] = tracked.map(OptionalFloat::from_option);
        Extras { bias, alibi_slopes, sinks, score_a, score_b, ..self }
    }
}
