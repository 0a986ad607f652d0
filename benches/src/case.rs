//! What is timed: a problem, and a pass over it.

use crate::data::step;
use crate::functions::{self, Document};
use clap::ValueEnum;
use flash_attention_kernels::blocks::{BLOCK, EMPTY, FULL};
use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, Dtype};
use flash_attention_reference::mods::{Alibi, Softcap};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One attention problem of a set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Element type.
    pub dtype: Dtype,
    /// Batches.
    pub batch: usize,
    /// Heads of the queries.
    pub heads_q: usize,
    /// Heads of keys and values.
    pub heads_kv: usize,
    /// Queries.
    pub seq_q: usize,
    /// Keys.
    pub seq_k: usize,
    /// Dimension of queries and keys.
    pub head_dim: usize,
    /// Dimension of values.
    pub head_dim_v: usize,
    /// Whether a query sees no later key.
    pub causal: bool,
    /// What else is asked of the scores.
    pub variant: Variant,
}

/// What is asked of the scores beside causality.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// Nothing.
    None,
    /// A padding mask `[batch, 1, 1, seq_k]` that hides the last eighth of the keys of every other batch.
    Mask,
    /// A bias `[1, heads, seq_q, seq_k]`, and its gradient.
    Bias,
    /// A softcap of 20.
    Softcap,
    /// A causal window of so many keys, the query's own counted.
    Window(usize),
    /// ALiBi's slopes, which are not learned.
    Alibi,
    /// A sink for each head, and its gradient.
    Sinks,
    /// One in ten probabilities dropped.
    Dropout,
    /// So many sequences of the same length, packed one behind the other.
    Packed(usize),
    /// Eight sequences, from 1/64 to 20/64 of all tokens, packed one behind the other.
    Documents,
    /// Sequences of all, 3/4, 1/2 and 1/4 of their batch, with padding behind.
    Lengths,
    /// [`Alibi`](Variant::Alibi) as a function of scores.
    AlibiFunction,
    /// [`Softcap`](Variant::Softcap) as a function of scores.
    SoftcapFunction,
    /// [`Window`](Variant::Window) as a function that hides pairs, causality included, with a block mask made of it.
    WindowFunction(usize),
    /// [`Documents`](Variant::Documents), where causal, as a function that hides pairs, with a block mask made of it.
    DocumentsFunction,
    /// A block mask for all heads, where so many blocks of a hundred are seen, whole, and no others.
    Sparse(usize),
}

/// 64ths of all tokens that sequences of [`Variant::Documents`] have, but for a few tokens.
const DOCUMENTS: [usize; 8] = [20, 1, 9, 3, 14, 2, 7, 8];

/// The probability of [`Variant::Dropout`].
pub const DROPOUT: f32 = 0.1;

/// The softcap of [`Variant::Softcap`].
pub const SOFTCAP: f32 = 20.0;

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Variant::None => f.write_str("none"),
            Variant::Mask => f.write_str("mask"),
            Variant::Bias => f.write_str("bias"),
            Variant::Softcap => f.write_str("softcap"),
            Variant::Window(keys) => write!(f, "window {keys}"),
            Variant::Alibi => f.write_str("alibi"),
            Variant::Sinks => f.write_str("sinks"),
            Variant::Dropout => f.write_str("dropout"),
            Variant::Packed(sequences) => write!(f, "packed {sequences}"),
            Variant::Documents => f.write_str("documents"),
            Variant::Lengths => f.write_str("lengths"),
            Variant::AlibiFunction | Variant::SoftcapFunction | Variant::DocumentsFunction => {
                write!(f, "{} function", self.option())
            }
            Variant::WindowFunction(keys) => write!(f, "window function {keys}"),
            Variant::Sparse(percent) => write!(f, "sparse {percent}"),
        }
    }
}

impl Variant {
    /// Of a function the option that computes the same; else itself.
    pub fn option(self) -> Variant {
        match self {
            Variant::AlibiFunction => Variant::Alibi,
            Variant::SoftcapFunction => Variant::Softcap,
            Variant::WindowFunction(keys) => Variant::Window(keys),
            Variant::DocumentsFunction => Variant::Documents,
            option => option,
        }
    }

    /// Whether it is asked for by a function or by a block mask.
    pub fn is_function(self) -> bool {
        self.option() != self || matches!(self, Variant::Sparse(_))
    }
}

