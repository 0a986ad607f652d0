//! The user's functions and their tensors, as a kernel argument.

use super::{MaskFn, Pair, Partials, ScoreFn, Values};
use crate::mask::Band;
use cubecl::prelude::*;

/// A user's tensor, `[batch | 1, heads | 1, seq_q | 1, seq_k | 1]`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Table {
    /// The tensor, if there is one.
    pub tensor: ComptimeOption<&'static Tensor<f32>>,
    /// Whether the tensor varies with the query.
    #[cube(comptime)]
    pub by_query: bool,
    /// Whether the tensor varies with the key.
    #[cube(comptime)]
    pub by_key: bool,
}

/// The two optional tensors of a function.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Tables {
    /// The first tensor.
    pub a: Table,
    /// The second tensor.
    pub b: Table,
}

/// The user's functions and their tensors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Mods {
    /// `score_mod`, if there is one.
    #[cube(comptime)]
    pub score: Option<ScoreFn>,
    /// Tensors of `score_mod`.
    pub of_score: Tables,
    /// `mask_mod`, if there is one.
    #[cube(comptime)]
    pub mask: Option<MaskFn>,
    /// Tensors of `mask_mod`.
    pub of_mask: Tables,
}

impl Tables {
    /// No tensor, on the host.
    pub fn none() -> Self {
        let none = Table { tensor: ComptimeOption::None, by_query: false, by_key: false };
        Tables { a: none, b: none }
    }
}

impl Mods {
    /// No function, on the host.
    pub(crate) fn none() -> Self {
        Mods { score: None, of_score: Tables::none(), mask: None, of_mask: Tables::none() }
    }

    /// Whether there is a function.
    pub fn exist(&self) -> bool {
        self.score.is_some() || self.mask.is_some()
    }
}

impl ModsExpand {
    /// [`Mods::exist`] while a kernel is compiled.
    pub fn exist(&self) -> bool {
        self.score.is_some() || self.mask.is_some()
    }
}

#[cube]
impl Table {
    /// The element for a pair, or 0 without a tensor.
    pub fn at(&self, batch: u32, head: u32, i: u32, j: u32) -> f32 {
        let mut value = 0.0f32.runtime();
        #[comptime]
        if let ComptimeOption::Some(tensor) = &self.tensor {
            // An index that does not vary with a position is computed and read once. Compilers recognise this only if the terms
            // are omitted.
            let mut at = batch as usize * tensor.stride(0) + head as usize * tensor.stride(1);
            if comptime!(self.by_query) {
                at += i as usize * tensor.stride(2);
            }
            if comptime!(self.by_key) {
                at += j as usize * tensor.stride(3);
            }
            value = tensor[at];
        }
        value
    }
}

/// A pair as kernels address it: row and column of a tile. Rows are queries and columns keys, or the reverse if `transposed`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Place {
    /// Batch of the tensors.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Position of the row.
    pub row: u32,
    /// Position of the column.
    pub column: u32,
    /// Distance from the column to the row, `row − column`, each counted from the beginning of its sequence.
    pub distance: f32,
    /// Whether rows are keys.
    #[cube(comptime)]
    pub transposed: bool,
}

#[cube]
impl Place {
    /// The pair of this row and column.
    pub fn new(batch: u32, head: u32, band: &Band, row: u32, column: u32, #[comptime] transposed: bool) -> Place {
        Place { batch, head, row, column, distance: Place::between(band, row, column, transposed), transposed }
    }

    /// Distance from a column to a row, each counted from the beginning of its sequence.
    pub fn between(band: &Band, row: u32, column: u32, #[comptime] transposed: bool) -> f32 {
        let (row, column) = band.positions(row, column, transposed);
        f32::cast_from(row as i32 - column as i32)
    }

    /// The pair as the user's functions see it. `band` is the band of rows and columns.
    pub fn pair(&self, band: &Band) -> Pair {
        let batch = band.number(self.batch);
        let (row, column) = band.positions(self.row, self.column, self.transposed);
        if comptime!(self.transposed) {
            Pair { batch, head: self.head, i: column, j: row, distance: -self.distance }
        } else {
            Pair { batch, head: self.head, i: row, j: column, distance: self.distance }
        }
    }

    /// The tensors' elements for the pair. Positions past the end are clamped to the last one.
    pub fn values(&self, tables: &Tables, band: &Band) -> Values {
        let (row, column) = (band.query_within(self.row), band.key_within(self.column, 1u32));
        let (i, j) = if comptime!(self.transposed) { (column, row) } else { (row, column) };
        Values { a: tables.a.at(self.batch, self.head, i, j), b: tables.b.at(self.batch, self.head, i, j) }
    }
}

#[cube]
impl Mods {
    /// The result of `score_mod`, or the score itself without a function.
    pub fn score_of(&self, score: f32, place: &Place, band: &Band) -> f32 {
        if comptime!(self.score.is_some()) {
            let function = comptime!(self.score.unwrap());
            function.score(score, place.pair(band), place.values(&self.of_score, band))
        } else {
            score
        }
    }

    /// The derivatives of [`Mods::score_of`].
    pub fn partials(&self, score: f32, place: &Place, band: &Band) -> Partials {
        if comptime!(self.score.is_some()) {
            let function = comptime!(self.score.unwrap());
            function.backward(score, place.pair(band), place.values(&self.of_score, band))
        } else {
            Partials { score: 1.0f32.runtime(), a: 0.0f32.runtime(), b: 0.0f32.runtime() }
        }
    }

    /// Whether `mask_mod` lets the query see the key; true without a function.
    pub fn sees(&self, place: &Place, band: &Band) -> bool {
        if comptime!(self.mask.is_some()) {
            let function = comptime!(self.mask.unwrap());
            function.sees(place.pair(band), place.values(&self.of_mask, band))
        } else {
            true.runtime()
        }
    }
}
