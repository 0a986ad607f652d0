//! Forward and backward against the f64 oracle, option by option.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::mods::ScoreFn;
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype, Forward, HopperForward};
use flash_attention_reference::mods::Bent;

/// Number of multiprocessors, or 0 if the driver does not report it.
fn multiprocessors(client: &Client) -> usize {
    client.properties().hardware.num_streaming_multiprocessors.unwrap_or(0) as usize
}

/// Whether the device has as few multiprocessors as the software driver, so that a tenth of a GPU's problem occupies it.
fn few_multiprocessors(client: &Client) -> bool {
    multiprocessors(client) < 16
}

/// Sequence lengths around the edges of tiles. Kernels are not specialised for them, so all lengths share one compilation.
const LENGTHS: [usize; 15] = [0, 1, 3, 17, 63, 64, 65, 113, 127, 129, 203, 257, 799, 1023, 1025];

#[test]
fn every_length() {
    all(LENGTHS.map(|n| Case::new([1, 1, 1, n, n, 16, 16], Dtype::F32, AttentionOptions::default())));
}

#[test]
fn every_length_causal_with_other_keys() {
    let pairs = LENGTHS.into_iter().zip(LENGTHS.into_iter().rev());
    all(pairs.map(|(sq, sk)| Case::new([1, 1, 1, sq, sk, 16, 16], Dtype::F32, causal())));
}

#[test]
fn causal_top_left() {
    let options = AttentionOptions { alignment: Alignment::TopLeft, ..causal() };
    let sizes = [(70, 130), (130, 70), (65, 65)];
    all(sizes.map(|(sq, sk)| Case::new([1, 2, 2, sq, sk, 16, 16], Dtype::F32, options)));
}

#[test]
fn windows() {
    let windows = [(Some(0), Some(0)), (Some(5), Some(40)), (Some(70), Some(3)), (Some(200), Some(200))];
    let lengths = [(130, 130), (60, 150), (150, 60)];
    all(windows.into_iter().flat_map(|(window_left, window_right)| {
        let options = AttentionOptions { window_left, window_right, ..Default::default() };
        lengths.map(|(sq, sk)| Case::new([1, 1, 1, sq, sk, 16, 16], Dtype::F32, options))
    }));
}

#[test]
fn one_sided_windows() {
    let left = AttentionOptions { window_left: Some(33), ..causal() };
    let right = AttentionOptions { window_right: Some(20), ..Default::default() };
    all([left, right].map(|options| Case::new([1, 2, 1, 100, 140, 16, 16], Dtype::F32, options)));
}

/// Head dimensions: odd ones, some that are no multiple of a vector, and the largest.
const HEAD_DIMS: [usize; 14] = [1, 2, 8, 16, 32, 59, 64, 72, 80, 96, 111, 128, 192, 256];

#[test]
fn every_head_dim() {
    let few: &[usize] = if thorough() { &HEAD_DIMS } else { &[1, 59, 64, 128, 256] };
    all(few.iter().map(|d| Case::new([1, 2, 1, 67, 70, *d, *d], Dtype::F32, causal())));
}

#[test]
fn values_of_another_dimension() {
    let pairs: &[(usize, usize)] = if thorough() {
        &[(64, 128), (128, 64), (40, 24), (17, 96), (192, 128), (3, 256)]
    } else {
        &[(40, 24), (17, 96)]
    };
    all(pairs.iter().map(|(d, dv)| Case::new([2, 2, 2, 70, 67, *d, *dv], Dtype::F32, AttentionOptions::default())));
}

#[test]
fn softcap_and_scale() {
    let options = AttentionOptions { softcap: Some(2.0), softmax_scale: Some(0.7), ..causal() };
    all([Case::new([2, 2, 1, 66, 90, 16, 16], Dtype::F32, options).with_dlse()]);
}

#[test]
fn grouped_heads() {
    let heads = [(1, 1), (6, 3), (8, 2), (8, 1)];
    all(heads.map(|(hq, hk)| Case::new([2, hq, hk, 40, 70, 16, 16], Dtype::F32, causal())));
}

