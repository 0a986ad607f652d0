//! Model of the report: which rows belong together in a chart, and their labels.

use crate::error::Error;
use crate::results::{self, Accuracy, COPY, Call, MATMUL, Memory, Moved, TileTiming, Timing};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// Implementations in the order of legends and tables. Other implementations come last.
const IMPLS: [&str; 13] = [
    "ours",
    "ours-fast",
    "ours-tf32",
    "burn",
    "composed",
    "cudnn",
    "flash2",
    "flash2-deterministic",
    "memeff",
    "flex",
    "products",
    MATMUL,
    COPY,
];
/// Not attention: matrix products only.
pub const PRODUCTS: &str = "products";
/// Implementations of this repository.
pub const OURS: [&str; 3] = ["ours", "ours-fast", "ours-tf32"];
/// Passes in the order of panels.
const PASSES: [&str; 4] = ["forward", "backward", "both", "autodiff"];

/// All results of one name.
pub struct Results {
    /// Name of the results.
    pub name: String,
    /// Device times.
    pub timings: Vec<Timing>,
    /// Calls.
    pub calls: Vec<Call>,
    /// Errors.
    pub errors: Vec<Accuracy>,
    /// Memory beyond the inputs.
    pub memory: Vec<Memory>,
    /// Tile sweeps.
    pub tiles: Vec<TileTiming>,
    /// Bytes moved.
    pub moved: Vec<Moved>,
}

impl Results {
    /// Reads the files of a name, of which at least one must exist.
    pub fn read(directory: &Path, name: &str) -> Result<Self, Error> {
        let results = Results {
            name: name.into(),
            timings: results::read_if_there(directory, name)?,
            calls: results::read_if_there(directory, name)?,
            errors: results::read_if_there(directory, name)?,
            memory: results::read_if_there(directory, name)?,
            tiles: results::read_if_there(directory, name)?,
            moved: results::read_if_there(directory, name)?,
        };
        let Results { timings, calls, errors, memory, tiles, moved, .. } = &results;
        let rows = [timings.len(), calls.len(), errors.len(), memory.len(), tiles.len(), moved.len()];
        if rows.iter().sum::<usize>() == 0 {
            return Err(Error::NoResults { directory: directory.into(), name: name.into() });
        }
        Ok(results)
    }

    /// Reason why this row has no time: the first line of its call's note.
    pub fn reason(&self, row: &Timing) -> &str {
        let same = |call: &&Call| {
            (&call.run, &call.r#impl, &call.kernel, &call.pass) == (&row.run, &row.r#impl, &row.kernel, &row.pass)
                && !call.note.is_empty()
                && Problem::from(*call) == Problem::from(row)
        };
        self.calls.iter().rev().find(same).and_then(|call| call.note.lines().next()).unwrap_or("no reason recorded")
    }

    /// Timings of each device with each runtime. PyTorch's rows join the runs in which they were timed. If the measurement was split into
    /// several sessions, they join the runs of their commit.
    pub fn machines(&self) -> Vec<Machine<'_>> {
        let what = |row: &Timing| {
            let who = (row.device.clone(), row.runtime.clone(), row.r#impl.clone());
            (who, row.pass.clone(), Problem::from(row))
        };
        let mut rows = latest(&self.timings, |row| (what(row), row.kernel.clone()));
        // A failed call without a kernel is dropped if there is a row for the same measurement that did not fail.
        let named: BTreeSet<_> = rows.iter().filter(|row| !row.kernel.is_empty()).map(|row| what(row)).collect();
        rows.retain(|row| !row.kernel.is_empty() || row.median_ms.is_some() || !named.contains(&what(row)));
        let torch = |row: &Timing| row.runtime.starts_with("torch");
        // Runs count even if a later run has repeated all of their measurements.
        let of_host = || self.timings.iter().filter(|row| !torch(row));
        let hosts: BTreeSet<&str> = of_host().map(|row| row.run.as_str()).collect();
        let commits: BTreeSet<[&str; 2]> = of_host().map(|row| [row.commit.as_str(), row.device.as_str()]).collect();
        let hosted = |row: &Timing| {
            hosts.contains(row.run.as_str()) || commits.contains(&[row.commit.as_str(), row.device.as_str()])
        };
        let alone = |row: &Timing| !torch(row) || !hosted(row);
        let mut machines: Vec<Machine> = Vec::new();
        for row in rows.iter().copied().filter(|row| alone(row)) {
            let same = |machine: &&mut Machine| (machine.device, machine.runtime) == (&*row.device, &*row.runtime);
            match machines.iter_mut().find(same) {
                Some(machine) => machine.rows.push(row),
                None => machines.push(Machine { device: &row.device, runtime: &row.runtime, rows: vec![row] }),
            }
        }
        for machine in &mut machines {
            let here = |row: &&Timing| (&*row.device, &*row.runtime) == (machine.device, machine.runtime);
            let runs: BTreeSet<&str> = self.timings.iter().filter(here).map(|row| row.run.as_str()).collect();
            let commits: BTreeSet<&str> = self.timings.iter().filter(here).map(|row| row.commit.as_str()).collect();
            let of_commit = |row: &Timing| row.device == machine.device && commits.contains(row.commit.as_str());
            let joins = |row: &&Timing| {
                let run = row.run.as_str();
                torch(row) && !alone(row) && if hosts.contains(run) { runs.contains(run) } else { of_commit(row) }
            };
            machine.rows.extend(rows.iter().copied().filter(joins));
        }
        machines
    }
}

/// Timings of a device with a runtime.
pub struct Machine<'a> {
    /// The device.
    pub device: &'a str,
    /// The runtime.
    pub runtime: &'a str,
    /// Rows, with the last one of repeated measurements.
    pub rows: Vec<&'a Timing>,
}

