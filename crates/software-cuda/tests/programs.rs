//! PTX programs with known results.

mod common;

use common::*;
use software_cuda::machine::tensor::{Swizzle, TensorMap};
use software_cuda::{Error, Kind};

fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn vectors_are_added() {
    let (mut a, mut b) = (bits((0..256).map(|n| n as f32)), bits((0..256).map(|n| 0.5 * n as f32)));
    let body = format!(
        "{START} ld.param.u64 %p1, [p1]; add.s64 %q0, %p0, %at; add.s64 %q1, %p1, %at;
         ld.global.f32 %f0, [%q0]; ld.global.nc.b32 %f1, [%q1]; add.rn.f32 %f0, %f0, %f1; st.global.f32 [%q0], %f0;"
    );
    run(&body, 2, 128, &mut [&mut a, &mut b], 1).unwrap();
    assert_eq!(a, bits((0..256).map(|n| 1.5 * n as f32)));
}

#[test]
fn diverged_lanes_reconverge() {
    // Each lane repeats the loop as often as its index. Then all lanes reconverge, which `activemask` shows.
    let mut out = vec![0; 32];
    let body = format!(
        "{START} mov.u32 %a3, 0;
         again: setp.ge.u32 %c0, %a3, %i; @%c0 bra done; add.u32 %a3, %a3, 1; bra again;
         done: and.b32 %a4, %i, 1; setp.eq.u32 %c1, %a4, 0; @%c1 bra even; mul.lo.u32 %a3, %a3, 100; bra.uni both;
         even: add.u32 %a3, %a3, 7;
         both: activemask.b32 %a5; setp.eq.u32 %c2, %a5, -1; selp.b32 %a3, %a3, 0, %c2;
         add.s64 %q0, %p0, %at; st.global.u32 [%q0], %a3;"
    );
    run(&body, 1, 32, &mut [&mut out], 1).unwrap();
    let want: Vec<u32> = (0..32).map(|n| if n % 2 == 1 { n * 100 } else { n + 7 }).collect();
    assert_eq!(out, want);
}

#[test]
fn sums_carry_and_fields_are_inserted() {
    let mut out = vec![0; 32 * 8];
    let body = format!(
        "{START} mul.lo.u32 %a3, %i, 0x9E3779B9; mad.lo.cc.u32 %a4, %a3, 0x85EBCA6B, 0xFFFFFFF0; madc.hi.u32 %a5, %a3, 0x85EBCA6B, 7;
         add.cc.u32 %a6, %a3, 0x80000000; addc.u32 %a7, %i, 0;
         mul.wide.u32 %q1, %i, 32; add.s64 %q0, %p0, %q1; st.global.v4.b32 [%q0], {{%a4, %a5, %a6, %a7}};
         bfi.b32 %a4, %i, %a3, 4, 8; bfi.b32 %a5, %i, %a3, 30, 32; min.u16x2 %a6, %a3, 0x80004000; max.s16x2 %a7, %a3, 0x00010001;
         st.global.v4.b32 [%q0+16], {{%a4, %a5, %a6, %a7}};"
    );
    run(&body, 1, 32, &mut [&mut out], 1).unwrap();
    for (n, got) in (0u32..).zip(out.chunks_exact(8)) {
        let a = n.wrapping_mul(0x9E37_79B9);
        let product = u64::from(a) * 0x85EB_CA6B + 0xFFFF_FFF0 + (7 << 32);
        let (sum, over) = a.overflowing_add(0x8000_0000);
        let (low, high) = (a as u16, (a >> 16) as u16);
        let pair = |low: u16, high: u16| u32::from(high) << 16 | u32::from(low);
        let want = [
            product as u32,
            (product >> 32) as u32,
            sum,
            n + u32::from(over),
            (n & 0xFF) << 4 | a & !0xFF0,
            n << 30 | a & 0x3FFF_FFFF,
            pair(low.min(0x4000), high.min(0x8000)),
            pair((low as i16).max(1) as u16, (high as i16).max(1) as u16),
        ];
        assert_eq!(got, want, "{n}");
    }
}

