//! Every option, gradient and entry point, compared with the oracle and with the same mathematics composed of Burn's operations. Runs on
//! Flex without a GPU, and on any device that `FLASH_TEST_DEVICE` names.

mod common;

use burn::tensor::ops::{AttentionModuleOptions, CausalAlignment};
use burn::tensor::{Device, Distribution, Int, IntDType, Tensor, Tolerance};
use burn_flash_attention::{
    BlockMask, FlashAttentionOptions, flash_attention, flash_attention_varlen, flash_attention_with_lse, plan,
};
use common::*;
use flash_attention_kernels::mods::{
    And, Causal, CausalDocument, Dilated, Document, MaskFn, PrefixLm, ScoreFn, SlidingGlobal,
};
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype};
use flash_attention_reference as reference;
use flash_attention_reference::mods::{Bent, Relative, Sloped, Strided};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Element types that a device computes in.
fn dtypes(target: &Target) -> Vec<Dtype> {
    let supported = |dtype: &Dtype| {
        let q = || Tensor::<4>::zeros([1, 1, 1, 1], (&target.device, burn_dtype(*dtype)));
        target.device.supports_dtype(burn_dtype(*dtype))
            && plan(&q(), &q(), &q(), &FlashAttentionOptions::new()).is_ok()
    };
    DTYPES.into_iter().filter(supported).collect()
}

fn all_options() -> Vec<AttentionOptions> {
    let none = AttentionOptions::default();
    vec![
        none,
        AttentionOptions { causal: true, ..none },
        AttentionOptions { causal: true, alignment: Alignment::TopLeft, ..none },
        AttentionOptions { window_left: Some(9), ..none },
        AttentionOptions { window_right: Some(3), alignment: Alignment::TopLeft, ..none },
        AttentionOptions { window_left: Some(20), window_right: Some(0), ..none },
        AttentionOptions { causal: true, window_left: Some(70), ..none },
        AttentionOptions { softmax_scale: Some(0.5), softcap: Some(2.0), ..none },
        AttentionOptions { softcap: Some(1.0), causal: true, ..none },
    ]
}

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

#[test]
fn functions_of_scores_and_masks() {
    for target in targets() {
        let functions = [
            (Some(ScoreFn::of::<Relative>()), Some(MaskFn::of::<Strided>())),
            (Some(ScoreFn::of::<Sloped>()), None),
            (Some(ScoreFn::of::<Bent>()), None),
            (None, Some(MaskFn::of::<Document>())),
            (Some(ScoreFn::of::<Bent>()), Some(MaskFn::of::<Document>())),
        ];
        // On other devices only the first and the last, because the kernels have their own tests.
        let (few, step) = if target.name == "flex" { (3, 1) } else { (1, functions.len() - 1) };
        for dtype in dtypes(&target).into_iter().take(few) {
            for (n, (score_mod, mask_mod)) in functions.into_iter().enumerate().step_by(step) {
                let options = AttentionOptions { score_mod, mask_mod, ..all_options()[[0, 1, 8, 5, 7][n]] };
                for (sq, sk) in [(65, 130), (130, 65)].into_iter().take(few) {
                    let [a, b] = [&[1, 4, 1, sk][..], &[2, 1, sq, 1]];
                    let of_score = match score_mod {
                        Some(function) if function == ScoreFn::of::<Sloped>() => vec![a],
                        Some(function) if function == ScoreFn::of::<Bent>() => vec![a, b],
                        _ => vec![],
                    };
                    let documents = [&[2, 1, sq, 1][..], &[1, 1, 1, sk]];
                    let of_mask = if mask_mod == Some(MaskFn::of::<Document>()) { &documents[..] } else { &[] };
                    let problem = problem([2, 4, 2, sq, sk, 16, 24], dtype, options);
                    let problem = problem.with_score_tensors(&of_score).unwrap().with_mask_tensors(of_mask).unwrap();
                    check(&Data::random(problem, n as u64), &target, How { loss: Loss::BOTH, ..How::default() });
                }
            }
        }
    }
}