#[test]
fn masks_broadcast_in_every_dimension() {
    let (b, h, sq, sk) = (2, 4, 37, 70);
    let shapes = (0..16).map(|bits| {
        let pick = |bit: usize, n: usize| if bits >> bit & 1 == 1 { n } else { 1 };
        [pick(3, b), pick(2, h), pick(1, sq), pick(0, sk)]
    });
    all(shapes.map(|shape| Case::new([b, h, 2, sq, sk, 16, 16], Dtype::F32, causal()).with_mask(shape)));
}

#[test]
fn biases_broadcast_in_every_dimension() {
    let (b, h, sq, sk) = (2, 4, 37, 70);
    let shapes = (0..16).map(|bits| {
        let pick = |bit: usize, n: usize| if bits >> bit & 1 == 1 { n } else { 1 };
        [pick(3, b), pick(2, h), pick(1, sq), pick(0, sk)]
    });
    all(shapes.map(|shape| Case::new([b, h, 2, sq, sk, 16, 16], Dtype::F32, causal()).with_bias(shape)));
}

#[test]
fn everything_at_once() {
    let options = AttentionOptions {
        softmax_scale: Some(0.3),
        softcap: Some(3.0),
        window_left: Some(50),
        alignment: Alignment::TopLeft,
        ..causal()
    };
    all([Case::new([2, 4, 2, 90, 75, 24, 40], Dtype::F32, options)
        .with_mask([2, 1, 1, 75])
        .with_bias([1, 4, 90, 75])
        .with_dlse()]);
}

#[test]
fn slopes() {
    let (b, h) = (2, 4);
    let left = AttentionOptions { window_left: Some(30), softcap: Some(2.0), ..causal() };
    let top_left = AttentionOptions { alignment: Alignment::TopLeft, ..Default::default() };
    let full = AttentionOptions::default();
    all([(full, [1, h]), (causal(), [b, h]), (left, [1, h]), (top_left, [b, h])].into_iter().flat_map(
        |(options, shape)| {
            [(70, 130), (130, 70)].map(|(sq, sk)| {
                Case::new([b, h, 2, sq, sk, 16, 24], Dtype::F32, options).with_alibi_slopes(shape).with_dlse()
            })
        },
    ));
}

#[test]
fn sinks() {
    let options = [AttentionOptions::default(), causal(), AttentionOptions { window_left: Some(9), ..causal() }];
    all(options.into_iter().flat_map(|options| {
        // With more queries than keys, the first queries see only their sinks.
        [(70, 130), (130, 70), (1, 1), (5, 0)]
            .map(|(sq, sk)| Case::new([2, 4, 2, sq, sk, 16, 24], Dtype::F32, options).with_sinks().with_dlse())
    }));
    // Few rows and many keys, which are computed in splits.
    all([Case::new([1, 2, 1, 3, 2049, 64, 64], Dtype::F32, causal()).with_sinks()]);
}

#[test]
fn dropout() {
    let window = AttentionOptions { window_left: Some(40), softcap: Some(2.0), ..causal() };
    all([AttentionOptions::default(), causal(), window].into_iter().flat_map(|options| {
        [(70, 130), (130, 70), (255, 256)]
            .map(|(sq, sk)| Case::new([2, 4, 2, sq, sk, 16, 24], Dtype::F32, options).with_dropout(0.2).with_dlse())
    }));
    // Nearly all pairs dropped, and hardly any.
    all([0.97, 1e-4].map(|rate| Case::new([1, 2, 1, 90, 120, 32, 32], Dtype::F32, causal()).with_dropout(rate)));
}

