//! Caches in e4m3: what they hold is within its bounds, and attention over it is exact.

use crate::common::*;
use crate::decoding::{all_problems, even, problem_of, uneven};
use crate::held::{Sequence, rounded};
use crate::paged::{check_steps_over, config_of};
use crate::sequence::{Run, Step};
use crate::{dtypes, lens_of};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_flash_attention::{
    AttentionCache, FlashAttentionOptions, KvCache, KvCacheConfig, KvStorage, PagedKvCache, PagedKvCacheConfig,
    SequenceId, flash_attention_with_kvcache, try_flash_attention_with_kvcache,
};
use flash_attention_kernels::e4m3::{page_bytes, scale_of};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
use flash_attention_reference as reference;
use rand::{Rng, SeedableRng, rngs::StdRng};

const E4M3: Option<KvStorage> = Some(KvStorage::E4m3);

/// A case whose keys and values pages in e4m3 represent exactly, however their scales grow.
pub fn representable(problem: AttentionProblem, seed: u64) -> Data {
    let mut data = Data::random(problem, seed);
    for values in [&mut data.tensors.k, &mut data.tensors.v] {
        let scale = scale_of(values.iter().fold(0.0, |largest, x| x.abs().max(largest)) as f32);
        values.iter_mut().for_each(|x| *x = rounded(*x, scale));
    }
    data
}

fn config_for(problem: &AttentionProblem, capacity: usize) -> KvCacheConfig {
    KvCacheConfig::new(problem.batch, problem.num_heads_kv, problem.head_dim, capacity)
        .with_head_dim_v(Some(problem.head_dim_v))
        .with_dtype(Some(burn_dtype(problem.dtype).into()))
        .with_storage(E4M3)
}

/// Runs these steps over a cache and over pages, and compares with the oracle and with composed operations.
fn check_steps(data: &Data, target: &Target, steps: &[Step], page_size: usize) {
    let p = &data.problem;
    let mut run = Run::over(data, config_for(p, p.seq_k).init(&target.device), &target.device);
    steps.iter().for_each(|step| run.step(step));
    assert_eq!(lens_of(&run.cache), run.lens);
    check_found(data, target, &run.results());
    let config = config_of(p, p.batch * p.seq_k.div_ceil(page_size), page_size).with_storage(E4M3);
    check_steps_over(data, target, steps, &config);
}

