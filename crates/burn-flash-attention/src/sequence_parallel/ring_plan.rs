//! What each rank of a ring computes in each step. No tensors here.

use std::ops::Range;

/// Rows of a rank's share that take part in a step. With [`Sharding::Zigzag`](super::Sharding::Zigzag) each half is one chunk.
///
/// ```
/// use burn_flash_attention::sequence_parallel::Rows;
///
/// assert_eq!(Rows::Second.range(8), 4..8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// All rows.
    All,
    /// The first half.
    First,
    /// The second half.
    Second,
}

impl Rows {
    /// The range of these rows in a share of `seq` rows.
    ///
    /// ```
    /// use burn_flash_attention::sequence_parallel::Rows;
    ///
    /// assert_eq!(Rows::First.range(8), 0..4);
    /// ```
    pub fn range(self, seq: usize) -> Range<usize> {
        match self {
            Rows::All => 0..seq,
            Rows::First => 0..seq / 2,
            Rows::Second => seq / 2..seq,
        }
    }
}

/// A step of a rank: one call of attention over the keys that have come to it.
///
/// ```
/// use burn_flash_attention::sequence_parallel::ring_plan;
///
/// // Queries by keys of each step of rank 0 of 4, with 2 chunks of 512 rows: the diagonal, then half of the pairs in each step.
/// let pairs = ring_plan(0, 4, true).iter().map(|step| step.pairs(1024)).collect::<Vec<_>>();
/// assert_eq!(pairs, [1024 * 1025 / 2, 1024 * 512, 1024 * 512, 1024 * 512]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStep {
    /// The rank whose keys and values these are.
    pub source: usize,
    /// The queries that see some of these keys.
    pub q: Rows,
    /// The keys that these queries see.
    pub k: Rows,
    /// Whether the step is causal: that over the rank's own keys. In all others each of the queries sees each of the keys.
    pub causal: bool,
}

impl RingStep {
    /// Pairs of a query and a key that the step computes for a head, of shares of `seq` rows. A pair costs `2 (head_dim + head_dim_v)` FLOPs
    /// in the forward.
    ///
    /// ```
    /// use burn_flash_attention::sequence_parallel::{RingStep, Rows};
    ///
    /// let step = RingStep { source: 1, q: Rows::Second, k: Rows::All, causal: false };
    /// assert_eq!(step.pairs(8), 4 * 8);
    /// ```
    pub fn pairs(&self, seq: usize) -> usize {
        let (q, k) = (self.q.range(seq).len(), self.k.range(seq).len());
        if self.causal { q * (q + 1) / 2 } else { q * k }
    }
}

/// The steps of a rank, in order. In step `t` it has the keys and values of rank `(rank − t) mod world_size`.
///
/// A causal rank holds the chunks `rank` and `2 · world_size − 1 − rank`. All its rows see the first chunk of an earlier rank, and none sees the
/// second. Of the chunks of a later rank its second chunk sees both, and its first chunk none. Every step after the first therefore costs
/// the same on every rank.
///
/// ```
/// use burn_flash_attention::sequence_parallel::{RingStep, Rows, ring_plan};
///
/// let plan = ring_plan(1, 3, true);
/// assert_eq!(plan[0], RingStep { source: 1, q: Rows::All, k: Rows::All, causal: true });
/// assert_eq!(plan[1], RingStep { source: 0, q: Rows::All, k: Rows::First, causal: false });
/// assert_eq!(plan[2], RingStep { source: 2, q: Rows::Second, k: Rows::All, causal: false });
/// ```
pub fn ring_plan(rank: usize, world_size: usize, causal: bool) -> Vec<RingStep> {
    let step = |t| {
        let source = (rank + world_size - t) % world_size;
        let (q, k) = match source {
            _ if !causal || source == rank => (Rows::All, Rows::All),
            _ if source < rank => (Rows::All, Rows::First),
            _ => (Rows::Second, Rows::All),
        };
        RingStep { source, q, k, causal: causal && source == rank }
    };
    (0..world_size).map(step).collect()
}
