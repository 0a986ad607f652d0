//! Few rows in the portable forward: query heads of a group as rows of one tile, and splits of the keys among thread blocks.

use crate::common::*;
use flash_attention_kernels::mods::{Alibi, MaskFn, ScoreFn};
use flash_attention_kernels::{
    Alignment, AttentionOptions, Dtype, FewRowsForward, FewRowsTile, Forward, Kernel, PortableForward, plan_with,
};
use flash_attention_reference::mods::Strided;

/// The plan of a case for this kernel, with this number of splits instead of the planned one. `None` where another kernel is tested.
fn planned(case: &Case, num_splits: Option<usize>) -> Option<FewRowsForward> {
    let client = client()?;
    if forced_kernel(case.problem.dtype).is_some_and(|kernel| kernel != Kernel::Portable) {
        return None;
    }
    let plan = plan_with(&client, &case.problem, Kernel::Portable).unwrap();
    let Forward::Portable(PortableForward::FewRows(few)) = plan.forward else { panic!("{plan}") };
    Some(FewRowsForward { num_splits: num_splits.unwrap_or(few.num_splits), ..few })
}

/// The case with this plan. Its gradients, which other kernels compute, are not requested.
fn with_plan(case: Case, plan: FewRowsForward) -> Case {
    let backward = plan_with(&client().unwrap(), &case.problem, Kernel::Portable).unwrap().backward;
    Case { tiles: Some((plan.into(), backward)), wanted: [false; 7], ..case }
}

/// Checks each case with the planned tile and this number of splits.
fn split(num_splits: usize, cases: impl IntoIterator<Item = Case>) {
    all(cases.into_iter().filter_map(|case| planned(&case, Some(num_splits)).map(|plan| with_plan(case, plan))));
}

/// Groups of 1, 2, 3, 4 and 8 heads, one query and several, head dimensions that are no multiple of a vector or of the threads of a key.
/// Compilers of processors need seconds for the larger ones.
fn few() -> Vec<Sizes> {
    let mut sizes = vec![
        [2, 4, 2, 1, 70, 32, 32],
        [1, 6, 2, 1, 300, 40, 24],
        [1, 8, 2, 2, 129, 30, 32],
        [1, 2, 2, 5, 133, 16, 64],
        [1, 4, 1, 4, 140, 32, 16],
    ];
    if thorough() {
        sizes.extend([
            [2, 32, 8, 1, 257, 128, 128],
            [1, 12, 4, 16, 190, 64, 64],
            [2, 4, 1, 3, 65, 192, 128],
            [1, 8, 2, 7, 140, 256, 256],
            [1, 64, 1, 1, 100, 64, 64],
        ]);
    }
    sizes
}

/// Every option that is applied to rows or to heads of their own, with one split and with several.
#[test]
fn options_of_few_rows() {
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(40), window_right: Some(3), ..full };
    let capped = AttentionOptions { softcap: Some(2.0), softmax_scale: Some(0.4), ..causal() };
    let cases = |sizes: Sizes| {
        let case = |options| Case::new(sizes, Dtype::F32, options);
        let [b, hq, _, sq, sk, ..] = sizes;
        [
            case(full),
            case(window).with_sinks(),
            case(capped).with_bias([1, hq, sq, sk]),
            case(full).with_mask([b, hq, 1, sk]),
            case(causal()).with_alibi_slopes([1, hq]).with_sinks(),
        ]
    };
    for (nth, sizes) in few().into_iter().enumerate() {
        let by = if nth % 2 == 0 { 1 } else { 3 };
        // Each case compiles a kernel. The last ones have more options at once.
        split(by, cases(sizes).into_iter().skip(nth.min(3)));
    }
}

/// Lengths of the caches, which only the device knows: rows that see no key, caches that end within a tile, and splits without keys.
#[test]
fn lengths_of_few_rows() {
    let case = |sizes: Sizes, options, lens_k: &[usize]| Case::new(sizes, Dtype::F32, options).with_seq_lens_k(lens_k);
    for num_splits in [1, 4] {
        split(
            num_splits,
            [
                case([4, 4, 2, 1, 300, 32, 32], causal(), &[300, 1, 0, 129]),
                case([3, 6, 2, 2, 200, 32, 32], causal(), &[1, 64, 200]).with_sinks(),
                case([2, 8, 2, 3, 500, 32, 32], AttentionOptions { window_left: Some(70), ..causal() }, &[77, 499]),
                case([2, 4, 1, 4, 90, 16, 16], AttentionOptions::default(), &[90, 33]).with_seq_lens_q(&[1, 4]),
                case([2, 4, 1, 4, 90, 16, 16], causal(), &[90, 0]).with_seq_lens_q(&[0, 4]).with_sinks(),
            ],
        );
    }
}

/// A window that leaves one tile of keys, in the middle of the cache, to one of several splits; and one that hides all keys.
#[test]
fn windows_leave_splits_without_keys() {
    let window = |left, right| AttentionOptions { window_left: Some(left), window_right: right, ..Default::default() };
    let case = |options| Case::new([1, 4, 2, 1, 400, 64, 64], Dtype::F32, options);
    let top_left = AttentionOptions { alignment: Alignment::TopLeft, ..window(0, Some(0)) };
    split(5, [case(window(10, Some(0))), case(window(150, None)).with_sinks(), case(top_left)]);
    let mut hidden = case(AttentionOptions::default()).with_mask([1, 1, 1, 1]);
    hidden.tensors.mask = Some(vec![true]);
    split(3, [hidden.clone(), hidden.with_sinks()]);
}

