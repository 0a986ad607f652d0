//! Visibility by position: which query sees which key, and which tiles contain a visible pair.
//!
//! Causality and windows form a band around the diagonal, clipped to the ends of the sequences: query `i` sees key `j` if `i +
//! lower ≤ j ≤ i + upper`. This is the only file that compares positions. Kernels and the test oracle call the same functions,
//! because a `#[cube]` function also runs on the host.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

mod run;
pub use run::*;

use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

/// Position of the diagonal of causal masks and windows when `seq_q` and `seq_k` differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alignment {
    /// The last query is aligned with the last key: query `i` has position `i + seq_k − seq_q` among the keys.
    #[default]
    BottomRight,
    /// The first query is aligned with the first key: query `i` has position `i` among the keys.
    TopLeft,
}

/// The band of keys that the queries see.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, mask::Band};
///
/// // Two queries over five keys, causal, aligned at the bottom right.
/// let band = Band::new(2, 5, &AttentionOptions { causal: true, ..Default::default() });
/// let row = |i| (0..5).map(|j| u8::from(band.sees(i, j))).collect::<Vec<_>>();
/// assert_eq!(row(0), [1, 1, 1, 1, 0]);
/// assert_eq!(row(1), [1, 1, 1, 1, 1]);
/// ```
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug, PartialEq, Eq)]
#[expand(derive(Clone, Copy))]
pub struct Band {
    /// Number of queries.
    pub seq_q: u32,
    /// Number of keys.
    pub seq_k: u32,
    /// Number of the sequence, if `varlen`.
    pub sequence: u32,
    /// First query of the sequence, if `varlen`.
    pub begin_q: u32,
    /// One past the last query of the sequence.
    pub end_q: u32,
    /// First key of the sequence.
    pub begin_k: u32,
    /// One past the last key of the sequence.
    pub end_k: u32,
    /// Query `i` sees no key before `i + lower`, if `bounded_below`.
    pub lower: i32,
    /// Query `i` sees no key after `i + upper`, if `bounded_above`.
    pub upper: i32,
    /// Query `i` has position `i + diagonal` among the keys.
    pub diagonal: i32,
    /// Whether there is a left edge.
    #[cube(comptime)]
    pub bounded_below: bool,
    /// Whether there is a right edge.
    #[cube(comptime)]
    pub bounded_above: bool,
    /// Whether the last query is aligned with the last key.
    #[cube(comptime)]
    pub bottom_right: bool,
    /// Whether the band belongs to one of several sequences.
    #[cube(comptime)]
    pub varlen: bool,
    /// Whether functions receive the position of a query among the keys: of two new queries after three keys, 3 and 4.
    #[cube(comptime)]
    pub continued: bool,
}

/// Which blocks of keys need masking, when blocks are processed from the last to the first.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq)]
#[expand(derive(Clone))]
pub struct Edges {
    /// Number of blocks at the start of the iteration that need masking.
    pub lead: u32,
    /// Index of the block in iteration order from which on all blocks need masking.
    pub tail: u32,
}

/// A range of blocks: from `start` up to, not including, `end`.
#[derive(CubeType, Clone, Copy, Debug, PartialEq, Eq)]
#[expand(derive(Clone))]
pub struct Blocks {
    /// The first block.
    pub start: u32,
    /// One past the last block; at least `start`.
    pub end: u32,
    /// Position at which block 0 starts.
    pub origin: u32,
}

#[cube]
impl Blocks {
    /// Number of blocks.
    pub fn count(&self) -> u32 {
        self.end - self.start
    }
}

/// Range of positions of a sequence in its batch, of queries or of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub struct Span {
    /// Batch.
    pub batch: u32,
    /// First position.
    pub begin: u32,
    /// One past the last position; at least `begin`.
    pub end: u32,
}