/// Slopes, sinks and dropout together, at head dimensions with different kernels.
#[test]
fn slopes_sinks_and_dropout() {
    let dims: &[usize] = if thorough() { &[64, 128, 192, 256] } else { &[40] };
    all(dims.iter().flat_map(|d| {
        let case = |options| {
            let case = Case::new([2, 4, 2, 140, 208, *d, *d], Dtype::F32, options);
            case.with_alibi_slopes([2, 4]).with_sinks().with_dropout(0.3).with_dlse()
        };
        let capped = AttentionOptions { softcap: Some(3.0), ..causal() };
        [
            case(causal()),
            case(capped).with_bias([1, 4, 140, 208]).with_mask([2, 1, 1, 208]),
            case(AttentionOptions::default()).with_bias([2, 1, 1, 208]),
            Case { fused: d <= &128, ..case(causal()) },
        ]
    }));
}

/// NaN and infinity in hidden keys do not leak with slopes, sinks and dropout.
#[test]
fn hidden_nans_do_not_leak_with_slopes_sinks_and_dropout() {
    let Some(client) = client() else { return };
    let case = Case::new([1, 2, 1, 140, 200, 16, 16], Dtype::F32, causal());
    let case = case.with_alibi_slopes([1, 2]).with_sinks().with_dropout(0.3);
    if !supports(&client, case.problem.dtype) {
        return;
    }
    let clean = case.check(&client);
    let mut poisoned = case.clone();
    // Only the last ten queries see the last ten keys.
    poisoned.tensors.v[190 * 16..].fill(f64::NAN);
    poisoned.tensors.k[190 * 16..].fill(f64::INFINITY);
    let got = poisoned.run(&client).unwrap();
    let (dq, clean_dq) = (got.dq.unwrap(), clean.dq.unwrap());
    for (name, got, want, limit) in [("o", &got.o, &clean.o, 1e-5), ("dq", &dq, &clean_dq, 4e-5)] {
        for (n, (got, want)) in got.iter().zip(want).enumerate().filter(|(n, _)| n / 16 % 140 < 130) {
            let close = (got - want).abs() <= case.tolerance(limit) * (1.0 + want.abs());
            assert!(close, "{name} of row {}: {got} instead of {want}", n / 16);
        }
    }
}

/// The same seed drops the same pairs, another seed drops others, and `dropout_kept` writes out the mask that is used.
#[test]
fn dropout_depends_on_its_seed_alone() {
    let Some(client) = client() else { return };
    // With equal keys and values of 1, o is the fraction of kept pairs divided by the probability of keeping.
    let mut case = Case::new([2, 2, 1, 50, 70, 16, 16], Dtype::F32, causal()).with_dropout(0.5);
    if !supports(&client, case.problem.dtype) {
        return;
    }
    case.tensors.k.fill(0.0);
    case.tensors.v.fill(1.0);
    let first = case.run(&client).unwrap();
    assert_eq!(first.o, case.run(&client).unwrap().o);
    assert_ne!(first.o, Case { seed: [1, 2], ..case.clone() }.run(&client).unwrap().o);
    let mut numbered = Case { seed: [1, 2], ..case.clone() };
    numbered.problem.options.dropout_seed = Some(u64::from(case.seed[0]) | u64::from(case.seed[1]) << 32);
    assert_eq!(first.o, numbered.run(&client).unwrap().o);
    let (kept, band) = (flash_attention_reference::kept(&case.problem, case.seed), case.problem.band());
    assert_eq!(case.kept(&client), kept);
    for (row, o) in first.o.chunks_exact(16).enumerate() {
        let seen: Vec<usize> = (0..70).filter(|j| band.sees(row as u32 % 50, *j as u32)).collect();
        let share = seen.iter().filter(|j| kept[row * 70 + *j]).count() as f64 / seen.len() as f64;
        assert!((o[0] - 2.0 * share).abs() <= case.tolerance(1e-5), "row {row}: {} instead of {}", o[0], 2.0 * share);
    }
}

