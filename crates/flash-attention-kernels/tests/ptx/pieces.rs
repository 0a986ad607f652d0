//! Runs the inline PTX of products on a simulated warp, thread by thread, with 32-bit registers and shared memory in bytes.

use flash_attention_kernels::e4m3::decode;
use flash_attention_kernels::mma::Products;
use flash_attention_kernels::mma::e4m3::missing;
use flash_attention_kernels::mma::products::{ColumnsOf, RowsOf, registers_with_columns, rows_with_rows};
use flash_attention_kernels::mma::tiles::{lane_of_columns, lane_of_rows, lane_of_sums, place};
use flash_attention_kernels::tensor_core::LINE;
use half::{bf16, f16};
use std::collections::HashMap;

/// Registers of a thread.
type Registers = HashMap<String, u32>;

/// The factors of a product in a register: a number of 32 bits truncated to tf32, or two of 16 bits, the low and the high half.
fn factors(of: &str, register: u32) -> Vec<f64> {
    let [low, high] = [register as u16, (register >> 16) as u16];
    match of {
        "tf32" => vec![f32::from_bits(register & !0x1fff) as f64],
        "bf16" => [low, high].map(|bits| bf16::from_bits(bits).to_f64()).to_vec(),
        _ => [low, high].map(|bits| f16::from_bits(bits).to_f64()).to_vec(),
    }
}

