//! What can be chosen: kernels, and how each works.

use super::ListShape;
use crate::blocks::RUN;
use crate::hopper::BiasTile;
use crate::matrix::MatrixTile;
use crate::mma::MmaTile;
use crate::portable::tile::TileShape;
use crate::rows::RowsTile;
use crate::tensor_core::HopperTile;
use serde::{Deserialize, Serialize};

/// A kernel family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Kernel {
    /// Warpgroup matrix products and TMA of NVIDIA Hopper, in f16 and bf16.
    Hopper,
    /// Matrix products of a warp, `mma.sync`, of NVIDIA GPUs from Ampere on, in f16 and bf16, and in f32 as tf32.
    Mma,
    /// Cooperative matrix products in f16 and bf16, on any device that offers them.
    Matrix,
    /// Fused multiply-adds in f32 on rows that a thread holds by itself, for devices that are processors.
    Rows,
    /// Fused multiply-adds in f32 on any CubeCL device.
    Portable,
}

impl Kernel {
    /// Every kernel family, the most preferred first.
    pub const ALL: [Kernel; 5] = [Kernel::Hopper, Kernel::Mma, Kernel::Matrix, Kernel::Rows, Kernel::Portable];

    /// The name used in messages and result files.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Hopper => "hopper",
            Kernel::Mma => "mma",
            Kernel::Matrix => "matrix",
            Kernel::Rows => "rows",
            Kernel::Portable => "portable",
        }
    }
}

/// A kernel of the forward, with its tiles.
///
/// ```
/// use flash_attention_kernels::{Forward, Kernel, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(Forward::from(tile).kernel(), Kernel::Portable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Forward {
    /// [`Kernel::Hopper`].
    Hopper(HopperForward),
    /// [`Kernel::Mma`].
    Mma(MmaForward),
    /// [`Kernel::Matrix`].
    Matrix(MatrixTile),
    /// [`Kernel::Rows`].
    Rows(RowsTile),
    /// [`Kernel::Portable`].
    Portable(TileShape),
}

/// How [`Kernel::Hopper`] computes a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HopperForward {
    /// Tiles.
    pub tile: HopperTile,
    /// Heads of a head group, whose keys and values stay in the L2 cache together.
    pub head_group: usize,
    /// Splits of the keys that are computed apart, where heads and blocks of queries are too few to keep the device busy.
    pub num_splits: usize,
}

/// How [`Kernel::Mma`] computes a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MmaForward {
    /// Tiles.
    pub tile: MmaTile,
    /// Heads of a head group, whose keys and values stay in the L2 cache together.
    pub head_group: usize,
}

/// How [`Kernel::Mma`] computes a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MmaGradient {
    /// Tiles: of keys that stream by for `dq`, of queries for `dk` and `dv`.
    pub tile: MmaTile,
    /// Heads of a head group, whose streamed operands stay in the L2 cache together.
    pub head_group: usize,
}

/// A kernel of a gradient, with its tiles.
///
/// ```
/// use flash_attention_kernels::{Gradient, Kernel, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(Gradient::Portable(tile).kernel(), Kernel::Portable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Gradient {
    /// [`Kernel::Hopper`].
    Hopper(HopperGradient),
    /// [`Kernel::Mma`].
    Mma(MmaGradient),
    /// [`Kernel::Matrix`].
    Matrix(MatrixTile),
    /// [`Kernel::Rows`].
    Rows(RowsTile),
    /// [`Kernel::Portable`].
    Portable(TileShape),
}

/// How [`Kernel::Hopper`] computes a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HopperGradient {
    /// Tiles: of keys that stream by for `dq`, of queries for `dk` and `dv`.
    pub tile: HopperTile,
    /// Heads of a head group, whose streamed operands stay in the L2 cache together.
    pub head_group: usize,
}

impl Gradient {
    /// The kernel family.
    pub fn kernel(&self) -> Kernel {
        match self {
            Gradient::Hopper(_) => Kernel::Hopper,
            Gradient::Mma(_) => Kernel::Mma,
            Gradient::Matrix(_) => Kernel::Matrix,
            Gradient::Rows(_) => Kernel::Rows,
            Gradient::Portable(_) => Kernel::Portable,
        }
    }

    /// The lists that it visits, if there is a block mask: of blocks of queries, or, transposed, of keys.
    pub(crate) fn list(&self, keys: bool) -> ListShape {
        let (rows, columns) = match self {
            Gradient::Hopper(gradient) => (gradient.tile.tile_q(), gradient.tile.tile_k),
            Gradient::Mma(gradient) => (gradient.tile.tile_q(), gradient.tile.tile_k),
            Gradient::Matrix(tile) => (tile.rows(), tile.columns),
            Gradient::Rows(tile) => (tile.block(), RUN),
            Gradient::Portable(tile) if keys => (tile.tile_k, tile.tile_q),
            Gradient::Portable(tile) => (tile.tile_q, tile.tile_k),
        };
        ListShape { keys, rows, columns }
    }
}

