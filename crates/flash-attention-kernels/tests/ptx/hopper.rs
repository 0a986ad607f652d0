//! The PTX of every kernel for Hopper has warpgroup products and TMA loads, no local memory and no guarded shuffles.

use crate::harness::*;
use cubecl_core::CubeKernel;
use cubecl_core::ir::nvidia::SmArch;
use flash_attention_kernels::extras::Extras;
use flash_attention_kernels::fragment::Role;
use flash_attention_kernels::hopper::dbias::{
    BiasOutCompilationArg, Block, DbiasScheduler, DbiasSchedulerCompilationArg,
};
use flash_attention_kernels::hopper::{BiasBlueprint, BiasTile, combine, copy, dbias, forward, gradient, reduce};
use flash_attention_kernels::mask::Band;
use flash_attention_kernels::mods::{Document, MaskFn, ScoreFn};
use flash_attention_kernels::tensor_core::{Blueprint, DeltaBlueprint, Divisor, Rows, TileScheduler, delta};
use flash_attention_kernels::tiling::{Device, element_type, plan_on};
use flash_attention_kernels::{
    AttentionOptions, AttentionProblem, BackwardOrder, BackwardTiles, BiasGradient, Dtype, Forward, Gradient,
    HopperForward, HopperTile, Kernel,
};
use flash_attention_reference::mods::{Alibi, Softcap};
use std::collections::HashMap;
use std::time::Instant;

fn compile(kernel: impl CubeKernel) -> String {
    crate::harness::compile(kernel, SmArch::new(90, true))
}

fn assemble(ptx: &str) -> Option<Assembled> {
    crate::harness::assemble(ptx, "sm_90a")
}

fn ptx(blueprint: Blueprint, problem: &AttentionProblem) -> String {
    match blueprint.role {
        Role::Forward => forward_ptx(blueprint, problem),
        _ => gradient_ptx(blueprint, problem),
    }
}

fn gradient_ptx(blueprint: Blueprint, problem: &AttentionProblem) -> String {
    let width = if blueprint.transposed() { 1 } else { 2 };
    let band = if blueprint.transposed() { problem.band().transposed() } else { problem.band() };
    compile(gradient::gradient::Gradient::new(
        settings(blueprint.tile.units()),
        properties(),
        Default::default(),
        streams(blueprint, true),
        source_sides(),
        score_args(problem, blueprint, band),
        gradient_outputs(),
        buffer(),
        schedule(),
        width,
        width,
        blueprint,
        types(blueprint),
    ))
}

fn round_ptx(blueprint: Blueprint, problem: &AttentionProblem) -> String {
    compile(reduce::convert_dq::ConvertDq::new(
        settings(reduce::UNITS as usize),
        properties(),
        Default::default(),
        buffer(),
        source_sides(),
        score_args(problem, blueprint, problem.band()),
        gradient_outputs(),
        buffer(),
        scheduler(),
        2,
        2,
        blueprint,
        types(blueprint),
    ))
}

fn forward_ptx(blueprint: Blueprint, problem: &AttentionProblem) -> String {
    compile(forward::forward::Forward::new(
        settings(blueprint.tile.units()),
        properties(),
        Default::default(),
        streams(blueprint, false),
        sources(),
        score_args(problem, blueprint, problem.band()),
        outputs(),
        schedule(),
        2,
        2,
        blueprint,
        types(blueprint),
    ))
}

fn dbias_ptx(blueprint: BiasBlueprint, problem: &AttentionProblem) -> String {
    compile(dbias::dbias::Dbias::new(
        settings(blueprint.tile.tile().units()),
        properties(),
        Default::default(),
        streams(blueprint.scores, true),
        score_args(problem, blueprint.scores, problem.band()),
        BiasOutCompilationArg { vectors: buffer(), elements: buffer(), rows: stride(), column: () },
        buffer(),
        DbiasSchedulerCompilationArg {
            num_tiles: (),
            matrices: (),
            q_blocks: divisor(),
            k_blocks: divisor(),
            heads: divisor(),
            group_batches: (),
            group_heads: divisor(),
            group_size: divisor(),
            batches: (),
            num_heads_q: (),
        },
        2,
        2,
        blueprint,
        types(blueprint.scores),
    ))
}

