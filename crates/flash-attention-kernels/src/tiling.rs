//! The one place that chooses kernels and tile shapes, from what the device says of itself. What it chooses for NVIDIA GPUs and
//! for matrix products has files of its own.

mod hopper;
pub(crate) mod matrix;
pub(crate) mod mma;
pub(crate) mod rows;

pub(crate) use hopper::stats_multiple;
#[cfg(feature = "cuda")]
pub(crate) use hopper::varies_by_pair;

use crate::blocks::BLOCK;
use crate::error::AttentionError;
use crate::hopper::{BiasTile, HopperTile, sums_columns};
use crate::matrix::{MatrixTile, Role};
use crate::mma::MmaTile;
use crate::portable::Blueprint;
use crate::portable::dbias::Sums;
use crate::portable::tile::{TileShape, Vec4, WIDTH};
use crate::problem::{AttentionProblem, BackwardOrder, Dtype};
use crate::rows::RowsTile;
use crate::score::Factor;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use serde::{Deserialize, Serialize};
use std::fmt;

const VEC4_BYTES: usize = size_of::<f32>() * WIDTH;
const _: fn(Vec4) = |_| ();

/// Tiles of the portable kernels, the first that fits the device wins.
///
/// ```text
/// tile_q × tile_k  units    micro  chunk  shared memory (forward)   where it fits
/// 64 × 64          8 × 16   8 × 4  64     56,320 bytes              CUDA
/// 64 × 64          16 × 16  4 × 4  32     48,128 bytes              desktop GPUs through Vulkan (48 KiB)
/// 64 × 32          16 × 8   4 × 4  32     25,088 bytes              integrated and Apple GPUs (32 KiB)
/// 32 × 32          8 × 8    4 × 4  32     14,848 bytes              what WebGPU promises everywhere (16 KiB)
/// ```
///
/// A micro tile of 8 × 4 reads 12 vectors for 128 multiply-adds, which keeps the arithmetic and not shared memory busy,
/// and leaves registers for several cubes to share a multiprocessor. Through Vulkan 4 × 4 was the faster one in the
/// backward (docs/performance.md).
const PORTABLE: [TileShape; 4] = [
    TileShape { tile_q: 64, tile_k: 64, units_q: 8, units_k: 16, chunk: 64 },
    TileShape { tile_q: 64, tile_k: 64, units_q: 16, units_k: 16, chunk: 32 },
    TileShape { tile_q: 64, tile_k: 32, units_q: 16, units_k: 8, chunk: 32 },
    TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 },
];

/// Vectors a unit may accumulate for `dk` and `dv` together before registers run out: beyond, they take a launch each.
const MAX_ACCUMULATED: usize = 16;

/// A kernel family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernel {
    /// Warpgroup matrix products and TMA of NVIDIA Hopper, in f16 and bf16.
    Hopper,
    /// Matrix products of a warp, `mma.sync`, of NVIDIA GPUs from Ampere on, in f16 and bf16, and in f32 as tf32.
    Mma,
    /// Cooperative matrix products in f16 and bf16, on any device that offers them.
    Matrix,
    /// Fused multiply-adds in f32 on rows that a unit holds by itself, for devices that are processors.
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
    /// Heads that take turns, so that their keys and values stay in the second-level cache.
    pub section: usize,
    /// Parts of the keys that are computed apart, where heads and blocks of queries are too few to keep the device busy.
    pub parts: usize,
}

/// How [`Kernel::Mma`] computes a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MmaForward {
    /// Tiles.
    pub tile: MmaTile,
    /// Heads that take turns, so that their keys and values stay in the second-level cache.
    pub section: usize,
}

