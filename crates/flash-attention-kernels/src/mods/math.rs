//! Mathematical functions for score modifications, computed by the hardware approximations of the device.
//!
//! On NVIDIA GPUs, CubeCL's own `exp`, `tanh` and `/` are accurate to the last place, at a cost. `exp` and `tanh` come from a
//! library of the CUDA toolkit. An exact division contains a function call for difficult operands, and next to a call the
//! assembler serialises warpgroup products. On other devices these functions are CubeCL's own, and on the host those of the
//! standard library.

use cubecl::prelude::*;

/// Whether inline PTX can be compiled: on CUDA through CubeCL's LLVM compiler, as [`Device::of`](crate::tiling::Device::of)
/// detects it.
#[cfg(feature = "cuda")]
fn compiles_ptx(scope: &Scope) -> bool {
    let features = scope.state().device_properties.as_ref().map(|properties| &properties.features);
    features.is_some_and(|features| !features.matmul.mma.is_empty() && !features.copy_async)
}

/// Defines a function of a number by three implementations: on the host, in kernels in general, and in inline PTX.
macro_rules! function {
    ($(#[$doc:meta])* $name:ident, $host:expr, $anywhere:expr, $ptx:expr) => {
        $(#[$doc])*
        pub fn $name(x: f32) -> f32 {
            $host(x)
        }

        #[doc(hidden)]
        pub mod $name {
            use cubecl::prelude::*;

            #[cube]
            fn anywhere(x: f32) -> f32 {
                $anywhere(x)
            }

            #[cfg(feature = "cuda")]
            #[cube]
            fn ptx(x: f32) -> f32 {
                $ptx(x)
            }

            pub fn expand(scope: &Scope, x: NativeExpand<f32>) -> NativeExpand<f32> {
                #[cfg(feature = "cuda")]
                if super::compiles_ptx(scope) {
                    return ptx::expand(scope, x);
                }
                anywhere::expand(scope, x)
            }
        }
    };
}

#[cfg(feature = "cuda")]
#[cube]
fn exp_by_base_2(x: f32) -> f32 {
    crate::ptx::ex2(x * comptime!(std::f32::consts::LOG2_E))
}

#[cfg(feature = "cuda")]
#[cube]
fn ln_by_base_2(x: f32) -> f32 {
    crate::ptx::lg2(x) * comptime!(std::f32::consts::LN_2)
}

#[cube]
fn inverse(x: f32) -> f32 {
    1.0f32 / x
}

function!(
    /// `e^x`.
    ///
    /// ```
    /// assert!((flash_attention_kernels::mods::exp(1.0) - std::f32::consts::E).abs() < 1e-6);
    /// ```
    exp, f32::exp, f32::exp, crate::mods::math::exp_by_base_2
);

function!(
    /// The natural logarithm of `x`.
    ///
    /// ```
    /// assert!((flash_attention_kernels::mods::ln(2.0) - std::f32::consts::LN_2).abs() < 1e-6);
    /// ```
    ln, f32::ln, f32::ln, crate::mods::math::ln_by_base_2
);

function!(
    /// `1 / x`.
    ///
    /// ```
    /// assert_eq!(flash_attention_kernels::mods::reciprocal(4.0), 0.25);
    /// ```
    reciprocal, |x: f32| 1.0 / x, crate::mods::math::inverse, crate::ptx::reciprocal
);

/// `tanh x`, computed as `1 − 2 / (1 + e^(2x))`, with an error of about 1e-7.
///
/// ```
/// assert!((flash_attention_kernels::mods::tanh(0.5) - 0.5f32.tanh()).abs() < 1e-6);
/// ```
#[cube]
pub fn tanh(x: f32) -> f32 {
    1.0f32 - 2.0f32 * reciprocal(1.0f32 + exp(2.0f32 * x))
}
