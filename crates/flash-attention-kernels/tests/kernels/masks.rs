//! Visibility of pairs, on the host: the functions of `Band` that kernels and oracle share.

use flash_attention_kernels::mask::Band;
use flash_attention_kernels::{Alignment, AttentionOptions};
use proptest::prelude::*;
use std::ops::Range;

fn options() -> impl Strategy<Value = AttentionOptions> {
    let window = || prop_oneof![Just(None), (0usize..12).prop_map(Some), Just(Some(usize::MAX))];
    (any::<bool>(), any::<bool>(), window(), window()).prop_map(|(causal, top_left, window_left, window_right)| {
        let alignment = if top_left { Alignment::TopLeft } else { Alignment::BottomRight };
        AttentionOptions { causal, alignment, window_left, window_right, ..Default::default() }
    })
}

/// Whether query `i` sees key `j`: the contract, written out with integers that cannot overflow.
fn sees(o: &AttentionOptions, seq_q: usize, seq_k: usize, i: usize, j: usize) -> bool {
    let diagonal = match o.alignment {
        Alignment::BottomRight => seq_k as i128 - seq_q as i128,
        Alignment::TopLeft => 0,
    };
    let distance = j as i128 - (i as i128 + diagonal);
    let left = o.window_left.is_none_or(|left| distance >= -(left as i128));
    let right = o.window_right.is_none_or(|right| distance <= right as i128);
    left && right && (!o.causal || distance <= 0)
}

/// A range of positions within a sequence.
fn part(of: [prop::sample::Index; 2], seq: usize) -> Range<usize> {
    let [a, b] = of.map(|n| n.index(seq + 1));
    a.min(b)..a.max(b)
}

