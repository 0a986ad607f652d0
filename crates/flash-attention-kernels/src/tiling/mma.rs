//! Tiles of the `mma.sync` kernels, chosen by the shared memory of a thread block: 227 KiB on Hopper, 163 KiB on sm_80 and sm_87,
//! 99 KiB on other GPUs from Ampere on.

use super::hopper::{self, head_group};
use super::splits::{self, SplitWork};
use super::{COUNTERS, Case, Gradient, MmaForward, MmaTiles, NOT_COMPILED, first, require, row};
use crate::dtype::Dtype;
use crate::e4m3::KvStorage;
use crate::fragment::Role;
use crate::mma::{MmaBlueprint, MmaTile, Products};
use crate::problem::AttentionProblem;
use crate::tensor_core::{Blueprint, VECTOR_BYTES};

/// Tiles of the forward. The first row is chosen that fits the larger head dimension and the shared memory.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S       of   shared memory
/// 64        1 × 2                         64    2 × 32 + 2 × 32       255  48 KiB
/// 128       1 × 2                         64    2 × 64 + 2 × 32       255  96 KiB
/// 192       2 × 1                         64    96 + 32               255  144 KiB
/// 192       1 × 1                         32    96 + 16               255  72 KiB
/// 256       2 × 1                         64    128 + 32              255  192 KiB
/// 256       1 × 1                         64    128 + 32              255  160 KiB
/// 256       1 × 1                         32    128 + 16              255  96 KiB
/// ```
///
/// With one group, reading operands from shared memory takes as long as the products; with two groups, half as long. With four
/// warps, a multiprocessor has room for two thread blocks: one computes products while the other one computes exponentials.
const FORWARD: [(usize, MmaTile); 7] = [
    (64, shape(1, 2, 64)),
    (128, shape(1, 2, 64)),
    (192, shape(2, 1, 64)),
    (192, shape(1, 1, 32)),
    (256, shape(2, 1, 64)),
    (256, shape(1, 1, 64)),
    (256, shape(1, 1, 32)),
];

/// Tiles of the forward over keys and values in e4m3, chosen in the same way. Conversions take registers of their own.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S       of   shared memory
/// 64        1 × 2                         64    2 × 32 + 2 × 32       246  49 KiB
/// 128       1 × 2                         32    2 × 64 + 2 × 16       241  49 KiB
/// ```
///
/// Larger head dimensions use the rows of 16-bit elements.
const FORWARD_E4M3: [(usize, MmaTile); 7] =
    [(64, shape(1, 2, 64)), (128, shape(1, 2, 32)), FORWARD[2], FORWARD[3], FORWARD[4], FORWARD[5], FORWARD[6]];

/// Tiles of `dq`, chosen in the same way.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: dQ, S, dP    of   shared memory
/// 64        1 × 2                         64    2 × (32 + 32 + 32)      255  64 KiB
/// 128       1 × 2                         32    2 × (64 + 16 + 16)      255  96 KiB
/// 192       2 × 1                         64    96 + 32 + 32            255  192 KiB
/// 192       1 × 1                         32    96 + 16 + 16            255  96 KiB
/// 256       2 × 1                         32    128 + 16 + 16           255  192 KiB
/// 256       1 × 1                         32    128 + 16 + 16           255  128 KiB
/// 256       1 × 1                         16    128 + 8 + 8             255  96 KiB
/// ```
const DQ: [(usize, MmaTile); 7] = [
    (64, shape(1, 2, 64)),
    (128, shape(1, 2, 32)),
    (192, shape(2, 1, 64)),
    (192, shape(1, 1, 32)),
    (256, shape(2, 1, 32)),
    (256, shape(1, 1, 32)),
    (256, shape(1, 1, 16)),
];

/// Tiles of `dk` and `dv`, chosen in the same way. For head dimensions above 128, each takes its own launch.
///
/// ```text
/// head_dim  keys: warpgroups × groups  queries  registers: dK + dV, S, dP   of   shared memory
/// 64        1 × 2                      32       2 × (64 + 16 + 16)          255  49 KiB
/// 128       2 × 1                      64       128 + 32 + 32               255  129 KiB
/// 128       1 × 1                      64       128 + 32 + 32               255  97 KiB
/// 192       2 × 1                      64       96 + 32 + 32                255  193 KiB
/// 192       1 × 1                      32       96 + 16 + 16                255  97 KiB
/// 256       2 × 1                      32       128 + 16 + 16               255  193 KiB
/// 256       1 × 1                      32       128 + 16 + 16               255  129 KiB
/// 256       1 × 1                      16       128 + 8 + 8                 255  97 KiB
/// ```
const DKDV: [(usize, MmaTile); 8] = [
    (64, shape(1, 2, 32)),
    (128, shape(2, 1, 64)),
    (128, shape(1, 1, 64)),
    (192, shape(2, 1, 64)),
    (192, shape(1, 1, 32)),
    (256, shape(2, 1, 32)),
    (256, shape(1, 1, 32)),
    (256, shape(1, 1, 16)),
];

