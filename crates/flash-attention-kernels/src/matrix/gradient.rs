//! Gradients: `dq`, one thread block for each block of queries of a head, or `dk` and `dv`, one for each block of keys.
//!
//! ```text
//! Dq      for each tile of keys that the queries see:
//!             S = Q Kᵀ    dP = dO Vᵀ    P = exp(S − lse)    dS = P ∘ (dP − delta) ∘ slope    dQ += dS K
//! DkDv    for each query head of the group and each tile of queries that see the keys:
//!             Sᵀ = K Qᵀ   dPᵀ = V dOᵀ   Pᵀ = exp(Sᵀ − lse)  dSᵀ = Pᵀ ∘ (dPᵀ − delta) ∘ slope
//!             dV += Pᵀ dO               dK += dSᵀ Q
//! ```
//!
//! The second is the first with queries and keys in each other's places and one product more; what each tensor is called here:
//! [`Role`](crate::matrix::Role). (FlashAttention-2, arXiv:2307.08691, algorithm 2.) Every sum is taken in a fixed order.

use super::tile::*;
use super::{Blueprint, MatrixTile, WIDTH};
use crate::blocks::visits;
use crate::mask::Band;
use crate::portable::Grid;
use crate::portable::scores::{TileAt, finish_score};
use crate::portable::tile::matrix;
use crate::score::{Factor, Score};
use crate::softmax::weight;
use cubecl::prelude::*;

