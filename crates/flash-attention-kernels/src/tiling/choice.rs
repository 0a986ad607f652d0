//! The possible choices: kernels, and their tiles and parameters.

use super::ListShape;
use crate::blocks::RUN;
use crate::error::AttentionError;
use crate::hopper::BiasTile;
use crate::matrix::MatrixTile;
use crate::mma::MmaTile;
use crate::mods::TENSORS;
use crate::portable::FewRowsTile;
use crate::portable::tile::TileShape;
use crate::rows::RowsTile;
use crate::tensor_core::HopperTile;
use serde::{Deserialize, Serialize};

/// A kernel family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Kernel {
    /// Warpgroup matrix products (`wgmma`) and TMA of NVIDIA Hopper, in f16 and bf16.
    Hopper,
    /// Matrix products of a warp (`mma.sync`) on NVIDIA GPUs from Ampere on, in f16 and bf16, and in f32 as tf32.
    Mma,
    /// Cooperative matrix products in f16 and bf16, on any device that offers them.
    Matrix,
    /// Fused multiply-adds in f32, where each thread processes whole rows, for CPUs.
    Rows,
    /// Fused multiply-adds in f32 on any CubeCL device.
    Portable,
}

impl Kernel {
    /// Every kernel family, most preferred first.
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

    /// The error for a requested kernel that cannot run.
    pub(crate) fn unavailable(self, why: String) -> AttentionError {
        AttentionError::KernelUnavailable { kernel: self.name(), why }
    }
}

/// A kernel family with the tiles and parameters of a kernel. `H` are those of Hopper's kernel, `M` those of `mma.sync`, `P` those of the
/// portable one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FamilyTiles<H, M, P> {
    /// [`Kernel::Hopper`].
    Hopper(H),
    /// [`Kernel::Mma`].
    Mma(M),
    /// [`Kernel::Matrix`].
    Matrix(MatrixTile),
    /// [`Kernel::Rows`].
    Rows(RowsTile),
    /// [`Kernel::Portable`].
    Portable(P),
}

/// A forward kernel with its tiles.
///
/// ```
/// use flash_attention_kernels::{Forward, Kernel, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(Forward::from(tile).kernel(), Kernel::Portable);
/// ```
pub type Forward = FamilyTiles<HopperForward, MmaForward, PortableForward>;

/// A gradient kernel with its tiles.
///
/// ```
/// use flash_attention_kernels::{Gradient, Kernel, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(Gradient::Portable(tile).kernel(), Kernel::Portable);
/// ```
pub type Gradient = FamilyTiles<HopperGradient, MmaTiles, TileShape>;

/// Parameters of a forward by [`Kernel::Hopper`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HopperForward {
    /// Tiles.
    pub tile: HopperTile,
    /// Number of heads in a head group, whose keys and values stay in the L2 cache together.
    pub head_group: usize,
    /// Number of splits of the keys. More than one is used if heads and blocks of queries are too few to keep the device busy.
    pub num_splits: usize,
}

/// Parameters of a gradient by [`Kernel::Hopper`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HopperGradient {
    /// Tiles. The streamed tiles are keys for `dq`, and queries for `dk` and `dv`. The kernel that computes all three above head
    /// dimension 128 streams tiles of 64 queries, and `tile_k` is the number of keys of a block.
    pub tile: HopperTile,
    /// Number of heads in a head group, whose streamed operands stay in the L2 cache together.
    pub head_group: usize,
    /// Number of splits of a group's query heads, for [`Role::All`](crate::fragment::Role::All). With more than one, the sums of `dk`
    /// and `dv` of each split are in f32, and added up afterwards.
    pub num_splits: usize,
}

/// Parameters of [`Kernel::Mma`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MmaTiles {
    /// Tiles. The streamed tiles are keys for the forward and `dq`, and queries for `dk` and `dv`.
    pub tile: MmaTile,
    /// Number of heads in a head group, whose streamed operands stay in the L2 cache together.
    pub head_group: usize,
}

