//! Visible keys of each query, compared with masks written out, and with equivalent options and shapes.

mod reference_common;

use flash_attention_kernels::mods::{
    And, Causal, CausalWindow, Chunked, Document, FirstKeys, MaskFn, Neighborhood, Not, Or, Pair, ScoreFn,
    SlidingWindow, Stride, Values,
};
use flash_attention_kernels::{Alignment, AttentionOptions};
use flash_attention_reference::mods::{Relative, Strided};
use reference_common::{Case, broadcasts};

/// Visible keys of each query as a string of `1` and `0`. V is the identity, so `o` is the attention matrix.
fn drawn(seq_q: usize, seq_k: usize, options: AttentionOptions) -> Vec<String> {
    let mut case = Case::new([1, 1, 1, seq_q, seq_k, 1, seq_k], options);
    case.tensors.v = (0..seq_k * seq_k).map(|n| f64::from(n / seq_k == n % seq_k)).collect();
    let o = case.forward().o;
    o.chunks(seq_k).map(|row| row.iter().map(|&p| if p > 0.0 { '1' } else { '0' }).collect()).collect()
}

fn causal(alignment: Alignment) -> AttentionOptions {
    AttentionOptions { causal: true, alignment, ..Default::default() }
}

fn window(left: Option<usize>, right: Option<usize>, alignment: Alignment) -> AttentionOptions {
    AttentionOptions { window_left: left, window_right: right, alignment, ..Default::default() }
}

/// The first two masks are those in FlashAttention's README, under "Changed in v2.1".
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
        case.tensors.v = vec![1.0, 0.0, 0.0, 1.0];
        case.tensors.mask = Some(mask);
        case.forward().o
    };
    assert_eq!(case(vec![false, false, true, false]), [1.0, 0.0, 0.0, 1.0]);
    assert_eq!(case(vec![true, false, false, true]), [0.0, 0.0, 1.0, 0.0]);
}

/// A broadcast mask or bias gives the same results as the expanded tensor.
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
            mask.push(short.tensors.mask.as_ref().unwrap()[index]);
            bias.push(short.tensors.bias.as_ref().unwrap()[index]);
        }
        (long.tensors.mask, long.tensors.bias) = (Some(mask), Some(bias));
        assert_eq!(short.forward(), long.forward(), "{shape:?}");
        assert_eq!(short.backward().dk, long.backward().dk, "{shape:?}");
    }
}

fn with_mask_mod(function: MaskFn) -> AttentionOptions {
    AttentionOptions { mask_mod: Some(function), ..Default::default() }
}

#[test]
fn a_causal_function_equals_the_option() {
    let sizes = [2, 4, 2, 6, 9, 3, 2];
    let function = Case::new(sizes, with_mask_mod(MaskFn::of::<Causal>())).with_dlse();
    let option = Case::new(sizes, causal(Alignment::TopLeft)).with_dlse();
    assert_eq!(function.forward(), option.forward());
    assert_eq!(function.backward(), option.backward());
    assert_ne!(function.forward(), Case::new(sizes, Default::default()).forward());
    // Positions of packed sequences count from the first of each sequence.
    let packed = |case: Case| case.with_cu_seqlens(&[1, 3, 5, 7, 12], &[0, 4, 7, 12, 17]).with_dlse();
    let (function, option) = (packed(function), packed(option));
    assert_eq!(function.forward(), option.forward());
    assert_eq!(function.backward(), option.backward());
}

#[test]
fn ready_made_functions_as_drawn() {
    let of = |function| drawn(5, 5, with_mask_mod(function));
    assert_eq!(of(MaskFn::of::<SlidingWindow<1>>()), ["11000", "11100", "01110", "00111", "00011"]);
    assert_eq!(of(MaskFn::of::<CausalWindow<1>>()), ["10000", "11000", "01100", "00110", "00011"]);
    assert_eq!(of(MaskFn::of::<And<Causal, Chunked<2>>>()), ["10000", "11000", "00100", "00110", "00001"]);
    assert_eq!(of(MaskFn::of::<Or<FirstKeys<1>, CausalWindow<0>>>()), ["10000", "11000", "10100", "10010", "10001"]);
    assert_eq!(of(MaskFn::of::<Stride<3>>()), ["10010", "01001", "00100", "10010", "01001"]);
    // An image of three rows of two.
    let near = drawn(6, 6, with_mask_mod(MaskFn::of::<Neighborhood<2, 3, 0>>()));
    assert_eq!(near, ["100000", "010000", "001000", "000100", "000010", "000001"]);
    let near = drawn(6, 6, with_mask_mod(MaskFn::of::<Neighborhood<3, 2, 1>>()));
    assert_eq!(near, ["111111"; 6]);
    let near = drawn(8, 8, with_mask_mod(MaskFn::of::<Neighborhood<2, 4, 1>>()));
    assert_eq!((&near[0][..], &near[7][..]), ("11111100", "00111111"));
}

