//! Software Vulkan compiles kernels without optimisation: they run for milliseconds and compile for seconds.

use std::sync::Once;

/// Tells Mesa's compiler to leave optimisations out, unless `GALLIVM_PERF` says something else. Every test that uses a device calls this
/// before anything else.
pub fn compile_quickly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("GALLIVM_PERF").is_none() {
            // SAFETY: drivers read the environment without the standard library's lock, and none is loaded yet: whoever loads one has
            // been here before, and waits until this is done.
            unsafe { std::env::set_var("GALLIVM_PERF", "nopt") };
        }
    });
}
