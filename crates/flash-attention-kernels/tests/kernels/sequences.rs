//! Sequence lengths and packed sequences against the f64 oracle.

use crate::common::*;
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype};

/// A sequence length for each batch: 0, all, more than there are, and lengths at the edges of tiles.
#[test]
fn sequence_lengths() {
    let window = AttentionOptions { window_left: Some(40), window_right: Some(7), ..Default::default() };
    let top_left = AttentionOptions { alignment: Alignment::TopLeft, ..causal() };
    let lens: [[usize; 6]; 3] = [[130, 64, 1, 0, 129, 65], [200, 10, 33, 128, 0, 127], [140, 0, 210, 64, 63, 1]];
    let options = [causal(), AttentionOptions::default(), window, top_left];
    all(options.into_iter().take(if thorough() { 4 } else { 1 }).flat_map(|options| {
        let case = |q: usize, k: usize| {
            let case = Case::new([6, 2, 1, 140, 210, 16, 24], Dtype::F32, options).with_dlse();
            case.with_seq_lens_q(&lens[q].map(|n| n.min(140))).with_seq_lens_k(&lens[k])
        };
        let plain = Case::new([6, 2, 1, 140, 210, 16, 24], Dtype::F32, options);
        [case(0, 1), case(1, 2), case(2, 0).with_sinks(), plain.with_seq_lens_k(&lens[1]).with_alibi_slopes([1, 2])]
    }));
    let plain = Case::new([2, 2, 1, 140, 210, 16, 16], Dtype::F32, causal()).with_seq_lens_q(&[100, 3]);
    all([[1, 2, 140, 210], [1, 2, 1, 210], [2, 2, 140, 1]].map(|shape| plain.clone().with_bias(shape)));
    // With splits of the keys, and with the fused kernel for dq, dk and dv.
    all([Case::new([1, 2, 1, 70, 4200, 64, 64], Dtype::F32, causal()).with_seq_lens_k(&[3333])]);
    all([Case { fused: true, ..Case::new([2, 2, 1, 300, 300, 64, 64], Dtype::F32, causal()) }
        .with_seq_lens_q(&[170, 300])
        .with_seq_lens_k(&[200, 31])]);
}

/// Packed sequences: with one key, without keys, without queries, with unused rows before and after them, in one batch and in several,
/// and across the end of a batch.
#[test]
fn packed_sequences() {
    let window = AttentionOptions { window_left: Some(40), window_right: Some(7), ..Default::default() };
    let top_left = AttentionOptions { alignment: Alignment::TopLeft, ..causal() };
    let drops = AttentionOptions { dropout: 0.25, ..causal() };
    let options = [causal(), drops, AttentionOptions::default(), window, top_left];
    all(options.into_iter().take(if thorough() { 5 } else { 2 }).flat_map(|options| {
        let one = Case::new([1, 4, 2, 500, 470, 16, 24], Dtype::F32, options).with_dlse();
        let rows = Case::new([3, 2, 1, 150, 150, 32, 32], Dtype::F32, options);
        let ends = [0, 70, 150, 151, 290, 300, 333, 450];
        [
            one.clone().with_cu_seqlens(&[0, 130, 131, 131, 333, 500], &[0, 1, 201, 300, 300, 470]).with_sinks(),
            one.with_cu_seqlens(&[7, 135, 263, 490], &[3, 131, 200, 460]).with_alibi_slopes([1, 4]),
            rows.clone().with_cu_seqlens(&ends, &ends).with_bias([1, 2, 150, 150]),
            // The second sequence crosses the end of the first batch, and the third one's keys cross the end of the second.
            rows.with_cu_seqlens(&[0, 100, 200, 300, 450], &[0, 90, 250, 310, 420]),
        ]
    }));
    let plain = Case::new([2, 2, 1, 140, 210, 16, 16], Dtype::F32, causal());
    let packed = plain.with_cu_seqlens(&[0, 40, 140, 200, 280], &[0, 100, 210, 211, 420]);
    all([[1, 2, 140, 210], [1, 2, 1, 210], [2, 2, 140, 1]]
        .map(|shape| packed.clone().with_bias(shape).with_mask([2, 1, 1, 210])));
    // With splits of the keys, and with the fused kernel for dq, dk and dv.
    all([Case::new([1, 2, 1, 70, 4200, 64, 64], Dtype::F32, causal()).with_cu_seqlens(&[0, 30, 70], &[0, 4000, 4200])]);
    all([Case { fused: true, ..Case::new([1, 2, 1, 600, 600, 64, 64], Dtype::F32, causal()) }
        .with_cu_seqlens(&[0, 170, 600], &[0, 201, 600])]);
    // No sequence at all.
    all([Case::new([1, 2, 1, 60, 60, 64, 64], Dtype::F32, causal()).with_cu_seqlens(&[5], &[9])]);
}