/// Compiles and checks the kernels that are planned for a problem.
fn check(name: &str, problem: AttentionProblem) {
    let plan = plan_on(&device(), &problem).unwrap();
    let Forward::Hopper(mut tiles) = plan.forward else { panic!("{plan}") };
    // HOPPER_TILE checks another tile: CONSUMER_GROUPS/WARPGROUPS/TILE_K/STAGES/PING_PONG/PRODUCER_WARP.
    if let Ok(tile) = std::env::var("HOPPER_TILE") {
        let n: Vec<usize> = tile.split('/').map(|n| n.parse().unwrap()).collect();
        let [consumer_groups, warpgroups, tile_k, stages, ping_pong, producer_warp] = n[..] else {
            panic!("HOPPER_TILE is {tile}; it must be CONSUMER_GROUPS/WARPGROUPS/TILE_K/STAGES/PING_PONG/PRODUCER_WARP")
        };
        tiles.tile = HopperTile {
            consumer_groups,
            warpgroups,
            tile_k,
            stages,
            ping_pong: ping_pong != 0,
            producer_warp: producer_warp != 0,
        };
    }
    let plain = scores(&problem, Role::Forward, tiles.tile);
    let mut blueprint = Blueprint { split_keys: tiles.num_splits > 1, ..plain };
    look_at(name, blueprint, &problem);
    let BackwardTiles { dq: Gradient::Hopper(dq), dkdv: Gradient::Hopper(dkdv), dv, .. } = plan.backward else {
        panic!("{plan}")
    };
    let mut gradients = vec![("dq", Role::Dq, dq.tile)];
    match dv {
        None => gradients.push(("dkdv", Role::DkDv { dk: true, dv: true }, dkdv.tile)),
        Some(Gradient::Hopper(dv)) => gradients.extend([
            ("dk", Role::DkDv { dk: true, dv: false }, dkdv.tile),
            ("dv", Role::DkDv { dk: false, dv: true }, dv.tile),
        ]),
        Some(_) => panic!("{plan}"),
    }
    let mut fast = problem;
    fast.options.backward_order = BackwardOrder::Fast;
    let any_order = plan_on(&device(), &fast).unwrap();
    gradients.extend(any_order.backward.fused.map(|fused| ("all", Role::All, fused.tile)));
    blueprint.split_keys = false;
    for (what, role, tile) in gradients {
        // HOPPER_GRADIENT_TILE checks other tiles: DQ_TILE_K/DQ_STAGES/DKDV_TILE_K/DKDV_STAGES.
        let mut tile = tile;
        if let Ok(asked) = std::env::var("HOPPER_GRADIENT_TILE") {
            let n: Vec<usize> = asked.split('/').map(|n| n.parse().unwrap()).collect();
            let n = if role == Role::Dq { &n[..2] } else { &n[2..] };
            (tile.tile_k, tile.stages) = (n[0], n[1]);
        }
        look_at(&format!("{name}_{what}"), Blueprint { role, tile, ..blueprint }, &problem);
        if blueprint.bias == Some(Rows::Each) {
            let tiled = Blueprint { role, tile, bias: Some(Rows::Tiled), ..blueprint };
            look_at(&format!("{name}_{what}_tiled"), tiled, &problem);
        }
    }
    if blueprint.bias == Some(Rows::Each) {
        look_at(&format!("{name}_tiled"), Blueprint { bias: Some(Rows::Tiled), ..blueprint }, &problem);
        check_dbias(name, blueprint, plan.backward.dbias, &problem);
    }
}

