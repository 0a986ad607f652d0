//! Backward (FlashAttention-2, arXiv:2307.08691, algorithm 2), with probabilities recomputed from `lse`:
//!
//! ```text
//! p = exp(s − lse)            delta = Σ dout∘out − dlse          dp = dout·vᵀ ∘ z
//! dbias = p∘(dp − delta)      ds = dbias∘∂f/∂t∘slope of the softcap
//! dv = (p∘z)ᵀ·dout            dq = softmax_scale · ds·k          dk = softmax_scale · dsᵀ·q
//! dslope = −Σ dbias∘|i − j|   dsink = −Σ exp(sink − lse) · delta        da = Σ dbias∘∂f/∂a
//! ```
//!
//! `z` is the factor of dropout, and `f` is the score function, which reads the tensor `a`.
//!
//! Each head of k and v is one task, which visits each tile once and computes dq, dk and dv from it. If there are fewer heads than threads,
//! blocks of keys (for dk and dv) and blocks of queries (for dq) are separate tasks: more work, but for all threads, and with the same sums
//! in the same order. If the bias broadcasts, dbias sums over tiles of several tasks, so it is computed separately. The gradients of the
//! tensors of the score function are computed separately as well.

use super::math::{self, vectorized};
use super::matrix::{Matrix, multiply};
use super::rows::Rows;
use super::tile::{Attention, Scratch, TILE_K, TILE_Q, Tile};
use crate::backend::Wanted;
use flash_attention_kernels::AttentionProblem;
use flash_attention_kernels::mods::Partials;

/// Saved output of the forward, and the gradients of the output.
pub struct Saved<'a> {
    /// `[batch, num_heads_q, seq_q]`; +∞ for rows that see nothing, which makes their probabilities 0.
    lse: Vec<f32>,
    /// `[batch, num_heads_q, seq_q]`.
    delta: Vec<f32>,
    dout: Rows<&'a [f32]>,
}

impl<'a> Saved<'a> {
    pub fn new(problem: &AttentionProblem, out: &[f32], lse: &[f32], dout: &'a [f32], dlse: Option<&[f32]>) -> Self {
        let dim = problem.head_dim_v;
        let rows = out.chunks_exact(dim).zip(dout.chunks_exact(dim)).enumerate();
        let delta = rows.map(|(row, (out, dout))| math::dot(out, dout) - dlse.map_or(0.0, |dlse| dlse[row])).collect();
        let lse = lse.iter().map(|&lse| if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse }).collect();
        Saved { lse, delta, dout: Rows::contiguous(dout, problem.o_shape()) }
    }
}

/// The gradients asked for, in f32.
pub struct Gradients {
    pub dq: Option<Vec<f32>>,
    pub dk: Option<Vec<f32>>,
    pub dv: Option<Vec<f32>>,
    pub dbias: Option<Vec<f32>>,
}

pub fn backward(attention: &Attention, saved: &Saved, wanted: Wanted) -> Gradients {
    let problem = attention.problem;
    let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
    let mut gradients = Gradients {
        dq: wanted.dq.then(|| zeros(problem.q_shape())),
        dk: wanted.dk.then(|| zeros(problem.k_shape())),
        dv: wanted.dv.then(|| zeros(problem.v_shape())),
        dbias: problem.bias.filter(|_| wanted.dbias).map(zeros),
    };
    // Without rows or keys, all gradients are 0.
    if problem.rows() == 0 || problem.seq_k == 0 {
        return gradients;
    }
    let Gradients { dq, dk, dv, dbias } = &mut gradients;
    let heads_occupy_threads = problem.batch * problem.num_heads_kv >= rayon::current_num_threads();
    // If the bias does not broadcast, each element of its gradient comes from one tile. The task that computes dq from that tile writes it.
    let none = &mut None;
    let alongside = problem.bias == Some(problem.scores_shape()) && dq.is_some();
    let (dbias, dbias_apart) = if alongside { (dbias, none) } else { (none, dbias) };
    match (dq.is_some(), dk.is_some() || dv.is_some()) {
        (true, true) if heads_occupy_threads => {
            by_keys(attention, saved, problem.seq_k.div_ceil(TILE_K), [dq, dk, dv, dbias]);
        }
        (has_dq, has_dkv) => {
            if has_dkv {
                by_keys(attention, saved, 1, [&mut None, dk, dv, &mut None]);
            }
            if has_dq {
                by_queries(attention, saved, dq, dbias);
            }
        }
    }
    if let (Some(dbias), Some(shape)) = (dbias_apart, problem.bias) {
        summed(attention, saved, shape, dbias, |_, _| {});
    }
    gradients
}

