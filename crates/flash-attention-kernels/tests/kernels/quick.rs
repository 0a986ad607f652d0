//! Software Vulkan compiles kernels without optimisation, because tests compile for seconds and run for milliseconds.

use std::sync::Once;

/// Disables optimisation in Mesa's compiler, unless `GALLIVM_PERF` is set. Every test that uses a device calls this first.
pub fn compile_quickly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("GALLIVM_PERF").is_none() {
            // SAFETY: drivers read the environment without the standard library's lock, but no driver is loaded yet: every test
            // that loads one calls this function first and waits for its end.
            unsafe { std::env::set_var("GALLIVM_PERF", "nopt") };
        }
    });
}
