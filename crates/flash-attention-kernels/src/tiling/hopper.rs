//! Tiles, head groups and splits of the keys for the kernels of NVIDIA Hopper.

mod tables;

use super::{Device, Forward, Gradient, HopperForward, HopperGradient, ListShape};
use crate::blocks::BLOCK;
use crate::dtype::Dtype;
use crate::fragment::Role;
use crate::hopper::{BiasTile, MAX_STAGES};
use crate::mma::Products;
use crate::problem::AttentionProblem;
use crate::tensor_core::{Blueprint, HopperTile, PANEL, Rows};
use tables::{HOPPER, HOPPER_BIAS, HOPPER_BLOCKS, HOPPER_DBIAS, HOPPER_DKDV, HOPPER_DQ, HOPPER_FUSED};

/// Largest size in bytes of the keys and values of a head group: what one half of Hopper's L2 cache (50 to 60 MB) can hold besides
/// other data.
const SECTION_BYTES: usize = 32 << 20;

/// Number of counters of a stream, which launches use one after the other, and bytes of each counter.
pub const COUNTERS: usize = 256;
pub const COUNTER_BYTES: usize = 4;

/// Fixed cost of a work tile, in units of the time of one tile of keys.
const ITEM: usize = 3;
/// Cost of combining splits of the keys: a fixed cost in tiles, and the number of bytes written and read again in the time of one
/// tile.
const COMBINE: usize = 4;
const COMBINED: usize = 4 << 20;
/// Numbers of splits that are considered.
const SPLITS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// Whether there is a bias that repeats neither queries nor keys. Such a bias may be loaded in tiles, if TMA can read its strides,
/// which are known only at the call.
pub fn varies_by_pair(problem: &AttentionProblem) -> bool {
    problem.bias.is_some_and(|[_, _, q, k]| q == problem.seq_q && k == problem.seq_k && q * k > 1)
}

/// Alternatives that may be as fast: the table's other tiles for this head dimension, and half and twice as many splits of the
/// keys.
#[cfg(feature = "autotune")]
pub fn alternatives(device: &Device, problem: &AttentionProblem, planned: HopperForward) -> Vec<HopperForward> {
    let widest = problem.head_dim.max(problem.head_dim_v);
    // With a tiled bias, no other tiles fit shared memory.
    let rows = HOPPER.iter().filter(|(head_dim, _, tile)| {
        let possible = problem.block_mask.is_none() || divides(tile);
        widest <= *head_dim && !varies_by_pair(problem) && possible
    });
    let narrowest = rows.clone().map(|(head_dim, ..)| *head_dim).min();
    let tiles = rows.filter(|(head_dim, ..)| Some(*head_dim) == narrowest).map(|(.., tile)| HopperForward {
        tile: *tile,
        head_group: head_group(device, problem, tile, false),
        num_splits: num_splits(device, problem, tile),
    });
    let counts = [planned.num_splits / 2, planned.num_splits * 2].into_iter().filter(|num_splits| {
        // Each split has at least one tile of keys.
        planned.num_splits > 1 && (1..=problem.seq_k / planned.tile.tile_k).contains(num_splits)
    });
    tiles.chain(counts.map(|num_splits| HopperForward { num_splits, ..planned })).collect()
}

/// The forward by Hopper's kernel, or the reason why it cannot run.
pub fn forward(device: &Device, problem: &AttentionProblem) -> Result<HopperForward, String> {
    possible(device, problem)?;
    let widest = problem.head_dim.max(problem.head_dim_v);
    let row = HOPPER.iter().find(|(head_dim, seq_k, tile)| {
        // With a block mask, tiles must divide its blocks.
        let fits = if problem.block_mask.is_some() { divides(tile) } else { problem.seq_k <= *seq_k };
        widest <= *head_dim && fits
    });
    let of_blocks = Some(HOPPER_BLOCKS).filter(|(head_dim, _)| problem.block_mask.is_some() && widest <= *head_dim);
    // Tiles for a bias divide any block.
    let narrow = HOPPER_BIAS.iter().find(|(head_dim, _)| widest <= *head_dim).map(|(_, tile)| *tile);
    let tile = of_blocks.map(|(_, tile)| tile).or(row.map(|(.., tile)| *tile));
    let tile = tile.filter(|_| !varies_by_pair(problem)).or(narrow);
    let tile = tile.ok_or_else(|| format!("head_dim {widest} is above {}", HOPPER[HOPPER.len() - 1].0))?;

    let found = HopperForward {
        tile,
        head_group: head_group(device, problem, &tile, false),
        num_splits: num_splits(device, problem, &tile),
    };
    numbers(problem, Forward::Hopper(found).list(false))?;
    check(device, problem, Role::Forward, tile, found.head_group, found.num_splits)?;
    Ok(found)
}