/// Gradient of the first or second tensor of the score function, of this shape.
pub fn score_tensor(attention: &Attention, saved: &Saved, nth: usize, shape: [usize; 4]) -> Vec<f32> {
    let mut gradient = vec![0.0; shape.iter().product()];
    if attention.problem.rows() > 0 && attention.problem.seq_k > 0 {
        let of = [|partials: Partials| partials.a, |partials: Partials| partials.b][nth];
        summed(attention, saved, shape, &mut gradient, |tile, Scratch { ds, t, .. }| {
            attention.times_partial(tile, t, ds, of);
        });
    }
    gradient
}

/// Gradient of the slopes, of this shape: summed for each head, then over the batches that share slopes.
pub fn slopes(attention: &Attention, saved: &Saved, shape: [usize; 2]) -> Vec<f32> {
    let problem = attention.problem;
    let heads = problem.num_heads_q;
    let mut of_heads = vec![0.0f64; problem.batch * heads];
    if problem.rows() > 0 && problem.seq_k > 0 {
        attention.for_each(of_heads.iter_mut().enumerate(), |scratch, (head, sum)| {
            for q_block in 0..attention.num_q_blocks() {
                for k_block in attention.k_blocks(head / heads, head % heads, q_block) {
                    let tile = attention.tile(head / heads, head % heads, q_block, k_block);
                    probabilities(attention, saved, tile, scratch);
                    bias_gradients(attention, saved, tile, scratch);
                    for (i, ds) in scratch.ds.chunks_exact(tile.cols).take(tile.rows).enumerate() {
                        let distance = |j| attention.distance(tile.b, tile.q_start + i, tile.k_start + j);
                        *sum += ds.iter().enumerate().map(|(j, ds)| f64::from(ds * distance(j))).sum::<f64>();
                    }
                }
            }
        });
    }
    let mut slopes = vec![0.0; shape.iter().product()];
    for (head, sum) in of_heads.into_iter().enumerate() {
        slopes[attention.slope_index(shape, head / heads, head % heads)] += sum as f32;
    }
    slopes
}

/// Gradient of the sinks, computed from lse and delta alone.
pub fn sinks(attention: &Attention, saved: &Saved) -> Vec<f32> {
    let problem = attention.problem;
    let of_head = |h: usize| {
        let rows = (0..problem.batch).flat_map(|b| {
            let first = (b * problem.num_heads_q + h) * problem.seq_q;
            first..first + problem.seq_q
        });
        let sum: f64 = rows.map(|row| f64::from((attention.sink(h) - saved.lse[row]).exp() * saved.delta[row])).sum();
        -sum as f32
    };
    (0..problem.num_heads_q).map(of_head).collect()
}

/// Gradients that a tile is accumulated into.
struct Sums<'a> {
    /// `[rows, head_dim]`.
    dq: Option<&'a mut [f32]>,
    /// `[cols, head_dim]`.
    dk: Option<&'a mut [f32]>,
    /// `[cols, head_dim_v]`.
    dv: Option<&'a mut [f32]>,
    /// `[rows, seq_k]`.
    dbias: Option<&'a mut [f32]>,
}

/// One task for each run of `blocks` blocks of keys of a head. With dq or dbias, a run must cover all blocks of the head.
fn by_keys(attention: &Attention, saved: &Saved, blocks: usize, [dq, dk, dv, dbias]: [&mut Option<Vec<f32>>; 4]) {
    let problem = attention.problem;
    let (seq_q, seq_k, group) = (problem.seq_q, problem.seq_k, problem.group_size());
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    let k_blocks = seq_k.div_ceil(TILE_K);
    let tasks_a_head = k_blocks.div_ceil(blocks);
    let tasks = problem.batch * problem.num_heads_kv * tasks_a_head;

    let dq = split(dq, tasks, group * seq_q * dim, group * seq_q * dim);
    let dk = split(dk, tasks, seq_k * dim, blocks * TILE_K * dim);
    let dv = split(dv, tasks, seq_k * dim_v, blocks * TILE_K * dim_v);
    let dbias = split(dbias, tasks, group * seq_q * seq_k, group * seq_q * seq_k);
    let tasks = dq.into_iter().zip(dk).zip(dv.into_iter().zip(dbias)).enumerate();
    attention.for_each(tasks, |scratch, (task, ((mut dq, mut dk), (mut dv, mut dbias)))| {
        let (head, first) = (task / tasks_a_head, task % tasks_a_head * blocks);
        let (b, h_kv) = (head / problem.num_heads_kv, head % problem.num_heads_kv);
        for k_block in first..k_blocks.min(first + blocks) {
            for n in 0..group {
                for q_block in attention.q_blocks(b, h_kv * group + n, k_block) {
                    let tile = attention.tile(b, h_kv * group + n, q_block, k_block);
                    let (q_row, k_row) = (n * seq_q + tile.q_start, (k_block - first) * TILE_K);
                    let sums = Sums {
                        dq: part(&mut dq, q_row, tile.rows, dim),
                        dk: part(&mut dk, k_row, tile.cols, dim),
                        dv: part(&mut dv, k_row, tile.cols, dim_v),
                        dbias: part(&mut dbias, q_row, tile.rows, seq_k),
                    };
                    visit(attention, saved, tile, scratch, sums);
                }
            }
        }
    });
}

