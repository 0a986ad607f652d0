//! Tiles for Hopper by head dimension, chosen by measurement.

use crate::hopper::BiasTile;
use crate::tensor_core::HopperTile;

/// Rows of a table: the larger head dimension, and what is chosen up to there.
type Table<T, const ROWS: usize> = [(usize, T); ROWS];

/// Tiles of the forward for Hopper, by the larger head dimension and the number of keys. The first row that fits both is chosen.
///
/// ```text
/// head_dim  seq_k    groups × warpgroups  keys  stages  registers: O, S, P    of   shared memory
/// 64        4,096    2 × 2                64    4       32 + 32 + 16          128  160 KiB
/// 64        any      1 × 3                128   4       32 + 64 + 32          168  152 KiB
/// 128       any      1 × 2                128   3       64 + 64 + 32          255  224 KiB
/// 192       any      1 × 2                96    2       96 + 48 + 24          255  192 KiB
/// 256       any      1 × 2                80    2       128 + 40 + 20         255  224 KiB
/// ```
///
/// The threads of a thread block share 65,536 registers. `O`, `S` and `P` must fit, with about 40 registers for everything else.
/// Within that limit, more keys are better, because each tile costs barriers and the shuffles of the row maximum. More warpgroups
/// are better, too, because their softmax and products overlap. Three warpgroups with 192 queries waste more of a short sequence
/// than two consumer groups with 128 queries each.
pub(super) const HOPPER: [(usize, usize, HopperTile); 5] = [
    (64, 4096, tile(2, 2, 64, 4)),
    (64, usize::MAX, tile(1, 3, 128, 4)),
    (128, usize::MAX, tile(1, 2, 128, 3)),
    (192, usize::MAX, ping_pong(tile(1, 2, 96, 2))),
    (256, usize::MAX, ping_pong(tile(1, 2, 80, 2))),
];

/// The tile of the forward for Hopper with a block mask, by the larger head dimension. It replaces the rows above. Lists make loads
/// longer, and a producer warp hides them if the consumer warps need at most 168 registers: 32 + 64 + 32, and the rest.
pub(super) const HOPPER_BLOCKS: (usize, HopperTile) = (64, HopperTile { producer_warp: true, ..tile(1, 2, 128, 5) });

/// Tiles of the forward for Hopper with a tiled bias, by the larger head dimension: the largest that fit the 227 KiB next to the
/// bias.
///
/// ```text
/// head_dim  groups × warpgroups  keys  stages  shared memory, of which bias
/// 64        2 × 2                64    3       224 KiB  96 KiB
/// 128       1 × 2                128   2       224 KiB  64 KiB
/// 192       1 × 2                64    2       176 KiB  32 KiB
/// 256       1 × 2                64    2       224 KiB  32 KiB
/// ```
pub(super) const HOPPER_BIAS: Table<HopperTile, 4> = [
    (64, tile(2, 2, 64, 3)),
    (128, tile(1, 2, 128, 2)),
    (192, ping_pong(tile(1, 2, 64, 2))),
    (256, ping_pong(tile(1, 2, 64, 2))),
];

/// Tiles of `dq` for Hopper, by the larger head dimension: without a tiled bias, and with one.
///
/// ```text
/// head_dim  keys, stages  with a bias  registers: dQ, S, dP   of   shared memory
/// 64        128, 3        128, 2       32 + 64 + 64           255  128 KiB, 160 KiB
/// 128       128, 2        64, 2        64 + 64 + 64           255  192 KiB, 160 KiB
/// 192       64, 2         48, 2        96 + 32 + 32           255  192 KiB, 200 KiB
/// 256       48, 2         32, 2        128 + 24 + 24          255  224 KiB, 224 KiB
/// ```
pub(super) const HOPPER_DQ: Table<[HopperTile; 2], 4> = [
    (64, [tile(1, 2, 128, 3), tile(1, 2, 128, 2)]),
    (128, [tile(1, 2, 128, 2), tile(1, 2, 64, 2)]),
    (192, [tile(1, 2, 64, 2), tile(1, 2, 48, 2)]),
    (256, [tile(1, 2, 48, 2), tile(1, 2, 32, 2)]),
];

