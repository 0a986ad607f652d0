//! Compiles kernels to PTX without a GPU, as CubeCL compiles them for a GPU. If `ptxas` is installed (or named by `PTXAS`), assembles them
//! as relocatable code, as CubeCL's driver calls do. With `nvdisasm` (or `NVDISASM`), searches the machine code for guarded shuffles.
//! `PTX_DIR` is a directory for the PTX.

use cubecl::ir::features::{Features, MmaConfig};
use cubecl::ir::{AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, UIntKind};
use cubecl::prelude::*;
use cubecl_core::ir::MemoryDeviceProperties;
use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::{Compiler, CubeKernel};
use cubecl_llvm::nvptx::ptx_version::PtxVersion;
use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
use flash_attention_kernels::dropout::DropoutCompilationArg;
use flash_attention_kernels::extras::ExtrasCompilationArg;
use flash_attention_kernels::fragment::{Role, ScoresCompilationArg};
use flash_attention_kernels::hopper::operands::{DqAccumCompilationArg, ScheduleCompilationArg, StreamsCompilationArg};
use flash_attention_kernels::hopper::producer::SpreadCompilationArg;
use flash_attention_kernels::mask::{Band, BandCompilationArg};
use flash_attention_kernels::mods::{ModsCompilationArg, TableCompilationArg, TablesCompilationArg};
use flash_attention_kernels::pages::PageTableCompilationArg;
use flash_attention_kernels::score::{Factors, ScoreCompilationArg};
use flash_attention_kernels::tensor_core::{
    Blueprint, DivisorCompilationArg, GradientOutputsCompilationArg, LseOutCompilationArg, OutputsCompilationArg, Rows,
    RowsInCompilationArg, RowsOutCompilationArg, SourceSideCompilationArg, SourceSidesCompilationArg,
    SourcesCompilationArg, StrideCompilationArg, SumsOutCompilationArg, TileSchedulerCompilationArg,
};
use flash_attention_kernels::tiling::{Device, element_type};
use flash_attention_kernels::{AttentionOptions, AttentionProblem, Dtype, HopperTile};
use std::process::Command;
use std::sync::Arc;

/// Bytes of shared memory of a thread block on Hopper.
pub const HOPPER: usize = 227 << 10;

/// A device like an H200, for plans and compilation.
pub fn device() -> Device {
    Device {
        name: "offline".into(),
        card: true,
        shared_memory: HOPPER,
        units: 1024,
        bindings: 1024,
        cubes: (u32::MAX, 65535, 65535),
        wide_addresses: true,
        dtypes: vec![Dtype::F32, Dtype::F16, Dtype::BF16],
        multiprocessors: 132,
        wgmma: true,
        mma: vec![Dtype::F32, Dtype::F16, Dtype::BF16],
        plane: 32,
        matrices: [Dtype::F16, Dtype::BF16].map(|dtype| (dtype, [16, 16, 16])).to_vec(),
    }
}

pub fn properties() -> Arc<DeviceProperties> {
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
    let memory = MemoryDeviceProperties::new(u64::MAX, 256);
    let timing = cubecl_core::profile::TimingMethod::Device;
    let half = ElemType::Float(FloatKind::F16);
    let products = MmaConfig { a_type: half, b_type: half, cd_type: half, m: 16, n: 8, k: 16 };
    let mut features = Features::default();
    features.matmul.mma.insert(products);
    Arc::new(DeviceProperties::new(features, memory, hardware, timing, identity))
}

pub fn tensor() -> TensorCompilationArg {
    TensorCompilationArg { meta: TensorMetaCompilationArg { len: (), rank: () }, buffer: buffer() }
}

pub fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

pub fn divisor() -> DivisorCompilationArg {
    DivisorCompilationArg { divisor: (), multiplier: (), shift: () }
}

pub fn stride() -> StrideCompilationArg {
    StrideCompilationArg { batch: (), head: (), row: () }
}

pub fn rows_in<E: Float, N: Size>() -> RowsInCompilationArg<E, N> {
    RowsInCompilationArg { data: buffer(), stride: stride() }
}

fn rows_out() -> RowsOutCompilationArg {
    RowsOutCompilationArg { data: buffer(), stride: stride() }
}

pub fn sources<E: Float, N: Size>() -> SourcesCompilationArg<E, N> {
    SourcesCompilationArg { q: rows_in(), k: rows_in(), v: rows_in() }
}

pub fn outputs() -> OutputsCompilationArg {
    OutputsCompilationArg { o: rows_out(), lse: LseOutCompilationArg { data: buffer(), stride: stride() } }
}

