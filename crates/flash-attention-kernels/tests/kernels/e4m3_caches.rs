//! Appends to pages in e4m3 and copies of them, bit for bit.

use crate::common::*;
use cubecl::client::Client;
use cubecl::server::Handle;
use flash_attention_kernels::e4m3::{decode, encode, page_bytes, scale_of};
use flash_attention_kernels::{
    AttentionError, CacheAppend, Dtype, KvStorage, TensorView, append_to_cache, copy_cache_pages,
};
use flash_attention_reference as reference;

/// Words of the device.
pub fn words<const RANK: usize>(client: &Client, words: &[u32], shape: [usize; RANK]) -> TensorView<RANK> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    TensorView::contiguous(client.create_from_slice(&bytes), shape)
}

pub fn read_words(client: &Client, handle: Handle) -> Vec<u32> {
    let bytes = client.read_one_unchecked(handle);
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Bytes around a pool.
const GUARD: usize = 1024;

/// A pool of pages in e4m3, on the host and on the device.
struct Pool {
    shape: [usize; 4],
    bytes: Vec<u8>,
    whole: Handle,
}

impl Pool {
    /// A pool of arbitrary bytes. No scale is NaN, so that a kernel that reads one of another page is seen.
    fn new(client: &Client, shape: [usize; 4]) -> Pool {
        let len = shape[0] * shape[1] * page_bytes(shape[2], shape[3]);
        let bytes: Vec<u8> = (0..len).map(|n| (n * 37 % 101) as u8).collect();
        let guard = [0xA5; GUARD];
        let whole = client.create_from_slice(&[&guard, &bytes[..], &guard].concat());
        Pool { shape, bytes, whole }
    }

    fn view(&self) -> TensorView {
        TensorView::e4m3_pages(self.whole.clone().offset_start(GUARD as u64).offset_end(GUARD as u64), self.shape)
    }

    /// The bytes of a page of a head.
    fn page(&mut self, page: usize, head: usize) -> &mut [u8] {
        let len = page_bytes(self.shape[2], self.shape[3]);
        &mut self.bytes[(page * self.shape[1] + head) * len..][..len]
    }

    /// Writes rows to a page of a head from the row `begin` on, as the format is documented.
    fn write(&mut self, page: usize, head: usize, begin: usize, rows: &[f32]) {
        let at = self.shape[2] * self.shape[3];
        let start = begin * self.shape[3];
        let bytes = self.page(page, head);
        let before = f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let unknown = rows.iter().any(|x| !x.is_finite());
        let largest = rows.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let mut scale = if unknown { f32::NAN } else { scale_of(largest) };
        if begin > 0 {
            scale = if before.is_nan() || scale.is_nan() { f32::NAN } else { scale.max(before) };
            for byte in &mut bytes[..start] {
                *byte = encode(decode(*byte) * before / scale);
            }
        }
        for (byte, value) in bytes[start..].iter_mut().zip(rows) {
            *byte = encode(value / scale);
        }
        bytes[at..at + 4].copy_from_slice(&scale.to_le_bytes());
    }

    /// Compares all bytes with the device's. Of a page whose scale is NaN only that counts, since all its elements are then NaN.
    fn check(&mut self, client: &Client, what: &str) {
        let all = client.read_one_unchecked(self.whole.clone());
        let (before, rest) = all.split_at(GUARD);
        let (bytes, after) = rest.split_at(self.bytes.len());
        assert!(before.iter().chain(&after[..GUARD]).all(|byte| *byte == 0xA5), "{what}: written outside of the pool");
        let [_, heads, page_size, columns] = self.shape;
        for (nth, found) in bytes.chunks_exact(page_bytes(page_size, columns)).enumerate() {
            let wanted = self.page(nth / heads, nth % heads);
            let at = page_size * columns;
            let [scale, of_device] = [&wanted[at..at + 4], &found[at..at + 4]];
            let [scale, of_device] = [scale, of_device].map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            assert_eq!(of_device.is_nan(), scale.is_nan(), "{what}: page {}, head {}", nth / heads, nth % heads);
            if scale.is_nan() {
                wanted.copy_from_slice(found);
            }
            assert_eq!(found, wanted, "{what}: page {}, head {}, {of_device} for {scale}", nth / heads, nth % heads);
        }
    }
}

/// A cache of sequences in pages, some of which do not exist.
struct Cache {
    pools: [Pool; 2],
    table: Vec<[u32; 4]>,
    lens: Vec<usize>,
}

impl Cache {
    /// Appends rows of these magnitudes, as many to each sequence, on the device and on the host, and compares.
    fn append(&mut self, client: &Client, new: usize, of_new: &[usize], layout: Layout, value: impl Fn(usize) -> f64) {
        let (dtype, batch) = (chosen_dtype(), self.lens.len());
        let [num_pages, heads, page_size, _] = self.pools[0].shape;
        let mut placed = Vec::new();
        for (nth, pool) in self.pools.iter_mut().enumerate() {
            let columns = pool.shape[3];
            let values: Vec<f64> = (0..batch * heads * new * columns).map(|at| value(at + 31 * nth)).collect();
            let values = from_bytes(&to_bytes(&values, dtype), dtype);
            placed.push(place(client, dtype, [batch, heads, new, columns], layout, &values));
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                let (start, end) = (self.lens[b], (self.lens[b] + of_new[b]).min(4 * page_size));
                let mut at = start;
                while at < end {
                    let stop = end.min((at / page_size + 1) * page_size);
                    let page = self.table[b][at / page_size] as usize;
                    let first = (b * heads + h) * new;
                    let rows = &values[(first + at - start) * columns..(first + stop - start) * columns];
                    let rows: Vec<f32> = rows.iter().map(|x| *x as f32).collect();
                    if page < num_pages {
                        pool.write(page, h, at % page_size, &rows);
                    }
                    at = stop;
                }
            }
        }
        let after = words(client, &vec![9; batch], [batch]);
        let lens = |lens: &[usize]| words(client, &lens.iter().map(|len| *len as u32).collect::<Vec<_>>(), [batch]);
        let call = CacheAppend {
            k: placed[0].view.clone(),
            v: placed[1].view.clone(),
            k_cache: self.pools[0].view(),
            v_cache: self.pools[1].view(),
            page_table: Some(words(client, self.table.as_flattened(), [batch, 4])),
            storage: KvStorage::E4m3,
            start: 0,
            seq_lens: Some(lens(&self.lens)),
            new_lens: Some(lens(of_new)),
            seq_lens_after: Some(after.clone()),
        };
        append_to_cache(client, dtype, &call).unwrap();
        let what = format!("{of_new:?} of {new} after {:?}, {layout:?}", self.lens);
        for pool in &mut self.pools {
            pool.check(client, &what);
        }
        for (len, new) in self.lens.iter_mut().zip(of_new) {
            *len = (*len + new).min(4 * page_size);
        }
        let of_device = read_words(client, after.handle);
        assert_eq!(of_device, self.lens.iter().map(|len| *len as u32).collect::<Vec<_>>(), "{what}");
    }
}