/// Tiles of `dk` and `dv` for Hopper, by the larger head dimension: without a tiled bias, and with one. The last column is the tile
/// of `dv` without a tiled bias, for head dimensions at which the sums of `dk` and `dv` do not fit the registers together. Tiles
/// divide [`stats_multiple`](super::stats_multiple). At 96 a step is shorter than at 128, and a fourth stage hides the loads.
///
/// ```text
/// head_dim  queries, stages  with a bias  dv     registers: dK, dV, S, dP  of   shared memory
/// 64        128, 3           128, 2              32 + 32 + 64 + 64         255  132 KiB, 162 KiB
/// 96        64, 4            64, 3               48 + 48 + 32 + 32         255  195 KiB, 210 KiB
/// 128       64, 3            64, 3               64 + 64 + 32 + 32         255  162 KiB, 210 KiB
/// 192       64, 2            32, 2        64, 2  96, 96 + 32 + 32          255  193 KiB, 161 KiB, 145 KiB
/// 256       48, 2            32, 2        64, 2  128, 128 + 24 + 24        255  225 KiB, 209 KiB, 193 KiB
/// ```
pub(super) const HOPPER_DKDV: Table<([HopperTile; 2], Option<HopperTile>), 5> = [
    (64, ([tile(1, 2, 128, 3), tile(1, 2, 128, 2)], None)),
    (96, ([tile(1, 2, 64, 4), tile(1, 2, 64, 3)], None)),
    (128, ([tile(1, 2, 64, 3), tile(1, 2, 64, 3)], None)),
    (192, ([tile(1, 2, 64, 2), tile(1, 2, 32, 2)], Some(tile(1, 2, 64, 2)))),
    (256, ([tile(1, 2, 48, 2), tile(1, 2, 32, 2)], Some(tile(1, 2, 64, 2)))),
];

/// Tiles of the gradient of a bias for Hopper, by the larger head dimension. Blocks have 128 queries. The wider a block, the less
/// is loaded for each pair. The wider a tile, the less is read from shared memory, which matters more at head dimension 128.
///
/// ```text
/// head_dim  keys    stages  of rows  registers: dB, S, dP  of   shared memory, of which bias
/// 64        4 × 64  6       2        128 + 32 + 32         255  227 KiB  64 KiB
/// 128       128     2       1        64 + 64 + 64          255  225 KiB  32 KiB
/// 192       2 × 64  2       1        64 + 32 + 32          255  226 KiB  32 KiB
/// 256       4 × 32  2       1        64 + 16 + 16          255  226 KiB  32 KiB
/// ```
pub(super) const HOPPER_DBIAS: Table<BiasTile, 4> = [
    (64, BiasTile { tile_k: 64, tiles: 4, stages: 6, row_stages: 2 }),
    (128, BiasTile { tile_k: 128, tiles: 1, stages: 2, row_stages: 1 }),
    (192, BiasTile { tile_k: 64, tiles: 2, stages: 2, row_stages: 1 }),
    (256, BiasTile { tile_k: 32, tiles: 4, stages: 2, row_stages: 1 }),
];

/// Tiles of the kernel that computes all three gradients, by the larger head dimension, with the number of queries from which on it is
/// faster. A tile has 128 queries, or 64 with two panels of columns, so that dQ of a tile is one block of 64 × 64 for each of two
/// warpgroups.
///
/// The last row belongs to the [kernel for wide heads](crate::hopper::wide). It has tiles of 64 queries, and the number of the row is
/// that of keys.
///
/// ```text
/// head_dim  seq_q  queries, stages  registers: dK + dV, S, dP, dQ  of   shared memory
/// 64        1,024  128, 3           64 + 64 + 64 + 32              255  196 KiB
/// 128       1,024  64, 3            128 + 32 + 32 + 32             255  195 KiB
/// head_dim  seq_q  keys, stages     registers: dK + dV, S, dP, dQ  of   shared memory
/// 256       2,048  80, 2            160 + 20 + 20 + 32             255  220 KiB
/// ```
pub(super) const HOPPER_FUSED: Table<(usize, HopperTile), 3> =
    [(64, (1024, tile(1, 2, 128, 3))), (128, (1024, tile(1, 2, 64, 3))), (256, (2048, tile(1, 2, 80, 2)))];

/// A tile whose warpgroups neither take turns nor have a producer warp.
const fn tile(consumer_groups: usize, warpgroups: usize, tile_k: usize, stages: usize) -> HopperTile {
    HopperTile { consumer_groups, warpgroups, tile_k, stages, ping_pong: false, producer_warp: false }
}

/// A tile whose warpgroups issue their products in turn.
const fn ping_pong(tile: HopperTile) -> HopperTile {
    HopperTile { ping_pong: true, ..tile }
}
