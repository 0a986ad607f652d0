//! Products of warps, and copies that run beside them. Names and semantics are those of the PTX ISA 8.7; how they become PTX:
//! [`hopper::ops`](crate::hopper::ops).

use crate::hopper::ops::lowered::{effect, effect_values, in_place};
use crate::hopper::ops::{held, hold, sequence};
use crate::problem::Dtype;
use cubecl::prelude::*;

/// Bytes of a line of shared memory: a panel's row.
const LINE: usize = 128;

// -- copies

/// Copies the first `bytes` bytes of the vector `nth` after the first of `from`, of 16, and zeros in place of the others, to byte
/// `offset` after a shared address; nothing is read if there is none. By the time that [`copies_wait`] says.
#[cube]
pub fn copy_vector<E: CubePrimitive>(
    from: &[E],
    #[comptime] nth: usize,
    to: u32,
    #[comptime] offset: usize,
    bytes: u32,
) {
    intrinsic!(|scope| {
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![to.read_value(scope), from, bytes.read_value(scope)];
        let template = format!("cp.async.cg.shared.global.L2::128B [$0+{offset}], [$1+{}], 16, $2;", 16 * nth);
        effect(scope, &template, "r,l,r,~{memory}", args)
    })
}

/// The same of 4 bytes, which are one element of `from`.
#[cube]
pub fn copy_word(from: &[u32], to: u32, bytes: u32) {
    intrinsic!(|scope| {
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![to.read_value(scope), from, bytes.read_value(scope)];
        effect(scope, "cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r,~{memory}", args)
    })
}

/// The copies that this unit has asked for since the last time form a group.
#[cube]
pub fn copies_commit() {
    intrinsic!(|scope| effect(scope, "cp.async.commit_group;", "~{memory}", vec![]))
}

/// Waits until at most the newest `n` groups of this unit's copies are under way.
#[cube]
pub fn copies_wait(#[comptime] n: usize) {
    intrinsic!(|scope| effect(scope, &format!("cp.async.wait_group {n};"), "~{memory}", vec![]))
}

// -- products

/// A read of four 8 × 8 matrices: what they are called, where from.
fn load(name: &str, nth: usize, at: &str, offset: usize, transposed: bool) -> String {
    let transposed = if transposed { ".trans" } else { "" };
    let words: Vec<_> = (0..4).map(|word| format!("{name}{}", 4 * nth + word)).collect();
    format!("ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{}}}, [{at}+{offset}];\n", words.join(", "))
}

/// A product `m16n8k16` that is added to `sums`, in registers from the `first` on, or to nothing.
fn product(first: usize, a: &[String], b: [String; 2], adds: bool, dtype: Dtype) -> String {
    let ty = match dtype {
        Dtype::BF16 => "bf16",
        _ => "f16",
    };
    let sums = (first..first + 4).map(|i| format!("${i}")).collect::<Vec<_>>().join(", ");
    let added = if adds { sums.clone() } else { "none, none, none, none".into() };
    let (a, b) = (a.join(", "), b.join(", "));
    format!("mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{{sums}}}, {{{a}}}, {{{b}}}, {{{added}}};\n")
}

/// Reads and what is multiplied with them, in this order but the reads so many ahead, as a read takes its time.
fn ahead(reads: Vec<String>, products: Vec<String>, by: usize) -> String {
    let mut text = reads[..by.min(reads.len())].concat();
    for (nth, product) in products.iter().enumerate() {
        if let Some(read) = reads.get(nth + by) {
            text += read;
        }
        text += product;
    }
    text
}

/// The four addresses of 16 columns of a panel's line each, which the swizzle exchanges: the one that is given, and three others.
fn sixteenths(name: &str, given: &str) -> String {
    (0..4).map(|n| format!("xor.b32 {name}{n}, {given}, {};\n", 32 * n)).collect()
}