#[test]
fn functions_of_masks_as_drawn() {
    assert_eq!(drawn(2, 3, with_mask_mod(MaskFn::of::<Causal>())), ["100", "110"]);
    assert_eq!(drawn(2, 3, with_mask_mod(MaskFn::of::<Not<Causal>>())), ["011", "001"]);
    assert_eq!(drawn(2, 3, with_mask_mod(MaskFn::of::<And<Causal, Not<Causal>>>())), ["000", "000"]);
    assert_eq!(drawn(2, 3, with_mask_mod(MaskFn::of::<Or<Causal, Not<Causal>>>())), ["111", "111"]);
    let strided = drawn(12, 12, with_mask_mod(MaskFn::of::<Strided>()));
    assert_eq!((&strided[0][..], &strided[11][..]), ("111111111000", "100011111111"));
    // A mask function in addition to a window.
    let both = AttentionOptions { window_left: Some(0), ..with_mask_mod(MaskFn::of::<Causal>()) };
    assert_eq!(drawn(3, 3, both), ["100", "010", "001"]);
}

#[test]
fn a_document_function_equals_its_mask() {
    let sizes = [2, 4, 2, 6, 9, 3, 2];
    for (of_q, of_k) in [([2, 1, 6, 1], [1, 1, 1, 9]), ([1, 4, 6, 1], [2, 1, 1, 9]), ([2, 4, 6, 9], [1, 1, 1, 1])] {
        let function = Case::new(sizes, Default::default()).with_mask_mod(MaskFn::of::<Document>(), &[of_q, of_k]);
        let mut mask = Case::new(sizes, Default::default()).with_mask([2, 4, 6, 9]);
        let [documents_q, documents_k] = function.tensors.mask_tensors.each_ref().map(|of| of.as_ref().unwrap());
        let at = |shape: [usize; 4], at: [usize; 4]| (0..4).fold(0, |n, d| n * shape[d] + at[d].min(shape[d] - 1));
        let hidden = |index: [usize; 4]| documents_q[at(of_q, index)] != documents_k[at(of_k, index)];
        mask.tensors.mask = Some(indices([2, 4, 6, 9]).map(hidden).collect());
        assert_eq!(function.forward(), mask.forward());
        assert_eq!(function.backward(), mask.backward());
    }
}

/// In packed sequences a function gets the number of the sequence as its batch, and positions within the sequence.
#[test]
fn functions_of_packed_sequences_equal_those_of_padded_ones() {
    let options = AttentionOptions {
        score_mod: Some(ScoreFn::of::<Relative>()),
        mask_mod: Some(MaskFn::of::<Strided>()),
        ..Default::default()
    };
    let (lens_q, lens_k) = ([11, 5, 14], [13, 20, 9]);
    let padded = Case::new([3, 2, 1, 14, 20, 3, 2], options).with_seq_lens(&lens_q, &lens_k);
    let mut packed = Case::new([1, 2, 1, 30, 42, 3, 2], options).with_cu_seqlens(&[0, 11, 16, 30], &[0, 13, 33, 42]);
    // `[sequences, heads, seq, dim]` to `[1, heads, total, dim]`.
    let pack = |values: &[f64], heads: usize, seq: usize, dim: usize, lens: [usize; 3]| -> Vec<f64> {
        let part = |h: usize, s: usize| &values[(s * heads + h) * seq * dim..][..lens[s] * dim];
        (0..heads).flat_map(|h| (0..3).flat_map(move |s| part(h, s).to_vec()).collect::<Vec<_>>()).collect()
    };
    packed.tensors.q = pack(&padded.tensors.q, 2, 14, 3, lens_q);
    packed.tensors.k = pack(&padded.tensors.k, 1, 20, 3, lens_k);
    packed.tensors.v = pack(&padded.tensors.v, 1, 20, 2, lens_k);
    packed.dout = pack(&padded.dout, 2, 14, 2, lens_q);
    let (of_packed, of_padded) = (packed.forward(), padded.forward());
    assert_eq!(of_packed.o, pack(&of_padded.o, 2, 14, 2, lens_q));
    assert_eq!(of_packed.lse, pack(&of_padded.lse, 2, 14, 1, lens_q));
    assert_eq!(packed.backward().dk, pack(&padded.backward().dk, 1, 20, 3, lens_k));
}

#[test]
fn a_block_mask_equals_the_boolean_mask() {
    let sizes = [2, 4, 2, 300, 290, 3, 2];
    let scores = [2, 4, 300, 290];
    for (heads, [block_q, block_k], options) in [
        ([1, 1], [128, 128], AttentionOptions::default()),
        ([2, 4], [256, 128], causal(Alignment::BottomRight)),
        ([1, 4], [128, 256], window(Some(70), Some(90), Alignment::TopLeft)),
    ] {
        let masked = Case::new(sizes, options).with_dlse().with_mask([2, 1, 1, 290]);
        let blocks = masked.clone().with_block_mask(heads, [block_q, block_k]);
        let states = blocks.tensors.block_mask.clone().unwrap();
        let [of_q, of_k] = [300usize.div_ceil(block_q), 290usize.div_ceil(block_k)];
        let state = |[b, h, i, j]: [usize; 4]| {
            let head = b.min(heads[0] - 1) * heads[1] + h.min(heads[1] - 1);
            states[(head * of_q + i / block_q) * of_k + j / block_k]
        };
        assert!((0..3).all(|of| indices(scores).any(|at| state(at) == of)));
        // In partial blocks the mask decides.
        let hidden = |at: [usize; 4]| match state(at) {
            0 => true,
            1 => masked.tensors.mask.as_ref().unwrap()[at[0] * 290 + at[3]],
            _ => false,
        };
        let mut written = Case::new(sizes, options).with_dlse().with_mask(scores);
        written.tensors.mask = Some(indices(scores).map(hidden).collect());
        assert_eq!(blocks.forward(), written.forward());
        assert_eq!(blocks.backward(), written.backward());
        assert_ne!(blocks.forward(), masked.forward());
    }
}

