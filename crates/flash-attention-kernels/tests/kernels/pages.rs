//! Keys and values in pages: in any order, in any page size, where every row that no sequence has is NaN.

use crate::common::*;
use flash_attention_kernels::mods::{Alibi, ScoreFn};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, CacheAppend, Dtype, Inputs, Kernel, KvStorage, TensorView,
    append_to_cache, backward, copy_cache_pages, forward, plan_with,
};

/// A token, a few and a prompt; sequences that end within a page, at its end, and in the first one.
pub fn cases() -> Vec<Case> {
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(40), window_right: Some(3), ..full };
    let capped = AttentionOptions { softcap: Some(2.0), softmax_scale: Some(0.4), ..causal() };
    let case = |sizes: Sizes, options| Case::new(sizes, Dtype::F32, options);
    let few = [3, 4, 2, 2, 300, 64, 64];
    let mut cases = vec![
        case(few, causal()).with_pages(16),
        case(few, causal()).with_seq_lens_k(&[300, 48, 3]).with_pages(16),
        case(few, window).with_sinks().with_seq_lens_k(&[299, 64, 0]).with_pages(64),
        case(few, capped).with_bias([1, 4, 2, 300]).with_mask([3, 4, 1, 300]).with_pages(32),
        case([2, 2, 2, 70, 130, 40, 64], causal()).with_seq_lens_k(&[130, 77]).with_pages(32),
        case([2, 2, 1, 70, 200, 64, 24], window).with_alibi_slopes([1, 2]).with_pages(16),
    ];
    if thorough() {
        cases.extend([
            case([2, 32, 8, 1, 700, 128, 128], full).with_seq_lens_k(&[700, 511]).with_pages(256),
            case([1, 8, 1, 5, 400, 128, 64], causal()).with_pages(128),
            case([2, 4, 2, 1, 190, 192, 256], causal()).with_seq_lens_k(&[190, 16]).with_pages(16),
            case([1, 2, 2, 130, 300, 128, 128], causal()).with_dropout(0.2).with_pages(64),
        ]);
    }
    cases
}

#[test]
fn attention_over_pages() {
    all(cases());
}

/// A kernel computes in the same order whether keys are in pages or not.
#[test]
fn pages_change_no_bit() {
    let Some(client) = client() else { return };
    if !supports(&client, chosen_dtype()) {
        return;
    }
    for paged in cases() {
        let ran = paged.run(&client).unwrap();
        if lanes::device() == "cuda" && forced_kernel(paged.problem.dtype).is_none() {
            assert_eq!(ran.forward.kernel(), Kernel::Mma, "{:?}", paged.problem);
        }
        let backward = plan_with(&client, &paged.problem, ran.forward.kernel()).unwrap().backward;
        let contiguous = Case { page_size: None, tiles: Some((ran.forward, backward)), ..paged.clone() };
        let other = contiguous.run(&client).unwrap();
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&ran.o), bits(&other.o), "{:?}", paged.problem);
        assert_eq!(bits(&ran.lse), bits(&other.lse), "{:?}", paged.problem);
    }
}

#[test]
fn block_masks_and_functions_over_pages() {
    let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal() };
    all([
        Case::new([1, 4, 2, 3, 190, 64, 64], Dtype::F32, options).with_score_tensors(&[[1, 4, 1, 1]]).with_pages(16),
        Case::new([1, 2, 2, 200, 300, 64, 64], Dtype::F32, AttentionOptions::default())
            .with_block_mask([1, 1, 2, 3], [128, 128], vec![0, 2, 1, 1, 0, 2])
            .with_pages(64),
    ]);
}

/// Rows that are no whole vectors. The kernel of `mma.sync` would need a copy of all pages, and leaves them to another one.
#[test]
fn odd_rows_in_pages() {
    if forced_kernel(chosen_dtype()) == Some(Kernel::Mma) {
        return;
    }
    all([Case::new([2, 2, 1, 3, 70, 5, 18], Dtype::F32, causal()).with_seq_lens_k(&[70, 20]).with_pages(16)]);
}

