//! Arithmetic instructions, by name.

use super::float::*;
use super::lanes::{Alu, Compare, compare, lanes1, lanes2, lanes3};

/// f16 or bf16.
trait Half {
    fn from(half: u16) -> f32;
    fn to(x: f32) -> u16;
}

struct F16;

impl Half for F16 {
    #[inline(always)]
    fn from(half: u16) -> f32 {
        from_f16(half)
    }

    #[inline(always)]
    fn to(x: f32) -> u16 {
        to_f16(x)
    }
}

struct Bf16;

impl Half for Bf16 {
    #[inline(always)]
    fn from(half: u16) -> f32 {
        from_bf16(half)
    }

    #[inline(always)]
    fn to(x: f32) -> u16 {
        to_bf16(x)
    }
}

/// `a · b + c` for numbers whose product is exact in f32, rounded to odd so that it can be rounded again.
#[inline(always)]
fn fma_to_odd(a: f32, b: f32, c: f32) -> f32 {
    let product = a * b;
    let sum = product + c;
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    let bits = sum.to_bits();
    let cut = if (error < 0.0) != (sum < 0.0) { bits.wrapping_sub(1) } else { bits };
    f32::from_bits(if error != 0.0 && sum.is_finite() && error.is_finite() { cut | 1 } else { bits })
}

fn halves1<H: Half + 'static>(packed: bool, f: impl Fn(f32) -> f32 + Copy) -> Alu {
    let one = move |a: u16| H::to(f(H::from(a)));
    match packed {
        true => lanes1(move |a: u32| u32::from(one(a as u16)) | u32::from(one((a >> 16) as u16)) << 16),
        false => lanes1(one),
    }
}

/// Applies a function of two 16-bit operands to both halves of a register.
fn pairs(f: impl Fn(u16, u16) -> u16 + Copy) -> Alu {
    lanes2(move |a: u32, b: u32| {
        u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
    })
}

fn halves2<H: Half + 'static>(packed: bool, f: impl Fn(f32, f32) -> f32 + Copy) -> Alu {
    let one = move |a: u16, b: u16| H::to(f(H::from(a), H::from(b)));
    match packed {
        true => pairs(one),
        false => lanes2(one),
    }
}

