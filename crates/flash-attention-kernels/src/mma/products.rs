//! PTX of a warp's products: reads of operands from shared memory, their rounding or splitting, and the products. The PTX ISA 8.7 defines
//! the layout of fragments in registers, in sections 9.7.14.5.8 (16-bit) and 9.7.14.5.7 (tf32).

use super::{MmaBlueprint, MmaTile, Products, e4m3};
use crate::tensor_core::LINE;

/// Operands of a product `A · Bᵀ`, of rows with rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowsOf {
    /// Blocks of 16 rows of the first operand.
    pub groups: usize,
    /// Bytes from one block to the next.
    pub group_bytes: usize,
    /// Lines of the first operand's panels.
    pub row_lines: usize,
    /// Rows of the second operand.
    pub tile_k: usize,
    /// Lines of the second operand's panels.
    pub lines: usize,
    /// Columns of both operands. The columns that pad them to whole products are 0.
    pub wide: usize,
    /// Type of the operands.
    pub products: Products,
}

/// Operands of a product `A · B`, of registers with columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnsOf {
    /// Blocks of 16 rows of the first operand.
    pub groups: usize,
    /// Rows of the second operand, which are summed over.
    pub tile_k: usize,
    /// Lines of the second operand's panels.
    pub lines: usize,
    /// Columns of the second operand: a multiple of 8.
    pub columns: usize,
    /// Type of the operands.
    pub products: Products,
}

impl MmaBlueprint {
    /// Operands of the product of a thread's rows, whose groups have `group_bytes` bytes, with a tile; both have `wide` columns.
    pub fn rows_of(&self, group_bytes: usize, wide: usize) -> RowsOf {
        let MmaTile { groups, tile_k: lines, warps_k, .. } = self.tile;
        let (row_lines, tile_k) = (self.tile.warpgroup_rows(), lines / warps_k);
        RowsOf { groups, group_bytes, row_lines, tile_k, lines, wide, products: self.products }
    }

    /// Operands of the product of registers with a tile of this number of columns.
    pub fn columns_of(&self, columns: usize) -> ColumnsOf {
        let MmaTile { groups, tile_k: lines, warps_k, .. } = self.tile;
        ColumnsOf { groups, tile_k: lines / warps_k, lines, columns, products: self.products }
    }
}

/// Read of four matrices, 8 × 8 of 16 bits or 8 × 4 of 32 bits, from the address `at + offset` to registers `name`, from number `4 nth` on.
pub(super) fn load(name: &str, nth: usize, at: &str, offset: usize, transposed: bool) -> String {
    let transposed = if transposed { ".trans" } else { "" };
    let words: Vec<_> = (0..4).map(|word| format!("{name}{}", 4 * nth + word)).collect();
    format!("ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{}}}, [{at}+{offset}];\n", words.join(", "))
}

impl Products {
    /// Declares registers for operands, and for their big parts if they are split.
    fn registers(self, name: &str, count: usize) -> String {
        let parts: &[&str] = if self == Products::Split { &["", "big_"] } else { &[""] };
        parts.iter().map(|part| format!(".reg .b32 {part}{name}<{count}>;\n")).collect()
    }

    /// Rounds or splits a factor before it is multiplied. The big part is rounded to nearest, ties away from zero, so that the small part,
    /// which `mma.sync` truncates, has 11 bits less. The small part is not finite where the factor is not finite.
    fn ready(self, factor: &str) -> String {
        match self {
            Products::F16 | Products::BF16 | Products::E4m3 { .. } => String::new(),
            Products::Tf32 => format!("cvt.rna.tf32.f32 {factor}, {factor};\n"),
            Products::Split => format!(
                "add.u32 big_{factor}, {factor}, 4096;\nand.b32 big_{factor}, big_{factor}, -8192;\nsub.rn.f32 {factor}, {factor}, \
                 big_{factor};\n"
            ),
        }
    }

    /// `sums = a · b`, or `sums += a · b` if `adds`.
    pub(super) fn multiply(self, sums: &[String], a: &[String], b: &[String], adds: bool) -> String {
        let (shape, of) = match self {
            Products::F16 | Products::E4m3 { .. } => ("m16n8k16", "f16"),
            Products::BF16 => ("m16n8k16", "bf16"),
            Products::Tf32 | Products::Split => ("m16n8k8", "tf32"),
        };
        let sums = sums.join(", ");
        let one = |a: &[String], b: &[String], adds: bool| {
            let added = if adds { &sums } else { "none, none, none, none" };
            let (a, b) = (a.join(", "), b.join(", "));
            format!("mma.sync.aligned.{shape}.row.col.f32.{of}.{of}.f32 {{{sums}}}, {{{a}}}, {{{b}}}, {{{added}}};\n")
        };
        if self != Products::Split {
            return one(a, b, adds);
        }
        let big = |of: &[String]| of.iter().map(|factor| format!("big_{factor}")).collect::<Vec<_>>();
        let (big_a, big_b) = (big(a), big(b));
        one(a, &big_b, adds) + &one(&big_a, b, true) + &one(&big_a, &big_b, true)
    }
}