/// Checks the dbias kernel of a bias with an element for each pair: with TMA loads and vector stores, and without.
fn check_dbias(name: &str, scores: Blueprint, planned: BiasGradient, problem: &AttentionProblem) {
    let BiasGradient::Hopper(mut tile) = planned else { panic!("{planned:?}") };
    // HOPPER_DBIAS_TILE checks another tile: TILE_K/TILES/STAGES/ROW_STAGES.
    if let Ok(asked) = std::env::var("HOPPER_DBIAS_TILE") {
        let n: Vec<usize> = asked.split('/').map(|n| n.parse().unwrap()).collect();
        tile = BiasTile { tile_k: n[0], tiles: n[1], stages: n[2], row_stages: n[3] };
    }
    assert!(tile.is_consistent(), "{tile:?}");
    for (what, bias, vectors) in [("dbias_tiled", Rows::Tiled, true), ("dbias", Rows::Each, false)] {
        let scores = Blueprint { role: Role::Dq, tile: tile.tile(), bias: Some(bias), split_keys: false, ..scores };
        let blueprint = BiasBlueprint { tile, scores, vectors };
        let bytes = blueprint.shared_memory();
        println!("{name}_{what}: {bytes} bytes of shared memory");
        assert!(
            bytes <= device().shared_memory,
            "{name}_{what} takes {bytes} bytes of shared memory, more than a thread block has"
        );
        look_at_ptx(&format!("{name}_{what}"), &scores, &[tile.tile_k], || dbias_ptx(blueprint, problem));
    }
}

fn look_at(name: &str, blueprint: Blueprint, problem: &AttentionProblem) {
    assert!(
        blueprint.shared_memory() <= device().shared_memory,
        "{name} takes {} bytes of shared memory, more than a thread block has",
        blueprint.shared_memory()
    );
    let sums = if blueprint.differentiates() { blueprint.columns_dk() } else { blueprint.columns() };
    look_at_ptx(name, &blueprint, &[blueprint.tile.tile_k, sums], || ptx(blueprint, problem));
}

/// Compiles a kernel, and checks that it has products with these numbers of columns.
fn look_at_ptx(name: &str, blueprint: &Blueprint, columns: &[usize], ptx: impl FnOnce() -> String) {
    let start = Instant::now();
    let ptx = ptx();
    let compiled = start.elapsed().as_millis();
    keep(name, &ptx);
    let ty = if blueprint.dtype == Dtype::BF16 { "bf16" } else { "f16" };
    for n in columns {
        let product = format!("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty}");
        assert!(ptx.contains(&product), "{name}: its PTX lacks {product}");
    }
    assert!(ptx.contains("cp.async.bulk.tensor.4d"), "{name}: its PTX lacks TMA loads");
    assert!(!ptx.contains(".local"), "{name}: its PTX uses local memory");
    assert!(!ptx.contains("call.uni"), "{name}: its PTX has a call, which serialises products");
    match assemble(&ptx) {
        Some(Assembled { registers, spills, said, guards }) => {
            println!("{name}: {registers} registers, {spills} bytes of spills, PTX in {compiled} ms");
            assert!(!said.contains("serialized"), "{name}: {said}");
            assert!(
                guards.is_none_or(|guards| guards == 0),
                "{name}: its machine code has {guards:?} guarded shuffles"
            );
        }
        None => println!("{name}: compiled; no ptxas to assemble it"),
    }
}

#[test]
fn every_head_dimension_is_warpgroup_products() {
    for head_dim in [64, 128, 192, 256] {
        for causal in [false, true] {
            let options = AttentionOptions { causal, ..Default::default() };
            let name = format!("d{head_dim}_{}", if causal { "causal" } else { "full" });
            check(&name, problem(head_dim, Dtype::BF16, options));
        }
    }
    let long = [1, 32, 16384, 64];
    let causal = AttentionOptions { causal: true, ..Default::default() };
    check("d64_long", AttentionProblem::new(&long, &long, &long, Dtype::BF16, causal).unwrap());
    // With splits of the keys.
    let few = [1, 1, 4096, 128];
    check("d128_few", AttentionProblem::new(&few, &few, &few, Dtype::BF16, causal).unwrap());
}

#[test]
fn every_option_is_warpgroup_products() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let window = AttentionOptions { window_left: Some(1023), ..causal };
    let capped = AttentionOptions { softcap: Some(50.0), ..causal };
    for head_dim in [64, 128] {
        let plain = problem(head_dim, Dtype::BF16, AttentionOptions::default());
        let name = |what: &str| format!("d{head_dim}_{what}");
        check(&name("f16"), problem(head_dim, Dtype::F16, causal));
        check(&name("window"), problem(head_dim, Dtype::BF16, window));
        check(&name("softcap"), problem(head_dim, Dtype::BF16, capped));
        check(&name("padding_mask"), plain.with_mask(&[4, 1, 1, 4096]).unwrap());
        check(&name("mask"), plain.with_mask(&[1, 1, 4096, 4096]).unwrap());
        check(&name("bias"), plain.with_bias(&[1, 16, 4096, 4096]).unwrap());
    }
}

