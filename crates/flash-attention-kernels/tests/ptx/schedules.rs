//! Schedulers of the kernels for Hopper visit each block once, and those with most work first.

use crate::harness::plain;
use flash_attention_kernels::extras::Extras;
use flash_attention_kernels::fragment::Role;
use flash_attention_kernels::hopper::BiasTile;
use flash_attention_kernels::hopper::dbias::{Block, DbiasScheduler};
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::tensor_core::{Blueprint, Divisor, TileScheduler};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
use std::collections::{HashMap, HashSet};

/// The dbias scheduler visits every block that the band does not hide entirely once, in order, for any stride and first block.
#[test]
fn dbias_scheduler_visits_every_block_once() {
    let options = [
        AttentionOptions::default(),
        AttentionOptions { causal: true, ..Default::default() },
        AttentionOptions { causal: true, window_left: Some(99), ..Default::default() },
    ];
    let tile = BiasTile { tile_k: 64, tiles: 2, stages: 2, row_stages: 1 };
    for ((seq_q, seq_k), options) in
        [(700, 700), (300, 900), (900, 300), (128, 128), (1, 500)].into_iter().flat_map(|n| options.map(|o| (n, o)))
    {
        let band = Band::new(seq_q, seq_k, &options);
        let scheduler = DbiasScheduler::new(&band, tile, [2, 3], [2, 6, 3]);
        let matrices = 0..6u32;
        let all: Vec<_> = matrices
            .flat_map(|matrix| (0..(seq_q as u32).div_ceil(128)).map(move |row| (matrix, row)))
            .flat_map(|(matrix, row)| {
                let seen = band.k_blocks(row * 128, 128, 128);
                (0..seen.end - seen.start).map(move |nth| Block { matrix, row, nth })
            })
            .collect();
        assert_eq!(all.len() as u32, scheduler.num_tiles);
        for stride in [1, 5, 132] {
            for first in 0..stride.min(3) {
                let (mut block, mut at) = (Block { matrix: 0, row: 0, nth: 0 }, 0);
                for number in (first..all.len()).step_by(stride) {
                    block = scheduler.after(&block, (number - at) as u32, &band, tile);
                    assert_eq!(block, all[number], "{band:?} {number}");
                    at = number;
                }
            }
        }
    }
}

/// Work tiles of dk and dv: each block of keys of each head comes once for each query head of its group, with the tiles of queries that see
/// it. Longer work tiles come first. The query heads of a group may be in splits.
#[test]
fn dkdv_work_tiles_cover_every_block_for_every_query_head() {
    let options = [
        AttentionOptions { causal: true, ..Default::default() },
        AttentionOptions { causal: true, window_left: Some(99), ..Default::default() },
        AttentionOptions::default(),
    ];
    for ((seq_q, seq_k, group, splits), options) in
        [(700, 700, 1, 1), (300, 420, 3, 1), (420, 300, 2, 1), (700, 700, 4, 2), (300, 420, 3, 3)]
            .into_iter()
            .flat_map(|case| options.map(|options| (case, options)))
    {
        let (q, k) = ([2, 2 * group as usize, seq_q, 64], [2, 2, seq_k, 64]);
        let band = AttentionProblem::new(&q, &k, &k, Dtype::BF16, options).unwrap().band();
        let blueprint = Blueprint { split_group: splits > 1, ..plain(Role::DkDv { dk: true, dv: true }, 64, false) };
        let blocks = (seq_k as u32).div_ceil(128);
        let scheduler = TileScheduler::new(blocks, 0, 2, 2, group, 4, splits);
        assert_eq!(scheduler.num_tiles, 2 * 2 * blocks * splits);
        let mut found = HashMap::new();
        let mut longest = u32::MAX;
        for number in 0..scheduler.num_tiles {
            for of_split in 0..group / splits {
                let work = scheduler.work_tile(number, of_split, &band.transposed(), &Extras::none(), blueprint);
                let split = (work.batch_out - work.batch) / 2;
                assert_eq!(work.head_kv, work.head * group + split * (group / splits) + of_split);
                let last = work.k_last / 64;
                let tiles = if work.fully_masked { 0..0 } else { last + 1 - work.steps..last + 1 };
                if options.window_left.is_none() && seq_q == seq_k {
                    assert!(work.steps <= longest, "{work:?}");
                    longest = work.steps;
                }
                assert!(
                    found.insert((work.batch, work.head_kv, work.q_start), tiles).is_none(),
                    "{work:?} comes twice"
                );
            }
        }
        assert_eq!(found.len() as u32, 2 * 2 * group * blocks);
        for ((_, _, start), tiles) in found {
            let keys = start..(start + 128).min(seq_k as u32);
            let seen = |tile: &u32| {
                (tile * 64..(tile * 64 + 64).min(seq_q as u32)).any(|i| keys.clone().any(|j| band.sees(i, j)))
            };
            let all = 0..(seq_q as u32).div_ceil(64);
            assert!(all.filter(seen).eq(tiles.clone()), "{band:?} {start}: {tiles:?}");
        }
    }
}

