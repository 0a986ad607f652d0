//! Combination of the attentions that the warps of a warpgroup have computed over keys of their own, with the same rows.
//!
//! ```text
//! m = max_w m_w      l = Σ 2^(m_w − m) l_w      O = Σ 2^(m_w − m) O_w
//! ```
//!
//! (Flash-Decoding, Dao et al. 2023, within a thread block.)

use super::{CHUNK, MmaBlueprint, OF_STATE};
use crate::ptx::{load_shared_floats, store_shared_floats};
use crate::tensor_core::OnlineSoftmax;
use cubecl::prelude::*;

/// Combines the states and accumulators of the warps in those of the first one. `at` is the shared address of tiles that the warps have
/// read. All threads must call this function.
#[cube]
pub fn merge_warps(
    softmax: &mut Sequence<OnlineSoftmax>,
    acc: &mut Sequence<Array<f32>>,
    at: u32,
    #[comptime] blueprint: MmaBlueprint,
) {
    let (groups, chunks) = comptime!((blueprint.tile.groups, blueprint.chunks()));
    let of_warp = comptime!((groups * chunks * CHUNK) as u32);
    let (warp, at) = (UNIT_POS / 32, at + UNIT_POS % 32 * 16);
    // All warps have read their last tile.
    sync_cube();
    if warp > 0 {
        let at = at + (warp - 1) * of_warp;
        #[unroll]
        for group in 0..groups {
            let first = comptime!(group * chunks);
            let state = softmax.index(group).state();
            #[unroll]
            for chunk in 0..OF_STATE {
                store_shared_floats(at, comptime!((first + chunk) * CHUNK), &state, chunk);
            }
            #[unroll]
            for chunk in 0..comptime!(chunks - OF_STATE) {
                store_shared_floats(at, comptime!((first + OF_STATE + chunk) * CHUNK), acc.index(group), chunk);
            }
        }
    }
    sync_cube();
    if warp == 0 {
        for other in 0..comptime!(blueprint.tile.warps_k as u32 - 1) {
            let at = at + other * of_warp;
            #[unroll]
            for group in 0..groups {
                let first = comptime!(group * chunks);
                let low = load_shared_floats(at, comptime!(first * CHUNK));
                let high = load_shared_floats(at, comptime!((first + 1) * CHUNK));
                let factors = softmax.index_mut(group).merge(&low, &high, comptime!(blueprint.scores));
                let of_group = acc.index_mut(group);
                #[unroll]
                for chunk in 0..comptime!(chunks - OF_STATE) {
                    let of_other = load_shared_floats(at, comptime!((first + OF_STATE + chunk) * CHUNK));
                    #[unroll]
                    for e in 0..4usize {
                        let n = comptime!(4 * chunk + e);
                        let row = comptime!(e / 2);
                        of_group[n] = fma(of_group[n], factors[row], *of_other.index(e) * factors[comptime!(2 + row)]);
                    }
                }
            }
        }
    }
}
