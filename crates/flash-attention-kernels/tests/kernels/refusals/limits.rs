//! Problems, tiles and kernels that are refused for any tensors.

use super::call::*;
use crate::common::*;
use crate::plans::smallest;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, BackwardTiles, BiasGradient, BiasTile, BlockMask, Dtype,
    FewRowsForward, FewRowsTile, Gradient, HopperForward, HopperGradient, Kernel, MAX_ELEMENTS, MAX_PAIRS, MAX_SEQ,
    MatrixTile, MmaTile, MmaTiles, RowsTile, TileShape, plan, plan_with,
};
use flash_attention_reference::mods::Bent;

/// The expected error as text, a change that causes it, and a predicate for it.
type Row<T> = (&'static str, fn(&mut T), fn(&AttentionError) -> bool);

/// A problem, entry points, and changes to its call that each of these entry points refuses.
type Group<'a> = (AttentionProblem, &'a [Entry], &'a [Row<Call>]);

macro_rules! rows {
    ($of:ty: $($change:expr => $error:ident { $($pattern:tt)* } $(if $guard:expr)?;)*) => {{
        let rows: &[Row<$of>] = &[$((
            stringify!($error { $($pattern)* }),
            $change,
            |error| matches!(error, AttentionError::$error { $($pattern)*, .. } $(if $guard)?),
        )),*];
        rows
    }};
}

/// An invalid problem is the same error from every entry point and from `plan()`.
#[test]
fn problems_that_are_not_valid() {
    let Some(client) = client() else { return };
    let plain = Call::new(&client, plain());
    let rows = rows! { AttentionProblem:
        |p| p.num_heads_kv = 3 => HeadsNotGrouped { num_heads_q: 4, num_heads_kv: 3 };
        |p| p.num_heads_kv = 0 => HeadsNotGrouped { num_heads_q: 4, num_heads_kv: 0 };
        |p| p.head_dim = 0 => HeadDim { argument: "head_dim", value: 0 };
        |p| p.head_dim_v = 257 => HeadDim { argument: "head_dim_v", value: 257 };
        |p| p.seq_q = MAX_SEQ + 1 => SequenceTooLong { argument: "seq_q", value: 0x4000_0000 };
        |p| p.seq_k = usize::MAX => SequenceTooLong { argument: "seq_k", value: usize::MAX };
        |p| p.batch = 1 << 48 => Elements { argument: "q", max: MAX_ELEMENTS };
        |p| (p.num_heads_q, p.num_heads_kv) = (usize::MAX, 1) => Elements { argument: "q", max: MAX_ELEMENTS };
        |p| (p.seq_k, p.batch) = (MAX_SEQ, 1 << 20) => Elements { argument: "k", max: MAX_ELEMENTS };
        |p| (p.seq_q, p.seq_k, p.mask) = (MAX_SEQ, MAX_SEQ, Some([1, 4, MAX_SEQ, MAX_SEQ])) => Elements { argument: "mask", max: MAX_PAIRS };
        |p| p.score_tensors[0] = Some([1; 4]) => Unsupported { option: "score_tensors[0]", value } if value.contains("[1, 1, 1, 1]");
        |p| p.mask_tensors[1] = Some([1; 4]) => Unsupported { option: "mask_tensors[1]", value } if value.contains("[1, 1, 1, 1]");
        |p| p.mask = Some([1, 1, 1, 5]) => Broadcast { argument: "mask", dimension: 3, value: 5 };
        |p| p.bias = Some([1, 3, 1, 1]) => Broadcast { argument: "bias", dimension: 1, value: 3 };
        |p| p.alibi_slopes = Some([1, 3]) => Dimension { argument: "alibi_slopes", value: 3, expected: 4 };
        |p| p.alibi_slopes = Some([5, 4]) => Dimension { argument: "alibi_slopes", value: 5, expected: 2 };
        |p| (p.block_mask, p.cu_seqlens, p.bias) = (BLOCKS, Some(2), Some([1; 4])) => Unsupported { option: "bias", value } if value.contains("[1, 1, 1, 1]");
        |p| (p.block_mask, p.cu_seqlens, p.alibi_slopes) = (BLOCKS, Some(2), Some([1, 4])) => Unsupported { option: "alibi_slopes", value } if value.contains("[1, 4, 1, 1]");
        |p| (p.block_mask, p.cu_seqlens) = (BLOCKS.map(|of| BlockMask { blocks: [3, 1, 1, 1], ..of }), Some(2)) => Blocks { dimension: 0, value: 3 };
        |p| (p.block_mask, p.cu_seqlens) = (BLOCKS.map(|of| BlockMask { blocks: [2, 1, 1, 0], ..of }), Some(2)) => Blocks { dimension: 3, value: 0 };
        |p| p.block_mask = BLOCKS.map(|of| BlockMask { block_q: 100, ..of }) => Option { option: "block_q", value: 100.0 };
        |p| p.block_mask = BLOCKS.map(|of| BlockMask { block_k: 0, ..of }) => Option { option: "block_k", value: 0.0 };
        |p| p.block_mask = BLOCKS.map(|of| BlockMask { blocks: [1, 1, 2, 1], ..of }) => Blocks { dimension: 2, value: 2 };
        |p| (p.cu_seqlens, p.seq_lens_k) = (Some(2), true) => Unsupported { option: "seq_lens_k" };
        |p| p.cu_seqlens = Some(MAX_SEQ + 1) => SequenceTooLong { argument: "cu_seqlens_q", value: 0x4000_0000 };
        |p| (p.cu_seqlens, p.seq_q) = (Some(2), MAX_SEQ) => SequenceTooLong { argument: "batch * seq_q", value: 0x7fff_fffe };
        |p| p.options.softmax_scale = Some(-1.0) => Option { option: "softmax_scale", value: -1.0 };
        |p| p.options.softcap = Some(0.0) => Option { option: "softcap", value: 0.0 };
        |p| p.options.dropout = 1.0 => Option { option: "dropout", value: 1.0 };
    };
    for (name, change, expected) in rows {
        let mut call = plain.clone();
        change(&mut call.problem);
        let p = &call.problem;
        let planned = plan(&client, p).expect_err(name);
        assert!(expected(&planned), "{name}: {planned:?}");
        assert_eq!(plan_with(&client, p, Kernel::Portable), Err(planned.clone()), "{name}");
        assert_eq!(plan_on(&smallest(), p), Err(planned.clone()), "{name}");
        for entry in
            [Entry::Forward, Entry::ForwardWith, Entry::Backward, Entry::BackwardWith, Entry::States, Entry::Kept]
        {
            call.refused(entry, name, |error| *error == planned);
        }
    }
}

/// A block mask of one block.
const BLOCKS: Option<BlockMask> = Some(BlockMask { blocks: [1; 4], block_q: 128, block_k: 128 });

const MMA: MmaTile = MmaTile { warpgroups: 1, groups: 2, tile_k: 64, warps_k: 1, stages: 2 };
/// A shape of matrix products that no device offers.
const MATRIX: MatrixTile = MatrixTile { planes: 1, plane: 7, columns: 16, shape: [3, 5, 7] };

/// Invalid tiles, kernels that this device or build lacks, and missing scratch.
#[test]
fn tiles_kernels_and_scratch() {
    let Some(client) = client() else { return };
    const UNEVEN: TileShape = TileShape { tile_q: 33, ..TILE };
    const LARGE: TileShape = TileShape { tile_q: 512, tile_k: 512, units_q: 16, units_k: 16, chunk: 32 };
    const LONG: TileShape = TileShape { tile_q: 96, ..TILE };
    const FEW: FewRowsTile = FewRowsTile { rows: 4, tile_k: 64, lanes: 4, reads: 8 };
    let of_forward = rows! { Call:
        |call| call.forward = UNEVEN.into() => Unsupported { option: "tile", value } if value.contains("tile_q: 33");
        |call| call.forward = LARGE.into() => NoTileFits { head_dim: 4, tile_q: 512, tile_k: 512, units: 256 };
        |call| call.forward = RowsTile { units: 0, rows: 1 }.into() => KernelUnavailable { kernel: "rows", why } if why.contains("units is 0");
        |call| call.forward = RowsTile { units: 1 << 20, rows: 1 }.into() => KernelUnavailable { kernel: "rows", why }
            if why.contains("needs 1048576");
        |call| call.forward = FewRowsForward { tile: FewRowsTile { lanes: 3, ..FEW }, num_splits: 1 }.into() =>
            KernelUnavailable { kernel: "portable", why } if why.contains("lanes: 3");
        |call| call.forward = FewRowsForward { tile: FEW, num_splits: 0 }.into() =>
            KernelUnavailable { kernel: "portable", why } if why.contains("num_splits is 0");
        |call| call.forward = FewRowsForward { tile: FewRowsTile { tile_k: 1 << 20, ..FEW }, num_splits: 1 }.into() =>
            KernelUnavailable { kernel: "portable", why } if why.contains("bytes of shared memory");
        |call| call.forward = MATRIX.into() => KernelUnavailable { kernel: "matrix", why } if why.contains("[3, 5, 7]");
    };
    let of_backward = rows! { Call:
        |call| call.backward = BackwardTiles::portable(UNEVEN, true) => Unsupported { option: "tile", value }
            if value.contains("tile_q: 33");
        |call| call.backward = BackwardTiles::portable(LARGE, true) => NoTileFits { head_dim: 4, tile_q: 512, tile_k: 512 };
        |call| call.backward.dq = Gradient::Rows(RowsTile { units: 0, rows: 1 }) => KernelUnavailable { kernel: "rows" };
        |call| call.backward.dkdv = Gradient::Matrix(MATRIX) => KernelUnavailable { kernel: "matrix", why } if why.contains("[3, 5, 7]");
        |call| {
            call.backward.fused = Some(HopperGradient { tile: HOPPER, head_group: 1, num_splits: 1 });
            call.scratch.dq_accum = None
        } => Unsupported { option: "scratch.dq_accum", value } if value == "none";
        |call| {
            call.backward.fused = Some(HopperGradient { tile: HOPPER, head_group: 1, num_splits: 1 });
            call.scratch.dq_turns = None
        } => Unsupported { option: "scratch.dq_turns", value } if value == "none";
    };
    // If these kernels are compiled in, `tiles.rs` tests their errors.
    let not_compiled = rows! { Call:
        |call| call.forward = HopperForward { tile: HOPPER, head_group: 1, num_splits: 1 }.into() => KernelUnavailable { kernel: "hopper" };
        |call| call.forward = MmaTiles { tile: MMA, head_group: 1 }.into() => KernelUnavailable { kernel: "mma" };
    };
    let gradients_not_compiled = rows! { Call:
        |call| call.backward.dq = Gradient::Hopper(HopperGradient { tile: HOPPER, head_group: 1, num_splits: 1 }) => KernelUnavailable { kernel: "hopper" };
        |call| call.backward.dkdv = Gradient::Mma(MmaTiles { tile: MMA, head_group: 1 }) => KernelUnavailable { kernel: "mma" };
    };
    // The bias repeats its queries, which Hopper's dbias kernel does not take.
    let of_bias = rows! { Call:
        |call| call.backward.dbias = BiasGradient::Hopper(BiasTile { tile_k: 64, tiles: 1, stages: 2, row_stages: 1 }) =>
            KernelUnavailable { kernel: "hopper" };
    };
    let of_slopes = rows! { Call:
        |call| {
            let of = Gradient::Portable(UNEVEN);
            (call.backward.dq, call.backward.dkdv) = (of, of);
            call.backward.dalibi_slopes = Some(BiasGradient::Sums { keys: false, alone: true })
        } => Unsupported { option: "tiles.dalibi_slopes", value } if value.contains("alone: true");
        |call| call.backward.dalibi_slopes = None => Unsupported { option: "tiles.dalibi_slopes", value } if value == "none";
        |call| call.scratch.bias_sums = None => Unsupported { option: "scratch.bias_sums", value } if value == "none";
    };
    let of_functions = rows! { Call:
        |call| call.backward.dscore_tensors = [None; 2] => Unsupported { option: "tiles.dscore_tensors", value } if value == "none";
    };
    let of_blocks = rows! { Call:
        |call| (call.forward, call.backward) = (LONG.into(), BackwardTiles::portable(LONG, true)) =>
            Unsupported { option: "tile", value } if value == "96×32";
    };
    let no_blocks = rows! { Call: |_| {} => Unsupported { option: "block_mask", value } if value == "none"; };
    let coarse =
        rows! { Call: |_| {} => Broadcast { argument: "mask", expected: [1, 1, 1, 1], dimension: 0, value: 2 }; };

    let p = plain();
    let mut functions = p;
    functions.options.score_mod = Some(ScoreFn::of::<Bent>());
    let functions = functions.with_score_tensors(&[&[1, 4, 1, 1]]);
    let masked = p.with_mask(&[2, 1, 1, 9]).and_then(|p| p.with_block_mask(&[1; 4], 128, 128));
    let [forward, backward] = [&[Entry::ForwardWith][..], &[Entry::BackwardWith]];
    let mut groups: Vec<Group> = vec![
        (p, forward, of_forward),
        (p, backward, of_backward),
        (p.with_alibi_slopes(&[1, 4]).unwrap(), backward, of_slopes),
        (functions.unwrap(), backward, of_functions),
        (p.with_block_mask(&[1; 4], 128, 128).unwrap(), &[Entry::ForwardWith, Entry::BackwardWith], of_blocks),
        (p, &[Entry::States], no_blocks),
        (masked.unwrap(), &[Entry::States], coarse),
    ];
    if !cfg!(feature = "cuda") {
        let biased = p.with_bias(&[1, 4, 1, 9]).unwrap();
        groups.extend([(p, forward, not_compiled), (p, backward, gradients_not_compiled), (biased, backward, of_bias)]);
    }
    for (problem, entries, rows) in groups {
        let call = Call::new(&client, problem);
        for (name, change, expected) in rows {
            let mut call = call.clone();
            change(&mut call);
            for &entry in entries {
                call.refused(entry, name, expected);
            }
        }
    }
}

/// Errors that depend on the limits of this device. `plan()` returns them too.
#[test]
fn what_this_device_lacks() {
    let Some(client) = client() else { return };
    let device = Device::of(&client);
    let full = Call::new(&client, full());
    if device.bindings < 16 {
        let binds = |kernel: &'static str, extras: usize| {
            let all = (kernel, 16, extras, device.bindings);
            move |error: &AttentionError| {
                matches!(error, AttentionError::Bindings { kernel, needed, extras, available }
                    if (*kernel, *needed, extras.len(), *available) == all)
            }
        };
        let error = full.refused(Entry::Forward, "bindings", binds("forward", 11));
        assert_eq!(plan(&client, &full.problem), Err(error));
        full.refused(Entry::ForwardWith, "bindings", binds("forward", 11));
        // The gradient kernels do not bind the sinks.
        full.refused(Entry::Backward, "bindings", binds("dq", 10));
        full.refused(Entry::BackwardWith, "bindings", binds("dq", 10));
    }
    for dtype in [Dtype::F16, Dtype::BF16].into_iter().filter(|dtype| !device.dtypes.contains(dtype)) {
        let mut half = Call::new(&client, plain());
        half.problem.dtype = dtype;
        for entry in [Entry::Forward, Entry::ForwardWith, Entry::Backward, Entry::BackwardWith] {
            let error = half.refused(entry, dtype.name(), |error| {
                matches!(error, AttentionError::DtypeUnsupported { dtype: of, device: name } if *of == dtype.name() && *name == device.name)
            });
            assert_eq!(plan(&client, &half.problem), Err(error));
        }
    }
    // Kernels requested by name, in an element type that they do not multiply.
    let mut single = plain();
    single.dtype = Dtype::F32;
    for kernel in [Kernel::Hopper, Kernel::Matrix] {
        let error = plan_with(&client, &single, kernel).unwrap_err();
        assert!(
            matches!(error, AttentionError::KernelUnavailable { kernel: of, .. } if of == kernel.name()),
            "{error}"
        );
    }
}

