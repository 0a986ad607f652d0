//! Gradient of the sinks. In each row a sink has the probability `exp(sink − lse)` and the value 0, so that
//!
//! ```text
//! dsink_h = Σ_b Σ_i exp(sink_h − lse_bhi) · (0 − delta_bhi)
//! ```
//!
//! The kernel needs only the sinks and the statistics of each row, which [`delta`](mod@super::delta) computes.

use cubecl::prelude::*;

/// Threads of a thread block. A thread block computes one head.
pub const UNITS: usize = 64;

/// Computes `dsinks [H]` from `stats [2, B, H, Sq]` and `sinks [H]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn dsinks(stats: &Tensor<f32>, sinks: &Tensor<f32>, dsinks: &mut Tensor<f32>) {
    let mut board = Shared::<[f32]>::new_slice(UNITS);
    let head = CUBE_POS;
    if head >= stats.shape(2) {
        terminate!();
    }
    let (of_delta, seq) = (stats.stride(0), stats.shape(3));
    let sink = sinks[head * sinks.stride(0)];
    let mut sum = 0.0f32;
    for batch in 0..stats.shape(1) {
        let first = batch * stats.stride(1) + head * stats.stride(2);
        let mut row = UNIT_POS as usize;
        while row < seq {
            let (lse, delta) = (stats[first + row], stats[of_delta + first + row]);
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
