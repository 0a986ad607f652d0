//! Attention without shared memory: a thread holds whole rows in registers, and what they are multiplied by streams past, one
//! element read for all of a thread's rows.
//!
//! ```text
//! row       a thread's rows, products with a column, rows written out
//! forward   O and the log-sum-exp
//! gradient  dq; dk and dv
//! ```
//!
//! For devices that are processors: they compute the threads of a warp as lanes of a vector, read memory lane by lane, keep
//! registers in their first-level cache, where there is room for many, and take both sides of every branch. So nothing is
//! staged, no thread waits for another, and nothing branches but the loop over columns.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod forward;
pub mod gradient;
pub mod row;

use crate::fragment::role::Role;
use crate::score::Factor;
use serde::Serialize;

/// Shapes of one thread block's tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct RowsTile {
    /// Threads of a thread block.
    pub units: usize,
    /// Rows of a thread.
    pub rows: usize,
}

impl RowsTile {
    /// Rows of a block.
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

/// What a kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// What is computed.
    pub role: Role,
    /// Tiles.
    pub tile: RowsTile,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// What gradients of scores are multiplied by.
    pub factor: Factor,
    /// Whether there can be pairs that do not see each other. What is hidden adds nothing, whatever stands there; IEEE arithmetic
    /// would make NaN of `0 · NaN`.
    pub careful: bool,
}
