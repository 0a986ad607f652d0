//! What a backend implements: the forward and the backward of attention on its own tensors.
//!
//! From here a call goes to `cube` (through Burn's fusion, if that is on), to `fallback` on Flex, or first through
//! `autodiff`. Arguments have been validated by `api` before they come here.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use flash_attention_kernels::mods::TENSORS;
use flash_attention_kernels::{AttentionOptions, AttentionProblem, BlockLists};

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
#[cfg(feature = "fusion")]
use burn::tensor::{DType, Shape};

/// A float tensor that may be absent: extensions take no `Option`.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub enum OptionalFloat<B: Backend> {
    Some(FloatTensor<B>),
    None,
}

/// A boolean tensor that may be absent.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub enum OptionalBool<B: Backend> {
    Some(BoolTensor<B>),
    None,
}

/// An integer tensor that may be absent.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub enum OptionalInt<B: Backend> {
    Some(IntTensor<B>),
    None,
}

/// The tensors that attention may take beside `q`, `k` and `v`.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct Extras<B: Backend> {
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, true hides.
    #[extension_type]
    pub mask: OptionalBool<B>,
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, of the dtype of `q`.
    #[extension_type]
    pub bias: OptionalFloat<B>,
    /// `[batch | 1, num_heads_q]`, f32.
    #[extension_type]
    pub alibi_slopes: OptionalFloat<B>,
    /// `[num_heads_q]`, f32.
    #[extension_type]
    pub sinks: OptionalFloat<B>,
    /// `[2]`, of 32 bits each.
    #[extension_type]
    pub dropout_seed: OptionalInt<B>,
    /// `[batch]`, of 32 bits each.
    #[extension_type]
    pub seq_lens_q: OptionalInt<B>,
    /// `[batch]`, of 32 bits each.
    #[extension_type]
    pub seq_lens_k: OptionalInt<B>,
    /// `[sequences + 1]`, of 32 bits each.
    #[extension_type]
    pub cu_seqlens_q: OptionalInt<B>,
    /// `[sequences + 1]`, of 32 bits each.
    #[extension_type]
    pub cu_seqlens_k: OptionalInt<B>,
    /// The first tensor of the function of scores: `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, f32.
    #[extension_type]
    pub score_a: OptionalFloat<B>,
    /// The second, likewise.
    #[extension_type]
    pub score_b: OptionalFloat<B>,
    /// The first tensor of the function that hides pairs, likewise.
    #[extension_type]
    pub mask_a: OptionalFloat<B>,
    /// The second, likewise.
    #[extension_type]
    pub mask_b: OptionalFloat<B>,
    /// `[batch | 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`, of 32 bits each.
    #[extension_type]
    pub block_mask: OptionalInt<B>,
    /// Queries and keys of a block of it; 0 if there is none.
    pub block_sizes: [usize; 2],
    /// The lists that have been made of it.
    pub block_lists: BlockLists,
}

/// What hides pairs beside positions.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct Masks<B: Backend> {
    /// `[batch | 1, num_heads_q | 1, seq_q | 1, seq_k | 1]`, true hides.
    #[extension_type]
    pub mask: OptionalBool<B>,
    /// The first tensor of the function that hides pairs, of the same shape, f32.
    #[extension_type]
    pub mask_a: OptionalFloat<B>,
    /// The second, likewise.
    #[extension_type]
    pub mask_b: OptionalFloat<B>,
}

#[cfg(all(feature = "cube", feature = "fusion"))]
impl<B: Backend> Extras<B> {
    /// None but these.
    pub fn of(mask: Option<BoolTensor<B>>, bias: Option<FloatTensor<B>>) -> Self {
        Extras {
            mask: OptionalBool::from_option(mask),
            bias: bias.into(),
            alibi_slopes: OptionalFloat::None,
            sinks: OptionalFloat::None,
            dropout_seed: OptionalInt::None,
            seq_lens_q: OptionalInt::None,
            seq_lens_k: OptionalInt::None,
            cu_seqlens_q: OptionalInt::None,
            cu_seqlens_k: OptionalInt::None,
            score_a: OptionalFloat::None,
            score_b: OptionalFloat::None,
            mask_a: OptionalFloat::None,
            mask_b: OptionalFloat::None,
            block_mask: OptionalInt::None,
            block_sizes: [0; 2],
            block_lists: BlockLists::default(),
        }
    }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for OptionalFloat<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::None, Self::Some)
    }
}

