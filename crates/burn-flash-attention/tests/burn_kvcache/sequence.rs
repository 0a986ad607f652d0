//! Runs the sequences of a case step by step over a cache.

use crate::cache_of;
use crate::common::*;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_flash_attention::{
    FlashAttentionOptions, KvCache, PagedKvCache, SequenceId, flash_attention_with_kvcache_and_lse,
};
use flash_attention_kernels::AttentionProblem;

/// Positions that a step appends to each sequence.
#[derive(Clone, Debug)]
pub enum Step {
    /// As many to each.
    Of(usize),
    /// As many as this, of the largest number that the tensors hold.
    Ragged(Vec<usize>),
}

impl Step {
    /// Positions that the tensors hold.
    pub fn positions(&self) -> usize {
        match self {
            Step::Of(new) => *new,
            Step::Ragged(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }

    /// Positions that are appended to sequence `b`.
    pub fn count(&self, b: usize) -> usize {
        match self {
            Step::Of(new) => *new,
            Step::Ragged(counts) => counts[b],
        }
    }
}

/// A cache that steps are appended to.
pub trait Stepped {
    /// The output of a step and its log-sum-exp.
    fn attend(&mut self, qkv: [Tensor<4>; 3], step: &Step, options: FlashAttentionOptions) -> (Tensor<4>, Tensor<3>);

    /// The number of keys that a call with this step has, where sequences have these lengths before.
    fn seq_k(&self, lens: &[usize], step: &Step) -> usize;
}

impl Stepped for KvCache {
    fn attend(&mut self, qkv: [Tensor<4>; 3], step: &Step, options: FlashAttentionOptions) -> (Tensor<4>, Tensor<3>) {
        let mut options = options;
        if let Step::Ragged(counts) = step {
            let counts: Vec<i32> = counts.iter().map(|count| *count as i32).collect();
            options.seq_lens_q = Some(Tensor::<1, Int>::from_data(counts.as_slice(), &self.device()));
        }
        let [q, k, v] = qkv;
        flash_attention_with_kvcache_and_lse(q, k, v, self, &options)
    }

    fn seq_k(&self, _lens: &[usize], step: &Step) -> usize {
        self.max_len() + step.positions()
    }
}

/// A paged cache, with the sequences of a run.
pub struct Paged {
    pub cache: PagedKvCache,
    pub sequences: Vec<SequenceId>,
}

impl Stepped for Paged {
    fn attend(&mut self, qkv: [Tensor<4>; 3], step: &Step, options: FlashAttentionOptions) -> (Tensor<4>, Tensor<3>) {
        let counted = self.sequences.iter().enumerate().map(|(b, sequence)| (*sequence, step.count(b)));
        let [q, k, v] = qkv;
        let mut batch = self.cache.batch(&counted.collect::<Vec<_>>()).unwrap();
        flash_attention_with_kvcache_and_lse(q, k, v, &mut batch, &options)
    }

    fn seq_k(&self, lens: &[usize], step: &Step) -> usize {
        lens.iter().enumerate().map(|(b, len)| len + step.count(b)).max().unwrap_or(0)
    }
}

/// A run over a cache: its lengths, and what it has found for each position, in the layout of the whole problem.
pub struct Run<'a, C = KvCache> {
    pub data: &'a Data,
    pub cache: C,
    pub lens: Vec<usize>,
    pub found: Results,
    device: Device,
}

impl<'a> Run<'a> {
    /// A run over an empty cache of this capacity.
    pub fn new(data: &'a Data, capacity: usize, device: &Device) -> Self {
        Run::over(data, cache_of(&data.problem, capacity, device), device)
    }
}

impl<'a, C: Stepped> Run<'a, C> {
    /// A run over a cache whose sequences are empty.
    pub fn over(data: &'a Data, cache: C, device: &Device) -> Self {
        let problem = &data.problem;
        let found = Results {
            out: vec![f64::NAN; problem.o_shape().iter().product()],
            lse: vec![f64::NAN; problem.rows()],
            ..Results::default()
        };
        Run { data, cache, lens: vec![0; problem.batch], found, device: device.clone() }
    }

