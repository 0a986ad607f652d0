//! The device: the best GPU that this build can use, else the CPU, or what `--device` names.

#[cfg(feature = "wgpu")]
use burn::backend::{CubeDevice, DispatchDevice, WgpuDeviceKind};
use burn::tensor::{Device, DeviceType};
use std::cmp::Reverse;

/// Kind of a device, in ascending order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A software adapter: a GPU's interface run by the CPU. Only chosen on request.
    Software,
    /// The CPU.
    Cpu,
    /// A GPU that shares the CPU's memory, or of unknown kind.
    Integrated,
    /// A GPU with its own memory.
    Discrete,
}

/// A device of this machine.
pub struct Found {
    /// Without autodiff.
    pub device: Device,
    /// Kind of the device.
    pub kind: Kind,
    /// Name of the device for `--device`: `cuda:0`.
    pub id: String,
}

/// Finds the device that `request` names: `auto`, or a backend with an optional index, as in `cuda:1`.
///
/// # Errors
///
/// If this build or this machine has no such device.
pub fn choose(request: &str) -> Result<Found, String> {
    let backends = backends();
    let named = |(name, _): &&(&str, DeviceType)| request == "auto" || request.split(':').next() == Some(name);
    let found = backends.iter().filter(named).flat_map(|(name, device_type)| enumerate(name, device_type.clone()));
    let found = match request {
        // The first of equal devices is kept.
        "auto" => found.filter(|found| found.kind > Kind::Software).min_by_key(|found| Reverse(found.kind)),
        _ => found.into_iter().find(|found| found.id == request || found.id == format!("{request}:0")),
    };
    let names: Vec<_> = backends.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| format!("--device {request} does not exist; it must be auto or one of {}", names.join(", ")))
}

/// Whether Burn's default device exists. Burn's optimizers load their state through it, whatever device the model is on.
pub fn default_exists() -> bool {
    let mut backends = backends().into_iter();
    std::env::var_os("BURN_DEVICE").is_some()
        || backends.next().is_some_and(|(name, device_type)| !enumerate(name, device_type).is_empty())
}

/// The backends of this build, in the order in which Burn chooses its default device.
fn backends() -> Vec<(&'static str, DeviceType)> {
    vec![
        #[cfg(feature = "cuda")]
        ("cuda", DeviceType::Cuda),
        #[cfg(feature = "metal")]
        ("metal", DeviceType::Metal),
        #[cfg(feature = "rocm")]
        ("rocm", DeviceType::Rocm),
        #[cfg(feature = "vulkan")]
        ("vulkan", DeviceType::Vulkan),
        #[cfg(feature = "wgpu")]
        ("wgpu", DeviceType::Wgpu),
        #[cfg(feature = "flex")]
        ("flex", DeviceType::Flex),
    ]
}

/// Devices of a backend, best first.
fn enumerate(name: &str, device_type: DeviceType) -> Vec<Found> {
    let found = |device| Found { kind: kind(name, &device), id: String::new(), device };
    let mut found: Vec<_> = Device::enumerate(device_type).into_iter().map(found).collect();
    found.sort_by_key(|found| Reverse(found.kind));
    found.iter_mut().enumerate().for_each(|(index, found)| found.id = format!("{name}:{index}"));
    found
}

#[cfg_attr(not(feature = "wgpu"), allow(unused_variables))]
fn kind(name: &str, device: &Device) -> Kind {
    #[cfg(feature = "wgpu")]
    if let DispatchDevice::Cube(CubeDevice::Wgpu(adapter)) = device.as_dispatch() {
        return match adapter.kind {
            WgpuDeviceKind::Cpu => Kind::Software,
            WgpuDeviceKind::DiscreteGpu(_) => Kind::Discrete,
            _ => Kind::Integrated,
        };
    }
    if name == "flex" { Kind::Cpu } else { Kind::Discrete }
}