pub fn source_sides<E: Float, N: Size>() -> SourceSidesCompilationArg<E, N> {
    let side = || SourceSideCompilationArg { qk: rows_in(), dov: rows_in() };
    SourceSidesCompilationArg { rows: side(), cols: side() }
}

pub fn gradient_outputs() -> GradientOutputsCompilationArg {
    let sums = SumsOutCompilationArg { data: buffer(), stride: stride(), next: () };
    GradientOutputsCompilationArg { dqk: rows_out(), dv: rows_out(), sums }
}

/// Operands loaded by TMA. The backward also loads rows of dO or V and the statistics.
pub fn streams<E: Float>(blueprint: Blueprint, backward: bool) -> StreamsCompilationArg<E> {
    let map = |is: bool| if is { ComptimeOptionCompilationArg::Some(()) } else { ComptimeOptionCompilationArg::None };
    let stats =
        if backward { ComptimeOptionCompilationArg::Some(buffer()) } else { ComptimeOptionCompilationArg::None };
    StreamsCompilationArg {
        rows_qk: (),
        rows_dov: map(backward),
        cols_qk: (),
        cols_dov: (),
        bias: map(blueprint.tiled_bias()),
        spread: SpreadCompilationArg { batch: (), head: () },
        stats,
    }
}

pub fn dq_accum() -> DqAccumCompilationArg {
    DqAccumCompilationArg { sums: buffer(), turns: buffer() }
}

pub fn schedule() -> ScheduleCompilationArg {
    ScheduleCompilationArg { tiles: scheduler(), counter: buffer() }
}

pub fn score_args<E: Float, M: Numeric, NB: Size, NM: Size>(
    problem: &AttentionProblem,
    blueprint: Blueprint,
    band: Band,
) -> ScoresCompilationArg<E, M, NB, NM> {
    ScoresCompilationArg {
        score: score(problem),
        mask: optional(blueprint.mask.is_some()),
        bias: optional(blueprint.bias.is_some()),
        band: band_arg(band),
    }
}

pub fn settings(units: usize) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_1d(units as u32), ExecutionMode::Unchecked, AddressType::U32)
}

pub fn optional<T: LaunchArg<CompilationArg = TensorCompilationArg>>(is: bool) -> ComptimeOptionCompilationArg<T> {
    if is { ComptimeOptionCompilationArg::Some(tensor()) } else { ComptimeOptionCompilationArg::None }
}

pub fn extras(problem: &AttentionProblem) -> ExtrasCompilationArg {
    ExtrasCompilationArg {
        slopes: optional(problem.alibi_slopes.is_some()),
        sinks: optional(problem.sinks),
        dropout: DropoutCompilationArg { seed: optional(problem.options.dropout > 0.0), threshold: (), factor: () },
        schedule: optional(problem.is_varlen()),
        lengths: ComptimeOptionCompilationArg::None,
        mods: ModsCompilationArg {
            score: problem.options.score_mod,
            of_score: tables(problem.score_tensors),
            mask: problem.options.mask_mod,
            of_mask: tables(problem.mask_tensors),
        },
        lists: optional(problem.block_mask.is_some()),
        pages: problem.pages.map_or(ComptimeOptionCompilationArg::None, |pages| {
            ComptimeOptionCompilationArg::Some(PageTableCompilationArg {
                pages: buffer(),
                sequence_stride: (),
                page_stride: (),
                num_pages: (),
                page_size: pages.page_size as u32,
            })
        }),
    }
}

fn tables(shapes: [Option<[usize; 4]>; 2]) -> TablesCompilationArg {
    let [a, b] = shapes.map(|shape| TableCompilationArg {
        tensor: optional(shape.is_some()),
        by_query: shape.is_some_and(|shape| shape[2] > 1),
        by_key: shape.is_some_and(|shape| shape[3] > 1),
    });
    TablesCompilationArg { a, b }
}

pub fn score(problem: &AttentionProblem) -> ScoreCompilationArg {
    let (capped, extras) = (problem.options.softcap.is_some(), extras(problem));
    ScoreCompilationArg { scale: (), softcap: (), per_softcap: (), inner: (), exponent: (), capped, extras }
}

pub fn band_arg(band: Band) -> BandCompilationArg {
    BandCompilationArg {
        seq_q: (),
        seq_k: (),
        sequence: (),
        begin_q: (),
        end_q: (),
        begin_k: (),
        end_k: (),
        lower: (),
        upper: (),
        diagonal: (),
        bounded_below: band.bounded_below,
        bounded_above: band.bounded_above,
        bottom_right: band.bottom_right,
        varlen: band.varlen,
        continued: band.continued,
    }
}

