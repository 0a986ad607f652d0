//! Matrix products: fragments in registers, operands in shared memory, and the multiplication itself.
//!
//! A warp accumulates tiles of 16 rows by 8 columns in four registers. The first two registers of lane `l` hold row `l / 4`, the last two
//! the row 8 below. Both pairs hold columns `2 (l % 4)` and the next one. Each row of the first operand is therefore used by four lanes,
//! and the columns of the second operand are the same for every four lanes.

use super::float::{from_bf16, from_f16};
use super::lanes::Line;
use super::program::Element;
use super::tensor::Swizzle;
use std::ops::Range;

/// A column of 16 rows: the upper and the lower half.
pub type Column = [[f32; 8]; 2];
/// A row of 8 columns: the even and the odd ones.
pub type Row = [[f32; 4]; 2];

#[inline(always)]
fn read(element: Element, half: u16) -> f32 {
    if element == Element::Bf16 { from_bf16(half) } else { from_f16(half) }
}

/// First operand of `mma` in registers, as columns.
pub fn left(element: Element, registers: &[&Line], columns: &mut [Column]) {
    match element {
        Element::Tf32 => {
            for (k, column) in columns.iter_mut().enumerate() {
                for half in 0..2 {
                    let line = &registers[k / 4 * 2 + half].0;
                    for row in 0..8 {
                        column[half][row] = f32::from_bits(line[4 * row + k % 4] & 0xFFFF_E000);
                    }
                }
            }
        }
        _ => {
            for (k, column) in columns.iter_mut().enumerate() {
                for half in 0..2 {
                    let line = &registers[k / 8 * 2 + half].0;
                    for row in 0..8 {
                        column[half][row] = read(element, (line[4 * row + k % 8 / 2] >> (16 * (k & 1))) as u16);
                    }
                }
            }
        }
    }
}

/// Second operand of `mma` in registers, as rows.
pub fn right(element: Element, registers: &[&Line], rows: &mut [Row]) {
    for (k, row) in rows.iter_mut().enumerate() {
        for n in 0..8 {
            row[n & 1][n / 2] = match element {
                Element::Tf32 => f32::from_bits(registers[k / 4].0[4 * n + k % 4] & 0xFFFF_E000),
                _ => read(element, (registers[k / 8].0[4 * n + k % 8 / 2] >> (16 * (k & 1))) as u16),
            };
        }
    }
}