/// Tiles of the forward in f32 with split tf32 products, chosen in the same way.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S    shared memory
/// 64        1 × 2                         32    2 × (32 + 16)      64 KiB
/// 128       1 × 1                         32    64 + 16            96 KiB
/// 192       2 × 1                         32    96 + 16            192 KiB
/// 192       1 × 1                         16    96 + 8             96 KiB
/// 256       1 × 1                         32    128 + 16           192 KiB
/// 256       1 × 1                         16    128 + 8            128 KiB
/// ```
///
/// Rows have twice the bytes of 16-bit elements. With three products instead of one, reads of operands are not the limit. Registers
/// are: they hold the weights twice.
const FORWARD_SPLIT: [(usize, MmaTile); 6] = [
    (64, shape(1, 2, 32)),
    (128, shape(1, 1, 32)),
    (192, shape(2, 1, 32)),
    (192, shape(1, 1, 16)),
    (256, shape(1, 1, 32)),
    (256, shape(1, 1, 16)),
];

/// Tiles of the forward in f32 with tf32 products, chosen in the same way. As many groups as fit are used, because reads of
/// operands take longest.
///
/// ```text
/// head_dim  queries: warpgroups × groups  keys  registers: O, S    shared memory
/// 64        1 × 2                         64    2 × (32 + 32)      96 KiB
/// 128       2 × 2                         32    2 × (64 + 16)      192 KiB
/// 128       1 × 2                         32    2 × (64 + 16)      128 KiB
/// 128       1 × 1                         32    64 + 16            96 KiB
/// ```
///
/// Larger head dimensions use the rows of split products.
const FORWARD_TF32: [(usize, MmaTile); 8] = [
    (64, shape(1, 2, 64)),
    (128, shape(2, 2, 32)),
    (128, shape(1, 2, 32)),
    (128, shape(1, 1, 32)),
    FORWARD_SPLIT[2],
    FORWARD_SPLIT[3],
    FORWARD_SPLIT[4],
    FORWARD_SPLIT[5],
];

/// Tiles of the gradients in f32, chosen in the same way. The column of registers is for `dq`, and for `dk` and `dv` together up to
/// head_dim 128, or one of them above.
///
/// ```text
/// head_dim  rows: warpgroups × groups  tile  registers: dQ or dK + dV, S, dP   shared memory
/// 64        1 × 2                      32    2 × (32 or 64 + 16 + 16)          96 KiB
/// 128       2 × 1                      32    64 or 128 + 16 + 16               192 KiB
/// 128       1 × 1                      16    64 or 128 + 8 + 8                 96 KiB
/// 192       1 × 1                      32    96 + 16 + 16                      192 KiB
/// 192       1 × 1                      16    96 + 8 + 8                        144 KiB
/// 256       1 × 1                      16    128 + 8 + 8                       192 KiB
/// ```
const GRADIENTS_F32: [(usize, MmaTile); 6] = [
    (64, shape(1, 2, 32)),
    (128, shape(2, 1, 32)),
    (128, shape(1, 1, 16)),
    (192, shape(1, 1, 32)),
    (192, shape(1, 1, 16)),
    (256, shape(1, 1, 16)),
];

/// Largest head dimension for which `dk` and `dv` are computed together.
const TOGETHER: usize = 128;

