//! Every gradient compared with central differences of the forward, for every option.

mod reference_common;

use cubecl::prelude::*;
use flash_attention_kernels::mods::{
    Alibi, Bias, Document, Kerple, MaskFn, Pair, Partials, RelativePosition, ScalableSoftmax, ScoreFn, ScoreMod,
    Softcap, Swapped, Temperature, Then, Values,
};
use flash_attention_kernels::{Alignment, AttentionOptions, BackwardOrder, Precision};
use flash_attention_reference::Gradients;
use flash_attention_reference::mods::{Bent, Relative, Sloped};
use reference_common::{Case, Sizes, assert_close, broadcasts};

/// Small sizes, all different where they may differ.
const GROUPED: Sizes = [2, 4, 2, 3, 5, 3, 2];
const LONG_Q: Sizes = [1, 2, 1, 6, 3, 2, 3];

const PLAIN: AttentionOptions = AttentionOptions {
    softmax_scale: None,
    causal: false,
    continued: false,
    alignment: Alignment::BottomRight,
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
const CAUSAL: AttentionOptions = AttentionOptions { causal: true, ..PLAIN };
const TOP_LEFT: AttentionOptions = AttentionOptions { alignment: Alignment::TopLeft, ..CAUSAL };
/// A cap so small that scores are in the curved part of tanh.
const SOFTCAP: AttentionOptions = AttentionOptions { softcap: Some(0.75), ..PLAIN };
const LEFT: AttentionOptions = AttentionOptions { window_left: Some(1), ..PLAIN };
const RIGHT: AttentionOptions = AttentionOptions { window_right: Some(0), alignment: Alignment::TopLeft, ..PLAIN };
const BOTH: AttentionOptions = AttentionOptions { window_left: Some(0), window_right: Some(1), ..PLAIN };
const SCALE: AttentionOptions = AttentionOptions { softmax_scale: Some(1.7), ..PLAIN };

type Tensor = fn(&mut Case) -> &mut Vec<f64>;

/// `Σ dout∘o + Σ dlse∘lse`, over the rows that see a key.
fn loss(case: &Case) -> f64 {
    let output = case.forward();
    let sum = |x: &[f64], y: &[f64]| x.iter().zip(y).filter(|(_, y)| y.is_finite()).map(|(x, y)| x * y).sum::<f64>();
    sum(&case.dout, &output.o) + case.dlse.as_ref().map_or(0.0, |dlse| sum(dlse, &output.lse))
}

/// The gradient of the loss for one tensor, by central differences.
fn differences(case: &Case, tensor: Tensor) -> Vec<f64> {
    const H: f64 = 1e-4;
    differences_of(case, tensor, &[(H, 0.5 / H)])
}

/// The gradient as a sum of differences `loss(x + step) − loss(x − step)` with these weights.
fn differences_of(case: &Case, tensor: Tensor, steps: &[(f64, f64)]) -> Vec<f64> {
    let mut case = case.clone();
    (0..tensor(&mut case).len())
        .map(|n| {
            let x = tensor(&mut case)[n];
            let mut loss_at = |x| {
                tensor(&mut case)[n] = x;
                loss(&case)
            };
            let difference = steps.iter().map(|(step, weight)| weight * (loss_at(x + step) - loss_at(x - step))).sum();
            loss_at(x);
            difference
        })
        .collect()
}

/// Largest deviation of dq, dk, dv and the gradients of the function's tensors from central differences. Functions compute in f32, so the
/// steps are wide, and the formula's error is of the fourth power of the step.
fn deviations_of_function(case: &Case, gradients: &Gradients) -> [f64; 5] {
    const H: f64 = 0.02;
    let steps = [(H, 8.0 / (12.0 * H)), (2.0 * H, -1.0 / (12.0 * H))];
    let deviation = |gradient: &[f64], tensor| {
        let differences = differences_of(case, tensor, &steps);
        assert_eq!(gradient.len(), differences.len());
        let pairs = gradient.iter().zip(&differences);
        pairs.map(|(x, y)| if x.is_nan() { f64::INFINITY } else { (x - y).abs() }).fold(0.0, f64::max)
    };
    for nth in 0..2 {
        assert_eq!(gradients.dscore_tensors[nth].is_some(), case.tensors.score_tensors[nth].is_some());
    }
    let of =
        |gradient: &Option<Vec<f64>>, tensor| gradient.as_ref().map_or(0.0, |gradient| deviation(gradient, tensor));
    [
        deviation(&gradients.dq, |case| &mut case.tensors.q),
        deviation(&gradients.dk, |case| &mut case.tensors.k),
        deviation(&gradients.dv, |case| &mut case.tensors.v),
        of(&gradients.dscore_tensors[0], |case| case.tensors.score_tensors[0].as_mut().unwrap()),
        of(&gradients.dscore_tensors[1], |case| case.tensors.score_tensors[1].as_mut().unwrap()),
    ]
}

/// Error of the differences and of rounding to f32.
const TOLERANCE_OF_FUNCTION: f64 = 3e-4;

#[track_caller]
fn check_function(case: &Case) {
    let deviations = deviations_of_function(case, &case.backward());
    assert!(
        deviations.iter().all(|&x| x < TOLERANCE_OF_FUNCTION),
        "deviations of dq, dk, dv, da, db are {deviations:?} for {:?}",
        case.problem
    );
}

/// Largest deviation of dq, dk, dv, dbias, dalibi_slopes and dsinks from central differences.
fn deviations(case: &Case, gradients: &Gradients) -> [f64; 6] {
    let deviation = |gradient: &[f64], tensor| {
        let differences = differences(case, tensor);
        assert_eq!(gradient.len(), differences.len());
        let pairs = gradient.iter().zip(&differences);
        pairs.map(|(x, y)| if x.is_nan() { f64::INFINITY } else { (x - y).abs() }).fold(0.0, f64::max)
    };
    assert_eq!(gradients.dbias.is_some(), case.tensors.bias.is_some());
    assert_eq!(gradients.dalibi_slopes.is_some(), case.tensors.alibi_slopes.is_some());
    assert_eq!(gradients.dsinks.is_some(), case.tensors.sinks.is_some());
    let of =
        |gradient: &Option<Vec<f64>>, tensor| gradient.as_ref().map_or(0.0, |gradient| deviation(gradient, tensor));
    [
        deviation(&gradients.dq, |case| &mut case.tensors.q),
        deviation(&gradients.dk, |case| &mut case.tensors.k),
        deviation(&gradients.dv, |case| &mut case.tensors.v),
        of(&gradients.dbias, |case| case.tensors.bias.as_mut().unwrap()),
        of(&gradients.dalibi_slopes, |case| case.tensors.alibi_slopes.as_mut().unwrap()),
        of(&gradients.dsinks, |case| case.tensors.sinks.as_mut().unwrap()),
    ]
}

/// Error of the differences, about the square of their step.
const TOLERANCE: f64 = 3e-7;

#[track_caller]
fn check(case: &Case) {
    let deviations = deviations(case, &case.backward());
    assert!(
        deviations.iter().all(|&x| x < TOLERANCE),
        "deviations of dq, dk, dv, dbias, dalibi_slopes, dsinks are {deviations:?} for {:?}",
        case.problem
    );
}

#[test]
fn gradients_agree_for_every_option() {
    for options in [PLAIN, CAUSAL, TOP_LEFT, SOFTCAP, LEFT, RIGHT, BOTH, SCALE] {
        for sizes in [GROUPED, LONG_Q] {
            check(&Case::new(sizes, options));
            check(&Case::new(sizes, options).with_dlse());
        }
    }
}

#[test]
fn gradients_agree_for_every_head_grouping() {
    for (num_heads_q, num_heads_kv) in [(1, 1), (3, 3), (6, 3), (8, 2), (4, 1)] {
        check(&Case::new([1, num_heads_q, num_heads_kv, 2, 3, 2, 2], CAUSAL).with_dlse());
    }
}

#[test]
fn gradients_agree_for_every_bias_broadcast() {
    for sizes in [GROUPED, LONG_Q] {
        let options = AttentionOptions { softcap: Some(0.75), ..CAUSAL };
        for shape in broadcasts(Case::new(sizes, options).problem.scores_shape()) {
            check(&Case::new(sizes, options).with_bias(shape).with_dlse());
        }
    }
}

#[test]
fn gradients_agree_for_every_mask_broadcast() {
    for shape in broadcasts(Case::new(GROUPED, PLAIN).problem.scores_shape()) {
        check(&Case::new(GROUPED, PLAIN).with_mask(shape).with_dlse());
    }
}

#[test]
fn gradients_agree_for_slopes() {
    for options in [PLAIN, CAUSAL, TOP_LEFT, SOFTCAP, LEFT] {
        for sizes in [GROUPED, LONG_Q] {
            let [batch, heads, ..] = sizes;
            check(&Case::new(sizes, options).with_alibi_slopes([1, heads]));
            check(&Case::new(sizes, options).with_alibi_slopes([batch, heads]).with_dlse());
        }
    }
}

#[test]
fn gradients_agree_for_sinks() {
    for options in [PLAIN, CAUSAL, SOFTCAP, BOTH] {
        // Some rows of the second problem see only their sinks.
        for sizes in [GROUPED, LONG_Q] {
            check(&Case::new(sizes, options).with_sinks());
            check(&Case::new(sizes, options).with_sinks().with_dlse());
        }
    }
}

#[test]
fn gradients_agree_under_dropout() {
    for options in [PLAIN, CAUSAL, SOFTCAP] {
        let options = AttentionOptions { dropout: 0.4, ..options };
        for sizes in [GROUPED, LONG_Q] {
            check(&Case::new(sizes, options).with_dlse());
        }
    }
}

#[test]
fn gradients_agree_for_sequence_lengths() {
    for options in [PLAIN, CAUSAL, TOP_LEFT, BOTH] {
        for (q, k) in [([3, 2], [5, 3]), ([1, 0], [2, 4]), ([3, 3], [0, 1])] {
            let case = Case::new(GROUPED, options).with_seq_lens(&q, &k).with_dlse();
            check(&case.clone().with_bias([1, 4, 1, 5]).with_alibi_slopes([1, 4]));
            check(&case.with_sinks());
        }
    }
}

#[test]
fn gradients_agree_for_packed_sequences() {
    let (q, k) = ([0, 2, 3, 5, 6], [1, 4, 5, 5, 9]);
    for options in [PLAIN, CAUSAL, TOP_LEFT, BOTH, AttentionOptions { dropout: 0.4, ..CAUSAL }] {
        let case = Case::new(GROUPED, options).with_cu_seqlens(&q, &k).with_dlse();
        check(&case.clone().with_bias([1, 4, 1, 5]).with_alibi_slopes([1, 4]));
        check(&case.with_sinks());
    }
}

/// Packed sequences give the same results as each sequence in a problem of its own.
#[test]
fn packed_sequences_equal_separate_ones() {
    for options in [PLAIN, CAUSAL, TOP_LEFT, LEFT] {
        let (cu_q, cu_k) = ([0, 3, 3, 7], [0, 2, 5, 9]);
        let packed = Case::new([1, 4, 2, 7, 9, 3, 2], options).with_cu_seqlens(&cu_q, &cu_k).with_alibi_slopes([1, 4]);
        let (o, gradients) = (packed.forward().o, packed.backward());
        for n in 0..3 {
            let (q, k) = (cu_q[n]..cu_q[n + 1], cu_k[n]..cu_k[n + 1]);
            let mut alone = Case::new([1, 4, 2, q.len(), k.len(), 3, 2], options).with_alibi_slopes([1, 4]);
            let cut = |values: &[f64], of: &std::ops::Range<usize>, [all, dim]: [usize; 2]| -> Vec<f64> {
                values.chunks(all * dim).flat_map(|head| head[of.start * dim..of.end * dim].to_vec()).collect()
            };
            alone.tensors.q = cut(&packed.tensors.q, &q, [7, 3]);
            alone.tensors.k = cut(&packed.tensors.k, &k, [9, 3]);
            alone.tensors.v = cut(&packed.tensors.v, &k, [9, 2]);
            alone.dout = cut(&packed.dout, &q, [7, 2]);
            assert_close(&cut(&o, &q, [7, 2]), &alone.forward().o);
            let of_one = alone.backward();
            assert_close(&cut(&gradients.dq, &q, [7, 3]), &of_one.dq);
            assert_close(&cut(&gradients.dk, &k, [9, 3]), &of_one.dk);
            assert_close(&cut(&gradients.dv, &k, [9, 2]), &of_one.dv);
        }
    }
}

/// A batch with sequence lengths gives the same results as one without padding.
#[test]
fn padded_sequences_equal_separate_ones() {
    for options in [PLAIN, CAUSAL, TOP_LEFT, LEFT] {
        let case = Case::new([1, 4, 2, 6, 7, 3, 2], options).with_seq_lens(&[4], &[5]).with_alibi_slopes([1, 4]);
        let mut alone = Case::new([1, 4, 2, 4, 5, 3, 2], options).with_alibi_slopes([1, 4]);
        let cut = |values: &[f64], [all, some, dim]: [usize; 3]| -> Vec<f64> {
            values.chunks(all * dim).flat_map(|head| head[..some * dim].to_vec()).collect()
        };
        alone.tensors.q = cut(&case.tensors.q, [6, 4, 3]);
        alone.tensors.k = cut(&case.tensors.k, [7, 5, 3]);
        alone.tensors.v = cut(&case.tensors.v, [7, 5, 2]);
        alone.dout = cut(&case.dout, [6, 4, 2]);
        let (whole, part) = (case.forward(), alone.forward());
        assert_close(&cut(&whole.o, [6, 4, 2]), &part.o);
        assert_close(&cut(&whole.lse, [6, 4, 1]), &part.lse);
        assert!(whole.o.chunks(12).all(|head| head[8..].iter().all(|x| *x == 0.0)));
        let (whole, part) = (case.backward(), alone.backward());
        assert_close(&cut(&whole.dq, [6, 4, 3]), &part.dq);
        assert_close(&cut(&whole.dk, [7, 5, 3]), &part.dk);
        assert_close(&cut(&whole.dv, [7, 5, 2]), &part.dv);
        assert_close(&whole.dalibi_slopes.unwrap(), &part.dalibi_slopes.unwrap());
    }
}

#[test]
fn gradients_agree_for_functions_of_scores() {
    for sizes in [GROUPED, LONG_Q] {
        let full = Case::new(sizes, PLAIN).problem.scores_shape();
        let [batch, heads, seq_q, seq_k] = full;
        for options in [PLAIN, CAUSAL, TOP_LEFT, SOFTCAP, SCALE, AttentionOptions { dropout: 0.4, ..LEFT }] {
            check_function(&Case::new(sizes, options).with_score_mod(ScoreFn::of::<Relative>(), &[]));
            let slopes = [[1, heads, 1, 1]];
            check_function(&Case::new(sizes, options).with_score_mod(ScoreFn::of::<Sloped>(), &slopes).with_dlse());
            let shapes = [[1, heads, 1, seq_k], [batch, 1, seq_q, 1]];
            check_function(&Case::new(sizes, options).with_score_mod(ScoreFn::of::<Bent>(), &shapes).with_dlse());
        }
        for shape in broadcasts(full) {
            let case = Case::new(sizes, SOFTCAP).with_score_mod(ScoreFn::of::<Bent>(), &[shape, full]).with_dlse();
            check_function(&case.with_bias([1, 1, 1, seq_k]));
        }
    }
}

#[test]
fn gradients_agree_for_functions_of_functions() {
    let shapes = [[1, 4, 1, 5], [2, 1, 3, 1]];
    check_function(&Case::new(GROUPED, PLAIN).with_score_mod(ScoreFn::of::<Then<Sloped, Bent>>(), &shapes));
    check_function(&Case::new(GROUPED, PLAIN).with_score_mod(ScoreFn::of::<Then<Bent, Bent>>(), &shapes));
}

/// The ready-made functions. Their tensors are above 0, as a temperature and a decay must be.
#[test]
fn gradients_agree_for_ready_made_functions() {
    let heads = [[1, 4, 1, 1]; 2];
    let functions = [
        (ScoreFn::of::<Temperature>(), 1),
        (ScoreFn::of::<Softcap<3>>(), 0),
        (ScoreFn::of::<ScalableSoftmax>(), 1),
        (ScoreFn::of::<Bias>(), 1),
        (ScoreFn::of::<Alibi>(), 1),
        (ScoreFn::of::<RelativePosition>(), 1),
        (ScoreFn::of::<Kerple>(), 2),
        (ScoreFn::of::<Swapped<Kerple>>(), 2),
        (ScoreFn::of::<Then<Temperature, Swapped<Alibi>>>(), 2),
    ];
    for options in [PLAIN, CAUSAL] {
        for (function, tensors) in functions {
            let mut case = Case::new(GROUPED, options).with_score_mod(function, &heads[..tensors]).with_dlse();
            for values in case.tensors.score_tensors.iter_mut().flatten() {
                values.iter_mut().for_each(|value| *value = value.abs() + 1.0);
            }
            check_function(&case);
        }
    }
}

#[test]
fn gradients_agree_for_functions_of_sequences() {
    let (full, columns) = ([2, 4, 3, 5], [1, 1, 1, 5]);
    let of = |case: Case| case.with_score_mod(ScoreFn::of::<Bent>(), &[full, columns]).with_dlse();
    for options in [PLAIN, CAUSAL] {
        let case = Case::new(GROUPED, options);
        check_function(&of(case.clone().with_seq_lens(&[3, 2], &[5, 3])).with_alibi_slopes([1, 4]));
        let packed = of(case.with_cu_seqlens(&[0, 2, 3, 5, 6], &[1, 4, 5, 5, 9]));
        check_function(&packed.with_mask_mod(MaskFn::of::<Document>(), &[[2, 1, 3, 1], [2, 1, 1, 5]]).with_sinks());
    }
}

/// [`Bent`] with wrong derivatives.
struct Wrong;

#[cube]
impl ScoreMod for Wrong {
    const ADDITIVE: bool = false;

    fn score(score: f32, pair: Pair, values: Values) -> f32 {
        Bent::score(score, pair, values)
    }

    fn backward(_score: f32, _pair: Pair, _values: Values) -> Partials {
        Partials { score: 1.0f32, a: 1.0f32, b: 1.0f32 }
    }
}

#[test]
fn wrong_derivatives_of_functions_are_noticed() {
    let of = |function| Case::new(GROUPED, PLAIN).with_score_mod(function, &[[1, 4, 1, 5], [2, 1, 3, 1]]).with_dlse();
    let case = of(ScoreFn::of::<Wrong>());
    let noticed = deviations_of_function(&case, &case.backward()).map(|x| x > 1e2 * TOLERANCE_OF_FUNCTION);
    assert_eq!(noticed, [true, true, false, true, true]);
    // The gradients of the two tensors, exchanged.
    let case = of(ScoreFn::of::<Bent>());
    let mut exchanged = case.backward();
    let [a, b] = exchanged.dscore_tensors.each_mut().map(|of| of.as_mut().unwrap());
    a[..6].swap_with_slice(&mut b[..6]);
    let noticed = deviations_of_function(&case, &exchanged).map(|x| x > 1e2 * TOLERANCE_OF_FUNCTION);
    assert_eq!(noticed, [false, false, false, true, true]);
}

/// A score of −∞ hides a pair, for any value of its derivatives.
#[test]
fn a_score_of_minus_infinity_hides_a_pair() {
    struct Hiding;

    #[cube]
    impl ScoreMod for Hiding {
        const ADDITIVE: bool = false;

        fn score(score: f32, pair: Pair, _values: Values) -> f32 {
            select(pair.j > pair.i + 2, f32::NEG_INFINITY, score)
        }

        fn backward(_score: f32, pair: Pair, _values: Values) -> Partials {
            Partials { score: select(pair.j > pair.i + 2, f32::INFINITY, 1.0f32), a: 0.0f32, b: 0.0f32 }
        }
    }

    // With three queries and five keys, bottom-right causality hides the same pairs.
    let hiding = Case::new(GROUPED, PLAIN).with_score_mod(ScoreFn::of::<Hiding>(), &[]).with_dlse();
    let causal = Case::new(GROUPED, CAUSAL).with_dlse();
    let (found, expected) = (hiding.backward(), causal.backward());
    for (found, expected) in [(&found.dq, &expected.dq), (&found.dk, &expected.dk), (&found.dv, &expected.dv)] {
        assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-5), "{found:?} differs from {expected:?}");
    }
}

