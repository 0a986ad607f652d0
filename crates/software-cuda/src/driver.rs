//! The CUDA driver API, as far as CubeCL calls it. Names, numbers and layouts are those of `cuda.h`, whose documentation goes for
//! the functions here, too.
//!
//! # Safety
//!
//! Callers keep the contract of `cuda.h`. Pointers are null where it allows that, or valid for what they are passed as; results go to
//! different places. Handles are those that this driver gave and has not taken back. No call frees or unloads what another one uses.
#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments)]

mod device;
mod launches;
mod memory;
mod modules;
mod streams;

use crate::machine::Settings;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

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

/// Bytes of shared memory that a block may ask for.
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
