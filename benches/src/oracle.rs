//! Blocks of the oracle's result, and errors of other results against them.

use crate::data::{Data, Results, Values};
use crate::judge::{self, Sampled, error_of_block};
use flash_attention_kernels::{AttentionProblem, Dtype, dropout};
use flash_attention_reference as reference;
use serde::{Deserialize, Serialize};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The oracle's result in some blocks of some heads.
pub struct Oracle {
    problem: AttentionProblem,
    sampled: Sampled,
    heads: Vec<Head>,
}

/// The oracle's result for one head.
struct Head {
    batch: usize,
    head: usize,
    right: reference::Sample,
}

/// Error of each result that was computed and sampled: the largest over its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Errors {
    /// Error of the output.
    pub o: Option<f64>,
    /// Error of the log-sum-exp, relative to 1 + |lse|.
    pub lse: Option<f64>,
    /// Error of the gradient of the queries.
    pub dq: Option<f64>,
    /// Error of the gradient of the keys.
    pub dk: Option<f64>,
    /// Error of the gradient of the values.
    pub dv: Option<f64>,
    /// Error of the gradient of the bias.
    pub dbias: Option<f64>,
}

/// Largest error of a log-sum-exp, which is f32 in every dtype.
const LSE: f64 = 1e-3;

impl Errors {
    /// The largest error, or NaN if one of them is NaN.
    pub fn worst(&self) -> f64 {
        let Errors { o, lse, dq, dk, dv, dbias } = *self;
        judge::worst([o, lse, dq, dk, dv, dbias].into_iter().flatten())
    }

    /// Whether all errors are within the bound of a correct result; see [`judge::bound`].
    pub fn are_right(&self, dtype: Dtype, tf32: bool) -> bool {
        let bound = judge::bound(dtype, tf32);
        self.worst() <= bound && self.lse.is_none_or(|error| error <= LSE.min(bound))
    }
}

impl Oracle {
    /// Computes the oracle. With `gradients`, also the gradients, where each key needs the row of every query that sees it.
    pub fn new(data: &Data, gradients: bool) -> Self {
        let p = &data.problem;
        let sampled = sampled(data, gradients);
        let rows = |blocks: &[Range<usize>]| blocks.iter().cloned().flatten().collect::<Vec<usize>>();
        let (queries, keys) = (rows(&sampled.queries), rows(&sampled.keys));
        // The last head shows errors in strides and offsets first.
        let mut heads = vec![[p.batch - 1, p.num_heads_q - 1], [0, 0]];
        heads.dedup();
        heads.truncate(sampled.heads);
        let sample = |[batch, head]: [usize; 2]| Head { batch, head, right: of(data, [batch, head], &queries, &keys) };
        Oracle { problem: *p, heads: heads.into_iter().map(sample).collect(), sampled }
    }

    /// [`Oracle::new`], cached in a directory for other processes, if there is one.
    pub fn cached(data: &Data, seed: u64, gradients: bool, folder: Option<&Path>) -> Self {
        let Some(folder) = folder else { return Oracle::new(data, gradients) };
        let mut hasher = DefaultHasher::new();
        (format!("{:?}", data.case), seed, gradients).hash(&mut hasher);
        let file = folder.join(format!("{:016x}.oracle", hasher.finish()));
        if let Some(heads) = fs::read(&file).ok().and_then(|bytes| decode(&bytes)) {
            return Oracle { problem: data.problem, sampled: sampled(data, gradients), heads };
        }
        let oracle = Oracle::new(data, gradients);
        // If the cache cannot be written, the next process computes the oracle again.
        let fresh = PathBuf::from(format!("{}.{}", file.display(), std::process::id()));
        let _ = fs::write(&fresh, encode(&oracle.heads)).and_then(|()| fs::rename(&fresh, &file));
        oracle
    }

