//! Test problems that cover every pair of choices of any two options: a fault in the interaction of two features shows in one of them.

use crate::mods::{Bent, Relative, Sloped, Strided};
use flash_attention_kernels::mods::{Document, MaskFn, ScoreFn};
use flash_attention_kernels::{Alignment, AttentionOptions, AttentionProblem, BackwardOrder, BlockMask, Dtype};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::collections::HashSet;

/// One of the test problems.
///
/// ```
/// let all = flash_attention_reference::pairs(500);
/// assert!(all.len() >= 500);
/// assert!(all.iter().any(|pair| pair.problem.sinks && pair.problem.bias.is_some() && pair.dlse));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pair {
    /// The problem, with a dropout seed if it has dropout.
    pub problem: AttentionProblem,
    /// Whether the loss depends on lse, too.
    pub dlse: bool,
    /// Which of three memory layouts the inputs have.
    pub layout: usize,
    /// Sequence lengths of queries and of keys for each batch, if the problem uses them.
    pub seq_lens: [[usize; 2]; 2],
    /// Beginnings of the sequences among all queries and among all keys, if the problem uses them.
    pub cu_seqlens: [Vec<usize>; 2],
    /// Block states, if the problem has a block mask: about as many empty, partial and full ones, and at least one of each if there are
    /// three or more blocks.
    pub block_states: Option<Vec<u32>>,
}

/// Lengths of queries and keys. The last pair spans several blocks.
const LENGTHS: [[usize; 2]; 7] = [[65, 130], [130, 65], [64, 64], [33, 200], [1, 97], [129, 129], [300, 290]];
/// Batches, query heads, key/value heads.
const HEADS: [[usize; 3]; 3] = [[1, 2, 2], [2, 4, 2], [2, 4, 1]];
/// Head dimensions of queries and of values.
const DIMS: [[usize; 2]; 4] = [[16, 16], [40, 24], [64, 64], [64, 128]];

/// Number of choices of each option.
const CHOICES: [usize; 20] =
    [LENGTHS.len(), HEADS.len(), DIMS.len(), 3, 3, 4, 2, 2, 4, 5, 3, 2, 2, 2, 2, 3, 6, 4, 3, 3];
/// Index of the option for sequences, and its first choice with packed sequences.
const PACKED: (usize, usize) = (16, 4);
/// Index of the option for block masks. Its choice 0 is no block mask.
const BLOCKS: usize = 19;

/// Options that packed sequences with a block mask cannot have, each with its last choice that is none of it: bias, slopes, tensors of a
/// score function.
const SUMMED: [(usize, usize); 3] = [(9, 0), (10, 0), (17, 1)];

/// Whether the choices made so far exclude each other.
fn contradicts(row: &[Option<usize>]) -> bool {
    let above = |(option, least): (usize, usize)| row[option].is_some_and(|choice| choice > least);
    above((PACKED.0, PACKED.1 - 1)) && above((BLOCKS, 0)) && SUMMED.into_iter().any(above)
}

/// At least `least` problems that cover every pair of choices of any two options.
pub fn pairs(least: usize) -> Vec<Pair> {
    covering(&CHOICES, least).into_iter().enumerate().map(|(n, choices)| pair(n as u64, &choices)).collect()
}

