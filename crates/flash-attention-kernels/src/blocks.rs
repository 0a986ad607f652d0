//! Block-sparse attention: which blocks of queries and keys see each other, and which of them need masking.
//!
//! A block mask has a state for each block of `block_q × block_k` pairs. [`EMPTY`]: no pair is visible. [`PARTIAL`]: mask and
//! `mask_mod` decide for each pair. [`FULL`]: every pair is visible.
//!
//! For each block of rows, a small kernel converts the states into a *list* of visited tiles of the size that the attention
//! kernel uses. The run time is then proportional to the number of visited tiles. The lists also take causality, windows and
//! lengths into account. With several sequences, each has its own lists, and blocks count from the start of the sequence, as
//! tiles do. The states of packed sequences are numbered by sequence instead of batch. (FlexAttention, arXiv:2412.05496, section
//! 4.2; block-sparse FlashAttention, arXiv:2205.14135, section 3.3.)

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::extras::Extras;
use crate::mask::{Band, Blocks};
use crate::mods::{Mods, Place};
use crate::sequences::{Block, Bounds};
use cubecl::prelude::*;

/// State of a block without a visible pair.
pub const EMPTY: u32 = 0;
/// State of a block whose pairs are decided by mask and `mask_mod`.
pub const PARTIAL: u32 = 1;
/// State of a block whose pairs are all visible; any greater number means the same.
pub const FULL: u32 = 2;

/// Block sizes are multiples of this, and tile sizes divide it.
pub const BLOCK: usize = 128;

/// Threads of a thread block of [`list()`] and of [`order()`].
pub const UNITS: usize = 64;
/// Words of a list before its entries: the number of entries, then the number of the block at this place in [`order()`].
pub const HEADER: usize = 2;
/// Threads of a thread block of [`classify()`].
pub const CLASSIFIERS: usize = 256;

/// Flag of an entry: the tile must be masked by the band.
const EDGE: u32 = 1;
/// Flag of an entry: the tile must be masked by mask and `mask_mod`.
const MASKED: u32 = 2;
/// Number of flag bits in an entry; the other bits are the first column of the tile, which is below 2³⁰.
const FLAGS: u32 = 2;

/// A visited tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Visit {
    /// First column of the tile.
    pub start: u32,
    /// Whether the band hides nothing in the tile.
    pub fully_visible: bool,
    /// Whether mask and `mask_mod` must be applied.
    pub masked: bool,
}

/// Size of the visited tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileSize {
    /// Rows of a block.
    pub rows: u32,
    /// Columns of a tile.
    pub columns: u32,
    /// Whether rows are keys instead of queries.
    pub keys: bool,
}

/// The tiles of columns that a block of rows visits, in order.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Visits {
    /// Number of visited tiles.
    pub count: u32,
    /// The lists, if there is a block mask.
    lists: ComptimeOption<&'static Tensor<u32>>,
    /// Position of the block's list; unused without lists.
    at: usize,
    /// First column of the first visited tile; unused with lists.
    first: u32,
    /// First row of the block.
    row: u32,
    /// The band of queries and keys, even if rows are keys.
    band: Band,
    #[cube(comptime)]
    size: TileSize,
}

/// The tiles visited by the block of rows that contains `row`, in this batch and query head. `band` is the band of queries and
/// keys, even if rows are keys. A packed sequence may have more blocks than lists: rows past the last list visit nothing.
#[cube]
pub fn visits(extras: &Extras, band: &Band, batch: usize, head: usize, row: u32, #[comptime] size: TileSize) -> Visits {
    let (lists, band) = (extras.lists, *band);
    if comptime!(extras.is_sparse()) {
        let of = extras.lists.unwrap();
        let first = if comptime!(size.keys) { band.first_key() } else { band.first_query() };
        let block = ((row - first) / size.rows) as usize;
        let mut at = band.number(batch as u32) as usize * of.stride(0) + head * of.stride(1);
        let mut exists = true.runtime();
        if comptime!(band.varlen) {
            exists = block < of.shape(2);
            at += min(block, of.shape(2) - 1) * of.stride(2);
        } else {
            at += block * of.stride(2);
        }
        let count = select(exists, of[at], 0u32);
        Visits { count, lists, at, first: 0u32.runtime(), row, band, size }
    } else {
        let seen = seen(&band, row, size);
        let first = seen.origin + seen.start * size.columns;
        Visits { count: seen.count(), lists, at: 0usize.runtime(), first, row, band, size }
    }
}