#[test]
fn half_precision() {
    all([Dtype::F16, Dtype::BF16].into_iter().flat_map(|dtype| {
        [
            Case::new([1, 4, 2, 100, 130, 64, 64], dtype, causal()),
            Case::new([1, 2, 2, 65, 70, 33, 17], dtype, AttentionOptions::default()).with_bias([1, 2, 1, 70]),
        ]
    }));
}

/// More work tiles than thread blocks run at a time, and more tiles of keys than a pipeline has stages.
#[test]
fn more_work_tiles_than_thread_blocks() {
    let Some(client) = client() else { return };
    let window = AttentionOptions { window_left: Some(300), ..causal() };
    let full = AttentionOptions::default();
    let (multiprocessors, few) = (multiprocessors(&client), few_multiprocessors(&client));
    let cases: [(Sizes, Sizes, AttentionOptions); 4] = [
        ([3, 2, 1, 300, 500, 64, 64], [3, 40, 20, 300, 500, 64, 64], causal()),
        ([1, 8, 8, 200, 900, 16, 128], [1, 80, 80, 200, 900, 16, 128], full),
        ([2, 4, 2, 390, 1000, 16, 16], [2, 40, 8, 390, 1000, 16, 16], window),
        ([2, 4, 2, 260, 900, 32, 256], [2, 40, 8, 260, 900, 32, 256], causal()),
    ];
    for dtype in [Dtype::F16, Dtype::BF16] {
        if !supports(&client, dtype) {
            continue;
        }
        for (small, large, options) in cases {
            let case = Case::new(if few { small } else { large }, dtype, options);
            // Other kernels launch a thread block for each work tile, so the assertions below do not apply to them.
            let Forward::Hopper(HopperForward { tile, num_splits, .. }) = case.check(&client).forward else { continue };
            let p = case.problem;
            let blocks = p.batch * p.num_heads_q * p.seq_q.div_ceil(tile.tile_q());
            assert!(num_splits == 1 && blocks > multiprocessors * tile.consumer_groups, "{blocks} blocks for {tile:?}");
            assert!(p.seq_k.div_ceil(tile.tile_k) > tile.stages, "{} keys for {tile:?}", p.seq_k);
        }
    }
}

/// Every tile shape that is planned for half precision on CUDA, in a minute under a sanitizer.
#[test]
fn every_planned_tile() {
    let dims = if thorough() { vec![64, 128, 192, 256] } else { vec![64] };
    let case = |d: usize, sq: usize, sk: usize| Case::new([1, 4, 2, sq, sk, d, d], Dtype::F32, causal());
    all(dims.iter().map(|d| case(*d, 200, 300)));
    all(dims.iter().map(|d| case(*d, 200, 304).with_bias([1, 4, 200, 304])));
    // Many keys have other tiles, and splits of the keys.
    all([case(64, 70, 4200), case(128, 70, 2100).with_mask([1, 1, 70, 2100])]);
    // The fused kernel for dq, dk and dv.
    all(dims.iter().map(|d| Case { fused: true, ..case(*d, 300, 200) }));
}

/// Biases with an element for each pair, shared by batches, heads, both or none, at lengths around the edges of tiles. Rows of 304 elements
/// are loaded by TMA and stored as vectors, rows of 308 are stored as vectors, rows of 301 neither.
#[test]
fn biases_of_each_pair() {
    let window = AttentionOptions { window_left: Some(70), window_right: Some(9), ..Default::default() };
    let options = [AttentionOptions::default(), causal(), window];
    let sizes = [(200, 304), (130, 308), (300, 301), (1, 72), (129, 1), (257, 64)];
    // One head dimension, because each one compiles its own kernels.
    let case = |sq, sk, [b, h]: [usize; 2], options| {
        Case::new([2, 4, 2, sq, sk, 16, 16], Dtype::F32, options).with_bias([b, h, sq, sk])
    };
    all(sizes.into_iter().flat_map(|(sq, sk)| options.map(|options| case(sq, sk, [1, 4], options))));
    for shared in [[2, 4], [2, 1], [1, 1]] {
        all(sizes.map(|(sq, sk)| case(sq, sk, shared, causal())));
    }
}

