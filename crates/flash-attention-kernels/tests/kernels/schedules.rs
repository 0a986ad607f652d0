//! Results do not depend, in any bit, on the order in which warps run and the time at which copies land.
//!
//! The software CUDA driver uses another order and other times for every launch; on a GPU they vary by themselves. `FLASH_TEST_SCHEDULES`
//! is the number of runs of each of twenty shapes, 32 by default. Without it, slow devices run five shapes, four times each.

use crate::common::*;
use cubecl::client::Client;
use flash_attention_kernels::tiling::Device;
use flash_attention_kernels::{Alignment, AttentionOptions, Dtype, Kernel, plan_with};

/// Twenty shapes, the most typical ones first. Each has several tiles of queries and keys. They differ in head dimension, grouped heads,
/// windows, biases, masks, dropout and sequence lengths.
fn shapes() -> Vec<Case> {
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(70), ..causal() };
    let capped = AttentionOptions { softcap: Some(3.0), ..causal() };
    let case = |sizes: Sizes, options| Case::new(sizes, Dtype::F32, options);
    vec![
        case([1, 2, 1, 200, 330, 64, 64], causal()),
        case([2, 2, 2, 130, 270, 16, 16], full).with_bias([1, 2, 130, 270]).with_dlse(),
        case([1, 2, 2, 140, 300, 128, 128], causal()),
        case([2, 4, 2, 140, 208, 40, 40], causal()).with_alibi_slopes([2, 4]).with_sinks().with_dropout(0.3),
        case([2, 2, 1, 150, 260, 32, 32], causal()).with_seq_lens_q(&[150, 33]).with_seq_lens_k(&[17, 260]),
        case([1, 2, 1, 300, 300, 16, 16], window),
        case([1, 1, 1, 257, 257, 72, 40], capped),
        case([1, 4, 1, 65, 400, 64, 64], full).with_mask([1, 1, 1, 400]),
        case([2, 2, 2, 64, 129, 96, 96], causal()),
        case([1, 1, 1, 128, 512, 64, 128], full),
        case([1, 2, 2, 30, 700, 16, 24], full),
        case([3, 1, 1, 200, 90, 8, 8], causal()),
        case([1, 6, 3, 70, 130, 24, 24], window).with_sinks(),
        case([1, 1, 1, 190, 190, 192, 128], causal()),
        case([1, 1, 1, 130, 200, 256, 256], causal()),
        case([2, 3, 3, 100, 227, 64, 64], causal()).with_dropout(0.5),
        case([1, 2, 1, 255, 256, 128, 128], full).with_dlse(),
        case([1, 2, 2, 150, 60, 59, 17], capped).with_bias([1, 1, 150, 60]),
        case([2, 2, 2, 96, 384, 32, 64], full).with_alibi_slopes([1, 2]),
        case([1, 1, 1, 383, 400, 64, 64], AttentionOptions { window_right: Some(3), ..full }),
    ]
}

fn bits(results: &Results) -> Vec<Vec<u64>> {
    let of = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect();
    let gradients = [&results.dq, &results.dk, &results.dv, &results.dbias, &results.dalibi_slopes, &results.dsinks];
    let mut all = vec![of(&results.o), of(&results.lse)];
    all.extend(gradients.into_iter().flatten().map(|gradient| of(gradient)));
    all
}

/// Number of shapes, and of runs of each.
fn asked() -> (usize, usize) {
    let given = std::env::var("FLASH_TEST_SCHEDULES").ok();
    let given = given.map(|n| n.parse().expect("FLASH_TEST_SCHEDULES must be a number"));
    match (given, thorough()) {
        (Some(schedules), _) => (20, schedules),
        (None, true) => (20, 32),
        (None, false) => (5, 4),
    }
}

/// Runs each shape with each kernel whose warps synchronise, or else with the planned one. The first run is compared with the oracle, the
/// others with the first.
#[test]
fn schedules_change_no_bit() {
    let Some(client) = client() else { return };
    let (device, dtype) = (Device::of(&client), chosen_dtype());
    let has = |kernel| match kernel {
        Kernel::Hopper => device.wgmma && dtype != Dtype::F32,
        _ => device.mma.contains(&dtype),
    };
    let mut kernels: Vec<_> = [Kernel::Hopper, Kernel::Mma].into_iter().filter(|kernel| has(*kernel)).collect();
    let (count, schedules) = asked();
    if let Some(forced) = forced_kernel(dtype) {
        kernels = vec![forced];
    }
    for (nth, case) in shapes().into_iter().take(count).enumerate() {
        let kernels =
            if kernels.is_empty() { vec![case.plan(&client).unwrap().forward.kernel()] } else { kernels.clone() };
        for kernel in kernels {
            let plan = plan_with(&client, &case.problem, kernel).unwrap();
            let case = Case { tiles: Some((plan.forward, plan.backward)), ..case.clone() };
            repeat(&client, &case, schedules, &format!("shape {nth}, {kernel:?}"));
        }
    }
}

/// Runs a case: compares the first run with the oracle, the others with the first.
fn repeat(client: &Client, case: &Case, schedules: usize, name: &str) {
    let first = bits(&case.check(client));
    for schedule in 1..schedules {
        let again = bits(&case.run(client).unwrap());
        for (result, (first, again)) in first.iter().zip(&again).enumerate() {
            let differs = first.iter().zip(again).position(|(first, again)| first != again);
            assert_eq!(differs, None, "{name}: result {result} of run {schedule} differs");
        }
    }
}

/// Blocks of keys add to `dq` in the order of the keys, whichever of them is ahead: many blocks for few tiles of queries, grouped heads, a
/// window whose first block differs between tiles, keys that no query sees, and queries that see no key.
#[test]
fn additions_in_order_change_no_bit() {
    let Some(client) = client() else { return };
    let dtype = chosen_dtype();
    if !Device::of(&client).wgmma || dtype == Dtype::F32 {
        return;
    }
    let (_, schedules) = asked();
    let full = AttentionOptions::default();
    let window = AttentionOptions { window_left: Some(150), window_right: Some(40), ..full };
    for (nth, (sizes, options)) in [
        ([1, 2, 2, 130, 1100, 64, 64], full),
        ([2, 4, 2, 700, 700, 128, 128], causal()),
        ([1, 2, 1, 650, 600, 64, 64], window),
        ([1, 1, 1, 128, 800, 96, 96], AttentionOptions { alignment: Alignment::TopLeft, ..causal() }),
        ([1, 3, 1, 500, 260, 128, 64], causal()),
    ]
    .into_iter()
    .enumerate()
    {
        let case = Case { fused: true, ..Case::new(sizes, Dtype::F32, options).with_dlse() };
        repeat(&client, &case, schedules, &format!("shape {nth}"));
    }
}
