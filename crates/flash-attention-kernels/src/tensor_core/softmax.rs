//! The online softmax on the rows of an accumulator, whose layout [`rows`](super::rows) describes.

use super::Blueprint;
use super::dropout::KeepMask;
use crate::dropout::Dropout;
use crate::dtype::Dtype;
use crate::extras::Extras;
use crate::fragment::filled;
use crate::ptx::*;
use crate::softmax::{HIDDEN, Rescale, raised, rounded_sum, softmax_backward};
use cubecl::prelude::*;

/// Largest per-thread sum of a tile's exponentials for which the reference maximum is kept, by the type of the weights: f16 must hold the
/// product of a weight and the factor of its value's scale.
fn kept(blueprint: &Blueprint) -> f32 {
    if blueprint.weights() == Dtype::F16 { 256.0 } else { 65536.0 }
}

/// Largest such sum that can be rescaled: 2^120, because 2^-127 is not a normal number.
const RESCALED: f32 = (1u128 << 120) as f32;

/// A reference maximum is searched in one of this many groups of eight columns.
const SPARSE: usize = 4;

/// State of the online softmax for a thread's two rows.
#[derive(CubeType)]
pub struct OnlineSoftmax {
    /// Base-2 exponent that the exponentials are relative to; [`HIDDEN`] for a row that has seen nothing yet.
    ///
    /// Any value that keeps the exponentials in range is correct. f16 needs the row maximum, or a value at most 8 below it,
    /// which allows exponentials up to 2^8. bf16 has the range of f32 and uses a *reference maximum*: a score of the first tile
    /// with a visible score. The sum of a tile's exponentials shows when the reference has become too low. Computing the row
    /// maximum instead would cost as many instructions as the exponentials.
    pub m: Array<f32>,
    /// This thread's part of the sum of exponentials; +∞ for a row that left the range of f32.
    pub l: Array<f32>,
    /// Source of the row's largest exponential.
    ///
    /// With row maxima it is the row's highest score. With reference maxima the row maximum is unknown; it is then this
    /// thread's largest exponential in the tiles that raised a reference maximum of the warp. In a sharp distribution, the tile
    /// with the row's maximum is such a tile.
    pub top: Array<f32>,
}

/// Result of [`OnlineSoftmax::update`], for [`OnlineSoftmax::rescale_o`].
#[derive(CubeType)]
pub struct Taken {
    /// For each row: with reference maxima, this thread's sum of the tile's exponentials, which decides how much the reference grows;
    /// with row maxima, the factor that rescales the accumulator.
    x: Array<f32>,
    /// Whether a row of the warp must be rescaled.
    needed: bool,
}

#[cube]
impl OnlineSoftmax {
    /// Uninitialised state.
    pub fn uninitialised() -> OnlineSoftmax {
        OnlineSoftmax { m: Array::new(2usize), l: Array::new(2usize), top: Array::new(2usize) }
    }

    /// Sets the state after the first tile. The scores in `s` become `2^(exponent · s − m)`. `hides`: whether the tile may be hidden
    /// from a row.
    pub fn first(
        &mut self,
        s: &mut Array<f32>,
        exponent: f32,
        #[comptime] hides: bool,
        #[comptime] blueprint: Blueprint,
    ) {
        let tile_k = comptime!(blueprint.tile.tile_k);
        let every = comptime!(if blueprint.uses_reference_max() { SPARSE } else { 1 });
        #[unroll]
        for r in 0..2usize {
            let highest = row_max(&*s, r, every, tile_k);
            self.m[r] = exponent_of_max(highest, exponent);
            self.l[r] = 0.0f32;
            self.top[r] = if comptime!(blueprint.uses_reference_max()) { 0.0f32.runtime() } else { highest };
        }
        if comptime!(hides) {
            self.set_reference_max(s, exponent, blueprint);
        }
        let taken = self.take(s, exponent, blueprint);
        if comptime!(blueprint.uses_reference_max()) && taken.needed {
            self.find_top(&*s, tile_k);
            let _ = self.raise_reference(s, &taken, blueprint);
        }
    }

