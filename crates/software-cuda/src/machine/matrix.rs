//! Products of matrices: fragments in registers, operands in shared memory, and the multiplying itself.
//!
//! A warp adds up 16 rows of 8 columns at a time, in four registers: lane `l` has row `l / 4`, and 8 more in the last two, and
//! columns `2 (l % 4)` and the next. So of the first operand eight rows each go to all lanes, every one to four, and of the second
//! four columns to every four lanes.

use super::float::{from_bf16, from_f16};
use super::lanes::Line;
use super::program::Element;
use super::tensor::Swizzle;

/// A column of 16 rows: its halves.
pub type Column = [[f32; 8]; 2];
/// Of a row of 8 columns the even ones, and the odd ones.
pub type Row = [[f32; 4]; 2];

#[inline(always)]
fn read(element: Element, half: u16) -> f32 {
    if element == Element::Bf16 { from_bf16(half) } else { from_f16(half) }
}

/// The first operand of `mma` in registers, by its columns.
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

/// The second operand of `mma` in registers, by its rows.
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

/// An operand in shared memory, as its descriptor tells.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    start: usize,
    leading: usize,
    stride: usize,
    swizzle: Swizzle,
}

impl Descriptor {
    /// Takes a descriptor apart; `None` for one with a base offset.
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

    /// Where eight elements lie that follow each other in memory: along the inner dimension (`transposed`: along rows), of the
    /// row (its inverse) `across`.
    #[inline(always)]
    fn eight(&self, along: usize, across: usize, transposed: bool) -> usize {
        // Eights to a line.
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

    /// Reads `count` rows from `first` on, 16 deep; gives every number with its row and depth, and the address of every eight. The
    /// first and the last byte that was read, or the address that memory does not hold.
    #[allow(clippy::too_many_arguments)]
    fn visit(
        &self,
        shared: &[u8],
        element: Element,
        transposed: bool,
        first: usize,
        count: usize,
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
            for along in first / 8..(first + count) / 8 {
                for k in 0..16 {
                    eight(along, k, &mut |nth, x| put(8 * along + nth - first, k, x))?;
                }
            }
        } else {
            for row in first..first + count {
                for along in 0..2 {
                    eight(along, row, &mut |nth, x| put(row - first, 8 * along + nth, x))?;
                }
            }
        }
        Ok((low, high))
    }

    /// 16 rows of the first operand, from `first` on, and where they were read.
    pub fn left(
        &self,
        shared: &[u8],
        element: Element,
        transposed: bool,
        first: usize,
        columns: &mut [Column; 16],
        seen: &mut Vec<u32>,
    ) -> Result<(usize, usize), usize> {
        self.visit(shared, element, transposed, first, 16, seen, |row, k, x| columns[k][row / 8][row % 8] = x)
    }

    /// The second operand: of every eight columns their 16 rows, and where they were read.
    pub fn right(
        &self,
        shared: &[u8],
        element: Element,
        transposed: bool,
        rows: &mut [Row],
        seen: &mut Vec<u32>,
    ) -> Result<(usize, usize), usize> {
        let count = rows.len() / 2;
        self.visit(shared, element, transposed, 0, count, seen, |n, k, x| rows[n / 8 * 16 + k][n & 1][n % 8 / 2] = x)
    }
}

/// Adds the product of `columns` and `rows`, as many of them, to four lines.
#[cfg(target_feature = "avx512f")]
#[inline(always)]
fn multiply_eight(sums: [*mut Line; 4], columns: &[[[f32; 32]; 2]], rows: &[Row]) {
    use std::arch::x86_64::*;
    // SAFETY: the processor has what the compiler was told of, and all pointers are to as many numbers as are read.
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

/// Adds the product of `columns` and `rows`, as many of them, to four lines.
#[cfg(not(target_feature = "avx512f"))]
#[inline(always)]
fn multiply_eight(sums: [*mut Line; 4], columns: &[[[f32; 32]; 2]], rows: &[Row]) {
    for (nth, line) in sums.into_iter().enumerate() {
        // SAFETY: the caller's lines are four different ones.
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

/// Adds the product of 16 rows, by their columns, and of the second operand, by its rows of every eight columns, to lines: four
/// for every eight.
///
/// # Safety
///
/// The lines are different ones that may be written.
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
