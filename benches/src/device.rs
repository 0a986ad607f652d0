//! Devices, by name.

use crate::error::Error;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A runtime, on its default device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceName {
    /// WGSL on any adapter. A binary with the feature `vulkan` uses SPIR-V instead.
    Wgpu,
    /// SPIR-V through Vulkan.
    Vulkan,
    /// CUDA.
    Cuda,
}

impl DeviceName {
    /// Name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            DeviceName::Wgpu => "wgpu",
            DeviceName::Vulkan => "vulkan",
            DeviceName::Cuda => "cuda",
        }
    }

    /// The best device that this binary was built for: CUDA before Vulkan before WGSL.
    pub fn best() -> Self {
        if cfg!(feature = "cuda") {
            DeviceName::Cuda
        } else if cfg!(feature = "vulkan") {
            DeviceName::Vulkan
        } else {
            DeviceName::Wgpu
        }
    }

    /// Opens the device, if it exists.
    pub fn open(self) -> Result<cubecl::Device, Error> {
        use cubecl::device::WgpuDeviceKind::DefaultDevice;
        let device = match self {
            DeviceName::Wgpu => cubecl::Device::wgpu(DefaultDevice),
            DeviceName::Vulkan => cubecl::Device::vulkan(DefaultDevice),
            DeviceName::Cuda => cubecl::Device::cuda(0),
        };
        device.map_err(|error| Error::Device { name: self.name(), why: error.to_string() })
    }
}
