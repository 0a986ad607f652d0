//! Streams, which never have pending work, and events.

use super::{Out, Status, give, health};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Mutex;
use std::time::Instant;

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

/// The recorded time.
type Event = Mutex<Option<Instant>>;

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<'_, *mut Event>, _flags: c_uint) -> Status {
    give(event, Box::into_raw(Box::new(Mutex::new(None))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut Event) -> Status {
    // SAFETY: `cuEventCreate` made it from a box, and the caller no longer uses it.
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
