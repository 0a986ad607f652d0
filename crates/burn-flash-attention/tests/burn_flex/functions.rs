//! Score functions, mask functions and block masks.

use super::{all_options, dtypes};
use crate::common::*;
use burn::tensor::{Device, Distribution, Int, IntDType, Tensor};
use burn_flash_attention::{BlockMask, FlashAttentionOptions, flash_attention, flash_attention_with_lse};
use flash_attention_kernels::mods::{
    And, Causal, CausalDocument, CausalWindow, Chunked, Dilated, Document, MaskFn, Pair, PrefixLm, ScoreFn,
    SlidingGlobal, Swapped, Values,
};
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype};
use flash_attention_reference as reference;
use flash_attention_reference::mods::{Bent, Relative, Sloped, Strided};

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
            data.tensors.k[100 * 16] = f64::NAN;
            data.tensors.v[100 * 24] = f64::NAN;
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
                data.tensors
                    .block_mask
                    .as_mut()
                    .unwrap()
                    .iter_mut()
                    .zip([1, 2, 0])
                    .for_each(|(state, known)| *state = known);
                check(&data, &target, How { loss: Loss::BOTH, ..How::default() });
                // With gradients that are summed over tiles of several blocks, and with sequence lengths.
                let summed = problem.with_bias(&[1, 4, 1, 290]).unwrap().with_alibi_slopes(&[2, 4]).unwrap();
                let ragged = summed.with_sinks(&[4]).unwrap().with_seq_lens_k(&[2]).unwrap();
                // With packed sequences, which have states of their own and begin within the tiles of the host's loops.
                let mut packed = problem;
                packed.block_mask = None;
                packed = packed.with_cu_seqlens(&[6], &[6]).unwrap();
                let blocks_k = (shape[3] - n % 2).max(1);
                let states = [if batch == 1 { 1 } else { 5 }, shape[1], shape[2], blocks_k];
                packed = packed.with_block_mask(&states, block_q, block_k).and_then(|p| p.with_sinks(&[4])).unwrap();
                for problem in [summed, ragged, packed] {
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
        of(MaskFn::of::<CausalWindow<60>>(), &[]),
        of(MaskFn::of::<Chunked<128>>(), &[]),
        of(MaskFn::of::<And<Causal, Swapped<PrefixLm>>>(), &[numbers([0.0, 0.0]), numbers([150.0, 0.0])]),
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
        let few = if target.name == "flex" { 10 } else { 2 };
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

/// Options with mask functions for packed sequences in two rows of 300 queries and 390 keys.
fn packed_documents(device: &Device) -> Vec<FlashAttentionOptions> {
    let ends = |ends: [i32; 6]| Tensor::<1, Int>::from_data(ends, device);
    let (q, k) = (ends([0, 140, 300, 301, 580, 600]), ends([0, 70, 390, 400, 780, 780]));
    let prefixes: Vec<f64> = (0..600).map(|n| if n < 300 { 90.0 } else { 7.0 }).collect();
    let prefixes = tensor(&prefixes, [2, 1, 300, 1], Dtype::F32, device);
    let of = |function, tensors: &[Tensor<4>]| FlashAttentionOptions::new().with_mask_mod(function, tensors.to_vec());
    let all = [
        of(MaskFn::of::<CausalWindow<60>>(), &[]),
        of(MaskFn::of::<And<Causal, Chunked<128>>>(), &[]),
        of(MaskFn::of::<Strided>(), &[]),
        of(MaskFn::of::<PrefixLm>(), &[prefixes]),
    ];
    all.into_iter().map(|options| options.with_cu_seqlens_q(q.clone()).with_cu_seqlens_k(k.clone())).collect()
}

/// A block mask of packed sequences, made from their mask function, changes no result.
#[test]
fn a_block_mask_of_packed_sequences_changes_nothing() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = |heads, seq, dim, n| {
            let values = reference::normal(2 * heads * seq * dim, n);
            tensor(&values, [2, heads, seq, dim], Dtype::F32, &device).require_grad()
        };
        let (q, k, v) = (random(4, 300, 16, 1), random(2, 390, 16, 2), random(2, 390, 24, 3));
        let few = if target.name == "flex" { 4 } else { 2 };
        for options in packed_documents(&device).into_iter().take(few) {
            let blocks = BlockMask::of(&options, [2, 4], [300, 390], [128, 128], &device);
            assert_eq!(blocks.states.dims(), [5, 4, 3, 4]);
            let states = blocks.states.clone().into_data().try_to_vec::<i32>().unwrap();
            assert!(states.contains(&0) && states.contains(&1), "no block is empty, or none partial");
            let [sparse, dense] = [options.clone().with_block_mask(blocks), options.clone()].map(|options| {
                let out = flash_attention(q.clone(), k.clone(), v.clone(), &options);
                let gradients = (out.clone() * 0.5).tanh().sum().backward();
                let of = |x: &Tensor<4>| read(x.grad(&gradients).unwrap());
                [read(out.detach()), of(&q), of(&k), of(&v)]
            });
            for (x, y) in sparse.iter().flatten().zip(dense.iter().flatten()) {
                assert!((x - y).abs() < 1e-4 * (1.0 + y.abs()), "{x} with blocks, {y} without: {:?}", options.mask_mod);
            }
        }
    }
}

/// Block states of packed sequences equal those computed pair by pair.
#[test]
fn block_states_of_packed_sequences_follow_from_the_pairs() {
    for target in targets() {
        let (ends_q, ends_k) = ([0, 140, 300, 301, 580, 600], [0, 70, 390, 400, 780, 780]);
        for options in packed_documents(&target.device) {
            let states = BlockMask::of(&options, [2, 4], [300, 390], [128, 128], &target.device).states;
            let found = states.into_data().try_to_vec::<i32>().unwrap();
            let function = options.mask_mod.unwrap();
            let expected: Vec<i32> = (0..5 * 4 * 3 * 4)
                .map(|n| {
                    let (s, h, of_q, of_k) = (n / 48, n / 12 % 4, n / 4 % 3, n % 4);
                    let mut counts = [0; 2];
                    for i in (of_q * 128..ends_q[s + 1] - ends_q[s]).take(128) {
                        for j in (of_k * 128..ends_k[s + 1] - ends_k[s]).take(128) {
                            let a = if ends_q[s] + i < 300 { 90.0 } else { 7.0 };
                            let pair = Pair::of(s as u32, h as u32, i as u32, j as u32);
                            counts[usize::from(function.sees(pair, Values { a, b: 0.0 }))] += 1;
                        }
                    }
                    [[0, 2], [0, 1]][usize::from(counts[0] > 0)][usize::from(counts[1] > 0)]
                })
                .collect();
            assert_eq!(found, expected, "{function:?} on {}", target.name);
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