/// The same at every head dimension with its own tiles, and with other options beside the bias.
#[test]
fn biases_of_each_pair_and_head_dimension() {
    let dims: &[(usize, usize)] =
        if thorough() { &[(64, 64), (128, 128), (192, 128), (64, 256), (256, 256), (59, 111)] } else { &[(59, 111)] };
    all(dims
        .iter()
        .map(|(d, dv)| Case::new([2, 4, 2, 200, 304, *d, *dv], Dtype::F32, causal()).with_bias([1, 4, 200, 304])));
    let capped = AttentionOptions { softcap: Some(3.0), softmax_scale: Some(0.3), ..causal() };
    let case = |mask: [usize; 4]| {
        Case::new([2, 4, 2, 140, 208, 64, 64], Dtype::F32, capped)
            .with_bias([1, 4, 140, 208])
            .with_mask(mask)
            .with_dlse()
    };
    all([[2, 1, 1, 208], [1, 4, 140, 208], [2, 4, 140, 1]].map(case));
    // More blocks than thread blocks, and blocks of queries that see no key.
    let Some(client) = client() else { return };
    let heads = if few_multiprocessors(&client) { [4, 3, 1] } else { [40, 12, 4] };
    let [many, some, fewer] = heads;
    all([
        Case::new([1, many, many, 520, 1100, 16, 16], Dtype::F32, causal()).with_bias([1, many, 520, 1100]),
        Case::new([3, some, fewer, 700, 304, 16, 16], Dtype::F32, causal()).with_bias([1, some, 700, 304]),
        Case::new([3, some, fewer, 700, 304, 16, 16], Dtype::F32, causal()).with_bias([3, some, 700, 304]),
    ]);
}

/// The bias gradient of hidden pairs is 0, and NaN or infinity in hidden keys, or in the queries of other rows, does not reach any other
/// element of it.
#[test]
fn hidden_pairs_have_no_bias_gradient() {
    let Some(client) = client() else { return };
    let case = Case::new([2, 2, 1, 140, 200, 16, 16], Dtype::F32, causal()).with_bias([2, 2, 140, 200]);
    if !supports(&client, case.problem.dtype) {
        return;
    }
    let clean = case.run(&client).unwrap().dbias.unwrap();
    let band = case.problem.band();
    // Only the last ten queries see the last ten keys.
    let hidden = |n: usize| n / 200 % 140 < 130;
    for poison in [f64::NAN, f64::INFINITY] {
        let mut keys = case.clone();
        let mut queries = case.clone();
        for batch in 0..2 {
            keys.tensors.v[(batch * 200 + 190) * 16..(batch + 1) * 200 * 16].fill(poison);
        }
        for head in 0..4 {
            queries.tensors.q[(head * 140 + 130) * 16..(head + 1) * 140 * 16].fill(poison);
            queries.dout[(head * 140 + 130) * 16..(head + 1) * 140 * 16].fill(poison);
        }
        for case in [keys, queries] {
            let got = case.run(&client).unwrap().dbias.unwrap();
            for (n, (got, want)) in got.iter().zip(&clean).enumerate() {
                let (i, j) = (n / 200 % 140, n % 200);
                // Rows of `o` that the poison has reached are recomputed one by one, with other rounding.
                let close = (got - want).abs() <= case.tolerance(1e-5) * (1.0 + want.abs());
                assert!(!hidden(n) || close, "({i}, {j}): {got} instead of {want} with {poison}");
                assert!(
                    band.sees(i as u32, j as u32) || *got == 0.0,
                    "({i}, {j}) is hidden, but its gradient is {got} with {poison}"
                );
            }
        }
    }
}