    /// Errors of these results.
    pub fn errors(&self, results: &Results) -> Errors {
        let p = &self.problem;
        let Sampled { queries, keys, .. } = &self.sampled;
        // Index of a head's first row: in tensors with rows of queries, in tensors with rows of keys, and in a bias for all batches.
        let q = |at: &Head| (at.batch * p.num_heads_q + at.head) * p.seq_q;
        let k = |at: &Head| (at.batch * p.num_heads_kv + at.head / p.group_size()) * p.seq_k;
        let bias = |at: &Head| at.head * p.seq_q;
        type Place<'a> = &'a dyn Fn(&Head) -> usize;
        type Right = fn(&reference::Sample) -> &[f64];
        type Measure = fn(&[f64], &[f64]) -> f64;
        let of =
            |found: &Option<Values>, right: Right, width, first: Place, blocks: &[Range<usize>], error: Measure| {
                let found = found.as_ref().filter(|_| self.heads.iter().any(|head| !right(&head.right).is_empty()))?;
                let errors = self.heads.iter().flat_map(|head| {
                    let (first, mut rest) = (first(head), right(&head.right));
                    blocks.iter().map(move |block| {
                        let (right, behind) = rest.split_at(block.len() * width);
                        rest = behind;
                        error(&found.range((first + block.start) * width..(first + block.end) * width), right)
                    })
                });
                Some(judge::worst(errors))
            };
        Errors {
            o: of(&results.o, |right| &right.o, p.head_dim_v, &q, queries, error_of_block),
            lse: of(&results.lse, |right| &right.lse, 1, &q, queries, error_of_logarithms),
            dq: of(&results.dq, |right| &right.dq, p.head_dim, &q, queries, error_of_block),
            dk: of(&results.dk, |right| &right.dk, p.head_dim, &k, keys, error_of_block),
            dv: of(&results.dv, |right| &right.dv, p.head_dim_v, &k, keys, error_of_block),
            dbias: of(&results.dbias, |right| &right.dbias, p.seq_k, &bias, queries, error_of_block),
        }
    }
}

fn sampled(data: &Data, gradients: bool) -> Sampled {
    let p = &data.problem;
    let sampled = judge::sampled(p.group_size(), p.seq_q, p.seq_k, data.case.causal);
    if gradients { sampled } else { Sampled { keys: Vec::new(), ..sampled } }
}

/// Error of a block of log-sum-exps, relative to 1 + |lse|. Rows that see nothing must be exactly −∞.
fn error_of_logarithms(found: &[f64], right: &[f64]) -> f64 {
    let pairs = || found.iter().copied().zip(right.iter().copied()).filter(|(_, right)| right.is_finite());
    let hidden = found.iter().zip(right).filter(|(_, right)| !right.is_finite());
    if hidden.into_iter().any(|(found, right)| found != right) {
        return f64::NAN;
    }
    let sizes: Vec<f64> = pairs().map(|(_, right)| 1.0 + right.abs()).collect();
    let moved: Vec<f64> = pairs().zip(&sizes).map(|((found, right), size)| size + (found - right)).collect();
    error_of_block(&moved, &sizes)
}

/// The oracle's result for head `[b, h]` at these positions.
fn of(data: &Data, [b, h]: [usize; 2], queries: &[usize], keys: &[usize]) -> reference::Sample {
    let whole = data.problem;
    let (group, kv) = (whole.group_size(), h / whole.group_size());
    // If heads are independent of each other, only those that share keys with this one are read.
    let alone = matches!(whole, AttentionProblem { mask: None, bias: None, cu_seqlens: None, .. });
    let mut p = whole;
    let (first, at) = if alone {
        (p.batch, p.num_heads_q, p.num_heads_kv) = (1, group, 1);
        ([b, kv * group], [0, h % group])
    } else {
        ([0, 0], [b, h])
    };
    let part = |values: &Values, [_, heads, rows, width]: [usize; 4], len: [usize; 4], head: usize| {
        let start = (first[0] * heads + head) * rows * width;
        values.range(start..start + len.iter().product::<usize>())
    };
    let q = part(&data.q, whole.q_shape(), p.q_shape(), first[1]);
    let k = part(&data.k, whole.k_shape(), p.k_shape(), first[1] / group);
    let v = part(&data.v, whole.v_shape(), p.v_shape(), first[1] / group);
    let dout = part(&data.dout, whole.o_shape(), p.o_shape(), first[1]);
    let bias = data.bias.as_ref().map(|bias| bias.range(0..bias.len()));
    // Values of the heads that are read.
    let of_heads = |values: &Vec<f32>| -> Vec<f64> {
        values[first[1]..first[1] + p.num_heads_q].iter().map(|x| f64::from(*x)).collect()
    };
    let (slopes, sinks) = (data.slopes.as_ref().map(of_heads), data.sinks.as_ref().map(of_heads));
    let documents: Option<Vec<f64>> =
        data.documents.as_ref().map(|of| of.iter().map(|number| f64::from(*number)).collect());
    p.alibi_slopes = p.alibi_slopes.map(|_| [1, p.num_heads_q]);
    p.score_tensors = p.score_tensors.map(|of| of.map(|_| [1, p.num_heads_q, 1, 1]));
    // A block mask that is computed from a function hides nothing else.
    p.block_mask = p.block_mask.filter(|_| data.blocks.is_some());
    let lens = |is: bool, from: usize| -> Option<Vec<usize>> {
        Some(data.sequences.as_ref().filter(|_| is)?[from..].iter().map(|n| *n as usize).collect())
    };
    let seq_lens = lens(p.seq_lens_q, first[0]).map(|lens| lens[..p.batch].to_vec());
    let ends = lens(p.cu_seqlens.is_some(), 0);
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
    reference::sample(&p, &inputs, &dout, at, queries, keys)
}

