//! Peak memory of work on a device.

#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm"))]
use burn::backend::DispatchDevice;
use burn::tensor::Device;
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Peak memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// In use on the device; on the CPU, resident in the process.
    pub bytes: u64,
    /// Reserved by the device's memory pool, including free memory; on the CPU there is no pool.
    pub reserved: Option<u64>,
}

/// Peak memory during `work`, if it can be measured.
///
/// On the CPU this is the peak of the whole process, so the measurement needs a process of its own.
pub fn peak(device: &Device, work: impl FnOnce()) -> Option<Peak> {
    match client(device) {
        Some(client) => Some(most_in_pool(client, work)),
        None => {
            work();
            most_resident().map(|bytes| Peak { bytes, reserved: None })
        }
    }
}

/// Allocations are made for launches, so the peak over all launches is the peak over all allocations.
fn most_in_pool(client: Client, work: impl FnOnce()) -> Peak {
    struct Watch {
        client: Client,
        in_use: AtomicU64,
        reserved: AtomicU64,
    }
    impl LaunchObserver for Watch {
        fn launched(&self, _kernel: &'static str) {
            let usage = self.client.memory_report(MemoryScope::Device).usage();
            self.in_use.fetch_max(usage.bytes_in_use, Ordering::Relaxed);
            self.reserved.fetch_max(usage.bytes_reserved, Ordering::Relaxed);
        }
    }
    let watch = Arc::new(Watch { client, in_use: AtomicU64::new(0), reserved: AtomicU64::new(0) });
    let observation = LaunchObservation::new(watch.clone());
    work();
    drop(observation);
    Peak { bytes: watch.in_use.load(Ordering::Relaxed), reserved: Some(watch.reserved.load(Ordering::Relaxed)) }
}

/// CubeCL's client of a device, if it has one.
#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm"))]
fn client(device: &Device) -> Option<Client> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.client()),
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

#[cfg(not(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm")))]
fn client(_: &Device) -> Option<Client> {
    None
}

/// Linux records the largest resident set of a process.
fn most_resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = most.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