impl Case {
    /// Causal or full self-attention: as many keys as queries, as many heads of one as of the other.
    pub const fn new(dtype: Dtype, [batch, heads, seq, head_dim]: [usize; 4], causal: bool) -> Self {
        Case {
            dtype,
            batch,
            heads_q: heads,
            heads_kv: heads,
            seq_q: seq,
            seq_k: seq,
            head_dim,
            head_dim_v: head_dim,
            causal,
            variant: Variant::None,
        }
    }

    /// The same with something asked of the scores.
    pub const fn with(self, variant: Variant) -> Self {
        Case { variant, ..self }
    }

    /// The problem that the kernels are given.
    pub fn problem(&self) -> Result<AttentionProblem, AttentionError> {
        let mut options = AttentionOptions { causal: self.causal, ..Default::default() };
        match self.variant {
            Variant::Softcap => options.softcap = Some(SOFTCAP),
            Variant::Window(keys) => options.window_left = Some(keys.saturating_sub(1)),
            Variant::Dropout => (options.dropout, options.dropout_seed) = (DROPOUT, Some(1)),
            Variant::AlibiFunction => options.score_mod = Some(ScoreFn::of::<Alibi>()),
            Variant::SoftcapFunction => options.score_mod = Some(ScoreFn::of::<Softcap<{ SOFTCAP as u32 }>>()),
            // These see to causality themselves, as their peer's do.
            Variant::WindowFunction(keys) => {
                let unknown = || AttentionError::Unsupported {
                    option: "window function",
                    value: keys.to_string(),
                    why: "functions are compiled for windows of 128, 256, 1024 and 2048 keys",
                };
                options.mask_mod = Some(functions::window(keys).ok_or_else(unknown)?);
                options.causal = false;
            }
            Variant::DocumentsFunction => {
                options.mask_mod = Some(MaskFn::of::<Document>());
                options.causal = false;
            }
            _ => {}
        }
        let q = [self.batch, self.heads_q, self.seq_q, self.head_dim];
        let k = [self.batch, self.heads_kv, self.seq_k, self.head_dim];
        let v = [self.batch, self.heads_kv, self.seq_k, self.head_dim_v];
        let problem = AttentionProblem::new(&q, &k, &v, self.dtype, options)?;
        match self.variant {
            Variant::Mask => problem.with_mask(&[self.batch, 1, 1, self.seq_k]),
            Variant::Bias => problem.with_bias(&[1, self.heads_q, self.seq_q, self.seq_k]),
            Variant::Alibi => problem.with_alibi_slopes(&[1, self.heads_q]),
            Variant::Sinks => problem.with_sinks(&[self.heads_q]),
            Variant::Packed(_) | Variant::Documents => {
                let ends = [self.sequences().len() + 1];
                problem.with_cu_seqlens(&ends, &ends)
            }
            Variant::Lengths => problem.with_seq_lens_q(&[self.batch])?.with_seq_lens_k(&[self.batch]),
            Variant::AlibiFunction => problem.with_score_tensors(&[&[1, self.heads_q, 1, 1]]),
            Variant::DocumentsFunction => {
                let problem = problem.with_mask_tensors(&[&[1, 1, self.seq_q, 1], &[1, 1, 1, self.seq_k]])?;
                problem.with_block_mask(&self.blocks_shape(), BLOCK, BLOCK)
            }
            Variant::WindowFunction(_) | Variant::Sparse(_) => {
                problem.with_block_mask(&self.blocks_shape(), BLOCK, BLOCK)
            }
            Variant::None | Variant::Softcap | Variant::Window(_) | Variant::Dropout | Variant::SoftcapFunction => {
                Ok(problem)
            }
        }
    }

    fn blocks_shape(&self) -> [usize; 4] {
        [1, 1, self.seq_q.div_ceil(BLOCK), self.seq_k.div_ceil(BLOCK)]
    }

    /// The states of a [sparse](Variant::Sparse) block mask's blocks, at random: of a row with none the first one is seen.
    pub fn blocks(&self) -> Option<Vec<u32>> {
        let Variant::Sparse(percent) = self.variant else { return None };
        let [_, _, down, across] = self.blocks_shape();
        // peers.py walks the same way.
        let mut state = 1;
        let mut states: Vec<u32> = (0..down * across)
            .map(|_| {
                state = step(state);
                if (state >> 33) % 100 < percent as u64 { FULL } else { EMPTY }
            })
            .collect();
        for row in states.chunks_mut(across.max(1)) {
            if row.iter().all(|state| *state == EMPTY) {
                row[0] = FULL;
            }
        }
        Some(states)
    }

