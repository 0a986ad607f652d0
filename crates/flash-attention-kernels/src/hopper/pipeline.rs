//! Stages of shared memory: TMA fills them, products empty them, `mbarrier`s tell each of the other.
//!
//! K, V and a tiled bias have a pipeline of stages each. A stage's barrier `full` completes when its bytes have come, `empty` when the last
//! warp is done with them. [`Memory`](super::memory::Memory) says where they lie, [`Producer`](super::producer::Producer) fills them.

use super::{Blueprint, WARP_UNITS, WARPGROUP_UNITS};
use cubecl::prelude::*;

/// The pipelines.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pipeline {
    /// Of K. It leads: who loads it finds out what there is to do.
    K,
    /// Of V.
    V,
    /// Of the bias.
    Bias,
}

impl Pipeline {
    /// The warp that loads: its warpgroup waits for it.
    pub fn warp(self) -> u32 {
        let of_warpgroup = (WARPGROUP_UNITS / WARP_UNITS) as u32;
        match self {
            Pipeline::K => 0,
            Pipeline::V => of_warpgroup,
            Pipeline::Bias => of_warpgroup + 1,
        }
    }

    /// Bytes of a stage.
    pub fn bytes(self, blueprint: Blueprint) -> u32 {
        let bytes = match self {
            Pipeline::K => blueprint.k_bytes(),
            Pipeline::V => blueprint.v_bytes(),
            Pipeline::Bias => blueprint.b_bytes(),
        };
        bytes as u32
    }

    /// Panels of a stage of K or V.
    pub fn panels(self, blueprint: Blueprint) -> u32 {
        (if self == Pipeline::V { blueprint.panels_v() } else { blueprint.panels() }) as u32
    }
}

/// A position in a pipeline: the stage, and the parity of its barriers' phase.
#[derive(CubeType, Clone)]
pub struct PipelineState {
    pub stage: u32,
    pub phase: u32,
}

#[cube]
impl PipelineState {
    /// The first.
    pub fn first() -> PipelineState {
        PipelineState { stage: 0u32, phase: 0u32 }
    }

    /// Moves on.
    pub fn advance(&mut self, #[comptime] stages: usize) {
        self.stage += 1;
        if self.stage == comptime!(stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1;
        }
    }

    /// The one after this.
    pub fn next(&self, #[comptime] stages: usize) -> PipelineState {
        let wraps = self.stage + 1 == comptime!(stages as u32);
        PipelineState { stage: select(wraps, 0u32, self.stage + 1), phase: self.phase ^ u32::cast_from(wraps) }
    }
}
