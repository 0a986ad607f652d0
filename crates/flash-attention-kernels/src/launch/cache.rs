//! Launch of the kernels that write to a key/value cache.

use super::arguments::{page_table, width};
use super::e4m3::{check_pool, words};
use super::{Argument, addresses, elementwise};
use crate::cache::{
    AppendedLengthsLaunch, Blueprint, CachedKeysValuesLaunch, KeysValuesLaunch, append, append_e4m3, copy_pages,
};
use crate::dtype::Dtype;
use crate::e4m3::KvStorage;
use crate::error::AttentionError;
use crate::pages::PageTableLaunch;
use crate::problem::{PagedKv, agree};
use crate::tensor::{AnyView, TensorView};
use crate::tiling::{self, Device, recent};
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;

/// Most threads of a thread block that appends to a page in e4m3.
const APPEND_UNITS: usize = 128;

/// New positions of sequences, and the key/value cache that [`append_to_cache`] writes them to.
#[derive(Clone, Debug)]
pub struct CacheAppend {
    /// Keys of the new positions, `[batch, num_heads_kv, new, head_dim]`.
    pub k: TensorView,
    /// Values of the new positions, `[batch, num_heads_kv, new, head_dim_v]`.
    pub v: TensorView,
    /// The cache of keys, `[batch, num_heads_kv, capacity, head_dim]`, or pages, `[num_pages, num_heads_kv, page_size, head_dim]`.
    pub k_cache: TensorView,
    /// The cache of values, `[batch, num_heads_kv, capacity, head_dim_v]`, or pages, `[num_pages, num_heads_kv, page_size, head_dim_v]`.
    pub v_cache: TensorView,
    /// The page of each block of positions of a sequence, `[batch, max_pages]`, 32 bits each, if the cache has pages. No page that is
    /// written to is another sequence's.
    pub page_table: Option<TensorView<2>>,
    /// How the cache stores keys and values. In e4m3 it has pages, and its views are those of [`TensorView::e4m3_pages`].
    pub storage: KvStorage,
    /// Length of every sequence, if `seq_lens` gives none.
    pub start: usize,
    /// Length of each sequence, `[batch]`, 32 bits each. Larger numbers count as the capacity.
    pub seq_lens: Option<TensorView<1>>,
    /// Number of new positions of each sequence, the first ones, in the same format. `None`: all.
    pub new_lens: Option<TensorView<1>>,
    /// Written: the length of each sequence afterwards, in the same format. There must be one if there are `seq_lens` or `new_lens`.
    pub seq_lens_after: Option<TensorView<1>>,
}

