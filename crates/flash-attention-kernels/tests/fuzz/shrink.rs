//! Simplifies a failing case as long as it still fails.

use crate::line::Line;
use crate::worker::Outcome;
use std::collections::HashSet;

/// Keys whose values are integers or lists of integers.
const NUMBERS: [&str; 17] = [
    "sq",
    "sk",
    "b",
    "hq",
    "hk",
    "d",
    "dv",
    "left",
    "right",
    "sharp",
    "cu_q",
    "cu_k",
    "lens_q",
    "lens_k",
    "block_size",
    "offsets",
    "seed",
];
/// Keys whose values are patterns of dimensions.
const PATTERNS: [&str; 8] = ["mask", "bias", "score_a", "score_b", "mask_a", "mask_b", "slopes", "blocks"];
/// Sizes that are not reduced to 0, because empty cases fail for other reasons.
const LEAST: [&str; 7] = ["sq", "sk", "b", "hq", "hk", "d", "dv"];

/// The simplest failing line that is found in at most `runs` runs, and its failure. `run` runs a line.
pub fn shrink(line: &Line, why: &str, runs: usize, mut run: impl FnMut(&Line) -> Outcome) -> (Line, String) {
    let mut best = (line.clone(), why.to_string());
    let mut tried = HashSet::from([line.clone()]);
    'simpler: loop {
        for candidate in simpler(&best.0) {
            if tried.len() > runs {
                return best;
            }
            if candidate.problem().is_err() || !tried.insert(candidate.clone()) {
                continue;
            }
            if let Outcome::Failed(why) = run(&candidate) {
                best = (candidate, why);
                continue 'simpler;
            }
        }
        return best;
    }
}

/// Lines that are simpler in one respect, the simplest first.
fn simpler(line: &Line) -> Vec<Line> {
    let mut all = Vec::new();
    let with = |changes: &[(&str, Option<String>)]| {
        let mut simpler = line.clone();
        for (key, value) in changes {
            match value {
                Some(value) => simpler.set(key, value),
                None => simpler.unset(key),
            }
        }
        simpler
    };
    // Without an option, and the keys that depend on it.
    let groups: [&[&str]; 10] = [
        &["score_mod", "score_a", "score_b"],
        &["mask_mod", "mask_a", "mask_b"],
        &["mask", "mask_storage", "mask_data", "mask_layout"],
        &["bias", "bias_data", "bias_layout"],
        &["dropout", "dropout_seed"],
        &["cu_q", "cu_k"],
        &["blocks", "block_size"],
        &["lens_q", "lens_k", "padding"],
        &["page", "storage"],
        &["causal", "align", "continued", "left", "right"],
    ];
    let removed = |keys: &[&'static str]| with(&keys.iter().map(|key| (*key, None)).collect::<Vec<_>>());
    all.extend(groups.iter().filter(|keys| keys.iter().any(|key| line.text(key).is_some())).map(|keys| removed(keys)));
    let kept = ["dtype", "precision", "sq", "sk", "d", "seed"];
    all.extend(line.keys().filter(|key| !kept.contains(key)).map(|key| removed(&[key])));

    // One gradient, or none.
    let grads = line.text("grads").unwrap_or("qkvbast");
    if grads.len() > 1 {
        all.push(with(&[("grads", Some("-".into()))]));
        all.extend(grads.chars().map(|letter| with(&[("grads", Some(letter.into()))])));
    }
    // Heads together, and head dimensions together.
    let count = |key: &str, default| line.number(key, default).unwrap_or(default);
    let (hq, d) = (count("hq", 1), count("d", 16));
    let (hk, dv) = (count("hk", hq), count("dv", d));
    let both =
        |of: [&'static str; 2], [a, b]: [usize; 2]| with(&[(of[0], Some(a.to_string())), (of[1], Some(b.to_string()))]);
    if hq.max(hk) > 1 {
        all.push(both(["hq", "hk"], [1, 1]));
    }
    if hk > 1 {
        all.push(both(["hq", "hk"], [hq / hk, 1]));
    }
    for head_dim in [1, 8, 16, 64] {
        if head_dim < d.max(dv) {
            all.push(both(["d", "dv"], [head_dim.min(d), head_dim.min(dv)]));
        }
    }
    // Numbers, large steps first. Cumulative lengths stay sorted.
    for key in NUMBERS.into_iter().filter(|key| line.text(key).is_some()) {
        let text = line.text(key).unwrap_or_default();
        let values: Vec<usize> = text.split(',').filter_map(|n| n.parse().ok()).collect();
        let least = usize::from(LEAST.contains(&key) && !values.contains(&0));
        for (nth, value) in values.iter().enumerate() {
            for smaller in [least, value / 4, value / 2, value.saturating_sub(value / 8), value.saturating_sub(1)] {
                if smaller < *value && smaller >= least {
                    let mut values = values.clone();
                    values[nth] = smaller;
                    let values: Vec<String> = values.iter().map(usize::to_string).collect();
                    all.push(with(&[(key, Some(values.join(",")))]));
                }
            }
        }
    }
    // One sequence fewer.
    if let (Some(q), Some(k)) = (line.text("cu_q"), line.text("cu_k")) {
        let without = |text: &str, nth: usize| {
            let ends = text.split(',').enumerate().filter(|(n, _)| *n != nth).map(|(_, end)| end);
            ends.collect::<Vec<_>>().join(",")
        };
        let sequences = q.split(',').count();
        all.extend((1..sequences).map(|nth| with(&[("cu_q", Some(without(q, nth))), ("cu_k", Some(without(k, nth)))])));
    }
    // One more broadcast dimension, or a contiguous layout.
    for key in PATTERNS {
        let text = line.text(key).unwrap_or_default();
        for (nth, _) in text.char_indices().filter(|(_, letter)| *letter != '1') {
            all.push(with(&[(key, Some(format!("{}1{}", &text[..nth], &text[nth + 1..])))]));
        }
    }
    if let Some(text) = line.text("layouts") {
        for nth in 0..4 {
            let layouts = text.split(',').enumerate().map(|(n, of)| if n == nth { "contiguous" } else { of });
            all.push(with(&[("layouts", Some(layouts.collect::<Vec<_>>().join(",")))]));
        }
    }
    all
}
