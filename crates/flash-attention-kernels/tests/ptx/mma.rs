//! The PTX of every `mma.sync` kernel, for Ampere and for Hopper, has `mma.sync` products, `ldmatrix` and `cp.async`, and no local memory.
//! `MMA_TILE` checks another tile, WARPGROUPS/GROUPS/TILE_K. `MMA_ONLY` checks one kernel.

use crate::harness::*;
use cubecl_core::ir::nvidia::SmArch;
use flash_attention_kernels::fragment::Role;
use flash_attention_kernels::mma::{MmaBlueprint, Products, forward, gradient};
use flash_attention_kernels::mods::{Alibi, Document, MaskFn, ScoreFn, Softcap};
use flash_attention_kernels::tensor_core::Blueprint;
use flash_attention_kernels::tensor_core::combine::CombinationCompilationArg;
use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{
    AttentionOptions, AttentionProblem, BackwardTiles, Dtype, Forward, Gradient, Kernel, KvStorage, MmaForward,
    MmaTile, Plan, Precision,
};
use std::time::Instant;

/// Bytes of shared memory of a thread block on sm_80, and on other devices from Ampere on.
const AMPERE: usize = 163 << 10;
const SMALL: usize = 99 << 10;

/// Largest number of spilled bytes on Hopper: a few registers of the kernels with the most live values.
const SPILLS: usize = 96;

/// The limit for f32, whose weights and gradients of scores are in registers twice. The fastest kernel of `dk` and `dv` spills the most.
const SPILLS_SPLIT: usize = 384;
/// The limits with a block mask, whose list entries and their positions are in registers, too: in half precision, and in f32.
const SPILLS_BLOCKS_HALF: usize = 96;
const SPILLS_BLOCKS: usize = 416;
/// The limit with a function that reads two tensors for each pair.
const SPILLS_FUNCTION: usize = 640;

/// A GPU with this much shared memory per thread block and no warpgroup products.
fn before_hopper(shared_memory: usize) -> Device {
    Device { shared_memory, wgmma: false, ..device() }
}

fn ptx(blueprint: MmaBlueprint, problem: &AttentionProblem, arch: SmArch) -> String {
    let band = problem.band();
    let scores = blueprint.scores;
    let settings = settings(blueprint.tile.units());
    let (properties, defaults) = (properties(), Default::default());
    let types = types(scores);
    if scores.role == Role::Forward {
        return compile(
            forward::forward::Forward::new(
                settings,
                properties,
                defaults,
                sources(),
                score_args(problem, scores, band),
                outputs(),
                CombinationCompilationArg { to: outputs(), tickets: buffer() },
                scheduler(),
                scores.vector(),
                2,
                2,
                blueprint,
                types,
            ),
            arch,
        );
    }
    let (band, width) = if scores.transposed() { (band.transposed(), 1) } else { (band, 2) };
    compile(
        gradient::gradient::Gradient::new(
            settings,
            properties,
            defaults,
            source_sides(),
            score_args(problem, scores, band),
            gradient_outputs(),
            buffer(),
            scheduler(),
            scores.vector(),
            width,
            width,
            blueprint,
            types,
        ),
        arch,
    )
}

/// Compiles and checks a kernel for Ampere and for Hopper. Returns the spilled bytes on Hopper.
fn look_at(name: &str, role: Role, tile: MmaTile, problem: &AttentionProblem, shared_memory: usize) -> usize {
    let mut tile = tile;
    if let Ok(asked) = std::env::var("MMA_TILE") {
        let n: Vec<usize> = asked.split('/').map(|n| n.parse().unwrap()).collect();
        tile = MmaTile { warpgroups: n[0], groups: n[1], tile_k: n[2], warps_k: 1, stages: 2 };
    }
    look_at_scores(name, tile, scores(problem, role, tile.tile()), problem, shared_memory)
}