/// The band of a packed sequence with these queries and keys.
fn of(band: Band, q: &Range<usize>, k: &Range<usize>) -> Band {
    band.of(3, q.start as u32, q.end as u32, k.start as u32, k.end as u32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_pair_is_seen_as_the_contract_says(o in options(), seq_q in 0usize..20, seq_k in 0usize..20) {
        let band = Band::new(seq_q, seq_k, &o);
        for i in 0..seq_q + 2 {
            for j in 0..seq_k + 2 {
                let want = i < seq_q && j < seq_k && sees(&o, seq_q, seq_k, i, j);
                prop_assert_eq!(band.sees(i as u32, j as u32), want, "i {} j {} {:?}", i, j, band);
            }
        }
    }

    #[test]
    fn pairs_of_a_sequence_are_visible_as_if_it_were_alone(
        o in options(), seq_q in 0usize..20, seq_k in 0usize..20, q in any::<[prop::sample::Index; 2]>(),
        k in any::<[prop::sample::Index; 2]>(),
    ) {
        let (q, k) = (part(q, seq_q), part(k, seq_k));
        let band = of(Band::new(seq_q, seq_k, &o), &q, &k);
        for i in 0..seq_q + 2 {
            let run = band.run(i as u32, 0, false);
            for j in 0..seq_k + 2 {
                let inside = q.contains(&i) && k.contains(&j);
                let want = inside && sees(&o, q.len(), k.len(), i - q.start, j - k.start);
                prop_assert_eq!(band.sees(i as u32, j as u32), want, "i {} j {} {:?}", i, j, band);
                prop_assert_eq!(band.transposed().sees(j as u32, i as u32), want, "j {} i {} {:?}", j, i, band);
                let in_run = (!run.bounded_below || j as i32 >= run.start) && (j as i32) < run.end;
                // Tiles start at the first key of a sequence, and rows past its end are not stored.
                prop_assert!(in_run == want || !q.contains(&i) || j < k.start, "i {} j {} {:?}", i, j, band);
            }
        }
    }

    #[test]
    fn skipped_blocks_hold_no_pair_and_fully_visible_blocks_all_pairs(
        o in options(), seq_q in 1usize..40, seq_k in 1usize..40, tile_q in 1u32..9, tile_k in 1u32..9,
        parts in proptest::option::of(any::<[prop::sample::Index; 4]>()),
    ) {
        let band = Band::new(seq_q, seq_k, &o);
        let parts = parts.map(|[q0, q1, k0, k1]| (part([q0, q1], seq_q), part([k0, k1], seq_k)));
        let band = parts.as_ref().map_or(band, |(q, k)| of(band, q, k));
        let (first_q, first_k) = parts.map_or((0, 0), |(q, k)| (q.start as u32, k.start as u32));
        for q_block in 0..(seq_q as u32).div_ceil(tile_q) {
            let q_start = first_q + q_block * tile_q;
            let keys = band.k_blocks(q_start, tile_q, tile_k);
            prop_assert!(keys.start <= keys.end && keys.end <= (seq_k as u32).div_ceil(tile_k));
            for k_block in 0..(seq_k as u32).div_ceil(tile_k) {
                let k_start = first_k + k_block * tile_k;
                let pairs = (q_start..q_start + tile_q).flat_map(|i| (k_start..k_start + tile_k).map(move |j| (i, j)));
                let seen = pairs.clone().filter(|(i, j)| band.sees(*i, *j)).count();
                let visited = (keys.start..keys.end).contains(&k_block);
                prop_assert!(visited || seen == 0, "keys {:?} skip block {} of {:?}", keys, k_block, band);
                let queries = band.q_blocks(k_start, tile_q, tile_k);
                let visited = (queries.start..queries.end).contains(&q_block);
                prop_assert!(visited || seen == 0, "queries {:?} skip block {} of {:?}", queries, q_block, band);
                let fully_visible = band.fully_visible(q_start, k_start, tile_q, tile_k);
                prop_assert_eq!(fully_visible, seen == (tile_q * tile_k) as usize);
                prop_assert!(band.meets(q_start, k_start, tile_q, tile_k) || seen == 0);
            }
        }
    }
}

#[test]
fn blocks_that_hold_no_pair_are_skipped() {
    // 64 queries and keys, causal: the blocks on and under the diagonal, in both directions.
    let band = Band::new(64, 64, &AttentionOptions { causal: true, ..Default::default() });
    for block in 0..4 {
        let (keys, queries) = (band.k_blocks(16 * block, 16, 16), band.q_blocks(16 * block, 16, 16));
        assert_eq!((keys.start, keys.end), (0, block + 1));
        assert_eq!((queries.start, queries.end), (block, 4));
    }
    // A window of 16 keys to the left: two blocks of keys for each block of queries.
    let window = AttentionOptions { causal: true, window_left: Some(16), ..Default::default() };
    let keys = Band::new(64, 64, &window).k_blocks(32, 16, 16);
    assert_eq!((keys.start, keys.end), (1, 3));
}

/// Functions for kernels with fragments in registers: which blocks are at an edge of the band, and which keys of a block a row sees.
#[test]
fn edges_and_runs_are_the_band() {
    let windows = [None, Some(0), Some(5), Some(40)];
    for (seq_q, seq_k) in [(37, 37), (20, 50), (50, 20), (16, 64), (1, 9)] {
        for (causal, left, right) in
            [false, true].into_iter().flat_map(|c| windows.into_iter().flat_map(move |l| windows.map(|r| (c, l, r))))
        {
            let options = AttentionOptions { causal, window_left: left, window_right: right, ..Default::default() };
            let band = Band::new(seq_q, seq_k, &options);
            for q_start in (0..seq_q as u32).step_by(8) {
                let blocks = band.k_blocks(q_start, 8, 16);
                if blocks.start == blocks.end {
                    continue;
                }
                let k_last = (blocks.end - 1) * 16;
                let edges = band.edges(q_start, k_last, 8, 16);
                for step in 0..blocks.end - blocks.start {
                    let k_start = k_last - step * 16;
                    let queries = q_start..(q_start + 8).min(seq_q as u32);
                    let hidden = queries.clone().any(|i| (k_start..k_start + 16).any(|j| !band.sees(i, j)));
                    if hidden {
                        assert!(step < edges.lead || step >= edges.tail, "{band:?} {q_start} {step} {edges:?}");
                    }
                    for i in queries {
                        let run = band.run(i, k_start, false);
                        for eight in 0..4 {
                            for bit in 0..32 {
                                let key = k_start + 8 * (eight + bit / 2) + bit % 2;
                                let seen = run.pairs(eight) >> bit & 1 == 1;
                                assert_eq!(seen, band.sees(i, key), "{band:?} {i} {k_start} {key}");
                            }
                            assert_eq!(band.run(i, k_start, true).pairs(eight), 0);
                        }
                    }
                }
                // The first block in which a query sees a key is the first of all or an edge.
                for i in q_start..(q_start + 8).min(seq_q as u32) {
                    let sees = |step: &u32| (0..16).any(|d| band.sees(i, k_last - step * 16 + d));
                    let begins = (0..blocks.end - blocks.start).find(sees).unwrap_or(0);
                    assert!(begins == 0 || begins < edges.lead || begins >= edges.tail, "{band:?} {i} {edges:?}");
                }
                // The leading edge is at most one block too wide, and only for queries past the last one.
                if q_start + 8 <= seq_q as u32 && edges.lead > 0 {
                    let k_start = k_last - (edges.lead - 1).min(blocks.end - blocks.start - 1) * 16;
                    let hides = (q_start..q_start + 8).any(|i| (k_start..k_start + 16).any(|j| !band.sees(i, j)));
                    assert!(hides || !band.sees(q_start, k_start + 16), "{band:?} {q_start} {edges:?}");
                }
            }
        }
    }
}

#[test]
fn the_longest_sequences_do_not_overflow() {
    let longest = flash_attention_kernels::MAX_SEQ;
    for options in [
        AttentionOptions { causal: true, ..Default::default() },
        AttentionOptions { causal: true, alignment: Alignment::TopLeft, ..Default::default() },
        AttentionOptions { window_left: Some(usize::MAX), window_right: Some(usize::MAX), ..Default::default() },
        AttentionOptions { window_left: Some(3), window_right: Some(5), ..Default::default() },
    ] {
        for (seq_q, seq_k) in [(longest, longest), (1, longest), (longest, 1)] {
            let band = Band::new(seq_q, seq_k, &options);
            for i in [0, seq_q / 2, seq_q - 1] {
                for j in [0, seq_k / 2, seq_k - 1] {
                    assert_eq!(band.sees(i as u32, j as u32), sees(&options, seq_q, seq_k, i, j), "{band:?} {i} {j}");
                }
            }
            band.k_blocks(seq_q as u32 - 1, 64, 64);
            band.q_blocks(seq_k as u32 - 1, 64, 64);
        }
    }
}