/// How [`Kernel::Mma`] computes a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MmaGradient {
    /// Tiles: of keys that stream by for `dq`, of queries for `dk` and `dv`.
    pub tile: MmaTile,
    /// Heads that take turns, so that what streams by stays in the second-level cache.
    pub section: usize,
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
    /// Heads that take turns, so that what streams by stays in the second-level cache.
    pub section: usize,
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

    /// Rows of a block, and positions of a tile that streams by.
    pub(crate) fn blocks(&self, transposed: bool) -> (usize, usize) {
        match self {
            Gradient::Hopper(gradient) => (gradient.tile.tile_q(), gradient.tile.tile_k),
            Gradient::Mma(gradient) => (gradient.tile.tile_q(), gradient.tile.tile_k),
            Gradient::Matrix(tile) => (tile.rows(), tile.columns),
            Gradient::Rows(tile) => (tile.block(), 1),
            Gradient::Portable(tile) if transposed => (tile.tile_k, tile.tile_q),
            Gradient::Portable(tile) => (tile.tile_q, tile.tile_k),
        }
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

/// What a device offers, as far as the choice depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The runtime's name.
    pub name: String,
    /// Whether there is a card behind it: a processor that computes by itself is none.
    pub card: bool,
    /// Bytes of shared memory a cube may have.
    pub shared_memory: usize,
    /// Units a cube may have.
    pub units: usize,
    /// Buffers a kernel may bind.
    pub bindings: usize,
    /// Cubes of a launch along x, y and z.
    pub cubes: (u32, u32, u32),
    /// Whether buffers of more than 2^32 elements can be addressed.
    pub wide_addresses: bool,
    /// Element types that can be stored and converted.
    pub dtypes: Vec<Dtype>,
    /// Multiprocessors, where known; otherwise 0.
    pub multiprocessors: usize,
    /// Whether there are warpgroup matrix products and TMA.
    pub wgmma: bool,
    /// Element types of warps' matrix products `mma.sync` that are summed in f32, where inline PTX can be compiled: of f16 and bf16
    /// those of 16 × 8 × 16, of f32 those of 16 × 8 × 8 of tf32.
    pub mma: Vec<Dtype>,
    /// Units of a plane, where all planes have as many; otherwise 0.
    pub plane: usize,
    /// Shapes `[m, n, k]` of cooperative matrix products of an element type that are summed in f32.
    pub matrices: Vec<(Dtype, [usize; 3])>,
}

impl Device {
    /// What the device behind this client offers.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let stores = |dtype: &Dtype| {
            let usage = properties.type_usage(element_type(*dtype));
            usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
        };
        let multiplies = |dtype: &Dtype| {
            let (factor, k) = match dtype {
                Dtype::F32 => (ElemType::Float(FloatKind::TF32), 8),
                half => (element_type(*half), 16),
            };
            let sums = ElemType::Float(FloatKind::F32);
            let shaped = properties.features.matmul.mma.iter().any(|of| {
                let types = [of.a_type, of.b_type, of.cd_type] == [factor, factor, sums];
                types && (of.m, of.n, of.k) == (16, 8, k)
            });
            // Only CubeCL's C++ compiler for CUDA, which takes no operations of our own, offers copies of its own.
            shaped && !properties.features.copy_async
        };
        Device {
            name: client.name().to_string(),
            card: properties.identity.physical.is_some(),
            shared_memory: hardware.max_shared_memory_size,
            units: hardware.max_units_per_cube as usize,
            bindings: hardware.max_bindings as usize,
            cubes: hardware.max_cube_count,
            wide_addresses: properties.supports_address(AddressType::U64),
            dtypes: [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().filter(stores).collect(),
            multiprocessors: hardware.num_streaming_multiprocessors.unwrap_or(0) as usize,
            wgmma: !properties.features.matmul.wgmma.is_empty(),
            mma: [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().filter(multiplies).collect(),
            plane: if hardware.plane_size_min == hardware.plane_size_max {
                hardware.plane_size_min as usize
            } else {
                0
            },
            matrices: [Dtype::F16, Dtype::BF16]
                .into_iter()
                .flat_map(|dtype| {
                    let element = element_type(dtype);
                    let sums = ElemType::Float(FloatKind::F32);
                    let all = properties.features.matmul.cmma.iter();
                    all.filter(move |of| of.a_type == element && of.b_type == element && of.cd_type == sums)
                        .map(move |of| (dtype, [of.m as usize, of.n as usize, of.k as usize]))
                })
                .collect(),
        }
    }
}

/// CubeCL's name for an element type.
pub fn element_type(dtype: Dtype) -> ElemType {
    ElemType::Float(match dtype {
        Dtype::F32 => FloatKind::F32,
        Dtype::F16 => FloatKind::F16,
        Dtype::BF16 => FloatKind::BF16,
    })
}

/// A choice that was passed over, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PassedOver {
    /// What was passed over.
    pub what: String,
    /// Why.
    pub why: String,
}