/// Number of heads in a head group. If `transposed`, the heads are key/value heads, and queries are streamed.
pub(super) fn head_group(device: &Device, problem: &AttentionProblem, tile: &HopperTile, transposed: bool) -> usize {
    let band = problem.band();
    let bounded = band.bounded_above || band.bounded_below;
    let consumer_groups = device.multiprocessors * tile.consumer_groups;
    // If all blocks have the same length, heads are processed one by one: their keys and values are then read by all consumer
    // groups at the same time. With a block mask, lengths differ. This matters more if several consumer groups share the blocks of
    // a head.
    if !bounded && (problem.block_mask.is_none() || tile.consumer_groups == 1) {
        return 1;
    }
    let of_position = (problem.head_dim + problem.head_dim_v) * problem.dtype.size();
    let (of_cache, heads, rows) = if transposed {
        let heads = SECTION_BYTES / (problem.seq_q * of_position * problem.group_size()).max(1);
        (heads, problem.num_heads_kv, problem.seq_k)
    } else {
        let heads = SECTION_BYTES / (problem.seq_k * of_position).max(1) * problem.group_size();
        (heads, problem.num_heads_q, problem.seq_q)
    };
    let most = if bounded {
        // At least two blocks of each head are processed at a time. Otherwise every load would come from memory first and from the
        // cache later.
        consumer_groups / 2
    } else {
        // About two blocks of a head group for each consumer group, so that the last blocks to run are short.
        2 * consumer_groups / rows.div_ceil(tile.tile_q()).max(1)
    };
    // A power of two, as numbers of heads usually are: a last head group with few heads would keep few consumer groups busy.
    let most = 1 << most.max(1).ilog2();
    of_cache.min(most).clamp(1, (problem.batch * heads).max(1))
}

/// The gradients by Hopper's kernels (`dq`, then `dk` and `dv` together, or `dv` in a separate launch), or the reason why they
/// cannot run.
pub fn backward(device: &Device, problem: &AttentionProblem) -> Result<(Gradient, Gradient, Option<Gradient>), String> {
    possible(device, problem)?;
    let widest = problem.head_dim.max(problem.head_dim_v);
    let biased = varies_by_pair(problem);
    let too_wide = || format!("head_dim {widest} is above {}", HOPPER_DQ[HOPPER_DQ.len() - 1].0);
    let (_, plain, with_bias) = HOPPER_DQ.iter().find(|(of, ..)| widest <= *of).ok_or_else(too_wide)?;
    let narrow = |tile: &HopperTile| biased || problem.block_mask.is_some() && !divides(tile);
    let dq = if narrow(plain) { *with_bias } else { *plain };
    let (_, plain, with_bias, dv) = HOPPER_DKDV.iter().find(|(of, ..)| widest <= *of).ok_or_else(too_wide)?;
    let dkdv = if narrow(plain) { *with_bias } else { *plain };
    let dv = dv.map(|tile| if narrow(&tile) { *with_bias } else { tile });
    let of = |tile: HopperTile, role: Role| {
        // Tiles of 32 divide any block.
        let sparse = problem.block_mask.is_some() && !divides(&tile);
        let tile = if sparse { HopperTile { tile_k: 32, ..tile } } else { tile };
        let head_group = head_group(device, problem, &tile, role.is_transposed());
        let found = Gradient::Hopper(HopperGradient { tile, head_group });
        numbers(problem, found.list(role.is_transposed()))?;
        check(device, problem, role, tile, head_group, 1)?;
        Ok::<_, String>(found)
    };
    let of_values = dv.map(|tile| of(tile, Role::DkDv { dk: false, dv: true })).transpose()?;
    Ok((of(dq, Role::Dq)?, of(dkdv, Role::DkDv { dk: true, dv: of_values.is_none() })?, of_values))
}

/// Whether the blocks of a block mask consist of whole tiles.
fn divides(tile: &HopperTile) -> bool {
    BLOCK.is_multiple_of(tile.tile_q()) && BLOCK.is_multiple_of(tile.tile_k)
}

/// The gradient of the bias by Hopper's kernel, if the other gradients run on Hopper, or the reason why it cannot run.
pub fn dbias(problem: &AttentionProblem) -> Result<BiasTile, String> {
    if !varies_by_pair(problem) {
        return Err("it takes no sums over queries or keys, which the bias repeats".into());
    }
    if problem.block_mask.is_some() {
        return Err("it visits all blocks of the bias: a block mask is for other kernels".into());
    }
    if problem.is_varlen() {
        return Err("blocks of one tile's batches would differ: sequences have lengths of their own".into());
    }
    let widest = problem.head_dim.max(problem.head_dim_v);
    let row = HOPPER_DBIAS.iter().find(|(of, _)| widest <= *of);
    row.map(|(_, tile)| *tile)
        .ok_or_else(|| format!("head_dim {widest} is above {}", HOPPER_DBIAS[HOPPER_DBIAS.len() - 1].0))
}

