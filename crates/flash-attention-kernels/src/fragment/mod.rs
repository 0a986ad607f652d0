//! Code that the families of kernels share: arguments, numbering of thread blocks, rows of tensors, scores.
//!
//! ```text
//! role      the forward, or the gradients that a kernel computes
//! operands  groups of tensors, each passed to kernels as one argument
//! rows      rows of a head, read and written four elements at a time
//! grid      which thread block computes which block of rows
//! scores    from a product to a score: score function, bias, slope, mask
//! ```

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod grid;
mod operands;
mod role;
mod rows;
mod scores;

pub use grid::*;
pub use operands::*;
pub use role::*;
pub use rows::*;
pub use scores::*;
