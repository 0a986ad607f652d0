//! Keys that one query sees, as the bits that the masks of accumulators are made of.

use cubecl::prelude::*;

/// Range of keys that one query sees, relative to an origin.
#[derive(CubeType, Clone, Copy, Debug)]
#[expand(derive(Clone))]
pub struct Run {
    /// The first key.
    pub start: i32,
    /// One past the last key.
    pub end: i32,
    /// Whether there is a left edge, so that `start` can lie after the first key.
    #[cube(comptime)]
    pub bounded_below: bool,
}

#[cube]
impl Run {
    /// Visibility of the first two keys in each group of eight, for 16 groups from group `eight` on. Bit `2 n + e` is set if
    /// the query sees the key at distance `8 (eight + n) + e` from the origin.
    pub fn pairs(&self, #[comptime] eight: u32) -> u32 {
        let from = comptime!(8 * eight as i32);
        let mut pairs = pairs_before(max(self.end, from) - from);
        if comptime!(self.bounded_below) {
            pairs &= !pairs_before(max(self.start, from) - from);
        }
        pairs
    }
}

/// Bits of the first two positions in each of 16 groups of eight. A bit is set if its position is below `end`, not negative.
#[cube]
fn pairs_before(end: i32) -> u32 {
    let end = end as u32;
    let count = min(end / 8 * 2 + min(end % 8, 2u32), 32u32);
    select(count == 32, u32::MAX, (1u32 << (count % 32)) - 1)
}