/// What a product of rows with rows multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowsOf {
    /// Blocks of 16 rows of the first operand.
    pub groups: usize,
    /// Lines of each of its panels.
    pub lines: usize,
    /// Bytes from a block to the next.
    pub group_bytes: usize,
    /// Rows of the second operand, and lines of its panels.
    pub tile_k: usize,
    /// Columns of both; what fills them up to a multiple of 16 is 0.
    pub wide: usize,
    /// f16 or bf16.
    pub dtype: Dtype,
}

/// PTX of [`multiply_rows`]: operands `$a` and `$b` follow the sums.
fn rows_with_rows(of: RowsOf) -> String {
    let RowsOf { groups, lines, group_bytes, tile_k, wide, dtype } = of;
    let (steps, pairs) = (wide.div_ceil(16), tile_k / 16);
    let count = groups * tile_k / 2;
    let (mut reads, mut products) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let (panel, sixteenth) = (step / 4, step % 4);
        for pair in 0..pairs {
            let nth = step * pairs + pair;
            let mut read = String::new();
            // The first operand's 16 columns come with the first that they are multiplied with.
            for group in 0..if pair == 0 { groups } else { 0 } {
                let offset = panel * lines * LINE + group * group_bytes;
                read += &load("a", step * groups + group, &format!("q{sixteenth}"), offset, false);
            }
            read += &load("b", nth, &format!("k{sixteenth}"), (panel * tile_k + 16 * pair) * LINE, false);
            reads.push(read);
            let mut of_pair = String::new();
            for eight in 0..2 {
                for group in 0..groups {
                    let a: Vec<_> = (0..4).map(|e| format!("a{}", 4 * (step * groups + group) + e)).collect();
                    let b = [0, 1].map(|e| format!("b{}", 4 * nth + 2 * eight + e));
                    let first = group * tile_k / 2 + 4 * (2 * pair + eight);
                    of_pair += &product(first, &a, b, step > 0, dtype);
                }
            }
            products.push(of_pair);
        }
    }
    let registers = format!(
        ".reg .b32 q<4>, k<4>, a<{}>, b<{}>;\n.reg .f32 none;\nmov.f32 none, 0f00000000;\n",
        4 * steps * groups,
        4 * steps * pairs
    );
    let (q, k) = (format!("${count}"), format!("${}", count + 1));
    let text = ahead(reads, products, 3 - groups);
    format!("{{\n{registers}{}{}{text}}}", sixteenths("q", &q), sixteenths("k", &k))
}

/// `acc = A · Bᵀ`: rows of `a` with rows of `b`, where [`lane_of_rows`](super::tiles::lane_of_rows) and
/// [`lane_of_columns`](super::tiles::lane_of_columns) say that this unit reads them.
#[cube]
pub fn multiply_rows(acc: &mut Sequence<Array<f32>>, a: u32, b: u32, #[comptime] of: RowsOf) {
    let after = product_rows(a, b, of);
    let len = comptime!(of.tile_k / 2);
    #[unroll]
    for group in 0..comptime!(of.groups) {
        let sums = acc.index_mut(group);
        #[unroll]
        for i in 0..len {
            sums[i] = *after.index(comptime!(group * len + i));
        }
    }
}

#[cube]
fn product_rows(a: u32, b: u32, #[comptime] of: RowsOf) -> Sequence<f32> {
    intrinsic!(|scope| {
        let count = of.groups * of.tile_k / 2;
        let args = vec![a.read_value(scope), b.read_value(scope)];
        let constraints = "=f,".repeat(count) + "r,r,~{memory}";
        let ty = f32::__expand_as_type(scope);
        sequence(scope, effect_values(scope, ty, count, &rows_with_rows(of), &constraints, args))
    })
}