impl Machine<'_> {
    /// Title, as in `NVIDIA H200, cuda, with torch 2.9.1`.
    pub fn title(&self) -> String {
        let peers = distinct(self.rows.iter().map(|row| row.runtime.as_str()).filter(|name| *name != self.runtime));
        let with = if peers.is_empty() { String::new() } else { format!(", with {}", peers.join(", ")) };
        format!("{}, {}{with}", self.device, self.runtime)
    }

    /// Rows of attention, without those of the device itself.
    pub fn attention(&self) -> impl Iterator<Item = &Timing> {
        self.rows.iter().copied().filter(|row| !row.is_roof())
    }
}

/// The problem of a row, named as the columns are. A zero stands for an axis that varies.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    pub dtype: String,
    pub head_dim: usize,
    pub causal: bool,
    pub variant: String,
    pub heads_q: usize,
    pub heads_kv: usize,
    pub batch: usize,
    pub seq_q: usize,
    pub seq_k: usize,
    /// A quantity that stays constant while axes vary together.
    pub also: String,
}

macro_rules! problem_of {
    ($($row:ty),*) => {$(
        impl From<&$row> for Problem {
            fn from(row: &$row) -> Self {
                Problem {
                    dtype: row.dtype.clone(),
                    head_dim: row.head_dim,
                    causal: row.causal,
                    variant: row.variant.clone(),
                    heads_q: row.heads_q,
                    heads_kv: row.heads_kv,
                    batch: row.batch,
                    seq_q: row.seq_q,
                    seq_k: row.seq_k,
                    also: String::new(),
                }
            }
        }
    )*};
}
problem_of!(Timing, Call, Accuracy, Memory);

/// Formats as in `bf16 [4, 16, 4096, 128] causal`; an axis that varies is a letter.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axis = |value: usize, letter: &str| if value == 0 { letter.into() } else { value.to_string() };
        write!(f, "{} [{}, {}", self.dtype, axis(self.batch, "b"), axis(self.heads_q, "h"))?;
        if self.heads_kv != self.heads_q {
            write!(f, "/{}", axis(self.heads_kv, "h"))?;
        }
        write!(f, ", {}", axis(self.seq_q, "s"))?;
        if self.seq_k != self.seq_q {
            write!(f, "→{}", axis(self.seq_k, "s"))?;
        }
        write!(f, ", {}] {}", axis(self.head_dim, "d"), if self.causal { "causal" } else { "full" })?;
        let mut rest = [&*self.variant, &*self.also].into_iter().filter(|text| !["", "none"].contains(text));
        rest.try_for_each(|text| write!(f, ", {text}"))
    }
}

/// Implementation of the rows in one line of a chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// Label: the implementation, with its kernel and runtime if there are several.
    pub label: String,
    /// Class, which determines the colour.
    pub class: &'static str,
    /// Index of this line among the implementation's lines.
    pub dash: usize,
}

