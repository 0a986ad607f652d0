//! Every option, gradient, element type and shape.

use super::{all_options, dtypes};
use crate::common::*;
use burn::tensor::{Distribution, Int, IntDType, Tensor};
use burn_flash_attention::{FlashAttentionOptions, flash_attention, flash_attention_varlen};
use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{AttentionOptions, Dtype};
use flash_attention_reference as reference;
use flash_attention_reference::mods::{Relative, Sloped, Strided};

#[test]
fn options_dtypes_and_shapes() {
    for target in targets() {
        for dtype in dtypes(&target) {
            for (n, options) in all_options().into_iter().enumerate() {
                for sizes in [[2, 4, 2, 65, 130, 16, 24], [1, 2, 2, 130, 65, 33, 8]] {
                    let data = Data::random(problem(sizes, dtype, options), n as u64);
                    check(&data, &target, How { loss: Loss::BOTH, ..How::default() });
                }
            }
        }
    }
}

#[test]
fn masks_and_biases_broadcast_in_every_dimension() {
    for target in targets() {
        let [b, h, q, k] = [2, 2, 70, 140];
        for n in 0..16 {
            let shape = [(b, 1), (h, 2), (q, 4), (k, 8)].map(|(size, bit)| if n & bit == 0 { size } else { 1 });
            let options =
                AttentionOptions { causal: n % 3 == 0, softcap: (n % 4 == 1).then_some(3.0), ..Default::default() };
            let problem = problem([b, h, 1, q, k, 8, 8], Dtype::F32, options);
            let data = Data::random(problem.with_bias(&shape).unwrap(), n);
            check(&data, &target, How::default());
            let data = Data::random(problem.with_mask(&shape).unwrap(), n);
            check(&data, &target, How::default());
            let both = problem.with_mask(&shape).unwrap().with_bias(&[b, h, q, k]).unwrap();
            check(&Data::random(both, n), &target, How { loss: Loss::BOTH, ..How::default() });
        }
    }
}

#[test]
fn half_precision_bias() {
    for target in targets() {
        for dtype in dtypes(&target) {
            for shape in [[2, 2, 70, 70], [1, 2, 1, 70], [1, 1, 70, 1]] {
                let problem = problem([2, 2, 2, 70, 70, 16, 16], dtype, AttentionOptions::default());
                let data = Data::random(problem.with_bias(&shape).unwrap(), 5);
                check(&data, &target, How::default());
            }
        }
    }
}

#[test]
fn sequences_at_the_edges_of_tiles() {
    for target in targets() {
        for (n, seq) in [1, 3, 17, 63, 64, 65, 127, 128, 129, 257].into_iter().enumerate() {
            for (seq_q, seq_k) in [(seq, seq), (1, seq), (seq, 5)] {
                let options = AttentionOptions { causal: seq_q == seq_k, ..Default::default() };
                let data = Data::random(problem([1, 2, 1, seq_q, seq_k, 8, 8], Dtype::F32, options), n as u64);
                check(&data, &target, How::default());
            }
        }
    }
}

#[test]
fn each_subset_of_inputs_tracked() {
    for target in targets() {
        let options = AttentionOptions { causal: true, softcap: Some(5.0), ..Default::default() };
        let problem = problem([2, 4, 2, 33, 47, 8, 12], Dtype::F32, options);
        let data = Data::random(problem.with_bias(&[1, 4, 33, 47]).unwrap(), 3);
        for tracked in Tracked::subsets() {
            for checkpointing in [false, true] {
                check(&data, &target, How { tracked, checkpointing, ..How::default() });
            }
        }
        // Without a bias, when the node has three parents.
        let data = Data::random(problem, 4);
        for tracked in Tracked::subsets().filter(|tracked| !tracked.bias) {
            check(&data, &target, How { tracked, loss: Loss::BOTH, ..How::default() });
        }
    }
}

#[test]
fn slopes_sinks_and_dropout() {
    for target in targets() {
        for dtype in dtypes(&target) {
            let dropout = AttentionOptions { dropout: 0.2, dropout_seed: Some(1 << 40 | 3), ..Default::default() };
            let options = [
                AttentionOptions { causal: true, ..dropout },
                AttentionOptions { causal: true, ..Default::default() },
                AttentionOptions { softcap: Some(2.0), window_left: Some(30), ..dropout },
            ];
            let few = if target.name == "flex" { 3 } else { 1 };
            for (n, options) in options.into_iter().take(few).enumerate() {
                let problem = problem([2, 4, 2, 65, 130, 16, 24], dtype, options);
                let sloped = problem.with_alibi_slopes(&[2, 4]).unwrap();
                for problem in [problem, problem.with_sinks(&[4]).unwrap(), sloped, sloped.with_sinks(&[4]).unwrap()] {
                    check(&Data::random(problem, n as u64), &target, How { loss: Loss::BOTH, ..How::default() });
                }
            }
        }
        // The first rows see only their sinks.
        let few = problem([1, 4, 2, 90, 40, 8, 8], Dtype::F32, AttentionOptions { causal: true, ..Default::default() });
        let few = few.with_sinks(&[4]).unwrap().with_alibi_slopes(&[1, 4]).unwrap();
        check(&Data::random(few, 7), &target, How { loss: Loss::BOTH, ..How::default() });
        // Each subset of tracked tensors, with a bias.
        let data = Data::random(few.with_bias(&[1, 4, 90, 40]).unwrap(), 8);
        for tracked in Tracked::subsets_of_extras() {
            check(&data, &target, How { tracked, loss: Loss::BOTH, ..How::default() });
        }
    }
}

