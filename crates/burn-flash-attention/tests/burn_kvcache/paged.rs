//! Caches in pages: decoding gives what attention over the whole sequence gives, whatever happens to sequences in between, and a page that
//! is free or another sequence's is never read. Before and between steps, all free pages are filled with NaN.

use crate::common::*;
use crate::decoding::{all_problems, even, problem_of, uneven};
use crate::dtypes;
use crate::e4m3::representable;
use crate::held::Sequence;
use crate::sequence::{Paged, Run, Step};
use crate::walks::{Walk, walks};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_flash_attention::{
    AttentionError, FlashAttentionOptions, KvStorage, PagedKvCache, PagedKvCacheConfig, SequenceId,
    flash_attention_with_kvcache_and_lse, try_flash_attention_with_kvcache,
};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
use rand::Rng;

/// The configuration of a paged cache for a problem.
pub fn config_of(problem: &AttentionProblem, num_pages: usize, page_size: usize) -> PagedKvCacheConfig {
    let config = PagedKvCacheConfig::new(num_pages, problem.num_heads_kv, problem.head_dim);
    let dtype = FloatDType::from(burn_dtype(problem.dtype));
    config.with_page_size(page_size).with_head_dim_v(Some(problem.head_dim_v)).with_dtype(Some(dtype))
}

/// Fills all free pages with NaN: a sequence takes them, and is freed.
pub fn poison(cache: &mut PagedKvCache) {
    let config = cache.config().clone();
    let new = cache.free_pages() * config.page_size;
    let (device, heads, dtype) = (cache.device(), config.num_heads_kv, DType::from(config.dtype.unwrap()));
    let nan = |dim| Tensor::<4>::full([1, heads, new, dim], f32::NAN, (&device, dtype));
    let sequence = cache.add();
    let options = FlashAttentionOptions::new().with_window_left(config.window);
    let (q, k, v) = (nan(config.head_dim), nan(config.head_dim), nan(config.head_dim_v.unwrap()));
    try_flash_attention_with_kvcache(q, k, v, &mut cache.batch(&[(sequence, new)]).unwrap(), &options).unwrap();
    assert_eq!(cache.free_pages(), 0);
    cache.free(sequence).unwrap();
}

/// Runs these steps over pages, and compares with the oracle and with composed operations.
fn check_steps(data: &Data, target: &Target, steps: &[Step], page_size: usize) {
    let p = &data.problem;
    // As many pages as are needed.
    let config = config_of(p, p.batch * p.seq_k.div_ceil(page_size), page_size);
    check_steps_over(data, target, steps, &config);
}

/// Runs these steps over pages of this configuration, and compares with the oracle and with composed operations.
pub fn check_steps_over(data: &Data, target: &Target, steps: &[Step], config: &PagedKvCacheConfig) {
    let p = &data.problem;
    let mut cache = config.init(&target.device);
    let sequences = (0..p.batch).map(|_| cache.add()).collect();
    poison(&mut cache);
    let mut run = Run::over(data, Paged { cache, sequences }, &target.device);
    steps.iter().for_each(|step| run.step(step));
    let lens: Vec<_> = run.cache.sequences.iter().map(|sequence| run.cache.cache.len(*sequence).unwrap()).collect();
    assert_eq!(lens, run.lens);
    check_found(data, target, &run.results());
}

#[test]
fn every_option() {
    for target in targets() {
        for (n, problem) in all_problems(Dtype::F32).into_iter().enumerate() {
            let data = Data::random(problem, n as u64);
            check_steps(&data, &target, &even(), 16);
            check_steps(&data, &target, &uneven(), 16);
        }
    }
}

#[test]
fn every_element_type_and_page_size() {
    for target in targets() {
        for dtype in dtypes(&target) {
            for (heads, dims, page_size) in
                [([8, 2], [64, 64], 16), ([4, 1], [128, 32], 32), ([3, 3], [5, 33], 64), ([16, 1], [64, 128], 16)]
            {
                let data = Data::random(problem_of(heads, dims, dtype, AttentionOptions::default()), 3);
                check_steps(&data, &target, &even(), page_size);
                check_steps(&data, &target, &uneven(), page_size);
            }
        }
    }
}