/// What will run: kernels, tiles and memory.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, plan};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [4, 16, 4096, 128];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// println!("{}", plan(client, &problem)?); // forward portable 64×64, backward portable 64×64 …
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The forward.
    pub forward: Forward,
    /// The backward.
    pub backward: BackwardTiles,
    /// Bytes that training keeps from forward to backward beside inputs and output: `lse`.
    pub saved_bytes: u64,
    /// Bytes of scratch that the backward allocates.
    pub scratch_bytes: u64,
    /// What would have been preferred, and why it cannot run.
    pub passed_over: Vec<PassedOver>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tile_q, tile_k) = (self.forward.tile_q(), self.forward.tile_k());
        write!(f, "forward {} {tile_q}×{tile_k}", self.forward.kernel().name())?;
        if let Forward::Hopper(HopperForward { parts: parts @ 2.., .. }) = self.forward {
            write!(f, " in {parts} parts")?;
        }
        let BackwardTiles { dq, dkdv, dv, fused, dbias, dalibi_slopes, dscore_tensors } = self.backward;
        let (dq_rows, dq_tile) = dq.blocks(false);
        let (dkdv_rows, dkdv_tile) = dkdv.blocks(true);
        write!(f, ", dq {} {dq_rows}×{dq_tile}", dq.kernel().name())?;
        write!(
            f,
            ", dk {} {} {dkdv_tile}×{dkdv_rows}",
            if dv.is_some() { "alone" } else { "and dv" },
            dkdv.kernel().name()
        )?;
        if let Some(dv) = dv {
            let (rows, tile) = dv.blocks(true);
            write!(f, ", dv {} {tile}×{rows}", dv.kernel().name())?;
        }
        if let Some(HopperGradient { tile, .. }) = fused {
            write!(f, ", all three {} {}×{} in any order", Kernel::Hopper.name(), tile.tile_k, tile.tile_q())?;
        }
        if let BiasGradient::Hopper(tile) = dbias {
            write!(f, ", dbias {} {}×{}", dbias.kernel().name(), BiasTile::TILE_Q, tile.block_k())?;
        }
        for (name, tile) in [("dalibi_slopes", dalibi_slopes), ("dscore_tensors", dscore_tensors)] {
            if let Some(tile) = tile {
                write!(f, ", {name} {} {}×{}", Kernel::Portable.name(), tile.tile_q, tile.tile_k)?;
            }
        }
        write!(f, ", {} bytes saved, {} bytes of scratch", self.saved_bytes, self.scratch_bytes)?;
        for PassedOver { what, why } in &self.passed_over {
            write!(f, "; not {what}: {why}")?;
        }
        Ok(())
    }
}

/// The kernels of the portable family, by what they keep in shared memory.
///
/// ```
/// use flash_attention_kernels::{TileShape, tiling::{Stage, shared_memory}};
///
/// let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
/// assert_eq!(shared_memory(&tile, Stage::Forward), 14848);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The forward.
    Forward,
    /// Those of the backward.
    Backward,
}

/// Bytes of shared memory of a cube with these tiles: the most that a kernel of the stage takes.
///
/// ```
/// use flash_attention_kernels::{TileShape, tiling::{Stage, shared_memory}};
///
/// let tile = TileShape { tile_q: 64, tile_k: 64, units_q: 16, units_k: 16, chunk: 32 };
/// assert!(shared_memory(&tile, Stage::Backward) <= 48 << 10);
/// ```
pub fn shared_memory(tile: &TileShape, stage: Stage) -> usize {
    let (q, k) = (tile.tile_q, tile.tile_k);
    let vectors = match stage {
        Stage::Forward => tile.panel_a() + tile.panel_b(k) + q * TileShape::pitch(k) + tile.board(),
        Stage::Backward => {
            let dq = tile.panel_b(k) + q * TileShape::pitch(k);
            let dkdv = tile.panel_b(q) + k * TileShape::pitch(q);
            let dbias = tile.panel_b(0)
                + 1
                + [Sums::Rows, Sums::Columns]
                    .map(|sums| tile.sums_board(sums).div_ceil(WIDTH))
                    .into_iter()
                    .max()
                    .unwrap_or(0);
            tile.panel_a() + dq.max(dkdv).max(dbias)
        }
    };
    vectors * VEC4_BYTES
}

/// Whether a cube with these tiles fits the device.
fn fits(device: &Device, tile: &TileShape, stage: Stage) -> bool {
    shared_memory(tile, stage) <= device.shared_memory && tile.units() <= device.units
}

