//! Speed and memory of the attention kernels: `cargo bench -p attention-bench -- --help`.

mod memory;
mod speed;

use clap::{Parser, ValueEnum};

/// Speed and memory of the attention kernels.
#[derive(Parser)]
struct Arguments {
    /// What to measure.
    #[arg(value_enum, default_value = "speed")]
    what: What,
    /// The device; each needs the feature of that name.
    #[arg(long, value_enum, default_value = "wgpu")]
    device: DeviceName,
    /// Time every tile shape that the device takes, not the chosen one alone.
    #[arg(long)]
    sweep: bool,
    /// Sizes that a software device can do.
    #[arg(long)]
    tiny: bool,
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// Time of each kernel, called directly.
    Speed,
    /// Memory of forward and backward through Burn's autodiff, by sequence length.
    Memory,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceName {
    Wgpu,
    Vulkan,
    Cuda,
}

impl DeviceName {
    fn open(self) -> Result<cubecl::Device, Box<dyn std::error::Error>> {
        use cubecl::device::WgpuDeviceKind::DefaultDevice;
        Ok(match self {
            DeviceName::Wgpu => cubecl::Device::wgpu(DefaultDevice)?,
            DeviceName::Vulkan => cubecl::Device::vulkan(DefaultDevice)?,
            DeviceName::Cuda => cubecl::Device::cuda(0)?,
        })
    }
}

/// Runs what the command line asks for; ends the process with code 2 and one sentence where that cannot be done.
pub fn main() {
    let arguments = Arguments::parse();
    let result = arguments.device.open().and_then(|device| match arguments.what {
        What::Speed => speed::run(&device, arguments.sweep, arguments.tiny),
        What::Memory => memory::run(device, arguments.tiny),
    });
    if let Err(error) = result {
        eprintln!("{error}");
        std::process::exit(2);
    }
}
