//! Tiles, head groups and splits of the keys for the kernels of NVIDIA Hopper.

mod tables;
mod wide;

use super::splits::{self, SplitWork};
use super::{
    BackwardTiles, BiasGradient, Case, FamilyTiles, Gradient, Gradients, HopperForward, HopperGradient, NOT_COMPILED,
    bias_sums, gradients, require, row, takes_sums,
};
use crate::dtype::Dtype;
use crate::fragment::Role;
use crate::hopper::{BiasTile, MAX_STAGES, dq_accum_columns};
use crate::mma::MmaTile;
use crate::portable::tile::TileShape;
use crate::problem::AttentionProblem;
use crate::score::{Factor, Factors};
use crate::tensor_core::{Blueprint, HopperTile, PANEL, Rows};
use tables::{HOPPER, HOPPER_BIAS, HOPPER_BLOCKS, HOPPER_DBIAS, HOPPER_DKDV, HOPPER_DQ, HOPPER_FUSED};
pub(crate) use wide::is_wide;

/// Largest size in bytes of the keys and values of a head group: what one half of Hopper's L2 cache (50 to 60 MB) can hold besides
/// other data.
const SECTION_BYTES: usize = 32 << 20;

/// Whether there is a bias that repeats neither queries nor keys. Such a bias may be loaded in tiles, if TMA can read its strides,
/// which are known only at the call.
pub fn varies_by_pair(problem: &AttentionProblem) -> bool {
    problem.bias.is_some_and(|[_, _, q, k]| q == problem.seq_q && k == problem.seq_k && q * k > 1)
}

/// Alternatives that may be as fast: the table's other tiles for this head dimension, and half and twice as many splits of the
/// keys.
#[cfg(feature = "autotune")]
pub fn alternatives(case: Case, planned: HopperForward) -> Vec<HopperForward> {
    let problem = case.problem;
    // With a tiled bias, no other tiles fit shared memory.
    let rows = HOPPER.iter().filter(|(head_dim, _, tile)| {
        let possible = problem.block_mask.is_none() || divides(tile);
        problem.widest() <= *head_dim && !varies_by_pair(problem) && possible
    });
    let narrowest = rows.clone().map(|(head_dim, ..)| *head_dim).min();
    let tiles = rows.filter(|(head_dim, ..)| Some(*head_dim) == narrowest).map(|(.., tile)| with_tile(case, *tile));
    let counts = [planned.num_splits / 2, planned.num_splits * 2].into_iter().filter(|num_splits| {
        // Each split has at least one tile of keys.
        planned.num_splits > 1 && (1..=problem.seq_k / planned.tile.tile_k).contains(num_splits)
    });
    tiles.chain(counts.map(|num_splits| HopperForward { num_splits, ..planned })).collect()
}

/// The forward by Hopper's kernel, or the reason why it cannot run.
pub fn forward(case: Case) -> Result<HopperForward, String> {
    possible(case)?;
    let problem = case.problem;
    // With a block mask, tiles must divide its blocks.
    let sparse = problem.block_mask.is_some();
    let fits = |seq_k: usize, tile: &HopperTile| if sparse { divides(tile) } else { problem.seq_k <= seq_k };
    let plain = HOPPER.iter().find(|(head_dim, seq_k, tile)| problem.widest() <= *head_dim && fits(*seq_k, tile));
    let of_blocks = Some(HOPPER_BLOCKS).filter(|(head_dim, _)| sparse && problem.widest() <= *head_dim);
    let tile = of_blocks.map(|(_, tile)| tile).or(plain.map(|(.., tile)| *tile));
    // Tiles for a bias divide any block.
    let tile = tile.filter(|_| !varies_by_pair(problem)).map_or_else(|| row(&HOPPER_BIAS, problem), Ok)?;
    let found = with_tile(case, tile);
    check(case, Role::Forward, tile, found.head_group, found.num_splits)?;
    Ok(found)
}

/// Number of splits of the keys for this tile.
fn num_splits(Case { device, problem }: Case, tile: &HopperTile) -> usize {
    let heads = problem.batch * problem.num_heads_q;
    let workers = device.multiprocessors * tile.consumer_groups;
    let (tile_q, tile_k) = (tile.tile_q(), tile.tile_k);
    splits::choose(problem, &SplitWork { workers, heads, tile_q, tile_k, max_splits: splits::MAX_SPLITS })
}

/// The forward with this tile.
fn with_tile(case: Case, tile: HopperTile) -> HopperForward {
    HopperForward { tile, head_group: head_group(case, &tile, Role::Forward, 1), num_splits: num_splits(case, &tile) }
}