/// A kernel of the bias's gradient, with its tiles.
///
/// ```
/// use flash_attention_kernels::{BiasGradient, Kernel, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(BiasGradient::Portable(tile).kernel(), Kernel::Portable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BiasGradient {
    /// [`Kernel::Hopper`], of a bias that has an element for each pair of query and key.
    Hopper(BiasTile),
    /// [`Kernel::Portable`].
    Portable(TileShape),
}

impl BiasGradient {
    /// The kernel family.
    pub fn kernel(&self) -> Kernel {
        match self {
            BiasGradient::Hopper(_) => Kernel::Hopper,
            BiasGradient::Portable(_) => Kernel::Portable,
        }
    }
}

/// Kernels of the backward, with their tiles.
///
/// ```
/// use flash_attention_kernels::{BackwardTiles, Kernel, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(BackwardTiles::portable(tile, true).dkdv.kernel(), Kernel::Portable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BackwardTiles {
    /// Of `dq`.
    pub dq: Gradient,
    /// Of `dk`, and of `dv` with it.
    pub dkdv: Gradient,
    /// Of `dv`, if it takes a launch of its own even where both are wanted.
    pub dv: Option<Gradient>,
    /// Of `dq`, `dk` and `dv` by one launch, which adds `dq` up in any order: instead of the others, where all three are wanted.
    pub fused: Option<HopperGradient>,
    /// Of the bias's gradient.
    pub dbias: BiasGradient,
    /// Of that of slopes, if there are any: portable.
    pub dalibi_slopes: Option<TileShape>,
    /// Of those of the tensors that a function of scores reads, if there are any: portable.
    pub dscore_tensors: Option<TileShape>,
}

impl BackwardTiles {
    /// The portable kernels with these tiles.
    pub fn portable(tile: TileShape, dkdv_together: bool) -> Self {
        let (of, dbias) = (Gradient::Portable(tile), BiasGradient::Portable(tile));
        let dv = (!dkdv_together).then_some(of);
        BackwardTiles {
            dq: of,
            dkdv: of,
            dv,
            fused: None,
            dbias,
            dalibi_slopes: Some(tile),
            dscore_tensors: Some(tile),
        }
    }

    /// Tiles of the portable kernels that are used.
    pub(crate) fn portables(&self) -> impl Iterator<Item = TileShape> {
        let of = |gradient| match gradient {
            Gradient::Portable(tile) => Some(tile),
            Gradient::Hopper(_) | Gradient::Mma(_) | Gradient::Matrix(_) | Gradient::Rows(_) => None,
        };
        let dbias = match self.dbias {
            BiasGradient::Portable(tile) => Some(tile),
            BiasGradient::Hopper(_) => None,
        };
        [of(self.dq), of(self.dkdv), self.dv.and_then(of), dbias, self.dalibi_slopes, self.dscore_tensors]
            .into_iter()
            .flatten()
    }
}

impl Forward {
    /// The kernel family.
    pub fn kernel(&self) -> Kernel {
        match self {
            Forward::Hopper(_) => Kernel::Hopper,
            Forward::Mma(_) => Kernel::Mma,
            Forward::Matrix(_) => Kernel::Matrix,
            Forward::Rows(_) => Kernel::Rows,
            Forward::Portable(_) => Kernel::Portable,
        }
    }

    /// Queries of a block.
    pub fn tile_q(&self) -> usize {
        match self {
            Forward::Hopper(forward) => forward.tile.tile_q(),
            Forward::Mma(forward) => forward.tile.tile_q(),
            Forward::Matrix(tile) => tile.rows(),
            Forward::Rows(tile) => tile.block(),
            Forward::Portable(tile) => tile.tile_q,
        }
    }

    /// The lists that it visits, if there is a block mask.
    pub(crate) fn list(&self) -> ListShape {
        let columns = if let Forward::Rows(_) = self { RUN } else { self.tile_k() };
        ListShape { keys: false, rows: self.tile_q(), columns }
    }

    /// Keys of a tile.
    pub fn tile_k(&self) -> usize {
        match self {
            Forward::Hopper(forward) => forward.tile.tile_k,
            Forward::Mma(forward) => forward.tile.tile_k,
            Forward::Matrix(tile) => tile.columns,
            Forward::Rows(_) => 1,
            Forward::Portable(tile) => tile.tile_k,
        }
    }
}

impl From<TileShape> for Forward {
    fn from(tile: TileShape) -> Self {
        Forward::Portable(tile)
    }
}

impl From<MatrixTile> for Forward {
    fn from(tile: MatrixTile) -> Self {
        Forward::Matrix(tile)
    }
}

impl From<RowsTile> for Forward {
    fn from(tile: RowsTile) -> Self {
        Forward::Rows(tile)
    }
}

impl From<MmaForward> for Forward {
    fn from(forward: MmaForward) -> Self {
        Forward::Mma(forward)
    }
}

impl From<HopperForward> for Forward {
    fn from(forward: HopperForward) -> Self {
        Forward::Hopper(forward)
    }
}
