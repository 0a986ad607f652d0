//! Sets of problems.

use crate::case::{Case, Variant};
use clap::ValueEnum;
use flash_attention_kernels::Dtype;

/// A set of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// Takes seconds, even on a software device; used by tests.
    Tiny,
    /// Takes minutes on any device, in f32 and f16: one axis at a time, and every variant.
    Quick,
    /// The shapes of the FlashAttention papers in bf16: 16k tokens in total, hidden size 2,048 (arXiv:2307.08691, section 4.1).
    Paper,
    /// Shapes that fill a data-centre GPU, in bf16.
    H200,
    /// Mask, bias, softcap, windows, slopes, sinks, dropout and several sequences at (4, 16, 4096, 128), in bf16; some of them also as
    /// functions; and sparse block masks at (1, 16, 16384, 64 and 128).
    Variants,
    /// Gradients of slopes, of tensors of functions and of a broadcast bias at (4, 16, 4096, 128) and (4, 32, 4096, 64), causal, in bf16,
    /// each next to the same problem without that gradient.
    Gradients,
    /// Lengths that no tile divides, each with the next length that tiles divide; grouped heads; few heads; in bf16.
    Ragged,
    /// Decoding steps in bf16: batches of 1 to 64, 128 to 128k keys, 32/8, 32/32 and 64/8 heads; some with 4 and 16 queries.
    Decode,
    /// f32 at 4k to 64k tokens, for memory.
    Lengths,
    /// (4, 16, 4096, 128) full and causal, in bf16, for the overhead of Burn's autodiff.
    Autodiff,
    /// (4, 16, 1024, 64) and (2, 16, 2048, 128), full and causal, in f16, for any GPU with matrix instructions.
    Modest,
    /// (4, 16, 4096, 64) and (4, 16, 4096, 128), causal, in f32.
    Single,
    /// (1, 16, 8192, 64) and (1, 16, 8192, 128), full, in f32, each without a block mask and with a sparse one.
    SingleBlocks,
    /// One sequence of 2²⁰ tokens, causal, in bf16; a call takes seconds.
    Million,
}