/// Checks tiles that the caller chose.
pub(crate) fn check_tile(
    device: &Device,
    problem: &AttentionProblem,
    tile: &TileShape,
    stage: Stage,
) -> Result<(), AttentionError> {
    if !tile.is_consistent() {
        return Err(AttentionError::Unsupported {
            option: "tile",
            value: format!("{tile:?}"),
            why: "units must divide tiles into runs of a multiple of 4, and the chunk must be a multiple of 4",
        });
    }
    if fits(device, tile, stage) { Ok(()) } else { Err(no_tile_fits(device, problem, tile, stage)) }
}

fn no_tile_fits(device: &Device, problem: &AttentionProblem, tile: &TileShape, stage: Stage) -> AttentionError {
    AttentionError::NoTileFits {
        head_dim: problem.head_dim.max(problem.head_dim_v),
        tile_q: tile.tile_q,
        tile_k: tile.tile_k,
        needed: shared_memory(tile, stage),
        units: tile.units(),
        available: device.shared_memory,
        max_units: device.units,
    }
}

fn choose(
    device: &Device,
    problem: &AttentionProblem,
    stage: Stage,
    passed_over: &mut Vec<PassedOver>,
) -> Result<TileShape, AttentionError> {
    for tile in PORTABLE {
        if fits(device, &tile, stage) {
            return Ok(tile);
        }
        let name = match stage {
            Stage::Forward => "forward",
            Stage::Backward => "backward",
        };
        passed_over.push(PassedOver {
            what: format!("{name} {}×{}", tile.tile_q, tile.tile_k),
            why: format!(
                "it takes {} bytes of shared memory and {} units, the device has {} and {}",
                shared_memory(&tile, stage),
                tile.units(),
                device.shared_memory,
                device.units
            ),
        });
    }
    Err(no_tile_fits(device, problem, &PORTABLE[PORTABLE.len() - 1], stage))
}

