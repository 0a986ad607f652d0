//! Tiles in shared memory: copied there row by row, read as operands of products.
//!
//! A tile is stored in *panels* with lines of 128 bytes, which are 64 columns of 16 bits. The index of each 16-byte vector of a line is
//! XORed with the line's number modulo 8. `ldmatrix` reads one vector of eight lines at a time, and these are then in different banks.

use super::ops::{copy_vector, copy_word};
use super::{MmaBlueprint, Products};
use crate::e4m3::KvStorage;
use crate::extras::Extras;
use crate::mask::Band;
use crate::tensor_core::{BlockRows, Blueprint, LINE, RowOf, RowsIn, SCALED_KEYS, Sources, WorkTile, scale_at};
use cubecl::prelude::*;

/// Threads that copy a line of a panel, a vector of 16 bytes each.
const OF_LINE: u32 = 8;

/// Offset of a line's vector from the start of the panel, in bytes.
#[cube]
pub fn place(line: u32, vector: u32) -> u32 {
    line * comptime!(LINE as u32) + (vector ^ (line % 8)) * 16
}

/// Offset of the line that a thread addresses when its warp reads 16 rows and 16 columns, from the tile's start, in bytes. The order of the
/// 8 × 8 matrices is down, then right: that of the first operand of a product and, with a transposing read, of the second one.
#[cube]
pub fn lane_of_rows(lane: u32) -> u32 {
    place(lane % 16, lane / 16)
}

/// Like [`lane_of_rows()`], for a second operand whose columns are rows of the tile. The order of the matrices is right, then down.
#[cube]
pub fn lane_of_columns(lane: u32) -> u32 {
    place(lane / 16 * 8 + lane % 8, lane / 8 % 2)
}

/// Offset of the 32-bit element that a thread reads in the first four even lines and eight columns of a tile, in bytes. The elements belong
/// to the second operand of a product whose rows are the even lines, then the odd ones. The thread's element of the odd lines is one line
/// further on, in the vector whose index differs in the last bit.
#[cube]
pub fn lane_of_even_rows(lane: u32) -> u32 {
    place(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4
}

/// Offset at which a thread reads a second operand whose rows are summed over.
#[cube]
pub fn lane_of_sums(lane: u32, #[comptime] products: Products) -> u32 {
    if comptime!(products.depth() == 16) { lane_of_rows(lane) } else { lane_of_even_rows(lane) }
}

/// Rows of a head that are copied.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct CopiedRows {
    /// Batch.
    pub batch: usize,
    /// Head.
    pub head: usize,
    /// The first row.
    pub first: u32,
    /// Their destination, an address in shared memory.
    pub to: u32,
}

/// Starts the copy of `wide` columns of rows of a head. They are a warpgroup's rows or, if `keys`, the rows of a tile; the band ends them
/// as queries or as keys. Elements past the last row or column become zeros. All threads must call this function.
#[cube]
pub fn copy_rows<E: Float, N: Size>(
    from: &RowsIn<E, N>,
    rows: &CopiedRows,
    band: &Band,
    #[comptime] keys: bool,
    #[comptime] wide: usize,
    #[comptime] blueprint: MmaBlueprint,
) {
    let count = comptime!(if keys { blueprint.tile.tile_k } else { blueprint.tile.warpgroup_rows() });
    let mut lines = Sequence::<Line>::new();
    #[unroll]
    for pass in 0..comptime!(passes(count, &blueprint)) {
        let row = rows.first + own_line(pass, blueprint);
        let (exists, row) = if comptime!(keys) {
            (band.is_key(row), band.key_within(row, 1u32))
        } else {
            (band.is_query(row), band.query_within(row))
        };
        lines.push(Line { batch: rows.batch, head: rows.head, row, exists });
    }
    copy_lines(from, &lines, rows.to, comptime!(of_elements(wide, &blueprint)), count, blueprint);
}

/// Bytes of so many elements of the inputs.
fn of_elements(wide: usize, blueprint: &MmaBlueprint) -> usize {
    wide * blueprint.scores.dtype.size()
}

/// Shared addresses of a tile of K and of V.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct KeyTiles {
    /// The tile of K.
    pub k: u32,
    /// The tile of V.
    pub v: u32,
    /// Scales of K, then of V, if they have any.
    pub scales: u32,
}

#[cube]
impl KeyTiles {
    /// The tiles of a stage, if these are those of the first one.
    pub fn stage(&self, stage: u32, #[comptime] scores: Blueprint) -> KeyTiles {
        KeyTiles {
            k: self.k + stage * comptime!(scores.k_bytes() as u32),
            v: self.v + stage * comptime!(scores.v_bytes() as u32),
            scales: self.scales + stage * comptime!(scores.scales_bytes() as u32),
        }
    }
}

