//! Launches.

use super::graphs;
use super::memory::{Memory, memory};
use super::{Out, SHARED, Status, fail, failed, give, seed, settings};
use crate::machine::lanes::{LANES, Line};
use crate::machine::program::Program;
use crate::machine::tensor::{Swizzle, TensorMap};
use crate::machine::{Launch, Ranges, Settings};
use crate::{Error, Kind};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use std::time::Instant;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *const Program,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    _stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    if let Some(status) = failed() {
        return status;
    }
    // SAFETY: `cuModuleGetFunction` returned it, and its module is still loaded.
    let program = unsafe { &*function };
    let (grid, threads) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let dynamic_shared = shared_bytes as usize;
    let block = threads.iter().map(|threads| u64::from(*threads)).product::<u64>();
    let shared = dynamic_shared + program.shared_bytes;
    let missing = parameters.is_null() && !program.parameters.is_empty();
    if grid.contains(&0) || grid[1].max(grid[2]) > 65535 || !(1..=1024).contains(&block) || shared > SHARED || missing {
        eprintln!(
            "software-cuda: {} cannot be launched with {grid:?} blocks of {threads:?} and {shared} bytes",
            program.name
        );
        return Status::InvalidValue;
    }
    // A `Line` is at least as aligned as any parameter.
    let mut lines = vec![Line([0; LANES]); program.parameter_bytes.div_ceil(size_of::<Line>())];
    let start = lines.as_mut_ptr().cast::<u8>();
    for (nth, (offset, size)) in program.parameters.iter().enumerate() {
        // SAFETY: the caller has a pointer to each parameter, of the size that the kernel declares. The parser has placed all parameters
        // within `parameter_bytes`, and the lines hold as many bytes.
        unsafe { std::ptr::copy_nonoverlapping((*parameters.add(nth)).cast::<u8>(), start.add(*offset), *size) };
    }
    let call = Call { function, grid, threads, dynamic_shared, parameters: lines };
    // SAFETY: the module of the function is still loaded.
    graphs::record(call).unwrap_or_else(|call| unsafe { call.run() })
}

/// A valid launch with its parameters.
pub(super) struct Call {
    function: *const Program,
    grid: [c_uint; 3],
    threads: [c_uint; 3],
    dynamic_shared: usize,
    parameters: Vec<Line>,
}

// SAFETY: programs of loaded modules do not change.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

impl Call {
    /// Runs the launch.
    ///
    /// # Safety
    ///
    /// The module of its function must still be loaded.
    pub(super) unsafe fn run(&self) -> Status {
        // SAFETY: the caller guarantees it.
        run(unsafe { &*self.function }, self)
    }
}

fn run(program: &Program, call: &Call) -> Status {
    let Call { grid, threads, dynamic_shared, parameters, .. } = call;
    let start = parameters.as_ptr().cast::<u8>();
    let ranges = {
        let mut memory = memory();
        let Memory { allocated, globals, ranges, .. } = &mut *memory;
        let pieces = allocated.iter().map(|(at, piece)| (*at, *at + piece.bytes as u64, piece.written.clone()));
        let pieces = pieces.chain(globals.iter().map(|(begin, end)| (*begin, *end, None)));
        ranges.get_or_insert_with(|| Arc::new(Ranges::new(pieces.collect()))).clone()
    };
    let seed = seed();
    let launch = Launch {
        program,
        grid: *grid,
        threads: *threads,
        dynamic_shared: *dynamic_shared,
        // SAFETY: the lines hold this many bytes, all of them initialised, and outlive the launch.
        parameters: unsafe { std::slice::from_raw_parts(start, program.parameter_bytes) },
        memory: &ranges,
        settings: Settings { seed, ..settings() },
    };
    let begin = Instant::now();
    let result = launch.run();
    if std::env::var("SOFTWARE_CUDA_TRACE").is_ok_and(|value| value == "1") {
        eprintln!(
            "software-cuda: {:9.3} ms {} {grid:?} × {threads:?}",
            begin.elapsed().as_secs_f64() * 1e3,
            program.name
        );
    }
    let Err(error) = result else { return Status::Success };
    eprintln!("software-cuda: {error} (SOFTWARE_CUDA_SEED={seed})");
    fail(match error {
        Error::Fault { kind: Kind::Address, .. } => Status::IllegalAddress,
        Error::Fault { kind: Kind::Alignment, .. } => Status::MisalignedAddress,
        _ => Status::LaunchFailed,
    })
}

