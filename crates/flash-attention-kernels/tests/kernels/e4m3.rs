//! Keys and values in 8 bits: conversions as on the host, and attention over pages in e4m3 against the oracle's over what is stored.

use crate::common::*;
use crate::e4m3_caches::{read_words, words};
use crate::pages;
use cubecl::prelude::*;
use flash_attention_kernels::e4m3::{decode, decode_word, encode, encode_word, inverse, scale_of, scale_of_bits};
use flash_attention_kernels::mods::{Alibi, ScoreFn};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, Dtype, Inputs, Kernel, KvStorage, TensorView, backward,
    forward, plan_with,
};
use flash_attention_reference as reference;

/// For each four numbers, given as bits: their scales, the inverses of these, the word that encodes them, and what it stands for, times the
/// first one's scale.
#[cube(launch_unchecked)]
fn convert(values: &[u32], results: &mut [u32]) {
    let at = 4 * ABSOLUTE_POS;
    if at >= values.len() {
        terminate!();
    }
    let first = scale_of_bits(values[at] & 0x7FFF_FFFFu32);
    let mut four = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for n in 0..4usize {
        let scale = scale_of_bits(values[at + n] & 0x7FFF_FFFFu32);
        results[13 * ABSOLUTE_POS + n] = u32::reinterpret(scale);
        results[13 * ABSOLUTE_POS + 4 + n] = u32::reinterpret(inverse(scale));
        four.insert(n, f32::reinterpret(values[at + n]));
    }
    let word = encode_word(four);
    results[13 * ABSOLUTE_POS + 8] = word;
    let back = decode_word(word, first);
    #[unroll]
    for n in 0..4usize {
        results[13 * ABSOLUTE_POS + 9 + n] = u32::reinterpret(back.extract(n));
    }
}

/// All codes, the numbers between two neighbours and beside those, and numbers of all exponents.
#[test]
fn devices_convert_as_the_host_does() {
    let Some(client) = client() else { return };
    let mut values: Vec<f32> = (0..=255u8).filter(|code| code & 0x7F != 0x7F).map(decode).collect();
    let middles: Vec<f32> = (0..0x7E).map(|code| (decode(code) + decode(code + 1)) / 2.0).collect();
    values.extend(middles.iter().flat_map(|x| [*x, -*x, x.next_up(), x.next_down(), -x.next_up()]));
    values.extend([448.0f32.next_up(), 480.0, 57344.0, -57345.0, 1e30, -3e38, 2f32.powi(-100), 1e-35]);
    values.extend(
        reference::normal(4000, 1).into_iter().enumerate().map(|(n, x)| x as f32 * 2f32.powi(n as i32 % 160 - 90)),
    );
    values.resize(values.len().next_multiple_of(4), 1.0);
    let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
    let (len, threads) = (values.len(), values.len() / 4);
    let from = words(&client, &bits, [len]);
    let to = client.empty(4 * 13 * threads);
    let count = CubeCount::Static(threads.div_ceil(64) as u32, 1, 1);
    // SAFETY: the kernel stops at the length of the values, and there are 13 results for each four of them.
    unsafe {
        let from = BufferArg::from_raw_parts(from.handle, len);
        let to = BufferArg::from_raw_parts(to.clone(), 13 * threads);
        convert::launch_unchecked(&client, count, CubeDim::new_1d(64), from, to);
    }
    for (four, results) in values.chunks_exact(4).zip(read_words(&client, to).chunks_exact(13)) {
        let scales = [0, 1, 2, 3].map(|n| scale_of(four[n]));
        let codes = [0, 1, 2, 3].map(|n| encode(four[n]));
        let mut want: Vec<u32> = scales.iter().chain(&scales.map(|scale| 1.0 / scale)).map(|x| x.to_bits()).collect();
        want.push(u32::from_le_bytes(codes));
        want.extend(codes.map(|code| (decode(code) * scales[0]).to_bits()));
        assert_eq!(results, want, "{four:?}");
    }
}

#[test]
fn codes_stand_for_the_published_numbers() {
    // Micikevicius et al., table 1: the largest number, the smallest normal one, the largest and the smallest subnormal one.
    let published = [(0x7E, 448.0), (0x08, 2f32.powi(-6)), (0x07, 0.875 * 2f32.powi(-6)), (0x01, 2f32.powi(-9))];
    for (code, value) in published {
        assert_eq!((decode(code), decode(code | 0x80)), (value, -value));
    }
}

