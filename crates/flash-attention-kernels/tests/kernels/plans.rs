//! Plans for devices that the test machine does not have.

use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, Dtype, Forward, Gradient, Kernel, PortableForward, Precision,
};

/// A device with the limits that WebGPU guarantees.
pub fn smallest() -> Device {
    Device {
        name: "smallest".into(),
        card: true,
        shared_memory: 16 << 10,
        units: 256,
        bindings: 7,
        cubes: (65535, 65535, 65535),
        wide_addresses: false,
        dtypes: vec![Dtype::F32],
        multiprocessors: 0,
        wgmma: false,
        mma: Vec::new(),
        plane: 0,
        matrices: Vec::new(),
    }
}

pub fn problem(shape: [usize; 4]) -> AttentionProblem {
    AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default()).unwrap()
}

fn in_f16(mut problem: AttentionProblem) -> AttentionProblem {
    problem.dtype = Dtype::F16;
    problem
}

#[test]
fn tiles_follow_shared_memory() {
    let chosen = |kib: usize| {
        let device = Device { shared_memory: kib << 10, ..smallest() };
        let plan = plan_on(&device, &problem([1, 1, 64, 256])).unwrap();
        let Forward::Portable(PortableForward::Tiles(tile)) = plan.forward else { panic!("{plan}") };
        // Six of the entries are kernels of matrix products, for the forward and the backward.
        (tile.tile_q, tile.tile_k, tile.units_q, plan.passed_over.len() - 6)
    };
    assert_eq!(chosen(227), (64, 64, 8, 0));
    assert_eq!(chosen(48), (64, 64, 16, 2));
    assert_eq!(chosen(32), (64, 32, 16, 4));
    assert_eq!(chosen(16), (32, 32, 8, 6));
    let none = plan_on(&Device { shared_memory: 8 << 10, ..smallest() }, &problem([1, 1, 64, 64])).unwrap_err();
    assert!(matches!(none, AttentionError::NoTileFits { needed: 14848, available: 8192, .. }), "{none}");
}

/// Kernels of matrix products are chosen by the shapes that the device offers. Otherwise the plan says what the device lacks.
#[test]
fn matrix_products_follow_what_is_offered() {
    let gpu = Device {
        shared_memory: 48 << 10,
        units: 1024,
        bindings: 32,
        dtypes: vec![Dtype::F32, Dtype::F16],
        plane: 32,
        matrices: vec![(Dtype::F16, [16, 8, 8]), (Dtype::F16, [16, 16, 16])],
        ..smallest()
    };
    let half = |head_dim| in_f16(problem([1, 1, 64, head_dim]));
    let chosen = |device: &Device, head_dim| {
        let plan = plan_on(device, &half(head_dim)).unwrap();
        let Forward::Matrix(tile) = plan.forward else { panic!("{plan}") };
        (tile.planes, tile.columns, tile.shape, plan.backward.dv.is_some())
    };
    assert_eq!(chosen(&gpu, 64), (4, 64, [16; 3], false));
    assert_eq!(chosen(&gpu, 128), (8, 32, [16; 3], true));
    assert_eq!(chosen(&gpu, 256), (4, 16, [16; 3], true));
    let eights = Device { matrices: vec![(Dtype::F16, [8, 8, 8])], plane: 8, ..gpu.clone() };
    assert_eq!(chosen(&eights, 64), (8, 64, [8; 3], false));

    let why = |device: Device, head_dim| {
        let plan = plan_on(&device, &half(head_dim)).unwrap();
        assert_eq!([plan.forward.kernel(), plan.backward.dq.kernel()], [Kernel::Portable; 2], "{plan}");
        plan.to_string()
    };
    let lacks = why(Device { matrices: vec![(Dtype::BF16, [16; 3])], ..gpu.clone() }, 64);
    assert!(lacks.contains("not forward matrix: the device offers no matrix products of f16"), "{lacks}");
    let uneven = why(Device { plane: 0, ..gpu.clone() }, 64);
    assert!(uneven.contains("does not report the number of threads of a subgroup"), "{uneven}");
    let small = why(Device { shared_memory: 16 << 10, ..gpu.clone() }, 256);
    assert!(small.contains("not backward matrix: it needs"), "{small}");
    let single = plan_on(&gpu, &problem([1, 1, 64, 64])).unwrap().to_string();
    assert!(single.contains("not forward matrix: it computes in f16 and bf16 only, and q is f32"), "{single}");
}

