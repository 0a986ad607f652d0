//! Random inputs on the host, and what is known to be right about them.

use crate::case::{Case, Variant};
use crate::error::Error;
use flash_attention_kernels::{AttentionProblem, BackwardOrder, Dtype, Precision, dropout};
use flash_attention_reference as reference;
use half::{bf16, f16};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::iter::successors;
use std::ops::Range;

/// Inputs of a problem: normal random numbers, rounded to its dtype.
pub struct Data {
    /// The case.
    pub case: Case,
    /// The problem that it poses.
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
    /// `problem.alibi_slopes`, or what its function reads: those of the paper, for heads that are a power of two.
    pub slopes: Option<Vec<f32>>,
    /// `[heads_q]`.
    pub sinks: Option<Vec<f32>>,
    /// Of several sequences: their lengths, or where they begin and the last one ends, if they are packed.
    pub sequences: Option<Vec<u32>>,
    /// `problem.mask_tensors`: the document of each token, which both are.
    pub documents: Option<Vec<f32>>,
    /// `problem.block_mask`, but where a function makes it.
    pub blocks: Option<Vec<u32>>,
}

/// Numbers of one dtype, as bytes.
pub struct Values {
    /// As a device stores them.
    pub bytes: Vec<u8>,
    /// What they are.
    pub dtype: Dtype,
}

/// Steps of a walk that one thread takes at a time.
const STRIDE: usize = 1 << 20;

impl Values {
    /// A table of normal numbers walked at random: cheap to make, and nothing like zeros.
    fn normal(len: usize, dtype: Dtype, seed: u64) -> Self {
        let mut table = Vec::new();
        for x in reference::normal(1 << 14, seed) {
            match dtype {
                Dtype::F32 => table.extend((x as f32).to_le_bytes()),
                Dtype::F16 => table.extend(f16::from_f64(x).to_le_bytes()),
                Dtype::BF16 => table.extend(bf16::from_f64(x).to_le_bytes()),
            }
        }
        // `x → a·x + c`, done so often, is of that form again: threads start where they would come to.
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

    /// The numbers at these places.
    pub fn range(&self, range: Range<usize>) -> Vec<f64> {
        let size = self.dtype.size();
        to_f64(&self.bytes[range.start * size..range.end * size], self.dtype)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }
}

/// A step of the walk.
pub(crate) fn step(state: u64) -> u64 {
    state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407)
}

/// Fills a stretch with what the walk meets in the table, of numbers of `SIZE` bytes.
fn walk<const SIZE: usize>(stretch: &mut [u8], table: &[u8], mut state: u64) {
    let (table, _) = table.as_chunks::<SIZE>();
    for x in stretch.as_chunks_mut::<SIZE>().0 {
        state = step(state);
        *x = table[(state >> 50) as usize];
    }
}

/// Numbers that a device stored.
fn to_f64(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f64()).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f64()).collect(),
    }
}

