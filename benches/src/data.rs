//! Random inputs on the host, and what is known to be right about them.

use crate::case::{Case, Variant};
use crate::error::Error;
use flash_attention_kernels::{AttentionProblem, BackwardOrder, Dtype};
use flash_attention_reference as reference;
use half::{bf16, f16};

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
}

/// Numbers of one dtype, as bytes.
pub struct Values {
    /// As a device stores them.
    pub bytes: Vec<u8>,
    dtype: Dtype,
}

impl Values {
    fn normal(len: usize, dtype: Dtype, seed: u64) -> Self {
        // A table of normal numbers walked at random: cheap to make, and nothing like zeros.
        let table = reference::normal(1 << 14, seed);
        let mut state = seed | 1;
        let mut bytes = Vec::with_capacity(len * dtype.size());
        for _ in 0..len {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = table[(state >> 50) as usize];
            match dtype {
                Dtype::F32 => bytes.extend_from_slice(&(x as f32).to_le_bytes()),
                Dtype::F16 => bytes.extend_from_slice(&f16::from_f64(x).to_le_bytes()),
                Dtype::BF16 => bytes.extend_from_slice(&bf16::from_f64(x).to_le_bytes()),
            }
        }
        Values { bytes, dtype }
    }

    /// The numbers themselves.
    pub fn to_f64(&self) -> Vec<f64> {
        to_f64(&self.bytes, self.dtype)
    }
}

/// Numbers that a device stored.
pub fn to_f64(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
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
        Ok(Data {
            case,
            problem,
            q: normal(problem.q_shape(), 0),
            k: normal(problem.k_shape(), 1),
            v: normal(problem.v_shape(), 2),
            dout: normal(problem.o_shape(), 3),
            bias: problem.bias.map(|shape| normal(shape, 4)),
            mask,
        })
    }

    /// The same, where the backward is to add up in this order.
    pub fn with_backward_order(mut self, order: BackwardOrder) -> Self {
        self.problem.options.backward_order = order;
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
    pub o: Option<Vec<f64>>,
    /// `[batch, heads_q, seq_q]`.
    pub lse: Option<Vec<f64>>,
    /// Shape of `q`.
    pub dq: Option<Vec<f64>>,
    /// Shape of `k`.
    pub dk: Option<Vec<f64>>,
    /// Shape of `v`.
    pub dv: Option<Vec<f64>>,
    /// Shape of the bias.
    pub dbias: Option<Vec<f64>>,
}

/// Positions that a sample holds, the first and last and the edges of tiles among them.
fn positions(len: usize) -> Vec<usize> {
    let spread = (0..48).map(|n| len * (2 * n + 1) / 96);
    let mut all: Vec<usize> =
        [0, 1, 63, 64, 127, 128].into_iter().chain(spread).chain(len.saturating_sub(2)..len).collect();
    all.retain(|&i| i < len);
    all.sort_unstable();
    all.dedup();
    all
}

impl Oracle {
    /// For the last head of the last batch, which wrong strides and offsets miss first.
    pub fn new(data: &Data) -> Self {
        let p = data.problem;
        let (queries, keys) = (positions(p.seq_q), positions(p.seq_k));
        let [q, k, v, dout] = [&data.q, &data.k, &data.v, &data.dout].map(Values::to_f64);
        let bias = data.bias.as_ref().map(Values::to_f64);
        let inputs = reference::Inputs { q: &q, k: &k, v: &v, mask: data.mask.as_deref(), bias: bias.as_deref() };
        let at = [p.batch - 1, p.num_heads_q - 1];
        let sample = reference::sample(&p, &inputs, &dout, at, &queries, &keys);
        Oracle { problem: p, queries, keys, sample }
    }

    /// The root-mean-square of the rows' relative errors: early rows of causal attention, which average few values, are many
    /// times as long as late ones, and would be all that counts.
    fn error_of_o(&self, found: &Option<Vec<f64>>) -> f64 {
        let Some(found) = found else { return 0.0 };
        let (p, width) = (&self.problem, self.problem.head_dim_v);
        let head = p.batch * p.num_heads_q - 1;
        let (mut sum, mut rows) = (0.0, 0.0);
        for (i, right) in self.queries.iter().zip(self.sample.o.chunks(width)) {
            let found = &found[(head * p.seq_q + i) * width..][..width];
            let difference: f64 = found.iter().zip(right).map(|(found, right)| (found - right).powi(2)).sum();
            let size: f64 = right.iter().map(|right| right.powi(2)).sum();
            // A row that sees nothing is 0.
            sum += if size == 0.0 { difference } else { difference / size };
            rows += 1.0;
        }
        (sum / f64::max(rows, 1.0)).sqrt()
    }

    /// The largest relative root-mean-square error of what was computed.
    pub fn error(&self, results: &Results) -> f64 {
        let p = &self.problem;
        let (head, head_kv) = (p.batch * p.num_heads_q - 1, p.batch * p.num_heads_kv - 1);
        let (queries, keys) = (&self.queries, &self.keys);
        let of = |found: &Option<Vec<f64>>, right: &[f64], head: usize, len: usize, at: &[usize], width: usize| {
            let Some(found) = found else { return 0.0 };
            let found = at.iter().flat_map(|i| &found[(head * len + i) * width..][..width]);
            let (mut difference, mut size) = (0.0, 0.0);
            for (found, right) in found.zip(right).filter(|(_, right)| right.is_finite()) {
                difference += (found - right).powi(2);
                size += right.powi(2);
            }
            // NaN stays NaN, and is larger than any tolerance to who asks whether it is within.
            (difference / size).sqrt()
        };
        let s = &self.sample;
        let errors = [
            self.error_of_o(&results.o),
            of(&results.lse, &s.lse, head, p.seq_q, queries, 1),
            of(&results.dq, &s.dq, head, p.seq_q, queries, p.head_dim),
            of(&results.dk, &s.dk, head_kv, p.seq_k, keys, p.head_dim),
            of(&results.dv, &s.dv, head_kv, p.seq_k, keys, p.head_dim_v),
            of(&results.dbias, &s.dbias, p.num_heads_q - 1, p.seq_q, queries, p.seq_k),
        ];
        errors.into_iter().fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
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
