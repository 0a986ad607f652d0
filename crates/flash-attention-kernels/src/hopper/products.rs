//! Products of a warpgroup's rows with a tile.

use crate::ptx::mma_shared;
use crate::tensor_core::{Blueprint, WARPGROUP_ROWS};
use cubecl::prelude::*;

/// Issues the product of a warpgroup's rows `q` with a tile `k`, both `wide` columns: `S = Q Kᵀ`. It is a group of its own.
#[cube]
pub fn products(s: &mut Array<f32>, q: u64, k: u64, #[comptime] wide: usize, #[comptime] blueprint: Blueprint) {
    let tile_k = comptime!(blueprint.tile.tile_k);
    // 16 columns are 32 bytes of a panel's lines. A panel of rows has 64 lines, a panel of a tile has one line for each key.
    let steps = comptime!(
        (0..wide.div_ceil(16))
            .map(|i| [WARPGROUP_ROWS, tile_k].map(|lines| i % 4 * 2 + i / 4 * lines * 8))
            .collect::<Vec<_>>()
    );
    mma_shared(s, q, k, steps, [false, false], tile_k, blueprint.dtype);
}
