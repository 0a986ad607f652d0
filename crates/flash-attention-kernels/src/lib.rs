//! FlashAttention in CubeCL: exact attention, forward and backward, on every device that CubeCL compiles to.
//!
//! An [`AttentionProblem`] says what is to be computed, [`TensorView`]s where the data lie; [`forward`] and [`backward`]
//! validate, choose kernels and launch them, and write into outputs that the caller allocates. [`plan()`] tells what would
//! run. Nothing here knows of any framework.
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
//! # From here to the kernel
//!
//! ```text
//! problem   sizes, dtype, options, validation          tiling    which kernel, which tiles: the only place that chooses
//! mask      which pairs see each other, which blocks   launch    validate → choose → grid → launch
//! score     scale, softcap, slopes, with derivatives   portable  the kernels for any device
//! softmax   the online softmax: −∞ lives here alone    matrix    those for devices with cooperative matrix products
//! dropout   which probabilities are dropped            rows      those for processors
//! mods      the user's functions of scores and masks   hopper    those for NVIDIA Hopper
//! sequences several of them in one call                mma       those for NVIDIA GPUs from Ampere on
//! blocks    block masks: which tiles are visited       tuning    times a few of them, with the feature autotune
//! extras    the tensors of all that, as one argument
//! fragment  what families of kernels share
//! ```

pub mod blocks;
pub mod dropout;
pub mod dtype;
pub mod error;
pub mod extras;
pub mod fragment;
pub mod hopper;
pub mod launch;
pub mod mask;
pub mod matrix;
pub mod mma;
pub mod mods;
pub mod portable;
pub mod problem;
#[cfg(feature = "cuda")]
pub mod ptx;
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
pub use error::AttentionError;
pub use hopper::BiasTile;
pub use launch::{
    BlockLists, Gradients, Inputs, MaskStorage, MaskView, Saved, Scratch, backward, backward_with, block_states,
    dropout_kept, forward, forward_with,
};
pub use mask::Alignment;
pub use matrix::MatrixTile;
pub use mma::MmaTile;
pub use portable::tile::TileShape;
pub use problem::{
    AttentionOptions, AttentionProblem, BackwardOrder, BlockMask, MAX_ELEMENTS, MAX_HEAD_DIM, MAX_PAIRS, MAX_SEQ,
    Precision,
};
pub use rows::RowsTile;
pub use tensor::TensorView;
pub use tensor_core::HopperTile;
pub use tiling::{
    BackwardTiles, BiasGradient, Forward, Gradient, HopperForward, HopperGradient, Kernel, MmaForward, MmaGradient,
    Plan, plan, plan_with,
};
