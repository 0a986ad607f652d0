//! The device, its context and the names of errors.

use super::memory::capacity;
use super::{Out, SHARED, Status, give, health, variable};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Version of the driver: CUDA 12.8, which loads PTX 8.7.
const VERSION: c_int = 12080;

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> Status {
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<'_, c_int>) -> Status {
    give(version, VERSION)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> Status {
    give(count, 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<'_, c_int>, ordinal: c_int) -> Status {
    if ordinal != 0 { Status::InvalidDevice } else { give(device, 0) }
}

/// Writes a text and a terminating zero; refuses null and buffers that are too small.
///
/// # Safety
///
/// The buffer holds `length` characters, unless the pointer is null.
unsafe fn give_text(to: *mut c_char, length: c_int, text: &str) -> Status {
    if to.is_null() || length <= text.len() as c_int {
        return Status::InvalidValue;
    }
    // SAFETY: `length` was just found to exceed the text's length, so the caller's buffer holds the text and the zero.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> Status {
    // SAFETY: `cuda.h` requires the caller to pass the size of the buffer.
    unsafe { give_text(name, length, "NVIDIA H200 (software)") }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, _device: c_int) -> Status {
    // SAFETY: `cuda.h` requires the caller to pass the size of the buffer.
    unsafe { give_text(id, length, "0000:00:00.0") }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: Out<'_, [u8; 16]>, _device: c_int) -> Status {
    give(uuid, *b"software hopper\0")
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, _device: c_int) -> Status {
    give(bytes, capacity())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: Out<'_, c_int>, attribute: c_int, _device: c_int) -> Status {
    let of = match attribute {
        1..=3 => 1024,                                               // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X, _Y
        4 => 64,                                                     // MAX_BLOCK_DIM_Z
        5 => c_int::MAX,                                             // MAX_GRID_DIM_X
        6 | 7 => 65535,                                              // MAX_GRID_DIM_Y, _Z
        8 => 48 << 10,                                               // MAX_SHARED_MEMORY_PER_BLOCK
        9 => 64 << 10,                                               // TOTAL_CONSTANT_MEMORY
        10 => 32,                                                    // WARP_SIZE
        11 => c_int::MAX,                                            // MAX_PITCH
        12 | 82 => 64 << 10,                                         // MAX_REGISTERS_PER_BLOCK, _PER_MULTIPROCESSOR
        13 => 1_980_000,                                             // CLOCK_RATE
        14 => 512,                                                   // TEXTURE_ALIGNMENT
        16 => variable("SOFTWARE_CUDA_MULTIPROCESSORS", 4) as c_int, // MULTIPROCESSOR_COUNT
        38 => 50 << 20,                                              // L2_CACHE_SIZE
        39 => 2048,                                                  // MAX_THREADS_PER_MULTIPROCESSOR
        40 | 41 => 1,                                                // ASYNC_ENGINE_COUNT, UNIFIED_ADDRESSING
        75 => 9,                                                     // COMPUTE_CAPABILITY_MAJOR
        81 => 228 << 10,                                             // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        97 => SHARED as c_int,                                       // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        106 => 32,                                                   // MAX_BLOCKS_PER_MULTIPROCESSOR
        111 => 1024,                                                 // RESERVED_SHARED_MEMORY_PER_BLOCK
        115 | 127 => 1, // MEMORY_POOLS_SUPPORTED, TENSOR_MAP_ACCESS_SUPPORTED
        _ => 0,
    };
    give(value, of)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(can: Out<'_, c_int>, _device: c_int, _peer: c_int) -> Status {
    give(can, 0)
}

const CONTEXT: *mut c_void = std::ptr::without_provenance_mut(0x1000);

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, *mut c_void>, _device: c_int) -> Status {
    give(context, CONTEXT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Status {
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> Status {
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<'_, *mut c_void>) -> Status {
    give(context, CONTEXT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<'_, c_int>) -> Status {
    give(device, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    health()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: Out<'_, c_int>, greatest: Out<'_, c_int>) -> Status {
    give(least, 0);
    give(greatest, -5)
}

fn described(status: c_int) -> Option<(&'static CStr, &'static CStr)> {
    Some(match status {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        218 => (c"CUDA_ERROR_INVALID_PTX", c"PTX that cannot be run; stderr says why"),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered; stderr says where"),
        716 => (c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address; stderr says where"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"launch failure; stderr says why"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        _ => return None,
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(status: c_int, name: Out<'_, *const c_char>) -> Status {
    match described(status) {
        Some((text, _)) => give(name, text.as_ptr()),
        None => Status::InvalidValue,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(status: c_int, text: Out<'_, *const c_char>) -> Status {
    match described(status) {
        Some((_, string)) => give(text, string.as_ptr()),
        None => Status::InvalidValue,
    }
}
