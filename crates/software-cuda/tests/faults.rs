//! Planted faults. Each program is correct, and has a faulty variant with one instruction less or more. For every order of warps and
//! copies, the correct program passes, and the faulty one ends with a fault that names the error and the line of the instruction.

mod common;

use common::*;
use software_cuda::machine::written::Written;
use software_cuda::{Error, Kind};
use std::sync::Arc;

/// Seeds for the order of warps and the times of copies.
const SEEDS: std::ops::Range<u64> = 0..12;

/// Runs a program with 64 KiB of global memory, all of it initialised or none.
fn run_with(body: &str, threads: u32, written: bool, seed: u64) -> Result<(), Error> {
    let mut memory = vec![0u128; 4 << 10];
    let bytes = 16 * memory.len();
    let text = format!(
        "{HEAD}.extern .shared .align 1024 .b8 memory[];\n.visible .entry main(.param .u64 p0) {{\n{START}\
         mov.u32 %a3, memory;\nshl.b32 %a4, %i, 2;\nadd.u32 %a4, %a3, %a4;\nsetp.eq.u32 %c0, %i, 0;\nsetp.lt.u32 %c1, %i, 32;\n\
         {body}\nret;\n}}"
    );
    let tracked = Written::new(bytes);
    if written {
        tracked.mark(0, bytes);
    }
    let at = memory.as_mut_ptr() as u64;
    launch(&text, 1, threads, at.to_le_bytes().to_vec(), vec![(at, at + bytes as u64, Some(Arc::new(tracked)))], seed)
}

/// Runs a correct program and its faulty variant. The correct program has the text between `«` and `»` and lacks the text between `‹` and
/// `›`; the faulty one lacks the former and has the latter. The fault must be of one of these kinds. A fault of the first kind must contain
/// these words, and be at the line that begins with `§`, if there is one.
fn planted(threads: u32, kinds: &[Kind], words: &str, program: &str) {
    let without = |text: &str, [open, close]: [char; 2], keep: bool| {
        let mut depth = 0;
        let kept = text.chars().filter(|c| {
            depth += i32::from(*c == open) - i32::from(*c == close);
            *c != open && *c != close && (keep || depth == 0)
        });
        kept.collect::<String>()
    };
    let right = without(&without(program, ['«', '»'], true), ['‹', '›'], false);
    let wrong = without(&without(program, ['«', '»'], false), ['‹', '›'], true);
    assert_ne!(right, wrong);
    // Number of lines that `run_with` puts before the program.
    let first = 5 + START.lines().count() + 5;
    let line = wrong.lines().position(|line| line.trim_start().starts_with('§')).map(|nth| (first + nth) as u32 + 1);
    for seed in SEEDS {
        if let Err(error) = run_with(&right.replace('§', ""), threads, true, seed) {
            panic!("seed {seed}: the correct program fails: {error}\n{right}");
        }
        let (kind, at, what) = fault(run_with(&wrong.replace('§', ""), threads, true, seed));
        assert!(kinds.contains(&kind), "seed {seed}: the fault is of the kind {kind:?}: {what}");
        assert!(kind != kinds[0] || what.contains(words), "seed {seed}: the fault lacks {words:?}: {what}");
        assert!(
            kind != kinds[0] || line.is_none_or(|line| line == at),
            "seed {seed}: the fault is at line {at}, expected {line:?}: {what}"
        );
    }
}

/// [`planted`], for faults of one kind.
fn told(threads: u32, kind: Kind, words: &str, program: &str) {
    planted(threads, &[kind], words, program);
}

// -- fences

#[test]
fn a_bulk_store_needs_a_proxy_fence() {
    told(
        32,
        Kind::Fence,
        "no `fence.proxy.async` after warp 0 wrote",
        "st.shared.u32 [%a4], %i;
         «fence.proxy.async.shared::cta;»
         bar.warp.sync -1;
         §@%c0 cp.async.bulk.global.shared::cta.bulk_group [%p0], [%a3], 128;
         @%c0 cp.async.bulk.commit_group;
         @%c0 cp.async.bulk.wait_group 0;",
    );
}