/// The tiles of columns in which the band lets a block of rows see anything.
#[cube]
fn seen(band: &Band, row: u32, #[comptime] size: TileSize) -> Blocks {
    if comptime!(size.keys) {
        band.q_blocks(row, size.columns, size.rows)
    } else {
        band.k_blocks(row, size.rows, size.columns)
    }
}

/// Decodes an entry of a list.
#[cube]
pub fn visit_of(entry: u32) -> Visit {
    Visit { start: entry >> FLAGS, fully_visible: entry & EDGE == 0, masked: entry & MASKED != 0 }
}

/// The number of the `nth` block in [`order()`], for this batch and query head.
#[cube]
pub fn block_in_order(extras: &Extras, batch: usize, head: usize, nth: u32) -> u32 {
    let lists = extras.lists.unwrap();
    lists[batch * lists.stride(0) + head * lists.stride(1) + nth as usize * lists.stride(2) + 1]
}

/// The entry of the lists at a position. There must be a block mask.
#[cube]
pub fn entry_at(extras: &Extras, place: u32) -> u32 {
    extras.lists.unwrap()[place as usize]
}

#[cube]
impl Visits {
    /// Position of the last entry. For an empty list, the position of a readable dummy entry.
    pub fn last(&self) -> u32 {
        self.at as u32 + comptime!(HEADER as u32 - 1) + max(self.count, 1u32)
    }

    /// Index of the visit of the tile that begins at `column`; `count` if the tile is not visited.
    pub fn find(&self, column: u32) -> u32 {
        let lists = self.lists.unwrap();
        let mut first = 0u32.runtime();
        let mut after = self.count;
        while first < after {
            let middle = (first + after) / 2;
            if lists[self.at + HEADER + middle as usize] >> FLAGS < column {
                first = middle + 1;
            } else {
                after = middle;
            }
        }
        let mut found = false.runtime();
        if first < self.count {
            found = lists[self.at + HEADER + first as usize] >> FLAGS == column;
        }
        select(found, first, self.count)
    }

    /// The `nth` visited tile. Past the last one, the result is an arbitrary tile.
    pub fn tile(&self, nth: u32) -> Visit {
        if comptime!(self.lists.is_some()) {
            let nth = min(nth, max(self.count, 1u32) - 1);
            let entry = self.lists.unwrap()[(self.at as u32 + comptime!(HEADER as u32) + nth) as usize];
            visit_of(entry)
        } else {
            let start = self.first + nth * self.size.columns;
            let fully_visible = is_fully_visible(&self.band, self.row, start, self.size);
            Visit { start, fully_visible, masked: true.runtime() }
        }
    }
}

/// Columns of a list's tile in kernels that process columns one by one.
pub const RUN: usize = 32;

/// A range of consecutive columns that a block of rows visits.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Run {
    /// First column.
    pub from: u32,
    /// One past the last column.
    pub to: u32,
    /// Whether mask and `mask_mod` must be applied.
    pub masked: bool,
}

/// The runs of columns that a block of rows visits. With a block mask, one run for each listed tile of [`RUN`] columns;
/// without, a single run of all columns that the band lets the block see. `band` is the band of rows and columns.
#[cube]
pub fn runs(extras: &Extras, band: &Band, batch: usize, head: usize, row: u32, #[comptime] rows: u32) -> Visits {
    let size = comptime!(TileSize { rows, columns: RUN as u32, keys: false });
    if comptime!(extras.is_sparse()) {
        visits(extras, band, batch, head, row, size)
    } else {
        let (lists, band) = (extras.lists, *band);
        Visits { count: 1u32.runtime(), lists, at: 0usize.runtime(), first: 0u32.runtime(), row, band, size }
    }
}

#[cube]
impl Visits {
    /// The `nth` run.
    pub fn run(&self, nth: u32) -> Run {
        if comptime!(self.lists.is_some()) {
            let visit = self.tile(nth);
            Run { from: visit.start, to: min(visit.start + RUN as u32, self.band.after_keys()), masked: visit.masked }
        } else {
            let seen = self.band.k_blocks(self.row, self.size.rows, 1u32);
            Run { from: seen.origin + seen.start, to: seen.origin + seen.end, masked: true.runtime() }
        }
    }
}

/// Whether the band hides nothing in a tile.
#[cube]
fn is_fully_visible(band: &Band, row: u32, column: u32, #[comptime] size: TileSize) -> bool {
    if comptime!(size.keys) {
        band.fully_visible(column, row, size.columns, size.rows)
    } else {
        band.fully_visible(row, column, size.rows, size.columns)
    }
}

/// The queries of a sequence as one block. Without `varlen` each batch is one sequence.
#[cube]
fn sequence_of(bounds: &Bounds, band: &Band, number: u32, #[comptime] varlen: bool) -> Block {
    if comptime!(varlen) {
        bounds.block(number, band)
    } else {
        Block { batch: number, start: 0u32.runtime(), band: *band }
    }
}

