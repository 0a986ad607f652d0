//! What a cache does with its memory: it is written in place, and belongs to one cache.

use crate::common::*;
use crate::sequence::{Run, Step};
use crate::{cache_of, lens_of};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_attention::{
    AttentionError, FlashAttentionOptions, KvCache, KvCacheConfig, KvStorage, flash_attention_with_kvcache,
    try_flash_attention_with_kvcache,
};
use flash_attention_kernels::{AttentionOptions, Dtype};
use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;
use std::thread;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which remembers each thread's largest allocation.
struct Remembering;

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Remembering {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(block.size())));
        // SAFETY: the caller guarantees what this function requires.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, at: *mut u8, block: Block) {
        // SAFETY: the caller guarantees what this function requires.
        unsafe { System.dealloc(at, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Remembering = Remembering;

fn causal() -> FlashAttentionOptions {
    FlashAttentionOptions::new().with_causal(true)
}

/// A step of `new` random positions.
fn step(cache: &mut KvCache, new: usize, device: &Device) -> Tensor<4> {
    let (heads, dim) = (cache.config().num_heads_kv, cache.config().head_dim);
    let random = || random([cache.config().batch, heads, new, dim], device);
    let (q, k, v) = (random(), random(), random());
    flash_attention_with_kvcache(q, k, v, cache, &causal())
}

#[test]
fn steps_allocate_no_second_cache() {
    let storages = [KvStorage::Elements, KvStorage::E4m3];
    for (target, storage) in targets().iter().flat_map(|target| storages.map(|storage| (target, storage))) {
        let device = &target.device;
        let mut cache = KvCacheConfig::new(1, 2, 64, 1 << 17).with_storage(Some(storage)).init(device);
        let bytes = cache.bytes();
        let of_page = if storage == KvStorage::E4m3 { 64 * 64 + 16 } else { 64 * 64 * 4 };
        assert_eq!(bytes, 2 * 2 * (1 << 11) * of_page);
        let (mut in_use, mut outputs) = (None, Vec::new());
        for n in 0..8 {
            LARGEST.set(0);
            outputs.push(step(&mut cache, 1 + n % 3, device));
            device.sync().unwrap();
            assert!(LARGEST.get() < bytes / 2, "a step allocated {} bytes on {}", LARGEST.get(), target.name);
            let now = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
            // The first steps compile kernels and fill the pools with small buffers.
            in_use = in_use.or(now.filter(|_| n > 2));
            if let (Some(before), Some(now)) = (in_use, now) {
                assert!(now < before + bytes as u64 / 2, "reserved are {now} bytes after {before} on {}", target.name);
            }
        }
        assert_eq!(cache.bytes(), bytes);
    }
}

#[test]
fn a_duplicate_has_memory_of_its_own() {
    for target in targets() {
        let options = AttentionOptions { causal: true, ..Default::default() };
        let sizes = [2, 2, 1, 30, 30, 16, 8];
        let [data, other] = [1, 2].map(|seed| Data::random(problem(sizes, Dtype::F32, options), seed));
        let mut run = Run::new(&data, 30, &target.device);
        run.step(&Step::Ragged(vec![7, 4]));
        // The duplicate takes other positions than the first one, which then goes on as if nothing had been.
        let mut second = Run::new(&other, 30, &target.device);
        (second.cache, second.lens) = (run.cache.duplicate(), run.lens.clone());
        second.step(&Step::Of(20));
        run.step(&Step::Of(20));
        assert_eq!((lens_of(&run.cache), lens_of(&second.cache)), (vec![27, 24], vec![27, 24]));
        check_found(&data, &target, &run.results());
        run.cache = run.cache.duplicate();
        run.step(&Step::Of(3));
        check_found(&data, &target, &run.results());
    }
}

#[test]
fn a_cache_grows_only_where_it_may() {
    for target in targets() {
        let device = &target.device;
        let options = AttentionOptions { causal: true, ..Default::default() };
        let data = Data::random(problem([2, 2, 1, 50, 50, 16, 8], Dtype::F32, options), 5);
        let mut run = Run::new(&data, 50, device);
        run.cache = KvCacheConfig::new(2, 1, 16, 4).with_head_dim_v(Some(8)).with_grows(true).init(device);
        let mut capacities = vec![];
        for new in [3, 1, 1, 4, 40] {
            run.step(&Step::Of(new));
            capacities.push(run.cache.capacity());
        }
        assert_eq!(capacities, [4, 4, 8, 16, 49]);
        check_found(&data, &target, &run.results());

        let mut full = cache_of(&data.problem, 4, device);
        let zeros = |heads, new, dim| Tensor::<4>::zeros([2, heads, new, dim], device);
        let append = |cache: &mut KvCache, new| {
            try_flash_attention_with_kvcache(zeros(2, new, 16), zeros(1, new, 16), zeros(1, new, 8), cache, &causal())
        };
        append(&mut full, 3).unwrap();
        let error = append(&mut full, 2).unwrap_err();
        assert_eq!(error, AttentionError::CacheFull { capacity: 4, len: 3, new: 2 });
        // The cache is as before.
        append(&mut full, 1).unwrap();
        assert_eq!((full.max_len(), full.capacity()), (4, 4));
        full.reserve(5).unwrap();
        append(&mut full, 1).unwrap();
        assert_eq!(lens_of(&full), [5, 5]);
        let error = full.reserve(1 << 30).unwrap_err();
        assert!(error.to_string().contains("seq_k is 1073741824"), "{error}");
        assert_eq!(full.capacity(), 5);
    }
}

/// Positions that were forgotten, NaN among them, reach no result.
#[test]
fn forgotten_positions_are_not_read() {
    for target in targets() {
        let device = &target.device;
        let options = AttentionOptions { causal: true, ..Default::default() };
        let data = Data::random(problem([2, 4, 2, 50, 50, 16, 8], Dtype::F32, options), 6);
        let mut run = Run::new(&data, 50, device);
        let poison = |run: &mut Run, new| {
            let nan = |heads, dim| Tensor::<4>::full([2, heads, new, dim], f32::NAN, device);
            flash_attention_with_kvcache(nan(4, 16), nan(2, 16), nan(2, 8), &mut run.cache, &causal());
        };
        run.step(&Step::Of(5));
        poison(&mut run, 9);
        run.cache.truncate(5);
        assert_eq!(run.cache.max_len(), 5);
        run.step(&Step::Of(1));
        // Of three proposed tokens, one sequence accepts two and the other none.
        run.step(&Step::Ragged(vec![2, 0]));
        poison(&mut run, 3);
        let lens: Vec<i32> = run.lens.iter().map(|len| *len as i32).collect();
        run.cache.set_seq_lens(Tensor::<1, Int>::from_data(lens.as_slice(), device), 8).unwrap();
        assert_eq!(lens_of(&run.cache), [8, 6]);
        run.step(&Step::Of(2));
        poison(&mut run, 4);
        run.cache.truncate(10);
        assert_eq!(lens_of(&run.cache), [10, 10]);
        // The second sequence has kept two poisoned positions. Both are forgotten.
        let lens = Tensor::<1, Int>::from_data([10i64, 8], (device, DType::I64));
        run.cache.set_seq_lens(lens, 10).unwrap();
        run.step(&Step::Ragged(vec![20, 30]));
        run.step(&Step::Of(1));
        check_found(&data, &target, &run.results());

        poison(&mut run, 5);
        run.cache.clear();
        assert_eq!((run.cache.max_len(), lens_of(&run.cache)), (0, vec![0, 0]));
        run.lens = vec![0, 0];
        run.step(&Step::Of(40));
        check_found(&data, &target, &run.results());
    }
}

#[test]
fn lengths_are_clamped() {
    for target in targets() {
        let device = &target.device;
        let mut cache = KvCacheConfig::new(3, 1, 8, 20).init(device);
        step(&mut cache, 10, device);
        cache.set_seq_lens(Tensor::<1, Int>::from_data([100, -1, 4], device), 10).unwrap();
        assert_eq!(lens_of(&cache), [10, 0, 4]);
        step(&mut cache, 2, device);
        assert_eq!(lens_of(&cache), [12, 2, 6]);
    }
}

/// Without tracked tensors, a device with autodiff is as good as one without.
#[test]
fn a_device_with_autodiff() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let mut cache = KvCacheConfig::new(1, 2, 16, 20).init(&device);
        assert!(!cache.device().is_autodiff());
        let out = step(&mut cache, 3, &device);
        assert!(out.is_autodiff() && !out.is_tracked());
        let [q, k, v] = [(); 3].map(|()| random::<4>([1, 2, 1, 16], &device));
        let mut again = cache.duplicate();
        let with = flash_attention_with_kvcache(q.clone(), k.clone(), v.clone(), &mut cache, &causal());
        let [q, k, v] = [q, k, v].map(Tensor::inner);
        let without = flash_attention_with_kvcache(q, k, v, &mut again, &causal());
        assert_eq!(with.inner().into_data(), without.into_data());
    }
}

