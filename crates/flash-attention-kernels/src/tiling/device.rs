//! The properties of a device that the choice of kernels depends on.

use super::require;
use crate::dtype::Dtype;
use crate::error::{AttentionError, Result};
use crate::problem::{AttentionProblem, MASK_TENSORS, SCORE_TENSORS};
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
        let sums = ElemType::Float(FloatKind::F32);
        let stores = |dtype: &Dtype| {
            let usage = properties.type_usage(element_type(*dtype));
            usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
        };
        let multiplies = |dtype: &Dtype| {
            let (factor, k) = match dtype {
                Dtype::F32 => (ElemType::Float(FloatKind::TF32), 8),
                half => (element_type(*half), 16),
            };
            let shaped = properties.features.matmul.mma.iter().any(|of| {
                let types = [of.a_type, of.b_type, of.cd_type] == [factor, factor, sums];
                types && (of.m, of.n, of.k) == (16, 8, k)
            });
            // `copy_async` is reported only by CubeCL's C++ compiler for CUDA, which cannot compile operations of this crate.
            shaped && !properties.features.copy_async
        };
        let matrices = |dtype: Dtype| {
            let factor = element_type(dtype);
            let all = properties.features.matmul.cmma.iter();
            all.filter(move |of| [of.a_type, of.b_type, of.cd_type] == [factor, factor, sums])
                .map(move |of| (dtype, [of.m as usize, of.n as usize, of.k as usize]))
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
            matrices: [Dtype::F16, Dtype::BF16].into_iter().flat_map(matrices).collect(),
        }
    }

    /// Checks that a thread block with this much shared memory and as many threads can run; else returns the reason.
    pub(super) fn has_room(&self, bytes: usize, units: usize) -> Result<(), String> {
        require(bytes <= self.shared_memory && units <= self.units, || {
            format!(
                "it needs {bytes} bytes of shared memory and {units} threads per thread block, but the device has {} and {}",
                self.shared_memory, self.units
            )
        })
    }
}

/// A problem on a device: what kernels and tiles are chosen for.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub device: &'a Device,
    pub problem: &'a AttentionProblem,
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
pub(crate) fn check_dtype(device: &Device, dtype: Dtype) -> Result<()> {
    if device.dtypes.contains(&dtype) {
        return Ok(());
    }
    Err(AttentionError::DtypeUnsupported { dtype: dtype.name(), device: device.name.clone() })
}

impl Case<'_> {
    /// Checks that the device can bind `needed` buffers and those of the problem's optional tensors at the same time.
    pub fn check_bindings(self, kernel: &'static str, needed: usize) -> Result<()> {
        let Case { device, problem } = self;
        let [score_a, score_b] = problem.score_tensors.map(|shape| shape.is_some());
        let [mask_a, mask_b] = problem.mask_tensors.map(|shape| shape.is_some());
        let extras: Vec<_> = [
            ("mask", problem.mask.is_some()),
            ("bias", problem.bias.is_some()),
            ("alibi_slopes", problem.alibi_slopes.is_some()),
            ("sinks", problem.sinks && kernel == "forward"),
            ("dropout_seed", problem.options.dropout > 0.0),
            ("sequences", problem.is_varlen()),
            ("block_mask", problem.block_mask.is_some()),
            ("page_table", problem.pages.is_some()),
            (SCORE_TENSORS[0], score_a),
            (SCORE_TENSORS[1], score_b),
            (MASK_TENSORS[0], mask_a),
            (MASK_TENSORS[1], mask_b),
        ]
        .into_iter()
        .filter_map(|(name, there)| there.then_some(name))
        .collect();
        let (needed, available) = (needed + extras.len(), device.bindings);
        if needed <= available { Ok(()) } else { Err(AttentionError::Bindings { kernel, needed, extras, available }) }
    }
}

/// A grid of at least `cubes` thread blocks within the device's limits. An empty grid cannot be launched, so that 0 thread blocks
/// give a grid of one.
pub(crate) fn cube_count(device: &Device, kernel: &'static str, cubes: u64) -> Result<CubeCount> {
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
