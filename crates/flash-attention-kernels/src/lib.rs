//! FlashAttention in CubeCL: exact attention, forward and backward, on every device that CubeCL compiles to.
//!
//! An [`AttentionProblem`] describes the computation: sizes, element type and options. [`TensorView`]s describe where the data
//! is in device memory. [`forward`] and [`backward`] validate the call, choose kernels, launch them and write into outputs that
//! the caller has allocated. [`plan()`] reports which kernels would run, without launching them. This crate depends on no
//! deep-learning framework.
//!
//! ```no_run
//! use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, Inputs, TensorView, forward};
//!
//! # fn f(client: cubecl::client::Client, q: TensorView, k: TensorView, v: TensorView) -> Result<(), flash_attention_kernels::AttentionError> {
//! let options = AttentionOptions { causal: true, ..Default::default() };
//! let problem = AttentionProblem::new(&q.shape, &k.shape, &v.shape, Dtype::F32, options)?;
//!
//! let o = TensorView::contiguous(client.empty(4 * problem.rows() * problem.head_dim_v), problem.o_shape());
//! let lse = TensorView::contiguous(client.empty(4 * problem.rows()), problem.lse_shape());
//! forward(&client, &problem, &Inputs::new(q, k, v), &o, &lse)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Modules, from the call to the kernel
//!
//! ```text
//! problem   sizes, dtype, options, validation          tiling      the only place that chooses kernels and tiles
//! mask      visibility by position                     launch      validates, chooses, prepares, launches
//! score     scale, softcap, slopes, with derivatives   tensor_core shared by hopper and mma: accumulators in registers
//! softmax   the online softmax; handles −∞             hopper      kernels for NVIDIA Hopper
//! dropout   which probabilities are kept               mma         kernels for NVIDIA GPUs from Ampere on
//! mods      the user's score_mod and mask_mod          matrix      kernels for devices with cooperative matrix products
//! sequences several sequences in one call              rows        kernels for CPUs
//! blocks    block masks: which tiles are visited       portable    kernels for any device
//! cache     key/value caches: appends in place         tuning      times candidate kernels, with the feature autotune
//! pages     keys and values in pages
//! e4m3      keys and values in 8 bits
//! rotary    rotary position embedding
//! extras    optional operands, as one argument         fragment    shared by all kernel families
//! ```

pub mod blocks;
pub mod cache;
pub mod dropout;
pub mod dtype;
pub mod e4m3;
pub mod error;
pub mod extras;
pub mod fragment;
pub mod hopper;
pub mod launch;
pub mod mask;
pub mod matrix;
pub mod mma;
pub mod mods;
pub mod pages;
pub mod portable;
pub mod problem;
#[cfg(feature = "cuda")]
pub mod ptx;
pub mod rotary;
pub mod rounding;
pub mod rows;
pub mod score;
pub mod sequences;
pub mod softmax;
pub mod tensor;
pub mod tensor_core;
pub mod tiling;
#[cfg(feature = "autotune")]
pub mod tuning;

pub use dtype::Dtype;
pub use e4m3::KvStorage;
pub use error::AttentionError;
pub use hopper::BiasTile;
pub use launch::{
    BlockLists, CacheAppend, Gradients, Inputs, MaskStorage, MaskView, Rotary, Saved, Scratch, append_to_cache,
    apply_rotary, backward, backward_with, block_states, check_rotary, copy_cache_pages, dropout_kept, forward,
    forward_with,
};
pub use mask::Alignment;
pub use matrix::MatrixTile;
pub use mma::MmaTile;
pub use portable::{FewRowsTile, tile::TileShape};
pub use problem::{
    AttentionOptions, AttentionProblem, BackwardOrder, BlockMask, MAX_ELEMENTS, MAX_HEAD_DIM, MAX_PAIRS, MAX_SEQ,
    PagedKv, Precision,
};
pub use rotary::RotaryLayout;
pub use rows::RowsTile;
pub use tensor::TensorView;
pub use tensor_core::HopperTile;
pub use tiling::{
    BackwardTiles, BiasGradient, FamilyTiles, FewRowsForward, Forward, Gradient, HopperForward, HopperGradient, Kernel,
    MmaForward, MmaTiles, Plan, PortableForward, check, plan, plan_with,
};