#[test]
fn slopes_sinks_and_dropout_are_warpgroup_products() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let dropout = AttentionOptions { dropout: 0.1, ..causal };
    for head_dim in [64, 128, 256] {
        let name = |what: &str| format!("d{head_dim}_{what}");
        let of = |options| problem(head_dim, Dtype::BF16, options);
        check(&name("slopes"), of(causal).with_alibi_slopes(&[1, 16]).unwrap());
        check(&name("sinks"), of(causal).with_sinks(&[16]).unwrap());
        check(&name("dropout"), of(dropout));
        check(&name("lengths"), of(causal).with_seq_lens_q(&[4]).unwrap().with_seq_lens_k(&[4]).unwrap());
        let all = AttentionOptions { window_left: Some(1023), softcap: Some(50.0), ..dropout };
        check(&name("all"), of(all).with_alibi_slopes(&[4, 16]).unwrap().with_sinks(&[16]).unwrap());
    }
    let biased = problem(128, Dtype::BF16, dropout).with_bias(&[1, 16, 4096, 4096]).unwrap();
    check("d128_biased", biased.with_alibi_slopes(&[1, 16]).unwrap());
}

/// Score and mask functions, alone and with other options.
#[test]
fn functions_are_warpgroup_products() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let alibi = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal };
    let capped = AttentionOptions { score_mod: Some(ScoreFn::of::<Softcap<50>>()), ..causal };
    let document = AttentionOptions { mask_mod: Some(MaskFn::of::<Document>()), ..causal };
    for head_dim in [64, 128, 256] {
        let of = |options| problem(head_dim, Dtype::BF16, options);
        let name = |what: &str| format!("d{head_dim}_{what}");
        check(&name("function_alibi"), of(alibi).with_score_tensors(&[&[1, 16, 1, 1]]).unwrap());
        check(&name("function_softcap"), of(capped));
        let documents = |problem: AttentionProblem| problem.with_mask_tensors(&[&[4, 1, 4096, 1], &[4, 1, 1, 4096]]);
        check(&name("function_document"), documents(of(document)).unwrap());
        let all = AttentionOptions { softcap: Some(50.0), dropout: 0.1, score_mod: alibi.score_mod, ..document };
        let all = documents(of(all)).unwrap().with_score_tensors(&[&[4, 16, 4096, 4096]]).unwrap();
        check(&name("function_all"), all.with_bias(&[4, 16, 4096, 4096]).unwrap());
    }
}

/// Block masks, alone and with other options.
#[test]
fn block_masks_are_warpgroup_products() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let document = AttentionOptions { mask_mod: Some(MaskFn::of::<Document>()), ..causal };
    for head_dim in [64, 128, 192, 256] {
        let of = |options| problem(head_dim, Dtype::BF16, options).with_block_mask(&[1, 16, 32, 32], 128, 128).unwrap();
        let name = |what: &str| format!("d{head_dim}_{what}");
        check(&name("blocks"), of(AttentionOptions::default()));
        check(&name("blocks_causal"), of(causal));
        check(&name("blocks_mask"), of(causal).with_mask(&[4, 1, 4096, 4096]).unwrap());
        let documents = of(document).with_mask_tensors(&[&[4, 1, 4096, 1], &[4, 1, 1, 4096]]).unwrap();
        check(&name("blocks_document"), documents);
        let lengths = documents.with_seq_lens_q(&[4]).unwrap().with_seq_lens_k(&[4]).unwrap();
        check(&name("blocks_lengths"), lengths.with_alibi_slopes(&[1, 16]).unwrap());
    }
}