fn halves_fma<H: Half + 'static>(packed: bool, relu: bool) -> Alu {
    fn one<H: Half>(a: u16, b: u16, c: u16) -> u16 {
        H::to(fma_to_odd(H::from(a), H::from(b), H::from(c)))
    }
    match (packed, relu) {
        (true, false) => lanes3(|a: u32, b: u32, c: u32| {
            let high = one::<H>((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
            u32::from(one::<H>(a as u16, b as u16, c as u16)) | u32::from(high) << 16
        }),
        (false, false) => lanes3(one::<H>),
        (true, true) => lanes3(|a: u32, b: u32, c: u32| {
            let relu = |x: u16| if x & 0x8000 != 0 && !H::from(x).is_nan() { 0 } else { x };
            let high = one::<H>((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
            u32::from(relu(one::<H>(a as u16, b as u16, c as u16))) | u32::from(relu(high)) << 16
        }),
        (false, true) => lanes3(|a: u16, b: u16, c: u16| {
            let x = one::<H>(a, b, c);
            if x & 0x8000 != 0 && !H::from(x).is_nan() { 0 } else { x }
        }),
    }
}

fn of_halves(name: &str, ty: &str, has: &impl Fn(&str) -> bool) -> Option<Alu> {
    fn of<H: Half + 'static>(name: &str, packed: bool, has: &impl Fn(&str) -> bool) -> Option<Alu> {
        Some(match name {
            "add" => halves2::<H>(packed, |a, b| a + b),
            "sub" => halves2::<H>(packed, |a, b| a - b),
            "mul" => halves2::<H>(packed, |a, b| a * b),
            "min" if has("NaN") => halves2::<H>(packed, min_nan),
            "max" if has("NaN") => halves2::<H>(packed, max_nan),
            "min" => halves2::<H>(packed, min),
            "max" => halves2::<H>(packed, max),
            "fma" => halves_fma::<H>(packed, has("relu")),
            "neg" if packed => lanes1(|a: u32| a ^ 0x8000_8000),
            "neg" => lanes1(|a: u16| a ^ 0x8000),
            "abs" if packed => lanes1(|a: u32| a & 0x7FFF_7FFF),
            "abs" => lanes1(|a: u16| a & 0x7FFF),
            "ex2" => halves1::<H>(packed, exp2),
            "tanh" => halves1::<H>(packed, f32::tanh),
            _ => return None,
        })
    }
    match ty {
        "f16" => of::<F16>(name, false, has),
        "f16x2" => of::<F16>(name, true, has),
        "bf16" => of::<Bf16>(name, false, has),
        "bf16x2" => of::<Bf16>(name, true, has),
        _ => None,
    }
}

/// Selects the variant of an f32 function: with flushed subnormals, clamped to 0 and 1, both, or neither.
macro_rules! single {
    ($has:expr, |$($x:ident),*| $e:expr) => {{
        let (ftz, sat) = ($has("ftz"), $has("sat"));
        macro_rules! lanes {
            ($f:expr) => { single!(@ $f, $($x),*) };
        }
        match (ftz, sat) {
            (false, false) => lanes!(|$($x: f32),*| -> f32 { $e }),
            (true, false) => lanes!(|$($x: f32),*| -> f32 { $(let $x = flush($x);)* flush($e) }),
            (false, true) => lanes!(|$($x: f32),*| -> f32 { min(max($e, 0.0), 1.0) }),
            (true, true) => lanes!(|$($x: f32),*| -> f32 { $(let $x = flush($x);)* min(max(flush($e), 0.0), 1.0) }),
        }
    }};
    (@ $f:expr, $a:ident) => { lanes1($f) };
    (@ $f:expr, $a:ident, $b:ident) => { lanes2($f) };
    (@ $f:expr, $a:ident, $b:ident, $c:ident) => { lanes3($f) };
}

fn of_singles(name: &str, has: &impl Fn(&str) -> bool) -> Option<Alu> {
    Some(match name {
        "add" => single!(has, |a, b| a + b),
        "sub" => single!(has, |a, b| a - b),
        "mul" => single!(has, |a, b| a * b),
        "div" => single!(has, |a, b| a / b),
        "fma" | "mad" => single!(has, |a, b, c| fma(a, b, c)),
        "min" if has("NaN") => single!(has, |a, b| min_nan(a, b)),
        "max" if has("NaN") => single!(has, |a, b| max_nan(a, b)),
        "min" => single!(has, |a, b| min(a, b)),
        "max" => single!(has, |a, b| max(a, b)),
        "neg" => single!(has, |a| -a),
        "abs" => single!(has, |a| a.abs()),
        "sqrt" => single!(has, |a| a.sqrt()),
        "rsqrt" => single!(has, |a| (1.0 / f64::from(a).sqrt()) as f32),
        "rcp" => single!(has, |a| 1.0 / a),
        "ex2" => single!(has, |a| exp2(a)),
        "lg2" => single!(has, |a| log2(a)),
        "tanh" => single!(has, |a| a.tanh()),
        "sin" => single!(has, |a| a.sin()),
        "cos" => single!(has, |a| a.cos()),
        "copysign" => lanes2(|a: f32, b: f32| b.copysign(a)),
        _ => return None,
    })
}

/// `a · b + c` rounded down. Negated arguments give rounding up.
#[inline(always)]
fn fma_down(a: f32, b: f32, c: f32) -> f32 {
    // The product is exact, and so is the error of the sum.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    let near = sum as f32;
    let above = f64::from(near) > sum || f64::from(near) == sum && error < 0.0;
    if above { near.next_down() } else { near }
}

/// Sums and products of f32 with directed rounding.
fn of_directed(name: &str, has: &impl Fn(&str) -> bool) -> Option<Alu> {
    if has("ftz") || has("sat") {
        return None;
    }
    Some(match (name, has("rm"), has("rp")) {
        ("fma", true, _) => lanes3(fma_down),
        ("fma", _, true) => lanes3(|a: f32, b: f32, c: f32| -fma_down(-a, b, -c)),
        ("add", true, _) => lanes2(|a: f32, b: f32| fma_down(a, 1.0, b)),
        ("add", _, true) => lanes2(|a: f32, b: f32| -fma_down(-a, 1.0, -b)),
        ("mul", true, _) => lanes2(|a: f32, b: f32| fma_down(a, b, 0.0)),
        ("mul", _, true) => lanes2(|a: f32, b: f32| -fma_down(-a, b, 0.0)),
        _ => return None,
    })
}

fn of_doubles(name: &str) -> Option<Alu> {
    Some(match name {
        "add" => lanes2(|a: f64, b: f64| a + b),
        "sub" => lanes2(|a: f64, b: f64| a - b),
        "mul" => lanes2(|a: f64, b: f64| a * b),
        "div" => lanes2(|a: f64, b: f64| a / b),
        "fma" | "mad" => lanes3(|a: f64, b: f64, c: f64| a.mul_add(b, c)),
        "min" => lanes2(f64::min),
        "max" => lanes2(f64::max),
        "neg" => lanes1(|a: f64| -a),
        "abs" => lanes1(f64::abs),
        "sqrt" => lanes1(f64::sqrt),
        "rcp" => lanes1(|a: f64| 1.0 / a),
        _ => return None,
    })
}

/// Integer arithmetic that is the same for all integer types.
macro_rules! integers {
    ($name:expr, $has:expr, $ty:ty, $unsigned:ty, $wide:ty, $bits:literal) => {
        match $name {
            "add" => lanes2(|a: $ty, b: $ty| a.wrapping_add(b)),
            "sub" => lanes2(|a: $ty, b: $ty| a.wrapping_sub(b)),
            "mul" if $has("hi") => lanes2(|a: $ty, b: $ty| ((a as $wide * b as $wide) >> $bits) as $ty),
            "mad" if $has("hi") => {
                lanes3(|a: $ty, b: $ty, c: $ty| (((a as $wide * b as $wide) >> $bits) as $ty).wrapping_add(c))
            }
            "mul" => lanes2(|a: $ty, b: $ty| a.wrapping_mul(b)),
            "mad" => lanes3(|a: $ty, b: $ty, c: $ty| a.wrapping_mul(b).wrapping_add(c)),
            "div" => lanes2(|a: $ty, b: $ty| if b == 0 { !0 } else { a.wrapping_div(b) }),
            "rem" => lanes2(|a: $ty, b: $ty| if b == 0 { a } else { a.wrapping_rem(b) }),
            "min" => lanes2(|a: $ty, b: $ty| a.min(b)),
            "max" => lanes2(|a: $ty, b: $ty| a.max(b)),
            "neg" => lanes1(|a: $ty| (0 as $ty).wrapping_sub(a)),
            "shr" => lanes2(|a: $ty, b: u32| if b >= $bits { if a < (0 as $ty) { !0 } else { 0 } } else { a >> b }),
            _ => return None,
        }
    };
}

fn of_integers(name: &str, ty: &str, has: &impl Fn(&str) -> bool) -> Option<Alu> {
    if has("wide") {
        return Some(match (name, ty) {
            ("mul", "u16") => lanes2(|a: u16, b: u16| u32::from(a) * u32::from(b)),
            ("mul", "s16") => lanes2(|a: i16, b: i16| i32::from(a) * i32::from(b)),
            ("mul", "u32") => lanes2(|a: u32, b: u32| u64::from(a) * u64::from(b)),
            ("mul", "s32") => lanes2(|a: i32, b: i32| i64::from(a) * i64::from(b)),
            ("mad", "u16") => lanes3(|a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c)),
            ("mad", "s16") => lanes3(|a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c)),
            ("mad", "u32") => lanes3(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)),
            ("mad", "s32") => lanes3(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)),
            _ => return None,
        });
    }
    Some(match (name, ty) {
        ("abs", "s16") => lanes1(i16::wrapping_abs),
        ("abs", "s32") => lanes1(i32::wrapping_abs),
        ("abs", "s64") => lanes1(i64::wrapping_abs),
        ("bfe", "u32") => lanes3(|a: u32, b: u32, c: u32| {
            let (at, length) = (b & 255, c & 255);
            if at > 31 || length == 0 { 0 } else { a >> at & (!0u32 >> (32 - length.min(32))) }
        }),
        ("bfe", "s32") => lanes3(|a: i32, b: u32, c: u32| {
            let (at, length) = (b & 255, (c & 255).min(32));
            if length == 0 {
                return 0;
            }
            let last = (at + length - 1).min(31);
            (i64::from(a) << (63 - last) >> (63 - last) >> at.min(31)) as i32
        }),
        ("bfe", "u64") => lanes3(|a: u64, b: u32, c: u32| {
            let (at, length) = (b & 255, c & 255);
            if at > 63 || length == 0 { 0 } else { a >> at & (!0u64 >> (64 - length.min(64))) }
        }),
        ("mul24", "u32") => lanes2(|a: u32, b: u32| (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF)),
        ("sad", "u32") => lanes3(|a: u32, b: u32, c: u32| a.abs_diff(b).wrapping_add(c)),
        ("dp4a", _) => return None,
        ("min", "u16x2") => pairs(|a, b| a.min(b)),
        ("max", "u16x2") => pairs(|a, b| a.max(b)),
        ("min", "s16x2") => pairs(|a, b| (a as i16).min(b as i16) as u16),
        ("max", "s16x2") => pairs(|a, b| (a as i16).max(b as i16) as u16),
        ("add", "u16x2" | "s16x2") => pairs(u16::wrapping_add),
        (_, "u16") => integers!(name, has, u16, u16, u32, 16),
        (_, "s16") => integers!(name, has, i16, u16, i32, 16),
        (_, "u32") => integers!(name, has, u32, u32, u64, 32),
        (_, "s32") => integers!(name, has, i32, u32, i64, 32),
        (_, "u64") => integers!(name, has, u64, u64, u128, 64),
        (_, "s64") => integers!(name, has, i64, u64, i128, 64),
        _ => return None,
    })
}

