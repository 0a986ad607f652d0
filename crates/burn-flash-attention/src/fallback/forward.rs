//! Forward (FlashAttention-2, arXiv:2307.08691, algorithm 1), one block of queries of one head at a time:
//!
//! ```text
//! m' = max(m, maxⱼ s)     p = exp(s − m')     l = l·exp(m − m') + Σⱼ p     o = o·exp(m − m') + p·v
//! out = o / l             lse = m + ln l
//! ```

use super::math::{self, vectorized};
use super::matrix::Matrix;
use super::tile::{Attention, Scratch, TILE_Q};

/// Returns `out [batch, num_heads_q, seq_q, head_dim_v]` and `lse [batch, num_heads_q, seq_q]`.
pub fn forward(attention: &Attention) -> (Vec<f32>, Vec<f32>) {
    let problem = attention.problem;
    let (seq_q, dim, heads) = (problem.seq_q, problem.head_dim_v, problem.num_heads_q);
    let mut out = vec![0.0; problem.rows() * dim];
    let mut lse = vec![f32::NEG_INFINITY; problem.rows()];
    if !out.is_empty() {
        let heads_out = out.chunks_mut(seq_q * dim).zip(lse.chunks_mut(seq_q)).enumerate();
        let tasks = heads_out.flat_map(|(head, (out, lse))| {
            let blocks = out.chunks_mut(TILE_Q * dim).zip(lse.chunks_mut(TILE_Q)).enumerate();
            blocks.map(move |(q_block, (out, lse))| ([head / heads, head % heads], q_block, out, lse))
        });
        attention.for_each(tasks, |scratch, (head, q_block, out, lse)| {
            block(attention, head, q_block, scratch, out, lse);
        });
    }
    (out, lse)
}

/// Computes one block of queries: `out [rows, head_dim_v]`, initially 0, and `lse [rows]`.
fn block(
    attention: &Attention,
    [b, h]: [usize; 2],
    q_block: usize,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let dim = attention.problem.head_dim_v;
    let Scratch { p, t, slope, kept, .. } = scratch;
    // The sink, if there is one, initialises the row's maximum and sum.
    let sink = attention.sink(h);
    let (mut m, mut l) = ([sink; TILE_Q], [if sink == f32::NEG_INFINITY { 0.0 } else { 1.0f32 }; TILE_Q]);
    for k_block in attention.k_blocks(b, h, q_block) {
        let tile = attention.tile(b, h, q_block, k_block);
        attention.scores(tile, p, t, slope);
        let p = &mut p[..tile.rows * tile.cols];

        // -- update m and l, rescale o
        vectorized(
            #[inline(always)]
            || {
                for (i, (p, o)) in p.chunks_exact_mut(tile.cols).zip(out.chunks_exact_mut(dim)).enumerate() {
                    let row_max = math::max(p);
                    let m_new = if row_max > m[i] { row_max } else { m[i] };
                    // While a row has seen nothing, any finite shift makes every exponential 0.
                    let shift = if m_new == f32::NEG_INFINITY { 0.0 } else { m_new };
                    let rescale = math::exp(m[i] - shift);
                    l[i] = l[i] * rescale + math::exp_sum(p, shift);
                    m[i] = m_new;
                    if rescale != 1.0 {
                        o.iter_mut().for_each(|o| *o *= rescale);
                    }
                }
            },
        );

        if let Some(kept) = attention.kept(tile, kept) {
            p.iter_mut().zip(kept).for_each(|(p, kept)| *p = if *kept { *p } else { 0.0 });
        }
        attention.accumulate(tile, out, attention.factor(), Matrix::new(p, tile.rows, tile.cols), attention.v(tile));
    }
    for (i, (o, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
        // A row that sees nothing keeps its initial `o = 0` and `lse = −∞`.
        if l[i] != 0.0 {
            o.iter_mut().for_each(|o| *o /= l[i]);
            *lse = m[i] + l[i].ln();
        }
    }
}
