//! Plans name the kernels that they pass over, and why.

use crate::harness::*;
use flash_attention_kernels::mods::{Alibi, ScoreFn, Temperature};
use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{
    AttentionOptions, AttentionProblem, BackwardOrder, Dtype, Forward, HopperForward, Kernel, Plan,
};

#[test]
fn plans_say_why_hopper_is_not_used() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let half = plan_on(&device(), &problem(128, Dtype::F16, causal)).unwrap();
    assert!(half.passed_over.is_empty() && half.to_string().starts_with("forward hopper 128×128"), "{half}");
    // Causal: keys and values of a head group of 16 heads take 32 MiB. Full attention takes one head at a time.
    assert!(matches!(half.forward, Forward::Hopper(HopperForward { head_group: 16, .. })), "{half:?}");
    let full = plan_on(&device(), &problem(128, Dtype::F16, AttentionOptions::default())).unwrap();
    assert!(matches!(full.forward, Forward::Hopper(HopperForward { head_group: 1, .. })), "{full:?}");

    // With few heads, splits of the keys give all multiprocessors about the same amount of work.
    for (heads, seq_q, seq_k, causal, num_splits) in
        [(1, 128, 65536, true, 64), (1, 16384, 16384, true, 2), (2, 4096, 4096, false, 2), (32, 1, 63, true, 1)]
    {
        let (q, k) = ([1, heads, seq_q, 128], [1, heads, seq_k, 128]);
        let options = AttentionOptions { causal, ..Default::default() };
        let plan = plan_on(&device(), &AttentionProblem::new(&q, &k, &k, Dtype::BF16, options).unwrap()).unwrap();
        let splits = if num_splits > 1 { format!(" in {num_splits} splits") } else { ",".into() };
        assert!(plan.to_string().starts_with(&format!("forward hopper 128×128{splits}")), "{plan}");
    }
    // One query of 64 keys, a single query of many keys, and 64 rows of a group's heads, are a step of decoding. More queries are not.
    for (heads_q, seq_q, seq_k, plan) in [
        (32, 1, 64, "forward mma 16×64 of packed heads,"),
        (32, 5, 255, "forward hopper 128×128"),
        (8, 1, 16384, "forward mma 16×64 in 16 splits"),
        (32, 1, 16384, "forward mma 16×64 of packed heads in 16 splits"),
        (32, 8, 16384, "forward mma 32×64 of packed heads in 16 splits"),
        (32, 16, 16384, "forward mma 64×64 of packed heads in 32 splits"),
        (32, 17, 16384, "forward hopper 128×128"),
    ] {
        let (q, k) = ([1, heads_q, seq_q, 128], [1, 8, seq_k, 128]);
        let problem = AttentionProblem::new(&q, &k, &k, Dtype::BF16, causal).unwrap();
        let found = plan_on(&device(), &problem).unwrap().to_string();
        assert!(found.starts_with(plan), "{found}");
    }

    let single = plan_on(&device(), &problem(128, Dtype::F32, causal)).unwrap();
    assert_eq!(single.forward.kernel(), Kernel::Mma);
    assert!(
        single.to_string().contains("not forward hopper: it computes in f16 and bf16 only, and q is f32"),
        "{single}"
    );
    let older = Device { wgmma: false, ..device() };
    let plan = plan_on(&older, &problem(128, Dtype::BF16, causal)).unwrap();
    assert!(plan.to_string().contains("no warpgroup matrix products"), "{plan}");
    assert_eq!(plan.forward.kernel(), Kernel::Mma, "{plan}");
}

