//! The five products of a step, of one warpgroup.

use super::super::layout::{Layout, Operand, Region, columns_offset};
use super::super::memory::Memory;
use super::WideBlueprint;
use crate::ptx::{mma_shared, product_onto, wgmma_commit, wgmma_fence};
use crate::tensor_core::PANEL;
use cubecl::prelude::*;

/// Offset of a descriptor that is read by columns from one that is read by rows, if the operand is a single panel.
fn by_columns() -> u64 {
    columns_offset(8)
}

/// Units of a descriptor between 16 lines, and between 16 columns of a line.
const LINES: usize = 128;
const COLUMNS: usize = 2;

/// The operands of a warpgroup's products. All descriptors are sums of one, because uniform registers are scarce.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Products {
    /// Descriptor of the first region of shared memory.
    pub start: u64,
    /// The warpgroup.
    pub warpgroup: u32,
    /// Shared memory.
    pub memory: Memory<WideBlueprint>,
}

#[cube]
impl Products {
    /// Issues the product of a tile of 64 queries, of Q or dO, with the warpgroup's half of the keys, of K or V: S or dP.
    pub fn scores(&self, s: &mut Array<f32>, stage: u32, #[comptime] rows: Operand) {
        let blueprint = comptime!(self.memory.blueprint);
        let (keys, dtype) = comptime!((blueprint.keys, blueprint.scores.dtype));
        let (cols, wide) = comptime!(match rows {
            Operand::Q => (Operand::K, blueprint.scores.head_dim),
            _ => (Operand::V, blueprint.scores.head_dim_v),
        });
        let a = self.memory.descriptor(self.start, stage, rows);
        let of_half = self.warpgroup * comptime!((blueprint.k_panel() / 2 / 16) as u32);
        let b = self.memory.descriptor(self.start, 0u32, cols) + u64::cast_from(of_half);
        let panels = comptime!([blueprint.q_panel(), blueprint.k_panel()]);
        let steps = comptime!(
            (0..wide.div_ceil(16))
                .map(|i| panels.map(|bytes| i % 4 * COLUMNS + i / 4 * bytes / 16))
                .collect::<Vec<_>>()
        );
        mma_shared(s, a, b, steps, [false, false], comptime!(keys / 2), dtype);
    }

    /// Issues the products of two panels of columns, of dO or Q, with Pᵀ or dSᵀ: the warpgroup's columns of dVᵀ or dKᵀ.
    pub fn sums(&self, sums: &mut Sequence<Array<f32>>, stage: u32, adds: u32, #[comptime] rows: Operand) {
        let blueprint = comptime!(self.memory.blueprint);
        let panel = comptime!(blueprint.q_panel() / 16);
        let a = self.memory.descriptor(self.start, stage, rows)
            + u64::cast_from(self.warpgroup * comptime!(2 * panel as u32))
            + comptime!(by_columns());
        let b = self.start + comptime!(u64::from(blueprint.offset(Region::Ds) / 16));
        let steps = comptime!((0..PANEL / 16).map(|i| [i * LINES, i * COLUMNS]).collect::<Vec<_>>());
        wgmma_fence();
        #[unroll]
        for nth in 0..2usize {
            let a = a + comptime!((nth * panel) as u64);
            let (keys, dtype) = comptime!((blueprint.keys, blueprint.scores.dtype));
            product_onto(sums.index_mut(nth), a, b, adds, comptime!(steps.clone()), [true, false], keys, dtype);
        }
        wgmma_commit();
    }

    /// Issues the product of dS with one of the warpgroup's two panels of K: 64 columns of dQ.
    pub fn dq(&self, dq: &mut Array<f32>, #[comptime] nth: usize) {
        let blueprint = comptime!(self.memory.blueprint);
        let panel = comptime!(blueprint.k_panel() / 16);
        let a = self.start + comptime!(u64::from(blueprint.offset(Region::Ds) / 16) + by_columns());
        let b = self.memory.descriptor(self.start, 0u32, Operand::K)
            + u64::cast_from(self.warpgroup * comptime!(2 * panel as u32))
            + comptime!((nth * panel) as u64 + by_columns());
        let steps = comptime!((0..blueprint.keys / 16).map(|i| [i * LINES, i * LINES]).collect::<Vec<_>>());
        mma_shared(dq, a, b, steps, [true, true], PANEL, blueprint.scores.dtype);
    }
}