/// Whether there is a causal mask or a window, so that blocks differ in length.
fn is_bounded(problem: &AttentionProblem) -> bool {
    let band = problem.band();
    band.bounded_above || band.bounded_below
}

/// Number of heads in a head group. If queries are streamed, the heads are key/value heads, whose query heads are in `num_splits` splits.
pub(super) fn head_group(Case { device, problem }: Case, tile: &HopperTile, role: Role, num_splits: usize) -> usize {
    let bounded = is_bounded(problem);
    let consumer_groups = device.multiprocessors * tile.consumer_groups;
    let waits = role.adds_in_order(problem);
    let (rows, heads) = problem.side(role.is_transposed());
    let blocks = rows.div_ceil(wide::rows_of_block(problem, tile, role)).max(1);
    let heads = (problem.batch * heads).max(1);
    if waits {
        return waiting_heads(consumer_groups, blocks, tile).min(heads);
    }
    // If all blocks have the same length, heads are processed one by one: their keys and values are then read by all consumer
    // groups at the same time. With a block mask, lengths differ. This matters more if several consumer groups share the blocks of
    // a head.
    if !bounded && (problem.block_mask.is_none() || tile.consumer_groups == 1) {
        return 1;
    }
    let of_cache = if role.is_transposed() {
        // Blocks of the same length visit the query heads of a group together.
        let visited = if bounded { problem.group_size() } else { 1 };
        SECTION_BYTES / (of_query_head(problem, role) * visited).max(1)
    } else {
        let of_position = (problem.head_dim + problem.head_dim_v) * problem.dtype.size();
        SECTION_BYTES / (problem.seq_k * of_position).max(1) * problem.group_size()
    };
    let most = if bounded {
        // At least two blocks of each head are processed at a time. Otherwise every load would come from memory first and from the
        // cache later.
        consumer_groups / 2
    } else {
        // About two blocks of a head group for each consumer group, so that the last blocks to run are short.
        2 * consumer_groups / blocks
    };
    // Blocks of keys visit the same tiles of queries at the same time. As many of them are in a head group as run at a time, even if
    // the cache holds fewer heads.
    let least = if role.is_transposed() { consumer_groups / (blocks * num_splits) } else { 1 };
    // A power of two, as numbers of heads usually are: a last head group with few heads would keep few consumer groups busy.
    let head_group = of_cache.max(least).min(most).max(1);
    (1 << head_group.ilog2()).min(heads)
}

/// Number of heads in a head group whose blocks wait for each other: those whose blocks run at a time, but at least 2. Most blocks that
/// a block waits for have then started together with it, and what they share is in the cache. Tiles of 128 queries have half as many
/// turns for the same work, so that a block that is late holds up the others for longer: twice as many heads are faster.
fn waiting_heads(consumer_groups: usize, blocks: usize, tile: &HopperTile) -> usize {
    let heads = (consumer_groups / blocks).max(2) * tile.tile_k / PANEL;
    1 << heads.max(1).ilog2()
}

/// The gradients by Hopper's kernels, or the reason why they cannot run.
pub fn backward(case: Case) -> Result<Gradients, String> {
    possible(case)?;
    let problem = case.problem;
    let (dq, (dkdv, dv)) = (row(&HOPPER_DQ, problem)?, row(&HOPPER_DKDV, problem)?);
    let divided = |tile: &HopperTile| problem.block_mask.is_none() || divides(tile);
    gradients(dv.is_none(), |role| {
        let [plain, with_bias] = match role {
            Role::Dq | Role::Sums { keys: false } => dq,
            Role::DkDv { dk: false, .. } => [dv.unwrap_or(dkdv[0]), dkdv[1]],
            _ => dkdv,
        };
        let tile = if varies_by_pair(problem) || !divided(&plain) { with_bias } else { plain };
        // Tiles of 32 divide any block.
        let tile = if divided(&tile) { tile } else { HopperTile { tile_k: 32, ..tile } };
        let head_group = head_group(case, &tile, role, 1);
        check(case, role, tile, head_group, 1)?;
        Ok(Gradient::Hopper(HopperGradient { tile, head_group, num_splits: 1 }))
    })
}

/// Whether the blocks of a block mask consist of whole tiles.
fn divides(tile: &HopperTile) -> bool {
    FamilyTiles::<_, MmaTile, TileShape>::Hopper(*tile).list(false).divides_blocks()
}