/// Tensors of functions in each shape that broadcasts, strided, and with each subset of them tracked.
#[test]
fn tensors_of_functions() {
    for target in targets() {
        let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Bent>()), ..Default::default() };
        let [b, h, q, k] = [2, 2, 70, 140];
        let few = if target.name == "flex" { 16 } else { 3 };
        for n in 0..few {
            let shape = [(b, 1), (h, 2), (q, 4), (k, 8)].map(|(size, bit)| if n & bit == 0 { size } else { 1 });
            let problem = problem([b, h, 1, q, k, 8, 8], Dtype::F32, options);
            let data = Data::random(problem.with_score_tensors(&[&shape, &[b, 1, q, k]]).unwrap(), n as u64);
            let layout = [Layout::Contiguous, Layout::HeadsInner, Layout::Transposed, Layout::Offset][n % 4];
            check(&data, &target, How { layout, ..How::default() });
        }
        let problem = problem([2, 4, 2, 33, 47, 8, 12], Dtype::F32, options);
        let problem = problem.with_score_tensors(&[&[1, 4, 1, 1], &[2, 1, 1, 47]]).unwrap();
        let data = Data::random(problem.with_bias(&[1, 4, 33, 47]).unwrap(), 3);
        for tracked in Tracked::subsets_of_tensors() {
            for checkpointing in [false, true] {
                check(&data, &target, How { tracked, checkpointing, ..How::default() });
            }
        }
        // With all tensors that can be tracked.
        let all = data.problem.with_alibi_slopes(&[2, 4]).unwrap().with_sinks(&[4]).unwrap();
        check(&Data::random(all, 4), &target, How { loss: Loss::BOTH, ..How::default() });
    }
}

/// A causal mask function equals the option `causal`, and NaN that it hides does not leak.
#[test]
fn a_causal_function_equals_the_option() {
    for target in targets() {
        let sizes = [2, 4, 2, 70, 140, 16, 24];
        let function = AttentionOptions { mask_mod: Some(MaskFn::of::<Causal>()), ..Default::default() };
        let option = AttentionOptions { causal: true, alignment: Alignment::TopLeft, ..Default::default() };
        let of = |options| {
            let mut data = Data::random(problem(sizes, Dtype::F32, options), 2);
            // Hidden from all queries, of which there are 70.
            data.k[100 * 16] = f64::NAN;
            data.v[100 * 24] = f64::NAN;
            flash(&data, &target, How { loss: Loss::BOTH, ..How::default() })
        };
        let (function, option) = (of(function), of(option));
        for (what, found, expected) in [
            ("out", Some(&function.out), Some(&option.out)),
            ("lse", Some(&function.lse), Some(&option.lse)),
            ("dq", function.dq.as_ref(), option.dq.as_ref()),
            ("dk", function.dk.as_ref(), option.dk.as_ref()),
            ("dv", function.dv.as_ref(), option.dv.as_ref()),
        ] {
            for (x, y) in found.into_iter().flatten().zip(expected.into_iter().flatten()) {
                assert!((x - y).abs() < 1e-4, "{what} on {}: {x} with the function, {y} with the option", target.name);
            }
        }
    }
}