/// Packed sequences give the same bits as padded ones, including dropout.
#[test]
fn packed_equals_padded() {
    let Some(client) = client() else { return };
    let options = AttentionOptions { dropout: 0.25, ..causal() };
    let lens = [100usize, 37, 1];
    let padded =
        Case::new([3, 2, 2, 100, 100, 16, 16], Dtype::F32, options).with_seq_lens_q(&lens).with_seq_lens_k(&lens);
    let mut packed = Case::new([1, 2, 2, 138, 138, 16, 16], Dtype::F32, options);
    if !supports(&client, padded.problem.dtype) {
        return;
    }
    let cut = |values: &[f64], head: usize| -> Vec<f64> {
        let of = |(batch, len): (usize, &usize)| values[(batch * 2 + head) * 1600..][..len * 16].to_vec();
        lens.iter().enumerate().flat_map(of).collect()
    };
    let whole = |values: &[f64]| [cut(values, 0), cut(values, 1)].concat();
    for (from, to) in [
        (&padded.tensors.q, &mut packed.tensors.q),
        (&padded.tensors.k, &mut packed.tensors.k),
        (&padded.tensors.v, &mut packed.tensors.v),
    ] {
        *to = whole(from);
    }
    packed.dout = whole(&padded.dout);
    let packed = packed.with_cu_seqlens(&[0, 100, 137, 138], &[0, 100, 137, 138]);
    let (padded, packed) = (padded.check(&client), packed.check(&client));
    assert_eq!(packed.o, whole(&padded.o));
    assert_eq!(packed.dq, padded.dq.map(|dq| whole(&dq)));
    assert_eq!(packed.dk, padded.dk.map(|dk| whole(&dk)));
    assert_eq!(packed.dv, padded.dv.map(|dv| whole(&dv)));
}

/// NaN and infinity in the padding after a sequence reach no result. Results of the padding are 0.
#[test]
fn padding_does_not_leak() {
    let Some(client) = client() else { return };
    let case = Case::new([2, 2, 1, 140, 200, 16, 16], Dtype::F32, causal());
    let case = case.with_seq_lens_q(&[100, 140]).with_seq_lens_k(&[90, 130]);
    if !supports(&client, case.problem.dtype) {
        return;
    }
    let clean = case.check(&client);
    let mut poisoned = case.clone();
    for (batch, (q, k)) in [(100, 90), (140, 130)].into_iter().enumerate() {
        for head in 0..2 {
            let first = (batch * 2 + head) * 140 * 16;
            poisoned.tensors.q[first + q * 16..first + 140 * 16].fill(f64::NAN);
            poisoned.dout[first + q * 16..first + 140 * 16].fill(f64::INFINITY);
        }
        poisoned.tensors.k[(batch * 200 + k) * 16..(batch + 1) * 200 * 16].fill(f64::NAN);
        poisoned.tensors.v[(batch * 200 + k) * 16..(batch + 1) * 200 * 16].fill(f64::INFINITY);
    }
    let got = poisoned.run(&client).unwrap();
    for (name, got, want) in [
        ("o", &got.o, &clean.o),
        ("lse", &got.lse, &clean.lse),
        ("dq", got.dq.as_ref().unwrap(), clean.dq.as_ref().unwrap()),
        ("dk", got.dk.as_ref().unwrap(), clean.dk.as_ref().unwrap()),
        ("dv", got.dv.as_ref().unwrap(), clean.dv.as_ref().unwrap()),
    ] {
        // Rows that a NaN has reached are recomputed one by one, with other rounding.
        close(name, got, want, case.tolerance(4e-5));
    }
}
