//! `cargo run --release -p llama -- generate --model DIR --prompt "…"` continues a text with a model of Hugging Face.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Err(error) = llama::cli::Cli::parse().run() else { return ExitCode::SUCCESS };
    // Errors of Burn and CubeCL are reports of many lines.
    let noise = ["An error happened", "Caused by", "skipped ", "Backtrace", "No backtrace", "Asked at"];
    let error = error.to_string();
    let lines = error.lines().map(|line| line.trim().trim_end_matches(':'));
    let lines = lines.filter(|line| !line.is_empty() && !noise.iter().any(|noise| line.starts_with(noise)));
    eprintln!("error: {}", lines.collect::<Vec<_>>().join(": "));
    ExitCode::from(2)
}