/// Tiles of the forward where the queries of all query heads of a group are few, by the head dimension and their number. The first row
/// is chosen that fits them and the shared memory. Four warps that divide the keys of a tile leave no row of a product of 16 rows to
/// another one: the products and the reads of K and V are a quarter of those of a tile of 64 rows. What limits decoding is memory: two
/// tiles of keys are on the way while one is multiplied, 64 KiB or more in each thread block.
///
/// ```text
/// head_dim  rows  keys × stages, 16 bits   shared memory     keys × stages, f32      shared memory
/// 64        16    128 × 3 by 4 warps       98 KiB            64 × 3 by 4 warps       100 KiB
/// 64        16                                               64 × 2 by 4 warps       68 KiB
/// 64        32    128 × 3 by 4 warps       100 KiB           64 × 3 by 4 warps       104 KiB
/// 64        64    64 × 2                   40 KiB            64 × 2                  80 KiB
/// 128       16    64 × 3 by 4 warps        100 KiB           64 × 3 by 4 warps       200 KiB
/// 128       16    64 × 2 by 4 warps        68 KiB            64 × 2 by 4 warps       136 KiB
/// 128       32    64 × 3 by 4 warps        104 KiB
/// 128       32    64 × 2 by 4 warps        72 KiB
/// 128       64    64 × 2                   80 KiB            32 × 2                  96 KiB
/// 192       16    64 × 3 by 4 warps        150 KiB           64 × 2 by 4 warps       204 KiB
/// 192       64    32 × 2                   72 KiB            16 × 2                  96 KiB
/// 256       16    64 × 3 by 4 warps        200 KiB
/// 256       16    64 × 2 by 4 warps        136 KiB
/// 256       64    32 × 2                   96 KiB            16 × 2                  128 KiB
/// ```
const FEW: [(usize, MmaTile); 13] = [
    (64, few(1, 128, 3)),
    (64, few(2, 128, 3)),
    (64, shape(1, 1, 64)),
    (128, few(1, 64, 3)),
    (128, few(1, 64, 2)),
    (128, few(2, 64, 3)),
    (128, few(2, 64, 2)),
    (128, shape(1, 1, 64)),
    (192, few(1, 64, 3)),
    (192, shape(1, 1, 32)),
    (256, few(1, 64, 3)),
    (256, few(1, 64, 2)),
    (256, shape(1, 1, 32)),
];

/// The rows of f32.
const FEW_F32: [(usize, MmaTile); 10] = [
    (64, few(1, 64, 3)),
    (64, few(1, 64, 2)),
    (64, few(2, 64, 3)),
    (64, shape(1, 1, 64)),
    (128, few(1, 64, 3)),
    (128, few(1, 64, 2)),
    (128, shape(1, 1, 32)),
    (192, few(1, 64, 2)),
    (192, shape(1, 1, 16)),
    (256, shape(1, 1, 16)),
];

/// The rows of keys and values in e4m3, whose tiles have half the bytes of 16-bit ones. Instructions limit these kernels: of one query of 4
/// heads over each key, with 64 sequences of 4,096 keys two stages take 147 µs and three 153, with one of 131,072 keys 80 and 88.
///
/// ```text
/// head_dim  rows  keys × stages            shared memory
/// 128       16    128 × 2 by 4 warps       68 KiB
/// 128       32    128 × 3 by 4 warps       104 KiB
/// 128       64    64 × 2                   48 KiB
/// 256       16    64 × 3 by 4 warps        104 KiB
/// 256       64    32 × 2                   64 KiB
/// ```
const FEW_E4M3: [(usize, MmaTile); 5] = [
    (128, few(1, 128, 2)),
    (128, few(2, 128, 3)),
    (128, shape(1, 1, 64)),
    (256, few(1, 64, 3)),
    (256, shape(1, 1, 32)),
];

/// Largest number of rows of all query heads of a group that count as few.
const FEW_ROWS: usize = 64;

/// Why a step of decoding has the tiles of any forward.
const NO_FEW_ROWS: &str = "query heads are not packed, and warps divide no keys, with dropout or a block mask";

/// Smallest numbers of keys for which the kernel of few rows is preferred to the one for Hopper, by the largest number of rows. Of one query of
/// 4 heads over 128 keys it takes 3.8 µs and Hopper's 6.4, with 16 sequences 5.4 and 23.
const MANY_KEYS: [(usize, usize); 2] = [(16, 64), (FEW_ROWS, 256)];

const fn shape(warpgroups: usize, groups: usize, tile_k: usize) -> MmaTile {
    MmaTile { warpgroups, groups, tile_k, warps_k: 1, stages: 2 }
}

/// A tile of 16 rows in each group, whose keys four warps divide among them.
const fn few(groups: usize, tile_k: usize, stages: usize) -> MmaTile {
    MmaTile { warpgroups: 1, groups, tile_k, warps_k: 4, stages }
}

/// Whether `dk` and `dv` are computed together.
pub fn together(problem: &AttentionProblem) -> bool {
    problem.widest() <= TOGETHER
}

/// The table of tiles for a role.
fn rows(problem: &AttentionProblem, role: Role) -> &'static [(usize, MmaTile)] {
    match (problem.dtype, role) {
        (Dtype::F16 | Dtype::BF16, Role::Forward) if problem.kv_storage() == KvStorage::E4m3 => &FORWARD_E4M3,
        (Dtype::F16 | Dtype::BF16, Role::Forward) => &FORWARD,
        (Dtype::F16 | Dtype::BF16, Role::Dq) => &DQ,
        (Dtype::F16 | Dtype::BF16, _) => &DKDV,
        (Dtype::F32, Role::Forward) if problem.rounds_to_tf32() => &FORWARD_TF32,
        (Dtype::F32, Role::Forward) => &FORWARD_SPLIT,
        (Dtype::F32, _) => &GRADIENTS_F32,
    }
}