/// Runs inline PTX for a warp. `units` are the registers of its threads, by name.
fn run(text: &str, shared: &[u8], units: &mut [Registers]) {
    let word = |at: usize| u32::from_le_bytes(shared[at..at + 4].try_into().unwrap());
    let half = |at: usize| u16::from_le_bytes(shared[at..at + 2].try_into().unwrap()) as u32;
    for line in text.lines() {
        let line = line.trim_end_matches(';');
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        let of: Vec<_> = rest.split(", ").collect();
        let lists: Vec<Vec<&str>> =
            rest.split('{').skip(1).map(|list| list.split_once('}').unwrap().0.split(", ").collect()).collect();
        let address = || {
            let (at, offset) = rest.split_once('[').unwrap().1.trim_end_matches(']').split_once('+').unwrap();
            (at, offset.parse::<u32>().unwrap())
        };
        let value = |unit: &Registers, operand: &str| match operand.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).unwrap(),
            None => operand.parse().unwrap_or_else(|_| unit[operand]),
        };
        // Instructions of a single thread.
        let alone: Option<&dyn Fn(&Registers) -> u32> = match name {
            "xor.b32" => Some(&|unit| unit[of[1]] ^ of[2].parse::<u32>().unwrap()),
            "and.b32" if of[2].starts_with('-') => Some(&|unit| unit[of[1]] & of[2].parse::<i32>().unwrap() as u32),
            "and.b32" => Some(&|unit| unit[of[1]] & value(unit, of[2])),
            "shr.u32" => Some(&|unit| unit[of[1]] >> value(unit, of[2])),
            // (a & b) | c
            "lop3.b32" if of[4] == "0xEA" => Some(&|unit| unit[of[1]] & unit[of[2]] | unit[of[3]]),
            "prmt.b32" => Some(&|unit| {
                let bytes = u64::from(value(unit, of[2])) << 32 | u64::from(value(unit, of[1]));
                let selected = |nth: u32| bytes >> (8 * (value(unit, of[3]) >> (4 * nth) & 7)) & 0xff;
                (0..4).map(|nth| (selected(nth) as u32) << (8 * nth)).sum()
            }),
            "cvt.rn.f16x2.e4m3x2" => Some(&|unit| {
                let half = |nth: u32| f16::from_f32(decode((unit[of[1]] >> (8 * nth)) as u8)).to_bits();
                u32::from(half(1)) << 16 | u32::from(half(0))
            }),
            "add.u32" => Some(&|unit| unit[of[1]].wrapping_add(of[2].parse().unwrap())),
            "add.rn.f32" => Some(&|unit| (f32::from_bits(unit[of[1]]) + f32::from_bits(unit[of[2]])).to_bits()),
            "sub.rn.f32" => Some(&|unit| (f32::from_bits(unit[of[1]]) - f32::from_bits(unit[of[2]])).to_bits()),
            "cvt.rna.tf32.f32" => Some(&|unit| match unit[of[1]] {
                bits if !f32::from_bits(bits).is_finite() => bits,
                bits => (bits + 0x1000) & !0x1fff,
            }),
            "mov.b32" if lists.is_empty() => Some(&|unit| value(unit, of[1])),
            "mov.f32" => Some(&|_| 0),
            "ld.shared.b32" => Some(&|unit| word((unit[address().0] + address().1) as usize)),
            _ => None,
        };
        if let Some(result) = alone {
            for unit in units.iter_mut() {
                let value = result(unit);
                unit.insert(of[0].into(), value);
            }
        } else if name == "mov.b32" {
            for unit in units.iter_mut() {
                let [low, high] = [0, 16].map(|shift| unit[of[2]] >> shift & 0xffff);
                unit.extend([(lists[0][0].into(), low), (lists[0][1].into(), high)]);
            }
        } else if name.starts_with("ldmatrix") {
            let (at, offset) = address();
            let lines: Vec<usize> = units.iter().map(|unit| (unit[at] + offset) as usize).collect();
            assert!(lines.iter().all(|line| line % 16 == 0));
            for (lane, unit) in units.iter_mut().enumerate() {
                for (matrix, register) in lists[0].iter().enumerate() {
                    let line = |row: usize| lines[8 * matrix + row];
                    let value = if name.contains("trans") {
                        let (row, column) = (lane % 4 * 2, lane / 4 * 2);
                        half(line(row) + column) | half(line(row + 1) + column) << 16
                    } else {
                        word(line(lane / 4) + lane % 4 * 4)
                    };
                    unit.insert(register.to_string(), value);
                }
            }
        } else if name.starts_with("mma") {
            let ty = name.rsplit('.').nth(1).unwrap();
            let each = factors(ty, 0).len();
            let (mut a, mut b) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
            for (lane, unit) in units.iter().enumerate() {
                let (group, within) = (lane / 4, lane % 4 * each);
                for n in 0..4 {
                    for (e, value) in factors(ty, unit[lists[1][n]]).into_iter().enumerate() {
                        a[group + n % 2 * 8][within + n / 2 * 4 * each + e] = value;
                    }
                }
                for n in 0..2 {
                    for (e, value) in factors(ty, unit[lists[2][n]]).into_iter().enumerate() {
                        b[within + n * 4 * each + e][group] = value;
                    }
                }
            }
            for (lane, unit) in units.iter_mut().enumerate() {
                for n in 0..4 {
                    let (row, column) = (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2);
                    let sum = (0..16).map(|k| a[row][k] * b[k][column]).sum::<f64>();
                    let sum = sum + f32::from_bits(unit[lists[3][n]]) as f64;
                    unit.insert(lists[0][n].into(), (sum as f32).to_bits());
                }
            }
        } else {
            assert!(["{", "}", ".reg"].contains(&name), "{line}");
        }
    }
}

fn bytes(products: Products) -> usize {
    32 / products.depth()
}

/// A test value that the element type holds exactly. In f32 all bits are used.
fn value(products: Products, seed: usize, row: usize, column: usize) -> f64 {
    let whole = (((row * 31 + column * 17 + seed * 7) * 2654435761 % 4294967296) / 65536 % 19) as f64 - 9.0;
    if products.depth() == 16 { whole } else { (whole + (row * 7 + column * 3 + seed) as f64 / 977.0) as f32 as f64 }
}

fn put(products: Products, to: &mut [u8], value: f64) {
    match products {
        Products::F16 | Products::E4m3 { .. } => to.copy_from_slice(&f16::from_f64(value).to_le_bytes()),
        Products::BF16 => to.copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
        Products::Tf32 | Products::Split => to.copy_from_slice(&(value as f32).to_le_bytes()),
    }
}