pub fn scheduler() -> TileSchedulerCompilationArg {
    TileSchedulerCompilationArg {
        num_tiles: (),
        blocks: (),
        ahead: (),
        heads: (),
        head_group_tiles: divisor(),
        head_group: divisor(),
        last_head_group: divisor(),
        num_heads_q: divisor(),
        group_size: divisor(),
        num_splits: divisor(),
        batches: (),
        chunk: divisor(),
        chunk_tiles: divisor(),
    }
}

pub fn types(blueprint: Blueprint) -> [ElemType; 2] {
    [element_type(blueprint.dtype), ElemType::UInt(UIntKind::U8)]
}

/// The PTX of a kernel for this architecture.
pub fn compile(kernel: impl CubeKernel, arch: SmArch) -> String {
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
            // SAFETY: the compiler terminates the PTX with a zero byte.
            unsafe { std::ffi::CStr::from_ptr(module.ptx.as_ptr()) }.to_string_lossy().into_owned()
        }
        _ => unreachable!("the compiler was asked for PTX"),
    }
}

/// The assembler's report on a kernel.
pub struct Assembled {
    pub registers: usize,
    /// Bytes of spill stores and loads.
    pub spills: usize,
    /// The assembler's messages.
    pub said: String,
    /// Number of guards around shuffles, for warps that may have diverged; `None` without a disassembler.
    pub guards: Option<usize>,
}

/// Assembles the PTX for this architecture, if there is an assembler.
pub fn assemble(ptx: &str, arch: &str) -> Option<Assembled> {
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
    let nvdisasm = std::env::var("NVDISASM").unwrap_or_else(|_| "nvdisasm".into());
    let code = Command::new(nvdisasm).arg("-c").arg(&object).output().ok().filter(|output| output.status.success());
    Some(Assembled {
        registers: before(" registers"),
        spills: before(" bytes spill stores") + before(" bytes spill loads"),
        guards: code.map(|code| String::from_utf8_lossy(&code.stdout).matches("BRA.DIV").count()),
        said,
    })
}

/// The blueprint of a problem's scores, with mask and bias read as they are in memory.
pub fn scores(problem: &AttentionProblem, role: Role, tile: HopperTile) -> Blueprint {
    let rows = |shape: Option<[usize; 4]>| shape.map(|shape| if shape[2] == 1 { Rows::Same } else { Rows::Each });
    Blueprint {
        role,
        tile,
        dtype: problem.dtype,
        storage: problem.kv_storage(),
        tf32: false,
        head_dim: problem.head_dim,
        head_dim_v: problem.head_dim_v,
        capped: problem.options.softcap.is_some(),
        mask: rows(problem.mask),
        bias: rows(problem.bias),
        varlen: problem.is_varlen(),
        sparse: problem.block_mask.is_some(),
        alibi: problem.alibi_slopes.is_some(),
        modified: problem.options.score_mod.is_some(),
        keeps_derivative: role.keeps_derivative(problem),
        sums: Factors::default(),
        mask_mod: problem.options.mask_mod.is_some(),
        ordered: role.adds_in_order(problem),
        split_keys: false,
        split_group: false,
        pack_gqa: false,
        warps_k: 1,
        stats_multiple: 384,
    }
}

/// Writes the PTX to `PTX_DIR`, if it is set.
pub fn keep(name: &str, ptx: &str) {
    if let Ok(directory) = std::env::var("PTX_DIR") {
        std::fs::write(format!("{directory}/{name}.ptx"), ptx).unwrap();
    }
}

/// Self-attention over 4,096 tokens.
pub fn problem(head_dim: usize, dtype: Dtype, options: AttentionOptions) -> AttentionProblem {
    let shape = [4, 16, 4096, head_dim];
    AttentionProblem::new(&shape, &shape, &shape, dtype, options).unwrap()
}

/// Specialisation of a kernel for Hopper in bf16 at head dimension 64, without options. A tile has `tile_k` columns.
pub fn plain(role: Role, tile_k: usize, split_keys: bool) -> Blueprint {
    let tile =
        HopperTile { consumer_groups: 1, warpgroups: 2, tile_k, stages: 3, ping_pong: false, producer_warp: false };
    let (head_dim, head_dim_v, stats_multiple) = (64, 64, 128);
    let (capped, mask, bias, alibi) = (false, None, None, false);
    let dtype = Dtype::BF16;
    Blueprint {
        role,
        tile,
        dtype,
        storage: flash_attention_kernels::KvStorage::Elements,
        tf32: false,
        head_dim,
        head_dim_v,
        capped,
        mask,
        bias,
        alibi,
        modified: false,
        keeps_derivative: false,
        sums: Factors::default(),
        mask_mod: false,
        varlen: false,
        sparse: false,
        ordered: false,
        split_keys,
        split_group: false,
        pack_gqa: false,
        warps_k: 1,
        stats_multiple,
    }
}