/// The forward where the queries of all query heads of a group are few, or the reason why it cannot run.
fn few_rows(case: Case) -> Result<MmaForward, String> {
    let Case { device, problem } = case;
    let (group, heads) = (problem.group_size(), problem.batch * problem.num_heads_kv);
    let rows = group * problem.seq_q;
    require(rows <= FEW_ROWS, || format!("{rows} rows of the query heads of a group are above {FEW_ROWS}"))?;
    require(problem.options.dropout == 0.0 && problem.block_mask.is_none(), || NO_FEW_ROWS.into())?;
    let table: &[(usize, MmaTile)] = match (problem.kv_storage(), problem.dtype) {
        (KvStorage::E4m3, _) => &FEW_E4M3,
        (_, Dtype::F32) => &FEW_F32,
        (_, Dtype::F16 | Dtype::BF16) => &FEW,
    };
    row(table, problem)?;
    let fits = table.iter().filter(|(head_dim, tile)| problem.widest() <= *head_dim && rows <= tile.tile_q());
    first(fits.map(|(_, tile)| {
        // Where memory is the limit, one thread block of each multiprocessor has enough on the way. Bytes also have to be converted.
        let of_each = if tile.warps_k > 1 && problem.kv_storage() == KvStorage::Elements { 1 } else { 2 };
        let work = SplitWork {
            workers: of_each * device.multiprocessors,
            heads,
            tile_q: (tile.tile_q() / group).max(1),
            tile_k: tile.tile_k,
            max_splits: splits::MAX_SPLITS,
        };
        let tiles = MmaTiles { tile: *tile, head_group: heads.max(1) };
        let plan = MmaForward { tiles, num_splits: splits::choose(problem, &work), pack_gqa: group > 1 };
        check(case, Role::Forward, plan).map(|()| plan)
    }))
}

/// Whether a step of decoding is faster by this family's forward than by Hopper's, whose tiles have at least 128 queries of one head.
pub fn decodes(case: Case) -> bool {
    let rows = case.problem.group_size() * case.problem.seq_q;
    let enough = |(most, keys): &(usize, usize)| rows <= *most && case.problem.seq_k >= *keys;
    MANY_KEYS.iter().any(enough) && few_rows(case).is_ok()
}

/// The forward, or the reason why the kernel cannot run.
pub fn forward(case: Case) -> Result<MmaForward, String> {
    few_rows(case).or_else(|_| choose(case, Role::Forward).map(MmaForward::from))
}

/// Other forwards: those of the tiles that fit or, with few rows, half and twice as many splits of the keys.
#[cfg(feature = "autotune")]
pub fn alternatives(case: Case, planned: MmaForward) -> Vec<MmaForward> {
    if few_rows(case) != Ok(planned) {
        return fitting(case, Role::Forward).into_iter().map(MmaForward::from).collect();
    }
    let most = (case.problem.seq_k / planned.tiles.tile.tile_k).max(1);
    let counts = [planned.num_splits / 2, planned.num_splits * 2].into_iter();
    let counts = counts.filter(|num_splits| (1..=most).contains(num_splits));
    counts.map(|num_splits| MmaForward { num_splits, ..planned }).collect()
}

/// The first tiles that fit, or the reason why the kernel cannot run.
pub fn choose(case: Case, role: Role) -> Result<MmaTiles, String> {
    row(rows(case.problem, role), case.problem)?;
    first(candidates(case, role))
}

/// Tiles that fit, in the order of the table and without duplicates.
#[cfg(feature = "autotune")]
pub fn fitting(case: Case, role: Role) -> Vec<MmaTiles> {
    let mut tiles = Vec::new();
    for tile in candidates(case, role).flatten() {
        if !tiles.contains(&tile) {
            tiles.push(tile);
        }
    }
    tiles
}

/// Tiles of the table, or the reasons why they cannot be used. Rows for larger head dimensions are valid for this one, too.
fn candidates(case: Case, role: Role) -> impl Iterator<Item = Result<MmaTiles, String>> {
    let rows = rows(case.problem, role).iter().filter(move |(head_dim, _)| case.problem.widest() <= *head_dim);
    rows.map(move |(_, tile)| {
        let head_group = head_group(case, &tile.tile(), role, 1);
        let tiles = MmaTiles { tile: *tile, head_group };
        check(case, role, tiles.into()).map(|()| tiles)
    })
}