impl<B: Backend> OptionalFloat<B> {
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

impl<B: Backend> OptionalBool<B> {
    pub fn from_option(tensor: Option<BoolTensor<B>>) -> Self {
        tensor.map_or(Self::None, Self::Some)
    }

    pub fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

impl<B: Backend> OptionalInt<B> {
    pub fn from_option(tensor: Option<IntTensor<B>>) -> Self {
        tensor.map_or(Self::None, Self::Some)
    }

    pub fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

/// What the forward returns.
#[derive(Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, num_heads_q, seq_q, head_dim_v]`, of the dtype of `q`.
    pub out: FloatTensor<B>,
    /// `[batch, num_heads_q, seq_q]`, f32.
    pub lse: FloatTensor<B>,
}

/// What the backward returns: the gradients asked for.
#[derive(Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct AttentionGradients<B: Backend> {
    #[extension_type]
    pub dq: OptionalFloat<B>,
    #[extension_type]
    pub dk: OptionalFloat<B>,
    #[extension_type]
    pub dv: OptionalFloat<B>,
    #[extension_type]
    pub dbias: OptionalFloat<B>,
    #[extension_type]
    pub dalibi_slopes: OptionalFloat<B>,
    #[extension_type]
    pub dsinks: OptionalFloat<B>,
    #[extension_type]
    pub dscore_a: OptionalFloat<B>,
    #[extension_type]
    pub dscore_b: OptionalFloat<B>,
}

/// Which gradients the backward is to compute; the others cost nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub dq: bool,
    pub dk: bool,
    pub dv: bool,
    pub dbias: bool,
    pub dalibi_slopes: bool,
    pub dsinks: bool,
    /// Of the tensors of the function of scores.
    pub dscore_tensors: [bool; TENSORS],
}

/// Attention as one operation of a backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "fusion"),
    Autodiff
)]
pub trait FlashAttentionOps: Backend {
    /// The output and the log-sum-exp of each row of scores.
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    #[fusion(meta = |q, _k, v, _extras, _options| AttentionOutputMetadata {
        out: TensorSpec::new(with_last(&q.shape, v.shape[3]), q.dtype),
        lse: TensorSpec::new(Shape::new([q.shape[0], q.shape[1], q.shape[2]]), DType::F32),
    })]
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self>;

    /// The gradients of `Σ dout∘out + Σ dlse∘lse`, from the forward's `out` and `lse`.
    #[fusion(meta = |q, k, v, extras, _out, _lse, _dout, _dlse, wanted, _options| AttentionGradientsMetadata {
        dq: when(wanted.dq, q),
        dk: when(wanted.dk, k),
        dv: when(wanted.dv, v),
        dbias: of(wanted.dbias, &extras.bias),
        dalibi_slopes: of(wanted.dalibi_slopes, &extras.alibi_slopes),
        dsinks: of(wanted.dsinks, &extras.sinks),
        dscore_a: of(wanted.dscore_tensors[0], &extras.score_a),
        dscore_b: of(wanted.dscore_tensors[1], &extras.score_b),
    })]
    #[allow(clippy::too_many_arguments)]
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    fn flash_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        #[extension_type] dlse: OptionalFloat<Self>,
        wanted: Wanted,
        options: AttentionOptions,
    ) -> AttentionGradients<Self>;

    /// The states of the problem's blocks, of what mask and function let be seen: of the shape and dtype of `empty`, and on its device.
    /// Nobody reads what `empty` holds.
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    #[fusion(meta = |empty, _masks, _problem| empty.clone())]
    fn flash_attention_block_states(
        empty: IntTensor<Self>,
        #[extension_type] masks: Masks<Self>,
        problem: AttentionProblem,
    ) -> IntTensor<Self>;
}

#[cfg(feature = "fusion")]
fn with_last(shape: &Shape, last: usize) -> Shape {
    Shape::new([shape[0], shape[1], shape[2], last])
}

#[cfg(feature = "fusion")]
fn when(wanted: bool, spec: &TensorSpec) -> OptionalFloatMetadata {
    if wanted { OptionalFloatMetadata::Some(spec.clone()) } else { OptionalFloatMetadata::None }
}

#[cfg(feature = "fusion")]
fn of(wanted: bool, optional: &OptionalFloatMetadata) -> OptionalFloatMetadata {
    match optional {
        OptionalFloatMetadata::Some(spec) => when(wanted, spec),
        OptionalFloatMetadata::None => OptionalFloatMetadata::None,
    }
}
