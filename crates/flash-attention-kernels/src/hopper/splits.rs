//! `dk` and `dv` where work tiles share the query heads of a group: the sums of these splits are added up.
//!
//! With few key/value heads and causal attention, blocks of keys that go through all query heads of a group drift apart. The blocks that
//! run at a time then read and add to more query heads than the L2 cache holds. Splits of two query heads stay closer together, and their
//! work tiles are shorter.
//!
//! Splits are added in their order, so that results do not depend on which one ends first.

use super::reduce::{WARP_ROWS, WarpRows};
use crate::fragment::{Scores, filled};
use crate::mask::Band;
use crate::tensor_core::{Blueprint, GradientOutputs, GradientRows, RowStatistics, RowsIn, SourceSides, TileScheduler};
use cubecl::prelude::*;

/// What the splits have written, `[P · B, Hkv, Sk, D or Dv]` for `P` splits.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SplitSums {
    /// Sums of dk.
    pub dk: RowsIn<f32, Const<2>>,
    /// Sums of dv.
    pub dv: RowsIn<f32, Const<2>>,
    /// Number of splits.
    pub count: u32,
    /// Batches of a split.
    pub batches: u32,
}

#[cube]
impl SplitSums {
    /// The sums of a warp's 16 rows over all splits, in the layout of an accumulator of `columns` columns. Rows past the last key are
    /// those of the last one.
    fn of(
        &self,
        splits: &RowsIn<f32, Const<2>>,
        rows: &GradientRows,
        band: &Band,
        #[comptime] columns: usize,
    ) -> Array<f32> {
        let (lane, eights) = (UNIT_POS % 32, comptime!(columns / 8));
        let mut sums = filled::<f32>(0.0f32, comptime!(columns / 2));
        for split in 0..self.count {
            let batch = (split * self.batches) as usize + rows.batch;
            #[unroll]
            for r in 0..2usize {
                let row = band.query_within(rows.first_row + lane / 4 + comptime!(8 * r as u32));
                let at = splits.stride.at(batch, rows.head, row) + (lane % 4) as usize;
                #[unroll]
                for i in 0..eights {
                    let pair = splits.data[at + comptime!(4 * i)];
                    #[unroll]
                    for e in 0..2usize {
                        sums[comptime!(4 * i + 2 * r + e)] += pair.extract(e);
                    }
                }
            }
        }
        sums
    }
}

/// Writes dk and dv, the sums over all splits. Rows that a hidden NaN or infinity has reached are recomputed, as in
/// [`gradient`](mod@crate::hopper::gradient). Each warp adds up 16 keys.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn sum_splits<E: Float, M: Numeric, NB: Size, NM: Size>(
    splits: SplitSums,
    sources: SourceSides<E, Const<8>>,
    scores: Scores<E, M, NB, NM>,
    outputs: &mut GradientOutputs,
    stats: &[u32],
    scheduler: TileScheduler,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let band = scores.band;
    let (columns_dk, columns_dv) = comptime!((blueprint.columns_dk(), blueprint.columns()));
    let of_warp = WarpRows::of(band.seq_q.div_ceil(WARP_ROWS) * WARP_ROWS, &scheduler);
    if of_warp.of_all >= scheduler.heads {
        terminate!();
    }
    let (batch, head) = (of_warp.batch, of_warp.head);
    let mut rows = GradientRows::new(batch as usize, head as usize, of_warp.first, band);
    let dk = splits.of(&splits.dk, &rows, &band, columns_dk);
    rows.store(&dk, &mut outputs.dqk, 0usize, 1.0f32, columns_dk, blueprint.dtype);
    rows.check(&dk, columns_dk);
    let dv = splits.of(&splits.dv, &rows, &band, columns_dv);
    rows.store(&dv, &mut outputs.dv, 0usize, 1.0f32, columns_dv, blueprint.dtype);
    rows.check(&dv, columns_dv);

    // Statistics of rows exist for queries only.
    let of_rows = RowStatistics::of(stats, batch, head, 0u32, &band, &scheduler, blueprint);
    let group = scheduler.group_size.divisor;
    rows.set_columns(head * group, (head + 1) * group);
    rows.recompute(&of_rows, &sources, &scores, outputs, stats, &scheduler, blueprint);
}
