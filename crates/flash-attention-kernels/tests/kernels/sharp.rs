//! Sharp distributions: one or a few keys have all of a row's probability, and scores are in the thousands.
//!
//! Rounding errors are large there: a score of 10⁴ has a unit in the last place of 10⁻³ in f32, and the gradient of a row with one key is
//! only the rounding error of `dP − delta`. Errors are therefore compared with those of FlashAttention-2's arithmetic.

use crate::common::*;
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, Precision};
use flash_attention_reference as reference;

/// `o, dq, dk, dv` of one head in the arithmetic of FlashAttention-2 as PyTorch builds it (`UNFUSE_FMA`). Sums are f32, in the order of
/// their terms. Probabilities, `dS` and results are rounded to the element type. With [`Precision::Tf32`] the factors of products are
/// rounded to tf32.
struct FlashAttention2 {
    o: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl FlashAttention2 {
    fn of(p: &AttentionProblem, [q, k, v, dout]: [&[f64]; 4]) -> Self {
        let rounded = |x: f32| {
            let mut x = [f64::from(x)];
            reference::round_to(&mut x, p.dtype);
            x[0] as f32
        };
        // Rounding of a factor of a matrix product.
        let factor = |x: f32| if p.options.precision == Precision::Tf32 { tf32(x) } else { rounded(x) };
        let factors = |values: &[f64]| values.iter().map(|x| f64::from(factor(*x as f32))).collect::<Vec<_>>();
        let [q, k, v, of_dout] = [factors(q), factors(k), factors(v), factors(dout)];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0, |sum, (a, b)| (*a as f32).mul_add(*b as f32, sum));
        let (d, d_v) = (p.head_dim, p.head_dim_v);
        let (scale, log2_e) = (p.softmax_scale(), std::f32::consts::LOG2_E);
        let exponent = scale * log2_e;
        let mut o = vec![0.0; p.seq_q * d_v];
        let [mut dq, mut dk, mut dv] = [p.seq_q * d, p.seq_k * d, p.seq_k * d_v].map(|len| vec![0.0f32; len]);
        for i in 0..p.seq_q {
            let keys = if p.options.causal { p.seq_k - p.seq_q + i + 1 } else { p.seq_k };
            let (q, dout, of_dout) = (&q[i * d..][..d], &dout[i * d_v..][..d_v], &of_dout[i * d_v..][..d_v]);
            let s: Vec<f32> = (0..keys).map(|j| dot(q, &k[j * d..][..d])).collect();
            let m = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = s.iter().map(|s| (s * exponent - m * exponent).exp2()).collect();
            let l: f32 = weights.iter().sum();
            let lse = m * scale + l.ln();
            for c in 0..d_v {
                let sum = (0..keys).fold(0.0f32, |sum, j| factor(weights[j]).mul_add(v[j * d_v + c] as f32, sum));
                o[i * d_v + c] = f64::from(rounded(sum * (1.0 / l)));
            }
            let delta = dot(dout, &o[i * d_v..][..d_v]);
            for (j, s) in s.iter().enumerate() {
                let weight = (s * exponent - lse * log2_e).exp2();
                let ds = factor(weight * (dot(of_dout, &v[j * d_v..][..d_v]) - delta));
                for c in 0..d {
                    dq[i * d + c] = ds.mul_add(k[j * d + c] as f32, dq[i * d + c]);
                    dk[j * d + c] = ds.mul_add(q[c] as f32, dk[j * d + c]);
                }
                for c in 0..d_v {
                    dv[j * d_v + c] = factor(weight).mul_add(of_dout[c] as f32, dv[j * d_v + c]);
                }
            }
        }
        let results = |sums: Vec<f32>, factor: f32| sums.into_iter().map(|x| f64::from(rounded(x * factor))).collect();
        FlashAttention2 { o, dq: results(dq, scale), dk: results(dk, scale), dv: results(dv, 1.0) }
    }
}

