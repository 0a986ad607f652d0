//! From a product to a score: scale and softcap, the user's functions, bias, slope, mask and band.

use super::rows::Rows;
use crate::blocks::Visit;
use crate::mask::Band;
use crate::mods::Place;
use crate::score::{Factor, Score};
use crate::softmax::HIDDEN;
use cubecl::prelude::*;

/// Everything besides the product that scores are computed from, as one argument of every kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Scores<E: Float, M: Numeric> {
    /// Scale, softcap, slopes, functions, dropout and sequences.
    pub score: Score,
    /// Boolean mask, `[B | 1, H | 1, Sq | 1, Sk | 1]`: nonzero hides.
    pub mask: ComptimeOption<&'static Tensor<M>>,
    /// Additive bias, `[B | 1, H | 1, Sq | 1, Sk | 1]`.
    pub bias: ComptimeOption<&'static Tensor<E>>,
    /// Which positions see each other.
    pub band: Band,
}

/// Query head of a batch, with the band of its sequence.
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
    /// Band of the sequence: which positions see each other.
    pub band: Band,
    /// Whether rows are keys. The band is transposed, too.
    #[cube(comptime)]
    pub transposed: bool,
}

/// Tile of a head that is being computed.
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
    /// Whether rows are keys. The band is transposed, too.
    #[cube(comptime)]
    pub transposed: bool,
}

#[cube]
impl HeadAt {
    /// Tile of a visit. The block of rows begins at `start`; its rows are queries, or keys if `keys`.
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
    /// Position of a pair, as an argument of the user's functions.
    pub fn place(&self, row: u32, column: u32) -> Place {
        Place::new(self.batch as u32, self.head as u32, &self.band, row, column, self.transposed)
    }

    /// Rows of the tile's queries.
    pub fn queries<E: Float, N: Size>(&self, tensor: &'static Tensor<Vector<E, N>>) -> Rows<E, N> {
        Rows::of(tensor, self.batch, self.head, self.q_start, self.band.after_queries())
    }

    /// Rows of the tile's keys.
    pub fn keys<E: Float, N: Size>(&self, tensor: &'static Tensor<Vector<E, N>>) -> Rows<E, N> {
        Rows::of(tensor, self.batch, self.head_kv, self.k_start, self.band.after_keys())
    }
}

#[cube]
impl<E: Float, M: Numeric> Scores<E, M> {
    /// A query head of a batch, in the sequence of `band`.
    pub fn head(&self, batch: usize, head: usize, head_kv: usize, band: Band, #[comptime] transposed: bool) -> HeadAt {
        HeadAt { batch, head, head_kv, slope: self.score.extras.slope(batch, head), band, transposed }
    }

    /// Whether the tile may contain hidden pairs.
    pub fn hide(&self, at: &TileAt) -> bool {
        let hides = comptime!(self.mask.is_some() || self.score.extras.mods.mask.is_some());
        !at.fully_visible || comptime!(hides) && at.masked
    }

    /// Whether scores of the tile need more than scale and softcap: [`Scores::masked_score`].
    pub fn need_care(&self, at: &TileAt) -> bool {
        self.hide(at) || comptime!(self.bias.is_some() || self.score.differs())
    }

    /// Score of the pair at `row` and `column`: applies score function, bias and slope to `t`, the result of [`Score::of`]. Returns
    /// [`HIDDEN`] if the query does not see the key.
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

    /// Factor of the gradient of a pair's score, from `t`, the result of [`Score::of`].
    pub fn factor(&self, t: f32, at: &TileAt, row: u32, column: u32, #[comptime] factor: Factor) -> f32 {
        self.score.factor(t, &at.place(row, column), &at.band, factor)
    }
}

/// Offset of a pair's element in a mask or bias.
#[cube]
fn element<E: CubePrimitive>(tensor: &Tensor<E>, at: &TileAt, row: u32, column: u32) -> usize {
    at.batch * tensor.stride(0)
        + at.head * tensor.stride(1)
        + row as usize * tensor.stride(2)
        + column as usize * tensor.stride(3)
}