/// Groups rows by implementation, in the order of legends. `who` returns implementation, kernel, runtime and pass. Kernel and runtime are
/// part of the label if an implementation has several in one pass of `all`, the rows of the figure.
pub fn by_who<'a, R>(rows: &[&'a R], all: &[&'a R], who: fn(&R) -> [&str; 4]) -> Vec<(Who, Vec<&'a R>)> {
    let keys = distinct(all.iter().map(|row| who(row)));
    let several = |name: &str, part: usize| {
        let of_pass = |pass: &str| {
            let same = keys.iter().filter(|key| (key[0], key[3]) == (name, pass));
            distinct(same.map(|key| key[part]).filter(|value| !value.is_empty())).len()
        };
        keys.iter().any(|key| of_pass(key[3]) > 1)
    };
    let parts = |key: [&'a str; 4]| {
        let parts = (1..3).filter(|part| several(key[0], *part)).map(|part| key[part]);
        [key[0]].into_iter().chain(parts.filter(|part| !part.is_empty())).collect::<Vec<_>>()
    };
    let labels = distinct(keys.iter().map(|key| parts(*key)));
    let mut mine = distinct(rows.iter().map(|row| parts(who(row))));
    mine.sort_by_key(|label| place(&IMPLS, label[0]));
    let of = |label: Vec<&'a str>| {
        let mut same = labels.iter().filter(|other| other[0] == label[0]);
        let dash = same.position(|other| *other == label).unwrap_or(0);
        let rows = rows.iter().copied().filter(|row| parts(who(row)) == label).collect();
        (Who { label: label.join(" "), class: class(label[0]), dash }, rows)
    };
    mine.into_iter().map(of).collect()
}

/// Implementation, kernel, runtime and pass of a timing.
pub fn timed_by(row: &Timing) -> [&str; 4] {
    [&row.r#impl, &row.kernel, &row.runtime, &row.pass]
}

/// Name of an implementation, or `other` if it is unknown.
pub fn class(name: &str) -> &'static str {
    IMPLS.into_iter().find(|known| *known == name).unwrap_or("other")
}

/// The passes among these names, in the order of panels.
pub fn passes<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut passes = distinct(names);
    passes.sort_by_key(|name| place(&PASSES, name));
    passes
}

fn place(known: &[&str], name: &str) -> usize {
    known.iter().position(|other| *other == name).unwrap_or(known.len())
}

/// Rates of the devices themselves, by run.
#[derive(Default)]
pub struct Roofs {
    /// The fastest matrix product of each element type, in TFLOP/s.
    products: BTreeMap<(String, String), f64>,
    /// The fastest copy, in GB/s.
    copies: BTreeMap<String, f64>,
}

impl Roofs {
    /// Adds the matrix products and copies among these rows.
    pub fn add<'a>(&mut self, rows: impl IntoIterator<Item = &'a Timing>) {
        for row in rows.into_iter().filter(|row| row.is_roof()) {
            let (roof, rate) = match row.r#impl == COPY {
                true => (self.copies.entry(row.run.clone()).or_default(), row.gigabytes_per_second()),
                false => (self.products.entry((row.run.clone(), row.dtype.clone())).or_default(), row.tflops),
            };
            *roof = roof.max(rate.unwrap_or(0.0));
        }
    }

    /// Part of the roofline of the row's run that its TFLOP/s are.
    pub fn part_of_product(&self, row: &Timing) -> Option<f64> {
        let roof = self.products.get(&(row.run.clone(), row.dtype.clone())).filter(|roof| **roof > 0.0)?;
        Some(row.tflops? / roof)
    }

    /// Rate of the copy in this run, in GB/s.
    pub fn copy(&self, run: &str) -> Option<f64> {
        self.copies.get(run).copied().filter(|rate| *rate > 0.0)
    }

    /// Part of the rate of the copy in the row's run that a decoding step reaches.
    pub fn part_of_copy(&self, row: &Timing) -> Option<f64> {
        Some(row.gigabytes_per_second()? / self.copy(&row.run)?)
    }
}

/// The last row of each key, in the original order.
pub fn latest<R, K: Ord>(rows: &[R], key: impl Fn(&R) -> K) -> Vec<&R> {
    let mut seen = BTreeSet::new();
    let mut kept: Vec<&R> = rows.iter().rev().filter(|row| seen.insert(key(row))).collect();
    kept.reverse();
    kept
}

/// Removes duplicates, in order of first appearance.
pub fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut kept = Vec::new();
    for item in items {
        if !kept.contains(&item) {
            kept.push(item);
        }
    }
    kept
}
