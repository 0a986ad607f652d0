//! Decoding step by step, compared with attention over the whole sequence.

use crate::common::*;
use crate::sequence::{Run, Step};
use crate::{dtypes, lens_of};
use flash_attention_kernels::mods::{Causal, CausalDocument, MaskFn, ScoreFn};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
use flash_attention_reference::mods::{Bent, Relative, Sloped, Strided};

/// Runs these steps, and compares with the oracle and with composed operations.
fn check_steps(data: &Data, target: &Target, steps: &[Step]) {
    let mut run = Run::new(data, data.problem.seq_k, &target.device);
    steps.iter().for_each(|step| run.step(step));
    assert_eq!(lens_of(&run.cache), run.lens);
    check_found(data, target, &run.results());
}

/// A causal problem of a whole sequence of 41 positions.
pub fn problem_of(heads: [usize; 2], dims: [usize; 2], dtype: Dtype, options: AttentionOptions) -> AttentionProblem {
    let options = AttentionOptions { causal: true, ..options };
    problem([3, heads[0], heads[1], 41, 41, dims[0], dims[1]], dtype, options)
}

/// A prompt, single tokens, and a few tokens at a time.
pub fn even() -> Vec<Step> {
    [17, 1, 1, 1, 3, 1, 16, 1].map(Step::Of).to_vec()
}

/// Prompts of different lengths, one of them empty, single tokens, and as many of three proposed tokens as were accepted.
pub fn uneven() -> Vec<Step> {
    vec![
        Step::Ragged(vec![17, 9, 0]),
        Step::Of(1),
        Step::Of(1),
        Step::Ragged(vec![1, 3, 2]),
        Step::Of(4),
        Step::Ragged(vec![0, 0, 1]),
        Step::Of(1),
    ]
}

/// Problems with each option that has a meaning with a cache.
pub fn all_problems(dtype: Dtype) -> Vec<AttentionProblem> {
    let none = AttentionOptions::default();
    let plain = |options| problem_of([4, 2], [16, 24], dtype, options);
    let whole = [3, 4, 41, 41];
    vec![
        plain(none),
        plain(AttentionOptions { window_left: Some(7), ..none }),
        plain(AttentionOptions { softcap: Some(2.0), softmax_scale: Some(0.5), ..none }),
        plain(none).with_sinks(&[4]).unwrap(),
        plain(none).with_alibi_slopes(&[1, 4]).unwrap().with_sinks(&[4]).unwrap(),
        plain(none).with_alibi_slopes(&[3, 4]).unwrap(),
        plain(none).with_bias(&whole).unwrap(),
        plain(none).with_bias(&[1, 4, 41, 1]).unwrap().with_mask(&[3, 1, 1, 41]).unwrap(),
        plain(none).with_mask(&whole).unwrap(),
        plain(AttentionOptions { score_mod: Some(ScoreFn::of::<Relative>()), ..none }),
        plain(AttentionOptions { score_mod: Some(ScoreFn::of::<Sloped>()), ..none })
            .with_score_tensors(&[&[1, 4, 1, 1]])
            .unwrap(),
        plain(AttentionOptions { score_mod: Some(ScoreFn::of::<Bent>()), ..none })
            .with_score_tensors(&[&[3, 1, 41, 1], &[1, 4, 1, 41]])
            .unwrap(),
        plain(AttentionOptions { mask_mod: Some(MaskFn::of::<Strided>()), ..none }),
        // Causality as a function: it needs the position of a query among the keys.
        problem([3, 4, 2, 41, 41, 16, 24], dtype, AttentionOptions { mask_mod: Some(MaskFn::of::<Causal>()), ..none }),
        plain(AttentionOptions { mask_mod: Some(MaskFn::of::<CausalDocument>()), ..none })
            .with_mask_tensors(&[&[3, 1, 41, 1], &[3, 1, 1, 41]])
            .unwrap(),
    ]
}

#[test]
fn every_option() {
    for target in targets() {
        for (n, problem) in all_problems(Dtype::F32).into_iter().enumerate() {
            let data = Data::random(problem, n as u64);
            check_steps(&data, &target, &even());
            check_steps(&data, &target, &uneven());
        }
    }
}

#[test]
fn every_element_type() {
    for target in targets() {
        for dtype in dtypes(&target) {
            for (heads, dims) in [([8, 2], [64, 64]), ([4, 1], [128, 32]), ([3, 3], [5, 33]), ([16, 1], [64, 128])] {
                let data = Data::random(problem_of(heads, dims, dtype, AttentionOptions::default()), 3);
                check_steps(&data, &target, &even());
                check_steps(&data, &target, &uneven());
            }
        }
    }
}

/// Enough keys for splits, and for the edges of tiles.
#[test]
fn long_caches() {
    for target in targets() {
        for dtype in dtypes(&target) {
            let options = AttentionOptions { causal: true, ..Default::default() };
            let data = Data::random(problem([2, 4, 1, 1100, 1100, 64, 64], dtype, options), 4);
            let mut run = Run::new(&data, 1200, &target.device);
            for new in [509, 1, 1, 1, 1, 511, 1, 8, 1] {
                run.step(&Step::Of(new));
            }
            run.step(&Step::Ragged(vec![3, 40]));
            run.step(&Step::Of(1));
            check_found(&data, &target, &run.results());
        }
    }
}
