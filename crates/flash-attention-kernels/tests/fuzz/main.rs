//! A seeded differential fuzzer of the kernels. It runs each drawn case twice, with guards around every buffer, and compares the first run
//! with the oracle and the second with the first, bit by bit. A failing case is simplified and printed as one line, which replays it.
//!
//! Without arguments, as `cargo test` runs it, it replays `corpus.txt`. See `docs/fuzzing.md`.

mod case;
#[path = "../kernels/common.rs"]
mod common;
mod draw;
mod harness;
mod line;
mod selfcheck;
mod shrink;
mod worker;

use clap::Parser;
use draw::Source;
use line::Line;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use worker::{Abilities, Outcome, SLACK, Worker};

/// Draws cases for the kernels and compares them with the oracle.
#[derive(Clone, Debug, Parser)]
#[command(name = "fuzz", after_help = line::help())]
pub struct Args {
    /// Seed of the drawn cases: a number, or `random` for a random seed, which is printed.
    #[arg(long)]
    seed: Option<String>,
    /// Number of cases to run [default with a seed: 300, or as many as --seconds allows]
    #[arg(long)]
    cases: Option<usize>,
    /// Time limit for drawn cases, in seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Number of cases for each combination of options.
    #[arg(long, default_value_t = 14)]
    each: usize,
    /// Sequences up to 2,000, for fast devices.
    #[arg(long)]
    large: bool,
    /// Device: wgpu, vulkan or cuda [default: FLASH_TEST_DEVICE, or wgpu]
    #[arg(long)]
    device: Option<String>,
    /// Kernel in place of the planned one: hopper, mma, matrix, rows or portable.
    #[arg(long)]
    kernel: Option<String>,
    /// Element type: f32, f16 or bf16 [default: all of the device's; replayed lines have their own]
    #[arg(long)]
    dtype: Option<String>,
    /// Precision of f32 products: full or tf32.
    #[arg(long)]
    precision: Option<String>,
    /// Keys that are not drawn, like `cu_q,cu_k`, because they fail for a known reason.
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Replays this line. May be repeated.
    #[arg(long, value_name = "LINE")]
    replay: Vec<String>,
    /// Replays the lines of this file.
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// Simplifies failing replayed lines, too.
    #[arg(long)]
    shrink: bool,
    /// Prints the drawn cases and runs nothing.
    #[arg(long)]
    dry_run: bool,
    /// Prints each case.
    #[arg(long)]
    verbose: bool,
    /// Time limit of a case, in seconds. Software Vulkan may compile the kernels of one for more than five minutes.
    #[arg(long, default_value_t = 900)]
    timeout: u64,
    /// Largest number of runs to simplify a failing case.
    #[arg(long, default_value_t = 150)]
    shrink_runs: usize,
    #[arg(long, hide = true)]
    worker: bool,
}

const CORPUS: &str = include_str!("corpus.txt");

/// Counts of cases.
#[derive(Default)]
struct Tally {
    passed: BTreeMap<String, usize>,
    failed: usize,
    skipped: BTreeMap<String, usize>,
    redrawn: usize,
}

impl Tally {
    fn passed(&self) -> usize {
        self.passed.values().sum()
    }

    fn skipped(&self) -> usize {
        self.skipped.values().sum()
    }
}

struct Fuzzer {
    args: Args,
    worker: Worker,
    abilities: Abilities,
    tally: Tally,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let by_default = !harness::has_own(&arguments);
    if by_default && !harness::asks_for_corpus(&arguments) {
        return ExitCode::SUCCESS;
    }
    let args = if by_default { Args::parse_from(["fuzz"]) } else { Args::parse() };
    if args.worker {
        worker::work();
        return ExitCode::SUCCESS;
    }
    let seed = match args.seed.as_deref() {
        Some("random") => Some(RandomState::new().build_hasher().finish() % 1_000_000_000),
        Some(number) => Some(number.parse().expect("--seed must be a number or random")),
        // Without --seed, cases are drawn from a fixed seed.
        None => (args.cases.is_some() || args.seconds.is_some() || args.dry_run).then_some(1),
    };
    if by_default {
        selfcheck::lines_and_shrinking();
    }
    let mut worker = Worker::new(environment(&args), Duration::from_secs(args.timeout));
    let Some(mut abilities) = worker.abilities() else {
        println!("fuzz: skipped: there is no device");
        return ExitCode::SUCCESS;
    };
    if let Some(dtype) = args.dtype.clone() {
        // Replayed lines of other element types are skipped and counted.
        assert!(
            seed.is_none() || abilities.dtypes.contains(&dtype),
            "--dtype is {dtype}; the device has {:?}",
            abilities.dtypes
        );
        abilities.dtypes = vec![dtype];
    }
    let mut fuzzer = Fuzzer { args, worker, abilities, tally: Tally::default() };
    fuzzer.replay_all(seed.is_some());
    if let Some(seed) = seed {
        println!("fuzz: seed {seed}");
        fuzzer.draw(seed);
    }
    fuzzer.close(seed)
}

/// Environment variables of the tests, from the command line.
fn environment(args: &Args) -> Vec<(&'static str, String)> {
    let all = [("FLASH_TEST_DEVICE", &args.device), ("FLASH_TEST_KERNEL", &args.kernel)];
    all.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect()
}

