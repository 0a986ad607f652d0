//! Every kernel made of `mma.sync` compiles to PTX for Ampere and for Hopper on a machine with no GPU, as CubeCL compiles it on
//! one, and is what it is meant to be: products of warps, `ldmatrix`, `cp.async`, nothing in local memory. Where `ptxas` is at hand
//! (or named by `PTXAS`), it is assembled as CubeCL's driver calls do, as relocatable code, and its registers are counted.
//!
//! `MMA_PTX_DIR` keeps the PTX there; `MMA_TILE` looks at other tiles: WARPGROUPS/GROUPS/KEYS.

use cubecl::ir::{AddressType, DeviceIdentity, DeviceProperties, ElemType, HardwareProperties, UIntKind};
use cubecl::prelude::*;
use cubecl_core::ir::MemoryDeviceProperties;
use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::{Compiler, CubeKernel};
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
use flash_attention_kernels::hopper::forward::{StrideCompilationArg, StridesCompilationArg};
use flash_attention_kernels::hopper::gradient::{ResultStridesCompilationArg, SourceStridesCompilationArg};
use flash_attention_kernels::hopper::schedule::{DivisorCompilationArg, WalkCompilationArg};
use flash_attention_kernels::hopper::scores::FactorsCompilationArg;
use flash_attention_kernels::hopper::{Blueprint, Role, Rows};
use flash_attention_kernels::mask::{Band, BandCompilationArg};
use flash_attention_kernels::mma::{MmaBlueprint, forward, gradient};
use flash_attention_kernels::tiling::{Device, element_type, plan_on};
use flash_attention_kernels::{
    AttentionOptions, AttentionProblem, BackwardTiles, Dtype, Forward, Gradient, Kernel, MmaTile,
};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

/// A GPU with so much shared memory for a cube, and no warpgroup products.
fn device(shared_memory: usize) -> Device {
    Device {
        name: "offline".into(),
        shared_memory,
        units: 1024,
        bindings: 1024,
        cubes: (u32::MAX, 65535, 65535),
        wide_addresses: true,
        dtypes: vec![Dtype::F32, Dtype::F16, Dtype::BF16],
        multiprocessors: 132,
        wgmma: false,
        mma: vec![Dtype::F16, Dtype::BF16],
        plane: 32,
        matrices: [Dtype::F16, Dtype::BF16].map(|dtype| (dtype, [16, 16, 16])).to_vec(),
    }
}

/// A cube of Hopper, of sm_80, of other ones from Ampere on.
const HOPPER: usize = 227 << 10;
const AMPERE: usize = 163 << 10;
const SMALL: usize = 99 << 10;

/// Bytes of spills that kernels may have on Hopper: a few registers, of those with most to do at once.
const SPILLS: usize = 64;

fn properties() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 32,
        max_shared_memory_size: HOPPER,
        max_cube_count: (u32::MAX, u16::MAX as u32, u16::MAX as u32),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity { name: "offline".into(), fingerprint: "offline".into(), physical: None };
    DeviceProperties::new(
        Default::default(),
        MemoryDeviceProperties::new(u64::MAX, 256),
        hardware,
        cubecl_core::profile::TimingMethod::Device,
        identity,
    )
}

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

fn divisor() -> DivisorCompilationArg {
    DivisorCompilationArg { divisor: (), multiplier: (), shift: () }
}

fn stride() -> StrideCompilationArg {
    StrideCompilationArg { batch: (), head: (), row: () }
}

fn optional<T: LaunchArg<CompilationArg = TensorCompilationArg>>(is: bool) -> ComptimeOptionCompilationArg<T> {
    let tensor = || TensorCompilationArg { meta: TensorMetaCompilationArg { len: (), rank: () }, buffer: buffer() };
    if is { ComptimeOptionCompilationArg::Some(tensor()) } else { ComptimeOptionCompilationArg::None }
}

fn factors() -> FactorsCompilationArg {
    FactorsCompilationArg { scale: (), softcap: (), inner: (), exponent: () }
}

fn band_arg(band: Band) -> BandCompilationArg {
    BandCompilationArg {
        seq_q: (),
        seq_k: (),
        lower: (),
        upper: (),
        bounded_below: band.bounded_below,
        bounded_above: band.bounded_above,
    }
}

