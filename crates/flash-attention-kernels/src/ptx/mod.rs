//! Every operation that CubeCL has no public name for: warpgroup matrix products, tensor-map loads, `mbarrier`s, named
//! barriers, approximations of the special-function unit.
//!
//! Nearly all is `PtxOp`, an operation of our own that lowers to one piece of inline PTX; fences and descriptors are those of
//! CubeCL's intermediate representation. It has products, too, but they carry an accumulator as one vector, and taking that
//! apart for each of them was more than half of the time that LLVM took for a kernel. Names and semantics are those of the PTX
//! ISA 8.7. Addresses of shared memory are byte addresses in the shared window, `u32`.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub(crate) mod asm;
pub mod barriers;
pub mod copies;
pub mod math;
pub mod wgmma;

pub use barriers::*;
pub use copies::*;
pub use math::*;
pub use wgmma::*;
pub(crate) use wgmma::{held, hold, sequence};
