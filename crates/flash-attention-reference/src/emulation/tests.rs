//! Without rounding, the emulation equals the oracle. With rounding, its distance from the oracle is what the spread predicts.

use super::*;
use crate::mods::{Bent, Strided};
use crate::{Comparison, Dropout, Judged, Operands, Unfit, backward, forward, normal, round_to};
use flash_attention_kernels::mods::{MaskFn, ScoreFn};
use flash_attention_kernels::{AttentionOptions, Dtype};

/// A problem with all options that can be combined.
struct Everything {
    problem: AttentionProblem,
    floats: Vec<Vec<f64>>,
    mask: Vec<bool>,
}

const SIZES: ([usize; 4], [usize; 4], [usize; 4]) = ([2, 4, 70, 24], [2, 2, 90, 24], [2, 2, 90, 40]);

impl Everything {
    fn new(dtype: Dtype) -> Self {
        let options = AttentionOptions {
            causal: true,
            softcap: Some(4.0),
            dropout: 0.2,
            score_mod: Some(ScoreFn::of::<Bent>()),
            mask_mod: Some(MaskFn::of::<Strided>()),
            ..Default::default()
        };
        let (q, k, v) = SIZES;
        let problem = AttentionProblem::new(&q, &k, &v, dtype, options).unwrap();
        let problem = problem.with_mask(&[2, 1, 1, 90]).unwrap().with_bias(&[1, 4, 70, 90]).unwrap();
        let problem = problem.with_alibi_slopes(&[1, 4]).unwrap().with_sinks(&[4]).unwrap();
        let problem = problem.with_score_tensors(&[&[1, 4, 1, 1], &[2, 1, 1, 90]]).unwrap();
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape(), [1, 4, 70, 90]];
        let shapes = shapes.into_iter().chain([[1, 1, 1, 4], [1, 1, 1, 4], [1, 4, 1, 1], [2, 1, 1, 90], [2, 4, 70, 1]]);
        let floats = shapes.enumerate().map(|(seed, shape)| {
            let mut values = normal(shape.iter().product(), seed as u64);
            // The loss grows with every lse, so that the sums in a head's gradients are larger than their rounding errors.
            let of = |value: f64| if seed == 9 { value.abs() } else { value * if seed > 4 { 0.2 } else { 1.0 } };
            values.iter_mut().for_each(|value| *value = of(*value));
            round_to(&mut values, dtype);
            values
        });
        Everything { problem, floats: floats.collect(), mask: normal(180, 20).iter().map(|x| *x > 0.8).collect() }
    }

    fn inputs(&self) -> Inputs<'_> {
        let floats = |nth: usize| &self.floats[nth][..];
        Inputs {
            q: floats(0),
            k: floats(1),
            v: floats(2),
            mask: Some(&self.mask),
            bias: Some(floats(4)),
            alibi_slopes: Some(floats(5)),
            sinks: Some(floats(6)),
            score_tensors: [Some(floats(7)), Some(floats(8))],
            dropout: Some(Dropout { seed: [3, 4], first: [0, 0] }),
            ..Default::default()
        }
    }
}

#[test]
fn without_rounding_it_is_the_oracle() {
    let all = Everything::new(Dtype::F32);
    let (inputs, dout, dlse) = (all.inputs(), &all.floats[3], &all.floats[9]);
    let of = compared(&all.problem, &inputs, dout, Some(dlse), Exact);
    assert_eq!(of.exact, of.emulated);
    assert_eq!(of.exact.output, forward(&all.problem, &inputs));
    assert_eq!(of.exact.gradients, backward(&all.problem, &inputs, dout, Some(dlse)));
}

/// All tensors of a result; those in f32 come last.
fn tensors(of: &Attention) -> Vec<(&'static str, &[f64])> {
    let Attention { output, gradients } = of;
    let [a, b] = gradients.dscore_tensors.each_ref().map(|of| of.as_deref().unwrap());
    vec![
        ("o", &output.o[..]),
        ("dq", &gradients.dq),
        ("dk", &gradients.dk),
        ("dv", &gradients.dv),
        ("dbias", gradients.dbias.as_deref().unwrap()),
        ("dalibi_slopes", gradients.dalibi_slopes.as_deref().unwrap()),
        ("dsinks", gradients.dsinks.as_deref().unwrap()),
        ("a", a),
        ("b", b),
    ]
}

fn rms(values: impl Iterator<Item = f64>, len: usize) -> f64 {
    (values.map(|x| x * x).sum::<f64>() / len as f64).sqrt()
}

#[test]
fn errors_match_the_spread() {
    let half = [Dtype::F16, Dtype::BF16];
    let all = half.into_iter().flat_map(|dtype| [Operands::Inputs, Operands::F32].map(|operands| (dtype, operands)));
    for (dtype, operands) in all.chain([(Dtype::F32, Operands::Tf32)]) {
        let all = Everything::new(dtype);
        let (inputs, dout, dlse) = (all.inputs(), &all.floats[3], &all.floats[9]);
        let of = expected(&all.problem, &inputs, dout, Some(dlse), Emulation { dtype, operands });
        let both = tensors(&of.exact).into_iter().zip(tensors(&of.emulated)).zip(tensors(&of.spread));
        for (((name, exact), (_, emulated)), (_, spread)) in both {
            let error = rms(exact.iter().zip(emulated).map(|(x, y)| x - y), exact.len());
            let spread = rms(spread.iter().copied(), exact.len());
            // With few elements, as for heads, the error is one or two random draws.
            let (least, most) = if exact.len() > 10 { (0.6, 1.4) } else { (0.1, 3.0) };
            let ratio = error / spread;
            assert!(
                (least..most).contains(&ratio),
                "{dtype:?} {operands:?} {name}: the error is {error}, the spread predicts {spread}"
            );
        }
    }
}

