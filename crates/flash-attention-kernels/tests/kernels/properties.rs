//! Properties of attention that hold for any data, checked without the oracle.

use crate::common::*;
use flash_attention_kernels::{AttentionOptions, BackwardOrder, Dtype, Kernel, Precision};

const CAUSAL: AttentionOptions = AttentionOptions {
    softmax_scale: None,
    causal: true,
    continued: false,
    alignment: flash_attention_kernels::Alignment::BottomRight,
    window_left: None,
    window_right: None,
    softcap: None,
    score_mod: None,
    mask_mod: None,
    dropout: 0.0,
    dropout_seed: None,
    backward_order: BackwardOrder::Deterministic,
    precision: Precision::Full,
};

/// `[batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v]` of most properties.
const SIZES: Sizes = [2, 4, 2, 70, 90, 16, 16];

fn plain() -> Case {
    Case::new(SIZES, Dtype::F32, AttentionOptions::default())
}

/// Rows `rows` of each matrix of `[matrices, of, width]`.
fn rows(values: &[f64], of: usize, width: usize, rows: impl IntoIterator<Item = usize> + Clone) -> Vec<f64> {
    values
        .chunks(of * width)
        .flat_map(|matrix| rows.clone().into_iter().flat_map(|r| matrix[r * width..(r + 1) * width].to_vec()))
        .collect()
}

fn grads(results: &Results) -> [&Vec<f64>; 3] {
    [results.dq.as_ref().unwrap(), results.dk.as_ref().unwrap(), results.dv.as_ref().unwrap()]
}

#[test]
fn permuting_keys_changes_nothing_but_their_gradients() {
    let Some(client) = client() else { return };
    let case = plain();
    let order: Vec<usize> = (0..90).map(|j| (j * 37 + 11) % 90).collect();
    let shuffle = |x: &[f64]| rows(x, 90, 16, order.clone());
    let mut shuffled = case.clone();
    (shuffled.tensors.k, shuffled.tensors.v) = (shuffle(&case.tensors.k), shuffle(&case.tensors.v));
    let (a, b) = (case.run(&client).unwrap(), shuffled.run(&client).unwrap());
    close("o", &b.o, &a.o, case.tolerance(5e-6));
    close("lse", &b.lse, &a.lse, 5e-6);
    let ([dq, dk, dv], [pq, pk, pv]) = (grads(&a), grads(&b));
    close("dq", pq, dq, case.tolerance(2e-5));
    close("dk", pk, &shuffle(dk), case.tolerance(2e-5));
    close("dv", pv, &shuffle(dv), case.tolerance(2e-5));
}

#[test]
fn values_of_one_give_one() {
    let Some(client) = client() else { return };
    let mut case = Case::new(SIZES, Dtype::F32, CAUSAL);
    case.tensors.v.fill(1.0);
    // The sum of the weights is exact, but their products with the values use rounded weights.
    let tolerance = if case.problem.options.precision == Precision::Tf32 { 5e-4 } else { 1e-6 };
    close("o", &case.run(&client).unwrap().o, &vec![1.0; case.problem.rows() * 16], tolerance);
}

#[test]
fn a_batch_or_head_alone_is_bitwise_the_one_among_others() {
    let Some(client) = client() else { return };
    let case = Case::new(SIZES, Dtype::F32, CAUSAL);
    let all = case.run(&client).unwrap();
    // Heads 2 and 3 of batch 1, which share key/value head 1.
    let mut alone = Case::new([1, 2, 1, 70, 90, 16, 16], Dtype::F32, CAUSAL);
    let q = (4 + 2) * 70 * 16..(4 + 4) * 70 * 16;
    let k = (2 + 1) * 90 * 16..(2 + 2) * 90 * 16;
    (alone.tensors.q, alone.dout) = (case.tensors.q[q.clone()].to_vec(), case.dout[q.clone()].to_vec());
    (alone.tensors.k, alone.tensors.v) = (case.tensors.k[k.clone()].to_vec(), case.tensors.v[k.clone()].to_vec());
    let one = alone.run(&client).unwrap();
    assert_eq!(one.o, all.o[q.clone()]);
    assert_eq!(one.lse, all.lse[(4 + 2) * 70..]);
    let ([dq, dk, dv], [aq, ak, av]) = (grads(&one), grads(&all));
    assert_eq!(*dq, aq[q]);
    assert_eq!(*dk, ak[k.clone()]);
    assert_eq!(*dv, av[k]);
}