/// Errors that no device here gives: plans for made-up devices.
#[test]
fn what_other_devices_lack() {
    let few = Device { cubes: (4, 2, 1), ..smallest() };
    let of = |heads: usize, seq_q: usize, seq_k: usize| {
        let [q, k] = [[1, heads, seq_q, 4], [1, heads, seq_k, 4]];
        AttentionProblem::new(&q, &k, &k, Dtype::F32, AttentionOptions::default())
    };
    let ends = |sequences: usize, seq: usize| {
        of(1, seq, 8).and_then(|p| p.with_cu_seqlens(&[sequences + 1], &[sequences + 1]))
    };
    let grid = |kernel, cubes| AttentionError::Grid { kernel, cubes, max: 8 };
    let far = |argument, reach| AttentionError::AddressSpace { argument, reach, device: "smallest".into() };
    let (long, of_blocks) = (1 << 17, 1 << 10);
    for (device, problem, expected) in [
        (&few, of(8, 1, 64), grid("dkdv", 16)),
        (&few, ends(9, 8), grid("schedule", 9)),
        (&few, ends(1, 577), grid("fill", 10)),
        // Each sequence may begin and end within a block, which adds blocks.
        (&few, ends(8, 64), grid("forward", 10)),
        (&few, of(9, 8, 8).and_then(|p| p.with_block_mask(&[1, 9, 1, 1], 128, 128)), grid("block_lists", 9)),
        (&smallest(), of(1, long, long).and_then(|p| p.with_mask(&[1, 1, long, long])), far("mask", 1 << 34)),
        (&smallest(), of(1, long, long).and_then(|p| p.with_bias(&[1, 1, long, long])), far("bias", 1 << 34)),
        (
            &smallest(),
            of(512, long, long).and_then(|p| p.with_block_mask(&[1, 512, of_blocks, of_blocks], 128, 128)),
            far("block_mask (its lists of tiles)", 512 * 4096 * 4098),
        ),
    ] {
        assert_eq!(plan_on(device, &problem.unwrap()), Err(expected));
    }
}
