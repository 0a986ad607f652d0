//! NVIDIA GPU operations without a public CubeCL function: warpgroup matrix products, tensor-map loads, `mbarrier`s, named
//! barriers, approximations of the special-function unit.
//!
//! Nearly all of them are a `PtxOp`, an operation of this crate that lowers to one piece of inline PTX. Fences and descriptors
//! are operations of CubeCL's intermediate representation. That representation has products, too, but they carry an accumulator
//! as one vector; splitting the vector for each product took more than half of LLVM's time for a kernel. Names and semantics
//! are those of the PTX ISA 8.7. Addresses of shared memory are byte addresses in the shared window, `u32`.

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