/// Size of the blocks of a block mask.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct BlockSize {
    /// Queries of a block.
    pub queries: u32,
    /// Keys of a block.
    pub keys: u32,
}

/// States of a block mask.
#[derive(CubeType, CubeLaunch)]
pub struct BlockStates {
    /// `[B | 1, H | 1, nq, nk]`, with packed sequences `[sequences | 1, H | 1, nq, nk]`.
    pub tensor: &'static Tensor<u32>,
    /// Size of a block.
    pub size: BlockSize,
}

#[cube]
impl BlockStates {
    /// The state of the block that contains a pair. Positions count from the start of the sequence. Rows are queries, or keys if
    /// `keys`.
    pub fn at(&self, sequence: usize, head: usize, row: u32, column: u32, #[comptime] keys: bool) -> u32 {
        let (i, j) = if comptime!(keys) { (column, row) } else { (row, column) };
        let (of_q, of_k) = ((i / self.size.queries) as usize, (j / self.size.keys) as usize);
        self.tensor[sequence * self.tensor.stride(0)
            + head * self.tensor.stride(1)
            + of_q * self.tensor.stride(2)
            + of_k * self.tensor.stride(3)]
    }
}

/// Writes the lists of visited tiles of this size: `out [sequences | 1, H | 1, blocks, HEADER + tiles]`. The list of a block of
/// rows holds the number of visited tiles and one entry for each. Each thread block writes one list. `bounds` gives the
/// sequences if `varlen`; else each batch is one. Tiles past the last block of the states are not visited.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn list(
    states: BlockStates,
    out: &mut Tensor<u32>,
    bounds: Bounds,
    band: Band,
    #[comptime] size: TileSize,
    #[comptime] varlen: bool,
) {
    let mut board = Shared::<[u32]>::new_slice(UNITS);
    let (blocks, heads) = (out.shape(2), out.shape(1));
    let (block, of_head) = (CUBE_POS % blocks, CUBE_POS / blocks);
    let (head, sequence) = (of_head % heads, of_head / heads);
    if sequence >= out.shape(0) {
        terminate!();
    }
    let band = sequence_of(&bounds, &band, sequence as u32, varlen).band;
    // Row and columns of the states, which count from the start of the sequence.
    let row_in_states = block as u32 * size.rows;
    let row = row_in_states + if comptime!(size.keys) { band.first_key() } else { band.first_query() };
    let at = sequence * out.stride(0) + head * out.stride(1) + block * out.stride(2);
    let seen = seen(&band, row, size);
    // Rows past the end of a sequence see nothing.
    let is_row = if comptime!(size.keys) { band.is_key(row) } else { band.is_query(row) };
    let last = min(seen.end, (out.shape(3) - HEADER) as u32);
    let end = select(is_row, max(last, seen.start), seen.start);

    // -- each thread counts the visited tiles of a range, and sums the counts of the threads before it
    let of_unit = (end - seen.start).div_ceil(comptime!(UNITS as u32));
    let first = min(seen.start + UNIT_POS * of_unit, end);
    let last = min(first + of_unit, end);
    let mut count = 0u32.runtime();
    for tile in first..last {
        count += u32::cast_from(states.at(sequence, head, row_in_states, tile * size.columns, size.keys) != EMPTY);
    }
    board[UNIT_POS as usize] = count;
    sync_cube();
    let mut before = 0u32.runtime();
    let mut all = 0u32.runtime();
    for unit in 0..UNITS {
        before += select((unit as u32) < UNIT_POS, board[unit], 0u32);
        all += board[unit];
    }

    // -- the entries of the thread's tiles
    for tile in first..last {
        let state = states.at(sequence, head, row_in_states, tile * size.columns, size.keys);
        if state != EMPTY {
            let column = seen.origin + tile * size.columns;
            let fully_visible = is_fully_visible(&band, row, column, size);
            let flags = select(fully_visible, 0u32, EDGE) | select(state == PARTIAL, MASKED, 0u32);
            out[at + HEADER + before as usize] = column << FLAGS | flags;
            before += 1;
        }
    }
    if UNIT_POS == 0 {
        out[at] = all;
        // An empty list has a readable dummy entry.
        if all == 0 {
            out[at + HEADER] = EDGE;
        }
    }
}

