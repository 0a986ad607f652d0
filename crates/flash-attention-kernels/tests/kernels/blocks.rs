//! Block masks hide the same pairs as the equivalent boolean mask, and skip empty blocks.

use crate::common::*;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_attention_kernels::blocks::{EMPTY, FULL, HEADER, PARTIAL, UNITS, order};
use flash_attention_kernels::mods::{MaskFn, MaskMod, Pair, Values};
use flash_attention_kernels::{AttentionOptions, BlockLists, Dtype, Inputs, TensorView, block_states};

/// Mask function: shows every third key and the keys near the query.
struct Third;

#[cube]
impl MaskMod for Third {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.j % 3 == pair.head % 3 || f32::abs(pair.distance) < 5.0f32
    }
}

/// Mask function: shows the keys up to 150 positions before the query, and none after it.
struct Sliding;

#[cube]
impl MaskMod for Sliding {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.j <= pair.i && pair.distance <= 150.0f32
    }
}

fn dtypes(client: &Client) -> Vec<Dtype> {
    let dtypes = if thorough() { &[Dtype::F32, Dtype::F16, Dtype::BF16][..] } else { &[Dtype::F32] };
    dtypes.iter().copied().filter(|dtype| supports(client, *dtype)).collect()
}

/// States for a block mask of this shape: empty, partial and full blocks mixed. The first row of blocks is all empty.
fn states(shape: [usize; 4]) -> Vec<u32> {
    let draws = flash_attention_reference::normal(shape.iter().product(), 21);
    let of_row = |n: usize| n / shape[3] % shape[2];
    let state = |x: f64| if x < -0.3 { EMPTY } else { [PARTIAL, FULL][usize::from(x > 0.3)] };
    draws.into_iter().enumerate().map(|(n, x)| if of_row(n) == 0 { EMPTY } else { state(x) }).collect()
}

/// The case with one boolean mask in place of its block mask, mask and mask function.
fn dense(case: &Case) -> Case {
    let p = case.problem;
    let blocks = p.block_mask.unwrap();
    let shape = p.scores_shape();
    let index = |shape: [usize; 4], at: [usize; 4]| {
        (0..4).fold(0, |n, dim| n * shape[dim] + if shape[dim] == 1 { 0 } else { at[dim] })
    };
    let hides = |n: usize| {
        let [_, h, q, k] = shape;
        let at = [n / (h * q * k), n / (q * k) % h, n / k % q, n % k];
        let of_block = [at[0], at[1], at[2] / blocks.block_q, at[3] / blocks.block_k];
        let masked = p.mask.is_some_and(|shape| case.tensors.mask.as_ref().unwrap()[index(shape, at)]);
        let pair = Pair::of(at[0] as u32, at[1] as u32, at[2] as u32, at[3] as u32);
        let sees = p.options.mask_mod.is_none_or(|function| function.sees(pair, Values::default()));
        match case.tensors.block_mask.as_ref().unwrap()[index(blocks.blocks, of_block)] {
            EMPTY => true,
            PARTIAL => masked || !sees,
            _ => false,
        }
    };
    let mut dense = case.clone();
    dense.problem.block_mask = None;
    dense.problem.options.mask_mod = None;
    dense.tensors.block_mask = None;
    dense.problem = dense.problem.with_mask(&shape).unwrap();
    dense.tensors.mask = Some((0..shape.iter().product()).map(hides).collect());
    dense
}

/// Asserts that the block mask and the equivalent boolean mask give the same results and gradients.
fn compare(client: &Client, name: &str, case: &Case) {
    let (a, b) = (case.run(client).unwrap(), dense(case).run(client).unwrap());
    same(name, case, &a, &b, 2.0);
}

#[test]
fn a_block_mask_equals_the_boolean_mask() {
    let Some(client) = client() else { return };
    let options = [
        ("full", AttentionOptions::default()),
        ("causal", AttentionOptions { causal: true, ..Default::default() }),
        ("window", AttentionOptions { causal: true, window_left: Some(99), ..Default::default() }),
    ];
    for dtype in dtypes(&client) {
        let dims = if thorough() { &[[64, 64], [128, 128], [72, 40], [192, 192], [256, 256]][..] } else { &[[64, 64]] };
        for &[head_dim, head_dim_v] in dims {
            // One set of options is enough for wide heads: each set compiles several kernels.
            let options = if head_dim > 64 { &options[1..2] } else { &options[..] };
            for &(name, options) in options {
                let case = Case::new([2, 4, 2, 400, 470, head_dim, head_dim_v], dtype, options);
                compare(&client, name, &case.clone().with_block_mask([1, 1, 4, 4], [128, 128], states([1, 1, 4, 4])));
                if head_dim == 64 && thorough() {
                    let own = case.with_block_mask([2, 4, 2, 4], [256, 128], states([2, 4, 2, 4]));
                    compare(&client, name, &own.with_dropout(0.2));
                }
            }
        }
    }
}