    /// Sets the reference maximum of rows that have seen nothing yet to the maximum of the next tile.
    pub fn set_reference_max(&mut self, s: &mut Array<f32>, exponent: f32, #[comptime] blueprint: Blueprint) {
        let none = self.m[0] == HIDDEN || self.m[1] == HIDDEN;
        if comptime!(blueprint.uses_reference_max()) && plane_any(none) {
            #[unroll]
            for r in 0..2usize {
                let highest = row_max(&*s, r, 1usize, comptime!(blueprint.tile.tile_k));
                self.m[r] = select(self.m[r] == HIDDEN, exponent_of_max(highest, exponent), self.m[r]);
            }
        }
    }

    /// Adds a tile. The scores in `s` become exponentials.
    pub fn update(&mut self, s: &mut Array<f32>, exponent: f32, #[comptime] blueprint: Blueprint) -> Taken {
        if comptime!(blueprint.uses_reference_max()) {
            self.take(s, exponent, blueprint)
        } else {
            let mut x = Array::<f32>::new(2usize);
            let mut needed = false.runtime();
            #[unroll]
            for r in 0..2usize {
                let highest = row_max(&*s, r, 1usize, comptime!(blueprint.tile.tile_k));
                self.top[r] = max(self.top[r], highest);
                // Branch-free, so that the exponentials need not wait for a vote.
                let m = raised(self.m[r], exponent_of_max(highest, exponent), Rescale::Lazily);
                x[r] = ex2(self.m[r] - m);
                needed = needed || m > self.m[r];
                self.m[r] = m;
                self.l[r] *= x[r];
            }
            let _ = self.take(s, exponent, blueprint);
            Taken { x, needed: plane_any(needed) }
        }
    }

    /// Rescales the accumulator `o` if needed. The products that add to it must be complete.
    pub fn rescale_o(
        &mut self,
        taken: &Taken,
        s: &mut Array<f32>,
        o: &mut Array<f32>,
        #[comptime] blueprint: Blueprint,
    ) {
        let (tile_k, o_len) = comptime!((blueprint.tile.tile_k, blueprint.columns() / 2));
        if taken.needed {
            if comptime!(blueprint.uses_reference_max()) {
                self.find_top(&*s, tile_k);
                let factors = self.raise_reference(s, taken, blueprint);
                scale_rows(o, &factors, o_len);
            } else {
                scale_rows(o, &taken.x, o_len);
            }
        }
    }

    /// The state, which `merge` adds to another one: `m`, `l` and `top` of both rows, and two zeros.
    pub fn state(&self) -> Array<f32> {
        let mut state = filled::<f32>(0.0f32.runtime(), 8usize);
        #[unroll]
        for r in 0..2usize {
            state[r] = self.m[r];
            state[2 + r] = self.l[r];
            state[4 + r] = self.top[r];
        }
        state
    }

    /// Adds the `state` of the same rows over other keys, in two parts. Returns the factors of both accumulators: of this
    /// state's rows, then of the other's.
    pub fn merge(&mut self, low: &Sequence<f32>, high: &Sequence<f32>, #[comptime] blueprint: Blueprint) -> Array<f32> {
        let mut factors = Array::<f32>::new(4usize);
        #[unroll]
        for r in 0..2usize {
            let (m, l, top) = (*low.index(r), *low.index(comptime!(2 + r)), *high.index(r));
            let highest = max(self.m[r], m);
            // A row that has seen nothing has a sum of 0, and rows of neither state keep it.
            let of_self = select(self.m[r] == HIDDEN, 0.0f32, ex2(self.m[r] - highest));
            let of_other = select(m == HIDDEN, 0.0f32, ex2(m - highest));
            // A row that left the range of f32 keeps the sum +∞.
            let lost = self.l[r] == f32::INFINITY || l == f32::INFINITY;
            self.l[r] = select(lost, f32::INFINITY, fma(self.l[r], of_self, l * of_other));
            self.top[r] = if comptime!(blueprint.uses_reference_max()) {
                max(self.top[r] * of_self, top * of_other)
            } else {
                max(self.top[r], top)
            };
            self.m[r] = highest;
            factors[r] = of_self;
            factors[comptime!(2 + r)] = of_other;
        }
        factors
    }

