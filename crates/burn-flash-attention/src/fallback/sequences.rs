//! Several sequences in one call, as defined in [`flash_attention_kernels::sequences`].

use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::mask::Band;
use std::ops::Range;

/// Sequences of each batch, in order.
pub struct Sequences(Vec<Vec<Band>>);

impl Sequences {
    /// One sequence in each batch, followed by padding.
    pub fn padded(problem: &AttentionProblem, lens_q: Option<&[u32]>, lens_k: Option<&[u32]>) -> Self {
        let len = |lens: Option<&[u32]>, b: usize, all: usize| lens.map_or(all as u32, |lens| lens[b].min(all as u32));
        let of = |b| {
            let (q, k) = (len(lens_q, b, problem.seq_q), len(lens_k, b, problem.seq_k));
            vec![problem.band().of(b as u32, 0, q, 0, k)]
        };
        Sequences((0..problem.batch).map(of).collect())
    }

    /// Packed sequences, counted through the batches.
    pub fn packed(problem: &AttentionProblem, cu_q: &[u32], cu_k: &[u32]) -> Self {
        let mut sequences = vec![Vec::new(); problem.batch];
        if problem.rows() == 0 || problem.seq_k == 0 {
            return Sequences(sequences);
        }
        let within = |ends: &[u32], seq: usize| {
            let (from, to) = (ends[0] as usize, ends[1] as usize);
            let from = from.min(problem.batch * seq);
            let batch = (from / seq).min(problem.batch - 1);
            let begin = from - batch * seq;
            (batch, begin..(begin + to.saturating_sub(from)).min(seq))
        };
        for (number, (q, k)) in cu_q.windows(2).zip(cu_k.windows(2)).enumerate() {
            let ((batch, q), (of_keys, k)) = (within(q, problem.seq_q), within(k, problem.seq_k));
            let k = if of_keys == batch { k } else { k.start..k.start };
            let [number, q0, q1, k0, k1] = [number, q.start, q.end, k.start, k.end].map(|n| n as u32);
            sequences[batch].push(problem.band().of(number, q0, q1, k0, k1));
        }
        Sequences(sequences)
    }

    /// Batch and band of a sequence; `None` if the tensors have no queries or no keys.
    pub fn numbered(&self, number: usize) -> Option<(usize, Band)> {
        let mut bands = self.0.iter().enumerate().flat_map(|(b, bands)| bands.iter().map(move |band| (b, *band)));
        bands.find(|(_, band)| band.sequence as usize == number)
    }

    /// Sequences of a batch.
    pub fn of(&self, b: usize) -> &[Band] {
        &self.0[b]
    }

    /// Band of the sequence that a query belongs to; `None` if it belongs to none.
    pub fn of_query(&self, b: usize, i: usize) -> Option<&Band> {
        self.of(b).iter().find(|band| (band.begin_q..band.end_q).contains(&(i as u32)))
    }

    /// Keys from the first to the last that any of these queries sees.
    pub fn keys(&self, b: usize, q_start: usize, rows: usize) -> Range<usize> {
        let seen = self.of(b).iter().map(|band| {
            let keys = (q_start..q_start + rows).map(|i| band.k_blocks(i as u32, 1, 1));
            hull(keys.map(|keys| (keys.origin + keys.start) as usize..(keys.origin + keys.end) as usize))
        });
        hull(seen)
    }

    /// Queries from the first to the last that see any of these keys.
    pub fn queries(&self, b: usize, k_start: usize, cols: usize) -> Range<usize> {
        let seen = self.of(b).iter().map(|band| {
            let queries = (k_start..k_start + cols).map(|j| band.q_blocks(j as u32, 1, 1));
            hull(queries.map(|of| (of.origin + of.start) as usize..(of.origin + of.end) as usize))
        });
        hull(seen)
    }

    /// Whether every one of these queries sees every one of these keys.
    pub fn fully_visible(&self, b: usize, q_start: usize, k_start: usize, rows: usize, cols: usize) -> bool {
        let [q_start, k_start, rows, cols] = [q_start, k_start, rows, cols].map(|n| n as u32);
        self.of(b).iter().any(|band| band.fully_visible(q_start, k_start, rows, cols))
    }
}

/// Smallest range that contains all ranges that are not empty.
fn hull(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let some = ranges.filter(|range| !range.is_empty());
    some.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}
