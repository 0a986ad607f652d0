//! Attention for NVIDIA GPUs from Ampere (sm_80) on, with `mma.sync`, the matrix product of a warp. `cp.async` copies tiles to swizzled
//! shared memory, from which `ldmatrix` reads the operands.
//!
//! ```text
//! forward   O and the log-sum-exp               tiles     copies of tiles to shared memory, addresses of operands in them
//! gradient  dq; dk and dv                       products  PTX of products
//! visits    tiles that a thread block visits    ops       operations that CubeCL does not offer
//! merge     attentions of warps with keys of    output    the end of a forward
//!           their own                           e4m3      PTX of products with keys and values in 8 bits
//! scales    factors of keys and values in 8 bits
//! ```
//!
//! f32 is multiplied as tf32. Each value is split into two tf32, which keeps its precision, or rounded to one, where the user
//! [asks for it](crate::Precision::Tf32).
//!
//! An accumulator has the same layout in the registers of a warp as in a warpgroup's product (`tensor_core::rows`). The code that works
//! on registers is therefore shared with the kernels for Hopper ([`tensor_core`](crate::tensor_core)): softmax, scores and recomputed
//! rows. There, four warps count as a warpgroup, and a *group* is 64 rows, 16 of each of the four warps.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

#[cfg(feature = "cuda")]
pub mod e4m3;
#[cfg(feature = "cuda")]
pub mod forward;
#[cfg(feature = "cuda")]
pub mod gradient;
#[cfg(feature = "cuda")]
pub mod merge;
#[cfg(feature = "cuda")]
pub mod ops;
#[cfg(feature = "cuda")]
pub mod output;
#[cfg(feature = "cuda")]
pub mod products;
#[cfg(feature = "cuda")]
pub mod scales;
#[cfg(feature = "cuda")]
pub mod tiles;
#[cfg(feature = "cuda")]
pub mod visits;

use crate::dtype::Dtype;
use crate::e4m3::KvStorage;
use crate::tensor_core::{Blueprint, HopperTile, WARPGROUP_ROWS, WARPGROUP_UNITS};
use serde::Serialize;

/// Tile of one thread block. In the kernel of `dk` and `dv`, queries and keys are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct MmaTile {
    /// Warpgroups of a thread block.
    pub warpgroups: usize,
    /// Blocks of 16 queries of a warp. Each read of K and V serves all of them.
    pub groups: usize,
    /// Keys of a tile. A multiple of 16 for each of `warps_k` warps, and of the rows that a thread block copies at a time, which are an
    /// eighth of its threads.
    pub tile_k: usize,
    /// Warps that share rows and divide the keys of a tile among them, in the forward: 1, or the four of a warpgroup, whose rows are then a
    /// quarter as many. A decoding step fills few rows.
    pub warps_k: usize,
    /// Tiles of K, and of V, in shared memory at a time: 2, or up to 4 if warps divide the keys of a tile.
    pub stages: usize,
}

impl MmaTile {
    /// Queries of a thread block.
    ///
    /// ```
    /// use flash_attention_kernels::MmaTile;
    ///
    /// assert_eq!(MmaTile { warpgroups: 1, groups: 2, tile_k: 64, warps_k: 1, stages: 2 }.tile_q(), 128);
    /// ```
    pub fn tile_q(&self) -> usize {
        self.warpgroups * self.groups * self.warpgroup_rows()
    }

    /// Rows of a warpgroup, in each group.
    pub fn warpgroup_rows(&self) -> usize {
        WARPGROUP_ROWS / self.warps_k
    }

    /// Threads of a thread block.
    pub fn units(&self) -> usize {
        self.warpgroups * WARPGROUP_UNITS
    }

    /// This tile as a [`HopperTile`], in which each group counts as a warpgroup.
    pub fn tile(&self) -> HopperTile {
        let (warpgroups, tile_k, stages) = (self.warpgroups * self.groups, self.tile_k, self.stages);
        HopperTile { consumer_groups: 1, warpgroups, tile_k, stages, ping_pong: false, producer_warp: false }
    }