/// Rows of very different magnitudes: scales grow, by one step and by so many that older rows become subnormal or zero; a page begins
/// again; there are infinities, and numbers that are too large for any scale.
#[test]
fn appends_as_documented() {
    let Some(client) = client() else { return };
    if !supports(&client, chosen_dtype()) {
        return;
    }
    for (page_size, dims) in [(16, [16, 24]), (32, [4, 8]), (64, [128, 64])] {
        let pools = dims.map(|columns| Pool::new(&client, [9, 2, page_size, columns]));
        let table = vec![[7, 2, 99, 4], [0, 8, 1, 3], [5, 99, 6, 99]];
        let mut cache = Cache { pools, table, lens: vec![0, 1, page_size - 2] };
        // Sequences whose first positions were never written begin with whatever the pool holds.
        for pool in &mut cache.pools {
            for (page, head) in [(0, 0), (0, 1), (5, 0), (5, 1)] {
                let columns = pool.shape[3];
                let bytes = pool.page(page, head);
                let rows: Vec<f32> = bytes[..columns].iter().map(|code| decode(*code)).collect();
                pool.write(page, head, 0, &rows);
            }
            let guard = [0xA5; GUARD];
            pool.whole = client.create_from_slice(&[&guard, &pool.bytes[..], &guard].concat());
        }
        let normal = reference::normal(1 << 14, 5);
        let random = |exponent: i32| {
            let normal = &normal;
            move |at: usize| normal[at % normal.len()] * 2f64.powi(exponent)
        };
        cache.append(&client, 1, &[1, 1, 1], Layout::Contiguous, random(0));
        // The scales stay, grow by one step, and grow by many.
        cache.append(&client, 1, &[1, 1, 1], Layout::Contiguous, random(-9));
        cache.append(&client, 2, &[2, 1, 0], Layout::HeadsInner, random(1));
        cache.append(&client, 3, &[3, 0, 3], Layout::Transposed, random(7));
        cache.append(&client, 1, &[1, 1, 1], Layout::Padded(3), |at| if at % 8 == 3 { 0.0 } else { -60000.0 });
        // Many pages at a time, some of them missing, and past the last one.
        cache.append(
            &client,
            2 * page_size,
            &[page_size, 2 * page_size, 2 * page_size - 1],
            Layout::Contiguous,
            |at| normal[at % normal.len()] * 2f64.powi((at / 64 % 20) as i32 - 14),
        );
        cache.append(&client, 2 * page_size, &[2 * page_size, 40, 3], Layout::Contiguous, random(-3));
        // Pages that are written from their first row on begin with a new scale.
        cache.lens = vec![0, page_size, 5];
        cache.append(&client, page_size + 1, &[page_size + 1, 5, 1], Layout::HeadsInner, random(-12));
        // An element that is not finite.
        cache.lens = vec![3, page_size + 2, 0];
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        cache.append(&client, 2, &[2, 1, 2], Layout::Contiguous, |at| if at % 97 == 5 { odd[at % 3] } else { 1.0 });
        cache.append(&client, 2, &[1, 2, 2], Layout::Contiguous, random(0));
        cache.lens = vec![0; 3];
        cache.append(&client, 4, &[4; 3], Layout::Contiguous, random(-1));
    }
}

