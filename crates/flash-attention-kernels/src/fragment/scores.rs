//! A product turned into a score: scale and softcap, the user's functions, bias, slope, mask, band.

use crate::blocks::Visit;
use crate::mask::Band;
use crate::mods::Place;
use crate::score::{Factor, Score};
use crate::softmax::HIDDEN;
use cubecl::prelude::*;

/// What scores are made of beside the product: one argument of every kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Scores<E: Float, M: Numeric> {
    /// Scale, softcap, slopes, functions, dropout and sequences.
    pub score: Score,
    /// A boolean mask, `[B | 1, H | 1, Sq | 1, Sk | 1]`: nonzero hides.
    pub mask: ComptimeOption<&'static Tensor<M>>,
    /// An additive bias, likewise.
    pub bias: ComptimeOption<&'static Tensor<E>>,
    /// Which positions see each other.
    pub band: Band,
}

/// A head of a batch, and the band of its sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct HeadAt {
    /// Batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Its key/value head.
    pub head_kv: usize,
    /// The head's slope.
    pub slope: f32,
    /// Which positions of its sequence see each other.
    pub band: Band,
    /// Whether rows are keys, here and for the band.
    #[cube(comptime)]
    pub transposed: bool,
}

/// Which tile of which head is being computed.
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
    /// Which positions of its sequence see each other.
    pub band: Band,
    /// Whether the band hides nothing of the tile.
    pub fully_visible: bool,
    /// Whether mask and function count here.
    pub masked: bool,
    /// Whether rows are keys, here and for the band.
    #[cube(comptime)]
    pub transposed: bool,
}

#[cube]
impl HeadAt {
    /// The tile of a block of rows, which are queries or `keys`, and of columns that it visits.
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
            transposed: self.transposed,
        }
    }
}

#[cube]
impl TileAt {
    /// A pair, for functions of it.
    pub fn place(&self, row: u32, column: u32) -> Place {
        Place::new(self.batch as u32, self.head as u32, &self.band, row, column, self.transposed)
    }
}

#[cube]
impl<E: Float, M: Numeric> Scores<E, M> {
    /// A query head of a batch in a sequence.
    pub fn head(&self, batch: usize, head: usize, head_kv: usize, band: Band, #[comptime] transposed: bool) -> HeadAt {
        HeadAt { batch, head, head_kv, slope: self.score.extras.slope(batch, head), band, transposed }
    }

    /// Whether a pair of the tile can be hidden.
    pub fn hide(&self, at: &TileAt) -> bool {
        let hides = comptime!(self.mask.is_some() || self.score.extras.mods.mask.is_some());
        !at.fully_visible || comptime!(hides) && at.masked
    }

    /// Whether scores of the tile take more than scale and softcap.
    pub fn need_care(&self, at: &TileAt) -> bool {
        self.hide(at) || comptime!(self.bias.is_some() || self.score.differs())
    }

    /// Adds to `t`, the result of [`Score::of`], what functions, bias and slope make of query `row` and key `column`; [`HIDDEN`] where
    /// the query does not see the key.
    pub fn masked_score(&self, t: f32, at: &TileAt, row: u32, column: u32) -> f32 {
        let place = at.place(row, column);
        let mut value = t;
        if at.band.sees(row, column) {
            value = self.score.modified(value, &place, &at.band);
            #[comptime]
            if let ComptimeOption::Some(bias) = self.bias {
                value += f32::cast_from(bias[element(bias, at, row, column)]);
            }
            value = self.score.biased(value, at.slope, &at.band, row, column);
            if at.masked {
                #[comptime]
                if let ComptimeOption::Some(mask) = self.mask {
                    value = select(mask[element(mask, at, row, column)] != M::from_int(0), HIDDEN, value);
                }
                value = select(self.score.extras.mods.sees(&place, &at.band), value, HIDDEN);
            }
        } else {
            value = HIDDEN.runtime();
        }
        value
    }

    /// What the gradient of a pair's score is multiplied by, from the result of [`Score::of`].
    pub fn factor(&self, t: f32, at: &TileAt, row: u32, column: u32, #[comptime] factor: Factor) -> f32 {
        self.score.factor(t, &at.place(row, column), &at.band, factor)
    }
}

/// Offset of the element of a mask or bias for one pair.
#[cube]
fn element<E: CubePrimitive>(tensor: &Tensor<E>, at: &TileAt, row: u32, column: u32) -> usize {
    at.batch * tensor.stride(0)
        + at.head * tensor.stride(1)
        + row as usize * tensor.stride(2)
        + column as usize * tensor.stride(3)
}
