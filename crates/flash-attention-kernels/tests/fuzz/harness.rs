//! Arguments that `cargo test` passes to every test program, for a program without the usual harness.

use crate::Args;
use clap::CommandFactory;

/// The name of the only test, for filters.
const NAME: &str = "corpus";
/// Options of the usual harness that take a value.
const WITH_VALUE: [&str; 8] =
    ["--skip", "--test-threads", "--format", "--color", "--logfile", "-Z", "--shuffle-seed", "--ensure-time"];

/// Whether one of the arguments is an option of the fuzzer.
pub fn has_own(arguments: &[String]) -> bool {
    let command = Args::command();
    let own: Vec<&str> = command.get_arguments().filter_map(|of| of.get_long()).chain(["help"]).collect();
    let flags = arguments.iter().filter_map(|argument| argument.strip_prefix("--"));
    flags.map(|flag| flag.split('=').next().unwrap_or(flag)).any(|flag| own.contains(&flag))
}

/// Whether the usual harness would run the test. If not, prints what the harness would print.
pub fn asks_for_corpus(arguments: &[String]) -> bool {
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    if has("--list") {
        println!("{NAME}: test\n\n1 test, 0 benchmarks");
        return false;
    }
    let (mut filters, mut skips) = (Vec::new(), Vec::new());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--skip" => skips.extend(rest.next()),
            flag if WITH_VALUE.contains(&flag) => drop(rest.next()),
            flag if flag.starts_with('-') => {}
            _ => filters.push(argument),
        }
    }
    let is_meant = |filter: &&String| if has("--exact") { *filter == NAME } else { NAME.contains(filter.as_str()) };
    let runs = (filters.is_empty() || filters.iter().any(is_meant)) && !skips.iter().any(is_meant) && !has("--ignored");
    if !runs {
        println!("fuzz: 0 passed, 0 failed: the corpus is filtered out");
    }
    runs
}
