//! Pipelines: stages of shared memory that TMA fills and matrix products read, synchronised by `mbarrier`s.
//!
//! K, V and a tiled bias have one pipeline each. Barrier `full` of a stage completes when the stage's bytes have arrived,
//! `empty` when the last warp has released the stage. [`Memory`](super::memory::Memory) holds their addresses, and
//! [`Producer`](super::producer::Producer) fills the stages.

use super::layout::Operand;
use crate::tensor_core::{Blueprint, WARP_UNITS, WARPGROUP_UNITS};
use cubecl::prelude::*;

impl Operand {
    /// The warp that loads the operand, without a producer warp. That of K also decodes the next work tile.
    pub fn warp(self) -> u32 {
        let of_warpgroup = (WARPGROUP_UNITS / WARP_UNITS) as u32;
        match self {
            Operand::V => of_warpgroup,
            Operand::Bias => of_warpgroup + 1,
            Operand::Q | Operand::D | Operand::K => 0,
        }
    }

    /// Panels of a tile of rows.
    pub fn panels(self, blueprint: &Blueprint) -> u32 {
        (if matches!(self, Operand::V | Operand::D) { blueprint.panels_v() } else { blueprint.panels() }) as u32
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
    /// The first stage, before any wrap.
    pub fn first() -> PipelineState {
        PipelineState { stage: 0u32, phase: 0u32 }
    }

    /// Advances to the next stage.
    pub fn advance(&mut self, #[comptime] stages: usize) {
        self.stage += 1;
        if self.stage == comptime!(stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1;
        }
    }

    /// The position before this one.
    pub fn previous(&self, #[comptime] stages: usize) -> PipelineState {
        let wraps = self.stage == 0;
        let stage = select(wraps, comptime!(stages as u32).runtime(), self.stage) - 1;
        PipelineState { stage, phase: self.phase ^ u32::cast_from(wraps) }
    }

    /// The position after this one.
    pub fn next(&self, #[comptime] stages: usize) -> PipelineState {
        let wraps = self.stage + 1 == comptime!(stages as u32);
        PipelineState { stage: select(wraps, 0u32, self.stage + 1), phase: self.phase ^ u32::cast_from(wraps) }
    }
}
