//! What a backend implements: the forward and the backward of attention on its own tensors.
//!
//! From here a call goes to `cube` (through Burn's fusion, if that is on), to `fallback` on Flex, or first through
//! `autodiff`. Arguments have been validated by `api` before they come here.

use crate::tensors::{Extras, OptionalFloat, OptionalInt};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use flash_attention_kernels::mods::TENSORS;
use flash_attention_kernels::{AttentionOptions, AttentionProblem, KvStorage};

#[cfg(feature = "fusion")]
use crate::tensors::{OptionalFloatMetadata, OptionalIntMetadata};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
#[cfg(feature = "fusion")]
use burn::tensor::{DType, Shape};

/// What the forward returns.
#[derive(Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, num_heads_q, seq_q, head_dim_v]`, of the dtype of `q`.
    pub out: FloatTensor<B>,
    /// `[batch, num_heads_q, seq_q]`, f32.
    pub lse: FloatTensor<B>,
}

/// Keys or values of a cache, as the cache stores them.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub enum CacheElements<B: Backend> {
    /// `[batch, num_heads_kv, capacity, head_dim]`, or with a page table `[num_pages, num_heads_kv, page_size, head_dim]`.
    Elements(FloatTensor<B>),
    /// [Pages in e4m3](KvStorage::E4m3), one after the other, in words of 32 bits. One dimension, because rows of several may be padded.
    E4m3(IntTensor<B>),
}

impl<B: Backend> CacheElements<B> {
    /// A tensor that is stored like this, for a backend whose tensors of all kinds are one type.
    #[cfg(any(feature = "cube", feature = "flex"))]
    pub fn new<T: Into<FloatTensor<B>> + Into<IntTensor<B>>>(storage: KvStorage, tensor: T) -> Self {
        match storage {
            KvStorage::E4m3 => CacheElements::E4m3(tensor.into()),
            _ => CacheElements::Elements(tensor.into()),
        }
    }

    /// The tensor and how it is stored, for a backend whose tensors of all kinds are one type.
    #[cfg(any(feature = "cube", feature = "flex"))]
    pub fn into_tensor<T>(self) -> (KvStorage, T)
    where
        FloatTensor<B>: Into<T>,
        IntTensor<B>: Into<T>,
    {
        match self {
            CacheElements::Elements(tensor) => (KvStorage::Elements, tensor.into()),
            CacheElements::E4m3(words) => (KvStorage::E4m3, words.into()),
        }
    }
}

/// Tensors of a key/value cache.
#[derive(Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct CacheTensors<B: Backend> {
    #[extension_type]
    pub k: CacheElements<B>,
    /// Stored as the keys are.
    #[extension_type]
    pub v: CacheElements<B>,
    /// `[batch]`, 32 bits each: the length of each sequence, if they may differ.
    #[extension_type]
    pub seq_lens: OptionalInt<B>,
    /// `[batch, max_pages]`, 32 bits each: the pages of each sequence, if keys and values are in pages. A cache that is given back has none.
    #[extension_type]
    pub page_table: OptionalInt<B>,
    /// `[n, 2]`, 32 bits each: pages to copy before new positions are written, each with the page that it is copied to. A cache that is given
    /// back has none.
    #[extension_type]
    pub page_copies: OptionalInt<B>,
}

/// Lengths of the sequences of a cache and of its pages, as the host knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLengths {
    /// Length of each sequence before a call, unless the device has their lengths.
    pub before: usize,
    /// Length of the longest sequence after the call, or more.
    pub after: usize,
    /// Positions of a page, if there are pages.
    pub page_size: usize,
}

/// What attention with a cache returns.
#[derive(Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct CachedAttentionOutput<B: Backend> {
    #[extension_type]
    pub attention: AttentionOutput<B>,
    /// The cache that was taken, in the same memory.
    #[extension_type]
    pub cache: CacheTensors<B>,
}