/// The blueprint of a kernel, assuming that the rows of a mask or bias differ.
pub fn blueprint(case: Case, role: Role, tile: MmaTile) -> MmaBlueprint {
    let scores = Blueprint { warps_k: tile.warps_k, ..hopper::blueprint(case.problem, role, tile.tile(), false) };
    MmaBlueprint { tile, scores, products: products(case) }
}

/// The kind of matrix products.
pub fn products(Case { device, problem }: Case) -> Products {
    match (problem.kv_storage(), problem.dtype) {
        // CubeCL does not tell of conversions of e4m3. What has products of warpgroups has them.
        (KvStorage::E4m3, _) => Products::E4m3 { instruction: device.wgmma },
        (_, Dtype::F16) => Products::F16,
        (_, Dtype::BF16) => Products::BF16,
        (_, Dtype::F32) if problem.rounds_to_tf32() => Products::Tf32,
        (_, Dtype::F32) => Products::Split,
    }
}

/// Checks that these tiles can be used; else returns the reason.
pub fn check(Case { device, problem }: Case, role: Role, plan: MmaForward) -> Result<(), String> {
    let MmaForward { tiles, num_splits, pack_gqa } = plan;
    let MmaTiles { tile, head_group } = tiles;
    require(head_group > 0, || "head_group is 0; it must be at least 1".into())?;
    require(num_splits > 0, || "num_splits is 0; it must be at least 1".into())?;
    require(num_splits == 1 || problem.block_mask.is_none(), || {
        format!("num_splits is {num_splits}, and with a block mask keys are not split")
    })?;
    let (group, rows) = (problem.group_size(), tile.tile_q());
    require(!pack_gqa || group <= rows, || format!("a group has {group} query heads, and a tile {rows} rows"))?;
    let (heads, queries) = if pack_gqa { (problem.num_heads_kv, rows / group) } else { (problem.num_heads_q, rows) };
    let (blocks, batches) = super::blocks(problem, problem.seq_q, queries);
    let counted = batches * heads * blocks;
    require(!plan.combines() || counted <= COUNTERS, || {
        format!("num_splits is {num_splits} for {counted} blocks of queries of all heads, more than {COUNTERS}")
    })?;
    let of_heads = pack_gqa || tile.warps_k > 1;
    require(!of_heads || problem.options.dropout == 0.0 && problem.block_mask.is_none(), || NO_FEW_ROWS.into())?;
    require(tile.warps_k == 1 || role == Role::Forward, || {
        format!("warps_k is {}; only the forward divides keys among warps", tile.warps_k)
    })?;
    require(cfg!(feature = "cuda"), || NOT_COMPILED.into())?;
    require(device.mma.contains(&problem.dtype), || {
        format!("the device has no mma.sync for {} that inline PTX can use", problem.dtype.name())
    })?;
    let row_bytes = [problem.head_dim, problem.head_dim_v].map(|columns| columns * problem.kv_size());
    let whole = row_bytes.iter().all(|bytes| bytes.is_multiple_of(VECTOR_BYTES));
    require(problem.pages.is_none() || whole, || {
        format!("rows of {row_bytes:?} bytes would be padded to multiples of {VECTOR_BYTES}, which copies all pages")
    })?;
    let halves = problem.dtype != Dtype::F32;
    require(halves || problem.kv_storage() == KvStorage::Elements, || {
        "it multiplies e4m3 by f16 and bf16 only, and q is f32".into()
    })?;
    require(tile.is_consistent(), || {
        format!("{tile:?} is inconsistent: the rows that are copied at a time must divide a tile")
    })?;
    let list = Gradient::Mma(tiles).list(role.is_transposed());
    require(problem.block_mask.is_none() || list.divides_blocks(), || {
        format!("tiles of {}×{} do not divide the blocks of a block mask", list.rows, list.columns)
    })?;
    list.check_words(problem)?;
    let blueprint = blueprint(Case { device, problem }, role, tile);
    let scores = &blueprint.scores;
    require(!role.is_transposed() || scores.stats_multiple.is_multiple_of(tile.tile_k), || {
        format!(
            "tiles of {} queries do not divide the multiple to which the scratch pads the rows of a head",
            tile.tile_k
        )
    })?;
    let (merged, streamed) = (blueprint.merge_bytes(), tile.stages * (scores.k_bytes() + scores.v_bytes()));
    require(merged <= streamed, || format!("{merged} bytes of attentions of warps do not fit {streamed} of K and V"))?;
    device.has_room(blueprint.shared_memory(), tile.units())
}
