//! Forward (FlashAttention-2, arXiv:2307.08691, algorithm 1), one block of queries at a time: of one head, or of the heads of a group that
//! fit a tile together:
//!
//! ```text
//! m' = max(m, maxⱼ s)     p = exp(s − m')     l = l·exp(m − m') + Σⱼ p     o = o·exp(m − m') + p·v
//! out = o / l             lse = m + ln l
//! ```
//!
//! If there are few queries, the keys are split, and the sums of the splits are combined in the order of the keys by the same formula.

use super::math::{self, vectorized};
use super::matrix::Matrix;
use super::tile::{Attention, Scratch, TILE_Q, Tile, num_splits};

/// Returns `out [batch, num_heads_q, seq_q, head_dim_v]` and `lse [batch, num_heads_q, seq_q]`.
pub fn forward(attention: &Attention) -> (Vec<f32>, Vec<f32>) {
    let problem = attention.problem;
    let (rows, dim, splits) = (problem.rows(), problem.head_dim_v, num_splits(problem));
    let mut o = vec![0.0; splits * rows * dim];
    let [mut m, mut l] = [f32::NEG_INFINITY, 0.0].map(|initial| vec![initial; splits * rows]);
    if !o.is_empty() {
        attention.for_each(tasks(attention, Sums { o: &mut o, m: &mut m, l: &mut l }), |scratch, mut task| {
            block(attention, &mut task, scratch);
            if splits == 1 {
                task.sums.finish();
            }
        });
        if splits > 1 {
            let of_splits = Sums { o: &mut o, m: &mut m, l: &mut l }.chunks(rows);
            let whole = of_splits.reduce(|mut sums, split| {
                sums.combine(split);
                sums
            });
            whole.into_iter().for_each(|mut sums| sums.finish());
            for (sums, len) in [(&mut o, rows * dim), (&mut m, rows)] {
                sums.truncate(len);
                sums.shrink_to_fit();
            }
        }
    }
    (o, m)
}

/// Sums of rows over the keys that have been visited.
struct Sums<'a> {
    /// `[rows, head_dim_v]`; at the end the output.
    o: &'a mut [f32],
    /// Maxima of the scores, `[rows]`; at the end lse.
    m: &'a mut [f32],
    /// `[rows]`.
    l: &'a mut [f32],
}

/// A block of queries and one split of the keys.
struct Task<'a> {
    b: usize,
    /// First query head.
    h: usize,
    q_block: usize,
    split: usize,
    /// 0, −∞ and 0 at first.
    sums: Sums<'a>,
}

/// All blocks of queries, for each split of the keys.
fn tasks<'a>(attention: &Attention, sums: Sums<'a>) -> impl Iterator<Item = Task<'a>> + Send {
    let problem = attention.problem;
    let (heads, heads_kv, group, seq_q) =
        (attention.heads_a_tile(), problem.num_heads_kv, problem.group_size(), problem.seq_q);
    sums.chunks(problem.rows()).enumerate().flat_map(move |(split, sums)| {
        sums.chunks(group * seq_q).enumerate().flat_map(move |(head_kv, sums)| {
            let (b, h) = (head_kv / heads_kv, head_kv % heads_kv * group);
            sums.chunks(heads * seq_q).enumerate().flat_map(move |(n, sums)| {
                let blocks = sums.chunks(TILE_Q).enumerate();
                blocks.map(move |(q_block, sums)| Task { b, h: h + n * heads, q_block, split, sums })
            })
        })
    })
}

/// Visits the keys of a task.
fn block(attention: &Attention, Task { b, h, q_block, split, sums }: &mut Task, scratch: &mut Scratch) {
    let (dim, Sums { o, m, l }) = (attention.problem.head_dim_v, sums);
    let rows = m.len();
    let tile = |k_block| Tile { rows, ..attention.tile(*b, *h, *q_block, k_block) };
    // The sink, if there is one, initialises the row's maximum and sum.
    let of_rows = tile(0);
    for (i, (m, l)) in m.iter_mut().zip(l.iter_mut()).enumerate().filter(|_| *split == 0) {
        let sink = attention.sink(of_rows.at(i)[0]);
        (*m, *l) = (sink, if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 });
    }
    let of_split = attention.k_blocks_of_split(*split);
    for k_block in attention.k_blocks(*b, *h, *q_block).filter(|k_block| of_split.contains(k_block)) {
        let tile = tile(k_block);
        attention.scores(tile, scratch);
        let Scratch { p, kept, wide, .. } = scratch;
        let p = &mut p[..tile.rows * tile.cols];

        // -- update m and l, rescale o
        vectorized(
            #[inline(always)]
            || {
                for (i, (p, o)) in p.chunks_exact_mut(tile.cols).zip(o.chunks_exact_mut(dim)).enumerate() {
                    let (shift, rescale) = grow(&mut m[i], math::max(p));
                    l[i] = l[i] * rescale + math::exp_sum(p, shift);
                    if rescale != 1.0 {
                        o.iter_mut().for_each(|o| *o *= rescale);
                    }
                }
            },
        );

        if let Some(kept) = attention.kept(tile, kept) {
            p.iter_mut().zip(kept).for_each(|(p, kept)| *p = if *kept { *p } else { 0.0 });
        }
        let p = Matrix::new(p, tile.rows, tile.cols);
        attention.accumulate(tile, o, attention.factor(), p, attention.v(tile, wide));
    }
}