/// `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: *mut c_void,
    pub attributes: *mut c_void,
    pub count: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    function: *const Program,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller passes a complete description, which consists of plain numbers.
    let LaunchConfig { grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes, stream, count, .. } = unsafe { *config };
    if count > 0 {
        eprintln!("software-cuda: attributes of launches are not supported");
        return Status::NotSupported;
    }
    // SAFETY: `cuLaunchKernel` has the same contract.
    unsafe { cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: Out<'_, TensorMap>,
    data_type: c_uint,
    rank: c_uint,
    address: u64,
    extents: *const u64,
    strides: *const u64,
    sides: *const u32,
    element_strides: *const u32,
    interleave: c_uint,
    swizzle: c_uint,
    _promotion: c_uint,
    fill: c_uint,
) -> Status {
    let refuse = |what: &str| {
        eprintln!("software-cuda: cuTensorMapEncodeTiled: {what}");
        Status::InvalidValue
    };
    if !(1..=5).contains(&rank) {
        return refuse("it has 1 to 5 dimensions");
    }
    let rank = rank as usize;
    // SAFETY: the caller has one element for each dimension, and one stride less.
    let (extents, strides, sides, element_strides) = unsafe {
        let strides = if rank > 1 { std::slice::from_raw_parts(strides, rank - 1) } else { &[] };
        let slice = std::slice::from_raw_parts;
        (std::slice::from_raw_parts(extents, rank), strides, slice(sides, rank), slice(element_strides, rank))
    };
    let element = match data_type {
        0 => 1,                   // UINT8
        1 | 6 | 9 => 2,           // UINT16, FLOAT16, BFLOAT16
        2 | 3 | 7 | 10..=12 => 4, // UINT32, INT32, FLOAT32, FLOAT32_FTZ, TFLOAT32, TFLOAT32_FTZ
        4 | 5 | 8 => 8,           // UINT64, INT64, FLOAT64
        _ => return refuse("a type that is not supported"),
    };
    let swizzle = match swizzle {
        0 => Swizzle::None,
        1 => Swizzle::B32,
        2 => Swizzle::B64,
        3 => Swizzle::B128,
        _ => return refuse("a swizzle that is not supported"),
    };
    let inner = sides[0] * u32::from(element);
    if !address.is_multiple_of(16) {
        return refuse("the tensor must begin at a multiple of 16 bytes");
    }
    if strides.iter().any(|stride| stride % 16 != 0 || *stride >= 1 << 40) {
        return refuse("strides must be multiples of 16 bytes below 2^40");
    }
    if extents.iter().any(|extent| !(1..=1 << 32).contains(extent)) {
        return refuse("extents must be 1 to 2^32");
    }
    if sides.iter().any(|side| !(1..=256).contains(side)) || inner % 16 != 0 {
        return refuse("a box has 1 to 256 elements a side, and 16 bytes or a multiple along the first");
    }
    if swizzle != Swizzle::None && inner > 16 << swizzle as u32 {
        return refuse("the first side of a box is larger than the swizzle");
    }
    if interleave != 0 || fill != 0 || element_strides.iter().any(|stride| *stride != 1) {
        return refuse("interleaving, strides within boxes and filling with NaN are not supported");
    }
    give(map, TensorMap::new(address, element, extents, strides, sides, swizzle))
}
