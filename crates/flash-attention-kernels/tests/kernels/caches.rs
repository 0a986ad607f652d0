//! Appending to a key/value cache: exact bits at the right positions, and nothing else written.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::{AttentionError, CacheAppend, KvStorage, TensorView, append_to_cache};

/// Sizes of a cache: batch, heads, capacity, head_dim, head_dim_v.
type Cache = [usize; 5];

/// Numbers that half precision represents exactly, different for each position.
fn numbered(len: usize, from: usize) -> Vec<f64> {
    (0..len).map(|n| ((n + from) % 199) as f64 / 8.0).collect()
}

fn lengths(client: &Client, lens: &[i32]) -> TensorView<1> {
    let bytes: Vec<u8> = lens.iter().flat_map(|len| len.to_le_bytes()).collect();
    TensorView::contiguous(client.create_from_slice(&bytes), [lens.len()])
}

fn read_lengths(client: &Client, lens: &TensorView<1>) -> Vec<i32> {
    let bytes = client.read_one_unchecked(lens.handle.clone());
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Appends `new` positions with this layout to sequences of these lengths, and compares with the same on the host.
fn check(client: &Client, cache: Cache, new: usize, layout: Layout, before: &[i32], of_new: Option<&[i32]>) {
    let [batch, heads, capacity, head_dim, head_dim_v] = cache;
    let dtype = chosen_dtype();
    let same = before.len() == 1;
    let varies = !same || of_new.is_some();
    let seq_lens_after = varies.then(|| lengths(client, &vec![-1; batch]));
    let wanted_len = |b: usize| of_new.map_or(new, |of_new| (of_new[b] as u32 as usize).min(new));
    let len = |b: usize| (before[if same { 0 } else { b }] as u32 as usize).min(capacity);
    let mut placed = Vec::new();
    let mut wanted = Vec::new();
    for (nth, dim) in [head_dim, head_dim_v].into_iter().enumerate() {
        let news = numbered(batch * heads * new * dim, 7 + 1000 * nth);
        let all = numbered(batch * heads * capacity * dim, 500 * nth);
        let mut want = all.clone();
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for row in (0..wanted_len(b)).filter(|row| len(b) + row < capacity) {
                let (from, to) =
                    (((b * heads + h) * new + row) * dim, ((b * heads + h) * capacity + len(b) + row) * dim);
                want[to..to + dim].copy_from_slice(&news[from..from + dim]);
            }
        }
        let news = place(client, dtype, [batch, heads, new, dim], layout, &news);
        let all = place(client, dtype, [batch, heads, capacity, dim], Layout::Contiguous, &all);
        placed.push((news, all));
        wanted.push(want);
    }
    let [(k, k_cache), (v, v_cache)] = &placed[..] else { unreachable!() };
    let call = CacheAppend {
        k: k.view.clone(),
        v: v.view.clone(),
        k_cache: k_cache.view.clone(),
        v_cache: v_cache.view.clone(),
        page_table: None,
        storage: KvStorage::Elements,
        start: if same { before[0] as usize } else { 0 },
        seq_lens: (!same).then(|| lengths(client, before)),
        new_lens: of_new.map(|of_new| lengths(client, of_new)),
        seq_lens_after: seq_lens_after.clone(),
    };
    append_to_cache(client, dtype, &call).unwrap();
    for ((name, cache), want) in [("k_cache", k_cache), ("v_cache", v_cache)].into_iter().zip(wanted) {
        assert_eq!(cache.read(client, name), want, "{before:?} and {of_new:?} of {new}");
    }
    if let Some(after) = seq_lens_after {
        let want: Vec<i32> = (0..batch).map(|b| (len(b) + wanted_len(b)).min(capacity) as i32).collect();
        assert_eq!(read_lengths(client, &after), want);
    }
}

#[test]
fn appends_where_the_sequences_end() {
    let Some(client) = client() else { return };
    if !supports(&client, chosen_dtype()) {
        return;
    }
    for (cache, layout) in [
        ([3, 2, 20, 16, 24], Layout::Contiguous),
        ([3, 2, 20, 16, 24], Layout::HeadsInner),
        // Rows that are no whole vectors.
        ([3, 1, 20, 5, 18], Layout::Contiguous),
        ([3, 3, 20, 32, 32], Layout::Transposed),
    ] {
        for new in [1, 3, 20] {
            check(&client, cache, new, layout, &[0], None);
            check(&client, cache, new, layout, &[20 - new as i32], None);
            check(&client, cache, new, layout, &[0, 7, 3], None);
            // Full, past the end, and negative, which is past the end as well.
            check(&client, cache, new, layout, &[20, 19, 100], None);
            check(&client, cache, new, layout, &[-1, 0, 2], Some(&[1, 0, -1]));
            check(&client, cache, new, layout, &[0], Some(&[2, 100, 0]));
        }
    }
}

#[test]
fn what_cannot_be_appended_is_refused() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !supports(&client, dtype) {
        return;
    }
    let zeros = |shape| zeros(&client, dtype, shape);
    let call = CacheAppend {
        k: zeros([2, 2, 3, 16]),
        v: zeros([2, 2, 3, 8]),
        k_cache: zeros([2, 2, 10, 16]),
        v_cache: zeros([2, 2, 10, 8]),
        page_table: None,
        storage: KvStorage::Elements,
        start: 4,
        seq_lens: None,
        new_lens: None,
        seq_lens_after: None,
    };
    let lens = || Some(lengths(&client, &[1, 2]));
    let refused = |call: CacheAppend, words: &str| {
        let error = append_to_cache(&client, dtype, &call).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    append_to_cache(&client, dtype, &call).unwrap();
    let full = append_to_cache(&client, dtype, &CacheAppend { start: 8, ..call.clone() }).unwrap_err();
    assert_eq!(full, AttentionError::CacheFull { capacity: 10, len: 8, new: 3 });
    refused(CacheAppend { v: zeros([2, 2, 4, 8]), ..call.clone() }, "v has dimension 2 4");
    refused(CacheAppend { k_cache: zeros([2, 1, 10, 16]), ..call.clone() }, "k_cache has dimension 1 1");
    refused(CacheAppend { v_cache: zeros([2, 2, 11, 8]), ..call.clone() }, "v_cache has capacity 11");
    refused(CacheAppend { v_cache: zeros([2, 2, 10, 16]), ..call.clone() }, "v_cache has dimension 3 16");
    refused(CacheAppend { seq_lens: lens(), ..call.clone() }, "seq_lens_after = no tensor");
    refused(CacheAppend { seq_lens_after: lens(), ..call.clone() }, "seq_lens_after = a tensor");
    let one = Some(lengths(&client, &[1]));
    refused(CacheAppend { new_lens: one, seq_lens_after: lens(), ..call.clone() }, "new_lens has dimension 0 1");
    let twice = TensorView { strides: [0, 160, 16, 1], ..call.k_cache.clone() };
    refused(CacheAppend { k_cache: twice, ..call.clone() }, "outputs must not overlap themselves");
    let short = TensorView { handle: client.empty(8 * dtype.size()), ..call.k_cache.clone() };
    refused(CacheAppend { k_cache: short, ..call }, "but its buffer holds 8");
}
