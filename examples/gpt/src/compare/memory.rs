//! Peak memory of a training step.

use crate::device::Strength;

/// Describes what [`peak`](example_support::memory::peak) measures.
pub fn meaning(strength: Strength) -> &'static str {
    match strength {
        Strength::Cpu => "the most memory resident in the process",
        _ => "the most bytes in use in the device's memory pool at a launch of one training step",
    }
}