#[test]
fn lanes_shuffle_and_vote() {
    let mut out = vec![0; 128];
    let body = format!(
        "{START} shfl.sync.bfly.b32 %a3, %i, 5, 31, -1; shfl.sync.up.b32 %a4|%c0, %i, 4, 0, 0xffffffff;
         selp.b32 %a4, %a4, 1000, %c0; shfl.sync.idx.b32 %a5, %i, 3, 0x181f, -1;
         setp.lt.u32 %c1, %i, 5; vote.sync.ballot.b32 %a6, %c1, -1;
         mul.wide.u32 %q1, %i, 16; add.s64 %q0, %p0, %q1; st.global.v4.b32 [%q0], {{%a3, %a4, %a5, %a6}};"
    );
    run(&body, 1, 32, &mut [&mut out], 1).unwrap();
    for (n, four) in (0u32..).zip(out.chunks_exact(4)) {
        assert_eq!(four, [n ^ 5, if n < 4 { 1000 } else { n - 4 }, n & !7 | 3, 31]);
    }
}

/// The first warp issues a bulk copy, and the second one waits for it.
#[test]
fn a_bulk_copy_comes_when_its_barrier_says() {
    for seed in 0..8 {
        let mut from: Vec<u32> = (0..256).collect();
        let mut out = vec![0; 32];
        // The source of a copy must be aligned to 16 bytes.
        let skip = (16 - from.as_ptr() as usize % 16) / 4 % 4;
        let body = format!(
            "{START} ld.param.u64 %p1, [p1]; mov.u32 %a3, memory; add.u32 %a4, %a3, 1024;
             setp.eq.u32 %c0, %i, 0; @%c0 mbarrier.init.shared::cta.b64 [%a3], 1;
             fence.proxy.async.shared::cta; bar.sync 0;
             setp.lt.u32 %c1, %i, 32; @!%c1 bra second;
             {{ .reg .pred one; elect.sync _|one, 0xffffffff;
             @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a3], 512;
             @one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a4], [%p0+{}], 512, [%a3]; }}
             bra.uni end;
             second: {{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%a3], 0; @!done bra wait; }}
             and.b32 %a5, %i, 31; shl.b32 %a5, %a5, 2; add.u32 %a6, %a4, %a5; ld.shared.u32 %a6, [%a6+128];
             cvt.u64.u32 %q0, %a5; add.s64 %q0, %p1, %q0; st.global.u32 [%q0], %a6;
             end:",
            4 * skip
        );
        run(&body, 1, 64, &mut [&mut from, &mut out], seed).unwrap();
        assert_eq!(out, (32 + skip as u32..64 + skip as u32).collect::<Vec<_>>());
    }
}

#[test]
fn matrices_are_stored_and_loaded() {
    let mut out = vec![0; 64];
    let body = format!(
        "{START} mov.u32 %a3, memory; shl.b32 %a4, %i, 4; add.u32 %a3, %a3, %a4;
         shl.b32 %a5, %i, 17; or.b32 %a5, %a5, %i; add.u32 %a6, %a5, 64; add.u32 %a7, %a5, 128; add.u32 %a1, %a5, 256;
         stmatrix.sync.aligned.m8n8.x4.shared.b16 [%a3], {{%a5, %a6, %a7, %a1}};
         ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%a0, %a2}}, [%a3];
         sub.u32 %a0, %a0, %a5; sub.u32 %a2, %a2, %a5; mul.wide.u32 %q1, %i, 8; add.s64 %q0, %p0, %q1;
         st.global.v2.b32 [%q0], {{%a0, %a2}};"
    );
    run(&body, 1, 32, &mut [&mut out], 1).unwrap();
    assert_eq!(out, [0, 64].repeat(32));
}

/// Numbers that are exact in f16 and bf16, and whose sums of products are exact in f32.
fn small(row: usize, column: usize) -> f32 {
    ((row * 7 + column * 5) % 13) as f32 - 6.0
}

fn bf16(x: f32) -> u32 {
    x.to_bits() >> 16
}

/// The bits of a small integer in f16.
fn f16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 { 0 } else { (bits >> 16 & 0x8000 | ((bits >> 23 & 0xFF) - 112) << 10 | bits >> 13 & 0x3FF) as u16 }
}

