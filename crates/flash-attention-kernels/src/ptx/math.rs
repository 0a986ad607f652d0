//! Arithmetic: approximations of the special-function unit, and pairs of 16-bit numbers in a word.

use super::asm::{effect_value, pure};
use crate::dtype::Dtype;
use cubecl::prelude::*;
use cubecl_core::ir::ExpandValue;

// -- special-function unit

/// An approximation by the special-function unit.
fn approximation(scope: &cubecl_core::ir::Scope, name: &str, x: pliron::value::Value) -> ExpandValue {
    let ty = f32::__expand_as_type(scope);
    pure(scope, ty, &format!("{name}.approx.ftz.f32 $0, $1;"), "=f,f", vec![x]).into()
}

/// `a · b`, always rounded: no compiler fuses it with an addition.
#[cube]
pub fn multiply_rounded(a: f32, b: f32) -> f32 {
    intrinsic!(|scope| {
        let (a, b) = (a.read_value(scope), b.read_value(scope));
        let ty = f32::__expand_as_type(scope);
        ExpandValue::from(pure(scope, ty, "mul.rn.f32 $0, $1, $2;", "=f,f,f", vec![a, b])).into()
    })
}

/// `a · b − c`, rounded once. CubeCL's `fma(a, b, -c)` would change the sign of `c` by an instruction of its own.
#[cube]
pub fn multiply_subtract(a: f32, b: f32, c: f32) -> f32 {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope), c.read_value(scope)];
        let ty = f32::__expand_as_type(scope);
        let template = "{\n.reg .f32 negative;\nneg.f32 negative, $3;\nfma.rn.f32 $0, $1, $2, negative;\n}";
        ExpandValue::from(pure(scope, ty, template, "=f,f,f,f", args)).into()
    })
}

/// `2^x`, by the hardware's approximation (relative error 2^-22). CubeCL's own function needs libdevice, which only an installed
/// CUDA toolkit provides. The same holds for `log2` and `tanh`.
#[cube]
pub fn ex2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        approximation(scope, "ex2", x).into()
    })
}

/// `log2 x`, by the hardware's approximation (absolute error 2^-22).
#[cube]
pub fn lg2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        approximation(scope, "lg2", x).into()
    })
}

/// `1 / x`, by the hardware's approximation (1 unit in the last place). An exact division costs far more than its own time: its
/// slow path is a call, which is external in the relocatable code that CubeCL links, and next to an external call the assembler
/// serialises every warpgroup product.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        approximation(scope, "rcp", x).into()
    })
}

/// Two f32 rounded to 16 bits and packed into one register, with `low` in its low half.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] dtype: Dtype) -> u32 {
    intrinsic!(|scope| {
        let (low, high) = (low.read_value(scope), high.read_value(scope));
        let ty = u32::__expand_as_type(scope);
        let template = format!("cvt.rn.{}x2.f32 $0, $2, $1;", dtype.name());
        ExpandValue::from(pure(scope, ty, &template, "=r,f,f", vec![low, high])).into()
    })
}

/// `a · b + c` for both halves of packed registers.
#[cube]
pub fn fma_packed(a: u32, b: u32, c: u32, #[comptime] dtype: Dtype) -> u32 {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope), c.read_value(scope)];
        let ty = u32::__expand_as_type(scope);
        let template = format!("fma.rn.{}x2 $0, $1, $2, $3;", dtype.name());
        ExpandValue::from(pure(scope, ty, &template, "=r,r,r,r", args)).into()
    })
}

/// One of the two numbers of a packed register, as f32.
#[cube]
pub fn unpack(packed: u32, #[comptime] high: bool, #[comptime] dtype: Dtype) -> f32 {
    if comptime!(dtype == Dtype::BF16) {
        // A bf16 is the upper half of an f32.
        f32::reinterpret(if comptime!(high) { packed & 0xFFFF_0000 } else { packed << 16 })
    } else {
        half_to_f32(packed, high)
    }
}

#[cube]
fn half_to_f32(packed: u32, #[comptime] high: bool) -> f32 {
    intrinsic!(|scope| {
        let (ty, packed) = (f32::__expand_as_type(scope), packed.read_value(scope));
        let half = if high { "_, half" } else { "half, _" };
        let template = format!("{{\n.reg .b16 half;\nmov.b32 {{{half}}}, $1;\ncvt.f32.f16 $0, half;\n}}");
        ExpandValue::from(pure(scope, ty, &template, "=f,r", vec![packed])).into()
    })
}

/// Four bytes of `a` and `b`, which the nibbles of `selector` select: the numbers of bytes of `a` are 0 to 3, those of `b` are 4 to 7.
#[cube]
pub fn bytes_of(a: u32, b: u32, selector: u32) -> u32 {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope), selector.read_value(scope)];
        let ty = u32::__expand_as_type(scope);
        ExpandValue::from(pure(scope, ty, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", args)).into()
    })
}

/// Four bytes of the highest bits of bytes of `x`, 0xff or 0: the number of such a byte is a nibble of `selector`, minus 8.
#[cube]
pub fn byte_signs(x: u32, #[comptime] selector: u32) -> u32 {
    intrinsic!(|scope| {
        let (ty, x) = (u32::__expand_as_type(scope), x.read_value(scope));
        ExpandValue::from(pure(scope, ty, &format!("prmt.b32 $0, $1, 0, {selector};"), "=r,r", vec![x])).into()
    })
}

/// The same number, opaque to the compiler. Values that are computed from it are computed where they are needed, and not
/// hoisted out of a loop, where each would occupy a register.
#[cube]
pub fn opaque(x: u32) -> u32 {
    intrinsic!(|scope| {
        let (ty, x) = (u32::__expand_as_type(scope), x.read_value(scope));
        ExpandValue::from(effect_value(scope, ty, "mov.u32 $0, $1;", "=r,r", vec![x])).into()
    })
}