/// The forward that runs: the most preferred kernel that can, or the one that is asked for.
pub(crate) fn choose_forward(
    device: &Device,
    problem: &AttentionProblem,
    asked: Option<Kernel>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<Forward, AttentionError> {
    for kernel in [Kernel::Hopper, Kernel::Mma, Kernel::Matrix] {
        if asked.is_some_and(|asked| asked != kernel) {
            continue;
        }
        let found = match kernel {
            Kernel::Hopper => hopper::forward(device, problem).map(Forward::Hopper),
            Kernel::Mma => mma::forward(device, problem).map(Forward::Mma),
            _ => matrix::forward(device, problem).map(Forward::Matrix),
        };
        match found {
            Ok(forward) => return Ok(forward),
            Err(why) if asked == Some(kernel) => {
                return Err(AttentionError::KernelUnavailable { kernel: kernel.name(), why });
            }
            Err(why) => passed_over.push(PassedOver { what: format!("forward {}", kernel.name()), why }),
        }
    }
    if rows::wanted(device, asked) {
        return Ok(Forward::Rows(rows::tile(device, problem, Role::Forward)));
    }
    Ok(Forward::Portable(choose(device, problem, Stage::Forward, passed_over)?))
}

/// The backward that runs: the most preferred kernels that can, or those that are asked for.
pub(crate) fn choose_backward(
    device: &Device,
    problem: &AttentionProblem,
    asked: Option<Kernel>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<BackwardTiles, AttentionError> {
    let mut pass_over = |kernel: Kernel, why| {
        passed_over.push(PassedOver { what: format!("backward {}", kernel.name()), why });
    };
    let asked_for = |kernel| asked.is_none_or(|asked| asked == kernel);
    let hopper = asked_for(Kernel::Hopper).then(|| hopper::backward(device, problem));
    let hopper = hopper.and_then(|found| found.map_err(|why| pass_over(Kernel::Hopper, why)).ok());
    let gradients = [Kernel::Mma, Kernel::Matrix].into_iter().filter(|kernel| hopper.is_none() && asked_for(*kernel));
    let gradients = gradients.into_iter().find_map(|kernel| {
        let found = match kernel {
            Kernel::Mma => mma::backward(device, problem).map(|found| of(found, Gradient::Mma)),
            _ => matrix::backward(device, problem).map(|found| of(found, Gradient::Matrix)),
        };
        found.map_err(|why| pass_over(kernel, why)).ok()
    });
    let rows = || rows::wanted(device, asked).then(|| of(rows::backward(device, problem), Gradient::Rows));
    let gradients = gradients.or_else(rows);
    let tile = choose(device, problem, Stage::Backward, passed_over)?;
    let dalibi_slopes = problem.alibi_slopes.map(|_| tile);
    let reads = problem.score_tensors.iter().any(Option::is_some);
    let dscore_tensors = reads.then_some(tile);
    Ok(match (hopper, gradients) {
        (Some((dq, dkdv, dv)), _) => {
            let dbias = hopper::dbias(problem).map(BiasGradient::Hopper).unwrap_or_else(|why| {
                if problem.bias.is_some() {
                    passed_over.push(PassedOver { what: format!("dbias {}", Kernel::Hopper.name()), why });
                }
                BiasGradient::Portable(tile)
            });
            let fused = match problem.options.backward_order {
                BackwardOrder::Deterministic => None,
                BackwardOrder::Fast => hopper::fused(device, problem)
                    .map_err(|why| passed_over.push(PassedOver { what: "dq, dk and dv together".into(), why }))
                    .ok(),
            };
            BackwardTiles { dq, dkdv, dv, fused, dbias, dalibi_slopes, dscore_tensors }
        }
        (None, Some((dq, dkdv, dv))) => {
            BackwardTiles { dq, dkdv, dv, dalibi_slopes, dscore_tensors, ..BackwardTiles::portable(tile, true) }
        }
        (None, None) => {
            let portable = BackwardTiles::portable(tile, together(device, problem, &tile));
            BackwardTiles { dalibi_slopes, dscore_tensors, ..portable }
        }
    })
}

/// How a family computes `dq`; `dk`, and `dv` with it; and `dv`, if it takes a launch of its own.
fn of<T>(
    (dq, dkdv, dv): (T, T, Option<T>),
    gradient: impl Fn(T) -> Gradient,
) -> (Gradient, Gradient, Option<Gradient>) {
    (gradient(dq), gradient(dkdv), dv.map(gradient))
}

/// Kernels of the forward worth timing against each other: the planned one first, then at most `limit − 1` others of its family,
/// in the order of its table. All of them can run on such a device.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, Kernel};
/// use flash_attention_kernels::tiling::{Device, forward_candidates};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [1, 8, 1024, 64];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// for forward in forward_candidates(&Device::of(client), &problem, 3)? {
///     println!("{} of {} queries", forward.kernel().name(), forward.tile_q());
/// }
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "autotune")]
pub fn forward_candidates(
    device: &Device,
    problem: &AttentionProblem,
    limit: usize,
) -> Result<Vec<Forward>, AttentionError> {
    let planned = choose_forward(device, problem, None, &mut Vec::new())?;
    let others: Vec<Forward> = match planned {
        Forward::Hopper(planned) => {
            hopper::alternatives(device, problem, planned).into_iter().map(Forward::Hopper).collect()
        }
        Forward::Mma(_) => mma::forwards(device, problem).into_iter().map(Forward::Mma).collect(),
        Forward::Matrix(_) => {
            matrix::fitting(device, problem, Role::Forward).into_iter().map(Forward::Matrix).collect()
        }
        Forward::Rows(tile) => rows::alternatives(tile).into_iter().map(Forward::Rows).collect(),
        Forward::Portable(_) => portables(device, Stage::Forward).map(Forward::Portable).collect(),
    };
    let others =
        others.into_iter().filter(|other| *other != planned && check_forward_cubes(device, problem, other).is_ok());
    Ok(std::iter::once(planned).chain(others).take(limit).collect())
}