/// Numbers that f16 does not hold: scales of all exponents, and numbers above the largest one.
#[test]
fn scales_have_bounds() {
    let Some(client) = client() else { return };
    if !supports(&client, chosen_dtype()) || chosen_dtype() == Dtype::F16 {
        return;
    }
    let pools = [8, 12].map(|columns| Pool::new(&client, [4, 1, 16, columns]));
    let mut cache = Cache { pools, table: vec![[0, 1, 2, 3]], lens: vec![0] };
    for exponent in [-120, -100, -92, -91, -60, 0, 5, 15, 16, 17, 100] {
        let signs = [1.0, -1.0];
        let value = |at: usize| (at % 7) as f64 / 6.0 * signs[at % 2] * 2f64.powi(exponent);
        cache.append(&client, 3, &[3], Layout::Contiguous, value);
    }
    let page = cache.pools[0].page(1, 0);
    assert_eq!(page[16 * 8..][..4], 128f32.to_le_bytes());
}

/// A page of a sequence is copied before another sequence that shares it appends to it.
#[test]
fn copies_of_pages_have_their_scales() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !supports(&client, dtype) {
        return;
    }
    let pools = [16, 20].map(|columns| Pool::new(&client, [6, 2, 16, columns]));
    let mut cache = Cache { pools, table: vec![[3, 9, 9, 9], [1, 9, 9, 9]], lens: vec![0, 0] };
    let normal = reference::normal(1000, 3);
    cache.append(&client, 7, &[7, 5], Layout::Contiguous, |at| normal[at % 1000]);
    // To the first, to the last, and with pages that do not exist.
    let pairs = words(&client, &[3, 0, 1, 5, 6, 2, 4, 77], [4, 2]);
    let [k, v] = cache.pools.each_ref().map(Pool::view);
    copy_cache_pages(&client, dtype, KvStorage::E4m3, &k, &v, &pairs).unwrap();
    for pool in &mut cache.pools {
        for (from, to, head) in [(3, 0, 0), (3, 0, 1), (1, 5, 0), (1, 5, 1)] {
            let page = pool.page(from, head).to_vec();
            pool.page(to, head).copy_from_slice(&page);
        }
        pool.check(&client, "copies");
    }
    cache.table = vec![[0, 9, 9, 9], [5, 9, 9, 9]];
    cache.append(&client, 2, &[2, 2], Layout::Contiguous, |at| 40.0 * normal[at % 1000]);
}