/// Each packed sequence has states of its own, and its blocks count from its first query and key.
#[test]
fn block_masks_of_packed_sequences_equal_separate_ones() {
    let options = AttentionOptions { mask_mod: Some(MaskFn::of::<Strided>()), ..causal(Alignment::BottomRight) };
    // 150, 0 and 200 queries, and 130, 40 and 300 keys.
    let (cu_q, cu_k) = ([0, 150, 150, 350], [0, 130, 170, 470]);
    let packed = Case::new([1, 2, 1, 350, 470, 3, 2], options).with_cu_seqlens(&cu_q, &cu_k).with_dlse();
    // The third sequence has two blocks of queries and three of keys, and the states have two of each: keys from 256 on are hidden.
    let shape = [3, 2, 2, 2];
    let states: Vec<u32> = (0..24).map(|n| [1, 2, 0, 2, 1][n % 5]).collect();
    let mut blocks = packed.clone();
    blocks.problem = blocks.problem.with_block_mask(&shape, 128, 128).unwrap();
    blocks.tensors.block_mask = Some(states.clone());
    // Written out as a mask of the tensors.
    let mut written = packed.with_mask([1, 2, 350, 470]);
    written.problem.options.mask_mod = None;
    let strided = MaskFn::of::<Strided>();
    let hidden = |[_, h, i, j]: [usize; 4]| {
        let of = |ends: [usize; 4], n: usize| (0..3).rfind(|s| ends[*s] <= n && n < ends[*s + 1]);
        let (Some(s), Some(of_key)) = (of(cu_q, i), of(cu_k, j)) else { return true };
        let (i, j) = (i - cu_q[s], j.wrapping_sub(cu_k[s]));
        if s != of_key || j >= 256 {
            return true;
        }
        match states[((s * 2 + h) * 2 + i / 128) * 2 + j / 128] {
            0 => true,
            1 => !strided.sees(Pair::of(s as u32, h as u32, i as u32, j as u32), Values::default()),
            _ => false,
        }
    };
    written.tensors.mask = Some(indices([1, 2, 350, 470]).map(hidden).collect());
    assert_eq!(blocks.forward(), written.forward());
    assert_eq!(blocks.backward(), written.backward());
}

/// Functions have no effect in full and in empty blocks. Options hide pairs in any block.
#[test]
fn functions_decide_in_partial_blocks_only_and_options_in_all() {
    let sizes = [1, 1, 1, 140, 200, 3, 2];
    let blocks = |options, states: [u32; 4]| {
        let mut case = Case::new(sizes, options).with_dlse().with_block_mask([1, 1], [128, 128]);
        case.tensors.block_mask = Some(states.to_vec());
        case
    };
    let nothing = with_mask_mod(MaskFn::of::<And<Causal, Not<Causal>>>());
    // Any state above 1 is a full block.
    let (shown, plain) = (blocks(nothing, [2, 2, 9, 2]), Case::new(sizes, Default::default()).with_dlse());
    assert_eq!(shown.forward(), plain.forward());
    assert_eq!(shown.backward(), plain.backward());
    let hidden = blocks(with_mask_mod(MaskFn::of::<Or<Causal, Not<Causal>>>()), [0; 4]).forward();
    assert!(hidden.lse.iter().all(|lse| *lse == f64::NEG_INFINITY));
    let asked = blocks(with_mask_mod(MaskFn::of::<Causal>()), [1; 4]);
    let function = Case::new(sizes, with_mask_mod(MaskFn::of::<Causal>())).with_dlse();
    assert_eq!(asked.forward(), function.forward());
    assert_eq!(asked.backward(), function.backward());
    let options = blocks(causal(Alignment::TopLeft), [2; 4]);
    assert_eq!(options.forward(), Case::new(sizes, causal(Alignment::TopLeft)).forward());
    // Sequence lengths hide pairs, too.
    let lens = blocks(Default::default(), [2; 4]).with_seq_lens(&[90], &[150]);
    assert_eq!(lens.forward(), Case::new(sizes, Default::default()).with_seq_lens(&[90], &[150]).forward());
}

fn indices([a, b, c, d]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..a * b * c * d).map(move |n| [n / (b * c * d), n / (c * d) % b, n / d % c, n % d])
}