/// All three gradients by one kernel if that is faster than two kernels, or the reason why it is not used.
pub fn fused(device: &Device, problem: &AttentionProblem) -> Result<HopperGradient, String> {
    let (least, fused) = fusible(device, problem)?;
    if problem.seq_q < least {
        return Err(format!("with {} queries a fixed order is as fast, {least} are the least", problem.seq_q));
    }
    Ok(fused)
}

/// All three gradients by one kernel, and the number of queries from which on it is faster than two kernels; or the reason why it
/// cannot run.
pub fn fusible(device: &Device, problem: &AttentionProblem) -> Result<(usize, HopperGradient), String> {
    possible(device, problem)?;
    if problem.is_varlen() {
        return Err("blocks of keys would add to sequences that are not theirs".into());
    }
    if problem.bias.is_some() {
        return Err("a bias leaves no room for tiles of dS in shared memory".into());
    }
    let (head_dim, widest) = (problem.head_dim, problem.head_dim.max(problem.head_dim_v));
    let (_, least, tile) = HOPPER_FUSED
        .iter()
        .find(|(of, ..)| widest <= *of)
        .ok_or_else(|| format!("head_dim {widest} is above {}", HOPPER_FUSED[HOPPER_FUSED.len() - 1].0))?;
    if tile.tile_k * head_dim.div_ceil(PANEL) != tile.tile_q() {
        return Err(format!("head_dim {head_dim} gives dQ no blocks of 64 × 64 for two warpgroups beside {widest}"));
    }
    Ok((*least, HopperGradient { tile: *tile, head_group: head_group(device, problem, tile, true) }))
}

/// Largest number of words of a block mask's lists that Hopper's kernels can address with 32 bits.
pub(super) const MAX_LIST: u64 = u32::MAX as u64;

/// Checks that a kernel of this role can run with these tiles; else returns the reason, which names the field and its value.
pub(crate) fn check(
    device: &Device,
    problem: &AttentionProblem,
    role: Role,
    tile: HopperTile,
    head_group: usize,
    num_splits: usize,
) -> Result<(), String> {
    possible(device, problem)?;
    let HopperTile { consumer_groups, warpgroups, tile_k, stages, ping_pong: _, producer_warp } = tile;
    let forward = role == Role::Forward;
    let at_least = |what: &str, value: usize, least: usize| {
        if value >= least { Ok(()) } else { Err(format!("{what} is {value}, and {least} is the least")) }
    };
    at_least("consumer_groups", consumer_groups, 1)?;
    // The second warpgroup loads V.
    at_least("warpgroups", warpgroups, 2)?;
    at_least("stages", stages, 2)?;
    at_least("head_group", head_group, 1)?;
    at_least("num_splits", num_splits, 1)?;
    if stages > MAX_STAGES {
        return Err(format!("stages is {stages}: work items are known for {MAX_STAGES} loads ahead at most"));
    }
    if !tile_k.is_multiple_of(16) || !(16..=256).contains(&tile_k) {
        return Err(format!("tile_k is {tile_k}: products take multiples of 16, at most 256"));
    }
    // One named barrier for each warpgroup's turn, and one for the whole thread block.
    if consumer_groups * warpgroups > 15 {
        return Err(format!(
            "consumer_groups × warpgroups is {}: there are named barriers for 15",
            consumer_groups * warpgroups
        ));
    }
    if producer_warp && !forward {
        return Err("producer_warp is true: a warp of its own loads in the forward alone".into());
    }
    if !forward && (consumer_groups, warpgroups) != (1, 2) {
        return Err(format!(
            "consumer_groups × warpgroups is {consumer_groups} × {warpgroups}: gradients are computed by one consumer group of two"
        ));
    }
    if num_splits > 1 && (!forward || problem.block_mask.is_some()) {
        return Err(format!("num_splits is {num_splits}: only a forward without a block mask splits the keys"));
    }
    let multiple = stats_multiple(problem);
    if role.is_transposed() && !multiple.is_multiple_of(tile_k) {
        return Err(format!(
            "tile_k is {tile_k}: tiles of queries divide the {multiple} that scratch fills heads up to"
        ));
    }
    if role == Role::All {
        fusible(device, problem)?;
        let columns = problem.head_dim.div_ceil(PANEL);
        if tile_k * columns != tile.tile_q() {
            return Err(format!("tile_k is {tile_k}: tiles of dQ are 64 × 64 for each of two warpgroups"));
        }
    }
    let bytes = blueprint(problem, role, tile, num_splits > 1).shared_memory();
    if bytes > device.shared_memory || tile.units() > device.units {
        return Err(format!(
            "{tile:?} takes {bytes} bytes of shared memory and {} threads, and the device has {} and {}",
            tile.units(),
            device.shared_memory,
            device.units
        ));
    }
    Ok(())
}