/// Asserts that hidden elements have not changed a result: bitwise for the portable kernel, else up to rounding, because other kernels
/// recompute rows that a NaN has reached, in another order of summation.
fn unseen(case: &Case, ran: Kernel, name: &str, got: &[f64], want: &[f64]) {
    match ran {
        Kernel::Portable => assert_eq!(got, want, "{name}"),
        _ => close(name, got, want, case.tolerance(2e-5)),
    }
}

#[test]
fn later_keys_do_not_change_a_causal_prefix() {
    let Some(client) = client() else { return };
    let mut short = Case::new([1, 2, 2, 70, 70, 16, 16], Dtype::F32, CAUSAL);
    let mut long = Case::new([1, 2, 2, 150, 150, 16, 16], Dtype::F32, CAUSAL);
    for head in 0..2 {
        for (to, from) in [
            (&mut long.tensors.q, &short.tensors.q),
            (&mut long.tensors.k, &short.tensors.k),
            (&mut long.tensors.v, &short.tensors.v),
        ] {
            to[head * 150 * 16..][..70 * 16].copy_from_slice(&from[head * 70 * 16..][..70 * 16]);
        }
    }
    short.dout = rows(&long.dout, 150, 16, 0..70);
    let want = short.run(&client).unwrap();
    // Later keys must not be seen, even if they are NaN.
    for poison in [1e4, f64::NAN] {
        let mut long = long.clone();
        for head in 0..2 {
            for x in [&mut long.tensors.q, &mut long.tensors.k, &mut long.tensors.v] {
                x[head * 150 * 16..][70 * 16..150 * 16].fill(poison);
            }
        }
        let got = long.run(&client).unwrap();
        if poison.is_finite() {
            assert_eq!(rows(&got.o, 150, 16, 0..70), want.o);
        } else {
            unseen(&short, want.forward.kernel(), "o", &rows(&got.o, 150, 16, 0..70), &want.o);
        }
        assert_eq!(rows(&got.lse, 150, 1, 0..70), want.lse);
        unseen(
            &short,
            want.forward.kernel(),
            "dq",
            &rows(got.dq.as_ref().unwrap(), 150, 16, 0..70),
            want.dq.as_ref().unwrap(),
        );
    }
}

#[test]
fn splits_of_the_keys_combined_by_lse_equal_the_whole() {
    let Some(client) = client() else { return };
    let whole = Case::new([1, 2, 2, 70, 90, 16, 16], Dtype::F32, AttentionOptions::default());
    let half = |range: std::ops::Range<usize>| {
        let mut case = Case::new([1, 2, 2, 70, range.len(), 16, 16], Dtype::F32, AttentionOptions::default());
        case.tensors.q.clone_from(&whole.tensors.q);
        (case.tensors.k, case.tensors.v) =
            (rows(&whole.tensors.k, 90, 16, range.clone()), rows(&whole.tensors.v, 90, 16, range));
        case.run(&client).unwrap()
    };
    let (a, b, all) = (half(0..33), half(33..90), whole.run(&client).unwrap());
    for row in 0..2 * 70 {
        let lse = (a.lse[row].exp() + b.lse[row].exp()).ln();
        assert!((lse - all.lse[row]).abs() < 1e-5);
        for c in 0..16 {
            let n = row * 16 + c;
            let merged = (a.lse[row] - lse).exp() * a.o[n] + (b.lse[row] - lse).exp() * b.o[n];
            assert!((merged - all.o[n]).abs() < whole.tolerance(1e-5));
        }
    }
}

