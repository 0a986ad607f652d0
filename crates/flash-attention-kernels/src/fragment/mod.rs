//! What families of kernels share: arguments, numbering of thread blocks, rows of tensors, scores.
//!
//! ```text
//! role      what a kernel computes
//! operands  the tensors that kernels read, each kind as one argument
//! rows      rows of a head, read and written four elements at a time
//! grid      which thread block computes which block of rows
//! scores    a product turned into a score: function, bias, slope, mask
//! ```

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod grid;
pub mod operands;
pub mod role;
pub mod rows;
pub mod scores;