#[test]
fn block_masks() {
    for target in targets() {
        let of_mask = [None, Some([2, 1, 300, 290]), Some([1, 4, 1, 290])];
        let functions = [None, Some(MaskFn::of::<Strided>()), Some(MaskFn::of::<Document>())];
        let states = [([1, 1], [128, 128]), ([2, 4], [256, 128]), ([2, 1], [128, 256]), ([1, 4], [384, 384])];
        // On other devices only a few, because the kernels have their own tests.
        let (few, step) = if target.name == "flex" { (3, 1) } else { (1, 7) };
        for dtype in dtypes(&target).into_iter().take(few) {
            for n in (0..9).step_by(step) {
                let options = AttentionOptions { mask_mod: functions[n % 3], ..all_options()[n] };
                let mut problem = problem([2, 4, 2, 300, 290, 16, 24], dtype, options);
                problem.mask = of_mask[n / 3];
                problem.mask_tensors = [[None, None], [Some([2, 1, 300, 1]), Some([1, 1, 1, 290])]][n % 3 / 2];
                let ([batch, heads], [block_q, block_k]) = states[n % 4];
                let shape = [batch, heads, 300usize.div_ceil(block_q), 290usize.div_ceil(block_k)];
                let problem = problem.with_block_mask(&shape, block_q, block_k).unwrap();
                let mut data = Data::random(problem, n as u64);
                // At least one block of each state, if there are enough blocks.
                data.block_states.as_mut().unwrap().iter_mut().zip([1, 2, 0]).for_each(|(state, known)| *state = known);
                check(&data, &target, How { loss: Loss::BOTH, ..How::default() });
                // With gradients that are summed over tiles of several blocks, and with sequence lengths.
                let summed = problem.with_bias(&[1, 4, 1, 290]).unwrap().with_alibi_slopes(&[2, 4]).unwrap();
                let ragged = summed.with_sinks(&[4]).unwrap().with_seq_lens_k(&[2]).unwrap();
                for problem in [summed, ragged] {
                    check_near(&Data::random(problem, n as u64), &target, How { loss: Loss::BOTH, ..How::default() });
                }
            }
        }
    }
}

/// Options with each ready-made mask function and its tensors, for two batches.
fn ready_made(device: &Device, [seq_q, seq_k]: [usize; 2]) -> Vec<FlashAttentionOptions> {
    let numbers = |numbers: [f32; 2]| Tensor::<1>::from_data(numbers, device).reshape([2, 1, 1, 1]);
    // Documents with ends at any position.
    let documents = |seq: usize, ends: [[usize; 3]; 2]| -> Vec<f64> {
        let of = |ends: [usize; 3]| (0..seq).map(move |n| ends.iter().filter(|end| n >= **end).count() as f64);
        ends.into_iter().flat_map(of).collect()
    };
    let ends = [[100, 128, 290], [64, 256, 270]];
    let of_q = tensor(&documents(seq_q, ends), [2, 1, seq_q, 1], Dtype::F32, device);
    let of_k = tensor(&documents(seq_k, ends), [2, 1, 1, seq_k], Dtype::F32, device);
    let of = |function, tensors: &[Tensor<4>]| FlashAttentionOptions::new().with_mask_mod(function, tensors.to_vec());
    vec![
        of(MaskFn::of::<Causal>(), &[]),
        of(MaskFn::of::<Document>(), &[of_q.clone(), of_k.clone()]),
        of(MaskFn::of::<CausalDocument>(), &[of_q, of_k]),
        of(MaskFn::of::<PrefixLm>(), &[numbers([150.0, 0.0])]),
        of(MaskFn::of::<SlidingGlobal>(), &[numbers([30.0, 64.0]), numbers([5.0, 0.0])]),
        of(MaskFn::of::<Dilated>(), &[numbers([1.0, 7.0]), numbers([100.0, 9.0])]),
        of(MaskFn::of::<And<Causal, Dilated>>(), &[numbers([3.0, 2.0]), numbers([20.0, 90.0])]),
    ]
}