/// Few heads and blocks of queries: kernels compute splits of the keys and combine them.
#[test]
fn few_heads_and_many_keys() {
    let window = AttentionOptions { window_left: Some(700), ..causal() };
    let full = AttentionOptions::default();
    let masked = Case::new([1, 2, 1, 40, 1300, 16, 24], Dtype::F32, full).with_mask([1, 2, 1, 1300]);
    let biased = Case::new([1, 2, 1, 70, 1200, 16, 16], Dtype::F32, causal()).with_bias([1, 2, 70, 1200]);
    let mut leaky = Case::new([1, 1, 1, 30, 1100, 16, 16], Dtype::F32, causal());
    leaky.wanted = [false; 7];
    leaky.tensors.v[1090 * 16..].fill(f64::NAN);
    all([
        Case::new([1, 1, 1, 100, 3000, 64, 64], Dtype::F32, causal()),
        Case::new([1, 2, 1, 1, 2049, 128, 128], Dtype::F32, full),
        Case::new([1, 1, 1, 300, 1500, 72, 40], Dtype::F32, window),
        masked,
        biased,
        leaky,
    ]);
}

/// Blocks of queries whose diagonal does not end at the edge of a tile of keys.
#[test]
fn one_query_fewer_than_keys() {
    let options = [causal(), AttentionOptions { window_right: Some(3), window_left: Some(90), ..Default::default() }];
    all(options.into_iter().flat_map(|options| {
        [(255, 256), (383, 400), (256, 255), (100, 227)]
            .map(|(sq, sk)| Case::new([1, 2, 2, sq, sk, 64, 64], Dtype::F32, options).with_dlse())
    }));
}

/// Scores that change from one tile of keys to the next by more than the range of exponentials. Keys are nearly equal within each 64, and
/// every third query has scores of the opposite sign.
#[test]
fn scores_that_rise_and_fall_from_tile_to_tile() {
    let levels: [[f64; 7]; 3] = [
        [75.0, 45.0, 15.0, -15.0, -45.0, -75.0, -105.0],
        [50.0, 0.0, -30.0, -60.0, -150.0, -160.0, 20.0],
        [-100.0, 0.0, 40.0, -60.0, -150.0, -160.0, -164.0],
    ];
    all(levels.into_iter().flat_map(|levels| {
        [AttentionOptions::default(), causal()].map(|options| {
            let mut case = Case::new([1, 1, 1, 448, 448, 64, 64], Dtype::F32, options);
            case.tensors.q.fill(0.0);
            case.tensors.k.fill(0.0);
            for row in 0..448 {
                case.tensors.q[row * 64] = if row % 3 == 0 { -8.0 } else { 8.0 };
                case.tensors.k[row * 64] = levels[row / 64] + (row % 7) as f64 / 4.0;
            }
            flash_attention_reference::round_to(&mut case.tensors.k, case.problem.dtype);
            // The rounding error of scores this large would dominate their gradients.
            case.wanted = [false; 7];
            case
        })
    }));
}

#[test]
fn strided_inputs_are_read_in_place() {
    use Layout::*;
    let layouts = [
        [HeadsInner, HeadsInner, HeadsInner, HeadsInner],
        [Padded(4), Padded(8), Contiguous, RepeatedRows],
        [Transposed, Contiguous, Padded(3), Scalar],
        [RepeatedRows, HeadsInner, RepeatedRows, Transposed],
    ];
    all(layouts.map(|layouts| Case::new([2, 2, 2, 66, 70, 16, 16], Dtype::F32, causal()).with_layouts(layouts)));
}