#[test]
fn grouped_heads_are_repeated_heads() {
    let Some(client) = client() else { return };
    let grouped = Case::new([1, 4, 2, 70, 90, 16, 16], Dtype::F32, CAUSAL);
    let mut repeated = Case::new([1, 4, 4, 70, 90, 16, 16], Dtype::F32, CAUSAL);
    let repeat = |x: &[f64]| x.chunks(90 * 16).flat_map(|head| [head, head].concat()).collect::<Vec<_>>();
    (repeated.tensors.q, repeated.dout) = (grouped.tensors.q.clone(), grouped.dout.clone());
    (repeated.tensors.k, repeated.tensors.v) = (repeat(&grouped.tensors.k), repeat(&grouped.tensors.v));
    let (a, b) = (grouped.run(&client).unwrap(), repeated.run(&client).unwrap());
    assert_eq!(a.o, b.o);
    assert_eq!(a.dq, b.dq);
    let fold = |x: &[f64]| {
        x.chunks(2 * 90 * 16)
            .flat_map(|pair| (0..90 * 16).map(|n| pair[n] + pair[n + 90 * 16]).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    close("dk", grads(&a)[1], &fold(grads(&b)[1]), grouped.tolerance(2e-5));
    close("dv", grads(&a)[2], &fold(grads(&b)[2]), grouped.tolerance(2e-5));
}

#[test]
fn masked_keys_have_zero_gradient_and_leak_nothing() {
    let Some(client) = client() else { return };
    // Keys 20 to 39 are hidden from all queries, like padding.
    let hidden = 20..40;
    let mut clean = plain().with_mask([1, 1, 1, 90]);
    clean.tensors.mask = Some((0..90).map(|j| hidden.contains(&j)).collect());
    let want = clean.run(&client).unwrap();
    let ran = want.forward.kernel();
    for poison in [f64::NAN, f64::INFINITY] {
        let mut dirty = clean.clone();
        for head in 0..4 {
            for x in [&mut dirty.tensors.k, &mut dirty.tensors.v] {
                x[(head * 90 + 20) * 16..(head * 90 + 40) * 16].fill(poison);
            }
        }
        let got = dirty.run(&client).unwrap();
        unseen(&clean, ran, "o", &got.o, &want.o);
        assert_eq!(got.lse, want.lse, "{poison} leaked");
        for (got, want) in grads(&got).into_iter().zip(grads(&want)) {
            unseen(&clean, ran, "gradient", got, want);
        }
        for d in [grads(&got)[1], grads(&got)[2]] {
            assert!(rows(d, 90, 16, hidden.clone()).iter().all(|x| *x == 0.0));
        }
    }
}

#[test]
fn non_finite_values_reach_only_rows_that_see_them() {
    let Some(client) = client() else { return };
    let window = AttentionOptions { window_left: Some(60), ..CAUSAL };
    for options in [CAUSAL, window] {
        let mut case = Case::new([1, 2, 1, 200, 200, 16, 40], Dtype::F32, options).with_mask([1, 2, 1, 200]);
        case.tensors.mask = Some((0..400).map(|n| n % 200 == 20 || n == 30).collect());
        // Key 20 is hidden from both heads, key 30 from the first.
        for (key, column, value) in
            [(150, 3, f64::NAN), (90, 39, f64::INFINITY), (20, 7, f64::NAN), (30, 8, f64::NEG_INFINITY)]
        {
            case.tensors.v[key * 40 + column] = value;
        }
        let want = flash_attention_reference::forward(&case.problem, &case.reference_inputs()).o;
        assert!(want.iter().any(|x| x.is_nan()) && want.contains(&f64::INFINITY) && want.contains(&f64::NEG_INFINITY));
        case.wanted = [false; 7];
        close("o", &case.run(&client).unwrap().o, &want, case.tolerance(5e-6));
    }
}

#[test]
fn fully_masked_queries_do_not_leak() {
    let Some(client) = client() else { return };
    // Queries 10 to 29 see no key, so NaN in them or in their dout must not reach dk and dv.
    let mut clean = plain().with_mask([1, 1, 70, 1]);
    clean.tensors.mask = Some((0..70).map(|i| (10..30).contains(&i)).collect());
    let want = clean.run(&client).unwrap();
    let ran = want.forward.kernel();
    let mut dirty = clean.clone();
    for head in 0..8 {
        for x in [&mut dirty.tensors.q, &mut dirty.dout] {
            x[(head * 70 + 10) * 16..(head * 70 + 30) * 16].fill(f64::NAN);
        }
    }
    let got = dirty.run(&client).unwrap();
    assert_eq!(got.o, want.o);
    for (got, want) in grads(&got).into_iter().zip(grads(&want)) {
        unseen(&clean, ran, "gradient", got, want);
    }
    assert!(rows(grads(&got)[0], 70, 16, 10..30).iter().all(|x| *x == 0.0));
}

#[test]
fn a_visible_nan_is_not_swallowed() {
    let Some(client) = client() else { return };
    let mut case = Case::new([1, 1, 1, 70, 90, 16, 16], Dtype::F32, AttentionOptions::default());
    case.tensors.q[5 * 16] = f64::NAN;
    let results = case.run(&client).unwrap();
    assert!(results.o[5 * 16..6 * 16].iter().all(|x| x.is_nan()), "{:?}", &results.o[5 * 16..6 * 16]);
    assert!(results.o[..5 * 16].iter().all(|x| x.is_finite()));
}

#[test]
fn adding_a_vector_to_every_key_shifts_lse_alone() {
    let Some(client) = client() else { return };
    let case = plain();
    // In half precision the shifted keys are rounded, which changes the products.
    let loose = case.tolerance(1e-5);
    let added: Vec<f64> = (0..16).map(|c| (c as f64 - 7.5) / 16.0).collect();
    let mut shifted = case.clone();
    shifted.tensors.k.iter_mut().enumerate().for_each(|(n, x)| *x = (*x + added[n % 16]) as f32 as f64);
    let (a, b) = (case.run(&client).unwrap(), shifted.run(&client).unwrap());
    close("o", &b.o, &a.o, loose);
    for row in 0..case.problem.rows() {
        let product: f64 = (0..16).map(|c| case.tensors.q[row * 16 + c] * added[c]).sum();
        assert!((b.lse[row] - a.lse[row] - product / 4.0).abs() < loose);
    }
    close("dv", grads(&b)[2], grads(&a)[2], 2.0 * loose);
}

#[test]
fn gradients_of_values_sum_to_those_of_outputs() {
    let Some(client) = client() else { return };
    let case = Case::new([1, 2, 2, 70, 90, 16, 16], Dtype::F32, CAUSAL);
    let results = case.run(&client).unwrap();
    for head in 0..2 {
        for c in 0..16 {
            let sum = |x: &[f64], seq: usize| (0..seq).map(|i| x[(head * seq + i) * 16 + c]).sum::<f64>();
            assert!((sum(grads(&results)[2], 90) - sum(&case.dout, 70)).abs() < case.tolerance(1e-4) * 4.0);
        }
    }
}

#[test]
fn gradients_are_linear_in_dout() {
    let Some(client) = client() else { return };
    let case = Case::new(SIZES, Dtype::F32, CAUSAL);
    let other = Case { dout: case.dout.iter().rev().copied().collect(), ..case.clone() };
    let both = Case {
        dout: case.dout.iter().zip(&other.dout).map(|(a, b)| (2.0 * a + b) as f32 as f64).collect(),
        ..case.clone()
    };
    let [a, b, sum] = [&case, &other, &both].map(|case| case.run(&client).unwrap());
    for n in 0..3 {
        let want: Vec<f64> = grads(&a)[n].iter().zip(grads(&b)[n]).map(|(a, b)| 2.0 * a + b).collect();
        close("gradient", grads(&sum)[n], &want, case.tolerance(2e-5));
    }
}

#[test]
fn options_that_hide_nothing_change_nothing() {
    let Some(client) = client() else { return };
    let causal = Case::new([1, 2, 2, 70, 70, 16, 16], Dtype::F32, CAUSAL);
    let want = causal.run(&client).unwrap();
    let mut window = causal.clone();
    window.problem.options.window_left = Some(70);
    let mut mask = causal.clone().with_mask([1, 1, 70, 70]);
    mask.tensors.mask.as_mut().unwrap().fill(false);
    let mut bias = causal.clone().with_bias([1, 1, 70, 70]);
    bias.tensors.bias.as_mut().unwrap().fill(0.0);
    for same in [window, mask, bias] {
        let got = same.run(&client).unwrap();
        close("o", &got.o, &want.o, 1e-6);
        close("lse", &got.lse, &want.lse, 1e-6);
        for n in 0..3 {
            close("gradient", grads(&got)[n], grads(&want)[n], 1e-6);
        }
    }
}
