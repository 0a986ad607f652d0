//! Appending to a key/value cache, as [`flash_attention_kernels::cache`] does, and reading it.

use super::rows::Elements;
use super::{KeysValues, e4m3, floats, slice, words};
use crate::backend::{CacheElements, CacheLengths, CacheTensors};
use crate::tensors::{Extras, OptionalInt};
use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{Flex, FlexTensor, Layout};
use flash_attention_kernels::KvStorage;
use flash_attention_kernels::e4m3::page_bytes;
use half::{bf16, f16};
use std::sync::Arc;

/// A cache after an append, and what attention over it reads.
pub struct Appended {
    /// The cache as it is given back, with the new lengths.
    pub cache: CacheTensors<Flex>,
    /// Keys and values of the positions that are used, where they lie.
    pub used: [KeysValues; 2],
    /// The extras, with the new lengths as those of the keys.
    pub extras: Extras<Flex>,
}

/// Writes keys and values of new positions to the cache, in place.
pub fn append(
    [new_k, new_v]: [FlexTensor; 2],
    cache: CacheTensors<Flex>,
    extras: Extras<Flex>,
    CacheLengths { before, after, page_size }: CacheLengths,
) -> Appended {
    let [batch, _, new, _]: [usize; 4] = new_k.layout().shape().dims();
    let read = |words_of: Option<FlexTensor>| words_of.map(|tensor| words(&tensor.to_contiguous()));
    let (seq_lens, new_lens) = (read(cache.seq_lens.into_option()), read(extras.seq_lens_q.clone().into_option()));
    let varies = seq_lens.is_some() || new_lens.is_some();
    let (k, v) = (Memory::of(cache.k, &new_k, page_size), Memory::of(cache.v, &new_v, page_size));
    let places = Arc::new(Places::of(k.rows, cache.page_table.into_option()));
    let begin = |b: usize| seq_lens.as_ref().map_or(before, |lens| lens[b] as usize).min(places.capacity);
    let count = |b: usize| {
        let count = new_lens.as_ref().map_or(new, |lens| lens[b] as usize).min(new);
        count.min(places.capacity - begin(b))
    };
    let runs: Vec<Vec<Run>> = (0..batch).map(|b| places.runs(b, begin(b), count(b))).collect();
    let pairs = read(cache.page_copies.into_option()).unwrap_or_default();
    let pairs: Vec<[usize; 2]> = pairs.chunks_exact(2).map(|pair| [pair[0] as usize, pair[1] as usize]).collect();
    let written = [(k, new_k), (v, new_v)].map(|(memory, new)| memory.written(new, &pairs, &runs));
    let lens: Arc<[usize]> = (0..batch).map(|b| (begin(b) + count(b)).min(after)).collect();
    let used = written.each_ref().map(|memory| {
        if places.table.is_none() {
            return KeysValues::Tensor(memory.tensor.narrow(2, 0, after));
        }
        let (places, lens) = (places.clone(), lens.clone());
        KeysValues::Pages(Pages { memory: memory.clone(), places, lens, seq_k: after })
    });
    let seq_lens = varies.then(|| {
        let lens: Vec<i32> = (0..batch).map(|b| (begin(b) + count(b)) as i32).collect();
        FlexTensor::new(Bytes::from_elems(lens), Layout::contiguous(Shape::new([batch])), DType::I32)
    });
    let seq_lens = OptionalInt::from_option(seq_lens);
    let extras = Extras { seq_lens_k: seq_lens.clone(), ..extras };
    let [k, v] = written.map(|memory| CacheElements::new(memory.storage, memory.tensor));
    let cache = CacheTensors { k, v, seq_lens, page_table: OptionalInt::None, page_copies: OptionalInt::None };
    Appended { cache, used, extras }
}

/// Where the positions of sequences are in a cache.
struct Places {
    /// The pages of each sequence, in rows of `columns`, if there are pages.
    table: Option<Vec<u32>>,
    columns: usize,
    /// Positions of a page, or of a sequence.
    rows: usize,
    /// Positions that a sequence can have.
    capacity: usize,
}

/// Positions of a sequence that lie one after the other in a cache.
struct Run {
    /// Their page, or sequence.
    block: usize,
    /// Their first row in it.
    row: usize,
    /// Number of positions before them.
    before: usize,
    len: usize,
}

impl Places {
    /// The places in a cache with pages or sequences of so many rows and this page table.
    fn of(rows: usize, table: Option<FlexTensor>) -> Self {
        let columns = table.as_ref().map_or(1, |table| table.layout().shape()[1]);
        let table = table.map(|table| words(&table.to_contiguous()));
        Places { table, columns, rows, capacity: columns * rows }
    }

    /// Where `count` positions of a sequence are, from `begin` on.
    fn runs(&self, sequence: usize, begin: usize, count: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut before = 0;
        while before < count {
            let position = begin + before;
            let (nth, row) = (position / self.rows, position % self.rows);
            let len = (self.rows - row).min(count - before);
            let block = self.table.as_ref().map_or(sequence, |pages| pages[sequence * self.columns + nth] as usize);
            runs.push(Run { block, row, before, len });
            before += len;
        }
        runs
    }
}

