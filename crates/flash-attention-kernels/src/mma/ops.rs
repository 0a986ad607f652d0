//! Products of warps, and asynchronous copies. Names and semantics are those of the PTX ISA 8.7. [`ptx`](crate::ptx) tells how they
//! become PTX.

use super::products::{ColumnsOf, RowsOf, registers_with_columns, rows_with_rows};
use crate::ptx::asm::{effect, in_place, pointers, set};
use cubecl::prelude::*;
use cubecl_core::ir::Scope;
use pliron::value::Value;

// -- copies

/// Starts the copy of a 16-byte vector, the `nth` after the first of `from`, to byte `offset` after the shared address `to`. Only the first
/// `bytes` bytes are read, none if `bytes` is 0, and the others become zeros. [`copies_wait()`] waits for the copy.
#[cube]
pub fn copy_vector<E: CubePrimitive>(
    from: &[E],
    #[comptime] nth: usize,
    to: u32,
    #[comptime] offset: usize,
    bytes: u32,
) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded; its pointer is a value of the kernel's code and is not dereferenced here.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![to.read_value(scope), from, bytes.read_value(scope)];
        let template = format!("cp.async.cg.shared.global.L2::128B [$0+{offset}], [$1+{}], 16, $2;", 16 * nth);
        effect(scope, &template, "r,l,r,~{memory}", args)
    })
}

/// Starts the copy of 4 bytes, the first ones of `from`, to the shared address `to`; otherwise like [`copy_vector()`].
#[cube]
pub fn copy_word<E: CubePrimitive>(from: &[E], to: u32, bytes: u32) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded; its pointer is a value of the kernel's code and is not dereferenced here.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![to.read_value(scope), from, bytes.read_value(scope)];
        effect(scope, "cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r,~{memory}", args)
    })
}

/// Puts the copies that this thread has started since the last call into one group.
#[cube]
pub fn copies_commit() {
    intrinsic!(|scope| effect(scope, "cp.async.commit_group;", "~{memory}", vec![]))
}

/// Waits until at most the newest `n` groups of this thread's copies are incomplete.
#[cube]
pub fn copies_wait(#[comptime] n: usize) {
    intrinsic!(|scope| effect(scope, &format!("cp.async.wait_group {n};"), "~{memory}", vec![]))
}

// -- products

/// `acc = A · Bᵀ`. `a` and `b` are the shared addresses from which this thread reads the rows of A and B, at the offsets
/// [`lane_of_rows`](crate::mma::tiles::lane_of_rows()) and [`lane_of_columns`](crate::mma::tiles::lane_of_columns()).
#[cube]
pub fn multiply_rows(acc: &mut Sequence<Array<f32>>, a: u32, b: u32, #[comptime] of: RowsOf) {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope)];
        set(scope, &rows_with_rows(of), &["r"; 2], &pointers_of_groups(scope, acc, of.tile_k / 2), args)
    })
}

/// Pointers to the first `len` registers of each group.
fn pointers_of_groups(scope: &Scope, acc: &SequenceExpand<Array<f32>>, len: usize) -> Vec<Value> {
    acc.iter_cloned().flat_map(|sums| pointers(scope, &sums, len)).collect()
}

/// `acc += A · B`. `fragments` are those of A: for each group, those of all steps. `b` is the shared address from which this thread reads
/// columns of B, at the offset [`lane_of_sums`](crate::mma::tiles::lane_of_sums()).
#[cube]
pub fn multiply_columns(acc: &mut Sequence<Array<f32>>, fragments: &Sequence<u32>, b: u32, #[comptime] of: ColumnsOf) {
    intrinsic!(|scope| {
        let mut args: Vec<_> = fragments.iter_cloned().map(|x| x.read_value(scope)).collect();
        args.push(b.read_value(scope));
        let others = vec!["r"; args.len()];
        let registers = pointers_of_groups(scope, acc, of.columns / 2);
        in_place(scope, &registers_with_columns(of), &others, &registers, args)
    })
}
