//! The CUDA driver API, as far as CubeCL calls it. Names, numbers and layouts are those of `cuda.h`, whose documentation goes for
//! the functions here, too.
//!
//! # Safety
//!
//! Callers keep the contract of `cuda.h`. Pointers are null where it allows that, or valid for what they are passed as; results go to
//! different places. Handles are those that this driver gave and has not taken back. No call frees or unloads what another one uses.
#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments)]

use crate::machine::lanes::{LANES, Line};
use crate::machine::program::Program;
use crate::machine::tensor::{Swizzle, TensorMap};
use crate::machine::written::Written;
use crate::machine::{Launch, Ranges, Settings};
use crate::{Error, Kind, Module};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// What functions return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum Status {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidDevice = 101,
    InvalidPtx = 218,
    NotFound = 500,
    IllegalAddress = 700,
    MisalignedAddress = 716,
    LaunchFailed = 719,
    NotSupported = 801,
}

/// Bytes that the device has, unless it is told otherwise. Of the host's only those are taken that something was written to.
const MEMORY: u64 = 141 << 30;
/// Of the driver: CUDA 12.8, which loads PTX 8.7.
const VERSION: c_int = 12080;
/// Bytes of shared memory that a block may ask for.
const SHARED: usize = 227 << 10;

/// An allocation ends where it was asked to, so that everything past it is noticed.
const ALIGNMENT: usize = 512;

/// A piece of global memory.
struct Allocation {
    bytes: usize,
    /// Where in the host's allocation it begins.
    offset: usize,
    /// What of it was written, if that is looked after.
    written: Option<Arc<Written>>,
}

#[derive(Default)]
struct Memory {
    /// By their addresses.
    allocated: BTreeMap<u64, Allocation>,
    /// Variables of modules.
    globals: Vec<(u64, u64)>,
    bytes: usize,
    /// What of it launches are given, until it changes.
    ranges: Option<Arc<Ranges>>,
}

static MEMORY_STATE: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY_STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn variable(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Err(_) => default,
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, which is no number")),
    }
}

fn settings() -> Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    *SETTINGS.get_or_init(|| Settings {
        threads: variable(
            "SOFTWARE_CUDA_THREADS",
            std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64),
        )
        .max(1) as usize,
        seed: 0,
        checks: variable("SOFTWARE_CUDA_CHECKS", 1) != 0,
    })
}

/// Bytes that the device has.
fn capacity() -> usize {
    static CAPACITY: OnceLock<usize> = OnceLock::new();
    *CAPACITY.get_or_init(|| variable("SOFTWARE_CUDA_MEMORY", MEMORY) as usize)
}

/// The fault that a launch ended with, where faults stay.
static FAILED: Mutex<Option<Status>> = Mutex::new(None);

/// What every call returns from now on, as on hardware, if `SOFTWARE_CUDA_STICKY` says so.
fn fail(status: Status) -> Status {
    if variable("SOFTWARE_CUDA_STICKY", 0) != 0 {
        FAILED.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(status);
    }
    status
}

/// The fault of a launch before, if faults stay.
fn failed() -> Option<Status> {
    *FAILED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether calls succeed.
fn health() -> Status {
    failed().unwrap_or(Status::Success)
}

/// The seed of the next launch: the one that was asked for, else the launch's number.
fn seed() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    variable("SOFTWARE_CUDA_SEED", LAUNCHES.fetch_add(1, Ordering::Relaxed))
}

/// Room for a result, which may hold anything; `None` is the null pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a result; null is refused.
fn give<T>(to: Out<'_, T>, value: T) -> Status {
    let Some(to) = to else { return Status::InvalidValue };
    to.write(value);
    Status::Success
}

// -- the device

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

