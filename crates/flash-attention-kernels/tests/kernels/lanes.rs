//! Lanes: the devices that the tests run on, with the element types and kernels expected on each. Expectations come from the environment,
//! never from the code under test.
//!
//! - `FLASH_TEST_DEVICE`: `wgpu` (the default), `vulkan` or `cuda`.
//! - `FLASH_TEST_ADAPTER`: `processor` or `card`, the adapter behind `wgpu` or `vulkan`. `REQUIRE_WGPU=1` without it means a processor, as
//!   in CI. Without both, the kernel of any lane of the device may run.
//! - `FLASH_TEST_KERNEL`: the kernel to use in place of the planned one, for the element types that it multiplies.

use cubecl::client::Client;
use cubecl::ir::AddressType;
use flash_attention_kernels::tiling::Device;
use flash_attention_kernels::{Dtype, Kernel};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Expectations for one device.
struct Lane {
    device: &'static str,
    adapter: &'static str,
    /// Element types that the device computes with. Only cases of other types are skipped. `None`: the types that the driver offers.
    dtypes: Option<&'static [Dtype]>,
    /// The kernel that runs in f32.
    single: Kernel,
    /// The kernel that runs in half precision.
    half: Kernel,
    /// Whether elements may be further apart than 32 bits address. `None`: if the driver offers it.
    wide_addresses: Option<bool>,
}

const ALL: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

/// CUDA on a Hopper GPU or on the software driver; Vulkan and WebGPU on a GPU and on Mesa's software adapter.
const LANES: [Lane; 5] = [
    Lane {
        device: "cuda",
        adapter: "card",
        dtypes: Some(ALL),
        single: Kernel::Mma,
        half: Kernel::Hopper,
        wide_addresses: Some(true),
    },
    Lane {
        device: "vulkan",
        adapter: "card",
        dtypes: None,
        single: Kernel::Portable,
        half: Kernel::Matrix,
        wide_addresses: None,
    },
    Lane {
        device: "vulkan",
        adapter: "processor",
        dtypes: None,
        single: Kernel::Rows,
        half: Kernel::Matrix,
        wide_addresses: None,
    },
    Lane {
        device: "wgpu",
        adapter: "card",
        dtypes: Some(&[Dtype::F32, Dtype::F16]),
        single: Kernel::Portable,
        half: Kernel::Portable,
        wide_addresses: Some(false),
    },
    Lane {
        device: "wgpu",
        adapter: "processor",
        dtypes: Some(&[Dtype::F32, Dtype::F16]),
        single: Kernel::Rows,
        half: Kernel::Rows,
        wide_addresses: Some(false),
    },
];

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The device, from `FLASH_TEST_DEVICE`.
pub fn device() -> String {
    variable("FLASH_TEST_DEVICE").unwrap_or_else(|| "wgpu".into())
}

/// The adapter, from `FLASH_TEST_ADAPTER` or `REQUIRE_WGPU`.
fn adapter() -> Option<String> {
    let required = (device() == "wgpu" && variable("REQUIRE_WGPU").as_deref() == Some("1")).then(|| "processor".into());
    variable("FLASH_TEST_ADAPTER").or(required)
}

/// Lanes that match the environment: one, if it names the adapter.
fn lanes() -> impl Iterator<Item = &'static Lane> {
    let (device, adapter) = (device(), adapter());
    let known = LANES.iter().filter(move |lane| lane.device == device);
    let known: Vec<_> = known.filter(|lane| adapter.as_ref().is_none_or(|adapter| lane.adapter == adapter)).collect();
    assert!(
        !known.is_empty(),
        "no lane has FLASH_TEST_DEVICE={} and FLASH_TEST_ADAPTER={:?}; see the table LANES",
        self::device(),
        self::adapter()
    );
    known.into_iter()
}

/// The value that all matching lanes have, or `None` if they differ.
fn agreed<T: PartialEq>(of: impl Fn(&Lane) -> T) -> Option<T> {
    let mut all = lanes().map(of);
    let first = all.next()?;
    all.all(|other| other == first).then_some(first)
}