/// Writes rows to shared memory, swizzled as the kernels' copies write them.
fn rows(products: Products, shared: &mut [u8], lines: usize, wide: usize, of: impl Fn(usize, usize) -> f64) {
    let (size, panel) = (bytes(products), LINE / bytes(products));
    for column in 0..wide {
        for line in 0..lines {
            let byte = column % panel * size;
            let at = column / panel * lines * LINE + place(line as u32, (byte / 16) as u32) as usize + byte % 16;
            put(products, &mut shared[at..at + size], of(line, column));
        }
    }
}

/// Tolerance of a sum whose terms have this total size.
fn tolerance(products: Products, size: f64) -> f64 {
    match products {
        Products::F16 | Products::BF16 | Products::E4m3 { .. } => 0.0,
        Products::Tf32 => size * 2f64.powi(-10),
        Products::Split => size * 2f64.powi(-21),
    }
}

/// Byte of uninitialised shared memory: such numbers are NaN.
const NOTHING: u8 = 0xff;

const ALL: [Products; 4] = [Products::F16, Products::BF16, Products::Tf32, Products::Split];

#[test]
fn rows_are_multiplied_with_rows() {
    let shapes = [(2, 64, 128usize), (1, 32, 64), (2, 16, 72), (1, 48, 16), (1, 64, 256), (1, 16, 4)];
    for (products, (groups, tile_k, wide)) in ALL.into_iter().flat_map(|of| shapes.map(|shape| (of, shape))) {
        let panels = wide.div_ceil(LINE / bytes(products));
        let group_bytes = 64 * panels * LINE;
        let of = RowsOf { groups, group_bytes, row_lines: 64, tile_k, lines: tile_k, wide, products };
        let padded = wide.next_multiple_of(products.depth());
        let k_at = groups * group_bytes;
        let mut shared = vec![NOTHING; k_at + tile_k * panels * LINE];
        let filled = |seed, row, column| if column < wide { value(products, seed, row, column) } else { 0.0 };
        for group in 0..groups {
            let of_group = |row, column| filled(0, group * 64 + row, column);
            rows(products, &mut shared[group * group_bytes..], 64, padded, of_group);
        }
        rows(products, &mut shared[k_at..], tile_k, padded, |row, column| filled(1, row, column));
        let count = groups * tile_k / 2;
        for warp in 0..4 {
            let mut units: Vec<Registers> = (0..32u32)
                .map(|lane| {
                    let q = (16 * LINE * warp) as u32 + lane_of_rows(lane);
                    let k = k_at as u32 + lane_of_columns(lane);
                    HashMap::from([(format!("${count}"), q), (format!("${}", count + 1), k)])
                })
                .collect();
            run(&rows_with_rows(of), &shared, &mut units);
            for (lane, unit) in units.iter().enumerate() {
                for n in 0..count {
                    let (group, i) = (n / (tile_k / 2), n % (tile_k / 2));
                    let row = group * 64 + warp * 16 + lane / 4 + i % 4 / 2 * 8;
                    let key = i / 4 * 8 + lane % 4 * 2 + i % 2;
                    let products = |d| value(of.products, 0, row, d) * value(of.products, 1, key, d);
                    let want: f64 = (0..wide).map(products).sum();
                    let size: f64 = (0..wide).map(|d| products(d).abs()).sum();
                    let got = f32::from_bits(unit[&format!("${n}")]) as f64;
                    assert!((got - want).abs() <= tolerance(of.products, size), "{of:?} {lane} {n}: {got}, {want}");
                }
            }
        }
    }
}

