//! Functions that hide pairs, ready-made. All of them count positions from where their sequence begins, on both sides, and combine by
//! [`And`], [`Or`](super::Or) and [`Not`](super::Not) as far as their tensors are the same.
//!
//! What they read is f32, and holds whole numbers as far as 2²⁴.

use super::{And, MaskMod, Pair, Values};
use cubecl::prelude::*;

/// Keys up to the query: `j ≤ i` (GPT, Radford et al. 2018; Vaswani et al., arXiv:1706.03762, section 3.2.3). Without tensors. Sequences
/// are aligned at their beginnings: where they are of one length, or that is meant, the option `causal` says the same and skips more.
///
/// ```
/// use flash_attention_kernels::mods::{Causal, MaskFn, Pair, Values};
///
/// let causal = MaskFn::of::<Causal>();
/// assert_eq!([6, 7, 8].map(|j| causal.sees(Pair::of(0, 0, 7, j), Values::default())), [true, true, false]);
/// ```
pub struct Causal;

#[cube]
impl MaskMod for Causal {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.j <= pair.i
    }
}

/// Keys of the query's own document: `a = b`, where `a` holds the documents of queries, `[batch | 1, 1, seq_q, 1]`, and `b` those of keys,
/// `[batch | 1, 1, 1, seq_k]` (FlexAttention, arXiv:2412.05496; Llama 3, arXiv:2407.21783, section 3.2).
///
/// ```
/// use flash_attention_kernels::mods::{Document, MaskFn, Pair, Values};
///
/// let document = MaskFn::of::<Document>();
/// assert!(document.sees(Pair::of(0, 0, 0, 5), Values { a: 3.0, b: 3.0 }));
/// assert!(!document.sees(Pair::of(0, 0, 0, 5), Values { a: 3.0, b: 2.0 }));
/// ```
pub struct Document;

#[cube]
impl MaskMod for Document {
    fn sees(_pair: Pair, values: Values) -> bool {
        values.a == values.b
    }
}

/// Keys of the query's own document up to the query: `j ≤ i` and `a = b`, with the tensors of [`Document`].
///
/// ```
/// use flash_attention_kernels::mods::{CausalDocument, MaskFn, Pair, Values};
///
/// let document = MaskFn::of::<CausalDocument>();
/// let same = Values { a: 3.0, b: 3.0 };
/// assert!(document.sees(Pair::of(0, 0, 5, 5), same) && !document.sees(Pair::of(0, 0, 5, 6), same));
/// assert!(!document.sees(Pair::of(0, 0, 5, 5), Values { a: 3.0, b: 2.0 }));
/// ```
pub type CausalDocument = And<Causal, Document>;

/// Keys up to the query, and those of a prefix that all see: `j ≤ i` or `j < a`, where `a` is how long the prefix is,
/// `[batch | 1, 1, 1, 1]`, not below 0 (T5's prefix language model, arXiv:1910.10683, section 3.2.1).
///
/// ```
/// use flash_attention_kernels::mods::{MaskFn, Pair, PrefixLm, Values};
///
/// let prefix = MaskFn::of::<PrefixLm>();
/// let sees = |i, j| prefix.sees(Pair::of(0, 0, i, j), Values { a: 4.0, b: 0.0 });
/// assert_eq!([sees(0, 3), sees(0, 4), sees(4, 4)], [true, false, true]);
/// ```
pub struct PrefixLm;

#[cube]
impl MaskMod for PrefixLm {
    fn sees(pair: Pair, values: Values) -> bool {
        // One conversion for all pairs, where the prefix is one.
        let prefix = values.a as u32;
        pair.j <= pair.i || pair.j < prefix
    }
}

/// A window, and positions that see all and are seen by all: `|i − j| ≤ a`, or `i < b`, or `j < b`, where `a` is how far the window
/// reaches to each side and `b` how many of the first positions are global, neither below 0: `[1 | batch, 1 | heads, 1, 1]` both
/// (Longformer, arXiv:2004.05150, section 3.1).
///
/// ```
/// use flash_attention_kernels::mods::{MaskFn, Pair, SlidingGlobal, Values};
///
/// let sliding = MaskFn::of::<SlidingGlobal>();
/// let sees = |i, j| sliding.sees(Pair::of(0, 0, i, j), Values { a: 2.0, b: 1.0 });
/// assert_eq!([7, 8, 9, 11, 12, 13].map(|j| sees(10, j)), [false, true, true, true, true, false]);
/// assert!(sees(0, 90) && sees(90, 0) && !sees(1, 90));
/// ```
pub struct SlidingGlobal;

#[cube]
impl MaskMod for SlidingGlobal {
    fn sees(pair: Pair, values: Values) -> bool {
        let global = values.b as u32;
        let near = f32::abs(pair.distance) <= values.a;
        near || pair.i < global || pair.j < global
    }
}

/// A window with gaps: `i − j` is divisible by `a`, and `|i − j| ≤ a·b`, so that a query sees itself and `b` keys to each side, `a` apart.
/// `a` is at least 1 (what is less is taken for it) and `b` not below 0: `[1 | batch, 1 | heads, 1, 1]` both (Longformer's dilated
/// window, arXiv:2004.05150, section 3.1).
///
/// ```
/// use flash_attention_kernels::mods::{Dilated, MaskFn, Pair, Values};
///
/// let dilated = MaskFn::of::<Dilated>();
/// let sees = |j| dilated.sees(Pair::of(0, 0, 10, j), Values { a: 3.0, b: 2.0 });
/// assert_eq!((0..20).filter(|j| sees(*j)).collect::<Vec<_>>(), [4, 7, 10, 13, 16]);
/// ```
pub struct Dilated;

#[cube]
impl MaskMod for Dilated {
    fn sees(pair: Pair, values: Values) -> bool {
        let step = f32::max(values.a, 1.0f32);
        let apart = step as u32;
        // Of a row or a column one remainder, and not one of each pair.
        let on_grid = pair.i % apart == pair.j % apart;
        on_grid && f32::abs(pair.distance) <= step * values.b
    }
}
