//! Every operation that CubeCL has no public name for: warpgroup matrix products, tensor-map loads, `mbarrier`s, named
//! barriers, approximations of the special-function unit.
//!
//! Nearly all is `PtxOp`, an operation of our own that lowers to one piece of inline PTX; fences and descriptors are those of
//! CubeCL's intermediate representation. It has products, too, but they carry an accumulator as one vector, and taking that
//! apart for each of them was more than half of the time that LLVM took for a kernel. Names and semantics are those of the PTX
//! ISA 8.7. Addresses of shared memory are byte addresses in the shared window, `u32`.

use crate::problem::Dtype;
use cubecl::prelude::*;
use cubecl_core::ir::ExpandValue;
use cubecl_core::ir::dialect::matrix::*;

pub(crate) mod lowered {
    use cubecl_core::ir::Scope;
    use cubecl_core::ir::interfaces::side_effects::{MemoryEffect, MemoryEffectsOp};
    use cubecl_core::ir::prelude::*;
    use cubecl_llvm::shared::intrinsic::i32_ty;
    use cubecl_llvm::shared::to_llvm::{ToLLVMDialect, prelude as lp};
    use pliron::builtin::attributes::{BoolAttr, StringAttr};
    use pliron_llvm::ops::{ExtractValueOp, InlineAsmOp};
    use pliron_llvm::types::{StructLayout, StructType};

    /// Inline PTX whose results are registers of 32 bits (`=r`: u32, `=f`: f32). CubeCL's own `gpu_asm!` has no lowering in
    /// the LLVM backend.
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

    /// Which buffers a kernel writes, as CubeCL has to know: outputs of a launch that does not run carry the reason. Counters of work tiles
    /// do not count: they outlive the launch, and one that does not run leaves them as they were. To the optimiser of CubeCL the operation
    /// stays opaque.
    #[op_interface_impl]
    impl MemoryEffectsOp for PtxOp {
        fn memory_effects(&self, ctx: &Context) -> Vec<MemoryEffect> {
            let template: String =
                self.get_attr_flash_ptx_template(ctx).expect("the constructor sets it").clone().into();
            let writes = ["st.global", "red.global"].iter().any(|write| template.contains(write));
            // The address comes first.
            let written = self.get_operation().deref(ctx).operands().next().filter(|_| writes);
            std::iter::once(MemoryEffect::Opaque).chain(written.map(MemoryEffect::Write)).collect()
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

    /// PTX without side effects that returns a register: it may move, and go if nothing uses it.
    pub fn pure(scope: &Scope, ty: TypeHandle, template: &str, constraints: &str, args: Vec<Value>) -> Value {
        result(scope, PtxOp::new(scope.ctx_mut(), vec![ty], args, template, constraints, false))
    }

    /// PTX that depends on memory and returns a register: it stays where it is.
    pub fn effect_value(scope: &Scope, ty: TypeHandle, template: &str, constraints: &str, args: Vec<Value>) -> Value {
        result(scope, PtxOp::new(scope.ctx_mut(), vec![ty], args, template, constraints, true))
    }

    /// PTX that depends on memory and returns registers.
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

    /// PTX that changes registers of f32, which come first among its operands, by the constraints of the other ones.
    /// Returns what they hold then.
    pub fn in_place(
        scope: &Scope,
        ty: TypeHandle,
        template: &str,
        others: &[&str],
        registers: Vec<Value>,
        args: Vec<Value>,
    ) -> Vec<Value> {
        let count = registers.len();
        let tied = (0..count).map(|nth| nth.to_string());
        let others = others.iter().copied().chain(["~{memory}"]).map(String::from);
        let constraints: Vec<_> = vec!["=f".to_string(); count].into_iter().chain(tied).chain(others).collect();
        let operands = registers.into_iter().chain(args).collect();
        let constraints = constraints.join(",");
        results(scope, PtxOp::new(scope.ctx_mut(), vec![ty; count], operands, template, &constraints, true), count)
    }

    /// PTX that acts on memory or on other threads.
    pub fn effect(scope: &Scope, template: &str, constraints: &str, args: Vec<Value>) {
        scope.register(&PtxOp::new(scope.ctx_mut(), vec![], args, template, constraints, true));
    }
}
use lowered::{effect, effect_value, effect_values, in_place, pure};

// -- special-function unit

/// What the special-function unit makes of an f32.
fn approximation(scope: &cubecl_core::ir::Scope, name: &str, x: pliron::value::Value) -> ExpandValue {
    let ty = f32::__expand_as_type(scope);
    pure(scope, ty, &format!("{name}.approx.ftz.f32 $0, $1;"), "=f,f", vec![x]).into()
}

/// `a · b`, rounded whatever is done with it: no compiler makes a fused multiply-add of it.
#[cube]
pub fn multiply_rounded(a: f32, b: f32) -> f32 {
    intrinsic!(|scope| {
        let (a, b) = (a.read_value(scope), b.read_value(scope));
        let ty = f32::__expand_as_type(scope);
        ExpandValue::from(pure(scope, ty, "mul.rn.f32 $0, $1, $2;", "=f,f,f", vec![a, b])).into()
    })
}

/// `2^x`, the hardware's approximation (relative error 2^-22). CubeCL's own needs libdevice, which only a CUDA toolkit on
/// the machine brings; so do `log2` and `tanh`.
#[cube]
pub fn ex2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        approximation(scope, "ex2", x).into()
    })
}

