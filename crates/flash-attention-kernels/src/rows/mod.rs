//! Attention without shared memory. Each thread holds whole rows in registers, and columns stream by. Each element of a column is read
//! once for all rows of a thread.
//!
//! ```text
//! row       a thread's rows, products with a column, rows written out
//! forward   O and the log-sum-exp
//! gradient  dq; dk and dv
//! ```
//!
//! These kernels are for processors, as software Vulkan uses them. A processor computes the threads of a warp as lanes of a vector and
//! reads memory lane by lane. It keeps registers in its first-level cache, which has room for many, and executes both sides of every
//! branch. Therefore nothing is staged, no thread waits for another, and the only branch is the loop over columns.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod forward;
pub mod gradient;
pub mod row;

use crate::fragment::Role;
use crate::score::Factor;
use serde::Serialize;

/// Tile of one thread block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct RowsTile {
    /// Threads of a thread block.
    pub units: usize,
    /// Rows of a thread.
    pub rows: usize,
}

impl RowsTile {
    /// Rows of a thread block.
    ///
    /// ```
    /// use flash_attention_kernels::RowsTile;
    ///
    /// assert_eq!(RowsTile { units: 8, rows: 4 }.block(), 32);
    /// ```
    pub fn block(&self) -> usize {
        self.units * self.rows
    }
}

/// Everything that a kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// Role of the kernel.
    pub role: Role,
    /// Tile.
    pub tile: RowsTile,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Factor of the gradients of scores.
    pub factor: Factor,
    /// Whether any pair can be hidden. A factor of 0 then adds nothing, even where a hidden key or value is NaN: in IEEE arithmetic
    /// `0 · NaN` is NaN.
    pub careful: bool,
}
