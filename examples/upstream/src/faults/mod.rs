//! The faults, a file each.

use crate::DeviceName::{self, Cuda, Flex, Vulkan, Wgpu};
use crate::Finding;
use burn::tensor::Device;

/// Something that Burn or CubeCL does wrong, and a program that shows it.
pub struct Fault {
    pub name: &'static str,
    pub what: &'static str,
    /// Where it may show.
    pub devices: &'static [DeviceName],
    /// What the program's process needs in its environment.
    pub environment: &'static [(&'static str, &'static str)],
    pub look: Look,
    /// Its source, which docs/upstream.md shows.
    #[cfg_attr(not(test), allow(dead_code, reason = "a test compares it with the page"))]
    pub program: &'static str,
}

pub enum Look {
    Burn(fn(&Device) -> Finding),
    CubeCl(fn(&cubecl::Device) -> Finding),
}

const EVERYWHERE: &[DeviceName] = &[Cuda, Vulkan, Wgpu, Flex];
const GPU: &[DeviceName] = &[Cuda, Vulkan, Wgpu];

/// Modules and the table of what is in them.
macro_rules! faults {
    ($($module:ident, $name:literal, $devices:expr, $environment:expr, $kind:ident, $what:literal;)*) => {
        $(mod $module;)*
        pub const FAULTS: &[Fault] = &[$(Fault {
            name: $name,
            what: $what,
            devices: $devices,
            environment: $environment,
            look: Look::$kind($module::look),
            program: include_str!(concat!(stringify!($module), ".rs")),
        }),*];
    };
}

/// Where Burn's default device cannot be found.
const NO_GPU: &[(&str, &str)] = &[
    ("CUDA_VISIBLE_DEVICES", "-1"),
    ("VK_DRIVER_FILES", "/nowhere"),
    ("VK_ICD_FILENAMES", "/nowhere"),
    ("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere"),
];

faults! {
    bf16_product, "bf16-product", EVERYWHERE, &[], Burn, "products of bf16 tensors by element are garbage";
    bf16_rounding, "bf16-rounding", EVERYWHERE, &[], Burn, "f32 is cut off to bf16, not rounded to nearest";
    bf16_range, "bf16-range", EVERYWHERE, &[], Burn, "Burn's attention of bf16 overflows where f16 would";
    causal_gradients, "causal-gradients", EVERYWHERE, &[], Burn, "gradients of Burn's causal attention are wrong";
    causal_f32, "causal-f32", &[Cuda], &[], Burn, "Burn's causal attention in f32 ends the device at GPT-2's size";
    column_sums, "column-sums", GPU, &[], Burn, "a sum over rows runs one thread a column";
    f32_products, "f32-products", EVERYWHERE, &[], Burn, "matrix products of f32 round their operands to tf32";
    repeated_bits, "repeated-bits", EVERYWHERE, &[], Burn, "operations do not repeat their bits";
    optimizer_device, "optimizer-device", &[Flex], NO_GPU, Burn, "an optimizer's state is loaded by way of a default device that is not there";
    lost_device, "lost-device", &[Vulkan, Wgpu], &[], Burn, "data of a lost device is read without an error";
    wait_timeout, "wait-timeout", &[Vulkan, Wgpu], &[], CubeCl, "a wait for a device panics, and a read gets no answer";
    field_alias, "field-alias", GPU, &[], CubeCl, "let x = self.field is the field, not a copy of it";
    negative_infinity, "negative-infinity", GPU, &[], CubeCl, "the constant −∞ is no WGSL";
    inline_asm, "inline-asm", &[Cuda], &[], CubeCl, "gpu_asm! has no lowering in the LLVM compiler";
}