/// [`look_at`] for a kernel with this blueprint of scores.
fn look_at_scores(
    name: &str,
    tile: MmaTile,
    scores: Blueprint,
    problem: &AttentionProblem,
    shared_memory: usize,
) -> usize {
    let halves = "ldmatrix.sync.aligned.m8n8.x4.trans";
    let (products, needed): (_, &[_]) = match (problem.kv_storage(), problem.dtype, problem.options.precision) {
        (KvStorage::E4m3, ..) => {
            (Products::E4m3 { instruction: false }, &["m16n8k16.row.col.f32.f16.f16.f32", halves, "lop3.b32"])
        }
        (_, Dtype::F32, Precision::Full) => {
            (Products::Split, &["m16n8k8.row.col.f32.tf32.tf32.f32", "ld.shared.b32", "add.rn.f32"])
        }
        (_, Dtype::F32, Precision::Tf32) => {
            (Products::Tf32, &["m16n8k8.row.col.f32.tf32.tf32.f32", "cvt.rna.tf32.f32"])
        }
        (_, Dtype::F16, _) => (Products::F16, &["m16n8k16.row.col.f32.f16.f16.f32", halves]),
        (_, Dtype::BF16, _) => (Products::BF16, &["m16n8k16.row.col.f32.bf16.bf16.f32", halves]),
        other => panic!("the test does not know the products of {other:?}"),
    };
    let blueprint = MmaBlueprint { tile, scores, products };
    let bytes = blueprint.shared_memory();
    assert!(tile.is_consistent() && bytes <= shared_memory, "{name}: {tile:?}, {bytes} bytes");
    let mut most = 0;
    for (arch, called) in [(SmArch::new(80, false), "sm_80"), (SmArch::new(90, true), "sm_90a")] {
        let start = Instant::now();
        let (mut blueprint, mut needed) = (blueprint, needed);
        if called == "sm_90a" && matches!(products, Products::E4m3 { .. }) {
            blueprint.products = Products::E4m3 { instruction: true };
            needed = &["cvt.rn.f16x2.e4m3x2"];
        }
        let ptx = ptx(blueprint, problem, arch);
        let compiled = start.elapsed().as_millis();
        keep(&format!("{name}.{called}"), &ptx);
        for needed in needed.iter().chain(&["ldmatrix.sync.aligned.m8n8.x4.shared", "cp.async.cg.shared.global"]) {
            assert!(ptx.contains(needed), "{name}: its PTX lacks {needed}");
        }
        assert!(
            !ptx.contains(".local") && !ptx.contains("call.uni"),
            "{name}: its PTX uses local memory or has a call"
        );
        match assemble(&ptx, called) {
            Some(Assembled { registers, spills, .. }) => {
                println!(
                    "{name} {called}: {registers} registers, {spills} bytes of spills, {bytes} of shared memory, PTX in {compiled} ms"
                );
                // Before Hopper, relocatable code guards shuffles by calls, which leave few registers.
                most = most.max(if called == "sm_90a" { spills } else { 0 });
            }
            None => println!("{name} {called}: compiled in {compiled} ms; no ptxas to assemble it"),
        }
    }
    most
}

/// A step of decoding with 32 query heads, 8 key/value heads and 4,096 keys.
fn decoding(head_dim: usize, dtype: Dtype, seq_q: usize) -> AttentionProblem {
    let (q, k) = ([2, 32, seq_q, head_dim], [2, 8, 4096, head_dim]);
    AttentionProblem::new(&q, &k, &k, dtype, AttentionOptions { causal: true, ..Default::default() }).unwrap()
}

