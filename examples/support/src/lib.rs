//! What the examples share: [`device`] chooses a device, and [`memory`] measures the peak of its memory.

pub mod device;
pub mod memory;
