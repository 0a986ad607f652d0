//! One kernel for dq, dk and dv, against the f64 oracle and against the kernels that it replaces.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::{Alignment, AttentionOptions, BackwardOrder, Dtype};
use flash_attention_reference::mods::Bent;
use std::ops::Range;

/// Whether there is such a kernel for this case on this lane's device.
fn exists(client: &Client, case: &Case) -> bool {
    (Case { fused: true, ..case.clone() }).run(client).unwrap().backward.fused.is_some()
}

/// Checks that NaN and infinity reach the same elements of dq, dk and dv in all of `fused` as in the separate kernels of `leaky`, and that
/// the other elements are close. In those of the three that are `lost`, they reach some elements and not others.
fn agree_with_several(client: &Client, leaky: &Case, lost: Range<usize>, fused: impl IntoIterator<Item = Case>) {
    let gradients = |case: &Case| {
        let results = case.run(client).unwrap();
        [results.dq, results.dk, results.dv].map(Option::unwrap)
    };
    let apart = gradients(leaky);
    for one in &apart[lost] {
        assert!(one.iter().any(|x| x.is_nan()) && one.iter().any(|x| x.is_finite()));
    }
    for case in fused {
        for (of, (apart, fused)) in apart.iter().zip(&gradients(&case)).enumerate() {
            for (n, (apart, fused)) in apart.iter().zip(fused).enumerate() {
                let agree = apart.is_finite() == fused.is_finite();
                let close = !apart.is_finite() || (apart - fused).abs() <= 0.05 * apart.abs().max(1.0);
                assert!(agree && close, "element {n} of {}", ["dq", "dk", "dv"][of]);
            }
        }
    }
}

/// The fused kernel, where there is one, with additions to `dq` in order and without: few and many tiles, head dimensions that do not
/// fill a panel, grouped heads, and NaN or infinity in keys that some rows must not see.
#[test]
fn gradients_in_one_kernel() {
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(100), window_right: Some(20), ..full };
    let capped = AttentionOptions { softcap: Some(2.0), ..causal() };
    // Keys that some queries do not see, and a query that some keys do not.
    let plain = Case::new([1, 2, 1, 200, 200, 64, 64], Dtype::F32, causal());
    let (mut of_keys, mut of_query) = (plain.clone(), plain);
    of_keys.tensors.k[130 * 64] = f64::INFINITY;
    of_keys.tensors.v[150 * 64..][..64].fill(f64::NAN);
    of_query.dout[70 * 64] = f64::NAN;
    let mut dims = vec![[1, 2, 1, 130, 70, 16, 24], [2, 1, 1, 257, 300, 64, 64]];
    if thorough() {
        dims.extend([[1, 4, 2, 200, 330, 72, 40], [1, 2, 2, 640, 640, 128, 128], [1, 1, 1, 1, 513, 128, 72]]);
    }
    let cases = dims.into_iter().flat_map(|sizes| {
        let case = |options| Case::new(sizes, Dtype::F32, options).with_dlse();
        let [b, _, _, sq, sk, ..] = sizes;
        [case(full), case(causal()), case(window), case(capped), case(full).with_mask([b, 1, sq, sk])]
    });
    all(cases.map(|case| Case { fused: true, ..case }));
    // Work tiles that share a group's query heads, one or two each.
    let grouped = |[heads, heads_kv, splits]: [usize; 3], options| {
        let case = Case::new([2, heads, heads_kv, 300, 200, 64, 40], Dtype::F32, options).with_dlse();
        Case { fused: true, splits, ..case }
    };
    all([[4, 2, 2], [4, 1, 2]]
        .into_iter()
        .flat_map(|splits| [full, causal(), window].map(|options| grouped(splits, options))));
    let Some(client) = client() else { return };
    let both = |leaky: &Case| -> Vec<_> {
        let of = |splits| Case { fused: true, splits, ..leaky.clone() }.in_orders();
        [1, 2].into_iter().flat_map(of).collect()
    };
    agree_with_several(&client, &of_keys, 0..1, both(&of_keys));
    if exists(&client, &of_query) {
        agree_with_several(&client, &of_query, 0..3, both(&of_query));
    }
}

/// The fused kernel for wide heads: few and many tiles, head dimensions that do not fill a panel, grouped heads, and NaN or infinity in
/// keys and queries that some rows must not see.
#[test]
fn gradients_of_wide_heads_in_one_kernel() {
    let full = AttentionOptions { backward_order: BackwardOrder::Fast, ..Default::default() };
    let causal = AttentionOptions { causal: true, ..full };
    let window = AttentionOptions { window_left: Some(100), window_right: Some(20), ..full };
    let capped = AttentionOptions { softcap: Some(2.0), ..causal };
    let bent = AttentionOptions { score_mod: Some(ScoreFn::of::<Bent>()), ..causal };
    let case = |sizes, options| Case { fused: true, ..Case::new(sizes, Dtype::F32, options).with_dlse() };
    let mut dims = vec![[1, 2, 1, 130, 170, 200, 256]];
    if thorough() {
        dims.extend([[2, 1, 1, 257, 300, 256, 256], [1, 4, 2, 1, 400, 193, 200], [1, 2, 2, 640, 80, 256, 200]]);
    }
    for sizes in dims {
        let [b, h, _, sq, sk, ..] = sizes;
        all([full, causal, window, capped].map(|options| case(sizes, options)));
        all([case(sizes, full).with_mask([b, 1, sq, sk]), case(sizes, causal).with_alibi_slopes([1, h])]);
        all([case(sizes, bent), case(sizes, window).with_dropout(0.3)]);
    }
    // Blocks of keys that no query sees.
    let top_left = AttentionOptions { alignment: Alignment::TopLeft, ..causal };
    all([case([1, 2, 1, 70, 200, 256, 256], top_left)]);

    let Some(client) = client() else { return };
    let mut leaky = Case::new([1, 2, 1, 200, 200, 256, 256], Dtype::F32, causal);
    leaky.tensors.k[130 * 256] = f64::INFINITY;
    leaky.tensors.v[150 * 256..][..256].fill(f64::NAN);
    leaky.tensors.q[20 * 256] = f64::NAN;
    if exists(&client, &leaky) {
        agree_with_several(&client, &leaky, 0..3, [Case { fused: true, ..leaky.clone() }]);
    }
}
