//! Tiles in shared memory: copied there row by row, read as operands of products.
//!
//! A tile lies in *panels* of 64 columns, 128 bytes a line, in which vectors of 16 bytes are exchanged by the line's number
//! modulo 8: eight rows of one column of vectors, which `ldmatrix` reads at a time, are in different banks then.

use super::ops::{copy_vector, copy_word};
use super::{MmaBlueprint, Products};
use crate::mask::Band;
use crate::tensor_core::LINE;
use crate::tensor_core::operands::RowsIn;
use cubecl::prelude::*;

/// Threads that copy a line of a panel: a vector of 16 bytes each.
const OF_LINE: u32 = 8;

/// Where a vector of a line lies from a panel's start on.
#[cube]
pub fn place(line: u32, vector: u32) -> u32 {
    line * comptime!(LINE as u32) + (vector ^ (line % 8)) * 16
}

/// Where a thread's part of a read of 16 rows and 16 columns lies from a tile's start on, as the first operand of a product and,
/// transposed, as the second: matrices of 8 × 8 follow one another down, then to the right.
#[cube]
pub fn lane_of_rows(lane: u32) -> u32 {
    place(lane % 16, lane / 16)
}

/// The same as the second operand, whose columns are rows here: matrices follow one another to the right, then down.
#[cube]
pub fn lane_of_columns(lane: u32) -> u32 {
    place(lane / 16 * 8 + lane % 8, lane / 8 % 2)
}

/// Where a thread's element of 32 bits lies in a tile's first even line and first eight columns, as the second operand of a product
/// whose rows are even lines first: the other ones are a line further on, in the vector that differs in its last bit.
#[cube]
pub fn lane_of_even_rows(lane: u32) -> u32 {
    place(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4
}

/// Where a thread's part of the second operand lies whose rows are summed over.
#[cube]
pub fn lane_of_sums(lane: u32, #[comptime] products: Products) -> u32 {
    if comptime!(matches!(products, Products::F16 | Products::BF16)) {
        lane_of_rows(lane)
    } else {
        lane_of_even_rows(lane)
    }
}

/// Which end of the band rows must lie before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Along {
    /// Rows are what the band calls queries.
    Queries,
    /// What it calls keys.
    Keys,
}

/// Size of a tile that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lines {
    /// What its rows are.
    pub along: Along,
    /// How many there are.
    pub count: usize,
    /// Columns.
    pub wide: usize,
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
    /// Where they come to in shared memory.
    pub to: u32,
}

/// Asks for a copy of rows of a head; zeros past the last row and column. By all threads.
#[cube]
pub fn copy_rows<E: Float, N: Size>(
    from: &RowsIn<E, N>,
    rows: &CopiedRows,
    band: &Band,
    #[comptime] size_of: Lines,
    #[comptime] blueprint: MmaBlueprint,
) {
    let (lines, wide) = comptime!((size_of.count, size_of.wide));
    let (tile, panel_columns, size) =
        comptime!((blueprint.tile, blueprint.scores.panel(), blueprint.scores.dtype.size()));
    let (line, vector) = (UNIT_POS / OF_LINE, UNIT_POS % OF_LINE);
    let at = rows.to + place(line, vector);
    let of_pass = comptime!(tile.units() / OF_LINE as usize);
    #[unroll]
    for pass in 0..comptime!(lines / of_pass) {
        let row = rows.first + line + comptime!((pass * of_pass) as u32);
        let (is_row, within) = if comptime!(size_of.along == Along::Keys) {
            (band.is_key(row), band.key_within(row, 1u32))
        } else {
            (band.is_query(row), band.query_within(row))
        };
        let start = from.stride.at(rows.batch, rows.head, within) + vector as usize;
        let row = &from.data[start..start + 1];
        #[unroll]
        for panel in 0..comptime!(wide.div_ceil(panel_columns)) {
            // Bytes of the row from this panel on.
            let left = comptime!((size * (wide - panel * panel_columns)) as u32);
            let bytes = if comptime!(left >= LINE as u32) {
                16u32.runtime()
            } else {
                min(max(left.runtime(), vector * 16) - vector * 16, 16u32)
            };
            let offset = comptime!((panel * lines + pass * of_pass) * LINE);
            let bytes = select(is_row, bytes, 0u32);
            copy_vector(row, comptime!(panel * OF_LINE as usize), at, offset, bytes);
        }
    }
}

/// Asks for a copy of `count` words from element `first` on to `to`. By all threads.
#[cube]
pub fn copy_words(from: &[u32], first: usize, to: u32, #[comptime] count: usize) {
    if UNIT_POS < comptime!(count as u32) {
        let start = first + UNIT_POS as usize;
        copy_word(&from[start..start + 1], to + UNIT_POS * 4, 4u32.runtime());
    }
}
