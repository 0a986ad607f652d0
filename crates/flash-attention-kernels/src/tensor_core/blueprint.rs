//! What kernels on tensor cores are specialised for.

use super::{LINE, PANEL, WARP_UNITS, WARPGROUP_ROWS, WARPGROUP_UNITS};
use crate::dtype::Dtype;
use crate::fragment::role::Role;
use serde::Serialize;

/// Tiles. What is said of queries and keys is the other way round in the kernel of `dk` and `dv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct HopperTile {
    /// Consumer groups of a thread block. Each works for itself, in shared memory of its own.
    pub consumer_groups: usize,
    /// Warpgroups of a consumer group, 64 queries each; at least 2.
    pub warpgroups: usize,
    /// Keys of a tile: a multiple of 16, at most 256.
    pub tile_k: usize,
    /// Tiles of K, and of V, in shared memory at a time.
    pub stages: usize,
    /// Whether the warpgroups take turns in issuing products, so that one's softmax runs under the other's products.
    pub ping_pong: bool,
    /// Whether each consumer group has one warp more, which loads and does nothing else; only in the forward. Warps come with registers by
    /// fours, so that beside two warpgroups it leaves each thread 168, beside three or four 128 or 96.
    pub producer_warp: bool,
}

impl HopperTile {
    /// Queries of a consumer group.
    pub fn tile_q(&self) -> usize {
        self.warpgroups * WARPGROUP_ROWS
    }

    /// Threads of a thread block.
    pub fn units(&self) -> usize {
        self.consumer_groups * (self.warpgroups * WARPGROUP_UNITS + if self.producer_warp { WARP_UNITS } else { 0 })
    }
}

/// What a kernel is specialised for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// What is computed.
    pub role: Role,
    /// Tiles.
    pub tile: HopperTile,
    /// Element type.
    pub dtype: Dtype,
    /// Whether f32 is rounded to tf32 before it is multiplied.
    pub tf32: bool,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Whether there is a softcap.
    pub capped: bool,
    /// Whether there is a boolean mask, and whether it differs from row to row.
    pub mask: Option<Rows>,
    /// Whether there is a bias, and whether it differs from row to row.
    pub bias: Option<Rows>,
    /// Whether there are slopes.
    pub alibi: bool,
    /// Whether there is a function of scores.
    pub modified: bool,
    /// Whether the derivative of what it makes of a product is kept until the gradient of the score is there.
    pub keeps_derivative: bool,
    /// Whether there is a function that hides pairs.
    pub mask_mod: bool,
    /// Whether there are several sequences.
    pub varlen: bool,
    /// Whether there is a block mask: lists say which tiles are visited.
    pub sparse: bool,
    /// Whether work tiles are splits of the keys, whose results are combined.
    pub split_keys: bool,
    /// Lse and delta lie in scratch with each head's rows filled up to a multiple of this, which tiles of queries divide.
    pub stats_multiple: usize,
}

/// Whether the rows of a mask or bias are all alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Rows {
    /// One row for all queries.
    Same,
    /// A row for each query.
    Each,
    /// A row for each query, and TMA can read them: tiles of a bias come to shared memory as those of K and V do.
    Tiled,
}

impl Blueprint {
    /// Elements of a vector of 16 bytes.
    pub fn vector(&self) -> usize {
        16 / self.dtype.size()
    }

    /// Columns of a panel, whose lines are 128 bytes.
    pub fn panel(&self) -> usize {
        LINE / self.dtype.size()
    }

    /// Panels of Q and K.
    pub fn panels(&self) -> usize {
        self.head_dim.div_ceil(self.panel())
    }

    /// Panels of V.
    pub fn panels_v(&self) -> usize {
        self.head_dim_v.div_ceil(self.panel())
    }

    /// Whether results are written in f32.
    pub fn writes_f32(&self) -> bool {
        self.split_keys || self.dtype == Dtype::F32
    }

    /// Columns of the accumulator of O or dV: `n` of its products, a multiple of 8.
    pub fn columns(&self) -> usize {
        self.head_dim_v.next_multiple_of(8)
    }

    /// Columns of the accumulator of dQ or dK.
    pub fn columns_dk(&self) -> usize {
        self.head_dim.next_multiple_of(8)
    }

    /// Whether keys are rows and queries columns.
    pub fn transposed(&self) -> bool {
        self.role.is_transposed()
    }

    /// Whether `dS` is computed, and the accumulator of dQ or dK.
    pub fn differentiates(&self) -> bool {
        self.role.differentiates()
    }

    /// Whether `P` multiplies, and there is an accumulator of dV.
    pub fn sums_values(&self) -> bool {
        matches!(self.role, Role::DkDv { dv: true, .. } | Role::All)
    }

    /// Whether dQ is added up in memory.
    pub fn reduces(&self) -> bool {
        self.role == Role::All
    }

    /// Bytes of a tile of K.
    pub fn k_bytes(&self) -> usize {
        self.tile.tile_k * self.panels() * LINE
    }

    /// Bytes of a tile of V.
    pub fn v_bytes(&self) -> usize {
        self.tile.tile_k * self.panels_v() * LINE
    }

    /// Whether tiles of the bias come to shared memory.
    pub fn tiled_bias(&self) -> bool {
        self.bias == Some(Rows::Tiled)
    }

    /// Panels of a tile of the bias.
    pub fn panels_b(&self) -> usize {
        self.tile.tile_k.div_ceil(PANEL)
    }

    /// Bytes of a tile of the bias, for all rows of a consumer group: panels of a warpgroup's 64 rows each, or, transposed, a panel for
    /// each warpgroup.
    pub fn b_bytes(&self) -> usize {
        let panels = if self.transposed() { self.tile.tile_k } else { WARPGROUP_ROWS * self.panels_b() };
        let bytes = self.tile.warpgroups * panels * PANEL * self.dtype.size();
        if self.tiled_bias() { bytes } else { 0 }
    }

    /// Bytes of a tile's log-sum-exp or delta, where they come to shared memory.
    pub fn stats_bytes(&self) -> usize {
        // Copies start at multiples of 16 bytes; tiles of sequences need not.
        let spare = if self.varlen { 16 } else { 0 };
        if self.transposed() { self.tile.tile_k * size_of::<f32>() + spare } else { 0 }
    }

    /// Bytes of a tile of `dSᵀ`, which goes through shared memory where dQ is added up. There are two.
    pub fn ds_bytes(&self) -> usize {
        if self.reduces() { self.tile.tile_q() * self.tile.tile_k * self.dtype.size() } else { 0 }
    }

    /// Bytes of a warpgroup's rows of Q.
    pub fn q_bytes(&self) -> usize {
        WARPGROUP_ROWS * self.panels() * LINE
    }

    /// Bytes of a warpgroup's rows of dO.
    pub fn d_bytes(&self) -> usize {
        if self.differentiates() { WARPGROUP_ROWS * self.panels_v() * LINE } else { 0 }
    }

    /// Whether exponentials are relative to a reference maximum, not to the maximum: where what they are rounded to has the range of f32,
    /// and no bias, slope or function stands in for a mask.
    pub fn uses_reference_max(&self) -> bool {
        self.dtype == Dtype::BF16 && self.bias.is_none() && !self.alibi && !self.modified
    }

    /// Whether pairs can be hidden that the band would let see each other.
    pub fn hides_pairs(&self) -> bool {
        self.mask.is_some() || self.mask_mod
    }

    /// Whether scores are turned into natural units before the softmax, not by its factor alone.
    pub fn scores_are_scaled(&self) -> bool {
        self.capped || self.bias.is_some() || self.alibi || self.modified
    }
}
