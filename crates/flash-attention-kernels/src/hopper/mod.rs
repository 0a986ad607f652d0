//! Attention kernels for NVIDIA Hopper: warpgroup matrix products (`wgmma`), loads by the tensor memory accelerator (TMA),
//! asynchronous barriers.
//!
//! ```text
//! forward    O and lse                                 memory     layout of shared memory
//! gradient   dq; dk and dv                             pipeline   stages of shared memory, their barriers
//! reduce     dq, accumulated by the blocks of keys     producer   loads that fill the pipelines
//! wide       dq, dk and dv of wide heads
//! splits     dk and dv, added up over splits of a group's query heads
//! dbias      gradient of a bias with one element       products   products of a warpgroup's rows with a tile
//!            for each pair                             operands   TMA operands and work tiles, as arguments
//! copy       packed copies of tensors that TMA cannot read
//! ```
//!
//! Computations on accumulators in registers are shared with [`mma`](crate::mma): see [`tensor_core`](crate::tensor_core).
//!
//! A work tile keeps a block of rows of one or two tensors in shared memory, while tiles of two other tensors are streamed
//! ([`Role`](crate::fragment::Role)).
//!
//! CubeCL assembles kernels as relocatable code, with two consequences. `setmaxnreg` is ignored, so that a producer warp takes
//! as many registers as any other warp, which pays off for few tile sizes only. And a single external call (an exact division
//! is enough) serialises every product.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

#[cfg(feature = "cuda")]
pub mod copy;
#[cfg(feature = "cuda")]
pub mod dbias;
#[cfg(feature = "cuda")]
pub mod forward;
#[cfg(feature = "cuda")]
pub mod gradient;
#[cfg(feature = "cuda")]
pub mod memory;
#[cfg(feature = "cuda")]
pub mod operands;
#[cfg(feature = "cuda")]
pub mod pipeline;
#[cfg(feature = "cuda")]
pub mod producer;
#[cfg(feature = "cuda")]
pub mod products;
#[cfg(feature = "cuda")]
pub mod reduce;
#[cfg(feature = "cuda")]
pub mod splits;

mod bias;
pub mod layout;
pub mod wide;
pub use bias::*;

use crate::tensor_core::{Blueprint, PANEL, WARPGROUP_ROWS};
use layout::{Layout, Operand};

/// Number of decoded work tiles kept in shared memory. It exceeds the number of work tiles by which loads may run ahead of the
/// products: one for each stage, plus one.
pub const SLOTS: usize = 8;
/// Largest number of pipeline stages. Of the slots, one holds the work tile being computed, and one the work tile after the
/// last one being loaded.
pub const MAX_STAGES: usize = SLOTS - 2;
/// Words of shared memory for a decoded work tile, and for each of the three cursors.
pub const WORDS: usize = 13;

/// Rows of `dq_accum` that share a counter of turns, and words of a counter: a vector of 16 bytes.
pub const TURN_ROWS: usize = WARPGROUP_ROWS;
pub const TURN_WORDS: usize = 4;

/// f32 values of a query in `dq_accum`, where every block of keys adds to dQ: whole panels.
pub fn dq_accum_columns(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

impl Blueprint {
    /// Bytes of shared memory: for each consumer group Q, the pipelines of K, V and a tiled bias, and the barriers.
    ///
    /// ```
    /// # use flash_attention_kernels::{Dtype, KvStorage, fragment::Role, tensor_core::{Blueprint, HopperTile}};
    /// let tile = HopperTile { consumer_groups: 1, warpgroups: 2, tile_k: 128, stages: 3, ping_pong: true, producer_warp: false };
    /// let blueprint = Blueprint {
    ///     role: Role::Forward, tile, dtype: Dtype::BF16, storage: KvStorage::Elements, tf32: false,
    ///     head_dim: 128, head_dim_v: 128, capped: false, mask: None, bias: None, alibi: false, modified: false,
    ///     keeps_derivative: false, sums: Default::default(), mask_mod: false, varlen: false, sparse: false, ordered: false, split_keys: false,
    ///     split_group: false, pack_gqa: false, warps_k: 1, stats_multiple: 128,
    /// };
    /// assert!(blueprint.shared_memory() <= 227 << 10);
    /// ```
    pub fn shared_memory(&self) -> usize {
        self.tile.consumer_groups * self.total()
    }
}

impl Layout for Blueprint {
    fn tiles(&self) -> [(Operand, usize, usize); 5] {
        let (stages, warpgroups) = (self.tile.stages, self.tile.warpgroups);
        [
            (Operand::Q, warpgroups, self.q_bytes()),
            (Operand::D, warpgroups, self.d_bytes()),
            (Operand::K, stages, self.k_bytes()),
            (Operand::V, stages, self.v_bytes()),
            (Operand::Bias, stages, self.b_bytes()),
        ]
    }

    fn readers(&self, operand: Operand) -> usize {
        // If dQ is accumulated in memory, all warps multiply with the rows of Q of every warpgroup.
        let of_one = operand == Operand::D || operand == Operand::Q && !self.reduces();
        if of_one { 1 } else { self.tile.warpgroups }
    }

    fn gradients(&self) -> [usize; 3] {
        let stats = self.tile.stages * self.stats_bytes();
        [2 * self.ds_bytes(), stats, stats]
    }

    fn arguments(&self) -> usize {
        self.argument_bytes()
    }

    fn words(&self) -> [usize; 2] {
        [3 * WORDS, if self.sparse { self.tile.stages } else { 0 }]
    }
}