/// Encodes heads as bytes: for each its position, and the length and numbers of each of its vectors.
fn encode(heads: &[Head]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for Head { batch, head, right } in heads {
        [batch, head].into_iter().for_each(|n| bytes.extend((*n as u64).to_le_bytes()));
        for numbers in [&right.o, &right.lse, &right.dq, &right.dk, &right.dv, &right.dbias] {
            bytes.extend((numbers.len() as u64).to_le_bytes());
            numbers.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
        }
    }
    bytes
}

/// Decodes the output of [`encode`]; `None` if it is incomplete.
fn decode(bytes: &[u8]) -> Option<Vec<Head>> {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut words = words.iter();
    let mut heads = Vec::new();
    while let Some(batch) = words.next() {
        let head = u64::from_le_bytes(*words.next()?) as usize;
        let mut vectors: [Vec<f64>; 6] = Default::default();
        for numbers in &mut vectors {
            let len = u64::from_le_bytes(*words.next()?) as usize;
            *numbers = words.by_ref().take(len).map(|x| f64::from_le_bytes(*x)).collect();
            if numbers.len() < len {
                return None;
            }
        }
        let [o, lse, dq, dk, dv, dbias] = vectors;
        let right = reference::Sample { o, lse, dq, dk, dv, dbias };
        heads.push(Head { batch: u64::from_le_bytes(*batch) as usize, head, right });
    }
    (rest.is_empty() && !heads.is_empty()).then_some(heads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Variant};
    use crate::data::Data;

    fn oracle(case: Case) -> Oracle {
        Oracle::new(&Data::new(case, 0).unwrap(), true)
    }

    #[test]
    fn heads_alone_are_the_first_and_the_last_of_all() {
        let case = Case { heads_kv: 2, ..Case::new(Dtype::F32, [2, 4, 40, 8], true) };
        let data = Data::new(case, 0).unwrap();
        let p = data.problem;
        let [q, k, v, dout] = [&data.q, &data.k, &data.v, &data.dout].map(|values| values.range(0..values.len()));
        let inputs = reference::Inputs { q: &q, k: &k, v: &v, ..Default::default() };
        let all: Vec<usize> = (0..40).collect();
        let oracle = Oracle::new(&data, true);
        assert_eq!(oracle.heads.iter().map(|of| [of.batch, of.head]).collect::<Vec<_>>(), [[1, 3], [0, 0]]);
        for Head { batch, head, right } in &oracle.heads {
            let same = reference::sample(&p, &inputs, &dout, [*batch, *head], &all, &all);
            assert_eq!((&right.o, &right.dq, &right.dk, &right.dv), (&same.o, &same.dq, &same.dk, &same.dv));
        }
        // The forward alone needs no gradients of keys.
        assert!(Oracle::new(&data, false).heads.iter().all(|of| of.right.dk.is_empty()));
    }

    /// Correct results of a problem, rounded as by an implementation in f32.
    fn results(case: Case) -> Results {
        let data = Data::new(case, 0).unwrap();
        let [q, k, v, dout] = [&data.q, &data.k, &data.v, &data.dout].map(|values| values.range(0..values.len()));
        let inputs = reference::Inputs { q: &q, k: &k, v: &v, ..Default::default() };
        let forward = reference::forward(&data.problem, &inputs);
        let backward = reference::backward(&data.problem, &inputs, &dout, None);
        let values = |numbers: &[f64]| {
            let bytes = numbers.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            Some(Values { bytes, dtype: Dtype::F32 })
        };
        Results {
            o: values(&forward.o),
            lse: values(&forward.lse),
            dq: values(&backward.dq),
            dk: values(&backward.dk),
            dv: values(&backward.dv),
            dbias: None,
        }
    }

    fn scaled(values: &Option<Values>, factor: f64) -> Option<Values> {
        let values = values.as_ref().unwrap();
        let bytes = values.range(0..values.len()).iter().flat_map(|x| ((x * factor) as f32).to_le_bytes()).collect();
        Some(Values { bytes, dtype: Dtype::F32 })
    }

    #[test]
    fn of_each_gradient_a_fiftieth_more_the_other_sign_and_nothing_are_wrong_in_every_dtype() {
        let case = Case::new(Dtype::F32, [2, 2, 300, 16], true);
        let oracle = oracle(case);
        let right = oracle.errors(&results(case));
        assert!(right.are_right(Dtype::F32, false), "{right:?}");
        for (factor, error) in [(1.02, 0.02), (-1.0, 2.0), (0.0, 1.0)] {
            for nth in 0..4 {
                let mut found = results(case);
                let Results { o, dq, dk, dv, .. } = &mut found;
                let of = [o, dq, dk, dv].into_iter().nth(nth).unwrap();
                *of = scaled(of, factor);
                let errors = oracle.errors(&found);
                assert!((errors.worst() - error).abs() < 1e-6, "{factor} {nth}: {errors:?}");
                for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
                    assert!(!errors.are_right(dtype, true), "{factor} {nth} {dtype:?}");
                }
            }
        }
        let mut found = results(case);
        found.lse = scaled(&found.lse, 1.01);
        assert!(!oracle.errors(&found).are_right(Dtype::BF16, false));
    }

    #[test]
    fn a_fault_in_one_block_of_one_head_is_that_block_s() {
        let case = Case::new(Dtype::F32, [2, 2, 300, 16], true);
        let mut found = results(case);
        let values = found.dv.as_mut().unwrap();
        // Rows 0 to 63 of the last head, of 4 × 300 rows.
        for at in (3 * 300 * 16)..(3 * 300 * 16 + 64 * 16) {
            let x = f32::from_le_bytes(values.bytes[4 * at..4 * at + 4].try_into().unwrap()) * 1.02;
            values.bytes[4 * at..4 * at + 4].copy_from_slice(&x.to_le_bytes());
        }
        let errors = oracle(case).errors(&found);
        assert!((errors.dv.unwrap() - 0.02).abs() < 1e-6 && errors.dk.unwrap() < 1e-6, "{errors:?}");
    }

    #[test]
    fn nan_stays_nan() {
        let errors = Errors { o: Some(f64::NAN), dq: Some(1.0), ..Errors::default() };
        assert!(errors.worst().is_nan() && !errors.are_right(Dtype::BF16, true));
        assert_eq!(Errors { o: None, ..errors }.worst(), 1.0);
        // A row that sees nothing must have −∞.
        let nothing = f64::NEG_INFINITY;
        assert_eq!(error_of_logarithms(&[1.0, nothing], &[1.0, nothing]), 0.0);
        assert!(error_of_logarithms(&[1.0, 0.0], &[1.0, nothing]).is_nan());
        assert!((error_of_logarithms(&[1.1], &[1.0]) - 0.05).abs() < 1e-12);
    }

    #[test]
    fn what_is_kept_is_what_was_computed() {
        let folder = tempfile::tempdir().unwrap();
        let data = Data::new(Case::new(Dtype::F32, [1, 2, 70, 8], true).with(Variant::Lengths), 0).unwrap();
        let first = Oracle::cached(&data, 0, true, Some(folder.path()));
        let file = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let again = Oracle::cached(&data, 0, true, Some(folder.path()));
        let whole = fs::read(&file).unwrap();
        assert!(encode(&first.heads) == whole && encode(&again.heads) == whole);
        // An incomplete file is computed again. Sums over threads differ in their last bits.
        fs::write(&file, &whole[..whole.len() - 4]).unwrap();
        assert!(decode(&whole[..whole.len() - 4]).is_none() && decode(&whole[..whole.len() - 8]).is_none());
        let anew = Oracle::cached(&data, 0, true, Some(folder.path()));
        assert!(error_of_block(&anew.heads[0].right.dv, &first.heads[0].right.dv) < 1e-12);
        assert_eq!(fs::read(&file).unwrap().len(), whole.len());
    }

    #[test]
    fn functions_compute_what_options_do() {
        let case = Case::new(Dtype::F32, [1, 2, 300, 8], true);
        let sample = |case: Case| oracle(case).heads.swap_remove(0).right;
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
                assert!(found.len() == right.len() && error_of_block(found, right) < 1e-6, "{name}");
            }
        }
        // Blocks that are not visible are hidden.
        let dense = sample(full);
        let sparse = sample(full.with(Variant::Sparse(30)));
        assert!(error_of_block(&sparse.o, &dense.o) > 0.1);
    }
}
