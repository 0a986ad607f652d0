//! TMA operands and work tiles, grouped into arguments.

use super::producer::Spread;
use crate::tensor_core::TileScheduler;
use cubecl::prelude::*;

/// Operands that TMA loads to shared memory, in boxes of 64 columns and either 64 rows or the rows of a tile.
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
    /// Dimensions along which the bias repeats.
    pub spread: Spread,
    /// lse and delta of all queries, in the backward, from [`delta`](mod@crate::tensor_core::delta).
    pub stats: ComptimeOption<&'static [u32]>,
}

/// The work tiles, and the counter that they are taken from.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Schedule {
    /// The tile scheduler.
    pub tiles: TileScheduler,
    /// Counter of the work tiles taken.
    pub counter: &'static [u32],
}