#[test]
fn a_warp_multiplies() {
    let mut registers = vec![0; 32 * 6];
    for lane in 0..32 {
        let (row, column) = (lane / 4, lane % 4 * 2);
        let pair = |row: usize, column: usize| bf16(small(row, column)) | bf16(small(row, column + 1)) << 16;
        // The second operand is the first eight rows of the first operand.
        let six = [
            pair(row, column),
            pair(row + 8, column),
            pair(row, column + 8),
            pair(row + 8, column + 8),
            pair(row, column),
            pair(row, column + 8),
        ];
        registers[6 * lane..][..6].copy_from_slice(&six);
    }
    let mut out = vec![0; 128];
    let body = format!(
        "{START} ld.param.u64 %p1, [p1]; mul.wide.u32 %q0, %i, 24; add.s64 %q0, %p0, %q0; mov.f32 %f4, 0f3F800000;
         ld.global.b32 %a0, [%q0]; ld.global.b32 %a1, [%q0+4]; ld.global.b32 %a2, [%q0+8]; ld.global.b32 %a3, [%q0+12];
         ld.global.b32 %a4, [%q0+16]; ld.global.b32 %a5, [%q0+20];
         mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%f0, %f1, %f2, %f3}}, {{%a0, %a1, %a2, %a3}}, {{%a4, %a5}},
           {{%f4, %f4, %f4, %f4}};
         mul.wide.u32 %q1, %i, 16; add.s64 %q1, %p1, %q1;
         st.global.f32 [%q1], %f0; st.global.f32 [%q1+4], %f1; st.global.f32 [%q1+8], %f2; st.global.f32 [%q1+12], %f3;"
    );
    run(&body, 1, 32, &mut [&mut registers, &mut out], 1).unwrap();
    for lane in 0..32 {
        for nth in 0..4 {
            let (row, column) = (lane / 4 + 8 * (nth / 2), lane % 4 * 2 + nth % 2);
            let want = (0..16).fold(1.0, |sum, k| sum + small(row, k) * small(column, k));
            assert_eq!(f32::from_bits(out[4 * lane + nth]), want, "{row} {column}");
        }
    }
}

/// `wmma` of 16 × 16 × 16 (tf32: 16 × 16 × 8), with the second operand row-major or column-major in shared memory.
#[test]
fn a_warp_multiplies_fragments() {
    for (layout, by_columns) in [("row", false), ("col", true)] {
        let products =
            [("bf16", 4, "f32.bf16.bf16.f32", 16), ("f16", 8, "f32.f32", 16), ("tf32", 4, "f32.tf32.tf32.f32", 8)];
        for (ty, registers, product, depth) in products {
            let bits = |x: f32| if ty == "bf16" { bf16(x) } else { u32::from(f16(x)) };
            // Two consecutive matrices with rows of 32 bytes. The second one in tf32 has rows of 64 bytes if it is row-major.
            let mut input: Vec<u32> = (0..2 * 16 * 8)
                .map(|word| match ty {
                    "tf32" if word < 128 || by_columns => small(word / 8, word % 8).to_bits(),
                    "tf32" => small(8 + word / 16, word % 16).to_bits(),
                    _ => {
                        let (row, column) = (word / 8, word % 8 * 2);
                        bits(small(row, column)) | bits(small(row, column + 1)) << 16
                    }
                })
                .collect();
            let along = if by_columns { depth } else { 16 };
            let mut out = vec![0; 256];
            let names = |prefix: &str, count: usize| {
                (0..count).map(|nth| format!("{prefix}{nth}")).collect::<Vec<_>>().join(", ")
            };
            let (a, b, sums) = (names("x", registers), names("y", registers), names("s", 8));
            let zeros: String = (0..8).map(|nth| format!("mov.f32 s{nth}, 0f3F800000;\n")).collect();
            let body = format!(
                "{START} .reg .b32 x<8>, y<8>; .reg .f32 s<8>; ld.param.u64 %p1, [p1]; mov.u32 %a3, memory; mov.u32 %a4, 0;
                 {zeros}
                 fill: shl.b32 %a5, %i, 2; mad.lo.u32 %a5, %a4, 128, %a5; cvt.u64.u32 %q0, %a5; add.s64 %q0, %p0, %q0;
                 ld.global.u32 %a6, [%q0]; add.u32 %a5, %a5, %a3; st.shared.u32 [%a5], %a6;
                 add.u32 %a4, %a4, 1; setp.lt.u32 %c0, %a4, 8; @%c0 bra fill; bar.warp.sync -1;
                 wmma.load.a.sync.aligned.row.m16n16k{depth}.shared.{ty} {{{a}}}, [%a3], {depth};
                 wmma.load.b.sync.aligned.{layout}.m16n16k{depth}.shared.{ty} {{{b}}}, [%a3+512], {along};
                 wmma.mma.sync.aligned.row.{layout}.m16n16k{depth}.{product} {{{sums}}}, {{{a}}}, {{{b}}}, {{{sums}}};
                 wmma.store.d.sync.aligned.row.m16n16k{depth}.shared.f32 [%a3+1024], {{{sums}}}, 16;
                 mov.u32 %a4, 0;
                 copy: shl.b32 %a5, %i, 2; mad.lo.u32 %a5, %a4, 128, %a5; cvt.u64.u32 %q0, %a5; add.s64 %q0, %p1, %q0;
                 add.u32 %a5, %a5, %a3; ld.shared.u32 %a6, [%a5+1024]; st.global.u32 [%q0], %a6;
                 add.u32 %a4, %a4, 1; setp.lt.u32 %c0, %a4, 8; @%c0 bra copy;"
            );
            run(&body, 1, 32, &mut [&mut input, &mut out], 1).unwrap();
            for (n, got) in out.iter().enumerate() {
                let (row, column) = (n / 16, n % 16);
                let second = |k: usize| if by_columns { small(16 + column, k) } else { small(16 + k, column) };
                let want = (0..depth).fold(1.0, |sum, k| sum + small(row, k) * second(k));
                assert_eq!(f32::from_bits(*got), want, "{row} {column} {layout} {ty}");
            }
        }
    }
}