    /// Turns scores into exponentials relative to the current `m`, and adds them to `l`.
    fn take(&mut self, s: &mut Array<f32>, exponent: f32, #[comptime] blueprint: Blueprint) -> Taken {
        let mut x = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            x[r] = exponentials(s, r, self.m[r], exponent, comptime!(blueprint.tile.tile_k));
            self.l[r] += x[r];
        }
        let kept = comptime!(kept(&blueprint));
        let needed = plane_any(x[0] > kept || x[1] > kept);
        Taken { x, needed }
    }

    /// Updates `top` with this thread's largest exponentials of a tile.
    fn find_top(&mut self, s: &Array<f32>, #[comptime] tile_k: usize) {
        #[unroll]
        for r in 0..2usize {
            self.top[r] = max(self.top[r], unit_max(s, r, 1usize, tile_k));
        }
    }

    /// Raises the reference maximum of each row whose sum has become too large, independently of the warp's other rows. Returns
    /// the factors by which earlier results must be multiplied.
    fn raise_reference(&mut self, s: &mut Array<f32>, taken: &Taken, #[comptime] blueprint: Blueprint) -> Array<f32> {
        let mut factors = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let growth = growth(taken.x[r], comptime!(kept(&blueprint)));
            factors[r] = ex2(-growth);
            self.m[r] += growth;
            self.l[r] = select(taken.x[r] > RESCALED, f32::INFINITY, self.l[r] * factors[r]);
            self.top[r] *= factors[r];
        }
        scale_rows(s, &factors, comptime!(blueprint.tile.tile_k / 2));
        factors
    }
}

/// Amount by which a row's reference maximum must grow. `sum` is this thread's sum of the tile's exponentials. The result is 0
/// unless the sum of one of the row's threads exceeds `kept`.
#[cube]
fn growth(sum: f32, #[comptime] kept: f32) -> f32 {
    let sum = max(sum, plane_shuffle_xor(sum, 1u32));
    let sum = max(sum, plane_shuffle_xor(sum, 2u32));
    let grows = sum > kept && sum <= RESCALED;
    select(grows, f32::floor(lg2(sum)), 0.0f32)
}

/// The highest score of row 0 or 1, over all threads of the row; [`HIDDEN`] if all are hidden. Only one of `every` groups of
/// eight columns is searched.
#[cube]
fn row_max(s: &Array<f32>, #[comptime] row: usize, #[comptime] every: usize, #[comptime] tile_k: usize) -> f32 {
    let m = unit_max(s, row, every, tile_k);
    let m = max(m, plane_shuffle_xor(m, 1u32));
    max(m, plane_shuffle_xor(m, 2u32))
}

/// The highest score that this thread holds of a row.
#[cube]
fn unit_max(s: &Array<f32>, #[comptime] row: usize, #[comptime] every: usize, #[comptime] tile_k: usize) -> f32 {
    // Four independent maxima, for even and odd groups and columns: a single one would be a chain of dependent instructions.
    let mut m = filled::<f32>(HIDDEN.runtime(), 4usize);
    #[unroll]
    for nth in 0..comptime!((tile_k / 8).div_ceil(every)) {
        #[unroll]
        for e in 0..2usize {
            let n = comptime!((2 * nth + e) % 4);
            m[n] = max(m[n], s[comptime!(4 * nth * every + 2 * row + e)]);
        }
    }
    max(max(m[0], m[1]), max(m[2], m[3]))
}

/// A row's highest score as a base-2 exponent; [`HIDDEN`] stays [`HIDDEN`].
#[cube]
fn exponent_of_max(highest: f32, exponent: f32) -> f32 {
    select(highest == HIDDEN, HIDDEN, highest * exponent)
}

/// Turns a row's scores into `2^(exponent · s − m)`. Returns this thread's sum of the exponentials.
#[cube]
fn exponentials(s: &mut Array<f32>, #[comptime] row: usize, m: f32, exponent: f32, #[comptime] tile_k: usize) -> f32 {
    // If the row has seen nothing, all of its scores are −∞.
    let offset = select(m == HIDDEN, 0.0f32, -m);
    let mut sum = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(tile_k / 8) {
        let at = comptime!(4 * i + 2 * row);
        let even = ex2(fma(s[at], exponent, offset));
        let odd = ex2(fma(s[at + 1], exponent, offset));
        s[at] = even;
        s[at + 1] = odd;
        sum += even + odd;
    }
    sum
}