/// Descriptor of an operand in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    start: usize,
    leading: usize,
    stride: usize,
    swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes a descriptor; `None` if it has a base offset.
    pub fn new(bits: u64) -> Option<Descriptor> {
        let field = |at: u32| (bits >> at & 0x3FFF) as usize * 16;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        let plain = bits >> 49 & 7 == 0;
        plain.then_some(Descriptor { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// Address of eight consecutive elements: along the inner dimension in row `across`, or, if `transposed`, along rows at depth `across`.
    #[inline(always)]
    fn eight(&self, along: usize, across: usize, transposed: bool) -> usize {
        // Vectors of eight elements in a line.
        let wide = 1usize << self.swizzle as usize;
        let line = across % 8 * 16 * wide;
        let at = match (self.swizzle, transposed) {
            (Swizzle::None, false) => line + across / 8 * self.stride + along * self.leading,
            (Swizzle::None, true) => line + across / 8 * self.leading + along * self.stride,
            (_, false) => line + across / 8 * self.stride + along * 16,
            (_, true) => line + across / 8 * self.stride + along / wide * self.leading + along % wide * 16,
        };
        self.swizzle.apply(self.start + at)
    }

    /// Reads these rows with a depth of 16. Calls `put` with each number's row and depth, and appends the address of every eight elements to
    /// `seen`. Returns the byte range that was read, or the address that lies outside shared memory.
    fn visit(
        &self,
        shared: &[u8],
        element: Element,
        transposed: bool,
        Range { start: first, end }: Range<usize>,
        seen: &mut Vec<u32>,
        mut put: impl FnMut(usize, usize, f32),
    ) -> Result<(usize, usize), usize> {
        let (mut low, mut high) = (usize::MAX, 0);
        let mut eight = |along: usize, across: usize, put: &mut dyn FnMut(usize, f32)| {
            let at = self.eight(along, across, transposed);
            let Some(bytes) = shared.get(at..at + 16).filter(|_| at >= super::SHARED_START) else { return Err(at) };
            (low, high) = (low.min(at), high.max(at + 16));
            seen.push(at as u32);
            for (nth, half) in bytes.chunks_exact(2).enumerate() {
                put(nth, read(element, u16::from_le_bytes([half[0], half[1]])));
            }
            Ok(())
        };
        if transposed {
            for along in first / 8..end / 8 {
                for k in 0..16 {
                    eight(along, k, &mut |nth, x| put(8 * along + nth - first, k, x))?;
                }
            }
        } else {
            for row in first..end {
                for along in 0..2 {
                    eight(along, row, &mut |nth, x| put(row - first, 8 * along + nth, x))?;
                }
            }
        }
        Ok((low, high))
    }

    /// 16 rows of the first operand, from row `first` on, and the addresses that they were read from.
    pub fn left(
        &self,
        shared: &[u8],
        element: Element,
        transposed: bool,
        first: usize,
        columns: &mut [Column; 16],
        seen: &mut Vec<u32>,
    ) -> Result<(usize, usize), usize> {
        self.visit(shared, element, transposed, first..first + 16, seen, |row, k, x| columns[k][row / 8][row % 8] = x)
    }

    /// The second operand: 16 rows of every eight columns, and the addresses that they were read from.
    pub fn right(
        &self,
        shared: &[u8],
        element: Element,
        transposed: bool,
        rows: &mut [Row],
        seen: &mut Vec<u32>,
    ) -> Result<(usize, usize), usize> {
        let count = rows.len() / 2;
        self.visit(shared, element, transposed, 0..count, seen, |n, k, x| rows[n / 8 * 16 + k][n & 1][n % 8 / 2] = x)
    }
}

/// Adds the product of equally many `columns` and `rows` to four lines.
#[cfg(target_feature = "avx512f")]
#[inline(always)]
fn multiply_eight(sums: [*mut Line; 4], columns: &[[[f32; 32]; 2]], rows: &[Row]) {
    use std::arch::x86_64::*;
    // SAFETY: the processor has the features that the compiler was told of, and every pointer is valid for the numbers that are read.
    unsafe {
        let mut lines = sums.map(|line| {
            let line = line.cast::<f32>();
            [_mm512_load_ps(line), _mm512_load_ps(line.add(16))]
        });
        for (column, row) in columns.iter().zip(rows) {
            let factors = [0, 1].map(|parity| _mm512_broadcast_f32x4(_mm_loadu_ps(row[parity].as_ptr())));
            for half in 0..2 {
                for part in 0..2 {
                    let left = _mm512_loadu_ps(column[half].as_ptr().add(16 * part));
                    for parity in 0..2 {
                        let sum = &mut lines[2 * half + parity][part];
                        *sum = _mm512_fmadd_ps(left, factors[parity], *sum);
                    }
                }
            }
        }
        for (line, [low, high]) in sums.iter().zip(lines) {
            _mm512_store_ps(line.cast::<f32>(), low);
            _mm512_store_ps(line.cast::<f32>().add(16), high);
        }
    }
}

/// Adds the product of equally many `columns` and `rows` to four lines.
#[cfg(not(target_feature = "avx512f"))]
#[inline(always)]
fn multiply_eight(sums: [*mut Line; 4], columns: &[[[f32; 32]; 2]], rows: &[Row]) {
    for (nth, line) in sums.into_iter().enumerate() {
        // SAFETY: the caller's four lines are different.
        let line = unsafe { &mut (*line).0 };
        let mut sum = line.map(f32::from_bits);
        for (column, row) in columns.iter().zip(rows) {
            for lane in 0..32 {
                sum[lane] = column[nth / 2][lane].mul_add(row[nth % 2][lane % 4], sum[lane]);
            }
        }
        *line = sum.map(f32::to_bits);
    }
}

/// Adds the product of the first operand, 16 rows given as columns, and of the second operand, rows of every eight columns, to lines: four
/// lines for every eight columns.
///
/// # Safety
///
/// The lines are different and may be written.
pub unsafe fn multiply(sums: &[*mut Line], columns: &[Column], rows: &[Row]) {
    let mut spread = [[[0f32; 32]; 2]; 16];
    for (column, spread) in columns.iter().zip(&mut spread) {
        for half in 0..2 {
            for lane in 0..32 {
                spread[half][lane] = column[half][lane / 4];
            }
        }
    }
    let depth = columns.len();
    for (sums, rows) in sums.chunks_exact(4).zip(rows.chunks_exact(depth)) {
        multiply_eight([sums[0], sums[1], sums[2], sums[3]], &spread[..depth], rows);
    }
}
