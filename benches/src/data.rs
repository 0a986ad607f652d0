//! Random inputs on the host, and computed results.

use crate::case::{Case, Variant};
use crate::error::Error;
use flash_attention_kernels::{AttentionProblem, BackwardOrder, Dtype, KvStorage, PagedKv, Precision, e4m3};
use flash_attention_reference as reference;
use half::{bf16, f16};
use rayon::prelude::*;
use std::iter::successors;
use std::ops::Range;

/// Inputs of a problem: normal random numbers, rounded to its dtype.
pub struct Data {
    /// The case.
    pub case: Case,
    /// The problem of the case.
    pub problem: AttentionProblem,
    /// `[batch, heads_q, seq_q, head_dim]`.
    pub q: Values,
    /// `[batch, heads_kv, seq_k, head_dim]`.
    pub k: Values,
    /// `[batch, heads_kv, seq_k, head_dim_v]`.
    pub v: Values,
    /// `[batch, heads_q, seq_q, head_dim_v]`.
    pub dout: Values,
    /// `problem.bias`.
    pub bias: Option<Values>,
    /// `problem.mask`, true hides.
    pub mask: Option<Vec<bool>>,
    /// `problem.alibi_slopes`, or the tensor of the equivalent function: the paper's slopes, for a power of two of heads.
    pub slopes: Option<Vec<f32>>,
    /// `[heads_q]`.
    pub sinks: Option<Vec<f32>>,
    /// Lengths of padded sequences, or beginnings of packed sequences and the end of the last one.
    pub sequences: Option<Vec<u32>>,
    /// Both `problem.mask_tensors`: the document of each token.
    pub documents: Option<Vec<f32>>,
    /// `problem.block_mask`, unless it is computed from a function.
    pub blocks: Option<Vec<u32>>,
}

/// Numbers of one dtype, as bytes.
pub struct Values {
    /// The numbers as a device stores them.
    pub bytes: Vec<u8>,
    /// Their type.
    pub dtype: Dtype,
}

/// Numbers that one thread generates at a time.
const STRIDE: usize = 1 << 20;

impl Values {
    /// Random entries of a table of normal numbers: fast to generate, and unlike zeros.
    fn normal(len: usize, dtype: Dtype, seed: u64) -> Self {
        let mut table = Vec::new();
        for x in reference::normal(1 << 14, seed) {
            match dtype {
                Dtype::F32 => table.extend((x as f32).to_le_bytes()),
                Dtype::F16 => table.extend(f16::from_f64(x).to_le_bytes()),
                Dtype::BF16 => table.extend(bf16::from_f64(x).to_le_bytes()),
            }
        }
        // A power of `x → a·x + c` has the same form, so each thread can start at its own position of the sequence.
        let stride = (0..STRIDE).fold((1, 0), |(a, c): (u64, u64), _| (step(a).wrapping_sub(step(0)), step(c)));
        let jump = |state: &u64| Some(state.wrapping_mul(stride.0).wrapping_add(stride.1));
        let starts: Vec<u64> = successors(Some(seed | 1), jump).take(len.div_ceil(STRIDE)).collect();
        let mut bytes = vec![0; len * dtype.size()];
        bytes.par_chunks_mut(STRIDE * dtype.size()).zip(starts).for_each(|(chunk, start)| match dtype {
            Dtype::F32 => walk::<4>(chunk, &table, start),
            Dtype::F16 | Dtype::BF16 => walk::<2>(chunk, &table, start),
        });
        Values { bytes, dtype }
    }

    /// Rounds numbers of heads of `head` numbers to e4m3 with a scale for each page of `page` numbers.
    fn round_to_e4m3(&mut self, head: usize, page: usize) {
        let (dtype, size) = (self.dtype, self.dtype.size());
        self.bytes.par_chunks_mut(head * size).flat_map(|head| head.par_chunks_mut(page * size)).for_each(|bytes| {
            let mut codes = vec![0; bytes.len() / size + e4m3::TAIL];
            let scale = narrow(&to_f64(bytes, dtype), &mut codes);
            for (to, code) in bytes.chunks_exact_mut(size).zip(codes) {
                let value = scale * e4m3::decode(code);
                match dtype {
                    Dtype::F32 => to.copy_from_slice(&value.to_le_bytes()),
                    Dtype::F16 => to.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                    Dtype::BF16 => to.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                }
            }
        });
    }

