//! PTX of products with keys and values in [e4m3](mod@crate::e4m3), which become f16 or bf16 in registers.
//!
//! `ldmatrix` moves bytes in pairs. In place of a 16-bit element, a thread gets two bytes:
//!
//! ```text
//! K               columns 4u to 4u + 3 of its key, of each 16 columns; u is the thread's number modulo 4
//! V, transposed   columns 2c and 2c + 1 of its keys, of each 16 columns; c is the thread's number divided by 4
//! ```
//!
//! Even and odd bytes become a word each. The order of the columns that a product sums over is free, and Q is put in that of K in shared
//! memory ([`order_columns`](super::tiles::order_columns())). Even columns of V are multiplied by one product and odd ones by another, so
//! that a thread accumulates columns `4u` to `4u + 3` of O.
//!
//! A byte `s eeee mmm` at the right place of 16 bits is the f16 `2^-8 x` or the bf16 `2^-120 x`, subnormal numbers included. The product
//! with `2^8` or `2^120` times the scale is exact.

use super::Products;
use super::products::{ColumnsOf, RowsOf, ahead, load, names, parts, sums};
use crate::tensor_core::LINE;

impl Products {
    /// Bits of exponent and mantissa of both halves of a word, the distance of a byte's from there, and the factor that is missing.
    fn fields(self) -> (u32, u32, f32) {
        match self {
            Products::F16 => (0x3F80_3F80, 1, 256.0),
            Products::BF16 => (0x07F0_07F0, 4, f32::from_bits((120 + 127) << 23)),
            Products::Tf32 | Products::Split => unreachable!("`tiling` multiplies e4m3 by f16 and bf16 only"),
        }
    }

    /// Reads the scales of `count` times 16 rows from the shared address `at`, as factors of both halves of a word, `m0` and following.
    fn factors(self, at: &str, count: usize) -> String {
        let (.., missing) = self.fields();
        let of = if self == Products::F16 { "f16x2" } else { "bf16x2" };
        let one = |nth: usize| {
            format!(
                "ld.shared.f32 scale, [{at}+{}];\nmul.rn.f32 scale, scale, 0f{:08X};\ncvt.rn.{of}.f32 m{nth}, scale, scale;\n",
                4 * nth,
                missing.to_bits()
            )
        };
        let registers = format!(".reg .f32 scale;\n.reg .b32 m<{count}>, bits, minus;\nmov.b32 minus, 0x80008000;\n");
        registers + &(0..count).map(one).collect::<String>()
    }

    /// Converts the upper bytes of both halves of `from`, or the lower ones, to `to`, and multiplies them by `factor`.
    fn widen(self, from: &str, upper: bool, to: &str, factor: &str) -> String {
        let (mask, distance, _) = self.fields();
        let of = if self == Products::F16 { "f16x2" } else { "bf16x2" };
        let (magnitude, sign) = if upper {
            (format!("shr.u32 bits, {from}, {distance};\n"), format!("mov.b32 {to}, {from};\n"))
        } else {
            (format!("shl.b32 bits, {from}, {};\n", 8 - distance), format!("shl.b32 {to}, {from}, 8;\n"))
        };
        // (to & 0x80008000) | bits
        format!(
            "{magnitude}and.b32 bits, bits, {mask};\n{sign}lop3.b32 {to}, {to}, minus, bits, 0xEA;\n\
             fma.rn.{of} {to}, {to}, {factor}, minus;\n"
        )
    }
}