/// `log2 x`, the hardware's approximation (absolute error 2^-22).
#[cube]
pub fn lg2(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        approximation(scope, "lg2", x).into()
    })
}

/// `1 / x`, the hardware's approximation (1 thread in the last place). An exact division costs far more than its time: its
/// slow path is a call, external in the relocatable code that CubeCL links, and beside an external call the assembler
/// serialises every warpgroup product.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        approximation(scope, "rcp", x).into()
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

/// `a · b + c` of both halves of packed registers.
#[cube]
pub fn fma_packed(a: u32, b: u32, c: u32, #[comptime] dtype: Dtype) -> u32 {
    intrinsic!(|scope| {
        let args = vec![a.read_value(scope), b.read_value(scope), c.read_value(scope)];
        let ty = u32::__expand_as_type(scope);
        let template = match dtype {
            Dtype::BF16 => "fma.rn.bf16x2 $0, $1, $2, $3;",
            _ => "fma.rn.f16x2 $0, $1, $2, $3;",
        };
        ExpandValue::from(pure(scope, ty, template, "=r,r,r,r", args)).into()
    })
}

// -- barriers

/// Waits until `units` threads have come to the named barrier `id`. Barrier 0 is `sync_cube`'s.
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

/// An instruction for one thread of a warp. The branch stays one of the warp as a whole: what the assembler has to take for
/// divergent makes it guard every shuffle that follows.
fn elected(instruction: &str) -> String {
    format!("{{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one {instruction}\n}}")
}

/// One thread of the warp arrives, and lets the phase wait for `bytes` bytes of loads. The whole warp must call it.
#[cube]
pub fn mbarrier_expect(at: u32, bytes: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), bytes.read_value(scope)];
        effect(scope, &elected("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"), "r,r,~{memory}", args)
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

/// One thread of the warp loads the box of `map` at `(batch, head, row, column)` to a shared address; the bytes count at
/// `barrier`. What lies past the tensor's ends is loaded as zeros. The whole warp must call it.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn tma_load<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    to: u32,
    barrier: u32,
    batch: u32,
    head: u32,
    row: u32,
    column: u32,
) {
    intrinsic!(|scope| {
        let args = vec![
            to.read_value(scope),
            map.value(scope),
            column.read_value(scope),
            row.read_value(scope),
            head.read_value(scope),
            batch.read_value(scope),
            barrier.read_value(scope),
        ];
        let template = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], \
             [$1, {$2, $3, $4, $5}], [$6];";
        effect(scope, &elected(template), "r,l,r,r,r,r,r,~{memory}", args)
    })
}

/// One thread of the warp loads `bytes` bytes from element `from` of `source` on to a shared address; they count at `barrier`. All
/// are multiples of 16 bytes. The whole warp must call it.
#[cube]
pub fn bulk_load(source: &[u32], from: usize, #[comptime] bytes: usize, to: u32, barrier: u32) {
    let element = &source[from..from + 1];
    bulk_load_from(element, bytes, to, barrier);
}