/// Block states that the device computes from functions, masks or both equal those computed pair by pair.
#[test]
fn block_states_follow_from_the_pairs() {
    for target in targets() {
        let seq = [300, 390];
        let hidden: Vec<bool> = reference::normal(4 * seq[1], 3).into_iter().map(|x| x > 1.5).collect();
        // The second head's mask hides all but one block of keys.
        let hidden: Vec<bool> =
            hidden.iter().enumerate().map(|(n, x)| *x || n / seq[1] % 2 == 1 && n % seq[1] >= 128).collect();
        let mask = mask_tensor(&hidden, [2, 2, 1, seq[1]], &target.device);
        let mut all: Vec<_> = ready_made(&target.device, seq);
        all.push(FlashAttentionOptions::new());
        let with_mask: Vec<_> = all.iter().map(|options| options.clone().with_mask(mask.clone())).collect();
        let mut found_of_each = [0; 3];
        for (options, block) in
            all.into_iter().chain(with_mask).zip([[128, 128], [256, 128], [128, 256]].into_iter().cycle())
        {
            let heads = if options.mask.is_some() { 2 } else { 1 };
            let states = BlockMask::of(&options, [2, heads], seq, block, &target.device).states;
            let shape = [2, heads, 300usize.div_ceil(block[0]), 390usize.div_ceil(block[1])];
            assert_eq!(states.dims(), shape);
            let problem = problem([2, heads, 1, seq[0], seq[1], 1, 1], Dtype::F32, Default::default());
            let shown: Vec<bool> = match options.mask_mod {
                Some(function) => {
                    let values = tables(&options.mask_tensors, &problem);
                    pairs(&problem).zip(values).map(|(pair, values)| function.sees(pair, values)).collect()
                }
                None => vec![true; 2 * heads * seq[0] * seq[1]],
            };
            let mut counts = vec![[0; 2]; shape.iter().product()];
            for (pair, shown) in pairs(&problem).zip(shown) {
                let [b, h, i, j] = [pair.batch, pair.head, pair.i, pair.j].map(|n| n as usize);
                let seen = shown && (options.mask.is_none() || !hidden[(b * 2 + h) * seq[1] + j]);
                counts[((b * heads + h) * shape[2] + i / block[0]) * shape[3] + j / block[1]][usize::from(seen)] += 1;
            }
            let expected: Vec<i32> = counts
                .iter()
                .map(|of| match of {
                    [_, 0] => 0,
                    [0, _] => 2,
                    _ => 1,
                })
                .collect();
            let found = states.into_data().try_to_vec::<i32>().unwrap();
            assert_eq!(found, expected, "{:?} on {}", options.mask_mod, target.name);
            expected.iter().for_each(|state| found_of_each[*state as usize] += 1);
        }
        assert!(found_of_each.iter().all(|found| *found > 20), "{found_of_each:?}");
    }
}

/// Skipping blocks does not change results. On Flex the bits are the same, because hidden pairs add 0.
#[test]
fn a_block_mask_of_options_changes_nothing() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = |heads, seq, dim, n| {
            let values = reference::normal(2 * heads * seq * dim, n);
            tensor(&values, [2, heads, seq, dim], Dtype::F32, &device).require_grad()
        };
        let (q, k, v) = (random(4, 300, 16, 1), random(2, 300, 16, 2), random(2, 300, 24, 3));
        let few = if target.name == "flex" { 7 } else { 2 };
        for options in ready_made(&device, [300, 300]).into_iter().take(few) {
            let blocks = BlockMask::of(&options, [2, 1], [300, 300], [128, 128], &device);
            let states = blocks.states.clone().into_data().try_to_vec::<i32>().unwrap();
            assert!(states.iter().any(|state| *state != 1), "no block is empty or full with {:?}", options.mask_mod);
            let [sparse, dense] = [options.clone().with_block_mask(blocks), options.clone()].map(|options| {
                let (out, lse) = flash_attention_with_lse(q.clone(), k.clone(), v.clone(), &options);
                let seen = lse.clone().detach().lower_elem(f32::MIN).bool_not();
                let loss = (out.clone() * 0.5).tanh().sum() + (lse.clone() * 0.1).mask_fill(seen.bool_not(), 0.0).sum();
                let gradients = loss.backward();
                let of = |x: &Tensor<4>| read(x.grad(&gradients).unwrap());
                [read(out.detach()), read(lse.detach()), of(&q), of(&k), of(&v)]
            });
            if target.name == "flex" {
                assert_eq!(sparse, dense, "{:?}", options.mask_mod);
            }
            for (x, y) in sparse.iter().flatten().zip(dense.iter().flatten()) {
                assert!(
                    x == y || (x - y).abs() < 1e-4 * (1.0 + y.abs()),
                    "{x} with blocks, {y} without: {:?}",
                    options.mask_mod
                );
            }
        }
    }
}