/// Whether the kernel under test reads other storage than elements.
fn is_tested() -> bool {
    client().is_some_and(|client| supports(&client, chosen_dtype()))
        && (chosen_dtype() != Dtype::F32 || forced_kernel(chosen_dtype()) != Some(Kernel::Mma))
}

/// Whether the kernel under test reads rows of these lengths: `mma.sync` reads vectors of 16 bytes.
fn has_rows(case: &Case) -> bool {
    let p = &case.problem;
    forced_kernel(chosen_dtype()) != Some(Kernel::Mma)
        || [p.head_dim, p.head_dim_v].iter().all(|columns| columns.is_multiple_of(16))
}

/// Those of pages in the element type, and head dimensions and page sizes that these lack.
fn cases() -> Vec<Case> {
    let mut cases = pages::cases();
    let case = |sizes: Sizes, options| Case::new(sizes, Dtype::F32, options);
    let (full, alibi) =
        (AttentionOptions::default(), AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal() });
    cases.extend([
        case([2, 2, 1, 1, 90, 4, 4], full).with_seq_lens_k(&[90, 33]).with_pages(16),
        case([1, 2, 2, 20, 140, 4, 12], causal()).with_pages(128),
        case([1, 4, 1, 3, 300, 64, 64], alibi).with_score_tensors(&[[1, 4, 1, 1]]).with_pages(256),
        case([1, 2, 2, 200, 300, 32, 32], full)
            .with_block_mask([1, 1, 2, 3], [128, 128], vec![0, 2, 1, 1, 0, 2])
            .with_pages(64),
    ]);
    if thorough() {
        cases.push(case([1, 4, 2, 1, 190, 256, 256], causal()).with_pages(128));
    }
    cases.into_iter().filter(has_rows).map(Case::with_e4m3).collect()
}

#[test]
fn attention_over_pages_in_e4m3() {
    if is_tested() {
        all(cases());
    }
}

/// What is stored is read exactly: the results are those of contiguous keys and values that are rounded to it. Only products of `mma.sync`
/// sum the columns of Q and K in another order.
#[test]
fn storage_changes_no_bit_of_what_is_stored() {
    let Some(client) = client().filter(|_| is_tested()) else { return };
    for stored in cases() {
        let ran = stored.run(&client).unwrap();
        let backward = plan_with(&client, &stored.problem, ran.forward.kernel()).unwrap().backward;
        let tiles = Some((ran.forward, backward));
        let contiguous = Case { page_size: None, kv_scales: None, tiles, ..stored.clone() };
        let other = contiguous.run(&client).unwrap();
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        if ran.forward.kernel() == Kernel::Mma {
            let near = ran.lse.iter().zip(&other.lse).all(|(a, b)| a == b || (a - b).abs() <= 1e-6 * (1.0 + b.abs()));
            assert!(near, "{:?}: {:?}, {:?}", stored.problem, ran.lse, other.lse);
            continue;
        }
        assert_eq!(bits(&ran.o), bits(&other.o), "{:?}", stored.problem);
        assert_eq!(bits(&ran.lse), bits(&other.lse), "{:?}", stored.problem);
    }
}

/// The kernels that are not planned here, for a token, which several thread blocks share, and for a prompt.
#[test]
fn every_family_reads_e4m3() {
    let Some(client) = client().filter(|_| is_tested()) else { return };
    let token = Case::new([2, 8, 2, 1, 200, 64, 32], Dtype::F32, causal()).with_seq_lens_k(&[200, 77]).with_sinks();
    let prompt = Case::new([1, 2, 1, 50, 80, 32, 64], Dtype::F32, causal());
    let mut ran = Vec::new();
    for case in [token, prompt].map(|case| case.with_pages(16).with_e4m3()) {
        for kernel in [Kernel::Portable, Kernel::Rows, Kernel::Matrix, Kernel::Mma] {
            let Ok(plan) = plan_with(&client, &case.forward_problem(), kernel) else { continue };
            let case = Case { tiles: Some((plan.forward, plan.backward)), wanted: [false; 7], ..case.clone() };
            case.check(&client);
            ran.push(kernel);
        }
    }
    assert!(ran.contains(&Kernel::Portable) && ran.contains(&Kernel::Rows), "{ran:?}");
    let multiplies = lanes::device() == "cuda" && chosen_dtype() != Dtype::F32;
    assert_eq!(ran.contains(&Kernel::Mma), multiplies, "{ran:?}");
}

