//! Mask, `mask_mod`, bias and slopes of each pair of a tile.

use super::super::{Blueprint, Rows, WARPGROUP_ROWS};
use super::{ScoreTile, pair_of};
use crate::fragment::Scores;
use crate::ptx::{load_tiles, unpack};
use crate::softmax::UNSEEN;
use cubecl::prelude::*;

/// Applies `mask_mod` and the mask, if there are any.
#[cube]
pub fn hide_pairs<E: Float, M: Numeric, NB: Size, NM: Size>(
    s: &mut Array<f32>,
    scores: &Scores<E, M, NB, NM>,
    tile: &ScoreTile,
    #[comptime] blueprint: Blueprint,
) {
    let (band, tile_k) = (&tile.band, comptime!(blueprint.tile.tile_k));
    if comptime!(blueprint.mask_mod) {
        let transposed = comptime!(blueprint.transposed());
        #[unroll]
        for r in 0..2usize {
            let distance = tile.between(r, transposed);
            #[unroll]
            for i in 0..comptime!(tile_k / 8) {
                #[unroll]
                for e in 0..2usize {
                    let n = comptime!(4 * i + 2 * r + e);
                    let place = tile.place(distance, r, i, e, transposed);
                    s[n] = select(scores.score.extras.mods.sees(&place, band), s[n], UNSEEN);
                }
            }
        }
    }
    #[comptime]
    if let ComptimeOption::Some(mask) = scores.mask {
        each_pair::<M, NM>(s, mask, true, blueprint.mask, tile, blueprint);
    }
}

/// Adds the bias, if there is one, and the ALiBi term of the slopes.
#[cube]
pub fn add_bias<E: Float, M: Numeric, NB: Size, NM: Size>(
    s: &mut Array<f32>,
    scores: &Scores<E, M, NB, NM>,
    tile: &ScoreTile,
    #[comptime] blueprint: Blueprint,
) {
    if comptime!(blueprint.tiled_bias()) {
        add_tile(s, scores.score.scale, tile, blueprint);
    } else {
        #[comptime]
        if let ComptimeOption::Some(bias) = scores.bias {
            each_pair::<E, NB>(s, bias, false, blueprint.bias, tile, blueprint);
        }
    }
    if comptime!(blueprint.alibi) {
        let first = scores.score.extras.slope(tile.batch as usize, tile.head as usize);
        #[unroll]
        for r in 0..2usize {
            let slope = if comptime!(tile.packs && r == 1) {
                scores.score.extras.slope(tile.batch as usize, tile.head_of(r) as usize)
            } else {
                first
            };
            let offset = tile.distances(r);
            #[unroll]
            for i in 0..comptime!(blueprint.tile.tile_k / 8) {
                #[unroll]
                for e in 0..2usize {
                    let n = comptime!(4 * i + 2 * r + e);
                    let offset = offset - comptime!((8 * i + e) as f32);
                    s[n] = fma(slope, min(offset, -offset), s[n]);
                }
            }
        }
    }
}

/// Reads the element of each pair of a mask or bias. `hides`: elements other than 0 hide their pairs; else they are added to the scores.
/// `rows`: how the rows differ.
#[cube]
fn each_pair<T: Numeric, N: Size>(
    s: &mut Array<f32>,
    tensor: &Tensor<Vector<T, N>>,
    #[comptime] hides: bool,
    #[comptime] rows: Option<Rows>,
    tile: &ScoreTile,
    #[comptime] blueprint: Blueprint,
) {
    let (band, transposed) = (&tile.band, comptime!(blueprint.transposed()));
    let once = comptime!(rows == Some(Rows::Same) && !transposed && !tile.packs);
    let first = tile.batch as usize * tensor.stride(0) + tile.head as usize * tensor.stride(1);
    #[unroll]
    for r in 0..comptime!(if once { 1usize } else { 2usize }) {
        let at = if comptime!(tile.packs && r == 1) {
            tile.batch as usize * tensor.stride(0) + tile.head_of(r) as usize * tensor.stride(1)
        } else {
            first
        };
        let row = band.query_within(tile.row(r));
        let at = at + row as usize * tensor.stride(comptime!(if transposed { 3 } else { 2 }));
        #[unroll]
        for i in 0..comptime!(blueprint.tile.tile_k / 8) {
            let column = tile.lane_column + comptime!(8 * i as u32);
            let pair = pair_of::<T, N>(tensor, at, band, column, rows, blueprint);
            #[unroll]
            for e in 0..2usize {
                #[unroll]
                for both in 0..comptime!(if once { 2usize } else { 1usize }) {
                    let n = comptime!(4 * i + 2 * (r + both) + e);
                    if comptime!(hides) {
                        s[n] = select(pair.extract(e) != T::from_int(0), UNSEEN, s[n]);
                    } else {
                        s[n] += f32::cast_from(pair.extract(e));
                    }
                }
            }
        }
    }
}

/// Adds a tiled bias, which is in shared memory. Multiplies by the scale, unless softcap or `score_mod` have been applied to
/// scaled scores.
#[cube]
fn add_tile(s: &mut Array<f32>, scale: f32, tile: &ScoreTile, #[comptime] blueprint: Blueprint) {
    // One load covers 16 rows and 16 columns: rows 0 to 7 and 8 to 15 of the first eight columns, then of the second eight. A
    // line of a panel has 128 bytes; the swizzle permutes its 16-byte vectors by the line's number.
    let lane = UNIT_POS % 32;
    let (of_warp, eight) = (UNIT_POS / 32 % 4, lane % 8);
    // If transposed, lines are columns.
    let line =
        if comptime!(blueprint.transposed()) { lane / 16 * 8 + eight } else { of_warp * 16 + lane / 8 % 2 * 8 + eight };
    let vector = if comptime!(blueprint.transposed()) { of_warp * 2 + lane / 8 % 2 } else { lane / 16 };
    let at = tile.bias_tile + line * 128 + (vector ^ eight) * 16;
    #[unroll]
    for i in 0..comptime!(blueprint.tile.tile_k / 16) {
        let words = if comptime!(blueprint.transposed()) {
            load_tiles(at + comptime!((i * 16 * 128) as u32), true)
        } else {
            let of_tile = comptime!(i + tile.sixteenth);
            let panel = comptime!((of_tile / 4 * WARPGROUP_ROWS * 128) as u32);
            load_tiles((at ^ comptime!((of_tile % 4 * 32) as u32)) + panel, false)
        };
        #[unroll]
        for word in 0..4usize {
            #[unroll]
            for e in 0..2usize {
                let n = comptime!(8 * i + 2 * word + e);
                let value = unpack(*words.index(word), comptime!(e == 1), blueprint.dtype);
                s[n] = if comptime!(blueprint.capped || blueprint.modified) {
                    s[n] + value
                } else {
                    fma(s[n], scale, value)
                };
            }
        }
    }
}