/// A warpgroup product of two boxes of 64 × 64, loaded and swizzled by a tensor map: `A · B` if `columns`, else `A · Bᵀ`.
fn warpgroup(columns: bool, before_wait: &str) -> Result<Vec<u32>, Error> {
    // A tensor of 128 rows. The last rows of a box may be outside of it.
    let tensor: Vec<u128> = (0..128 * 8)
        .map(|eight| {
            (0..8).fold(0, |sum, nth| sum | u128::from(bf16(small(eight / 8, eight % 8 * 8 + nth))) << (16 * nth))
        })
        .collect();
    let map = TensorMap::new(tensor.as_ptr() as u64, 2, &[64, 128], &[128], &[64, 64], Swizzle::B128);
    let mut out = vec![0u32; 64 * 64];
    let sums = |f: &dyn Fn(usize) -> String| (0..32).map(f).collect::<Vec<_>>().join(", ");
    let products: String = (0..4)
        .map(|step| {
            let (b, trans) = if columns { (128 * step, 1) } else { (2 * step, 0) };
            format!(
                "add.s64 a, %q2, {}; add.s64 b, %q3, {b};
                 wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, a, b, adds, 1, 1, 0, {trans};
                 setp.eq.u32 adds, 0, 0;\n",
                2 * step,
                sums(&|nth| format!("s{nth}"))
            )
        })
        .collect();
    let stores: String = (0..32)
        .map(|nth| {
            let offset = 4 * (8 * (nth / 4) + nth % 2 + 64 * 8 * (nth / 2 % 2));
            format!("st.global.f32 [%q1+{offset}], s{nth};\n")
        })
        .collect();
    let text = format!(
        "{HEAD}.extern .shared .align 1024 .b8 memory[];
         .visible .entry main(.param .align 64 .b8 map[128], .param .u64 p0) {{
         {START} .reg .b64 a, b; .reg .f32 s<32>; .reg .pred adds, done, one;
         mov.b64 %p1, map; cvta.param.u64 %p1, %p1; mov.u32 %a3, memory; add.u32 %a4, %a3, 1024; add.u32 %a5, %a4, 8192;
         setp.eq.u32 %c0, %i, 0; @%c0 mbarrier.init.shared::cta.b64 [%a3], 1;
             fence.proxy.async.shared::cta; bar.sync 0;
         setp.gt.u32 %c1, %i, 31; @%c1 bra wait; elect.sync _|one, -1;
         @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a3], 16384;
         @one cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%a4], [%p1, {{0, 5}}], [%a3];
         @one cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%a5], [%p1, {{0, 70}}], [%a3];
         wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%a3], 0; @!done bra wait;
         shr.u32 %a6, %a4, 4; cvt.u64.u32 %q2, %a6; or.b64 %q2, %q2, {descriptor}; add.s64 %q3, %q2, 512;
         wgmma.fence.sync.aligned; setp.ne.u32 adds, 0, 0;
         {products} wgmma.commit_group.sync.aligned; {before_wait} wgmma.wait_group.sync.aligned 0;
         shr.u32 %a7, %i, 5; and.b32 %a6, %i, 31; shr.u32 %a1, %a6, 2; mad.lo.u32 %a7, %a7, 16, %a1; and.b32 %a6, %a6, 3;
         shl.b32 %a6, %a6, 1; mad.lo.u32 %a7, %a7, 64, %a6; mul.wide.u32 %q1, %a7, 4; add.s64 %q1, %p0, %q1;
         {stores} ret; }}",
        descriptor = 1u64 << 62 | 64 << 32 | 1 << 16,
    );
    // SAFETY: a tensor map consists of integers without padding.
    let map = unsafe { std::slice::from_raw_parts((&raw const map).cast::<u8>(), size_of::<TensorMap>()) };
    let mut parameters = Parameters(map.to_vec());
    parameters.0.resize(128, 0);
    parameters.0.extend_from_slice(&(out.as_mut_ptr() as u64).to_le_bytes());
    let pieces = vec![
        (tensor.as_ptr_range().start as u64, tensor.as_ptr_range().end as u64, None),
        (out.as_ptr_range().start as u64, out.as_ptr_range().end as u64, None),
    ];
    launch(&text, 1, 128, parameters.0, pieces, 3)?;
    Ok(out)
}