/// One task for each block of queries.
fn by_queries(attention: &Attention, saved: &Saved, dq: &mut Option<Vec<f32>>, dbias: &mut Option<Vec<f32>>) {
    let (problem, q_blocks) = (attention.problem, attention.num_q_blocks());
    let (heads, seq_q, seq_k, dim) = (problem.num_heads_q, problem.seq_q, problem.seq_k, problem.head_dim);
    let tasks = problem.batch * heads * q_blocks;
    let dq = split(dq, tasks, seq_q * dim, TILE_Q * dim);
    let dbias = split(dbias, tasks, seq_q * seq_k, TILE_Q * seq_k);
    attention.for_each(dq.into_iter().zip(dbias).enumerate(), |scratch, (task, (mut dq, mut dbias))| {
        let (head, q_block) = (task / q_blocks, task % q_blocks);
        for k_block in attention.k_blocks(head / heads, head % heads, q_block) {
            let tile = attention.tile(head / heads, head % heads, q_block, k_block);
            let sums = Sums { dq: dq.as_deref_mut(), dk: None, dv: None, dbias: dbias.as_deref_mut() };
            visit(attention, saved, tile, scratch, sums);
        }
    });
}

/// Gradient of the bias, or with `times` of a tensor of the score function: the sum over the dimensions that the tensor broadcasts over.
/// One task for each part of the gradient that no other task adds to.
fn summed(
    attention: &Attention,
    saved: &Saved,
    [shape_b, shape_h, shape_q, shape_k]: [usize; 4],
    dbias: &mut [f32],
    times: impl Fn(Tile, &mut Scratch) + Sync + Send,
) {
    let problem = attention.problem;
    let along_q = shape_q == problem.seq_q;
    let (q_blocks, k_blocks) = (attention.num_q_blocks(), problem.seq_k.div_ceil(TILE_K));
    // Blocks of queries if the tensor has rows for them, else blocks of keys.
    let part = if along_q { TILE_Q * shape_k } else { TILE_K };
    let parts = dbias
        .chunks_mut(shape_q * shape_k)
        .enumerate()
        .flat_map(|(head, dbias)| dbias.chunks_mut(part).enumerate().map(move |(n, dbias)| (head, n, dbias)));
    // The index in a dimension of the scores, or the whole dimension if the tensor repeats it.
    let all = |shape: usize, size: usize, index: usize| if shape == 1 { 0..size } else { index..index + 1 };

    attention.for_each(parts, |scratch, (head, n, dbias)| {
        for b in all(shape_b, problem.batch, head / shape_h) {
            for h in all(shape_h, problem.num_heads_q, head % shape_h) {
                for q_block in if along_q { n..n + 1 } else { 0..q_blocks } {
                    let own = if along_q || shape_k == 1 { 0..k_blocks } else { n..n + 1 };
                    for k_block in attention.k_blocks(b, h, q_block).filter(|k_block| own.contains(k_block)) {
                        let tile = attention.tile(b, h, q_block, k_block);
                        probabilities(attention, saved, tile, scratch);
                        bias_gradients(attention, saved, tile, scratch);
                        times(tile, scratch);
                        // Without rows, a part starts at its own block of keys.
                        let column = if along_q { tile.k_start } else { 0 };
                        for (i, ds) in scratch.ds.chunks_exact(tile.cols).take(tile.rows).enumerate() {
                            let row = if along_q { i * shape_k } else { 0 };
                            if shape_k == 1 {
                                dbias[row] += ds.iter().sum::<f32>();
                            } else {
                                dbias[row + column..].iter_mut().zip(ds).for_each(|(dbias, ds)| *dbias += ds);
                            }
                        }
                    }
                }
            }
        }
    });
}

