//! Failures after a call has returned: reading the result returns an error that names the cause, and the next call on the same device is
//! correct. Errors that can be known before are typed errors of the call.

mod common;
#[path = "../../flash-attention-kernels/tests/kernels/unbuildable.rs"]
mod unbuildable;

use burn::backend::DispatchDevice;
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_flash_attention::{AttentionError, FlashAttentionOptions, flash_attention, plan, try_flash_attention};
use common::{Data, How, Target, check, problem, random, targets};
use cubecl::client::Client;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::{AttentionOptions, Dtype};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use unbuildable::{Panics, Refused};

/// Runs one test at a time, because an observer of launches sees the whole process.
fn serial() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CubeCL's client of a device, or `None` for Flex.
fn client(device: &Device) -> Option<Client> {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => Some(device.client()),
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

/// Asserts that forward and gradients on this device are correct.
fn assert_right(target: &Target) {
    let options = AttentionOptions { causal: true, ..Default::default() };
    let problem = problem([1, 4, 2, 33, 40, 16, 16], Dtype::F32, options);
    check(&Data::random(problem.with_bias(&[1, 4, 1, 40]).unwrap(), 3), target, How::default());
}

/// The output and the gradient of `q`, or the message of a panic of the call or of the error of the read.
fn outcomes(target: &Target, options: &FlashAttentionOptions) -> [Result<TensorData, String>; 2] {
    let device = target.device.clone().autodiff();
    let leaf = || Tensor::<4>::random([1, 2, 20, 16], Distribution::Default, &device).require_grad();
    let (q, k, v) = (leaf(), leaf(), leaf());
    let caught = |work: &dyn Fn() -> Tensor<4>| {
        let read = catch_unwind(AssertUnwindSafe(|| work().try_into_data()));
        match read {
            Ok(read) => read.map_err(|error| error.to_string()),
            Err(panic) => Err(match panic.downcast::<String>() {
                Ok(message) => *message,
                Err(panic) => panic.downcast_ref::<&str>().expect("the panic's payload must be a message").to_string(),
            }),
        }
    };
    let out = || flash_attention(q.clone(), k.clone(), v.clone(), options);
    let gradient = || q.grad(&(out() + 1.0).sum().backward()).expect("q must have a gradient, because it is tracked");
    [caught(&out), caught(&gradient)]
}

/// Asserts that reading the output and reading the gradient fail with this reason.
fn assert_fail(target: &Target, options: &FlashAttentionOptions, why: &str) {
    for (what, outcome) in ["the output", "the gradient"].into_iter().zip(outcomes(target, options)) {
        let error = outcome.expect_err(what);
        assert!(error.contains(why), "{what} on {}: {error}", target.name);
    }
}

#[test]
fn a_launch_that_the_compiler_refuses() {
    let _serial = serial();
    for target in targets().iter().filter(|target| target.name != "flex") {
        let with = |score_mod| FlashAttentionOptions::new().with_score_mod(score_mod, []);
        assert_fail(target, &with(ScoreFn::of::<Refused<false>>()), "no device computes this score");
        assert_right(target);
        let [out, gradient] = outcomes(target, &with(ScoreFn::of::<Refused<true>>()));
        out.expect("the forward must run, because it does not need the derivative");
        let error = gradient.expect_err("the backward needs the derivative, which the compiler refuses");
        assert!(error.contains("no device computes this derivative"), "{error}");
        assert_right(target);
    }
}

#[test]
fn a_function_that_panics() {
    let _serial = serial();
    for target in &targets() {
        let options = FlashAttentionOptions::new().with_score_mod(ScoreFn::of::<Panics>(), []);
        assert_fail(target, &options, "this score was never finished");
        assert_right(target);
    }
}

/// A panic during the launch of a deferred operation, on the thread that runs Burn's queue.
#[test]
fn a_deferred_operation_that_panics() {
    use cubecl::logging::{LaunchObservation, LaunchObserver};
    struct PanicsAtAttention;
    impl LaunchObserver for PanicsAtAttention {
        fn launched(&self, kernel: &'static str) {
            assert!(!kernel.contains("flash_attention_kernels"), "a planted panic in a launch of attention");
        }
    }
    let _serial = serial();
    for target in targets().iter().filter(|target| target.name != "flex") {
        let observation = LaunchObservation::new(std::sync::Arc::new(PanicsAtAttention));
        let outcomes = outcomes(target, &FlashAttentionOptions::new());
        drop(observation);
        for outcome in outcomes {
            let error = outcome.expect_err("the launch must have panicked");
            assert!(error.contains("a planted panic in a launch of attention"), "{error}");
        }
        assert_right(target);
    }
}

/// An output larger than the device's largest allocation, or than the host's memory, is refused before anything is queued.
#[test]
fn an_output_that_cannot_be_allocated() {
    let _serial = serial();
    for target in &targets() {
        let device = &target.device;
        // Inputs are expanded from one row, so they need no memory.
        let of = |shape: [usize; 4]| Tensor::<4>::zeros([1, 1, 1, shape[3]], device).expand(shape);
        let largest = client(device).map(|client| client.properties().memory.max_page_size);
        let (batch, seq) = match largest {
            Some(largest) => (1, largest as usize / (256 * size_of::<f32>()) + 1),
            // More bytes than the address space has.
            None => (1 << 12, (1 << 30) - 1),
        };
        let (q, k, v) = (of([batch, 1, seq, 1]), of([batch, 1, 1, 1]), of([batch, 1, 1, 256]));
        let options = FlashAttentionOptions::new();
        let error = plan(&q, &k, &v, &options).unwrap_err();
        assert_eq!(try_flash_attention(q, k, v, &options).unwrap_err(), error);
        match &error {
            AttentionError::Allocation { tensor: "o", bytes, max, .. } => {
                assert_eq!((*bytes, *max), ((batch * seq * 256 * size_of::<f32>()) as u64, largest));
                assert!(error.to_string().starts_with(&format!("o takes {bytes} bytes")), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_right(target);
    }
}

/// An input that the device could not allocate. Only the device knows, so reading the result fails.
#[test]
fn an_input_that_could_not_be_allocated() {
    let _serial = serial();
    for target in &targets() {
        let Some(client) = client(&target.device) else { continue };
        let rows = client.properties().memory.max_page_size as usize / (256 * size_of::<f32>()) + 1;
        let large = Tensor::<4>::empty([1, 1, rows, 256], &target.device);
        let k = large.slice([0..1, 0..1, 0..20, 0..16]);
        let q = random([1, 1, 20, 16], &target.device);
        let out = flash_attention(q, k.clone(), k, &FlashAttentionOptions::new());
        let error = out.try_into_data().expect_err("reading must fail, because k was not allocated").to_string();
        assert!(error.contains(&(rows * 256 * size_of::<f32>()).to_string()), "{error}");
        assert_right(target);
    }
}

/// A device without free memory. Through wgpu CubeCL notices by a panic on its thread, so the result's error names the failed allocation
/// but not the reason. Freed memory is used again.
#[cfg(all(feature = "wgpu", target_os = "linux"))]
#[test]
fn a_device_that_runs_out_of_memory() {
    const ALONE: &str = "FLASH_TEST_ALONE";
    let _serial = serial();
    let Some(target) = targets().into_iter().find(|target| target.name == "wgpu") else { return };
    let client = client(&target.device).expect("a wgpu device has a client");
    if client.properties().identity.physical.is_some() {
        println!("skipped: the memory of a GPU cannot be limited, only that of a software adapter");
        return;
    }
    if std::env::var(ALONE).is_err() {
        // A software adapter uses the memory of the process, which is limited to 4 GB of addresses.
        let mut child = std::process::Command::new("sh");
        child.args(["-c", "ulimit -v 4000000 && exec \"$0\" --exact a_device_that_runs_out_of_memory --nocapture"]);
        child.arg(std::env::current_exe().expect("the path of the test program"));
        child.envs([(ALONE, "1"), ("RUST_BACKTRACE", "0"), ("RAYON_NUM_THREADS", "2")]);
        let output = child.output().expect("sh must start");
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    assert_right(&target);
    let in_use = || {
        target.device.sync().expect("the device must not have failed");
        client.memory_report(cubecl::MemoryScope::Device).usage().bytes_in_use
    };
    let rows = client.properties().memory.max_page_size as usize / (256 * size_of::<f32>());
    // Memory for the host while the device uses all of the rest.
    let reserve = vec![1u8; 64 << 20];
    let mut taken = Vec::new();
    let last = loop {
        let before = in_use();
        let tensor = Tensor::<4>::empty([1, 1, rows, 256], &target.device);
        if in_use() == before {
            break tensor;
        }
        taken.push(tensor);
        assert!(taken.len() < 64, "{} tensors of 128 MiB were allocated in 4 GB", taken.len());
    };
    drop(reserve);
    let k = last.slice([0..1, 0..1, 0..20, 0..16]);
    let q = random([1, 1, 20, 16], &target.device);
    let out = flash_attention(q, k.clone(), k, &FlashAttentionOptions::new());
    let error = out.try_into_data().expect_err("reading must fail, because k was not allocated").to_string();
    assert!(error.contains("Memory location was never initialized"), "{error}");
    assert!(taken.len() > 4, "only {} tensors were allocated", taken.len());
    drop(taken);
    assert_right(&target);
    let before = in_use();
    let again = Tensor::<4>::empty([1, 1, rows, 256], &target.device);
    assert!(in_use() > before, "freed memory must be allocated again");
    drop(again);
}

/// A lost device reports an error on every later use. Other devices of the process still compute.
#[cfg(feature = "wgpu")]
#[test]
fn a_device_that_is_lost() {
    use cubecl::wgpu::{AutoGraphicsApi, RuntimeOptions, WgpuDevice, init_device, init_setup, wgpu};
    let _serial = serial();
    let Some(target) = targets().into_iter().find(|target| target.name == "wgpu") else { return };
    let setup = init_setup::<AutoGraphicsApi>(&WgpuDevice::default(), RuntimeOptions::default());
    let below = setup.device.clone();
    let device = Device::new(cubecl::Device::Wgpu(init_device(setup, RuntimeOptions::default())));
    let lost = Target { device: device.clone(), ..target.clone() };
    assert_right(&lost);
    below.destroy();
    below.poll(wgpu::PollType::wait_indefinitely()).ok();
    let error = device.sync().expect_err("the device must be lost");
    assert!(error.is_device_poisoned(), "{error}");
    let q = random([1, 2, 20, 16], &device);
    let out = flash_attention(q.clone(), q.clone(), q, &FlashAttentionOptions::new());
    // Burn copies data lazily: `try_into_data` succeeds, and only looking at the data fails.
    let error = out.try_into_vec_as::<f32>().expect_err("the device must be lost");
    assert!(error.to_string().contains("The device is poisoned"), "{error}");
    assert_right(&target);
}