/// A value that is not finite reaches the row that sees it and no other one, which kernels of tensor cores compute again by itself.
#[test]
fn values_that_are_not_finite_in_pages() {
    let mut case = Case::new([1, 4, 2, 3, 150, 64, 64], Dtype::F32, causal()).with_seq_lens_k(&[149]);
    case.tensors.v[148 * 64..][..64].fill(f64::NAN);
    all([case.with_pages(16)]);
}

/// Words of the device.
fn words<const RANK: usize>(client: &cubecl::client::Client, words: &[u32], shape: [usize; RANK]) -> TensorView<RANK> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    TensorView::contiguous(client.create_from_slice(&bytes), shape)
}

/// Numbers that half precision represents exactly, all different in f32.
fn numbered(len: usize, from: usize) -> Vec<f64> {
    (0..len).map(|n| ((n + from) % 1999) as f64).collect()
}

/// Sequences of 5, 31, 16 and 40 positions get 3 new ones each, or as many as there are: the first ones of a page, of several pages, past
/// the last column of the table, and in a page that does not exist.
#[test]
fn appends_to_pages() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !supports(&client, dtype) {
        return;
    }
    let (heads, size, num_pages, new) = (2, 16, 7, 3);
    for (dim, dim_v) in [(16, 24), (5, 18)] {
        let table = [[6, 99, 99], [2, 0, 99], [3, 99, 99], [4, 1, 5]];
        let (before, of_new) = ([5, 31, 16, 47], [3, 2, 3, 3]);
        let mut placed = Vec::new();
        let mut wanted = Vec::new();
        for (nth, dim) in [dim, dim_v].into_iter().enumerate() {
            let news = numbered(4 * heads * new * dim, 700 * nth);
            let all = numbered(num_pages * heads * size * dim, 1000 + 300 * nth);
            let mut want = all.clone();
            for (b, h, row) in (0..4 * heads * new).map(|n| (n / heads / new, n / new % heads, n % new)) {
                let to = before[b] + row;
                if row >= of_new[b] || to >= 3 * size || table[b][to / size] as usize >= num_pages {
                    continue;
                }
                let at = ((table[b][to / size] as usize * heads + h) * size + to % size) * dim;
                let from = ((b * heads + h) * new + row) * dim;
                want[at..at + dim].copy_from_slice(&news[from..from + dim]);
            }
            assert_ne!(all, want);
            let news = place(&client, dtype, [4, heads, new, dim], Layout::HeadsInner, &news);
            placed.push((news, place(&client, dtype, [num_pages, heads, size, dim], Layout::Contiguous, &all)));
            wanted.push(want);
        }
        let [(k, k_cache), (v, v_cache)] = &placed[..] else { unreachable!() };
        let after = words(&client, &[9; 4], [4]);
        let call = CacheAppend {
            k: k.view.clone(),
            v: v.view.clone(),
            k_cache: k_cache.view.clone(),
            v_cache: v_cache.view.clone(),
            page_table: Some(words(&client, table.as_flattened(), [4, 3])),
            storage: KvStorage::Elements,
            start: 0,
            seq_lens: Some(words(&client, &before.map(|len| len as u32), [4])),
            new_lens: Some(words(&client, &of_new.map(|len| len as u32), [4])),
            seq_lens_after: Some(after.clone()),
        };
        append_to_cache(&client, dtype, &call).unwrap();
        for ((name, cache), want) in [("k_cache", k_cache), ("v_cache", v_cache)].into_iter().zip(wanted) {
            assert_eq!(cache.read(&client, name), from_bytes(&to_bytes(&want, dtype), dtype));
        }
        let bytes = client.read_one_unchecked(after.handle);
        let lens: Vec<u32> = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(lens, [8, 33, 19, 48]);
    }
}

