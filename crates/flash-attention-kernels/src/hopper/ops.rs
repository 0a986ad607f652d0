//! Every operation that CubeCL has no public name for: warpgroup matrix products, tensor-map loads, `mbarrier`s, named
//! barriers, approximations of the special-function unit.
//!
//! Three kinds: `PtxOp`, an operation of our own that lowers to one piece of inline PTX; thin wrappers of warpgroup
//! operations that CubeCL's intermediate representation has; and descriptors. Names and semantics are those of the PTX
//! ISA 8.7. Addresses of shared memory are byte addresses in the shared window, `u32`.

use crate::problem::Dtype;
use cubecl::prelude::*;
use cubecl_core::ir::ExpandValue;
use cubecl_core::ir::dialect::matrix::*;
use cubecl_core::ir::types::MatrixShape;
use pliron::builtin::attributes::TypeAttr;

mod lowered {
    use cubecl_core::ir::Scope;
    use cubecl_core::ir::prelude::*;
    use cubecl_llvm::shared::intrinsic::i32_ty;
    use cubecl_llvm::shared::to_llvm::{ToLLVMDialect, prelude as lp};
    use pliron::builtin::attributes::{BoolAttr, StringAttr};
    use pliron_llvm::ops::InlineAsmOp;

    /// Inline PTX with at most one result, a register of 32 bits (`=r`: u32, `=f`: f32). CubeCL's own `gpu_asm!` has no
    /// lowering in the LLVM backend.
    #[pliron_op(
        name = "flash.ptx",
        format,
        attributes = (flash_ptx_template: StringAttr, flash_ptx_constraints: StringAttr, flash_ptx_effects: BoolAttr),
        verifier = "succ"
    )]
    pub struct PtxOp;

    impl PtxOp {
        fn new(
            ctx: &mut Context,
            result: Option<TypeHandle>,
            args: Vec<Value>,
            template: &str,
            constraints: &str,
            effects: bool,
        ) -> Self {
            let op = Operation::new(ctx, Self::get_concrete_op_info(), result.into_iter().collect(), args, vec![], 0);
            let op = PtxOp { op };
            op.set_attr_flash_ptx_template(ctx, StringAttr::new(template.to_string()));
            op.set_attr_flash_ptx_constraints(ctx, StringAttr::new(constraints.to_string()));
            op.set_attr_flash_ptx_effects(ctx, BoolAttr::new(effects));
            op
        }
    }

    #[op_interface_impl]
    impl ToLLVMDialect for PtxOp {
        fn rewrite(
            &self,
            ctx: &mut Context,
            rewriter: &mut lp::DialectConversionRewriter,
            _: &lp::OperandsInfo,
        ) -> Result<()> {
            const SET: &str = "the constructor sets it";
            let args: Vec<Value> = self.get_operation().deref(ctx).operands().collect();
            let template: String = self.get_attr_flash_ptx_template(ctx).expect(SET).clone().into();
            let constraints: String = self.get_attr_flash_ptx_constraints(ctx).expect(SET).clone().into();
            let effects: bool = self.get_attr_flash_ptx_effects(ctx).expect(SET).clone().into();
            let ty: TypeHandle = match constraints.get(..2) {
                Some("=r") => i32_ty(ctx),
                Some("=f") => lp::FP32Type::get(ctx).into(),
                _ => lp::VoidType::get(ctx).into(),
            };
            let asm = InlineAsmOp::new(ctx, ty, args, &template, &constraints, effects);
            rewriter.insert_op(ctx, &asm);
            if constraints.starts_with('=') {
                let value = asm.get_operation().deref(ctx).get_result(0);
                rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![value]);
            } else {
                rewriter.erase_operation(ctx, self.get_operation());
            }
            Ok(())
        }
    }

    fn result(scope: &Scope, op: PtxOp) -> Value {
        scope.register(&op);
        op.get_operation().deref(scope.ctx()).get_result(0)
    }

    /// PTX without side effects that returns a register: it may move, and go if nothing uses it.
    pub fn pure(scope: &Scope, ty: TypeHandle, template: &str, constraints: &str, args: Vec<Value>) -> Value {
        result(scope, PtxOp::new(scope.ctx_mut(), Some(ty), args, template, constraints, false))
    }

    /// PTX that depends on memory and returns a register: it stays where it is.
    pub fn effect_value(scope: &Scope, ty: TypeHandle, template: &str, constraints: &str, args: Vec<Value>) -> Value {
        result(scope, PtxOp::new(scope.ctx_mut(), Some(ty), args, template, constraints, true))
    }

    /// PTX that acts on memory or on other units.
    pub fn effect(scope: &Scope, template: &str, constraints: &str, args: Vec<Value>) {
        scope.register(&PtxOp::new(scope.ctx_mut(), None, args, template, constraints, true));
    }
}
use lowered::{effect, effect_value, pure};