/// The page, as the table has it, of key `first + 16 n` of a tile in e4m3. The 16 keys from there on are in this page. `n` is the number of the
/// thread modulo the number of 16 keys in a tile.
#[cube]
pub fn pages_of_tile(extras: &Extras, work: &WorkTile, first: u32, #[comptime] blueprint: MmaBlueprint) -> u32 {
    if comptime!(blueprint.scores.storage == KvStorage::E4m3) {
        let scaled = comptime!(SCALED_KEYS as u32);
        let nth = UNIT_POS % comptime!(blueprint.tile.tile_k as u32 / scaled);
        extras.pages.unwrap().page(work.batch as usize, work.band.key_within(first + nth * scaled, 1u32))
    } else {
        0u32.runtime()
    }
}

/// Starts the copies of a tile of K and of V, from key `first` on, to these shared addresses. `pages` are those of [`pages_of_tile()`].
///
/// Instructions limit attention over e4m3, so that its copies should not wait for pages. Elements of 16 and 32 bits leave time for this: each
/// thread looks up the keys that it copies, all before the first copy, which the compiler moves no read past.
#[cube]
pub fn copy_keys<E: Float, N: Size>(
    sources: &Sources<E, N>,
    extras: &Extras,
    work: &WorkTile,
    first: u32,
    pages: u32,
    to: KeyTiles,
    #[comptime] blueprint: MmaBlueprint,
) {
    if comptime!(blueprint.scores.storage == KvStorage::E4m3) {
        copy_e4m3(sources, extras, work, first, extras.pages.unwrap().existing(pages), to, blueprint);
    } else {
        let (batch, head, band) = (work.batch as usize, work.head_kv as usize, work.band);
        let (tile_k, k_row, v_row) = comptime!((blueprint.tile.tile_k, k_row(&blueprint), v_row(&blueprint)));
        let mut lines = Sequence::<Line>::new();
        #[unroll]
        for pass in 0..comptime!(passes(tile_k, &blueprint)) {
            let key = first + own_line(pass, blueprint);
            let place = extras.place(batch, band.key_within(key, 1u32));
            lines.push(Line { batch: place.batch, head, row: place.row, exists: band.is_key(key) });
        }
        copy_lines(&sources.k, &lines, to.k, k_row, tile_k, blueprint);
        copy_lines(&sources.v, &lines, to.v, v_row, tile_k, blueprint);
    }
}

/// [`copy_keys()`] in e4m3, from pages that exist.
#[cube]
fn copy_e4m3<E: Float, N: Size>(
    sources: &Sources<E, N>,
    extras: &Extras,
    work: &WorkTile,
    first: u32,
    pages: u32,
    to: KeyTiles,
    #[comptime] blueprint: MmaBlueprint,
) {
    let (head, band) = (work.head_kv as usize, work.band);
    let (tile_k, k_row, v_row) = comptime!((blueprint.tile.tile_k, k_row(&blueprint), v_row(&blueprint)));
    #[unroll]
    for pass in 0..comptime!(passes(tile_k, &blueprint)) {
        let line = own_line(pass, blueprint);
        let page = plane_shuffle(pages, line / comptime!(SCALED_KEYS as u32));
        let place = extras.pages.unwrap().place_in(page, band.key_within(first + line, 1u32));
        let line = Line { batch: place.batch, head, row: place.row, exists: band.is_key(first + line) };
        copy_line(&sources.k, line, pass, to.k, k_row, tile_k, blueprint);
        copy_line(&sources.v, line, pass, to.v, v_row, tile_k, blueprint);
    }
    let of_v = to.scales + comptime!(blueprint.scores.scales_bytes() as u32 / 2);
    let exists = band.is_key(first + UNIT_POS % 32 * comptime!(SCALED_KEYS as u32));
    let line = Line { batch: pages as usize, head, row: 0u32.runtime(), exists };
    copy_scale(&sources.k, extras, line, 0u32, to.scales, k_row, blueprint);
    copy_scale(&sources.v, extras, line, 1u32, of_v, v_row, blueprint);
}

/// Bytes of a row of K.
fn k_row(blueprint: &MmaBlueprint) -> usize {
    blueprint.scores.head_dim * blueprint.scores.kv_size()
}

/// Bytes of a row of V.
fn v_row(blueprint: &MmaBlueprint) -> usize {
    blueprint.scores.head_dim_v * blueprint.scores.kv_size()
}

