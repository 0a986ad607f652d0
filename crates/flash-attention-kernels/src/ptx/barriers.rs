//! Named barriers, `mbarrier`s, the counter of work tiles, and turns of thread blocks.

use super::asm::{effect, effect_value};
use cubecl::prelude::*;
use cubecl_core::ir::ExpandValue;

// -- barriers

/// Arrives at the named barrier `id` and waits until `units` threads have arrived. Barrier 0 belongs to `sync_cube`.
#[cube]
pub fn named_sync(id: u32, units: u32) {
    intrinsic!(|scope| {
        let args = vec![id.read_value(scope), units.read_value(scope)];
        effect(scope, "barrier.cta.sync.aligned $0, $1;", "r,r,~{memory}", args)
    })
}

/// Arrives at the named barrier `id` without waiting.
#[cube]
pub fn named_arrive(id: u32, units: u32) {
    intrinsic!(|scope| {
        let args = vec![id.read_value(scope), units.read_value(scope)];
        effect(scope, "barrier.cta.arrive.aligned $0, $1;", "r,r,~{memory}", args)
    })
}

/// Initialises the `mbarrier` at a shared address, with phases of `count` arrivals. (CubeCL's `Barrier` lowers as a single
/// object only, not as an array with a run-time index.)
#[cube]
pub fn mbarrier_init(at: u32, count: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), count.read_value(scope)];
        effect(scope, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r,~{memory}", args)
    })
}

/// Arrives at the `mbarrier` at a shared address.
#[cube]
pub fn mbarrier_arrive(at: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope)];
        effect(scope, "mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}", args)
    })
}

/// Arrives once for the warp at the `mbarrier` at a shared address.
#[cube]
pub fn mbarrier_release(at: u32) {
    let lane = UNIT_POS % 32;
    if lane == 0 {
        mbarrier_arrive(at);
    }
}

/// Wraps an instruction so that one elected thread of the warp executes it. The branch stays warp-uniform: after a branch that
/// the assembler considers divergent, it guards every shuffle that follows.
pub(super) fn elected(instruction: &str) -> String {
    format!("{{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one {instruction}\n}}")
}

/// One thread of the warp arrives, and the phase additionally waits for `bytes` bytes of loads. The whole warp must call it.
#[cube]
pub fn mbarrier_expect(at: u32, bytes: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), bytes.read_value(scope)];
        effect(scope, &elected("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"), "r,r,~{memory}", args)
    })
}

/// Waits until the phase of this parity has completed.
#[cube]
pub fn mbarrier_wait(at: u32, parity: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), parity.read_value(scope)];
        let template =
            "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@!done bra wait;\n}";
        effect(scope, template, "r,r,~{memory}", args)
    })
}

/// Thread 0 of the warp atomically adds 1 to the first element of `counter`, or sets it to 0 if it was `last`. Returns the old
/// value to thread 0. The whole warp must call it.
#[cube]
pub fn take_ticket(counter: &[u32], last: u32) -> u32 {
    intrinsic!(|scope| {
        let ty = u32::__expand_as_type(scope);
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let counter = unsafe { *counter.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![counter, last.read_value(scope)];
        let template = "{\n.reg .pred p;\n.reg .u32 lane;\nmov.u32 lane, %laneid;\nsetp.eq.u32 p, lane, 0;\nmov.u32 $0, 0;\n\
             @p atom.global.inc.u32 $0, [$1], $2;\n}";
        let value = effect_value(scope, ty, template, "=&r,l,r,~{memory}", args);
        ExpandValue::from(value).into()
    })
}

/// Orders this warp's accesses to memory before and after it, as seen by other thread blocks.
#[cube]
pub fn fence_gpu() {
    intrinsic!(|scope| effect(scope, "fence.acq_rel.gpu;", "~{memory}", vec![]))
}

/// Waits until the first element of `turn` is at least `turns`. All that was written to global memory before [`pass_turn()`] then
/// comes before all that this warp does next. The whole warp must call it.
#[cube]
pub fn await_turn(turn: &[u32], turns: u32) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let turn = unsafe { *turn.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![turn, turns.read_value(scope)];
        let template = "{\n.reg .pred early;\n.reg .u32 now;\nwait:\nld.acquire.gpu.global.u32 now, [$0];\n\
             setp.lo.u32 early, now, $1;\n@early bra wait;\n}";
        effect(scope, template, "l,r,~{memory}", args)
    })
}

/// One thread of the warp adds 1 to the first element of `turn`. All writes to global memory that the warp knows of come before it.
/// The whole warp must call it.
#[cube]
pub fn pass_turn(turn: &[u32]) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let turn = unsafe { *turn.__expand_as_ptr_method(scope) }.value(scope);
        effect(scope, &elected("red.release.gpu.global.add.u32 [$0], 1;"), "l,~{memory}", vec![turn])
    })
}