#[cube]
impl Span {
    /// Whether the range contains this position of a batch.
    pub fn holds(&self, batch: u32, position: u32) -> bool {
        self.batch == batch && position >= self.begin && position < self.end
    }
}

impl Band {
    /// The band of `seq_q` queries over `seq_k` keys, where a query sees `left` keys before its own position and `right` keys
    /// after it. `None`: no limit. Lengths are at most [`MAX_SEQ`](crate::problem::MAX_SEQ).
    pub fn of_window(
        seq_q: usize,
        seq_k: usize,
        left: Option<usize>,
        right: Option<usize>,
        alignment: Alignment,
    ) -> Self {
        let (sq, sk) = (seq_q as i64, seq_k as i64);
        let diagonal = match alignment {
            Alignment::BottomRight => sk - sq,
            Alignment::TopLeft => 0,
        };
        // Edges outside the sequences are clamped, so that adding a position cannot overflow.
        let reach = |x: Option<usize>| (x.unwrap_or(0) as u64).min(1 << 40) as i64;
        let lower = (diagonal - reach(left)).max(-sq);
        let upper = (diagonal + reach(right)).min(sk);
        Band {
            seq_q: seq_q as u32,
            seq_k: seq_k as u32,
            sequence: 0,
            begin_q: 0,
            end_q: seq_q as u32,
            begin_k: 0,
            end_k: seq_k as u32,
            lower: lower.min(sk) as i32,
            upper: upper.max(-sq) as i32,
            diagonal: diagonal as i32,
            bounded_below: left.is_some(),
            bounded_above: right.is_some(),
            bottom_right: alignment == Alignment::BottomRight,
            varlen: false,
            continued: false,
        }
    }

    /// Number of queries by which the first block of `tile_q` queries should start before query 0.
    ///
    /// The shift aligns the diagonal with the ends of the tiles of `tile_k` keys: the last key that a block sees is then the
    /// last key of a tile. Without it, a block whose diagonal passes the end of a tile by one key computes a whole tile for
    /// that key. The result is 0 if the shift would need one more block.
    ///
    /// ```
    /// use flash_attention_kernels::{AttentionOptions, mask::Band};
    ///
    /// let causal = AttentionOptions { causal: true, ..Default::default() };
    /// assert_eq!(Band::new(1024, 1024, &causal).ahead(128, 128), 0);
    /// assert_eq!(Band::new(1023, 1024, &causal).ahead(128, 128), 1);
    /// assert_eq!(Band::new(1024, 1025, &causal).ahead(128, 128), 0);
    /// ```
    pub fn ahead(&self, tile_q: u32, tile_k: u32) -> u32 {
        let common = (1..=tile_k).rev().find(|n| tile_k.is_multiple_of(*n) && tile_q.is_multiple_of(*n)).unwrap_or(1);
        let ahead = if self.bounded_above { self.upper.rem_euclid(common as i32) as u32 } else { 0 };
        let free = (tile_q - self.seq_q % tile_q) % tile_q;
        if ahead <= free { ahead } else { 0 }
    }

    /// Number of visible pairs.
    ///
    /// ```
    /// use flash_attention_kernels::{AttentionOptions, mask::Band};
    ///
    /// let options = AttentionOptions { causal: true, window_left: Some(1), ..Default::default() };
    /// assert_eq!(Band::new(3, 3, &options).pairs(), 1 + 2 + 2);
    /// ```
    pub fn pairs(&self) -> u64 {
        (0..self.seq_q).map(|i| u64::from(self.k_blocks(i, 1, 1).count())).sum()
    }

    /// The launch argument for this band.
    pub fn into_launch(self) -> BandLaunch {
        BandLaunch::new(
            self.seq_q,
            self.seq_k,
            self.sequence,
            self.begin_q,
            self.end_q,
            self.begin_k,
            self.end_k,
            self.lower,
            self.upper,
            self.diagonal,
            self.bounded_below,
            self.bounded_above,
            self.bottom_right,
            self.varlen,
            self.continued,
        )
    }
}

