//! Cases: the problem, the values of its tensors, the settings of a run, and the results that the oracle expects.

use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, dropout};
use flash_attention_reference::{self as reference, Emulation, Operands};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Memory layout of an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Row-major.
    #[default]
    Contiguous,
    /// `[batch, seq, heads, dim]` in memory, as after `swap_dims(1, 2)` of a projection.
    HeadsInner,
    /// The last two dimensions transposed in memory.
    Transposed,
    /// A slice of a larger tensor.
    Offset,
}

/// Which inputs get gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    pub q: bool,
    pub k: bool,
    pub v: bool,
    pub bias: bool,
    pub slopes: bool,
    pub sinks: bool,
    /// The tensors of the score function.
    pub tensors: [bool; 2],
}

impl Tracked {
    pub const ALL: Tracked =
        Tracked { q: true, k: true, v: true, bias: true, slopes: true, sinks: true, tensors: [true, true] };
    pub const NONE: Tracked =
        Tracked { q: false, k: false, v: false, bias: false, slopes: false, sinks: false, tensors: [false, false] };

    /// All 16 subsets of q, k, v and the bias.
    pub fn subsets() -> impl Iterator<Item = Tracked> {
        (0..16).map(|n| Tracked { q: n & 1 != 0, k: n & 2 != 0, v: n & 4 != 0, bias: n & 8 != 0, ..Tracked::NONE })
    }

    /// All 8 subsets of bias, slopes and sinks, with q tracked.
    pub fn subsets_of_extras() -> impl Iterator<Item = Tracked> {
        (0..8).map(|n| Tracked { q: true, bias: n & 1 != 0, slopes: n & 2 != 0, sinks: n & 4 != 0, ..Tracked::NONE })
    }

    /// All 8 subsets of the bias and a function's two tensors, without q.
    pub fn subsets_of_tensors() -> impl Iterator<Item = Tracked> {
        (0..8).map(|n| Tracked { bias: n & 1 != 0, tensors: [n & 2 != 0, n & 4 != 0], ..Tracked::NONE })
    }

    pub fn any(self) -> bool {
        self != Tracked::NONE
    }
}

/// Terms of the loss: `Σ dout∘out`, `Σ dlse∘lse` or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    pub out: bool,
    pub lse: bool,
}

impl Loss {
    pub const OUT: Loss = Loss { out: true, lse: false };
    pub const LSE: Loss = Loss { out: false, lse: true };
    pub const BOTH: Loss = Loss { out: true, lse: true };
}

/// Settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub tracked: Tracked,
    pub loss: Loss,
    pub layout: Layout,
    pub checkpointing: bool,
}

impl Default for How {
    fn default() -> Self {
        How { tracked: Tracked::ALL, loss: Loss::OUT, layout: Layout::Contiguous, checkpointing: false }
    }
}

/// Values of the tensors of a case, rounded to its dtype.
#[derive(Clone, Debug)]
pub struct Data {
    pub problem: AttentionProblem,
    pub tensors: reference::Tensors,
    pub dout: Vec<f64>,
    pub dlse: Vec<f64>,
}

/// The problem of sizes `[batch, num_heads_q, num_heads_kv, seq_q, seq_k, head_dim, head_dim_v]`.
pub fn problem(sizes: [usize; 7], dtype: Dtype, options: AttentionOptions) -> AttentionProblem {
    let [batch, num_heads_q, num_heads_kv, seq_q, seq_k, head_dim, head_dim_v] = sizes;
    AttentionProblem::new(
        &[batch, num_heads_q, seq_q, head_dim],
        &[batch, num_heads_kv, seq_k, head_dim],
        &[batch, num_heads_kv, seq_k, head_dim_v],
        dtype,
        options,
    )
    .unwrap()
}