/// Parameters of a forward by [`Kernel::Mma`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MmaForward {
    /// Tiles and head groups. If heads are packed, the heads of a head group are key/value heads.
    #[serde(flatten)]
    pub tiles: MmaTiles,
    /// Number of splits of the keys. More than one is used if heads and blocks of queries are too few to keep the device busy.
    pub num_splits: usize,
    /// Whether the query heads of a group are rows of the same tile, so that each key is read once for all of them.
    pub pack_gqa: bool,
}

impl MmaForward {
    /// Whether the last split of a block of queries combines all of them, without another launch. A warp combines one row after the other,
    /// which takes longer than a launch if there are many.
    pub(crate) fn combines(&self) -> bool {
        self.num_splits > 1 && self.tiles.tile.warps_k > 1
    }
}

/// Parameters of a forward by [`Kernel::Portable`].
///
/// ```
/// use flash_attention_kernels::{PortableForward, TileShape};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(PortableForward::from(tile), PortableForward::Tiles(tile));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum PortableForward {
    /// Blocks of queries of one head.
    Tiles(TileShape),
    /// Few queries of all heads of a group.
    FewRows(FewRowsForward),
}

/// Parameters of the portable forward of few rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FewRowsForward {
    /// Tile.
    pub tile: FewRowsTile,
    /// Number of splits of the keys. More than one is used if heads are too few to keep the device busy.
    pub num_splits: usize,
}

impl<H: Copy + Into<HopperTile>, M: Copy + Into<MmaTile>, P: Copy + Into<PortableForward>> FamilyTiles<H, M, P> {
    /// The kernel family.
    pub fn kernel(&self) -> Kernel {
        match self {
            FamilyTiles::Hopper(_) => Kernel::Hopper,
            FamilyTiles::Mma(_) => Kernel::Mma,
            FamilyTiles::Matrix(_) => Kernel::Matrix,
            FamilyTiles::Rows(_) => Kernel::Rows,
            FamilyTiles::Portable(_) => Kernel::Portable,
        }
    }

    /// Shape of the lists that the kernel uses with a block mask: of blocks of queries, or of blocks of keys if `keys`.
    pub(crate) fn list(&self, keys: bool) -> ListShape {
        let (rows, columns) = match *self {
            FamilyTiles::Hopper(tiles) => (tiles.into().tile_q(), tiles.into().tile_k),
            FamilyTiles::Mma(tiles) => (tiles.into().tile_q(), tiles.into().tile_k),
            FamilyTiles::Matrix(tile) => (tile.rows(), tile.columns),
            FamilyTiles::Rows(tile) => (tile.block(), RUN),
            FamilyTiles::Portable(tiles) => match tiles.into() {
                PortableForward::Tiles(tile) if keys => (tile.tile_k, tile.tile_q),
                PortableForward::Tiles(tile) => (tile.tile_q, tile.tile_k),
                PortableForward::FewRows(FewRowsForward { tile, .. }) => (tile.rows, tile.tile_k),
            },
        };
        ListShape { keys, rows, columns }
    }
}

/// A kernel for the gradient of the bias, of slopes or of a tensor that `score_mod` reads, with its tiles.
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
    /// [`Kernel::Hopper`], for a bias with an element for each pair of query and key.
    Hopper(BiasTile),
    /// [`Kernel::Hopper`], for a tensor that is broadcast over queries or keys: the kernel of `dq`, or of `dk`, computes sums as well,
    /// or a kernel with the same tiles computes them alone. If all of `dq`, `dk` and `dv` are requested, the kernel of all three may
    /// replace that of `dq`.
    Sums {
        /// Whether it is the kernel of `dk`, whose rows are keys.
        keys: bool,
        /// Whether a kernel computes the sums alone even if `dq` or `dk` is requested.
        alone: bool,
    },
    /// [`Kernel::Portable`].
    Portable(TileShape),
}

impl BiasGradient {
    /// The kernel family.
    pub fn kernel(&self) -> Kernel {
        match self {
            BiasGradient::Hopper(_) | BiasGradient::Sums { .. } => Kernel::Hopper,
            BiasGradient::Portable(_) => Kernel::Portable,
        }
    }

