//! Score and mask functions that are equivalent to an option give the same results as the option.

use crate::common::*;
use cubecl::prelude::*;
use flash_attention_kernels::mods::{
    Alibi, And, Bias, Causal, CausalWindow, Chunked, Document, FirstKeys, Kerple, MaskFn, MaskMod, Neighborhood, Not,
    Or, Pair, RelativePosition, ScalableSoftmax, ScoreFn, SlidingWindow, Softcap, Stride, Swapped, Temperature, Then,
    Values,
};
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype};

const CAP: u32 = 3;

/// Shows keys less than 20 positions before the query, and all after it.
struct Near;

#[cube]
impl MaskMod for Near {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.j + 20u32 > pair.i
    }
}

fn dtypes(client: &cubecl::client::Client) -> Vec<Dtype> {
    let dtypes = if thorough() { &[Dtype::F32, Dtype::F16, Dtype::BF16][..] } else { &[Dtype::F32] };
    dtypes.iter().copied().filter(|dtype| supports(client, *dtype)).collect()
}

/// The first size, and on fast devices the second one too.
fn sizes(one: Sizes, other: Sizes) -> Vec<Sizes> {
    if thorough() { vec![one, other] } else { vec![one] }
}

#[test]
fn an_alibi_function_equals_the_option() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        for sizes in sizes([2, 4, 2, 150, 150, 64, 64], [1, 2, 2, 70, 70, 128, 72]) {
            let (batch, heads) = (sizes[0], sizes[1]);
            let causal = AttentionOptions { causal: true, ..Default::default() };
            let built_in = Case::new(sizes, dtype, causal).with_bias([1, heads, 1, sizes[4]]);
            let built_in = built_in.with_alibi_slopes([batch, heads]);
            let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal };
            let mut case = Case::new(sizes, dtype, options).with_bias([1, heads, 1, sizes[4]]);
            case = case.with_score_tensors(&[[batch, heads, 1, 1]]);
            case.tensors.score_tensors[0] = built_in.tensors.alibi_slopes.clone();
            let (a, b) = (case.run(&client).unwrap(), built_in.run(&client).unwrap());
            same("alibi", &case, &a, &b, 1.0);
            let (of_tensor, of_slopes) = (a.dscore_tensors[0].as_ref().unwrap(), b.dalibi_slopes.as_ref().unwrap());
            close("slopes", of_tensor, of_slopes, case.tolerance(1e-4));
        }
    }
}

#[test]
fn a_softcap_function_equals_the_option() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        for sizes in sizes([2, 4, 2, 150, 130, 64, 64], [1, 2, 2, 70, 90, 128, 72]) {
            let options = AttentionOptions { causal: true, softmax_scale: Some(1.0), ..Default::default() };
            let capped = AttentionOptions { softcap: Some(CAP as f32), ..options };
            let modified = AttentionOptions { score_mod: Some(ScoreFn::of::<Softcap<CAP>>()), ..options };
            let biases = [[1, 1, 1, sizes[4]], [sizes[0], sizes[1], sizes[3], sizes[4]]];
            for bias in biases.into_iter().take(if thorough() { 2 } else { 1 }) {
                let [a, b] = [modified, capped].map(|options| {
                    let case = Case::new(sizes, dtype, options).with_bias(bias).with_dropout(0.25);
                    (case.run(&client).unwrap(), case)
                });
                same("cap", &a.1, &a.0, &b.0, 4.0);
            }
        }
    }
}

#[test]
fn composed_functions_with_two_tensors() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        let sizes = [1, 4, 2, 80, 80, 64, 64];
        let options = AttentionOptions { softcap: Some(CAP as f32), ..Default::default() };
        let built_in = Case::new(sizes, dtype, options).with_alibi_slopes([1, 4]).with_bias([1, 4, 80, 80]);
        let both = AttentionOptions { score_mod: Some(ScoreFn::of::<Then<Alibi, Swapped<Bias>>>()), ..options };
        let mut case = Case::new(sizes, dtype, both).with_score_tensors(&[[1, 4, 1, 1], [1, 4, 80, 80]]);
        case.tensors.score_tensors = [built_in.tensors.alibi_slopes.clone(), built_in.tensors.bias.clone()];
        let (a, mut b) = (case.run(&client).unwrap(), built_in.run(&client).unwrap());
        let dbias = b.dbias.take().unwrap();
        same("then", &case, &a, &b, 4.0);
        close("bias", a.dscore_tensors[1].as_ref().unwrap(), &dbias, 4.0 * case.tolerance(2e-5));
        let of_slopes = b.dalibi_slopes.as_ref().unwrap();
        close("slopes", a.dscore_tensors[0].as_ref().unwrap(), of_slopes, 4.0 * case.tolerance(1e-4));
    }
}