fn pair(n: u64, choices: &[usize]) -> Pair {
    let &[
        lengths,
        heads,
        dims,
        dtype,
        causal,
        window,
        softcap,
        scale,
        mask,
        bias,
        slopes,
        sinks,
        dropout,
        dlse,
        order,
        layout,
        ragged,
        score_mod,
        mask_mod,
        blocks,
    ] = choices
    else {
        unreachable!("as many as there are options")
    };
    let ([sq, sk], [b, hq, hk], [d, dv]) = (LENGTHS[lengths], HEADS[heads], DIMS[dims]);
    let options = AttentionOptions {
        softmax_scale: [None, Some(0.3)][scale],
        causal: causal > 0,
        alignment: [Alignment::BottomRight, Alignment::BottomRight, Alignment::TopLeft][causal],
        window_left: [None, Some(20), None, Some(10)][window],
        window_right: [None, None, Some(5), Some(3)][window],
        softcap: [None, Some(2.0)][softcap],
        dropout: [0.0, 0.25][dropout],
        dropout_seed: (dropout > 0).then_some(n << 33 | 5),
        score_mod: [None, Some(ScoreFn::of::<Relative>()), Some(ScoreFn::of::<Sloped>()), Some(ScoreFn::of::<Bent>())]
            [score_mod],
        mask_mod: [None, Some(MaskFn::of::<Strided>()), Some(MaskFn::of::<Document>())][mask_mod],
        backward_order: [BackwardOrder::Deterministic, BackwardOrder::Fast][order],
        ..Default::default()
    };
    let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][dtype];
    let problem = AttentionProblem::new(&[b, hq, sq, d], &[b, hk, sk, d], &[b, hk, sk, dv], dtype, options);
    let mut problem = problem.expect("choices that fit each other");
    problem.mask = [None, Some([b, 1, 1, sk]), Some([1, hq, sq, sk]), Some([b, 1, sq, 1])][mask];
    problem.bias = [None, Some([1, hq, sq, sk]), Some([b, 1, 1, sk]), Some([1, hq, sq, 1]), Some([1, hq, 1, 1])][bias];
    problem.alibi_slopes = [None, Some([1, hq]), Some([b, hq])][slopes];
    problem.sinks = sinks > 0;
    // The shapes alternate: one element for each head, key, pair and query.
    let of_pairs = [[1, hq, 1, 1], [b, 1, 1, sk], [b, hq, sq, sk], [1, hq, sq, 1]];
    let nth = |n: u64| Some(of_pairs[n as usize % of_pairs.len()]);
    problem.score_tensors = [[None, None], [None, None], [nth(n), None], [nth(n + 1), nth(n / 4 + 2)]][score_mod];
    problem.mask_tensors = [[None, None], [None, None], [Some([b, 1, sq, 1]), Some([1, 1, 1, sk])]][mask_mod];
    (problem.seq_lens_q, problem.seq_lens_k) = (matches!(ragged, 1 | 3), matches!(ragged, 2 | 3));
    // Four sequences in each batch, one or two of them without queries or without keys. With choice 5, some positions before and after them
    // belong to no sequence.
    let mut ends = [(sq, [0, sq / 3, sq / 3, sq - sq / 5]), (sk, [0, sk / 4, sk / 2, sk - 1])].map(|(seq, begins)| {
        let begins = (0..b).flat_map(|batch| begins.map(|begin| batch * seq + begin));
        begins.chain([b * seq]).collect::<Vec<_>>()
    });
    if ragged == 5 {
        ends[0][0] = ends[0][1].min(1);
        *ends[0].last_mut().expect("there is an end") -= sq / 7;
        *ends[1].last_mut().expect("there is an end") -= 1;
    }
    problem.cu_seqlens = (ragged >= PACKED.1).then_some(4 * b);
    let sequences = problem.cu_seqlens.unwrap_or(b);
    let [one, each] = [([1, 1], [128, 128]), ([sequences, hq], [256, 128])].map(|([b, h], [block_q, block_k])| {
        let blocks = [b, h, sq.div_ceil(block_q), sk.div_ceil(block_k)];
        BlockMask { blocks, block_q, block_k }
    });
    problem.block_mask = [None, Some(one), Some(each)][blocks];
    problem.validate().expect("choices that fit each other");
    // One of the two batches has almost no queries, and at most one key.
    let seq_lens = [[sq - sq / 3, sq / 20], [sk - sk / 4, n as usize % 2]];
    let block_states = problem.block_mask.map(|mask| {
        let mut states: Vec<u32> =
            (0..mask.blocks.iter().product::<usize>() as u32).map(|block| (block + n as u32) % 3).collect();
        states.shuffle(&mut StdRng::seed_from_u64(n));
        states
    });
    Pair { problem, dlse: dlse > 0, layout, seq_lens, cu_seqlens: ends, block_states }
}