/// Block states as integers of any width, and strided.
#[test]
fn states_of_any_kind() {
    for target in targets() {
        let x = Tensor::<4>::random([1, 1, 300, 8], Distribution::Default, &target.device);
        let states = Tensor::<4, Int>::from_data([[[[2, 1, 0], [0, 2, 0], [7, 0, 1]]]], &target.device);
        let out = |states: Tensor<4, Int>| {
            let options = FlashAttentionOptions::new().with_causal(true);
            let options = options.with_block_mask(BlockMask::new(states, 128, 128));
            read(flash_attention(x.clone(), x.clone(), x.clone(), &options))
        };
        let turned = states.clone().swap_dims(2, 3).mul_scalar(1).swap_dims(2, 3);
        assert_eq!(out(states.clone()), out(turned));
        assert_ne!(out(states.clone()), out(states.clone().swap_dims(2, 3)));
        if target.name == "flex" {
            assert_eq!(out(states.clone()), out(states.cast(IntDType::I64)));
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
            data.block_states = pair.block_states;
            check_near(&data, &target, How { loss, layout, ..How::default() });
        }
    }
}

/// Without a seed in the options, each call takes a seed from Burn's generator, and the backward drops the same pairs as the forward.
#[test]
fn dropout_draws_from_burns_generator() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = |n| Tensor::<4>::random([2, 2, n, 16], Distribution::Default, &device);
        let (q, k, v, dout) = (random(70), random(90), random(90).require_grad(), random(70));
        let options = FlashAttentionOptions::new().with_dropout(0.3);
        let run = || flash_attention(q.clone(), k.clone(), v.clone(), &options);
        let (first, second) = (run(), run());
        let differ = (first.clone() - second).abs().sum().into_scalar::<f32>();
        assert!(differ > 1.0, "{}: two calls dropped the same pairs", target.name);
        // The output is linear in v.
        let gradients = (first.clone() * dout.clone()).sum().backward();
        let of_values = (v.grad(&gradients).unwrap() * v.clone().inner()).sum().into_scalar::<f32>();
        let of_output = (first * dout).sum().into_scalar::<f32>();
        assert!(
            (of_values - of_output).abs() < 1e-3 * (1.0 + of_output.abs()),
            "⟨v, dv⟩ is {of_values}, ⟨out, dout⟩ is {of_output}"
        );
    }
}

#[test]
fn lse_alone_out_alone_and_both() {
    for target in targets() {
        for dtype in dtypes(&target) {
            let options = AttentionOptions { causal: true, ..Default::default() };
            // The first rows see no key, so their lse is −∞.
            let data = Data::random(problem([1, 2, 2, 70, 50, 16, 16], dtype, options), 6);
            for loss in [Loss::OUT, Loss::LSE, Loss::BOTH] {
                for checkpointing in [false, true] {
                    check(&data, &target, How { loss, checkpointing, ..How::default() });
                }
            }
        }
    }
}

#[test]
fn strided_inputs_are_taken_as_they_are() {
    for target in targets() {
        for layout in [Layout::HeadsInner, Layout::Transposed, Layout::Offset] {
            let problem = problem([2, 4, 2, 65, 66, 16, 16], Dtype::F32, AttentionOptions::default());
            let data = Data::random(problem.with_bias(&[2, 1, 65, 66]).unwrap(), 7);
            check(&data, &target, How { layout, loss: Loss::BOTH, ..How::default() });
        }
    }
}

#[test]
fn expanded_flipped_and_expanded_gradients() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, &device);
        let q = random([2, 4, 9, 8]).flip([2]);
        let k = random([1, 1, 9, 8]).expand([2, 4, 9, 8]);
        let v = random([2, 4, 1, 8]).expand([2, 4, 9, 8]);
        let (q, k, v) = (q.detach().require_grad(), k.detach().require_grad(), v.detach().require_grad());
        let run = |ours: bool| {
            let options = AttentionModuleOptions::default();
            let out = if ours {
                burn_flash_attention::attention(q.clone(), k.clone(), v.clone(), None, None, options)
            } else {
                burn::tensor::module::attention_fallback(q.clone(), k.clone(), v.clone(), None, None, options)
            };
            // The gradient of a sum is an expanded number.
            let gradients = out.clone().sum().backward();
            [out.detach(), q.grad(&gradients).unwrap(), k.grad(&gradients).unwrap(), v.grad(&gradients).unwrap()]
        };
        for (ours, burns) in run(true).into_iter().zip(run(false)) {
            ours.into_data().assert_approx_eq::<f32>(&burns.into_data(), burns_own(&target));
        }
    }
}

