//! Several sequences in one call, which do not see each other: packed one after the other, or one per batch with padding.
//!
//! The lengths stay on the device and are never read back. A small kernel writes a *schedule*, the list of the existing blocks
//! of rows, which the attention kernels read. Where each sequence has one block, as in decoding, the kernels read the lengths
//! and there is no schedule. Blocks of the sequences with the most columns come first, so that the last blocks to run are short
//! (Graham 1969). Positions are those of the tensors; blocks and tiles begin at the beginning of a sequence.
//! The attention kernels do not write rows that belong to no sequence: [`fill()`] sets them to 0.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use crate::mask::{Band, Span};
use crate::softmax::lse_bits;
use cubecl::prelude::*;

/// Words of the schedule before the first block. The first one is the number of blocks; the others are unused.
pub const HEADER: usize = 8;
/// Words of a block: batch, sequence, first row, then the range of the sequence's rows and the range of its columns.
pub const WORDS: usize = 8;
/// Threads of a thread block of [`schedule()`] and [`fill()`].
pub const UNITS: usize = 64;

/// Beginnings and ends of the sequences, as the caller gives them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Bounds {
    /// The first query of each sequence, counted through all batches, and the end of the last sequence: `[sequences + 1]`.
    pub cu_q: ComptimeOption<&'static Tensor<u32>>,
    /// The first key of each sequence, in the same format.
    pub cu_k: ComptimeOption<&'static Tensor<u32>>,
    /// Number of valid queries of each batch, `[batch]`; absent if all are valid.
    pub lens_q: ComptimeOption<&'static Tensor<u32>>,
    /// Number of valid keys of each batch, in the same format.
    pub lens_k: ComptimeOption<&'static Tensor<u32>>,
    /// Number of sequences.
    pub sequences: u32,
    /// Batch size.
    pub batches: u32,
    /// Queries of a batch.
    pub seq_q: u32,
    /// Keys of a batch.
    pub seq_k: u32,
}

#[cube]
impl Bounds {
    /// The bounds of one side: of the queries, or of the `keys`.
    fn side(&self, #[comptime] keys: bool) -> Side {
        if comptime!(keys) {
            Side { cu: self.cu_k, lens: self.lens_k, seq: self.seq_k }
        } else {
            Side { cu: self.cu_q, lens: self.lens_q, seq: self.seq_q }
        }
    }

    /// The queries of a sequence, or its `keys`.
    fn span(&self, sequence: u32, #[comptime] keys: bool) -> Span {
        let side = self.side(keys);
        if comptime!(side.cu.is_some()) {
            // Without any sequence the tensor has a single element.
            let next = min(sequence + 1, self.sequences);
            between(side.end(sequence), side.end(next), side.seq, self.batches)
        } else {
            let mut end = side.seq;
            #[comptime]
            if let ComptimeOption::Some(lens) = &side.lens {
                end = min(end, lens[sequence as usize * lens.stride(0)]);
            }
            Span { batch: sequence, begin: 0u32.runtime(), end }
        }
    }

    /// Rows and columns of a sequence. Rows are queries, or keys if `keys`. Columns in another batch than the rows are an empty
    /// range.
    pub(crate) fn sides(&self, sequence: u32, #[comptime] keys: bool) -> (Span, Span) {
        let rows = self.span(sequence, keys);
        let columns = self.span(sequence, comptime!(!keys));
        let end = select(columns.batch == rows.batch, columns.end, columns.begin);
        (rows, Span { batch: columns.batch, begin: columns.begin, end })
    }

    /// The queries of a sequence as one block. `band` is the band of the options, without sequences.
    pub fn block(&self, sequence: u32, band: &Band) -> Block {
        let (queries, keys) = self.sides(sequence, false);
        let band = band.of(sequence, queries.begin, queries.end, keys.begin, keys.end);
        Block { batch: queries.batch, start: queries.begin, band }
    }

    /// Whether this position of a batch, a query or a key, belongs to a sequence.
    fn covers(&self, batch: u32, position: u32, #[comptime] keys: bool) -> bool {
        let side = self.side(keys);
        let mut sequence = batch;
        if comptime!(side.cu.is_some()) {
            // Binary search for the last sequence that begins at or before the position.
            let at = batch * side.seq + position;
            let mut first = 0u32.runtime();
            let mut after = self.sequences;
            while first < after {
                let middle = (first + after) / 2;
                if side.end(middle) <= at {
                    first = middle + 1;
                } else {
                    after = middle;
                }
            }
            sequence = max(first, 1u32) - 1;
        }
        let mut covered = false.runtime();
        if sequence < self.sequences {
            let span = self.span(sequence, keys);
            covered = span.holds(batch, position);
        }
        covered
    }
}

/// The bounds of one side: of the queries, or of the keys.
#[derive(CubeType, Clone, Copy)]
struct Side {
    cu: ComptimeOption<&'static Tensor<u32>>,
    lens: ComptimeOption<&'static Tensor<u32>>,
    seq: u32,
}

#[cube]
impl Side {
    /// The first position of packed sequence `nth`, which is also the end of the sequence before it.
    fn end(&self, nth: u32) -> u32 {
        let mut end = 0u32.runtime();
        #[comptime]
        if let ComptimeOption::Some(cu) = &self.cu {
            end = cu[nth as usize * cu.stride(0)];
        }
        end
    }
}

/// The positions from `from` to `to`, both counted through batches of `seq`, that lie in the batch of `from`.
#[cube]
fn between(from: u32, to: u32, seq: u32, batches: u32) -> Span {
    let from = min(from, seq * batches);
    let batch = min(from / seq, batches - 1);
    let begin = from - batch * seq;
    let end = min(begin + (max(to, from) - from), seq);
    Span { batch, begin, end }
}