/// Writes keys and values of new positions to a cache, in place: those of sequence `b` go to positions `seq_lens[b]` and after. What does
/// not fit into the capacity, or goes to a page that does not exist, is dropped.
///
/// Errors name the argument at fault; in that case nothing has been launched.
///
/// ```no_run
/// use flash_attention_kernels::{CacheAppend, Dtype, KvStorage, TensorView, append_to_cache};
///
/// # fn f(client: cubecl::client::Client, k: TensorView, v: TensorView) -> Result<(), flash_attention_kernels::AttentionError> {
/// // A cache of 4,096 positions of 8 heads of 128 elements in bf16; `k` and `v` are `[1, 8, new, 128]`.
/// let empty = || TensorView::contiguous(client.empty(2 * 8 * 4096 * 128), [1, 8, 4096, 128]);
/// let (k_cache, v_cache) = (empty(), empty());
/// let append = CacheAppend {
///     k,
///     v,
///     k_cache,
///     v_cache,
///     page_table: None,
///     storage: KvStorage::Elements,
///     start: 0,
///     seq_lens: None,
///     new_lens: None,
///     seq_lens_after: None,
/// };
/// append_to_cache(&client, Dtype::BF16, &append)
/// # }
/// ```
pub fn append_to_cache(client: &Client, dtype: Dtype, call: &CacheAppend) -> Result<(), AttentionError> {
    let device = recent::device(client);
    tiling::check_dtype(&device, dtype)?;
    let CacheAppend { k, v, k_cache, v_cache, page_table: table, storage, start, seq_lens, new_lens, seq_lens_after } =
        call;
    let [batch, heads, new, head_dim] = k.shape;
    let (rows, head_dim_v) = (k_cache.shape[2], v.shape[3]);
    agree("v_cache", &v_cache.shape, 2, if table.is_some() { "page_size" } else { "capacity" }, "k_cache", rows)?;
    let paged = table.as_ref().map(|table| PagedKv {
        num_pages: k_cache.shape[0],
        page_size: rows,
        max_pages: table.shape[1],
        storage: *storage,
    });
    paged.map_or(Ok(()), |paged| paged.check())?;
    if paged.is_none() && *storage == KvStorage::E4m3 {
        return Err(AttentionError::Unsupported {
            option: "storage",
            value: format!("{storage:?}"),
            why: "only caches in pages have another element type than new positions; give page_table",
        });
    }
    let (blocks, capacity) = paged.map_or((batch, rows), |paged| (paged.num_pages, paged.max_pages * paged.page_size));
    let lens = Some([batch]);
    let (size, stored) = (dtype.size(), storage.size(dtype));
    for argument in [
        Argument::new("k", k, Some(k.shape), size),
        Argument::new("v", v, Some([batch, heads, new, head_dim_v]), size),
        Argument::new("seq_lens", seq_lens, lens.filter(|_| seq_lens.is_some()), 4),
        Argument::new("new_lens", new_lens, lens.filter(|_| new_lens.is_some()), 4),
        Argument::new("page_table", table, paged.map(|paged| [batch, paged.max_pages]), 4),
    ] {
        argument.check(&device)?;
    }
    let varies = seq_lens.is_some() || new_lens.is_some();
    let after = Argument::new("seq_lens_after", seq_lens_after, lens.filter(|_| varies), 4);
    for argument in [
        Argument::new("k_cache", k_cache, Some([blocks, heads, rows, head_dim]), stored),
        Argument::new("v_cache", v_cache, Some([blocks, heads, rows, head_dim_v]), stored),
    ] {
        argument.check_output(&device)?;
    }
    check_pools(*storage, k_cache, v_cache)?;
    after.check(&device)?;
    after.check_output(&device)?;
    if seq_lens.is_none() && start + new > capacity {
        return Err(AttentionError::CacheFull { capacity, len: *start, new });
    }
    if k.is_empty() && v.is_empty() {
        return Ok(());
    }
    let [before, of_new, after] = [seq_lens, new_lens, seq_lens_after].map(|lens| lens.as_ref().map(|lens| lens.arg()));
    let lengths =
        AppendedLengthsLaunch::new(capacity as u32, *start as u32, before.into(), of_new.into(), after.into());
    let pages = paged.zip(table.as_ref()).map(|(paged, table)| page_table(paged, table));
    match pages {
        Some(pages) if *storage == KvStorage::E4m3 => launch_e4m3(client, &device, dtype, call, lengths, pages),
        pages => launch_elements(client, &device, dtype, call, lengths, pages),
    }
}

/// Launches the append to a cache of elements of the type of new positions.
fn launch_elements(
    client: &Client,
    device: &Device,
    dtype: Dtype,
    call: &CacheAppend,
    lengths: AppendedLengthsLaunch,
    pages: Option<PageTableLaunch>,
) -> Result<(), AttentionError> {
    let CacheAppend { k, v, k_cache, v_cache, .. } = call;
    let views = [k, v, k_cache, v_cache];
    let width = width(views, dtype.size());
    let (count, dim) = elementwise(device, "append", (k.len() + v.len()) / width)?;
    // SAFETY: views have been checked against their buffers. The kernel drops positions past the end of the cache.
    unsafe {
        append::launch_unchecked(
            client,
            count,
            dim,
            addresses(views.map(|view| view as &dyn AnyView)),
            width,
            KeysValuesLaunch::new(k.arg(), v.arg()),
            CachedKeysValuesLaunch::new(k_cache.arg(), v_cache.arg()),
            lengths,
            pages.into(),
            tiling::element_type(dtype),
        );
    }
    Ok(())
}