#[test]
fn registers_are_multiplied_with_columns() {
    let shapes = [(2, 64, 128usize), (1, 32, 256), (2, 16, 72), (1, 48, 8), (1, 64, 104)];
    for (products, (groups, tile_k, columns)) in ALL.into_iter().flat_map(|of| shapes.map(|shape| (of, shape))) {
        let of = ColumnsOf { groups, tile_k, lines: tile_k, columns, products };
        let panels = columns.div_ceil(LINE / bytes(products));
        let mut shared = vec![NOTHING; tile_k * panels * LINE];
        rows(products, &mut shared, tile_k, columns, |row, column| value(products, 2, row, column));
        // Fragments as they are made from an accumulator's registers: 16-bit fragments hold pairs of columns, f32 fragments single
        // columns, each of two rows that are eight apart.
        let (count, depth) = (groups * columns / 2, products.depth());
        let words = 4 * (tile_k / depth);
        let mut units: Vec<Registers> = (0..32usize)
            .map(|lane| {
                let mut unit = Registers::new();
                for n in 0..count {
                    unit.insert(format!("${n}"), (1000.0 + n as f32).to_bits());
                }
                for n in 0..groups * words {
                    let (group, word) = (n / words, n % words);
                    let row = group * 16 + lane / 4 + word % 2 * 8;
                    let value = |key| value(products, 3, row, key);
                    let mut bytes = [0; 4];
                    if depth == 16 {
                        let key = word / 2 * 8 + lane % 4 * 2;
                        put(products, &mut bytes[..2], value(key));
                        put(products, &mut bytes[2..], value(key + 1));
                    } else {
                        put(products, &mut bytes, value(word / 4 * 8 + lane % 4 * 2 + word % 4 / 2));
                    }
                    unit.insert(format!("${}", 2 * count + n), u32::from_le_bytes(bytes));
                }
                unit.insert(format!("${}", 2 * count + groups * words), lane_of_sums(lane as u32, products));
                unit
            })
            .collect();
        run(&registers_with_columns(of), &shared, &mut units);
        for (lane, unit) in units.iter().enumerate() {
            for n in 0..count {
                let (group, i) = (n / (columns / 2), n % (columns / 2));
                let row = group * 16 + lane / 4 + i % 4 / 2 * 8;
                let column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                let one = |key| value(products, 3, row, key) * value(products, 2, key, column);
                let want = 1000.0 + n as f64 + (0..tile_k).map(one).sum::<f64>();
                let size = 1000.0 + n as f64 + (0..tile_k).map(|key| one(key).abs()).sum::<f64>();
                let got = f32::from_bits(unit[&format!("${n}")]) as f64;
                assert!((got - want).abs() <= tolerance(products, size), "{of:?} {lane} {n}: {got}, {want}");
            }
        }
    }
}

/// Splitting f32 into tf32 parts keeps NaN and infinity.
#[test]
fn splitting_keeps_nan_and_infinity() {
    for products in [Products::Tf32, Products::Split] {
        let of = ColumnsOf { groups: 1, tile_k: 16, lines: 16, columns: 8, products };
        for lost in [f32::NAN.to_bits(), 0x7fff_ffff, 0xffff_ffff, f32::INFINITY.to_bits(), f32::NEG_INFINITY.to_bits()]
        {
            let mut shared = vec![NOTHING; 16 * LINE];
            rows(products, &mut shared, 16, 8, |_, _| 1.0);
            let at = place(3, 0) as usize;
            shared[at..at + 4].copy_from_slice(&lost.to_le_bytes());
            let mut units: Vec<Registers> = (0..32u32)
                .map(|lane| {
                    let fragments = (8..16).map(|n| (format!("${n}"), 1f32.to_bits()));
                    let sums = (0..4).map(|n| (format!("${n}"), 0));
                    sums.chain(fragments).chain([("$16".into(), lane_of_sums(lane, products))]).collect()
                })
                .collect();
            run(&registers_with_columns(of), &shared, &mut units);
            let sum = f32::from_bits(units[0]["$0"]);
            assert!(!sum.is_finite(), "{products:?} of {lost:x} gives {sum}");
        }
    }
}

/// A code of e4m3: any but those of NaN.
fn code(seed: usize, row: usize, column: usize) -> u8 {
    let drawn = ((row * 31 + column * 17 + seed * 7) * 2654435761 % 4294967296 / 65536 % 254) as u8;
    if drawn >= 0x7f { drawn + 1 } else { drawn }
}

