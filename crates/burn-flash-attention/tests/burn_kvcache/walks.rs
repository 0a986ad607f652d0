//! Random walks: caches are appended to, cut, duplicated, emptied and enlarged in any order, and every output is compared with the oracle of
//! what the sequences hold.
//!
//! `FLASH_WALK_STEPS` is the number of steps of all walks on a device, `FLASH_WALK_SEED` the seed of the first walk.

use crate::common::*;
use crate::held::Sequence;
use crate::lens_of;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_attention::{
    FlashAttentionOptions, KvCache, KvCacheConfig, KvStorage, flash_attention_with_kvcache_and_lse,
};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
use flash_attention_reference as reference;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// A cache, and what its sequences hold.
struct Held {
    cache: KvCache,
    sequences: Vec<Sequence>,
    /// The bound of lengths that the host knows.
    bound: usize,
}

impl Held {
    fn duplicate(&self) -> Self {
        Held { cache: self.cache.duplicate(), sequences: self.sequences.clone(), bound: self.bound }
    }
}

/// New positions of a batch of sequences.
pub struct Drawn {
    /// Batch, heads of q, heads of k and v, head_dim, head_dim_v.
    sizes: [usize; 5],
    /// Positions that the tensors hold.
    new: usize,
    /// Positions of each sequence, the first ones.
    pub counts: Vec<usize>,
    qkv: [Vec<f64>; 3],
}

impl Drawn {
    /// Appends the keys and values to what sequences hold.
    pub fn push(&self, sequences: Vec<&mut Sequence>) {
        let ([_, _, heads, dim, dim_v], new) = (self.sizes, self.new);
        let [_, k, v] = &self.qkv;
        for (b, sequence) in sequences.into_iter().enumerate() {
            let rows = (0..self.counts[b]).map(|i| {
                let row = |values: &[f64], dim: usize| {
                    let of_head = |h| ((b * heads + h) * new + i) * dim;
                    (0..heads).flat_map(|h| values[of_head(h)..of_head(h) + dim].to_vec()).collect::<Vec<_>>()
                };
                [row(k, dim), row(v, dim_v)]
            });
            sequence.append(rows.collect());
        }
    }

    /// The tensors.
    pub fn tensors(&self, device: &Device) -> [Tensor<4>; 3] {
        let [batch, heads_q, heads_kv, dim, dim_v] = self.sizes;
        let shapes =
            [[batch, heads_q, self.new, dim], [batch, heads_kv, self.new, dim], [batch, heads_kv, self.new, dim_v]];
        [0, 1, 2].map(|nth| tensor(&self.qkv[nth], shapes[nth], Dtype::F32, device))
    }
}

/// A walk's sizes and options.
pub struct Walk {
    pub rng: StdRng,
    pub device: Device,
    /// Batch, heads of q, heads of k and v, head_dim, head_dim_v.
    pub sizes: [usize; 5],
    pub options: AttentionOptions,
    pub storage: KvStorage,
    sinks: Option<Vec<f64>>,
}

