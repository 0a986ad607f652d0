//! Key/value caches: keys and values of new positions are written after those of earlier calls, in place, and pages are copied.
//!
//! A cache is `k [B, Hkv, C, D]` and `v [B, Hkv, C, Dv]`, of which a sequence has used the first positions. Attention reads it like any
//! other keys and values, with strides of the whole cache and the lengths of the [sequences](mod@crate::sequences). Or it is a pool of
//! [pages](mod@crate::pages).

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod e4m3;

pub use e4m3::{Blueprint, append_e4m3};

use crate::fragment::row_start;
use crate::pages::{KeyPlace, PageTable};
use cubecl::prelude::*;

/// Keys and values, of new positions or of a cache: `[B, Hkv, S, D]` and `[B, Hkv, S, Dv]`.
#[derive(CubeType, CubeLaunch)]
pub struct KeysValues<E: Float, N: Size> {
    pub k: &'static Tensor<Vector<E, N>>,
    pub v: &'static Tensor<Vector<E, N>>,
}

/// The same, written to.
#[derive(CubeType, CubeLaunch)]
pub struct CachedKeysValues<E: Numeric, N: Size> {
    pub k: &'static mut Tensor<Vector<E, N>>,
    pub v: &'static mut Tensor<Vector<E, N>>,
}

/// Lengths of sequences, before and after new positions are appended.
#[derive(CubeType, CubeLaunch)]
pub struct AppendedLengths {
    /// Positions that a sequence can have.
    pub capacity: u32,
    /// Length of every sequence before, unless `before` gives one for each.
    pub start: u32,
    /// Lengths before, `[B]`.
    pub before: ComptimeOption<&'static Tensor<u32>>,
    /// Number of new positions of each sequence, `[B]`; absent if all are appended.
    pub new: ComptimeOption<&'static Tensor<u32>>,
    /// Lengths after, `[B]`, written if they are not the same for all sequences.
    pub after: ComptimeOption<&'static mut Tensor<u32>>,
}

#[cube]
impl AppendedLengths {
    /// Length of a sequence before, and how many of `rows` new positions it gets.
    pub fn of(&self, batch: usize, rows: u32) -> (u32, u32) {
        let mut start = self.start;
        #[comptime]
        if let ComptimeOption::Some(before) = &self.before {
            start = min(before[batch * before.stride(0)], self.capacity);
        }
        let mut count = rows;
        #[comptime]
        if let ComptimeOption::Some(new) = &self.new {
            count = min(new[batch * new.stride(0)], count);
        }
        (start, count)
    }
}

/// Copies new keys and values to the cache, after the positions that each sequence has, and writes the new lengths. Positions past the end
/// of the cache, and those in pages that do not exist, are dropped. A thread copies a vector of K or of V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn append<E: Float, N: Size>(
    new: KeysValues<E, N>,
    cache: CachedKeysValues<E, N>,
    lengths: AppendedLengths,
    pages: ComptimeOption<PageTable>,
    #[define(E)] _type: ElemType,
) {
    let width = N::value();
    let (heads, rows, capacity) = (new.k.shape(1), new.k.shape(2), lengths.capacity);
    let (of_k, of_v) = (new.k.shape(3) / width, new.v.shape(3) / width);
    let row = ABSOLUTE_POS / (of_k + of_v);
    let column = ABSOLUTE_POS % (of_k + of_v);
    let (head, row) = (row / rows, row % rows);
    let (batch, head) = (head / heads, head % heads);
    if batch >= new.k.shape(0) {
        terminate!();
    }
    let (begin, count) = lengths.of(batch, rows as u32);
    let to = begin + row as u32;
    let exists = (row as u32) < count && to < capacity;
    // What is not written has no page.
    let to = select(exists, to, 0u32);
    let place = if comptime!(pages.is_some()) { pages.unwrap().place(batch, to) } else { KeyPlace { batch, row: to } };
    let mut written = exists;
    #[comptime]
    if let ComptimeOption::Some(pages) = &pages {
        written = exists && pages.page(batch, to) < pages.num_pages;
    }
    if written {
        if column < of_k {
            let from = row_start(new.k, batch, head, row as u32) + column * width * new.k.stride(3);
            let at = row_start(&*cache.k, place.batch, head, place.row) + column * width * cache.k.stride(3);
            cache.k[at / width] = new.k[from / width];
        } else {
            let column = column - of_k;
            let from = row_start(new.v, batch, head, row as u32) + column * width * new.v.stride(3);
            let at = row_start(&*cache.v, place.batch, head, place.row) + column * width * cache.v.stride(3);
            cache.v[at / width] = new.v[from / width];
        }
    }
    if head == 0 && row == 0 && column == 0 {
        #[comptime]
        if let ComptimeOption::Some(after) = lengths.after {
            let at = batch * after.stride(0);
            after[at] = min(begin + count, capacity);
        }
    }
}

/// Copies whole pages of keys and values to others. `pairs [n, 2]` has the pages that are copied, each with the page that it is copied to;
/// a pair with a page that does not exist copies nothing. No page is copied to that another pair names. A thread copies a vector of K or
/// of V. Pools in e4m3 are words, `[num_pages, Hkv, 1, words]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn copy_pages<E: Numeric, N: Size>(
    pool: CachedKeysValues<E, N>,
    pairs: &Tensor<u32>,
    #[define(E)] _type: ElemType,
) {
    let width = N::value();
    let (heads, rows) = (pool.k.shape(1), pool.k.shape(2));
    let (of_k, of_v) = (pool.k.shape(3) / width, pool.v.shape(3) / width);
    let row = ABSOLUTE_POS / (of_k + of_v);
    let column = ABSOLUTE_POS % (of_k + of_v);
    let (head, row) = (row / rows, row % rows);
    let (pair, head) = (head / heads, head % heads);
    if pair >= pairs.shape(0) {
        terminate!();
    }
    let at = pair * pairs.stride(0);
    let (from, to) = (pairs[at] as usize, pairs[at + pairs.stride(1)] as usize);
    if from < pool.k.shape(0) && to < pool.k.shape(0) {
        if column < of_k {
            let at = row_start(&*pool.k, 0usize, head, row as u32) + column * width * pool.k.stride(3);
            copy_vector(pool.k, from, to, at);
        } else {
            let column = column - of_k;
            let at = row_start(&*pool.v, 0usize, head, row as u32) + column * width * pool.v.stride(3);
            copy_vector(pool.v, from, to, at);
        }
    }
}

/// Copies the vector at element `at` of a page to the same place of another page.
#[cube]
fn copy_vector<E: Numeric, N: Size>(tensor: &mut Tensor<Vector<E, N>>, from: usize, to: usize, at: usize) {
    let (width, stride) = (N::value(), tensor.stride(0));
    let copied = tensor[(from * stride + at) / width];
    tensor[(to * stride + at) / width] = copied;
}
