//! Tiles of the portable forward of few rows, for steps of decoding.

use super::splits::{self, SplitWork};
use super::{Case, Device, FewRowsForward, Kernel, cube_count, first, require};
use crate::error::AttentionError;
use crate::portable::{FewRowsBlueprint, FewRowsTile};
use crate::problem::AttentionProblem;

/// Tiles by the number of rows of all query heads of a group. The first one is chosen that has as many rows and fits the device; the last
/// ones also compute more rows, block by block.
///
/// ```text
/// rows  keys  lanes  threads  shared memory at head_dim 128, 256
/// 4     64    4      64        7 KiB,  9 KiB
/// 8     64    8      128      22 KiB, 26 KiB
/// 8     32    4      64        9 KiB, 13 KiB
/// 16    32    8      128      26 KiB, 34 KiB
/// 16    16    4      64       13 KiB, 21 KiB
/// ```
///
/// What limits decoding is memory. Small thread blocks, of which a multiprocessor runs many, wait for each other's barriers least. A thread
/// reads eight vectors before it uses the first one: with 512 threads on a multiprocessor, 32 KiB in 16 bits are on the way. More lanes
/// take fewer reads of Q from shared memory for each key, and more room for partial sums.
const TILES: [FewRowsTile; 5] = [
    FewRowsTile { rows: 4, tile_k: 64, lanes: 4, reads: 8 },
    FewRowsTile { rows: 8, tile_k: 64, lanes: 8, reads: 8 },
    FewRowsTile { rows: 8, tile_k: 32, lanes: 4, reads: 8 },
    FewRowsTile { rows: 16, tile_k: 32, lanes: 8, reads: 8 },
    FewRowsTile { rows: 16, tile_k: 16, lanes: 4, reads: 8 },
];

/// Tiles of keys in 16 bits, where there are many: tiles by 4 rows and by 8, chosen before those above. They have twice the vectors on the
/// way, since each has half the bytes. An H200 reads 2.6 TB/s with them in place of 2.1, of 16 sequences of 4,096 keys of 8 heads, and 2.2
/// in place of 1.5 for 8 rows. Of one sequence, the tiles above are faster.
const HALVES: [(usize, FewRowsTile); 2] = [
    (4, FewRowsTile { rows: 4, tile_k: 128, lanes: 4, reads: 16 }),
    (8, FewRowsTile { rows: 8, tile_k: 64, lanes: 4, reads: 16 }),
];

/// Smallest number of keys of all heads and batches, for each multiprocessor, that count as many.
const MANY_KEYS: usize = 1024;

/// Largest number of rows of a tile.
const MOST_ROWS: usize = 16;

/// Largest number of queries of a step of decoding.
const FEW_QUERIES: usize = 16;

/// Largest number of rows of all query heads of a group for which this kernel is preferred, and preferred to matrix products. Each block of
/// 16 rows reads the keys. Multiply-adds in f32 keep up with half the rate of memory up to 16 rows: an H200 reads 2.1·10¹² bytes a second,
/// half its rate, or 1.1·10¹² elements in 16 bits, for each of which 16 rows take 3.4·10¹³ operations of 6.7·10¹³.
const FEW_ROWS: usize = 64;
const FEW_ROWS_OF_MATRICES: usize = 16;

/// Number of multiprocessors if it is unknown.
const MULTIPROCESSORS: usize = 128;

/// Largest number of splits of the keys.
const MAX_SPLITS: usize = 128;

/// Whether this kernel is preferred to other portable ones and to matrix products: for few rows on a card, or if portable kernels are
/// requested. A processor has better ones.
pub fn wanted(Case { device, problem }: Case, asked: Option<Kernel>) -> bool {
    let matrices = asked.is_none() && device.matrices.iter().any(|(dtype, _)| *dtype == problem.dtype);
    let most = if matrices { FEW_ROWS_OF_MATRICES } else { FEW_ROWS };
    let few = problem.seq_q <= FEW_QUERIES && rows(problem) <= most;
    few && (device.card || asked == Some(Kernel::Portable))
}

/// Queries of all query heads of a group.
fn rows(problem: &AttentionProblem) -> usize {
    problem.group_size() * problem.seq_q
}

/// The first tiles that fit, or the reason why the kernel cannot run.
pub fn choose(case: Case) -> Result<FewRowsForward, String> {
    case.check_bindings("forward", bindings(case.problem)).map_err(|error| error.to_string())?;
    first(candidates(case))
}

