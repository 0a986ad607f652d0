//! Studies: rows that differ along one axis only, each drawn as lines.

use super::model::{Machine, Problem, distinct};
use crate::results::Timing;
use std::collections::BTreeMap;
use std::ptr;

/// An axis that varies while everything else stays constant.
pub struct Axis {
    /// Its label.
    pub label: &'static str,
    /// Its value for a row.
    pub of: fn(&Timing) -> usize,
    /// Removes it from a problem, so that the rest is the same for all rows of a study.
    clear: fn(&mut Problem),
}

const SEQUENCE: Axis = Axis {
    label: "sequence length",
    of: |row| row.seq_q,
    clear: |problem| {
        if problem.seq_q == problem.seq_k {
            problem.seq_k = 0;
        }
        problem.seq_q = 0;
    },
};

/// The FlashAttention papers keep the total number of tokens constant.
const SEQUENCE_OF_TOKENS: Axis = Axis {
    clear: |problem| {
        problem.also = format!("b · s = {}", problem.batch * problem.seq_q);
        problem.batch = 0;
        (SEQUENCE.clear)(problem);
    },
    ..SEQUENCE
};

/// Decoding steps of all batches are one study.
const KEYS: Axis =
    Axis { label: "keys", of: |row| row.seq_k, clear: |problem| (problem.batch, problem.seq_k) = (0, 0) };

const SCALING: [Axis; 4] = [
    Axis { label: "batch", of: |row| row.batch, clear: |problem| problem.batch = 0 },
    Axis {
        label: "heads",
        of: |row| row.heads_q,
        clear: |problem| {
            if problem.heads_q != problem.heads_kv {
                let group = problem.heads_q / problem.heads_kv.max(1);
                problem.also = format!("{group} query heads for one of keys and values");
            }
            (problem.heads_q, problem.heads_kv) = (0, 0);
        },
    },
    Axis { label: "heads of keys and values", of: |row| row.heads_kv, clear: |problem| problem.heads_kv = 0 },
    Axis { label: "head_dim", of: |row| row.head_dim, clear: |problem| problem.head_dim = 0 },
];

/// Rows that differ along one axis only.
pub struct Study<'a> {
    /// The axis.
    pub axis: &'static Axis,
    /// The constant rest of the problem.
    pub fixed: Problem,
    /// The rows.
    pub rows: Vec<&'a Timing>,
}

/// All studies along an axis with at least two values.
fn along<'a>(machine: &'a Machine, axis: &'static Axis) -> Vec<Study<'a>> {
    let mut groups: BTreeMap<Problem, Vec<&Timing>> = BTreeMap::new();
    for row in machine.attention() {
        let mut problem = Problem::from(row);
        (axis.clear)(&mut problem);
        groups.entry(problem).or_default().push(row);
    }
    let studies = groups.into_iter().map(|(fixed, rows)| Study { axis, fixed, rows });
    studies.filter(|study| distinct(study.rows.iter().map(|row| (axis.of)(row))).len() > 1).collect()
}

/// Studies of sequence length at a constant batch, and, where those leave two lengths, at a constant number of tokens.
pub fn sequences<'a>(machine: &'a Machine) -> Vec<Study<'a>> {
    // Lengths less than an octave apart compare tiles that divide them with tiles that do not.
    let octave = |study: &Study| {
        let lengths = || study.rows.iter().map(|row| row.seq_q);
        lengths().max() >= lengths().min().map(|least| 2 * least)
    };
    let at_batch: Vec<Study> = along(machine, &SEQUENCE).into_iter().filter(octave).collect();
    let seen = |row: &Timing| at_batch.iter().any(|study| study.rows.iter().any(|other| ptr::eq(*other, row)));
    let fresh = |study: &Study| distinct(study.rows.iter().filter(|row| !seen(row)).map(|row| row.seq_q)).len() > 1;
    let of_tokens = along(machine, &SEQUENCE_OF_TOKENS).into_iter().filter(|study| octave(study) && fresh(study));
    let of_tokens: Vec<Study> = of_tokens.collect();
    at_batch.into_iter().chain(of_tokens).collect()
}

/// Studies of decoding steps along their keys, with all batches.
pub fn decoding<'a>(machine: &'a Machine) -> Vec<Study<'a>> {
    let mut studies = along(machine, &KEYS);
    studies.iter_mut().for_each(|study| study.rows.retain(|row| row.is_decoding()));
    studies.retain(|study| distinct(study.rows.iter().map(|row| row.seq_k)).len() > 1);
    studies
}

/// Studies along every other axis.
pub fn scaling<'a>(machine: &'a Machine) -> Vec<Study<'a>> {
    SCALING.iter().flat_map(|axis| along(machine, axis)).collect()
}
