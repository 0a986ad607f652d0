//! Conversions to the element type, which must not depend on the device's own.

use crate::common::*;
use cubecl::prelude::*;
use flash_attention_kernels::rounding::nearest_bf16;
use half::bf16;

#[cube(launch_unchecked)]
fn round_all(bits: &[u32], out: &mut [u32]) {
    if ABSOLUTE_POS < bits.len() {
        out[ABSOLUTE_POS] = u32::reinterpret(nearest_bf16(f32::reinterpret(bits[ABSOLUTE_POS])));
    }
}

/// Round to nearest, ties to even: values halfway between two numbers and next to that, the ends of the range, and NaN.
#[test]
fn bf16_is_rounded_to_nearest() {
    let Some(client) = client() else { return };
    let upper = [0x3f80, 0x3f81, 0x0080, 0x7f7f, 0xbf80, 0xc2ff];
    let lower = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let specials = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 0.0, -0.0].map(f32::to_bits);
    let mut bits: Vec<u32> = upper.iter().flat_map(|upper| lower.map(|lower| upper << 16 | lower)).collect();
    bits.extend(specials);
    bits.extend([0x7fff_ffff, 0xffff_ffff, 0x7f80_0001]);
    let input = client.create_from_slice(&bits.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let output = client.empty(4 * bits.len());
    // SAFETY: both buffers have as many elements as their arguments say.
    unsafe {
        let [input, output] = [&input, &output].map(|of| BufferArg::from_raw_parts(of.clone(), bits.len()));
        round_all::launch_unchecked(&client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(64), input, output);
    }
    let bytes = client.read_one_unchecked(output);
    for (bits, found) in bits.iter().zip(bytes.chunks_exact(4)) {
        let found = u32::from_le_bytes(found.try_into().unwrap());
        let want = bf16::from_f32(f32::from_bits(*bits));
        assert_eq!(found & 0xffff, 0, "{bits:x}");
        let same = found >> 16 == u32::from(want.to_bits());
        assert!(
            same || want.is_nan() && f32::from_bits(found).is_nan(),
            "{bits:x} is rounded to {found:x}, expected {want:?}"
        );
    }
}
