//! Warpgroup matrix products (`wgmma`), and one `mma.sync` step.

use super::asm::{in_place, pointers, set};
use crate::dtype::Dtype;
use cubecl::prelude::*;
use cubecl_core::ir::dialect::matrix::*;

// -- warpgroup products. An accumulator is an array of single registers; `len` and `n / 2` are their number.

/// Pins registers: the compiler moves no access to them across this point.
#[cube]
pub fn pin(registers: &mut Array<f32>, #[comptime] len: usize) {
    intrinsic!(|scope| in_place(scope, "", &[], &pointers(scope, registers, len), vec![]))
}

/// `wgmma.fence`: needed before the first product, and after writes to registers that products read or add to.
#[cube]
pub fn wgmma_fence() {
    intrinsic!(|scope| scope.register(&WgmmaFenceOp::new(scope.ctx_mut())))
}

/// `wgmma.commit_group`: groups the products that were issued since the last commit.
#[cube]
pub fn wgmma_commit() {
    intrinsic!(|scope| scope.register(&WgmmaCommitGroupOp::new(scope.ctx_mut())))
}

/// `wgmma.wait_group`: waits until at most the newest `n` groups are in flight. (CubeCL's `Pending::wait` waits for all groups,
/// which would prevent an overlap of products and softmax.)
#[cube]
pub fn wgmma_wait(#[comptime] n: usize) {
    intrinsic!(|scope| scope.register(&WgmmaWaitGroupOp::new(scope.ctx_mut(), n)))
}

/// The descriptor of a tile in shared memory with the 128-byte swizzle. `leading` and `stride` are offsets in bytes. The
/// address in a descriptor counts units of 16 bytes and may be added to.
#[cube]
pub fn descriptor<E: CubePrimitive>(tile: &[E], #[comptime] leading: usize, #[comptime] stride: usize) -> u64 {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let ptr = unsafe { *tile.__expand_as_ptr_method(scope) }.value(scope);
        let op = WgmmaDescriptorOp::new(scope.ctx_mut(), ptr, leading, stride, WgmmaSwizzle::B128);
        scope.register_with_result(&op).into()
    })
}

/// The PTX of a product `m64 n`, in steps of 16 along the inner dimension. All steps are one piece of PTX, because CubeCL and
/// LLVM spend more time on the code around a piece than on its contents.
///
/// `steps`: for each step, PTX that precedes it, and its operands. `adds`: 0 if the old values of the accumulator `$0`, `$1`, …
/// are ignored. `columns`: for each operand in shared memory, whether it is MN-major.
fn wgmma(n: usize, dtype: Dtype, adds: &str, columns: impl AsRef<[bool]>, steps: &[(String, String)]) -> String {
    let transposed: Vec<_> = columns.as_ref().iter().map(|is| u32::from(*is).to_string()).collect();
    let transposed = transposed.join(", ");
    let ty = dtype.name();
    let registers = (0..n / 2).map(|i| format!("${i}")).collect::<Vec<_>>().join(", ");
    let product = format!("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty}");
    let steps = steps.iter().enumerate().map(|(nth, (before, operands))| {
        let adds = if nth == 0 { "first" } else { "others" };
        format!("{before}\n{product} {{{registers}}}, {operands}, {adds}, 1, 1, {transposed};\n")
    });
    format!(
        "{{\n.reg .pred first, others;\n.reg .b64 a, b;\nsetp.ne.b32 first, {adds}, 0;\nsetp.ne.b32 others, 1, 0;\n{}}}",
        steps.collect::<String>()
    )
}

/// `acc = A · B`, `m64 n`, with both operands in shared memory, issued as a group of its own. `steps`: offsets in A and in B of
/// each 16 of the inner dimension, relative to the descriptors `a` and `b`. `columns`: whether A and B are MN-major instead of
/// K-major.
#[cube]
pub fn mma_shared(
    acc: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] steps: Vec<[usize; 2]>,
    #[comptime] columns: [bool; 2],
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) {
    wgmma_fence();
    product_shared(acc, a, b, steps, columns, n, dtype);
    wgmma_commit();
}

#[cube]
fn product_shared(
    acc: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] steps: Vec<[usize; 2]>,
    #[comptime] columns: [bool; 2],
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope)];
        let template = wgmma(n, dtype, "0", columns, &shared_steps(n / 2, &steps));
        set(scope, &template, &["l", "l"], &pointers(scope, acc, n / 2), args)
    })
}

