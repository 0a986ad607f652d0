//! Combines splits of the keys, which were computed separately.
//!
//! ```text
//! m = max_p lse_p      w_p = exp(lse_p − m) / Σ exp(lse_p − m)      o = Σ w_p o_p      lse = m + ln Σ exp(lse_p − m)
//! ```
//!
//! A sink counts as one more split with `o = 0`. (Flash-Decoding, Dao et al. 2023.) The order of the sums depends on the number of splits
//! alone.

use super::operands::Outputs;
use super::{BlockRows, Blueprint, RowOf, TileScheduler, WorkTile};
use crate::dtype::Dtype;
use crate::extras::Extras;
use crate::fragment::filled;
use crate::ptx::*;
use crate::softmax::{HIDDEN, lse_bits_log2, lse_of_split};
use cubecl::prelude::*;

/// Rows that a thread block combines at a time, one for each of its warps.
pub const ROWS: u32 = 4;

/// Splits whose outputs are read at a time.
const AT_A_TIME: usize = 8;

/// Columns that a warp combines at a time, four of each thread.
const COLUMNS: usize = 128;

/// A row of queries.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SplitRow {
    /// Batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query.
    pub query: u32,
    /// Number of splits, `P`.
    pub count: u32,
    /// Number of batches, `B`.
    pub batches: usize,
}

/// Where the last split of a block of queries combines all of them.
#[derive(CubeType, CubeLaunch)]
pub struct Combination {
    /// The results.
    pub to: Outputs,
    /// For each block of queries of a head a counter, which is 0 before and after the launch.
    pub tickets: &'static mut [u32],
}

/// Combines the `count` splits of all rows of `batches` batches into `to`, whose rows have `wide` columns.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn combine(
    splits: &Outputs,
    to: &mut Outputs,
    extras: Extras,
    count: u32,
    batches: u32,
    heads: u32,
    queries: u32,
    #[comptime] wide: usize,
    #[comptime] dtype: Dtype,
) {
    let number = CUBE_POS as u32 * ROWS + UNIT_POS / 32;
    if number >= batches * heads * queries {
        terminate!();
    }
    let (query, head) = (number % queries, number / queries);
    let (batch, head) = ((head / heads) as usize, (head % heads) as usize);
    let row = SplitRow { batch, head, query, count, batches: batches as usize };
    combine_row(splits, to, &extras, &row, wide, dtype);
}

/// Combines the splits of a block of queries, if all others have been written. The rows of `splits` have been written by warps of this thread
/// block of four warps. `slot` is the shared address of a word that no thread reads any more. All threads must call this function.
#[cube]
pub fn combine_last(
    splits: &Outputs,
    combination: &mut Combination,
    extras: &Extras,
    scheduler: &TileScheduler,
    work: &WorkTile,
    rows: &BlockRows,
    slot: u32,
    #[comptime] blueprint: Blueprint,
) {
    let (count, batches) = (scheduler.num_splits.divisor, scheduler.batches as usize);
    let warp = UNIT_POS / 32;
    // All warps have written their rows.
    sync_cube();
    if warp == 0 {
        let at = work.block as usize;
        fence_gpu();
        let ticket = take_ticket(&combination.tickets[at..at + 1], count - 1);
        if UNIT_POS == 0 {
            store_shared(slot, ticket);
        }
    }
    sync_cube();
    if load_shared(slot) == count - 1 {
        fence_gpu();
        for nth in 0..comptime!(blueprint.rows() as u32 / ROWS) {
            let RowOf { query, head } = rows.at(warp + nth * ROWS);
            if work.band.is_query(query) {
                let (batch, head) = (work.batch as usize, head as usize);
                let row = SplitRow { batch, head, query, count, batches };
                let (wide, dtype) = comptime!((blueprint.head_dim_v, blueprint.dtype));
                combine_row(splits, &mut combination.to, extras, &row, wide, dtype);
            }
        }
    }
}

