//! Fully masked rows, empty tensors, and hidden NaN.

mod reference_common;

use flash_attention_kernels::{AttentionOptions, BackwardOrder, Precision};
use flash_attention_reference::{Gradients, Output};
use reference_common::{Case, assert_close};

const SIZES: [usize; 7] = [2, 4, 2, 5, 2, 3, 4];
const CAUSAL: AttentionOptions = AttentionOptions {
    causal: true,
    continued: false,
    alignment: flash_attention_kernels::Alignment::BottomRight,
    softmax_scale: None,
    window_left: None,
    window_right: None,
    softcap: None,
    dropout: 0.0,
    dropout_seed: None,
    score_mod: None,
    mask_mod: None,
    backward_order: BackwardOrder::Deterministic,
    precision: Precision::Full,
};

/// Whether a row of [`CAUSAL`] sees no key: the first three of each five.
fn is_fully_masked(row: usize) -> bool {
    row % 5 < 3
}

#[test]
fn a_fully_masked_row_is_zero_with_lse_minus_infinity() {
    let case = Case::new(SIZES, CAUSAL).with_dlse();
    let (output, gradients) = (case.forward(), case.backward());
    for (row, &lse) in output.lse.iter().enumerate() {
        let fully_masked = is_fully_masked(row);
        assert_eq!(lse == f64::NEG_INFINITY, fully_masked, "row {row}");
        assert_eq!(output.o[row * 4..][..4] == [0.0; 4], fully_masked, "row {row}");
        // Row 3 sees one key, whose probability is 1 for any score, so only dlse contributes to its dq.
        assert_eq!(gradients.dq[row * 3..][..3] == [0.0; 3], fully_masked, "row {row}");
    }
}

/// NaN in a fully masked row changes no bit of any output or gradient.
#[test]
fn a_fully_masked_row_changes_nothing() {
    let case = Case::new(SIZES, CAUSAL).with_bias([1, 1, 5, 2]).with_dlse();
    let mut poisoned = case.clone();
    for row in (0..case.problem.rows()).filter(|&row| is_fully_masked(row)) {
        poisoned.tensors.q[row * 3..][..3].fill(f64::NAN);
        poisoned.dout[row * 4..][..4].fill(f64::INFINITY);
        poisoned.dlse.as_mut().unwrap()[row] = f64::NAN;
    }
    poisoned.tensors.bias.as_mut().unwrap()[..6].fill(f64::NAN);
    assert_eq!(poisoned.forward(), case.forward());
    assert_eq!(poisoned.backward(), case.backward());
    assert_eq!(case.backward().dbias.unwrap()[..6], [0.0; 6]);
}

#[test]
fn masks_and_infinite_biases_fully_mask_rows_too() {
    let live = Case::new([1, 1, 1, 2, 3, 2, 2], AttentionOptions::default()).with_dlse();
    let mut masked = live.clone().with_mask([1, 1, 2, 1]);
    masked.tensors.mask = Some(vec![true, false]);
    let mut biased = live.clone().with_bias([1, 1, 2, 1]);
    biased.tensors.bias = Some(vec![f64::NEG_INFINITY, 0.0]);

    for case in [masked, biased] {
        let (output, gradients) = (case.forward(), case.backward());
        assert_eq!(output.lse, [f64::NEG_INFINITY, live.forward().lse[1]]);
        assert_eq!(output.o, [&[0.0; 2], &live.forward().o[2..]].concat());
        assert_eq!(gradients.dq, [&[0.0; 2], &live.backward().dq[2..]].concat());
        // Only row 1 contributes to dk and dv.
        let mut alone = live.clone();
        alone.dout[..2].fill(0.0);
        alone.dlse.as_mut().unwrap()[0] = 0.0;
        assert_eq!(gradients.dk, alone.backward().dk);
        assert_eq!(gradients.dv, alone.backward().dv);
        assert!(gradients.dbias.is_none_or(|dbias| dbias[0] == 0.0));
    }
}

/// A visible NaN gives NaN, not a fully masked row.
#[test]
fn visible_nan_is_reported() {
    let mut case = Case::new([1, 1, 1, 1, 2, 1, 1], AttentionOptions::default());
    case.tensors.q = vec![f64::NAN];
    let output = case.forward();
    assert!(output.o[0].is_nan() && output.lse[0].is_nan());
    assert!(case.backward().dq[0].is_nan());
}