/// Rows of codes in shared memory, swizzled as the kernels' copies write them.
fn codes(shared: &mut [u8], lines: usize, wide: usize, seed: usize) {
    for (line, column) in (0..lines).flat_map(|line| (0..wide).map(move |column| (line, column))) {
        let byte = column % LINE;
        let at = column / LINE * lines * LINE + place(line as u32, (byte / 16) as u32) as usize + byte % 16;
        shared[at] = code(seed, line, column);
    }
}

/// Keys and values in e4m3, converted with an instruction and without. The latter lacks a factor.
#[test]
fn e4m3_becomes_f16() {
    for instruction in [true, false] {
        let (products, factor) = (Products::E4m3 { instruction }, f64::from(missing(instruction)));
        let (tile_k, lines, wide) = (32, 64, 144);
        let of = RowsOf { groups: 1, group_bytes: 0, row_lines: 16, tile_k, lines, wide, products };
        let k_at = 16 * 3 * LINE;
        let mut shared = vec![NOTHING; k_at + 2 * lines * LINE];
        // Q in the order of K: words 2u and 2u + 1 of 16 columns are word u of the first and the second vector.
        let column = |place: usize| place / 16 * 16 + place % 8 / 2 * 4 + place % 16 / 8 * 2 + place % 2;
        let q = |row: usize, column: usize| value(Products::F16, 0, row, column);
        rows(Products::F16, &mut shared, 16, wide, |row, place| q(row, column(place)));
        codes(&mut shared[k_at..], lines, wide, 1);
        let mut units: Vec<Registers> = (0..32u32)
            .map(|lane| {
                let k = k_at as u32 + lane_of_columns(lane);
                HashMap::from([("$16".into(), lane_of_rows(lane)), ("$17".into(), k)])
            })
            .collect();
        run(&rows_with_rows(of), &shared, &mut units);
        for (lane, n) in (0..32).flat_map(|lane| (0..16).map(move |n| (lane, n))) {
            let (row, key) = (lane / 4 + n % 4 / 2 * 8, n / 4 * 8 + lane % 4 * 2 + n % 2);
            let want: f64 = (0..wide).map(|d| q(row, d) * f64::from(decode(code(1, key, d)))).sum();
            let got = f64::from(f32::from_bits(units[lane][&format!("${n}")])) * factor;
            assert!((got - want).abs() <= want.abs() * 1e-6, "{instruction}, {lane}, {n}: {got}, {want}");
        }

        let columns = 80;
        let of = ColumnsOf { groups: 1, tile_k, lines, columns, products };
        codes(&mut shared, lines, columns, 2);
        let weight = |row: usize, key: usize| value(Products::F16, 3, row, key);
        let mut units: Vec<Registers> = (0..32usize)
            .map(|lane| {
                let words = (0..8).map(|word| {
                    let (row, key) = (lane / 4 + word % 2 * 8, word / 2 * 8 + lane % 4 * 2);
                    let [low, high] = [key, key + 1].map(|key| f16::from_f64(weight(row, key)).to_bits());
                    (format!("${}", columns + word), u32::from(high) << 16 | u32::from(low))
                });
                let sums = (0..columns / 2).map(|n| (format!("${n}"), 0));
                let at = (format!("${}", columns + 8), lane_of_sums(lane as u32, products));
                words.chain(sums).chain([at]).collect()
            })
            .collect();
        run(&registers_with_columns(of), &shared, &mut units);
        for (lane, n) in (0..32).flat_map(|lane| (0..columns / 2).map(move |n| (lane, n))) {
            // A thread has four neighbouring columns of each 16.
            let row = lane / 4 + n % 4 / 2 * 8;
            let column = n / 8 * 16 + lane % 4 * 4 + n % 2 * 2 + n / 4 % 2;
            let want: f64 = (0..tile_k).map(|key| weight(row, key) * f64::from(decode(code(2, key, column)))).sum();
            let got = f64::from(f32::from_bits(units[lane][&format!("${n}")])) * factor;
            assert!((got - want).abs() <= want.abs() * 1e-6, "{instruction}, {lane}, {n}: {got}, {want}");
        }
    }
}