/// Hidden keys that are not finite reach no row, and a visible value reaches the rows that see it.
#[test]
fn hidden_nans_do_not_leak_into_few_rows() {
    let mut case = Case::new([1, 4, 2, 3, 150, 64, 64], Dtype::F32, causal()).with_seq_lens_k(&[149]);
    case.tensors.k[149 * 64] = f64::INFINITY;
    case.tensors.v[147 * 64..][..64].fill(f64::NAN);
    split(1, [case.clone()]);
    split(2, [case]);
}

/// Plans of the caller: several blocks of rows, any number of splits, threads that share a key in several ways.
#[test]
fn tiles_and_splits_of_the_caller() {
    let window = AttentionOptions { window_left: Some(60), ..causal() };
    let tile = |rows, tile_k, lanes, reads| FewRowsTile { rows, tile_k, lanes, reads };
    for (sizes, options, tile, num_splits) in [
        ([1, 4, 2, 13, 100, 64, 64], causal(), tile(4, 32, 1, 1), 2),
        ([1, 6, 2, 5, 170, 64, 64], causal(), tile(8, 16, 2, 4), 3),
        ([2, 4, 2, 1, 100, 16, 16], causal(), tile(4, 128, 8, 16), 8),
        ([1, 6, 2, 11, 170, 40, 40], window, tile(16, 16, 16, 8), 2),
        ([1, 8, 1, 2, 90, 6, 5], window, tile(8, 64, 4, 8), 1),
        ([1, 2, 2, 1, 60, 3, 200], causal(), tile(16, 32, 4, 2), 1),
    ] {
        let case = Case::new(sizes, Dtype::F32, options).with_sinks();
        if planned(&case, None).is_some() {
            all([with_plan(case, FewRowsForward { tile, num_splits })]);
        }
    }
}

/// More splits than are combined at a time, of which later ones have higher scores, and the last ones no keys.
#[test]
fn many_splits_are_combined() {
    let tile = FewRowsTile { rows: 4, tile_k: 16, lanes: 4, reads: 8 };
    let mut case = Case::new([1, 4, 2, 1, 330, 16, 16], Dtype::F32, causal());
    for (nth, x) in case.tensors.k.iter_mut().enumerate() {
        // Powers of two, so that half precision represents the products.
        *x *= if nth / 16 % 330 < 200 { 0.5 } else { 2.0 };
    }
    for case in [case.clone(), case.with_sinks()] {
        if planned(&case, None).is_some() {
            all([with_plan(case, FewRowsForward { tile, num_splits: 19 })]);
        }
    }
}

/// Functions see the row and the head of each row of a tile.
#[test]
fn functions_of_few_rows() {
    let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal() };
    let case = |sizes: Sizes| {
        let heads = sizes[1];
        Case::new(sizes, Dtype::F32, options).with_score_tensors(&[[1, heads, 1, 1]])
    };
    let strided = AttentionOptions { mask_mod: Some(MaskFn::of::<Strided>()), ..Default::default() };
    let masked = Case::new([1, 4, 2, 3, 100, 32, 32], Dtype::F32, strided);
    split(2, [case([1, 6, 2, 2, 100, 64, 64]), case([2, 8, 2, 1, 70, 32, 32]), masked]);
}

/// Views whose rows are not contiguous, not aligned, or the same row.
#[test]
fn layouts_of_few_rows() {
    let case = || Case::new([2, 4, 2, 2, 90, 32, 32], Dtype::F32, causal());
    let layouts = [Layout::HeadsInner, Layout::Padded(3), Layout::Transposed, Layout::Contiguous];
    split(2, [case().with_layouts(layouts), case().with_layouts([Layout::HeadsInner; 4])]);
    split(1, [case().with_layouts([Layout::Contiguous, Layout::RepeatedRows, Layout::Padded(4), Layout::Contiguous])]);
}

/// With a given plan, the bits of a result neither change from run to run nor depend on other sequences.
#[test]
fn few_rows_repeat_their_bits() {
    let case = Case::new([3, 4, 2, 1, 333, 64, 64], Dtype::F32, causal()).with_seq_lens_k(&[333, 20, 190]);
    let Some(plan) = planned(&case, Some(3)) else { return };
    let client = client().unwrap();
    let first = with_plan(case.clone(), plan).run(&client).unwrap();
    let again = with_plan(Case { poison: Poison::Huge, ..case.clone() }, plan).run(&client).unwrap();
    assert_eq!((&first.o, &first.lse), (&again.o, &again.lse));

    let mut alone = Case::new([1, 4, 2, 1, 333, 64, 64], Dtype::F32, causal()).with_seq_lens_k(&[190]);
    let (of_q, of_k) = (4 * 64, 2 * 333 * 64);
    alone.tensors.q = case.tensors.q[2 * of_q..].to_vec();
    alone.tensors.k = case.tensors.k[2 * of_k..].to_vec();
    alone.tensors.v = case.tensors.v[2 * of_k..].to_vec();
    let one = with_plan(alone, plan).run(&client).unwrap();
    assert_eq!((&one.o[..], &one.lse[..]), (&first.o[2 * of_q..], &first.lse[8..]));
}
