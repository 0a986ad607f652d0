//! Predefined mask functions. They count positions of queries and keys from the beginning of the sequence. [`And`],
//! [`Or`](super::Or) and [`Not`](super::Not) combine them, and [`Swapped`](super::Swapped) lets one of two read the other tensor.
//!
//! Sizes that are the same for all heads are const parameters: the compiler folds them, and no tensor is read. Sizes that vary
//! with the head or the sequence are tensors of f32, which hold integers up to 2²⁴.

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

/// A sliding window: `|i − j| ≤ REACH` (Longformer, arXiv:2004.05150, section 3.1). It reads no tensors. For a window alone, the
/// options `window_left` and `window_right` compute the same and skip more work.
///
/// ```
/// use flash_attention_kernels::mods::{MaskFn, Pair, SlidingWindow, Values};
///
/// let window = MaskFn::of::<SlidingWindow<2>>();
/// let sees = |j| window.sees(Pair::of(0, 0, 10, j), Values::default());
/// assert_eq!((0..20).filter(|j| sees(*j)).collect::<Vec<_>>(), [8, 9, 10, 11, 12]);
/// ```
pub struct SlidingWindow<const REACH: u32>;

#[cube]
impl<const REACH: u32> MaskMod for SlidingWindow<REACH> {
    fn sees(pair: Pair, _values: Values) -> bool {
        f32::abs(pair.distance) <= comptime!(REACH as f32)
    }
}

/// The query itself and the `REACH` keys before it: `i − REACH ≤ j ≤ i` (Mistral 7B, arXiv:2310.06825, section 2). It reads no
/// tensors.
///
/// ```
/// use flash_attention_kernels::mods::{CausalWindow, MaskFn, Pair, Values};
///
/// let window = MaskFn::of::<CausalWindow<2>>();
/// let sees = |j| window.sees(Pair::of(0, 0, 10, j), Values::default());
/// assert_eq!((0..20).filter(|j| sees(*j)).collect::<Vec<_>>(), [8, 9, 10]);
/// ```
pub type CausalWindow<const REACH: u32> = And<Causal, SlidingWindow<REACH>>;

/// The first `COUNT` keys: `j < COUNT`. It reads no tensors. With a window, `Or<FirstKeys<4>, SlidingWindow<1023>>`, they are the
/// tokens that StreamingLLM keeps as attention sinks (arXiv:2309.17453, section 3.2).
///
/// ```
/// use flash_attention_kernels::mods::{FirstKeys, MaskFn, Pair, Values};
///
/// let first = MaskFn::of::<FirstKeys<4>>();
/// assert_eq!([0, 3, 4].map(|j| first.sees(Pair::of(0, 0, 90, j), Values::default())), [true, true, false]);
/// ```
pub struct FirstKeys<const COUNT: u32>;

#[cube]
impl<const COUNT: u32> MaskMod for FirstKeys<COUNT> {
    fn sees(pair: Pair, _values: Values) -> bool {
        pair.j < comptime!(COUNT)
    }
}

/// Keys of the query's own chunk of `SIZE` positions: `⌊i / SIZE⌋ = ⌊j / SIZE⌋`. It reads no tensors. With [`Causal`] it is the
/// chunked attention of Llama 4, `And<Causal, Chunked<8192>>`. `SIZE` is at least 1; 0 is taken as 1.
///
/// ```
/// use flash_attention_kernels::mods::{Chunked, MaskFn, Pair, Values};
///
/// let chunked = MaskFn::of::<Chunked<4>>();
/// let sees = |j| chunked.sees(Pair::of(0, 0, 9, j), Values::default());
/// assert_eq!((0..20).filter(|j| sees(*j)).collect::<Vec<_>>(), [8, 9, 10, 11]);
/// ```
pub struct Chunked<const SIZE: u32>;

#[cube]
impl<const SIZE: u32> MaskMod for Chunked<SIZE> {
    fn sees(pair: Pair, _values: Values) -> bool {
        let size = comptime!(Ord::max(SIZE, 1));
        pair.i / size == pair.j / size
    }
}

/// Keys at multiples of a gap from the query: `GAP` divides `i − j`. It reads no tensors. With a window it is a dilated window,
/// `And<Stride<3>, SlidingWindow<6>>`, equal to [`Dilated`] of 3 and 2 for all heads. Sparse Transformers' strided attention is
/// `And<Causal, Or<Stride<128>, SlidingWindow<128>>>` (arXiv:1904.10509, section 4.3). `GAP` is at least 1; 0 is taken as 1.
///
/// ```
/// use flash_attention_kernels::mods::{MaskFn, Pair, Stride, Values};
///
/// let stride = MaskFn::of::<Stride<6>>();
/// let sees = |j| stride.sees(Pair::of(0, 0, 9, j), Values::default());
/// assert_eq!((0..20).filter(|j| sees(*j)).collect::<Vec<_>>(), [3, 9, 15]);
/// ```
pub struct Stride<const GAP: u32>;

#[cube]
impl<const GAP: u32> MaskMod for Stride<GAP> {
    fn sees(pair: Pair, _values: Values) -> bool {
        let gap = comptime!(Ord::max(GAP, 1));
        pair.i % gap == pair.j % gap
    }
}

/// Neighbours in an image of `HEIGHT` rows of `WIDTH` positions, stored row by row: the square of `2·REACH + 1` rows and columns
/// around the query. Queries at the border see the nearest such square within the image, so that all see as many keys
/// (Neighborhood Attention Transformer, arXiv:2204.07143, section 3). It reads no tensors.
///
/// ```
/// use flash_attention_kernels::mods::{MaskFn, Neighborhood, Pair, Values};
///
/// let near = MaskFn::of::<Neighborhood<5, 4, 1>>();
/// let seen = |i| (0..20).filter(|j| near.sees(Pair::of(0, 0, i, *j), Values::default())).collect::<Vec<_>>();
/// assert_eq!(seen(7), [1, 2, 3, 6, 7, 8, 11, 12, 13]);
/// assert_eq!(seen(0), [0, 1, 2, 5, 6, 7, 10, 11, 12]);
/// ```
pub struct Neighborhood<const WIDTH: u32, const HEIGHT: u32, const REACH: u32>;

#[cube]
impl<const WIDTH: u32, const HEIGHT: u32, const REACH: u32> MaskMod for Neighborhood<WIDTH, HEIGHT, REACH> {
    fn sees(pair: Pair, _values: Values) -> bool {
        let width = comptime!(Ord::max(WIDTH, 1));
        let same_rows = is_near(pair.i / width, pair.j / width, HEIGHT, REACH);
        let same_columns = is_near(pair.i % width, pair.j % width, WIDTH, REACH);
        same_rows && same_columns
    }
}

/// Whether `key` is among the `2·reach + 1` places nearest to `query`, of `size` places in a line.
#[cube]
fn is_near(query: u32, key: u32, #[comptime] size: u32, #[comptime] reach: u32) -> bool {
    let last = comptime!(size.saturating_sub(reach + 1));
    let centre = u32::min(u32::max(query, reach), last);
    key <= centre + reach && key + reach >= centre
}
