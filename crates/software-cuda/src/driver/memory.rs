//! Device memory, and copies.

use super::{Out, Status, give, health, refused, variable};
use crate::machine::Ranges;
use crate::machine::written::Written;
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

/// Default size of the device's memory in bytes. Only pages that are written take memory of the host.
const MEMORY: u64 = 141 << 30;

/// Alignment of allocations in bytes. An allocation ends exactly at its size, so that every access past it is detected.
const ALIGNMENT: usize = 512;

/// An allocation in global memory.
pub(super) struct Allocation {
    pub(super) bytes: usize,
    /// Offset of its first byte in the host's allocation.
    pub(super) offset: usize,
    /// Which bytes were written, if that is tracked.
    pub(super) written: Option<Arc<Written>>,
}

#[derive(Default)]
pub(super) struct Memory {
    /// Allocations by address.
    pub(super) allocated: BTreeMap<u64, Allocation>,
    /// Address ranges of modules' variables.
    pub(super) globals: Vec<(u64, u64)>,
    pub(super) bytes: usize,
    /// Memory that launches may access, cached until it changes.
    pub(super) ranges: Option<Arc<Ranges>>,
}

static MEMORY_STATE: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);

pub(super) fn memory() -> MutexGuard<'static, Memory> {
    MEMORY_STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Size of the device's memory in bytes.
pub(super) fn capacity() -> usize {
    static CAPACITY: OnceLock<usize> = OnceLock::new();
    *CAPACITY.get_or_init(|| variable("SOFTWARE_CUDA_MEMORY", MEMORY) as usize)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(to: Out<'_, u64>, bytes: usize) -> Status {
    if let Some(status) = refused() {
        return status;
    }
    let mut memory = memory();
    // Aligned by hand: for larger alignments, the host's allocator would zero the memory by writing to it.
    let Ok(layout) = Layout::from_size_align(bytes.saturating_add(ALIGNMENT), 1) else { return Status::InvalidValue };
    if bytes == 0 {
        return Status::InvalidValue;
    }
    if memory.bytes.saturating_add(bytes) > capacity() {
        return Status::OutOfMemory;
    }
    // SAFETY: the layout has a size of at least the alignment.
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
    // SAFETY: it was in the table, so `cuMemAlloc_v2` allocated it with this layout, `offset` bytes before. It is freed once.
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
    // SAFETY: calls are synchronous, so the contract is the same.
    unsafe { cuMemFree_v2(at) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> Status {
    give(free, capacity() - memory().bytes);
    give(total, capacity())
}

/// Size of the header, which holds the size of the allocation.
const HOST_HEADER: usize = 512;

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(to: Out<'_, *mut c_void>, bytes: usize) -> Status {
    let size = bytes.saturating_add(HOST_HEADER);
    let Ok(layout) = Layout::from_size_align(size, HOST_HEADER) else { return Status::InvalidValue };
    // SAFETY: the layout has a size of at least the header.
    let at = unsafe { std::alloc::alloc_zeroed(layout) };
    if at.is_null() {
        return Status::OutOfMemory;
    }
    // SAFETY: the header, which is aligned for a `usize`, and the bytes behind it were just allocated.
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
    // SAFETY: the caller frees memory from `cuMemAllocHost_v2`, which lies in one layout behind a header with its size.
    unsafe {
        let at = at.cast::<u8>().sub(HOST_HEADER);
        let bytes = at.cast::<usize>().read();
        std::alloc::dealloc(at, Layout::from_size_align_unchecked(bytes + HOST_HEADER, HOST_HEADER));
    }
    Status::Success
}

/// Whether a copy or memset stays within an allocation. Reports it on stderr if not.
pub(super) fn within(at: u64, bytes: usize) -> bool {
    let memory = memory();
    let around = memory.allocated.range(..=at).next_back();
    let fine = bytes == 0
        || around.is_some_and(|(begin, piece)| (at - begin).saturating_add(bytes as u64) <= piece.bytes as u64);
    if !fine {
        eprintln!("software-cuda: {bytes} bytes at {at:#x} are not all allocated");
    }
    fine
}

/// Whether a write stays within an allocation. If so, marks the bytes as written.
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

/// Copies, unless an earlier launch has failed and faults are sticky.
///
/// # Safety
///
/// `bytes` bytes may be read from `from` and written to `to`.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Status {
    if let Some(status) = refused() {
        return status;
    }
    // SAFETY: the caller guarantees it; the ranges may overlap.
    unsafe { std::ptr::copy(from, to, bytes) };
    Status::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Status {
    if !written_within(to, bytes) {
        return Status::InvalidValue;
    }
    // SAFETY: the destination was just found in the table of allocations, and the caller's source has as many bytes.
    unsafe { copy(to as *mut u8, from.cast(), bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    _stream: *mut c_void,
) -> Status {
    // SAFETY: calls are synchronous, so the contract is the same.
    unsafe { cuMemcpyHtoD_v2(to, from, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Status {
    if !within(from, bytes) {
        return Status::InvalidValue;
    }
    // SAFETY: the source was just found in the table of allocations, and the caller's destination has as many bytes.
    unsafe { copy(to.cast(), from as *const u8, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    _stream: *mut c_void,
) -> Status {
    // SAFETY: calls are synchronous, so the contract is the same.
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
    // SAFETY: calls are synchronous, so the contract is the same.
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

/// Source or destination of a 2D copy. Memory types: 1 is the host's, 2 the device's.
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
    // SAFETY: the caller passes a complete description, which consists of plain numbers.
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
        // SAFETY: rows on the device were just found in the table of allocations, and the caller has the rows on the host.
        unsafe { copy(to as *mut u8, from as *const u8, width) };
    }
    health()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy2d: *const Copy2d, _stream: *mut c_void) -> Status {
    // SAFETY: calls are synchronous, so the contract is the same.
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
    // SAFETY: calls are synchronous, so the contract is the same.
    unsafe { cuMemsetD8_v2(at, byte, bytes) }
}