/// Heads of a group that share a tile, and keys that are split: options that differ by head, and those that hide keys.
#[test]
fn few_queries_over_many_keys() {
    for target in targets() {
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let dropout = AttentionOptions { dropout: 0.2, dropout_seed: Some(1 << 40 | 3), ..causal };
        let capped = AttentionOptions { window_left: Some(700), softcap: Some(2.0), ..causal };
        let functions = AttentionOptions {
            score_mod: Some(ScoreFn::of::<Sloped>()),
            mask_mod: Some(MaskFn::of::<Strided>()),
            ..causal
        };
        let plain = |options| problem([2, 6, 2, 3, 1100, 16, 24], Dtype::F32, options);
        let sloped = plain(causal).with_sinks(&[6]).unwrap().with_alibi_slopes(&[2, 6]).unwrap();
        let problems = [
            sloped,
            plain(functions).with_score_tensors(&[&[1, 6, 1, 1]]).unwrap(),
            plain(dropout).with_mask(&[2, 6, 3, 1100]).unwrap(),
            plain(capped).with_bias(&[2, 6, 3, 1100]).unwrap().with_mask(&[1, 6, 1, 1100]).unwrap(),
            sloped.with_seq_lens_q(&[2]).unwrap().with_seq_lens_k(&[2]).unwrap(),
            sloped.with_cu_seqlens(&[4], &[4]).unwrap(),
        ];
        let few = if target.name == "flex" { problems.len() } else { 1 };
        for (n, problem) in problems.into_iter().take(few).enumerate() {
            check_near(&Data::random(problem, n as u64), &target, How { loss: Loss::BOTH, ..How::default() });
        }
        // One query of each head of a group that fills a tile, and of one that does not fit.
        for (heads, dtype) in
            [64, 70].into_iter().flat_map(|heads| dtypes(&target).into_iter().map(move |of| (heads, of)))
        {
            let problem = problem([1, heads, 1, 1, 600, 8, 16], dtype, causal).with_sinks(&[heads]).unwrap();
            check_near(&Data::random(problem, 7), &target, How { loss: Loss::BOTH, ..How::default() });
        }
    }
}

/// Sequence lengths as integers of any width.
#[test]
fn sequence_lengths() {
    for target in targets() {
        let few = if target.name == "flex" { 9 } else { 2 };
        for (n, options) in all_options().into_iter().take(few).enumerate() {
            let problem = problem([3, 4, 2, 70, 140, 16, 24], Dtype::F32, options);
            let ragged = problem.with_seq_lens_q(&[3]).unwrap().with_seq_lens_k(&[3]).unwrap();
            for problem in [ragged, problem.with_seq_lens_k(&[3]).unwrap().with_sinks(&[4]).unwrap()] {
                check_near(&Data::random(problem, n as u64), &target, How { loss: Loss::BOTH, ..How::default() });
            }
        }
        let x = Tensor::<4>::random([2, 1, 5, 8], Distribution::Default, &target.device);
        let out = |lens: Tensor<1, Int>| {
            let options = FlashAttentionOptions::new().with_seq_lens_k(lens);
            read(flash_attention(x.clone(), x.clone(), x.clone(), &options))
        };
        let lens = Tensor::<1, Int>::from_data([2, 4], &target.device);
        let wide = lens.clone().cast(IntDType::I64);
        if target.name == "flex" {
            assert_eq!(out(lens.clone()), out(wide));
        }
        assert_ne!(out(lens), out(Tensor::from_data([5, 5], &target.device)));
    }
}

