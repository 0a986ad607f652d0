//! Attention for NVIDIA Hopper: warpgroup matrix products (`wgmma`), loads by the tensor memory accelerator (TMA),
//! asynchronous barriers.
//!
//! ```text
//! forward    O and the log-sum-exp                     pipeline   stages of shared memory, their barriers
//! gradient   dq; dk and dv                             schedule   which consumer group computes which work tile, and when
//! reduce     dq, to which every block of keys adds     copy       tensors that TMA cannot read, packed
//! dbias      the gradient of a bias of each pair       recompute  rows that products of tiles cannot give
//! rows       online softmax on an accumulator's rows   combine    splits of the keys, put together
//! scores     softcap, bias, mask, band, on registers   ops        operations that CubeCL has no name for
//! delta      what gradients need of each query         dropout    which registers are kept
//! memory     where all that lies in shared memory      producer   who fills the pipelines, and when
//! operands   tensors, each kind as one argument
//! ```
//!
//! Each kernel keeps blocks of rows of one or two tensors, and tiles of two others stream by ([`Role`]).
//!
//! CubeCL assembles what it compiles as relocatable code, which shapes these kernels: `setmaxnreg` is ignored there, so that
//! a warp that only loads takes as many registers as any other and is worth them in few tiles, and one external call (an exact
//! division is enough) serialises every product.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

#[cfg(feature = "cuda")]
pub mod combine;
#[cfg(feature = "cuda")]
pub mod copy;
#[cfg(feature = "cuda")]
pub mod dbias;
#[cfg(feature = "cuda")]
pub mod delta;
#[cfg(feature = "cuda")]
pub mod dropout;
#[cfg(feature = "cuda")]
pub mod forward;
#[cfg(feature = "cuda")]
pub mod gradient;
#[cfg(feature = "cuda")]
pub mod memory;
#[cfg(feature = "cuda")]
pub mod operands;
#[cfg(feature = "cuda")]
pub mod ops;
#[cfg(feature = "cuda")]
pub mod pipeline;
#[cfg(feature = "cuda")]
pub mod producer;
#[cfg(feature = "cuda")]
pub mod recompute;
#[cfg(feature = "cuda")]
pub mod reduce;
#[cfg(feature = "cuda")]
pub mod rows;
#[cfg(feature = "cuda")]
pub mod schedule;
#[cfg(feature = "cuda")]
pub mod scores;

mod bias;
pub use bias::*;

use crate::fragment::role::Role;
use crate::problem::Dtype;
use serde::Serialize;

/// Rows of a warpgroup's products.
pub const WARPGROUP_ROWS: usize = 64;
/// Threads of a warpgroup.
pub const WARPGROUP_UNITS: usize = 128;
/// Threads of a warp.
pub const WARP_UNITS: usize = 32;
/// Bytes of a line of a panel: what the swizzle works on.
pub const LINE: usize = 128;
/// Columns of a panel in 16 bits.
pub const PANEL: usize = 64;

/// Work tiles that are kept in shared memory: more than loads run ahead of the products (one for each stage, and one).
pub const SLOTS: usize = 8;
/// Stages of a pipeline at most: the work tile that is computed has a slot, and that after the last one that is loaded.
pub const MAX_STAGES: usize = SLOTS - 2;
/// Words of shared memory for a kept work tile, and for each of the three cursors.
pub const WORDS: usize = 13;

/// f32 of a query in the sums of dQ, where every block of keys adds to it: whole panels.
pub fn dq_accum_columns(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

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

    /// Bytes of shared memory: for each consumer group Q, the pipelines of K, V and perhaps the bias, barriers.
    ///
    /// ```
    /// # use flash_attention_kernels::{Dtype, fragment::role::Role, hopper::{Blueprint, HopperTile}};
    /// let tile = HopperTile { consumer_groups: 1, warpgroups: 2, tile_k: 128, stages: 3, ping_pong: true, producer_warp: false };
    /// let blueprint = Blueprint {
    ///     role: Role::Forward, tile, dtype: Dtype::BF16, tf32: false, head_dim: 128, head_dim_v: 128,
    ///     capped: false, mask: None, bias: None, alibi: false, modified: false, keeps_derivative: false,
    ///     mask_mod: false, varlen: false, sparse: false, split_keys: false, stats_multiple: 128,
    /// };
    /// assert!(blueprint.shared_memory() <= 227 << 10);
    /// ```
    pub fn shared_memory(&self) -> usize {
        self.tile.consumer_groups * self.group_memory()
    }

    /// Bytes of a consumer group, a multiple of 1,024, to which swizzled tiles are aligned.
    pub fn group_memory(&self) -> usize {
        let barriers = 3 * self.tile.warpgroups + 6 * self.tile.stages + SLOTS;
        let stage = self.k_bytes() + self.v_bytes() + self.b_bytes() + 2 * self.stats_bytes();
        let tiles = self.tile.warpgroups * (self.q_bytes() + self.d_bytes()) + self.tile.stages * stage;
        let words = WORDS * (SLOTS + 3) + if self.sparse { self.tile.stages } else { 0 };
        (tiles + 2 * self.ds_bytes() + 8 * barriers + 4 * words).next_multiple_of(1024)
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
