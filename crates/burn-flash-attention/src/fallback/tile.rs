//! A tile of scores: `TILE_Q` queries of one head by `TILE_K` keys.

use super::blocks::States;
use super::math::{self, vectorized};
use super::matrix::{Block, Matrix, Rows, multiply};
use super::sequences::Sequences;
use burn_flex::Layout;
use flash_attention_kernels::blocks::{EMPTY, PARTIAL};
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::mods::{Pair, Partials, TENSORS, Values};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, dropout};
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

/// Queries in a tile. The scores, keys and values of a tile fit a core's private cache, and its products are large enough for the matrix
/// routine to reach full speed.
pub const TILE_Q: usize = 64;
/// Keys in a tile.
pub const TILE_K: usize = 128;

/// Position and size of a tile.
#[derive(Clone, Copy)]
pub struct Tile {
    pub b: usize,
    /// Query head.
    pub h: usize,
    pub q_start: usize,
    /// Number of queries: `TILE_Q`, or fewer in the last block.
    pub rows: usize,
    pub k_start: usize,
    /// Number of keys: `TILE_K`, or fewer in the last block.
    pub cols: usize,
}

/// Buffers of a thread, each of the size of a tile.
#[derive(Default)]
pub struct Scratch {
    /// Scores, then probabilities.
    pub p: Vec<f32>,
    /// Gradients of probabilities, then of scores.
    pub ds: Vec<f32>,
    /// Scores before the score function, if there is one.
    pub t: Vec<f32>,
    /// Derivative of the softcap.
    pub slope: Vec<f32>,
    /// Which weights dropout keeps, if there is dropout.
    pub kept: Vec<bool>,
}

impl Scratch {
    /// Upper bound on a thread's scratch size, in f32.
    pub const LEN: usize = 4 * TILE_Q * TILE_K + TILE_Q * TILE_K / size_of::<f32>();

    fn new(problem: &AttentionProblem) -> Self {
        let tile = || vec![0.0; problem.seq_q.min(TILE_Q) * problem.seq_k.min(TILE_K)];
        // The forward does not touch `ds`, so its pages are not allocated.
        let drops = problem.options.dropout > 0.0;
        Scratch {
            p: tile(),
            ds: tile(),
            t: problem.options.score_mod.map_or_else(Vec::new, |_| tile()),
            slope: problem.options.softcap.map_or_else(Vec::new, |_| tile()),
            kept: vec![true; if drops { problem.seq_q.min(TILE_Q) * problem.seq_k.min(TILE_K) } else { 0 }],
        }
    }
}

/// A tensor that broadcasts to the shape of the scores and is read without being expanded.
pub struct Broadcast<'a, T> {
    data: &'a [T],
    start: usize,
    strides: [isize; 4],
}

impl<'a, T: Copy> Broadcast<'a, T> {
    pub fn new(data: &'a [T], layout: &Layout) -> Self {
        let stride = |dim: usize| if layout.shape()[dim] == 1 { 0 } else { layout.strides()[dim] };
        Broadcast { data, start: layout.start_offset(), strides: std::array::from_fn(stride) }
    }

    /// Index of the element that belongs to a score.
    #[inline(always)]
    fn index(&self, at: [usize; 4]) -> usize {
        let offset: isize = at.iter().zip(self.strides).map(|(n, stride)| *n as isize * stride).sum();
        self.start.wrapping_add_signed(offset)
    }

    /// Element that belongs to a score.
    #[inline(always)]
    pub fn at(&self, at: [usize; 4]) -> T {
        self.data[self.index(at)]
    }

    /// Applies `f` to each number of `row` and the element that belongs to it. `at` is the position of the row's first number.
    #[inline(always)]
    fn zip(&self, at: [usize; 4], row: &mut [f32], f: impl Fn(&mut f32, T)) {
        let first = self.index(at);
        match self.strides[3] {
            1 => row.iter_mut().zip(&self.data[first..]).for_each(|(x, y)| f(x, *y)),
            0 => row.iter_mut().for_each(|x| f(x, self.data[first])),
            // Strides may be negative: Flex flips without copying.
            stride => {
                let index = |n: usize| first.wrapping_add_signed(n as isize * stride);
                row.iter_mut().enumerate().for_each(|(n, x)| f(x, self.data[index(n)]));
            }
        }
    }
}

/// The bias, in its own dtype.
pub enum Bias<'a> {
    F32(Broadcast<'a, f32>),
    F16(Broadcast<'a, f16>),
    BF16(Broadcast<'a, bf16>),
}

/// Tensors that a function reads.
pub type Tables<'a> = [Option<Broadcast<'a, f32>>; TENSORS];

/// Tensors that the score function and `mask_mod` read.
#[derive(Default)]
pub struct Functions<'a> {
    pub of_score: Tables<'a>,
    pub of_mask: Tables<'a>,
}

