//! Every pair of values of any two options, against the oracle.

use crate::common::*;
use flash_attention_kernels::BackwardOrder;
use flash_attention_reference::{Pair, pairs};

/// Checks all 500 problems on fast devices. `FLASH_TEST_PAIRS=1/14` checks the first of each 14. Fails if another kernel than the lane's
/// runs, and prints the kernel of each problem.
#[test]
fn every_pair_of_options() {
    let Some(client) = client() else { return };
    let (first, step) = match std::env::var("FLASH_TEST_PAIRS") {
        Ok(part) => {
            let (first, step) = part.split_once('/').expect("FLASH_TEST_PAIRS must be like 1/14");
            (
                first.parse::<usize>().expect("a number before / in FLASH_TEST_PAIRS") - 1,
                step.parse::<usize>().expect("a number after / in FLASH_TEST_PAIRS"),
            )
        }
        Err(_) => (0, if thorough() { 1 } else { 60 }),
    };
    for (n, pair) in pairs(500).into_iter().enumerate().skip(first).step_by(step) {
        if supports(&client, pair.problem.dtype) {
            let case = case(&pair);
            let results = case.check(&client);
            println!("{n}: {} for {:?}", results.forward.kernel().name(), case.problem);
        }
    }
}

fn case(pair: &Pair) -> Case {
    let p = pair.problem;
    let sizes = [p.batch, p.num_heads_q, p.num_heads_kv, p.seq_q, p.seq_k, p.head_dim, p.head_dim_v];
    let mut case = Case::new(sizes, p.dtype, p.options);
    if let Some(shape) = p.mask {
        case = case.with_mask(shape);
    }
    if let Some(shape) = p.bias {
        case = case.with_bias(shape);
    }
    if let Some(shape) = p.alibi_slopes {
        case = case.with_alibi_slopes(shape);
    }
    if p.sinks {
        case = case.with_sinks();
    }
    let tensors = |shapes: [Option<[usize; 4]>; 2]| shapes.into_iter().flatten().collect::<Vec<_>>();
    case = case.with_score_tensors(&tensors(p.score_tensors)).with_mask_tensors(&tensors(p.mask_tensors));
    let [q, k] = pair.seq_lens;
    if p.seq_lens_q {
        case = case.with_seq_lens_q(&q[..p.batch]);
    }
    if p.seq_lens_k {
        case = case.with_seq_lens_k(&k[..p.batch]);
    }
    if p.cu_seqlens.is_some() {
        case = case.with_cu_seqlens(&pair.cu_seqlens[0], &pair.cu_seqlens[1]);
    }
    if let (Some(mask), Some(states)) = (p.block_mask, &pair.block_states) {
        case = case.with_block_mask(mask.blocks, [mask.block_q, mask.block_k], states.clone());
    }
    if pair.dlse {
        case = case.with_dlse();
    }
    // The oracle uses the problem's seed.
    case.seed = flash_attention_kernels::dropout::seed(p.options.dropout_seed.unwrap_or(0));
    case.fused = p.options.backward_order == BackwardOrder::Fast && case.problem.bias.is_none();
    use Layout::*;
    case.with_layouts([[Contiguous; 4], [HeadsInner; 4], [Padded(4), Transposed, Padded(3), RepeatedRows]][pair.layout])
}
