//! Faults that attention kernels of other projects have had.

use crate::common::*;
use cubecl::prelude::*;
use flash_attention_kernels::{
    AttentionError, AttentionOptions, Dtype, Gradients, RowsTile, Saved, Scratch, TensorView, TileShape, backward,
    backward_with, forward, forward_with,
};

/// A case that runs every kernel: partial tiles, grouped heads, a bias whose gradient is summed.
fn rich() -> Case {
    Case::new([2, 4, 2, 70, 90, 16, 16], Dtype::F32, causal()).with_bias([1, 4, 1, 90]).with_dlse()
}

fn all_of(results: &Results) -> Vec<Vec<f64>> {
    let [dq, dk, dv, dbias] = [&results.dq, &results.dk, &results.dv, &results.dbias].map(|g| g.clone().unwrap());
    vec![results.o.clone(), results.lse.clone(), dq, dk, dv, dbias]
}

#[test]
fn nothing_depends_on_what_outputs_and_scratch_held() {
    let Some(client) = client() else { return };
    let nan = rich().run(&client).unwrap();
    let huge = Case { poison: Poison::Huge, ..rich() }.run(&client).unwrap();
    assert_eq!(all_of(&nan), all_of(&huge));
    assert!(all_of(&nan).iter().flatten().all(|x| x.is_finite()));
}

#[test]
fn every_run_gives_the_same_bits() {
    let Some(client) = client() else { return };
    let first = rich().run(&client).unwrap();
    let asked =
        std::env::var("FLASH_TEST_REPEATS").ok().map(|n| n.parse().expect("FLASH_TEST_REPEATS must be a number"));
    for _ in 0..asked.unwrap_or(if thorough() { 100 } else { 3 }) {
        assert_eq!(all_of(&rich().run(&client).unwrap()), all_of(&first));
    }
}

/// Twenty shapes: head dimensions of every kernel, full, causal and windowed, grouped heads, lengths that are no multiple of a tile.
fn many_shapes() -> Vec<Case> {
    let window = AttentionOptions { window_left: Some(200), ..causal() };
    let options = [AttentionOptions::default(), causal(), window, AttentionOptions { softcap: Some(5.0), ..causal() }];
    let sizes: [Sizes; 5] = [
        [2, 4, 2, 300, 300, 64, 64],
        [1, 8, 8, 515, 515, 128, 128],
        [1, 3, 1, 257, 640, 96, 40],
        [1, 4, 2, 200, 330, 192, 128],
        [1, 2, 2, 384, 384, 256, 256],
    ];
    let case = |sizes, options| Case::new(sizes, Dtype::F32, options);
    sizes.into_iter().flat_map(|sizes| options.map(|options| case(sizes, options))).collect()
}

/// Repeats the backward alone, from one forward, and compares bytes. This is fast enough for many repetitions, also beside other work.
#[test]
fn every_backward_gives_the_same_bits() {
    let Some(client) = client() else { return };
    let repeats: usize = std::env::var("FLASH_TEST_REPEATS")
        .map_or(if thorough() { 50 } else { 2 }, |n| n.parse().expect("FLASH_TEST_REPEATS must be a number"));
    let shapes = many_shapes();
    let shapes = if thorough() { &shapes[..] } else { &shapes[..2] };
    for case in shapes {
        let p = &case.problem;
        let size = p.dtype.size();
        let [q, k, v] = case.qkv(&client);
        let inputs = flash_attention_kernels::Inputs::new(q, k, v);
        let empty =
            |shape: [usize; 4]| TensorView::contiguous(client.empty(size * shape.iter().product::<usize>()), shape);
        let o = empty(p.o_shape());
        let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
        let plan = case.plan(&client).unwrap();
        forward_with(&client, p, &inputs, &o, &lse, plan.forward).unwrap();
        let scratch = Scratch::empty(&client, p);
        let saved = Saved {
            o,
            lse,
            dout: place(&client, p.dtype, p.o_shape(), Layout::Contiguous, &case.dout).view,
            dlse: None,
        };
        let mut first = None;
        for _ in 0..=repeats {
            let views = [p.q_shape(), p.k_shape(), p.v_shape()].map(empty);
            let [dq, dk, dv] = views.clone().map(Some);
            let gradients = Gradients { dq, dk, dv, ..Default::default() };
            backward_with(&client, p, &inputs, &saved, &gradients, &scratch, Some(plan.backward)).unwrap();
            let bytes = views.map(|view| client.read_one_unchecked(view.handle).to_vec());
            let first = first.get_or_insert_with(|| bytes.clone());
            assert!(*first == bytes, "{p:?}");
        }
    }
}

