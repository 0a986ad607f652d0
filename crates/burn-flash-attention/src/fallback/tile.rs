//! A tile of scores: up to `TILE_Q` rows, which are queries of one head or of several heads of a group, by `TILE_K` keys.

use super::blocks::States;
use super::math::{self, vectorized};
use super::matrix::{Matrix, multiply};
use super::rows::{Block, Elements, Rows};
use super::sequences::Sequences;
use burn_flex::Layout;
use flash_attention_kernels::blocks::{EMPTY, PARTIAL};
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::mods::{Pair, Partials, TENSORS, Values};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, dropout};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows of a tile. The scores, keys and values of a tile fit a core's private cache, and its products are large enough for the matrix
/// routine to reach full speed.
pub const TILE_Q: usize = 64;
/// Keys in a tile.
pub const TILE_K: usize = 128;

/// Blocks of keys of a split.
const SPLIT_BLOCKS: usize = 4;

/// Parts that the keys are split into in the forward, so that all threads have work where there are few queries, as in decoding. The number
/// depends on the sizes alone, and so do the results.
pub fn num_splits(problem: &AttentionProblem) -> usize {
    if problem.seq_q > TILE_Q { 1 } else { problem.seq_k.div_ceil(SPLIT_BLOCKS * TILE_K).max(1) }
}

/// Whether each key and value is read by one tile alone in the forward.
pub fn reads_once(problem: &AttentionProblem) -> bool {
    problem.seq_q * problem.group_size() <= TILE_Q
}

/// Position and size of a tile.
#[derive(Clone, Copy)]
pub struct Tile {
    pub b: usize,
    /// First query head.
    pub h: usize,
    pub q_start: usize,
    /// Number of queries of each head: `TILE_Q`, or fewer in the last block.
    pub queries: usize,
    /// Number of rows: the queries of one head, then those of the next one.
    pub rows: usize,
    pub k_start: usize,
    /// Number of keys: `TILE_K`, or fewer in the last block.
    pub cols: usize,
}

impl Tile {
    /// Query head and query of a row.
    #[inline(always)]
    pub fn at(&self, row: usize) -> [usize; 2] {
        [self.h + row / self.queries, self.q_start + row % self.queries]
    }
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
    /// Keys or values in f32, where the tensor has halves. Empty until then.
    pub wide: Vec<f32>,
}

impl Scratch {
    /// Upper bound on a thread's scratch size, in f32.
    pub const LEN: usize = 4 * TILE_Q * TILE_K + TILE_Q * TILE_K / size_of::<f32>();

