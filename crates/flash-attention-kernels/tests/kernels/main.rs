//! Tests of the kernels, called directly through CubeCL: comparison with the oracle, properties of attention, poisoned memory.
//!
//! `common.rs` says which environment variables choose the device.

mod alone;
mod block_lists;
mod blocks;
mod bounds;
mod caches;
mod common;
mod derivatives;
mod e4m3;
mod e4m3_caches;
mod empty;
mod failures;
mod faults;
mod few_rows;
mod functions;
mod masks;
mod offsets;
mod one_kernel;
mod oracle;
mod packed;
mod pages;
mod pairs;
mod plans;
mod properties;
mod recent;
mod refusals;
mod rotary;
mod rounding;
#[cfg(feature = "cuda")]
mod schedules;
mod sequences;
mod sharp;
mod streams;
mod sums;
mod tiles;
#[cfg(feature = "autotune")]
mod tuning;
mod unbuildable;
