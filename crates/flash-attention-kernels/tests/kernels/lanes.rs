//! The lanes that the suite is sent through, and what each of them must do: from the environment, and never from what the code under
//! test says of the device.
//!
//! `FLASH_TEST_DEVICE` is `wgpu` (the default), `vulkan` or `cuda`; `FLASH_TEST_ADAPTER` says what is behind the first two, `processor` or
//! `card`. `REQUIRE_WGPU=1` alone says that it is a processor, which is what CI has. Where nothing is said, any kernel of the device's lanes
//! may run. `FLASH_TEST_KERNEL` sends the suite through another kernel, in the element types that it multiplies.

use cubecl::client::Client;
use cubecl::ir::AddressType;
use flash_attention_kernels::tiling::Device;
use flash_attention_kernels::{Dtype, Kernel};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a device does in a lane.
struct Lane {
    device: &'static str,
    adapter: &'static str,
    /// What it computes with. Cases of another element type are skipped, and no others. `None`: what the driver offers.
    dtypes: Option<&'static [Dtype]>,
    /// The kernel that runs in f32, and there with a block mask.
    single: [Kernel; 2],
    /// The kernel that runs in half precision.
    half: Kernel,
    /// Whether tensors may lie further apart than 32 bits count. `None`: if the driver offers it.
    wide_addresses: Option<bool>,
}

const ALL: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

/// An H200, or one in software; Vulkan and WebGPU on a card, and on Mesa's processor.
const LANES: [Lane; 5] = [
    Lane {
        device: "cuda",
        adapter: "card",
        dtypes: Some(ALL),
        single: [Kernel::Mma, Kernel::Portable],
        half: Kernel::Hopper,
        wide_addresses: Some(true),
    },
    Lane {
        device: "vulkan",
        adapter: "card",
        dtypes: None,
        single: [Kernel::Portable; 2],
        half: Kernel::Matrix,
        wide_addresses: None,
    },
    Lane {
        device: "vulkan",
        adapter: "processor",
        dtypes: None,
        single: [Kernel::Rows; 2],
        half: Kernel::Matrix,
        wide_addresses: None,
    },
    Lane {
        device: "wgpu",
        adapter: "card",
        dtypes: Some(&[Dtype::F32, Dtype::F16]),
        single: [Kernel::Portable; 2],
        half: Kernel::Portable,
        wide_addresses: Some(false),
    },
    Lane {
        device: "wgpu",
        adapter: "processor",
        dtypes: Some(&[Dtype::F32, Dtype::F16]),
        single: [Kernel::Rows; 2],
        half: Kernel::Rows,
        wide_addresses: Some(false),
    },
];

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// `FLASH_TEST_DEVICE`.
pub fn device() -> String {
    variable("FLASH_TEST_DEVICE").unwrap_or_else(|| "wgpu".into())
}

/// What the environment says of the adapter.
fn adapter() -> Option<String> {
    let required = (device() == "wgpu" && variable("REQUIRE_WGPU").as_deref() == Some("1")).then(|| "processor".into());
    variable("FLASH_TEST_ADAPTER").or(required)
}

/// The lanes that it may be: one, if the environment says what it is.
fn lanes() -> impl Iterator<Item = &'static Lane> {
    let (device, adapter) = (device(), adapter());
    let known = LANES.iter().filter(move |lane| lane.device == device);
    let known: Vec<_> = known.filter(|lane| adapter.as_ref().is_none_or(|adapter| lane.adapter == adapter)).collect();
    assert!(
        !known.is_empty(),
        "no lane has FLASH_TEST_DEVICE={} and FLASH_TEST_ADAPTER={:?}",
        self::device(),
        self::adapter()
    );
    known.into_iter()
}

/// Whether that is what every lane has which it may be; `None` if they differ.
fn agreed<T: PartialEq>(of: impl Fn(&Lane) -> T) -> Option<T> {
    let mut all = lanes().map(of);
    let first = all.next()?;
    all.all(|other| other == first).then_some(first)
}

/// The kernel in place of the planned one: `FLASH_TEST_KERNEL`, of element types that it multiplies.
pub fn forced_kernel(dtype: Dtype) -> Option<Kernel> {
    let name = variable("FLASH_TEST_KERNEL")?;
    let found = Kernel::ALL.into_iter().find(|kernel| kernel.name() == name);
    let found =
        found.unwrap_or_else(|| panic!("FLASH_TEST_KERNEL={name}: it is one of {:?}", Kernel::ALL.map(Kernel::name)));
    let multiplies = dtype != Dtype::F32 || matches!(found, Kernel::Mma | Kernel::Rows | Kernel::Portable);
    multiplies.then_some(found)
}

/// Whether the lane's kernel takes block masks: those of `mma.sync` do not, where they are asked for by name.
pub fn takes_block_masks() -> bool {
    forced_kernel(Dtype::F16) != Some(Kernel::Mma)
}

/// Asserts that this is the kernel of the lane.
pub fn assert_kernel(ran: Kernel, dtype: Dtype, block_mask: bool) {
    let expected: Vec<Kernel> = match forced_kernel(dtype) {
        Some(kernel) => vec![kernel],
        None if dtype == Dtype::F32 => lanes().map(|lane| lane.single[usize::from(block_mask)]).collect(),
        None => lanes().map(|lane| lane.half).collect(),
    };
    assert!(expected.contains(&ran), "{} ran in {}, not one of {expected:?}", ran.name(), dtype.name());
}

/// Whether the lane has tensors that lie further apart than 32 bits count.
pub fn wide_addresses(client: &Client) -> bool {
    let offered = || client.properties().supports_address(AddressType::U64);
    agreed(|lane| lane.wide_addresses).flatten().unwrap_or_else(offered)
}

/// How many cases have been skipped.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Whether the lane computes with this element type: a device that does not do what the table says, or does more, is a failure. Where it
/// does not, the case is skipped and counted.
pub fn supports(client: &Client, dtype: Dtype) -> bool {
    let device = Device::of(client).dtypes.contains(&dtype);
    // Of an adapter of which nothing is said, the table does not know.
    let dtypes = if lanes().count() == 1 { lanes().find_map(|lane| lane.dtypes) } else { None };
    let stated = dtypes.map_or(device, |dtypes| dtypes.contains(&dtype));
    assert_eq!(device, stated, "whether the device computes in {}, and what the table of lanes says", dtype.name());
    if !stated {
        let skipped = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
        println!("skipped: a case in {}, which this lane has not; {skipped} so far", dtype.name());
    }
    stated
}