impl Fuzzer {
    /// Replays the given lines, or the corpus if nothing else is requested.
    fn replay_all(&mut self, draws: bool) {
        let mut lines = self.args.replay.clone();
        let corpus = match &self.args.corpus {
            Some(path) => std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
            None if lines.is_empty() && !draws => CORPUS.into(),
            None => String::new(),
        };
        lines.extend(corpus.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from));
        for text in lines {
            let mut line: Line = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            if let Some(dtype) = &self.args.dtype {
                line.set("dtype", dtype);
            }
            if let Some(precision) = &self.args.precision {
                line.set("precision", precision);
            }
            self.run(&line, 1.0, self.args.shrink);
        }
    }

    /// Draws and runs cases of this seed until the number of cases or the time limit is reached.
    fn draw(&mut self, seed: u64) {
        let (begun, before) = (Instant::now(), self.tally.passed() + self.tally.failed);
        let (most, longest) = if self.args.large { (400_000_000, 2_000) } else { (12_000_000, 520) };
        let (abilities, precision) = (self.abilities.clone(), self.args.precision.clone());
        let source = Source { seed, abilities, precision, without: self.args.without.clone(), most, longest };
        let cases = self.args.cases.unwrap_or(if self.args.seconds.is_some() { usize::MAX } else { 300 });
        let mut last_report = begun;
        for number in 0.. {
            let mut combination = source.combination(number);
            for _ in 0..self.args.each {
                let (run, late) = (self.tally.passed() + self.tally.failed - before, begun.elapsed());
                if run >= cases || self.args.seconds.is_some_and(|seconds| late.as_secs() >= seconds) {
                    return;
                }
                let line = combination.case();
                if line.problem().is_err() {
                    self.tally.redrawn += 1;
                    continue;
                }
                if self.args.dry_run {
                    println!("{line}");
                    *self.tally.passed.entry("drawn".into()).or_default() += 1;
                    continue;
                }
                if matches!(self.run(&line, SLACK, true), Outcome::Skipped(_)) {
                    // A kernel that does not take this case takes no case of the combination.
                    break;
                }
                if last_report.elapsed() > Duration::from_secs(60) {
                    last_report = Instant::now();
                    println!("fuzz: {} cases in {} s, {} failed", run + 1, late.as_secs(), self.tally.failed);
                }
            }
            let Tally { redrawn, .. } = self.tally;
            let drawn = (number as usize + 1) * self.args.each;
            assert!(
                self.tally.skipped() <= 1_000 + drawn / 2,
                "{} of {drawn} cases are skipped; at most half may be",
                self.tally.skipped()
            );
            // Drawn options do not contradict each other, so a refused line is a fault of the fuzzer.
            assert!(redrawn * 50 <= drawn + 500, "{redrawn} of {drawn} cases are invalid; at most one in 50 may be");
        }
    }

    fn run(&mut self, line: &Line, slack: f64, shrinks: bool) -> Outcome {
        let begun = Instant::now();
        let outcome = self.worker.run(line, slack);
        if self.args.verbose {
            println!("{:.1} s: {line}", begun.elapsed().as_secs_f64());
        }
        match &outcome {
            Outcome::Ran(kernel) => *self.tally.passed.entry(kernel.clone()).or_default() += 1,
            Outcome::Skipped(why) => *self.tally.skipped.entry(why.clone()).or_default() += 1,
            Outcome::Failed(why) => {
                self.tally.failed += 1;
                println!("FAILED: {line}\n  {why}");
                self.alone(line, why, slack, shrinks);
            }
        }
        outcome
    }

    /// Runs a failed case again in a new process, and simplifies it.
    fn alone(&mut self, line: &Line, why: &str, slack: f64, shrinks: bool) {
        let (mut simplest, mut why) = (line.clone(), why.to_string());
        if shrinks {
            match self.worker.run(line, slack) {
                Outcome::Failed(_) => {
                    let runs = self.args.shrink_runs;
                    (simplest, why) = shrink::shrink(line, &why, runs, |line| self.worker.run(line, slack));
                }
                _ => println!("  alone it passes: the failure depends on earlier cases, or is intermittent"),
            }
            println!("shrunk to: {simplest}\n  {why}");
        }
        let Args { device, kernel, .. } = &self.args;
        let named = [("--device", device), ("--kernel", kernel)];
        let named = named.into_iter().filter_map(|(flag, value)| Some(format!("{flag} {} ", value.as_ref()?)));
        println!("  replay: cargo test --workspace --test fuzz -- {}--replay '{simplest}'", named.collect::<String>());
    }

    /// Prints the summary.
    fn close(&self, seed: Option<u64>) -> ExitCode {
        let Args { device, kernel, dtype, .. } = &self.args;
        let Tally { passed, failed, skipped, redrawn } = &self.tally;
        let list = |counts: &BTreeMap<String, usize>| {
            let all = counts.iter().map(|(name, count)| format!("{name} {count}"));
            all.collect::<Vec<_>>().join(", ")
        };
        for (why, count) in skipped {
            println!("  skipped {count}: {why}");
        }
        println!(
            "fuzz: {} passed, {failed} failed, {} skipped; seed {}, device {}, kernel {}, dtype {}; ran: {}; redrawn {redrawn}",
            self.tally.passed(),
            self.tally.skipped(),
            seed.map_or("none".into(), |seed| seed.to_string()),
            device.clone().unwrap_or_else(common::lanes::device),
            kernel.as_deref().unwrap_or("planned"),
            dtype.as_deref().unwrap_or("any"),
            if passed.is_empty() { "nothing".into() } else { list(passed) },
        );
        if *failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