/// Query heads of a group as rows of a tile, with splits of the keys.
#[test]
fn packed_heads_are_products_of_warps() {
    for (head_dim, dtype, memory) in [
        (64, Dtype::BF16, SMALL),
        (128, Dtype::BF16, SMALL),
        (128, Dtype::BF16, AMPERE),
        (192, Dtype::F16, SMALL),
        (256, Dtype::BF16, SMALL),
        (64, Dtype::F32, SMALL),
        (128, Dtype::F32, SMALL),
        (256, Dtype::F32, AMPERE),
    ] {
        let causal = decoding(head_dim, dtype, 1);
        let mut full = causal;
        full.options.causal = false;
        let pages = full.with_page_table(&[2, 256], 600, 16).unwrap();
        let mut cases = vec![
            ("full", full),
            ("causal", causal),
            ("alibi", causal.with_alibi_slopes(&[1, 32]).unwrap()),
            ("pages", pages),
        ];
        if dtype != Dtype::F32 {
            cases.push(("e4m3", pages.with_kv_storage(KvStorage::E4m3).unwrap()));
        }
        for (called, problem) in cases {
            let plan = plan_on(&before_hopper(memory), &problem).unwrap();
            let Forward::Mma(MmaForward { tiles, num_splits: 2.., pack_gqa: true }) = plan.forward else {
                panic!("{plan}")
            };
            let scores = scores(&problem, Role::Forward, tiles.tile.tile());
            let scores = Blueprint { pack_gqa: true, warps_k: tiles.tile.warps_k, split_keys: true, ..scores };
            let name = format!("d{head_dim}_{}_packed_{called}", dtype.name());
            let most = look_at_scores(&name, tiles.tile, scores, &problem, memory);
            assert!(most <= SPILLS, "{name}: {most} bytes of spills, more than {SPILLS}");
        }
    }
}

/// Heads are packed where a tile of one head would be filled by no more than a few queries.
#[test]
fn plans_say_when_heads_are_packed() {
    let plan = |problem: AttentionProblem| plan_on(&before_hopper(AMPERE), &problem).unwrap();
    let one = plan(decoding(128, Dtype::BF16, 1));
    let Forward::Mma(MmaForward { num_splits, pack_gqa: true, .. }) = one.forward else { panic!("{one}") };
    assert!(one.to_string().starts_with(&format!("forward mma 16×64 of packed heads in {num_splits} splits")), "{one}");
    // Outputs of the splits and their lse, in f32.
    assert_eq!(one.forward_scratch_bytes, (4 * num_splits * 2 * 32 * (128 + 1)) as u64);
    let packs = |plan: &Plan| matches!(plan.forward, Forward::Mma(MmaForward { pack_gqa: true, .. }));
    assert!(packs(&plan(decoding(128, Dtype::BF16, 16))));
    let dropped = AttentionOptions { dropout: 0.1, ..Default::default() };
    let (q, k) = ([2, 32, 1, 128], [2, 8, 4096, 128]);
    let dropped = AttentionProblem::new(&q, &k, &k, Dtype::BF16, dropped).unwrap();
    let ungrouped = AttentionProblem::new(&k, &k, &k, Dtype::BF16, AttentionOptions::default()).unwrap();
    for other in [decoding(128, Dtype::BF16, 17), dropped, ungrouped] {
        let plan = plan(other);
        assert!(!packs(&plan), "{plan}");
    }
    // The tile has as few rows as the queries of a group need.
    for (seq_q, tile_q) in [(1, 16), (4, 16), (5, 32), (8, 32), (9, 64), (17, 128)] {
        let plan = plan(decoding(128, Dtype::BF16, seq_q));
        assert_eq!(plan.forward.tile_q(), tile_q, "{plan}");
    }
}

/// Compiles and checks the kernels that are planned for a problem on a device with this much shared memory.
fn check(name: &str, problem: AttentionProblem, shared_memory: usize, spills: usize) {
    let plan = plan_on(&before_hopper(shared_memory), &problem).unwrap();
    let Forward::Mma(forward) = plan.forward else { panic!("{plan}") };
    let BackwardTiles { dq: Gradient::Mma(dq), dkdv: Gradient::Mma(dkdv), dv, .. } = plan.backward else {
        panic!("{plan}")
    };
    let mut all = vec![("forward", Role::Forward, forward.tiles.tile), ("dq", Role::Dq, dq.tile)];
    match dv {
        None => all.push(("dkdv", Role::DkDv { dk: true, dv: true }, dkdv.tile)),
        Some(Gradient::Mma(dv)) => all.extend([
            ("dk", Role::DkDv { dk: true, dv: false }, dkdv.tile),
            ("dv", Role::DkDv { dk: false, dv: true }, dv.tile),
        ]),
        Some(_) => panic!("{plan}"),
    }
    let only = std::env::var("MMA_ONLY").ok();
    for (what, role, tile) in all.into_iter().filter(|(what, ..)| only.as_ref().is_none_or(|only| only == what)) {
        let most = look_at(&format!("{name}_{what}"), role, tile, &problem, shared_memory);
        assert!(most <= spills, "{name}_{what}: {most} bytes of spills, more than {spills}");
    }
}