/// What an attention call may have beside `q`, `k` and `v`.
#[derive(Default)]
pub struct Optional<'a> {
    pub mask: Option<Broadcast<'a, u8>>,
    pub bias: Option<Bias<'a>>,
    pub heads: Heads<'a>,
    pub functions: Functions<'a>,
    /// Seed of dropout.
    pub seed: Option<[u32; 2]>,
    /// Bands of several sequences in place of the one of the problem.
    pub sequences: Option<&'a Sequences>,
    /// States of the blocks of a block mask.
    pub states: Option<&'a States>,
}

/// An attention call.
pub struct Attention<'a> {
    pub problem: &'a AttentionProblem,
    /// The band, if each batch is one sequence.
    band: Band,
    pub scale: f32,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    optional: Optional<'a>,
}

/// Values for each head.
#[derive(Clone, Copy, Default)]
pub struct Heads<'a> {
    /// `[batch | 1, num_heads_q]`.
    pub slopes: Option<&'a [f32]>,
    /// `[num_heads_q]`.
    pub sinks: Option<&'a [f32]>,
}

impl<'a> Attention<'a> {
    pub fn new(problem: &'a AttentionProblem, [q, k, v]: [Rows<'a>; 3], optional: Optional<'a>) -> Self {
        Attention { problem, band: problem.band(), scale: problem.softmax_scale(), q, k, v, optional }
    }

    /// Sink of a head; −∞ if there is none.
    pub fn sink(&self, h: usize) -> f32 {
        self.optional.heads.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[h])
    }

    /// Index of a head's slope in slopes of this shape.
    pub fn slope_index(&self, [batch, heads]: [usize; 2], b: usize, h: usize) -> usize {
        (if batch == 1 { 0 } else { b }) * heads + h
    }

    /// Band of the sequence that a query belongs to; `None` if it belongs to none.
    fn band_of(&self, b: usize, i: usize) -> Option<&Band> {
        self.optional.sequences.map_or(Some(&self.band), |sequences| sequences.of_query(b, i))
    }

    /// Derivative of a score by its slope: the negated distance between query and key.
    pub fn distance(&self, b: usize, i: usize, j: usize) -> f32 {
        self.band_of(b, i).map_or(0.0, |band| -band.offset(i as u32, j as u32).abs() as f32)
    }

    /// Scale applied to sums of kept probabilities.
    pub fn factor(&self) -> f32 {
        self.optional.seed.map_or(1.0, |_| dropout::factor(self.problem.options.dropout))
    }

    /// Which weights of a tile are kept; `None` if there is no dropout.
    pub fn kept<'s>(&self, tile: Tile, kept: &'s mut [bool]) -> Option<&'s [bool]> {
        let seed = self.optional.seed?;
        let kept = &mut kept[..tile.rows * tile.cols];
        for (i, row) in kept.chunks_exact_mut(tile.cols).enumerate() {
            // In packed or padded sequences, draws depend on the number of the sequence and on positions within it.
            let i = tile.q_start + i;
            let band = self.band_of(tile.b, i).filter(|_| self.optional.sequences.is_some());
            let [sequence, first_q, first_k] =
                band.map_or([tile.b, 0, 0], |band| [band.sequence, band.begin_q, band.begin_k].map(|n| n as usize));
            for (j, kept) in row.iter_mut().enumerate() {
                // Keys before the sequence are hidden in any case.
                let Some(j) = (tile.k_start + j).checked_sub(first_k) else { continue };
                let at = [sequence, tile.h, i - first_q, j].map(|n| n as u32);
                *kept = dropout::keeps(seed, self.problem.options.dropout, at);
            }
        }
        Some(kept)
    }

    /// The tile of this block of queries and this block of keys.
    pub fn tile(&self, b: usize, h: usize, q_block: usize, k_block: usize) -> Tile {
        let (q_start, k_start) = (q_block * TILE_Q, k_block * TILE_K);
        let (rows, cols) = (self.problem.seq_q - q_start, self.problem.seq_k - k_start);
        Tile { b, h, q_start, rows: rows.min(TILE_Q), k_start, cols: cols.min(TILE_K) }
    }

    /// State of the block that contains a tile. Without a block mask, mask and `mask_mod` are always evaluated.
    fn state(&self, tile: Tile) -> u32 {
        self.optional.states.map_or(PARTIAL, |states| states.of(tile))
    }

    /// Blocks of keys that a block of queries of a head sees.
    pub fn k_blocks(&self, b: usize, h: usize, q_block: usize) -> impl Iterator<Item = usize> {
        let seen = self.k_blocks_in_band(b, q_block);
        seen.filter(move |k_block| self.state(self.tile(b, h, q_block, *k_block)) != EMPTY)
    }

    /// Blocks of keys that the band lets a block of queries see.
    fn k_blocks_in_band(&self, b: usize, q_block: usize) -> Range<usize> {
        if let Some(sequences) = self.optional.sequences {
            let keys = sequences.keys(b, q_block * TILE_Q, TILE_Q);
            return keys.start / TILE_K..keys.end.div_ceil(TILE_K);
        }
        let blocks = self.band.k_blocks((q_block * TILE_Q) as u32, TILE_Q as u32, TILE_K as u32);
        blocks.start as usize..blocks.end as usize
    }

    /// Blocks of queries of a head that see a block of keys.
    pub fn q_blocks(&self, b: usize, h: usize, k_block: usize) -> impl Iterator<Item = usize> {
        let seeing = self.q_blocks_in_band(b, k_block);
        seeing.filter(move |q_block| self.state(self.tile(b, h, *q_block, k_block)) != EMPTY)
    }

    /// Blocks of queries that the band lets see a block of keys.
    fn q_blocks_in_band(&self, b: usize, k_block: usize) -> Range<usize> {
        if let Some(sequences) = self.optional.sequences {
            let queries = sequences.queries(b, k_block * TILE_K, TILE_K);
            return queries.start / TILE_Q..queries.end.div_ceil(TILE_Q);
        }
        let blocks = self.band.q_blocks((k_block * TILE_K) as u32, TILE_Q as u32, TILE_K as u32);
        blocks.start as usize..blocks.end as usize
    }

    /// Runs the tasks, on all threads if there is enough work for them.
    pub fn for_each<T: Send>(&self, tasks: impl Iterator<Item = T>, run: impl Fn(&mut Scratch, T) + Sync + Send) {
        const WORTH_WAKING: f64 = 1e6;
        if self.problem.forward_flops() < WORTH_WAKING {
            let mut scratch = Scratch::new(self.problem);
            return tasks.for_each(|task| run(&mut scratch, task));
        }
        let tasks: Vec<T> = tasks.collect();
        tasks.into_par_iter().for_each_init(|| Scratch::new(self.problem), run);
    }

    /// Number of blocks of queries.
    pub fn num_q_blocks(&self) -> usize {
        self.problem.seq_q.div_ceil(TILE_Q)
    }

    pub fn q(&self, tile: Tile) -> Block<'a> {
        self.q.block(tile.b, tile.h, tile.q_start, tile.rows)
    }

    pub fn k(&self, tile: Tile) -> Block<'a> {
        self.k.block(tile.b, tile.h / self.problem.group_size(), tile.k_start, tile.cols)
    }

    pub fn v(&self, tile: Tile) -> Block<'a> {
        self.v.block(tile.b, tile.h / self.problem.group_size(), tile.k_start, tile.cols)
    }

    /// Whether the band hides nothing of a tile.
    fn in_band(&self, tile: Tile) -> bool {
        let Tile { b, q_start, rows, k_start, cols, .. } = tile;
        match self.optional.sequences {
            Some(sequences) => sequences.fully_visible(b, q_start, k_start, rows, cols),
            None => self.band.fully_visible(q_start as u32, k_start as u32, rows as u32, cols as u32),
        }
    }

    /// `c += scale · weights · block`, with a weight for each pair of the tile. A weight of exactly 0, which hidden pairs have, adds
    /// nothing of its row, not even a NaN.
    pub fn accumulate(&self, tile: Tile, c: &mut [f32], scale: f32, weights: Matrix, block: Block) {
        let AttentionOptions { score_mod, mask_mod, .. } = self.problem.options;
        let hides = self.optional.mask.is_some()
            || self.optional.bias.is_some()
            || self.optional.seed.is_some()
            || !self.in_band(tile);
        let hides = hides || score_mod.is_some() || mask_mod.is_some();
        if !hides
            || vectorized(
                #[inline(always)]
                || math::all_finite(block.data),
            )
        {
            return multiply(c, true, scale, weights, block.matrix());
        }
        // The other rows must get the same bits as if these rows were finite.
        let mut numbers = block.data.to_vec();
        for row in numbers.chunks_exact_mut(block.dim).filter(|row| !math::all_finite(row)) {
            row.fill(0.0);
        }
        let rows = numbers.len() / block.dim;
        multiply(c, true, scale, weights, Matrix::new(&numbers, rows, block.dim));
        for (j, row) in block.data.chunks_exact(block.dim).enumerate().filter(|(_, row)| !math::all_finite(row)) {
            for (i, c) in c.chunks_exact_mut(block.dim).take(weights.rows).enumerate() {
                let weight = weights.at(i, j);
                if weight != 0.0 {
                    c.iter_mut().zip(row).for_each(|(c, x)| *c += scale * weight * x);
                }
            }
        }
    }

    /// Calls `f` for each pair of a tile within the band, with the pair's index in the tile, the pair as functions see it, and the values
    /// of `tables`.
    fn for_pairs(&self, tile: Tile, tables: &Tables, mut f: impl FnMut(usize, Pair, Values)) {
        let Tile { b, h, q_start, rows, k_start, cols } = tile;
        for i in 0..rows {
            let Some(band) = self.band_of(b, q_start + i) else { continue };
            let number = band.number(b as u32);
            for j in 0..cols {
                let (n, at) = (i * cols + j, [b, h, q_start + i, k_start + j]);
                let (query, key) = (at[2] as u32, at[3] as u32);
                if band.sees(query, key) {
                    let [a, b] = tables.each_ref().map(|table| table.as_ref().map_or(0.0, |table| table.at(at)));
                    let (i, j) = band.positions(query, key, false);
                    let pair = Pair::of(number, h as u32, i, j);
                    f(n, pair, Values { a, b });
                }
            }
        }
    }

    /// Multiplies the value of each pair by a derivative of the score function at its score `t`, if there is a score function. A value of 0
    /// stays 0, whatever the derivative.
    pub fn times_partial(&self, tile: Tile, t: &[f32], ds: &mut [f32], of: fn(Partials) -> f32) {
        let Some(function) = self.problem.options.score_mod else { return };
        self.for_pairs(tile, &self.optional.functions.of_score, |n, pair, values| {
            if ds[n] != 0.0 {
                ds[n] *= of(function.backward(t[n], pair, values));
            }
        });
    }

    /// Computes the scores of a tile into `s [rows, cols]`, −∞ where hidden; the derivative of the softcap into `slope`; and the scores
    /// before the score function into `t`, if there is one.
    pub fn scores(&self, tile: Tile, s: &mut [f32], t: &mut [f32], slope: &mut [f32]) {
        let Tile { b, h, q_start, rows, k_start, cols } = tile;
        let s = &mut s[..rows * cols];
        multiply(s, false, self.scale, self.q(tile).matrix(), self.k(tile).transposed());
        if let Some(softcap) = self.problem.options.softcap {
            vectorized(
                #[inline(always)]
                || {
                    for (s, slope) in s.iter_mut().zip(slope) {
                        let t = math::tanh(*s / softcap);
                        *s = softcap * t;
                        *slope = 1.0 - t * t;
                    }
                },
            );
        }
        if let Some(function) = self.problem.options.score_mod {
            t[..s.len()].copy_from_slice(s);
            let made = |n: usize, pair, values| s[n] = function.score(s[n], pair, values);
            self.for_pairs(tile, &self.optional.functions.of_score, made);
        }
        let rows_of = |s: &mut [f32], f: &dyn Fn([usize; 4], &mut [f32])| {
            s.chunks_exact_mut(cols).enumerate().for_each(|(i, row)| f([b, h, q_start + i, k_start], row));
        };
        // The bias is added before hiding, so that a NaN in it cannot replace −∞.
        match &self.optional.bias {
            None => {}
            Some(Bias::F32(bias)) => rows_of(s, &|at, row| bias.zip(at, row, |s, bias| *s += bias)),
            Some(Bias::F16(bias)) => rows_of(s, &|at, row| bias.zip(at, row, |s, bias| *s += bias.to_f32())),
            Some(Bias::BF16(bias)) => rows_of(s, &|at, row| bias.zip(at, row, |s, bias| *s += bias.to_f32())),
        }
        if let Some((shape, slopes)) = self.problem.alibi_slopes.zip(self.optional.heads.slopes) {
            let slope = slopes[self.slope_index(shape, b, h)];
            rows_of(s, &|[_, _, i, j], row| {
                row.iter_mut().enumerate().for_each(|(n, s)| *s += slope * self.distance(b, i, j + n));
            });
        }
        let masked = self.state(tile) == PARTIAL;
        if let Some(mask) = self.optional.mask.as_ref().filter(|_| masked) {
            let hide = |s: &mut f32, hidden| *s = if hidden != 0 { f32::NEG_INFINITY } else { *s };
            rows_of(s, &|at, row| mask.zip(at, row, hide));
        }
        if let Some(function) = self.problem.options.mask_mod.filter(|_| masked) {
            self.for_pairs(tile, &self.optional.functions.of_mask, |n, pair, values| {
                if !function.sees(pair, values) {
                    s[n] = f32::NEG_INFINITY;
                }
            });
        }
        if !self.in_band(tile) {
            rows_of(s, &|[_, _, i, j], row| {
                let band = self.band_of(b, i);
                for (n, s) in row.iter_mut().enumerate() {
                    let seen = band.is_some_and(|band| band.sees(i as u32, (j + n) as u32));
                    *s = if seen { *s } else { f32::NEG_INFINITY };
                }
            });
        }
    }
}