impl Data {
    /// Standard normal tensors, and a mask that hides three pairs in ten.
    pub fn random(problem: AttentionProblem, seed: u64) -> Self {
        let floats = |shape: &[usize], n: u64| {
            let mut values = reference::normal(shape.iter().product(), 16 * seed + n);
            reference::round_to(&mut values, problem.dtype);
            values
        };
        let f32s = |len, n: u64, times: f64| {
            let mut values = reference::normal(len, 16 * seed + n);
            values.iter_mut().for_each(|x| *x *= times);
            reference::round_to(&mut values, Dtype::F32);
            values
        };
        let mut of_lens = StdRng::seed_from_u64(16 * seed + 9);
        let mut lens = |seq: usize| (0..problem.batch).map(|_| of_lens.random_range(0..=seq)).collect();
        // Sequences begin and end anywhere: within a batch, across its end, or are empty.
        let ends = problem.cu_seqlens.map(|sequences| {
            let mut of_ends = StdRng::seed_from_u64(16 * seed + 10);
            [problem.seq_q, problem.seq_k].map(|seq| {
                let all = problem.batch * seq;
                let mut ends: Vec<_> = (0..sequences + 1).map(|_| of_ends.random_range(0..=all)).collect();
                ends.sort_unstable();
                ends
            })
        });
        let [cu_seqlens_q, cu_seqlens_k] = ends.map_or([None, None], |ends| ends.map(Some));
        let options = &problem.options;
        let mut rng = StdRng::seed_from_u64(16 * seed + 8);
        let mut dlse = reference::normal(problem.rows(), 16 * seed + 7);
        reference::round_to(&mut dlse, Dtype::F32);
        let tensors = reference::Tensors {
            q: floats(&problem.q_shape(), 0),
            k: floats(&problem.k_shape(), 1),
            v: floats(&problem.v_shape(), 2),
            mask: problem.mask.map(|shape| (0..shape.iter().product()).map(|_| rng.random_bool(0.3)).collect()),
            bias: problem.bias.map(|shape| floats(&shape, 3)),
            alibi_slopes: problem.alibi_slopes.map(|[batch, heads]| f32s(batch * heads, 5, 0.1)),
            sinks: problem.sinks.then(|| f32s(problem.num_heads_q, 6, 2.0)),
            dropout: (options.dropout > 0.0).then(|| {
                let seed = options.dropout_seed.expect("tests with dropout set its seed");
                reference::Dropout { seed: dropout::seed(seed), first: [0, 0] }
            }),
            seq_lens_q: problem.seq_lens_q.then(|| lens(problem.seq_q)),
            seq_lens_k: problem.seq_lens_k.then(|| lens(problem.seq_k)),
            cu_seqlens_q,
            cu_seqlens_k,
            score_tensors: std::array::from_fn(|nth| {
                problem.score_tensors[nth].map(|shape| f32s(shape.iter().product(), 11 + nth as u64, 0.5))
            }),
            mask_tensors: std::array::from_fn(|nth| {
                let len = problem.mask_tensors[nth]?.iter().product();
                Some(reference::mods::documents(len, 16 * seed + 13 + nth as u64))
            }),
            block_mask: problem.block_mask.map(|mask| {
                let mut of_states = StdRng::seed_from_u64(16 * seed + 15);
                (0..mask.blocks.iter().product::<usize>()).map(|_| of_states.random_range(0..3)).collect()
            }),
        };
        Data { problem, tensors, dout: floats(&problem.o_shape(), 4), dlse }
    }

    /// The oracle's results.
    pub fn oracle(&self, how: How) -> Results {
        let output = reference::forward(&self.problem, &self.tensors.inputs());
        let (dout, dlse) = self.loss(how);
        let gradients = reference::backward(&self.problem, &self.tensors.inputs(), &dout, dlse);
        Results::of(reference::Attention { output, gradients }, how.tracked)
    }

    /// The oracle's results, the emulated results with the roundings of the kernel of this name, and the expected spread of their
    /// difference.
    pub fn expected(&self, how: How, kernel: &str) -> [Results; 3] {
        let operands = match kernel {
            "hopper" | "matrix" => Operands::Inputs,
            "mma" if self.problem.dtype != Dtype::F32 => Operands::Inputs,
            _ => Operands::F32,
        };
        let emulation = Emulation { dtype: self.problem.dtype, operands };
        let (dout, dlse) = self.loss(how);
        let of = reference::expected(&self.problem, &self.tensors.inputs(), &dout, dlse, emulation);
        [of.exact, of.emulated, of.spread].map(|of| Results::of(of, how.tracked))
    }

    /// The gradients of output and lse.
    fn loss(&self, how: How) -> (Vec<f64>, Option<&[f64]>) {
        let dout = if how.loss.out { self.dout.clone() } else { vec![0.0; self.dout.len()] };
        (dout, how.loss.lse.then_some(&self.dlse))
    }
}

/// Outputs and gradients, read back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Option<Vec<f64>>,
    pub dk: Option<Vec<f64>>,
    pub dv: Option<Vec<f64>>,
    pub dbias: Option<Vec<f64>>,
    pub dslopes: Option<Vec<f64>>,
    pub dsinks: Option<Vec<f64>>,
    /// Gradients of the score function's tensors.
    pub dtensors: [Option<Vec<f64>>; 2],
}

impl Results {
    /// The output, and the gradients of tracked tensors.
    fn of(attention: reference::Attention, tracked: Tracked) -> Self {
        let reference::Attention { output, gradients } = attention;
        let Tracked { q, k, v, bias, slopes, sinks, tensors } = tracked;
        let [dscore_a, dscore_b] = gradients.dscore_tensors;
        Results {
            dtensors: [dscore_a.filter(|_| tensors[0]), dscore_b.filter(|_| tensors[1])],
            out: output.o,
            lse: output.lse,
            dq: q.then_some(gradients.dq),
            dk: k.then_some(gradients.dk),
            dv: v.then_some(gradients.dv),
            dbias: gradients.dbias.filter(|_| bias),
            dslopes: gradients.dalibi_slopes.filter(|_| slopes),
            dsinks: gradients.dsinks.filter(|_| sinks),
        }
    }

    /// Output and gradients with their names and row lengths. Missing gradients are `None`.
    pub fn tensors(&self, problem: &AttentionProblem) -> [(&'static str, usize, Option<&[f64]>); 9] {
        let bias_row = problem.bias.map_or(1, |shape| shape[3].max(1));
        [
            ("out", problem.head_dim_v, Some(&self.out)),
            ("dq", problem.head_dim, self.dq.as_deref()),
            ("dk", problem.head_dim, self.dk.as_deref()),
            ("dv", problem.head_dim_v, self.dv.as_deref()),
            ("dbias", bias_row, self.dbias.as_deref()),
            ("dalibi_slopes", 1, self.dslopes.as_deref()),
            ("dsinks", 1, self.dsinks.as_deref()),
            ("da", 1, self.dtensors[0].as_deref()),
            ("db", 1, self.dtensors[1].as_deref()),
        ]
    }
}
