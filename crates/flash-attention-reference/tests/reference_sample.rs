//! The oracle's results for a sample equal those of the whole problem.

mod reference_common;

use flash_attention_kernels::AttentionOptions;
use flash_attention_kernels::mods::{Document, MaskFn, ScoreFn};
use flash_attention_reference::mods::Bent;
use flash_attention_reference::sample;
use reference_common::{Case, assert_close};

#[test]
fn a_sample_is_part_of_the_whole() {
    let options = AttentionOptions { causal: true, softcap: Some(2.0), ..Default::default() };
    // Queries 0 and 1 see no key, because there are two more queries than keys.
    let case = Case::new([2, 4, 2, 9, 7, 5, 3], options).with_mask([2, 1, 9, 7]).with_bias([1, 4, 9, 7]);
    let functions = case.clone().with_score_mod(ScoreFn::of::<Bent>(), &[[1, 4, 1, 7], [2, 1, 9, 1]]);
    let functions = functions.with_mask_mod(MaskFn::of::<Document>(), &[[2, 1, 9, 1], [1, 1, 1, 7]]);
    let mut blocks = functions.clone().with_block_mask([2, 4], [128, 128]);
    blocks.tensors.block_mask = Some(vec![2, 0, 1, 1, 0, 1, 2, 2]);
    for case in [case, functions, blocks] {
        a_sample_is_part_of(case);
    }
}

#[track_caller]
fn a_sample_is_part_of(case: Case) {
    let (whole, gradients) = (case.forward(), case.backward());
    let (queries, keys) = ([0, 4, 8], [1, 6]);
    for [b, h] in [[0, 0], [1, 3]] {
        let found = sample(&case.problem, &case.tensors.inputs(), &case.dout, [b, h], &queries, &keys);
        let rows = |values: &[f64], head: usize, length: usize, of: &[usize], width: usize| -> Vec<f64> {
            of.iter().flat_map(|i| values[(head * length + i) * width..][..width].to_vec()).collect()
        };
        let (head, head_kv) = (b * 4 + h, b * 2 + h / 2);
        assert_close(&found.o, &rows(&whole.o, head, 9, &queries, 3));
        assert_close(&found.lse, &rows(&whole.lse, head, 9, &queries, 1));
        assert_close(&found.dq, &rows(&gradients.dq, head, 9, &queries, 5));
        assert_close(&found.dk, &rows(&gradients.dk, head_kv, 7, &keys, 5));
        assert_close(&found.dv, &rows(&gradients.dv, head_kv, 7, &keys, 3));
        assert_close(&found.dbias, &rows(gradients.dbias.as_ref().unwrap(), h, 9, &queries, 7));
    }
}

#[test]
fn a_broadcast_bias_has_no_rows() {
    let case = Case::new([1, 2, 2, 4, 4, 3, 3], AttentionOptions::default()).with_bias([1, 1, 4, 4]);
    assert!(sample(&case.problem, &case.tensors.inputs(), &case.dout, [0, 1], &[2], &[]).dbias.is_empty());
}
