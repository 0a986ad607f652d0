//! `wmma`: warp-level products whose fragments have an unspecified register layout. Here it is the layout of `mma.m16n8k16`, or of
//! `mma.m16n8k8` for tf32, with the second operand and the result as two such fragments side by side. f16 fragments have twice the
//! registers that this needs; the others are 0.

use super::block::{Block, Failure};
use super::lanes::LANES;
use super::program::Fragment;
use crate::error::Kind;

/// Rows and columns of all matrices, except for the depth.
const SIDE: usize = 16;

/// Rows and columns of a fragment with elements of `size` bytes. The depth is 8 for tf32 and 16 for half precision.
fn shape(fragment: Fragment, size: usize) -> [usize; 2] {
    match fragment {
        Fragment::A => [SIDE, 32 / size],
        Fragment::B => [32 / size, SIDE],
        Fragment::Sums => [SIDE, SIDE],
    }
}

/// Register, lane and part of the register that hold an element. A register of an operand holds `each` elements along the depth.
fn place(fragment: Fragment, each: usize, row: usize, column: usize) -> (usize, usize, usize) {
    match fragment {
        Fragment::A => (column / (4 * each) * 2 + row / 8, 4 * (row % 8) + column % (4 * each) / each, column % each),
        // The rows are the depth.
        Fragment::B => (column / 8 * 2 + row / (4 * each), 4 * (column % 8) + row % (4 * each) / each, row % each),
        Fragment::Sums => (column / 8 * 4 + row / 8 * 2 + column % 2, 4 * (row % 8) + column % 8 / 2, 0),
    }
}

/// A matrix in shared memory: a line of elements every `stride` bytes.
pub struct Lines {
    /// Address of the first line.
    pub at: u64,
    /// Bytes from one line to the next.
    pub stride: u64,
    /// Bytes of an element.
    pub size: usize,
    /// Whether a line is a column.
    pub columns: bool,
}

/// Registers to write, their spoiled lanes, and the reason.
pub type Loaded = (Vec<[u32; LANES]>, Vec<u32>, Option<Failure>);

/// Loads a fragment of this many registers.
pub fn load(
    block: &mut Block<'_>,
    warp: u32,
    fragment: Fragment,
    lines: &Lines,
    count: usize,
) -> Result<Loaded, Failure> {
    let (mut registers, mut lost, mut why) = (vec![[0; LANES]; count], vec![0; count], None);
    let [rows, columns] = shape(fragment, lines.size);
    let (many, long) = if lines.columns { (columns, rows) } else { (rows, columns) };
    for line in 0..many {
        let at = lines.at + line as u64 * lines.stride;
        check(at, lines)?;
        let pointer = block.shared(at, long * lines.size)?;
        let failure = block.order.read(warp, at as usize, long * lines.size).err();
        let bad = failure.is_some();
        match failure {
            Some(failure) if failure.0 == Kind::Uninitialised => why = Some(failure),
            Some(failure) => return Err(failure),
            None => {}
        }
        for nth in 0..long {
            let (row, column) = if lines.columns { (nth, line) } else { (line, nth) };
            let (register, lane, part) = place(fragment, 4 / lines.size, row, column);
            // SAFETY: the line was just checked to lie in shared memory.
            registers[register][lane] |= unsafe {
                match lines.size {
                    2 => u32::from(pointer.cast::<u16>().add(nth).read_unaligned()) << (16 * part),
                    _ => pointer.cast::<u32>().add(nth).read_unaligned(),
                }
            };
            lost[register] |= u32::from(bad) << lane;
        }
    }
    Ok((registers, lost, why))
}

/// Stores an accumulator; `lost` are its spoiled lanes.
pub fn store(
    block: &mut Block<'_>,
    warp: u32,
    lines: &Lines,
    registers: &[[u32; LANES]],
    lost: &[u32],
    text_line: u32,
) -> Result<(), Failure> {
    for line in 0..SIDE {
        let at = lines.at + line as u64 * lines.stride;
        check(at, lines)?;
        let pointer = block.shared(at, SIDE * lines.size)?;
        block.writes(at as usize, SIDE * lines.size)?;
        block.order.write(warp, at as usize, SIDE * lines.size, text_line)?;
        for nth in 0..SIDE {
            let (row, column) = if lines.columns { (nth, line) } else { (line, nth) };
            let (register, lane, _) = place(Fragment::Sums, 1, row, column);
            // SAFETY: the line was just checked to lie in shared memory.
            unsafe { pointer.cast::<u32>().add(nth).write_unaligned(registers[register][lane]) };
            if lost[register] >> lane & 1 != 0 {
                block.order.forget(at as usize + nth * lines.size, lines.size, text_line);
            }
        }
    }
    Ok(())
}

fn check(at: u64, lines: &Lines) -> Result<(), Failure> {
    match at % 16 {
        0 => Ok(()),
        _ => Err((
            Kind::Alignment,
            format!("a line of a fragment at {at:#x} of shared memory, {} bytes apart", lines.stride),
        )),
    }
}
