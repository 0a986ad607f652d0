//! FlashAttention for [Burn](https://burn.dev): exact attention, forward and backward, in memory linear in the sequence.
//!
//! [`flash_attention`] is the operation, and [`FlashAttentionOptions`] are its options. [`flash_attention_with_kvcache`] is the operation
//! for decoding, over a [`KvCache`]. [`attention`] has the signature of Burn's own attention, and `install` intercepts calls of Burn's own.
//! [`FlashMultiHeadAttention`], [`FlashCrossAttention`], [`FlashTransformerEncoder`] and [`FlashTransformerDecoder`] load the records of
//! burn-nn's modules. [`FlashDecoder`] is a Llama, Qwen, Gemma or Mistral, and [`FlashSelfAttention`] its attention. [`plan()`] tells which kernel runs.
//! [`sequence_parallel`] divides one long sequence among several devices.
//! Kernels come from [`flash_attention_kernels`] and run on any device that CubeCL compiles for. Tensors on Flex are computed on the host.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_flash_attention::{FlashAttentionOptions, flash_attention};
//!
//! // [batch, heads, seq, head_dim]
//! let x = Tensor::<4>::random([1, 8, 128, 64], Distribution::Default, &Device::flex());
//! let out = flash_attention(x.clone(), x.clone(), x, &FlashAttentionOptions::new().with_causal(true));
//! assert_eq!(out.dims(), [1, 8, 128, 64]);
//! # }
//! ```
//!
//! # Features
//!
//! `wgpu`, `vulkan`, `metal`, `cuda`, `rocm` and `flex` select devices, as in Burn. `fusion` enables Burn's feature of the same name, and
//! must be enabled here if it is enabled in Burn. `autotune` enables Burn's feature as well, and lets CubeCL's autotuner choose among a few
//! kernels for each problem size; its choices are cached on disk. Default: `wgpu`, `flex` and `fusion`.

mod api;
mod autodiff;
mod backend;
mod block_mask;
mod block_states;
mod checks;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod fallback;
#[cfg(all(feature = "cube", feature = "fusion"))]
mod intercept;
mod kv_cache;
mod module;
mod options;
mod plan;
mod problem;
mod rotary;
pub mod sequence_parallel;
mod slopes;
mod temperature;
mod tensors;

#[cfg(feature = "autotune")]
pub use api::tuned;
pub use api::{
    attention, flash_attention, flash_attention_varlen, flash_attention_with_lse, plan, try_flash_attention,
    try_flash_attention_varlen, try_flash_attention_with_lse,
};
pub use block_mask::{BlockMask, BlockState};
#[cfg(feature = "autotune")]
pub use flash_attention_kernels::tuning::Tuned;
pub use flash_attention_kernels::{
    Alignment, AttentionError, BackwardOrder, Dtype, Kernel, KvStorage, Plan, Precision, RotaryLayout, mods,
};
#[cfg(all(feature = "cube", feature = "fusion"))]
pub use intercept::{Counts, InstallError, Interception, install};
pub use kv_cache::{
    AttentionCache, KvCache, KvCacheConfig, PagedBatch, PagedKvCache, PagedKvCacheConfig, SequenceId,
    flash_attention_with_kvcache, flash_attention_with_kvcache_and_lse, try_flash_attention_with_kvcache,
    try_flash_attention_with_kvcache_and_lse,
};
pub use module::{
    FlashCrossAttention, FlashCrossAttentionCache, FlashCrossAttentionConfig, FlashDecoder, FlashDecoderCache,
    FlashDecoderConfig, FlashDecoderLayer, FlashDecoderLayerConfig, FlashLatentAttention, FlashLatentAttentionConfig,
    FlashMhaCache, FlashMhaInput, FlashMhaOutput, FlashMultiHeadAttention, FlashMultiHeadAttentionConfig,
    FlashSelfAttention, FlashSelfAttentionConfig, FlashSelfAttentionInput, FlashTransformerDecoder,
    FlashTransformerDecoderAutoregressiveCache, FlashTransformerDecoderConfig, FlashTransformerDecoderInput,
    FlashTransformerDecoderLayer, FlashTransformerEncoder, FlashTransformerEncoderAutoregressiveCache,
    FlashTransformerEncoderConfig, FlashTransformerEncoderInput, FlashTransformerEncoderLayer, Mlp, MlpActivation,
    MlpConfig, RotaryAngles, RotaryEmbedding, RotaryEmbeddingConfig, RotaryScaling,
};
pub use options::FlashAttentionOptions;
pub use plan::{AttentionPlan, HostPlan};
pub use slopes::AlibiSlopes;

/// Runs the example of the crate's README as a doc test.
#[cfg(all(doctest, feature = "flex"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the examples of the page about decoding as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/decoding.md")]
struct Decoding;

/// Runs the examples of the page about models as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/models.md")]
struct Models;

/// Runs the examples of the page about sequence parallelism as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/sequence-parallel.md")]
struct SequenceParallel;

/// Runs the examples of the page for users of PyTorch as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/coming-from-pytorch.md")]
struct ComingFromPyTorch;
