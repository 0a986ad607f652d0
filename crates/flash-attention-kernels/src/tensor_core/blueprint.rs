//! The blueprint of kernels on tensor cores: everything they are compiled for.

use super::{LINE, PANEL, WARP_UNITS, WARPGROUP_ROWS, WARPGROUP_UNITS};
use crate::dtype::Dtype;
use crate::e4m3::KvStorage;
use crate::fragment::Role;
use crate::score::Factors;
use serde::Serialize;

/// Keys of a tile that share a scale: those of the smallest page.
pub const SCALED_KEYS: usize = 16;

/// Tile sizes. In the kernel of `dk` and `dv`, queries and keys exchange their roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct HopperTile {
    /// Consumer groups of a thread block. They are independent and use separate shared memory.
    pub consumer_groups: usize,
    /// Warpgroups of a consumer group, 64 queries each; at least 2.
    pub warpgroups: usize,
    /// Keys of a tile: a multiple of 16, at most 256.
    pub tile_k: usize,
    /// Pipeline stages: number of tiles of K, and of V, in shared memory at a time.
    pub stages: usize,
    /// Whether the warpgroups issue their products in turn, so that one's softmax runs under the other's products.
    pub ping_pong: bool,
    /// Whether each consumer group has an additional warp that only loads; in the forward only. Registers are allocated for
    /// four warps at a time, so that a thread has 168 registers with two warpgroups and a producer warp, 128 with three and 96
    /// with four.
    pub producer_warp: bool,
}

impl HopperTile {
    /// Queries of a consumer group's tile.
    pub fn tile_q(&self) -> usize {
        self.warpgroups * WARPGROUP_ROWS
    }

    /// Threads of a thread block.
    pub fn units(&self) -> usize {
        self.consumer_groups * (self.warpgroups * WARPGROUP_UNITS + if self.producer_warp { WARP_UNITS } else { 0 })
    }
}

/// Everything a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Blueprint {
    /// What the kernel computes.
    pub role: Role,
    /// Tile sizes.
    pub tile: HopperTile,
    /// Element type.
    pub dtype: Dtype,
    /// How K and V are stored.
    pub storage: KvStorage,
    /// Whether f32 operands are rounded to tf32 before they are multiplied.
    pub tf32: bool,
    /// Dimension of a query and of a key.
    pub head_dim: usize,
    /// Dimension of a value.
    pub head_dim_v: usize,
    /// Whether there is a softcap.
    pub capped: bool,
    /// The boolean mask, if there is one: whether its rows differ.
    pub mask: Option<Rows>,
    /// The bias, if there is one: whether its rows differ.
    pub bias: Option<Rows>,
    /// Whether there are ALiBi slopes.
    pub alibi: bool,
    /// Whether there is a `score_mod`.
    pub modified: bool,
    /// Whether the derivatives of softcap and `score_mod` are kept until the gradient of the score is known.
    pub keeps_derivative: bool,
    /// Factors whose products with `dT` are summed over the columns.
    pub sums: Factors,
    /// Whether there is a `mask_mod`.
    pub mask_mod: bool,
    /// Whether there are several sequences.
    pub varlen: bool,
    /// Whether there is a block mask, and lists select the visited tiles.
    pub sparse: bool,
    /// Whether blocks of keys add to `dQ` in a fixed order, that of their work tiles.
    pub ordered: bool,
    /// Whether a work tile is a split of the keys. The results are then combined.
    pub split_keys: bool,
    /// Whether the query heads of a group are rows of the same tile.
    pub pack_gqa: bool,
    /// Warps that share 16 rows and divide the keys of a tile among them: 1, or the four of a warpgroup. Each computes an attention of its
    /// own, and these are combined in the end.
    pub warps_k: usize,
    /// Whether a work tile of `dk` and `dv` is a split of the group's query heads. The sums of the splits are then added up by another
    /// kernel.
    pub split_group: bool,
    /// In scratch, each head's rows of lse and delta are padded to a multiple of this. The number of queries of a tile divides
    /// it.
    pub stats_multiple: usize,
}

/// How the rows of a mask or bias differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Rows {
    /// One row for all queries.
    Same,
    /// One row for each query.
    Each,
    /// One row for each query, readable by TMA: tiles of the bias are loaded to shared memory like those of K and V.
    Tiled,
}

impl Blueprint {
    /// Elements of a 16-byte vector.
    pub fn vector(&self) -> usize {
        16 / self.dtype.size()
    }

    /// Columns of a panel, whose lines have 128 bytes.
    pub fn panel(&self) -> usize {
        LINE / self.dtype.size()
    }

    /// Number of panels of Q and K.
    pub fn panels(&self) -> usize {
        self.head_dim.div_ceil(self.panel())
    }

    /// Number of panels of V.
    pub fn panels_v(&self) -> usize {
        self.head_dim_v.div_ceil(self.panel())
    }

    /// Bytes of an element of K and V.
    pub fn kv_size(&self) -> usize {
        self.storage.size(self.dtype)
    }

    /// Bytes of a tile of rows of K or V.
    fn tile_bytes(&self, columns: usize) -> usize {
        self.tile.tile_k * (columns * self.kv_size()).div_ceil(LINE) * LINE
    }

    /// Whether a work tile is a split of what streams by.
    pub fn is_split(&self) -> bool {
        self.split_keys || self.split_group
    }

    /// Whether results are written in f32.
    pub fn writes_f32(&self) -> bool {
        self.is_split() || self.dtype == Dtype::F32
    }

    /// Columns of the accumulator of O or dV: `n` of the product, a multiple of 8.
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