impl Data {
    /// The same for the same case and seed.
    pub fn new(case: Case, seed: u64) -> Result<Self, Error> {
        let problem = case.problem()?;
        let normal = |shape: [usize; 4], n: u64| Values::normal(shape.iter().product(), case.dtype, 8 * seed + n);
        // Every other batch ends an eighth early.
        let mask = (case.variant == Variant::Mask).then(|| {
            let hides = |b: usize, j: usize| b.is_multiple_of(2) && j >= case.seq_k - case.seq_k / 8;
            (0..case.batch).flat_map(|b| (0..case.seq_k).map(move |j| hides(b, j))).collect()
        });
        let lens = case.sequences();
        let sequences = problem.is_ragged().then(|| match problem.cu_seqlens {
            Some(_) => (0..lens.len() + 1).map(|n| lens[..n].iter().sum::<usize>() as u32).collect(),
            None => lens.iter().map(|len| *len as u32).collect(),
        });
        Ok(Data {
            case,
            problem,
            q: normal(problem.q_shape(), 0),
            k: normal(problem.k_shape(), 1),
            v: normal(problem.v_shape(), 2),
            dout: normal(problem.o_shape(), 3),
            bias: problem.bias.map(|shape| normal(shape, 4)),
            mask,
            slopes: (case.variant.option() == Variant::Alibi).then(|| {
                let heads = case.heads_q;
                (1..=heads).map(|h| 2f64.powf(-8.0 * h as f64 / heads as f64) as f32).collect()
            }),
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

    /// The same, where the backward is to add up in this order.
    pub fn with_backward_order(mut self, order: BackwardOrder) -> Self {
        self.problem.options.backward_order = order;
        self
    }

    /// The same, where f32 is to be multiplied so precisely.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.problem.options.precision = precision;
        self
    }
}

/// Some rows and keys of the right result.
pub struct Oracle {
    problem: AttentionProblem,
    queries: Vec<usize>,
    keys: Vec<usize>,
    sample: reference::Sample,
}

/// What an implementation computed, whole; what it did not compute is `None`.
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

/// The error of each result that was computed and that the sample holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Errors {
    /// Of the output.
    pub o: Option<f64>,
    /// Of the log-sum-exp.
    pub lse: Option<f64>,
    /// Of the queries' gradient.
    pub dq: Option<f64>,
    /// Of the keys'.
    pub dk: Option<f64>,
    /// Of the values'.
    pub dv: Option<f64>,
    /// Of the bias's.
    pub dbias: Option<f64>,
}

impl Errors {
    /// The largest, or NaN if one of them is.
    pub fn worst(&self) -> f64 {
        let Errors { o, lse, dq, dk, dv, dbias } = *self;
        let all = [o, lse, dq, dk, dv, dbias].into_iter().flatten();
        all.fold(0.0, |worst: f64, error| if error > worst || error.is_nan() { error } else { worst })
    }
}

/// Sequences longer than this are sampled at few places: a row of scores is as long as the sequence, and the gradient
/// of a key takes the row of every query that sees it.
const LONG: usize = 1 << 17;

/// Queries and keys that a sample holds.
fn sampled(p: &AttentionProblem) -> (Vec<usize>, Vec<usize>) {
    if p.seq_q.max(p.seq_k) <= LONG {
        return (positions(p.seq_q, 128), positions(p.seq_k, 128));
    }
    // Where causal, those near the end are seen by few queries. Others have too many to sum over.
    let keys =
        if p.options.causal { (1..=8).rev().map(|n| p.seq_k.saturating_sub(16 * n - 15)).collect() } else { vec![] };
    (positions(p.seq_q, 16), keys)
}

/// The first and last positions, edges of tiles, and so many others.
fn positions(len: usize, spread: usize) -> Vec<usize> {
    let others = (0..spread).map(|n| len * (2 * n + 1) / (2 * spread));
    let mut all: Vec<usize> =
        [0, 1, 63, 64, 127, 128].into_iter().chain(others).chain(len.saturating_sub(2)..len).collect();
    all.retain(|&i| i < len);
    all.sort_unstable();
    all.dedup();
    all
}

/// Rows smaller than this part of their typical size are measured against that size: what rounding leaves there is no
/// part of them. The first row of causal `dq` is such a one, 0 but for rounding.
const NEGLIGIBLE: f64 = 1e-3;

/// The root-mean-square of the rows' relative errors: early rows of causal attention, which average few values, are
/// many times as long as late ones, and would be all that counts in a norm over all of them. NaN stays NaN, and is
/// within no tolerance.
fn error_of_rows(found: &[f64], right: &[f64], width: usize) -> f64 {
    let square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
    let rows = (right.len() / width) as f64;
    let typical = square(right) / rows;
    let errors = found.chunks(width).zip(right.chunks(width)).map(|(found, right)| {
        let difference: f64 = found.iter().zip(right).map(|(found, right)| (found - right).powi(2)).sum();
        let size = square(right);
        let size = if size < NEGLIGIBLE.powi(2) * typical { typical } else { size };
        // All of them are 0.
        if size == 0.0 { difference } else { difference / size }
    });
    (errors.sum::<f64>() / rows).sqrt()
}

impl Oracle {
    /// For the last head of the last batch, which wrong strides and offsets miss first.
    pub fn new(data: &Data) -> Self {
        let whole = data.problem;
        let (queries, keys) = sampled(&whole);
        // Of heads that share nothing with the others nothing else is read.
        let (p, at) = match data.problem {
            AttentionProblem { mask: None, bias: None, cu_seqlens: None, .. } => {
                let group = whole.group_size();
                (AttentionProblem { batch: 1, num_heads_q: group, num_heads_kv: 1, ..whole }, [0, group - 1])
            }
            _ => (whole, [whole.batch - 1, whole.num_heads_q - 1]),
        };
        let last = |values: &Values, shape: [usize; 4]| {
            values.range(values.len() - shape.iter().product::<usize>()..values.len())
        };
        let (q, k, v) = (last(&data.q, p.q_shape()), last(&data.k, p.k_shape()), last(&data.v, p.v_shape()));
        let dout = last(&data.dout, p.o_shape());
        let bias = data.bias.as_ref().zip(p.bias).map(|(bias, shape)| last(bias, shape));
        // Of a head alone, what is its own.
        let of_heads = |values: &Vec<f32>| -> Vec<f64> {
            values[values.len() - p.num_heads_q..].iter().map(|x| f64::from(*x)).collect()
        };
        let (slopes, sinks) = (data.slopes.as_ref().map(of_heads), data.sinks.as_ref().map(of_heads));
        let documents: Option<Vec<f64>> =
            data.documents.as_ref().map(|of| of.iter().map(|number| f64::from(*number)).collect());
        let p = AttentionProblem {
            alibi_slopes: p.alibi_slopes.map(|_| [1, p.num_heads_q]),
            score_tensors: p.score_tensors.map(|of| of.map(|_| [1, p.num_heads_q, 1, 1])),
            // One that is made of a function says nothing more.
            block_mask: p.block_mask.filter(|_| data.blocks.is_some()),
            ..p
        };
        let first = [whole.batch - p.batch, whole.num_heads_q - p.num_heads_q];
        let lens = |is: bool| -> Option<Vec<usize>> {
            let lens = data.sequences.as_ref().filter(|_| is)?;
            let first = if p.cu_seqlens.is_some() { 0 } else { lens.len() - p.batch };
            Some(lens[first..].iter().map(|n| *n as usize).collect())
        };
        let (seq_lens, ends) = (lens(p.seq_lens_q), lens(p.cu_seqlens.is_some()));
        let seed = p.options.dropout_seed.filter(|_| p.options.dropout > 0.0);
        let inputs = reference::Inputs {
            q: &q,
            k: &k,
            v: &v,
            mask: data.mask.as_deref(),
            bias: bias.as_deref(),
            alibi_slopes: slopes.as_deref().filter(|_| p.alibi_slopes.is_some()),
            sinks: sinks.as_deref(),
            dropout: seed.map(|seed| reference::Dropout { seed: dropout::seed(seed), first }),
            seq_lens_q: seq_lens.as_deref(),
            seq_lens_k: seq_lens.as_deref(),
            cu_seqlens_q: ends.as_deref(),
            cu_seqlens_k: ends.as_deref(),
            score_tensors: p.score_tensors.map(|of| slopes.as_deref().filter(|_| of.is_some())),
            mask_tensors: p.mask_tensors.map(|of| documents.as_deref().filter(|_| of.is_some())),
            block_mask: data.blocks.as_deref(),
        };
        let sample = reference::sample(&p, &inputs, &dout, at, &queries, &keys);
        Oracle { problem: whole, queries, keys, sample }
    }