#[test]
fn every_option() {
    for target in targets() {
        for (n, problem) in all_problems(Dtype::F32).into_iter().enumerate() {
            let data = representable(problem, n as u64);
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
                [([8, 2], [64, 64], 16), ([4, 1], [128, 32], 32), ([3, 3], [12, 36], 64), ([16, 1], [64, 128], 256)]
            {
                let data = representable(problem_of(heads, dims, dtype, AttentionOptions::default()), 3);
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
            let data = representable(problem([2, 4, 1, 1100, 1100, 64, 64], dtype, options), 4);
            let mut steps: Vec<_> = [509, 1, 1, 1, 1, 511, 1, 8, 1].map(Step::Of).to_vec();
            steps.extend([Step::Ragged(vec![3, 40]), Step::Of(1)]);
            check_steps(&data, &target, &steps, if dtype == Dtype::F16 { 256 } else { 64 });
        }
    }
}

/// Heads of the caches whose elements are read back, and their dimensions.
const SIZES: [usize; 3] = [2, 8, 12];

/// Positions whose magnitudes differ by powers of two.
fn rows(rng: &mut StdRng, count: usize, dtype: Dtype) -> Vec<[Vec<f64>; 2]> {
    let [heads, dim, dim_v] = SIZES;
    let row = |rng: &mut StdRng, dim: usize| {
        let times = f64::from(rng.random_range(-11..11)).exp2();
        let mut row: Vec<f64> = reference::normal(heads * dim, rng.random()).iter().map(|x| x * times).collect();
        reference::round_to(&mut row, dtype);
        row
    };
    (0..count).map(|_| [row(rng, dim), row(rng, dim_v)]).collect()
}

/// Appends the positions of one sequence.
fn append(cache: &mut impl AttentionCache, rows: &[[Vec<f64>; 2]], dtype: Dtype, device: &Device) {
    let [heads, dim, dim_v] = SIZES;
    let of = |nth: usize, dim: usize| {
        let of_head = |h: usize| rows.iter().flat_map(move |row| row[nth][h * dim..(h + 1) * dim].to_vec());
        let values: Vec<f64> = (0..heads).flat_map(of_head).collect();
        tensor::<4>(&values, [1, heads, rows.len(), dim], dtype, device)
    };
    let (k, v) = (of(0, dim), of(1, dim_v));
    flash_attention_with_kvcache(k.clone(), k, v, cache, &FlashAttentionOptions::new());
}

/// The values of all positions, `[position][head · dim_v]`: each query sees one of them alone. Appends as many positions.
fn values_of(cache: &mut impl AttentionCache, len: usize, dtype: Dtype, device: &Device) -> Vec<Vec<f64>> {
    let [heads, dim, dim_v] = SIZES;
    let zeros = |dim| Tensor::<4>::zeros([1, heads, len, dim], (device, burn_dtype(dtype)));
    let hides: Vec<bool> = (0..len).flat_map(|i| (0..2 * len).map(move |j| i != j)).collect();
    let options = FlashAttentionOptions::new().with_mask(mask_tensor(&hides, [1, 1, len, 2 * len], device));
    let out = read(flash_attention_with_kvcache(zeros(dim), zeros(dim), zeros(dim_v), cache, &options));
    let of = |i: usize, h: usize| out[(h * len + i) * dim_v..][..dim_v].to_vec();
    (0..len).map(|i| (0..heads).flat_map(|h| of(i, h)).collect()).collect()
}

/// Checks what a cache holds against what a sequence must hold, bit for bit, and within the bounds against what was appended.
fn check_values(found: &[Vec<f64>], held: &Sequence, appended: &[[Vec<f64>; 2]]) {
    let [_, _, dim_v] = SIZES;
    for (position, (found, [_, original])) in found.iter().zip(appended).enumerate() {
        assert_eq!(*found, held.rows()[position][1], "values of position {position}");
        for (n, (found, original)) in found.iter().zip(original).enumerate() {
            let scale = f64::from(held.scale(position, 1, n / dim_v));
            let bound = original.abs() / 16.0 + scale / 512.0;
            assert!((found - original).abs() <= bound, "{found} for {original} with the scale {scale}");
        }
    }
}

#[test]
fn elements_are_within_their_bounds() {
    for target in targets() {
        for dtype in dtypes(&target) {
            let (device, mut rng) = (&target.device, StdRng::seed_from_u64(7));
            let [heads, dim, dim_v] = SIZES;
            let config = KvCacheConfig::new(1, heads, dim, 10).with_head_dim_v(Some(dim_v)).with_grows(true);
            let config = config.with_dtype(Some(burn_dtype(dtype).into())).with_storage(E4M3);
            let (mut cache, mut held) = (config.init(device), Sequence::new(KvStorage::E4m3, 64, heads));
            let mut all = Vec::new();
            for step in 0..24 {
                if step % 7 == 6 {
                    // Within a page, or before one.
                    let len = if step == 13 { 0 } else { rng.random_range(0..all.len()) };
                    cache.truncate(len);
                    held.truncate(len);
                    all.truncate(len);
                }
                let count = if step % 3 == 0 { rng.random_range(1..40) } else { 1 };
                let new = rows(&mut rng, count, dtype);
                append(&mut cache, &new, dtype, device);
                all.extend(new.clone());
                held.append(new);
                let found = values_of(&mut cache.duplicate(), all.len(), dtype, device);
                check_values(&found, &held, &all);
            }
        }
    }
}

/// Elements that are too large count as the largest one. What is not finite makes the page of a head NaN, until it is written anew.
#[test]
fn what_is_not_finite_stays_in_its_page() {
    for target in targets() {
        let (device, dtype) = (&target.device, Dtype::F32);
        let [heads, dim, dim_v] = SIZES;
        let config = PagedKvCacheConfig::new(20, heads, dim).with_head_dim_v(Some(dim_v)).with_page_size(16);
        let mut cache = config.with_storage(E4M3).init(device);
        let sequence = cache.add();
        let step = |cache: &mut PagedKvCache, rows: &[[Vec<f64>; 2]]| {
            append(&mut cache.batch(&[(sequence, rows.len())]).unwrap(), rows, dtype, device);
        };
        let found = |cache: &mut PagedKvCache| {
            let (fork, len) = (cache.fork(sequence).unwrap(), cache.len(sequence).unwrap());
            let values = values_of(&mut cache.batch(&[(fork, len)]).unwrap(), len, dtype, device);
            cache.free(fork).unwrap();
            values
        };
        let row = |x: f64| [vec![1.0; heads * dim], (0..heads * dim_v).map(|n| if n == 0 { x } else { 1.0 }).collect()];
        step(&mut cache, &vec![row(1.0); 20]);
        step(&mut cache, &[row(1e6)]);
        let values = found(&mut cache);
        assert_eq!((values[20][0], values[20][1], values[0][0]), (57344.0, 1.0, 1.0));
        for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            step(&mut cache, &[row(x)]);
            for (position, row) in found(&mut cache).iter().enumerate() {
                for (n, value) in row.iter().enumerate() {
                    assert_eq!(value.is_nan(), position >= 16 && n < dim_v, "{value} at {position}, {n} after {x}");
                }
            }
            // The page stays as it is if a part of it is forgotten.
            cache.truncate(sequence, 18).unwrap();
            step(&mut cache, &[row(2.0)]);
            assert!(found(&mut cache)[16][0].is_nan());
            cache.truncate(sequence, 16).unwrap();
            step(&mut cache, &[row(2.0), row(3.0)]);
            let values = found(&mut cache);
            assert_eq!((values.len(), values[16][0], values[17][0]), (18, 2.0, 3.0));
        }
    }
}