#[test]
fn drop_in_for_burns_attention() {
    for target in targets() {
        let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &target.device);
        let (q, k, v) = (random([2, 4, 20, 16]), random([2, 2, 30, 16]), random([2, 2, 30, 8]));
        // All keys of each batch's first row are hidden.
        let mask = random([2, 1, 20, 30]).greater_elem(0.3);
        let first = Tensor::<4>::ones([2, 1, 1, 30], &target.device).greater_elem(0.0);
        let mask = mask.slice_assign([0..2, 0..1, 0..1, 0..30], first).expand([2, 4, 20, 30]);
        let bias = random([1, 4, 20, 30]).expand([2, 4, 20, 30]);
        for n in 0..32 {
            let options = AttentionModuleOptions {
                scale: (n & 1 != 0).then_some(0.3),
                softcap: (n & 2 != 0).then_some(4.0),
                is_causal: n & 4 != 0,
                causal_alignment: if n & 8 != 0 { CausalAlignment::TopLeft } else { CausalAlignment::BottomRight },
            };
            let (mask, bias) = ((n & 16 != 0).then(|| mask.clone()), (n & 1 != 0).then(|| bias.clone()));
            let ours =
                burn_flash_attention::attention(q.clone(), k.clone(), v.clone(), mask.clone(), bias.clone(), options);
            let burns = burn::tensor::module::attention(q.clone(), k.clone(), v.clone(), mask, bias, options);
            ours.into_data().assert_approx_eq::<f32>(&burns.into_data(), burns_own(&target));
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
        data.mask = Some(vec![true]);
        let how = How { loss: Loss::BOTH, ..How::default() };
        let results = flash(&data, &target, how);
        let mut oracle = data.oracle(how);
        assert_eq!(results, oracle);
        let mut data = Data::random(problem.with_bias(&[1, 1, 1, 1]).unwrap(), 1);
        data.bias = Some(vec![f64::NEG_INFINITY]);
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
            data.mask.as_mut().unwrap().iter_mut().enumerate().for_each(|(n, mask)| *mask |= hidden(n));
            data
        };
        let mut dirty = clean.clone();
        for (values, row) in [(&mut dirty.k, 100), (&mut dirty.v, 100), (&mut dirty.q, 3), (&mut dirty.dout, 3)] {
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

#[test]
fn the_same_bits_every_time() {
    for target in targets() {
        let problem = problem([2, 4, 2, 130, 130, 16, 16], Dtype::F32, AttentionOptions::default());
        let data = Data::random(problem.with_bias(&[1, 4, 130, 1]).unwrap(), 8);
        let how = How { loss: Loss::BOTH, ..How::default() };
        let first = flash(&data, &target, how);
        for _ in 0..3 {
            assert_eq!(flash(&data, &target, how), first, "on {}", target.name);
        }
    }
}

#[test]
fn a_head_alone_is_bitwise_the_one_in_the_batch() {
    for target in targets() {
        let options = AttentionOptions { causal: true, ..Default::default() };
        let whole = Data::random(problem([3, 4, 4, 70, 140, 8, 8], Dtype::F32, options), 9);
        let all = flash(&whole, &target, How::default());
        let (q_len, k_len) = (70 * 8, 140 * 8);
        for head in [0, 5, 11] {
            let (q, k) = (head * q_len..(head + 1) * q_len, head * k_len..(head + 1) * k_len);
            let mut one = Data::random(problem([1, 1, 1, 70, 140, 8, 8], Dtype::F32, options), 0);
            one.q = whole.q[q.clone()].to_vec();
            one.k = whole.k[k.clone()].to_vec();
            one.v = whole.v[k.clone()].to_vec();
            one.dout = whole.dout[q.clone()].to_vec();
            let alone = flash(&one, &target, How::default());
            assert_eq!(alone.out, all.out[q.clone()]);
            assert_eq!(alone.dq.unwrap(), all.dq.as_ref().unwrap()[q]);
            assert_eq!(alone.dk.unwrap(), all.dk.as_ref().unwrap()[k.clone()]);
            assert_eq!(alone.dv.unwrap(), all.dv.as_ref().unwrap()[k]);
        }
    }
}

/// Gradients of a small graph with memory-bound operations before and after attention, which checkpointing recomputes.
fn graph(device: &Device, detach: &str) -> Option<[Vec<f64>; 2]> {
    let x = tensor(&flash_attention_reference::normal(2 * 9 * 8, 1), [1, 2, 9, 8], Dtype::F32, device).require_grad();
    let w = tensor(&flash_attention_reference::normal(2 * 9 * 8, 2), [1, 2, 9, 8], Dtype::F32, device).require_grad();
    let (out, lse) = flash_attention_with_lse(
        x.clone() * 1.5,
        (x.clone() + 0.25).tanh(),
        x.clone() * w.clone(),
        &FlashAttentionOptions::new().with_causal(true),
    );
    let (out, lse) = match detach {
        "out" => (out.detach(), lse),
        "lse" => (out, lse.detach()),
        "both" => (out.detach(), lse.detach()),
        _ => (out, lse),
    };
    let mixed = (out.clone() * 2.0 + 1.0).tanh() * out.clone() + (lse.clone() * 0.5).unsqueeze_dim(3);
    let loss = (mixed.exp() * lse.unsqueeze_dim(3)).sum() + out.sum();
    if !loss.is_require_grad() {
        let gradients = loss.backward();
        return x.grad(&gradients).map(|dx| [read(dx), vec![]]);
    }
    let gradients = loss.backward();
    Some([read(x.grad(&gradients)?), read(w.grad(&gradients)?)])
}

#[test]
fn checkpointing_changes_nothing() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        for detach in ["", "out", "lse"] {
            let plain = graph(&device, detach).unwrap();
            let checkpointed = graph(&device.clone().gradient_checkpointing(), detach).unwrap();
            for (plain, checkpointed) in plain.iter().zip(&checkpointed) {
                // Relative to the largest gradient, because the loss is an exponential of the output.
                let largest = plain.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
                let far = plain.iter().zip(checkpointed).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / largest;
                assert!(
                    far < 1e-5,
                    "gradients with and without checkpointing differ by {far} with {detach} detached on {}",
                    target.name
                );
            }
        }
    }
}

#[test]
fn a_graph_is_used_once_like_any_of_burns() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let q = Tensor::<4>::random([1, 1, 5, 4], Distribution::Default, &device).require_grad();
        let options = FlashAttentionOptions::new();
        // Two losses that each use both outputs, and one backward of their sum.
        let (out, lse) = flash_attention_with_lse(q.clone(), q.clone(), q.clone(), &options);
        let twice = q.grad(&(out.clone().sum() + out.sum() + lse.clone().sum() + lse.sum()).backward()).unwrap();
        let (out, lse) = flash_attention_with_lse(q.clone(), q.clone(), q.clone(), &options);
        let once = q.grad(&(out.sum() + lse.sum()).backward()).unwrap();
        twice.into_data().assert_approx_eq::<f32>(&(once * 2.0).into_data(), Tolerance::absolute(1e-5));
        // Burn refuses a second backward through the same node.
        let (out, lse) = flash_attention_with_lse(q.clone(), q.clone(), q.clone(), &options);
        out.sum().backward();
        let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lse.sum().backward()));
        assert!(again.is_err());
        // No input is tracked.
        let out = flash_attention(q.clone().detach(), q.clone().detach(), q.detach(), &options);
        assert!(!out.is_require_grad());
    }
}