    fn new(problem: &AttentionProblem) -> Self {
        let len = (problem.seq_q * problem.group_size()).min(TILE_Q) * problem.seq_k.min(TILE_K);
        let tile = || vec![0.0; len];
        // The forward does not touch `ds`, so its pages are not allocated.
        let drops = problem.options.dropout > 0.0;
        Scratch {
            p: tile(),
            ds: tile(),
            t: problem.options.score_mod.map_or_else(Vec::new, |_| tile()),
            slope: problem.options.softcap.map_or_else(Vec::new, |_| tile()),
            kept: vec![true; if drops { len } else { 0 }],
            wide: Vec::new(),
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
    q: Rows<&'a [f32]>,
    k: Rows<Elements<'a>>,
    v: Rows<Elements<'a>>,
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
    pub fn new(
        problem: &'a AttentionProblem,
        q: Rows<&'a [f32]>,
        [k, v]: [Rows<Elements<'a>>; 2],
        optional: Optional<'a>,
    ) -> Self {
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
            let [h, i] = tile.at(i);
            let band = self.band_of(tile.b, i).filter(|_| self.optional.sequences.is_some());
            let [sequence, first_q, first_k] =
                band.map_or([tile.b, 0, 0], |band| [band.sequence, band.begin_q, band.begin_k].map(|n| n as usize));
            for (j, kept) in row.iter_mut().enumerate() {
                // Keys before the sequence are hidden in any case.
                let Some(j) = (tile.k_start + j).checked_sub(first_k) else { continue };
                let at = [sequence, h, i - first_q, j].map(|n| n as u32);
                *kept = dropout::keeps(seed, self.problem.options.dropout, at);
            }
        }
        Some(kept)
    }

    /// Query heads of a tile of the forward, where their queries are rows of one tile: keys and values are then read once for all of them.
    pub fn heads_a_tile(&self) -> usize {
        // A block mask may hide a tile from one head and not from another one.
        let several = self.optional.states.is_none() && self.problem.seq_q > 0;
        if several { (TILE_Q / self.problem.seq_q).clamp(1, self.problem.group_size()) } else { 1 }
    }

    /// The tile of this block of queries of one head and this block of keys.
    pub fn tile(&self, b: usize, h: usize, q_block: usize, k_block: usize) -> Tile {
        let (q_start, k_start) = (q_block * TILE_Q, k_block * TILE_K);
        let queries = (self.problem.seq_q - q_start).min(TILE_Q);
        let cols = (self.problem.seq_k - k_start).min(TILE_K);
        Tile { b, h, q_start, queries, rows: queries, k_start, cols }
    }

    /// State of the blocks that a tile belongs to; `None` if they differ. Without a block mask, mask and `mask_mod` are always evaluated.
    fn state(&self, tile: Tile) -> Option<u32> {
        self.optional.states.map_or(Some(PARTIAL), |states| states.of(tile, self.optional.sequences))
    }

    /// Blocks of keys that a block of queries of a head sees.
    pub fn k_blocks(&self, b: usize, h: usize, q_block: usize) -> impl Iterator<Item = usize> {
        let seen = self.k_blocks_in_band(b, q_block);
        seen.filter(move |k_block| self.state(self.tile(b, h, q_block, *k_block)) != Some(EMPTY))
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
        seeing.filter(move |q_block| self.state(self.tile(b, h, *q_block, k_block)) != Some(EMPTY))
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

    /// Runs the tasks, on all threads if there is enough work for them. The calling thread is one of them: it need not wait for others to
    /// wake up.
    pub fn for_each<T: Send>(
        &self,
        tasks: impl Iterator<Item = T> + Send,
        run: impl Fn(&mut Scratch, T) + Sync + Send,
    ) {
        const WORTH_WAKING: f64 = 1e6;
        let scratch = || Scratch::new(self.problem);
        if self.problem.forward_flops() < WORTH_WAKING {
            let mut scratch = scratch();
            return tasks.for_each(|task| run(&mut scratch, task));
        }
        let tasks = Mutex::new(tasks);
        let next = || tasks.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            let mut scratch = scratch();
            while let Some(task) = next() {
                run(&mut scratch, task);
            }
        };
        rayon::in_place_scope(|scope| {
            (1..rayon::current_num_threads()).for_each(|_| scope.spawn(|_| work()));
            work();
        });
    }

    /// The blocks of keys of each split.
    pub fn k_blocks_of_split(&self, split: usize) -> Range<usize> {
        if num_splits(self.problem) == 1 { 0..usize::MAX } else { split * SPLIT_BLOCKS..(split + 1) * SPLIT_BLOCKS }
    }

    /// Number of blocks of queries.
    pub fn num_q_blocks(&self) -> usize {
        self.problem.seq_q.div_ceil(TILE_Q)
    }

    /// Queries of a tile. With several heads, q is contiguous and the tile has all queries of each.
    pub fn q(&self, tile: Tile) -> Block<'a> {
        self.q.block(tile.b, tile.h, tile.q_start, tile.rows)
    }

    pub fn k<'s>(&'s self, tile: Tile, wide: &'s mut Vec<f32>) -> Block<'s> {
        self.k.widened(tile.b, tile.h / self.problem.group_size(), tile.k_start, tile.cols, wide)
    }

    pub fn v<'s>(&'s self, tile: Tile, wide: &'s mut Vec<f32>) -> Block<'s> {
        self.v.widened(tile.b, tile.h / self.problem.group_size(), tile.k_start, tile.cols, wide)
    }

    /// Whether the band hides nothing of a tile.
    fn in_band(&self, tile: Tile) -> bool {
        let Tile { b, q_start, queries, k_start, cols, .. } = tile;
        match self.optional.sequences {
            Some(sequences) => sequences.fully_visible(b, q_start, k_start, queries, cols),
            None => self.band.fully_visible(q_start as u32, k_start as u32, queries as u32, cols as u32),
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
        let hides = hides || score_mod.is_some() || mask_mod.is_some() || self.state(tile).is_none();
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
        let Tile { b, rows, k_start, cols, .. } = tile;
        for row in 0..rows {
            let [h, i] = tile.at(row);
            let Some(band) = self.band_of(b, i) else { continue };
            let number = band.number(b as u32);
            for j in 0..cols {
                let (n, at) = (row * cols + j, [b, h, i, k_start + j]);
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

    /// Computes the scores of a tile into `p [rows, cols]`, −∞ where hidden; the derivative of the softcap into `slope`; and the scores
    /// before the score function into `t`, if there is one.
    pub fn scores(&self, tile: Tile, Scratch { p, t, slope, wide, .. }: &mut Scratch) {
        let Tile { b, rows, k_start, cols, .. } = tile;
        let s = &mut p[..rows * cols];
        multiply(s, false, self.scale, self.q(tile).matrix(), self.k(tile, wide).transposed());
        if let Some(softcap) = self.problem.options.softcap {
            vectorized(
                #[inline(always)]
                || {
                    for (s, slope) in s.iter_mut().zip(slope.iter_mut()) {
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
            s.chunks_exact_mut(cols).enumerate().for_each(|(n, row)| {
                let [h, i] = tile.at(n);
                f([b, h, i, k_start], row);
            });
        };
        // The bias is added before hiding, so that a NaN in it cannot replace −∞.
        match &self.optional.bias {
            None => {}
            Some(Bias::F32(bias)) => rows_of(s, &|at, row| bias.zip(at, row, |s, bias| *s += bias)),
            Some(Bias::F16(bias)) => rows_of(s, &|at, row| bias.zip(at, row, |s, bias| *s += bias.to_f32())),
            Some(Bias::BF16(bias)) => rows_of(s, &|at, row| bias.zip(at, row, |s, bias| *s += bias.to_f32())),
        }
        if let Some((shape, slopes)) = self.problem.alibi_slopes.zip(self.optional.heads.slopes) {
            rows_of(s, &|[_, h, i, j], row| {
                let slope = slopes[self.slope_index(shape, b, h)];
                row.iter_mut().enumerate().for_each(|(n, s)| *s += slope * self.distance(b, i, j + n));
            });
        }
        let state = self.state(tile);
        let masked = matches!(state, None | Some(PARTIAL));
        let shown = if state.is_none() { s.to_vec() } else { Vec::new() };
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
        if let Some(states) = self.optional.states.filter(|_| state.is_none()) {
            self.for_pairs(tile, &Tables::default(), |n, pair, _| {
                match states.at([pair.batch, pair.head, pair.i, pair.j].map(|n| n as usize)) {
                    EMPTY => s[n] = f32::NEG_INFINITY,
                    PARTIAL => {}
                    _ => s[n] = shown[n],
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