/// `acc += A · B`, or `acc = A · B` if not `adds`, with both operands in shared memory as in [`mma_shared()`]. It needs a fence before
/// it, and a commit after it.
#[cube]
pub fn product_onto(
    acc: &mut Array<f32>,
    a: u64,
    b: u64,
    adds: u32,
    #[comptime] steps: Vec<[usize; 2]>,
    #[comptime] columns: [bool; 2],
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope), adds.read_value(scope)];
        // The registers are operands twice, as results and as what they were before.
        let template = wgmma(n, dtype, &format!("${}", n + 2), columns, &shared_steps(n, &steps));
        in_place(scope, &template, &["l", "l", "r"], &pointers(scope, acc, n / 2), args)
    })
}

/// Steps of a product of two operands in shared memory. Their descriptors are operands `first` and `first + 1`.
fn shared_steps(first: usize, steps: &[[usize; 2]]) -> Vec<(String, String)> {
    let of = |[a, b]: &[usize; 2]| format!("add.s64 a, ${first}, {a};\nadd.s64 b, ${}, {b};", first + 1);
    steps.iter().map(|step| (of(step), "a, b".into())).collect()
}

/// `acc += A · B`, or `acc = A · B` if not `adds`; `m64 n`, with A in registers and B in shared memory, MN-major, issued as a
/// group of its own. A has four packed registers for each step.
#[cube]
pub fn mma_registers(
    acc: &mut Array<f32>,
    a: &Sequence<Array<u32>>,
    b: u64,
    adds: u32,
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) {
    wgmma_fence();
    let mut fragments = Sequence::<u32>::new();
    #[unroll]
    for i in 0..a.len() {
        #[unroll]
        for e in 0..4usize {
            fragments.push(a.index(i)[e]);
        }
    }
    product_registers(acc, &fragments, b, adds, n, dtype);
    wgmma_commit();
}

#[cube]
fn product_registers(
    acc: &mut Array<f32>,
    fragments: &Sequence<u32>,
    b: u64,
    adds: u32,
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) {
    intrinsic!(|scope| {
        let mut args: Vec<_> = fragments.iter_cloned().map(|x| x.read_value(scope)).collect();
        let (first, last) = (n, n + args.len());
        let steps: Vec<_> = (0..args.len() / 4)
            .map(|i| {
                let a: Vec<_> = (0..4).map(|e| format!("${}", first + 4 * i + e)).collect();
                // A step of B is 16 lines of 128 bytes; descriptors count units of 16 bytes.
                (format!("add.s64 b, ${last}, {};", 128 * i), format!("{{{}}}, b", a.join(", ")))
            })
            .collect();
        let template = wgmma(n, dtype, &format!("${}", last + 1), [true], &steps);
        let mut others = vec!["r"; args.len()];
        others.extend(["l", "r"]);
        args.extend([b.read_value(scope), adds.read_value(scope)]);
        in_place(scope, &template, &others, &pointers(scope, acc, n / 2), args)
    })
}

/// `mma.sync`, `m16 n8 k16`: `sums += A · B`. `first` and `second` are the words of A in the thread's two rows, each for the
/// first and the second eight columns. `column` holds the words of B in the thread's column, for the first and the second eight
/// rows.
#[cube]
pub fn mma_step(
    sums: &mut Array<f32>,
    first: (u32, u32),
    second: (u32, u32),
    column: (u32, u32),
    #[comptime] dtype: Dtype,
) {
    let mut words = Sequence::<u32>::new();
    words.push(first.0);
    words.push(second.0);
    words.push(first.1);
    words.push(second.1);
    words.push(column.0);
    words.push(column.1);
    product_of_step(sums, &words, dtype);
}

#[cube]
fn product_of_step(sums: &mut Array<f32>, words: &Sequence<u32>, #[comptime] dtype: Dtype) {
    intrinsic!(|scope| {
        let args: Vec<_> = words.iter_cloned().map(|x| x.read_value(scope)).collect();
        let ty = dtype.name();
        // Operands 4 to 7 are the old sums, tied to the registers of operands 0 to 3.
        let template = format!(
            "mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{$0, $1, $2, $3}}, {{$8, $9, $10, $11}}, {{$12, $13}}, \
             {{$0, $1, $2, $3}};"
        );
        in_place(scope, &template, &["r"; 6], &pointers(scope, sums, 4), args)
    })
}
