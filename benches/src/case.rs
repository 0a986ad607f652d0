//! Benchmark cases: a problem, and a pass over it.

use crate::data::step;
use crate::functions::{self, Document};
use clap::ValueEnum;
use flash_attention_kernels::blocks::{BLOCK, EMPTY, FULL};
use flash_attention_kernels::mods::{Alibi, MaskFn, ScoreFn, Softcap, Temperature};
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, Dtype, KvStorage};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One attention problem of a set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Element type.
    pub dtype: Dtype,
    /// Batches.
    pub batch: usize,
    /// Number of query heads.
    pub heads_q: usize,
    /// Number of key/value heads.
    pub heads_kv: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_k: usize,
    /// Head dimension of queries and keys.
    pub head_dim: usize,
    /// Head dimension of values.
    pub head_dim_v: usize,
    /// Whether later keys are hidden from a query.
    pub causal: bool,
    /// Other options of the problem.
    pub variant: Variant,
}

/// Options of a problem other than causality.
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
    /// A causal window of this many keys, including the query's own.
    Window(usize),
    /// ALiBi slopes, without their gradient.
    Alibi,
    /// A sink for each head, and its gradient.
    Sinks,
    /// Dropout of one in ten probabilities.
    Dropout,
    /// This many packed sequences of equal length.
    Packed(usize),
    /// Eight packed sequences, from 1/64 to 20/64 of all tokens.
    Documents,
    /// Padded sequences, of 1, 3/4, 1/2 and 1/4 of the tensor's length.
    Lengths,
    /// [`Alibi`](Variant::Alibi) as a score function.
    AlibiFunction,
    /// [`Softcap`](Variant::Softcap) as a score function.
    SoftcapFunction,
    /// [`Window`](Variant::Window), including causality, as a mask function, with a block mask computed from it.
    WindowFunction(usize),
    /// [`Documents`](Variant::Documents), where causal, as a mask function, with a block mask computed from it.
    DocumentsFunction,
    /// [`Alibi`](Variant::Alibi) with the gradient of the slopes.
    AlibiGradient,
    /// [`AlibiFunction`](Variant::AlibiFunction) with the gradient of its tensor.
    AlibiFunctionGradient,
    /// Scores divided by a temperature for each head, as a score function, without the gradient of the temperatures.
    Temperature,
    /// [`Temperature`](Variant::Temperature) with the gradient of the temperatures.
    TemperatureGradient,
    /// A bias `[1, 1, 1, seq_k]`, without its gradient.
    KeyBias,
    /// [`KeyBias`](Variant::KeyBias) with its gradient.
    KeyBiasGradient,
    /// Keys and values in pages of this many positions, in random order.
    Pages(usize),
    /// The same in e4m3, with a scale for each page and head.
    E4m3Pages(usize),
    /// A block mask for all heads, in which this percentage of the blocks is full and the others are empty.
    Sparse(usize),
}

/// Name of [`Variant::Pages`], before the number.
const PAGES: &str = "pages of ";

/// Name of [`Variant::E4m3Pages`], before the number.
const E4M3_PAGES: &str = "e4m3 pages of ";

/// Lengths of the sequences of [`Variant::Documents`] in 64ths of all tokens, up to a few tokens.
const DOCUMENTS: [usize; 8] = [20, 1, 9, 3, 14, 2, 7, 8];

/// The dropout rate of [`Variant::Dropout`].
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
            Variant::Pages(size) => write!(f, "{PAGES}{size}"),
            Variant::E4m3Pages(size) => write!(f, "{E4M3_PAGES}{size}"),
            Variant::Temperature => f.write_str("temperature"),
            Variant::KeyBias => f.write_str("key bias"),
            Variant::AlibiGradient
            | Variant::AlibiFunctionGradient
            | Variant::TemperatureGradient
            | Variant::KeyBiasGradient => write!(f, "{} gradient", self.without_gradient()),
        }
    }
}

impl Variant {
    /// The option that is equivalent to a function, or else the variant itself.
    pub fn option(self) -> Variant {
        match self {
            Variant::AlibiFunction => Variant::Alibi,
            Variant::AlibiFunctionGradient => Variant::AlibiGradient,
            Variant::SoftcapFunction => Variant::Softcap,
            Variant::WindowFunction(keys) => Variant::Window(keys),
            Variant::DocumentsFunction => Variant::Documents,
            option => option,
        }
    }

    /// Whether the variant uses a function or a block mask.
    pub fn is_function(self) -> bool {
        let alone = matches!(self, Variant::Sparse(_) | Variant::Temperature | Variant::TemperatureGradient);
        self.option() != self || alone
    }

    /// The variant without the gradient that it adds to those of `q`, `k` and `v`.
    pub fn without_gradient(self) -> Variant {
        match self {
            Variant::AlibiGradient => Variant::Alibi,
            Variant::AlibiFunctionGradient => Variant::AlibiFunction,
            Variant::TemperatureGradient => Variant::Temperature,
            Variant::KeyBiasGradient => Variant::KeyBias,
            variant => variant,
        }
    }

