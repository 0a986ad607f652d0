//! Block masks whose heads differ, so that each query head of a group visits other tiles, with each option and with tiles of every size.

use crate::common::*;
use flash_attention_kernels::blocks::{EMPTY, FULL, PARTIAL};
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::{AttentionOptions, Dtype};
use flash_attention_reference::mods::Bent;

/// Block mask for two batches of six heads in two groups: three blocks of queries, and four of keys. Of each group, the second head sees
/// nothing, and the others see different numbers of blocks. No head sees the last block of queries, nor the second one of keys.
const HEADS: [usize; 4] = [2, 6, 3, 4];

fn heads() -> Vec<u32> {
    let state = |n: usize| {
        let (batch, head, of_q, of_k) = (n / 72, n / 12 % 6, n / 4 % 3, n % 4);
        let sees = match head % 3 {
            0 => of_k == 0 || of_q == 1,
            1 => false,
            _ => of_k >= 2 && (of_q == 0 || batch == 1),
        };
        if !sees || of_q == 2 || of_k == 1 { EMPTY } else { [FULL, PARTIAL][(head + of_k) % 2] }
    };
    (0..HEADS.iter().product()).map(state).collect()
}

#[test]
fn heads_have_lists_of_their_own() {
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(200), window_right: Some(100), ..full };
    let capped = AttentionOptions { softcap: Some(2.0), ..causal() };
    let bent = AttentionOptions { score_mod: Some(ScoreFn::of::<Bent>()), ..full };
    let case = |options| {
        let case = Case::new([2, 6, 2, 300, 420, 16, 24], Dtype::F32, options).with_dlse();
        case.with_block_mask(HEADS, [128, 128], heads())
    };
    let mut cases = vec![
        case(causal()).with_mask([2, 1, 1, 420]),
        case(capped).with_sinks(),
        case(bent).with_dropout(0.3),
        case(window).with_seq_lens_q(&[300, 170]).with_seq_lens_k(&[200, 420]),
    ];
    if thorough() {
        cases.extend([
            case(full),
            case(window).with_sinks().with_alibi_slopes([1, 6]),
            case(capped).with_bias([1, 6, 1, 420]),
            case(causal()).with_mask([2, 6, 300, 420]).with_dropout(0.2),
            case(full).with_layouts([Layout::HeadsInner; 4]),
        ]);
    }
    all(cases);
}

/// A row that sees its first key in a tile that the band shows entirely, because the block mask skips the tile at the band's edge.
#[test]
fn first_keys_after_a_skipped_block() {
    // The first 64 queries end in the second block of keys, the others in the third one.
    let of = |options| Case::new([1, 2, 1, 128, 320, 64, 64], Dtype::F32, options).with_dlse();
    all([causal(), AttentionOptions { window_left: Some(250), ..causal() }]
        .map(|options| of(options).with_block_mask([1, 1, 1, 3], [128, 128], vec![FULL, EMPTY, FULL])));
}

/// NaN in a block of keys or queries reaches the rows that see it, and no others. Lists have tiles of every size.
#[test]
fn nans_reach_the_rows_that_see_them() {
    let Some(client) = client() else { return };
    // Four heads in two groups. The poisoned keys are in the second block of the first key/value head, and the poisoned query is in the
    // last block of the first query head.
    let states = [
        [[FULL, FULL, EMPTY], [PARTIAL, EMPTY, FULL], [FULL, EMPTY, EMPTY]],
        [[FULL, EMPTY, PARTIAL], [EMPTY, EMPTY, EMPTY], [FULL, EMPTY, FULL]],
        [[FULL, FULL, FULL], [FULL, FULL, FULL], [EMPTY, FULL, EMPTY]],
        [[EMPTY, PARTIAL, EMPTY], [FULL, EMPTY, FULL], [FULL, FULL, FULL]],
    ];
    let (heads, keys, query) = (4, 130..140, 260);
    let dims = if thorough() { &[16, 64, 128, 192, 256][..] } else { &[64, 256] };
    for &dim in dims {
        let case = Case::new([1, heads, 2, 300, 310, dim, dim], Dtype::F32, AttentionOptions::default());
        let case = case.with_block_mask([1, heads, 3, 3], [128, 128], states.as_flattened().as_flattened().to_vec());
        if !supports(&client, case.problem.dtype) {
            return;
        }
        let clean = case.run(&client).unwrap();
        let (mut of_keys, mut of_query) = (case.clone(), case.clone());
        of_keys.tensors.k[keys.start * dim..keys.end * dim].fill(f64::NAN);
        of_keys.tensors.v[keys.start * dim..keys.end * dim].fill(f64::NAN);
        of_query.tensors.q[query * dim..][..dim].fill(f64::NAN);
        of_query.dout[query * dim..][..dim].fill(f64::NAN);
        let compare = |what: &str, got: &[f64], want: &[f64], reached: &dyn Fn(usize) -> bool| {
            for (n, (got, want)) in got.iter().zip(want).enumerate() {
                // Recomputed rows have other rounding.
                let close = (got - want).abs() <= case.tolerance(1e-5) * (1.0 + want.abs());
                assert!(if reached(n / dim) { got.is_nan() } else { close }, "{what} {n}: {got} instead of {want}");
            }
        };
        let leaked = of_keys.run(&client).unwrap();
        let reached = |row: usize| row / 300 < 2 && states[row / 300][row % 300 / 128][1] != EMPTY;
        compare("o", &leaked.o, &clean.o, &reached);
        compare("dq", &leaked.dq.unwrap(), clean.dq.as_ref().unwrap(), &reached);
        let leaked = of_query.run(&client).unwrap();
        let reached = |row: usize| row < 310 && states[0][query / 128][row / 128] != EMPTY;
        compare("dk", &leaked.dk.unwrap(), clean.dk.as_ref().unwrap(), &reached);
        compare("dv", &leaked.dv.unwrap(), clean.dv.as_ref().unwrap(), &reached);
    }
}
