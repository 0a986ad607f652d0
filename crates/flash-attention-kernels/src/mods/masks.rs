//! Predefined mask functions. They count positions of queries and keys from the beginning of the sequence. Functions that read
//! the same tensors can be combined by [`And`], [`Or`](super::Or) and [`Not`](super::Not).
//!
//! Their tensors are f32 and hold integers up to 2²⁴.

use super::{And, MaskMod, Pair, Values};
use cubecl::prelude::*;

/// Keys up to the query: `j ≤ i` (GPT, Radford et al. 2018; Vaswani et al., arXiv:1706.03762, section 3.2.3). It reads no
/// tensors. Queries and keys are aligned at the beginning of their sequences. If both have the same length, or if that
/// alignment is intended, the option `causal` computes the same and skips more work.
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

/// Keys of the query's own document: `a = b`. `a`, `[batch | 1, 1, seq_q, 1]`, holds the document of each query, and `b`,
/// `[batch | 1, 1, 1, seq_k]`, the document of each key (FlexAttention, arXiv:2412.05496; Llama 3, arXiv:2407.21783, section
/// 3.2).
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

/// Keys up to the query, and the keys of a prefix that every query sees: `j ≤ i` or `j < a`. `a`, `[batch | 1, 1, 1, 1]`, is
/// the length of the prefix and not negative (T5's prefix language model, arXiv:1910.10683, section 3.2.1).
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
        // The conversion is hoisted out of the loop over pairs if the prefix is the same for all of them.
        let prefix = values.a as u32;
        pair.j <= pair.i || pair.j < prefix
    }
}

/// A sliding window with global positions, which see every key and are seen by every query: `|i − j| ≤ a`, or `i < b`, or `j <
/// b`. `a` is the reach of the window to each side, and the first `b` positions are global. Both are `[1 | batch, 1 | heads, 1,
/// 1]` and not negative (Longformer, arXiv:2004.05150, section 3.1).
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

/// A dilated window: `i − j` is divisible by `a`, and `|i − j| ≤ a·b`. A query sees itself and `b` keys to each side, at
/// distance `a` from each other. `a` is at least 1 (smaller values are taken as 1), and `b` is not negative. Both are `[1 |
/// batch, 1 | heads, 1, 1]` (Longformer's dilated window, arXiv:2004.05150, section 3.1).
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
        // One remainder for each row and each column instead of one for each pair.
        let on_grid = pair.i % apart == pair.j % apart;
        on_grid && f32::abs(pair.distance) <= step * values.b
    }
}