    /// Whether the variant is timed with this repository's kernels only, called directly.
    pub fn is_direct(self) -> bool {
        let direct = matches!(self, Variant::Temperature | Variant::KeyBias) || self.pages().is_some();
        self.without_gradient() != self || direct
    }

    /// Positions of a page and their storage, if keys and values are in pages.
    pub fn pages(self) -> Option<(usize, KvStorage)> {
        match self {
            Variant::Pages(size) => Some((size, KvStorage::Elements)),
            Variant::E4m3Pages(size) => Some((size, KvStorage::E4m3)),
            _ => None,
        }
    }
}

impl Case {
    /// Causal or full self-attention: as many keys as queries, and as many key/value heads as query heads.
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

    /// The case with this variant.
    pub const fn with(self, variant: Variant) -> Self {
        Case { variant, ..self }
    }

    /// The problem that the kernels compute.
    pub fn problem(&self) -> Result<AttentionProblem, AttentionError> {
        let mut options = AttentionOptions { causal: self.causal, ..Default::default() };
        match self.variant.without_gradient() {
            Variant::Softcap => options.softcap = Some(SOFTCAP),
            Variant::Window(keys) => options.window_left = Some(keys.saturating_sub(1)),
            Variant::Dropout => (options.dropout, options.dropout_seed) = (DROPOUT, Some(1)),
            Variant::AlibiFunction => options.score_mod = Some(ScoreFn::of::<Alibi>()),
            Variant::Temperature => options.score_mod = Some(ScoreFn::of::<Temperature>()),
            Variant::SoftcapFunction => options.score_mod = Some(ScoreFn::of::<Softcap<{ SOFTCAP as u32 }>>()),
            // These functions include causality, as the peer's functions do.
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
        match self.variant.without_gradient() {
            Variant::Mask => problem.with_mask(&[self.batch, 1, 1, self.seq_k]),
            Variant::Bias => problem.with_bias(&[1, self.heads_q, self.seq_q, self.seq_k]),
            Variant::KeyBias => problem.with_bias(&[1, 1, 1, self.seq_k]),
            Variant::Alibi => problem.with_alibi_slopes(&[1, self.heads_q]),
            Variant::Sinks => problem.with_sinks(&[self.heads_q]),
            Variant::Packed(_) | Variant::Documents => {
                let ends = [self.sequences().len() + 1];
                problem.with_cu_seqlens(&ends, &ends)
            }
            Variant::Lengths => problem.with_seq_lens_q(&[self.batch])?.with_seq_lens_k(&[self.batch]),
            Variant::AlibiFunction | Variant::Temperature => problem.with_score_tensors(&[&[1, self.heads_q, 1, 1]]),
            Variant::DocumentsFunction => {
                let problem = problem.with_mask_tensors(&[&[1, 1, self.seq_q, 1], &[1, 1, 1, self.seq_k]])?;
                problem.with_block_mask(&self.blocks_shape(), BLOCK, BLOCK)
            }
            Variant::WindowFunction(_) | Variant::Sparse(_) => {
                problem.with_block_mask(&self.blocks_shape(), BLOCK, BLOCK)
            }
            _ => Ok(problem),
        }
    }

    fn blocks_shape(&self) -> [usize; 4] {
        [1, 1, self.seq_q.div_ceil(BLOCK), self.seq_k.div_ceil(BLOCK)]
    }

    /// Random block states of a [sparse](Variant::Sparse) block mask. If a row of blocks has no visible block, its first one is visible.
    pub fn blocks(&self) -> Option<Vec<u32>> {
        let Variant::Sparse(percent) = self.variant else { return None };
        let [_, _, down, across] = self.blocks_shape();
        // peers.py generates the same numbers.
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

    /// Number of pairs in the visible blocks.
    fn pairs_of(&self, states: &[u32]) -> usize {
        let across = self.seq_k.div_ceil(BLOCK);
        let seen = states.iter().enumerate().filter(|(_, state)| **state != EMPTY);
        let within = |nth: usize, all: usize| BLOCK.min(all - nth * BLOCK);
        seen.map(|(n, _)| within(n / across, self.seq_q) * within(n % across, self.seq_k)).sum()
    }

    /// Lengths of the sequences, for queries and keys alike: one sequence for each batch, unless the variant has others.
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

    /// Floating-point operations of a pass, as counted in papers: for several sequences, the sum over the sequences; for a function, those
    /// of the equivalent option; for a block mask, those of the visible blocks.
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

    /// Value of the column `variant` in the results.
    pub fn variant_name(&self) -> String {
        if self.head_dim_v == self.head_dim {
            self.variant.to_string()
        } else {
            format!("{}{HEAD_DIM_V}{}", self.variant, self.head_dim_v)
        }
    }

    /// Whether a forward of the problem is a [decoding step](is_decoding).
    pub fn is_decoding(&self) -> bool {
        is_decoding(self.seq_q, self.seq_k, &self.variant.to_string())
    }

    /// Bytes of `q`, `k`, `v` and the output.
    pub fn bytes(&self) -> usize {
        let heads = [self.heads_q, self.heads_kv];
        bytes_read_once(
            self.batch,
            heads,
            [self.seq_q, self.seq_k],
            [self.head_dim, self.head_dim_v],
            sizes(self.dtype.size(), &self.variant.to_string()),
        )
    }
}

/// Bytes of a number of `q` and `o`, which are given, and of `k` and `v`, with this variant by name.
pub fn sizes(size: usize, variant: &str) -> [usize; 2] {
    [size, if variant.starts_with(E4M3_PAGES) { 1 } else { size }]
}

/// Bytes that a forward must move: each number of `q`, `k` and `v` read once and each number of `o` written once, `batch · (heads_q · seq_q
/// + heads_kv · seq_k) · (head_dim + head_dim_v)` numbers of these [`sizes`]. Divided by the time, this is the bandwidth of a decoding step.
pub fn bytes_read_once(
    batch: usize,
    heads: [usize; 2],
    seqs: [usize; 2],
    dims: [usize; 2],
    sizes: [usize; 2],
) -> usize {
    let rows: usize = (0..2).map(|side| heads[side] * seqs[side] * sizes[side]).sum();
    batch * rows * (dims[0] + dims[1])
}

/// Largest number of queries for which a forward counts as a decoding step.
pub const DECODING: usize = 16;

/// Whether a forward of these numbers of queries and keys, with this variant by name, is a decoding step. The time of a decoding step
/// depends on the bytes of its cache and not on its operations, so it is measured without launches and reported in GB/s.
pub fn is_decoding(seq_q: usize, seq_k: usize, variant: &str) -> bool {
    seq_q <= DECODING && seq_q < seq_k && (variant == "none" || variant.contains(PAGES))
}

/// Separator that [`Case::variant_name`] puts before a head dimension of values that differs from that of queries and keys.
const HEAD_DIM_V: &str = ", head_dim_v ";

/// Splits the column `variant` into the variant and the head dimension of values.
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
    /// All gradients, from the saved results of the forward.
    Backward,
    /// Forward and backward.
    Both,
    /// Forward and backward through Burn's autodiff.
    Autodiff,
}

impl Pass {
    /// Name of the pass in results.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Both => "both",
            Pass::Autodiff => "autodiff",
        }
    }

    /// Floating-point operations, as counted in papers.
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

    /// Functions and the equivalent options.
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
        // The format that peers.py reads.
        let json = |variant: Variant| serde_json::to_string(&variant).unwrap();
        assert_eq!(json(Variant::AlibiFunction), r#""alibi-function""#);
        assert_eq!(json(Variant::WindowFunction(256)), r#"{"window-function":256}"#);
        assert_eq!([Variant::Sinks, Variant::Packed(4)].map(json), [r#""sinks""#, r#"{"packed":4}"#]);
        let unknown = case.with(Variant::WindowFunction(300)).problem().unwrap_err().to_string();
        assert!(unknown.contains("300") && unknown.contains("256"), "{unknown}");
    }

    #[test]
    fn gradients_have_names_and_the_same_problem() {
        let case = Case::new(Dtype::BF16, [1, 2, 2048, 64], true);
        for (with, name) in [
            (Variant::AlibiGradient, "alibi gradient"),
            (Variant::AlibiFunctionGradient, "alibi function gradient"),
            (Variant::TemperatureGradient, "temperature gradient"),
            (Variant::KeyBiasGradient, "key bias gradient"),
        ] {
            let without = with.without_gradient();
            assert_eq!((with.to_string().as_str(), format!("{without} gradient").as_str()), (name, name));
            assert_eq!(case.with(with).problem().unwrap(), case.with(without).problem().unwrap(), "{name}");
            let count = |variant| case.with(variant).flops(Pass::Backward).unwrap();
            assert_eq!(count(with), count(without), "{name}");
            assert_eq!((with.is_function(), with.is_direct()), (without.is_function(), true));
        }
    }

    #[test]
    fn of_sparse_blocks_those_that_are_seen_count() {
        let dense = Case::new(Dtype::BF16, [1, 16, 16384, 128], false);
        let sparse = dense.with(Variant::Sparse(10));
        assert_eq!(sparse.to_string(), "bf16 [1, 16, 16384, 128], sparse 10");
        let states = sparse.blocks().unwrap();
        let full = states.iter().filter(|state| **state == FULL).count();
        // peers.py has the same number of full blocks.
        assert_eq!((states.len(), full), (128 * 128, 1647));
        assert!(states.chunks(128).all(|row| row.contains(&FULL)));
        for pass in [Pass::Forward, Pass::Backward] {
            let part = sparse.flops(pass).unwrap() / dense.flops(pass).unwrap();
            assert!((part - full as f64 / 16384.0).abs() < 1e-12, "{part}");
        }
        // The last blocks are smaller. Without any visible block, each row keeps its first one.
        let cut = Case::new(Dtype::BF16, [1, 1, 200, 64], false);
        let part = |percent| cut.with(Variant::Sparse(percent)).flops(Pass::Forward).unwrap() / (4.0 * 64.0);
        assert_eq!((part(100), part(0)), (200.0 * 200.0, 200.0 * 128.0));
        assert_eq!(cut.with(Variant::Window(128)).blocks(), None);
    }
}
