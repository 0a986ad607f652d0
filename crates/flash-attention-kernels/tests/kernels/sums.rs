//! Gradients of slopes, of tensors that score functions read and of broadcast biases, which Hopper's kernels of `dq` and `dk` sum: several
//! at a time, over queries and over keys, and next to hidden values that are NaN or infinite.

use crate::common::*;
use flash_attention_kernels::mods::{Alibi, ScoreFn, Temperature};
use flash_attention_kernels::{AttentionOptions, Dtype};
use flash_attention_reference::mods::Bent;

/// Score functions with the shapes of their tensors: of each head, of each query and of each key.
fn functions(heads: usize, seq_q: usize, seq_k: usize) -> [(ScoreFn, Vec<[usize; 4]>); 5] {
    let (alibi, bent) = (ScoreFn::of::<Alibi>(), ScoreFn::of::<Bent>());
    [
        (alibi, vec![[1, heads, 1, 1]]),
        (alibi, vec![[1, 1, seq_q, 1]]),
        (alibi, vec![[1, heads, 1, seq_k]]),
        (bent, vec![[1, 1, seq_q, 1], [1, heads, 1, seq_k]]),
        (bent, vec![[1, heads, 1, 1], [1, 1, seq_q, seq_k]]),
    ]
}

/// More sums than one kernel computes, with grouped heads, dropout and a softcap.
#[test]
fn several_sums_at_a_time() {
    let options = AttentionOptions { dropout: 0.25, ..causal() };
    let capped = AttentionOptions { softcap: Some(3.0), window_left: Some(90), ..causal() };
    let dims: &[usize] = if thorough() { &[40, 64, 96, 128, 192, 256] } else { &[40] };
    all(dims.iter().flat_map(|d| {
        let case = |options| Case::new([2, 4, 2, 140, 208, *d, *d], Dtype::F32, options).with_alibi_slopes([1, 4]);
        let of_function = functions(4, 140, 208).map(|(function, shapes)| {
            let options = AttentionOptions { score_mod: Some(function), ..options };
            case(options).with_bias([1, 4, 1, 208]).with_score_tensors(&shapes)
        });
        let of_bias = [[1, 4, 1, 1], [2, 1, 140, 1], [1, 1, 1, 208]].map(|shape| case(capped).with_bias(shape));
        of_function.into_iter().chain(of_bias)
    }));
}

/// Additions of one kernel that computes `dq`, `dk` and `dv`.
#[test]
fn sums_of_the_kernel_of_all_gradients() {
    let alibi = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal() };
    let temperature = AttentionOptions { score_mod: Some(ScoreFn::of::<Temperature>()), ..causal() };
    let of_dims = |d, options| Case { fused: true, ..Case::new([1, 4, 2, 150, 300, d, d], Dtype::F32, options) };
    let of = |options| of_dims(64, options);
    all([
        of(causal()).with_alibi_slopes([1, 4]),
        Case { splits: 2, ..of(causal()).with_alibi_slopes([1, 4]) },
        of(AttentionOptions { dropout: 0.25, ..causal() }).with_alibi_slopes([1, 4]),
        of(alibi).with_score_tensors(&[[1, 4, 1, 300]]),
        of(alibi).with_score_tensors(&[[1, 4, 150, 1]]),
        with_temperatures(of(temperature)),
        with_temperatures(of_dims(128, temperature)),
    ]);
}

/// Temperatures of each head near 1, by which scores are divided.
fn with_temperatures(case: Case) -> Case {
    let mut case = case.with_score_tensors(&[[1, 4, 1, 1]]);
    for value in case.tensors.score_tensors[0].iter_mut().flatten() {
        *value = 1.0 + value.clamp(-0.5, 0.5);
        *value = f64::from(*value as f32);
    }
    case
}

#[test]
fn sums_of_sequences() {
    let alibi = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal() };
    let padded = Case::new([2, 4, 2, 140, 210, 16, 16], Dtype::F32, alibi);
    let padded = padded.with_seq_lens_q(&[100, 3]).with_seq_lens_k(&[210, 90]).with_score_tensors(&[[2, 4, 1, 1]]);
    let packed = Case::new([1, 4, 2, 280, 420, 16, 16], Dtype::F32, alibi);
    let packed = packed.with_cu_seqlens(&[7, 40, 140, 200, 270], &[0, 100, 200, 211, 400]);
    all([
        padded.clone().with_alibi_slopes([2, 4]).with_bias([1, 1, 1, 210]),
        padded.with_bias([1, 1, 140, 1]),
        packed.clone().with_score_tensors(&[[1, 4, 280, 1]]).with_alibi_slopes([1, 4]),
        packed.with_score_tensors(&[[1, 4, 1, 420]]).with_bias([1, 4, 1, 1]),
    ]);
}

/// NaN and infinity in keys that no query sees, and in queries that see no key, do not reach any sum.
#[test]
fn hidden_values_do_not_reach_sums() {
    let Some(client) = client() else { return };
    let (sq, sk, d) = (208, 140, 16);
    for (function, shapes) in functions(2, sq, sk) {
        for fused in [false, true] {
            let options = AttentionOptions { score_mod: Some(function), ..causal() };
            let case = Case::new([1, 2, 1, sq, sk, d, d], Dtype::F32, options).with_mask([1, 1, 1, sk]);
            let mut case = Case { fused, ..case }.with_alibi_slopes([1, 2]).with_score_tensors(&shapes);
            if !fused {
                case = case.with_bias([1, 2, 1, sk]);
            }
            if !supports(&client, case.problem.dtype) {
                return;
            }
            // The last 30 keys and every seventh are hidden. The first 68 queries are before the first key.
            let hidden = |key: usize| key >= 110 || key.is_multiple_of(7);
            case.tensors.mask = Some((0..sk).map(hidden).collect());
            for key in (0..sk).filter(|key| hidden(*key)) {
                case.tensors.k[key * d..][..d].fill(if key % 2 == 0 { f64::NAN } else { f64::INFINITY });
                case.tensors.v[key * d..][..d].fill(if key % 3 == 0 { f64::NAN } else { f64::INFINITY });
            }
            for row in (0..2 * sq).filter(|row| row % sq < sq - sk) {
                case.tensors.q[row * d..][..d].fill(f64::NAN);
                case.dout[row * d..][..d].fill(f64::NAN);
            }
            let Results { dbias, dalibi_slopes, dscore_tensors: [a, b], .. } = case.check(&client);
            let all = [dbias, dalibi_slopes, a, b].into_iter().flatten().flatten();
            assert!(all.into_iter().all(f64::is_finite), "a hidden value has reached a sum");
        }
    }
}