impl Set {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Set::Tiny => "tiny",
            Set::Quick => "quick",
            Set::Paper => "paper",
            Set::H200 => "h200",
            Set::Variants => "variants",
            Set::Gradients => "gradients",
            Set::Ragged => "ragged",
            Set::Decode => "decode",
            Set::Lengths => "lengths",
            Set::Autodiff => "autodiff",
            Set::Modest => "modest",
            Set::Single => "single",
            Set::SingleBlocks => "single-blocks",
            Set::Million => "million",
        }
    }

    /// The problems of the set.
    pub fn cases(self) -> Vec<Case> {
        use Dtype::{BF16, F16, F32};
        match self {
            Set::Tiny => {
                let base = Case::new(F32, [1, 2, 64, 32], true);
                vec![
                    base,
                    Case::new(F32, [1, 2, 128, 32], true),
                    Case { heads_kv: 1, ..base },
                    base.with(Variant::Mask),
                    base.with(Variant::Bias),
                ]
            }
            Set::Quick => [F32, F16].into_iter().flat_map(quick).collect(),
            Set::Paper => {
                let lengths = [512, 1024, 2048, 4096, 8192, 16384];
                let of = |head_dim: usize, causal: bool| {
                    lengths.map(|seq| Case::new(BF16, [16384 / seq, 2048 / head_dim, seq, head_dim], causal))
                };
                [64, 128, 256].into_iter().flat_map(|d| [of(d, false), of(d, true)].concat()).collect()
            }
            Set::H200 => [
                ([16, 16, 1024, 128], false),
                ([16, 16, 1024, 128], true),
                ([32, 16, 512, 128], true),
                ([4, 16, 4096, 128], false),
                ([4, 16, 4096, 128], true),
                ([1, 16, 16384, 128], true),
                ([16, 32, 1024, 64], true),
                ([4, 32, 4096, 64], true),
                ([1, 32, 16384, 64], true),
                ([4, 8, 4096, 256], true),
                ([1, 8, 16384, 256], true),
                ([4, 16, 4096, 96], true),
                ([4, 8, 4096, 192], true),
            ]
            .map(|(shape, causal)| Case::new(BF16, shape, causal))
            .into_iter()
            // Eight query heads for each key/value head, as in many models.
            .chain([8192, 16384].into_iter().flat_map(|seq| {
                let of = move |causal| Case { heads_kv: 8, ..Case::new(BF16, [1, 64, seq, 128], causal) };
                [false, true].map(of)
            }))
            .collect(),
            Set::Variants => {
                let full = Case::new(BF16, [4, 16, 4096, 128], false);
                let causal = Case { causal: true, ..full };
                let long = [128, 64].map(|head_dim| Case::new(BF16, [1, 16, 16384, head_dim], false));
                let options = [
                    full.with(Variant::Mask),
                    full.with(Variant::Bias),
                    causal.with(Variant::Softcap),
                    causal.with(Variant::Window(256)),
                    causal.with(Variant::Window(1024)),
                    causal.with(Variant::Window(2048)),
                    causal.with(Variant::Alibi),
                    causal.with(Variant::Sinks),
                    full.with(Variant::Dropout),
                    causal.with(Variant::Dropout),
                    Case { batch: 1, seq_q: 16384, seq_k: 16384, ..full }.with(Variant::Packed(4)),
                    Case { batch: 1, seq_q: 16384, seq_k: 16384, ..causal }.with(Variant::Packed(4)),
                    Case { batch: 1, seq_q: 16384, seq_k: 16384, ..causal }.with(Variant::Documents),
                    causal.with(Variant::Lengths),
                ];
                let functions = [
                    causal.with(Variant::AlibiFunction),
                    causal.with(Variant::SoftcapFunction),
                    causal.with(Variant::WindowFunction(256)),
                    causal.with(Variant::WindowFunction(1024)),
                    causal.with(Variant::WindowFunction(2048)),
                    Case { causal: true, ..long[0] }.with(Variant::DocumentsFunction),
                ];
                // Sparse problems, each next to the dense one.
                let sparse = long.into_iter().flat_map(|case| [case, case.with(Variant::Sparse(10))]);
                options.into_iter().chain(functions).chain(sparse).collect()
            }
            Set::Gradients => {
                let with = [
                    Variant::AlibiGradient,
                    Variant::AlibiFunctionGradient,
                    Variant::TemperatureGradient,
                    Variant::KeyBiasGradient,
                ];
                let shapes = [[4, 16, 4096, 128], [4, 32, 4096, 64]];
                let of = |shape| {
                    let case = Case::new(BF16, shape, true);
                    with.into_iter().flat_map(move |with| [case.with(with.without_gradient()), case.with(with)])
                };
                shapes.into_iter().flat_map(of).collect()
            }
            Set::Ragged => {
                let of = |seq_q: usize, seq_k: usize, batch: usize| Case {
                    seq_k,
                    ..Case::new(BF16, [batch, 16, seq_q, 128], true)
                };
                let grouped = Case::new(BF16, [4, 32, 4096, 128], true);
                vec![
                    of(1000, 1000, 16),
                    of(1024, 1024, 16),
                    of(1023, 1024, 16),
                    of(4095, 4095, 4),
                    of(4096, 4096, 4),
                    of(16385, 16385, 1),
                    of(16512, 16512, 1),
                    grouped,
                    Case { heads_kv: 8, ..grouped },
                    Case { head_dim_v: 64, ..of(4096, 4096, 4) },
                    Case::new(BF16, [1, 1, 16384, 128], true),
                    Case::new(BF16, [1, 2, 4096, 128], false),
                ]
            }
            Set::Decode => decode(),
            Set::Lengths => [4096, 8192, 16384, 32768, 65536].map(|seq| Case::new(F32, [1, 8, seq, 64], true)).to_vec(),
            Set::Autodiff => [false, true].map(|causal| Case::new(BF16, [4, 16, 4096, 128], causal)).to_vec(),
            Set::Modest => [[4, 16, 1024, 64], [2, 16, 2048, 128]]
                .into_iter()
                .flat_map(|shape| [false, true].map(|causal| Case::new(F16, shape, causal)))
                .collect(),
            Set::Single => [64, 128].map(|head_dim| Case::new(F32, [4, 16, 4096, head_dim], true)).to_vec(),
            Set::SingleBlocks => [64, 128]
                .map(|head_dim| Case::new(F32, [1, 16, 8192, head_dim], false))
                .into_iter()
                .flat_map(|case| [case, case.with(Variant::Sparse(10))])
                .collect(),
            Set::Million => vec![Case::new(BF16, [1, 8, 1 << 20, 128], true)],
        }
    }
}