/// Kernels of the backward worth timing against each other, likewise. Each adds up in a fixed order, unless the problem asks for
/// [`BackwardOrder::Fast`].
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_kernels::tiling::{Device, backward_candidates};
///
/// # fn f(client: &cubecl::client::Client) -> Result<(), flash_attention_kernels::AttentionError> {
/// let shape = [1, 8, 1024, 64];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// assert!(backward_candidates(&Device::of(client), &problem, 3)?.iter().all(|tiles| tiles.fused.is_none()));
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "autotune")]
pub fn backward_candidates(
    device: &Device,
    problem: &AttentionProblem,
    limit: usize,
) -> Result<Vec<BackwardTiles>, AttentionError> {
    let planned = choose_backward(device, problem, None, &mut Vec::new())?;
    let gradients = |(dq, dkdv, dv)| BackwardTiles { dq, dkdv, dv, ..planned };
    let others: Vec<BackwardTiles> = match planned.dq {
        // Its tables have one row for each head dimension; where any order will do, there are two ways.
        Gradient::Hopper(_) => planned.fused.map(|_| BackwardTiles { fused: None, ..planned }).into_iter().collect(),
        Gradient::Mma(_) => mma::backwards(device, problem).into_iter().map(gradients).collect(),
        Gradient::Matrix(_) => matrix::backwards(device, problem).into_iter().map(gradients).collect(),
        Gradient::Rows(tile) => {
            let others = rows::alternatives(tile).into_iter().map(Gradient::Rows);
            others.map(|of| gradients((of, of, planned.dv.map(|_| of)))).collect()
        }
        Gradient::Portable(_) => portables(device, Stage::Backward)
            .map(|tile| BackwardTiles::portable(tile, together(device, problem, &tile)))
            .map(|tiles| {
                let BackwardTiles { dalibi_slopes, dscore_tensors, .. } = planned;
                BackwardTiles { dalibi_slopes, dscore_tensors, ..tiles }
            })
            .collect(),
    };
    let others =
        others.into_iter().filter(|other| *other != planned && check_backward_cubes(device, problem, other).is_ok());
    Ok(std::iter::once(planned).chain(others).take(limit).collect())
}

#[cfg(feature = "autotune")]
fn portables(device: &Device, stage: Stage) -> impl Iterator<Item = TileShape> {
    PORTABLE.into_iter().filter(move |tile| fits(device, tile, stage))
}

fn together(device: &Device, problem: &AttentionProblem, tile: &TileShape) -> bool {
    let rows = tile.tile_k / tile.units_q;
    let accumulated = rows * (tile.groups(problem.head_dim) + tile.groups(problem.head_dim_v));
    accumulated <= MAX_ACCUMULATED && check_bindings(device, problem, "dkdv", 7).is_ok()
}

/// What will run for this problem on this client's device.
pub fn plan(client: &Client, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    plan_on(&Device::of(client), problem)
}

/// What will run if it must be this kernel, as far as that has the parts.
pub fn plan_with(client: &Client, problem: &AttentionProblem, forward: Kernel) -> Result<Plan, AttentionError> {
    plan_for(&Device::of(client), problem, Some(forward))
}

/// How `dq`, `dk` and `dv` would be computed by one launch on such a device, whether or not that is what would be chosen.
///
/// ```no_run
/// use flash_attention_kernels::{AttentionProblem, tiling::{Device, fused_on}};
///
/// # fn f(client: &cubecl::client::Client, problem: &AttentionProblem) {
/// if let Some(gradient) = fused_on(&Device::of(client), problem) {
///     println!("tiles of {} queries", gradient.tile.tile_k);
/// }
/// # }
/// ```
pub fn fused_on(device: &Device, problem: &AttentionProblem) -> Option<HopperGradient> {
    hopper::fusible(device, problem).ok().map(|(_, gradient)| gradient)
}

/// What would run for this problem on such a device.
///
/// ```
/// use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype};
/// use flash_attention_kernels::tiling::{Device, plan_on};
///
/// let small = Device {
///     name: "the least that WebGPU promises".into(),
///     card: true,
///     shared_memory: 16 << 10,
///     units: 256,
///     bindings: 7,
///     cubes: (65535, 65535, 65535),
///     wide_addresses: false,
///     dtypes: vec![Dtype::F32],
///     multiprocessors: 0,
///     wgmma: false,
///     mma: Vec::new(),
///     plane: 0,
///     matrices: Vec::new(),
/// };
/// let shape = [1, 1, 128, 256];
/// let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default())?;
/// assert_eq!(plan_on(&small, &problem)?.forward.tile_q(), 32);
/// # Ok::<(), flash_attention_kernels::AttentionError>(())
/// ```
pub fn plan_on(device: &Device, problem: &AttentionProblem) -> Result<Plan, AttentionError> {
    plan_for(device, problem, None)
}