/// On a processor each thread computes whole rows: as many as its compiler handles, and fewer if some cores would have no work.
#[test]
fn processors_hold_rows() {
    let processor = Device { card: false, plane: 8, ..smallest() };
    let chosen = |device: &Device, shape| {
        let plan = plan_on(device, &problem(shape)).unwrap();
        let (Forward::Rows(forward), Gradient::Rows(dq)) = (plan.forward, plan.backward.dq) else { panic!("{plan}") };
        assert_eq!(forward, dq);
        (forward.units, forward.rows)
    };
    assert_eq!(chosen(&processor, [1, 8, 512, 64]), (8, 4));
    assert_eq!(chosen(&processor, [1, 8, 512, 100]), (8, 2));
    assert_eq!(chosen(&processor, [1, 8, 512, 256]), (8, 1));
    assert_eq!(chosen(&processor, [1, 8, 512, 1]), (8, 8));
    assert_eq!(chosen(&processor, [1, 8, 70, 64]), (8, 2));
    assert_eq!(chosen(&processor, [1, 8, 1, 64]), (8, 1));
    // The kernel of dk and dv binds seven buffers, the mask is the eighth. With fewer bindings dv has a launch of its own.
    let masked = problem([1, 1, 8, 8]).with_mask(&[1, 1, 1, 8]).unwrap();
    let split = |bindings| plan_on(&Device { bindings, ..processor.clone() }, &masked).unwrap().backward.dv.is_some();
    assert_eq!([7, 8].map(split), [true, false]);

    for card in [Device { card: true, ..processor.clone() }, Device { plane: 32, ..processor.clone() }, smallest()] {
        let plan = plan_on(&card, &problem([1, 8, 512, 64])).unwrap();
        assert_eq!([plan.forward.kernel(), plan.backward.dq.kernel()], [Kernel::Portable; 2], "{plan}");
    }
}

/// `Precision::Tf32` is a permission. Without a kernel for tf32, products stay f32 and the plan says so.
#[test]
fn tf32_is_planned_visibly() {
    let mut rounded = problem([1, 1, 64, 64]);
    rounded.options.precision = Precision::Tf32;
    let plan = plan_on(&smallest(), &rounded).unwrap();
    assert_eq!([plan.forward.kernel(), plan.backward.dq.kernel()], [Kernel::Portable; 2], "{plan}");
    let text = plan.to_string();
    assert!(text.contains("not forward mma: ") && text.contains("not backward mma: "), "{text}");
}

#[test]
fn what_the_device_cannot_do_is_refused() {
    let refused = |device: &Device, problem: &AttentionProblem| plan_on(device, problem).unwrap_err();
    assert!(matches!(
        refused(&smallest(), &in_f16(problem([1, 1, 8, 8]))),
        AttentionError::DtypeUnsupported { dtype: "f16", .. }
    ));
    let huge = problem([64, 64, 1 << 14, 128]);
    assert!(
        matches!(refused(&smallest(), &huge), AttentionError::AddressSpace { argument: "q", reach, .. } if reach == 1 << 33)
    );
    let few = Device { cubes: (4, 2, 1), ..smallest() };
    let error = refused(&few, &problem([1, 9, 8, 8]));
    assert!(matches!(error, AttentionError::Grid { kernel: "forward", cubes: 9, max: 8 }), "{error}");
}

#[test]
fn a_backward_that_binds_too_much_is_told_beforehand() {
    let both = problem([1, 1, 8, 8]).with_mask(&[1, 1, 1, 8]).unwrap().with_bias(&[1, 1, 1, 8]).unwrap();
    let plan = plan_on(&smallest(), &both).unwrap();
    assert!(plan.to_string().contains("not any backward: dq binds 8 buffers"), "{plan}");
    let fewer = plan_on(&Device { bindings: 6, ..smallest() }, &both).unwrap_err();
    assert!(matches!(fewer, AttentionError::Bindings { kernel: "forward", needed: 7, available: 6, .. }), "{fewer}");
}

/// A GPU with cooperative matrices, through Vulkan.
fn gpu() -> Device {
    Device {
        shared_memory: 48 << 10,
        units: 1024,
        bindings: 32,
        dtypes: vec![Dtype::F32, Dtype::F16],
        multiprocessors: 132,
        plane: 32,
        matrices: vec![(Dtype::F16, [16; 3])],
        ..smallest()
    }
}