/// What a product of registers with columns multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnsOf {
    /// Blocks of 16 rows of the first operand.
    pub groups: usize,
    /// Rows of the second operand, which are summed over, and lines of its panels.
    pub tile_k: usize,
    /// Its columns: a multiple of 8.
    pub columns: usize,
    /// f16 or bf16.
    pub dtype: Dtype,
}

/// PTX of [`multiply_columns`]: of each group the fragments of all steps, then `$b`, follow the sums, which come twice.
fn registers_with_columns(of: ColumnsOf) -> String {
    let ColumnsOf { groups, tile_k, columns, dtype } = of;
    let (steps, pairs) = (tile_k / 16, columns.div_ceil(16));
    let fragments = groups * columns;
    let last = fragments + groups * 4 * steps;
    let (mut reads, mut products) = (Vec::new(), Vec::new());
    for step in 0..steps {
        for pair in 0..pairs {
            let nth = step * pairs + pair;
            let offset = (pair / 4 * tile_k + 16 * step) * LINE;
            reads.push(load("b", nth, &format!("v{}", pair % 4), offset, true));
            let mut of_pair = String::new();
            for eight in (0..2).filter(|eight| 2 * pair + eight < columns / 8) {
                for group in 0..groups {
                    let a: Vec<_> =
                        (0..4).map(|e| format!("${}", fragments + 4 * (group * steps + step) + e)).collect();
                    let b = [0, 1].map(|e| format!("b{}", 4 * nth + 2 * eight + e));
                    of_pair += &product(group * columns / 2 + 4 * (2 * pair + eight), &a, b, true, dtype);
                }
            }
            products.push(of_pair);
        }
    }
    let registers = format!(".reg .b32 v<4>, b<{}>;\n", 4 * steps * pairs);
    format!("{{\n{registers}{}{}}}", sixteenths("v", &format!("${last}")), ahead(reads, products, 3 - groups))
}

/// `acc += A · B`: fragments, of each group those of all steps, with columns of `b`, where
/// [`lane_of_rows`](super::tiles::lane_of_rows) says that this unit reads them.
#[cube]
pub fn multiply_columns(acc: &mut Sequence<Array<f32>>, fragments: &Sequence<u32>, b: u32, #[comptime] of: ColumnsOf) {
    let len = comptime!(of.columns / 2);
    let mut before = Sequence::<f32>::new();
    #[unroll]
    for group in 0..comptime!(of.groups) {
        let sums = held(acc.index(group), len);
        #[unroll]
        for i in 0..len {
            before.push(*sums.index(i));
        }
    }
    let after = product_columns(&before, fragments, b, of);
    #[unroll]
    for group in 0..comptime!(of.groups) {
        let mut sums = Sequence::<f32>::new();
        #[unroll]
        for i in 0..len {
            sums.push(*after.index(comptime!(group * len + i)));
        }
        hold(acc.index_mut(group), &sums, len);
    }
}

#[cube]
fn product_columns(
    held: &Sequence<f32>,
    fragments: &Sequence<u32>,
    b: u32,
    #[comptime] of: ColumnsOf,
) -> Sequence<f32> {
    intrinsic!(|scope| {
        let registers: Vec<_> = held.iter_cloned().map(|x| x.read_value(scope)).collect();
        let mut args: Vec<_> = fragments.iter_cloned().map(|x| x.read_value(scope)).collect();
        args.push(b.read_value(scope));
        let others = vec!["r"; args.len()];
        let ty = f32::__expand_as_type(scope);
        sequence(scope, in_place(scope, ty, &registers_with_columns(of), &others, registers, args))
    })
}

#[cfg(test)]
mod tests {
    //! What the pieces of PTX compute, unit by unit, as the PTX ISA (sections 9.7.14.5.8 and 9.7.14.5.15) lays fragments out.

    use super::super::tiles::{lane_of_columns, lane_of_rows, place};
    use super::*;
    use std::collections::HashMap;