/// The gradient of a bias that repeats queries or keys is summed by the kernel of `dq` or of `dk`. Other gradients that Hopper's kernels do
/// not compute are computed by the portable kernel, and the plan says why.
#[test]
fn plans_say_which_kernel_computes_dbias() {
    let plain = problem(128, Dtype::BF16, AttentionOptions::default());
    let plan = |problem: AttentionProblem| plan_on(&device(), &problem).unwrap();
    let biased = plan(plain.with_bias(&[1, 16, 4096, 4096]).unwrap());
    assert!(biased.to_string().contains(", dbias hopper 128×128"), "{biased}");
    assert!(biased.passed_over.iter().all(|passed| passed.what == "dq, dk and dv together"), "{biased}");
    for (shape, with) in [([4, 16, 1, 4096], "dk"), ([1, 1, 4096, 1], "dq"), ([1, 16, 1, 1], "dq")] {
        let repeated = plan(plain.with_bias(&shape).unwrap());
        assert_eq!(repeated.backward.dbias.kernel(), Kernel::Hopper, "{repeated}");
        assert!(repeated.to_string().contains(&format!(", dbias hopper with {with}")), "{repeated}");
    }
    let packed = plain.with_cu_seqlens(&[3], &[3]).unwrap().with_bias(&[1, 16, 4096, 4096]).unwrap();
    assert_eq!(plan(packed).backward.dbias.kernel(), Kernel::Portable);
    assert!(plan(packed).to_string().contains("; not dbias hopper: it does not support several sequences"));
    let none = plan(plain);
    assert!(none.passed_over.is_empty() && !none.to_string().contains("dbias"), "{none}");
}

/// Gradients of slopes and of tensors of functions: one sum for each kernel that accumulates `dq` or `dk`. Derivatives that depend on the
/// score have a kernel of their own.
#[test]
fn plans_say_which_kernels_sum() {
    let plan = |problem: AttentionProblem| plan_on(&device(), &problem).unwrap().to_string();
    let with = |function| AttentionOptions { score_mod: Some(function), ..Default::default() };
    let sloped = problem(128, Dtype::BF16, AttentionOptions::default()).with_alibi_slopes(&[1, 16]).unwrap();
    assert!(plan(sloped).contains(", dalibi_slopes hopper with dq"), "{}", plan(sloped));
    let both = sloped.with_bias(&[1, 16, 1, 1]).unwrap();
    assert!(plan(both).contains(", dbias hopper with dq, dalibi_slopes hopper with dk"), "{}", plan(both));
    let alibi =
        problem(128, Dtype::BF16, with(ScoreFn::of::<Alibi>())).with_score_tensors(&[&[1, 16, 1, 4096]]).unwrap();
    assert!(plan(alibi).contains(", dscore_tensors[0] hopper with dk"), "{}", plan(alibi));
    let third = alibi.with_alibi_slopes(&[1, 16]).unwrap().with_bias(&[1, 16, 1, 1]).unwrap();
    assert!(plan(third).contains(", dscore_tensors[0] hopper alone"), "{}", plan(third));
    // Arguments of the function are kept in shared memory, if it has room for them.
    for (head_dim, kernel) in [(64, "with dq"), (128, "with dk"), (256, "alone")] {
        let temperature = problem(head_dim, Dtype::BF16, with(ScoreFn::of::<Temperature>()));
        let temperature = temperature.with_score_tensors(&[&[1, 16, 1, 1]]).unwrap();
        let expected = format!(", dscore_tensors[0] hopper {kernel}");
        assert!(plan(temperature).contains(&expected), "{}", plan(temperature));
    }
    let each_pair = problem(128, Dtype::BF16, alibi.options).with_score_tensors(&[&[1, 1, 4096, 4096]]).unwrap();
    assert!(plan(each_pair).contains(", dscore_tensors[0] portable 64×64"), "{}", plan(each_pair));
}