/// All elements of a page with one that is not finite are NaN. They reach the queries that see the page and no other ones.
#[test]
fn pages_that_are_not_finite() {
    let Some(client) = client().filter(|_| is_tested()) else { return };
    let window = AttentionOptions { window_left: Some(20), ..causal() };
    let mut case = Case::new([1, 4, 2, 40, 150, 64, 64], Dtype::F32, window);
    // The page of the positions 96 to 111 of the first key/value head, which its queries 0 and 1 to 21 see; the first of 110 is at 110.
    case.tensors.v[100 * 64 + 3] = f64::INFINITY;
    case.tensors.k[(150 + 101) * 64] = f64::NAN;
    let case = case.with_pages(16).with_e4m3();
    // Rows that do not see them, some of which are computed again by themselves, are those of the oracle.
    Case { wanted: [false; 7], ..case.clone() }.check(&client);
    let ran = case.run(&client).unwrap();
    for (row, o) in ran.o.chunks_exact(64).enumerate() {
        let sees = row % 40 + 110 - 20 <= 111;
        assert!(o.iter().all(|x| x.is_nan() == sees), "row {row}: {o:?}");
    }
}

#[test]
fn what_cannot_be_read_in_e4m3_is_refused() {
    let problem = |columns: usize| {
        let (q, kv) = ([2, 4, 1, columns], [2, 2, 100, columns]);
        AttentionProblem::new(&q, &kv, &kv, Dtype::F32, AttentionOptions::default()).unwrap()
    };
    let refused = |made: Result<AttentionProblem, AttentionError>, words: &str| {
        let error = made.unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    refused(
        problem(64).with_kv_storage(KvStorage::E4m3),
        "storage = E4m3 is not supported: only keys and values in pages",
    );
    let paged = |columns| problem(columns).with_page_table(&[2, 7], 20, 16).unwrap().with_kv_storage(KvStorage::E4m3);
    refused(paged(66), "storage = E4m3 is not supported: head_dim and head_dim_v must be multiples of 4");
    let good = paged(64).unwrap();
    let Some(client) = client() else { return };
    let zeros = |shape: [usize; 4]| {
        TensorView::contiguous(client.create_from_slice(&vec![0; 4 * shape.iter().product::<usize>()]), shape)
    };
    let (q, o, lse) = (zeros([2, 4, 1, 64]), zeros([2, 4, 1, 64]), words(&client, &[0; 8], [2, 4, 1]));
    let pool = TensorView::e4m3_pages(client.create_from_slice(&[0; 20 * 2 * (16 * 64 + 16)]), [20, 2, 16, 64]);
    let inputs =
        Inputs { page_table: Some(words(&client, &[0; 14], [2, 7])), ..Inputs::new(q, pool.clone(), pool.clone()) };
    if is_tested() {
        forward(&client, &good, &inputs, &o, &lse).unwrap();
    }
    let refused = |inputs: &Inputs, words: &str| {
        let error = forward(&client, &good, inputs, &o, &lse).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    // In the element type, without the last scale, and as many bytes from the start of a word.
    refused(
        &Inputs { v: zeros([20, 2, 16, 64]), ..inputs.clone() },
        "v with shape [20, 2, 16, 64] has strides [2048, ",
    );
    let short = TensorView { handle: pool.handle.clone().offset_end(16), ..pool.clone() };
    refused(
        &Inputs { k: short, ..inputs.clone() },
        "k with shape [20, 2, 16, 64] and strides [2080, 1040, 64, 1] reaches",
    );
    let larger = client.empty(20 * 2 * (16 * 64 + 16) + 4).offset_start(1);
    refused(
        &Inputs { k: TensorView { handle: larger, ..pool }, ..inputs.clone() },
        "k = a view that begins at byte 1 is not",
    );
    let saved = flash_attention_kernels::Saved { o: o.clone(), lse: lse.clone(), dout: o.clone(), dlse: None };
    let error = backward(&client, &good, &inputs, &saved, &Default::default()).unwrap_err().to_string();
    assert!(error.starts_with("page_table = 20 pages of 16 positions is not supported"), "{error}");
    // Kernels for Hopper read no pages, and `mma.sync` multiplies e4m3 by elements of 16 bits only.
    for kernel in [Kernel::Hopper, Kernel::Mma] {
        let error = plan_with(&client, &good, kernel).unwrap_err().to_string();
        assert!(error.starts_with(&format!("kernel {} was requested, but", kernel.name())), "{error}");
    }
}