#[test]
fn every_head_dimension_is_products_of_warps() {
    for head_dim in [64, 128, 192, 256] {
        for causal in [false, true] {
            let options = AttentionOptions { causal, ..Default::default() };
            let name = format!("d{head_dim}_{}", if causal { "causal" } else { "full" });
            check(&name, problem(head_dim, Dtype::BF16, options), HOPPER, SPILLS);
        }
    }
}

/// A prompt over pages in e4m3, whose tiles have more than 64 rows.
#[test]
fn prompts_over_e4m3_are_products_of_warps() {
    for (head_dim, dtype, memory) in [
        (64, Dtype::BF16, SMALL),
        (128, Dtype::BF16, SMALL),
        (128, Dtype::F16, SMALL),
        (192, Dtype::BF16, HOPPER),
        (256, Dtype::BF16, HOPPER),
    ] {
        let pages = decoding(head_dim, dtype, 256).with_page_table(&[2, 256], 600, 16).unwrap();
        let problem = pages.with_kv_storage(KvStorage::E4m3).unwrap();
        let plan = plan_on(&before_hopper(memory), &problem).unwrap();
        let Forward::Mma(MmaForward { tiles, pack_gqa: false, .. }) = plan.forward else { panic!("{plan}") };
        let name = format!("d{head_dim}_{}_prompt_e4m3", dtype.name());
        let most = look_at(&name, Role::Forward, tiles.tile, &problem, memory);
        assert!(most <= SPILLS, "{name}: {most} bytes of spills, more than {SPILLS}");
    }
}

#[test]
fn every_device_has_tiles() {
    for (called, shared_memory) in [("ampere", AMPERE), ("small", SMALL)] {
        for head_dim in [64, 128, 192, 256] {
            let options = AttentionOptions { causal: true, ..Default::default() };
            check(&format!("d{head_dim}_{called}"), problem(head_dim, Dtype::F16, options), shared_memory, SPILLS);
        }
    }
}

#[test]
fn every_option_is_products_of_warps() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let window = AttentionOptions { window_left: Some(1023), ..causal };
    let capped = AttentionOptions { softcap: Some(50.0), ..causal };
    for head_dim in [64, 128] {
        let plain = problem(head_dim, Dtype::BF16, AttentionOptions::default());
        let name = |what: &str| format!("d{head_dim}_{what}");
        check(&name("f16"), problem(head_dim, Dtype::F16, causal), HOPPER, SPILLS);
        check(&name("window"), problem(head_dim, Dtype::BF16, window), HOPPER, SPILLS);
        check(&name("softcap"), problem(head_dim, Dtype::BF16, capped), HOPPER, SPILLS);
        check(&name("padding_mask"), plain.with_mask(&[4, 1, 1, 4096]).unwrap(), HOPPER, SPILLS);
        check(&name("mask"), plain.with_mask(&[1, 1, 4096, 4096]).unwrap(), HOPPER, SPILLS);
        check(&name("bias"), plain.with_bias(&[1, 16, 4096, 4096]).unwrap(), HOPPER, SPILLS);
    }
}

#[test]
fn functions_are_products_of_warps() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let alibi = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal };
    let capped = AttentionOptions { score_mod: Some(ScoreFn::of::<Softcap<50>>()), ..causal };
    let document = AttentionOptions { mask_mod: Some(MaskFn::of::<Document>()), ..causal };
    for (head_dim, dtype, spills) in [
        (64, Dtype::BF16, SPILLS_FUNCTION),
        (128, Dtype::BF16, SPILLS_FUNCTION),
        (64, Dtype::F32, SPILLS_FUNCTION),
        (128, Dtype::F32, SPILLS_FUNCTION),
    ] {
        let of = |options| problem(head_dim, dtype, options);
        let name = |what: &str| format!("d{head_dim}_{}_{what}", dtype.name());
        let sloped = of(alibi).with_score_tensors(&[&[1, 16, 1, 1]]).unwrap();
        check(&name("function_alibi"), sloped, HOPPER, spills);
        check(&name("function_softcap"), of(capped), HOPPER, spills);
        let documents = of(document).with_mask_tensors(&[&[4, 1, 4096, 1], &[4, 1, 1, 4096]]).unwrap();
        check(&name("function_document"), documents, HOPPER, spills);
    }
}

