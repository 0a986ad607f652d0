//! Error bounds are tight: results of this lane's kernels pass them, but a gradient scaled by 1.02, its negative, or zeros do not.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::{AttentionOptions, Dtype};
use flash_attention_reference::Comparison;
use flash_attention_reference::mods::Bent;

/// A case with every gradient. Its loss grows with every lse, so that the sums in a head's gradients are larger than their rounding errors
/// and a fault shows.
fn every_gradient(dtype: Dtype, bias: [usize; 4]) -> Case {
    let options = AttentionOptions { causal: true, score_mod: Some(ScoreFn::of::<Bent>()), ..Default::default() };
    let case = Case::new([2, 4, 2, 140, 208, 64, 64], dtype, options).with_bias(bias).with_alibi_slopes([1, 4]);
    let case = case.with_sinks().with_score_tensors(&[[1, 4, 1, 1], [1, 1, 1, 208]]);
    let mut case = case.with_dlse();
    case.dlse.iter_mut().flatten().for_each(|dlse| *dlse = dlse.abs());
    case
}

const GRADIENTS: [&str; 8] =
    ["dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks", "dscore_tensors[0]", "dscore_tensors[1]"];

fn bind(client: &Client, case: &Case, gradients: &[&str]) {
    let results = case.run(client).unwrap();
    let expected = case.expected(results.forward.kernel());
    let comparisons = case.comparisons(&results, &expected);
    let names: Vec<_> = comparisons.iter().map(|comparison| comparison.name).collect();
    assert_eq!(names, [&["o"], gradients].concat());
    for comparison in comparisons {
        let verdict = comparison.judge().unwrap();
        assert!(
            verdict.rounding < 0.02,
            "the rounding error of {} is {}, too large to notice 2%",
            comparison.name,
            verdict.rounding
        );
        for times in [1.02, -1.0, 0.0] {
            let computed: Vec<f64> = comparison.computed.iter().map(|x| times * x).collect();
            let judged = Comparison { computed: &computed, ..comparison }.judge();
            assert!(
                judged.is_err(),
                "{times} × {} passes the bound: {verdict:?} of {:?}",
                comparison.name,
                case.problem
            );
        }
    }
}

#[test]
fn two_percent_of_any_gradient_are_noticed() {
    let Some(client) = client() else { return };
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        // `Case::new` replaces f32 by the element type of the lane.
        if supports(&client, dtype) {
            bind(&client, &every_gradient(dtype, [1, 4, 140, 208]), &GRADIENTS);
        }
    }
}

/// A bias that repeats its queries, whose gradient another kernel sums, and the fused kernel for dq, dk and dv where there is one.
#[test]
fn faults_are_noticed_in_every_order() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    bind(&client, &every_gradient(dtype, [1, 1, 1, 208]), &GRADIENTS);
    let plain = Case::new([2, 4, 2, 140, 208, 64, 64], dtype, AttentionOptions::default());
    bind(&client, &Case { fused: true, ..plain }, &GRADIENTS[..3]);
}
