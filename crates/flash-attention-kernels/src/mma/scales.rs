//! Factors of products with keys and values in [e4m3](super::e4m3), all powers of two.
//!
//! ```text
//! S = a_i s_j  (Q_i / a_i) · K_j          a_i: of a row of Q, so that bf16 becomes f16      s_j: scale of the page of key j
//! O = u Σ_j (s_j / u) P_ij V_j            s_j: scale of the page of value j                 u: unit of the accumulator
//! ```
//!
//! Weights are f16 in products. The unit keeps `s / u` at 1 or more for the largest scale of a tile, so that f16 represents weights down to 2^-24
//! of the row's reference maximum. The unit follows the scales of the tiles and hardly ever changes.

use super::MmaBlueprint;
use super::tiles::place;
use crate::dtype::Dtype;
use crate::e4m3::inverse;
use crate::ptx::{load_shared, load_shared_quad, pack, store_shared, unpack};
use crate::tensor_core::{LINE, SCALED_KEYS};
use cubecl::prelude::*;

/// Largest and smallest `s / u`, and the one that is chosen.
const MOST: f32 = 128.0;
const LEAST: f32 = 8.0;
const CHOSEN: f32 = 32.0;

/// Where the unit begins: at the smallest scale, below that of any page.
const FIRST_UNIT: f32 = f32::from_bits((127 - 100) << 23);

/// The smallest unit in proportion to earlier ones, with which the accumulator stays in the range of f32.
const DROP: f32 = f32::from_bits((127 - 64) << 23);

/// Exponent of the largest element of a row of Q that has become f16, and the smallest biased one of bf16 for which the factors are normal
/// numbers.
const HIGHEST: u32 = 14;
const SMALLEST: u32 = 15;

/// Prepares the rows of Q for products with e4m3, from the shared address `at` on. Their columns, step by step of 16, get the
/// [order](mod@crate::mma::e4m3) in which these products sum them: of each two words the first one goes to the first vector and the second
/// one to the second. Elements in bf16 become f16, divided by factors that are written to the shared address `factors`, one for each row.
#[cube]
pub fn order_queries(at: u32, factors: u32, #[comptime] blueprint: MmaBlueprint) {
    let scores = comptime!(blueprint.scores);
    let (units, parts) = comptime!((blueprint.tile.units() as u32, 4 * scores.rows() as u32));
    let (lines, panels) = comptime!((scores.warpgroup_rows() as u32, scores.panels()));
    let converts = comptime!(blueprint.factor_bytes() > 0);
    // Four threads have the steps of a row in each panel.
    #[unroll]
    for pass in 0..comptime!(parts.div_ceil(units)) {
        let part = UNIT_POS + pass * units;
        if part < parts {
            let row = part / 4;
            let low = at + row / lines * comptime!(scores.q_bytes() as u32) + place(row % lines, part % 4 * 2);
            let mut multiplier = 1.0f32.runtime();
            if comptime!(converts) {
                let exponent = exponent_of_row(low, blueprint);
                multiplier = f32::reinterpret((comptime!(2 * 127 + HIGHEST) - exponent) << 23);
                if part & 3 == 0 {
                    store_shared(factors + row * 4, (exponent - HIGHEST) << 23);
                }
            }
            #[unroll]
            for panel in 0..panels {
                let low = low + comptime!(panel as u32 * lines * LINE as u32);
                // The two vectors of a step are neighbours also after the swizzle.
                let high = low ^ 16;
                let (first, last) = (load_shared_quad(low), load_shared_quad(high));
                #[unroll]
                for word in 0..4usize {
                    let of_half = if comptime!(word < 2) { &first } else { &last };
                    let pair = comptime!(2 * word % 4);
                    let (a, b) = (*of_half.index(pair), *of_half.index(comptime!(pair + 1)));
                    let place = comptime!(4 * word as u32);
                    store_shared(low + place, as_f16(a, multiplier, converts));
                    store_shared(high + place, as_f16(b, multiplier, converts));
                }
            }
        }
    }
}

