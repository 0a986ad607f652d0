//! Failures on the device: reading the result returns an error that names the cause, and the next call is correct.

use crate::alone::alone;
use crate::common::*;
use crate::unbuildable::{Panics, Refused};
use cubecl::client::Client;
use cubecl::logging::{LaunchObservation, LaunchObserver};
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::{
    AttentionError, AttentionOptions, BlockLists, Dtype, Gradients, Inputs, Saved, TensorView, backward, forward, plan,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, ThreadId};

/// A case with forward and all gradients.
fn case(options: AttentionOptions) -> Case {
    Case::new([1, 4, 4, 64, 64, 16, 16], Dtype::F32, options)
}

/// Asserts that the device still computes correct results.
fn assert_right(client: &Client) {
    case(AttentionOptions { causal: true, ..Default::default() }).check(client);
}

/// Runs forward and backward, with `k` in the caller's buffer if there is one. Returns the buffers of `o` and `dq`.
fn launched(client: &Client, case: &Case, k: Option<Handle>) -> Result<[Handle; 2], AttentionError> {
    let p = &case.problem;
    let empty = |shape: [usize; 4]| {
        TensorView::contiguous(client.empty(shape.iter().product::<usize>() * p.dtype.size()), shape)
    };
    let [q, own_k, v] = case.qkv(client);
    let k = k.map_or(own_k, |handle| TensorView::contiguous(handle, p.k_shape()));
    let mut inputs = Inputs::new(q, k, v);
    if let Some((states, lists)) = &case.shared_blocks {
        (inputs.block_mask, inputs.block_lists) = (Some(states.clone()), lists.clone());
    }
    let (o, dq) = (empty(p.o_shape()), empty(p.q_shape()));
    let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
    forward(client, p, &inputs, &o, &lse)?;
    let saved = Saved {
        o: o.clone(),
        lse,
        dout: place(client, p.dtype, p.o_shape(), Layout::Contiguous, &case.dout).view,
        dlse: None,
    };
    let gradients = Gradients { dq: Some(dq.clone()), ..Default::default() };
    backward(client, p, &inputs, &saved, &gradients)?;
    Ok([o, dq].map(|view| view.handle))
}

/// The error of reading this buffer.
fn read_error(client: &Client, handle: Handle) -> String {
    client.read_one(handle).expect_err("reading must fail, because no kernel wrote this buffer").to_string()
}

#[test]
fn a_buffer_larger_than_the_device_allocates() {
    let Some(client) = client() else { return };
    let largest = client.properties().memory.max_page_size;
    // Keys that cannot be allocated. Sizes are rounded up to whole vectors.
    let asked = largest.next_multiple_of(1024) + 1024;
    let keys = client.empty(asked as usize);
    let [o, dq] = launched(&client, &case(AttentionOptions::default()), Some(keys)).unwrap();
    for handle in [o, dq] {
        let error = read_error(&client, handle);
        assert!(error.contains(&asked.to_string()), "{error}");
    }
    assert_right(&client);
    // `plan()` reports an output that cannot be allocated.
    let seq = largest as usize / (256 * chosen_dtype().size()) + 1;
    let problem = Case { wanted: [false; 7], ..case(AttentionOptions::default()) }.problem;
    let long = |seq_q, head_dim_v| {
        let mut problem = problem;
        (problem.seq_q, problem.head_dim, problem.head_dim_v, problem.num_heads_q, problem.num_heads_kv) =
            (seq_q, 1, head_dim_v, 1, 1);
        plan(&client, &problem)
    };
    let bytes = (seq * 256 * chosen_dtype().size()) as u64;
    match long(seq, 256) {
        Err(AttentionError::Allocation { tensor: "o", bytes: found, max: Some(max), .. }) => {
            assert_eq!((found, max), (bytes, largest));
        }
        other => panic!("{other:?}"),
    }
    assert!(long(seq - 1, 256).is_ok());
}

#[test]
fn a_launch_that_is_refused() {
    let Some(client) = client() else { return };
    let with = |score_mod| case(AttentionOptions { score_mod: Some(score_mod), ..Default::default() });
    let [o, dq] = launched(&client, &with(ScoreFn::of::<Refused<false>>()), None).unwrap();
    for handle in [o, dq] {
        let error = read_error(&client, handle);
        assert!(error.contains("no device computes this score"), "{error}");
    }
    assert_right(&client);
    let [o, dq] = launched(&client, &with(ScoreFn::of::<Refused<true>>()), None).unwrap();
    client.read_one(o).expect("the forward does not use the refused derivative");
    let error = read_error(&client, dq);
    assert!(error.contains("no device computes this derivative"), "{error}");
    assert_right(&client);
}

#[test]
fn a_score_function_that_panics() {
    let Some(client) = client() else { return };
    let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Panics>()), ..Default::default() };
    let [o, dq] = launched(&client, &case(options), None).unwrap();
    for handle in [o, dq] {
        let error = read_error(&client, handle);
        assert!(error.contains("this score was never finished"), "{error}");
    }
    assert_right(&client);
}

/// Panics at the launch of this number on this thread.
struct PanicsAt(ThreadId, std::sync::atomic::AtomicUsize);

