//! Combines splits of the keys, which were computed separately.
//!
//! ```text
//! m = max_p lse_p      w_p = exp(lse_p − m)      o = Σ w_p o_p / Σ w_p      lse = m + ln Σ w_p
//! ```
//!
//! A sink counts as one more split with `o = 0`. (Flash-Decoding, Dao et al. 2023.) The order of the sums depends on the number of splits
//! alone.

use crate::fragment::{ForwardOutputs, Layout, Rows, Vec4, WIDTH, row_start, write_quad};
use crate::softmax::{HIDDEN, lse_bits, lse_of_split, normalizer, weight};
use cubecl::prelude::*;

/// Splits that are read at a time.
const AT_A_TIME: usize = 8;

/// What splits of the keys have written.
#[derive(CubeType, CubeLaunch)]
pub struct Splits<N: Size> {
    /// `[P · B, H, Sq, Dv]` for `P` splits.
    pub o: &'static Tensor<Vector<f32, N>>,
    /// Bits of the log-sum-exp, `[P · B, H, Sq]`.
    pub lse: &'static Tensor<u32>,
    /// Number of splits.
    pub count: u32,
}

/// Combines the splits of all rows. Each thread combines four columns of a row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn combine<F: Float, N: Size>(
    splits: Splits<N>,
    outputs: ForwardOutputs<F, N>,
    sinks: ComptimeOption<&Tensor<f32>>,
    #[comptime] head_dim_v: usize,
    #[define(F)] _type: ElemType,
) {
    let (o, lse) = (outputs.o, outputs.lse);
    let (batches, heads, queries) = (lse.shape(0), lse.shape(1), lse.shape(2));
    let columns = comptime!(head_dim_v.div_ceil(WIDTH));
    let (row, column) = (ABSOLUTE_POS / columns, ABSOLUTE_POS % columns * WIDTH);
    let (query, row) = ((row % queries) as u32, row / queries);
    let (head, batch) = (row % heads, row / heads);
    if batch >= batches {
        terminate!();
    }
    let mut m = HIDDEN.runtime();
    let mut l = 0.0f32.runtime();
    #[comptime]
    if let ComptimeOption::Some(sinks) = &sinks {
        m = sinks[head * sinks.stride(0)];
        l = 1.0f32.runtime();
    }
    let mut sum = Vec4::new(0.0f32);
    let mut first = 0u32.runtime();
    while first < splits.count {
        // Reads of several splits are on the way together.
        let mut values = Array::<Vec4>::new(AT_A_TIME);
        let mut of_split = Array::<f32>::new(AT_A_TIME);
        let mut highest = m;
        #[unroll]
        for n in 0..AT_A_TIME {
            let split = first + comptime!(n as u32);
            let from = min(split, splits.count - 1) as usize * batches + batch;
            let rows = Rows::of(splits.o, from, head, query, query + 1);
            values[n] = rows.read_within(query, column, head_dim_v);
            let bits = splits.lse[row_start(splits.lse, from, head, query)];
            of_split[n] = select(split < splits.count, lse_of_split(bits), HIDDEN);
            highest = max(highest, of_split[n]);
        }
        let alpha = f32::exp(m - highest);
        m = highest;
        l *= alpha;
        sum *= Vec4::new(alpha);
        #[unroll]
        for n in 0..AT_A_TIME {
            let w = weight(of_split[n], m);
            l += w;
            sum = fma(Vec4::new(w), values[n], sum);
        }
        first += comptime!(AT_A_TIME as u32);
    }
    let layout = Layout::of(&*o, batch, head);
    write_quad(o, &layout, query, column, sum * Vec4::new(normalizer(l)), head_dim_v);
    if column == 0 {
        let at = row_start(&*lse, batch, head, query);
        lse[at] = lse_bits(m, l);
    }
}