#[test]
fn copies_whole_pages() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !supports(&client, dtype) {
        return;
    }
    let (num_pages, heads, size) = (6, 2, 16);
    for (dim, dim_v) in [(16, 24), (5, 18)] {
        let pools = [dim, dim_v].map(|dim| {
            let all = numbered(num_pages * heads * size * dim, dim);
            (place(&client, dtype, [num_pages, heads, size, dim], Layout::Contiguous, &all), all)
        });
        let [(k, _), (v, _)] = &pools;
        // To the first, to the last, and with pages that do not exist.
        let pairs = words(&client, &[3, 0, 1, 5, 6, 2, 4, 77], [4, 2]);
        copy_cache_pages(&client, dtype, KvStorage::Elements, &k.view, &v.view, &pairs).unwrap();
        for ((pool, all), dim) in pools.iter().zip([dim, dim_v]) {
            let page = heads * size * dim;
            let mut want = from_bytes(&to_bytes(all, dtype), dtype);
            want.copy_within(3 * page..4 * page, 0);
            want.copy_within(page..2 * page, 5 * page);
            assert_eq!(pool.read(&client, "pool"), want);
        }
    }
}

#[test]
fn pages_that_make_no_sense_are_refused() {
    let problem = |pages: [usize; 2], num_pages, size| {
        let (q, kv) = ([2, 4, 1, 64], [2, 2, 100, 64]);
        let problem = AttentionProblem::new(&q, &kv, &kv, Dtype::F32, AttentionOptions::default()).unwrap();
        problem.with_page_table(&pages, num_pages, size)
    };
    let refused = |made: Result<AttentionProblem, AttentionError>, words: &str| {
        let error = made.unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    refused(problem([2, 7], 20, 48), "page_size is 48; it must be 16, 32, 64, 128 or 256");
    refused(problem([2, 7], 0, 16), "num_pages is 0");
    refused(problem([2, 0], 20, 16), "max_pages is 0");
    refused(problem([3, 7], 20, 16), "page_table has batch 3");
    refused(problem([2, 6], 20, 16), "page_table has max_pages 6 (shape [2, 6]), but seq_k has 7");
    let good = problem([2, 7], 20, 16).unwrap();
    refused(good.with_cu_seqlens(&[3], &[3]), "cu_seqlens_k = the bounds of 2 sequences");
    let Some(client) = client() else { return };
    let zeros = |shape: [usize; 4]| {
        TensorView::contiguous(client.create_from_slice(&vec![0; 4 * shape.iter().product::<usize>()]), shape)
    };
    let (q, pool) = (zeros([2, 4, 1, 64]), zeros([20, 2, 16, 64]));
    let (o, lse) = (zeros([2, 4, 1, 64]), words(&client, &[0; 8], [2, 4, 1]));
    let inputs = Inputs::new(q.clone(), pool.clone(), pool.clone());
    let error = forward(&client, &good, &inputs, &o, &lse).unwrap_err().to_string();
    assert!(error.starts_with("page_table = no tensor"), "{error}");
    let inputs = Inputs { page_table: Some(words(&client, &[0; 14], [2, 7])), ..inputs };
    forward(&client, &good, &inputs, &o, &lse).unwrap();
    let other = Inputs { k: zeros([20, 2, 32, 64]), ..inputs.clone() };
    let error = forward(&client, &good, &other, &o, &lse).unwrap_err().to_string();
    assert!(error.starts_with("k has dimension 2 32"), "{error}");
    let saved = flash_attention_kernels::Saved { o: o.clone(), lse, dout: o, dlse: None };
    let error = backward(&client, &good, &inputs, &saved, &Default::default()).unwrap_err().to_string();
    assert!(error.starts_with("page_table = 20 pages of 16 positions is not supported"), "{error}");
    // A cache in pages of 24, and pairs that are none.
    let call = CacheAppend {
        k: zeros([2, 2, 1, 64]),
        v: zeros([2, 2, 1, 64]),
        k_cache: zeros([20, 2, 24, 64]),
        v_cache: zeros([20, 2, 24, 64]),
        page_table: Some(words(&client, &[0; 2], [2, 1])),
        storage: KvStorage::Elements,
        start: 0,
        seq_lens: None,
        new_lens: None,
        seq_lens_after: None,
    };
    let error = append_to_cache(&client, Dtype::F32, &call).unwrap_err().to_string();
    assert!(error.starts_with("page_size is 24"), "{error}");
    let error =
        copy_cache_pages(&client, Dtype::F32, KvStorage::Elements, &pool, &pool, &words(&client, &[0; 3], [1, 3]))
            .unwrap_err();
    assert!(error.to_string().starts_with("pairs has dimension 1 3"), "{error}");
}