/// Adds the contributions of one tile.
fn visit(attention: &Attention, saved: &Saved, tile: Tile, scratch: &mut Scratch, sums: Sums) {
    let Tile { b, h, q_start, rows, cols, .. } = tile;
    probabilities(attention, saved, tile, scratch);
    if let Some(dv) = sums.dv {
        // `scratch.p` must keep its values, because the gradients of the scores need them.
        let kept = attention.kept(tile, &mut scratch.kept);
        if let Some(kept) = kept {
            let left = scratch.p.iter().zip(kept).map(|(p, kept)| if *kept { *p } else { 0.0 });
            scratch.ds.iter_mut().zip(left).for_each(|(left, p)| *left = p);
        }
        let p = if kept.is_some() { &scratch.ds } else { &scratch.p };
        let p = Matrix::new(p, rows, cols);
        attention.accumulate(tile, dv, attention.factor(), p.transposed(), saved.dout.block(b, h, q_start, rows));
    }
    if sums.dq.is_none() && sums.dk.is_none() {
        return;
    }
    bias_gradients(attention, saved, tile, scratch);
    if let Some(dbias) = sums.dbias {
        let dbias = dbias.chunks_exact_mut(attention.problem.seq_k);
        for (dbias, ds) in dbias.zip(scratch.ds.chunks_exact(cols)) {
            dbias[tile.k_start..tile.k_start + cols].copy_from_slice(ds);
        }
    }
    if attention.problem.options.score_mod.is_some_and(|function| !function.additive()) {
        attention.times_partial(tile, &scratch.t, &mut scratch.ds, |partials| partials.score);
    }
    if attention.problem.options.softcap.is_some() {
        let slope = &scratch.slope[..rows * cols];
        scratch.ds.iter_mut().zip(slope).for_each(|(ds, slope)| *ds = if *ds == 0.0 { 0.0 } else { *ds * slope });
    }
    let ds = Matrix::new(&scratch.ds, rows, cols);
    if let Some(dk) = sums.dk {
        attention.accumulate(tile, dk, attention.scale, ds.transposed(), attention.q(tile));
    }
    if let Some(dq) = sums.dq {
        attention.accumulate(tile, dq, attention.scale, ds, attention.k(tile, &mut scratch.wide));
    }
}

/// Computes `p = exp(s − lse)` into `scratch.p`; 0 where hidden.
fn probabilities(attention: &Attention, saved: &Saved, tile: Tile, scratch: &mut Scratch) {
    attention.scores(tile, scratch);
    let lse = &saved.lse[first_row(attention.problem, tile)..];
    vectorized(
        #[inline(always)]
        || {
            for (p, &lse) in scratch.p.chunks_exact_mut(tile.cols).take(tile.rows).zip(lse) {
                p.iter_mut().for_each(|p| *p = math::exp(*p - lse));
            }
        },
    );
}

/// Computes `p∘(dout·vᵀ − delta)` into `scratch.ds`; 0 where hidden, whatever v and dout contain there.
fn bias_gradients(attention: &Attention, saved: &Saved, tile: Tile, scratch: &mut Scratch) {
    let Tile { b, h, q_start, rows, cols, .. } = tile;
    let dout = saved.dout.block(b, h, q_start, rows);
    multiply(&mut scratch.ds, false, 1.0, dout.matrix(), attention.v(tile, &mut scratch.wide).transposed());
    if let Some(kept) = attention.kept(tile, &mut scratch.kept) {
        let factor = attention.factor();
        scratch.ds.iter_mut().zip(kept).for_each(|(dp, kept)| *dp = if *kept { *dp * factor } else { 0.0 });
    }
    let delta = &saved.delta[first_row(attention.problem, tile)..];
    vectorized(
        #[inline(always)]
        || {
            let tiles = scratch.ds.chunks_exact_mut(cols).zip(scratch.p.chunks_exact(cols)).take(rows);
            for ((ds, p), &delta) in tiles.zip(delta) {
                ds.iter_mut().zip(p).for_each(|(ds, &p)| *ds = if p == 0.0 { 0.0 } else { p * (*ds - delta) });
            }
        },
    );
}

/// First row of the tile, counted over batches and heads.
fn first_row(problem: &AttentionProblem, tile: Tile) -> usize {
    (tile.b * problem.num_heads_q + tile.h) * problem.seq_q + tile.q_start
}

/// Splits the `head_len` numbers of each head into parts of `len`, one for each task. Without data, returns `None` for each task.
fn split(data: &mut Option<Vec<f32>>, tasks: usize, head_len: usize, len: usize) -> Vec<Option<&mut [f32]>> {
    match data {
        Some(data) => data.chunks_mut(head_len).flat_map(|head| head.chunks_mut(len)).map(Some).collect(),
        None => (0..tasks).map(|_| None).collect(),
    }
}

/// `rows` rows of `dim` numbers, from row `start` on.
fn part<'a>(data: &'a mut Option<&mut [f32]>, start: usize, rows: usize, dim: usize) -> Option<&'a mut [f32]> {
    data.as_deref_mut().map(|data| &mut data[start * dim..][..rows * dim])
}