#[test]
fn nan_and_infinity_under_a_mask_do_not_leak() {
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        // Key 1 is hidden from all queries.
        let mut clean =
            Case::new([1, 2, 1, 3, 3, 2, 2], AttentionOptions::default()).with_mask([1, 1, 1, 3]).with_dlse();
        clean.tensors.mask = Some(vec![false, true, false]);
        let mut poisoned = clean.clone();
        poisoned.tensors.k[2..4].fill(poison);
        poisoned.tensors.v[2..4].fill(poison);
        assert_eq!(poisoned.forward(), clean.forward());
        let gradients = poisoned.backward();
        assert_eq!(gradients, clean.backward());
        assert_eq!((&gradients.dk[2..4], &gradients.dv[2..4]), (&[0.0; 2][..], &[0.0; 2][..]));
    }
}

#[test]
fn a_causal_prefix_does_not_see_what_comes_later() {
    let clean = Case::new([1, 1, 1, 4, 4, 2, 2], CAUSAL);
    let mut poisoned = clean.clone();
    for tensor in [&mut poisoned.tensors.k, &mut poisoned.tensors.v] {
        tensor[6..].fill(f64::NAN); // key 3
    }
    let (clean, poisoned) = (clean.forward(), poisoned.forward());
    assert_eq!((&poisoned.o[..6], &poisoned.lse[..3]), (&clean.o[..6], &clean.lse[..3]));
    assert!(poisoned.o[6..].iter().all(|x| x.is_nan()));
}

/// Large scores do not overflow and are not taken for −∞.
#[test]
fn large_scores_are_taken_as_they_are() {
    let options = AttentionOptions { softmax_scale: Some(1.0), ..Default::default() };
    for shift in [1e6, -1e6] {
        let mut case = Case::new([1, 1, 1, 1, 2, 1, 1], options);
        (case.tensors.q, case.tensors.k, case.tensors.v) = (vec![1.0], vec![shift, shift], vec![2.0, 4.0]);
        assert_close(&case.forward().o, &[3.0]);
        assert_close(&case.forward().lse, &[shift + 2f64.ln()]);
    }
}

#[test]
fn without_keys_every_row_is_fully_masked() {
    for options in [AttentionOptions::default(), CAUSAL] {
        let case =
            Case::new([1, 2, 1, 3, 0, 2, 2], options).with_bias([1, 1, 3, 1]).with_mask([1, 1, 1, 0]).with_dlse();
        assert_eq!(case.forward(), Output { o: vec![0.0; 12], lse: vec![f64::NEG_INFINITY; 6] });
        let zero =
            Gradients { dq: vec![0.0; 12], dk: vec![], dv: vec![], dbias: Some(vec![0.0; 3]), ..Default::default() };
        assert_eq!(case.backward(), zero);
    }
}

#[test]
fn without_queries_batch_or_heads_results_are_empty_or_zero() {
    let nothing = Output { o: vec![], lse: vec![] };
    for (sizes, keys) in [([1, 2, 1, 0, 3, 2, 2], 6), ([0, 2, 1, 3, 3, 2, 2], 0), ([1, 0, 2, 3, 3, 2, 2], 12)] {
        for options in [AttentionOptions::default(), CAUSAL] {
            let case = Case::new(sizes, options).with_bias([1, 1, 1, 3]).with_dlse();
            assert_eq!(case.forward(), nothing);
            let zero = vec![0.0; keys];
            let expected =
                Gradients { dq: vec![], dk: zero.clone(), dv: zero, dbias: Some(vec![0.0; 3]), ..Default::default() };
            assert_eq!(case.backward(), expected, "{sizes:?}");
        }
    }
}

#[test]
#[should_panic(expected = "length of k")]
fn a_tensor_of_another_length_is_refused() {
    let mut case = Case::new(SIZES, CAUSAL);
    case.tensors.k.pop();
    case.forward();
}

#[test]
#[should_panic(expected = "length of mask")]
fn a_missing_mask_is_refused() {
    let mut case = Case::new(SIZES, CAUSAL).with_mask([1, 1, 1, 2]);
    case.tensors.mask = None;
    case.forward();
}
