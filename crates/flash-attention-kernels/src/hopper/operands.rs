//! What reaches shared memory by TMA, and the work tiles, each as one argument.

use super::producer::Spread;
use crate::tensor_core::schedule::TileScheduler;
use cubecl::prelude::*;

/// What comes to shared memory by TMA: boxes of 64 columns of 64 rows, or of a tile's columns.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Streams<E: Float> {
    /// Q or K of the rows.
    pub rows_qk: &'static TensorMap<E, Tiled>,
    /// dO or V of the rows, in the backward.
    pub rows_dov: ComptimeOption<&'static TensorMap<E, Tiled>>,
    /// K or Q of the columns.
    pub cols_qk: &'static TensorMap<E, Tiled>,
    /// V or dO of the columns.
    pub cols_dov: &'static TensorMap<E, Tiled>,
    /// A tiled bias, if there is one.
    pub bias: ComptimeOption<&'static TensorMap<E, Tiled>>,
    /// Which of its dimensions repeat.
    pub spread: Spread,
    /// lse and delta of all queries, in the backward, from [`delta`](mod@crate::tensor_core::delta).
    pub stats: ComptimeOption<&'static [u32]>,
}

/// Which work tiles there are, and the counter that they are taken from.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Schedule {
    /// The work tiles.
    pub tiles: TileScheduler,
    /// The counter.
    pub counter: &'static [u32],
}