/// Writes the schedule of blocks of `tile` rows, `[HEADER + capacity · WORDS]`. Each thread block handles one sequence.
///
/// Rows are queries, or keys if `keys`. The blocks of a sequence are listed in order, or in reverse order if `last_first`. With
/// `turned`, the rows are the keys of the band.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn schedule(
    bounds: Bounds,
    list: &mut Tensor<u32>,
    tile: u32,
    capacity: u32,
    #[comptime] keys: bool,
    #[comptime] last_first: bool,
    #[comptime] turned: bool,
) {
    let mut board = Shared::<[u32]>::new_slice(comptime!(2 * UNITS));
    let sequence = CUBE_POS as u32;
    let exists = sequence < bounds.sequences;
    let (rows, columns) = bounds.sides(select(exists, sequence, 0u32), keys);
    let width = columns.end - columns.begin;

    // -- number of blocks of all sequences, and of the sequences scheduled before this one
    let mut before = 0u32.runtime();
    let mut all = 0u32.runtime();
    let mut other = UNIT_POS;
    while other < bounds.sequences {
        let (other_rows, other_columns) = bounds.sides(other, keys);
        let other_width = other_columns.end - other_columns.begin;
        let blocks = (other_rows.end - other_rows.begin).div_ceil(tile);
        let first = other_width > width || (other_width == width && other < sequence);
        before += select(first, blocks, 0u32);
        all += blocks;
        other += comptime!(UNITS as u32);
    }
    board[UNIT_POS as usize] = before;
    board[UNIT_POS as usize + UNITS] = all;
    sync_cube();
    before = 0u32.runtime();
    all = 0u32.runtime();
    for unit in 0..UNITS {
        before += board[unit];
        all += board[unit + UNITS];
    }
    if CUBE_POS == 0 && UNIT_POS == 0 {
        list[0] = min(all, capacity);
    }

    // -- blocks of this sequence
    let blocks = select(exists, (rows.end - rows.begin).div_ceil(tile), 0u32);
    let mut nth = UNIT_POS;
    while nth < blocks {
        let block = if comptime!(last_first) { blocks - 1 - nth } else { nth };
        if before + nth < capacity {
            let at = comptime!(HEADER) + (before + nth) as usize * WORDS;
            list[at] = rows.batch;
            list[at + 1] = sequence;
            list[at + 2] = rows.begin + block * tile;
            let (of_rows, of_columns) = if comptime!(turned) { (5usize, 3usize) } else { (3usize, 5usize) };
            list[at + of_rows] = rows.begin;
            list[at + of_rows + 1] = rows.end;
            list[at + of_columns] = columns.begin;
            list[at + of_columns + 1] = columns.end;
        }
        nth += comptime!(UNITS as u32);
    }
}

/// Sets the rows of `out [B, H, S, D]` that belong to no sequence to 0. Rows are queries, or keys if `keys`.
///
/// For the forward's output, `lse [B, H, S]` of these rows becomes −∞, or the sink of `sinks [H]` if there are sinks. The
/// batches of `out` may be a multiple of those of the bounds, as for splits of the keys. Each thread block handles `UNITS` rows
/// of a head.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn fill<F: Float>(
    bounds: Bounds,
    out: &mut Tensor<F>,
    lse: ComptimeOption<&mut Tensor<u32>>,
    sinks: ComptimeOption<&Tensor<f32>>,
    #[comptime] keys: bool,
    #[define(F)] _type: ElemType,
) {
    let mut board = Shared::<[u32]>::new_slice(UNITS);
    let blocks = out.shape(2).div_ceil(UNITS);
    let (head, first) = (CUBE_POS / blocks, CUBE_POS % blocks * UNITS);
    let (batch, head) = (head / out.shape(1), head % out.shape(1));
    if batch >= out.shape(0) {
        terminate!();
    }
    let row = first + UNIT_POS as usize;
    let lost = row < out.shape(2) && !bounds.covers(batch as u32 % bounds.batches, row as u32, keys);
    board[UNIT_POS as usize] = u32::cast_from(lost);
    sync_cube();
    let at = batch * out.stride(0) + head * out.stride(1);
    let (rows, row_step, column_step) = (first, out.stride(2), out.stride(3));
    let columns = out.shape(3);
    for nth in 0..UNITS {
        if board[nth] == 1 {
            let mut column = UNIT_POS as usize;
            while column < columns {
                out[at + (rows + nth) * row_step + column * column_step] = F::from_int(0);
                column += UNITS;
            }
        }
    }
    if lost {
        let mut bits = lse_bits(0.0f32, 0.0f32.runtime());
        #[comptime]
        if let ComptimeOption::Some(sinks) = &sinks {
            bits = u32::reinterpret(sinks[head * sinks.stride(0)]);
        }
        #[comptime]
        if let ComptimeOption::Some(lse) = lse {
            let to = batch * lse.stride(0) + head * lse.stride(1) + row * lse.stride(2);
            lse[to] = bits;
        }
    }
}

/// A block of a schedule.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Block {
    /// Batch.
    pub batch: u32,
    /// First row.
    pub start: u32,
    /// The band of the block's sequence.
    pub band: Band,
}

/// The `nth` block of a schedule. `band` is the band of the options, without sequences.
#[cube]
pub fn block_of(list: &Tensor<u32>, band: &Band, nth: u32) -> Block {
    let at = comptime!(HEADER) + nth as usize * WORDS;
    let band = band.of(list[at + 1], list[at + 3], list[at + 4], list[at + 5], list[at + 6]);
    Block { batch: list[at], start: list[at + 2], band }
}