    /// Tiles of the portable kernel, if it is one.
    pub(crate) fn portable(&self) -> Option<TileShape> {
        if let BiasGradient::Portable(tile) = *self { Some(tile) } else { None }
    }
}

/// The kernels of a backward, with their tiles.
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
    /// Kernel of `dq`.
    pub dq: Gradient,
    /// Kernel of `dk`, and of `dv` in the same launch unless [`dv`](Self::dv) is set.
    pub dkdv: Gradient,
    /// Kernel of `dv`, if `dv` takes a separate launch even if both are requested.
    pub dv: Option<Gradient>,
    /// Kernel that computes `dq`, `dk` and `dv` in one launch, where blocks of keys add to `dq`. It replaces the others if all three are
    /// requested.
    pub fused: Option<HopperGradient>,
    /// Kernel of the gradient of the bias.
    pub dbias: BiasGradient,
    /// Kernel of the gradient of the slopes, if there are any.
    pub dalibi_slopes: Option<BiasGradient>,
    /// Kernels of the gradients of the tensors that `score_mod` reads, if there are any.
    pub dscore_tensors: [Option<BiasGradient>; TENSORS],
}

impl BackwardTiles {
    /// The portable kernels with these tiles.
    pub fn portable(tile: TileShape, dkdv_together: bool) -> Self {
        let of = Gradient::Portable(tile);
        BackwardTiles {
            dq: of,
            dkdv: of,
            dv: (!dkdv_together).then_some(of),
            fused: None,
            dbias: BiasGradient::Portable(tile),
            dalibi_slopes: Some(BiasGradient::Portable(tile)),
            dscore_tensors: [Some(BiasGradient::Portable(tile)); TENSORS],
        }
    }

    /// Tiles of the portable kernels among them.
    pub(crate) fn portables(&self) -> impl Iterator<Item = TileShape> {
        let of = |gradient| if let Gradient::Portable(tile) = gradient { Some(tile) } else { None };
        let gradients = [of(self.dq), of(self.dkdv), self.dv.and_then(of)].into_iter();
        let of_scores = [self.dalibi_slopes].into_iter().chain(self.dscore_tensors).flatten();
        let of_scores = [self.dbias].into_iter().chain(of_scores).map(|of| of.portable());
        gradients.chain(of_scores).flatten()
    }
}

impl Forward {
    /// Queries of a block, or rows if query heads are packed.
    pub fn tile_q(&self) -> usize {
        self.list(false).rows
    }

    /// Keys of a tile.
    pub fn tile_k(&self) -> usize {
        if let Forward::Rows(_) = self { 1 } else { self.list(false).columns }
    }
}

macro_rules! from {
    ($from:ty, $to:ty, $tiles:ident => $value:expr) => {
        impl From<$from> for $to {
            fn from($tiles: $from) -> Self {
                $value
            }
        }
    };
}

from!(HopperForward, HopperTile, tiles => tiles.tile);
from!(HopperGradient, HopperTile, tiles => tiles.tile);
from!(HopperForward, Forward, tiles => Forward::Hopper(tiles));
from!(MmaTiles, MmaTile, tiles => tiles.tile);
from!(MmaForward, MmaTile, plan => plan.tiles.tile);
from!(MmaTiles, MmaForward, tiles => MmaForward { tiles, num_splits: 1, pack_gqa: false });
from!(MmaForward, Forward, plan => Forward::Mma(plan));
from!(MmaTiles, Forward, tiles => Forward::Mma(tiles.into()));
from!(MatrixTile, Forward, tile => Forward::Matrix(tile));
from!(RowsTile, Forward, tile => Forward::Rows(tile));
from!(TileShape, PortableForward, tile => PortableForward::Tiles(tile));
from!(FewRowsForward, PortableForward, plan => PortableForward::FewRows(plan));
from!(TileShape, Forward, tile => Forward::Portable(tile.into()));
from!(FewRowsForward, Forward, plan => Forward::Portable(plan.into()));