/// At least `least` rows with a choice for each option, which cover every pair of choices and do not contradict themselves. If `least`
/// demands more rows, the pairs are covered again by other rows. (D. M. Cohen et al., The AETG system: an approach to testing based on
/// combinatorial design, 1997.)
fn covering(choices: &[usize], least: usize) -> Vec<Vec<usize>> {
    let mut random = StdRng::seed_from_u64(7);
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut missing = HashSet::new();
    while rows.len() < least || !missing.is_empty() {
        if missing.is_empty() {
            missing = every_pair(choices).collect();
        }
        let best = (0..20).map(|_| row(choices, &missing, &mut random)).max_by_key(|row| met(row, &missing).count());
        let best = best.expect("there were 20");
        for pair in met(&best, &missing).collect::<Vec<_>>() {
            missing.remove(&pair);
        }
        rows.push(best);
    }
    rows
}

/// Two options, the first one before the second, with a choice each.
type TwoChoices = [(usize, usize); 2];

fn every_pair(choices: &[usize]) -> impl Iterator<Item = TwoChoices> {
    let options = (0..choices.len()).flat_map(move |a| (a + 1..choices.len()).map(move |b| (a, b)));
    options.flat_map(move |(a, b)| (0..choices[a]).flat_map(move |x| (0..choices[b]).map(move |y| [(a, x), (b, y)])))
}

/// The missing pairs that a row covers.
fn met<'a>(row: &'a [usize], missing: &'a HashSet<TwoChoices>) -> impl Iterator<Item = TwoChoices> + 'a {
    let options = (0..row.len()).flat_map(move |a| (a + 1..row.len()).map(move |b| [(a, row[a]), (b, row[b])]));
    options.filter(|pair| missing.contains(pair))
}

/// A row that starts with a missing pair and adds, option by option, the choice that covers most other missing pairs.
fn row(choices: &[usize], missing: &HashSet<TwoChoices>, random: &mut StdRng) -> Vec<usize> {
    let mut all: Vec<_> = missing.iter().collect();
    // Sort, because the order of a set is not deterministic.
    all.sort_unstable();
    let [(a, x), (b, y)] = *all[random.random_range(0..all.len())];
    let mut row: Vec<Option<usize>> = vec![None; choices.len()];
    (row[a], row[b]) = (Some(x), Some(y));
    let mut others: Vec<usize> = (0..choices.len()).filter(|option| row[*option].is_none()).collect();
    others.shuffle(random);
    for option in others {
        let gain = |choice: usize| {
            let with = |(other, known): (usize, &Option<usize>)| {
                let known = (*known)?;
                let mut pair = [(option, choice), (other, known)];
                pair.sort_unstable();
                missing.contains(&pair).then_some(())
            };
            row.iter().enumerate().filter_map(with).count()
        };
        let fits = |choice: &usize| {
            let mut with = row.clone();
            with[option] = Some(*choice);
            !contradicts(&with)
        };
        let first = random.random_range(0..choices[option]);
        let turned = (0..choices[option]).map(|n| (first + n) % choices[option]);
        row[option] = turned.filter(fits).max_by_key(|choice| gain(*choice));
    }
    row.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_two_choices_meet() {
        let rows = covering(&CHOICES, 1);
        let mut missing: HashSet<_> = every_pair(&CHOICES).collect();
        for row in &rows {
            assert!(row.iter().zip(CHOICES).all(|(choice, choices)| *choice < choices));
            assert!(!contradicts(&row.iter().copied().map(Some).collect::<Vec<_>>()));
            for pair in met(row, &missing).collect::<Vec<_>>() {
                missing.remove(&pair);
            }
        }
        assert!(missing.is_empty() && rows.len() < 60, "{} rows, {} pairs missing", rows.len(), missing.len());
    }

    #[test]
    fn blocks_of_each_state_beside_each_way_of_masking() {
        let all = pairs(500);
        let masked = |pair: &Pair| (pair.problem.mask.is_some(), pair.problem.options.mask_mod.is_some());
        for kind in [(false, false), (false, true), (true, false), (true, true)] {
            let states = all.iter().filter(|pair| masked(pair) == kind).filter_map(|pair| pair.block_states.as_ref());
            let several = states.filter(|states| (0..3).all(|state| states.contains(&state))).count();
            assert!(several > 5, "{several} problems with blocks of each state, mask and function: {kind:?}");
        }
        for pair in all {
            let blocks = pair.problem.block_mask.map(|mask| mask.blocks.iter().product());
            assert_eq!(pair.block_states.map(|states| states.len()), blocks);
        }
    }
}