/// A step of decoding: `heads` query heads, `seq_q` queries, `seq_k` keys.
fn decoding(batch: usize, heads: [usize; 2], seq_q: usize, seq_k: usize) -> AttentionProblem {
    let k = [batch, heads[1], seq_k, 128];
    AttentionProblem::new(&[batch, heads[0], seq_q, 128], &k, &k, Dtype::F16, AttentionOptions::default()).unwrap()
}

/// With few rows the query heads of a group share a tile, and keys are split until the device is busy.
#[test]
fn few_rows_are_packed_and_split() {
    let chosen = |problem: &AttentionProblem| {
        let plan = plan_on(&gpu(), problem).unwrap();
        let Forward::Portable(PortableForward::FewRows(few)) = plan.forward else { panic!("{plan}") };
        (few.tile.rows, few.num_splits, plan.forward_scratch_bytes)
    };
    // Each thread block has its own tiles where heads are many, and a quarter of the keys where they are 128.
    assert_eq!(chosen(&decoding(600, [32, 8], 1, 4096)), (4, 1, 0));
    assert_eq!(chosen(&decoding(16, [32, 8], 1, 4096)), (4, 4, 4 * 4 * 16 * 32 * (128 + 1)));
    assert_eq!(chosen(&decoding(1, [32, 8], 1, 131_072)).1, 64);
    assert_eq!(chosen(&decoding(1, [32, 8], 1, 100)), (4, 1, 0));
    assert_eq!(chosen(&decoding(1, [48, 8], 1, 100)).0, 8);
    assert_eq!(chosen(&decoding(1, [32, 8], 3, 100)).0, 16);
    let text = plan_on(&gpu(), &decoding(16, [32, 8], 1, 4096)).unwrap().to_string();
    assert!(text.starts_with("forward portable 4×128 of few rows in 4 splits, dq matrix"), "{text}");

    // More rows are faster by matrix products, and on a processor the kernels that it prefers.
    let more = decoding(1, [32, 8], 5, 100);
    assert_eq!(plan_on(&gpu(), &more).unwrap().forward.kernel(), Kernel::Matrix);
    let mut single = more;
    single.dtype = Dtype::F32;
    assert_eq!(chosen(&single).0, 16);
    let processor = Device { card: false, plane: 8, matrices: Vec::new(), ..gpu() };
    assert_eq!(plan_on(&processor, &decoding(1, [32, 8], 1, 100)).unwrap().forward.kernel(), Kernel::Rows);
}

/// Tiles of few rows fit the shared memory, and the plan says why another kernel is used.
#[test]
fn few_rows_need_room_and_other_options() {
    let small = Device { dtypes: vec![Dtype::F32, Dtype::F16], ..smallest() };
    let tile = |rows_of_group: usize| {
        let plan = plan_on(&small, &decoding(1, [rows_of_group, 1], 1, 100)).unwrap();
        let Forward::Portable(PortableForward::FewRows(few)) = plan.forward else { panic!("{plan}") };
        (few.tile.rows, few.tile.tile_k)
    };
    assert_eq!([4, 8, 16].map(tile), [(4, 64), (8, 32), (16, 16)]);
    let problem = decoding(1, [4, 1], 1, 100);
    let mut dropping = problem;
    (dropping.options.dropout, dropping.options.dropout_seed) = (0.1, Some(1));
    for other in [
        dropping,
        problem.with_block_mask(&[1, 1, 1, 1], 128, 128).unwrap(),
        problem.with_cu_seqlens(&[2], &[2]).unwrap(),
    ] {
        let plan = plan_on(&gpu(), &other).unwrap();
        assert_eq!(plan.forward.kernel(), Kernel::Matrix, "{plan}");
        assert!(plan.to_string().contains("not forward portable of few rows: query heads are not packed with dropout"));
    }
    // Lengths of queries and of keys are two buffers.
    let masked = problem.with_mask(&[1, 1, 1, 100]).unwrap();
    let lengths = masked.with_seq_lens_q(&[1]).unwrap().with_seq_lens_k(&[1]).unwrap();
    let plan = plan_on(&small, &lengths).unwrap();
    assert!(plan.to_string().contains("not forward portable of few rows: forward binds 8 buffers"), "{plan}");
}