    /// Shared memory of 16-bit elements, which hold small whole numbers here.
    type Shared = Vec<i64>;
    /// Registers of a unit: of sums one number, of fragments two.
    type Registers = HashMap<String, [i64; 2]>;

    /// Runs a piece for a warp, whose operands registers hold by their names.
    fn run(text: &str, shared: &Shared, units: &mut [Registers]) {
        for line in text.lines() {
            let line = line.trim_end_matches(';');
            let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
            let lists: Vec<Vec<&str>> =
                rest.split('{').skip(1).map(|list| list.split_once('}').unwrap().0.split(", ").collect()).collect();
            if name == "xor.b32" {
                let of: Vec<_> = rest.split(", ").collect();
                for unit in units.iter_mut() {
                    let value = unit[of[1]][0] ^ of[2].parse::<i64>().unwrap();
                    unit.insert(of[0].into(), [value, 0]);
                }
            } else if name.starts_with("mov") {
                for unit in units.iter_mut() {
                    unit.insert("none".into(), [0, 0]);
                }
            } else if name.starts_with("ldmatrix") {
                let (at, offset) = rest.split_once('[').unwrap().1.trim_end_matches(']').split_once('+').unwrap();
                let offset: i64 = offset.parse().unwrap();
                let lines: Vec<i64> = units.iter().map(|unit| unit[at][0] + offset).collect();
                assert!(lines.iter().all(|line| line % 16 == 0));
                for (lane, unit) in units.iter_mut().enumerate() {
                    for (matrix, word) in lists[0].iter().enumerate() {
                        let element = |row: usize, column: usize| shared[lines[8 * matrix + row] as usize / 2 + column];
                        let (across, along) = (lane / 4, lane % 4 * 2);
                        let value = if name.contains("trans") {
                            [element(along, across), element(along + 1, across)]
                        } else {
                            [element(across, along), element(across, along + 1)]
                        };
                        unit.insert(word.to_string(), value);
                    }
                }
            } else if name.starts_with("mma") {
                let (mut a, mut b) = ([[0; 16]; 16], [[0; 8]; 16]);
                for (lane, unit) in units.iter().enumerate() {
                    let (group, within) = (lane / 4, lane % 4 * 2);
                    for e in 0..2 {
                        for n in 0..4 {
                            a[group + n % 2 * 8][within + n / 2 * 8 + e] = unit[lists[1][n]][e];
                        }
                        for n in 0..2 {
                            b[within + 8 * n + e][group] = unit[lists[2][n]][e];
                        }
                    }
                }
                for (lane, unit) in units.iter_mut().enumerate() {
                    for n in 0..4 {
                        let (row, column) = (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2);
                        let sum = (0..16).map(|k| a[row][k] * b[k][column]).sum::<i64>() + unit[lists[3][n]][0];
                        unit.insert(lists[0][n].into(), [sum, 0]);
                    }
                }
            } else {
                assert!(["{", "}", ".reg"].contains(&name), "{line}");
            }
        }
    }

    fn value(seed: usize, row: usize, column: usize) -> i64 {
        ((row * 31 + column * 17 + seed * 7) * 2654435761 % 4294967296 / 65536 % 19) as i64 - 9
    }

    /// Puts rows where copies put them, and nonsense where they put nothing.
    fn put(shared: &mut Shared, at: usize, lines: usize, wide: usize, of: impl Fn(usize, usize) -> i64) {
        for column in 0..wide {
            for line in 0..lines {
                let within = place(line as u32, (column % 64 / 8) as u32) as usize;
                shared[(at + column / 64 * lines * LINE + within) / 2 + column % 8] = of(line, column);
            }
        }
    }