    /// Pairs that these blocks let see each other.
    fn pairs_of(&self, states: &[u32]) -> usize {
        let across = self.seq_k.div_ceil(BLOCK);
        let seen = states.iter().enumerate().filter(|(_, state)| **state != EMPTY);
        let within = |nth: usize, all: usize| BLOCK.min(all - nth * BLOCK);
        seen.map(|(n, _)| within(n / across, self.seq_q) * within(n % across, self.seq_k)).sum()
    }

    /// The lengths of sequences, of queries and keys alike: one of a batch but where the variant has others.
    pub fn sequences(&self) -> Vec<usize> {
        let all = self.batch * self.seq_q;
        match self.variant {
            Variant::Packed(sequences) => vec![all / sequences; sequences],
            Variant::Documents => {
                // Ends that no tile divides.
                let last = DOCUMENTS.len();
                let end = |n: usize| {
                    DOCUMENTS[..n].iter().sum::<usize>() * all / 64 + if n.is_multiple_of(last) { 0 } else { 5 * n }
                };
                (0..last).map(|n| end(n + 1) - end(n)).collect()
            }
            Variant::Lengths => (0..self.batch).map(|b| self.seq_q * (4 - b % 4) / 4).collect(),
            _ => vec![self.seq_q; self.batch],
        }
    }

    /// Operations of a pass as the field counts them: of several sequences, those of each by itself; of a function those of the option that
    /// computes the same; of blocks, those of the ones that are seen.
    pub fn flops(&self, pass: Pass) -> Result<f64, AttentionError> {
        let counted = self.with(self.variant.option());
        let problem = counted.problem()?;
        if let Some(states) = self.blocks() {
            let all = (self.seq_q * self.seq_k).max(1) as f64;
            return Ok(pass.flops(&problem) * self.pairs_of(&states) as f64 / all);
        }
        if !problem.is_varlen() {
            return Ok(pass.flops(&problem));
        }
        let alone = |len: usize| {
            let mut problem = problem;
            (problem.batch, problem.seq_q, problem.seq_k) = (1, len, len);
            pass.flops(&problem)
        };
        Ok(counted.sequences().into_iter().map(alone).sum())
    }

    /// The column `variant` of the results.
    pub fn variant_name(&self) -> String {
        if self.head_dim_v == self.head_dim {
            self.variant.to_string()
        } else {
            format!("{}{HEAD_DIM_V}{}", self.variant, self.head_dim_v)
        }
    }

    /// Bytes of `q`, `k`, `v` and the output.
    pub fn bytes(&self) -> usize {
        let heads = [self.heads_q, self.heads_kv];
        bytes_read_once(
            self.batch,
            heads,
            [self.seq_q, self.seq_k],
            [self.head_dim, self.head_dim_v],
            self.dtype.size(),
        )
    }
}

/// Bytes that a forward cannot do without: each number of `q`, `k` and `v` read once and each of `o` written once,
/// `batch · (heads_q · seq_q + heads_kv · seq_k) · (head_dim + head_dim_v)` of `size` bytes. Over the time they are the bandwidth
/// that a decoding step reaches.
pub fn bytes_read_once(batch: usize, heads: [usize; 2], seqs: [usize; 2], dims: [usize; 2], size: usize) -> usize {
    let rows = heads[0] * seqs[0] + heads[1] * seqs[1];
    batch * rows * (dims[0] + dims[1]) * size
}

/// Queries up to which a forward counts as a step of decoding, whose time goes with the bytes of its cache and not with
/// operations.
pub const DECODING: usize = 16;

/// What [`Case::variant_name`] puts before a head dimension of values that is another than that of queries and keys.
const HEAD_DIM_V: &str = ", head_dim_v ";