    /// The errors of what was computed.
    pub fn errors(&self, results: &Results) -> Errors {
        let p = &self.problem;
        let (queries, keys, s) = (&self.queries, &self.keys, &self.sample);
        // Rows at these positions, of the last head.
        let rows = |found: &Values, len: usize, at: &[usize], width: usize| -> Vec<f64> {
            let head = found.len() - len * width;
            at.iter().flat_map(|i| found.range(head + i * width..head + (i + 1) * width)).collect()
        };
        let of = |found: &Option<Values>, right: &[f64], len: usize, at: &[usize], width: usize| {
            let found = found.as_ref().filter(|_| !right.is_empty())?;
            Some(error_of_rows(&rows(found, len, at, width), right, width))
        };
        // Logarithms count together, where there are any.
        let lse = results.lse.as_ref().and_then(|found| {
            let found = rows(found, p.seq_q, queries, 1);
            let finite = found.into_iter().zip(s.lse.iter().copied()).filter(|(_, right)| right.is_finite());
            let (found, right): (Vec<f64>, Vec<f64>) = finite.unzip();
            (!right.is_empty()).then(|| error_of_rows(&found, &right, right.len()))
        });
        Errors {
            o: of(&results.o, &s.o, p.seq_q, queries, p.head_dim_v),
            lse,
            dq: of(&results.dq, &s.dq, p.seq_q, queries, p.head_dim),
            dk: of(&results.dk, &s.dk, p.seq_k, keys, p.head_dim),
            dv: of(&results.dv, &s.dv, p.seq_k, keys, p.head_dim_v),
            dbias: of(&results.dbias, &s.dbias, p.seq_q, queries, p.seq_k),
        }
    }
}

/// The largest error of a right result: several times what rounding the inputs' dtype leaves.
///
/// Burn's own f32 products on CUDA round their operands to TF32, which has the precision of f16.
pub fn tolerance(dtype: Dtype, tf32: bool) -> f64 {
    match dtype {
        Dtype::F32 if tf32 => 5e-3,
        Dtype::F32 => 1e-4,
        Dtype::F16 => 5e-3,
        Dtype::BF16 => 3e-2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_count_alike_whatever_their_size() {
        let right = [100.0, 0.0, 0.0, 1.0];
        // A tenth of either row.
        assert!((error_of_rows(&[110.0, 0.0, 0.0, 1.1], &right, 2) - 0.1).abs() < 1e-12);
        // One bad row of two, the small one.
        assert!((error_of_rows(&[100.0, 0.0, 0.0, 2.0], &right, 2) - 0.5f64.sqrt()).abs() < 1e-12);
        assert_eq!(error_of_rows(&right, &right, 2), 0.0);
    }

    #[test]
    fn a_row_of_next_to_nothing_is_measured_against_the_typical_one() {
        // Rows of 2 and 2 beside one that is 0 but for rounding: 1e-7 of their size, not infinitely much.
        let right = [2.0, 0.0, 2.0];
        let typical = (8.0f64 / 3.0).sqrt();
        let error = error_of_rows(&[2.0, 1e-7 * typical, 2.0], &right, 1);
        assert!((error - 1e-7 / 3f64.sqrt()).abs() < 1e-15, "{error}");
        // So is one just below the threshold, while one above it counts like any other.
        let small = |size: f64| error_of_rows(&[2.0, 0.0, 2.0], &[2.0, size, 2.0], 1);
        assert!(small(1e-3) < 1e-3 && (small(1e-2) - 1.0 / 3f64.sqrt()).abs() < 1e-12);
        // Where all is 0 what is found is all there is to measure.
        assert_eq!(error_of_rows(&[3.0, 0.0], &[0.0, 0.0], 2), 3.0);
    }

    #[test]
    fn nan_stays_nan() {
        assert!(error_of_rows(&[f64::NAN, 1.0, 1.0], &[0.0, 1.0, 1.0], 1).is_nan());
        let errors = Errors { o: Some(f64::NAN), dq: Some(1.0), ..Errors::default() };
        assert!(errors.worst().is_nan());
        assert_eq!(Errors { o: None, ..errors }.worst(), 1.0);
    }

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

    #[test]
    fn a_head_alone_is_the_last_of_all() {
        let case = Case { heads_kv: 2, ..Case::new(Dtype::F32, [2, 4, 40, 8], true) };
        let data = Data::new(case, 0).unwrap();
        let p = data.problem;
        let [q, k, v, dout] = [&data.q, &data.k, &data.v, &data.dout].map(|values| values.range(0..values.len()));
        let inputs = reference::Inputs { q: &q, k: &k, v: &v, ..Default::default() };
        let (queries, keys) = sampled(&p);
        let right = reference::sample(&p, &inputs, &dout, [1, 3], &queries, &keys);
        assert_eq!(Oracle::new(&data).sample.o, right.o);
        assert_eq!(Oracle::new(&data).sample.dq, right.dq);
    }

    #[test]
    fn long_sequences_are_sampled_where_few_queries_see_the_keys() {
        let p = Case::new(Dtype::BF16, [1, 1, 1 << 20, 8], true).problem().unwrap();
        let (queries, keys) = sampled(&p);
        assert!(queries.len() < 30 && queries.contains(&0) && queries.contains(&((1 << 20) - 1)), "{queries:?}");
        assert_eq!(keys.len(), 8);
        assert!(keys.is_sorted() && keys[0] > (1 << 20) - 128 && keys[7] == (1 << 20) - 1, "{keys:?}");
    }

    #[test]
    fn functions_compute_what_options_do() {
        let case = Case::new(Dtype::F32, [1, 2, 300, 8], true);
        let sample = |case: Case| Oracle::new(&Data::new(case, 0).unwrap()).sample;
        let functions = [
            Variant::AlibiFunction,
            Variant::SoftcapFunction,
            Variant::WindowFunction(128),
            Variant::DocumentsFunction,
        ];
        let full = Case { causal: false, ..case };
        let pairs = functions.map(|function| (case.with(function), case.with(function.option())));
        for (found, right) in pairs.into_iter().chain([(full.with(Variant::Sparse(100)), full)]) {
            let name = found.variant;
            let (found, right) = (sample(found), sample(right));
            for (found, right) in [
                (&found.o, &right.o),
                (&found.lse, &right.lse),
                (&found.dq, &right.dq),
                (&found.dk, &right.dk),
                (&found.dv, &right.dv),
            ] {
                assert!(found.len() == right.len() && error_of_rows(found, right, right.len()) < 1e-6, "{name}");
            }
        }
        // And blocks that are not seen are hidden.
        let dense = sample(full);
        let sparse = sample(full.with(Variant::Sparse(30)));
        assert!(error_of_rows(&sparse.o, &dense.o, dense.o.len()) > 0.1);
    }
}
