//! Attention by cooperative matrix products: a warp of threads holds small matrices between its threads and multiplies them on
//! the device's matrix units. Vulkan, CUDA before Hopper, Metal and ROCm offer them.
//!
//! ```text
//! tile      panels of 16-bit elements in shared memory, products on them, rows written out
//! forward   O and the log-sum-exp
//! gradient  dq; dk and dv
//! ```
//!
//! How a warp's threads share a matrix is the device's secret, so that whatever works row by row — softmax, masks, scaling —
//! goes through a *board* of f32 in shared memory, on which each thread has its row, or its part of one.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod forward;
pub mod gradient;
pub mod tile;

use crate::fragment::role::Role;
use crate::fragment::rows::WIDTH;
use crate::score::Factor;
use serde::Serialize;

/// Elements that rows in shared memory are apart beyond what fills them, so that neighbours start in different banks.
const PAD: usize = 8;

/// Shapes of one thread block's tiles. A warp owns `m` rows; columns stream by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct MatrixTile {
    /// Warps of a thread block.
    pub planes: usize,
    /// Threads of a warp.
    pub plane: usize,
    /// Columns of a tile: keys that stream by, or, for the gradients of keys and values, queries.
    pub columns: usize,
    /// Shape of a product: `[m, k] · [k, n]`.
    pub shape: [usize; 3],
}

impl MatrixTile {
    /// Rows of a warp, and of a product.
    pub fn m(&self) -> usize {
        self.shape[0]
    }

    /// Columns of a product.
    pub fn n(&self) -> usize {
        self.shape[1]
    }

    /// What a product sums over.
    pub fn k(&self) -> usize {
        self.shape[2]
    }

    /// Rows of a block.
    pub fn rows(&self) -> usize {
        self.planes * self.m()
    }

    /// Threads of a thread block.
    pub fn units(&self) -> usize {
        self.planes * self.plane
    }

    /// Threads that share a row of the board.
    pub fn sharers(&self) -> usize {
        (self.plane / self.m()).max(1)
    }

    /// Rows of the board that a thread has a part of.
    pub fn rows_of_unit(&self) -> usize {
        self.m().div_ceil(self.plane)
    }

    /// Vectors of a row of the board that a thread has.
    pub fn vectors_of_unit(&self) -> usize {
        self.columns / WIDTH / self.sharers()
    }

    /// Vectors between rows of the board, and of the panel of weights.
    pub fn board_pitch(&self) -> usize {
        (self.columns + PAD) / WIDTH
    }

    /// Elements of a row of a panel, zeros behind the last: products sum over whole `k`, and count whole `n`.
    pub fn padded(&self, head_dim: usize) -> usize {
        head_dim.next_multiple_of(self.k().max(self.n()))
    }

    /// Vectors between rows of a panel.
    pub fn pitch(&self, head_dim: usize) -> usize {
        (self.padded(head_dim) + PAD) / WIDTH
    }

    /// Whether a kernel can be made of these shapes.
    ///
    /// ```
    /// use flash_attention_kernels::matrix::MatrixTile;
    ///
    /// let tile = MatrixTile { planes: 4, plane: 32, columns: 32, shape: [16, 16, 16] };
    /// assert!(tile.is_consistent());
    /// assert!(!MatrixTile { columns: 24, ..tile }.is_consistent());
    /// ```
    pub fn is_consistent(&self) -> bool {
        let MatrixTile { planes, plane, columns, shape: [m, n, k] } = *self;
        let divides = |a: usize, b: usize| a > 0 && b.is_multiple_of(a);
        planes > 0
            && (divides(m, plane) || divides(plane, m))
            && divides(m, columns)
            && divides(n, columns)
            && divides(k, columns)
            && divides(WIDTH, n)
            && divides(WIDTH, k)
            && divides(self.sharers() * WIDTH, columns)
            && (divides(k, n) || divides(n, k))
    }
}

/// What a kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// What is computed.
    pub role: Role,
    /// Tiles.
    pub tile: MatrixTile,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// What gradients of scores are multiplied by.
    pub factor: Factor,
    /// Whether warps of a thread block may take branches apart that have a warp's barrier in them. They may, but Mesa's software Vulkan
    /// waits for the whole thread block there.
    pub apart: bool,
}

impl Blueprint {
    /// Bytes of shared memory: panels of K and V, the board, weights, a word for each warp.
    ///
    /// ```
    /// # use flash_attention_kernels::{fragment::role::Role, matrix::{Blueprint, MatrixTile}, score::Factor};
    /// let tile = MatrixTile { planes: 8, plane: 32, columns: 32, shape: [16, 16, 16] };
    /// let (role, head_dim, head_dim_v) = (Role::Forward, 128, 128);
    /// let blueprint = Blueprint { role, tile, head_dim, head_dim_v, factor: Factor::One, apart: true };
    /// assert!(blueprint.shared_memory() <= 48 << 10);
    /// ```
    pub fn shared_memory(&self) -> usize {
        let tile = &self.tile;
        let panels = tile.columns * (tile.pitch(self.head_dim) + tile.pitch(self.head_dim_v)) * 2;
        let board = tile.rows() * tile.board_pitch() * (4 + 2);
        (panels + board) * WIDTH + 4 * tile.planes
    }
}
