//! A problem like an earlier one is not planned again, and no other problem gets its plan.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::mods::{Alibi, Causal, MaskFn, ScoreFn, Softcap};
use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{
    Alignment, AttentionOptions, AttentionProblem, BackwardOrder, Dtype, Inputs, Kernel, Plan, Precision, TensorView,
    check, forward, forward_with, plan, plan_with,
};
use std::alloc::{GlobalAlloc, Layout as MemoryLayout, System};
use std::cell::Cell;
use std::thread;

/// The system's allocator, counting the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends may allocate when its variables are gone.
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: MemoryLayout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees what the system's allocator demands.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: MemoryLayout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: MemoryLayout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: MemoryLayout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Number of allocations of this thread in `f`.
fn allocations<T>(f: impl FnOnce() -> T) -> usize {
    let before = ALLOCATIONS.get();
    let _result = f();
    ALLOCATIONS.get() - before
}

fn causal() -> AttentionOptions {
    AttentionOptions { causal: true, ..Default::default() }
}

fn plain(q: [usize; 4], k: [usize; 4]) -> AttentionProblem {
    AttentionProblem::new(&q, &k, &k, chosen_dtype(), causal()).unwrap()
}

/// A problem, and problems that differ from it in one field each, but for the number of a seed.
fn variants(device: &Device) -> Vec<AttentionProblem> {
    const Q: [usize; 4] = [2, 4, 512, 64];
    const K: [usize; 4] = [2, 2, 512, 64];
    let base = plain(Q, K);
    let shaped = |q, k| plain(q, k);
    let with = |change: fn(&mut AttentionOptions)| {
        let mut problem = base;
        change(&mut problem.options);
        problem.validate().unwrap();
        problem
    };
    let scores = [2, 4, 512, 512];
    let modified = with(|options| options.score_mod = Some(ScoreFn::of::<Alibi>()));
    let masked = with(|options| options.mask_mod = Some(MaskFn::of::<Causal>()));
    let mut all = vec![
        base,
        shaped([1, 4, 512, 64], [1, 2, 512, 64]),
        shaped([2, 8, 512, 64], K),
        shaped(Q, [2, 4, 512, 64]),
        shaped([2, 4, 4096, 64], K),
        shaped(Q, [2, 2, 4096, 64]),
        shaped([2, 4, 512, 128], [2, 2, 512, 128]),
        AttentionProblem::new(&Q, &K, &[2, 2, 512, 128], chosen_dtype(), causal()).unwrap(),
        base.with_mask(&[1, 1, 1, 512]).unwrap(),
        base.with_mask(&scores).unwrap(),
        base.with_bias(&[1, 4, 1, 512]).unwrap(),
        base.with_bias(&[1, 4, 512, 512]).unwrap(),
        base.with_alibi_slopes(&[1, 4]).unwrap(),
        base.with_sinks(&[4]).unwrap(),
        base.with_seq_lens_q(&[2]).unwrap(),
        base.with_seq_lens_k(&[2]).unwrap(),
        base.with_cu_seqlens(&[4], &[4]).unwrap(),
        base.with_cu_seqlens(&[6], &[6]).unwrap(),
        base.with_block_mask(&[1, 1, 4, 4], 128, 128).unwrap(),
        base.with_block_mask(&[1, 1, 2, 4], 256, 128).unwrap(),
        modified,
        modified.with_score_tensors(&[&[1, 4, 1, 1]]).unwrap(),
        modified.with_score_tensors(&[&[1, 4, 1, 512]]).unwrap(),
        with(|options| options.score_mod = Some(ScoreFn::of::<Softcap<30>>())),
        masked,
        masked.with_mask_tensors(&[&[2, 1, 512, 1]]).unwrap(),
        with(|options| options.causal = false),
        with(|options| options.alignment = Alignment::TopLeft),
        with(|options| options.softmax_scale = Some(0.5)),
        with(|options| options.softcap = Some(20.0)),
        with(|options| options.dropout = 0.25),
        with(|options| options.window_left = Some(100)),
        with(|options| (options.causal, options.window_right) = (false, Some(100))),
        with(|options| options.backward_order = BackwardOrder::Fast),
        with(|options| options.precision = Precision::Tf32),
    ];
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        if dtype != base.dtype && device.dtypes.contains(&dtype) {
            let mut of_dtype = base;
            of_dtype.dtype = dtype;
            all.push(of_dtype);
        }
    }
    all
}