/// A bias constant along rows does not change the output. Its gradient is pure rounding error, and the spread predicts its size.
#[test]
fn sums_that_cancel_have_a_spread() {
    let shape = [1, 2, 64, 16];
    let options = AttentionOptions::default();
    let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::BF16, options).unwrap();
    let problem = problem.with_bias(&[1, 2, 64, 1]).unwrap();
    let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| {
        let mut values = normal(2 * 64 * 16, seed);
        round_to(&mut values, Dtype::BF16);
        values
    });
    let bias = vec![0.5; 128];
    let inputs = Inputs { q: &q, k: &k, v: &v, bias: Some(&bias), ..Default::default() };
    let emulation = Emulation { dtype: Dtype::BF16, operands: Operands::Inputs };
    let of = expected(&problem, &inputs, &dout, None, emulation);
    let [exact, emulated, spread] = [&of.exact, &of.emulated, &of.spread].map(|of| of.gradients.dbias.clone().unwrap());
    assert!(exact.iter().all(|x| x.abs() < 1e-12));
    let (error, spread) = (rms(emulated.into_iter(), 128), rms(spread.into_iter(), 128));
    assert!(
        error > 1e-4 && (0.8..1.2).contains(&(error / spread)),
        "the error is {error}, the spread predicts {spread}"
    );
}

/// The emulated tensors pass the judge, and faulty versions of them do not.
#[test]
fn the_judge_accepts_rounding_and_rejects_faults() {
    let half = [Dtype::F16, Dtype::BF16].map(|dtype| (dtype, Operands::Inputs));
    for (dtype, operands) in half.into_iter().chain([(Dtype::F32, Operands::Tf32), (Dtype::F32, Operands::F32)]) {
        let all = Everything::new(dtype);
        let (inputs, dout, dlse) = (all.inputs(), &all.floats[3], &all.floats[9]);
        let of = expected(&all.problem, &inputs, dout, Some(dlse), Emulation { dtype, operands });
        let both = tensors(&of.exact).into_iter().zip(tensors(&of.emulated)).zip(tensors(&of.spread));
        for (((name, exact), (_, emulated)), (_, spread)) in both {
            let judged = if name == "o" { Judged::Output } else { Judged::Gradient };
            let comparison = Comparison {
                name,
                judged,
                dtype,
                row_len: 1,
                computed: emulated,
                exact,
                emulated,
                spread: Some(spread),
            };
            let verdict = comparison.binds().unwrap();
            assert!(verdict.norm <= 1.0 && verdict.rounding < 0.01, "{dtype:?} {operands:?} {name}: {verdict:?}");
            for times in [1.02, 0.98, -1.0, 0.0] {
                let computed: Vec<f64> = emulated.iter().map(|x| times * x).collect();
                let judged = Comparison { computed: &computed, ..comparison }.judge();
                assert!(judged.is_err(), "{dtype:?} {operands:?} {name}: {times} times the tensor passes");
            }
        }
    }
}

/// The judge finds a fault in one of many blocks of rows, and a single wrong element.
#[test]
fn the_judge_looks_at_blocks_and_at_elements() {
    let exact = normal(64 * 200, 5);
    let emulated: Vec<f64> = exact.iter().zip(normal(64 * 200, 6)).map(|(x, error)| x + 1e-3 * error).collect();
    let computed: Vec<f64> = exact.iter().zip(normal(64 * 200, 7)).map(|(x, error)| x + 1e-3 * error).collect();
    let comparison = |computed: &[f64]| {
        let (name, judged, dtype) = ("dq", Judged::Gradient, Dtype::BF16);
        Comparison { name, judged, dtype, row_len: 1, computed, exact: &exact, emulated: &emulated, spread: None }
            .judge()
    };
    comparison(&computed).unwrap();
    let mut block = computed.clone();
    block[64 * 150..64 * 151].iter_mut().zip(normal(64, 8)).for_each(|(x, error)| *x += 0.004 * error.clamp(-2.0, 2.0));
    let found = comparison(&block).unwrap_err();
    assert!(matches!(&found, Unfit::Average { measure, .. } if measure.contains("block 150")), "{found}");
    let mut element = computed.clone();
    element[77] += 0.05;
    assert!(matches!(comparison(&element).unwrap_err(), Unfit::Largest { at: 77, .. }));
    for (at, value) in [(3, f64::NAN), (4, f64::INFINITY)] {
        let mut element = computed.clone();
        element[at] = value;
        assert!(matches!(comparison(&element).unwrap_err(), Unfit::NotFinite { at: found, .. } if found == at));
    }
    assert!(matches!(comparison(&computed[1..]).unwrap_err(), Unfit::Length { computed: 12799, .. }));
}