    /// Whether `dS` is computed.
    pub fn differentiates(&self) -> bool {
        self.role.differentiates()
    }

    /// Whether an accumulator of dQ or dK is computed from `dS`.
    pub fn accumulates(&self) -> bool {
        self.role.accumulates()
    }

    /// Whether the arguments of `score_mod` are kept until the gradient of the score is known, because factors of sums are derivatives
    /// that depend on them.
    pub fn keeps_arguments(&self) -> bool {
        self.sums.of_function() && (!self.accumulates() || self.keeps_derivative)
    }

    /// Bytes of shared memory for these arguments. Kernels with an accumulator have no registers for them.
    pub fn argument_bytes(&self) -> usize {
        let of_thread =
            if self.accumulates() && self.keeps_arguments() { self.tile.tile_k / 2 * size_of::<f32>() } else { 0 };
        self.tile.warpgroups * WARPGROUP_UNITS * of_thread
    }

    /// Whether an accumulator of dV is computed from `P`.
    pub fn sums_values(&self) -> bool {
        matches!(self.role, Role::DkDv { dv: true, .. } | Role::All)
    }

    /// Whether dQ is accumulated in global memory.
    pub fn reduces(&self) -> bool {
        self.role == Role::All
    }

    /// Bytes of a tile of K.
    pub fn k_bytes(&self) -> usize {
        self.tile_bytes(self.head_dim)
    }

    /// Bytes of a tile of V.
    pub fn v_bytes(&self) -> usize {
        self.tile_bytes(self.head_dim_v)
    }

    /// Whether tiles of the bias are loaded to shared memory.
    pub fn tiled_bias(&self) -> bool {
        self.bias == Some(Rows::Tiled)
    }

    /// Number of panels of a tile of the bias.
    pub fn panels_b(&self) -> usize {
        self.tile.tile_k.div_ceil(PANEL)
    }

    /// Bytes of a tile of the bias for all rows of a consumer group. The tile consists of panels of 64 rows for each warpgroup
    /// or, if transposed, of one panel for each warpgroup.
    pub fn b_bytes(&self) -> usize {
        let panels = if self.transposed() { self.tile.tile_k } else { WARPGROUP_ROWS * self.panels_b() };
        let bytes = self.tile.warpgroups * panels * PANEL * self.dtype.size();
        if self.tiled_bias() { bytes } else { 0 }
    }

    /// Bytes of lse, or of delta, of a tile of queries in shared memory.
    pub fn stats_bytes(&self) -> usize {
        // Copies start at multiples of 16 bytes. Tiles of several sequences may start anywhere.
        let spare = if self.varlen { 16 } else { 0 };
        if self.transposed() { self.tile.tile_k * size_of::<f32>() + spare } else { 0 }
    }

    /// Bytes of a tile of `dSᵀ`, which passes through shared memory if dQ is accumulated in memory. There are two such tiles.
    pub fn ds_bytes(&self) -> usize {
        if self.reduces() { self.tile.tile_q() * self.tile.tile_k * self.dtype.size() } else { 0 }
    }

    /// Bytes of the scales of a tile of K and of V: one of each for 16 keys.
    pub fn scales_bytes(&self) -> usize {
        match self.storage {
            KvStorage::Elements => 0,
            KvStorage::E4m3 => 2 * self.tile.tile_k / SCALED_KEYS * size_of::<f32>(),
        }
    }

    /// Rows of a warpgroup.
    pub fn warpgroup_rows(&self) -> usize {
        WARPGROUP_ROWS / self.warps_k
    }

    /// Rows of a consumer group's tile.
    pub fn rows(&self) -> usize {
        self.tile.warpgroups * self.warpgroup_rows()
    }

    /// This blueprint with the columns of a tile that a warp computes.
    pub fn of_warp(&self) -> Blueprint {
        let tile = HopperTile { tile_k: self.tile.tile_k / self.warps_k, ..self.tile };
        Blueprint { tile, ..*self }
    }

    /// Bytes of a warpgroup's rows of Q.
    pub fn q_bytes(&self) -> usize {
        self.warpgroup_rows() * self.panels() * LINE
    }

    /// Bytes of a warpgroup's rows of dO.
    pub fn d_bytes(&self) -> usize {
        if self.differentiates() { WARPGROUP_ROWS * self.panels_v() * LINE } else { 0 }
    }

    /// Type of the weights P in products.
    pub fn weights(&self) -> Dtype {
        match self.storage {
            KvStorage::Elements => self.dtype,
            KvStorage::E4m3 => Dtype::F16,
        }
    }

    /// Whether exponentials are relative to a reference maximum instead of the row maximum. This needs bf16, which has the
    /// range of f32, and no bias, slope or `score_mod`, since these may act as a mask.
    pub fn uses_reference_max(&self) -> bool {
        self.dtype == Dtype::BF16 && self.bias.is_none() && !self.alibi && !self.modified
    }

    /// Whether mask or `mask_mod` may hide pairs that the band shows.
    pub fn hides_pairs(&self) -> bool {
        self.mask.is_some() || self.mask_mod
    }

    /// Whether anything is hidden besides positions past the last one. `bounded` is whether the band has a bound.
    pub fn hides(&self, bounded: bool) -> bool {
        self.varlen || self.sparse || self.hides_pairs() || bounded
    }

    /// Whether scores are scaled to natural units before the softmax. Otherwise the softmax's exponent factor includes the
    /// scale.
    pub fn scores_are_scaled(&self) -> bool {
        self.capped || self.bias.is_some() || self.alibi || self.modified
    }
}
