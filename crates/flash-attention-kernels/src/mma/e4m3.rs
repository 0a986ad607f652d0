//! PTX of products with keys and values in [e4m3](mod@crate::e4m3), which become f16 in registers. Their scales are factors of scores and of
//! weights ([`scales`](super::scales)).
//!
//! `ldmatrix` moves bytes in pairs. In place of a 16-bit element, a thread gets two bytes:
//!
//! ```text
//! K               columns 4u to 4u + 3 of its key, of each 16 columns; u is the thread's number modulo 4
//! V, transposed   columns 2c and 2c + 1 of its keys, of each 16 columns; c is the thread's number divided by 4
//! ```
//!
//! The order of the columns that a product sums over is free, and Q is put in that of K in shared memory
//! ([`order_queries`](super::scales::order_queries())). Even columns of V are multiplied by one product and odd ones by another, so that a
//! thread accumulates columns `4u` to `4u + 3` of O.
//!
//! One instruction converts two bytes (`cvt.rn.f16x2.e4m3x2`, PTX ISA 8.7, section 9.7.9.21, from sm_89 on). Without it, a byte
//! `s eeee mmm` at the right place of 16 bits is the f16 `2^-8 x`, subnormal numbers included: the missing factor is one of the scale.

use super::products::{ColumnsOf, RowsOf, ahead, load, names, parts, sums};
use crate::tensor_core::LINE;

/// Factor that f16 lack where no `instruction` converts them.
pub fn missing(instruction: bool) -> f32 {
    if instruction { 1.0 } else { 256.0 }
}

/// Converts the lower two bytes of `from` to the registers `to[0]` and the upper two to `to[1]`, as pairs of f16.
fn widen(from: &str, to: &[String], instruction: bool) -> String {
    if instruction {
        let of = ["low", "high"].into_iter().zip(to).map(|(half, to)| format!("cvt.rn.f16x2.e4m3x2 {to}, {half};\n"));
        return format!("mov.b32 {{low, high}}, {from};\n") + &of.collect::<String>();
    }
    // A byte of each half: the upper byte there, its magnitude one place lower.
    let of = ["0x5040", "0x7060"].into_iter().zip(to).map(|(selector, to)| {
        format!(
            "prmt.b32 {to}, 0, {from}, {selector};\nshr.u32 bits, {to}, 1;\nand.b32 bits, bits, 0x3F803F80;\n\
             lop3.b32 {to}, {to}, minus, bits, 0xEA;\n"
        )
    });
    of.collect()
}

/// Declares the registers of [`widen()`].
fn registers() -> &'static str {
    ".reg .b16 low, high;\n.reg .b32 bits, minus;\nmov.b32 minus, 0x80008000;\n"
}

/// PTX of [`multiply_rows`](crate::mma::ops::multiply_rows()).
pub fn rows_with_rows(of: RowsOf, instruction: bool) -> String {
    let RowsOf { groups, group_bytes, row_lines, tile_k, lines, wide, products } = of;
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
                    text += &widen(&format!("b{word}"), &wide, instruction);
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
    let declared =
        format!(".reg .b32 q<4>, k<4>, a<{}>, b<{read}>, w<{}>;\n{}", 4 * steps * groups, 2 * read, registers());
    let addresses = parts("q", &format!("${count}"), 0) + &parts("k", &format!("${}", count + 1), 0);
    format!("{{\n{declared}{}{addresses}{}}}", sums(products, count), ahead(reads, multiplied, 3 - groups))
}

/// PTX of [`multiply_columns`](crate::mma::ops::multiply_columns()).
pub fn registers_with_columns(of: ColumnsOf, instruction: bool) -> String {
    let ColumnsOf { groups, tile_k, lines, columns, products } = of;
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
                // Of both words: the even column of two keys, then the odd one.
                let first = 4 * nth + 2 * (sixteen % 2);
                let words = [first, first + 1].map(|word| names("w", 2 * word, 2));
                for (word, to) in (first..).zip(&words) {
                    text += &format!("prmt.b32 b{word}, b{word}, 0, 0x3120;\n");
                    text += &widen(&format!("b{word}"), to, instruction);
                }
                for odd in 0..2 {
                    let wide = words.each_ref().map(|word| word[odd].clone());
                    for group in 0..groups {
                        let a = names("$", fragments + 4 * (group * steps + step), 4);
                        let to = names("$", group * columns / 2 + 4 * (2 * sixteen + odd), 4);
                        text += &products.multiply(&to, &a, &wide, true);
                    }
                }
            }
            multiplied.push(text);
        }
    }
    let read = 4 * steps * doubles;
    let declared = format!(".reg .b32 v<4>, b<{read}>, w<{}>;\n{}", 2 * read, registers());
    let addresses = parts("v", &format!("${last}"), 0);
    format!("{{\n{declared}{addresses}{}}}", ahead(reads, multiplied, 3 - groups))
}