// -- special-function unit

/// `2^x`, the hardware's approximation (relative error 2^-22). CubeCL's own needs libdevice, which only a CUDA toolkit on
/// the machine brings; so do `log2` and `tanh`.
#[cube]
pub fn ex2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let (ty, x) = (f32::__expand_as_type(scope), x.read_value(scope));
        ExpandValue::from(pure(scope, ty, "ex2.approx.ftz.f32 $0, $1;", "=f,f", vec![x])).into()
    })
}

/// `log2 x`, the hardware's approximation (absolute error 2^-22).
#[cube]
pub fn lg2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let (ty, x) = (f32::__expand_as_type(scope), x.read_value(scope));
        ExpandValue::from(pure(scope, ty, "lg2.approx.ftz.f32 $0, $1;", "=f,f", vec![x])).into()
    })
}

/// `1 / x`, the hardware's approximation (1 unit in the last place). An exact division costs far more than its time: its
/// slow path is a call, external in the relocatable code that CubeCL links, and beside an external call the assembler
/// serialises every warpgroup product.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    intrinsic!(|scope| {
        let (ty, x) = (f32::__expand_as_type(scope), x.read_value(scope));
        ExpandValue::from(pure(scope, ty, "rcp.approx.ftz.f32 $0, $1;", "=f,f", vec![x])).into()
    })
}

/// Two f32 rounded to 16 bits in one register, `low` in its low half.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] dtype: Dtype) -> u32 {
    intrinsic!(|scope| {
        let (low, high) = (low.read_value(scope), high.read_value(scope));
        let ty = u32::__expand_as_type(scope);
        let template = match dtype {
            Dtype::BF16 => "cvt.rn.bf16x2.f32 $0, $2, $1;",
            _ => "cvt.rn.f16x2.f32 $0, $2, $1;",
        };
        ExpandValue::from(pure(scope, ty, template, "=r,f,f", vec![low, high])).into()
    })
}

// -- barriers

/// Waits until `units` units have come to the named barrier `id`. Barrier 0 is `sync_cube`'s.
#[cube]
pub fn named_sync(id: u32, units: u32) {
    intrinsic!(|scope| {
        let args = vec![id.read_value(scope), units.read_value(scope)];
        effect(scope, "barrier.cta.sync.aligned $0, $1;", "r,r,~{memory}", args)
    })
}

/// Comes to the named barrier `id` and goes on.
#[cube]
pub fn named_arrive(id: u32, units: u32) {
    intrinsic!(|scope| {
        let args = vec![id.read_value(scope), units.read_value(scope)];
        effect(scope, "barrier.cta.arrive.aligned $0, $1;", "r,r,~{memory}", args)
    })
}

/// Makes the `mbarrier` at a shared address, with phases of `count` arrivals. (CubeCL's `Barrier` lowers as a single
/// object only, not as an array with a run-time index.)
#[cube]
pub fn mbarrier_init(at: u32, count: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), count.read_value(scope)];
        effect(scope, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r,~{memory}", args)
    })
}

/// Arrives.
#[cube]
pub fn mbarrier_arrive(at: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope)];
        effect(scope, "mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}", args)
    })
}

/// Arrives, and lets the phase wait for `bytes` bytes of loads.
#[cube]
pub fn mbarrier_expect(at: u32, bytes: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), bytes.read_value(scope)];
        effect(scope, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r,~{memory}", args)
    })
}

/// Waits until the phase of this parity is over.
#[cube]
pub fn mbarrier_wait(at: u32, parity: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), parity.read_value(scope)];
        let template =
            "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@!done bra wait;\n}";
        effect(scope, template, "r,r,~{memory}", args)
    })
}

// -- memory

/// Loads the box of `map` at `(batch, head, row, column)` to a shared address; the bytes count at `barrier`. What lies
/// past the tensor's ends is loaded as zeros.
#[cube]
pub fn tma_load<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    to: u32,
    barrier: u32,
    batch: u32,
    head: u32,
    row: u32,
    #[comptime] column: u32,
) {
    intrinsic!(|scope| {
        let args = vec![
            to.read_value(scope),
            map.value(scope),
            row.read_value(scope),
            head.read_value(scope),
            batch.read_value(scope),
            barrier.read_value(scope),
        ];
        let template = format!(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {{{column}, $2, $3, $4}}], [$5];"
        );
        effect(scope, &template, "r,l,r,r,r,r,~{memory}", args)
    })
}

/// Writes a word of shared memory.
#[cube]
pub fn store_shared(at: u32, value: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), value.read_value(scope)];
        effect(scope, "st.shared.u32 [$0], $1;", "r,r,~{memory}", args)
    })
}