    /// Whether a kernel can be built with this tile.
    ///
    /// ```
    /// use flash_attention_kernels::MmaTile;
    ///
    /// assert!(MmaTile { warpgroups: 2, groups: 1, tile_k: 64, warps_k: 1, stages: 2 }.is_consistent());
    /// assert!(!MmaTile { warpgroups: 2, groups: 1, tile_k: 48, warps_k: 1, stages: 2 }.is_consistent());
    /// ```
    pub fn is_consistent(&self) -> bool {
        let MmaTile { warpgroups, groups, tile_k, warps_k, stages } = *self;
        matches!(warpgroups, 1 | 2 | 4)
            && matches!(groups, 1 | 2)
            && (warps_k == 1 || warps_k == 4 && warpgroups == 1)
            && tile_k.is_multiple_of(16 * warps_k)
            && (stages == 2 || matches!(stages, 3 | 4) && warps_k > 1)
            && tile_k > 0
            && tile_k.is_multiple_of(self.units() / 8)
            && tile_k <= 256
    }
}

/// Everything that a kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct MmaBlueprint {
    /// Tile.
    pub tile: MmaTile,
    /// Blueprint of the code shared with the kernels for Hopper, with this [tile](MmaTile::tile()).
    pub scores: Blueprint,
    /// Operands of the products.
    pub products: Products,
}

/// Operands that `mma.sync` multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Products {
    /// f16.
    F16,
    /// bf16.
    BF16,
    /// Keys and values in e4m3, which become [f16](mod@crate::mma::e4m3), as queries and weights do.
    E4m3 {
        /// Whether there is an instruction for that. Before sm_89 there is none.
        instruction: bool,
    },
    /// f32, rounded to tf32.
    Tf32,
    /// f32 as the sum of two tf32, `x = big + small`, with `x y ≈ small big + big small + big big`. The term left out is 2^-22 of the
    /// product (H. Ootomo and R. Yokota, Recovering single precision accuracy from Tensor Cores, arXiv:2203.03341). As in that paper,
    /// every few products their sum is added in f32 with rounding to nearest, because `mma.sync` rounds towards zero.
    Split,
}

impl Products {
    /// Inner dimension of one product: 32 bytes of each operand.
    pub fn depth(self) -> usize {
        match self {
            Products::F16 | Products::BF16 | Products::E4m3 { .. } => 16,
            Products::Tf32 | Products::Split => 8,
        }
    }
}

/// Bytes that a warp writes at a time when the attentions of warps are combined: 16 of each thread.
const CHUNK: usize = 512;

/// Chunks of the state of a group's rows, before those of its accumulator.
const OF_STATE: usize = 2;

impl MmaBlueprint {
    /// Whether the last split of a block of queries combines all of them, without another launch.
    pub fn combines(&self) -> bool {
        self.scores.split_keys && self.tile.warps_k > 1
    }

    /// Chunks of a group.
    fn chunks(&self) -> usize {
        OF_STATE + self.scores.columns() / 8
    }

    /// Bytes of shared memory for the attentions of all warps but the first one. They replace tiles of K and V.
    pub fn merge_bytes(&self) -> usize {
        (self.tile.warps_k - 1) * self.tile.groups * self.chunks() * CHUNK
    }

    /// Bytes of shared memory: rows of Q and of dO, tiles of K and of V, and as many of lse and of delta where queries stream by.
    ///
    /// ```
    /// # use flash_attention_kernels::{Dtype, KvStorage, MmaTile, fragment::Role, mma::{MmaBlueprint, Products}, tensor_core::Blueprint};
    /// let tile = MmaTile { warpgroups: 1, groups: 2, tile_k: 64, warps_k: 1, stages: 2 };
    /// let scores = Blueprint {
    ///     role: Role::Forward, tile: tile.tile(), dtype: Dtype::BF16, storage: KvStorage::Elements, tf32: false,
    ///     head_dim: 128, head_dim_v: 128, capped: false, mask: None, bias: None, alibi: false, modified: false,
    ///     keeps_derivative: false, sums: Default::default(), mask_mod: false, varlen: false, sparse: false, ordered: false, split_keys: false,
    ///     split_group: false, pack_gqa: false, warps_k: 1, stats_multiple: 128,
    /// };
    /// assert_eq!(MmaBlueprint { tile, scores, products: Products::BF16 }.shared_memory(), 96 << 10);
    /// ```
    pub fn shared_memory(&self) -> usize {
        let scores = &self.scores;
        let rows = scores.tile.warpgroups * (scores.q_bytes() + scores.d_bytes());
        let stage = scores.k_bytes() + scores.v_bytes() + scores.scales_bytes() + 2 * scores.stats_bytes();
        rows + self.tile.stages * stage + self.factor_bytes()
    }

    /// Bytes of the factors of rows of Q that have become f16.
    pub fn factor_bytes(&self) -> usize {
        match (self.scores.storage, self.scores.dtype) {
            (KvStorage::E4m3, Dtype::BF16) => self.scores.rows() * size_of::<f32>(),
            _ => 0,
        }
    }
}
