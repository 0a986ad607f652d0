//! What kernels on NVIDIA's tensor cores share: accumulators as registers hold them, and what is computed on these.
//!
//! ```text
//! blueprint   what a kernel is specialised for        rows        rows of an accumulator: operands, stores
//! operands    tensors, each kind as one argument      softmax     the online softmax
//! schedule    which work tile is computed when        scores      softcap, function, bias, mask, band
//! delta       lse and delta of each query             dropout     which registers are kept
//! statistics  how gradients read these                recompute   rows that products of tiles cannot give
//! ```
//!
//! Kernels for [`hopper`](crate::hopper) multiply by `wgmma`, those of [`mma`](crate::mma) by `mma.sync`; both leave an accumulator in
//! registers in the same order, by rows of 64.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod blueprint;
#[cfg(feature = "cuda")]
pub mod delta;
#[cfg(feature = "cuda")]
pub mod dropout;
#[cfg(feature = "cuda")]
pub mod operands;
#[cfg(feature = "cuda")]
pub mod recompute;
#[cfg(feature = "cuda")]
pub mod rows;
#[cfg(feature = "cuda")]
pub mod schedule;
#[cfg(feature = "cuda")]
pub mod scores;
#[cfg(feature = "cuda")]
pub mod softmax;
#[cfg(feature = "cuda")]
pub mod statistics;

pub use blueprint::{Blueprint, HopperTile, Rows};

/// Rows of a warpgroup's products.
pub const WARPGROUP_ROWS: usize = 64;
/// Threads of a warpgroup.
pub const WARPGROUP_UNITS: usize = 128;
/// Threads of a warp.
pub const WARP_UNITS: usize = 32;
/// Bytes of a line of a panel: what the swizzle works on.
pub const LINE: usize = 128;
/// Columns of a panel in 16 bits.
pub const PANEL: usize = 64;
