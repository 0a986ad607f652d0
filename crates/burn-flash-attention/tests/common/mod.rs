//! Runs a case through this crate, through the same mathematics composed of Burn's operations, and through the oracle, and compares the
//! error of the first with the error of the second.
//!
//! - `FLASH_TEST_DEVICE`: `flex`, `wgpu`, `vulkan` or `cuda`, if its feature is compiled in. By default Flex, and wgpu if there is an
//!   adapter.
//! - `FLASH_TEST_KERNEL`: the kernel that must run in f32; a case that runs another one fails. By default `mma` on CUDA, else `portable`,
//!   or `rows` on a software adapter. Flex has its own.
//! - `REQUIRE_WGPU=1`: fails if there is no adapter.
#![allow(dead_code, unused_imports, reason = "each test program uses a part of it")]

mod cases;
mod comparison;
mod devices;
mod implementations;
#[path = "../../../flash-attention-kernels/tests/kernels/quick.rs"]
mod quick;
mod tensors;

pub use cases::*;
pub use comparison::*;
pub use devices::*;
pub use implementations::*;
pub use tensors::*;