/// The fused kernel is planned where it is possible and faster. Otherwise the plan says why not.
#[test]
fn plans_say_why_the_backward_is_not_fused() {
    let options = AttentionOptions { backward_order: BackwardOrder::Fast, ..Default::default() };
    let plan = |problem: AttentionProblem| plan_on(&device(), &problem).unwrap();
    let fast = plan(problem(128, Dtype::BF16, options));
    assert!(fast.to_string().contains(", all three hopper 64×128"), "{fast}");
    // `dq_accum` in f32.
    assert_eq!(fast.scratch_bytes, 4 * 4 * 16 * 4096 * (128 + 2));
    // And four words for each 64 queries.
    let fixed = plan(problem(128, Dtype::BF16, AttentionOptions::default()));
    assert_eq!(fixed.scratch_bytes - fast.scratch_bytes, 4 * 4 * 16 * 4096 / 64 * 4);
    // The query heads of a group are split where those of a group do not fit the cache: four splits of dk and dv of 8 heads.
    let grouped = |seq: usize, causal| {
        let (q, k) = ([1, 64, seq, 128], [1, 8, seq, 128]);
        plan(AttentionProblem::new(&q, &k, &k, Dtype::BF16, AttentionOptions { causal, ..options }).unwrap())
    };
    let long = grouped(8192, true);
    assert!(long.to_string().contains(", all three hopper 64×128 in 4 splits"), "{long}");
    assert_eq!(long.scratch_bytes, 4 * (64 * 8192 * (128 + 2) + 4 * 2 * 8 * 8192 * 128));
    for plan in [grouped(8192, false), grouped(2048, true)] {
        assert_eq!(plan.backward.fused.map(|fused| fused.num_splits), Some(1), "{plan}");
    }
    let of = |[batch, heads, seq]: [usize; 3], options| {
        let shape = [batch, heads, seq, 128];
        AttentionProblem::new(&shape, &shape, &shape, Dtype::BF16, options).unwrap()
    };
    let wide = plan(problem(256, Dtype::BF16, options));
    assert!(wide.to_string().contains(", all three hopper 64×80"), "{wide}");
    let tile = |plan: &Plan| plan.backward.fused.map(|fused| fused.tile);
    assert_eq!(tile(&fixed), tile(&fast));
    // Heads whose blocks wait for each other run at a time: 16 of 8 blocks, 2 of 128. With tiles of 128 queries, twice as many.
    let head_group = |plan: &Plan| plan.backward.fused.map(|fused| fused.head_group);
    for (shape, heads) in [([16, 16, 1024], 16), ([4, 16, 4096], 4), ([1, 16, 16384], 2)] {
        let plan = plan(of(shape, AttentionOptions::default()));
        assert_eq!(head_group(&plan), Some(heads), "{plan}");
    }
    let narrow = plan(problem(64, Dtype::BF16, AttentionOptions::default()));
    assert_eq!(head_group(&narrow), Some(8), "{narrow}");
    let short = of([1, 16, 512], options);
    let biased = problem(64, Dtype::BF16, options).with_bias(&[1, 1, 4096, 4096]).unwrap();
    let fixed_with = |options| problem(128, Dtype::BF16, options);
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let whys = [
        (short, "at least 1024 are needed"),
        (problem(256, Dtype::F16, AttentionOptions::default()), "256 is above 128"),
        (problem(192, Dtype::F16, options), "both from 193 to 256"),
        (biased, "a bias"),
        (fixed_with(AttentionOptions { window_left: Some(99), ..Default::default() }), "a window"),
        (of([1, 16, 4096], causal), "the longest of 512 blocks of keys"),
        (of([1, 16, 4096], AttentionOptions::default()), "1024 tiles of queries; at least 1584 are needed"),
        (
            problem(64, Dtype::BF16, AttentionOptions::default()).with_block_mask(&[1, 1, 32, 32], 128, 128).unwrap(),
            "a block mask",
        ),
    ];
    for (problem, why) in whys {
        let plan = plan(problem);
        let reported = plan.to_string().contains("; not dq, dk and dv together: ") && plan.to_string().contains(why);
        assert!(plan.backward.fused.is_none() && reported, "{plan}");
    }
}