#[test]
fn partial_blocks_are_masked_and_full_ones_are_not() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        for causal in if thorough() { &[false, true][..] } else { &[true] } {
            let options =
                AttentionOptions { causal: *causal, mask_mod: Some(MaskFn::of::<Third>()), ..Default::default() };
            let case = Case::new([2, 4, 2, 300, 300, 64, 64], dtype, options);
            let case = case.with_block_mask([2, 4, 3, 3], [128, 128], states([2, 4, 3, 3]));
            compare(&client, "function", &case);
            compare(&client, "function and mask", &case.clone().with_mask([2, 1, 300, 300]));
            compare(&client, "lengths", &case.with_seq_lens_q(&[300, 170]).with_seq_lens_k(&[140, 300]));
        }
    }
}

/// Packed sequences have states of their own, or share those of one. They begin anywhere, one has no queries, one no keys, and the last one
/// more keys than its states have blocks.
#[test]
fn packed_sequences() {
    let Some(client) = client() else { return };
    let (q, k) = ([0, 150, 150, 350, 600], [0, 130, 170, 170, 571]);
    for dtype in dtypes(&client) {
        for causal in if thorough() { &[false, true][..] } else { &[true] } {
            let options =
                AttentionOptions { causal: *causal, mask_mod: Some(MaskFn::of::<Third>()), ..Default::default() };
            let case = Case::new([1, 4, 2, 600, 571, 64, 64], dtype, options).with_cu_seqlens(&q, &k).with_dlse();
            let own = [4, 4, 2, 3];
            case.clone().with_block_mask(own, [128, 128], states(own)).check(&client);
            let shared = [1, 1, 2, 2];
            case.clone().with_block_mask(shared, [128, 256], states(shared)).with_dropout(0.2).check(&client);
            case.with_block_mask(own, [256, 128], states(own)).with_mask([1, 4, 600, 571]).with_sinks().check(&client);
        }
    }
}

/// Without any sequence nothing is seen, and there are no states.
#[test]
fn no_packed_sequences() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    for shape in [[0, 2, 1, 2], [1, 1, 1, 1]] {
        let case = Case::new([1, 2, 1, 140, 150, 64, 64], dtype, causal()).with_cu_seqlens(&[0], &[0]).with_sinks();
        case.with_block_mask(shape, [256, 128], vec![FULL; shape.iter().product()]).check(&client);
    }
}

/// A block mask of packed sequences gives the same bits as that of the padded ones.
#[test]
fn packed_sequences_equal_padded_ones() {
    let Some(client) = client() else { return };
    let options = AttentionOptions { mask_mod: Some(MaskFn::of::<Third>()), ..causal() };
    let lens = [200usize, 37, 140];
    let padded = Case::new([3, 2, 2, 200, 200, 16, 16], Dtype::F32, options);
    let padded = padded.with_seq_lens_q(&lens).with_seq_lens_k(&lens);
    if !supports(&client, Dtype::F32) {
        return;
    }
    let mut packed = Case::new([1, 2, 2, 377, 377, 16, 16], Dtype::F32, options);
    let part = |values: &[f64], batch: usize, head: usize| -> Vec<f64> {
        values[(batch * 2 + head) * 3200..][..lens[batch] * 16].to_vec()
    };
    let whole = |values: &[f64]| -> Vec<f64> {
        (0..2).flat_map(|head| [0, 1, 2].map(|batch| part(values, batch, head)).concat()).collect()
    };
    packed.tensors.q = whole(&padded.tensors.q);
    packed.tensors.k = whole(&padded.tensors.k);
    packed.tensors.v = whole(&padded.tensors.v);
    packed.dout = whole(&padded.dout);
    let ends = [0, 200, 237, 377];
    let states = vec![1, 2, 0, 1, 2, 0, 0, 0, 1, 0, 2, 2];
    let padded = padded.with_block_mask([3, 1, 2, 2], [128, 128], states.clone()).check(&client);
    let packed = packed.with_cu_seqlens(&ends, &ends).with_block_mask([3, 1, 2, 2], [128, 128], states).check(&client);
    assert_eq!(packed.o, whole(&padded.o));
    assert_eq!(packed.dq, padded.dq.map(|dq| whole(&dq)));
    assert_eq!(packed.dk, padded.dk.map(|dk| whole(&dk)));
    assert_eq!(packed.dv, padded.dv.map(|dv| whole(&dv)));
}

