//! Exact attention on any CubeCL device. The kernels need fused multiply-adds, shared memory and barriers, and nothing else.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod combine;
pub mod dbias;
pub mod delta;
pub mod dsinks;
pub mod few_rows;
pub mod forward;
pub mod gradient;
pub mod nothing;
pub mod recompute;
pub mod scores;
pub mod tile;

pub use few_rows::{FewRowsBlueprint, FewRowsTile};

use crate::fragment::Role;
use crate::score::Factor;
use serde::Serialize;
use tile::TileShape;

/// Everything that a portable kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// Role of the kernel.
    pub role: Role,
    /// Tile.
    pub tile: TileShape,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Factor of the gradients of scores.
    pub factor: Factor,
    /// Whether the operands of `S` and `dP` are rounded to tf32.
    pub tf32: bool,
}

impl Blueprint {
    /// Length of the array of factors. It is 1 where there are no factors, because an array cannot be empty.
    pub fn factors(&self) -> usize {
        if self.factor != Factor::One { self.tile.micro() } else { 1 }
    }
}
