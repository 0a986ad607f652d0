//! Rounding from f32 to the element type, to nearest with ties to even, and to tf32.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

/// `value` rounded to the element type.
///
/// bf16 is rounded here, bit by bit: SPIR-V leaves the rounding direction of a conversion to the driver. NVIDIA's driver
/// truncates, and with truncated weights the sum of a row's weights would be less than one.
#[cube]
pub fn rounded<E: Float, Of: Size, To: Size>(value: Vector<f32, Of>) -> Vector<E, To> {
    let bf16 = is_bf16::<E>();
    if comptime!(bf16) {
        let mut even = value;
        #[unroll]
        for n in 0..value.vector_size() {
            even.insert(n, nearest_bf16(value.extract(n)));
        }
        Vector::<E, To>::cast_from(even)
    } else {
        Vector::<E, To>::cast_from(value)
    }
}

/// [`rounded()`] for a single number.
#[cube]
pub fn rounded_one<E: Float>(value: f32) -> E {
    let bf16 = is_bf16::<E>();
    if comptime!(bf16) { E::cast_from(nearest_bf16(value)) } else { E::cast_from(value) }
}

/// The nearest bf16, as an f32 whose lower 16 bits are 0.
#[cube]
pub fn nearest_bf16(value: f32) -> f32 {
    let bits = u32::reinterpret(value);
    let nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // A NaN stays a NaN, whatever its payload.
    let is_number = (bits & 0x7fff_ffff) <= 0x7f80_0000;
    f32::reinterpret(select(is_number, nearest, (bits | 0x0040_0000) & 0xffff_0000))
}

/// The nearest tf32, ties away from zero, as the PTX instruction `cvt.rna.tf32.f32` rounds.
///
/// Probabilities are `exp(score − lse)`. A kernel that recomputes scores must therefore round its operands exactly as the
/// forward did: an error of a large score becomes a relative error of its probability.
#[cube]
pub fn nearest_tf32(value: f32) -> f32 {
    let bits = u32::reinterpret(value);
    let is_number = (bits & 0x7fff_ffff) <= 0x7f80_0000;
    f32::reinterpret(select(is_number, (bits + 0x1000) & 0xffff_e000, bits))
}

#[cube]
#[allow(clippy::extra_unused_type_parameters, reason = "it is used where the kernel is compiled")]
fn is_bf16<E: Float>() -> comptime_type!(bool) {
    intrinsic!(|scope| E::elem_type(scope) == ElemType::Float(FloatKind::BF16))
}