#[test]
fn gradients_agree_with_everything_at_once() {
    let options =
        AttentionOptions { softmax_scale: Some(1.3), softcap: Some(1.5), window_left: Some(2), dropout: 0.3, ..CAUSAL };
    let case = Case::new(GROUPED, options).with_mask([2, 1, 3, 5]).with_bias([1, 4, 3, 5]).with_dlse();
    check(&case.with_alibi_slopes([2, 4]).with_sinks());
}

#[test]
fn gradients_agree_where_bias_is_minus_infinity() {
    let mut case = Case::new(GROUPED, PLAIN).with_bias([1, 1, 3, 5]).with_dlse();
    let bias = case.tensors.bias.as_mut().unwrap();
    bias[1] = f64::NEG_INFINITY;
    bias[5..10].fill(f64::NEG_INFINITY); // all of row 1
    check(&case);
}

/// Wrong gradients deviate by far more than the tolerance.
#[test]
fn wrong_gradients_are_noticed() {
    let options = AttentionOptions { dropout: 0.3, ..SOFTCAP };
    let case = Case::new(GROUPED, options).with_bias([1, 1, 3, 5]).with_alibi_slopes([1, 4]).with_sinks().with_dlse();
    let right = case.backward();
    let wrong = |change: fn(&mut Case)| {
        let mut case = case.clone();
        change(&mut case);
        case.backward()
    };
    let noticed = |gradients: &Gradients| deviations(&case, gradients).map(|x| x > 1e3 * TOLERANCE);

    let no_softcap = wrong(|case| case.problem.options.softcap = None);
    assert_eq!(noticed(&no_softcap), [true; 6]);
    let no_dlse = wrong(|case| case.dlse = None);
    assert_eq!(noticed(&no_dlse), [true, true, false, true, true, true]);
    let causal = wrong(|case| case.problem.options.causal = true);
    assert_eq!(noticed(&causal), [true; 6]);
    let no_bias = wrong(|case| case.tensors.bias.as_mut().unwrap().fill(0.0));
    assert_eq!(noticed(&no_bias), [true; 6]);
    let no_slopes = wrong(|case| case.tensors.alibi_slopes.as_mut().unwrap().fill(0.0));
    assert_eq!(noticed(&no_slopes), [true; 6]);
    let no_sinks = wrong(|case| case.tensors.sinks.as_mut().unwrap().fill(-1e3));
    assert_eq!(noticed(&no_sinks), [true; 6]);
    let dropped_otherwise = wrong(|case| case.tensors.dropout.as_mut().unwrap().seed = [1, 2]);
    assert_eq!(noticed(&dropped_otherwise), [true; 6]);
    let scale = wrong(|case| case.problem.options.softmax_scale = Some(0.5));
    assert_eq!(noticed(&scale), [true; 6]);

    // Gradients of the two heads of k and v, exchanged.
    let mut exchanged = right.clone();
    exchanged.dk.rotate_left(right.dk.len() / 4);
    exchanged.dv.rotate_left(right.dv.len() / 4);
    assert_eq!(noticed(&exchanged), [false, true, true, false, false, false]);
    let mut nan = right;
    nan.dq[0] = f64::NAN;
    assert_eq!(noticed(&nan), [true, false, false, false, false, false]);
}
