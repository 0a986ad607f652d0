//! The end of a forward: `O / l` and lse of a warp's rows, and rows that must be recomputed.

use super::{MmaBlueprint, Products};
use crate::dtype::Dtype;
use crate::e4m3::KvStorage;
use crate::fragment::Scores;
use crate::ptx::lg2;
use crate::softmax::lse_bits_log2;
use crate::tensor_core::*;
use cubecl::prelude::*;

/// Writes the rows of a warp, 16 of each group, of which the first one is `first_row` of the block. The whole warp must call it.
#[cube]
pub fn write_rows<E: Float, M: Numeric, N: Size, NB: Size, NM: Size>(
    sources: &Sources<E, N>,
    inputs: &Scores<E, M, NB, NM>,
    outputs: &mut Outputs,
    softmax: &Sequence<OnlineSoftmax>,
    acc: &Sequence<Array<f32>>,
    work: &WorkTile,
    block: &BlockRows,
    first_row: u32,
    #[comptime] blueprint: MmaBlueprint,
) {
    let (extras, exponent, band) = (inputs.score.extras, inputs.score.exponent, work.band);
    let bounded = comptime!(inputs.band.bounded_above || inputs.band.bounded_below);
    let (tile, scores, products) = comptime!((blueprint.tile, blueprint.scores, blueprint.products));
    let (groups, tile_k, dtype) = comptime!((tile.groups, tile.tile_k, scores.dtype));
    let (split, columns) = comptime!((products == Products::Split, scores.columns()));
    let hides = comptime!(scores.hides(bounded));
    let (batch, head_kv) = (work.batch as usize, work.head_kv as usize);
    let lane = UNIT_POS % 32;
    let quarter = lane % 4;
    let steps = work.steps;
    // Sinks are added when splits are combined.
    let sinks = comptime!(!scores.split_keys && extras.sinks.is_some());
    let written = comptime!(if scores.writes_f32() { Dtype::F32 } else { dtype });
    let batch_out = work.batch_out as usize;
    let mut again = 0u32.runtime();
    let mut m = Array::<f32>::new(comptime!(2 * groups));
    let mut l = Array::<f32>::new(comptime!(2 * groups));
    #[unroll]
    for group in 0..groups {
        let row = first_row + comptime!((group * tile.warpgroup_rows()) as u32) + lane / 4;
        #[unroll]
        for half in 0..2usize {
            let RowOf { query: row, head } = block.at(row + comptime!(8 * half as u32));
            let of_sink = sink_log2(&extras, head, sinks);
            let head = head as usize;
            let of_row = comptime!(2 * group + half);
            let rows = softmax.index(group);
            let end = RowEnd::of(rows.m[half], rows.l[half], rows.top[half], of_sink, exponent, sinks, scores);
            let sum = end.l;
            m[of_row] = end.m;
            l[of_row] = sum;
            let live = band.is_query(row);
            if quarter == 0 && live {
                let at = outputs.lse.stride.at(batch_out, head, row);
                outputs.lse.data[at] = lse_bits_log2(m[of_row], sum, lg2(sum));
            }
            let factor = normalizer_of(sum, end.factor, &extras);
            let of_group = acc.index(group);
            let at = outputs.o.stride.at(batch_out, head, row);
            if comptime!(scores.storage == KvStorage::E4m3) {
                store_interleaved_row(of_group, half, factor, &mut outputs.o, at, live, scores.head_dim_v, written);
            } else {
                store_row_of(of_group, half, factor, &mut outputs.o, at, live, scores.head_dim_v, written);
            }
            // Rows to recompute: the sum left the range of f32, or a hidden value that is not finite reached the row.
            let mut lost = sum == f32::INFINITY;
            if comptime!(hides || split) {
                let finite = is_finite_row(of_group, half, columns);
                lost = lost || (sum <= f32::MAX && !finite);
            }
            // Split operands turn infinity into NaN.
            if comptime!(split) {
                let none = sum.is_nan();
                l[of_row] = select(none, f32::INFINITY, sum);
                lost = lost || none;
            }
            again |= select(live && lost, comptime!(1u32 << of_row), 0u32);
        }
    }
    if comptime!(hides || split || scores.uses_reference_max()) && plane_any(again != 0) {
        // Other threads' stores to these rows must come before those of the recomputation.
        sync_plane();
        let (first, after) = if comptime!(scores.sparse) {
            (0u32.runtime(), band.after_keys())
        } else {
            let after = work.k_last + comptime!(tile_k as u32);
            (after - steps * comptime!(tile_k as u32), after)
        };
        for nth in 0..comptime!(16 * groups as u32) {
            let (of_row, from) = (nth / 8, nth % 8);
            let mut of_m = m[0];
            let mut of_l = l[0];
            #[unroll]
            for other in 1..comptime!(2 * groups) {
                of_m = select(of_row == comptime!(other as u32), m[other], of_m);
                of_l = select(of_row == comptime!(other as u32), l[other], of_l);
            }
            let of_m = plane_shuffle(of_m, 4 * from);
            let of_l = plane_shuffle(of_l, 4 * from);
            if plane_any(lane / 4 == from && (again >> of_row) & 1 == 1) {
                let of_group = of_row % 2 * 8 + from;
                let row = first_row + of_row / 2 * comptime!(tile.warpgroup_rows() as u32) + of_group;
                let RowOf { query: row, head } = block.at(row);
                let head = head as usize;
                let lost = LostRow { batch, batch_out, head, head_kv, row, first, after, m: of_m, l: of_l, band };
                recompute_row(sources, inputs, &mut outputs.o, &mut outputs.lse, &lost, scores);
            }
        }
    }
}