/// Enough keys for splits, and for the edges of tiles and pages.
#[test]
fn long_sequences() {
    for target in targets() {
        for dtype in dtypes(&target) {
            let options = AttentionOptions { causal: true, ..Default::default() };
            let data = Data::random(problem([2, 4, 1, 1100, 1100, 64, 64], dtype, options), 4);
            let mut steps: Vec<_> = [509, 1, 1, 1, 1, 511, 1, 8, 1].map(Step::Of).to_vec();
            steps.extend([Step::Ragged(vec![3, 40]), Step::Of(1)]);
            check_steps(&data, &target, &steps, if dtype == Dtype::F16 { 256 } else { 64 });
        }
    }
}

/// A rolling cache: a window of 20 positions needs three pages of 16, however long the sequence is.
#[test]
fn pages_outside_the_window_are_used_again() {
    let storages = [KvStorage::Elements, KvStorage::E4m3];
    for (target, storage) in targets().iter().flat_map(|target| storages.map(|storage| (target, storage))) {
        let options = AttentionOptions { causal: true, window_left: Some(20), ..Default::default() };
        let data = representable(problem([2, 4, 2, 200, 200, 16, 16], Dtype::F32, options), 5);
        let config = PagedKvCacheConfig::new(6, 2, 16).with_page_size(16).with_window(Some(20));
        let config = config.with_head_dim_v(Some(16)).with_dtype(Some(FloatDType::F32)).with_storage(Some(storage));
        let mut cache = config.init(&target.device);
        let sequences: Vec<_> = (0..2).map(|_| cache.add()).collect();
        let mut run = Run::over(&data, Paged { cache, sequences }, &target.device);
        for n in 0..130 {
            run.step(&if n % 5 == 4 { Step::Ragged(vec![1, 3]) } else { Step::Of(1) });
            if n % 7 == 0 && run.cache.cache.free_pages() > 0 {
                poison(&mut run.cache.cache);
            }
        }
        check_found(&data, target, &run.results());
        let (cache, sequence) = (&mut run.cache.cache, run.cache.sequences[0]);
        assert_eq!(cache.len(sequence), Ok(130));
        let error = cache.truncate(sequence, 100).unwrap_err().to_string();
        assert!(error.starts_with("len = 100 is not supported: the window of the next position"), "{error}");
        // A larger window, or none, would see positions that are no longer there.
        let zeros = || Tensor::<4>::zeros([1, 2, 1, 16], &target.device);
        for left in [None, Some(21)] {
            let options = FlashAttentionOptions::new().with_window_left(left);
            let batch = &mut cache.batch(&[(sequence, 1)]).unwrap();
            let error = try_flash_attention_with_kvcache(zeros(), zeros(), zeros(), batch, &options).unwrap_err();
            assert!(error.to_string().starts_with("window_left = "), "{error}");
        }
    }
}

/// Sequences of a cache, and what they hold.
struct Held {
    cache: PagedKvCache,
    sequences: Vec<(SequenceId, Sequence)>,
}

/// A step of a walk: sequences are added, forked, extended in batches, cut and freed.
fn step(walk: &mut Walk, held: &mut Held) {
    let nth = walk.rng.random_range(0..held.sequences.len().max(1));
    match walk.rng.random_range(0..16) {
        0 | 1 if held.sequences.len() < 6 => held.sequences.push((held.cache.add(), walk.sequence(16))),
        2 | 3 if !held.sequences.is_empty() => {
            let (sequence, rows) = held.sequences[nth].clone();
            held.sequences.push((held.cache.fork(sequence).unwrap(), rows));
        }
        4 | 5 if held.sequences.len() > 2 => {
            let (sequence, _) = held.sequences.swap_remove(nth);
            held.cache.free(sequence).unwrap();
            assert_eq!(held.cache.len(sequence).unwrap_err(), held.cache.free(sequence).unwrap_err());
        }
        6 if !held.sequences.is_empty() => {
            let (sequence, rows) = &mut held.sequences[nth];
            let len = walk.rng.random_range(0..=rows.len() + 3);
            if held.cache.truncate(*sequence, len).is_ok() {
                rows.truncate(len);
            }
        }
        7 if held.cache.free_pages() > 0 => poison(&mut held.cache),
        _ => append(walk, held),
    }
    for (sequence, rows) in &held.sequences {
        assert_eq!(held.cache.len(*sequence), Ok(rows.len()));
    }
}