#[cube]
impl Band {
    /// The band with queries and keys exchanged: query `i` sees key `j` in the result if query `j` sees key `i` in `self`.
    ///
    /// ```
    /// use flash_attention_kernels::{AttentionOptions, mask::Band};
    ///
    /// let band = Band::new(3, 5, &AttentionOptions { causal: true, window_left: Some(1), ..Default::default() });
    /// assert!((0..3).all(|i| (0..5).all(|j| band.transposed().sees(j, i) == band.sees(i, j))));
    /// ```
    pub fn transposed(&self) -> Band {
        Band {
            seq_q: self.seq_k,
            seq_k: self.seq_q,
            sequence: self.sequence,
            begin_q: self.begin_k,
            end_q: self.end_k,
            begin_k: self.begin_q,
            end_k: self.end_q,
            lower: -self.upper,
            upper: -self.lower,
            diagonal: -self.diagonal,
            bounded_below: comptime!(self.bounded_above),
            bounded_above: comptime!(self.bounded_below),
            bottom_right: comptime!(self.bottom_right),
            varlen: comptime!(self.varlen),
            continued: comptime!(self.continued),
        }
    }

    /// The band of one of several sequences, number `sequence`. Its queries `begin_q .. end_q` see its keys `begin_k .. end_k`
    /// only.
    ///
    /// ```
    /// use flash_attention_kernels::{AttentionOptions, mask::Band};
    ///
    /// // Of three queries over five keys the last one is padding, as is the first key.
    /// let band = Band::new(3, 5, &AttentionOptions { causal: true, ..Default::default() }).of(0, 0, 2, 1, 5);
    /// let row = |i| (0..5).map(|j| u8::from(band.sees(i, j))).collect::<Vec<_>>();
    /// assert_eq!(row(0), [0, 1, 1, 1, 0]);
    /// assert_eq!(row(1), [0, 1, 1, 1, 1]);
    /// assert_eq!(row(2), [0; 5]);
    /// ```
    pub fn of(&self, sequence: u32, begin_q: u32, end_q: u32, begin_k: u32, end_k: u32) -> Band {
        let mut diagonal = begin_k as i32 - begin_q as i32;
        if comptime!(self.bottom_right) {
            diagonal = end_k as i32 - end_q as i32;
        }
        Band {
            seq_q: self.seq_q,
            seq_k: self.seq_k,
            sequence,
            begin_q,
            end_q,
            begin_k,
            end_k,
            lower: self.lower + (diagonal - self.diagonal),
            upper: self.upper + (diagonal - self.diagonal),
            diagonal,
            bounded_below: comptime!(self.bounded_below),
            bounded_above: comptime!(self.bounded_above),
            bottom_right: comptime!(self.bottom_right),
            varlen: comptime!(true),
            continued: comptime!(self.continued),
        }
    }

    /// One past the last query: the end of the sequence if `varlen`, else the number of queries.
    pub fn after_queries(&self) -> u32 {
        if comptime!(self.varlen) { self.end_q } else { self.seq_q }
    }

    /// One past the last key: the end of the sequence if `varlen`, else the number of keys.
    pub fn after_keys(&self) -> u32 {
        if comptime!(self.varlen) { self.end_k } else { self.seq_k }
    }

    /// Number of the sequence. Without `varlen` each batch is one sequence, and its number is the batch.
    pub fn number(&self, batch: u32) -> u32 {
        if comptime!(self.varlen) { self.sequence } else { batch }
    }

    /// The first query of the sequence.
    pub fn first_query(&self) -> u32 {
        if comptime!(self.varlen) { self.begin_q } else { 0u32.runtime() }
    }

    /// The first key of the sequence.
    pub fn first_key(&self) -> u32 {
        if comptime!(self.varlen) { self.begin_k } else { 0u32.runtime() }
    }

