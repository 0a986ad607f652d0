//! The part of the CUDA driver API that CubeCL calls. Names, numbers and layouts are those of `cuda.h`, whose documentation applies to
//! these functions as well.
//!
//! # Safety
//!
//! Callers must keep the contract of `cuda.h`. Pointers are null where it allows null, or valid for the type that they are passed as.
//! Results are written to distinct addresses. Handles come from this driver and have not been destroyed. No call frees or unloads anything
//! that another call uses.
#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc)]

mod device;
mod graphs;
mod launches;
mod memory;
mod modules;
mod streams;

use crate::machine::Settings;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// Results of functions, `CUresult`.
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
    CaptureUnsupported = 900,
}

/// Maximum bytes of shared memory of a block.
const SHARED: usize = 227 << 10;

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

/// The fault that ended a launch, if faults are sticky.
static FAILED: Mutex<Option<Status>> = Mutex::new(None);

/// Records the fault, so that every later call returns it as on hardware, if `SOFTWARE_CUDA_STICKY` is set.
fn fail(status: Status) -> Status {
    if variable("SOFTWARE_CUDA_STICKY", 0) != 0 {
        FAILED.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(status);
    }
    status
}

/// The fault of an earlier launch, if faults are sticky.
fn failed() -> Option<Status> {
    *FAILED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Why a call that allocates, copies or waits is refused: an earlier fault, or that launches are recorded.
fn refused() -> Option<Status> {
    failed().or(graphs::is_recording().then_some(Status::CaptureUnsupported))
}

/// Status of a call that waits and cannot fail itself.
fn health() -> Status {
    refused().unwrap_or(Status::Success)
}

/// Seed of the next launch: `SOFTWARE_CUDA_SEED`, or else the number of the launch.
fn seed() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    variable("SOFTWARE_CUDA_SEED", LAUNCHES.fetch_add(1, Ordering::Relaxed))
}

/// Possibly uninitialised memory for a result; `None` is the null pointer.
type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a result; refuses null.
fn give<T>(to: Out<'_, T>, value: T) -> Status {
    let Some(to) = to else { return Status::InvalidValue };
    to.write(value);
    Status::Success
}