    #[test]
    fn rows_are_multiplied_with_rows() {
        let dtype = Dtype::F16;
        for (groups, tile_k, wide) in [(2, 64, 128), (1, 32, 64), (2, 16, 72), (1, 48, 16), (1, 64, 256)] {
            let group_bytes = 64 * wide.div_ceil(64) * LINE;
            let of = RowsOf { groups, lines: 64, group_bytes, tile_k, wide, dtype };
            let padded = wide.next_multiple_of(16);
            let (q_at, k_at) = (0, groups * group_bytes);
            let mut shared = vec![1 << 40; (k_at + tile_k * wide.div_ceil(64) * LINE) / 2];
            let filled = |seed, row, column| if column < wide { value(seed, row, column) } else { 0 };
            for group in 0..groups {
                put(&mut shared, q_at + group * group_bytes, 64, padded, |row, column| {
                    filled(0, group * 64 + row, column)
                });
            }
            put(&mut shared, k_at, tile_k, padded, |row, column| filled(1, row, column));
            let count = groups * tile_k / 2;
            for warp in 0..4 {
                let mut units: Vec<Registers> = (0..32u32)
                    .map(|lane| {
                        let q = q_at + 16 * LINE * warp + lane_of_rows(lane) as usize;
                        let k = k_at + lane_of_columns(lane) as usize;
                        HashMap::from([
                            (format!("${count}"), [q as i64, 0]),
                            (format!("${}", count + 1), [k as i64, 0]),
                        ])
                    })
                    .collect();
                run(&rows_with_rows(of), &shared, &mut units);
                for (lane, unit) in units.iter().enumerate() {
                    for n in 0..count {
                        let (group, i) = (n / (tile_k / 2), n % (tile_k / 2));
                        let row = group * 64 + warp * 16 + lane / 4 + i % 4 / 2 * 8;
                        let key = i / 4 * 8 + lane % 4 * 2 + i % 2;
                        let want: i64 = (0..wide).map(|d| value(0, row, d) * value(1, key, d)).sum();
                        assert_eq!(unit[&format!("${n}")][0], want, "{of:?} {lane} {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn registers_are_multiplied_with_columns() {
        let dtype = Dtype::F16;
        for (groups, tile_k, columns) in [(2, 64, 128), (1, 32, 256), (2, 16, 72), (1, 48, 8), (1, 64, 104)] {
            let of = ColumnsOf { groups, tile_k, columns, dtype };
            let panels = columns.div_ceil(64);
            let mut shared = vec![1 << 40; tile_k * panels * LINE / 2];
            put(&mut shared, 0, tile_k, columns, |row, column| value(2, row, column));
            let (count, steps) = (groups * columns / 2, tile_k / 16);
            let mut units: Vec<Registers> = (0..32usize)
                .map(|lane| {
                    let mut unit = Registers::new();
                    for n in 0..count {
                        unit.insert(format!("${n}"), [1000 + n as i64, 0]);
                    }
                    // As an accumulator's registers are packed: of each eight of columns two rows.
                    for n in 0..groups * 4 * steps {
                        let (group, word) = (n / (4 * steps), n % (4 * steps));
                        let (row, eight) = (group * 16 + lane / 4 + word % 2 * 8, word / 2);
                        let key = eight * 8 + lane % 4 * 2;
                        unit.insert(format!("${}", 2 * count + n), [value(3, row, key), value(3, row, key + 1)]);
                    }
                    let b = lane_of_rows(lane as u32) as i64;
                    unit.insert(format!("${}", 2 * count + groups * 4 * steps), [b, 0]);
                    unit
                })
                .collect();
            run(&registers_with_columns(of), &shared, &mut units);
            for (lane, unit) in units.iter().enumerate() {
                for n in 0..count {
                    let (group, i) = (n / (columns / 2), n % (columns / 2));
                    let row = group * 16 + lane / 4 + i % 4 / 2 * 8;
                    let column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    let sum: i64 = (0..tile_k).map(|key| value(3, row, key) * value(2, key, column)).sum();
                    assert_eq!(unit[&format!("${n}")][0], 1000 + n as i64 + sum, "{of:?} {lane} {n}");
                }
            }
        }
    }
}