#[test]
fn a_barrier_needs_a_fence_before_copies_count_there() {
    told(
        32,
        Kind::Fence,
        "no `fence.proxy.async`",
        "@%c0 mbarrier.init.shared::cta.b64 [%a3], 1;
         «fence.mbarrier_init.release.cluster;»
         @%c0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a3], 128;
         §@%c0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a3+128], [%p0], 128, [%a3];
         wait: mbarrier.try_wait.parity.shared::cta.b64 %c2, [%a3], 0;
         @!%c2 bra wait;",
    );
}

/// A warpgroup product of zeros in shared memory with 8 columns, with these instructions between its parts.
fn product(fill: &str, fence: &str, between: &str, after: &str) -> String {
    format!(
        ".reg .f32 s<4>;
         .reg .b32 r<4>;
         .reg .pred adds;
         mov.b32 r0, 0; mov.b32 r1, 0; mov.b32 r2, 0; mov.b32 r3, 0;
         mov.f32 s0, 0f00000000; mov.f32 s1, 0f00000000; mov.f32 s2, 0f00000000; mov.f32 s3, 0f00000000;
         setp.eq.u32 adds, 0, 0;
         setp.lt.u32 %c1, %i, 64;
         {fill}
         shr.u32 %a5, %a3, 4;
         cvt.u64.u32 %q2, %a5;
         or.b64 %q2, %q2, {};
         {fence}
         §wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{s0, s1, s2, s3}}, {{r0, r1, r2, r3}}, %q2, adds, 1, 1, 0;
         wgmma.commit_group.sync.aligned;
         {between}
         wgmma.wait_group.sync.aligned 0;
         {after}",
        8u64 << 16 | 16 << 32
    )
}

const ZEROS: &str = "@%c1 st.shared.u32 [%a4], 0; fence.proxy.async.shared::cta; bar.sync 0;";
const FENCE: &str = "wgmma.fence.sync.aligned;";

#[test]
fn a_product_of_what_warps_wrote_needs_a_proxy_fence() {
    let fill = "@%c1 st.shared.u32 [%a4], 0; «fence.proxy.async.shared::cta;» bar.sync 0;";
    told(128, Kind::Fence, "no `fence.proxy.async` after warp", &product(fill, FENCE, "", ""));
}

#[test]
fn a_proxy_fence_needs_a_barrier_after_it() {
    let fill = "@%c1 st.shared.u32 [%a4], 0; fence.proxy.async.shared::cta; «bar.sync 0;»";
    // If the product runs before the other warp has written, its operand is uninitialised.
    let program = product(fill, FENCE, "", "add.f32 %f0, s0, s1; st.global.f32 [%p0], %f0;").replace("§wgmma", "wgmma");
    planted(128, &[Kind::Race, Kind::Uninitialised], "with no barrier after warp", &program);
}

#[test]
fn results_do_not_depend_on_uninitialised_memory() {
    let fill = "‹bra.uni multiply;› @%c1 st.shared.u32 [%a4], 0; fence.proxy.async.shared::cta; bar.sync 0; multiply:";
    let words = "something depends on what line 26 has read: 16 bytes at 0x400 of shared memory are read, which nothing in this block has written";
    let program = product(fill, FENCE, "", "mov.f32 %f1, s0; add.f32 %f0, %f1, %f1; st.global.f32 [%p0], %f0;");
    let program = program.replace("§wgmma", "wgmma");
    told(128, Kind::Uninitialised, words, &program);
    // Uninitialised values that do not affect a result are no fault.
    let program = product("", FENCE, "", "mov.f32 %f1, s0; add.f32 %f0, %f1, %f1;").replace('§', "");
    run_with(&program, 128, true, 1).unwrap();
}

#[test]
fn the_first_product_needs_a_fence() {
    told(128, Kind::Fence, "no `wgmma.fence` before it", &product(ZEROS, "«wgmma.fence.sync.aligned;»", "", ""));
}

#[test]
fn an_accumulator_that_was_scaled_needs_a_fence() {
    let fence = "wgmma.fence.sync.aligned; mul.f32 s2, s2, 0f40000000; «wgmma.fence.sync.aligned;»";
    told(128, Kind::Fence, "after its accumulator was written", &product(ZEROS, fence, "", ""));
}