/// The kernel named by `FLASH_TEST_KERNEL`, if it multiplies this element type.
pub fn forced_kernel(dtype: Dtype) -> Option<Kernel> {
    let name = variable("FLASH_TEST_KERNEL")?;
    let found = Kernel::ALL.into_iter().find(|kernel| kernel.name() == name);
    let found = found.unwrap_or_else(|| {
        panic!("FLASH_TEST_KERNEL is {name}; it must be one of {:?}", Kernel::ALL.map(Kernel::name))
    });
    let multiplies = dtype != Dtype::F32 || matches!(found, Kernel::Mma | Kernel::Rows | Kernel::Portable);
    multiplies.then_some(found)
}

/// The kernel that is planned for a step of decoding, if a family has one of its own: of this many queries of all query heads of a group
/// over this many keys.
fn kernel_of_few_rows(dtype: Dtype, rows: usize, keys: usize) -> Option<Kernel> {
    let planned = forced_kernel(dtype).is_none();
    match device().as_str() {
        "cuda" => {
            let few = rows <= 16 && keys >= 64 || rows <= 64 && keys >= 256;
            (planned && few).then_some(Kernel::Mma)
        }
        // Other GPUs in half precision, whose kernel is that of matrix products.
        "vulkan" => {
            let card = agreed(|lane| lane.adapter) != Some("processor");
            (planned && rows <= 16 && card && dtype != Dtype::F32).then_some(Kernel::Portable)
        }
        _ => None,
    }
}

/// A step of decoding: the number of queries of all query heads of a group, and of keys.
pub type FewRows = Option<[usize; 2]>;

/// Asserts that the kernel that ran a forward is the lane's or that of few rows for a step of `decoding`.
pub fn assert_kernel(ran: Kernel, dtype: Dtype, decoding: FewRows) {
    let few = decoding.and_then(|[rows, keys]| kernel_of_few_rows(dtype, rows, keys));
    if let Some(kernel) = few.filter(|_| agreed(|lane| lane.adapter).is_some()) {
        return assert_eq!(ran, kernel, "the kernel of a step of decoding");
    }
    let mut expected: Vec<Kernel> = match forced_kernel(dtype) {
        Some(kernel) => vec![kernel],
        None if dtype == Dtype::F32 => lanes().map(|lane| lane.single).collect(),
        None => lanes().map(|lane| lane.half).collect(),
    };
    // The adapter may be a GPU.
    expected.extend(few);
    assert!(expected.contains(&ran), "the kernel {} ran in {}; expected one of {expected:?}", ran.name(), dtype.name());
}

/// The kernel of the gradients, where `forward` is that of the forward of a step of `decoding` or of any other problem.
pub fn kernel_of_gradients(forward: Kernel, dtype: Dtype, decoding: FewRows) -> Kernel {
    let few = decoding.and_then(|[rows, keys]| kernel_of_few_rows(dtype, rows, keys));
    let planned = few.is_some() && dtype != Dtype::F32;
    if planned { agreed(|lane| lane.half).expect("the lane is known") } else { forward }
}

/// Whether the lane's device addresses elements further apart than 32 bits.
pub fn wide_addresses(client: &Client) -> bool {
    let offered = || client.properties().supports_address(AddressType::U64);
    agreed(|lane| lane.wide_addresses).flatten().unwrap_or_else(offered)
}

/// Number of skipped cases.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Whether the lane computes with this element type. If not, the case is skipped and counted. Fails if the device offers a type that the
/// table does not list, or lacks one that it lists.
pub fn supports(client: &Client, dtype: Dtype) -> bool {
    let device = Device::of(client).dtypes.contains(&dtype);
    // The table has no expectation if the environment does not name the adapter.
    let dtypes = if lanes().count() == 1 { lanes().find_map(|lane| lane.dtypes) } else { None };
    let stated = dtypes.map_or(device, |dtypes| dtypes.contains(&dtype));
    assert_eq!(
        device,
        stated,
        "whether the device computes in {} (left) and whether LANES says so (right)",
        dtype.name()
    );
    if !stated {
        let skipped = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
        println!("skipped: a case in {}, which this lane does not compute in; {skipped} so far", dtype.name());
    }
    stated
}