/// Kernel with a planted fault: it writes one element past its tensor.
#[cube(launch_unchecked)]
fn overrun(out: &mut Tensor<f32>, extra: usize) {
    if ABSOLUTE_POS < out.len() + extra {
        out[ABSOLUTE_POS] = 1.0f32;
    }
}

#[test]
fn the_guards_notice_a_planted_overrun() {
    let Some(client) = client() else { return };
    for (extra, noticed) in [(0, false), (1, true)] {
        let out = Guarded::output(&client, Dtype::F32, [1, 1, 10, 10], Poison::Nan);
        let TensorView { handle, shape, strides } = out.view.clone();
        // SAFETY: the overrun stays within the guards, and the stray write within the memory pool, or a sanitizer reports it.
        unsafe {
            let arg = TensorArg::from_raw_parts(handle, strides.into(), shape.into());
            overrun::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(128), arg, extra);
        }
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| out.read(&client, "out")));
        assert_eq!(read.is_err(), noticed);
    }
}

/// Kernel with a planted fault that guards do not detect: it writes far past its tensor.
#[cube(launch_unchecked)]
fn stray(out: &mut Tensor<f32>, at: usize) {
    if ABSOLUTE_POS == 0 {
        out[at] = 1.0f32;
    }
}

/// Planted fault for `compute-sanitizer`, which must report it. CubeCL's allocations are slices of pages, so the sanitizer does not see an
/// overrun within a page unless the tests are built with `cubecl/exclusive-memory-only`, and even then a page is larger than its tensor.
#[test]
#[ignore = "planted fault; run it under compute-sanitizer, which must report it"]
fn a_planted_stray_write() {
    let Some(client) = client() else { return };
    let out = Guarded::output(&client, Dtype::F32, [1, 1, 10, 10], Poison::Nan);
    let TensorView { handle, shape, strides } = out.view.clone();
    // SAFETY: the overrun stays within the guards, and the stray write within the memory pool, or a sanitizer reports it.
    unsafe {
        let arg = TensorArg::from_raw_parts(handle, strides.into(), shape.into());
        stray::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(32), arg, 1 << 28);
    }
    out.read(&client, "out");
}

#[test]
fn every_tile_shape() {
    let Some(client) = client() else { return };
    let shape = |tile_q, tile_k, units_q, units_k, chunk| TileShape { tile_q, tile_k, units_q, units_k, chunk };
    let shapes = [
        shape(64, 64, 16, 16, 32),
        shape(64, 32, 16, 8, 32),
        shape(32, 32, 8, 8, 32),
        shape(64, 32, 8, 8, 16),
        shape(32, 64, 8, 8, 8),
        shape(128, 64, 16, 16, 32),
        shape(128, 128, 16, 16, 16),
    ];
    let mut ran = 0;
    for tile in shapes {
        let case = rich().with_tiles(tile);
        match case.run(&client) {
            Ok(_) => {
                assert_eq!(case.check(&client).forward, tile.into());
                ran += 1;
            }
            Err(AttentionError::NoTileFits { tile_q, tile_k, .. }) => {
                assert_eq!((tile_q, tile_k), (tile.tile_q, tile.tile_k))
            }
            Err(error) => panic!("{tile:?}: {error}"),
        }
    }
    assert!(ran >= 2, "only {ran} tile shapes ran");
}

/// Threads with one row and with several, more rows than the problem has, thread blocks of one thread and of many.
#[test]
fn every_number_of_rows() {
    let Some(client) = client() else { return };
    for (units, rows) in [(8, 1), (1, 8), (4, 2), (16, 4), (32, 8)] {
        let tile = RowsTile { units, rows };
        assert_eq!(rich().with_rows(tile).check(&client).forward, tile.into());
    }
}

#[test]
fn grids_past_65535_cubes() {
    let Some(client) = client() else { return };
    // The smallest tiles give the largest number of thread blocks.
    let tile = TileShape { tile_q: 32, tile_k: 32, units_q: 8, units_k: 8, chunk: 32 };
    let case = Case::new([260, 256, 256, 1, 2, 4, 4], Dtype::F32, AttentionOptions::default());
    case.with_tiles(tile).check(&client);
}

