//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each block of keys that the queries see:
//!     S = Q Kᵀ, turned into scores      m' = max(m, rowmax S)      P = exp(S − m')
//!     l = exp(m − m')·l + rowsum P      O = exp(m − m')·O + P V
//! o = O / l      lse = m + ln l
//! ```
//!
//! Each thread sums `l` over its own columns only, and the threads of a row add their sums once, at the end. They share `m` for every
//! tile.

use super::Blueprint;
use super::scores::apply_score_mod;
use super::tile::*;
use crate::blocks::{TileSize, visits};
use crate::dropout::Dropout;
use crate::fragment::{ForwardOutputs, Grid, Qkv, ScalarScores, TileAt, Vec4, WIDTH, filled, row_start, zeros};
use crate::softmax::{HIDDEN, lse_bits, normalizer, weight};
use cubecl::prelude::*;

/// Computes `o [B, H, Sq, Dv]` and the bits of `lse [B, H, Sq]` from Q, K and V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn forward<F: Float, M: Numeric, N: Size>(
    inputs: Qkv<F, N>,
    scores: ScalarScores<F, M>,
    outputs: ForwardOutputs<F, N>,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let tile = comptime!(blueprint.tile);
    let (tile_q, tile_k, head_dim_v) = comptime!((tile.tile_q as u32, tile.tile_k as u32, blueprint.head_dim_v));
    let quads = comptime!(tile.micro_q() / WIDTH);
    let (micro_q, groups) = comptime!((tile.micro_q(), tile.groups(head_dim_v)));
    let mut panels = Panels::new(tile.tile_q, tile.tile_k, blueprint);
    let mut board = Shared::<[Vec4]>::new_slice(comptime!(tile.board()));
    let me = panels.me;

    let work = grid.work(CUBE_POS, &scores.score.extras, &scores.band, tile_q, false);
    if work.is_none {
        terminate!();
    }
    let of_head = scores.head(work.batch, work.head, work.head / grid.group_size as usize, work.band, false);

    let mut s = Array::<f32>::new(comptime!(tile.micro()));
    let mut factors = Array::<f32>::new(comptime!(blueprint.factors()));
    let mut acc = zeros(comptime!(micro_q * groups));
    let (first, sum) = scores.score.begin(work.head, me.x == 0);
    let mut m = filled::<Vec4>(Vec4::new(first), quads);
    let mut l = filled::<Vec4>(Vec4::new(sum), quads);

    let size = comptime!(TileSize { rows: tile_q, columns: tile_k, keys: false });
    let visits = visits(&scores.score.extras, &work.band, work.batch, work.head, work.start, size);
    let first = of_head.tile(work.start, &visits.tile(0u32), false);
    panels.ask_scores(&first.queries(inputs.q), &first.keys(inputs.k), blueprint.head_dim);
    for nth in 0..visits.count {
        let at = of_head.tile(work.start, &visits.tile(nth), false);

        // -- scores
        panels.products(&at.queries(inputs.q), &at.keys(inputs.k), &mut s, blueprint.head_dim);
        panels.ask_right(&at.keys(inputs.v), head_dim_v);
        apply_score_mod(&mut s, &mut factors, &scores, &at, me, blueprint);

        // -- new maxima of the rows
        share_maxima(&s, &mut board, me, tile);
        sync_cube();
        let mut alpha = Array::<Vec4>::new(quads);
        #[unroll]
        for n in 0..quads {
            let mut highest = m[n];
            #[unroll]
            for x in 0..tile.units_k {
                highest = max(highest, board[comptime!(x * tile.tile_q / WIDTH) + me.y as usize * quads + n]);
            }
            alpha[n] = Vec4::exp(m[n] - highest);
            m[n] = highest;
        }

        // -- P and l
        weigh(&mut s, &m, &mut l, &alpha, &scores.score.extras.dropout, &at, me, tile);
        panels.share(&s, false);
        rescale(&mut acc, &alpha, groups, micro_q);

        // -- O
        let next = of_head.tile(work.start, &visits.tile(nth + 1), false);
        panels.ask_scores(&next.queries(inputs.q), &next.keys(inputs.k), blueprint.head_dim);
        panels.accumulate(&at.keys(inputs.v), &mut acc, scores.hide(&at), head_dim_v);
    }

    // -- l of whole rows, lse and O / l
    sync_cube();
    #[unroll]
    for n in 0..quads {
        board[me.x as usize * comptime!(tile.tile_q / WIDTH) + me.y as usize * quads + n] = l[n];
    }
    sync_cube();
    let mut factors = Array::<Vec4>::new(quads);
    let lse = outputs.lse;
    #[unroll]
    for n in 0..quads {
        let mut total = Vec4::new(0.0f32);
        #[unroll]
        for x in 0..tile.units_k {
            total += board[comptime!(x * tile.tile_q / WIDTH) + me.y as usize * quads + n];
        }
        let mut factor = Vec4::new(0.0f32);
        #[unroll]
        for lane in 0..WIDTH {
            let row = work.start + me.y * comptime!(tile.micro_q() as u32) + comptime!((n * WIDTH + lane) as u32);
            let sum = total.extract(lane);
            factor.insert(lane, normalizer(sum) * scores.score.extras.dropout.scale());
            if me.x == 0 && work.band.is_query(row) {
                let at = row_start(&*lse, work.batch, work.head, row);
                lse[at] = lse_bits(m[n].extract(lane), sum);
            }
        }
        factors[n] = factor;
    }
    panels.store(outputs.o, &work.rows(false), &acc, &factors, head_dim_v);
}

