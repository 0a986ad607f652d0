//! The kernels straight on CubeCL: against the oracle, by their properties, and with everything around them poisoned.
//!
//! See `common.rs` for how the device is chosen.

mod blocks;
mod common;
mod faults;
mod functions;
mod masks;
mod oracle;
mod pairs;
mod plans;
mod properties;
mod rounding;
#[cfg(feature = "autotune")]
mod tuning;