/// Keys or values in the memory of a cache.
#[derive(Clone)]
struct Memory {
    storage: KvStorage,
    tensor: FlexTensor,
    heads: usize,
    /// Positions of a page, or of a sequence.
    rows: usize,
    dim: usize,
}

/// Expands the macro `$body` with the element type of a tensor.
macro_rules! of_elements {
    ($tensor:expr, $body:ident) => {
        match $tensor.dtype() {
            DType::F16 => $body!(f16),
            DType::BF16 => $body!(bf16),
            _ => $body!(f32),
        }
    };
}

impl Memory {
    /// The memory that new keys or values like these go to.
    fn of(elements: CacheElements<Flex>, new: &FlexTensor, page_size: usize) -> Self {
        let [_, heads, _, dim]: [usize; 4] = new.layout().shape().dims();
        let (storage, tensor): (_, FlexTensor) = elements.into_tensor();
        let rows = if storage == KvStorage::Elements { tensor.layout().shape()[2] } else { page_size };
        Memory { storage, tensor, heads, rows, dim }
    }

    /// The memory, of which pages have been copied to others, with the rows of new positions. It belongs to the cache alone, so that nothing
    /// is copied to make it so.
    fn written(mut self, new: FlexTensor, pairs: &[[usize; 2]], runs: &[Vec<Run>]) -> Self {
        let (heads, rows, dim, new_rows) = (self.heads, self.rows, self.dim, new.layout().shape()[2]);
        /// Copies rows of this element type.
        macro_rules! copied {
            ($element:ty) => {{
                let new = new.to_contiguous();
                let from = &new.storage::<$element>()[new.layout().start_offset()..];
                let to = self.tensor.storage_mut::<$element>();
                copy_blocks(to, heads * rows * dim, pairs);
                for (head, of_block, run) in of_heads(runs, heads) {
                    let (from_row, to_row) = ((head * new_rows + run.before) * dim, (of_block * rows + run.row) * dim);
                    let len = run.len * dim;
                    to[to_row..to_row + len].copy_from_slice(&from[from_row..from_row + len]);
                }
            }};
        }
        if self.storage == KvStorage::Elements {
            of_elements!(self.tensor, copied);
            return self;
        }
        let new = floats(new);
        let (from, words) = (slice(&new), page_bytes(rows, dim) / size_of::<i32>());
        let to = self.tensor.storage_mut::<i32>();
        copy_blocks(to, heads * words, pairs);
        for (head, of_block, run) in of_heads(runs, heads) {
            let from = &from[(head * new_rows + run.before) * dim..][..run.len * dim];
            e4m3::write(&mut to[of_block * words..][..words], run.row * dim, from);
        }
        self
    }

    /// Reads rows of a head of a page or sequence.
    fn read(&self, of_block: usize, row: usize, to: &mut [f32]) {
        let first = (of_block * self.rows + row) * self.dim;
        match self.tensor.dtype() {
            DType::F16 => Elements::F16(self.tensor.storage()).widen(first, to),
            DType::BF16 => Elements::BF16(self.tensor.storage()).widen(first, to),
            DType::F32 => Elements::F32(self.tensor.storage()).widen(first, to),
            _ => {
                let len = page_bytes(self.rows, self.dim);
                e4m3::read(&self.tensor.bytes()[of_block * len..][..len], row * self.dim, to);
            }
        }
    }
}

/// Keys or values in pages.
pub struct Pages {
    memory: Memory,
    places: Arc<Places>,
    /// Length of each sequence.
    lens: Arc<[usize]>,
    seq_k: usize,
}

impl Pages {
    /// `[batch, heads, seq_k, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        [self.lens.len(), self.memory.heads, self.seq_k, self.memory.dim]
    }

    /// Reads rows of a head of a sequence, from `row` on. Those behind the end of the sequence are 0.
    pub fn read(&self, b: usize, head: usize, row: usize, to: &mut [f32]) {
        let Memory { heads, dim, .. } = self.memory;
        let count = self.lens[b].saturating_sub(row).min(to.len() / dim);
        let (to, behind) = to.split_at_mut(count * dim);
        behind.fill(0.0);
        for run in self.places.runs(b, row, count) {
            let to = &mut to[run.before * dim..][..run.len * dim];
            self.memory.read(run.block * heads + head, run.row, to);
        }
    }
}

/// The runs of each head of each sequence: the number of the head among those of all sequences, among those of all pages, and the run.
fn of_heads(runs: &[Vec<Run>], heads: usize) -> impl Iterator<Item = (usize, usize, &Run)> {
    runs.iter().enumerate().flat_map(move |(b, runs)| {
        (0..heads).flat_map(move |head| runs.iter().map(move |run| (b * heads + head, run.block * heads + head, run)))
    })
}

/// Copies blocks of `len` elements, each to another one.
fn copy_blocks<T: Copy>(all: &mut [T], len: usize, pairs: &[[usize; 2]]) {
    for [from, to] in pairs {
        all.copy_within(from * len..(from + 1) * len, to * len);
    }
}
