//! A thread's products turned into scores: scale and softcap, the user's functions, mask, band, bias.

use super::tile::{TileShape, Unit};
use crate::mask::Band;
use crate::mods::Place;
use crate::score::{Factor, Score};
use crate::softmax::HIDDEN;
use cubecl::prelude::*;

/// Which tile of which head is being computed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct TileAt {
    /// Batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// First query.
    pub q_start: u32,
    /// First key.
    pub k_start: u32,
    /// The head's slope.
    pub slope: f32,
    /// Which positions of its sequence see each other.
    pub band: Band,
    /// Whether mask and function count here.
    pub masked: bool,
    /// Whether rows are keys, here and for the band.
    #[cube(comptime)]
    pub transposed: bool,
}

/// Turns products into scores, hidden ones into [`HIDDEN`]. `factors` receives what their gradients are to be multiplied by.
///
/// `careful` is false where the band hides nothing of the tile; a mask is looked at in any case.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn finish_scores<F: Float, M: Numeric>(
    s: &mut Array<f32>,
    factors: &mut Array<f32>,
    score: &Score,
    band: &Band,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<F>>,
    at: &TileAt,
    careful: bool,
    me: Unit,
    #[comptime] factor: Factor,
    #[comptime] tile: TileShape,
) {
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    #[unroll]
    for i in 0..micro_q {
        #[unroll]
        for j in 0..micro_k {
            let n = comptime!(i * micro_k + j);
            let t = score.of(s[n]);
            s[n] = t;
            if comptime!(factor != Factor::One) {
                let row = at.q_start + me.y * comptime!(micro_q as u32) + comptime!(i as u32);
                let column = at.k_start + me.x * comptime!(micro_k as u32) + comptime!(j as u32);
                factors[n] = score.factor(t, &at.place(row, column), band, factor);
            }
        }
    }
    if careful || comptime!(score.differs()) {
        #[unroll]
        for i in 0..micro_q {
            #[unroll]
            for j in 0..micro_k {
                let n = comptime!(i * micro_k + j);
                let row = at.q_start + me.y * comptime!(micro_q as u32) + comptime!(i as u32);
                let column = at.k_start + me.x * comptime!(micro_k as u32) + comptime!(j as u32);
                s[n] = finish_score(s[n], score, band, mask, bias, at, row, column);
            }
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

/// Adds what biases query `row` and key `column` to `t`; [`HIDDEN`] where the query does not see the key.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn finish_score<F: Float, M: Numeric>(
    t: f32,
    score: &Score,
    band: &Band,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<F>>,
    at: &TileAt,
    row: u32,
    column: u32,
) -> f32 {
    let place = at.place(row, column);
    let mut value = t;
    if band.sees(row, column) {
        value = score.modified(value, &place, band);
        #[comptime]
        if let ComptimeOption::Some(bias) = bias {
            let offset = element(at, row, column, bias.stride(0), bias.stride(1), bias.stride(2), bias.stride(3));
            value += f32::cast_from(bias[offset]);
        }
        value = score.biased(value, at.slope, band, row, column);
        if at.masked {
            #[comptime]
            if let ComptimeOption::Some(mask) = mask {
                let offset = element(at, row, column, mask.stride(0), mask.stride(1), mask.stride(2), mask.stride(3));
                value = select(mask[offset] != M::from_int(0), HIDDEN, value);
            }
            value = select(score.extras.mods.sees(&place, band), value, HIDDEN);
        }
    } else {
        value = HIDDEN.runtime();
    }
    value
}

/// Offset of the element of a mask or bias for one pair, from its strides.
#[cube]
fn element(
    at: &TileAt,
    row: u32,
    column: u32,
    of_batch: usize,
    of_head: usize,
    of_row: usize,
    of_column: usize,
) -> usize {
    at.batch * of_batch + at.head * of_head + row as usize * of_row + column as usize * of_column
}