/// Where blocks of keys add to dQ in order, those that add to a tile of queries are numbered from 0, in the order of their work tiles: each
/// waits only for work tiles with smaller numbers.
#[test]
fn blocks_wait_for_smaller_numbers() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let windows = [(150, 40), (0, 0), (700, 0)];
    let options = windows.map(|(left, right)| AttentionOptions {
        window_left: Some(left),
        window_right: Some(right),
        ..Default::default()
    });
    let options = [AttentionOptions::default(), causal].into_iter().chain(options);
    let shapes =
        [(700, 700, 1, 2, 1), (300, 1420, 2, 3, 2), (1420, 300, 1, 1, 1), (900, 899, 4, 4, 4), (128, 1300, 2, 64, 1)];
    for (options, (seq_q, seq_k, head_group, chunk, splits)) in
        options.flat_map(|options| shapes.map(move |shape| (options, shape)))
    {
        let shape = |heads, seq| [2, heads, seq, 128];
        let (q, k) = (shape(8, seq_q), shape(2, seq_k));
        let problem = AttentionProblem::new(&q, &k, &k, Dtype::BF16, options).unwrap();
        let band = problem.band().transposed();
        let blueprint = Blueprint { ordered: true, split_group: splits > 1, ..plain(Role::All, 64, false) };
        let blocks = (seq_k as u32).div_ceil(128);
        let scheduler = TileScheduler::new(blocks, 0, 2, 2, 4, head_group, splits).in_chunks(chunk);
        let mut added = HashMap::new();
        let mut found = HashSet::new();
        let tiles = (0..scheduler.num_tiles).flat_map(|number| (0..4 / splits).map(move |of_split| (number, of_split)));
        for (number, of_split) in tiles {
            let work = scheduler.work_tile(number, of_split, &band, &Extras::none(), blueprint);
            if work.q_start < seq_k as u32 {
                assert!(found.insert((work.batch, work.head_kv, work.q_start)), "{work:?} comes twice");
            } else {
                assert!(work.fully_masked, "{work:?}");
            }
            if work.fully_masked {
                continue;
            }
            for step in 0..work.steps {
                let start = work.k_last - step * 64;
                let all = band.q_blocks(start, 128, 64);
                let before: &mut u32 = added.entry((work.batch, work.head_kv, start)).or_default();
                assert_eq!(scheduler.blocks_before(work.q_start / 128, &all), *before, "{options:?} {work:?} {start}");
                *before += 1;
            }
        }
        assert_eq!(found.len() as u32, 16 * blocks);
    }
}

/// Work tiles of the forward: each block of queries of each head comes once. Within a head group, longer work tiles come first.
#[test]
fn work_tiles_cover_every_block_once() {
    let cases =
        [(1, 1, 1, 1), (6, 4, 700, 700), (6, 6, 300, 300), (5, 1, 129, 129), (4, 2, 383, 384), (4, 2, 300, 420)];
    for ((heads, head_group, seq_q, seq_k), num_splits) in cases.into_iter().flat_map(|case| [(case, 1), (case, 3)]) {
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let q = [heads / heads.min(3), heads.min(3), seq_q, 64];
        let k = [q[0], q[1], seq_k, 64];
        let problem = AttentionProblem::new(&q, &k, &k, Dtype::BF16, causal).unwrap();
        let band = problem.band();
        let ahead = band.ahead(128, 128);
        let blocks = (seq_q as u32 + ahead).div_ceil(128);
        let scheduler = TileScheduler::new(blocks, ahead, q[0] as u32, q[1] as u32, 1, head_group, num_splits);
        let blueprint = plain(Role::Forward, 128, num_splits > 1);
        let work: Vec<_> = (0..scheduler.num_tiles)
            .map(|number| scheduler.work_tile(number, 0, &band, &Extras::none(), blueprint))
            .collect();
        let (batches, heads) = (q[0] as u32, q[1] as u32);
        for head_group_tiles in work.chunks((scheduler.head_group.divisor * blocks * num_splits) as usize) {
            assert!(
                num_splits > 1 || head_group_tiles.is_sorted_by_key(|work| std::cmp::Reverse(work.steps)),
                "{scheduler:?}"
            );
        }
        // The splits of a block together visit each of its tiles once.
        let mut tiles = HashMap::<_, Vec<_>>::new();
        for work in &work {
            assert_eq!(work.batch_out % batches, work.batch, "{work:?}");
            let of_block = tiles.entry((work.batch, work.head, work.q_start as i32)).or_default();
            if !work.fully_masked {
                let last = work.k_last / 128;
                of_block.extend(last + 1 - work.steps..=last);
            }
        }
        for (batch, head, block) in
            (0..batches).flat_map(|b| (0..heads).flat_map(move |h| (0..blocks).map(move |q| (b, h, q))))
        {
            let start = (block * 128) as i32 - ahead as i32;
            let mut of_block = tiles.remove(&(batch, head, start)).unwrap();
            of_block.sort_unstable();
            let after = ((start + 128).min(seq_q as i32) + seq_k as i32 - seq_q as i32) as u32;
            assert!(of_block.into_iter().eq(0..after.div_ceil(128)), "{scheduler:?} {start}");
        }
        assert!(tiles.is_empty(), "{scheduler:?}");
    }
}

#[test]
fn products_and_shifts_divide() {
    for divisor in (1..300).chain([65_535, 65_536, 1 << 30, (1 << 31) - 1]) {
        let by = Divisor::new(divisor);
        let multiples = (0..5).map(|n| n * divisor as u64).chain([(1 << 31) / divisor as u64 * divisor as u64]);
        for x in multiples.flat_map(|x| [x.saturating_sub(1), x, x + 1]).chain([0, (1 << 31) - 1]) {
            if let Ok(x @ 0..=0x7fff_ffff) = u32::try_from(x) {
                assert_eq!((by.divide(x), by.modulo(x)), (x / divisor, x % divisor), "{x} by {divisor}");
            }
        }
    }
}