#[test]
fn a_warpgroup_multiplies() {
    // Rows past the end of the tensor are loaded as zeros.
    let of = |row: usize, column: usize| if row < 128 { small(row, column) } else { 0.0 };
    for columns in [false, true] {
        let out = warpgroup(columns, "").unwrap();
        for row in 0..64 {
            for column in 0..64 {
                let second = |k: usize| if columns { of(70 + k, column) } else { of(70 + column, k) };
                let want = (0..64).fold(0.0, |sum, k| sum + of(5 + row, k) * second(k));
                assert_eq!(f32::from_bits(out[64 * row + column]), want, "{row} {column} {columns}");
            }
        }
    }
}

#[test]
fn memory_that_a_product_reads_is_not_overwritten() {
    let (kind, _, what) = fault(warpgroup(false, "st.shared.u32 [%a4+2048], 0;").map(|_| ()));
    assert_eq!(kind, Kind::Race, "{what}");
    warpgroup(false, "@%c0 st.shared.u32 [%a3+512], 0;").unwrap();
}

#[test]
fn addresses_past_an_allocation_are_faults() {
    let mut out = vec![0; 32];
    let body = format!("{START} add.s64 %q0, %p0, %at; st.global.u32 [%q0], %i;");
    run(&body, 1, 32, &mut [&mut out], 1).unwrap();
    let (kind, line, what) = fault(run(&body, 2, 32, &mut [&mut out], 1));
    assert_eq!((kind, line), (Kind::Address, 9), "{what}");
    let (kind, ..) = fault(run(&format!("{START} ld.shared.u32 %a3, [%i];"), 1, 32, &mut [&mut out], 1));
    assert_eq!(kind, Kind::Address);
    let (kind, ..) = fault(run(&format!("{START} ld.global.u32 %a3, [%p0+2];"), 1, 32, &mut [&mut out], 1));
    assert_eq!(kind, Kind::Alignment);
}

#[test]
fn endless_waits_are_faults() {
    let mut out = vec![0; 32];
    let body = format!(
        "{START} mov.u32 %a3, memory; setp.gt.u32 %c1, %i, 31; @%c1 bra end; mbarrier.init.shared::cta.b64 [%a3], 33;
         wait: mbarrier.try_wait.parity.shared::cta.b64 %c0, [%a3], 0; @!%c0 bra wait;
         end:"
    );
    let (kind, line, what) = fault(run(&body, 1, 64, &mut [&mut out], 1));
    assert_eq!((kind, line), (Kind::Deadlock, 10), "{what}");
    assert!(what.contains("lacks 33 arrivals"), "{what}");
    let body = format!("{START} setp.gt.u32 %c1, %i, 31; @%c1 bra end; bar.sync 1, 64; end:");
    let (kind, _, what) = fault(run(&body, 1, 64, &mut [&mut out], 1));
    assert_eq!(kind, Kind::Deadlock);
    assert!(what.contains("barrier 1"), "{what}");
}

#[test]
fn warp_wide_instructions_need_all_lanes() {
    let mut out = vec![0; 32];
    let body = format!("{START} setp.gt.u32 %c1, %i, 15; @%c1 bra end; shfl.sync.bfly.b32 %a3, %i, 1, 31, -1; end:");
    assert_eq!(fault(run(&body, 1, 32, &mut [&mut out], 1)).0, Kind::Undefined);
}

#[test]
fn unknown_instructions_are_named() {
    let error = run("frobnicate.b32 1, 2;", 1, 32, &mut [], 1).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { text, line: 6, .. } if text == "frobnicate.b32"), "{error}");
}