/// Runs with the same block states share one set of tile lists. Other states, or another mask or window, get their own.
#[test]
fn runs_share_lists() {
    let Some(client) = client() else { return };
    let of_window = |window_left| AttentionOptions { window_left, ..Default::default() };
    let case = |options, states| {
        Case::new([1, 4, 2, 300, 300, 64, 64], Dtype::F32, options).with_block_mask([1, 1, 3, 3], [128, 128], states)
    };
    let all = states([1, 1, 3, 3]);
    let others: Vec<u32> = all.iter().map(|state| FULL - state).collect();
    let (first, second) = (case(of_window(None), all.clone()), case(of_window(None), others));
    let lists = BlockLists::default();
    let kept_after = |case: &Case, states: &TensorView| {
        let shared = Case { shared_blocks: Some((states.clone(), lists.clone())), ..case.clone() };
        let (a, b) = (shared.run(&client).unwrap(), case.run(&client).unwrap());
        assert_eq!([a.o, a.dq.unwrap(), a.dk.unwrap()], [b.o, b.dq.unwrap(), b.dk.unwrap()], "{:?}", case.problem);
        lists.kept()
    };
    let of_first = first.blocks_on(&client).unwrap();
    let made = kept_after(&first, &of_first);
    assert!(made > 0);
    assert_eq!(kept_after(&first, &of_first), made, "the second run with the same states must reuse the lists");
    assert_eq!(
        kept_after(&first.clone().with_seq_lens_k(&[170]), &of_first),
        made,
        "no lists are kept for lengths that only the device knows"
    );
    assert_eq!(
        kept_after(&second, &second.blocks_on(&client).unwrap()),
        2 * made,
        "other states must have their own lists"
    );
    let mut most = 0;
    for window in 0..10 {
        let kept = kept_after(&case(of_window(Some(20 * window)), all.clone()), &of_first);
        most = most.max(kept);
        assert!(window > 0 || kept == 3 * made, "another window must have its own lists");
    }
    assert!((3 * made + 1..=24).contains(&most), "the number of kept lists is {most}");
    assert_eq!(kept_after(&first, &of_first), most, "lists that were dropped must be made again");
}

/// The gradient of a bias of any shape visits the same tiles.
#[test]
fn biases_of_every_shape() {
    let Some(client) = client() else { return };
    let shapes = [[1, 4, 300, 300], [2, 1, 1, 300], [1, 4, 300, 1], [1, 4, 1, 1]];
    for dtype in dtypes(&client) {
        for shape in if thorough() { &shapes[..] } else { &shapes[..2] } {
            let case = Case::new([2, 4, 2, 300, 300, 64, 64], dtype, AttentionOptions::default()).with_bias(*shape);
            compare(
                &client,
                &format!("{shape:?}"),
                &case.with_block_mask([1, 4, 3, 3], [128, 128], states([1, 4, 3, 3])),
            );
        }
    }
}

/// NaN in keys and values of empty blocks, or under the mask in other blocks, reaches no result.
#[test]
fn hidden_nans_do_not_leak() {
    let Some(client) = client() else { return };
    for dtype in dtypes(&client) {
        let blocks = vec![PARTIAL, EMPTY, EMPTY, FULL, EMPTY, PARTIAL, EMPTY, EMPTY, EMPTY];
        let case = Case::new([1, 2, 1, 300, 300, 64, 64], dtype, AttentionOptions::default()).with_mask([1, 1, 1, 300]);
        let mut case = case.with_block_mask([1, 1, 3, 3], [128, 128], blocks);
        let mask: Vec<bool> = (0..300).map(|j| j >= 256 && j % 2 == 0).collect();
        // All blocks of keys 128 to 255 are empty.
        let unseen = |j: usize| (128..256).contains(&j) || mask[j];
        for j in (0..300).filter(|j| unseen(*j)) {
            case.tensors.v[j * 64..(j + 1) * 64].fill(f64::NAN);
            case.tensors.k[j * 64..(j + 1) * 64].fill(f64::NAN);
        }
        case.tensors.mask = Some(mask.clone());
        let results = case.run(&client).unwrap();
        assert!(results.o.iter().all(|x| x.is_finite()), "{dtype:?}: a hidden NaN has reached o");
        assert!(results.dq.unwrap().iter().all(|x| x.is_finite()), "{dtype:?}: a hidden NaN has reached dq");
        // Rows of the last block of queries see no key.
        let rows = results.o.chunks(64).enumerate().filter(|(n, _)| n % 300 >= 256);
        assert!(
            rows.into_iter().all(|(_, row)| row.iter().all(|x| *x == 0.0)),
            "{dtype:?}: rows that see no key must be 0"
        );
    }
}