/// Score functions of `mods` against the oracle, with tensors that are not negative, as a temperature and a decay must be.
#[test]
fn ready_made_score_functions() {
    let Some(client) = client() else { return };
    let heads = [[1, 4, 1, 1]; 2];
    let of_pairs = [[1, 4, 1, 1], [2, 1, 70, 90]];
    let functions = [
        (ScoreFn::of::<Temperature>(), &heads[..1]),
        (ScoreFn::of::<ScalableSoftmax>(), &heads[..1]),
        (ScoreFn::of::<RelativePosition>(), &heads[..1]),
        (ScoreFn::of::<Kerple>(), &heads[..]),
        (ScoreFn::of::<Then<Softcap<CAP>, Bias>>(), &of_pairs[1..]),
        (ScoreFn::of::<Then<Kerple, Swapped<Alibi>>>(), &heads[..]),
        (ScoreFn::of::<Then<Temperature, Swapped<Bias>>>(), &of_pairs[..]),
    ];
    for dtype in dtypes(&client) {
        for (score_mod, shapes) in functions {
            let options = AttentionOptions { score_mod: Some(score_mod), ..Default::default() };
            let mut case = Case::new([2, 4, 2, 70, 90, 64, 64], dtype, options).with_score_tensors(shapes);
            for values in case.tensors.score_tensors.iter_mut().flatten() {
                values.iter_mut().for_each(|value| *value = f64::from((value.abs() + 0.5) as f32));
            }
            case.with_dlse().check(&client);
        }
    }
}

/// Mask functions of `mods` without tensors, against the oracle.
#[test]
fn ready_made_mask_functions() {
    let Some(client) = client() else { return };
    let functions = [
        MaskFn::of::<CausalWindow<19>>(),
        MaskFn::of::<And<Causal, Chunked<48>>>(),
        MaskFn::of::<And<Causal, Or<FirstKeys<4>, SlidingWindow<30>>>>(),
        MaskFn::of::<And<Stride<3>, SlidingWindow<40>>>(),
        MaskFn::of::<And<Causal, Or<Stride<16>, SlidingWindow<15>>>>(),
        MaskFn::of::<Neighborhood<15, 10, 2>>(),
    ];
    for dtype in dtypes(&client) {
        for mask_mod in functions {
            let options = AttentionOptions { mask_mod: Some(mask_mod), ..Default::default() };
            Case::new([2, 2, 1, 150, 150, 64, 64], dtype, options).with_dlse().check(&client);
        }
    }
}

#[test]
fn mask_functions_equal_options() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        let sizes = [2, 2, 1, 150, 150, 64, 64];
        let mods = |mask| AttentionOptions { mask_mod: Some(mask), ..Default::default() };
        let compared = |name, options: AttentionOptions, case: Case| {
            let built_in = Case::new(sizes, dtype, options);
            same(name, &case, &case.run(&client).unwrap(), &built_in.run(&client).unwrap(), 1.0);
        };
        let causal = AttentionOptions { causal: true, alignment: Alignment::TopLeft, ..Default::default() };
        compared("causal", causal, Case::new(sizes, dtype, mods(MaskFn::of::<Causal>())));
        let sliding = AttentionOptions { window_left: Some(19), ..causal };
        compared("sliding", sliding, Case::new(sizes, dtype, mods(MaskFn::of::<And<Near, Causal>>())));
        let anti = MaskFn::of::<Or<And<Causal, Near>, Not<Or<Causal, Not<Causal>>>>>();
        compared("sliding again", sliding, Case::new(sizes, dtype, mods(anti)));
        let both = AttentionOptions { mask_mod: Some(MaskFn::of::<Near>()), ..causal };
        compared("both", sliding, Case::new(sizes, dtype, both));
    }
}

#[test]
fn a_document_function_equals_its_mask() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        let sizes = [2, 2, 1, 100, 130, 64, 64];
        let options = AttentionOptions { mask_mod: Some(MaskFn::of::<Document>()), ..Default::default() };
        let mut case = Case::new(sizes, dtype, options).with_mask_tensors(&[[2, 1, 100, 1], [2, 1, 1, 130]]);
        let [of_queries, of_keys] = case.tensors.mask_tensors.clone().map(|of| of.unwrap());
        let mut masked = Case::new(sizes, dtype, AttentionOptions::default()).with_mask([2, 1, 100, 130]);
        let pair = |n: usize| of_queries[n / 130] != of_keys[n / 13000 * 130 + n % 130];
        masked.tensors.mask = Some((0..2 * 100 * 130).map(pair).collect());
        let (a, b) = (case.run(&client).unwrap(), masked.run(&client).unwrap());
        same("documents", &case, &a, &b, 1.0);
        // NaN in values that no query sees must not reach any result.
        assert!(of_keys.contains(&2.0));
        case.tensors.mask_tensors[0] = Some(of_queries.iter().map(|document| document.min(1.0)).collect());
        case.tensors
            .v
            .chunks_mut(64)
            .zip(&of_keys)
            .filter(|(_, document)| **document == 2.0)
            .for_each(|(v, _)| v.fill(f64::NAN));
        let results = case.run(&client).unwrap();
        assert!(results.o.iter().all(|x| x.is_finite()), "a hidden NaN has reached o");
        let dq = results.dq.unwrap();
        assert!(dq.iter().all(|x| x.is_finite()), "a hidden NaN has reached dq");
    }
}