/// Rows `q`, `d` and columns `k`, `v`, all `[B, H, S, D]` or `[…, Dv]` as [`Role`](crate::matrix::Role) names them, with
/// `stats [2, B · H · Sq]` to `dk`, of the shape of `q`, and `dv`, of that of `d`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn gradient<E: Float, M: Numeric, N: Size>(
    q: &Tensor<Vector<E, N>>,
    d: &Tensor<Vector<E, N>>,
    k: &Tensor<Vector<E, N>>,
    v: &Tensor<Vector<E, N>>,
    stats: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<E>>,
    dk: ComptimeOption<&mut Tensor<Vector<E, N>>>,
    dv: ComptimeOption<&mut Tensor<Vector<E, N>>>,
    score: Score,
    band: Band,
    grid: Grid,
    #[comptime] blueprint: Blueprint,
    #[define(E, M)] _types: [ElemType; 2],
) {
    let (tile, role) = comptime!((blueprint.tile, blueprint.role));
    let (rows, columns) = comptime!((tile.rows() as u32, tile.columns as u32));
    let (head_dim, head_dim_v) = comptime!((blueprint.head_dim, blueprint.head_dim_v));
    let me = Place::here();
    let mut panels = Panels::<E>::new(blueprint);
    let work = grid.work(CUBE_POS, &score.extras, &band, rows, role.is_transposed());
    if work.is_none {
        terminate!();
    }
    let band = work.band;
    let start = work.start;
    let (queries_end, keys_end) = (band.after_queries(), band.after_keys());
    let rows_end = if comptime!(role.is_transposed()) { keys_end } else { queries_end };
    let columns_end = if comptime!(role.is_transposed()) { queries_end } else { keys_end };
    let group_size = grid.group_size as usize;

    let q_at = matrix(q, work.batch, work.head);
    let d_at = matrix(d, work.batch, work.head);
    let keep = operands(q, &q_at, start, rows_end, &mut panels.k, me, head_dim, tile);
    let keep_d = if comptime!(role.differentiates()) {
        operands(d, &d_at, start, rows_end, &mut panels.v, me, head_dim_v, tile)
    } else {
        Sequence::new()
    };
    let mut acc = accumulator(comptime!(if role.differentiates() { head_dim } else { 0 }), tile);
    let mut acc_v = accumulator(comptime!(if dv.is_some() { head_dim_v } else { 0 }), tile);

    // Heads that stream by: the query heads of a key head, or the key head of a query head.
    let streams = if comptime!(role.is_transposed()) { group_size } else { 1usize.runtime() };
    let extras = score.extras;
    for member in 0..streams {
        let stream =
            if comptime!(role.is_transposed()) { work.head * group_size + member } else { work.head / group_size };
        let k_at = matrix(k, work.batch, stream);
        let v_at = matrix(v, work.batch, stream);
        let (head, heads) = if comptime!(role.is_transposed()) {
            (stream, grid.heads as usize * group_size)
        } else {
            (work.head, grid.heads as usize)
        };
        let stats_row = (work.batch * heads + head) * band.seq_q as usize;
        let slope = score.extras.slope(work.batch, head);
        let batch = work.batch;
        let visits = visits(&extras, &band, batch, head, start, rows, columns, role.is_transposed());
        for nth in 0..visits.count {
            let visit = visits.tile(nth, &extras, &band, rows, columns, role.is_transposed());
            let (first, fully_visible, masked) = (visit.start, visit.fully_visible, visit.masked);
            let (q_start, k_start) = if comptime!(role.is_transposed()) { (first, start) } else { (start, first) };
            let at = TileAt { batch, head, q_start, k_start, slope, band, masked, transposed: false };

            // -- the tile
            sync_cube();
            let dirty_k = stage(k, &k_at, first, columns_end, &mut panels.k, head_dim, tile);
            let dirty_v = stage(v, &v_at, first, columns_end, &mut panels.v, head_dim_v, tile);
            tell_staged(dirty_k || dirty_v, &mut panels.flags, me);
            sync_cube();
            let dirty = was_staged(&panels.flags, tile);

            // -- P
            scores(&keep, &panels.k, &mut panels.board, me, head_dim, tile);
            sync_plane();
            let of_unit = comptime!(tile.rows_of_unit());
            let mut weighed = Sequence::<Row>::new();
            #[unroll]
            for nth in 0..of_unit {
                let s = read_row(&panels.board, me, nth, tile);
                let row = Row::weighed(
                    s,
                    stats,
                    &score,
                    &band,
                    &mask,
                    &bias,
                    &at,
                    stats_row,
                    !fully_visible || comptime!(blueprint.bias) || comptime!(blueprint.mask) && masked,
                    me,
                    nth,
                    blueprint,
                );
                if comptime!(dv.is_some()) {
                    write_row(&row.left(&score, tile), &mut panels.weights, me, nth, tile);
                }
                weighed.push(row);
            }
            sync_plane();
            if comptime!(dv.is_some()) {
                let (board, weights) = (&mut panels.board, &panels.weights);
                accumulate(&mut acc_v, weights, &panels.v, board, dirty, me, head_dim_v, tile);
                sync_plane();
            }

            // -- dS
            if comptime!(role.differentiates()) {
                scores(&keep_d, &panels.v, &mut panels.board, me, head_dim_v, tile);
                sync_plane();
                #[unroll]
                for nth in 0..of_unit {
                    let row = weighed.index_mut(nth);
                    row.differentiate(
                        &read_row(&panels.board, me, nth, tile),
                        stats,
                        stats_row,
                        &score,
                        &band,
                        &at,
                        me,
                        nth,
                        blueprint,
                    );
                    write_row(&row.weights, &mut panels.weights, me, nth, tile);
                }
                sync_plane();
                accumulate(&mut acc, &panels.weights, &panels.k, &mut panels.board, dirty, me, head_dim, tile);
            }
        }
    }

    let mut factors = Array::<f32>::new(comptime!(tile.rows_of_unit()));
    #[comptime]
    if let ComptimeOption::Some(dk) = dk {
        #[unroll]
        for nth in 0..comptime!(tile.rows_of_unit()) {
            factors[nth] = score.scale;
        }
        let at = matrix(&*dk, work.batch, work.head);
        write(dk, &at, start, rows_end, &acc, &mut panels.board, &factors, me, head_dim, tile);
    }
    #[comptime]
    if let ComptimeOption::Some(dv) = dv {
        #[unroll]
        for nth in 0..comptime!(tile.rows_of_unit()) {
            factors[nth] = score.extras.dropout.scale();
        }
        let at = matrix(&*dv, work.batch, work.head);
        write(dv, &at, start, rows_end, &acc_v, &mut panels.board, &factors, me, head_dim_v, tile);
    }
}

/// A thread's part of a row of the tile.
#[derive(CubeType)]
struct Row {
    /// `P`, then `dS`.
    weights: Array<f32>,
    /// What gradients of scores are multiplied by, if by anything.
    factors: Array<f32>,
    /// Which of them dropout keeps, where there is any.
    kept: Array<bool>,
}

