//! Appending to pages in [e4m3](mod@crate::e4m3).

use super::{AppendedLengths, CachedKeysValues, KeysValues};
use crate::e4m3::{decode_word, encode_word, inverse, scale_of_bits};
use crate::fragment::{Rows, Vec4, WIDTH};
use crate::pages::PageTable;
use cubecl::prelude::*;

/// What a kernel that appends to pages in e4m3 is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// Threads of a thread block, a power of two.
    pub units: usize,
    /// Columns of keys, a multiple of 4.
    pub head_dim: usize,
    /// Columns of values, a multiple of 4.
    pub head_dim_v: usize,
}

/// The rows of a page that new positions are written to.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct NewRows {
    batch: usize,
    head: usize,
    page: usize,
    /// The new position that comes first in the page.
    first: u32,
    /// Its row in the page.
    begin: u32,
    /// The row after the last one.
    end: u32,
}

/// [`append`](fn@crate::cache::append) to pages in e4m3, whose pools are words, `[num_pages, Hkv, 1, words]`. A thread block writes K or V of a page
/// of a head: new rows, and those before them if the scale of the page grows. `pages_each` is the most pages that the new positions of a
/// sequence are in.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn append_e4m3<E: Float, N: Size>(
    new: KeysValues<E, N>,
    pools: CachedKeysValues<u32, Const<1>>,
    lengths: AppendedLengths,
    pages: PageTable,
    pages_each: u32,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _type: ElemType,
) {
    let mut board = Shared::<[u32]>::new_slice(comptime!(blueprint.units));
    let (batches, heads) = (new.k.shape(0), new.k.shape(1));
    let of_values = CUBE_POS % 2 == 1;
    let nth = CUBE_POS / 2;
    let (nth, of_sequence) = (nth / pages_each as usize, (nth % pages_each as usize) as u32);
    let (batch, head) = (nth / heads, nth % heads);
    if batch >= batches {
        terminate!();
    }
    let (start, count) = lengths.of(batch, new.k.shape(2) as u32);
    let (page_size, after) = (comptime!(pages.page_size), min(start + count, lengths.capacity));
    if of_sequence == 0 && head == 0 && !of_values && UNIT_POS == 0 {
        #[comptime]
        if let ComptimeOption::Some(to) = lengths.after {
            let at = batch * to.stride(0);
            to[at] = after;
        }
    }
    let page_start = (start / page_size + of_sequence) * page_size;
    let (begin, end) = (max(start, page_start), min(after, page_start + page_size));
    // What is not written has no page.
    let page = pages.page(batch, select(begin < end, begin, 0u32));
    if begin >= end || page >= pages.num_pages {
        terminate!();
    }
    let (first, page) = (begin - start, page as usize);
    let rows = NewRows { batch, head, page, first, begin: begin - page_start, end: end - page_start };
    let sizes = comptime!((blueprint.units, blueprint.head_dim, page_size as usize));
    if of_values {
        let sizes = comptime!((blueprint.units, blueprint.head_dim_v, page_size as usize));
        write_page(new.v, pools.v, &rows, &mut board, sizes);
    } else {
        write_page(new.k, pools.k, &rows, &mut board, sizes);
    }
}

/// Writes new rows to a page of a head. `sizes`: threads, columns, rows of a page.
#[cube]
fn write_page<E: Float, N: Size>(
    new: &'static Tensor<Vector<E, N>>,
    pool: &mut Tensor<Vector<u32, Const<1>>>,
    rows: &NewRows,
    board: &mut Shared<[u32]>,
    #[comptime] sizes: (usize, usize, usize),
) {
    let (units, head_dim, page_size) = sizes;
    let words = comptime!(head_dim / WIDTH);
    let page = rows.page * pool.stride(0) + rows.head * pool.stride(1);
    let scale_at = page + comptime!(page_size * words);
    let positions = rows.first + rows.end - rows.begin;
    let source = Rows::of(new, rows.batch, rows.head, rows.first, positions);
    let before = pool[scale_at].extract(0usize) & MAGNITUDE;

    // The largest magnitude as bits, which are in the same order, with NaN above all.
    let len = (rows.end - rows.begin) as usize * words;
    let mut largest = 0u32.runtime();
    let mut at = UNIT_POS as usize;
    while at < len {
        let value = word_of(&source, rows.first, at, head_dim);
        #[unroll]
        for n in 0..WIDTH {
            largest = max(largest, u32::reinterpret(value.extract(n)) & MAGNITUDE);
        }
        at += units;
    }
    let largest = largest_of(largest, board, units);

    // Scales are in the order of their bits as well.
    let mut bits = u32::reinterpret(scale_of_bits(largest)) & MAGNITUDE;
    if rows.begin > 0 {
        bits = max(bits, before);
    }
    let divided = inverse(f32::reinterpret(bits));
    if rows.begin > 0 && bits > before {
        let factor = f32::reinterpret(before) * divided;
        let mut at = UNIT_POS as usize;
        while at < rows.begin as usize * words {
            let word = pool[page + at].extract(0usize);
            pool[page + at] = Vector::new(encode_word(decode_word(word, factor)));
            at += units;
        }
    }
    let mut at = UNIT_POS as usize;
    while at < len {
        let value = word_of(&source, rows.first, at, head_dim);
        pool[page + rows.begin as usize * words + at] = Vector::new(encode_word(value * Vector::new(divided)));
        at += units;
    }
    // Every thread has read the old one before it waited for the others.
    if UNIT_POS == 0 {
        pool[scale_at] = Vector::new(bits);
    }
}

/// The elements of word `at` of new rows from `first` on.
#[cube]
fn word_of<E: Float, N: Size>(source: &Rows<E, N>, first: u32, at: usize, #[comptime] head_dim: usize) -> Vec4 {
    let words = comptime!(head_dim / WIDTH);
    Vec4::cast_from(source.read_within(first + (at / words) as u32, at % words * WIDTH, head_dim))
}

/// The bits of a number without its sign.
const MAGNITUDE: u32 = 0x7FFF_FFFF;

/// The largest number of a thread block.
#[cube]
fn largest_of(value: u32, board: &mut Shared<[u32]>, #[comptime] units: usize) -> u32 {
    let unit = UNIT_POS as usize;
    board[unit] = value;
    sync_cube();
    #[unroll]
    for step in 1..=comptime!(units.ilog2()) {
        let half = comptime!(units >> step);
        if unit < half {
            board[unit] = max(board[unit], board[unit + half]);
        }
        sync_cube();
    }
    board[0]
}
