//! Few rows in the forward of `mma.sync`: query heads of a group as rows of one tile, warps that divide the keys of a tile, and splits of
//! the keys.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::mods::{Alibi, ScoreFn};
use flash_attention_kernels::tiling::Device;
use flash_attention_kernels::{AttentionOptions, Dtype, Forward, Kernel, MmaForward, MmaTile, MmaTiles, plan_with};

/// Whether the kernel of `mma.sync` can run, and no other one is asked for.
fn runs(client: &Client, dtype: Dtype) -> bool {
    let asked = forced_kernel(dtype).is_none_or(|kernel| kernel == Kernel::Mma);
    asked && Device::of(client).mma.contains(&dtype) && cfg!(feature = "cuda")
}

/// Checks each case with the forward of `mma.sync`, which packs the query heads of a group.
fn packed(cases: impl IntoIterator<Item = Case>) {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !runs(&client, dtype) {
        return;
    }
    all(cases.into_iter().map(|case| {
        let mut problem = case.problem;
        problem.dtype = dtype;
        let plan = plan_with(&client, &problem, Kernel::Mma).unwrap();
        let packs = matches!(plan.forward, Forward::Mma(MmaForward { pack_gqa: true, .. }));
        assert_eq!(packs, problem.group_size() > 1, "{plan}");
        Case { tiles: Some((plan.forward, plan.backward)), ..case }
    }));
}

/// Sizes of few queries: groups of 1, 2, 3, 4 and 8 heads, one query and several, at most 16, 32 and 64 rows, one tile of keys and many.
fn few() -> Vec<Sizes> {
    let mut sizes = vec![
        [2, 4, 2, 1, 70, 64, 64],
        [1, 6, 2, 1, 300, 40, 24],
        [3, 8, 2, 2, 129, 128, 128],
        [1, 8, 1, 5, 200, 16, 64],
        [2, 2, 2, 1, 333, 128, 64],
        [1, 4, 2, 9, 140, 64, 128],
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

/// Every option that is applied to rows or to heads of their own.
#[test]
fn options_of_packed_heads() {
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(40), window_right: Some(3), ..full };
    let capped = AttentionOptions { softcap: Some(2.0), softmax_scale: Some(0.4), ..causal() };
    packed(few().into_iter().flat_map(|sizes| {
        let case = |options| Case::new(sizes, Dtype::F32, options);
        let [b, hq, _, sq, sk, ..] = sizes;
        let slopes = case(causal()).with_alibi_slopes([1, hq]).with_sinks();
        [
            case(full),
            case(causal()),
            case(window).with_sinks(),
            case(capped).with_bias([1, hq, sq, sk]),
            case(full).with_mask([b, hq, 1, sk]),
            slopes,
        ]
    }));
}

/// Lengths of the caches, which only the device knows: queries that see no key, and caches that end within a tile.
#[test]
fn lengths_of_packed_heads() {
    let case = |sizes: Sizes, options, lens_k: &[usize]| Case::new(sizes, Dtype::F32, options).with_seq_lens_k(lens_k);
    packed([
        case([4, 4, 2, 1, 300, 64, 64], causal(), &[300, 1, 0, 129]),
        case([3, 6, 2, 2, 200, 32, 32], causal(), &[1, 64, 200]).with_sinks(),
        case([2, 8, 2, 3, 500, 128, 128], AttentionOptions { window_left: Some(70), ..causal() }, &[77, 499]),
        case([2, 4, 1, 4, 90, 64, 64], AttentionOptions::default(), &[90, 33]).with_seq_lens_q(&[1, 4]),
        // Keys of the last one of four warps only.
        case([1, 4, 2, 1, 126, 128, 128], AttentionOptions { window_left: Some(10), ..causal() }, &[126]),
    ]);
}

/// Hidden keys that are not finite reach no row, and a visible value reaches the rows that see it.
#[test]
fn hidden_nans_do_not_leak_into_packed_heads() {
    let mut case = Case::new([1, 4, 2, 3, 150, 64, 64], Dtype::F32, causal()).with_seq_lens_k(&[149]);
    case.tensors.k[149 * 64] = f64::INFINITY;
    case.tensors.v[147 * 64..][..64].fill(f64::NAN);
    packed([case]);
}

/// Plans of the caller: heads packed into several tiles, and any number of splits, more than there are tiles of keys.
#[test]
fn tiles_and_splits_of_the_caller() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !runs(&client, dtype) {
        return;
    }
    let tile = MmaTile { warpgroups: 1, groups: 1, tile_k: 32, warps_k: 1, stages: 2 };
    let wide = MmaTile { groups: 2, ..tile };
    // Warps that divide the keys of a tile: several blocks of queries, and rows of two groups.
    let few = MmaTile { tile_k: 64, warps_k: 4, ..tile };
    let pairs = MmaTile { groups: 2, ..few };
    let deep = |stages| MmaTile { stages, ..few };
    let window = AttentionOptions { window_left: Some(60), ..causal() };
    for (sizes, options, tile, num_splits, pack_gqa) in [
        ([1, 4, 2, 130, 200, 64, 64], causal(), tile, 1, true),
        ([1, 6, 2, 50, 170, 64, 64], causal(), tile, 3, true),
        ([2, 4, 2, 1, 100, 64, 64], causal(), tile, 8, true),
        ([1, 6, 2, 50, 170, 40, 40], window, wide, 2, true),
        ([1, 2, 2, 70, 300, 64, 64], causal(), tile, 4, false),
        ([1, 4, 2, 33, 100, 32, 32], window, wide, 5, false),
        ([1, 4, 2, 21, 200, 64, 64], causal(), few, 1, true),
        ([1, 2, 2, 37, 150, 40, 64], window, few, 2, false),
        ([2, 6, 2, 20, 333, 64, 40], window, pairs, 3, true),
        ([1, 2, 2, 70, 190, 32, 64], causal(), pairs, 1, false),
        ([1, 4, 2, 1, 700, 64, 64], causal(), deep(3), 2, true),
        ([1, 4, 2, 3, 500, 40, 40], window, deep(4), 1, true),
    ] {
        let case = Case::new(sizes, Dtype::F32, options).with_sinks();
        let backward = plan_with(&client, &case.problem, Kernel::Mma).unwrap().backward;
        let forward = MmaForward { tiles: MmaTiles { tile, head_group: 2 }, num_splits, pack_gqa };
        Case { tiles: Some((Forward::Mma(forward), backward)), ..case }.check(&client);
    }
}

/// Functions see the row and the head of each row of a tile.
#[test]
fn functions_of_packed_heads() {
    let options = AttentionOptions { score_mod: Some(ScoreFn::of::<Alibi>()), ..causal() };
    let case = |sizes: Sizes| {
        let heads = sizes[1];
        Case::new(sizes, Dtype::F32, options).with_score_tensors(&[[1, heads, 1, 1]])
    };
    packed([case([1, 6, 2, 2, 100, 64, 64]), case([2, 8, 2, 1, 70, 32, 32])]);
}