/// The gradient of the bias by Hopper's kernel, if the other gradients run on Hopper, or the reason why it cannot run.
pub fn dbias(problem: &AttentionProblem) -> Result<BiasTile, String> {
    let sums = || "it does not sum over queries or keys, over which the bias is broadcast".into();
    require(varies_by_pair(problem), sums)?;
    let dense = || "it does not support block masks".into();
    require(problem.block_mask.is_none(), dense)?;
    let equal = || "it does not support several sequences, because the lengths in one tile would differ".into();
    require(!problem.is_varlen(), equal)?;
    row(&HOPPER_DBIAS, problem)
}

/// Bytes of shared memory of a thread block on every GPU with warpgroup products.
const SHARED_MEMORY: usize = 227 << 10;

/// Whether a kernel of this role has registers, and shared memory, for these sums.
pub fn carries(problem: &AttentionProblem, kernel: Gradient, role: Role, sums: Factors) -> bool {
    let Gradient::Hopper(HopperGradient { tile, .. }) = kernel else { return false };
    match role {
        Role::Sums { .. } => true,
        _ if is_wide(problem, role) => sums.is_empty(),
        _ => {
            // The call may load the bias in tiles.
            let bias = problem.bias.map(|_| if varies_by_pair(problem) { Rows::Tiled } else { Rows::Each });
            let blueprint = Blueprint { sums, bias, ..blueprint(problem, role, tile, false) };
            role.accumulates() && sums.len() <= 1 && blueprint.shared_memory() <= SHARED_MEMORY
        }
    }
}

/// The kernel of `dq`, or of `dk` if rows are `keys`, and its role where it computes sums as well.
pub fn of_sums(tiles: &BackwardTiles, keys: bool) -> (Gradient, Role) {
    if keys { (tiles.dkdv, Role::DkDv { dk: true, dv: tiles.dv.is_none() }) } else { (tiles.dq, Role::Dq) }
}

/// The kernels that sum the gradients of bias, slopes and the tensors of `score_mod`, if they exist and are broadcast over queries or
/// keys. They depend on the problem alone, so that no gradient depends on which others are requested.
pub fn sums(problem: &AttentionProblem, tiles: &BackwardTiles) -> [Option<BiasGradient>; 4] {
    let [score_a, score_b] = problem.score_tensors;
    let slopes = problem.alibi_slopes.map(|[batch, heads]| [batch, heads, 1, 1]);
    let mut carried = [Factors::default(); 2];
    [(problem.bias, Factor::One), (slopes, Factor::Slope), (score_a, Factor::A), (score_b, Factor::B)].map(
        |(shape, factor)| {
            let shape = shape?;
            let kind = bias_sums(&shape, problem);
            let sides = || [false, true].into_iter().filter(|keys| takes_sums(kind, &shape, *keys));
            let carries = |keys: &bool| {
                let (kernel, role) = of_sums(tiles, *keys);
                carries(problem, kernel, role, carried[usize::from(*keys)].with(factor))
            };
            if let Some(keys) = sides().find(carries) {
                carried[usize::from(keys)] = carried[usize::from(keys)].with(factor);
                return Some(BiasGradient::Sums { keys, alone: false });
            }
            sides().next().map(|keys| BiasGradient::Sums { keys, alone: true })
        },
    )
}

/// Work for each multiprocessor from which on blocks of keys add to dQ in order. Blocks of different lengths are counted: the shortest
/// blocks of a head group come first, and the last of fewer, longer ones would end late. Of blocks of the same length, tiles of queries
/// are counted: the first blocks of a head start one after the other, one tile apart.
const MANY: usize = 12;

/// All three gradients by one kernel if that is faster than two kernels, or the reason why it is not used.
pub fn fused(case: Case) -> Result<HopperGradient, String> {
    let (least, fused) = fusible(case)?;
    let Case { device, problem } = case;
    let queries = problem.seq_q;
    require(queries >= least, || {
        format!("with {queries} queries two kernels are as fast; at least {least} are needed")
    })?;
    let in_order = Role::All.adds_in_order(problem);
    require(!in_order || problem.options.window_left.is_none(), || {
        "with a window, two kernels with a fixed order are as fast".into()
    })?;
    let keys = wide::rows_of_block(problem, &fused.tile, Role::All);
    let blocks = problem.seq_k.div_ceil(keys);
    let many = MANY * device.multiprocessors;
    if in_order && is_bounded(problem) {
        let blocks = problem.batch * problem.num_heads_kv * blocks;
        require(blocks >= many, || {
            format!("the longest of {blocks} blocks of keys would add to dq last; at least {many} are needed")
        })?;
    } else if in_order && blocks > 1 {
        let tiles = problem.batch * problem.num_heads_q * queries.div_ceil(fused.tile.tile_k);
        require(tiles >= many, || {
            format!(
                "blocks of keys would start one after the other, with {tiles} tiles of queries; at least {many} are needed"
            )
        })?;
    }
    Ok(fused)
}

