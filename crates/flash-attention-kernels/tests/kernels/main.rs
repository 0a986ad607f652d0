//! The kernels straight on CubeCL: against the oracle, by their properties, and with everything around them poisoned.
//!
//! See `common.rs` for how the device is chosen.

mod alone;
mod blocks;
mod bounds;
mod common;
mod empty;
mod failures;
mod faults;
mod functions;
mod masks;
mod offsets;
mod oracle;
mod pairs;
mod plans;
mod properties;
mod refusals;
mod rounding;
#[cfg(feature = "cuda")]
mod schedules;
mod sharp;
mod streams;
mod tiles;
#[cfg(feature = "autotune")]
mod tuning;
mod unbuildable;