/// A fork that writes to a shared page gets a copy with its scale.
#[test]
fn a_copied_page_has_its_scale() {
    for target in targets() {
        let (device, dtype, mut rng) = (&target.device, Dtype::F32, StdRng::seed_from_u64(9));
        let [heads, dim, dim_v] = SIZES;
        let config = PagedKvCacheConfig::new(9, heads, dim).with_head_dim_v(Some(dim_v)).with_page_size(16);
        let mut cache = config.with_dtype(Some(FloatDType::F32)).with_storage(E4M3).init(device);
        let first = cache.add();
        let mut held = [(first, Sequence::new(KvStorage::E4m3, 16, heads), Vec::new())].to_vec();
        type Of = (SequenceId, Sequence, Vec<[Vec<f64>; 2]>);
        let mut step = |cache: &mut PagedKvCache, (id, held, all): &mut Of, count| {
            let new = rows(&mut rng, count, dtype);
            append(&mut cache.batch(&[(*id, count)]).unwrap(), &new, dtype, device);
            all.extend(new.clone());
            held.append(new);
        };
        step(&mut cache, &mut held[0], 21);
        for _ in 0..2 {
            let (_, sequence, all) = held[0].clone();
            held.push((cache.fork(first).unwrap(), sequence, all));
        }
        assert_eq!(cache.free_pages(), 7);
        (0..3).for_each(|nth| step(&mut cache, &mut held[nth], 1 + nth));
        assert_eq!(cache.free_pages(), 5);
        for (id, sequence, all) in &held {
            let fork = cache.fork(*id).unwrap();
            let values = values_of(&mut cache.batch(&[(fork, all.len())]).unwrap(), all.len(), dtype, device);
            check_values(&values, sequence, all);
            cache.free(fork).unwrap();
        }
    }
}

#[test]
fn memory_is_a_byte_an_element() {
    for target in targets() {
        let device = &target.device;
        let config = KvCacheConfig::new(2, 3, 64, 100).with_head_dim_v(Some(32)).with_storage(E4M3);
        let mut cache = config.init(device);
        // Two pages of 64 positions of each sequence.
        let pages = |count: usize| 2 * count * 3 * (page_bytes(64, 64) + page_bytes(64, 32));
        assert_eq!((cache.bytes(), cache.capacity()), (pages(2), 100));
        assert_eq!(config.bytes_per_position(), pages(1).div_ceil(64));
        assert_eq!(cache.duplicate().bytes(), pages(2));
        cache.reserve(120).unwrap();
        assert_eq!((cache.bytes(), cache.capacity()), (pages(2), 120));
        cache.reserve(129).unwrap();
        assert_eq!((cache.bytes(), cache.capacity()), (pages(3), 129));
        let config = PagedKvCacheConfig::new(10, 3, 64).with_page_size(16).with_storage(E4M3);
        assert_eq!(config.bytes_per_page(), 2 * 3 * page_bytes(16, 64));
        assert_eq!(config.init(device).bytes(), 10 * config.bytes_per_page());
        let mut none = KvCacheConfig::new(0, 1, 8, 20).with_storage(E4M3).init(device);
        assert_eq!(step_of_zeros(&mut none, device).unwrap().dims(), [0, 1, 1, 8]);
        none.reserve(100).unwrap();
        assert_eq!(lens_of(&none.duplicate()), Vec::<usize>::new());
    }
}