/// `prmt`: bytes of two registers, selected by the nibbles of a third.
fn permute(a: u32, b: u32, select: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |sum, nth| {
        let nibble = select >> (4 * nth) & 15;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        let byte = if nibble & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte };
        sum | u32::from(byte) << (8 * nth)
    })
}

fn of_bits(name: &str, ty: &str, has: &impl Fn(&str) -> bool) -> Option<Alu> {
    Some(match (name, ty) {
        ("mov", "b8" | "u8" | "s8" | "b16" | "u16" | "s16" | "f16" | "bf16") => lanes1(|a: u32| a),
        ("mov", "b32" | "u32" | "s32" | "f32") => lanes1(|a: u32| a),
        ("mov", "b64" | "u64" | "s64" | "f64") => lanes1(|a: u64| a),
        ("not", "b16") => lanes1(|a: u16| !a),
        ("not", "b32") => lanes1(|a: u32| !a),
        ("not", "b64") => lanes1(|a: u64| !a),
        ("and", "b16") => lanes2(|a: u16, b: u16| a & b),
        ("and", "b32") => lanes2(|a: u32, b: u32| a & b),
        ("and", "b64") => lanes2(|a: u64, b: u64| a & b),
        ("or", "b16") => lanes2(|a: u16, b: u16| a | b),
        ("or", "b32") => lanes2(|a: u32, b: u32| a | b),
        ("or", "b64") => lanes2(|a: u64, b: u64| a | b),
        ("xor", "b16") => lanes2(|a: u16, b: u16| a ^ b),
        ("xor", "b32") => lanes2(|a: u32, b: u32| a ^ b),
        ("xor", "b64") => lanes2(|a: u64, b: u64| a ^ b),
        ("cnot", "b32") => lanes1(|a: u32| u32::from(a == 0)),
        ("shl", "b16") => lanes2(|a: u16, b: u32| if b > 15 { 0 } else { a << b }),
        ("shl", "b32") => lanes2(|a: u32, b: u32| if b > 31 { 0 } else { a << b }),
        ("shl", "b64") => lanes2(|a: u64, b: u32| if b > 63 { 0 } else { a << b }),
        ("shr", "b16") => lanes2(|a: u16, b: u32| if b > 15 { 0 } else { a >> b }),
        ("shr", "b32") => lanes2(|a: u32, b: u32| if b > 31 { 0 } else { a >> b }),
        ("shr", "b64") => lanes2(|a: u64, b: u32| if b > 63 { 0 } else { a >> b }),
        ("shf", "b32") => {
            let both = |a: u32, b: u32| u64::from(b) << 32 | u64::from(a);
            match (has("l"), has("wrap")) {
                (true, true) => lanes3(move |a: u32, b: u32, c: u32| (both(a, b) << (c & 31) >> 32) as u32),
                (true, false) => lanes3(move |a: u32, b: u32, c: u32| (both(a, b) << c.min(32) >> 32) as u32),
                (false, true) => lanes3(move |a: u32, b: u32, c: u32| (both(a, b) >> (c & 31)) as u32),
                (false, false) => lanes3(move |a: u32, b: u32, c: u32| (both(a, b) >> c.min(32)) as u32),
            }
        }
        ("popc", "b32") => lanes1(u32::count_ones),
        ("popc", "b64") => lanes1(u64::count_ones),
        ("clz", "b32") => lanes1(u32::leading_zeros),
        ("clz", "b64") => lanes1(u64::leading_zeros),
        ("brev", "b32") => lanes1(u32::reverse_bits),
        ("brev", "b64") => lanes1(u64::reverse_bits),
        ("bfind", "u32") => lanes1(|a: u32| 31u32.wrapping_sub(a.leading_zeros())),
        ("prmt", "b32") if !has("f4e") => lanes3(permute),
        _ => return None,
    })
}