/// A plan without what depends on the memory of the client's device.
fn bare(mut plan: Plan) -> Plan {
    plan.passed_over.retain(|passed| passed.what != "any backward");
    plan
}

/// Plans these problems one after the other, and compares with plans that nothing is remembered of.
fn compare<'a>(client: &Client, device: &Device, problems: impl Iterator<Item = &'a AttentionProblem>) {
    for problem in problems {
        match (plan(client, problem), plan_on(device, problem)) {
            (Ok(found), Ok(right)) => assert_eq!(bare(found), bare(right), "{problem:?}"),
            (found, right) => assert_eq!(found.err(), right.err(), "{problem:?}"),
        }
        assert_eq!(check(client, problem).err(), plan_on(device, problem).err(), "{problem:?}");
    }
}

#[test]
fn the_second_plan_of_a_problem_allocates_nothing() {
    let Some(client) = client() else { return };
    let problem = plain([1, 4, 512, 64], [1, 4, 512, 64]);
    assert!(allocations(|| check(&client, &problem).unwrap()) > 0);
    assert_eq!(allocations(|| check(&client, &problem).unwrap()), 0);
    // Each step of a training has another seed.
    let step = |seed| {
        let mut problem = problem;
        (problem.options.dropout, problem.options.dropout_seed) = (0.25, Some(seed));
        problem
    };
    check(&client, &step(0)).unwrap();
    assert!((1..100).all(|seed| allocations(|| check(&client, &step(seed)).unwrap()) == 0));
}

/// A launch allocates as much with the kernel that it finds itself as with one that the caller gives.
#[test]
fn the_choice_of_a_second_forward_allocates_nothing() {
    let Some(client) = client() else { return };
    let problem = plain([1, 1, 16, 16], [1, 1, 16, 16]);
    let size = problem.dtype.size();
    let zeros = || TensorView::contiguous(client.create_from_slice(&vec![0; 16 * 16 * size]), [1, 1, 16, 16]);
    let (inputs, o) = (Inputs::new(zeros(), zeros(), zeros()), zeros());
    let lse = TensorView::contiguous(client.empty(4 * 16), [1, 1, 16]);
    let planned = forward(&client, &problem, &inputs, &o, &lse).unwrap();
    let least = |f: &dyn Fn()| (0..20).map(|_| allocations(f)).min();
    let given = least(&|| forward_with(&client, &problem, &inputs, &o, &lse, planned).unwrap());
    let found = least(&|| {
        forward(&client, &problem, &inputs, &o, &lse).unwrap();
    });
    assert_eq!(found, given);
}

#[test]
fn no_problem_gets_the_plan_of_another_one() {
    let Some(client) = client() else { return };
    let device = Device::of(&client);
    let problems = variants(&device);
    // Each one next to each other, so that none has been forgotten.
    for (nth, problem) in problems.iter().enumerate() {
        let pairs = problems[nth + 1..].iter().flat_map(|other| [problem, other]);
        compare(&client, &device, pairs);
    }
    // Problems that are forgotten and planned again.
    compare(&client, &device, problems.iter().cycle().take(3 * problems.len()));
    for problem in &problems {
        let planned = plan(&client, problem);
        for kernel in [Kernel::Hopper, Kernel::Mma, Kernel::Matrix] {
            let asked = plan_with(&client, problem, kernel);
            assert!(asked.is_err() || asked.is_ok_and(|plan| plan.forward.kernel() == kernel), "{problem:?}");
        }
        assert_eq!(plan(&client, problem), planned, "{problem:?}");
    }
}

#[test]
fn refusals_are_not_remembered_as_plans() {
    let Some(client) = client() else { return };
    let good = plain([1, 4, 64, 64], [1, 4, 64, 64]);
    let mut bad = good;
    bad.options.softcap = Some(f32::NAN);
    for _ in 0..3 {
        assert!(check(&client, &good).is_ok() && plan(&client, &bad).is_err() && check(&client, &bad).is_err());
    }
}

#[test]
fn threads_plan_apart() {
    let Some(client) = client() else { return };
    let device = &Device::of(&client);
    let problems = &variants(device);
    thread::scope(|scope| {
        for nth in 0..4 {
            let client = client.clone();
            let shifted = problems.iter().cycle().skip(nth * problems.len() / 4);
            scope.spawn(move || compare(&client, device, shifted.take(2 * problems.len())));
        }
    });
}
