//! From a product to a score: scale and softcap, the user's functions, bias, slope, mask and band.

use super::rows::{Rows, StoredRows};
use crate::blocks::Visit;
use crate::mask::Band;
use crate::mods::Place;
use crate::pages::PageTable;
use crate::score::{Factor, Score};
use crate::softmax::HIDDEN;
use cubecl::prelude::*;

/// Everything besides products that scores are computed from: one argument of every kernel. `NB` and `NM` are the numbers of
/// elements of the bias and of the mask that are read at a time.
#[derive(CubeType, CubeLaunch)]
pub struct Scores<E: Float, M: Numeric, NB: Size, NM: Size> {
    /// Scale, softcap, slopes, functions, dropout and sequences.
    pub score: Score,
    /// Boolean mask, `[B | 1, H | 1, Sq | 1, Sk | 1]`: nonzero hides.
    pub mask: ComptimeOption<&'static Tensor<Vector<M, NM>>>,
    /// Additive bias, `[B | 1, H | 1, Sq | 1, Sk | 1]`.
    pub bias: ComptimeOption<&'static Tensor<Vector<E, NB>>>,
    /// The band of rows and columns.
    pub band: Band,
}

/// [`Scores`] of kernels that read mask and bias element by element.
pub type ScalarScores<E, M> = Scores<E, M, Const<1>, Const<1>>;

/// Tile of a query head that is being computed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct TileAt {
    /// Batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Its key/value head.
    pub head_kv: usize,
    /// First query.
    pub q_start: u32,
    /// First key.
    pub k_start: u32,
    /// The head's slope.
    pub slope: f32,
    /// Band of the sequence: which positions see each other.
    pub band: Band,
    /// Whether the band hides nothing of the tile.
    pub fully_visible: bool,
    /// Whether the mask and the mask function apply to the tile.
    pub masked: bool,
    /// The pages of keys and values, if they are in pages.
    pages: ComptimeOption<PageTable>,
    /// Whether rows are keys. The band is transposed, too.
    #[cube(comptime)]
    pub transposed: bool,
}

#[cube]
impl TileAt {
    /// Tile of a visit in the same head. The block of rows begins at `start`; its rows are queries, or keys if `keys`.
    pub fn tile(&self, start: u32, visit: &Visit, #[comptime] keys: bool) -> TileAt {
        let (q_start, k_start) = if comptime!(keys) { (visit.start, start) } else { (start, visit.start) };
        TileAt {
            batch: self.batch,
            head: self.head,
            head_kv: self.head_kv,
            q_start,
            k_start,
            slope: self.slope,
            band: self.band,
            fully_visible: visit.fully_visible,
            masked: visit.masked,
            pages: self.pages,
            transposed: self.transposed,
        }
    }

    /// Position of a pair, as an argument of the user's functions.
    pub fn place(&self, row: u32, column: u32) -> Place {
        Place::new(self.batch as u32, self.head as u32, &self.band, row, column, self.transposed)
    }

    /// Rows of the tile's queries.
    pub fn queries<E: Float, N: Size>(&self, tensor: &'static Tensor<Vector<E, N>>) -> Rows<E, N> {
        Rows::of(tensor, self.batch, self.head, self.q_start, self.band.after_queries())
    }

    /// Rows of keys or values, from the tile's first key on.
    pub fn keys<E: Float, N: Size>(&self, stored: StoredRows<E, N>) -> Rows<E, N> {
        Rows::of_keys(stored, self.pages, self.batch, self.head_kv, self.k_start, self.band.after_keys())
    }
}

#[cube]
impl<E: Float, M: Numeric, NB: Size, NM: Size> Scores<E, M, NB, NM> {
    /// The first tile of a query head of a batch, in the sequence of `band`.
    pub fn head(&self, batch: usize, head: usize, head_kv: usize, band: Band, #[comptime] transposed: bool) -> TileAt {
        TileAt {
            batch,
            head,
            head_kv,
            q_start: 0u32.runtime(),
            k_start: 0u32.runtime(),
            slope: self.score.extras.slope(batch, head),
            band,
            fully_visible: false.runtime(),
            masked: true.runtime(),
            pages: self.score.extras.pages,
            transposed,
        }
    }

    /// Whether there is a mask or a mask function.
    fn have_mask(&self) -> comptime_type!(bool) {
        comptime!(self.mask.is_some() || self.score.extras.mods.mask.is_some())
    }

    /// Whether the tile may contain hidden pairs.
    pub fn hide(&self, at: &TileAt) -> bool {
        let hides = self.have_mask();
        !at.fully_visible || comptime!(hides) && at.masked
    }

    /// Whether scores of the tile need more than scale and softcap: [`Scores::masked_score`].
    pub fn need_care(&self, at: &TileAt) -> bool {
        self.hide(at) || comptime!(self.bias.is_some() || self.score.differs())
    }

    /// Score of a pair that the query sees: score function, bias and slope, applied to `t`, the result of [`Score::of`].
    pub fn composed(&self, t: f32, slope: f32, place: &Place, band: &Band) -> f32 {
        let mut value = self.score.modified(t, place, band);
        #[comptime]
        if let ComptimeOption::Some(bias) = self.bias {
            value += f32::cast_from(element::<E, NB>(bias, place));
        }
        self.score.biased(value, slope, band, place.row, place.column)
    }

    /// Whether neither mask nor mask function hides the pair.
    pub fn show(&self, place: &Place, band: &Band) -> bool {
        let mut shown = self.score.extras.mods.sees(place, band);
        #[comptime]
        if let ComptimeOption::Some(mask) = self.mask {
            let element = element::<M, NM>(mask, place);
            shown = shown && element == M::from_int(0);
        }
        shown
    }

    /// Score of the pair at `row` and `column` from `t`, the result of [`Score::of`]. Returns [`HIDDEN`] if the query does not
    /// see the key.
    pub fn masked_score(&self, t: f32, at: &TileAt, row: u32, column: u32) -> f32 {
        let mut value = HIDDEN.runtime();
        if at.band.sees(row, column) {
            let place = at.place(row, column);
            value = self.composed(t, at.slope, &place, &at.band);
            let hides = self.have_mask();
            if comptime!(hides) && at.masked {
                value = select(self.show(&place, &at.band), value, HIDDEN);
            }
        }
        value
    }

    /// Factor of the gradient of a pair's score, from `t`, the result of [`Score::of`].
    pub fn factor(&self, t: f32, at: &TileAt, row: u32, column: u32, #[comptime] factor: Factor) -> f32 {
        self.score.factor(t, &at.place(row, column), &at.band, factor)
    }
}

/// A pair's element of a mask or bias.
#[cube]
fn element<T: Numeric, N: Size>(tensor: &Tensor<Vector<T, N>>, place: &Place) -> T {
    let (i, j) = if comptime!(place.transposed) { (place.column, place.row) } else { (place.row, place.column) };
    let at = place.batch as usize * tensor.stride(0)
        + place.head as usize * tensor.stride(1)
        + i as usize * tensor.stride(2)
        + j as usize * tensor.stride(3);
    let width = tensor.vector_size();
    if comptime!(width == 2) {
        let pair = tensor[at / 2];
        select(at % 2 == 1, pair.extract(1usize), pair.extract(0usize))
    } else {
        tensor[at].extract(0usize)
    }
}