fn plan_for(device: &Device, problem: &AttentionProblem, asked: Option<Kernel>) -> Result<Plan, AttentionError> {
    problem.validate()?;
    check_dtype(device, problem.dtype)?;
    let mut passed_over = Vec::new();
    let forward = choose_forward(device, problem, asked, &mut passed_over)?;
    let backward = choose_backward(device, problem, asked, &mut passed_over)?;
    check_size(device, problem, &forward, &backward)?;
    check_bindings(device, problem, "forward", 5)?;
    if let Err(error) = check_bindings(device, problem, "dq", 6) {
        passed_over.push(PassedOver { what: "any backward".into(), why: error.to_string() });
    }
    Ok(Plan {
        forward,
        backward,
        saved_bytes: 4 * problem.rows() as u64,
        scratch_bytes: 4 * scratch_floats(device, problem) as u64,
        passed_over,
    })
}

/// Checks that the device reaches every element, were the tensors contiguous, and can start every cube.
fn check_size(
    device: &Device,
    problem: &AttentionProblem,
    forward: &Forward,
    backward: &BackwardTiles,
) -> Result<(), AttentionError> {
    let shapes =
        [("q", problem.q_shape()), ("k", problem.k_shape()), ("v", problem.v_shape()), ("o", problem.o_shape())];
    let extras = [("mask", problem.mask), ("bias", problem.bias)];
    for (argument, shape) in
        shapes.into_iter().chain(extras.into_iter().filter_map(|(name, shape)| Some((name, shape?))))
    {
        let reach = shape.iter().map(|n| *n as u64).product();
        if reach > u32::MAX as u64 && !device.wide_addresses {
            return Err(AttentionError::AddressSpace { argument, reach, device: device.name.clone() });
        }
    }
    check_forward_cubes(device, problem, forward)?;
    check_backward_cubes(device, problem, backward)
}

/// Checks that the device can start every cube: smaller tiles take more.
fn check_forward_cubes(device: &Device, problem: &AttentionProblem, forward: &Forward) -> Result<(), AttentionError> {
    let blocks = problem.seq_q.div_ceil(forward.tile_q());
    check_cubes(device, "forward", blocks, problem.batch * problem.num_heads_q)
}

/// Likewise of the backward.
fn check_backward_cubes(
    device: &Device,
    problem: &AttentionProblem,
    backward: &BackwardTiles,
) -> Result<(), AttentionError> {
    let (dq, dkdv) = (backward.dq.blocks(false).0, backward.dkdv.blocks(true).0);
    check_cubes(device, "dq", problem.seq_q.div_ceil(dq), problem.batch * problem.num_heads_q)?;
    check_cubes(device, "dkdv", problem.seq_k.div_ceil(dkdv), problem.batch * problem.num_heads_kv)
}

fn check_cubes(device: &Device, kernel: &'static str, blocks: usize, heads: usize) -> Result<(), AttentionError> {
    cube_count(device, kernel, (blocks as u64 * heads as u64).max(1)).map(|_| ())
}

/// Checks that the device binds `needed` buffers and those of what the problem adds at once.
pub(crate) fn check_bindings(
    device: &Device,
    problem: &AttentionProblem,
    kernel: &'static str,
    needed: usize,
) -> Result<(), AttentionError> {
    let extras: Vec<_> = [
        ("mask", problem.mask.is_some()),
        ("bias", problem.bias.is_some()),
        ("alibi_slopes", problem.alibi_slopes.is_some()),
        ("sinks", problem.sinks && kernel == "forward"),
        ("dropout_seed", problem.options.dropout > 0.0),
        ("sequences", problem.is_ragged()),
        ("block_mask", problem.block_mask.is_some()),
        ("score_tensors[0]", problem.score_tensors[0].is_some()),
        ("score_tensors[1]", problem.score_tensors[1].is_some()),
        ("mask_tensors[0]", problem.mask_tensors[0].is_some()),
        ("mask_tensors[1]", problem.mask_tensors[1].is_some()),
    ]
    .into_iter()
    .filter_map(|(name, there)| there.then_some(name))
    .collect();
    let (needed, available) = (needed + extras.len(), device.bindings);
    if needed <= available { Ok(()) } else { Err(AttentionError::Bindings { kernel, needed, extras, available }) }
}

/// f32 values of scratch: lse and delta of each row, the sums that a broadcast bias's gradient is folded from, and those of
/// `dq`.
pub(crate) fn scratch_floats(device: &Device, problem: &AttentionProblem) -> usize {
    let columns = if adds_dq(device, problem) { sums_columns(problem.head_dim) } else { 0 };
    (2 + columns) * stats_rows(problem) + bias_sums_len(problem)
}