/// A step of one position, `[batch, heads, 1, head_dim]`, of zeros in the type of the device.
fn step_of_zeros(cache: &mut KvCache, device: &Device) -> Result<Tensor<4>, String> {
    let config = cache.config();
    let zeros = || Tensor::<4>::zeros([config.batch, config.num_heads_kv, 1, config.head_dim], device);
    let (q, k, v) = (zeros(), zeros(), zeros());
    try_flash_attention_with_kvcache(q, k, v, cache, &FlashAttentionOptions::new()).map_err(|error| error.to_string())
}

#[test]
fn what_cannot_be_stored_is_refused() {
    for target in targets() {
        let device = &target.device;
        for (head_dim, head_dim_v) in [(33, 32), (32, 30)] {
            let (of_cache, of_pages) =
                (KvCacheConfig::new(1, 2, head_dim, 100), PagedKvCacheConfig::new(10, 2, head_dim));
            let errors = [
                of_cache.with_head_dim_v(Some(head_dim_v)).with_storage(E4M3).try_init(device).unwrap_err(),
                of_pages.with_head_dim_v(Some(head_dim_v)).with_storage(E4M3).try_init(device).unwrap_err(),
            ];
            for error in errors {
                let words = "storage = E4m3 is not supported: head_dim and head_dim_v must be multiples of 4";
                assert_eq!(error.to_string(), words);
            }
        }
        // The type of new keys and values is that of the cache, as ever, and autodiff has no place here.
        let config = KvCacheConfig::new(1, 2, 16, 8).with_storage(E4M3);
        let mut cache = config.clone().with_dtype(Some(FloatDType::F16)).init(device);
        let error = step_of_zeros(&mut cache, device).unwrap_err();
        assert!(error.starts_with("the cache is f16, but q is f32"), "{error}");
        let autodiff = device.clone().autodiff();
        let mut cache = config.init(&autodiff);
        assert!(!cache.device().is_autodiff() && step_of_zeros(&mut cache, &autodiff).unwrap().is_autodiff());
        let tracked = Tensor::<4>::zeros([1, 2, 1, 16], &autodiff).require_grad();
        let zeros = || Tensor::<4>::zeros([1, 2, 1, 16], &autodiff);
        let error = try_flash_attention_with_kvcache(zeros(), tracked, zeros(), &mut cache, &Default::default());
        assert!(error.unwrap_err().to_string().starts_with("k is tracked"));
        for n in 0..7 {
            assert_eq!((step_of_zeros(&mut cache, device).is_ok(), lens_of(&cache)), (true, vec![2 + n]));
        }
        let error = step_of_zeros(&mut cache, device).unwrap_err();
        assert!(error.contains("room for 8 positions"), "{error}");
        cache.set_seq_lens(Tensor::<1, Int>::from_data([5], device), 6).unwrap();
        step_of_zeros(&mut cache, device).unwrap();
        assert_eq!((lens_of(&cache), cache.max_len()), (vec![6], 7));
    }
}

/// Configurations of before there was a storage are read.
#[test]
fn configurations() {
    let config = KvCacheConfig::new(1, 2, 16, 8).with_storage(E4M3);
    let text = serde_json::to_string(&config).unwrap();
    assert!(text.contains(r#""storage":"e4m3""#), "{text}");
    assert_eq!(serde_json::from_str::<KvCacheConfig>(&text).unwrap().storage, E4M3);
    let before =
        r#"{"batch":1,"num_heads_kv":2,"head_dim":16,"capacity":8,"head_dim_v":null,"dtype":null,"grows":true}"#;
    assert_eq!(serde_json::from_str::<KvCacheConfig>(before).unwrap().storage, None);
    let config = PagedKvCacheConfig::new(10, 2, 16).with_storage(E4M3);
    let mut value = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<PagedKvCacheConfig>(value.clone()).unwrap().storage, E4M3);
    value.as_object_mut().unwrap().remove("storage").unwrap();
    assert_eq!(serde_json::from_value::<PagedKvCacheConfig>(value).unwrap().storage, None);
}
