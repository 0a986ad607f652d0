//! Choice of the device: the best GPU, or else the CPU, or what `--device` names.

use crate::error::Error;
#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm"))]
use burn::backend::DispatchDevice;
#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
use burn::backend::{CubeDevice, WgpuDeviceKind};
use burn::tensor::{Device, DeviceType};
use std::fmt::{Display, Formatter, Result as FmtResult};

/// Performance class of a device, which determines the default size of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Strength {
    /// A software adapter: a GPU's interface run by the CPU. Only chosen on request.
    Software,
    /// The CPU.
    Cpu,
    /// A GPU that shares the CPU's memory, or of unknown kind.
    Integrated,
    /// A GPU with its own memory.
    Discrete,
}

/// A device with its name.
pub struct Found {
    /// Without autodiff.
    pub device: Device,
    /// Its performance class.
    pub strength: Strength,
    /// `cuda:0`
    pub id: String,
}

impl Display for Found {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        if self.strength == Strength::Cpu {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            return write!(f, "CPU with {threads} threads ({})", self.id);
        }
        let name = adapter_name(&self.device).unwrap_or_else(|| "GPU".to_string());
        match self.strength {
            Strength::Software => write!(f, "{name}, in software ({})", self.id),
            _ => write!(f, "{name} ({})", self.id),
        }
    }
}

/// Waits, when dropped, until the devices have finished their queued work. Mesa compiles pipelines in its own threads. A process that exits
/// meanwhile dies of SIGSEGV, and its exit code is lost.
pub struct AtRest(pub Vec<Device>);

impl Drop for AtRest {
    fn drop(&mut self) {
        for device in &self.0 {
            // Errors have already been reported where a result was read.
            let _ = device.sync();
        }
    }
}

/// Chooses the device for `--device`: `auto`, or the name of a backend with an optional index, as in `cuda:1`.
///
/// # Errors
///
/// If this build has no such backend, or this machine has no such device.
pub fn choose(request: &str) -> Result<Found, Error> {
    if request == "auto" {
        let mut best: Option<Found> = None;
        for (name, device_type) in backends() {
            for found in enumerate(name, device_type) {
                // The first of equal devices is kept, because backends are listed best first.
                if found.strength > best.as_ref().map_or(Strength::Software, |best| best.strength) {
                    best = Some(found);
                }
            }
        }
        return best.ok_or_else(|| Error::NoDevice { request: request.to_string(), found: inventory() });
    }

    let unknown = || {
        let names: Vec<_> = ["auto"].into_iter().chain(backends().into_iter().map(|(name, _)| name)).collect();
        Error::UnknownDevice { request: request.to_string(), known: names.join(", ") }
    };
    let (name, index) = match request.split_once(':') {
        Some((name, index)) => (name, index.parse().map_err(|_| unknown())?),
        None => (request, 0),
    };
    let (name, device_type) = backends().into_iter().find(|(backend, _)| *backend == name).ok_or_else(unknown)?;
    enumerate(name, device_type)
        .into_iter()
        .nth(index)
        .ok_or_else(|| Error::NoDevice { request: request.to_string(), found: inventory() })
}

/// Chooses the devices for `--devices`: those with these `numbers` of the backend in `request`; without numbers, the device for `request`.
///
/// # Errors
///
/// The errors of [`choose`] for each device, and an error if a number is repeated: replicas on one device would share buffers, against
/// which Burn's collectives do not guard.
pub fn choose_all(request: &str, numbers: &[usize]) -> Result<Vec<Found>, Error> {
    let chosen = choose(request)?;
    if numbers.is_empty() {
        return Ok(vec![chosen]);
    }
    if let Some((_, number)) = numbers.iter().enumerate().find(|(at, number)| numbers[..*at].contains(number)) {
        return Err(Error::RepeatedDevice { number: *number });
    }
    let backend = chosen.id.split(':').next().unwrap_or_default();
    numbers.iter().map(|number| choose(&format!("{backend}:{number}"))).collect()
}

/// The compiled backends, best first.
fn backends() -> Vec<(&'static str, DeviceType)> {
    let backends: &[(&'static str, DeviceType)] = &[
        #[cfg(feature = "cuda")]
        ("cuda", DeviceType::Cuda),
        #[cfg(feature = "rocm")]
        ("rocm", DeviceType::Rocm),
        #[cfg(feature = "metal")]
        ("metal", DeviceType::Metal),
        #[cfg(feature = "vulkan")]
        ("vulkan", DeviceType::Vulkan),
        #[cfg(feature = "wgpu")]
        ("wgpu", DeviceType::Wgpu),
        #[cfg(feature = "flex")]
        ("flex", DeviceType::Flex),
    ];
    backends.to_vec()
}

/// Devices of a backend, real ones before software adapters.
fn enumerate(name: &str, device_type: DeviceType) -> Vec<Found> {
    let mut found: Vec<_> = Device::enumerate(device_type)
        .into_iter()
        .map(|device| Found { strength: strength(&device), id: String::new(), device })
        .collect();
    found.sort_by_key(|found| std::cmp::Reverse(found.strength));
    for (index, found) in found.iter_mut().enumerate() {
        found.id = if name == "flex" { name.to_string() } else { format!("{name}:{index}") };
    }
    found
}

/// The devices found, for an error message.
fn inventory() -> String {
    let found: Vec<_> = backends()
        .into_iter()
        .flat_map(|(name, device_type)| enumerate(name, device_type))
        .map(|found| match found.strength {
            Strength::Software => format!("{} (in software)", found.id),
            _ => found.id,
        })
        .collect();
    if found.is_empty() { "none that this build can use".to_string() } else { found.join(", ") }
}

#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm"))]
fn strength(device: &Device) -> Strength {
    match device.as_dispatch() {
        #[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
        DispatchDevice::Cube(CubeDevice::Wgpu(adapter)) => match adapter.kind {
            WgpuDeviceKind::Cpu => Strength::Software,
            WgpuDeviceKind::DiscreteGpu(_) => Strength::Discrete,
            _ => Strength::Integrated,
        },
        DispatchDevice::Cube(_) => Strength::Discrete,
        #[allow(unreachable_patterns)]
        _ => Strength::Cpu,
    }
}

#[cfg(not(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm")))]
fn strength(_: &Device) -> Strength {
    Strength::Cpu
}

/// Name of the device in its driver.
#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm"))]
fn adapter_name(device: &Device) -> Option<String> {
    device.identity().map(|identity| identity.name)
}

#[cfg(not(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "cuda", feature = "rocm")))]
fn adapter_name(_: &Device) -> Option<String> {
    None
}