/// Whether blocks of keys add to `dq`, which is kept in f32 then.
pub(crate) fn adds_dq(device: &Device, problem: &AttentionProblem) -> bool {
    problem.options.backward_order == BackwardOrder::Fast && hopper::fused(device, problem).is_ok()
}

/// Rows whose lse and delta have room in scratch. Heads are filled up, as there are kernels that load whole tiles, which those of
/// sequences begin anywhere.
pub(crate) fn stats_rows(problem: &AttentionProblem) -> usize {
    let multiple = stats_multiple(problem);
    let spare = if problem.is_ragged() { multiple } else { 0 };
    problem.batch * problem.num_heads_q * (problem.seq_q.next_multiple_of(multiple) + spare)
}

/// Which sums the gradient of this bias is made of.
pub(crate) fn bias_sums(shape: &[usize; 4], problem: &AttentionProblem) -> Sums {
    // A dimension of 1 that the scores have too broadcasts nothing.
    let varies = |dim: usize| shape[dim] == problem.scores_shape()[dim];
    match (varies(2), varies(3)) {
        (true, true) => Sums::Tile,
        (false, true) => Sums::Columns,
        (_, false) => Sums::Rows,
    }
}

/// Checks that blocks of a block mask, if there is one, consist of whole tiles.
pub(crate) fn check_blocks(problem: &AttentionProblem, (rows, columns): (usize, usize)) -> Result<(), AttentionError> {
    if problem.block_mask.is_none() || BLOCK.is_multiple_of(rows) && BLOCK.is_multiple_of(columns) {
        return Ok(());
    }
    let value = format!("{rows}×{columns}");
    Err(AttentionError::Unsupported {
        option: "tile",
        value,
        why: "where there is a block mask, tiles divide 128 queries and keys",
    })
}

/// Length of the buffer of these sums.
pub(crate) fn sums_len(sums: Sums, problem: &AttentionProblem) -> usize {
    match sums {
        Sums::Tile => 0,
        Sums::Columns => problem.batch * problem.num_heads_q * problem.seq_k,
        Sums::Rows => problem.rows(),
    }
}

/// Length of that which the gradients of the bias, of slopes and of tensors of functions are folded from, one after the other.
pub(crate) fn bias_sums_len(problem: &AttentionProblem) -> usize {
    let of_bias = problem.bias.map_or(0, |shape| sums_len(bias_sums(&shape, problem), problem));
    let of_slopes = problem.alibi_slopes.map_or(0, |_| sums_len(Sums::Rows, problem));
    let of_tensors = problem.score_tensors.into_iter().flatten();
    let of_tensors = of_tensors.map(|shape| sums_len(bias_sums(&shape, problem), problem)).max();
    of_bias.max(of_slopes).max(of_tensors.unwrap_or(0))
}

/// Whether the device computes with this element type.
pub(crate) fn check_dtype(device: &Device, dtype: Dtype) -> Result<(), AttentionError> {
    if device.dtypes.contains(&dtype) {
        return Ok(());
    }
    Err(AttentionError::DtypeUnsupported { dtype: dtype.name(), device: device.name.clone() })
}

/// What a kernel with these tiles is specialised for.
pub(crate) fn blueprint(problem: &AttentionProblem, tile: TileShape, factor: Factor) -> Blueprint {
    Blueprint {
        tile,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        factor,
        mask: problem.hides_pairs(),
        bias: problem.bias.is_some(),
    }
}

/// A grid of at least `cubes` cubes, as the device takes it.
pub(crate) fn cube_count(device: &Device, kernel: &'static str, cubes: u64) -> Result<(u32, u32, u32), AttentionError> {
    let (x_max, y_max, z_max) = (device.cubes.0 as u64, device.cubes.1 as u64, device.cubes.2 as u64);
    let x = cubes.min(x_max);
    let y = cubes.div_ceil(x).min(y_max);
    let z = cubes.div_ceil(x * y);
    // Cubes are numbered with the address type, 32 bits on most devices.
    if z > z_max || x * y * z > u32::MAX as u64 {
        let max = x_max.saturating_mul(y_max).saturating_mul(z_max).min(u32::MAX as u64);
        return Err(AttentionError::Grid { kernel, cubes, max });
    }
    Ok((x as u32, y as u32, z as u32))
}
