//! The fused-op benchmark: `cargo bench -p attention-bench -- --help`.
//!
//! ```text
//! case             problems and sets of them, filters
//! functions        scores and masks as users write them
//! implementations  ours, Burn's own, composed operations; peers.py: PyTorch's
//! worker           one implementation on one problem in a process of its own: checks, then times
//! run              all of them, into a table and results/*.csv
//! memory           what each takes beyond its inputs, beside what it must hold
//! sweep            every tile shape, and what the profiler sees
//! tune             ways to plan Hopper's forward
//! report           results as a page and as the README's tables
//! ```

pub mod case;
mod data;
mod device;
pub mod error;
mod functions;
mod implementations;
mod memory;
mod part;
mod peers;
pub mod report;
pub mod results;
mod run;
mod sweep;
mod timing;
mod tune;
mod worker;

use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Times attention beside its peers.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: run::Options,
    /// Set by `cargo bench`.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Times every tile shape of every kernel.
    Sweep(sweep::Options),
    /// Times ways to plan kernels for CUDA.
    Tune(tune::Options),
    /// Measures memory beyond the inputs, of kernels called directly and through autodiff, and times nothing.
    Memory(memory::Options),
    /// Turns results into one page with charts.
    Report {
        /// Names of results; all there are if none is given.
        names: Vec<String>,
        /// Where results are kept.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
        directory: PathBuf,
        /// The page.
        #[arg(long, default_value = "report.html")]
        out: PathBuf,
        /// A folder for the charts that documents show.
        #[arg(long)]
        pictures: Option<PathBuf>,
    },
    /// Writes tables of results between their markers in a document.
    Readme {
        /// The document.
        #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"))]
        document: PathBuf,
        /// Where results are kept.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
        directory: PathBuf,
        /// Writes nothing, and fails where the tables are not current.
        #[arg(long)]
        check: bool,
    },
    /// Does one job for `run`.
    #[command(hide = true)]
    Worker,
}

/// Does what the command line asks for; ends the process with code 2 and one sentence where that cannot be done.
pub fn main() {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        None => run::run(&arguments.run),
        Some(Command::Sweep(options)) => sweep::run(&options),
        Some(Command::Tune(options)) => tune::run(&options),
        Some(Command::Memory(options)) => memory::run(&options),
        Some(Command::Report { names, directory, out, pictures }) => {
            report::write(&directory, &names, &out, pictures.as_deref())
                .map(|written| written.iter().for_each(|path| println!("written: {}", path.display())))
        }
        Some(Command::Readme { document, directory, check }) => report::readme(&directory, &document, check),
        Some(Command::Worker) => worker::run(),
    };
    if let Err(error) = result {
        eprintln!("{error}");
        std::process::exit(2);
    }
}