impl Walk {
    pub fn new(seed: u64, device: &Device, storage: KvStorage) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let heads_kv = rng.random_range(1..3);
        let heads_q = heads_kv * rng.random_range(1..5);
        // Few head dimensions, each of which compiles kernels of its own.
        let odd = if storage == KvStorage::E4m3 { 36 } else { 33 };
        let [dim, dim_v] = [[16, 16], [odd, 24], [8, 40]][rng.random_range(0..3)];
        let sizes = [rng.random_range(1..4), heads_q, heads_kv, dim, dim_v];
        let options = AttentionOptions {
            causal: rng.random_bool(0.8),
            window_left: rng.random_bool(0.3).then(|| rng.random_range(0..20)),
            softcap: rng.random_bool(0.3).then_some(3.0),
            ..Default::default()
        };
        let sinks = rng.random_bool(0.3).then(|| {
            let mut sinks = reference::normal(heads_q, seed);
            reference::round_to(&mut sinks, Dtype::F32);
            sinks
        });
        Walk { rng, device: device.clone(), sizes, options, storage, sinks }
    }

    /// A sequence of a cache with pages of so many positions, if it has pages.
    pub fn sequence(&self, page_size: usize) -> Sequence {
        Sequence::new(self.storage, page_size, self.sizes[2])
    }

    fn empty(&mut self) -> Held {
        let [batch, _, heads_kv, dim, dim_v] = self.sizes;
        let config = KvCacheConfig::new(batch, heads_kv, dim, self.rng.random_range(1..40));
        let config = config.with_head_dim_v(Some(dim_v)).with_grows(true).with_storage(Some(self.storage));
        Held { cache: config.init(&self.device), sequences: vec![self.sequence(64); batch], bound: 0 }
    }

    fn normal(&mut self, len: usize) -> Vec<f64> {
        let mut values = reference::normal(len, self.rng.random());
        reference::round_to(&mut values, Dtype::F32);
        values
    }

    /// Appends positions, and compares the output with the oracle's.
    fn append(&mut self, held: &mut Held) {
        let batch = self.sizes[0];
        let new = if self.rng.random_bool(0.7) { 1 } else { self.rng.random_range(1..9) };
        let padded = self.rng.random_bool(0.4);
        let counts = (0..batch).map(|_| if padded { self.rng.random_range(0..=new) } else { new }).collect();
        let drawn = self.draw(new, counts);
        drawn.push(held.sequences.iter_mut().collect());
        held.bound += new;
        let mut options = self.options();
        options.seq_lens_q = padded.then(|| {
            let counts: Vec<i32> = drawn.counts.iter().map(|count| *count as i32).collect();
            Tensor::<1, Int>::from_data(counts.as_slice(), &self.device)
        });
        let [q, k, v] = drawn.tensors(&self.device);
        let (out, lse) = flash_attention_with_kvcache_and_lse(q, k, v, &mut held.cache, &options);
        self.judge(&drawn, &held.sequences.iter().collect::<Vec<_>>(), (out, lse));
    }

    /// Queries, keys and values of new positions.
    pub fn draw(&mut self, new: usize, counts: Vec<usize>) -> Drawn {
        let [_, heads_q, heads_kv, dim, dim_v] = self.sizes;
        let batch = counts.len();
        let q = self.normal(batch * heads_q * new * dim);
        let [k, v] = [dim, dim_v].map(|dim| self.normal(batch * heads_kv * new * dim));
        Drawn { sizes: [batch, heads_q, heads_kv, dim, dim_v], new, counts, qkv: [q, k, v] }
    }

    /// The options of all calls.
    pub fn options(&self) -> FlashAttentionOptions {
        let mut options = FlashAttentionOptions::from(self.options);
        options.sinks = self.sinks.as_ref().map(|sinks| tensor(sinks, [self.sizes[1]], Dtype::F32, &self.device));
        options
    }

    /// Compares an output with the oracle's: each sequence by itself, over as many keys as it has.
    pub fn judge(&self, drawn: &Drawn, sequences: &[&Sequence], (out, lse): (Tensor<4>, Tensor<3>)) {
        let (out, lse) = (read(out), read(lse));
        let Drawn { sizes: [_, heads_q, heads_kv, dim, dim_v], new, counts, qkv: [q, ..] } = drawn;
        let (heads_q, heads_kv, dim, dim_v) = (*heads_q, *heads_kv, *dim, *dim_v);
        for (b, keys) in sequences.iter().enumerate() {
            let rows = counts[b];
            let [shape_q, shape_k, shape_v] =
                [[1, heads_q, rows, dim], [1, heads_kv, keys.len(), dim], [1, heads_kv, keys.len(), dim_v]];
            let problem = AttentionProblem::new(&shape_q, &shape_k, &shape_v, Dtype::F32, self.options).unwrap();
            let problem = if self.sinks.is_some() { problem.with_sinks(&[heads_q]).unwrap() } else { problem };
            let of_heads = |nth: usize, dim: usize| -> Vec<f64> {
                (0..heads_kv)
                    .flat_map(|h| keys.rows().iter().flat_map(move |row| row[nth][h * dim..(h + 1) * dim].to_vec()))
                    .collect()
            };
            let at = |h: usize, i: usize, dim: usize| ((b * heads_q + h) * new + i) * dim;
            let all = || (0..heads_q).flat_map(|h| (0..rows).map(move |i| (h, i)));
            let tensors = reference::Tensors {
                q: all().flat_map(|(h, i)| q[at(h, i, dim)..at(h, i, dim) + dim].to_vec()).collect(),
                k: of_heads(0, dim),
                v: of_heads(1, dim_v),
                sinks: self.sinks.clone(),
                ..Default::default()
            };
            let exact = reference::forward(&problem, &tensors.inputs());
            for (n, (h, i)) in all().enumerate() {
                let found = &out[at(h, i, dim_v)..at(h, i, dim_v) + dim_v];
                let wanted = &exact.o[n * dim_v..(n + 1) * dim_v];
                let near = |(found, wanted): (&f64, &f64)| (found - wanted).abs() <= 1e-5 * (1.0 + wanted.abs());
                assert!(found.iter().zip(wanted).all(near), "{found:?}, the oracle has {wanted:?}");
                let (found, wanted) = (lse[at(h, i, 1)], exact.lse[n]);
                assert!(found == wanted || near((&found, &wanted)), "lse {found}, the oracle has {wanted}");
            }
        }
    }

    /// Appends NaN, as tokens that are then all rejected. In e4m3 it would stay, so that these are large numbers there.
    fn reject(&mut self, held: &mut Held) {
        let [batch, heads_q, heads_kv, dim, dim_v] = self.sizes;
        let new = self.rng.random_range(1..6);
        let rejected = if self.storage == KvStorage::E4m3 { 1000.0 } else { f32::NAN };
        let nan = |heads, dim| Tensor::<4>::full([batch, heads, new, dim], rejected, &self.device);
        for sequence in &mut held.sequences {
            let len = sequence.len();
            sequence.append(vec![[dim, dim_v].map(|dim| vec![f64::from(rejected); heads_kv * dim]); new]);
            sequence.truncate(len);
        }
        let options = FlashAttentionOptions::from(self.options);
        let (q, k, v) = (nan(heads_q, dim), nan(heads_kv, dim), nan(heads_kv, dim_v));
        flash_attention_with_kvcache_and_lse(q, k, v, &mut held.cache, &options);
        self.set_lens(held, held.bound);
    }

    fn set_lens(&self, held: &mut Held, bound: usize) {
        let lens: Vec<i32> = held.sequences.iter().map(|sequence| sequence.len() as i32).collect();
        let lens = Tensor::<1, Int>::from_data(lens.as_slice(), &self.device);
        held.cache.set_seq_lens(lens, bound).unwrap();
        held.bound = bound;
    }

    /// Shortens each sequence by itself.
    fn accept_some(&mut self, held: &mut Held) {
        for sequence in &mut held.sequences {
            let kept = self.rng.random_range(0..=sequence.len());
            sequence.truncate(kept);
        }
        // As low as the longest sequence, or as it was.
        let longest = held.sequences.iter().map(Sequence::len).max().unwrap_or(0);
        let bound = if self.rng.random_bool(0.5) { longest } else { held.bound };
        self.set_lens(held, bound);
    }

    fn truncate(&mut self, held: &mut Held) {
        let len = self.rng.random_range(0..=held.bound);
        held.cache.truncate(len);
        held.sequences.iter_mut().for_each(|sequence| sequence.truncate(len));
        held.bound = held.bound.min(len);
    }

    fn walk(&mut self, steps: usize) {
        let mut all = vec![self.empty()];
        for _ in 0..steps {
            let nth = self.rng.random_range(0..all.len());
            match self.rng.random_range(0..20) {
                0 => self.truncate(&mut all[nth]),
                1 => self.accept_some(&mut all[nth]),
                2 => self.reject(&mut all[nth]),
                3 if all.len() < 4 => {
                    let duplicate = all[nth].duplicate();
                    all.push(duplicate);
                }
                4 if all.len() > 1 => drop(all.swap_remove(nth)),
                5 => {
                    let capacity = all[nth].cache.capacity() + self.rng.random_range(0..9);
                    all[nth].cache.reserve(capacity).unwrap();
                }
                6 if self.rng.random_bool(0.3) => {
                    all[nth].cache.clear();
                    all[nth].sequences.iter_mut().for_each(|sequence| sequence.truncate(0));
                    all[nth].bound = 0;
                }
                _ => self.append(&mut all[nth]),
            }
            let found = &all[nth.min(all.len() - 1)];
            assert_eq!(found.cache.max_len(), found.bound);
        }
        for held in &all {
            assert_eq!(lens_of(&held.cache), held.sequences.iter().map(Sequence::len).collect::<Vec<_>>());
        }
    }
}

fn number(variable: &str, default: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{variable} is {value}, which is no number")))
}

/// Walks of 50 steps on each device, as many as the variables ask for.
pub fn walks(storage: KvStorage, walk: impl Fn(Walk, usize)) {
    const STEPS_OF_WALK: u64 = 50;
    for target in targets() {
        let steps = number("FLASH_WALK_STEPS", if target.name == "flex" { 1000 } else { 150 });
        let first = number("FLASH_WALK_SEED", 1);
        for seed in first..first + steps.div_ceil(STEPS_OF_WALK) {
            println!("a walk on {} with FLASH_WALK_SEED={seed} FLASH_WALK_STEPS={STEPS_OF_WALK}", target.name);
            walk(Walk::new(seed, &target.device, storage), STEPS_OF_WALK as usize);
        }
    }
}

#[test]
fn random_walks() {
    walks(KvStorage::Elements, |mut walk, steps| walk.walk(steps));
}

#[test]
fn random_walks_in_e4m3() {
    walks(KvStorage::E4m3, |mut walk, steps| walk.walk(steps));
}