    /// Whether query `i` sees key `j`. False for positions outside the sequence.
    pub fn sees(&self, i: u32, j: u32) -> bool {
        // Evaluated before the `&&`: a call after it becomes a branch, and unrolled loops have too many for some compilers.
        let (queries, keys) = (self.after_queries(), self.after_keys());
        let mut seen = i < queries && j < keys;
        if comptime!(self.varlen) {
            seen = seen && i >= self.begin_q && j >= self.begin_k;
        }
        if comptime!(self.bounded_below) {
            seen = seen && j as i32 >= i as i32 + self.lower;
        }
        if comptime!(self.bounded_above) {
            seen = seen && j as i32 <= i as i32 + self.upper;
        }
        seen
    }

    /// Distance from key `j` to query `i`: negative if the query's position is before the key.
    pub fn offset(&self, i: u32, j: u32) -> i32 {
        i as i32 + self.diagonal - j as i32
    }

    /// Positions of a row and a column as functions receive them, counted from the beginning of their sequence. Rows are queries and
    /// columns keys, or the reverse if `transposed`.
    pub fn positions(&self, row: u32, column: u32, #[comptime] transposed: bool) -> (u32, u32) {
        let (first_row, first_column) = (self.first_query(), self.first_key());
        if comptime!(self.continued && transposed) {
            (row - first_row, (column as i32 - self.diagonal - first_row as i32) as u32)
        } else if comptime!(self.continued) {
            ((row as i32 + self.diagonal - first_column as i32) as u32, column - first_column)
        } else {
            (row - first_row, column - first_column)
        }
    }

    /// The blocks of `tile_k` keys, counted from the first key of the sequence, in which queries `q_start .. q_start + tile_q`
    /// see anything. `q_start` may be before query 0: a negative number in 32 bits.
    pub fn k_blocks(&self, q_start: u32, #[comptime] tile_q: u32, #[comptime] tile_k: u32) -> Blocks {
        let mut first = self.first_key() as i32;
        let mut after = self.after_keys() as i32;
        let mut q_first = q_start as i32;
        let q_last = min(q_start as i32 + tile_q as i32, self.after_queries() as i32) - 1;
        if comptime!(self.varlen) {
            q_first = max(q_first, self.begin_q as i32);
            after = select(q_first > q_last, first, after);
        }
        if comptime!(self.bounded_below) {
            first = max(first, q_first + self.lower);
        }
        if comptime!(self.bounded_above) {
            after = min(after, q_last + self.upper + 1);
        }
        blocks(first, after, self.first_key(), tile_k)
    }

    /// The blocks of `tile_q` queries, counted from the first query of the sequence, that see any of the keys `k_start ..
    /// k_start + tile_k`.
    pub fn q_blocks(&self, k_start: u32, #[comptime] tile_q: u32, #[comptime] tile_k: u32) -> Blocks {
        self.transposed().k_blocks(k_start, tile_k, tile_q)
    }

    /// Whether queries `q_start .. q_start + tile_q` see any of the keys `k_start .. k_start + tile_k`.
    pub fn meets(&self, q_start: u32, k_start: u32, #[comptime] tile_q: u32, #[comptime] tile_k: u32) -> bool {
        let seen = self.k_blocks(q_start, tile_q, 1u32);
        seen.start < seen.end && seen.origin + seen.start < k_start + tile_k && seen.origin + seen.end > k_start
    }

    /// The keys that query `i` sees, relative to `origin`; an empty range if `fully_masked`.
    pub fn run(&self, i: u32, origin: u32, fully_masked: bool) -> Run {
        let mut start = 0i32;
        let mut end = self.after_keys() as i32;
        if comptime!(self.bounded_below) {
            start = i as i32 + self.lower;
        }
        if comptime!(self.bounded_above) {
            end = min(end, i as i32 + self.upper + 1);
        }
        Run {
            start: start - origin as i32,
            end: select(fully_masked, i32::MIN, end - origin as i32),
            bounded_below: comptime!(self.bounded_below),
        }
    }

