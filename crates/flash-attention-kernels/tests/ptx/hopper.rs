//! The PTX of every kernel for Hopper has warpgroup products and TMA loads, no local memory and no guarded shuffles.

use crate::harness::*;
use cubecl_core::CubeKernel;
use cubecl_core::ir::nvidia::SmArch;
use flash_attention_kernels::fragment::Role;
use flash_attention_kernels::hopper::dbias::{BiasOutCompilationArg, DbiasSchedulerCompilationArg};
use flash_attention_kernels::hopper::splits::{self, SplitSumsCompilationArg};
use flash_attention_kernels::hopper::wide::{WideBlueprint, gradients};
use flash_attention_kernels::hopper::{BiasBlueprint, BiasTile, copy, dbias, forward, gradient, reduce};
use flash_attention_kernels::mods::{Alibi, Document, MaskFn, ScoreFn, Softcap, Temperature};
use flash_attention_kernels::score::{Factor, Factors};
use flash_attention_kernels::tensor_core::{Blueprint, DeltaBlueprint, Rows, Zeros, combine, delta};
use flash_attention_kernels::tiling::{element_type, plan_on};
use flash_attention_kernels::{
    AttentionOptions, AttentionProblem, BackwardOrder, BackwardTiles, BiasGradient, Dtype, Forward, Gradient,
    HopperTile,
};
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
        dq_accum(),
        schedule(),
        width,
        width,
        blueprint,
        types(blueprint),
    ))
}

fn wide_ptx(blueprint: WideBlueprint, problem: &AttentionProblem) -> String {
    compile(gradients::gradients::Gradients::new(
        settings(blueprint.scores.tile.units()),
        properties(),
        Default::default(),
        streams(blueprint.scores, true),
        source_sides(),
        score_args(problem, blueprint.scores, problem.band()),
        gradient_outputs(),
        dq_accum(),
        schedule(),
        2,
        2,
        blueprint,
        types(blueprint.scores),
    ))
}

/// Checks the kernel that computes all gradients of wide heads.
fn check_wide(name: &str, tile: HopperTile, scores: Blueprint, problem: &AttentionProblem) {
    let blueprint = WideBlueprint::new(tile, scores);
    let bytes = blueprint.shared_memory();
    assert!(blueprint.is_consistent(), "{blueprint:?}");
    assert!(
        bytes <= device().shared_memory,
        "{name} takes {bytes} bytes of shared memory, more than a thread block has"
    );
    look_at_ptx(name, &blueprint.scores, &[tile.tile_k / 2, tile.tile_k, 64], || wide_ptx(blueprint, problem));
}

