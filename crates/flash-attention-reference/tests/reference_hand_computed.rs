//! Cases with results that are computed by hand.

mod reference_common;

use flash_attention_kernels::AttentionOptions;
use reference_common::{Case, assert_close};

/// One query `1` over keys `0` and `log 3`, values `4` and `8`: probabilities are 1/4 and 3/4.
fn one_to_three() -> Case {
    let options = AttentionOptions { softmax_scale: Some(1.0), ..Default::default() };
    let mut case = Case::new([1, 1, 1, 1, 2, 1, 1], options);
    case.tensors.q = vec![1.0];
    case.tensors.k = vec![0.0, 3f64.ln()];
    case.tensors.v = vec![4.0, 8.0];
    case.dout = vec![1.0];
    case
}

#[test]
fn one_query_over_two_keys() {
    let case = one_to_three();
    let output = case.forward();
    assert_close(&output.o, &[7.0]); // (4 + 3·8) / 4
    assert_close(&output.lse, &[4f64.ln()]);
    // dp = 4, 8; delta = 7; ds = 1/4·(4 − 7), 3/4·(8 − 7).
    let gradients = case.backward();
    assert_close(&gradients.dv, &[0.25, 0.75]);
    assert_close(&gradients.dk, &[-0.75, 0.75]);
    assert_close(&gradients.dq, &[0.75 * 3f64.ln()]);
    assert_eq!(gradients.dbias, None);
}

#[test]
fn the_gradient_of_lse_is_the_probability() {
    let mut case = one_to_three();
    case.dout = vec![0.0];
    case.dlse = Some(vec![2.0]);
    let gradients = case.backward();
    assert_close(&gradients.dv, &[0.0, 0.0]);
    assert_close(&gradients.dk, &[0.5, 1.5]);
    assert_close(&gradients.dq, &[1.5 * 3f64.ln()]);
}

#[test]
fn scale_multiplies_scores_and_their_gradients() {
    let mut case = one_to_three();
    case.problem.options.softmax_scale = Some(0.5);
    case.tensors.k = vec![0.0, 2.0 * 3f64.ln()];
    assert_close(&case.forward().o, &[7.0]);
    assert_close(&case.backward().dk, &[-0.375, 0.375]);
    assert_close(&case.backward().dq, &[0.75 * 3f64.ln()]);
}

#[test]
fn the_default_scale_is_one_over_the_root_of_head_dim() {
    let mut case = Case::new([1, 1, 1, 1, 2, 4, 1], AttentionOptions::default());
    case.tensors.q = vec![1.0; 4];
    case.tensors.k = [[0.0; 4], [3f64.ln() / 2.0; 4]].concat(); // 4 · log 3 / 2 · 1/2
    case.tensors.v = vec![4.0, 8.0];
    assert_close(&case.forward().o, &[7.0]);
}

/// tanh(log 3 / 2) = 1/2, so a softcap of 2 maps a score of log 3 to 1, with the derivative 3/4.
#[test]
fn softcap_bends_scores_and_their_gradients() {
    let mut case = one_to_three();
    case.problem.options.softcap = Some(2.0);
    let e = 1f64.exp();
    let output = case.forward();
    assert_close(&output.o, &[(4.0 + 8.0 * e) / (1.0 + e)]);
    assert_close(&output.lse, &[(1.0 + e).ln()]);
    let ds = 4.0 * e / (1.0 + e).powi(2); // p₀·p₁·(8 − 4)
    let gradients = case.backward();
    assert_close(&gradients.dk, &[-ds, 0.75 * ds]);
    assert_close(&gradients.dq, &[0.75 * ds * 3f64.ln()]);
}

/// A bias added before the softcap would become `2·tanh(log 3 / 2)`, 1.
#[test]
fn bias_is_added_after_softcap() {
    let mut case = one_to_three().with_bias([1, 1, 1, 2]);
    case.problem.options.softcap = Some(2.0);
    case.tensors.k = vec![0.0, 0.0];
    case.tensors.bias = Some(vec![0.0, 3f64.ln()]);
    assert_close(&case.forward().o, &[7.0]);
    let gradients = case.backward();
    assert_close(gradients.dbias.as_ref().unwrap(), &[-0.75, 0.75]);
    assert_close(&gradients.dk, &[-0.75, 0.75]);
    assert_close(&gradients.dq, &[0.0]);
}

/// A finite bias does not make a hidden key visible.
#[test]
fn bias_does_not_show_what_the_mask_hides() {
    let mut case = one_to_three().with_mask([1, 1, 1, 2]).with_bias([1, 1, 1, 2]);
    case.tensors.mask = Some(vec![false, true]);
    for bias in [1e30, f64::INFINITY, f64::NAN] {
        case.tensors.bias = Some(vec![5.0, bias]);
        assert_eq!(case.forward().o, [4.0]);
        assert_eq!(case.forward().lse, [5.0]);
        assert_eq!(case.backward().dbias.unwrap(), [0.0, 0.0]);
    }
}

/// Queries 0 and 1 share key head 0, queries 2 and 3 key head 1.
#[test]
fn query_heads_share_neighbouring_key_heads() {
    let mut case = Case::new([1, 4, 2, 1, 1, 1, 1], AttentionOptions::default());
    case.tensors.v = vec![10.0, 20.0];
    case.dout = vec![1.0, 2.0, 4.0, 8.0];
    assert_eq!(case.forward().o, [10.0, 10.0, 20.0, 20.0]);
    assert_eq!(case.backward().dv, [3.0, 12.0]);
}

#[test]
fn dbias_sums_over_what_it_broadcasts_over() {
    let mut case = one_to_three().with_bias([1, 1, 1, 1]);
    case.dlse = Some(vec![2.0]);
    // A bias on all keys shifts only lse.
    assert_close(&case.backward().dbias.unwrap(), &[2.0]);
}