/// `count` names of registers, numbered from `first` on.
pub(super) fn names(name: &str, first: usize, count: usize) -> Vec<String> {
    (first..first + count).map(|nth| format!("{name}{nth}")).collect()
}

/// Adds four partial sums, the registers `sum…`, to the accumulator.
fn add(first: usize) -> String {
    (first..first + 4).map(|nth| format!("add.rn.f32 ${nth}, ${nth}, sum{nth};\n")).collect()
}

/// Interleaves reads with the products that use them. Each read is issued `by` products earlier, to hide its latency.
pub(super) fn ahead(reads: Vec<String>, products: Vec<String>, by: usize) -> String {
    let mut text = reads[..by.min(reads.len())].concat();
    for (nth, product) in products.iter().enumerate() {
        if let Some(read) = reads.get(nth + by) {
            text += read;
        }
        text += product;
    }
    text
}

/// Computes the addresses of the four 32-byte parts of a panel's line. Because of the swizzle, part `n` is at `given` XOR `32 n`. `bits` are
/// flipped in all four addresses.
pub(super) fn parts(name: &str, given: &str, bits: usize) -> String {
    (0..4).map(|n| format!("xor.b32 {name}{n}, {given}, {};\n", 32 * n + bits)).collect()
}

/// Declares the register `none`, which is 0, and for split operands the registers `sum…` of partial sums.
pub(super) fn sums(products: Products, count: usize) -> String {
    let apart = if products == Products::Split { format!(".reg .f32 sum<{count}>;\n") } else { String::new() };
    format!(".reg .f32 none;\nmov.f32 none, 0f00000000;\n{apart}")
}

/// PTX of [`multiply_rows`](crate::mma::ops::multiply_rows()). The operands `a` and `b` follow the sums.
pub fn rows_with_rows(of: RowsOf) -> String {
    match of.products {
        Products::E4m3 { instruction } => e4m3::rows_with_rows(of, instruction),
        _ => elements_with_rows(of),
    }
}

fn elements_with_rows(of: RowsOf) -> String {
    let RowsOf { groups, group_bytes, row_lines, tile_k, lines, wide, products } = of;
    let (steps, pairs) = (wide.div_ceil(products.depth()), tile_k / 16);
    let count = groups * tile_k / 2;
    let (mut reads, mut multiplied) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let (panel, part) = (step / 4, step % 4);
        // With split operands, the products of each panel after the first have a partial sum of their own.
        let apart = products == Products::Split && panel > 0;
        for pair in 0..pairs {
            let nth = step * pairs + pair;
            let a = |group: usize| names("a", 4 * (step * groups + group), 4);
            let mut read = String::new();
            let mut text = String::new();
            // The first operand is read in the first `pair` of each step.
            for group in 0..if pair == 0 { groups } else { 0 } {
                let offset = panel * row_lines * LINE + group * group_bytes;
                read += &load("a", step * groups + group, &format!("q{part}"), offset, false);
                text += &a(group).iter().map(|factor| products.ready(factor)).collect::<String>();
            }
            read += &load("b", nth, &format!("k{part}"), (panel * lines + 16 * pair) * LINE, false);
            reads.push(read);
            text += &names("b", 4 * nth, 4).iter().map(|factor| products.ready(factor)).collect::<String>();
            for eight in 0..2 {
                for group in 0..groups {
                    let first = group * tile_k / 2 + 4 * (2 * pair + eight);
                    let to = names(if apart { "sum" } else { "$" }, first, 4);
                    let adds = if apart { part > 0 } else { step > 0 };
                    text += &products.multiply(&to, &a(group), &names("b", 4 * nth + 2 * eight, 2), adds);
                    if apart && (part == 3 || step + 1 == steps) {
                        text += &add(first);
                    }
                }
            }
            multiplied.push(text);
        }
    }
    let registers = products.registers("a", 4 * steps * groups) + &products.registers("b", 4 * steps * pairs);
    let addresses = parts("q", &format!("${count}"), 0) + &parts("k", &format!("${}", count + 1), 0);
    let text = ahead(reads, multiplied, 3 - groups);
    format!("{{\n.reg .b32 q<4>, k<4>;\n{registers}{}{addresses}{text}}}", sums(products, count))
}