#[test]
fn caches_that_cannot_be_in_e4m3_are_refused() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !supports(&client, dtype) {
        return;
    }
    let zeros = |shape| zeros(&client, dtype, shape);
    let pool = |shape: [usize; 4]| Pool::new(&client, shape).view();
    let call = CacheAppend {
        k: zeros([2, 2, 3, 16]),
        v: zeros([2, 2, 3, 8]),
        k_cache: pool([5, 2, 16, 16]),
        v_cache: pool([5, 2, 16, 8]),
        page_table: Some(words(&client, &[0, 1], [2, 1])),
        storage: KvStorage::E4m3,
        start: 4,
        seq_lens: None,
        new_lens: None,
        seq_lens_after: None,
    };
    append_to_cache(&client, dtype, &call).unwrap();
    let refused = |call: CacheAppend, words: &str| {
        let error = append_to_cache(&client, dtype, &call).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    };
    let full = append_to_cache(&client, dtype, &CacheAppend { start: 14, ..call.clone() }).unwrap_err();
    assert_eq!(full, AttentionError::CacheFull { capacity: 16, len: 14, new: 3 });
    refused(
        CacheAppend { page_table: None, k_cache: zeros([2, 2, 16, 16]), v_cache: zeros([2, 2, 16, 8]), ..call.clone() },
        "storage = E4m3 is not supported: only caches in pages",
    );
    let other = TensorView { strides: [512, 256, 16, 1], ..call.k_cache.clone() };
    refused(
        CacheAppend { k_cache: other, ..call.clone() },
        "has strides [512, 256, 16, 1]; pages in e4m3 have strides [544, 272, 16, 1]",
    );
    // The rows fit, but not the last scale.
    let short = TensorView { handle: client.empty(5 * 2 * (16 * 8 + 16) - 16), ..call.v_cache.clone() };
    refused(CacheAppend { v_cache: short, ..call.clone() }, "v_cache with shape [5, 2, 16, 8]");
    refused(
        CacheAppend { k: zeros([2, 2, 3, 6]), k_cache: pool([5, 2, 16, 6]), ..call.clone() },
        "k_cache = rows of 6 elements is not supported",
    );
    let odd = TensorView::e4m3_pages(client.empty(4096).offset_start(2), [5, 2, 16, 16]);
    refused(CacheAppend { k_cache: odd, ..call.clone() }, "k_cache = a view that begins at byte 2");
    let [k, v] = [&call.k_cache, &call.v_cache];
    let pairs = words(&client, &[0, 1], [1, 2]);
    copy_cache_pages(&client, dtype, KvStorage::E4m3, k, v, &pairs).unwrap();
    let error = copy_cache_pages(&client, dtype, KvStorage::E4m3, k, &zeros([5, 2, 16, 8]), &pairs).unwrap_err();
    assert!(error.to_string().starts_with("v_cache with shape"), "{error}");
}