    /// Appends the next positions of each sequence. Padding is NaN.
    pub fn step(&mut self, step: &Step) {
        let (p, new) = (&self.data.problem, step.positions());
        let tensors = &self.data.tensors;
        let row = |b: usize, i: usize| (i < step.count(b)).then_some(self.lens[b] + i);
        let rows = |values: &[f64], [batch, heads, seq, dim]: [usize; 4]| {
            let at = |b, h, i| row(b, i).map(|row| ((b * heads + h) * seq + row) * dim);
            let all = (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..new).map(move |i| (b, h, i))));
            let gathered = all.flat_map(|(b, h, i)| match at(b, h, i) {
                Some(at) => values[at..at + dim].to_vec(),
                None => vec![f64::NAN; dim],
            });
            tensor(&gathered.collect::<Vec<_>>(), [batch, heads, new, dim], p.dtype, &self.device)
        };
        let (q, k, v) = (rows(&tensors.q, p.q_shape()), rows(&tensors.k, p.k_shape()), rows(&tensors.v, p.v_shape()));
        let options = self.options(step);
        let (out, lse) = self.cache.attend([q, k, v], step, options);
        let (out, lse) = (read(out), read(lse));
        let (heads, dim) = (p.num_heads_q, p.head_dim_v);
        for (b, h, i) in (0..p.batch).flat_map(|b| (0..heads).flat_map(move |h| (0..new).map(move |i| (b, h, i)))) {
            let from = (b * heads + h) * new + i;
            let found = &out[from * dim..(from + 1) * dim];
            if let Some(row) = row(b, i) {
                let to = (b * heads + h) * p.seq_q + row;
                self.found.out[to * dim..(to + 1) * dim].copy_from_slice(found);
                self.found.lse[to] = lse[from];
            } else {
                let of_none = tensors.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[h]);
                assert!(found.iter().all(|x| *x == 0.0), "the output of padding is {found:?}");
                assert_eq!(lse[from], of_none, "lse of padding");
            }
        }
        (0..p.batch).for_each(|b| self.lens[b] += step.count(b));
    }

    /// The options of the case, with the rows of these positions.
    fn options(&self, step: &Step) -> FlashAttentionOptions {
        let (p, tensors) = (&self.data.problem, &self.data.tensors);
        let how = How { tracked: Tracked::NONE, ..How::default() };
        let whole = Tensors::new(self.data, &self.device, how).options;
        let seq_k = self.cache.seq_k(&self.lens, step);
        let floats = |shape: Option<[usize; 4]>, values: Option<&Vec<f64>>, dtype| {
            let (shape, values) = self.rows_of(step, seq_k, shape?, values?);
            Some(tensor::<4>(&values, shape, dtype, &self.device))
        };
        let of_functions = |shapes: [Option<[usize; 4]>; 2], values: &[Option<Vec<f64>>; 2]| -> Vec<Tensor<4>> {
            let f32s = |nth: usize| floats(shapes[nth], values[nth].as_ref(), flash_attention_kernels::Dtype::F32);
            (0..2).filter_map(f32s).collect()
        };
        let mut options = whole;
        options.mask = p.mask.zip(tensors.mask.as_ref()).map(|(shape, hides)| -> Tensor<4, Bool> {
            let (shape, hides) = self.rows_of(step, seq_k, shape, hides);
            mask_tensor(&hides, shape, &self.device)
        });
        options.bias = floats(p.bias, tensors.bias.as_ref(), p.dtype);
        options.score_tensors = of_functions(p.score_tensors, &tensors.score_tensors);
        options.mask_tensors = of_functions(p.mask_tensors, &tensors.mask_tensors);
        options
    }

    /// The part of a tensor of pairs that belongs to the new positions, for all keys up to the bound of their number. Past the ends, any.
    fn rows_of<T: Copy>(&self, step: &Step, seq_k: usize, shape: [usize; 4], values: &[T]) -> ([usize; 4], Vec<T>) {
        let p: &AttentionProblem = &self.data.problem;
        let many = |dim: usize, size: usize| if shape[dim] > 1 { size } else { 1 };
        // Rows differ between sequences of different lengths.
        let batches = if shape[2] > 1 { p.batch } else { shape[0] };
        let part = [batches, shape[1], many(2, step.positions()), many(3, seq_k)];
        let mut found = Vec::with_capacity(part.iter().product());
        for (b, h) in (0..part[0]).flat_map(|b| (0..part[1]).map(move |h| (b, h))) {
            for (i, j) in (0..part[2]).flat_map(|i| (0..part[3]).map(move |j| (i, j))) {
                let row = if shape[2] > 1 { self.lens[b] + i } else { 0 };
                let at = [b, h, row, j];
                let clamped = |n: usize| at[n].min(shape[n] - 1);
                let at = (0..4).fold(0, |index, n| index * shape[n] + clamped(n));
                found.push(values[at]);
            }
        }
        (part, found)
    }

    /// What was found, with the exact results where nothing was run.
    pub fn results(&self) -> Results {
        let how = How { tracked: Tracked::NONE, ..How::default() };
        let exact = self.data.oracle(how);
        let filled = |found: &[f64], exact: Vec<f64>, dim: usize| -> Vec<f64> {
            let seq = self.data.problem.seq_q;
            let ran = |n: usize| {
                let (b, row) = (n / dim / seq / self.data.problem.num_heads_q, n / dim % seq);
                row < self.lens[b]
            };
            exact.into_iter().enumerate().map(|(n, exact)| if ran(n) { found[n] } else { exact }).collect()
        };
        Results {
            out: filled(&self.found.out, exact.out, self.data.problem.head_dim_v),
            lse: filled(&self.found.lse, exact.lse, 1),
            ..Results::default()
        }
    }
}
