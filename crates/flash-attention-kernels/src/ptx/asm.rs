//! Inline PTX as an operation of CubeCL's intermediate representation.

use cubecl::prelude::*;
use cubecl_core::ir::dialect::memory::{IndexOp, StoreOp};
use cubecl_core::ir::interfaces::side_effects::{MemoryEffect, MemoryEffectsOp};
use cubecl_core::ir::prelude::*;
use cubecl_core::ir::{Scope, read_value};
use cubecl_llvm::shared::intrinsic::i32_ty;
use cubecl_llvm::shared::to_llvm::{ToLLVMDialect, prelude as lp};
use pliron::builtin::attributes::{BoolAttr, StringAttr};
use pliron_llvm::ops::{ExtractValueOp, InlineAsmOp};
use pliron_llvm::types::{StructLayout, StructType};

/// Inline PTX whose results are 32-bit registers (`=r`: u32, `=f`: f32). CubeCL's own `gpu_asm!` has no lowering in the LLVM
/// backend.
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
        results: Vec<TypeHandle>,
        args: Vec<Value>,
        template: &str,
        constraints: &str,
        effects: bool,
    ) -> Self {
        let op = Operation::new(ctx, Self::get_concrete_op_info(), results, args, vec![], 0);
        let op = PtxOp { op };
        op.set_attr_flash_ptx_template(ctx, StringAttr::new(template.to_string()));
        op.set_attr_flash_ptx_constraints(ctx, StringAttr::new(constraints.to_string()));
        op.set_attr_flash_ptx_effects(ctx, BoolAttr::new(effects));
        op
    }
}

/// Reports to CubeCL which buffers a kernel reads and writes. CubeCL skips a launch if an input carries a failure, and marks
/// the outputs of a skipped launch with the reason. Counters of work tiles are not reported: they outlive the launch, and a
/// launch that does not run leaves them unchanged. To the optimiser of CubeCL the operation stays opaque.
#[op_interface_impl]
impl MemoryEffectsOp for PtxOp {
    fn memory_effects(&self, ctx: &Context) -> Vec<MemoryEffect> {
        let template: String = self.get_attr_flash_ptx_template(ctx).expect("the constructor sets it").clone().into();
        let holds = |instructions: &[&str]| instructions.iter().any(|instruction| template.contains(instruction));
        let operand = |nth| self.get_operation().deref(ctx).operands().nth(nth);
        // The destination is operand 0. A copy's source is operand 1.
        let written = holds(&["st.global", "red.global", "red.release.gpu.global"]).then(|| operand(0)).flatten();
        let read =
            holds(&["cp.async.cg.shared.global", "cp.async.ca.shared.global", "cp.async.bulk.shared::cluster.global"]);
        let read = read.then(|| operand(1)).flatten();
        std::iter::once(MemoryEffect::Opaque)
            .chain(written.map(MemoryEffect::Write))
            .chain(read.map(MemoryEffect::Read))
            .collect()
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
        let results: Vec<TypeHandle> = constraints
            .split(',')
            .filter_map(|constraint| match constraint {
                "=r" | "=&r" => Some(i32_ty(ctx)),
                "=f" => Some(lp::FP32Type::get(ctx).into()),
                _ => None,
            })
            .collect();
        let count = results.len();
        let ty: TypeHandle = match count {
            0 => lp::VoidType::get(ctx).into(),
            1 => results[0],
            _ => StructType::get_unnamed(ctx, (results, StructLayout::Unpacked)).into(),
        };
        let asm = InlineAsmOp::new(ctx, ty, args, &template, &constraints, effects);
        rewriter.insert_op(ctx, &asm);
        if count == 0 {
            rewriter.erase_operation(ctx, self.get_operation());
            return Ok(());
        }
        let value = asm.get_operation().deref(ctx).get_result(0);
        let values = match count {
            1 => vec![value],
            _ => (0..count)
                .map(|field| {
                    let field = ExtractValueOp::new(ctx, value, vec![field as u32]).expect("a field of the struct");
                    rewriter.insert_op(ctx, &field);
                    field.get_operation().deref(ctx).get_result(0)
                })
                .collect(),
        };
        rewriter.replace_operation_with_values(ctx, self.get_operation(), values);
        Ok(())
    }
}

fn result(scope: &Scope, op: PtxOp) -> Value {
    results(scope, op, 1)[0]
}

fn results(scope: &Scope, op: PtxOp, count: usize) -> Vec<Value> {
    scope.register(&op);
    let op = op.get_operation().deref(scope.ctx());
    (0..count).map(|nth| op.get_result(nth)).collect()
}

/// PTX without side effects that returns a register. The compiler may move it, or remove it if its result is unused.
pub fn pure(scope: &Scope, ty: TypeHandle, template: &str, constraints: &str, args: Vec<Value>) -> Value {
    result(scope, PtxOp::new(scope.ctx_mut(), vec![ty], args, template, constraints, false))
}

/// PTX that depends on memory and returns a register. The compiler does not move it.
pub fn effect_value(scope: &Scope, ty: TypeHandle, template: &str, constraints: &str, args: Vec<Value>) -> Value {
    result(scope, PtxOp::new(scope.ctx_mut(), vec![ty], args, template, constraints, true))
}

/// PTX that depends on memory and returns several registers.
pub fn effect_values(
    scope: &Scope,
    ty: TypeHandle,
    count: usize,
    template: &str,
    constraints: &str,
    args: Vec<Value>,
) -> Vec<Value> {
    results(scope, PtxOp::new(scope.ctx_mut(), vec![ty; count], args, template, constraints, true), count)
}

/// Pointers to the first `len` registers of an accumulator. An index into an `Array` would be twice as many operations, which
/// every pass of CubeCL's compiler visits.
pub fn pointers(scope: &Scope, registers: &NativeExpand<Array<f32>>, len: usize) -> Vec<Value> {
    let list = registers.__extract_list(scope);
    let pointer = |i| {
        let index = IndexOp::maybe_checked(scope.ctx_mut(), list, scope.const_usize(i), false);
        scope.register_with_result(&index)
    };
    (0..len).map(pointer).collect()
}

/// PTX that sets f32 registers, which are its first operands.
pub fn set(scope: &Scope, template: &str, others: &[&str], registers: &[Value], args: Vec<Value>) {
    let outputs = vec!["=f"; registers.len()];
    let constraints = [&outputs, others, &["~{memory}"]].concat().join(",");
    let ty = f32::__expand_as_type(scope);
    let values = effect_values(scope, ty, registers.len(), template, &constraints, args);
    registers.iter().zip(values).for_each(|(to, value)| scope.register(&StoreOp::new(scope.ctx_mut(), *to, value)));
}

/// PTX that changes f32 registers in place. They are its first operands; `others` are the constraints of the remaining ones.
pub fn in_place(scope: &Scope, template: &str, others: &[&str], registers: &[Value], args: Vec<Value>) {
    let tied: Vec<_> = (0..registers.len()).map(|nth| nth.to_string()).collect();
    let constraints: Vec<_> = tied.iter().map(String::as_str).chain(others.iter().copied()).collect();
    let before = registers.iter().map(|register| read_value(scope, *register));
    set(scope, template, &constraints, registers, before.chain(args).collect());
}

/// PTX that acts on memory or on other threads.
pub fn effect(scope: &Scope, template: &str, constraints: &str, args: Vec<Value>) {
    scope.register(&PtxOp::new(scope.ctx_mut(), vec![], args, template, constraints, true));
}
