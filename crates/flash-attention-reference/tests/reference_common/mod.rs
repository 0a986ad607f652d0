//! A problem together with tensors for it.
#![allow(dead_code)] // each test file uses a part of it

use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
use flash_attention_reference::mods::documents;
use flash_attention_reference::{Dropout, Gradients, Output, Tensors, backward, forward, normal};

/// `[batch, num_heads_q, num_heads_kv, seq_q, seq_k, head_dim, head_dim_v]`.
pub type Sizes = [usize; 7];

#[derive(Clone)]
pub struct Case {
    pub problem: AttentionProblem,
    pub tensors: Tensors,
    pub dout: Vec<f64>,
    pub dlse: Option<Vec<f64>>,
}

impl Case {
    /// Standard normal inputs and `dout`, without mask, bias and `dlse`.
    pub fn new([b, hq, hkv, sq, sk, d, dv]: Sizes, options: AttentionOptions) -> Self {
        let problem =
            AttentionProblem::new(&[b, hq, sq, d], &[b, hkv, sk, d], &[b, hkv, sk, dv], Dtype::F32, options).unwrap();
        let draw = |shape: [usize; 4], seed| normal(shape.iter().product(), seed);
        Case {
            problem,
            tensors: Tensors {
                q: draw(problem.q_shape(), 1),
                k: draw(problem.k_shape(), 2),
                v: draw(problem.v_shape(), 3),
                dropout: (options.dropout > 0.0).then_some(Dropout { seed: [8, 9], first: [0, 0] }),
                ..Default::default()
            },
            dout: draw(problem.o_shape(), 4),
            dlse: None,
        }
    }

    /// Adds a random mask of this shape that hides about a third of the pairs.
    pub fn with_mask(mut self, shape: [usize; 4]) -> Self {
        self.problem = self.problem.with_mask(&shape).unwrap();
        self.tensors.mask = Some(normal(shape.iter().product(), 5).iter().map(|&x| x > 0.4).collect());
        self
    }

    pub fn with_bias(mut self, shape: [usize; 4]) -> Self {
        self.problem = self.problem.with_bias(&shape).unwrap();
        self.tensors.bias = Some(normal(shape.iter().product(), 6));
        self
    }

    pub fn with_alibi_slopes(mut self, shape: [usize; 2]) -> Self {
        self.problem = self.problem.with_alibi_slopes(&shape).unwrap();
        self.tensors.alibi_slopes = Some(normal(shape.iter().product(), 10));
        self
    }

    pub fn with_sinks(mut self) -> Self {
        self.problem = self.problem.with_sinks(&[self.problem.num_heads_q]).unwrap();
        self.tensors.sinks = Some(normal(self.problem.num_heads_q, 11));
        self
    }

    /// Adds sequence lengths for each batch.
    pub fn with_seq_lens(mut self, q: &[usize], k: &[usize]) -> Self {
        let batch = [self.problem.batch];
        self.problem = self.problem.with_seq_lens_q(&batch).unwrap().with_seq_lens_k(&batch).unwrap();
        (self.tensors.seq_lens_q, self.tensors.seq_lens_k) = (Some(q.to_vec()), Some(k.to_vec()));
        self
    }

    /// Adds packed sequences with these cumulative lengths.
    pub fn with_cu_seqlens(mut self, q: &[usize], k: &[usize]) -> Self {
        self.problem = self.problem.with_cu_seqlens(&[q.len()], &[k.len()]).unwrap();
        (self.tensors.cu_seqlens_q, self.tensors.cu_seqlens_k) = (Some(q.to_vec()), Some(k.to_vec()));
        self
    }

    /// Adds a score function, and tensors of these shapes for it.
    pub fn with_score_mod(mut self, function: ScoreFn, shapes: &[[usize; 4]]) -> Self {
        self.problem.options.score_mod = Some(function);
        self.problem =
            self.problem.with_score_tensors(&shapes.iter().map(|shape| &shape[..]).collect::<Vec<_>>()).unwrap();
        for (nth, shape) in shapes.iter().enumerate() {
            self.tensors.score_tensors[nth] = Some(normal(shape.iter().product(), 12 + nth as u64));
        }
        self
    }

    /// Adds a mask function, and tensors of document numbers of these shapes for it.
    pub fn with_mask_mod(mut self, function: MaskFn, shapes: &[[usize; 4]]) -> Self {
        self.problem.options.mask_mod = Some(function);
        self.problem =
            self.problem.with_mask_tensors(&shapes.iter().map(|shape| &shape[..]).collect::<Vec<_>>()).unwrap();
        for (nth, shape) in shapes.iter().enumerate() {
            self.tensors.mask_tensors[nth] = Some(documents(shape.iter().product(), 14 + nth as u64));
        }
        self
    }

    /// Adds a block mask for this many batches and heads. A third of the blocks is in each state.
    pub fn with_block_mask(mut self, [batch, heads]: [usize; 2], [block_q, block_k]: [usize; 2]) -> Self {
        let shape = [batch, heads, self.problem.seq_q.div_ceil(block_q), self.problem.seq_k.div_ceil(block_k)];
        self.problem = self.problem.with_block_mask(&shape, block_q, block_k).unwrap();
        let drawn = normal(shape.iter().product(), 16);
        self.tensors.block_mask = Some(drawn.iter().map(|x| u32::from(*x > -0.43) + u32::from(*x > 0.43)).collect());
        self
    }

    pub fn with_dlse(mut self) -> Self {
        self.dlse = Some(normal(self.problem.rows(), 7));
        self
    }

    pub fn forward(&self) -> Output {
        forward(&self.problem, &self.tensors.inputs())
    }

    pub fn backward(&self) -> Gradients {
        backward(&self.problem, &self.tensors.inputs(), &self.dout, self.dlse.as_deref())
    }
}

/// Asserts that both are equal up to rounding.
#[track_caller]
pub fn assert_close(x: &[f64], y: &[f64]) {
    assert_eq!(x.len(), y.len());
    assert!(
        x.iter().zip(y).all(|(x, y)| x == y || (x - y).abs() <= 1e-12 * (1.0 + y.abs())),
        "{x:?} differs from {y:?}"
    );
}

/// The 16 shapes that broadcast to `shape`.
pub fn broadcasts(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..16usize).map(move |kept| std::array::from_fn(|n| if kept >> n & 1 == 1 { shape[n] } else { 1 }))
}
