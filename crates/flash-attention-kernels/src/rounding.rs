//! From f32 to the element type, to nearest, ties to even; and to tf32.

#![allow(missing_docs, reason = "for what the macros of CubeCL generate; everything written here has its own")]

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

/// `value` in the element type. Of bf16 the bits are rounded here: SPIR-V leaves to the driver which way a conversion rounds, and
/// NVIDIA's cuts off what does not fit, by which weights would sum to less than one.
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

/// The same of a number.
#[cube]
pub fn rounded_one<E: Float>(value: f32) -> E {
    let bf16 = is_bf16::<E>();
    if comptime!(bf16) { E::cast_from(nearest_bf16(value)) } else { E::cast_from(value) }
}

/// The f32 whose upper half is that of the nearest bf16, and whose lower half is 0.
#[cube]
pub fn nearest_bf16(value: f32) -> f32 {
    let bits = u32::reinterpret(value);
    let nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // What is no number stays none, whatever its bits are.
    let is_number = (bits & 0x7fff_ffff) <= 0x7f80_0000;
    f32::reinterpret(select(is_number, nearest, (bits | 0x0040_0000) & 0xffff_0000))
}

/// The nearest tf32, ties away from zero, as the instruction `cvt.rna.tf32.f32` of the PTX ISA rounds.
///
/// Probabilities are `exp(score − lse)`: what recomputes scores rounds factors as the forward has, or an error of a large score becomes
/// a factor on its probability.
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