/// Starts the copies of the scales of a tile to the shared address `to`, each by the thread of warp `by` that has its page.
#[cube]
fn copy_scale<E: Float, N: Size>(
    from: &RowsIn<E, N>,
    extras: &Extras,
    of: Line,
    by: u32,
    to: u32,
    #[comptime] row: usize,
    #[comptime] blueprint: MmaBlueprint,
) {
    let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
    if warp == by && lane < comptime!((blueprint.tile.tile_k / SCALED_KEYS) as u32) {
        let at = from.stride.at(of.batch, of.head, of.row) + scale_at(extras, row);
        copy_word(&from.data[at..at + 1], to + lane * 4, select(of.exists, 4u32, 0u32));
    }
}

/// [`copy_rows()`] for the rows of a warpgroup in a block of queries, from its row `rows.first` on, whose query heads may be packed.
#[cube]
pub fn copy_block_rows<E: Float, N: Size>(
    from: &RowsIn<E, N>,
    rows: &CopiedRows,
    block: BlockRows,
    band: &Band,
    #[comptime] wide: usize,
    #[comptime] blueprint: MmaBlueprint,
) {
    let count = comptime!(blueprint.tile.warpgroup_rows());
    let mut lines = Sequence::<Line>::new();
    #[unroll]
    for pass in 0..comptime!(passes(count, &blueprint)) {
        let RowOf { query, head } = block.at(rows.first + own_line(pass, blueprint));
        let row = band.query_within(query);
        lines.push(Line { batch: rows.batch, head: head as usize, row, exists: band.is_query(query) });
    }
    copy_lines(from, &lines, rows.to, comptime!(of_elements(wide, &blueprint)), count, blueprint);
}

/// A row that a thread copies, with others, to a line of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Line {
    /// Batch, or page.
    batch: usize,
    head: usize,
    /// A row that exists.
    row: u32,
    /// Whether the line has this row. Else it becomes zeros.
    exists: bool,
}

/// Number of lines that a thread copies of so many.
fn passes(lines: usize, blueprint: &MmaBlueprint) -> usize {
    lines / (blueprint.tile.units() / OF_LINE as usize)
}

/// The line that this thread copies in a pass.
#[cube]
fn own_line(#[comptime] pass: usize, #[comptime] blueprint: MmaBlueprint) -> u32 {
    UNIT_POS / OF_LINE + comptime!((pass * blueprint.tile.units() / OF_LINE as usize) as u32)
}

/// Starts the copies of the first `wide` bytes of this thread's lines, of `count` in all, to the shared address `to`.
#[cube]
fn copy_lines<E: Float, N: Size>(
    from: &RowsIn<E, N>,
    lines: &Sequence<Line>,
    to: u32,
    #[comptime] wide: usize,
    #[comptime] count: usize,
    #[comptime] blueprint: MmaBlueprint,
) {
    #[unroll]
    for pass in 0..comptime!(passes(count, &blueprint)) {
        copy_line(from, *lines.index(pass), pass, to, wide, count, blueprint);
    }
}

/// [`copy_lines()`] for the line of a pass.
#[cube]
fn copy_line<E: Float, N: Size>(
    from: &RowsIn<E, N>,
    line: Line,
    #[comptime] pass: usize,
    to: u32,
    #[comptime] wide: usize,
    #[comptime] count: usize,
    #[comptime] blueprint: MmaBlueprint,
) {
    let vector = UNIT_POS % OF_LINE;
    let at = to + place(UNIT_POS / OF_LINE, vector);
    let of_pass = comptime!(blueprint.tile.units() / OF_LINE as usize);
    let start = from.stride.at(line.batch, line.head, line.row) + vector as usize;
    let row = &from.data[start..start + 1];
    #[unroll]
    for panel in 0..comptime!(wide.div_ceil(LINE)) {
        // Bytes of the row from the start of this panel on.
        let left = comptime!((wide - panel * LINE) as u32);
        let bytes = if comptime!(left >= LINE as u32) {
            16u32.runtime()
        } else {
            min(max(left.runtime(), vector * 16) - vector * 16, 16u32)
        };
        let offset = comptime!((panel * count + pass * of_pass) * LINE);
        let bytes = select(line.exists, bytes, 0u32);
        copy_vector(row, comptime!(panel * OF_LINE as usize), at, offset, bytes);
    }
}

/// Starts the copy of `count` words, from element `first` of `from` on, to the shared address `to`. All threads must call this function.
#[cube]
pub fn copy_words(from: &[u32], first: usize, to: u32, #[comptime] count: usize) {
    if UNIT_POS < comptime!(count as u32) {
        let start = first + UNIT_POS as usize;
        copy_word(&from[start..start + 1], to + UNIT_POS * 4, 4u32.runtime());
    }
}