/// Conversions between integer types.
macro_rules! cast_integers {
    ($to:expr, $from:expr; $($to_name:literal $to_ty:ty),*; $from_names:tt) => {
        match $to {
            $($to_name => cast_integers!(@ $from, $to_ty, $from_names),)*
            _ => return None,
        }
    };
    (@ $from:expr, $to:ty, [$($from_name:literal $from_ty:ty),*]) => {
        match $from {
            $($from_name => lanes1(|a: $from_ty| a as $to),)*
            _ => return None,
        }
    };
}

fn of_conversion(to: &str, from: &str, has: &impl Fn(&str) -> bool) -> Option<Alu> {
    let integer = |ty: &str| matches!(ty, "u8" | "s8" | "u16" | "s16" | "u32" | "s32" | "u64" | "s64");
    macro_rules! from_integer {
        (|$a:ident: $ty:ident| $e:expr) => {
            match from {
                "u8" => lanes1(|$a: u8| $e($a as $ty)),
                "s8" => lanes1(|$a: i8| $e($a as $ty)),
                "u16" => lanes1(|$a: u16| $e($a as $ty)),
                "s16" => lanes1(|$a: i16| $e($a as $ty)),
                "u32" => lanes1(|$a: u32| $e($a as $ty)),
                "s32" => lanes1(|$a: i32| $e($a as $ty)),
                "u64" => lanes1(|$a: u64| $e($a as $ty)),
                "s64" => lanes1(|$a: i64| $e($a as $ty)),
                _ => return None,
            }
        };
    }
    // NaN becomes 0, and numbers that are too large become the largest integer.
    macro_rules! to_integer {
        (|$a:ident: $ty:ty| $e:expr) => {
            match to {
                "u8" => lanes1(|$a: $ty| $e as u8),
                "s8" => lanes1(|$a: $ty| $e as i8),
                "u16" => lanes1(|$a: $ty| $e as u16),
                "s16" => lanes1(|$a: $ty| $e as i16),
                "u32" => lanes1(|$a: $ty| $e as u32),
                "s32" => lanes1(|$a: $ty| $e as i32),
                "u64" => lanes1(|$a: $ty| $e as u64),
                "s64" => lanes1(|$a: $ty| $e as i64),
                _ => return None,
            }
        };
    }
    macro_rules! rounded_to_integer {
        (|$a:ident: $ty:ty| $e:expr) => {
            if has("rni") {
                to_integer!(|$a: $ty| $e.round_ties_even())
            } else if has("rmi") {
                to_integer!(|$a: $ty| $e.floor())
            } else if has("rpi") {
                to_integer!(|$a: $ty| $e.ceil())
            } else {
                to_integer!(|$a: $ty| $e.trunc())
            }
        };
    }
    if integer(to) && integer(from) {
        if has("sat") {
            return None;
        }
        return Some(cast_integers!(to, from;
            "u8" u8, "s8" i8, "u16" u16, "s16" i16, "u32" u32, "s32" i32, "u64" u64, "s64" i64;
            ["u8" u8, "s8" i8, "u16" u16, "s16" i16, "u32" u32, "s32" i32, "u64" u64, "s64" i64]));
    }
    Some(match (to, from) {
        ("f32", _) if integer(from) => from_integer!(|a: f32| |x: f32| x),
        ("f64", _) if integer(from) => from_integer!(|a: f64| |x: f64| x),
        ("f16", _) if integer(from) => from_integer!(|a: f64| f64_to_f16),
        ("bf16", _) if integer(from) => from_integer!(|a: f32| to_bf16),
        (_, "f32") if integer(to) && has("ftz") => rounded_to_integer!(|a: f32| flush(a)),
        (_, "f32") if integer(to) => rounded_to_integer!(|a: f32| a),
        (_, "f64") if integer(to) => rounded_to_integer!(|a: f64| a),
        (_, "f16") if integer(to) => rounded_to_integer!(|a: u16| from_f16(a)),
        (_, "bf16") if integer(to) => rounded_to_integer!(|a: u16| from_bf16(a)),
        ("f32", "f32") if has("rni") => single!(has, |a| a.round_ties_even()),
        ("f32", "f32") if has("rmi") => single!(has, |a| a.floor()),
        ("f32", "f32") if has("rpi") => single!(has, |a| a.ceil()),
        ("f32", "f32") if has("rzi") => single!(has, |a| a.trunc()),
        ("f32", "f32") => single!(has, |a| a),
        ("f64", "f32") => lanes1(|a: f32| f64::from(a)),
        ("f32", "f64") if has("rn") => lanes1(|a: f64| a as f32),
        ("f64", "f64") if has("rni") => lanes1(f64::round_ties_even),
        ("f64", "f64") if has("rmi") => lanes1(f64::floor),
        ("f64", "f64") if has("rpi") => lanes1(f64::ceil),
        ("f64", "f64") if has("rzi") => lanes1(f64::trunc),
        ("f32", "f16") => lanes1(from_f16),
        ("f32", "bf16") => lanes1(from_bf16),
        ("f64", "f16") => lanes1(|a: u16| f64::from(from_f16(a))),
        ("f16", "f64") if has("rn") => lanes1(f64_to_f16),
        ("f16", "f32") if has("rn") => lanes1(to_f16),
        ("bf16", "f32") if has("rn") => lanes1(to_bf16),
        ("bf16", "f32") if has("rz") => lanes1(cut_to_bf16),
        ("f16", "f16") if has("rni") => halves1::<F16>(false, f32::round_ties_even),
        ("f16", "f16") if has("rmi") => halves1::<F16>(false, f32::floor),
        ("f16", "f16") if has("rpi") => halves1::<F16>(false, f32::ceil),
        ("f16", "f16") if has("rzi") => halves1::<F16>(false, f32::trunc),
        ("f16x2", "f32") if has("rn") => lanes2(|a: f32, b: f32| u32::from(to_f16(a)) << 16 | u32::from(to_f16(b))),
        ("bf16x2", "f32") if has("rn") => lanes2(|a: f32, b: f32| u32::from(to_bf16(a)) << 16 | u32::from(to_bf16(b))),
        ("tf32", "f32") if has("rna") => lanes1(to_tf32),
        ("f16x2", "e4m3x2") if has("rn") => {
            lanes1(|a: u16| u32::from(e4m3_to_f16((a >> 8) as u8)) << 16 | u32::from(e4m3_to_f16(a as u8)))
        }
        _ => return None,
    })
}