/// What the backward reads beside the inputs: outputs of the forward, and their gradients.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
pub struct Saved<B: Backend> {
    /// The forward's output, `[batch, num_heads_q, seq_q, head_dim_v]`.
    pub out: FloatTensor<B>,
    /// The forward's log-sum-exp, `[batch, num_heads_q, seq_q]`, f32.
    pub lse: FloatTensor<B>,
    /// Gradient of `out`.
    pub dout: FloatTensor<B>,
    /// Gradient of `lse`, if the loss depends on it.
    #[extension_type]
    pub dlse: OptionalFloat<B>,
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

impl Wanted {
    /// The gradients of `q`, `k` and `v`.
    pub const QKV: Wanted = Wanted {
        dq: true,
        dk: true,
        dv: true,
        dbias: false,
        dalibi_slopes: false,
        dsinks: false,
        dscore_tensors: [false; TENSORS],
    };
}

/// What autodiff makes of the log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lse {
    /// A tensor that gradients flow back from.
    Tracked,
    /// A tensor without gradient. Recording it would cost two nodes more.
    Constant,
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
    #[fusion(meta = |q, _k, v, _extras, _options, _lse| output(q, v))]
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        options: AttentionOptions,
        lse: Lse,
    ) -> AttentionOutput<Self>;

    /// The gradients of `Σ dout∘out + Σ dlse∘lse`.
    #[fusion(meta = |q, k, v, extras, _saved, wanted, _options| AttentionGradientsMetadata {
        dq: when(wanted.dq, q),
        dk: when(wanted.dk, k),
        dv: when(wanted.dv, v),
        dbias: of(wanted.dbias, &extras.bias),
        dalibi_slopes: of(wanted.dalibi_slopes, &extras.alibi_slopes),
        dsinks: of(wanted.dsinks, &extras.sinks),
        dscore_a: of(wanted.dscore_tensors[0], &extras.score_a),
        dscore_b: of(wanted.dscore_tensors[1], &extras.score_b),
    })]
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    fn flash_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        #[extension_type] saved: Saved<Self>,
        wanted: Wanted,
        options: AttentionOptions,
    ) -> AttentionGradients<Self>;

    /// Appends `k` and `v` to a cache, in place, and computes attention over it.
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    #[fusion(meta = |q, _k, v, cache, extras, _options, _lengths| CachedAttentionOutputMetadata {
        attention: output(q, v),
        cache: CacheTensorsMetadata {
            k: cache.k.clone(),
            v: cache.v.clone(),
            seq_lens: lens(q.shape[0], [&cache.seq_lens, &extras.seq_lens_q]),
            page_table: OptionalIntMetadata::None,
            page_copies: OptionalIntMetadata::None,
        },
    })]
    fn flash_attention_with_kvcache(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] cache: CacheTensors<Self>,
        #[extension_type] extras: Extras<Self>,
        options: AttentionOptions,
        lengths: CacheLengths,
    ) -> CachedAttentionOutput<Self>;

    /// The states of the problem's blocks, from mask and mask function: a tensor like `empty`, whose elements are not read.
    #[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
    #[fusion(meta = |empty, _extras, _problem| empty.clone())]
    fn flash_attention_block_states(
        empty: IntTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        problem: AttentionProblem,
    ) -> IntTensor<Self>;
}

/// Metadata of the forward of `q` over `v`.
#[cfg(feature = "fusion")]
fn output(q: &TensorSpec, v: &TensorSpec) -> AttentionOutputMetadata {
    let [batch, heads, seq_q] = [q.shape[0], q.shape[1], q.shape[2]];
    AttentionOutputMetadata {
        out: TensorSpec::new(Shape::new([batch, heads, seq_q, v.shape[3]]), q.dtype),
        lse: TensorSpec::new(Shape::new([batch, heads, seq_q]), DType::F32),
    }
}

/// Metadata of the lengths of sequences, which there are if any of these lengths are given.
#[cfg(feature = "fusion")]
fn lens(batch: usize, found: [&OptionalIntMetadata; 2]) -> OptionalIntMetadata {
    if found.iter().all(|lens| matches!(lens, OptionalIntMetadata::None)) {
        return OptionalIntMetadata::None;
    }
    OptionalIntMetadata::Some(TensorSpec::new(Shape::new([batch]), DType::I32))
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
