//! Matrix products with few rows, as in decoding. Neither operand is packed: that would take longer than the product.

use pulp::{Simd, WithSimd};

/// Asks for the cache lines that lie `AHEAD` elements behind those of `b`. A cache is read once, from memory, and hardware does not look
/// beyond a page of 4 KiB.
#[inline(always)]
fn prefetch(b: &[f32]) {
    /// Elements of a page. What lies behind a block of rows are mostly the next rows of its head.
    #[cfg(target_arch = "x86_64")]
    const AHEAD: usize = 1024;
    #[cfg(target_arch = "x86_64")]
    for line in b.chunks(64 / size_of::<f32>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect but on caches, wherever the pointer points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = b;
}

/// `c += scale · a · bᵀ`. All three are row-major.
pub struct Dots<'a> {
    pub c: &'a mut [f32],
    pub scale: f32,
    pub a: &'a [f32],
    pub b: &'a [f32],
    /// Columns of `a` and of `b`.
    pub dim: usize,
}

impl WithSimd for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        /// Rows of `b` at a time: their sums do not wait for each other, and `a` is loaded once for all of them.
        const ROWS: usize = 4;
        let Dots { c, scale, a, b, dim } = self;
        let cols = b.len() / dim;
        for (n, b) in b.chunks(ROWS * dim).enumerate() {
            prefetch(b);
            for (c, a) in c.chunks_exact_mut(cols).zip(a.chunks_exact(dim)) {
                let c = &mut c[n * ROWS..];
                if b.len() == ROWS * dim {
                    let rows: [&[f32]; ROWS] = std::array::from_fn(|n| &b[n * dim..][..dim]);
                    c.iter_mut().zip(dots(simd, a, rows)).for_each(|(c, dot)| *c += scale * dot);
                } else {
                    c.iter_mut().zip(b.chunks_exact(dim)).for_each(|(c, b)| *c += scale * dots(simd, a, [b])[0]);
                }
            }
        }
    }
}

/// `a · b` for each `b`, of the length of `a`.
#[inline(always)]
fn dots<S: Simd, const N: usize>(simd: S, a: &[f32], b: [&[f32]; N]) -> [f32; N] {
    let (a, a_rest) = S::as_simd_f32s(a);
    let b = b.map(|b| S::as_simd_f32s(b));
    let rows: [&[S::f32s]; N] = std::array::from_fn(|n| &b[n].0[..a.len()]);
    let mut sums = [simd.splat_f32s(0.0); N];
    for (i, a) in a.iter().enumerate() {
        for n in 0..N {
            sums[n] = simd.mul_add_e_f32s(*a, rows[n][i], sums[n]);
        }
    }
    if !a_rest.is_empty() {
        let a = simd.partial_load_f32s(a_rest);
        for n in 0..N {
            sums[n] = simd.mul_add_e_f32s(a, simd.partial_load_f32s(b[n].1), sums[n]);
        }
    }
    sums.map(|sum| simd.reduce_sum_f32s(sum))
}

/// `c += scale · a · b`. All three are row-major.
pub struct WeightedRows<'a> {
    pub c: &'a mut [f32],
    pub scale: f32,
    pub a: &'a [f32],
    pub b: &'a [f32],
    /// Columns of `b` and of `c`.
    pub dim: usize,
}

impl WithSimd for WeightedRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        /// Rows of `b` at a time, so that `c` is loaded and stored once for all of them.
        const ROWS: usize = 8;
        let WeightedRows { c, scale, a, b, dim } = self;
        let weights_a_row = b.len() / dim;
        for (n, b) in b.chunks(ROWS * dim).enumerate() {
            prefetch(b);
            for (c, a) in c.chunks_exact_mut(dim).zip(a.chunks_exact(weights_a_row)) {
                let weights = &a[n * ROWS..];
                if b.len() == ROWS * dim {
                    let weights: [f32; ROWS] = std::array::from_fn(|n| scale * weights[n]);
                    add_rows(simd, c, weights, b);
                } else {
                    weights.iter().zip(b.chunks_exact(dim)).for_each(|(x, b)| add_rows(simd, c, [scale * x], b));
                }
            }
        }
    }
}

/// `c += Σ weights · b`, for `N` rows `b` of the length of `c`.
#[inline(always)]
fn add_rows<S: Simd, const N: usize>(simd: S, c: &mut [f32], weights: [f32; N], b: &[f32]) {
    let dim = c.len();
    let b: [_; N] = std::array::from_fn(|n| S::as_simd_f32s(&b[n * dim..][..dim]));
    let (c, c_rest) = S::as_mut_simd_f32s(c);
    let rows: [&[S::f32s]; N] = std::array::from_fn(|n| &b[n].0[..c.len()]);
    let splats = weights.map(|weight| simd.splat_f32s(weight));
    for (i, c) in c.iter_mut().enumerate() {
        *c = (0..N).fold(*c, |sum, n| simd.mul_add_e_f32s(splats[n], rows[n][i], sum));
    }
    if !c_rest.is_empty() {
        let rest = |sum, n: usize| simd.mul_add_e_f32s(splats[n], simd.partial_load_f32s(b[n].1), sum);
        let sum = (0..N).fold(simd.partial_load_f32s(c_rest), rest);
        simd.partial_store_f32s(c_rest, sum);
    }
}