/// Writes a text and a zero behind it; null and too little room are refused.
///
/// # Safety
///
/// There is room for `length` characters, unless the pointer is null.
unsafe fn give_text(to: *mut c_char, length: c_int, text: &str) -> Status {
    if to.is_null() || length <= text.len() as c_int {
        return Status::InvalidValue;
    }
    // SAFETY: `length` was just found to be above the text's, so that the caller's room takes it and the zero.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> Status {
    // SAFETY: `cuda.h` has the caller state how much room there is.
    unsafe { give_text(name, length, "NVIDIA H200 (software)") }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, _device: c_int) -> Status {
    // SAFETY: `cuda.h` has the caller state how much room there is.
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

// -- contexts: there is one

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

// -- streams, which have nothing to wait for, and events

const STREAM: *mut c_void = std::ptr::without_provenance_mut(0x2000);

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<'_, *mut c_void>, _flags: c_uint) -> Status {
    give(stream, STREAM)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(stream: Out<'_, *mut c_void>, _flags: c_uint, _priority: c_int) -> Status {
    give(stream, STREAM)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(_stream: *mut c_void) -> Status {
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(_stream: *mut c_void) -> Status {
    health()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(_stream: *mut c_void) -> Status {
    health()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(_stream: *mut c_void, _event: *mut c_void, _flags: c_uint) -> Status {
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(_stream: *mut c_void, _mode: c_uint) -> Status {
    Status::NotSupported
}

/// The time that was recorded.
type Event = Mutex<Option<Instant>>;

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<'_, *mut Event>, _flags: c_uint) -> Status {
    give(event, Box::into_raw(Box::new(Mutex::new(None))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut Event) -> Status {
    // SAFETY: `cuEventCreate` made it of a box, and the caller uses it no more.
    drop(unsafe { Box::from_raw(event) });
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Option<&Event>, _stream: *mut c_void) -> Status {
    let Some(event) = event else { return Status::InvalidValue };
    *event.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Instant::now());
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(_event: *mut Event) -> Status {
    health()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(_event: *mut Event) -> Status {
    health()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(milliseconds: Out<'_, f32>, start: Option<&Event>, end: Option<&Event>) -> Status {
    let time = |event: Option<&Event>| *event?.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match (time(start), time(end)) {
        (Some(start), Some(end)) => give(milliseconds, (end - start).as_secs_f32() * 1e3),
        _ => Status::InvalidValue,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(
    milliseconds: Out<'_, f32>,
    start: Option<&Event>,
    end: Option<&Event>,
) -> Status {
    cuEventElapsedTime(milliseconds, start, end)
}

// -- memory

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(to: Out<'_, u64>, bytes: usize) -> Status {
    if let Some(status) = failed() {
        return status;
    }
    let mut memory = memory();
    // Aligned by hand: the host zeroes by hand what it aligns.
    let Ok(layout) = Layout::from_size_align(bytes.saturating_add(ALIGNMENT), 1) else { return Status::InvalidValue };
    if bytes == 0 {
        return Status::InvalidValue;
    }
    if memory.bytes.saturating_add(bytes) > capacity() {
        return Status::OutOfMemory;
    }
    // SAFETY: the layout has a size: that of the alignment at least.
    let at = unsafe { std::alloc::alloc_zeroed(layout) } as u64;
    if at == 0 {
        return Status::OutOfMemory;
    }
    let offset = at.next_multiple_of(ALIGNMENT as u64) - at;
    let at = at + offset;
    let written = (variable("SOFTWARE_CUDA_UNINITIALISED", 1) != 0).then(|| Arc::new(Written::new(bytes)));
    memory.allocated.insert(at, Allocation { bytes, offset: offset as usize, written });
    memory.bytes += bytes;
    memory.ranges = None;
    give(to, at)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> Status {
    let mut memory = memory();
    let Some(Allocation { bytes, offset, .. }) = memory.allocated.remove(&at) else { return Status::InvalidValue };
    memory.bytes -= bytes;
    memory.ranges = None;
    // SAFETY: the table had it, so `cuMemAlloc_v2` allocated it with this layout, `offset` bytes before, and it is freed once.
    unsafe {
        let layout = Layout::from_size_align_unchecked(bytes + ALIGNMENT, 1);
        std::alloc::dealloc((at as *mut u8).sub(offset), layout);
    }
    Status::Success
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(to: Out<'_, u64>, bytes: usize, _stream: *mut c_void) -> Status {
    cuMemAlloc_v2(to, bytes)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(at: u64, _stream: *mut c_void) -> Status {
    // SAFETY: nothing outlasts a call here, so that it has the same contract.
    unsafe { cuMemFree_v2(at) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> Status {
    give(free, capacity() - memory().bytes);
    give(total, capacity())
}

/// The size is kept in front of it.
const HOST_HEADER: usize = 512;

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(to: Out<'_, *mut c_void>, bytes: usize) -> Status {
    let size = bytes.saturating_add(HOST_HEADER);
    let Ok(layout) = Layout::from_size_align(size, HOST_HEADER) else { return Status::InvalidValue };
    // SAFETY: the layout has a size: that of the header at least.
    let at = unsafe { std::alloc::alloc_zeroed(layout) };
    if at.is_null() {
        return Status::OutOfMemory;
    }
    // SAFETY: the header, which is aligned for a number, and the bytes behind it are what was just allocated.
    let bytes_at = unsafe {
        at.cast::<usize>().write(bytes);
        at.add(HOST_HEADER)
    };
    give(to, bytes_at.cast())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(to: Out<'_, *mut c_void>, bytes: usize, _flags: c_uint) -> Status {
    cuMemAllocHost_v2(to, bytes)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(at: *mut c_void) -> Status {
    // SAFETY: the caller frees what `cuMemAllocHost_v2` gave, which lies behind a header with its size, in one layout.
    unsafe {
        let at = at.cast::<u8>().sub(HOST_HEADER);
        let bytes = at.cast::<usize>().read();
        std::alloc::dealloc(at, Layout::from_size_align_unchecked(bytes + HOST_HEADER, HOST_HEADER));
    }
    Status::Success
}

/// Whether a copy or the like stays within an allocation; says so if not.
fn within(at: u64, bytes: usize) -> bool {
    let memory = memory();
    let around = memory.allocated.range(..=at).next_back();
    let fine = bytes == 0
        || around.is_some_and(|(begin, piece)| (at - begin).saturating_add(bytes as u64) <= piece.bytes as u64);
    if !fine {
        eprintln!("software-cuda: {bytes} bytes at {at:#x} are not all allocated");
    }
    fine
}

/// The same, and if so, it is written.
fn written_within(at: u64, bytes: usize) -> bool {
    let fine = within(at, bytes);
    if let Some((begin, Allocation { written: Some(written), .. })) = memory().allocated.range(..=at).next_back()
        && fine
        && bytes > 0
    {
        written.mark((at - begin) as usize, bytes);
    }
    fine
}

/// Copies, unless a launch before has failed for good.
///
/// # Safety
///
/// So many bytes may be read from the one and written to the other.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Status {
    if let Some(status) = failed() {
        return status;
    }
    // SAFETY: the caller's promise; they may overlap.
    unsafe { std::ptr::copy(from, to, bytes) };
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Status {
    if !written_within(to, bytes) {
        return Status::InvalidValue;
    }
    // SAFETY: the destination was just found in the table of allocations, and the caller has as much to read.
    unsafe { copy(to as *mut u8, from.cast(), bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    _stream: *mut c_void,
) -> Status {
    // SAFETY: nothing outlasts a call here, so that it has the same contract.
    unsafe { cuMemcpyHtoD_v2(to, from, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Status {
    if !within(from, bytes) {
        return Status::InvalidValue;
    }
    // SAFETY: the source was just found in the table of allocations, and the caller has as much room.
    unsafe { copy(to.cast(), from as *const u8, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    _stream: *mut c_void,
) -> Status {
    // SAFETY: nothing outlasts a call here, so that it has the same contract.
    unsafe { cuMemcpyDtoH_v2(to, from, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> Status {
    if !within(from, bytes) || !written_within(to, bytes) {
        return Status::InvalidValue;
    }
    // SAFETY: both were just found in the table of allocations.
    unsafe { copy(to as *mut u8, from as *const u8, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: *mut c_void) -> Status {
    // SAFETY: nothing outlasts a call here, so that it has the same contract.
    unsafe { cuMemcpyDtoD_v2(to, from, bytes) }
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Copy2d {
    pub from: Side2d,
    pub to: Side2d,
    pub width: usize,
    pub height: usize,
}

/// One side of it. Memory types: 1 is the host's, 2 the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Side2d {
    pub x: usize,
    pub y: usize,
    pub memory_type: c_uint,
    pub host: *mut c_void,
    pub device: u64,
    pub array: *mut c_void,
    pub pitch: usize,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2D_v2(copy2d: *const Copy2d) -> Status {
    // SAFETY: the caller passes a whole description, which is plain numbers.
    let Copy2d { from, to, width, height } = unsafe { *copy2d };
    for row in 0..height {
        let place = |side: Side2d, within: fn(u64, usize) -> bool| {
            let offset = (side.y + row) * side.pitch + side.x;
            match side.memory_type {
                1 => Some(side.host as u64 + offset as u64),
                2 if within(side.device + offset as u64, width) => Some(side.device + offset as u64),
                _ => None,
            }
        };
        let (Some(from), Some(to)) = (place(from, within), place(to, written_within)) else {
            return Status::InvalidValue;
        };
        // SAFETY: rows of the device's were just found in the table of allocations; the caller has those of the host's.
        unsafe { copy(to as *mut u8, from as *const u8, width) };
    }
    health()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy2d: *const Copy2d, _stream: *mut c_void) -> Status {
    // SAFETY: nothing outlasts a call here, so that it has the same contract.
    unsafe { cuMemcpy2D_v2(copy2d) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(at: u64, byte: u8, bytes: usize) -> Status {
    if !written_within(at, bytes) {
        return Status::InvalidValue;
    }
    // SAFETY: the bytes were just found in the table of allocations.
    unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes) };
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(at: u64, byte: u8, bytes: usize, _stream: *mut c_void) -> Status {
    // SAFETY: nothing outlasts a call here, so that it has the same contract.
    unsafe { cuMemsetD8_v2(at, byte, bytes) }
}

// -- modules

/// What a link makes of PTX: the text, which ends with a zero.
pub struct Link {
    text: Vec<u8>,
    /// Where errors go, and how many characters there is room for.
    log: Option<(*mut u8, usize)>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkCreate_v2(
    count: c_uint,
    options: *const c_uint,
    values: *const *mut c_void,
    link: Out<'_, *mut Link>,
) -> Status {
    const ERROR_LOG_BUFFER: c_uint = 5;
    const ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
    let value = |option: c_uint| {
        // SAFETY: the caller has `count` options, and `nth` is below.
        let nth = (0..count as usize).find(|nth| unsafe { *options.add(*nth) } == option)?;
        // SAFETY: it has as many values.
        Some(unsafe { *values.add(nth) })
    };
    let log = value(ERROR_LOG_BUFFER).zip(value(ERROR_LOG_BUFFER_SIZE_BYTES));
    let log = log.map(|(buffer, size)| (buffer.cast(), size as usize));
    give(link, Box::into_raw(Box::new(Link { text: Vec::new(), log })))
}

/// Keeps PTX where it was asked for, by the name of its first kernel.
fn keep(text: &str) {
    let Ok(directory) = std::env::var("SOFTWARE_CUDA_PTX") else { return };
    let name = text
        .split_once(".entry")
        .and_then(|(_, rest)| rest.split(|c: char| c == '(' || c.is_whitespace()).find(|word| !word.is_empty()));
    let file = format!("{directory}/{}.ptx", name.unwrap_or("module"));
    if let Err(error) = std::fs::write(&file, text) {
        eprintln!("software-cuda: {file}: {error}");
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkAddData_v2(
    link: *mut Link,
    _kind: c_uint,
    data: *const c_void,
    size: usize,
    _name: *const c_char,
    _count: c_uint,
    _options: *const c_uint,
    _values: *const *mut c_void,
) -> Status {
    // SAFETY: `cuLinkCreate_v2` made the link, which no other call uses meanwhile; the caller has `size` bytes of data.
    let (link, text) = unsafe { (&mut *link, std::slice::from_raw_parts(data.cast::<u8>(), size)) };
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let result = match std::str::from_utf8(text) {
        Ok(text) => {
            keep(text);
            Module::new(text).map(|_| ()).map_err(|error| error.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = result {
        eprintln!("software-cuda: {error}");
        if let Some((log, size)) = link.log.filter(|(_, size)| *size > 0) {
            let length = error.len().min(size - 1);
            // SAFETY: the log that the link was created with has room for `size` characters: those and a zero.
            unsafe {
                std::ptr::copy_nonoverlapping(error.as_ptr(), log, length);
                log.add(length).write(0);
            }
        }
        return Status::InvalidPtx;
    }
    link.text = text.to_vec();
    link.text.push(0);
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkComplete(link: *mut Link, data: Out<'_, *mut c_void>, size: Out<'_, usize>) -> Status {
    // SAFETY: `cuLinkCreate_v2` made it, and no other call uses it meanwhile.
    let link = unsafe { &mut *link };
    give(data, link.text.as_mut_ptr().cast());
    give(size, link.text.len())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkDestroy(link: *mut Link) -> Status {
    // SAFETY: `cuLinkCreate_v2` made it of a box, and the caller uses it no more.
    drop(unsafe { Box::from_raw(link) });
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: Out<'_, *mut Module>, image: *const c_void) -> Status {
    // SAFETY: the caller passes PTX, which is text that ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    match Module::new(&text) {
        Ok(loaded) => {
            let mut memory = memory();
            memory.globals.extend(loaded.pieces());
            memory.ranges = None;
            give(module, Box::into_raw(Box::new(loaded)))
        }
        Err(error) => {
            eprintln!("software-cuda: {error}");
            Status::InvalidPtx
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: Out<'_, *mut Module>,
    image: *const c_void,
    _count: c_uint,
    _options: *const c_uint,
    _values: *const *mut c_void,
) -> Status {
    // SAFETY: the contract is the same but for the options, which are not read.
    unsafe { cuModuleLoadData(module, image) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut Module) -> Status {
    // SAFETY: `cuModuleLoadData` made it of a box, and the caller uses it and its functions no more.
    let module = unsafe { Box::from_raw(module) };
    let mut memory = memory();
    for piece in module.pieces() {
        memory.globals.retain(|other| *other != piece);
    }
    memory.ranges = None;
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: Out<'_, *const Program>,
    module: *mut Module,
    name: *const c_char,
) -> Status {
    // SAFETY: `cuModuleLoadData` made the module, which changes no more; the name ends with a zero.
    let (module, name) = unsafe { (&*module, CStr::from_ptr(name)) };
    match module.kernels.get(name.to_string_lossy().as_ref()) {
        Some(program) => give(function, program),
        None => Status::NotFound,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(_function: *const Program, attribute: c_int, value: c_int) -> Status {
    const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
    if attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES && value as usize > SHARED {
        return Status::InvalidValue;
    }
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    function: *const Program,
) -> Status {
    // SAFETY: `cuModuleGetFunction` gave it, of a module that is loaded still.
    let program = unsafe { &*function };
    let of = match attribute {
        0 => 1024,                          // MAX_THREADS_PER_BLOCK
        1 => program.shared_bytes as c_int, // SHARED_SIZE_BYTES
        3 => program.local_bytes as c_int,  // LOCAL_SIZE_BYTES
        8 => SHARED as c_int,               // MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ => 0,
    };
    give(value, of)
}

// -- launches

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
    // SAFETY: `cuModuleGetFunction` gave it, of a module that is loaded still.
    let program = unsafe { &*function };
    let (grid, threads) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let block = threads.iter().map(|threads| u64::from(*threads)).product::<u64>();
    let shared = shared_bytes as usize + program.shared_bytes;
    let missing = parameters.is_null() && !program.parameters.is_empty();
    if grid.contains(&0) || grid[1].max(grid[2]) > 65535 || !(1..=1024).contains(&block) || shared > SHARED || missing {
        eprintln!(
            "software-cuda: {} cannot be launched with {grid:?} blocks of {threads:?} and {shared} bytes",
            program.name
        );
        return Status::InvalidValue;
    }
    // Lines are aligned like anything that parameters hold.
    let mut bytes = vec![Line([0; LANES]); program.parameter_bytes.div_ceil(size_of::<Line>())];
    let start = bytes.as_mut_ptr().cast::<u8>();
    for (nth, (offset, size)) in program.parameters.iter().enumerate() {
        // SAFETY: the caller has a pointer to each parameter, of the size that the kernel states; the parser has put all within
        // `parameter_bytes`, for which there are lines enough.
        unsafe { std::ptr::copy_nonoverlapping((*parameters.add(nth)).cast::<u8>(), start.add(*offset), *size) };
    }
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
        grid,
        threads,
        dynamic_shared: shared_bytes as usize,
        // SAFETY: the lines have as many bytes, all of them initialised, and outlive the launch.
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
    // SAFETY: the caller passes a whole description, which is plain numbers.
    let LaunchConfig { grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes, stream, count, .. } = unsafe { *config };
    if count > 0 {
        eprintln!("software-cuda: attributes of launches are not supported");
        return Status::NotSupported;
    }
    // SAFETY: the contract of what is passed on is the same.
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
    // SAFETY: the caller has as many of each as there are dimensions, of strides one less.
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

// -- errors

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
