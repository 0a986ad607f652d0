//! Code shared by all kernels for NVIDIA's tensor cores: accumulators in registers, and the computations on them.
//!
//! ```text
//! blueprint   everything a kernel is compiled for      rows        rows of an accumulator: operands, stores
//! operands    tensors, grouped into arguments          softmax     the online softmax
//! schedule    the tile scheduler                       scores      softcap, score_mod, bias, mask, band
//! delta       lse and delta of each query              dropout     keep mask in registers
//! statistics  reads lse and delta in gradients         recompute   rows that the tiled products cannot compute
//! sums        sums of `dT ∘ factor` over columns       packed      query heads of a group as rows of a tile
//! combine     combines splits of the keys
//! ```
//!
//! Kernels of [`hopper`](crate::hopper) multiply by `wgmma`, kernels of [`mma`](crate::mma) by `mma.sync`. Both leave an
//! accumulator in registers in the same layout, in groups of 64 rows.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod blueprint;
#[cfg(feature = "cuda")]
pub mod combine;
#[cfg(feature = "cuda")]
pub mod delta;
#[cfg(feature = "cuda")]
mod dropout;
#[cfg(feature = "cuda")]
mod operands;
#[cfg(feature = "cuda")]
mod packed;
#[cfg(feature = "cuda")]
mod recompute;
#[cfg(feature = "cuda")]
mod rows;
#[cfg(feature = "cuda")]
mod schedule;
#[cfg(feature = "cuda")]
mod scores;
#[cfg(feature = "cuda")]
mod softmax;
#[cfg(feature = "cuda")]
mod statistics;
#[cfg(feature = "cuda")]
mod sums;

pub use blueprint::{Blueprint, HopperTile, Rows, SCALED_KEYS};
#[cfg(feature = "cuda")]
pub use {
    delta::*, dropout::*, operands::*, packed::*, recompute::*, rows::*, schedule::*, scores::*, softmax::*,
    statistics::*, sums::*,
};

/// Rows of a warpgroup's matrix product.
pub const WARPGROUP_ROWS: usize = 64;
/// Threads of a warpgroup.
pub const WARPGROUP_UNITS: usize = 128;
/// Threads of a warp.
pub const WARP_UNITS: usize = 32;
/// Alignment of rows in bytes that TMA and 16-byte vectors require.
pub const VECTOR_BYTES: usize = 16;
/// Bytes of a line of a panel, the unit of the 128-byte swizzle.
pub const LINE: usize = 128;
/// Columns of a panel of 16-bit elements.
pub const PANEL: usize = 64;