/// The function that an instruction computes, if it only accesses registers.
pub fn arithmetic(parts: &[&str]) -> Option<Alu> {
    let (name, ty) = (parts[0], *parts.last()?);
    let has = |modifier: &str| parts[1..].contains(&modifier);
    if ty == "f32"
        && let Some(directed) = of_directed(name, &has)
    {
        return Some(directed);
    }
    // Other instructions with directed rounding or a carry are not handled here.
    let plain = !["rz", "rm", "rp", "cc"].iter().any(|modifier| has(modifier));
    if name == "cvt" {
        return of_conversion(parts.get(parts.len().checked_sub(2)?)?, ty, &has);
    }
    if name == "cvta" || !plain {
        return None;
    }
    of_bits(name, ty, &has).or_else(|| match ty {
        "f32" => of_singles(name, &has),
        "f64" => of_doubles(name),
        "f16" | "bf16" | "f16x2" | "bf16x2" => of_halves(name, ty, &has),
        _ if has("sat") => None,
        _ => of_integers(name, ty, &has),
    })
}

/// The comparison of a `setp`.
// Comparisons that hold for NaN are written as the negation of one that does not.
#[allow(clippy::neg_cmp_op_on_partial_ord)]
pub fn comparison(parts: &[&str]) -> Option<Compare> {
    let (test, ty) = (*parts.get(1)?, *parts.last()?);
    macro_rules! ordered {
        ($ty:ty) => {
            match test {
                "eq" => compare(|a: $ty, b: $ty| a == b),
                "ne" => compare(|a: $ty, b: $ty| a != b),
                "lt" | "lo" => compare(|a: $ty, b: $ty| a < b),
                "le" | "ls" => compare(|a: $ty, b: $ty| a <= b),
                "gt" | "hi" => compare(|a: $ty, b: $ty| a > b),
                "ge" | "hs" => compare(|a: $ty, b: $ty| a >= b),
                _ => return None,
            }
        };
    }
    // `ne` does not hold for NaN, unlike in Rust.
    macro_rules! float {
        ($ty:ty, $read:expr) => {
            match test {
                "eq" => compare(|a: $ty, b: $ty| $read(a) == $read(b)),
                "ne" => compare(|a: $ty, b: $ty| $read(a) < $read(b) || $read(a) > $read(b)),
                "lt" => compare(|a: $ty, b: $ty| $read(a) < $read(b)),
                "le" => compare(|a: $ty, b: $ty| $read(a) <= $read(b)),
                "gt" => compare(|a: $ty, b: $ty| $read(a) > $read(b)),
                "ge" => compare(|a: $ty, b: $ty| $read(a) >= $read(b)),
                "equ" => compare(|a: $ty, b: $ty| !($read(a) < $read(b) || $read(a) > $read(b))),
                "neu" => compare(|a: $ty, b: $ty| $read(a) != $read(b)),
                "ltu" => compare(|a: $ty, b: $ty| !($read(a) >= $read(b))),
                "leu" => compare(|a: $ty, b: $ty| !($read(a) > $read(b))),
                "gtu" => compare(|a: $ty, b: $ty| !($read(a) <= $read(b))),
                "geu" => compare(|a: $ty, b: $ty| !($read(a) < $read(b))),
                "num" => compare(|a: $ty, b: $ty| !$read(a).is_nan() && !$read(b).is_nan()),
                "nan" => compare(|a: $ty, b: $ty| $read(a).is_nan() || $read(b).is_nan()),
                _ => return None,
            }
        };
    }
    Some(match ty {
        "u16" | "b16" => ordered!(u16),
        "s16" => ordered!(i16),
        "u32" | "b32" => ordered!(u32),
        "s32" => ordered!(i32),
        "u64" | "b64" => ordered!(u64),
        "s64" => ordered!(i64),
        "f32" if parts.contains(&"ftz") => float!(f32, flush),
        "f32" => float!(f32, |x: f32| x),
        "f64" => float!(f64, |x: f64| x),
        "f16" => float!(u16, from_f16),
        "bf16" => float!(u16, from_bf16),
        _ => return None,
    })
}
