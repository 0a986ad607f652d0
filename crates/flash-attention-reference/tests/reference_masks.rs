//! Which keys each query sees, against masks drawn out, and against options and shapes that mean the same.

mod reference_common;

use flash_attention_kernels::{Alignment, AttentionOptions};
use reference_common::{Case, broadcasts};

/// What the oracle sees, a string of `1` and `0` for each query: with V the identity, `o` is the attention matrix.
fn drawn(seq_q: usize, seq_k: usize, options: AttentionOptions) -> Vec<String> {
    let mut case = Case::new([1, 1, 1, seq_q, seq_k, 1, seq_k], options);
    case.v = (0..seq_k * seq_k).map(|n| f64::from(n / seq_k == n % seq_k)).collect();
    let o = case.forward().o;
    o.chunks(seq_k).map(|row| row.iter().map(|&p| if p > 0.0 { '1' } else { '0' }).collect()).collect()
}

fn causal(alignment: Alignment) -> AttentionOptions {
    AttentionOptions { causal: true, alignment, ..Default::default() }
}

fn window(left: Option<usize>, right: Option<usize>, alignment: Alignment) -> AttentionOptions {
    AttentionOptions { window_left: left, window_right: right, alignment, ..Default::default() }
}

/// The first two are drawn in FlashAttention's README, under "Changed in v2.1".
#[test]
fn causal_masks_as_drawn() {
    use Alignment::{BottomRight, TopLeft};
    assert_eq!(drawn(2, 5, causal(BottomRight)), ["11110", "11111"]);
    assert_eq!(drawn(5, 2, causal(BottomRight)), ["00", "00", "00", "10", "11"]);
    assert_eq!(drawn(2, 5, causal(TopLeft)), ["10000", "11000"]);
    assert_eq!(drawn(5, 2, causal(TopLeft)), ["10", "11", "11", "11", "11"]);
    for alignment in [BottomRight, TopLeft] {
        assert_eq!(drawn(3, 3, causal(alignment)), ["100", "110", "111"]);
        assert_eq!(drawn(1, 1, causal(alignment)), ["1"]);
    }
    assert_eq!(drawn(2, 3, AttentionOptions::default()), ["111", "111"]);
}

#[test]
fn windows_as_drawn() {
    use Alignment::{BottomRight, TopLeft};
    assert_eq!(drawn(4, 4, window(Some(1), Some(0), BottomRight)), ["1000", "1100", "0110", "0011"]);
    assert_eq!(drawn(4, 4, window(Some(0), Some(2), BottomRight)), ["1110", "0111", "0011", "0001"]);
    assert_eq!(drawn(3, 3, window(Some(1), None, BottomRight)), ["111", "111", "011"]);
    assert_eq!(drawn(3, 3, window(None, Some(1), BottomRight)), ["110", "111", "111"]);
    assert_eq!(drawn(2, 5, window(Some(1), Some(1), BottomRight)), ["00111", "00011"]);
    assert_eq!(drawn(2, 5, window(Some(1), Some(1), TopLeft)), ["11000", "11100"]);
    assert_eq!(drawn(5, 2, window(Some(1), Some(1), BottomRight)), ["00", "00", "10", "11", "11"]);
    assert_eq!(drawn(5, 2, window(Some(1), Some(1), TopLeft)), ["11", "11", "01", "00", "00"]);
    assert_eq!(drawn(3, 3, window(Some(9), Some(9), BottomRight)), ["111", "111", "111"]);
}

#[test]
fn causal_hides_what_a_right_window_would_show() {
    let options = AttentionOptions { causal: true, ..window(Some(1), Some(5), Alignment::BottomRight) };
    assert_eq!(drawn(4, 4, options), ["1000", "1100", "0110", "0011"]);
}

#[test]
fn a_mask_hides_where_it_is_true_in_addition_to_causality() {
    let case = |mask: Vec<bool>| {
        let mut case = Case::new([1, 1, 1, 2, 2, 1, 2], causal(Alignment::BottomRight)).with_mask([1, 1, 2, 2]);
        case.v = vec![1.0, 0.0, 0.0, 1.0];
        case.mask = Some(mask);
        case.forward().o
    };
    assert_eq!(case(vec![false, false, true, false]), [1.0, 0.0, 0.0, 1.0]);
    assert_eq!(case(vec![true, false, false, true]), [0.0, 0.0, 1.0, 0.0]);
}

/// A tensor that broadcasts means the same as the one written out.
#[test]
fn broadcast_masks_and_biases_are_those_written_out() {
    let sizes = [2, 4, 2, 3, 5, 2, 2];
    let full = [2, 4, 3, 5];
    for shape in broadcasts(full) {
        let short = Case::new(sizes, Default::default()).with_mask(shape).with_bias(shape);
        let mut long = Case::new(sizes, Default::default()).with_mask(full).with_bias(full);
        let (mut mask, mut bias) = (Vec::new(), Vec::new());
        for [b, h, i, j] in indices(full) {
            let strides = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1];
            let index: usize = (0..4).map(|n| strides[n] * [b, h, i, j][n].min(shape[n] - 1)).sum();
            mask.push(short.mask.as_ref().unwrap()[index]);
            bias.push(short.bias.as_ref().unwrap()[index]);
        }
        (long.mask, long.bias) = (Some(mask), Some(bias));
        assert_eq!(short.forward(), long.forward(), "{shape:?}");
        assert_eq!(short.backward().dk, long.backward().dk, "{shape:?}");
    }
}

fn indices([a, b, c, d]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..a * b * c * d).map(move |n| [n / (b * c * d), n / (c * d) % b, n / d % c, n % d])
}
