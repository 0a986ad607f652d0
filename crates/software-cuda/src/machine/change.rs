//! Atomic operations.

use super::float::{from_bf16, from_f16, to_bf16, to_f16};
use super::program::Change;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering as Memory};

/// New contents of memory after an atomic operation.
pub fn changed(change: Change, old: u64, x: u64, other: u64, size: usize) -> u64 {
    let single = |bits: u64| f32::from_bits(bits as u32);
    let halves = |f: fn(u16, u16) -> u16| {
        let of = |shift: u32| u64::from(f((old >> shift) as u16, (x >> shift) as u16)) << shift;
        of(0) | of(16)
    };
    let signed = |x: u64| if size == 8 { x as i64 } else { i64::from(x as i32) };
    let result = match change {
        Change::Add => old.wrapping_add(x),
        Change::AddF32 => u64::from((single(old) + single(x)).to_bits()),
        Change::AddF64 => (f64::from_bits(old) + f64::from_bits(x)).to_bits(),
        Change::AddF16x2 => halves(|a, b| to_f16(from_f16(a) + from_f16(b))),
        Change::AddBf16x2 => halves(|a, b| to_bf16(from_bf16(a) + from_bf16(b))),
        Change::AddF16 => u64::from(to_f16(from_f16(old as u16) + from_f16(x as u16))),
        Change::AddBf16 => u64::from(to_bf16(from_bf16(old as u16) + from_bf16(x as u16))),
        Change::Min(false) => old.min(x),
        Change::Max(false) => old.max(x),
        Change::Min(true) => {
            if signed(old) < signed(x) {
                old
            } else {
                x
            }
        }
        Change::Max(true) => {
            if signed(old) > signed(x) {
                old
            } else {
                x
            }
        }
        Change::Increment => {
            if old >= x {
                0
            } else {
                old + 1
            }
        }
        Change::Decrement => {
            if old == 0 || old > x {
                x
            } else {
                old - 1
            }
        }
        Change::Exchange => x,
        Change::CompareExchange => {
            if old == x {
                other
            } else {
                old
            }
        }
        Change::And => old & x,
        Change::Or => old | x,
        Change::Xor => old ^ x,
    };
    if size == 8 { result } else { result & ((1 << (8 * size)) - 1) }
}

/// Changes memory atomically and returns its old contents.
///
/// # Safety
///
/// The memory is allocated, aligned, and of 2, 4 or 8 bytes.
pub unsafe fn exchange(at: *mut u8, size: usize, change: impl Fn(u64) -> u64) -> u64 {
    match size {
        8 => {
            // SAFETY: the caller guarantees it.
            let atomic = unsafe { AtomicU64::from_ptr(at.cast()) };
            let (mut old, order) = (atomic.load(Memory::SeqCst), Memory::SeqCst);
            while let Err(other) = atomic.compare_exchange_weak(old, change(old), order, order) {
                old = other;
            }
            old
        }
        _ => {
            // Two bytes are changed together with their neighbours, as a word.
            let shift = if size == 2 { 8 * (at as u32 & 2) } else { 0 };
            let mask = if size == 2 { 0xFFFFu32 << shift } else { !0 };
            // SAFETY: the caller guarantees it. An aligned word of four bytes that contains two bytes of an allocation lies in it entirely.
            let atomic = unsafe { AtomicU32::from_ptr(at.map_addr(|at| at & !3).cast()) };
            let (mut old, order) = (atomic.load(Memory::SeqCst), Memory::SeqCst);
            loop {
                let new = (change(u64::from((old & mask) >> shift)) as u32) << shift & mask | old & !mask;
                match atomic.compare_exchange_weak(old, new, order, order) {
                    Ok(_) => return u64::from((old & mask) >> shift),
                    Err(other) => old = other,
                }
            }
        }
    }
}
