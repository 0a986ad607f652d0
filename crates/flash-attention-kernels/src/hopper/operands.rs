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

/// `dQ` in f32, to which blocks of keys add.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct DqAccum {
    /// The sums, in the layout of [`reduce`](super::reduce).
    pub sums: &'static [Vector<f32, Const<4>>],
    /// If blocks of keys add in order: for each tile of queries, the number of blocks that have added to it. Every
    /// [`TURN_ROWS`](super::TURN_ROWS) rows of `sums` have [`TURN_WORDS`](super::TURN_WORDS) words, of which the
    /// first one counts.
    pub turns: &'static [u32],
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