/// The gradient of a bias with an element for each pair, alone and with other options.
#[test]
fn gradients_of_biases_are_warpgroup_products() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let check = |name: &str, problem: AttentionProblem| {
        let plan = plan_on(&device(), &problem).unwrap();
        let tile = HopperTile {
            consumer_groups: 1,
            warpgroups: 2,
            tile_k: 64,
            stages: 2,
            ping_pong: false,
            producer_warp: false,
        };
        let scores = Blueprint { keeps_derivative: false, ..scores(&problem, Role::Dq, tile) };
        check_dbias(name, scores, plan.backward.dbias, &problem);
    };
    let dims: Vec<usize> = match std::env::var("HOPPER_DIMS") {
        Ok(dims) => dims.split(',').map(|n| n.parse().unwrap()).collect(),
        Err(_) => vec![64, 128, 192, 256],
    };
    for head_dim in dims {
        let biased = |dtype, options| problem(head_dim, dtype, options).with_bias(&[1, 16, 4096, 4096]).unwrap();
        check(&format!("d{head_dim}_full"), biased(Dtype::BF16, AttentionOptions::default()));
        check(&format!("d{head_dim}_causal_f16"), biased(Dtype::F16, causal));
        let everything = AttentionOptions { window_left: Some(1023), softcap: Some(50.0), ..causal };
        check(&format!("d{head_dim}_all"), biased(Dtype::BF16, everything).with_mask(&[4, 1, 4096, 4096]).unwrap());
    }
}

/// The kernels around them (copies, combine, delta, conversion of `dq_accum`) use no local memory.
#[test]
fn helper_kernels_compile() {
    for dtype in [Dtype::BF16, Dtype::F16] {
        let (properties, defaults) = (|| properties(), || Default::default());
        let ty = element_type(dtype);
        let causal = problem(128, dtype, AttentionOptions { causal: true, ..Default::default() });
        let tile = HopperTile {
            consumer_groups: 1,
            warpgroups: 2,
            tile_k: 64,
            stages: 3,
            ping_pong: false,
            producer_warp: false,
        };
        let kernels = [
            (
                "copy",
                compile(copy::copy::Copy::new(
                    settings(128),
                    properties(),
                    defaults(),
                    tensor(),
                    tensor(),
                    (),
                    (),
                    (),
                    (),
                    (),
                    ty,
                )),
            ),
            (
                "combine",
                compile(combine::combine::Combine::new(
                    settings(128),
                    properties(),
                    defaults(),
                    tensor(),
                    tensor(),
                    tensor(),
                    tensor(),
                    extras(&causal),
                    ty,
                )),
            ),
            (
                "delta",
                compile(delta::delta::Delta::new(
                    settings(128),
                    properties(),
                    defaults(),
                    tensor(),
                    tensor(),
                    tensor(),
                    optional(true),
                    buffer(),
                    buffer(),
                    8,
                    DeltaBlueprint { head_dim_v: 72, stats_multiple: 128, varlen: false, zeros: 128 },
                    ty,
                )),
            ),
            (
                "convert_dq",
                round_ptx(Blueprint { head_dim: 128, head_dim_v: 128, ..plain(Role::Dq, tile, false) }, &causal),
            ),
        ];
        for (name, ptx) in kernels {
            assert!(!ptx.contains(".local") && !ptx.contains("call.uni"), "{name}: {ptx}");
            if let Some(Assembled { registers, spills, .. }) = assemble(&ptx) {
                println!("{name}: {registers} registers, {spills} bytes of spills");
                assert_eq!(spills, 0, "{name}");
            }
        }
    }
}

/// Head dimensions that are no multiple of a panel, of 16 or of 8.
#[test]
fn odd_head_dimensions_are_warpgroup_products() {
    for (head_dim, head_dim_v) in [(96, 96), (72, 40), (59, 111), (8, 8), (192, 128)] {
        let (q, v) = ([1, 2, 300, head_dim], [1, 2, 300, head_dim_v]);
        let options = AttentionOptions { causal: true, ..Default::default() };
        let name = format!("d{head_dim}_{head_dim_v}");
        check(&name, AttentionProblem::new(&q, &q, &v, Dtype::BF16, options).unwrap());
    }
}

