//! Attention with cooperative matrices: the threads of a warp hold small matrices together and multiply them on the device's matrix
//! units. Vulkan, CUDA before Hopper, Metal and ROCm offer cooperative matrices.
//!
//! ```text
//! tile      panels of 16-bit elements in shared memory, products on them, rows written out
//! forward   O and the log-sum-exp
//! gradient  dq; dk and dv
//! ```
//!
//! It is not known which thread of a warp holds which element of a matrix. Operations on rows (softmax, masks, scaling) therefore go
//! through a *board* of f32 in shared memory, on which each thread works on whole rows or on a part of one row.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

pub mod forward;
pub mod gradient;
pub mod tile;

use crate::fragment::{Role, WIDTH};
use crate::score::Factor;
use serde::Serialize;

/// Elements of padding between rows in shared memory, so that neighbouring rows start in different banks.
const PAD: usize = 8;

/// Tile of one thread block. A warp owns `m` rows; columns stream by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct MatrixTile {
    /// Warps of a thread block.
    pub planes: usize,
    /// Threads of a warp.
    pub plane: usize,
    /// Columns of a tile: keys, or queries in the kernel of `dk` and `dv`.
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

    /// Inner dimension of a product.
    pub fn k(&self) -> usize {
        self.shape[2]
    }

    /// Rows of a thread block.
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

    /// Rows of the board that a thread works on, wholly or in part.
    pub fn rows_of_unit(&self) -> usize {
        self.m().div_ceil(self.plane)
    }

    /// Vectors that a thread works on in each of its rows of the board.
    pub fn vectors_of_unit(&self) -> usize {
        self.columns / WIDTH / self.sharers()
    }

    /// Vectors between the starts of rows of the board, and of the weights.
    pub fn board_pitch(&self) -> usize {
        (self.columns + PAD) / WIDTH
    }

    /// Elements of a row of a panel, padded with zeros to a multiple of `k` and `n`, the sizes of whole products.
    pub fn padded(&self, head_dim: usize) -> usize {
        head_dim.next_multiple_of(self.k().max(self.n()))
    }

    /// Vectors between the starts of rows of a panel.
    pub fn pitch(&self, head_dim: usize) -> usize {
        (self.padded(head_dim) + PAD) / WIDTH
    }

    /// Whether a kernel can be built with these shapes.
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

/// Everything that a kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// Role of the kernel.
    pub role: Role,
    /// Tile.
    pub tile: MatrixTile,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Factor of the gradients of scores.
    pub factor: Factor,
    /// Whether warps of a thread block may diverge at a branch that contains a warp barrier. It is allowed, but in Mesa's software Vulkan
    /// such a barrier waits for the whole thread block.
    pub apart: bool,
}

impl Blueprint {
    /// Bytes of shared memory: panels of K and V, the board, the weights, and a word for each warp.
    ///
    /// ```
    /// # use flash_attention_kernels::{fragment::Role, matrix::{Blueprint, MatrixTile}, score::Factor};
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
