//! Backward for the sinks: a sink's probability is `exp(sink − lse)` in each row, and its value 0, so that
//!
//! ```text
//! dsink_h = Σ_b Σ_i exp(sink_h − lse_bhi) · (0 − delta_bhi)
//! ```
//!
//! which takes nothing but what [`delta`](mod@super::delta) has found of each row.

use cubecl::prelude::*;

/// Threads of a thread block, which is that of a head.
pub const UNITS: usize = 64;

/// `stats [2, B · H · Sq]` to `dsinks [H]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dsinks(
    stats: &Tensor<f32>,
    sinks: &Tensor<f32>,
    dsinks: &mut Tensor<f32>,
    batches: u32,
    heads: u32,
    seq_q: u32,
) {
    let mut board = Shared::<[f32]>::new_slice(UNITS);
    let head = CUBE_POS;
    if head >= heads as usize {
        terminate!();
    }
    let rows = stats.shape(1);
    let sink = sinks[head * sinks.stride(0)];
    let mut sum = 0.0f32;
    for batch in 0..batches as usize {
        let first = (batch * heads as usize + head) * seq_q as usize;
        let mut row = UNIT_POS as usize;
        while row < seq_q as usize {
            let (lse, delta) = (stats[first + row], stats[rows + first + row]);
            sum = fma(-f32::exp(sink - lse), delta, sum);
            row += UNITS;
        }
    }
    board[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = 0.0f32;
        for n in 0..UNITS {
            total += board[n];
        }
        let at = head * dsinks.stride(0);
        dsinks[at] = total;
    }
}