/// Appends to some sequences, in any order, and compares the output with the oracle's.
fn append(walk: &mut Walk, held: &mut Held) {
    let mut chosen: Vec<_> = (0..held.sequences.len()).filter(|_| walk.rng.random_bool(0.6)).collect();
    if walk.rng.random_bool(0.5) {
        chosen.reverse();
    }
    if chosen.is_empty() {
        return;
    }
    let new = if walk.rng.random_bool(0.7) { 1 } else { walk.rng.random_range(1..20) };
    let padded = walk.rng.random_bool(0.3);
    let counts: Vec<_> = chosen.iter().map(|_| if padded { walk.rng.random_range(0..=new) } else { new }).collect();
    let batch: Vec<_> = chosen.iter().zip(&counts).map(|(nth, count)| (held.sequences[*nth].0, *count)).collect();
    let drawn = walk.draw(new, counts);
    let [q, k, v] = drawn.tensors(&walk.device);
    let free = held.cache.free_pages();
    let mut of_call = held.cache.batch(&batch).unwrap();
    let options = walk.options();
    match try_with_lse([q, k, v], &mut of_call, &options) {
        Ok(found) => {
            let mut all: Vec<_> = held.sequences.iter_mut().map(|(_, rows)| Some(rows)).collect();
            let mut sequences: Vec<_> = chosen.iter().map(|nth| all[*nth].take().unwrap()).collect();
            drawn.push(sequences.iter_mut().map(|rows| &mut **rows).collect());
            let sequences: Vec<_> = sequences.iter().map(|rows| &**rows).collect();
            walk.judge(&drawn, &sequences, found);
        }
        Err(error) => {
            assert!(matches!(error, AttentionError::OutOfPages { .. }), "{error}");
            assert_eq!(held.cache.free_pages(), free);
        }
    }
}

fn try_with_lse(
    [q, k, v]: [Tensor<4>; 3],
    batch: &mut burn_flash_attention::PagedBatch<'_>,
    options: &FlashAttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    burn_flash_attention::try_flash_attention_with_kvcache_and_lse(q, k, v, batch, options)
}

#[test]
fn random_walks_over_pages() {
    walk_over_pages(KvStorage::Elements);
}

#[test]
fn random_walks_over_pages_in_e4m3() {
    walk_over_pages(KvStorage::E4m3);
}

fn walk_over_pages(storage: KvStorage) {
    walks(storage, |mut walk, steps| {
        let [_, _, heads, dim, dim_v] = walk.sizes;
        let config = PagedKvCacheConfig::new(walk.rng.random_range(4..20), heads, dim).with_page_size(16);
        let config = config.with_head_dim_v(Some(dim_v)).with_dtype(Some(FloatDType::F32)).with_storage(Some(storage));
        let cache = config.with_window(walk.options.window_left).init(&walk.device);
        let mut held = Held { cache, sequences: Vec::new() };
        (0..steps).for_each(|_| step(&mut walk, &mut held));
        for (sequence, _) in held.sequences {
            held.cache.free(sequence).unwrap();
        }
        assert_eq!(held.cache.free_pages(), held.cache.config().num_pages);
    });
}