    /// The numbers in this range.
    pub fn range(&self, range: Range<usize>) -> Vec<f64> {
        let size = self.dtype.size();
        to_f64(&self.bytes[range.start * size..range.end * size], self.dtype)
    }

    /// Number of numbers.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }
}

/// All pages in random order (Fisher and Yates), the same one on every machine.
pub fn page_table(pages: PagedKv) -> Vec<u32> {
    let mut table: Vec<u32> = (0..pages.num_pages as u32).collect();
    let mut state = 1;
    for left in (1..pages.num_pages).rev() {
        state = step(state);
        table.swap(left, (state >> 33) as usize % (left + 1));
    }
    table
}

/// Writes numbers in e4m3 and their scale to a page of a head. Returns the scale.
fn narrow(numbers: &[f64], page: &mut [u8]) -> f32 {
    let scale = e4m3::scale_of(numbers.iter().fold(0.0, |most, x| x.abs().max(most)) as f32);
    let (rows, tail) = page.split_at_mut(page.len() - e4m3::TAIL);
    rows.iter_mut().zip(numbers).for_each(|(code, x)| *code = e4m3::encode(*x as f32 / scale));
    tail[..4].copy_from_slice(&scale.to_le_bytes());
    scale
}

/// One step of the random sequence.
pub(crate) fn step(state: u64) -> u64 {
    state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407)
}

/// Fills `stretch` with random entries of the table, which has numbers of `SIZE` bytes.
fn walk<const SIZE: usize>(stretch: &mut [u8], table: &[u8], mut state: u64) {
    let (table, _) = table.as_chunks::<SIZE>();
    for x in stretch.as_chunks_mut::<SIZE>().0 {
        state = step(state);
        *x = table[(state >> 50) as usize];
    }
}

/// Converts numbers as stored by a device.
fn to_f64(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f64()).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f64()).collect(),
    }
}

impl Data {
    /// Creates the inputs, which are the same for the same case and seed.
    pub fn new(case: Case, seed: u64) -> Result<Self, Error> {
        let problem = case.problem()?;
        let normal = |shape: [usize; 4], n: u64| Values::normal(shape.iter().product(), case.dtype, 8 * seed + n);
        // In every other batch, the last eighth of the keys is hidden.
        let mask = (case.variant == Variant::Mask).then(|| {
            let hides = |b: usize, j: usize| b.is_multiple_of(2) && j >= case.seq_k - case.seq_k / 8;
            (0..case.batch).flat_map(|b| (0..case.seq_k).map(move |j| hides(b, j))).collect()
        });
        let (lens, heads) = (case.sequences(), case.heads_q);
        let sequences = problem.is_varlen().then(|| match problem.cu_seqlens {
            Some(_) => (0..lens.len() + 1).map(|n| lens[..n].iter().sum::<usize>() as u32).collect(),
            None => lens.iter().map(|len| *len as u32).collect(),
        });
        let mut keys_values = [normal(problem.k_shape(), 1), normal(problem.v_shape(), 2)];
        if let Some((page_size, KvStorage::E4m3)) = case.variant.pages() {
            for (values, head_dim) in keys_values.iter_mut().zip([case.head_dim, case.head_dim_v]) {
                values.round_to_e4m3(case.seq_k * head_dim, page_size * head_dim);
            }
        }
        let [k, v] = keys_values;
        Ok(Data {
            case,
            problem,
            q: normal(problem.q_shape(), 0),
            k,
            v,
            dout: normal(problem.o_shape(), 3),
            bias: problem.bias.map(|shape| normal(shape, 4)),
            mask,
            slopes: match case.variant.option().without_gradient() {
                Variant::Alibi => Some((1..=heads).map(|h| 2f64.powf(-8.0 * h as f64 / heads as f64) as f32).collect()),
                // Temperatures up to 1.5, which a function reads in place of slopes.
                Variant::Temperature => Some((1..=heads).map(|h| 0.5 + h as f32 / heads as f32).collect()),
                _ => None,
            },
            sequences,
            documents: (case.variant == Variant::DocumentsFunction).then(|| {
                let lens = case.with(case.variant.option()).sequences();
                lens.into_iter().enumerate().flat_map(|(number, len)| std::iter::repeat_n(number as f32, len)).collect()
            }),
            blocks: case.blocks(),
            sinks: problem
                .sinks
                .then(|| reference::normal(case.heads_q, 8 * seed + 5).into_iter().map(|sink| sink as f32).collect()),
        })
    }