/// All three gradients by one kernel, and the number of queries from which on it is faster than two kernels; or the reason why it
/// cannot run.
pub fn fusible(case: Case) -> Result<(usize, HopperGradient), String> {
    possible(case)?;
    let problem = case.problem;
    require(!problem.is_varlen(), || {
        "it does not support several sequences, because blocks of keys would add to queries of others".into()
    })?;
    let fixed = Role::All.adds_in_order(problem);
    require(!fixed || problem.block_mask.is_none(), || {
        "with a block mask, the order of the blocks of keys that add to a query is not known".into()
    })?;
    require(problem.bias.is_none(), || "with a bias, tiles of dS do not fit in shared memory".into())?;
    let (head_dim, widest) = (problem.head_dim, problem.widest());
    let (least, tile) = row(&HOPPER_FUSED, problem)?;
    if is_wide(problem, Role::All) {
        wide::check(problem, tile)?;
    } else {
        require(tile.tile_k * head_dim.div_ceil(PANEL) == tile.tile_q(), || {
            format!(
                "head_dim is {head_dim}, where the larger head dimension is {widest}: dQ cannot be divided into blocks of 64 × 64 for two warpgroups"
            )
        })?;
    }
    let num_splits = group_splits(problem);
    let head_group = head_group(case, &tile, Role::All, num_splits);
    Ok((least, HopperGradient { tile, head_group, num_splits }))
}

/// Number of splits of a group's query heads. With causal attention blocks of keys differ in length and drift apart as they go through
/// query heads. If those of a group do not fit the cache together, splits have at most two. Blocks that wait for each other would wait
/// longer.
fn group_splits(problem: &AttentionProblem) -> usize {
    let (group, band) = (problem.group_size(), problem.band());
    let drifts = band.bounded_above && !band.bounded_below && problem.block_mask.is_none();
    let fits = group * of_query_head(problem, Role::All) <= SECTION_BYTES;
    if !drifts || fits || is_wide(problem, Role::All) || Role::All.adds_in_order(problem) {
        return 1;
    }
    (1..=group).find(|splits| group.is_multiple_of(*splits) && group / splits <= 2).unwrap_or(1)
}

/// Bytes of a query head that blocks of keys load and, in this role, add to.
fn of_query_head(problem: &AttentionProblem, role: Role) -> usize {
    let loaded = (problem.head_dim + problem.head_dim_v) * problem.dtype.size();
    let added = if role == Role::All { dq_accum_columns(problem.head_dim) * size_of::<f32>() } else { 0 };
    problem.seq_q * (loaded + added)
}

/// Shapes of what the splits of a group's query heads write: the sums of `dk` and `dv`.
pub(crate) fn split_sums_shapes(problem: &AttentionProblem, num_splits: usize) -> [[usize; 4]; 2] {
    let [batch, heads, rows, _] = problem.k_shape();
    [problem.head_dim, problem.head_dim_v].map(|columns| [num_splits * batch, heads, rows, columns.next_multiple_of(8)])
}