/// The gradient of the sinks uses one thread block per head. With scores and sinks of 0 and one key whose value is 1, it is −1/4.
#[test]
fn more_than_65535_sinks() {
    let Some(client) = client() else { return };
    const HEADS: usize = 65540;
    let case = Case::new([1, HEADS, HEADS, 1, 1, 1, 1], Dtype::F32, AttentionOptions::default());
    let p = case.problem.with_sinks(&[HEADS]).unwrap();
    let filled = |value: f64, dtype| client.create_from_slice(&to_bytes(&vec![value; HEADS], dtype));
    let tensor = |value| TensorView::contiguous(filled(value, p.dtype), [1, HEADS, 1, 1]);
    let sinks = Some(TensorView::contiguous(filled(0.0, Dtype::F32), [HEADS]));
    let inputs = flash_attention_kernels::Inputs::new(tensor(0.0), tensor(0.0), tensor(1.0));
    let inputs = flash_attention_kernels::Inputs { sinks, ..inputs };
    let lse = TensorView::contiguous(filled(2f64.ln(), Dtype::F32), p.lse_shape());
    let saved = Saved { o: tensor(0.5), lse, dout: tensor(1.0), dlse: None };
    let dsinks = Guarded::output(&client, Dtype::F32, [HEADS], Poison::Nan);
    let gradients = Gradients { dsinks: Some(dsinks.view.clone()), ..Default::default() };
    backward(&client, &p, &inputs, &saved, &gradients).unwrap();
    close("dsinks", &dsinks.read(&client, "dsinks"), &[-0.25; HEADS], 1e-6);
}

/// Asserts that a tensor is refused because its elements are further apart than the device addresses.
fn refused<T: std::fmt::Debug>(name: &str, result: Result<T, AttentionError>) {
    let error = result.expect_err(name);
    let reaches =
        matches!(error, AttentionError::AddressSpace { argument, reach, .. } if argument == name && reach > 1 << 32);
    assert!(reaches, "{name}: {error}");
}

/// Batches 2^31 elements apart, so that the last of three begins at element 2^32. In lanes without 64-bit addresses every tensor that
/// needs them is refused by name before anything is launched.
#[test]
fn offsets_past_32_bits() {
    let Some(client) = client() else { return };
    let case = Case::new([3, 1, 1, 70, 90, 16, 16], Dtype::F32, AttentionOptions::default());
    let p = case.problem;
    let (dtype, size) = (p.dtype, p.dtype.size());
    let near = |shape: [usize; 4]| TensorView::contiguous(client.empty(size * shape.iter().product::<usize>()), shape);
    let inputs = || {
        let [q, k, v] = case.qkv(&client);
        flash_attention_kernels::Inputs::new(q, k, v)
    };
    let apart = |handle, shape: [usize; 4]| {
        let [_, _, rows, columns] = shape;
        TensorView { handle, shape, strides: [1 << 31, rows * columns, columns, 1] }
    };
    let lse = || TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
    if !lanes::wide_addresses(&client) {
        let far = |shape| apart(client.empty(64), shape);
        let of = flash_attention_kernels::Inputs { q: far(p.q_shape()), ..inputs() };
        refused("q", forward(&client, &p, &of, &near(p.o_shape()), &lse()));
        let of = flash_attention_kernels::Inputs { k: far(p.k_shape()), ..inputs() };
        refused("k", forward(&client, &p, &of, &near(p.o_shape()), &lse()));
        let of = flash_attention_kernels::Inputs { v: far(p.v_shape()), ..inputs() };
        refused("v", forward(&client, &p, &of, &near(p.o_shape()), &lse()));
        refused("o", forward(&client, &p, &inputs(), &far(p.o_shape()), &lse()));
        let saved = || Saved { o: near(p.o_shape()), lse: lse(), dout: near(p.o_shape()), dlse: None };
        let gradients = |dq, dk, dv| Gradients { dq: Some(dq), dk: Some(dk), dv: Some(dv), ..Default::default() };
        let [q, k, v] = [p.q_shape(), p.k_shape(), p.v_shape()];
        let backward = |saved, gradients| backward(&client, &p, &inputs(), &saved, &gradients);
        let plain = || gradients(near(q), near(k), near(v));
        refused("dout", backward(Saved { dout: far(p.o_shape()), ..saved() }, plain()));
        refused("dq", backward(saved(), gradients(far(q), near(k), near(v))));
        refused("dk", backward(saved(), gradients(near(q), far(k), near(v))));
        refused("dv", backward(saved(), gradients(near(q), near(k), far(v))));
        return;
    }
    if !thorough() {
        // The software driver fills all memory that is allocated.
        println!("skipped: tensors of 2^33 bytes need a GPU");
        return;
    }
    // Elements of a tensor's three batches, for any distance between batches.
    let read = |view: &TensorView| -> Vec<f64> {
        let batch = view.shape[2] * view.shape[3];
        let of_batch = |n: usize| {
            let from = (size * n * view.strides[0]) as u64;
            let after = (size * (n * view.strides[0] + batch)) as u64;
            let all = view.handle.size_in_used();
            client.read_one_unchecked(view.handle.clone().offset_start(from).offset_end(all - after))
        };
        (0..3).flat_map(|n| from_bytes(&of_batch(n), dtype)).collect()
    };
    let empty = |shape: [usize; 4]| apart(client.empty(size * ((2 << 31) + shape[2] * shape[3])), shape);
    // All results, in outputs that are contiguous or have batches 2^31 elements apart.
    let (inputs, lse, dout) =
        (inputs(), lse(), place(&client, dtype, p.o_shape(), Layout::Contiguous, &case.dout).view);
    let results = |view: &dyn Fn([usize; 4]) -> TensorView| {
        let o = view(p.o_shape());
        forward(&client, &p, &inputs, &o, &lse).unwrap();
        let views = [view(p.q_shape()), view(p.k_shape()), view(p.v_shape())];
        let [dq, dk, dv] = views.clone().map(Some);
        // The strided `o` is read too: by the backward, and as the queries of another forward.
        let saved = Saved { o: o.clone(), lse: lse.clone(), dout: dout.clone(), dlse: None };
        backward(&client, &p, &inputs, &saved, &Gradients { dq, dk, dv, ..Default::default() }).unwrap();
        let again = view(p.o_shape());
        let from_o = flash_attention_kernels::Inputs { q: o.clone(), ..inputs.clone() };
        forward(&client, &p, &from_o, &again, &lse).unwrap();
        let [dq, dk, dv] = views;
        [o, dq, dk, dv, again].map(|view| read(&view))
    };
    let (far, near) = (results(&empty), results(&near));
    assert!(far == near, "results in strided memory differ from those in contiguous memory");
    let plan = case.plan(&client).unwrap();
    let expected = case.expected(plan.forward.kernel());
    let [o, dq, dk, dv, _] = far;
    let of = &expected.exact.gradients;
    for (name, got, want) in
        [("o", o, &expected.exact.output.o), ("dq", dq, &of.dq), ("dk", dk, &of.dk), ("dv", dv, &of.dv)]
    {
        close(name, &got, want, case.tolerance(2e-5));
    }
}