/// Neither a table nor lengths are made again for the same sequences, as long as their pages stay as they are.
#[test]
fn a_fork_shares_what_it_does_not_write() {
    for target in targets() {
        let device = &target.device;
        let mut cache = PagedKvCacheConfig::new(6, 1, 8).with_page_size(16).init(device);
        let options = FlashAttentionOptions::new().with_causal(true);
        let random = |batch, new| random::<4>([batch, 1, new, 8], device);
        let first = cache.add();
        let call = |cache: &mut PagedKvCache, batch: &[(SequenceId, usize)], new| {
            let (q, k, v) = (random(batch.len(), new), random(batch.len(), new), random(batch.len(), new));
            flash_attention_with_kvcache_and_lse(q, k, v, &mut cache.batch(batch).unwrap(), &options).0
        };
        call(&mut cache, &[(first, 36)], 36);
        assert_eq!(cache.free_pages(), 3);
        let forks = [(); 3].map(|()| cache.fork(first).unwrap());
        assert_eq!(cache.free_pages(), 3);
        // Each writes to the third page: three get a copy, the last one has it.
        let all: Vec<_> = forks.into_iter().chain([first]).map(|sequence| (sequence, 1)).collect();
        call(&mut cache, &all, 1);
        assert_eq!(cache.free_pages(), 0);
        let error = try_flash_attention_with_kvcache(
            random(4, 12),
            random(4, 12),
            random(4, 12),
            &mut cache.batch(&all.iter().map(|(id, _)| (*id, 12)).collect::<Vec<_>>()).unwrap(),
            &options,
        );
        assert_eq!(error.unwrap_err(), AttentionError::OutOfPages { num_pages: 6, free: 0, needed: 4 });
        call(&mut cache, &all, 1);
        cache.free(forks[0]).unwrap();
        assert_eq!(cache.free_pages(), 1);
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    for target in targets() {
        let device = &target.device;
        let mut cache = PagedKvCacheConfig::new(6, 2, 16).with_page_size(16).init(device);
        let (a, b) = (cache.add(), cache.add());
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (device, DType::F32));
        let plain = FlashAttentionOptions::new();
        let mut refused = |batch: &[(SequenceId, usize)],
                           [q, k, v]: [[usize; 4]; 3],
                           options: &FlashAttentionOptions,
                           words: &str| {
            let batch = &mut cache.batch(batch).unwrap();
            let planned = batch.plan(&zeros(q), &zeros(k), &zeros(v), options).unwrap_err();
            let error = try_flash_attention_with_kvcache(zeros(q), zeros(k), zeros(v), batch, options).unwrap_err();
            assert_eq!(planned, error);
            assert!(error.to_string().contains(words), "{error} lacks {words}");
        };
        let (q, kv) = ([2, 4, 3, 16], [2, 2, 3, 16]);
        refused(
            &[(a, 3)],
            [q, kv, kv],
            &plain,
            "k has batch 2 (shape [2, 2, 3, 16]), but the batch of sequences has 1",
        );
        refused(&[(a, 4), (b, 1)], [q, kv, kv], &plain, "sequences = 4 new positions of sequence 0");
        refused(&[(a, 3), (b, 3)], [q, [2, 1, 3, 16], kv], &plain, "k has num_heads_kv 1");
        refused(&[(a, 3), (b, 3)], [[2, 3, 3, 16], kv, kv], &plain, "num_heads_q is 3");
        let lens = plain.clone().with_seq_lens_q(Some(Tensor::<1, Int>::from_data([1, 1], device)));
        refused(&[(a, 3), (b, 3)], [q, kv, kv], &lens, "seq_lens_q = a tensor of shape [2]");
        refused(&[(a, 3), (b, 3)], [q, kv, kv], &plain.clone().with_dropout(0.5), "dropout = 0.5");
        let says = |error: AttentionError, words: &str| assert!(error.to_string().contains(words), "{error}");
        says(cache.batch(&[(a, 1), (b, 1), (a, 0)]).unwrap_err(), "sequences = sequence 0 twice");
        cache.free(b).unwrap();
        assert_eq!(cache.batch(&[(b, 1)]).unwrap_err(), AttentionError::NoSequence { sequence: 1 });
        assert_eq!(cache.fork(b), Err(AttentionError::NoSequence { sequence: 1 }));
        assert_eq!(cache.truncate(b, 0), Err(AttentionError::NoSequence { sequence: 1 }));
        for (config, words) in [
            (PagedKvCacheConfig::new(6, 2, 16).with_page_size(20), "page_size is 20"),
            (PagedKvCacheConfig::new(0, 2, 16), "num_pages is 0"),
            (PagedKvCacheConfig::new(6, 0, 16), "num_heads_kv = 0"),
            (PagedKvCacheConfig::new(6, 2, 300), "head_dim is 300"),
        ] {
            says(config.try_init(device).unwrap_err(), words);
        }
    }
}