#[cube]
fn bulk_load_from(element: &[u32], #[comptime] bytes: usize, to: u32, barrier: u32) {
    intrinsic!(|scope| {
        // SAFETY: the reference is one of a kernel that is being expanded; its pointer is a value of the kernel's code, which nobody follows here.
        let from = unsafe { *element.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![to.read_value(scope), from, barrier.read_value(scope)];
        let template =
            format!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {bytes}, [$2];");
        effect(scope, &elected(&template), "r,l,r,~{memory}", args)
    })
}

/// One thread of the warp asks for the box of `map` at `(batch, head, row, column)` to be brought to the second-level cache. The
/// whole warp must call it.
#[cube]
pub fn tma_prefetch<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    batch: u32,
    head: u32,
    row: u32,
    #[comptime] column: u32,
) {
    intrinsic!(|scope| {
        let args = vec![map.value(scope), row.read_value(scope), head.read_value(scope), batch.read_value(scope)];
        let template = format!("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$0, {{{column}, $1, $2, $3}}];");
        effect(scope, &elected(&template), "l,r,r,r,~{memory}", args)
    })
}

/// Writes two words to the vector of `to` of this number, if `live`. No branch: after one, the assembler takes the warp for
/// divergent. (Indexing computes an address for each vector: numbers are added in 32 bits, which no immediate offset can do.)
#[cube]
pub fn store_pair(to: &mut [Vector<u32, Const<2>>], #[comptime] nth: usize, low: u32, high: u32, live: bool) {
    intrinsic!(|scope| {
        // SAFETY: the reference is one of a kernel that is being expanded; its pointer is a value of the kernel's code, which nobody follows here.
        let to = unsafe { *to.__expand_as_ptr_method(scope) }.value(scope);
        let template = format!("@$3 st.global.v2.u32 [$0+{}], {{$1, $2}};", 8 * nth);
        let args = vec![to, low.read_value(scope), high.read_value(scope), live.read_value(scope)];
        effect(scope, &template, "l,r,r,b,~{memory}", args)
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

/// Two f32 of shared memory.
#[cube]
pub fn load_shared_pair(at: u32) -> Sequence<f32> {
    intrinsic!(|scope| {
        let (ty, at) = (f32::__expand_as_type(scope), at.read_value(scope));
        let template = "ld.shared.v2.f32 {$0, $1}, [$2];";
        sequence(scope, effect_values(scope, ty, 2, template, "=f,=f,r,~{memory}", vec![at]))
    })
}

/// Four 8 x 8 tiles of 16 bits from shared memory. Of the `n`-th tile, thread `8 n + i` gives the address of row `i`, 16 bytes;
/// each thread `u` gets columns `2 (u % 4)` and the next of row `u / 4` of each tile, as an accumulator's registers lie; if
/// `transposed`, rows and columns change places.
#[cube]
pub fn load_tiles(at: u32, #[comptime] transposed: bool) -> Sequence<u32> {
    intrinsic!(|scope| {
        let (ty, at) = (u32::__expand_as_type(scope), at.read_value(scope));
        let transposed = if transposed { ".trans" } else { "" };
        let template = format!("ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4];");
        sequence(scope, effect_values(scope, ty, 4, &template, "=r,=r,=r,=r,r,~{memory}", vec![at]))
    })
}

/// The opposite of [`load_tiles()`]: each thread gives what it would get.
#[cube]
pub fn store_tiles(at: u32, tiles: &Array<u32>) {
    store_tiles_of(at, tiles[0], tiles[1], tiles[2], tiles[3]);
}

#[cube]
fn store_tiles_of(at: u32, a: u32, b: u32, c: u32, d: u32) {
    intrinsic!(|scope| {
        let args = [at, a, b, c, d].map(|x| x.read_value(scope)).to_vec();
        let template = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};";
        effect(scope, template, "r,r,r,r,r,~{memory}", args)
    })
}

/// Adds four f32 to those from element `128 nth` of `sums` on, a multiple of 16 bytes.
#[cube]
pub fn add_quad(sums: &[f32], #[comptime] nth: usize, a: f32, b: f32, c: f32, d: f32) {
    intrinsic!(|scope| {
        // SAFETY: the reference is one of a kernel that is being expanded; its pointer is a value of the kernel's code, which nobody follows here.
        let sums = unsafe { *sums.__expand_as_ptr_method(scope) }.value(scope);
        let mut args = vec![sums];
        args.extend([a, b, c, d].map(|x| x.read_value(scope)));
        let template = format!("red.global.add.v4.f32 [$0+{}], {{$1, $2, $3, $4}};", 512 * nth);
        effect(scope, &template, "l,f,f,f,f,~{memory}", args)
    })
}

/// One of the two numbers of a packed register, as f32.
#[cube]
pub fn unpack(packed: u32, #[comptime] high: bool, #[comptime] dtype: Dtype) -> f32 {
    if comptime!(dtype == Dtype::BF16) {
        // bf16 is the upper half of f32.
        f32::reinterpret(if comptime!(high) { packed & 0xFFFF_0000 } else { packed << 16 })
    } else {
        half_to_f32(packed, high)
    }
}

#[cube]
fn half_to_f32(packed: u32, #[comptime] high: bool) -> f32 {
    intrinsic!(|scope| {
        let (ty, packed) = (f32::__expand_as_type(scope), packed.read_value(scope));
        let half = if high { "_, half" } else { "half, _" };
        let template = format!("{{\n.reg .b16 half;\nmov.b32 {{{half}}}, $1;\ncvt.f32.f16 $0, half;\n}}");
        ExpandValue::from(pure(scope, ty, &template, "=f,r", vec![packed])).into()
    })
}

/// Thread 0 of the warp adds 1 to the first element of `counter`, or makes it 0 if it was `last`; returns to it what it was.
/// The whole warp must call it.
#[cube]
pub fn take_ticket(counter: &[u32], last: u32) -> u32 {
    intrinsic!(|scope| {
        let ty = u32::__expand_as_type(scope);
        // SAFETY: the reference is one of a kernel that is being expanded; its pointer is a value of the kernel's code, which nobody follows here.
        let counter = unsafe { *counter.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![counter, last.read_value(scope)];
        let template = "{\n.reg .pred p;\n.reg .u32 lane;\nmov.u32 lane, %laneid;\nsetp.eq.u32 p, lane, 0;\nmov.u32 $0, 0;\n\
             @p atom.global.inc.u32 $0, [$1], $2;\n}";
        let value = effect_value(scope, ty, template, "=&r,l,r,~{memory}", args);
        ExpandValue::from(value).into()
    })
}

/// The address of the start of `tile`, a multiple of 16, in the shared window: a descriptor's low bits hold it, in threads
/// of 16 bytes.
#[cube]
pub fn shared_address<E: CubePrimitive>(tile: &[E]) -> u32 {
    u32::cast_from(descriptor::<E>(tile, 16usize, 1024usize) & 0x3FFFu64) << 4
}

// -- warpgroup products. Accumulators lie in registers one by one; `len` and `n / 2` of them.

/// What registers hold.
#[cube]
pub(crate) fn held(registers: &Array<f32>, #[comptime] len: usize) -> Sequence<f32> {
    let mut held = Sequence::<f32>::new();
    #[unroll]
    for i in 0..len {
        held.push(registers[i]);
    }
    held
}

/// Lets them hold this.
#[cube]
pub(crate) fn hold(registers: &mut Array<f32>, values: &Sequence<f32>, #[comptime] len: usize) {
    #[unroll]
    for i in 0..len {
        registers[i] = *values.index(i);
    }
}

/// Pins registers: no access to them moves across this point.
#[cube]
pub fn pin(registers: &mut Array<f32>, #[comptime] len: usize) {
    let after = pinned(&held(&*registers, len));
    hold(registers, &after, len);
}

#[cube]
fn pinned(held: &Sequence<f32>) -> Sequence<f32> {
    intrinsic!(|scope| {
        let ty = f32::__expand_as_type(scope);
        let registers = held.iter_cloned().map(|x| x.read_value(scope)).collect();
        sequence(scope, in_place(scope, ty, "", &[], registers, vec![]))
    })
}

/// Values as what a `#[cube]` function returns.
pub(crate) fn sequence<T: CubePrimitive>(
    scope: &cubecl_core::ir::Scope,
    values: Vec<pliron::value::Value>,
) -> SequenceExpand<T> {
    let mut all = Sequence::<T>::__expand_new(scope);
    values.into_iter().for_each(|value| all.__expand_push_method(scope, ExpandValue::from(value).into()));
    all
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
/// threads of 16 bytes and may be added to.
#[cube]
pub fn descriptor<E: CubePrimitive>(tile: &[E], #[comptime] leading: usize, #[comptime] stride: usize) -> u64 {
    intrinsic!(|scope| {
        // SAFETY: the reference is one of a kernel that is being expanded; its pointer is a value of the kernel's code, which nobody follows here.
        let ptr = unsafe { *tile.__expand_as_ptr_method(scope) }.value(scope);
        let op = WgmmaDescriptorOp::new(scope.ctx_mut(), ptr, leading, stride, WgmmaSwizzle::B128);
        scope.register_with_result(&op).into()
    })
}

/// A product `m64 n` in steps of 16 along its inner dimension, as one piece of PTX: what surrounds a piece takes CubeCL and
/// LLVM more time than what is in it. Of each step: what comes before it, and its operands. `adds`: 0 if what the accumulator
/// `$0`, `$1`, … holds does not count. `columns`: for each operand in shared memory, whether it is MN-major.
fn wgmma(n: usize, dtype: Dtype, adds: &str, columns: impl AsRef<[bool]>, steps: &[(String, String)]) -> String {
    let transposed: Vec<_> = columns.as_ref().iter().map(|is| u32::from(*is).to_string()).collect();
    let transposed = transposed.join(", ");
    let ty = match dtype {
        Dtype::BF16 => "bf16",
        _ => "f16",
    };
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

/// `acc = A · B`, `m64 n`, both from shared memory. `steps`: where 16 of the inner dimension lie in A and in B, from `a` and `b`
/// on. `columns`: whether A and B are MN-major, not K-major.
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
    let after = product_shared(a, b, steps, columns, n, dtype);
    hold(acc, &after, comptime!(n / 2));
}

#[cube]
fn product_shared(
    a: u64,
    b: u64,
    #[comptime] steps: Vec<[usize; 2]>,
    #[comptime] columns: [bool; 2],
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) -> Sequence<f32> {
    intrinsic!(|scope| {
        let count = n / 2;
        let args = vec![a.read_value(scope), b.read_value(scope)];
        let template = wgmma(n, dtype, "0", columns, &shared_steps(count, &steps));
        let constraints = "=f,".repeat(count) + "l,l,~{memory}";
        sequence(scope, effect_values(scope, f32::__expand_as_type(scope), count, &template, &constraints, args))
    })
}

/// Steps of a product of two operands in shared memory, whose descriptors come from operand `first` on.
fn shared_steps(first: usize, steps: &[[usize; 2]]) -> Vec<(String, String)> {
    let of = |[a, b]: &[usize; 2]| format!("add.s64 a, ${first}, {a};\nadd.s64 b, ${}, {b};", first + 1);
    steps.iter().map(|step| (of(step), "a, b".into())).collect()
}

/// `acc += A · B`, or `acc = A · B` if not `adds`; `m64 n`, A from registers, B from shared memory, MN-major. Of A four packed
/// registers a step; `stride`: from a step of B to the next.
#[cube]
pub fn mma_registers(
    acc: &mut Array<f32>,
    a: &Sequence<Array<u32>>,
    b: u64,
    adds: u32,
    #[comptime] stride: usize,
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) {
    let before = held(&*acc, comptime!(n / 2));
    let mut fragments = Sequence::<u32>::new();
    #[unroll]
    for i in 0..a.len() {
        #[unroll]
        for e in 0..4usize {
            fragments.push(a.index(i)[e]);
        }
    }
    let after = product_registers(&before, &fragments, b, adds, stride, n, dtype);
    hold(acc, &after, comptime!(n / 2));
}

#[cube]
fn product_registers(
    held: &Sequence<f32>,
    fragments: &Sequence<u32>,
    b: u64,
    adds: u32,
    #[comptime] stride: usize,
    #[comptime] n: usize,
    #[comptime] dtype: Dtype,
) -> Sequence<f32> {
    intrinsic!(|scope| {
        let registers: Vec<_> = held.iter_cloned().map(|x| x.read_value(scope)).collect();
        let mut args: Vec<_> = fragments.iter_cloned().map(|x| x.read_value(scope)).collect();
        let (first, last) = (n, n + args.len());
        let steps: Vec<_> = (0..args.len() / 4)
            .map(|i| {
                let a: Vec<_> = (0..4).map(|e| format!("${}", first + 4 * i + e)).collect();
                (format!("add.s64 b, ${last}, {};", i * stride), format!("{{{}}}, b", a.join(", ")))
            })
            .collect();
        let template = wgmma(n, dtype, &format!("${}", last + 1), [true], &steps);
        let mut others = vec!["r"; args.len()];
        others.extend(["l", "r"]);
        args.extend([b.read_value(scope), adds.read_value(scope)]);
        sequence(scope, in_place(scope, f32::__expand_as_type(scope), &template, &others, registers, args))
    })
}

/// `mma.sync`, `m16 n8 k16`: `sums += A · B`. `first`, `second`: the words of A in a thread's two rows, of its first eight columns and its second.
/// `column`: those of B in its column, of its first eight rows and its second.
#[cube]
pub fn mma_step(
    sums: &mut Array<f32>,
    first: (u32, u32),
    second: (u32, u32),
    column: (u32, u32),
    #[comptime] dtype: Dtype,
) {
    let before = held(&*sums, 4usize);
    let mut words = Sequence::<u32>::new();
    words.push(first.0);
    words.push(second.0);
    words.push(first.1);
    words.push(second.1);
    words.push(column.0);
    words.push(column.1);
    let after = product_of_step(&before, &words, dtype);
    hold(sums, &after, 4usize);
}

#[cube]
fn product_of_step(held: &Sequence<f32>, words: &Sequence<u32>, #[comptime] dtype: Dtype) -> Sequence<f32> {
    intrinsic!(|scope| {
        let registers: Vec<_> = held.iter_cloned().map(|x| x.read_value(scope)).collect();
        let args: Vec<_> = words.iter_cloned().map(|x| x.read_value(scope)).collect();
        let ty = if dtype == Dtype::BF16 { "bf16" } else { "f16" };
        // Operands 4 to 7 are the sums as they were, in the registers of 0 to 3.
        let template = format!(
            "mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{$0, $1, $2, $3}}, {{$8, $9, $10, $11}}, {{$12, $13}}, \
             {{$0, $1, $2, $3}};"
        );
        let others = ["r"; 6];
        sequence(scope, in_place(scope, f32::__expand_as_type(scope), &template, &others, registers, args))
    })
}

/// Writes one of the two numbers of a packed register to the first element of `to`, if `live`. No branch, as for [`store_pair()`].
#[cube]
pub fn store_half<E: CubePrimitive>(to: &mut [E], packed: u32, #[comptime] high: bool, live: bool) {
    intrinsic!(|scope| {
        // SAFETY: the reference is one of a kernel that is being expanded; its pointer is a value of the kernel's code, which nobody follows here.
        let to = unsafe { *to.__expand_as_ptr_method(scope) }.value(scope);
        let halves = if high { "_, half" } else { "half, _" };
        let template = format!("{{\n.reg .b16 half;\nmov.b32 {{{halves}}}, $1;\n@$2 st.global.b16 [$0], half;\n}}");
        effect(scope, &template, "l,r,b,~{memory}", vec![to, packed.read_value(scope), live.read_value(scope)])
    })
}

/// The same number, which the compiler takes for another one each time: what is computed from it is computed where it is needed,
/// not once before a loop, which takes a register for each.
#[cube]
pub fn opaque(x: u32) -> u32 {
    intrinsic!(|scope| {
        let (ty, x) = (u32::__expand_as_type(scope), x.read_value(scope));
        ExpandValue::from(effect_value(scope, ty, "mov.u32 $0, $1;", "=r,r", vec![x])).into()
    })
}
