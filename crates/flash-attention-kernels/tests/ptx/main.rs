//! Kernels for CUDA compiled to PTX, and assembled, on a machine with no GPU.

mod harness;
mod hopper;
mod mma;
mod pieces;
mod plans;
mod schedules;