fn walk() -> WalkCompilationArg {
    WalkCompilationArg {
        items: (),
        blocks: (),
        ahead: (),
        heads: (),
        of_section: divisor(),
        section: divisor(),
        last_section: divisor(),
        num_heads_q: divisor(),
        group_size: divisor(),
        parts: divisor(),
        batches: (),
    }
}

fn ptx(blueprint: MmaBlueprint, band: Band, arch: SmArch) -> String {
    let scores = blueprint.scores;
    let settings = KernelSettings::new(
        *CubeDim::new_1d(blueprint.tile.units() as u32),
        ExecutionMode::Unchecked,
        AddressType::U32,
    );
    let (properties, defaults) = (Arc::new(properties()), Arc::new(Default::default()));
    let types = [element_type(scores.dtype), ElemType::UInt(UIntKind::U8)];
    let (mask, bias) = (scores.mask.is_some(), scores.bias.is_some());
    if scores.role == Role::Forward {
        let strides = StridesCompilationArg { q: stride(), k: stride(), v: stride(), o: stride(), lse: stride() };
        return compile(
            forward::forward::Forward::new(
                settings,
                properties,
                defaults,
                buffer(),
                buffer(),
                buffer(),
                optional(mask),
                optional(bias),
                buffer(),
                buffer(),
                strides,
                factors(),
                band_arg(band),
                walk(),
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
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            optional(mask),
            optional(bias),
            buffer(),
            buffer(),
            buffer(),
            SourceStridesCompilationArg { q: stride(), d: stride(), k: stride(), v: stride() },
            ResultStridesCompilationArg { dk: stride(), dv: stride() },
            (),
            factors(),
            band_arg(band),
            walk(),
            width,
            width,
            blueprint,
            types,
        ),
        arch,
    )
}

fn compile(kernel: impl CubeKernel, arch: SmArch) -> String {
    let options = PlironOptions {
        arch: None,
        sm_arch: Some(arch),
        ptx_version: PtxVersion::for_driver(12080),
        grid_constants: true,
        ..Default::default()
    };
    let mut compiler = PlironCompiler { target: LlvmTarget::Nvptx };
    match compiler.compile(kernel.define(), &options).unwrap() {
        PlironArtifact::NvptxCode(module) => {
            // SAFETY: the compiler ends it with a zero.
            unsafe { std::ffi::CStr::from_ptr(module.ptx.as_ptr()) }.to_string_lossy().into_owned()
        }
        _ => unreachable!("PTX was asked for"),
    }
}

/// Registers and bytes of spills, if there is an assembler.
fn assemble(ptx: &str, arch: &str) -> Option<(usize, usize)> {
    let ptxas = std::env::var("PTXAS").unwrap_or_else(|_| "ptxas".into());
    let directory = tempfile::tempdir().unwrap();
    let (source, object) = (directory.path().join("kernel.ptx"), directory.path().join("kernel.o"));
    std::fs::write(&source, ptx).unwrap();
    let arguments = ["-c", &format!("-arch={arch}"), "-v", "-o"];
    let output = Command::new(ptxas).args(arguments).args([&object, &source]).output().ok()?;
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success(), "{said}");
    let before = |what: &str| -> usize {
        said.match_indices(what)
            .filter_map(|(at, _)| said[..at].split_whitespace().last()?.parse::<usize>().ok())
            .max()
            .unwrap_or(0)
    };
    Some((before(" registers"), before(" bytes spill stores") + before(" bytes spill loads")))
}