#[test]
fn an_operand_in_registers_needs_a_fence() {
    let fence = "wgmma.fence.sync.aligned; xor.b32 r1, r1, r1; «wgmma.fence.sync.aligned;»";
    told(128, Kind::Fence, "after its first operand was written", &product(ZEROS, fence, "", ""));
}

// -- registers of products

#[test]
fn accumulators_are_read_after_the_wait() {
    let program = product(ZEROS, FENCE, "‹add.f32 %f0, s0, s1;›", "add.f32 %f0, s0, s1;").replace("§wgmma", "wgmma");
    told(128, Kind::Race, "a register is read", &program);
    // A move copies the register early, so reading its target is the same race.
    let program = product(ZEROS, FENCE, "mov.f32 %f1, s3; ‹add.f32 %f0, %f1, %f1;›", "add.f32 %f0, %f1, %f1;");
    told(128, Kind::Race, "a register is read", &program.replace("§wgmma", "wgmma"));
    // `wait_group 1` does not wait for the last group.
    let wait = "‹wgmma.wait_group.sync.aligned 1; st.global.f32 [%p0], s0;›";
    told(128, Kind::Race, "a register is read", &product(ZEROS, FENCE, wait, "").replace("§wgmma", "wgmma"));
}

#[test]
fn registers_of_a_running_product_are_not_written() {
    let program = product(ZEROS, FENCE, "‹mul.f32 s0, %f0, %f0;›", "mul.f32 s0, %f0, %f0;").replace("§wgmma", "wgmma");
    told(128, Kind::Race, "a register is written in which a product adds up", &program);
    let program = product(ZEROS, FENCE, "‹add.u32 r2, %i, %i;›", "add.u32 r2, %i, %i;").replace("§wgmma", "wgmma");
    told(128, Kind::Race, "a register is written that a product reads", &program);
}

// -- uninitialised memory

#[test]
fn shared_memory_is_written_before_it_is_read() {
    told(
        32,
        Kind::Uninitialised,
        "nothing in this block has written",
        "«st.shared.u32 [%a4], 1;»\nld.shared.u32 %a5, [%a4];\nadd.s64 %q0, %p0, %at;\n§st.global.u32 [%q0], %a5;",
    );
    told(
        32,
        Kind::Uninitialised,
        "16 bytes at 0x400",
        "@%c0 st.shared.v2.u32 [%a3], {%i, %i};
         «@%c0 st.shared.v2.u32 [%a3+8], {%i, %i};»
         @%c0 ld.shared.v4.u32 {%a1, %a2, %a5, %a6}, [%a3];
         add.u32 %a6, %a6, %a1;
         setp.eq.u32 %c2, %a6, 0;
         §@%c2 bra end;
         end:",
    );
    told(
        32,
        Kind::Uninitialised,
        "nothing in this block has written",
        "shl.b32 %a5, %i, 4;
         add.u32 %a5, %a5, %a3;
         st.shared.u32 [%a4], 0;
         «st.shared.u32 [%a4+128], 0;»
         bar.warp.sync -1;
         ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%a6, %a7}, [%a5];
         add.s64 %q0, %p0, %at;
         §st.global.u32 [%q0], %a7;",
    );
}