/// Combines the splits of a row. The whole warp must call it.
///
/// Each thread reads the lse of one split of a turn of 32. Sums are relative to the maximum of the turns so far. Outputs are read before a
/// lse is used, so that one row waits for memory once.
#[cube]
pub fn combine_row(
    splits: &Outputs,
    to: &mut Outputs,
    extras: &Extras,
    row: &SplitRow,
    #[comptime] wide: usize,
    #[comptime] dtype: Dtype,
) {
    let log2_e = comptime!(std::f32::consts::LOG2_E);
    let (lane, count) = (UNIT_POS % 32, row.count);
    let sink = extras.sink(row.head, HIDDEN.runtime());
    let mut m = sink;
    let mut l = select(sink == HIDDEN, 0.0f32, 1.0f32);
    let mut lse = HIDDEN.runtime();
    // Of this thread's split.
    let mut weight = 0.0f32.runtime();
    let parts = comptime!(wide.div_ceil(COLUMNS));
    let mut sum = filled::<f32>(0.0f32, comptime!(4 * parts));
    let mut first = 0u32.runtime();
    while first < count {
        let split = first + lane;
        let turns = first & 31 == 0;
        if turns {
            lse = select(split < count, lse_of(splits, row, min(split, count - 1)), HIDDEN);
        }
        let mut values = Sequence::<Sequence<f32>>::new();
        #[unroll]
        for nth in 0..AT_A_TIME {
            let split = min(first + comptime!(nth as u32), count - 1);
            let at = splits.o.stride.at(split as usize * row.batches + row.batch, row.head, row.query);
            #[unroll]
            for part in 0..parts {
                let at = at + (column_of(part, wide, dtype).0 / 2) as usize;
                values.push(load_floats_of_others(&splits.o.data[at..at + 2]));
            }
        }
        if turns {
            let highest = max(plane_max(lse), m);
            let scale = ex2((m - highest) * log2_e);
            m = highest;
            weight = select(m == HIDDEN, 0.0f32, ex2((lse - m) * log2_e));
            l = fma(l, scale, plane_sum(weight));
            #[unroll]
            for n in 0..comptime!(4 * parts) {
                sum[n] *= scale;
            }
        }
        #[unroll]
        for nth in 0..AT_A_TIME {
            // Splits past the last one have weight 0.
            let weight = plane_shuffle(weight, first % 32 + comptime!(nth as u32));
            #[unroll]
            for part in 0..parts {
                let of_split = values.index(comptime!(nth * parts + part));
                #[unroll]
                for e in 0..4usize {
                    let n = comptime!(4 * part + e);
                    sum[n] = fma(*of_split.index(e), weight, sum[n]);
                }
            }
        }
        first += comptime!(AT_A_TIME as u32);
    }
    let nothing = m == HIDDEN;
    let factor = select(nothing, 0.0f32, reciprocal(l));
    let at = to.o.stride.at(row.batch, row.head, row.query);
    #[unroll]
    for part in 0..parts {
        let (read, live) = column_of(part, wide, dtype);
        #[unroll]
        for e in 0..4usize {
            sum[comptime!(4 * part + e)] *= factor;
        }
        let n = comptime!(4 * part);
        let (a, b, c, d) = (sum[n], sum[comptime!(n + 1)], sum[comptime!(n + 2)], sum[comptime!(n + 3)]);
        if comptime!(dtype == Dtype::F32) {
            let at = at + (read / 2) as usize;
            let to = &mut to.o.data[at..at + 1];
            store_pair(to, 0usize, u32::reinterpret(a), u32::reinterpret(b), live);
            store_pair(to, 1usize, u32::reinterpret(c), u32::reinterpret(d), live);
        } else {
            let at = at + (read / 4) as usize;
            let to = &mut to.o.data[at..at + 1];
            store_pair(to, 0usize, pack(a, b, dtype), pack(c, d, dtype), live);
        }
    }
    if lane == 0 {
        let seen = select(nothing, 0.0f32, l);
        let at = to.lse.stride.at(row.batch, row.head, row.query);
        to.lse.data[at] = lse_bits_log2(m * log2_e, seen, lg2(l));
    }
}

/// The first of the four columns that this thread combines in a part of a row, and whether they exist. Outputs have rows of whole 16-byte
/// vectors. Threads past the last column read the first one's.
#[cube]
fn column_of(#[comptime] part: usize, #[comptime] wide: usize, #[comptime] dtype: Dtype) -> (u32, bool) {
    let column = UNIT_POS % 32 * 4 + comptime!((part * COLUMNS) as u32);
    let live = column < comptime!(padded(wide, dtype) as u32);
    (select(live, column, 0u32), live)
}

/// The log-sum-exp of a split of a row; [`HIDDEN`] if it sees no key.
#[cube]
fn lse_of(splits: &Outputs, row: &SplitRow, split: u32) -> f32 {
    let batch = split as usize * row.batches + row.batch;
    let at = splits.lse.stride.at(batch, row.head, row.query);
    lse_of_split(load_word_of_others(&splits.lse.data[at..at + 1]))
}

/// Columns of an output's row, which is padded to 16-byte vectors.
fn padded(wide: usize, dtype: Dtype) -> usize {
    wide.next_multiple_of(16 / dtype.size())
}