/// A kernel, compiled for both and looked at. Returns bytes of spills on Hopper.
fn look_at(name: &str, role: Role, tile: MmaTile, problem: &AttentionProblem, shared_memory: usize) -> usize {
    let mut tile = tile;
    if let Ok(asked) = std::env::var("MMA_TILE") {
        let n: Vec<usize> = asked.split('/').map(|n| n.parse().unwrap()).collect();
        tile = MmaTile { warpgroups: n[0], groups: n[1], tile_k: n[2] };
    }
    let rows = |shape: Option<[usize; 4]>| shape.map(|shape| if shape[2] == 1 { Rows::Same } else { Rows::Each });
    let scores = Blueprint {
        role,
        tile: tile.tile(),
        dtype: problem.dtype,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        capped: problem.options.softcap.is_some(),
        mask: rows(problem.mask),
        bias: rows(problem.bias),
        partial: false,
        stats_multiple: 384,
    };
    let blueprint = MmaBlueprint { tile, scores };
    let bytes = blueprint.shared_memory();
    assert!(tile.is_consistent() && bytes <= shared_memory, "{name}: {tile:?}, {bytes} bytes");
    let ty = if problem.dtype == Dtype::BF16 { "bf16" } else { "f16" };
    let mut most = 0;
    for (arch, called) in [(SmArch::new(80, false), "sm_80"), (SmArch::new(90, true), "sm_90a")] {
        let start = Instant::now();
        let ptx = ptx(blueprint, problem.band(), arch);
        let compiled = start.elapsed().as_millis();
        if let Ok(directory) = std::env::var("MMA_PTX_DIR") {
            std::fs::write(format!("{directory}/{name}.{called}.ptx"), &ptx).unwrap();
        }
        let product = format!("mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32");
        for needed in [&product, "ldmatrix.sync.aligned.m8n8.x4.trans", "cp.async.cg.shared.global"] {
            assert!(ptx.contains(needed), "{name}: no {needed}");
        }
        assert!(!ptx.contains(".local") && !ptx.contains("call.uni"), "{name}: local memory or a call");
        match assemble(&ptx, called) {
            Some((registers, spills)) => {
                println!(
                    "{name} {called}: {registers} registers, {spills} bytes of spills, {bytes} of shared memory, PTX in {compiled} ms"
                );
                // Before Hopper, relocatable code guards shuffles behind votes by calls, beside which registers are few.
                most = most.max(if called == "sm_90a" { spills } else { 0 });
            }
            None => println!("{name} {called}: compiled in {compiled} ms; no ptxas to assemble it"),
        }
    }
    most
}

/// The kernels that are planned for a problem on such a device, compiled and looked at.
fn check(name: &str, problem: AttentionProblem, shared_memory: usize, spills: usize) {
    let plan = plan_on(&device(shared_memory), &problem).unwrap();
    let Forward::Mma(forward) = plan.forward else { panic!("{plan}") };
    let BackwardTiles { dq: Gradient::Mma(dq), dkdv: Gradient::Mma(dkdv), dv, .. } = plan.backward else {
        panic!("{plan}")
    };
    let mut all = vec![("forward", Role::Forward, forward.tile), ("dq", Role::Dq, dq.tile)];
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
        assert!(most <= spills, "{name}_{what}: {most} bytes of spills");
    }
}

fn problem(head_dim: usize, dtype: Dtype, options: AttentionOptions) -> AttentionProblem {
    let shape = [4, 16, 4096, head_dim];
    AttentionProblem::new(&shape, &shape, &shape, dtype, options).unwrap()
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
fn what_mma_cannot_do_is_planned_visibly() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let plan = |device: &Device, dtype| plan_on(device, &problem(128, dtype, causal)).unwrap();
    let half = plan(&device(SMALL), Dtype::F16);
    assert!(half.to_string().starts_with("forward mma 128×64, dq mma 128×32, dk and dv mma 64×64"), "{half}");
    let single = plan(&device(HOPPER), Dtype::F32);
    assert_eq!(single.forward.kernel(), Kernel::Portable);
    assert!(single.to_string().contains("not forward mma: it computes in f16 and bf16, not f32"), "{single}");
    let only = plan(&Device { mma: vec![Dtype::F16], ..device(HOPPER) }, Dtype::BF16);
    assert_eq!(only.forward.kernel(), Kernel::Matrix);
    assert!(only.to_string().contains("not forward mma: the device has no mma.sync of bf16"), "{only}");
    // What is meant for wider heads fits less memory.
    let less = plan(&device(64 << 10), Dtype::BF16);
    assert!(less.to_string().starts_with("forward mma 64×32"), "{less}");
    let little = plan(&device(32 << 10), Dtype::BF16);
    assert!(little.to_string().contains("not forward mma: it takes "), "{little}");
}