/// The block states that the device computes follow from the mask and the mask function together.
#[test]
fn states_of_functions_and_masks() {
    let Some(client) = client() else { return };
    let options = AttentionOptions { mask_mod: Some(MaskFn::of::<Sliding>()), ..Default::default() };
    for masked in [false, true] {
        let mut case = Case::new([2, 1, 1, 700, 640, 8, 8], Dtype::F32, options);
        if masked {
            // The second batch has 300 keys.
            case = case.with_mask([2, 1, 1, 640]);
            case.tensors.mask = Some((0..2 * 640).map(|n| n >= 640 + 300).collect());
        }
        let shape = [2, 1, 700usize.div_ceil(256), 5];
        let mut case = case.with_block_mask(shape, [256, 128], vec![FULL; shape.iter().product()]);
        let sees = |b: usize, i: usize, j: usize| j <= i && i - j <= 150 && !(masked && b == 1 && j >= 300);
        let mut want = Vec::new();
        for (b, of_q, of_k) in (0..2).flat_map(|b| (0..3).flat_map(move |q| (0..5).map(move |k| (b, q, k)))) {
            let pairs = (of_q * 256..700.min(of_q * 256 + 256))
                .flat_map(|i| (of_k * 128..of_k * 128 + 128).map(move |j| (i, j)));
            let (any, all) = pairs.fold((false, true), |(any, all), (i, j)| {
                let sees = sees(b, i, j);
                (any || sees, all && sees)
            });
            want.push(if !any { EMPTY } else { [PARTIAL, FULL][usize::from(all)] });
        }
        assert!(want.contains(&EMPTY) && want.contains(&PARTIAL));
        let zeros = |shape: [usize; 4]| {
            TensorView::contiguous(client.create_from_slice(&vec![0; 4 * shape.iter().product::<usize>()]), shape)
        };
        let p = case.problem;
        let mut inputs = Inputs::new(zeros(p.q_shape()), zeros(p.k_shape()), zeros(p.v_shape()));
        inputs.mask = case.tensors.mask.as_ref().map(|mask| {
            let bytes: Vec<u8> = mask.iter().flat_map(|hides| u32::from(*hides).to_le_bytes()).collect();
            let tensor = TensorView::contiguous(client.create_from_slice(&bytes), p.mask.unwrap());
            flash_attention_kernels::MaskView { tensor, storage: flash_attention_kernels::MaskStorage::U32 }
        });
        let out = zeros(shape);
        block_states(&client, &p, &inputs, &out).unwrap();
        let got = client.read_one_unchecked(out.handle);
        let got: Vec<u32> = got.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(got, want, "masked: {masked}");
        // Attention with these states equals attention with the function alone.
        let mut partial = case.clone();
        partial.tensors.block_mask = Some(vec![PARTIAL; want.len()]);
        case.tensors.block_mask = Some(got);
        let (a, b) = (case.run(&client).unwrap(), dense(&partial));
        close("o", &a.o, &b.run(&client).unwrap().o, b.tolerance(1e-5));
    }
}

#[test]
fn blocks_are_ordered_by_the_tiles_they_visit() {
    let Some(client) = client() else { return };
    // One block, as many as a thread block has threads, and more than two thread blocks have.
    for blocks in [1, UNITS, 2 * UNITS + 5] {
        let shape = [2, 3, blocks, HEADER + 4];
        let lists: Vec<u32> = (0..shape.iter().product::<usize>()).map(|n| (n * n % 101 % 5) as u32).collect();
        let bytes: Vec<u8> = lists.iter().flat_map(|word| word.to_le_bytes()).collect();
        let view = TensorView::contiguous(client.create_from_slice(&bytes), shape);
        // SAFETY: the tensor is as large as its shape.
        unsafe {
            let lists = TensorArg::from_raw_parts(view.handle.clone(), view.strides.into(), shape.into());
            // One thread block more than needed.
            let cubes = CubeCount::Static(6 * blocks.div_ceil(UNITS) as u32 + 1, 1, 1);
            order::launch_unchecked(&client, cubes, CubeDim::new_1d(UNITS as u32), AddressType::U32, lists);
        }
        let bytes = client.read_one_unchecked(view.handle);
        let ordered: Vec<_> = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let words = shape[3];
        for (before, after) in lists.chunks(blocks * words).zip(ordered.chunks(blocks * words)) {
            let mut expected: Vec<u32> = (0..blocks as u32).collect();
            expected.sort_by_key(|block| std::cmp::Reverse(before[*block as usize * words]));
            assert_eq!(after.chunks(words).map(|list| list[1]).collect::<Vec<_>>(), expected, "{blocks} blocks");
            let others = before.iter().zip(after).enumerate().filter(|(n, _)| n % words != 1);
            assert!(
                others.map(|(_, pair)| pair).all(|(before, after)| before == after),
                "only the order may be written"
            );
        }
    }
}
