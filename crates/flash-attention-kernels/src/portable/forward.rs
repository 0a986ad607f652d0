//! Forward: `o = softmax(scores) · v` and its log-sum-exp, one thread block for each block of queries of a head.
//!
//! ```text
//! for each block of keys that the queries see:
//!     S = Q Kᵀ, turned into scores      m' = max(m, rowmax S)      P = exp(S − m')
//!     l = exp(m − m')·l + rowsum P      O = exp(m − m')·O + P V
//! o = O / l      lse = m + ln l
//! ```
//!
//! Each thread sums `l` over its own columns only; the sums of a row meet once, at the end. `m` must be shared every time.

use super::scores::{TileAt, finish_scores};
use super::tile::*;
use super::{Blueprint, Grid};
use crate::blocks::visits;
use crate::mask::Band;
use crate::score::{Factor, Score};
use crate::softmax::{HIDDEN, begin, lse_bits, normalizer, weight};
use cubecl::prelude::*;

/// `q [B, H, Sq, D]`, `k [B, Hkv, Sk, D]`, `v [B, Hkv, Sk, Dv]` to `o [B, H, Sq, Dv]` and the bits of `lse [B, H, Sq]`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn forward<F: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    o: &mut Tensor<Vector<F, N>>,
    lse: &mut Tensor<u32>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let tile = comptime!(blueprint.tile);
    let (tile_q, tile_k) = comptime!((tile.tile_q as u32, tile.tile_k as u32));
    let quads = comptime!(tile.micro_q() / WIDTH);
    let me = unit(tile);

    let mut panel_a = Shared::<[Vec4]>::new_slice(comptime!(tile.panel_a()));
    let mut panel_b = Shared::<[Vec4]>::new_slice(comptime!(tile.panel_b(tile.tile_k)));
    let mut panel_p = Shared::<[Vec4]>::new_slice(comptime!(tile.tile_q * TileShape::pitch(tile.tile_k)));
    let mut board = Shared::<[Vec4]>::new_slice(comptime!(tile.board()));

    let work = grid.work(CUBE_POS, &score.extras, &band, tile_q, false);
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let q_start = work.start;
    let head_kv = work.head / grid.group_size as usize;
    let q_at = matrix(q, work.batch, work.head);
    let k_at = matrix(k, work.batch, head_kv);
    let v_at = matrix(v, work.batch, head_kv);

    let mut s = Array::<f32>::new(comptime!(tile.micro_q() * tile.micro_k()));
    let mut factors = Array::<f32>::new(comptime!(blueprint.factors()));
    let mut acc = Array::<Vec4>::new(comptime!(tile.micro_q() * tile.groups(blueprint.head_dim_v)));
    let mut m = Array::<Vec4>::new(quads);
    let mut l = Array::<Vec4>::new(quads);
    #[unroll]
    for n in 0..comptime!(tile.micro_q() * tile.groups(blueprint.head_dim_v)) {
        acc[n] = Vec4::new(0.0f32);
    }
    #[unroll]
    for n in 0..quads {
        let (first, sum) = begin(&score, work.head, me.x == 0);
        m[n] = Vec4::new(first);
        l[n] = Vec4::new(sum);
    }
    let slope = score.extras.slope(work.batch, work.head);

    let extras = score.extras;
    let visits = visits(&extras, &band, work.batch, work.head, q_start, tile_q, tile_k, false);
    let mut ahead = Ahead::new(tile.tile_k, tile);
    let head_dim = comptime!(blueprint.head_dim);
    let first = visits.tile(0u32, &extras, &band, tile_q, tile_k, false).start;
    ahead.ask_scores(
        q,
        &q_at,
        q_start,
        band.after_queries(),
        k,
        &k_at,
        first,
        band.after_keys(),
        0usize,
        head_dim,
        tile,
    );
    for nth in 0..visits.count {
        let visit = visits.tile(nth, &extras, &band, tile_q, tile_k, false);
        let (k_start, fully_visible, masked) = (visit.start, visit.fully_visible, visit.masked);
        let (batch, head) = (work.batch, work.head);
        let at = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };

        // -- scores
        scores(
            q,
            &q_at,
            q_start,
            band.after_queries(),
            k,
            &k_at,
            k_start,
            band.after_keys(),
            &mut panel_a,
            &mut panel_b,
            &mut ahead,
            &mut s,
            me,
            head_dim,
            blueprint.tf32,
            tile,
        );
        ahead.ask_right(v, &v_at, k_start, band.after_keys(), 0usize, tile.tile_k, blueprint.head_dim_v, tile);
        finish_scores(
            &mut s,
            &mut factors,
            &score,
            &band,
            &mask,
            &bias,
            &at,
            !fully_visible || comptime!(blueprint.bias) || comptime!(blueprint.mask) && masked,
            me,
            Factor::One,
            tile,
        );

        // -- the rows' new maxima
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

        // -- P, and what it adds to l
        share_weights(&s, &m, &mut l, &alpha, &mut panel_p, &score, &at, me, tile);
        rescale(&mut acc, &alpha, comptime!(tile.groups(blueprint.head_dim_v)), comptime!(tile.micro_q()));

        // -- O
        let next = visits.tile(nth + 1, &extras, &band, tile_q, tile_k, false).start;
        ahead.ask_scores(
            q,
            &q_at,
            q_start,
            band.after_queries(),
            k,
            &k_at,
            next,
            band.after_keys(),
            0usize,
            head_dim,
            tile,
        );
        accumulate(
            &panel_p,
            v,
            &v_at,
            k_start,
            band.after_keys(),
            &mut panel_b,
            &mut ahead,
            &mut acc,
            !fully_visible || comptime!(blueprint.mask),
            me,
            tile.tile_q,
            tile.tile_k,
            blueprint.head_dim_v,
            tile,
        );
    }

    // -- the sums of a row meet
    sync_cube();
    #[unroll]
    for n in 0..quads {
        board[me.x as usize * comptime!(tile.tile_q / WIDTH) + me.y as usize * quads + n] = l[n];
    }
    sync_cube();
    let mut factors = Array::<Vec4>::new(quads);
    let lse_at = work.batch * lse.stride(0) + work.head * lse.stride(1);
    let lse_step = lse.stride(2);
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
            let row = q_start + me.y * comptime!(tile.micro_q() as u32) + comptime!((n * WIDTH + lane) as u32);
            let sum = total.extract(lane);
            factor.insert(lane, normalizer(sum) * score.extras.dropout.scale());
            if me.x == 0 && band.is_query(row) {
                lse[lse_at + row as usize * lse_step] = lse_bits(m[n].extract(lane), sum);
            }
        }
        factors[n] = factor;
    }
    let o_at = matrix(&*o, work.batch, work.head);
    store(o, &o_at, q_start, band.after_queries(), &acc, &factors, me, tile.tile_q, blueprint.head_dim_v, tile);
}