impl LaunchObserver for PanicsAt {
    fn launched(&self, kernel: &'static str) {
        use std::sync::atomic::Ordering;
        if thread::current().id() == self.0 && self.1.fetch_sub(1, Ordering::Relaxed) == 0 {
            panic!("{kernel} was to be launched");
        }
    }
}

/// After a panic between two launches of a call, the next call is correct: work tile counters and tile lists are still usable.
#[test]
fn a_call_that_panics_between_launches() {
    let Some(client) = client() else { return };
    // The observer sees all launches of the process.
    if !alone("failures::a_call_that_panics_between_launches", &[]) {
        return;
    }
    let plain = || case(AttentionOptions::default());
    // The call that panics and the next one share these tile lists.
    let blocks = || {
        let (shape, states) = ([1, 1, 2, 2], vec![2, 0, 1, 1]);
        let case = Case::new([1, 4, 4, 200, 200, 16, 16], Dtype::F32, AttentionOptions::default());
        let case = case.with_block_mask(shape, [128, 128], states);
        let states = case.blocks_on(&client).expect("the case has a block mask");
        Case { shared_blocks: Some((states, BlockLists::default())), ..case }
    };
    for of in [&plain as &dyn Fn() -> Case, &blocks] {
        let mut panics = 0;
        for launch in 0.. {
            let case = of();
            let observation = LaunchObservation::new(Arc::new(PanicsAt(thread::current().id(), launch.into())));
            let ran = catch_unwind(AssertUnwindSafe(|| case.run(&client).map(|_| ())));
            drop(observation);
            let Err(panic) = ran else { break };
            let message = panic.downcast_ref::<String>().expect("the panic's payload is a message");
            assert!(message.ends_with("was to be launched"), "{message}");
            panics += 1;
            case.check(&client);
        }
        assert!(panics >= 3, "{panics} launches, too few for a forward and a backward");
    }
}

/// Whether this lane runs on the software driver, whose memory can be limited and whose faults can be made persistent.
fn software_cuda(client: &Client) -> bool {
    lanes::device() == "cuda" && client.properties().identity.name.contains("(software)")
}

/// A device with 48 MiB of memory, nearly all of it in use.
#[test]
fn a_device_that_runs_out_of_memory() {
    let Some(client) = client() else { return };
    if !software_cuda(&client) {
        println!("skipped: only the memory of the software driver can be limited");
        return;
    }
    let test = "failures::a_device_that_runs_out_of_memory";
    if !alone(test, &[("SOFTWARE_CUDA_MEMORY", "50331648")]) {
        return;
    }
    let wide = Case::new([4, 16, 16, 128, 128, 64, 64], Dtype::F32, AttentionOptions::default());
    let blocks = wide.clone().with_block_mask([1, 1, 1, 1], [128, 128], vec![1]);
    let states = blocks.blocks_on(&client).expect("the case has a block mask");
    let blocks = Case { shared_blocks: Some((states, BlockLists::default())), ..blocks };
    let mut taken = Vec::new();
    for bytes in [1 << 20, 1 << 12, 1 << 8] {
        loop {
            taken.push(client.empty(bytes));
            assert!(taken.len() < 300_000, "more was allocated than the device's 48 MiB");
            if client.check(taken.last()).is_err() {
                break;
            }
        }
    }
    // These are the first calls of the process, so they also allocate memory that outlives a call (work tile counters, tile lists of a
    // block mask). These allocations fail as well.
    for case in [&wide, &blocks] {
        for handle in launched(&client, case, None).unwrap() {
            let error = read_error(&client, handle);
            assert!(error.contains("out of device memory allocating"), "{error}");
        }
    }
    drop(taken);
    for case in [&wide, &blocks] {
        for handle in launched(&client, case, None).unwrap() {
            client.read_one(handle).unwrap();
        }
    }
    assert_right(&client);
}

/// Kernel that writes 1 GiB past its tensor.
#[cube(launch_unchecked)]
fn stray(out: &mut [f32]) {
    out[ABSOLUTE_POS + 268_435_456] = 1.0f32;
}

/// After a persistent fault, every read and sync of the process fails. A new process computes correctly.
#[test]
fn a_device_that_failed() {
    let Some(of_lane) = client() else { return };
    if !software_cuda(&of_lane) {
        println!("skipped: only on the software driver can the device be made to fail");
        return;
    }
    let test = "failures::a_device_that_failed";
    if !alone(test, &[("SOFTWARE_CUDA_STICKY", "1")]) {
        // This process has a working device.
        assert_right(&of_lane);
        return;
    }
    let client = of_lane;
    assert_right(&client);
    let out = client.empty(4);
    // SAFETY: none. The write out of bounds is the planted fault.
    unsafe {
        let arg = BufferArg::from_raw_parts(out.clone(), 1);
        stray::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(1), arg);
    }
    let error = client.read_one(out).expect_err("the kernel broke the device").to_string();
    assert!(error.contains("The device was poisoned during launch") && error.contains("status 700"), "{error}");
    let [o, dq] = launched(&client, &case(AttentionOptions::default()), None).unwrap();
    for handle in [o, dq] {
        let error = client.read_one(handle).expect_err("the device has failed");
        assert!(error.is_device_poisoned(), "{error}");
    }
    let error = cubecl::future::block_on(client.sync()).expect_err("the device has failed");
    assert!(error.is_device_poisoned(), "{error}");
}
