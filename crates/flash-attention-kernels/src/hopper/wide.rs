//! All gradients of wide heads in one kernel: `dq`, `dk` and `dv` of a block of keys, where two warpgroups share each tile of
//! queries.
//!
//! ```text
//! each warpgroup   S = Q Kᵀ    dP = dO Vᵀ    P = 2^(c S − lse)    dS = P ∘ (dP − delta)   for its half of the keys
//! both             Pᵀ, later dSᵀ                                                          → shared memory
//! each warpgroup   dVᵀ += dOᵀ P    dKᵀ += Qᵀ dS    dQ += dS K                             for its half of the columns
//! ```
//!
//! The sums of dK and dV of 128 keys of [`gradient`](super::gradient) would take 256 registers of a thread. Here they are
//! transposed and divided by columns: 64 columns by 80 keys are 40 registers, and a warpgroup has four such sums. The A operands
//! of their products are tiles of dO and Q as TMA loads them, read by columns. As much as possible is computed for a tile of
//! queries once it has been loaded, because the additions to dQ and the loads of Q and dO are a burden for the L2 cache: the more
//! keys a block has, the fewer there are. (FlashAttention-4's kernel for Hopper has the same tile.)
//!
//! K and V stay in shared memory for a block of keys; tiles of Q and dO are streamed, for each query head of the group. `dq_accum`
//! is that of [`reduce`](super::reduce).

#[cfg(feature = "cuda")]
pub mod gradients;
#[cfg(feature = "cuda")]
mod loads;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod products;
#[cfg(feature = "cuda")]
mod stores;

use super::WORDS;
use super::layout::{Layout, Operand};
use crate::fragment::Role;
use crate::tensor_core::{Blueprint, HopperTile, LINE, PANEL, WARPGROUP_ROWS};
use serde::Serialize;

/// Warpgroups of a thread block.
pub const WARPGROUPS: usize = 2;
/// Panels of 64 columns of every operand: two for each warpgroup.
pub const PANELS: usize = 4;
/// Words of shared memory that describe a tile of queries.
const ENTRY_WORDS: usize = 3;

/// Everything the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct WideBlueprint {
    /// Keys of a block: a multiple of 16.
    pub keys: usize,
    /// Pipeline stages: number of tiles of Q, and of dO, in shared memory at a time.
    pub stages: usize,
    /// Blueprint of the scores of a warpgroup: the one of [`Role::Dq`], whose tile has half of the keys.
    pub scores: Blueprint,
}

impl WideBlueprint {
    /// The blueprint of blocks of `tile.tile_k` keys. `scores` is the blueprint of [`Role::Dq`].
    pub fn new(tile: HopperTile, scores: Blueprint) -> Self {
        let half = HopperTile { tile_k: tile.tile_k / WARPGROUPS, ..tile };
        WideBlueprint { keys: tile.tile_k, stages: tile.stages, scores: Blueprint { tile: half, ..scores } }
    }

    /// Whether there is a kernel with these tiles for the head dimensions of the scores.
    pub fn is_consistent(&self) -> bool {
        let panels = [self.scores.panels(), self.scores.panels_v()];
        self.keys.is_multiple_of(16) && (16..=256).contains(&self.keys) && self.stages >= 2 && panels == [PANELS; 2]
    }

    /// Blueprint of the gradients of single keys.
    pub fn of_keys(&self) -> Blueprint {
        Blueprint { role: Role::All, ..self.scores }
    }

    /// Bytes of lse, or of delta, of a tile of queries.
    pub fn stats_bytes(&self) -> usize {
        WARPGROUP_ROWS * size_of::<f32>()
    }

    /// Bytes of a panel of K or V.
    pub fn k_panel(&self) -> usize {
        self.keys * LINE
    }

    /// Bytes of a panel of Q or dO.
    pub fn q_panel(&self) -> usize {
        WARPGROUP_ROWS * LINE
    }

    /// Bytes of shared memory.
    pub fn shared_memory(&self) -> usize {
        self.total()
    }
}

impl Layout for WideBlueprint {
    fn tiles(&self) -> [(Operand, usize, usize); 5] {
        [
            (Operand::Q, self.stages, PANELS * self.q_panel()),
            (Operand::D, self.stages, PANELS * self.q_panel()),
            (Operand::K, 1, PANELS * self.k_panel()),
            (Operand::V, 1, PANELS * self.k_panel()),
            (Operand::Bias, 0, 0),
        ]
    }

    fn readers(&self, _: Operand) -> usize {
        WARPGROUPS
    }

    /// One tile holds first `Pᵀ` and then `dSᵀ`.
    fn gradients(&self) -> [usize; 3] {
        let stats = self.stages * self.stats_bytes();
        [self.keys * PANEL * self.scores.dtype.size(), stats, stats]
    }

    fn words(&self) -> [usize; 2] {
        [2 * WORDS, ENTRY_WORDS * self.stages]
    }
}
