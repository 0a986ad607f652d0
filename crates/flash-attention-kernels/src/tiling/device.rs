//! The properties of a device that the choice of kernels depends on.

use crate::dtype::Dtype;
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::CubeCount;

/// Properties of a device that the choice of kernels depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The runtime's name.
    pub name: String,
    /// Whether there is a card behind the device. False for a CPU that computes by itself.
    pub card: bool,
    /// Bytes of shared memory available to a thread block.
    pub shared_memory: usize,
    /// Largest number of threads of a thread block.
    pub units: usize,
    /// Largest number of buffers that a kernel can bind.
    pub bindings: usize,
    /// Largest number of thread blocks of a launch along x, y and z.
    pub cubes: (u32, u32, u32),
    /// Whether buffers of more than 2^32 elements can be addressed.
    pub wide_addresses: bool,
    /// Element types that can be stored and converted.
    pub dtypes: Vec<Dtype>,
    /// Number of multiprocessors; 0 if unknown.
    pub multiprocessors: usize,
    /// Whether the device has warpgroup matrix products and TMA.
    pub wgmma: bool,
    /// Element types of warp-level matrix products `mma.sync` with f32 accumulation, if inline PTX can be compiled: for f16 and
    /// bf16 of shape 16 × 8 × 16, for f32 of shape 16 × 8 × 8 in tf32.
    pub mma: Vec<Dtype>,
    /// Threads of a warp, if all warps have the same number; otherwise 0.
    pub plane: usize,
    /// Shapes `[m, n, k]` of cooperative matrix products with f32 accumulation, by element type.
    pub matrices: Vec<(Dtype, [usize; 3])>,
}

impl Device {
    /// The properties of this client's device.
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
            // `copy_async` is reported only by CubeCL's C++ compiler for CUDA, which cannot compile operations of this crate.
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

/// The element type as CubeCL names it.
pub fn element_type(dtype: Dtype) -> ElemType {
    ElemType::Float(match dtype {
        Dtype::F32 => FloatKind::F32,
        Dtype::F16 => FloatKind::F16,
        Dtype::BF16 => FloatKind::BF16,
    })
}

/// Checks that the device supports this element type.
pub(crate) fn check_dtype(device: &Device, dtype: Dtype) -> Result<(), AttentionError> {
    if device.dtypes.contains(&dtype) {
        return Ok(());
    }
    Err(AttentionError::DtypeUnsupported { dtype: dtype.name(), device: device.name.clone() })
}

/// Checks that the device can bind `needed` buffers and those of the problem's optional tensors at the same time.
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
        ("sequences", problem.is_varlen()),
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

/// A grid of at least `cubes` thread blocks within the device's limits. An empty grid cannot be launched, so that 0 thread blocks
/// give a grid of one.
pub(crate) fn cube_count(device: &Device, kernel: &'static str, cubes: u64) -> Result<CubeCount, AttentionError> {
    let (x_max, y_max, z_max) = device.cubes;
    let (x, y, z) = sizes(device, cubes);
    // Thread blocks are numbered with the address type, which has 32 bits on most devices.
    let numbered = x as u64 * y as u64 * z as u64;
    if numbered < cubes || z > z_max || numbered > u32::MAX as u64 {
        let max = (x_max as u64).saturating_mul(y_max as u64).saturating_mul(z_max as u64).min(u32::MAX as u64);
        return Err(AttentionError::Grid { kernel, cubes, max });
    }
    Ok(CubeCount::Static(x, y, z))
}

/// [`cube_count`] for a number of thread blocks that has been checked.
pub(crate) fn grid(device: &Device, cubes: u64) -> CubeCount {
    let (x, y, z) = sizes(device, cubes);
    CubeCount::Static(x, y, z)
}

fn sizes(device: &Device, cubes: u64) -> (u32, u32, u32) {
    let cubes = cubes.max(1);
    let x = cubes.min(device.cubes.0 as u64);
    let y = cubes.div_ceil(x).min(device.cubes.1 as u64);
    let z = cubes.div_ceil(x * y).min(u32::MAX as u64);
    (x as u32, y as u32, z as u32)
}