#[cube]
impl Row {
    /// From products `s`.
    #[allow(clippy::too_many_arguments)]
    fn weighed<E: Float, M: Numeric>(
        s: Array<f32>,
        stats: &Tensor<f32>,
        score: &Score,
        band: &Band,
        mask: &ComptimeOption<&Tensor<M>>,
        bias: &ComptimeOption<&Tensor<E>>,
        at: &TileAt,
        stats_row: usize,
        careful: bool,
        me: Place,
        #[comptime] nth: usize,
        #[comptime] blueprint: Blueprint,
    ) -> Row {
        let tile = comptime!(blueprint.tile);
        let len = comptime!(tile.vectors_of_unit() * WIDTH);
        let mut weights = Array::<f32>::new(len);
        let factor = comptime!(blueprint.factor);
        let mut factors = Array::<f32>::new(comptime!(if factor == Factor::One { 1 } else { len }));
        let mut kept = Array::<bool>::new(comptime!(if score.extras.dropout.seed.is_some() { len } else { 1 }));
        #[unroll]
        for n in 0..len {
            let t = score.of(s[n]);
            weights[n] = t;
            if comptime!(factor != Factor::One) {
                let (i, j) = pair(at, me, nth, n, blueprint);
                factors[n] = score.factor(t, &at.place(i, j), band, factor);
            }
        }
        #[unroll]
        for n in 0..len {
            let (i, j) = pair(at, me, nth, n, blueprint);
            if careful || comptime!(score.differs()) {
                weights[n] = finish_score(weights[n], score, band, mask, bias, at, i, j);
            }
            let lse = select(band.is_query(i), stats[stats_row + band.query_within(i) as usize], f32::MAX);
            weights[n] = weight(weights[n], lse);
            if comptime!(score.extras.dropout.seed.is_some()) {
                kept[n] = score.extras.dropout.keeps_of(&at.band, at.batch as u32, at.head as u32, i, j, false);
            }
        }
        Row { weights, factors, kept }
    }

    /// What dropout leaves of the weights.
    fn left(&self, score: &Score, #[comptime] tile: MatrixTile) -> Array<f32> {
        let len = comptime!(tile.vectors_of_unit() * WIDTH);
        let mut left = Array::<f32>::new(len);
        #[unroll]
        for n in 0..len {
            left[n] = self.weights[n];
            if comptime!(score.extras.dropout.seed.is_some()) {
                left[n] = score.extras.dropout.apply(self.weights[n], self.kept[n]);
            }
        }
        left
    }

    /// Goes on to `dS`, with the row of `dP`.
    #[allow(clippy::too_many_arguments)]
    fn differentiate(
        &mut self,
        dp: &Array<f32>,
        stats: &Tensor<f32>,
        stats_row: usize,
        score: &Score,
        band: &Band,
        at: &TileAt,
        me: Place,
        #[comptime] nth: usize,
        #[comptime] blueprint: Blueprint,
    ) {
        let all = stats.shape(1);
        #[unroll]
        for n in 0..comptime!(blueprint.tile.vectors_of_unit() * WIDTH) {
            let (i, _) = pair(at, me, nth, n, blueprint);
            let delta = stats[all + stats_row + band.query_within(i) as usize];
            let p = self.weights[n];
            let mut of_kept = dp[n];
            if comptime!(score.extras.dropout.seed.is_some()) {
                of_kept = score.extras.dropout.backward(dp[n], self.kept[n]);
            }
            let mut ds = p * (of_kept - delta);
            if comptime!(blueprint.factor != Factor::One) {
                ds *= self.factors[n];
            }
            // What is hidden has no gradient, whatever dO and V hold there.
            self.weights[n] = select(p == 0.0, 0.0f32, ds);
        }
    }
}

/// The query and the key of the `n`-th element of a thread's `nth` row.
#[cube]
fn pair(
    at: &TileAt,
    me: Place,
    #[comptime] nth: usize,
    #[comptime] n: usize,
    #[comptime] blueprint: Blueprint,
) -> (u32, u32) {
    let tile = comptime!(blueprint.tile);
    let row = me.plane * comptime!(tile.m() as u32) + me.row(nth, tile);
    let column = me.vector(comptime!(n / WIDTH), tile) * comptime!(WIDTH as u32) + comptime!((n % WIDTH) as u32);
    if comptime!(blueprint.role.is_transposed()) {
        (at.q_start + column, at.k_start + row)
    } else {
        (at.q_start + row, at.k_start + column)
    }
}