/// Checks that a kernel of this role can run with these tiles; else returns the reason, which names the field and its value.
pub(crate) fn check(
    case: Case,
    role: Role,
    tile: HopperTile,
    head_group: usize,
    num_splits: usize,
) -> Result<(), String> {
    possible(case)?;
    let Case { device, problem } = case;
    let HopperTile { consumer_groups, warpgroups, tile_k, stages, ping_pong: _, producer_warp } = tile;
    let forward = role == Role::Forward;
    FamilyTiles::<_, MmaTile, TileShape>::Hopper(tile).list(role.is_transposed()).check_words(problem)?;
    for (what, value, least) in [
        ("consumer_groups", consumer_groups, 1),
        // The second warpgroup loads V.
        ("warpgroups", warpgroups, 2),
        ("stages", stages, 2),
        ("head_group", head_group, 1),
        ("num_splits", num_splits, 1),
    ] {
        require(value >= least, || format!("{what} is {value}; it must be at least {least}"))?;
    }
    require(stages <= MAX_STAGES, || {
        format!(
            "stages is {stages}; it must be at most {MAX_STAGES}, the number of loads for which work tiles are known ahead"
        )
    })?;
    require(tile_k.is_multiple_of(16) && (16..=256).contains(&tile_k), || {
        format!("tile_k is {tile_k}; it must be a multiple of 16 and at most 256")
    })?;
    // One named barrier for each warpgroup's turn, and one for the whole thread block.
    require(consumer_groups * warpgroups <= 15, || {
        format!(
            "consumer_groups × warpgroups is {}; there are named barriers for at most 15",
            consumer_groups * warpgroups
        )
    })?;
    require(forward || !producer_warp, || "producer_warp is true; only the forward has a producer warp".into())?;
    require(forward || (consumer_groups, warpgroups) == (1, 2), || {
        format!(
            "consumer_groups × warpgroups is {consumer_groups} × {warpgroups}; gradients need one consumer group of two warpgroups"
        )
    })?;
    let group = problem.group_size();
    let splits_group = role == Role::All && !is_wide(problem, role);
    require(num_splits == 1 || forward && problem.block_mask.is_none() || splits_group, || {
        format!(
            "num_splits is {num_splits}; only a forward without a block mask can split the keys, and only dq, dk and dv together a group of heads"
        )
    })?;
    require(role != Role::All || group.is_multiple_of(num_splits), || {
        format!("num_splits is {num_splits}; it must divide {group}, the number of query heads in a group")
    })?;
    let (multiple, wide) = (stats_multiple(problem), is_wide(problem, role));
    require(wide || !role.is_transposed() || multiple.is_multiple_of(tile_k), || {
        format!("tile_k is {tile_k}; it must divide {multiple}, to which the scratch pads the rows of a head")
    })?;
    if role == Role::All {
        fusible(case)?;
        if wide {
            wide::check(problem, tile)?;
        }
        require(wide || tile_k * problem.head_dim.div_ceil(PANEL) == tile.tile_q(), || {
            format!("tile_k is {tile_k}; a tile of dQ must consist of one block of 64 × 64 for each of two warpgroups")
        })?;
    }
    let bytes = if wide {
        wide::blueprint(problem, tile).shared_memory()
    } else {
        blueprint(problem, role, tile, num_splits > 1).shared_memory()
    };
    let units = tile.units();
    let (available, most) = (device.shared_memory, device.units);
    require(bytes <= available && units <= most, || {
        format!(
            "{tile:?} takes {bytes} bytes of shared memory and {units} threads, and the device has {available} and {most}"
        )
    })
}

/// The blueprint of a kernel, assuming that a mask or bias is read directly from memory and its rows differ.
pub(crate) fn blueprint(problem: &AttentionProblem, role: Role, tile: HopperTile, is_split: bool) -> Blueprint {
    Blueprint {
        role,
        tile,
        dtype: problem.dtype,
        storage: problem.kv_storage(),
        tf32: problem.rounds_to_tf32(),
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        capped: problem.options.softcap.is_some(),
        mask: problem.mask.map(|_| Rows::Each),
        bias: problem.bias.map(|_| Rows::Each),
        alibi: problem.alibi_slopes.is_some(),
        modified: problem.options.score_mod.is_some(),
        keeps_derivative: role.keeps_derivative(problem),
        sums: Factors::default(),
        mask_mod: problem.options.mask_mod.is_some(),
        varlen: problem.is_varlen(),
        sparse: problem.block_mask.is_some(),
        ordered: role.adds_in_order(problem),
        split_keys: is_split && role == Role::Forward,
        split_group: is_split && role != Role::Forward,
        pack_gqa: false,
        warps_k: 1,
        stats_multiple: stats_multiple(problem),
    }
}

/// Checks that Hopper's kernels support the problem at all; else returns the reason.
fn possible(Case { device, problem }: Case) -> Result<(), String> {
    require(device.wgmma, || "the device has no warpgroup matrix products".into())?;
    require(cfg!(feature = "cuda"), || NOT_COMPILED.into())?;
    require(problem.dtype != Dtype::F32, || "it computes in f16 and bf16 only, and q is f32".into())?;
    require(problem.pages.is_none(), || "TMA copies rows of one sequence, and keys are in pages".into())
}

/// Rows of lse and delta of a head are padded to a multiple of this, because whole tiles of them are loaded.
pub fn stats_multiple(problem: &AttentionProblem) -> usize {
    if problem.widest() <= 192 { 128 } else { 384 }
}
