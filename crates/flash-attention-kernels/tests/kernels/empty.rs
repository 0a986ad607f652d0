//! Problems without batch, heads, queries, keys or sequences, with every option: results are zeros or empty, and no grid is empty.

use crate::common::*;
use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{AttentionOptions, Dtype, Inputs, TensorView, block_states};
use flash_attention_reference::mods::{Bent, Strided};

/// `[batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v]`. In each, a dimension of the results or of the sums is 0.
const SIZES: [Sizes; 6] = [
    [0, 2, 1, 5, 7, 16, 16],
    [1, 0, 0, 5, 7, 16, 16],
    [2, 2, 1, 0, 7, 16, 16],
    [2, 2, 1, 5, 0, 16, 8],
    [2, 2, 2, 0, 0, 16, 16],
    [1, 2, 2, 0, 130, 64, 64],
];

/// A case of these sizes without options, and one with each option whose tensors depend on the sizes.
fn with_every_option(sizes: Sizes) -> Vec<(&'static str, Case)> {
    let [batch, heads, _, seq_q, seq_k, ..] = sizes;
    let plain = |options| Case::new(sizes, Dtype::F32, options);
    let none = || plain(AttentionOptions::default());
    let causal = || plain(AttentionOptions { causal: true, ..Default::default() });
    let full = |count: usize, seq: usize| vec![seq; count];
    let ends = |seq: usize| (0..=batch).map(|n| n * seq).collect::<Vec<_>>();
    let functions = AttentionOptions {
        score_mod: Some(ScoreFn::of::<Bent>()),
        mask_mod: Some(MaskFn::of::<Strided>()),
        ..Default::default()
    };
    let blocks = [1, 1, seq_q.div_ceil(128), seq_k.div_ceil(128)];
    vec![
        ("plain", none().with_dlse()),
        ("mask", none().with_mask([1, 1, seq_q, seq_k])),
        ("bias", none().with_bias([batch, heads, seq_q, seq_k])),
        ("bias of keys", causal().with_bias([1, heads, 1, seq_k])),
        ("slopes", causal().with_alibi_slopes([1, heads])),
        ("sinks", none().with_sinks().with_dlse()),
        ("dropout", causal().with_dropout(0.3)),
        ("window", plain(AttentionOptions { window_left: Some(3), softcap: Some(2.0), ..Default::default() })),
        ("functions", plain(functions).with_score_tensors(&[[1, heads, 1, 1], [1, 1, seq_q, 1]])),
        ("lengths", causal().with_seq_lens_q(&full(batch, seq_q)).with_seq_lens_k(&full(batch, seq_k))),
        ("lengths of keys, sinks", none().with_seq_lens_k(&full(batch, seq_k)).with_sinks().with_dlse()),
        (
            "lengths, mask, bias",
            none().with_seq_lens_q(&full(batch, seq_q)).with_mask([1, 1, 1, seq_k]).with_bias([1, 1, seq_q, 1]),
        ),
        ("packed", causal().with_cu_seqlens(&ends(seq_q), &ends(seq_k)).with_sinks()),
        ("no sequences", none().with_cu_seqlens(&[0], &[0])),
        (
            "packed, mask, bias",
            none().with_cu_seqlens(&ends(seq_q), &ends(seq_k)).with_mask([1, 1, seq_q, 1]).with_bias([1, 1, 1, seq_k]),
        ),
        ("blocks", causal().with_block_mask(blocks, [128, 128], vec![2; blocks.iter().product()])),
        (
            "blocks, lengths",
            none()
                .with_block_mask(blocks, [128, 128], vec![1; blocks.iter().product()])
                .with_seq_lens_q(&full(batch, seq_q)),
        ),
    ]
}

#[test]
fn every_option() {
    let Some(client) = client() else { return };
    let mut checked = 0;
    for sizes in SIZES {
        for (name, case) in with_every_option(sizes) {
            eprintln!("{name} with {sizes:?}");
            case.check(&client);
            checked += 1;
        }
    }
    assert_eq!(checked, SIZES.len() * 17);
}

/// Empty sequences among others, and tensors in which all sequences are empty.
#[test]
fn sequences_without_queries_or_keys() {
    let Some(client) = client() else { return };
    let case =
        || Case::new([2, 2, 1, 40, 50, 16, 16], Dtype::F32, AttentionOptions::default()).with_sinks().with_dlse();
    case().with_cu_seqlens(&[0], &[0]).check(&client);
    case().with_cu_seqlens(&[0, 0, 0], &[0, 50, 50]).check(&client);
    case().with_cu_seqlens(&[0, 40, 40, 80], &[0, 0, 50, 100]).check(&client);
    case().with_seq_lens_q(&[0, 40]).with_seq_lens_k(&[50, 0]).check(&client);
    case().with_seq_lens_q(&[0, 0]).with_seq_lens_k(&[0, 0]).check(&client);
}

/// A block mask without blocks has no states.
#[test]
fn states_of_no_blocks() {
    let Some(client) = client() else { return };
    let case = Case::new([1, 1, 1, 0, 130, 16, 16], Dtype::F32, AttentionOptions::default());
    let problem = case.problem.with_block_mask(&[1, 1, 0, 2], 128, 128).unwrap();
    let none = || TensorView::contiguous(client.empty(4), [1, 1, 0, 2]);
    block_states(&client, &problem, &Inputs::new(none(), none(), none()), &none()).unwrap();
}