/// Launches the append to pages in e4m3.
fn launch_e4m3(
    client: &Client,
    device: &Device,
    dtype: Dtype,
    call: &CacheAppend,
    lengths: AppendedLengthsLaunch,
    pages: PageTableLaunch,
) -> Result<(), AttentionError> {
    let CacheAppend { k, v, k_cache, v_cache, .. } = call;
    let [batch, heads, new, head_dim] = k.shape;
    let page_size = k_cache.shape[2];
    // They are most if the first new position is the last of a page.
    let pages_each = (new + page_size - 2) / page_size + 1;
    let count = tiling::cube_count(device, "append", (2 * batch * heads * pages_each) as u64)?;
    let units = 1 << device.units.min(APPEND_UNITS).ilog2();
    let (k_words, v_words) = (words(k_cache), words(v_cache));
    // SAFETY: views have been checked against their buffers, and pools hold all pages with their scales. The kernel drops positions past
    // the end of the cache, and writes to no page that does not exist.
    unsafe {
        append_e4m3::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(units as u32),
            addresses([k, v, &k_words, &v_words].map(|view| view as &dyn AnyView)),
            width([k, v], dtype.size()),
            KeysValuesLaunch::new(k.arg(), v.arg()),
            CachedKeysValuesLaunch::new(k_words.arg(), v_words.arg()),
            lengths,
            pages,
            pages_each as u32,
            Blueprint { units, head_dim, head_dim_v: v.shape[3] },
            tiling::element_type(dtype),
        );
    }
    Ok(())
}

/// Copies pages of a pool of keys, `[num_pages, num_heads_kv, page_size, head_dim]`, and of values, `[num_pages, num_heads_kv, page_size,
/// head_dim_v]`, to other pages of it. Before one of two sequences that share a page writes to it, it gets a copy.
///
/// `pairs` is `[n, 2]`, 32 bits each: the pages that are copied, each with the page that it is copied to, which no other pair names. A pair
/// with a page that does not exist copies nothing. Errors name the argument at fault; in that case nothing has been launched.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionError, Dtype, KvStorage, TensorView, copy_cache_pages};
///
/// # fn f(client: cubecl::client::Client, k: TensorView, v: TensorView) -> Result<(), AttentionError> {
/// // Page 3 to page 7.
/// let words: Vec<u8> = [3u32, 7].into_iter().flat_map(u32::to_le_bytes).collect();
/// let pairs = TensorView::contiguous(client.create_from_slice(&words), [1, 2]);
/// copy_cache_pages(&client, Dtype::BF16, KvStorage::Elements, &k, &v, &pairs)
/// # }
/// ```
pub fn copy_cache_pages(
    client: &Client,
    dtype: Dtype,
    storage: KvStorage,
    k_cache: &TensorView,
    v_cache: &TensorView,
    pairs: &TensorView<2>,
) -> Result<(), AttentionError> {
    let device = recent::device(client);
    tiling::check_dtype(&device, dtype)?;
    let size = storage.size(dtype);
    let [num_pages, heads, page_size, _] = k_cache.shape;
    for (name, view) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        let shape = [num_pages, heads, page_size, view.shape[3]];
        Argument::new(name, view, Some(shape), size).check_output(&device)?;
    }
    Argument::new("pairs", pairs, Some([pairs.shape[0], 2]), 4).check(&device)?;
    check_pools(storage, k_cache, v_cache)?;
    let (k, v, element, size) = match storage {
        KvStorage::Elements => (k_cache.clone(), v_cache.clone(), tiling::element_type(dtype), size),
        KvStorage::E4m3 => (words(k_cache), words(v_cache), ElemType::UInt(UIntKind::U32), 4),
    };
    let views = [&k, &v];
    let width = width(views, size);
    let of_page = |view: &TensorView| view.shape[1..].iter().product::<usize>();
    let vectors = pairs.shape[0] * (of_page(&k) + of_page(&v)) / width;
    if vectors == 0 {
        return Ok(());
    }
    let (count, dim) = elementwise(&device, "copy_pages", vectors)?;
    // SAFETY: views have been checked against their buffers. The kernel copies no page that does not exist.
    unsafe {
        copy_pages::launch_unchecked(
            client,
            count,
            dim,
            addresses(views.map(|view| view as &dyn AnyView).into_iter().chain([pairs as &dyn AnyView])),
            width,
            CachedKeysValuesLaunch::new(k.arg(), v.arg()),
            pairs.arg(),
            element,
        );
    }
    Ok(())
}

/// Checks the layout of pools whose storage has one.
fn check_pools(storage: KvStorage, k_cache: &TensorView, v_cache: &TensorView) -> Result<(), AttentionError> {
    match storage {
        KvStorage::Elements => Ok(()),
        KvStorage::E4m3 => check_pool("k_cache", k_cache).and(check_pool("v_cache", v_cache)),
    }
}