    /// Which blocks of `tile_k` keys contain a key that one of the queries `q_start .. q_start + tile_q` does not see. Blocks
    /// are processed from the one that starts at `k_last` downwards. Queries past the last one are ignored, because their
    /// results are discarded.
    pub fn edges(&self, q_start: u32, k_last: u32, #[comptime] tile_q: u32, #[comptime] tile_k: u32) -> Edges {
        let tile = tile_k as i32;
        let after = (k_last + tile_k) as i32;
        // Every query sees the keys from `first` to `end`.
        let mut end = self.after_keys() as i32;
        if comptime!(self.bounded_above) {
            end = min(end, q_start as i32 + self.upper + 1);
        }
        // Masking continues until every query has begun to see keys. The block in which the first query begins is included,
        // even if that block is fully visible.
        let lead = select(after > end, (after - end) / tile + 1, 0i32);
        let mut tail = i32::MAX.runtime();
        if comptime!(self.bounded_below) {
            let first = q_start as i32 + tile_q as i32 - 1 + self.lower;
            tail = max(after - max(first, 0i32), 0i32) / tile;
        }
        Edges { lead: lead as u32, tail: tail as u32 }
    }

    /// Whether query `i` is before the end of the sequence's queries. `i` must not be before the first one.
    pub fn is_query(&self, i: u32) -> bool {
        i < self.after_queries()
    }

    /// Whether key `j` is before the end of the sequence's keys. `j` must not be before the first one.
    pub fn is_key(&self, j: u32) -> bool {
        j < self.after_keys()
    }

    /// Query `i` clamped to the last query, so that it can be read.
    pub fn query_within(&self, i: u32) -> u32 {
        min(i, self.seq_q - 1)
    }

    /// Key `j` clamped so that `width` keys from it can be read.
    pub fn key_within(&self, j: u32, width: u32) -> u32 {
        min(j, self.seq_k - width)
    }

    /// Whether every query of `q_start .. q_start + tile_q` sees every key of `k_start .. k_start + tile_k`. Such a tile needs
    /// no masking.
    pub fn fully_visible(&self, q_start: u32, k_start: u32, #[comptime] tile_q: u32, #[comptime] tile_k: u32) -> bool {
        let q_last = q_start + tile_q - 1;
        let (is_query, seen) = (self.is_query(q_last), self.all_see(q_start, q_last, k_start, tile_k));
        is_query && seen
    }

    /// Whether the queries from `q_first` to `q_last`, up to the last one of the sequence, see every key of `k_start .. k_start + tile_k`.
    pub fn all_see(&self, q_first: u32, q_last: u32, k_start: u32, #[comptime] tile_k: u32) -> bool {
        // A sequence may have no query.
        let (after_last, k_last) = (min(q_last + 1, self.after_queries()), k_start + tile_k - 1);
        let mut seen = self.is_key(k_last);
        if comptime!(self.varlen) {
            seen = seen && q_first >= self.begin_q && k_start >= self.begin_k;
        }
        if comptime!(self.bounded_below) {
            seen = seen && k_start as i32 + 1 >= after_last as i32 + self.lower;
        }
        if comptime!(self.bounded_above) {
            seen = seen && k_last as i32 <= q_first as i32 + self.upper;
        }
        seen
    }
}

/// The blocks of `tile` positions, counted from `origin`, that overlap `first .. after`. `first` must not be before `origin`.
#[cube]
fn blocks(first: i32, after: i32, origin: u32, #[comptime] tile: u32) -> Blocks {
    let mut start = 0u32;
    let mut end = 0u32;
    if first < after {
        start = (first as u32 - origin) / tile;
        end = (after as u32 - origin).div_ceil(tile);
    }
    Blocks { start, end, origin }
}