#[test]
fn every_subset_of_gradients() {
    let Some(client) = client() else { return };
    let case = Case::new([1, 2, 1, 40, 70, 16, 16], Dtype::F32, causal()).with_bias([1, 2, 40, 70]);
    let mut case = case.with_alibi_slopes([1, 2]).with_sinks();
    case.problem.options.score_mod = Some(ScoreFn::of::<Bent>());
    let case = case.with_score_tensors(&[[1, 2, 1, 1], [1, 1, 40, 1]]);
    let full = case.check(&client);
    // On slow devices: each gradient by itself, all, none, and some other subsets.
    for bits in (0..128u32).filter(|bits| thorough() || bits.count_ones() < 2 || bits % 9 == 1 || *bits == 127) {
        let wanted = [0, 1, 2, 3, 4, 5, 6].map(|n| bits >> n & 1 == 1);
        let results = Case { wanted, ..case.clone() }.run(&client).unwrap();
        let pairs = [
            (&results.dq, &full.dq),
            (&results.dk, &full.dk),
            (&results.dv, &full.dv),
            (&results.dbias, &full.dbias),
            (&results.dalibi_slopes, &full.dalibi_slopes),
            (&results.dsinks, &full.dsinks),
            (&results.dscore_tensors[0], &full.dscore_tensors[0]),
            (&results.dscore_tensors[1], &full.dscore_tensors[1]),
        ];
        for (n, (got, want)) in pairs.into_iter().enumerate() {
            assert_eq!(got.is_some(), wanted[n.min(6)]);
            assert!(got.is_none() || got == want, "gradient {n} of {wanted:?} differs from that computed with all");
        }
    }
}

#[test]
fn empty_batch_heads_queries_keys() {
    let sizes: [Sizes; 5] = [
        [0, 2, 1, 5, 7, 16, 16],
        [1, 0, 0, 5, 7, 16, 16],
        [1, 2, 1, 0, 7, 16, 16],
        [1, 2, 1, 5, 0, 16, 8],
        [2, 2, 2, 0, 0, 16, 16],
    ];
    all(sizes.map(|sizes| Case::new(sizes, Dtype::F32, AttentionOptions::default())));
}

#[test]
fn fully_masked_rows() {
    // There are 60 more queries than keys, so with bottom-right alignment the first 60 see no key.
    let few_keys = Case::new([1, 2, 1, 100, 40, 16, 16], Dtype::F32, causal()).with_dlse();
    // A mask that hides all keys of some rows and of one head.
    let mut masked = Case::new([2, 2, 2, 33, 40, 16, 16], Dtype::F32, causal()).with_mask([2, 2, 33, 1]);
    for (n, hides) in masked.tensors.mask.as_mut().unwrap().iter_mut().enumerate() {
        *hides = n % 33 % 3 == 0 || n < 33;
    }
    // A bias of −∞ hides pairs, too.
    let mut biased = Case::new([1, 2, 2, 33, 40, 16, 16], Dtype::F32, causal()).with_bias([1, 1, 33, 1]);
    for (n, bias) in biased.tensors.bias.as_mut().unwrap().iter_mut().enumerate() {
        if n % 4 == 0 {
            *bias = f64::NEG_INFINITY;
        }
    }
    all([few_keys, masked, biased]);
}

/// Scores around −1e6 and 1e6 reveal a finite mask value such as −1e5, or a maximum that starts at 0. Each row of `o` is a mean of values,
/// most often of one.
#[test]
fn logits_below_any_finite_mask_value() {
    let Some(client) = client() else { return };
    for sign in [1.0, -1.0] {
        let mut case = Case::new([1, 1, 1, 40, 70, 16, 16], Dtype::F32, causal());
        case.tensors.q.iter_mut().for_each(|x| *x = 1000.0 + x.round());
        case.tensors.k.iter_mut().for_each(|x| *x = sign * 256.0 + x.round() / 4.0);
        flash_attention_reference::round_to(&mut case.tensors.q, case.problem.dtype);
        flash_attention_reference::round_to(&mut case.tensors.k, case.problem.dtype);
        // The rounding error of scores this large would dominate their gradients.
        case.wanted = [false; 7];
        let results = case.check(&client);
        assert!(results.lse.iter().all(|x| x.is_finite() && x * sign > 1e5), "{:?}", &results.lse[..4]);
        let is_mean = |o: &[f64]| o.iter().all(|x| x.is_finite() && x.abs() < 5.0) && o.iter().any(|x| x.abs() > 0.1);
        assert!(results.o.chunks(16).all(is_mean), "every output must be a mean of values");
    }
}