#[test]
fn plans_say_why_hopper_is_not_used() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let half = plan_on(&device(), &problem(128, Dtype::F16, causal)).unwrap();
    assert!(half.passed_over.is_empty() && half.to_string().starts_with("forward hopper 128×128"), "{half}");
    // Causal: keys and values of a head group of 16 heads take 32 MiB. Full attention takes one head at a time.
    assert!(matches!(half.forward, Forward::Hopper(HopperForward { head_group: 16, .. })), "{half:?}");
    let full = plan_on(&device(), &problem(128, Dtype::F16, AttentionOptions::default())).unwrap();
    assert!(matches!(full.forward, Forward::Hopper(HopperForward { head_group: 1, .. })), "{full:?}");

    // With few heads or a single query, splits of the keys give all multiprocessors about the same amount of work.
    for (heads, seq_q, seq_k, causal, num_splits) in
        [(1, 128, 65536, true, 64), (1, 16384, 16384, true, 2), (2, 4096, 4096, false, 2), (32, 1, 16384, true, 4)]
    {
        let (q, k) = ([1, heads, seq_q, 128], [1, heads, seq_k, 128]);
        let options = AttentionOptions { causal, ..Default::default() };
        let plan = plan_on(&device(), &AttentionProblem::new(&q, &k, &k, Dtype::BF16, options).unwrap()).unwrap();
        assert!(plan.to_string().starts_with(&format!("forward hopper 128×128 in {num_splits} splits")), "{plan}");
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

/// The gradient of a bias that repeats queries or keys is computed by the portable kernel, and the plan says why.
#[test]
fn plans_say_why_dbias_is_not_hoppers() {
    let plain = problem(128, Dtype::BF16, AttentionOptions::default());
    let plan = |problem: AttentionProblem| plan_on(&device(), &problem).unwrap();
    let biased = plan(plain.with_bias(&[1, 16, 4096, 4096]).unwrap());
    assert!(biased.passed_over.is_empty() && biased.to_string().contains(", dbias hopper 128×128"), "{biased}");
    for shape in [[4, 16, 1, 4096], [1, 1, 4096, 1], [1, 16, 1, 1]] {
        let repeated = plan(plain.with_bias(&shape).unwrap());
        assert_eq!(repeated.backward.dbias.kernel(), Kernel::Portable, "{repeated}");
        assert!(repeated.to_string().contains("; not dbias hopper: it does not sum"), "{repeated}");
    }
    let none = plan(plain);
    assert!(none.passed_over.is_empty() && !none.to_string().contains("dbias"), "{none}");
}

/// `BackwardOrder::Fast` plans the fused kernel where it is possible and faster. Otherwise the plan says why not.
#[test]
fn plans_say_why_the_backward_is_not_fused() {
    let options = AttentionOptions { backward_order: BackwardOrder::Fast, ..Default::default() };
    let plan = |problem: AttentionProblem| plan_on(&device(), &problem).unwrap();
    let fast = plan(problem(128, Dtype::BF16, options));
    assert!(fast.to_string().contains(", all three hopper 64×128 in any order"), "{fast}");
    let fixed = plan(problem(128, Dtype::BF16, AttentionOptions::default()));
    assert!(fixed.backward.fused.is_none() && fixed.passed_over.is_empty(), "{fixed}");
    // `dq_accum` in f32.
    assert_eq!(fast.scratch_bytes - fixed.scratch_bytes, 4 * 4 * 16 * 4096 * 128);
    let short = [1, 16, 1024, 128];
    let short = AttentionProblem::new(&short, &short, &short, Dtype::BF16, options).unwrap();
    let biased = problem(64, Dtype::BF16, options).with_bias(&[1, 1, 4096, 4096]).unwrap();
    let whys = [
        (short, "at least 2048 are needed"),
        (problem(256, Dtype::F16, options), "256 is above 128"),
        (biased, "a bias"),
    ];
    for (problem, why) in whys {
        let plan = plan(problem);
        let reported = plan.to_string().contains("; not dq, dk and dv together: ") && plan.to_string().contains(why);
        assert!(plan.backward.fused.is_none() && reported, "{plan}");
    }
}

/// The dbias scheduler visits every block that the band does not hide entirely once, in order, for any stride and first block.
#[test]
fn dbias_scheduler_visits_every_block_once() {
    let options = [
        AttentionOptions::default(),
        AttentionOptions { causal: true, ..Default::default() },
        AttentionOptions { causal: true, window_left: Some(99), ..Default::default() },
    ];
    let tile = BiasTile { tile_k: 64, tiles: 2, stages: 2, row_stages: 1 };
    for ((seq_q, seq_k), options) in
        [(700, 700), (300, 900), (900, 300), (128, 128), (1, 500)].into_iter().flat_map(|n| options.map(|o| (n, o)))
    {
        let band = Band::new(seq_q, seq_k, &options);
        let scheduler = DbiasScheduler::new(&band, tile, [2, 3], [2, 6, 3]);
        let matrices = 0..6u32;
        let all: Vec<_> = matrices
            .flat_map(|matrix| (0..(seq_q as u32).div_ceil(128)).map(move |row| (matrix, row)))
            .flat_map(|(matrix, row)| {
                let seen = band.k_blocks(row * 128, 128, 128);
                (0..seen.end - seen.start).map(move |nth| Block { matrix, row, nth })
            })
            .collect();
        assert_eq!(all.len() as u32, scheduler.num_tiles);
        for stride in [1, 5, 132] {
            for first in 0..stride.min(3) {
                let (mut block, mut at) = (Block { matrix: 0, row: 0, nth: 0 }, 0);
                for number in (first..all.len()).step_by(stride) {
                    block = scheduler.after(&block, (number - at) as u32, &band, tile);
                    assert_eq!(block, all[number], "{band:?} {number}");
                    at = number;
                }
            }
        }
    }
}

fn plain(role: Role, tile: HopperTile, split_keys: bool) -> Blueprint {
    let (head_dim, head_dim_v, stats_multiple) = (64, 64, 128);
    let (capped, mask, bias, alibi) = (false, None, None, false);
    let dtype = Dtype::BF16;
    Blueprint {
        role,
        tile,
        dtype,
        tf32: false,
        head_dim,
        head_dim_v,
        capped,
        mask,
        bias,
        alibi,
        modified: false,
        keeps_derivative: false,
        mask_mod: false,
        varlen: false,
        sparse: false,
        split_keys,
        stats_multiple,
    }
}

/// Work tiles of dk and dv: each block of keys of each head comes once for each query head of its group, with the tiles of queries that see
/// it. Longer work tiles come first.
#[test]
fn dkdv_work_tiles_cover_every_block_for_every_query_head() {
    let options = [
        AttentionOptions { causal: true, ..Default::default() },
        AttentionOptions { causal: true, window_left: Some(99), ..Default::default() },
        AttentionOptions::default(),
    ];
    for ((seq_q, seq_k, group), options) in [(700, 700, 1), (300, 420, 3), (420, 300, 2)]
        .into_iter()
        .flat_map(|case| options.map(|options| (case, options)))
    {
        let (q, k) = ([2, 2 * group as usize, seq_q, 64], [2, 2, seq_k, 64]);
        let band = AttentionProblem::new(&q, &k, &k, Dtype::BF16, options).unwrap().band();
        let tile = HopperTile {
            consumer_groups: 1,
            warpgroups: 2,
            tile_k: 64,
            stages: 3,
            ping_pong: false,
            producer_warp: false,
        };
        let blueprint = plain(Role::DkDv { dk: true, dv: true }, tile, false);
        let blocks = (seq_k as u32).div_ceil(128);
        let scheduler = TileScheduler::new(blocks, 0, 2, 2, group, 4, 1);
        assert_eq!(scheduler.num_tiles, 2 * 2 * blocks);
        let mut found = HashMap::new();
        let mut longest = u32::MAX;
        for number in 0..scheduler.num_tiles {
            for of_group in 0..group {
                let work = scheduler.work_tile(number, of_group, &band.transposed(), &Extras::none(), blueprint);
                assert_eq!(work.head_kv, work.head * group + of_group);
                let last = work.k_last / 64;
                let tiles = if work.fully_masked { 0..0 } else { last + 1 - work.steps..last + 1 };
                if options.window_left.is_none() && seq_q == seq_k {
                    assert!(work.steps <= longest, "{work:?}");
                    longest = work.steps;
                }
                assert!(
                    found.insert((work.batch, work.head_kv, work.q_start), tiles).is_none(),
                    "{work:?} comes twice"
                );
            }
        }
        assert_eq!(found.len() as u32, 2 * 2 * group * blocks);
        for ((_, _, start), tiles) in found {
            let keys = start..(start + 128).min(seq_k as u32);
            let seen = |tile: &u32| {
                (tile * 64..(tile * 64 + 64).min(seq_q as u32)).any(|i| keys.clone().any(|j| band.sees(i, j)))
            };
            let all = 0..(seq_q as u32).div_ceil(64);
            assert!(all.filter(seen).eq(tiles.clone()), "{band:?} {start}: {tiles:?}");
        }
    }
}

/// Work tiles of the forward: each block of queries of each head comes once. Within a head group, longer work tiles come first.
#[test]
fn work_tiles_cover_every_block_once() {
    let cases =
        [(1, 1, 1, 1), (6, 4, 700, 700), (6, 6, 300, 300), (5, 1, 129, 129), (4, 2, 383, 384), (4, 2, 300, 420)];
    for ((heads, head_group, seq_q, seq_k), num_splits) in cases.into_iter().flat_map(|case| [(case, 1), (case, 3)]) {
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let q = [heads / heads.min(3), heads.min(3), seq_q, 64];
        let k = [q[0], q[1], seq_k, 64];
        let problem = AttentionProblem::new(&q, &k, &k, Dtype::BF16, causal).unwrap();
        let tile = HopperTile {
            consumer_groups: 1,
            warpgroups: 2,
            tile_k: 128,
            stages: 3,
            ping_pong: false,
            producer_warp: false,
        };
        let band = problem.band();
        let ahead = band.ahead(128, 128);
        let blocks = (seq_q as u32 + ahead).div_ceil(128);
        let scheduler = TileScheduler::new(blocks, ahead, q[0] as u32, q[1] as u32, 1, head_group, num_splits);
        let blueprint = plain(Role::Forward, tile, num_splits > 1);
        let work: Vec<_> = (0..scheduler.num_tiles)
            .map(|number| scheduler.work_tile(number, 0, &band, &Extras::none(), blueprint))
            .collect();
        let (batches, heads) = (q[0] as u32, q[1] as u32);
        for head_group_tiles in work.chunks((scheduler.head_group.divisor * blocks * num_splits) as usize) {
            assert!(
                num_splits > 1 || head_group_tiles.is_sorted_by_key(|work| std::cmp::Reverse(work.steps)),
                "{scheduler:?}"
            );
        }
        // The splits of a block together visit each of its tiles once.
        let mut tiles = HashMap::<_, Vec<_>>::new();
        for work in &work {
            assert_eq!(work.batch_out % batches, work.batch, "{work:?}");
            let of_block = tiles.entry((work.batch, work.head, work.q_start as i32)).or_default();
            if !work.fully_masked {
                let last = work.k_last / 128;
                of_block.extend(last + 1 - work.steps..=last);
            }
        }
        for (batch, head, block) in
            (0..batches).flat_map(|b| (0..heads).flat_map(move |h| (0..blocks).map(move |q| (b, h, q))))
        {
            let start = (block * 128) as i32 - ahead as i32;
            let mut of_block = tiles.remove(&(batch, head, start)).unwrap();
            of_block.sort_unstable();
            let after = ((start + 128).min(seq_q as i32) + seq_k as i32 - seq_q as i32) as u32;
            assert!(of_block.into_iter().eq(0..after.div_ceil(128)), "{scheduler:?} {start}");
        }
        assert!(tiles.is_empty(), "{scheduler:?}");
    }
}

#[test]
fn products_and_shifts_divide() {
    for divisor in (1..300).chain([65_535, 65_536, 1 << 30, (1 << 31) - 1]) {
        let by = Divisor::new(divisor);
        let multiples = (0..5).map(|n| n * divisor as u64).chain([(1 << 31) / divisor as u64 * divisor as u64]);
        for x in multiples.flat_map(|x| [x.saturating_sub(1), x, x + 1]).chain([0, (1 << 31) - 1]) {
            if let Ok(x @ 0..=0x7fff_ffff) = u32::try_from(x) {
                assert_eq!((by.divide(x), by.modulo(x)), (x / divisor, x % divisor), "{x} by {divisor}");
            }
        }
    }
}
