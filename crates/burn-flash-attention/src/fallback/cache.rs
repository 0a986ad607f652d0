//! Appending to a key/value cache, as [`flash_attention_kernels::cache`] does, and reading it.

use super::words;
use crate::backend::{CacheLengths, CacheTensors};
use crate::tensors::{Extras, OptionalInt};
use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{Flex, FlexTensor, Layout};
use half::{bf16, f16};

/// A cache after an append, and what attention over it reads.
pub struct Appended {
    /// The cache as it is given back, with the new lengths.
    pub cache: CacheTensors<Flex>,
    /// Keys and values of the positions that are used: where they lie or, of pages, gathered.
    pub used: [FlexTensor; 2],
    /// The extras, with the new lengths as those of the keys.
    pub extras: Extras<Flex>,
}

/// Writes keys and values of new positions to the cache, in place.
pub fn append(
    [k, v]: [FlexTensor; 2],
    cache: CacheTensors<Flex>,
    extras: Extras<Flex>,
    CacheLengths { before, after }: CacheLengths,
) -> Appended {
    let [batch, _, new, _]: [usize; 4] = k.layout().shape().dims();
    let read = |words_of: Option<FlexTensor>| words_of.map(|tensor| words(&tensor.to_contiguous()));
    let (seq_lens, new_lens) = (read(cache.seq_lens.into_option()), read(extras.seq_lens_q.clone().into_option()));
    let varies = seq_lens.is_some() || new_lens.is_some();
    let places = Places::of(&cache.k, cache.page_table.into_option());
    let begin = |b: usize| seq_lens.as_ref().map_or(before, |lens| lens[b] as usize).min(places.capacity);
    let count = |b: usize| {
        let count = new_lens.as_ref().map_or(new, |lens| lens[b] as usize).min(new);
        count.min(places.capacity - begin(b))
    };
    let runs: Vec<Vec<Run>> = (0..batch).map(|b| places.runs(b, begin(b), count(b))).collect();
    let pairs = read(cache.page_copies.into_option()).unwrap_or_default();
    let pairs: Vec<[usize; 2]> = pairs.chunks_exact(2).map(|pair| [pair[0] as usize, pair[1] as usize]).collect();
    let (k, v) = (written(cache.k, k, &pairs, &runs), written(cache.v, v, &pairs, &runs));
    let used = if places.table.is_some() {
        let runs: Vec<Vec<Run>> = (0..batch).map(|b| places.runs(b, 0, (begin(b) + count(b)).min(after))).collect();
        [&k, &v].map(|pool| gathered(pool, &runs, after))
    } else {
        [&k, &v].map(|tensor| tensor.narrow(2, 0, after))
    };
    let seq_lens = varies.then(|| {
        let lens: Vec<i32> = (0..batch).map(|b| (begin(b) + count(b)) as i32).collect();
        FlexTensor::new(Bytes::from_elems(lens), Layout::contiguous(Shape::new([batch])), DType::I32)
    });
    let seq_lens = OptionalInt::from_option(seq_lens);
    let extras = Extras { seq_lens_k: seq_lens.clone(), ..extras };
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
    /// The places in a cache with these keys and this page table.
    fn of(k: &FlexTensor, table: Option<FlexTensor>) -> Self {
        let rows = k.layout().shape()[2];
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

/// A cache of keys or values, of which pages have been copied to others, with those of new positions.
fn written(cache: FlexTensor, new: FlexTensor, pairs: &[[usize; 2]], runs: &[Vec<Run>]) -> FlexTensor {
    /// Copies rows of this element type.
    macro_rules! copied {
        ($element:ty) => {{
            let mut cache = cache;
            let new = new.to_contiguous();
            let ([_, heads, rows, dim], capacity) = (new.layout().shape().dims(), cache.layout().shape()[2]);
            let first = new.layout().start_offset();
            let from = &new.storage::<$element>()[first..];
            // The memory belongs to the cache alone, so that nothing is copied to make it so.
            let to = cache.storage_mut::<$element>();
            let block = heads * capacity * dim;
            for [from, into] in pairs {
                to.copy_within(from * block..(from + 1) * block, into * block);
            }
            for (b, runs) in runs.iter().enumerate() {
                for (head, run) in (0..heads).flat_map(|head| runs.iter().map(move |run| (head, run))) {
                    let from_row = ((b * heads + head) * rows + run.before) * dim;
                    let to_row = ((run.block * heads + head) * capacity + run.row) * dim;
                    let len = run.len * dim;
                    to[to_row..to_row + len].copy_from_slice(&from[from_row..from_row + len]);
                }
            }
            cache
        }};
    }
    of_elements!(cache, copied)
}

/// The rows of these runs, `[batch, heads, rows, dim]`. Rows without a run are 0.
fn gathered(pool: &FlexTensor, runs: &[Vec<Run>], rows: usize) -> FlexTensor {
    let [_, heads, page_size, dim]: [usize; 4] = pool.layout().shape().dims();
    /// Copies rows of this element type.
    macro_rules! copied {
        ($element:ty) => {{
            let from = pool.storage::<$element>();
            let mut to = vec![<$element>::from(0u8); runs.len() * heads * rows * dim];
            for (b, runs) in runs.iter().enumerate() {
                for (head, run) in (0..heads).flat_map(|head| runs.iter().map(move |run| (head, run))) {
                    let from_row = ((run.block * heads + head) * page_size + run.row) * dim;
                    let to_row = ((b * heads + head) * rows + run.before) * dim;
                    let len = run.len * dim;
                    to[to_row..to_row + len].copy_from_slice(&from[from_row..from_row + len]);
                }
            }
            Bytes::from_elems(to)
        }};
    }
    let bytes = of_elements!(pool, copied);
    FlexTensor::new(bytes, Layout::contiguous(Shape::new([runs.len(), heads, rows, dim])), pool.dtype())
}