/// Packed sequences that begin and end anywhere.
#[test]
fn packed_sequences() {
    for target in targets() {
        let few = if target.name == "flex" { 9 } else { 2 };
        for (n, options) in all_options().into_iter().take(few).enumerate() {
            let of = |batch| problem([batch, 4, 2, 70, 140, 16, 24], Dtype::F32, options);
            let (one, rows) = (of(1).with_cu_seqlens(&[6], &[6]).unwrap(), of(3).with_cu_seqlens(&[9], &[9]).unwrap());
            for problem in [one, rows.with_sinks(&[4]).unwrap().with_alibi_slopes(&[1, 4]).unwrap()] {
                check_near(&Data::random(problem, n as u64), &target, How { loss: Loss::BOTH, ..How::default() });
            }
        }
        // The same documents as `[total, heads, head_dim]`, and as one batch.
        let x = Tensor::<3>::random([12, 2, 8], Distribution::Default, &target.device);
        let rows = x.clone().reshape([2, 6, 2, 8]).swap_dims(1, 2);
        let ends = Tensor::<1, Int>::from_data([0, 4, 6, 12], &target.device);
        let causal = FlashAttentionOptions::new().with_causal(true);
        let functions = causal.clone().with_score_mod(ScoreFn::of::<Relative>(), []);
        let functions = functions.with_mask_mod(MaskFn::of::<Strided>(), []);
        let [of_causal, of_functions] = [causal, functions].map(|options| {
            let packed = flash_attention_varlen(x.clone(), x.clone(), x.clone(), ends.clone(), ends.clone(), &options);
            let options = options.with_cu_seqlens_q(ends.clone()).with_cu_seqlens_k(ends.clone());
            let out = flash_attention(rows.clone(), rows.clone(), rows.clone(), &options).swap_dims(1, 2);
            let packed = read(packed.reshape([2, 6, 2, 8]));
            assert_eq!(packed, read(out));
            packed
        });
        assert_ne!(of_causal, of_functions);
    }
}

/// Every pair of values of any two options. All 500 problems run on Flex. Other devices run some of them, because kernels compile slowly
/// and have their own tests.
#[test]
fn every_pair_of_options() {
    for target in targets() {
        let supported = dtypes(&target);
        for pair in reference::pairs(500).into_iter().step_by(if target.name == "flex" { 1 } else { 60 }) {
            if !supported.contains(&pair.problem.dtype) {
                continue;
            }
            let loss = if pair.dlse { Loss::BOTH } else { Loss::OUT };
            let layout = [Layout::Contiguous, Layout::HeadsInner, Layout::Transposed][pair.layout];
            let mut data = Data::random(pair.problem, pair.problem.options.dropout_seed.unwrap_or(1) >> 33);
            data.tensors.block_mask = pair.block_states;
            check_near(&data, &target, How { loss, layout, ..How::default() });
        }
    }
}

#[test]
fn empty_and_fully_masked_problems() {
    for target in targets() {
        for sizes in [[1, 2, 2, 4, 0, 8, 8], [1, 2, 2, 0, 4, 8, 8], [0, 2, 2, 4, 4, 8, 8], [1, 1, 1, 0, 0, 8, 8]] {
            let data = Data::random(problem(sizes, Dtype::F32, AttentionOptions::default()), 0);
            let oracle = data.oracle(How::default());
            assert_eq!(flash(&data, &target, How::default()), oracle, "{sizes:?} on {}", target.name);
        }
        // All pairs are hidden, by the mask and by a bias of −∞.
        let problem = problem([1, 2, 1, 70, 70, 8, 8], Dtype::F32, AttentionOptions::default());
        let mut data = Data::random(problem.with_mask(&[1, 1, 1, 1]).unwrap(), 1);
        data.tensors.mask = Some(vec![true]);
        let how = How { loss: Loss::BOTH, ..How::default() };
        let results = flash(&data, &target, how);
        let mut oracle = data.oracle(how);
        assert_eq!(results, oracle);
        let mut data = Data::random(problem.with_bias(&[1, 1, 1, 1]).unwrap(), 1);
        data.tensors.bias = Some(vec![f64::NEG_INFINITY]);
        oracle.dbias = Some(vec![0.0]);
        assert_eq!(flash(&data, &target, how), oracle);
    }
}

#[test]
fn hidden_nans_do_not_leak() {
    for target in targets() {
        let problem = problem([1, 2, 1, 70, 140, 8, 8], Dtype::F32, AttentionOptions::default());
        let clean = {
            let mut data = Data::random(problem.with_mask(&[1, 1, 70, 140]).unwrap(), 2);
            // Key 100 is hidden from all queries, and query 3 sees no key.
            let hidden = |n: usize| n % 140 == 100 || n / 140 == 3;
            data.tensors.mask.as_mut().unwrap().iter_mut().enumerate().for_each(|(n, mask)| *mask |= hidden(n));
            data
        };
        let mut dirty = clean.clone();
        for (values, row) in
            [(&mut dirty.tensors.k, 100), (&mut dirty.tensors.v, 100), (&mut dirty.tensors.q, 3), (&mut dirty.dout, 3)]
        {
            values[row * 8] = f64::NAN;
            values[row * 8 + 1] = f64::INFINITY;
        }
        let how = How { loss: Loss::BOTH, ..How::default() };
        if target.kernel == "mma" {
            // Kernels of matrix products recompute rows that a NaN has reached, in another order of summation.
            check_near(&dirty, &target, how);
        } else {
            assert_eq!(flash(&dirty, &target, how), flash(&clean, &target, how), "on {}", target.name);
        }
    }
}