/// Orders the blocks of each head by the number of visited tiles, highest first; ties keep the order of blocks. The blocks that
/// run last are then short, and no multiprocessor idles for long. The number of the `nth` block in this order is written into
/// the `nth` list, which [`list()`] has written before. Each thread block handles [`UNITS`] blocks of a head. (Longest
/// processing time first: Graham, "Bounds on multiprocessing timing anomalies", 1969.)
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn order(lists: &mut Tensor<u32>) {
    let mut board = Shared::<[u32]>::new_slice(UNITS);
    let (blocks, heads) = (lists.shape(2), lists.shape(1));
    let cubes = blocks.div_ceil(UNITS);
    let (of_blocks, of_head) = (CUBE_POS % cubes, CUBE_POS / cubes);
    let (head, batch) = (of_head % heads, of_head / heads);
    if batch >= lists.shape(0) {
        terminate!();
    }
    let at = batch * lists.stride(0) + head * lists.stride(1);
    let block = of_blocks * UNITS + UNIT_POS as usize;
    let mut count = 0u32.runtime();
    if block < blocks {
        count = lists[at + block * lists.stride(2)];
    }
    // Number of blocks that come before this one.
    let mut before = 0u32.runtime();
    let mut first = 0usize.runtime();
    while first < blocks {
        let mine = first + UNIT_POS as usize;
        if mine < blocks {
            board[UNIT_POS as usize] = lists[at + mine * lists.stride(2)];
        }
        sync_cube();
        for nth in 0..min(blocks - first, UNITS) {
            let other = board[nth];
            before += u32::cast_from(other > count || other == count && first + nth < block);
        }
        sync_cube();
        first += UNITS;
    }
    if block < blocks {
        let to = at + before as usize * lists.stride(2) + 1;
        lists[to] = block as u32;
    }
}

/// Computes the states of a block mask from mask and `mask_mod`: `out [B | 1, H | 1, nq, nk]`, or `[sequences, H | 1, nq, nk]` of
/// the packed sequences of `bounds` if `varlen`. Causality and windows are ignored. Each thread block computes one state.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn classify<M: Numeric>(
    mask: ComptimeOption<&Tensor<M>>,
    out: &mut Tensor<u32>,
    mods: Mods,
    bounds: Bounds,
    band: Band,
    size: BlockSize,
    #[comptime] varlen: bool,
    #[define(M)] _type: ElemType,
) {
    let mut board = Shared::<[u32]>::new_slice(comptime!(2 * CLASSIFIERS));
    let (across, down) = (out.shape(3), out.shape(2));
    let (of_k, rest) = (CUBE_POS % across, CUBE_POS / across);
    let (of_q, rest) = (rest % down, rest / down);
    let (head, sequence) = (rest % out.shape(1), rest / out.shape(1));
    if sequence >= out.shape(0) {
        terminate!();
    }
    let of = sequence_of(&bounds, &band, sequence as u32, varlen);
    let (batch, band) = (of.batch as usize, of.band);
    let first_i = band.first_query() + of_q as u32 * size.queries;
    let first_j = band.first_key() + of_k as u32 * size.keys;
    let after_i = min(first_i + size.queries, band.after_queries());
    let after_j = min(first_j + size.keys, band.after_keys());
    let mut any = false.runtime();
    let mut all = true.runtime();
    // Rows and columns are counted separately: their product may exceed 32 bits.
    let mut i = first_i + UNIT_POS / comptime!(BLOCK as u32);
    while i < after_i {
        let mut j = first_j + UNIT_POS % comptime!(BLOCK as u32);
        while j < after_j {
            let place = Place::new(batch as u32, head as u32, &band, i, j, false);
            let mut sees = mods.sees(&place, &band);
            #[comptime]
            if let ComptimeOption::Some(mask) = &mask {
                let at = batch * mask.stride(0) + head * mask.stride(1);
                let hides = mask[at + i as usize * mask.stride(2) + j as usize * mask.stride(3)] != M::from_int(0);
                sees = sees && !hides;
            }
            any = any || sees;
            all = all && sees;
            j += comptime!(BLOCK as u32);
        }
        i += comptime!((CLASSIFIERS / BLOCK) as u32);
    }
    board[UNIT_POS as usize] = u32::cast_from(any);
    board[UNIT_POS as usize + CLASSIFIERS] = u32::cast_from(all);
    sync_cube();
    if UNIT_POS == 0 {
        let mut any = 0u32.runtime();
        let mut all = 1u32.runtime();
        for unit in 0..CLASSIFIERS {
            any |= board[unit];
            all &= board[unit + CLASSIFIERS];
        }
        let at = sequence * out.stride(0) + head * out.stride(1) + of_q * out.stride(2) + of_k * out.stride(3);
        out[at] = select(any == 0, EMPTY, select(all == 1, FULL, PARTIAL));
    }
}