#[test]
fn global_memory_is_written_before_it_is_read() {
    let loads = "add.s64 %q0, %p0, %at; st.global.u32 [%q0], %i; ld.global.u32 %a5, [%q0];\n";
    let wait = "wait: mbarrier.try_wait.parity.shared::cta.b64 %c2, [%a3], 0; @!%c2 bra wait;";
    let uses = [
        ("ld.global.u32 %a5, [%q0+64]; add.u32 %a5, %a5, 1; st.global.u32 [%q0+256], %a5;", "to byte 128"),
        ("ld.global.u32 %a5, [%q0+64]; setp.eq.u32 %c2, %a5, 0; @%c2 bra end; end:", "to byte 128"),
        (
            "ld.global.u32 %a5, [%q0+64]; and.b32 %a5, %a5, 0; cvt.u64.u32 %q1, %a5; add.s64 %q1, %p0, %q1; ld.global.u32 %a6, [%q1];",
            "to byte 128",
        ),
        (
            "ld.global.u32 %a5, [%q0+64]; st.shared.u32 [%a4], %a5; ld.shared.u32 %a6, [%a4]; st.global.u32 [%q0], %a6;",
            "line 15",
        ),
        (
            "ld.global.u32 %a5, [%q0+64]; shfl.sync.bfly.b32 %a6, %a5, 1, 31, -1; st.global.u32 [%q0], %a6;",
            "to byte 128",
        ),
        ("red.global.add.u32 [%q0+128], 1;", "to byte 128"),
        (
            "cp.async.ca.shared.global [%a4], [%q0+64], 4; cp.async.wait_all; ld.shared.u32 %a6, [%a4];
             st.global.u32 [%q0], %a6;",
            "line 15 has put",
        ),
        (
            &format!(
                "@%c0 mbarrier.init.shared::cta.b64 [%a3], 1; fence.proxy.async;
                 @%c0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a3], 160;
                 @%c0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a3+128], [%p0], 160, [%a3];
                 {wait} ld.shared.u32 %a6, [%a4+160]; st.global.u32 [%q0], %a6;"
            ),
            "line 17 has put",
        ),
    ];
    for (text, words) in uses {
        for seed in SEEDS {
            run_with(&format!("{loads}{text}"), 32, true, seed).unwrap();
            let (kind, _, what) = fault(run_with(&format!("{loads}{text}"), 32, false, seed));
            assert_eq!(kind, Kind::Uninitialised, "{what}");
            assert!(what.contains(words), "{what}");
        }
    }
    // Uninitialised values that do not affect a result are no fault: lanes that read one select another value.
    let text =
        "ld.global.u32 %a5, [%q0+64]; setp.lt.u32 %c2, %i, 16; selp.b32 %a5, %a5, 7, %c2; st.global.u32 [%q0], %a5;";
    run_with(&format!("{loads}{text}"), 32, false, 1).unwrap();
}

// -- asynchronous copies

#[test]
fn memory_that_a_bulk_store_reads_is_not_overwritten() {
    for (store, left) in [("cp.async.bulk", ""), ("cp.reduce.async.bulk", ".add.f32")] {
        let program = |wait: &str| {
            format!(
                "st.shared.u32 [%a4], 0;
                 fence.proxy.async.shared::cta;
                 bar.warp.sync -1;
                 @%c0 {store}.global.shared::cta.bulk_group{left} [%p0], [%a3], 128;
                 @%c0 cp.async.bulk.commit_group;
                 {wait}
                 bar.warp.sync -1;
                 §st.shared.u32 [%a4], %i;
                 @%c0 cp.async.bulk.wait_group 0;"
            )
        };
        told(32, Kind::Race, "the bulk copy in line", &program("«@%c0 cp.async.bulk.wait_group.read 0;»"));
        let early = "‹@%c0 cp.async.bulk.wait_group.read 1;›«@%c0 cp.async.bulk.wait_group.read 0;»";
        told(32, Kind::Race, "the bulk copy in line", &program(early));
    }
}

#[test]
fn a_bulk_store_is_waited_for_before_another_warp_writes() {
    let program = "@%c1 st.shared.u32 [%a4], 0;
         fence.proxy.async.shared::cta;
         bar.sync 0;
         @%c0 cp.async.bulk.global.shared::cta.bulk_group [%p0], [%a3], 128;
         @%c0 cp.async.bulk.commit_group;
         @%c0 cp.async.bulk.wait_group.read 0;
         «bar.sync 0;»
         setp.gt.u32 %c2, %i, 31;
         @%c2 st.shared.u32 [%a4+-128], %i;
         @%c0 cp.async.bulk.wait_group 0;";
    // If the other warp runs first, the copy is the one that reads too early.
    planted(64, &[Kind::Race, Kind::Fence], "no barrier after warp", program);
}