/// The biased exponent of the largest element of a row of Q, of which this thread and its three neighbours have parts.
#[cube]
fn exponent_of_row(low: u32, #[comptime] blueprint: MmaBlueprint) -> u32 {
    let scores = comptime!(blueprint.scores);
    let mut largest = 0u32.runtime();
    #[unroll]
    for panel in 0..comptime!(scores.panels()) {
        let low = low + comptime!((panel * scores.warpgroup_rows() * LINE) as u32);
        let (first, last) = (load_shared_quad(low), load_shared_quad(low ^ 16));
        #[unroll]
        for word in 0..4usize {
            let (a, b) = (*first.index(word), *last.index(word));
            largest = max(largest, max(a & 0x7FFFu32, (a >> 16) & 0x7FFFu32));
            largest = max(largest, max(b & 0x7FFFu32, (b >> 16) & 0x7FFFu32));
        }
    }
    let largest = max(largest, plane_shuffle_xor(largest, 1u32));
    let largest = max(largest, plane_shuffle_xor(largest, 2u32));
    max(largest >> 7, comptime!(SMALLEST).runtime())
}

/// Both halves of a word multiplied and converted, if they are bf16.
#[cube]
fn as_f16(word: u32, multiplier: f32, #[comptime] converts: bool) -> u32 {
    if comptime!(converts) {
        let low = unpack(word, false, Dtype::BF16) * multiplier;
        let high = unpack(word, true, Dtype::BF16) * multiplier;
        pack(low, high, Dtype::F16)
    } else {
        word
    }
}

/// The scales of a tile's keys, one for each 16, from the shared address `at` on.
#[cube]
pub fn load_scales(at: u32, #[comptime] keys: usize, #[comptime] missing: f32) -> Sequence<f32> {
    let mut scales = Sequence::<f32>::new();
    #[unroll]
    for nth in 0..comptime!(keys / SCALED_KEYS) {
        let scale = f32::reinterpret(load_shared(at + comptime!(4 * nth as u32)));
        scales.push(if comptime!(missing == 1.0) { scale } else { scale * missing });
    }
    scales
}

/// Multiplies the columns of a thread's two rows of scores or weights by the factors of their keys, and the rows by factors of their own.
#[cube]
pub fn scale_keys(s: &mut Array<f32>, scales: &Sequence<f32>, rows: &Sequence<f32>, #[comptime] keys: usize) {
    let of_rows = comptime!(rows.len());
    #[unroll]
    for sixteen in 0..comptime!(keys / SCALED_KEYS) {
        let scale = *scales.index(sixteen);
        #[unroll]
        for row in 0..2usize {
            let factor = if comptime!(of_rows > 0) { scale * *rows.index(row) } else { scale };
            #[unroll]
            for n in 0..4usize {
                s[comptime!(8 * sixteen + n / 2 * 4 + 2 * row + n % 2)] *= factor;
            }
        }
    }
}

/// Unit of a warp's accumulator.
#[derive(CubeType)]
pub struct ValueUnit {
    /// The unit.
    value: f32,
    /// The smallest one that the accumulator allows.
    least: f32,
}

#[cube]
impl ValueUnit {
    pub fn first() -> ValueUnit {
        ValueUnit { value: FIRST_UNIT.runtime(), least: 0.0f32.runtime() }
    }

    /// Adds the factors of the weights of a tile whose values have these scales. Changes the unit if they would be too large or too small.
    pub fn factors(
        &mut self,
        scales: &Sequence<f32>,
        acc: &mut Sequence<Array<f32>>,
        factors: &mut Sequence<f32>,
        #[comptime] columns: usize,
    ) {
        let mut largest = *scales.index(0usize);
        #[unroll]
        for nth in 1..comptime!(scales.len()) {
            largest = max(largest, *scales.index(nth));
        }
        // Keys past the last one have the scale 0. NaN changes nothing.
        if largest > self.value * MOST || largest < self.value * LEAST && largest > 0.0f32 {
            let unit = max(largest * comptime!(1.0 / CHOSEN), self.least);
            scale_all(acc, self.value * inverse(unit), columns);
            self.value = unit;
            self.least = max(self.least, unit * DROP);
        }
        let inverse = inverse(self.value);
        #[unroll]
        for nth in 0..comptime!(scales.len()) {
            factors.push(*scales.index(nth) * inverse);
        }
    }

    /// Turns multiples of the unit into numbers.
    pub fn apply(&self, acc: &mut Sequence<Array<f32>>, #[comptime] columns: usize) {
        scale_all(acc, self.value, columns);
    }
}

#[cube]
fn scale_all(acc: &mut Sequence<Array<f32>>, factor: f32, #[comptime] columns: usize) {
    #[unroll]
    for group in 0..comptime!(acc.len()) {
        let of_group = acc.index_mut(group);
        #[unroll]
        for n in 0..comptime!(columns / 2) {
            of_group[n] *= factor;
        }
    }
}
