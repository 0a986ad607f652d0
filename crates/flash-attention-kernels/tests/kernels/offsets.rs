//! Elements past the 2^32nd of optional tensors (`faults.rs` has those of q, k and v), and blocks of 2^32 pairs.
//!
//! Buffers have 16 GiB, of which only a few pages are touched. Devices with 32-bit addresses skip these tests.

use crate::common::*;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::tiling::{Device, plan_on};
use flash_attention_kernels::{
    AttentionOptions, AttentionProblem, Dtype, Gradients, Inputs, Kernel, Saved, TensorView, backward, block_states,
    forward,
};
use flash_attention_reference::mods::Sloped;

/// Writes `value` to element 0 and `2 * value` to element `second`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn write_two(out: &mut Tensor<f32>, second: usize, value: f32) {
    if ABSOLUTE_POS < 2 {
        out[ABSOLUTE_POS * second] = value * f32::cast_from(ABSOLUTE_POS + 1);
    }
}

/// Distance between the two elements of a tensor, in elements.
const FAR: usize = 1 << 32;

/// A tensor `[2, 1, 1, 1]` of f32 with the elements `value` and `2 * value`, `apart` elements apart.
fn pair(client: &Client, apart: usize, value: f32) -> TensorView {
    let view =
        TensorView { handle: client.empty(4 * (apart + 1)), shape: [2, 1, 1, 1], strides: [apart, apart, apart, 1] };
    // SAFETY: the buffer holds both elements.
    unsafe {
        let arg = TensorArg::from_raw_parts(view.handle.clone(), view.strides.into(), view.shape.into());
        let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(32));
        write_two::launch_unchecked(client, count, dim, AddressType::from_len(apart + 1), arg, apart, value);
    }
    view
}

/// Copies two elements to `out`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn read_two(from: &Tensor<f32>, out: &mut [f32], second: usize) {
    if ABSOLUTE_POS < 2 {
        out[ABSOLUTE_POS] = from[ABSOLUTE_POS * second];
    }
}

/// Both elements of a [`pair`].
fn read(client: &Client, view: &TensorView) -> Vec<f64> {
    let apart = view.strides[0];
    let out = client.empty(8);
    // SAFETY: the buffer holds both elements, and `out` has room for them.
    unsafe {
        let from = TensorArg::from_raw_parts(view.handle.clone(), view.strides.into(), view.shape.into());
        let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(32));
        let to = BufferArg::from_raw_parts(out.clone(), 2);
        read_two::launch_unchecked(client, count, dim, AddressType::from_len(apart + 1), from, to, apart);
    }
    from_bytes(&client.read_one_unchecked(out)[..8], Dtype::F32)
}

#[test]
fn tensors_of_functions_and_their_gradients() {
    let Some(client) = client() else { return };
    if !Device::of(&client).wide_addresses {
        return;
    }
    let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Sloped>()), ..Default::default() };
    let case = Case::new([2, 1, 1, 40, 50, 16, 16], Dtype::F32, options);
    let p = case.problem.with_score_tensors(&[&[2, 1, 1, 1], &[2, 1, 1, 1]]).unwrap();
    let dtype = p.dtype;
    let run = |apart: usize| {
        let score_tensors = [Some(pair(&client, apart, 0.25)), Some(pair(&client, 1, 0.5))];
        let [q, k, v] = case.qkv(&client);
        let inputs = Inputs { score_tensors, ..Inputs::new(q, k, v) };
        let o = TensorView::contiguous(client.empty(dtype.size() * p.rows() * 16), p.o_shape());
        let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
        forward(&client, &p, &inputs, &o, &lse).unwrap();
        let saved = Saved {
            o: o.clone(),
            lse,
            dout: place(&client, dtype, p.o_shape(), Layout::Contiguous, &case.dout).view,
            dlse: None,
        };
        let dscore = [pair(&client, apart, f32::NAN), pair(&client, 1, f32::NAN)];
        let dscore_tensors = dscore.clone().map(Some);
        backward(&client, &p, &inputs, &saved, &Gradients { dscore_tensors, ..Default::default() }).unwrap();
        (client.read_one_unchecked(o.handle).to_vec(), dscore.each_ref().map(|view| read(&client, view)))
    };
    let (near, far) = (run(1), run(FAR));
    assert!(near.1[0].iter().all(|x| x.is_finite() && *x != 0.0), "{:?}", near.1);
    assert!(near == far, "{:?}, {:?}", near.1, far.1);
}

/// The number of pairs of a block of 2^16 × 2^16 wraps to 0 in 32 bits.
#[test]
fn states_of_blocks_of_2_to_the_32_pairs() {
    let Some(client) = client() else { return };
    let case = Case::new([1, 1, 1, 300, 200, 16, 16], Dtype::F32, AttentionOptions::default()).with_mask([1, 1, 1, 1]);
    for (hides, want) in [(0u32, 2u32), (1, 0)] {
        let p = case.problem.with_block_mask(&[1, 1, 1, 1], 1 << 16, 1 << 16).unwrap();
        let number = |value: u32| TensorView::contiguous(client.create_from_slice(&value.to_le_bytes()), [1, 1, 1, 1]);
        let states = number(77);
        let mask = flash_attention_kernels::MaskView {
            tensor: number(hides),
            storage: flash_attention_kernels::MaskStorage::U32,
        };
        let inputs = Inputs { mask: Some(mask), ..Inputs::new(number(0), number(0), number(0)) };
        block_states(&client, &p, &inputs, &states).unwrap();
        assert_eq!(client.read_one_unchecked(states.handle)[..4], want.to_le_bytes());
    }
}

/// Hopper's kernels index tile lists with 32 bits. For longer lists the plan takes another kernel and says why; it reports the lists'
/// bytes.
#[test]
fn lists_of_more_than_2_to_the_32_words() {
    let device = Device {
        name: "hopper".into(),
        card: true,
        shared_memory: 227 << 10,
        units: 1024,
        bindings: 64,
        cubes: (i32::MAX as u32, 65535, 65535),
        wide_addresses: true,
        dtypes: vec![Dtype::F32, Dtype::F16, Dtype::BF16],
        multiprocessors: 132,
        wgmma: cfg!(feature = "cuda"),
        mma: Vec::new(),
        plane: 32,
        matrices: Vec::new(),
    };
    let plan = |heads: usize, seq: usize| {
        let shape = [1, heads, seq, 64];
        let options = AttentionOptions { causal: true, ..Default::default() };
        let problem = AttentionProblem::new(&shape, &shape, &shape, Dtype::BF16, options).unwrap();
        let blocks = [1, heads, seq / 128, seq / 128];
        plan_on(&device, &problem.with_block_mask(&blocks, 128, 128).unwrap()).unwrap()
    };
    let small = plan(2, 1 << 12);
    // Lists for 32 blocks of queries and for 32 blocks of keys, each with 32 tiles and a header of two words.
    assert!(small.kept_bytes >= 2 * 4 * 2 * 32 * 34, "{small}");
    if cfg!(feature = "cuda") {
        assert_eq!(small.forward.kernel(), Kernel::Hopper);
        let large = plan(80, 1 << 20);
        assert_ne!(large.forward.kernel(), Kernel::Hopper);
        assert!(large.to_string().contains("the lists of the block mask have"), "{large}");
    }
}