/// Head dimensions that are no multiple of a panel, of 16 or of 8.
#[test]
fn odd_head_dimensions_are_products_of_warps() {
    for (head_dim, head_dim_v) in [(72, 40), (59, 111), (8, 8), (1, 3), (192, 128), (249, 17)] {
        let (q, v) = ([1, 2, 300, head_dim], [1, 2, 300, head_dim_v]);
        let options = AttentionOptions { causal: true, ..Default::default() };
        let problem = AttentionProblem::new(&q, &q, &v, Dtype::BF16, options).unwrap();
        check(&format!("d{head_dim}_{head_dim_v}"), problem, HOPPER, SPILLS);
    }
}

#[test]
fn f32_is_products_of_tf32() {
    for precision in [Precision::Full, Precision::Tf32] {
        let options = AttentionOptions { causal: true, precision, ..Default::default() };
        for (head_dim, memory) in
            [64, 128, 192, 256].map(|d| (d, HOPPER)).into_iter().chain([(64, SMALL), (128, SMALL), (192, AMPERE)])
        {
            let name = format!("d{head_dim}_f32_{precision:?}_{memory}");
            check(&name, problem(head_dim, Dtype::F32, options), memory, SPILLS_SPLIT);
        }
    }
}

/// Block masks, alone and with other options. The kernels of `dk` and `dv` look up the list of each query head.
#[test]
fn block_masks_are_products_of_warps() {
    let full = AttentionOptions::default();
    let causal = AttentionOptions { causal: true, ..full };
    let rounded = AttentionOptions { precision: Precision::Tf32, ..causal };
    for head_dim in [64, 128] {
        let check = |what: &str, dtype, options, spills| {
            let problem = problem(head_dim, dtype, options).with_block_mask(&[1, 16, 32, 32], 128, 128).unwrap();
            check(&format!("d{head_dim}_{}_blocks_{what}", dtype.name()), problem, HOPPER, spills);
        };
        check("full", Dtype::BF16, full, SPILLS_BLOCKS_HALF);
        check("causal", Dtype::BF16, causal, SPILLS_BLOCKS_HALF);
        check("causal", Dtype::F32, causal, SPILLS_BLOCKS);
        check("tf32", Dtype::F32, rounded, SPILLS_BLOCKS);
    }
    // Tiles of 16, smaller than the run of keys that a warp recomputes together.
    let wide = problem(256, Dtype::F32, causal).with_block_mask(&[1, 16, 32, 32], 128, 128).unwrap();
    check("d256_f32_blocks", wide, HOPPER, SPILLS_BLOCKS);
}

#[test]
fn plans_say_why_mma_is_not_used() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let plan = |device: &Device, dtype| plan_on(device, &problem(128, dtype, causal)).unwrap();
    let half = plan(&before_hopper(SMALL), Dtype::F16);
    assert!(half.to_string().starts_with("forward mma 128×64, dq mma 128×32, dk and dv mma 64×64"), "{half}");
    let single = plan(&Device { mma: vec![Dtype::F16], ..before_hopper(HOPPER) }, Dtype::F32);
    assert_eq!(single.forward.kernel(), Kernel::Portable);
    assert!(single.to_string().contains("not forward mma: the device has no mma.sync for f32"), "{single}");
    let only = plan(&Device { mma: vec![Dtype::F16], ..before_hopper(HOPPER) }, Dtype::BF16);
    assert_eq!(only.forward.kernel(), Kernel::Matrix);
    assert!(only.to_string().contains("not forward mma: the device has no mma.sync for bf16"), "{only}");
    // With less shared memory, the tile of wider heads is planned.
    let less = plan(&before_hopper(64 << 10), Dtype::BF16);
    assert!(less.to_string().starts_with("forward mma 64×32"), "{less}");
    let little = plan(&before_hopper(32 << 10), Dtype::BF16);
    assert!(little.to_string().contains("not forward mma: it needs "), "{little}");
}