#[test]
fn a_cache_goes_from_thread_to_thread() {
    for target in targets() {
        let options = AttentionOptions { causal: true, ..Default::default() };
        let data = Data::random(problem([2, 2, 1, 30, 30, 16, 8], Dtype::F32, options), 7);
        let mut run = Run::new(&data, 30, &target.device);
        for new in [4, 1, 3] {
            run.step(&Step::Of(new));
            run = thread::scope(|scope| {
                let other = scope.spawn(move || {
                    run.step(&Step::Of(1));
                    run
                });
                other.join().unwrap()
            });
        }
        check_found(&data, &target, &run.results());
    }
}

/// Nothing is appended by a call without new positions.
#[test]
fn no_new_positions() {
    for target in targets() {
        let device = &target.device;
        let mut cache = KvCacheConfig::new(2, 1, 8, 20).init(device);
        step(&mut cache, 3, device);
        assert_eq!(step(&mut cache, 0, device).dims(), [2, 1, 0, 8]);
        let none = Tensor::<1, Int>::from_data([0, 0], device);
        let x = || random::<4>([2, 1, 2, 8], device);
        let out = flash_attention_with_kvcache(x(), x(), x(), &mut cache, &causal().with_seq_lens_q(none));
        assert!(read(out).iter().all(|x| *x == 0.0));
        assert_eq!((lens_of(&cache), cache.max_len()), (vec![3, 3], 5));
        let mut cache = KvCacheConfig::new(0, 1, 8, 20).init(device);
        assert_eq!(step(&mut cache, 1, device).dims(), [0, 1, 1, 8]);
    }
}