/// Plans with the tiles of the table, or the reasons why they cannot be used.
fn candidates(case: Case) -> impl Iterator<Item = Result<FewRowsForward, String>> {
    let Case { device, problem } = case;
    let needed = rows(problem).min(MOST_ROWS);
    let keys = problem.batch * problem.num_heads_kv * problem.seq_k;
    let halves = problem.kv_size() == 2 && keys >= MANY_KEYS * multiprocessors(device);
    let of_halves = HALVES.into_iter().filter(move |(most, _)| halves && needed <= *most).map(|(_, tile)| tile);
    let tiles = of_halves.take(1).chain(TILES.into_iter().filter(move |tile| needed <= tile.rows));
    tiles.map(move |tile| {
        let plan = FewRowsForward { tile, num_splits: num_splits(case, tile) };
        check(case, plan).map(|()| plan)
    })
}

/// Other plans: the other tiles that fit, and half and twice as many splits of the keys.
#[cfg(feature = "autotune")]
pub fn alternatives(case: Case, planned: FewRowsForward) -> Vec<FewRowsForward> {
    let most = case.problem.seq_k.div_ceil(planned.tile.tile_k).max(1);
    let splits = [planned.num_splits / 2, planned.num_splits * 2].into_iter();
    let splits = splits.filter(|num_splits| (1..=most).contains(num_splits));
    let splits = splits.map(|num_splits| FewRowsForward { num_splits, ..planned });
    splits.chain(candidates(case).flatten()).collect()
}

/// Threads of a multiprocessor that have registers at the same time: 65,536 registers of 128, 160 and 190 each, as NVIDIA's compiler needs
/// for 4, 8 and 16 rows.
fn threads(tile: FewRowsTile) -> usize {
    match tile.rows {
        ..=4 => 512,
        5..=8 => 384,
        _ => 256,
    }
}

/// Number of multiprocessors, or of those of a usual card if the device does not tell.
fn multiprocessors(device: &Device) -> usize {
    if device.multiprocessors > 0 { device.multiprocessors } else { MULTIPROCESSORS }
}

/// Number of splits of the keys.
fn num_splits(Case { device, problem }: Case, tile: FewRowsTile) -> usize {
    let work = SplitWork {
        workers: multiprocessors(device) * (threads(tile) / tile.units()).max(1),
        heads: problem.batch * problem.num_heads_kv,
        tile_q: (tile.rows / problem.group_size().max(1)).max(1),
        tile_k: tile.tile_k,
        max_splits: MAX_SPLITS,
    };
    splits::choose(problem, &work)
}

/// Buffers that the kernel binds, besides those that every forward binds for optional tensors: lengths of queries and of keys are two.
pub fn bindings(problem: &AttentionProblem) -> usize {
    5 + usize::from(problem.seq_lens_q && problem.seq_lens_k)
}

/// Number of thread blocks of a key/value head: the splits of its blocks of rows.
pub fn cubes_of_head(problem: &AttentionProblem, FewRowsForward { tile, num_splits }: FewRowsForward) -> usize {
    num_splits * rows(problem).div_ceil(tile.rows)
}

/// Checks that the device can launch every thread block.
pub fn check_cubes(Case { device, problem }: Case, plan: FewRowsForward) -> Result<(), AttentionError> {
    let cubes = cubes_of_head(problem, plan) as u64 * (problem.num_heads_kv * problem.batch) as u64;
    cube_count(device, "forward", cubes).map(|_| ())
}

/// The blueprint of a kernel.
pub fn blueprint(problem: &AttentionProblem, FewRowsForward { tile, num_splits }: FewRowsForward) -> FewRowsBlueprint {
    let (head_dim, head_dim_v) = (problem.head_dim, problem.head_dim_v);
    FewRowsBlueprint { tile, head_dim, head_dim_v, is_split: num_splits > 1 }
}

/// Checks that a plan can be used; else returns the reason.
pub fn check(Case { device, problem }: Case, plan: FewRowsForward) -> Result<(), String> {
    let FewRowsForward { tile, num_splits } = plan;
    require(num_splits > 0, || "num_splits is 0; it must be at least 1".into())?;
    require(problem.options.dropout == 0.0 && problem.block_mask.is_none() && problem.cu_seqlens.is_none(), || {
        "query heads are not packed with dropout, a block mask or packed sequences".into()
    })?;
    require(tile.is_consistent(), || {
        format!(
            "{tile:?} is inconsistent: its numbers are powers of two, rows are at least 4, and lanes at least rows / 4 and at most its threads"
        )
    })?;
    device.has_room(blueprint(problem, plan).shared_memory(), tile.units())
}