/// PTX of [`multiply_columns`](crate::mma::ops::multiply_columns()). The sums come first, as results and again as operands. Then follow
/// each group's fragments of all steps, then the operand `b`.
pub fn registers_with_columns(of: ColumnsOf) -> String {
    match of.products {
        Products::E4m3 { instruction } => e4m3::registers_with_columns(of, instruction),
        Products::F16 | Products::BF16 => halves_with_columns(of),
        Products::Tf32 | Products::Split => words_with_columns(of),
    }
}

fn halves_with_columns(of: ColumnsOf) -> String {
    let ColumnsOf { groups, tile_k, lines, columns, products } = of;
    let (steps, pairs) = (tile_k / 16, columns.div_ceil(16));
    let fragments = groups * columns;
    let last = fragments + groups * 4 * steps;
    let (mut reads, mut multiplied) = (Vec::new(), Vec::new());
    for step in 0..steps {
        for pair in 0..pairs {
            let nth = step * pairs + pair;
            let offset = (pair / 4 * lines + 16 * step) * LINE;
            reads.push(load("b", nth, &format!("v{}", pair % 4), offset, true));
            let mut text = String::new();
            for eight in (0..2).filter(|eight| 2 * pair + eight < columns / 8) {
                for group in 0..groups {
                    let a = names("$", fragments + 4 * (group * steps + step), 4);
                    let to = names("$", group * columns / 2 + 4 * (2 * pair + eight), 4);
                    text += &products.multiply(&to, &a, &names("b", 4 * nth + 2 * eight, 2), true);
                }
            }
            multiplied.push(text);
        }
    }
    let registers = products.registers("b", 4 * steps * pairs);
    let addresses = parts("v", &format!("${last}"), 0);
    format!("{{\n.reg .b32 v<4>;\n{registers}{addresses}{}}}", ahead(reads, multiplied, 3 - groups))
}

/// PTX for 32-bit elements, which `ldmatrix` cannot transpose. The order of a sum is free, however. If the even lines are a fragment's
/// first four rows, threads already hold their part of the first operand, and their reads of the second one are in different banks.
fn words_with_columns(of: ColumnsOf) -> String {
    let ColumnsOf { groups, tile_k, lines, columns, products } = of;
    let (steps, eights) = (tile_k / 8, columns / 8);
    let (fragments, count) = (groups * columns, groups * 4 * steps);
    let apart = products == Products::Split;
    let factors: String = (0..count)
        .map(|nth| format!("mov.b32 a{nth}, ${};\n", fragments + nth) + &products.ready(&format!("a{nth}")))
        .collect();
    // Eights of columns that are computed together, so that no product waits for the previous one of the same sum.
    let across = 4 / groups;
    let (mut reads, mut multiplied) = (Vec::new(), Vec::new());
    for first in (0..eights).step_by(across) {
        let some = first..(first + across).min(eights);
        for step in 0..steps {
            let (mut read, mut text) = (String::new(), String::new());
            for eight in some.clone() {
                let b = names("b", 2 * (step * eights + eight), 2);
                let offset = (eight / 4 * lines + 8 * step) * LINE;
                read += &format!("ld.shared.b32 {}, [v{}+{offset}];\n", b[0], eight % 4);
                read += &format!("ld.shared.b32 {}, [w{}+{}];\n", b[1], eight % 4, offset + LINE);
                text += &(products.ready(&b[0]) + &products.ready(&b[1]));
                for group in 0..groups {
                    let sum = group * columns / 2 + 4 * eight;
                    let to = names(if apart { "sum" } else { "$" }, sum, 4);
                    let a = names("a", 4 * (group * steps + step), 4);
                    text += &products.multiply(&to, &a, &b, !apart || step > 0);
                    if apart && step + 1 == steps {
                        text += &add(sum);
                    }
                }
            }
            reads.push(read);
            multiplied.push(text);
        }
    }
    let registers = products.registers("a", count) + &products.registers("b", 2 * steps * eights);
    let given = format!("${}", fragments + count);
    let addresses = parts("v", &given, 0) + &parts("w", &given, 16);
    let text = ahead(reads, multiplied, 1);
    format!(
        "{{\n.reg .b32 v<4>, w<4>;\n{registers}{}{addresses}{factors}{text}}}",
        sums(products, groups * columns / 2)
    )
}