/// PTX of [`multiply_rows`](crate::mma::ops::multiply_rows()). The operands `a`, `b` and `scales` follow the sums.
pub fn rows_with_rows(of: RowsOf) -> String {
    let RowsOf { groups, group_bytes, row_lines, tile_k, lines, wide, products, .. } = of;
    let (steps, pairs) = (wide / 16, tile_k / 16);
    let count = groups * tile_k / 2;
    let (mut reads, mut multiplied) = (Vec::new(), Vec::new());
    // Each read of K has the columns of two steps.
    for double in 0..steps.div_ceil(2) {
        let both = 2 * double..(2 * double + 2).min(steps);
        for pair in 0..pairs {
            let nth = double * pairs + pair;
            let a = |step: usize, group: usize| names("a", 4 * (step * groups + group), 4);
            let (mut read, mut text) = (String::new(), String::new());
            // The first operand is read in the first `pair` of each step.
            for step in both.clone().filter(|_| pair == 0) {
                for group in 0..groups {
                    let offset = step / 4 * row_lines * LINE + group * group_bytes;
                    read += &load("a", step * groups + group, &format!("q{}", step % 4), offset, false);
                }
            }
            read += &load("b", nth, &format!("k{}", double % 4), (double / 4 * lines + 16 * pair) * LINE, false);
            reads.push(read);
            for step in both.clone() {
                for eight in 0..2 {
                    let word = 4 * nth + 2 * eight + step % 2;
                    let wide = names("w", 2 * word, 2);
                    for (odd, to) in [false, true].into_iter().zip(&wide) {
                        text += &products.widen(&format!("b{word}"), odd, to, &format!("m{pair}"));
                    }
                    for group in 0..groups {
                        let to = names("$", group * tile_k / 2 + 4 * (2 * pair + eight), 4);
                        text += &products.multiply(&to, &a(step, group), &wide, step > 0);
                    }
                }
            }
            multiplied.push(text);
        }
    }
    let read = 4 * steps.div_ceil(2) * pairs;
    let registers = format!(".reg .b32 q<4>, k<4>, a<{}>, b<{read}>, w<{}>;\n", 4 * steps * groups, 2 * read);
    let addresses = parts("q", &format!("${count}"), 0) + &parts("k", &format!("${}", count + 1), 0);
    let factors = products.factors(&format!("${}", count + 2), pairs);
    format!("{{\n{registers}{}{addresses}{factors}{}}}", sums(products, count), ahead(reads, multiplied, 3 - groups))
}

/// PTX of [`multiply_columns`](crate::mma::ops::multiply_columns()): as the one of 16-bit elements, with `scales` after the operand `b`.
pub fn registers_with_columns(of: ColumnsOf) -> String {
    let ColumnsOf { groups, tile_k, lines, columns, products, .. } = of;
    let (steps, doubles) = (tile_k / 16, columns.div_ceil(32));
    let fragments = groups * columns;
    let last = fragments + groups * 4 * steps;
    let (mut reads, mut multiplied) = (Vec::new(), Vec::new());
    for step in 0..steps {
        for double in 0..doubles {
            let nth = step * doubles + double;
            let offset = (double / 4 * lines + 16 * step) * LINE;
            reads.push(load("b", nth, &format!("v{}", double % 4), offset, true));
            let mut text = String::new();
            for sixteen in (2 * double..2 * double + 2).filter(|sixteen| sixteen * 16 < columns) {
                for odd in [false, true] {
                    let first = 4 * nth + 2 * (sixteen % 2);
                    let wide = names("w", 2 * first + 2 * usize::from(odd), 2);
                    for (to, word) in wide.iter().zip(first..) {
                        text += &products.widen(&format!("b{word}"), odd, to, &format!("m{step}"));
                    }
                    for group in 0..groups {
                        let a = names("$", fragments + 4 * (group * steps + step), 4);
                        let to = names("$", group * columns / 2 + 4 * (2 * sixteen + usize::from(odd)), 4);
                        text += &products.multiply(&to, &a, &wide, true);
                    }
                }
            }
            multiplied.push(text);
        }
    }
    let read = 4 * steps * doubles;
    let registers = format!(".reg .b32 v<4>, b<{read}>, w<{}>;\n", 2 * read);
    let addresses = parts("v", &format!("${last}"), 0);
    let factors = products.factors(&format!("${}", last + 1), steps);
    format!("{{\n{registers}{addresses}{factors}{}}}", ahead(reads, multiplied, 3 - groups))
}