/// A head's sink as a base-2 exponent, if there are sinks and `counts` is set; else [`HIDDEN`].
#[cube]
pub fn sink_log2(extras: &Extras, head: u32, #[comptime] counts: bool) -> f32 {
    if comptime!(counts && extras.sinks.is_some()) {
        extras.sink(head as usize, 0.0f32.runtime()) * comptime!(std::f32::consts::LOG2_E)
    } else {
        HIDDEN.runtime()
    }
}

/// The largest exponential of a row, or the best estimate of it, from `top` and `m` of [`OnlineSoftmax`].
#[cube]
fn largest(top: f32, m: f32, exponent: f32, #[comptime] blueprint: Blueprint) -> f32 {
    if comptime!(blueprint.uses_reference_max()) {
        let top = max(top, plane_shuffle_xor(top, 1u32));
        max(top, plane_shuffle_xor(top, 2u32))
    } else {
        select(m == HIDDEN, 0.0f32, ex2(fma(top, exponent, -m)))
    }
}

/// Final state of a row: maximum, sum of exponentials, and the factor that normalises the row of `O`. The sink is included if
/// it `counts`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct RowEnd {
    /// The base-2 exponent that the exponentials are relative to.
    pub m: f32,
    /// Sum of the exponentials.
    pub l: f32,
    /// Factor that normalises the row of `O`.
    pub factor: f32,
}

#[cube]
impl RowEnd {
    /// The final state of a row. `m`, `l` and `top` are this thread's values of the row's [`OnlineSoftmax`].
    pub fn of(
        m: f32,
        l: f32,
        top: f32,
        sink: f32,
        exponent: f32,
        #[comptime] counts: bool,
        #[comptime] blueprint: Blueprint,
    ) -> RowEnd {
        let l = row_sum(l);
        let mut rounded = l;
        if comptime!(blueprint.weights() != Dtype::F32) {
            let largest = largest(top, m, exponent, blueprint);
            let weights = comptime!(blueprint.weights());
            let of_product = unpack(pack(largest, largest, weights), false, weights);
            rounded = rounded_sum(l, largest, of_product);
        }
        if comptime!(counts) {
            let highest = max(m, sink);
            let rescaled = ex2(m - highest);
            let of_sink = ex2(sink - highest);
            // A row that left the range of f32 keeps the sum +∞.
            let sum = select(l == f32::INFINITY, l, fma(l, rescaled, of_sink));
            RowEnd { m: highest, l: sum, factor: reciprocal(fma(rounded, rescaled, of_sink)) * rescaled }
        } else {
            RowEnd { m, l, factor: reciprocal(rounded) }
        }
    }
}

/// The factor that normalises a row of `O`, including the scale of dropout; 0 for a fully masked row.
#[cube]
pub fn normalizer_of(l: f32, factor: f32, extras: &Extras) -> f32 {
    let factor = if comptime!(extras.dropout.seed.is_some()) { factor * extras.dropout.factor } else { factor };
    select(l == 0.0f32, 0.0f32, factor)
}

/// Sum over the four threads that share a row.
#[cube]
pub fn row_sum(part: f32) -> f32 {
    let pair = part + plane_shuffle_xor(part, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}

/// Multiplies a thread's two rows of an accumulator of `len` registers by their factors.
#[cube]
fn scale_rows(o: &mut Array<f32>, factors: &Array<f32>, #[comptime] len: usize) {
    let (first, second) = (factors[0], factors[1]);
    #[unroll]
    for n in 0..len {
        o[n] *= if comptime!(n / 2 % 2 == 0) { first } else { second };
    }
}

/// Turns `dP`, the gradient after dropout, into gradients of scores by [`softmax_backward()`]. `delta` has one element for each
/// register.
#[cube]
pub fn tile_backward(
    dp: &mut Array<f32>,
    p: &Array<f32>,
    delta: &Sequence<f32>,
    kept: &KeepMask,
    dropout: &Dropout,
    #[comptime] len: usize,
) {
    kept.apply_all(dp, len);
    #[unroll]
    for n in 0..len {
        dp[n] = if comptime!(kept.drops) {
            // Scaled by the instruction that subtracts.
            p[n] * multiply_subtract(dp[n], dropout.factor, *delta.index(n))
        } else {
            softmax_backward(p[n], dp[n], *delta.index(n), false)
        };
    }
}