/// The blueprint of a kernel, assuming that a mask or bias is read directly from memory and its rows differ.
pub(crate) fn blueprint(problem: &AttentionProblem, role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
    Blueprint {
        role,
        tile,
        dtype: problem.dtype,
        tf32: super::mma::products(problem) == Products::Tf32,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        capped: problem.options.softcap.is_some(),
        mask: problem.mask.map(|_| Rows::Each),
        bias: problem.bias.map(|_| Rows::Each),
        alibi: problem.alibi_slopes.is_some(),
        modified: problem.options.score_mod.is_some(),
        keeps_derivative: role.keeps_derivative(problem),
        mask_mod: problem.options.mask_mod.is_some(),
        varlen: problem.is_varlen(),
        sparse: problem.block_mask.is_some(),
        split_keys,
        stats_multiple: stats_multiple(problem),
    }
}

/// Checks that Hopper's kernels can address every word of these lists, if there is a block mask.
fn numbers(problem: &AttentionProblem, list: ListShape) -> Result<(), String> {
    match list.len(problem) {
        words if words > MAX_LIST => {
            Err(format!("the lists of the block mask take {words} words, and it numbers {MAX_LIST} at most"))
        }
        _ => Ok(()),
    }
}

/// Checks that Hopper's kernels support the problem at all; else returns the reason.
fn possible(device: &Device, problem: &AttentionProblem) -> Result<(), String> {
    if !device.wgmma {
        return Err("the device has no warpgroup matrix products".into());
    }
    if !cfg!(feature = "cuda") {
        return Err("it was not compiled: that takes the feature cuda".into());
    }
    if problem.dtype == Dtype::F32 {
        return Err("it computes in f16 and bf16, q is f32".into());
    }
    Ok(())
}

/// Number of splits of the keys that minimises the estimated time. Times are in tiles of keys; a consumer group computes a tile in
/// about 1.4 µs.
fn num_splits(device: &Device, problem: &AttentionProblem, tile: &HopperTile) -> usize {
    let consumer_groups = device.multiprocessors * tile.consumer_groups;
    let heads = problem.batch * problem.num_heads_q;
    let (tile_q, tile_k) = (tile.tile_q() as u32, tile.tile_k as u32);
    let band = problem.band();
    let blocks = (problem.seq_q as u32).div_ceil(tile_q);
    // With this many blocks, a group that finishes early finds more work. With a block mask, only the device knows the length of a
    // block.
    if heads * blocks as usize >= 4 * consumer_groups || problem.block_mask.is_some() {
        return 1;
    }
    let mut tiles: Vec<usize> = (0..blocks)
        .map(|block| {
            let seen = band.k_blocks(block * tile_q, tile_q, tile_k);
            (seen.end - seen.start) as usize
        })
        .collect();
    tiles.sort_unstable_by_key(|tiles| std::cmp::Reverse(*tiles));
    let longest = tiles.first().copied().unwrap_or(0);
    let time = |num_splits: usize| {
        let of_item = |tiles: usize| tiles.div_ceil(num_splits) + ITEM;
        let each =
            tiles.iter().map(|tiles| heads * num_splits * of_item(*tiles)).sum::<usize>().div_ceil(consumer_groups);
        // If n · `consumer_groups` + 1 work tiles are at least this long, one of the consumer groups computes n + 1 of them.
        let items = blocks as usize * heads * num_splits;
        let rounds = (0..items).step_by(consumer_groups).enumerate();
        let most = rounds.map(|(n, nth)| (n + 1) * of_item(tiles[nth / (heads * num_splits)])).max();
        let bytes = 2 * size_of::<f32>() * num_splits * problem.rows() * problem.head_dim_v;
        let combine = if num_splits == 1 { 0 } else { COMBINE + bytes / COMBINED };
        each.max(most.unwrap_or(0)) + combine
    };
    SPLITS
        .into_iter()
        .filter(|num_splits| *num_splits == 1 || 2 * num_splits <= longest)
        .min_by_key(|num_splits| time(*num_splits))
        .unwrap_or(1)
}

/// Rows of lse and delta of a head are padded to a multiple of this, because whole tiles of them are loaded.
pub fn stats_multiple(problem: &AttentionProblem) -> usize {
    if problem.head_dim.max(problem.head_dim_v) <= 192 { 128 } else { 384 }
}