/// Each thread's maxima over its own columns, for all threads of the row to read.
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

/// `P = exp(S − m)`, what is left of it, into its panel, and `l = α·l + rowsum P` over this thread's columns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn share_weights(
    s: &Array<f32>,
    m: &Array<Vec4>,
    l: &mut Array<Vec4>,
    alpha: &Array<Vec4>,
    panel_p: &mut Shared<[Vec4]>,
    score: &Score,
    at: &TileAt,
    me: Unit,
    #[comptime] tile: TileShape,
) {
    let (micro_q, micro_k) = comptime!((tile.micro_q(), tile.micro_k()));
    let pitch = comptime!(TileShape::pitch(tile.tile_k));
    #[unroll]
    for n in 0..comptime!(micro_q / WIDTH) {
        let mut sums = l[n] * alpha[n];
        #[unroll]
        for lane in 0..WIDTH {
            let i = comptime!(n * WIDTH + lane);
            let highest = m[n].extract(lane);
            let mut sum = sums.extract(lane);
            #[unroll]
            for quad in 0..comptime!(micro_k / WIDTH) {
                let mut p = Vec4::new(0.0f32);
                let row = me.y as usize * micro_q + i;
                let column = me.x as usize * micro_k + comptime!(quad * WIDTH);
                let (query, key) = (at.q_start + row as u32, at.k_start + column as u32);
                let kept =
                    score.extras.dropout.keeps_four_of(&at.band, at.batch as u32, at.head as u32, query, key, false);
                #[unroll]
                for j in 0..WIDTH {
                    let w = weight(s[comptime!(i * micro_k + quad * WIDTH + j)], highest);
                    sum += w;
                    p.insert(j, score.extras.dropout.apply(w, kept & comptime!(1u32 << j) != 0));
                }
                panel_p[row * pitch + me.x as usize * comptime!(micro_k / WIDTH) + quad] = p;
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