#[test]
fn a_view_that_its_buffer_cannot_hold_is_refused() {
    let Some(client) = client() else { return };
    let p = Case::new([1, 1, 1, 8, 8, 4, 4], Dtype::F32, causal()).problem;
    let good = || TensorView::contiguous(client.empty(4 * 32), [1, 1, 8, 4]);
    let inputs = |q| flash_attention_kernels::Inputs::new(q, good(), good());
    let lse = TensorView::contiguous(client.empty(32), [1, 1, 8]);
    let beyond = TensorView { strides: [1000, 1000, 1000, 1], ..good() };
    let error = forward(&client, &p, &inputs(beyond), &good(), &lse).unwrap_err();
    assert!(matches!(error, AttentionError::Buffer { argument: "q", reach: 7004, .. }), "{error}");
    // A stride whose product with the row overflows 64 bits.
    let wrapped = TensorView { strides: [1, 1, usize::MAX / 7 + 1, 1], ..good() };
    let error = forward(&client, &p, &inputs(wrapped), &good(), &lse).unwrap_err();
    let far = |reach: &u64| *reach == u64::MAX;
    match &error {
        AttentionError::Buffer { argument: "q", reach, .. } if far(reach) => {}
        AttentionError::AddressSpace { argument: "q", reach, .. } if far(reach) => {}
        _ => panic!("{error}"),
    }
    // An output all of whose rows are the same memory.
    let overlapping = TensorView { strides: [0, 0, 0, 1], ..good() };
    let error = forward(&client, &p, &inputs(good()), &overlapping, &lse).unwrap_err();
    assert!(matches!(error, AttentionError::OutputOverlaps { argument: "o", .. }), "{error}");
    // A shape other than the problem's.
    let other = TensorView::contiguous(client.empty(4 * 32), [1, 1, 4, 8]);
    let error = forward(&client, &p, &inputs(other), &good(), &lse).unwrap_err();
    assert!(matches!(error, AttentionError::Dimension { argument: "q", value: 4, expected: 8, .. }), "{error}");
}