/// Writes a thread's row maxima over its own columns to the board, for all threads of the row.
#[cube]
fn share_maxima(s: &Array<f32>, board: &mut Shared<[Vec4]>, me: Unit, #[comptime] tile: TileShape) {
    let micro_k = comptime!(tile.micro_k());
    let quads = comptime!(tile.micro_q() / WIDTH);
    #[unroll]
    for n in 0..quads {
        let mut highest = Vec4::new(HIDDEN);
        #[unroll]
        for lane in 0..WIDTH {
            let mut value = HIDDEN.runtime();
            #[unroll]
            for j in 0..micro_k {
                value = max(value, s[comptime!((n * WIDTH + lane) * micro_k + j)]);
            }
            highest.insert(lane, value);
        }
        board[me.x as usize * comptime!(tile.tile_q / WIDTH) + me.y as usize * quads + n] = highest;
    }
}

/// Turns a thread's scores into `P = exp(S − m)`, after dropout. Updates `l = α·l + rowsum P`, before dropout, over its columns.
#[cube]
fn weigh(
    s: &mut Array<f32>,
    m: &Array<Vec4>,
    l: &mut Array<Vec4>,
    alpha: &Array<Vec4>,
    dropout: &Dropout,
    at: &TileAt,
    me: Unit,
    #[comptime] tile: TileShape,
) {
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    #[unroll]
    for n in 0..comptime!(micro_q / WIDTH) {
        let mut sums = l[n] * alpha[n];
        #[unroll]
        for lane in 0..WIDTH {
            let i = comptime!(n * WIDTH + lane);
            let highest = m[n].extract(lane);
            let mut sum = sums.extract(lane);
            let query = at.q_start + me.y * comptime!(micro_q as u32) + comptime!(i as u32);
            #[unroll]
            for quad in 0..comptime!(micro_k / WIDTH) {
                let key = at.k_start + me.x * comptime!(micro_k as u32) + comptime!((quad * WIDTH) as u32);
                let kept = dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, query, key, false);
                #[unroll]
                for j in 0..WIDTH {
                    let e = comptime!(i * micro_k + quad * WIDTH + j);
                    let w = weight(s[e], highest);
                    sum += w;
                    s[e] = dropout.apply(w, kept & comptime!(1u32 << j) != 0);
                }
            }
            sums.insert(lane, sum);
        }
        l[n] = sums;
    }
}

/// Multiplies each of a thread's accumulated rows by its factor.
#[cube]
fn rescale(acc: &mut Array<Vec4>, factors: &Array<Vec4>, #[comptime] groups: usize, #[comptime] micro: usize) {
    #[unroll]
    for i in 0..micro {
        let factor = factors[comptime!(i / WIDTH)].extract(comptime!(i % WIDTH));
        #[unroll]
        for group in 0..groups {
            acc[comptime!(i * groups + group)] *= Vec4::new(factor);
        }
    }
}
