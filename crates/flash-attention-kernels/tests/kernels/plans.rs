//! What is chosen for devices that are not here.

use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, Dtype, Forward};

/// The least that WebGPU promises.
fn smallest() -> Device {
    Device {
        name: "smallest".into(),
        shared_memory: 16 << 10,
        units: 256,
        bindings: 7,
        cubes: (65535, 65535, 65535),
        wide_addresses: false,
        dtypes: vec![Dtype::F32],
        multiprocessors: 0,
        wgmma: false,
    }
}

fn problem(shape: [usize; 4]) -> AttentionProblem {
    AttentionProblem::new(&shape, &shape, &shape, Dtype::F32, AttentionOptions::default()).unwrap()
}

#[test]
fn tiles_follow_shared_memory() {
    let chosen = |kib: usize| {
        let device = Device { shared_memory: kib << 10, ..smallest() };
        let plan = plan_on(&device, &problem([1, 1, 64, 256])).unwrap();
        let Forward::Portable(tile) = plan.forward else { panic!("{plan}") };
        // The kernels for Hopper, of the forward and of the backward, are two.
        (tile.tile_q, tile.tile_k, tile.units_q, plan.passed_over.len() - 2)
    };
    assert_eq!(chosen(227), (64, 64, 8, 0));
    assert_eq!(chosen(48), (64, 64, 16, 2));
    assert_eq!(chosen(32), (64, 32, 16, 4));
    assert_eq!(chosen(16), (32, 32, 8, 6));
    let none = plan_on(&Device { shared_memory: 8 << 10, ..smallest() }, &problem([1, 1, 64, 64])).unwrap_err();
    assert!(matches!(none, AttentionError::NoTileFits { needed: 14848, available: 8192, .. }), "{none}");
}

#[test]
fn what_the_device_cannot_do_is_refused() {
    let refused = |device: &Device, problem: &AttentionProblem| plan_on(device, problem).unwrap_err();
    let half = AttentionProblem { dtype: Dtype::F16, ..problem([1, 1, 8, 8]) };
    assert!(matches!(refused(&smallest(), &half), AttentionError::DtypeUnsupported { dtype: "f16", .. }));
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