#[test]
fn a_bulk_store_is_waited_for_before_the_end() {
    told(
        32,
        Kind::Race,
        "a warp ends before the bulk copy in line",
        "st.shared.u32 [%a4], 0;
         fence.proxy.async.shared::cta;
         @%c0 cp.async.bulk.global.shared::cta.bulk_group [%p0], [%a3], 128;
         @%c0 cp.async.bulk.commit_group;
         «@%c0 cp.async.bulk.wait_group 0;»",
    );
}

/// One warp loads a tile twice, another warp reads it in between. `full`, `empty` and `last` are the waits.
fn pipeline(expects: u32, full: &str, empty: &str, last: &str) -> String {
    format!(
        "@%c0 mbarrier.init.shared::cta.b64 [%a3], 1;
         @%c0 mbarrier.init.shared::cta.b64 [%a3+8], 32;
         fence.proxy.async.shared::cta;
         bar.sync 0;
         add.u32 %a5, %a3, 128;
         @!%c1 bra consumer;
         @%c0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a3], {expects};
         @%c0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a5], [%p0], 128, [%a3];
         {empty}
         @%c0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a3], 128;
         @%c0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a5], [%p0+128], 128, [%a3];
         bra.uni end;
         consumer:
         {full}
         ld.shared.u32 %a6, [%a4];
         mbarrier.arrive.shared::cta.b64 _, [%a3+8];
         {last}
         end:"
    )
}

const FULL: &str = "full: mbarrier.try_wait.parity.shared::cta.b64 %c2, [%a3], 0; @!%c2 bra full;";
const EMPTY: &str = "empty: mbarrier.try_wait.parity.shared::cta.b64 %c3, [%a3+8], 0; @!%c3 bra empty;";
const LAST: &str =
    "last: mbarrier.try_wait.parity.shared::cta.b64 %c2, [%a3], 1; @!%c2 bra last; ld.shared.u32 %a6, [%a4];";

#[test]
fn a_tile_is_read_when_its_barrier_says() {
    let full = format!("«{FULL}»");
    // If the warp reads before the copy is issued, the memory is uninitialised.
    let kinds = [Kind::Race, Kind::Uninitialised, Kind::Undefined];
    planted(64, &kinds, "before the barrier at 0x400", &pipeline(128, &full, EMPTY, LAST));
}

#[test]
fn a_tile_is_loaded_when_the_last_one_was_read() {
    let empty = format!("«{EMPTY}»");
    // The other warp may have the first fault: it waits for a phase that has already passed.
    let kinds = [Kind::Race, Kind::Deadlock, Kind::Undefined];
    planted(64, &kinds, "with no barrier after", &pipeline(128, FULL, &empty, LAST));
}

#[test]
fn a_block_ends_when_its_copies_are_there() {
    let last = format!("«{LAST}»");
    let wrong = pipeline(128, FULL, EMPTY, &last);
    // If the copy has already landed, there is no fault.
    let body = wrong.replace(&last, "");
    let told = (0..64).filter(|seed| run_with(&body, 64, true, *seed).is_err()).count();
    assert!(told > 16, "only {told} of 64 runs have a fault");
    for seed in SEEDS {
        run_with(&pipeline(128, FULL, EMPTY, LAST), 64, true, seed).unwrap();
    }
}

#[test]
fn a_phase_that_may_have_passed_is_not_waited_for() {
    // Both warps meet after the second copy is issued. A late warp then waits for a phase that has already passed.
    let again = |wait: &str| {
        let program = pipeline(128, FULL, EMPTY, &format!("bar.sync 1, 64;\n{wait}\n{LAST}"));
        program.replace("bra.uni end;", "bar.sync 1, 64;\nbra.uni end;")
    };
    let wrong = again(&FULL.replace("full", "again"));
    let told = (0..64).filter(|seed| match run_with(&wrong, 64, true, *seed) {
        Ok(()) => false,
        Err(Error::Fault { kind, what, .. }) => {
            assert!(kind == Kind::Deadlock && what.contains("lacks 1 arrivals and 0 bytes"), "{kind:?}: {what}");
            true
        }
        Err(error) => panic!("{error}"),
    });
    let told = told.count();
    assert!(told > 8, "only {told} of 64 runs have a fault");
    for seed in SEEDS {
        run_with(&again(""), 64, true, seed).unwrap();
    }
}