    /// The problem as the kernels compute it: that of the case, in pages if the case asks for them.
    pub fn problem_of_kernels(&self) -> Result<AttentionProblem, Error> {
        let Some((size, storage)) = self.case.variant.pages() else { return Ok(self.problem) };
        let columns = self.problem.seq_k.div_ceil(size);
        let num_pages = self.problem.batch * columns;
        let problem = self.problem.with_page_table(&[self.problem.batch, columns], num_pages, size)?;
        Ok(problem.with_kv_storage(storage)?)
    }

    /// Keys or values in the pages of this table.
    pub fn in_pages(&self, values: &Values, pages: PagedKv, table: &[u32]) -> Vec<u8> {
        let PagedKv { num_pages, page_size, max_pages, storage } = pages;
        let AttentionProblem { num_heads_kv: heads, seq_k, .. } = self.problem;
        let row = values.bytes.len() / (self.problem.batch * heads * seq_k);
        let of_page = match storage {
            KvStorage::E4m3 => e4m3::page_bytes(page_size, row / values.dtype.size()),
            _ => page_size * row,
        };
        let mut pool = vec![0; num_pages * heads * of_page];
        for (nth, page) in table.iter().enumerate() {
            let (sequence, first) = (nth / max_pages, nth % max_pages * page_size);
            let len = page_size.min(seq_k - first) * row;
            for head in 0..heads {
                let from = ((sequence * heads + head) * seq_k + first) * row;
                let to = (*page as usize * heads + head) * of_page;
                let (from, to) = (&values.bytes[from..from + len], &mut pool[to..to + of_page]);
                if storage == KvStorage::E4m3 {
                    narrow(&to_f64(from, values.dtype), to);
                } else {
                    to[..len].copy_from_slice(from);
                }
            }
        }
        pool
    }

    /// Sets the order in which the backward sums.
    pub fn with_backward_order(mut self, order: BackwardOrder) -> Self {
        self.problem.options.backward_order = order;
        self
    }

    /// Sets the precision of f32 products.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.problem.options.precision = precision;
        self
    }
}

/// Complete results of an implementation; `None` for those that it did not compute.
#[derive(Default)]
pub struct Results {
    /// `[batch, heads_q, seq_q, head_dim_v]`.
    pub o: Option<Values>,
    /// `[batch, heads_q, seq_q]`.
    pub lse: Option<Values>,
    /// Shape of `q`.
    pub dq: Option<Values>,
    /// Shape of `k`.
    pub dk: Option<Values>,
    /// Shape of `v`.
    pub dv: Option<Values>,
    /// Shape of the bias.
    pub dbias: Option<Values>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_walk_as_one_would() {
        let seed = 5;
        let table = reference::normal(1 << 14, seed);
        let values = Values::normal(STRIDE + 9, Dtype::F32, seed);
        let mut state = seed | 1;
        let right: Vec<f64> = (0..STRIDE + 9)
            .map(|_| {
                state = step(state);
                f64::from(table[(state >> 50) as usize] as f32)
            })
            .collect();
        assert_eq!(values.range(0..values.len()), right);
    }
}