/// Rounds to ten fraction bits, ties away from zero, like `cvt.rna.tf32.f32`.
fn tf32(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x1000) & !0x1FFF)
}

/// Root mean square of the differences, and the largest difference.
fn errors(got: &[f64], want: &[f64]) -> [f64; 2] {
    let differences = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    let squares: f64 = differences.clone().map(|x| x * x).sum();
    [(squares / got.len() as f64).sqrt(), differences.fold(0.0, f64::max)]
}

/// A case whose queries and keys are `factor` times as large as usual.
fn case(sizes: Sizes, factor: f64, options: AttentionOptions) -> Case {
    let mut case = Case::new(sizes, Dtype::F32, options);
    for values in [&mut case.tensors.q, &mut case.tensors.k] {
        values.iter_mut().for_each(|x| *x *= factor);
        reference::round_to(values, case.problem.dtype);
    }
    case
}

#[test]
fn errors_are_those_of_flash_attention_2() {
    let Some(client) = client() else { return };
    let causal = AttentionOptions { causal: true, ..Default::default() };
    for (sizes, factor, options) in [
        ([2, 4, 4, 512, 513, 64, 64], 60.0, AttentionOptions::default()),
        ([1, 4, 4, 129, 257, 128, 128], 20.0, causal),
        ([1, 4, 4, 200, 200, 64, 64], 4.0, causal),
        ([1, 4, 4, 70, 513, 96, 64], 60.0, AttentionOptions::default()),
    ] {
        let case = case(sizes, factor, options);
        let p = case.problem;
        let got = case.run(&client).unwrap();
        let inputs = case.reference_inputs();
        let want = reference::forward(&p, &inputs);
        let grads = reference::backward(&p, &inputs, &case.dout, None);
        // Heads are contiguous in memory.
        let [_, _, _, sq, sk, d, d_v] = sizes;
        let heads = (0..p.batch * p.num_heads_q).map(|head| {
            let of = |values: &'_ [f64], len: usize| values[head * len..][..len].to_vec();
            let (q, k) = (of(&case.tensors.q, sq * d), of(&case.tensors.k, sk * d));
            FlashAttention2::of(&p, [&q, &k, &of(&case.tensors.v, sk * d_v), &of(&case.dout, sq * d_v)])
        });
        let heads: Vec<FlashAttention2> = heads.collect();
        let all = |of: fn(&FlashAttention2) -> &Vec<f64>| heads.iter().flat_map(|head| of(head).clone()).collect();
        let theirs: [Vec<f64>; 4] =
            [all(|head| &head.o), all(|head| &head.dq), all(|head| &head.dk), all(|head| &head.dv)];
        let ours = [&got.o, got.dq.as_ref().unwrap(), got.dk.as_ref().unwrap(), got.dv.as_ref().unwrap()];
        let wanted = [&want.o, &grads.dq, &grads.dk, &grads.dv];
        // Products of f32 as (split) tf32 differ between forward and backward.
        let products = if p.dtype == Dtype::F32 { 3.0 } else { 1.5 };
        for (n, name) in ["o", "dq", "dk", "dv"].into_iter().enumerate() {
            let (ours, theirs) = (errors(ours[n], wanted[n]), errors(&theirs[n], wanted[n]));
            println!("{name} of {p:?}: errors (rms, largest) {ours:?}, FlashAttention-2's {theirs:?}");
            // Error that remains if one key has all of the probability.
            let floor = 5e-5 * factor / 60.0;
            assert!(
                ours[0] <= products * theirs[0] + floor,
                "{name} of {p:?}: errors (rms, largest) are {ours:?}, FlashAttention-2's {theirs:?}"
            );
            // The largest error depends on single rows, so its bound is wider.
            assert!(
                ours[1] <= 4.0 * theirs[1] + 20.0 * floor,
                "{name} of {p:?}: errors (rms, largest) are {ours:?}, FlashAttention-2's {theirs:?}"
            );
        }
    }
}