#[test]
fn a_barrier_expects_what_comes() {
    for (expects, lacks) in [(64, "lacks 0 arrivals and -64 bytes"), (192, "lacks 0 arrivals and 64 bytes")] {
        for seed in SEEDS {
            let (kind, _, what) = fault(run_with(&pipeline(expects, FULL, EMPTY, LAST), 64, true, seed));
            assert_eq!(kind, Kind::Deadlock, "{what}");
            assert!(what.contains(lacks), "{what}");
        }
    }
}

#[test]
fn an_asynchronous_copy_is_waited_for() {
    let kinds = [Kind::Race];
    let program = |wait: &str| {
        format!(
            "add.s64 %q0, %p0, %at; cp.async.ca.shared.global [%a4], [%q0], 4; cp.async.commit_group;\n{wait}\n§ld.shared.u32 %a5, [%a4];"
        )
    };
    planted(32, &kinds, "before the copy in line", &program("«cp.async.wait_group 0;»"));
    let one = "‹cp.async.wait_group 1;›«cp.async.wait_group 0;»";
    planted(32, &kinds, "before the copy in line", &program(one));
}

// -- races between warps

#[test]
fn a_barrier_orders_a_write_before_a_read() {
    let program = "st.shared.u32 [%a4], %i;
         «bar.sync 0;»
         xor.b32 %a5, %a4, 128;
         §ld.shared.u32 %a6, [%a5];";
    planted(64, &[Kind::Race, Kind::Uninitialised], "no barrier after warp", program);
}

#[test]
fn a_barrier_orders_a_read_before_a_write() {
    let program = "st.shared.u32 [%a4], %i;
         bar.sync 0;
         xor.b32 %a5, %a4, 128;
         ld.shared.u32 %a6, [%a5];
         «bar.sync 0;»
         st.shared.u32 [%a4], %a6;";
    planted(64, &[Kind::Race], "no barrier after warp", program);
}

#[test]
fn bar_arrive_orders_earlier_accesses() {
    // The first warp arrives without waiting; the second one waits.
    let program = "@%c1 st.shared.u32 [%a4], %i;
         @%c1 bar.arrive 1, 64;
         ‹@%c1 st.shared.u32 [%a4], 7;›
         @%c1 bra end;
         bar.sync 1, 64;
         ld.shared.u32 %a6, [%a4+-128];
         end:";
    planted(64, &[Kind::Race], "no barrier after warp", program);
}

#[test]
fn an_mbarrier_is_initialised_before_others_use_it() {
    let program = "@%c0 mbarrier.init.shared::cta.b64 [%a3], 64;
         «bar.sync 0;»
         mbarrier.arrive.shared::cta.b64 _, [%a3];
         wait: mbarrier.try_wait.parity.shared::cta.b64 %c2, [%a3], 0;
         @!%c2 bra wait;";
    planted(64, &[Kind::Race, Kind::Undefined, Kind::Uninitialised], "no barrier after warp 0", program);
}

#[test]
fn atomic_changes_are_no_races() {
    let program = "@%c0 st.shared.u32 [%a3], 0;
         «bar.sync 0;»
         atom.shared.add.u32 %a5, [%a3], 1;";
    planted(64, &[Kind::Race, Kind::Uninitialised], "no barrier after warp 0", program);
}

#[test]
fn a_shuffle_needs_its_lanes() {
    let program = "setp.gt.u32 %c2, %i, 15;
         ‹@%c2 bra end;›
         §shfl.sync.bfly.b32 %a5, %i, 1, 31, -1;
         end:";
    told(32, Kind::Undefined, "which are not where they are", program);
}

#[test]
fn addresses_that_wrap_around_are_faults() {
    for space in ["global", "shared"] {
        let body = format!("@%c0 mov.u64 %q1, -8;\n@%c0 ld.{space}.u64 %q2, [%q1];");
        let (kind, _, what) = fault(run_with(&body, 32, true, 1));
        assert_eq!(kind, Kind::Address, "{space}: {what}");
    }
}
