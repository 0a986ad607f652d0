//! The devices under test, and the kernels that must run on them.

use super::quick;
use burn::tensor::Device;
use burn_flash_attention::AttentionPlan;
use flash_attention_kernels::{AttentionProblem, Dtype};

/// A device under test.
#[derive(Clone, Debug)]
pub struct Target {
    pub name: String,
    /// The device, without autodiff.
    pub device: Device,
    /// The forward kernel that must run in f32, or several, separated by bars.
    pub kernel: String,
    /// The forward kernel that must run in f16 and bf16.
    pub half: String,
}

impl Target {
    /// The kernel that must run, or several, separated by bars. Kernels of `mma.sync` take no block masks.
    pub fn expected_kernel(&self, problem: &AttentionProblem) -> &str {
        match problem.dtype {
            Dtype::F32 if self.kernel == "mma" && problem.block_mask.is_some() => "portable",
            Dtype::F32 => &self.kernel,
            _ => &self.half,
        }
    }
}

/// The devices under test.
pub fn targets() -> Vec<Target> {
    match std::env::var("FLASH_TEST_DEVICE") {
        Ok(name) => vec![target(&name).unwrap_or_else(|| {
            panic!("FLASH_TEST_DEVICE is {name}, but there is no such device, or its feature is not compiled in")
        })],
        Err(_) => ["flex", "wgpu"].into_iter().filter_map(target).collect(),
    }
}

/// The device of this name. If there is none or its feature is not compiled in, prints a message and returns `None`.
pub fn target(name: &str) -> Option<Target> {
    let device = device(name);
    if device.is_none() {
        let required = name == "wgpu" && std::env::var("REQUIRE_WGPU").as_deref() == Ok("1");
        assert!(!required, "REQUIRE_WGPU=1, but there is no wgpu device");
        eprintln!("skipped on {name}: there is no such device");
    }
    let named = |variable: &str, default: &str| std::env::var(variable).unwrap_or_else(|_| default.to_string());
    let (kernel, half) = match name {
        "flex" => ("host".to_string(), "host".to_string()),
        // A Hopper GPU, unless the environment names other kernels.
        "cuda" => (named("FLASH_TEST_KERNEL", "mma"), named("FLASH_TEST_HALF_KERNEL", "hopper")),
        _ => (named("FLASH_TEST_KERNEL", "portable|rows"), named("FLASH_TEST_HALF_KERNEL", "portable|rows")),
    };
    device.map(|device| Target { name: name.to_string(), device, kernel, half })
}

fn device(name: &str) -> Option<Device> {
    use burn::tensor::{DeviceKind, DeviceType};
    quick::compile_quickly();
    match name {
        #[cfg(feature = "flex")]
        "flex" => Some(Device::flex()),
        #[cfg(feature = "wgpu")]
        "wgpu" => Device::enumerate(DeviceType::Wgpu).into_vec().into_iter().next(),
        #[cfg(feature = "vulkan")]
        "vulkan" => Device::enumerate(DeviceType::Vulkan).into_vec().into_iter().next(),
        #[cfg(feature = "cuda")]
        "cuda" => Device::enumerate(DeviceType::Cuda).into_vec().into_iter().next(),
        _ => None,
    }
}

/// The name of the kernel that a plan chose.
pub fn kernel_name(plan: &AttentionPlan) -> &'static str {
    match plan {
        AttentionPlan::Host(_) => "host",
        AttentionPlan::Kernel(plan) => plan.forward.kernel().name(),
        other => panic!("{other:?}"),
    }
}