fn round_ptx(blueprint: Blueprint, problem: &AttentionProblem) -> String {
    compile(reduce::convert_dq::ConvertDq::new(
        settings(reduce::UNITS as usize),
        properties(),
        Default::default(),
        dq_accum(),
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

fn sum_splits_ptx(blueprint: Blueprint, problem: &AttentionProblem) -> String {
    compile(splits::sum_splits::SumSplits::new(
        settings(reduce::UNITS as usize),
        properties(),
        Default::default(),
        SplitSumsCompilationArg { dk: rows_in(), dv: rows_in(), count: (), batches: () },
        source_sides(),
        score_args(problem, blueprint, problem.band().transposed()),
        gradient_outputs(),
        buffer(),
        scheduler(),
        1,
        1,
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
    gradients.extend(any_order.backward.fused.map(|fused| ("all_in_splits", Role::All, fused.tile)));
    gradients.extend(plan.backward.fused.map(|fused| ("all_in_order", Role::All, fused.tile)));
    blueprint.split_keys = false;
    for (what, role, tile) in gradients {
        // HOPPER_GRADIENT_TILE checks other tiles: DQ_TILE_K/DQ_STAGES/DKDV_TILE_K/DKDV_STAGES.
        let mut tile = tile;
        if let Ok(asked) = std::env::var("HOPPER_GRADIENT_TILE") {
            let n: Vec<usize> = asked.split('/').map(|n| n.parse().unwrap()).collect();
            let n = if role == Role::Dq { &n[..2] } else { &n[2..] };
            (tile.tile_k, tile.stages) = (n[0], n[1]);
        }
        let (ordered, split_group) = (what == "all_in_order", what == "all_in_splits");
        if role == Role::All && problem.head_dim > 128 {
            check_wide(
                &format!("{name}_{what}"),
                tile,
                Blueprint { role: Role::Dq, ..scores(&problem, Role::Dq, tile) },
                &problem,
            );
            continue;
        }
        look_at(&format!("{name}_{what}"), Blueprint { role, tile, ordered, split_group, ..blueprint }, &problem);
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
    let sums = if blueprint.accumulates() { blueprint.columns_dk() } else { blueprint.columns() };
    let columns = [blueprint.tile.tile_k, sums];
    let columns = if let Role::Sums { .. } = blueprint.role { &columns[..1] } else { &columns };
    look_at_ptx(name, &blueprint, columns, || ptx(blueprint, problem));
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

/// The kernel that computes all gradients of wide heads, alone and with every option that it takes.
#[test]
fn all_gradients_of_wide_heads_are_warpgroup_products() {
    let causal = AttentionOptions { causal: true, backward_order: BackwardOrder::Fast, ..Default::default() };
    let full = AttentionOptions { causal: false, ..causal };
    let of = |dtype, options| problem(256, dtype, options);
    let bf16 = |options| of(Dtype::BF16, options);
    let capped = AttentionOptions { softcap: Some(50.0), ..causal };
    let dropout = AttentionOptions { dropout: 0.1, ..causal };
    let alibi = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal };
    let document = AttentionOptions { mask_mod: Some(MaskFn::of::<Document>()), ..causal };
    let cases = [
        ("full", bf16(full)),
        ("causal", bf16(causal)),
        ("causal_f16", of(Dtype::F16, causal)),
        ("window", bf16(AttentionOptions { window_left: Some(1023), ..causal })),
        ("softcap", bf16(capped)),
        ("dropout", bf16(dropout)),
        ("slopes", bf16(causal).with_alibi_slopes(&[1, 16]).unwrap()),
        ("padding_mask", bf16(full).with_mask(&[4, 1, 1, 4096]).unwrap()),
        ("mask", bf16(full).with_mask(&[1, 1, 4096, 4096]).unwrap()),
        ("function_alibi", bf16(alibi).with_score_tensors(&[&[1, 16, 1, 1]]).unwrap()),
        ("function_softcap", bf16(AttentionOptions { score_mod: Some(ScoreFn::of::<Softcap<50>>()), ..causal })),
        ("function_document", bf16(document).with_mask_tensors(&[&[4, 1, 4096, 1], &[4, 1, 1, 4096]]).unwrap()),
    ];
    let only = std::env::var("HOPPER_WIDE").ok();
    for (name, problem) in cases.into_iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        let tile = plan_on(&device(), &problem).unwrap().backward.fused.unwrap().tile;
        let scores = Blueprint { split_keys: false, ..scores(&problem, Role::Dq, tile) };
        check_wide(&format!("d256_all_{name}"), tile, scores, &problem);
    }
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

/// Head dimensions: those of `HOPPER_DIMS`, or else all.
fn dims(all: &[usize]) -> Vec<usize> {
    let chosen = std::env::var("HOPPER_DIMS").ok();
    chosen.map_or(all.to_vec(), |dims| dims.split(',').map(|n| n.parse().unwrap()).collect())
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
    for head_dim in dims(&[64, 128, 192, 256]) {
        let biased = |dtype, options| problem(head_dim, dtype, options).with_bias(&[1, 16, 4096, 4096]).unwrap();
        check(&format!("d{head_dim}_full"), biased(Dtype::BF16, AttentionOptions::default()));
        check(&format!("d{head_dim}_causal_f16"), biased(Dtype::F16, causal));
        let everything = AttentionOptions { window_left: Some(1023), softcap: Some(50.0), ..causal };
        check(&format!("d{head_dim}_all"), biased(Dtype::BF16, everything).with_mask(&[4, 1, 4096, 4096]).unwrap());
    }
}

/// Gradients of slopes, of tensors of functions and of broadcast biases: kernels of `dq` and `dk` that compute sums as well, and kernels
/// of sums alone.
#[test]
fn sums_are_warpgroup_products() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let alibi = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal };
    let temperature = AttentionOptions { score_mod: Some(ScoreFn::of::<Temperature>()), ..causal };
    let of = |factors: &[Factor]| factors.iter().fold(Factors::default(), |all, factor| all.with(*factor));
    for head_dim in dims(&[64, 96, 128, 192, 256]) {
        let plain = |options| problem(head_dim, Dtype::BF16, options);
        let cases = [
            ("slopes", plain(causal).with_alibi_slopes(&[1, 16]).unwrap(), of(&[Factor::Slope])),
            ("key_bias", plain(AttentionOptions::default()).with_bias(&[1, 1, 1, 4096]).unwrap(), of(&[Factor::One])),
            ("alibi", plain(alibi).with_score_tensors(&[&[1, 16, 1, 1]]).unwrap(), of(&[Factor::A])),
            ("temperature", plain(temperature).with_score_tensors(&[&[1, 16, 1, 1]]).unwrap(), of(&[Factor::A])),
            (
                "both",
                plain(causal).with_alibi_slopes(&[1, 16]).unwrap().with_bias(&[1, 1, 1, 4096]).unwrap(),
                of(&[Factor::One, Factor::Slope]),
            ),
        ];
        for (what, problem, sums) in cases {
            let BackwardTiles { dq: Gradient::Hopper(dq), dkdv: Gradient::Hopper(dkdv), dv, fused, .. } =
                plan_on(&device(), &problem).unwrap().backward
            else {
                panic!("no kernels for Hopper")
            };
            let mut roles = vec![
                ("of_queries", Role::Sums { keys: false }, dq.tile),
                ("of_keys", Role::Sums { keys: true }, dkdv.tile),
            ];
            // Kernels with an accumulator have registers for one sum. Arguments of a factor that depends on the score are kept in shared
            // memory.
            if sums.len() == 1 {
                roles.push(("dq", Role::Dq, dq.tile));
                roles.push(("dkdv", Role::DkDv { dk: true, dv: dv.is_none() }, dkdv.tile));
                roles.extend(fused.map(|fused| ("all", Role::All, fused.tile)));
            }
            for (of_role, role, tile) in roles {
                let blueprint = Blueprint { sums, ..scores(&problem, role, tile) };
                if blueprint.argument_bytes() > 0 && blueprint.shared_memory() > device().shared_memory {
                    println!("d{head_dim}_{what}_sums_{of_role}: no shared memory for arguments");
                    continue;
                }
                look_at(&format!("d{head_dim}_{what}_sums_{of_role}"), blueprint, &problem);
            }
        }
    }
}

/// The kernels around them (copies, combine, delta, conversion of `dq_accum`) use no local memory.
#[test]
fn helper_kernels_compile() {
    for dtype in [Dtype::BF16, Dtype::F16] {
        let (properties, defaults) = (|| properties(), || Default::default());
        let ty = element_type(dtype);
        let causal = problem(128, dtype, AttentionOptions { causal: true, ..Default::default() });
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
                    outputs(),
                    outputs(),
                    extras(&causal),
                    (),
                    (),
                    (),
                    (),
                    causal.head_dim_v,
                    causal.dtype,
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
                    DeltaBlueprint {
                        head_dim_v: 72,
                        stats_multiple: 128,
                        varlen: false,
                        zeros: Zeros { words: 128, rows: 1 },
                    },
                    ty,
                )),
            ),
            (
                "convert_dq",
                round_ptx(
                    Blueprint { head_dim: 128, head_dim_v: 128, ordered: true, ..plain(Role::Dq, 64, false) },
                    &causal,
                ),
            ),
            ("sum_splits", sum_splits_ptx(plain(Role::All, 64, false), &causal)),
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