/// One query over a grid of heads, batches and keys, and several queries. Left out are K and V of more than 5 GB, whose rates are those of
/// 4 GB, and cells of 32/32 and 64/8 heads whose rates lie between those of their neighbours. None is causal: all queries at the last
/// position see all keys, but PyTorch aligns causality to the first key.
fn decode() -> Vec<Case> {
    let grid: [([usize; 2], usize, &[usize]); 8] = [
        ([32, 8], 1, &[128, 1024, 4096, 16384, 32768, 131072]),
        ([32, 8], 4, &[1024, 4096, 16384, 32768, 131072]),
        ([32, 8], 16, &[1024, 4096, 16384, 32768]),
        ([32, 8], 64, &[1024, 4096, 16384]),
        ([32, 32], 1, &[1024, 4096, 16384, 131072]),
        ([32, 32], 16, &[1024, 4096, 16384]),
        ([64, 8], 1, &[1024, 4096, 16384, 131072]),
        ([64, 8], 16, &[1024, 4096, 16384]),
    ];
    let case = |[heads_q, heads_kv]: [usize; 2], batch, seq_q, seq_k| Case {
        heads_kv,
        seq_k,
        ..Case::new(Dtype::BF16, [batch, heads_q, seq_q, 128], false)
    };
    let one = grid.iter().flat_map(|(heads, batch, keys)| keys.iter().map(|seq_k| case(*heads, *batch, 1, *seq_k)));
    let several = [4, 16].map(|seq_q| case([32, 8], 16, seq_q, 8192));
    let paged = [(1, 4096), (1, 131072), (16, 4096), (64, 4096)];
    let variants = [Variant::Pages(16), Variant::Pages(64), Variant::Pages(256), Variant::E4m3Pages(64)];
    let paged = paged.map(|(batch, seq_k)| variants.map(|variant| case([32, 8], batch, 1, seq_k).with(variant)));
    one.chain(several).chain(paged.into_iter().flatten()).collect()
}

/// One axis at a time around `[1, 8, 512, 64]`.
fn quick(dtype: Dtype) -> Vec<Case> {
    let base = Case::new(dtype, [1, 8, 512, 64], true);
    let mut cases: Vec<Case> = [256, 512, 1024].map(|seq| Case { seq_q: seq, seq_k: seq, ..base }).to_vec();
    cases.push(Case { causal: false, ..base });
    if dtype == Dtype::F32 {
        cases.extend([32, 128].map(|d| Case { head_dim: d, head_dim_v: d, ..base }));
        cases.extend([2, 4].map(|batch| Case { batch, ..base }));
        cases.extend([2, 4].map(|heads| Case { heads_q: heads, heads_kv: heads, ..base }));
        cases.push(Case { heads_kv: 2, ..base });
        cases.push(Case { seq_q: 128, ..base });
        let variants = [Variant::Mask, Variant::Bias, Variant::Softcap, Variant::Window(128)];
        cases.extend(
            variants
                .into_iter()
                .chain([Variant::Alibi, Variant::Sinks, Variant::Dropout, Variant::Documents])
                .map(|v| base.with(v)),
        );
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_timed_beside_options_of_the_same_size() {
        let cases = Set::Variants.cases();
        for case in cases.iter().filter(|case| case.variant.is_function()) {
            let beside = match case.variant {
                Variant::Sparse(_) => Variant::None,
                function => function.option(),
            };
            assert!(cases.contains(&case.with(beside)), "{case}");
            assert!(case.problem().is_ok(), "{case}");
        }
        assert_eq!(cases.iter().filter(|case| case.variant.is_function()).count(), 8);
    }

    #[test]
    fn every_problem_is_one_that_attention_is_defined_for() {
        for set in Set::value_variants() {
            let cases = set.cases();
            assert!(!cases.is_empty());
            for case in cases {
                assert!(case.problem().is_ok(), "{} {case}", set.name());
            }
        }
        let steps = Set::Decode.cases();
        assert!(steps.iter().all(|case| case.is_decoding() && case.bytes() < 5_000_000_000));
        assert!(!Set::Quick.cases().iter().any(Case::is_decoding));
    }
}