/// The variant, and the head dimension of values, of a column `variant`.
pub fn parse_variant(name: &str, head_dim: usize) -> (&str, usize) {
    let parts = name.split_once(HEAD_DIM_V).and_then(|(variant, dim)| Some((variant, dim.parse().ok()?)));
    parts.unwrap_or((name, head_dim))
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}, {}", self.dtype.name(), self.batch, self.heads_q)?;
        if self.heads_kv != self.heads_q {
            write!(f, "/{}", self.heads_kv)?;
        }
        write!(f, ", {}", self.seq_q)?;
        if self.seq_k != self.seq_q {
            write!(f, "→{}", self.seq_k)?;
        }
        write!(f, ", {}]{}", self.head_dim, if self.causal { " causal" } else { "" })?;
        match self.variant_name() {
            name if name == "none" => Ok(()),
            name => write!(f, ", {name}"),
        }
    }
}

/// A pass over a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// The output.
    Forward,
    /// All gradients, from what the forward saved.
    Backward,
    /// One after the other.
    Both,
    /// One after the other, through Burn's autodiff.
    Autodiff,
}

impl Pass {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Both => "both",
            Pass::Autodiff => "autodiff",
        }
    }

    /// Operations as the field counts them.
    pub fn flops(self, problem: &AttentionProblem) -> f64 {
        match self {
            Pass::Forward => problem.forward_flops(),
            Pass::Backward => problem.backward_flops(),
            Pass::Both | Pass::Autodiff => problem.forward_flops() + problem.backward_flops(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Functions beside the options that compute the same.
    const FUNCTIONS: [(Variant, Variant, &str); 4] = [
        (Variant::AlibiFunction, Variant::Alibi, "alibi function"),
        (Variant::SoftcapFunction, Variant::Softcap, "softcap function"),
        (Variant::WindowFunction(256), Variant::Window(256), "window function 256"),
        (Variant::DocumentsFunction, Variant::Documents, "documents function"),
    ];

    #[test]
    fn functions_have_names_and_count_as_options() {
        let case = Case::new(Dtype::BF16, [1, 2, 2048, 64], true);
        for (function, option, name) in FUNCTIONS {
            assert_eq!((function.option(), function.to_string().as_str()), (option, name));
            assert!(function.is_function() && !option.is_function());
            let count = |variant| case.with(variant).flops(Pass::Backward).unwrap();
            assert_eq!(count(function), count(option), "{name}");
            let options = case.with(function).problem().unwrap().options;
            assert!(options.score_mod.is_some() || options.mask_mod.is_some(), "{name}");
        }
        // As peers.py reads them.
        let json = |variant: Variant| serde_json::to_string(&variant).unwrap();
        assert_eq!(json(Variant::AlibiFunction), r#""alibi-function""#);
        assert_eq!(json(Variant::WindowFunction(256)), r#"{"window-function":256}"#);
        assert_eq!([Variant::Sinks, Variant::Packed(4)].map(json), [r#""sinks""#, r#"{"packed":4}"#]);
        let unknown = case.with(Variant::WindowFunction(300)).problem().unwrap_err().to_string();
        assert!(unknown.contains("300") && unknown.contains("256"), "{unknown}");
    }

    #[test]
    fn of_sparse_blocks_those_that_are_seen_count() {
        let dense = Case::new(Dtype::BF16, [1, 16, 16384, 128], false);
        let sparse = dense.with(Variant::Sparse(10));
        assert_eq!(sparse.to_string(), "bf16 [1, 16, 16384, 128], sparse 10");
        let states = sparse.blocks().unwrap();
        let full = states.iter().filter(|state| **state == FULL).count();
        // peers.py draws as many.
        assert_eq!((states.len(), full), (128 * 128, 1647));
        assert!(states.chunks(128).all(|row| row.contains(&FULL)));
        for pass in [Pass::Forward, Pass::Backward] {
            let part = sparse.flops(pass).unwrap() / dense.flops(pass).unwrap();
            assert!((part - full as f64 / 16384.0).abs() < 1e-12, "{part}");
        }
        // The last blocks are smaller. With no luck at all each row has its first one.
        let cut = Case::new(Dtype::BF16, [1, 1, 200, 64], false);
        let part = |percent| cut.with(Variant::Sparse(percent)).flops(Pass::Forward).unwrap() / (4.0 * 64.0);
        assert_eq!((part(100), part(0)), (200.0 * 200.0, 200.0 * 128.0));
        assert_eq!(cut.with(Variant::Window(128)).blocks(), None);
    }
}