/// Replaces the maximum `m` by that of it and `other`. Returns what exponentials are relative to from now on, and the factor of earlier sums.
#[inline(always)]
fn grow(m: &mut f32, other: f32) -> (f32, f32) {
    let m_new = if other > *m { other } else { *m };
    // While a row has seen nothing, any finite shift makes every exponential 0.
    let shift = if m_new == f32::NEG_INFINITY { 0.0 } else { m_new };
    let rescale = math::exp(*m - shift);
    *m = m_new;
    (shift, rescale)
}

impl<'a> Sums<'a> {
    /// The sums of each `rows` rows.
    fn chunks(self, rows: usize) -> impl Iterator<Item = Sums<'a>> + Send {
        let dim = self.o.len() / self.m.len();
        let of_rows = self.m.chunks_mut(rows).zip(self.l.chunks_mut(rows));
        self.o.chunks_mut(rows * dim).zip(of_rows).map(|(o, (m, l))| Sums { o, m, l })
    }

    /// Adds the sums of the same rows over other keys.
    fn combine(&mut self, other: Sums) {
        let dim = self.o.len() / self.m.len();
        for (i, (o, other_o)) in self.o.chunks_exact_mut(dim).zip(other.o.chunks_exact(dim)).enumerate() {
            let (shift, rescale) = grow(&mut self.m[i], other.m[i]);
            let of_other = math::exp(other.m[i] - shift);
            self.l[i] = self.l[i] * rescale + other.l[i] * of_other;
            o.iter_mut().zip(other_o).for_each(|(o, other)| *o = *o * rescale + other * of_other);
        }
    }

    /// Turns the sums into the output and lse.
    fn finish(&mut self) {
        let dim = self.o.len() / self.m.len();
        for ((o, m), l) in self.o.chunks_exact_mut(dim).zip(self.m.iter_mut()).zip(self.l.iter()) {
            // A row that sees nothing keeps its initial `o = 0` and `lse = −∞`.
            if *l != 0.0 {
                o.iter_mut().for_each(|o| *o /= l);
                *m += l.ln();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::{Elements, Rows};
    use super::super::tile::Optional;
    use super::*;
    use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};

    /// Output and lse of numbers that depend on the sizes alone, on this many threads.
    fn run([batch, heads_q, heads_kv, seq_q, seq_k, dim]: [usize; 6], threads: usize) -> (Vec<f32>, Vec<f32>) {
        let (q, kv) = ([batch, heads_q, seq_q, dim], [batch, heads_kv, seq_k, dim]);
        let problem = AttentionProblem::new(&q, &kv, &kv, Dtype::F32, AttentionOptions::default()).unwrap();
        let numbers = |shape: [usize; 4], seed: usize| -> Vec<f32> {
            let number = |n: usize| ((n * 7919 + seed * 104_729) % 1009) as f32 / 500.0 - 1.0;
            (0..shape.iter().product()).map(number).collect()
        };
        let (q, k, v) = (numbers(q, 1), numbers(kv, 2), numbers(kv, 3));
        let kv = [&k, &v].map(|data| Rows::contiguous(Elements::F32(data), kv));
        let attention = Attention::new(&problem, Rows::contiguous(&q, problem.q_shape()), kv, Optional::default());
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| forward(&attention))
    }

    /// Of one query of each head, of a few, of more than a tile has rows, and of several tiles of each head.
    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        for sizes in [[1, 8, 2, 1, 1500, 64], [1, 6, 2, 5, 700, 33], [1, 66, 1, 3, 600, 16], [1, 2, 1, 150, 300, 16]] {
            let alone = run(sizes, 1);
            for threads in [2, 3, 8] {
                assert!(run(sizes, threads) == alone, "{sizes:?} on {threads} threads");
            }
        }
    }
}
