//! Calls that are refused. The error names the argument and its value. `plan()` returns the same error if it depends on no tensor. Nothing
//! is launched, no output changes, and the next call on the same client is correct.
//!
//! [`SITES`] lists every place in `src/launch` and `src/tiling` that makes an error, and the test that provokes it.

mod call;
mod limits;
mod tensors;

use std::collections::BTreeMap;
use std::path::Path;

/// Not provoked: the error needs 2^31 work tiles, whose tensors no device holds.
const OUT_OF_REACH: &str = "";

/// Places that make errors: the file, the error, the number of places, and the test that provokes them.
const SITES: &[(&str, &str, usize, &str)] = &[
    ("launch/backward.rs", "KernelUnavailable", 2, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/backward.rs", "Unsupported", 2, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/backward/sums.rs", "Unsupported", 1, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/blocks.rs", "Unsupported", 1, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/cache.rs", "CacheFull", 1, "caches::what_cannot_be_appended_is_refused"),
    ("launch/cache.rs", "Unsupported", 1, "e4m3_caches::caches_that_cannot_be_in_e4m3_are_refused"),
    ("launch/direct.rs", "KernelUnavailable", 2, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/e4m3.rs", "Buffer", 1, "e4m3_caches::caches_that_cannot_be_in_e4m3_are_refused"),
    ("launch/e4m3.rs", "Strides", 1, "e4m3_caches::caches_that_cannot_be_in_e4m3_are_refused"),
    ("launch/e4m3.rs", "Unsupported", 2, "e4m3_caches::caches_that_cannot_be_in_e4m3_are_refused"),
    ("launch/few_rows.rs", "KernelUnavailable", 1, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/forward.rs", "KernelUnavailable", 1, "refusals::limits::tiles_kernels_and_scratch"),
    ("launch/hopper/backward.rs", "KernelUnavailable", 1, "tiles::hoppers_gradients"),
    ("launch/hopper/dbias.rs", "Grid", 1, OUT_OF_REACH),
    ("launch/hopper/dbias.rs", "Unsupported", 2, "tiles::hoppers_gradient_of_a_bias"),
    ("launch/hopper/forward.rs", "KernelUnavailable", 1, "tiles::hoppers_forward"),
    ("launch/mma.rs", "KernelUnavailable", 1, "tiles::warps_products"),
    ("launch/mod.rs", "AddressSpace", 1, "refusals::tensors::tensors_that_do_not_fit"),
    ("launch/mod.rs", "Buffer", 1, "refusals::tensors::tensors_that_do_not_fit"),
    ("launch/mod.rs", "OutputOverlaps", 1, "refusals::tensors::tensors_that_do_not_fit"),
    ("launch/mod.rs", "Unsupported", 1, "refusals::tensors::tensors_that_the_problem_does_not_state"),
    ("launch/rotary.rs", "Allocation", 1, "rotary::what_cannot_be_rotated_is_refused"),
    ("launch/rotary.rs", "Unsupported", 1, "rotary::what_cannot_be_rotated_is_refused"),
    ("launch/tensor_core.rs", "Grid", 1, OUT_OF_REACH),
    ("tiling.rs", "KernelUnavailable", 1, "refusals::limits::what_this_device_lacks"),
    ("tiling.rs", "Unsupported", 1, "refusals::limits::tiles_kernels_and_scratch"),
    ("tiling/choice.rs", "KernelUnavailable", 1, "refusals::limits::what_this_device_lacks"),
    ("tiling/device.rs", "Bindings", 1, "plans::a_backward_that_binds_too_much_is_told_beforehand"),
    ("tiling/device.rs", "DtypeUnsupported", 1, "plans::what_the_device_cannot_do_is_refused"),
    ("tiling/device.rs", "Grid", 1, "refusals::limits::what_other_devices_lack"),
    ("tiling/lists.rs", "AddressSpace", 1, "refusals::limits::what_other_devices_lack"),
    ("tiling/plan.rs", "AddressSpace", 1, "refusals::limits::what_other_devices_lack"),
    ("tiling/plan.rs", "Allocation", 1, "failures::a_buffer_larger_than_the_device_allocates"),
    ("tiling/portable.rs", "NoTileFits", 1, "plans::tiles_follow_shared_memory"),
    ("tiling/portable.rs", "Unsupported", 1, "refusals::limits::tiles_kernels_and_scratch"),
];

/// Adds to `found` the number of places that make each error in the sources at a path.
fn sites(source: &Path, path: &Path, found: &mut BTreeMap<(String, String), usize>) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            sites(source, &entry.unwrap().path(), found);
        }
        return;
    }
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = path.strip_prefix(source).unwrap().to_string_lossy().replace('\\', "/");
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        let errors = line.split("AttentionError::").skip(1);
        let errors = errors.map(|rest| rest.chars().take_while(char::is_ascii_alphanumeric).collect());
        // `Kernel::unavailable` makes the error.
        let unavailable = line.matches(".unavailable(").map(|_| "KernelUnavailable".to_string());
        for error in errors.chain(unavailable) {
            *found.entry((file.clone(), error)).or_default() += 1;
        }
    }
}

#[test]
fn every_place_that_makes_an_error_is_known() {
    let of_crate = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (source, mut found) = (of_crate.join("src"), BTreeMap::new());
    for path in ["launch", "tiling", "tiling.rs"] {
        sites(&source, &source.join(path), &mut found);
    }
    let known = SITES.iter().map(|(file, error, count, _)| ((file.to_string(), error.to_string()), *count));
    assert_eq!(
        found,
        known.collect(),
        "an error is made in a place that is not in `SITES`: provoke it in a test (plans must find it if they can, and nothing is launched) \
         and add it to `SITES`"
    );
    for (file, error, _, test) in SITES.iter().filter(|site| site.3 != OUT_OF_REACH) {
        let (module, name) = test.rsplit_once("::").unwrap();
        let file_of_test = of_crate.join(format!("tests/kernels/{}.rs", module.replace("::", "/")));
        let tests = std::fs::read_to_string(file_of_test).unwrap();
        assert!(tests.contains(&format!("fn {name}()")), "{error} of {file}: there is no test {test}");
    }
}
