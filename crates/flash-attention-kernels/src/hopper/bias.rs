//! Tiles and blueprint of the kernel that computes the gradient of a bias.

use super::layout::{Layout, Operand};
use super::{SLOTS, WORDS};
use crate::tensor_core::{Blueprint, HopperTile, PANEL, WARPGROUP_ROWS};
use serde::Serialize;

/// Tile sizes of the gradient of a bias. A thread block of two warpgroups computes a block of 128 queries by `tiles` tiles of
/// keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct BiasTile {
    /// Keys of a tile: 32, 64 or 128.
    pub tile_k: usize,
    /// Number of key tiles of a block. The keys of a block are a multiple of 64.
    pub tiles: usize,
    /// Pipeline stages: number of tiles of K, and of V, in shared memory at a time; at least 2.
    pub stages: usize,
    /// Pipeline stages of rows: number of blocks of Q, and of dO, in shared memory at a time.
    pub row_stages: usize,
}

impl BiasTile {
    /// Warpgroups of a thread block.
    pub const WARPGROUPS: usize = 2;
    /// Queries of a block.
    pub const TILE_Q: usize = Self::WARPGROUPS * WARPGROUP_ROWS;

    /// Keys of a block.
    pub fn block_k(&self) -> usize {
        self.tile_k * self.tiles
    }

    /// The equivalent [`HopperTile`].
    pub fn tile(&self) -> HopperTile {
        let (warpgroups, tile_k, stages) = (Self::WARPGROUPS, self.tile_k, self.stages);
        HopperTile { consumer_groups: 1, warpgroups, tile_k, stages, ping_pong: false, producer_warp: false }
    }

    /// Number of turns by which loads run ahead. A turn is one batch and head of a block.
    pub fn ahead(&self) -> usize {
        self.row_stages.max((self.tiles + self.stages - 2) / self.tiles.max(1)).max(1)
    }

    /// Whether there is a kernel with these tiles.
    ///
    /// ```
    /// use flash_attention_kernels::hopper::BiasTile;
    ///
    /// assert!(BiasTile { tile_k: 64, tiles: 4, stages: 3, row_stages: 1 }.is_consistent());
    /// assert!(!BiasTile { tile_k: 64, tiles: 4, stages: 1, row_stages: 1 }.is_consistent());
    /// ```
    pub fn is_consistent(&self) -> bool {
        // Slots hold the turns that are posted ahead and those still in use: a warp is at most two turns behind the warp that
        // posts.
        matches!(self.tile_k, 32 | 64 | 128)
            && self.tiles > 0
            && self.block_k().is_multiple_of(PANEL)
            && self.stages >= 2
            && self.row_stages >= 1
            && self.ahead() + 4 <= SLOTS
    }
}

/// Everything the kernel for the gradient of a bias is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct BiasBlueprint {
    /// Tile sizes.
    pub tile: BiasTile,
    /// Blueprint of the scores: the one of [`Role::Dq`](crate::fragment::Role::Dq) with this [tile](BiasTile::tile()).
    pub scores: Blueprint,
    /// Whether the rows of the output consist of 8-byte vectors.
    pub vectors: bool,
}

impl BiasBlueprint {
    /// Columns of a group of the bias, which is loaded and released as a whole: whole panels, and at least the columns of a
    /// tile.
    pub fn group_b(&self) -> usize {
        self.tile.tile_k.max(PANEL)
    }

    /// Number of groups of a block.
    pub fn groups_b(&self) -> usize {
        if self.scores.tiled_bias() { self.tile.block_k() / self.group_b() } else { 0 }
    }

    /// Bytes of a group for the rows of a warpgroup.
    pub fn group_bytes(&self) -> usize {
        WARPGROUP_ROWS * self.group_b() * self.scores.dtype.size()
    }

    /// Bytes of lse, or of delta, for the rows of a warpgroup.
    pub fn stats_bytes(&self) -> usize {
        WARPGROUP_ROWS * size_of::<f32>()
    }

    /// Bytes of shared memory.
    ///
    /// ```
    /// # use flash_attention_kernels::{Dtype, KvStorage, fragment::Role, hopper::{BiasBlueprint, BiasTile}, tensor_core::{Blueprint, Rows}};
    /// let tile = BiasTile { tile_k: 64, tiles: 4, stages: 3, row_stages: 1 };
    /// let scores = Blueprint {
    ///     role: Role::Dq, tile: tile.tile(), dtype: Dtype::BF16, storage: KvStorage::Elements, tf32: false,
    ///     head_dim: 128, head_dim_v: 128, capped: false, mask: None, bias: Some(Rows::Tiled), alibi: false, modified: false,
    ///     keeps_derivative: false, sums: Default::default(), mask_mod: false, varlen: false, sparse: false, ordered: false, split_keys: false,
    ///     split_group: false, pack_gqa: false, warps_k: 1, stats_multiple: 128,
    /// };
    /// assert!(BiasBlueprint { tile, scores, vectors: true }.shared_memory() <= 227 << 10);
    /// ```
    pub fn shared_memory(&self) -> usize {
        self.total()
    }
}

impl Layout for BiasBlueprint {
    fn tiles(&self) -> [(Operand, usize, usize); 5] {
        let (rows, stages) = (self.tile.row_stages * BiasTile::WARPGROUPS, self.tile.stages);
        [
            (Operand::Q, rows, self.scores.q_bytes()),
            (Operand::D, rows, self.scores.d_bytes()),
            (Operand::K, stages, self.scores.k_bytes()),
            (Operand::V, stages, self.scores.v_bytes()),
            (Operand::Bias, BiasTile::WARPGROUPS * self.groups_b(), self.group_bytes()),
        ]
    }

    fn readers(&self, operand: Operand) -> usize {
        if matches!(operand, Operand::K | Operand::V) { BiasTile::WARPGROUPS } else { 1 }
    }

    fn gradients(&self) -> [usize; 3] {
        let stats = self.tile.row_stages * BiasTile::WARPGROUPS * self.stats_bytes();
        [0, stats, stats]
    }

    fn words(&self) -> [usize; 2] {
        [WORDS, 0]
    }
}