/// Reads a word of shared memory.
#[cube]
pub fn load_shared(at: u32) -> u32 {
    intrinsic!(|scope| {
        let (ty, at) = (u32::__expand_as_type(scope), at.read_value(scope));
        ExpandValue::from(effect_value(scope, ty, "ld.shared.u32 $0, [$1];", "=r,r,~{memory}", vec![at])).into()
    })
}

/// Adds 1 to the first element of `counter`, or makes it 0 if it was `last`; returns what it was.
#[cube]
pub fn take_ticket(counter: &[u32], last: u32) -> u32 {
    intrinsic!(|scope| {
        let ty = u32::__expand_as_type(scope);
        let counter = unsafe { *counter.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![counter, last.read_value(scope)];
        let value = effect_value(scope, ty, "atom.global.inc.u32 $0, [$1], $2;", "=r,l,r,~{memory}", args);
        ExpandValue::from(value).into()
    })
}

/// The address of the start of `tile`, a multiple of 16, in the shared window: a descriptor's low bits hold it, in units
/// of 16 bytes.
#[cube]
pub fn shared_address<E: CubePrimitive>(tile: &[E]) -> u32 {
    u32::cast_from(descriptor::<E>(tile, 16usize, 1024usize) & 0x3FFFu64) << 4
}

// -- warpgroup products

/// Pins registers: no access to them moves across this point.
#[cube]
pub fn pin<E: CubePrimitive>(registers: &Array<E>) {
    intrinsic!(|scope| {
        let list = registers.__extract_list(scope);
        scope.register(&WgmmaFenceOperandOp::new(scope.ctx_mut(), list));
    })
}

/// `wgmma.fence`: before the first product, and after registers that products read or add to were written.
#[cube]
pub fn wgmma_fence() {
    intrinsic!(|scope| scope.register(&WgmmaFenceOp::new(scope.ctx_mut())))
}

/// `wgmma.commit_group`: the products issued since the last one form a group.
#[cube]
pub fn wgmma_commit() {
    intrinsic!(|scope| scope.register(&WgmmaCommitGroupOp::new(scope.ctx_mut())))
}

/// `wgmma.wait_group`: waits until at most the newest `n` groups are in flight. (CubeCL's `Pending::wait` waits for all,
/// which would keep products and softmax from overlapping.)
#[cube]
pub fn wgmma_wait(#[comptime] n: usize) {
    intrinsic!(|scope| scope.register(&WgmmaWaitGroupOp::new(scope.ctx_mut(), n)))
}

/// The descriptor of a tile in shared memory with the 128-byte swizzle; offsets in bytes. Addresses within it count in
/// units of 16 bytes and may be added to.
#[cube]
pub fn descriptor<E: CubePrimitive>(tile: &[E], #[comptime] leading: usize, #[comptime] stride: usize) -> u64 {
    intrinsic!(|scope| {
        let ptr = unsafe { *tile.__expand_as_ptr_method(scope) }.value(scope);
        let op = WgmmaDescriptorOp::new(scope.ctx_mut(), ptr, leading, stride, WgmmaSwizzle::B128);
        scope.register_with_result(&op).into()
    })
}

/// `acc += A · B`, `m64 n k16`, both from shared memory, both K-major.
#[cube]
pub fn mma_shared<E: CubePrimitive>(acc: &Array<f32>, a: u64, b: u64, #[comptime] n: usize) {
    intrinsic!(|scope| {
        let (a, b) = (a.read_value(scope), b.read_value(scope));
        let acc = acc.__extract_list(scope);
        let ty = TypeAttr::new(E::__expand_as_type(scope));
        let shape = MatrixShape { m: 64, n, k: 16 };
        scope.register(&WgmmaOp::new(scope.ctx_mut(), a, b, acc, ty.clone(), ty, shape, WgmmaMajor::K, WgmmaMajor::K));
    })
}

/// `acc += A · B`, `m64 n k16`, A from four packed registers, B from shared memory, MN-major.
#[cube]
pub fn mma_registers<E: CubePrimitive>(acc: &Array<f32>, a: &Array<u32>, b: u64, #[comptime] n: usize) {
    intrinsic!(|scope| {
        let b = b.read_value(scope);
        let a = a.__extract_list(scope);
        let acc = acc.__extract_list(scope);
        let ty = TypeAttr::new(E::__expand_as_type(scope));
        let shape = MatrixShape { m: 64, n, k: 16 };
        scope.register(&WgmmaOp::new(scope.ctx_mut(), a, b, acc, ty.clone(), ty, shape, WgmmaMajor::K, WgmmaMajor::MN));
    })
}
