//! The fused-op benchmark: `cargo bench -p attention-bench -- --help`.
//!
//! ```text
//! case             a problem, and a pass over it
//! sets             sets of problems
//! problems         which of them a command line asks for, or shapes of its own
//! functions        scores and masks as users write them
//! implementations  ours, Burn's own, composed operations; peers.py: PyTorch's
//! data, oracle     inputs, and some blocks of the right result
//! judge            relative errors in the norm, bounds, verdicts; judge.py: of PyTorch's results
//! worker           one implementation on one problem in a process of its own: checks, then times
//! session          workers and peers, one after the other, up to a time
//! run              all of what a command line asks for, into a table and results/*.csv
//! publish          everything that documents show, in pieces
//! replace          what was published in place of older results
//! memory           what each takes beyond its inputs, beside what it may hold
//! sweep            every tile shape, and what the profiler sees
//! tune             ways to plan Hopper's forward
//! host             host time of small calls; host_peer.py: PyTorch's
//! ranks            one sequence over several GPUs
//! report           results as a page of charts, and as the tables and charts of documents
//! ```

pub mod case;
mod child;
mod data;
mod device;
pub mod error;
mod functions;
mod host;
mod implementations;
pub mod judge;
mod memory;
mod oracle;
mod part;
mod peers;
pub mod problems;
mod publish;
mod published;
#[cfg(feature = "cuda")]
mod ranks;
mod replace;
pub mod report;
pub mod results;
mod run;
mod session;
pub mod sets;
mod sweep;
mod timing;
mod tune;
mod worker;

use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Times attention and its peers.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: run::Options,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Times every tile shape of every kernel.
    Sweep(sweep::Options),
    /// Times other plans of the CUDA kernels.
    Tune(tune::Options),
    /// Measures memory in addition to the inputs, for kernels called directly and through autodiff, without timing.
    Memory(memory::Options),
    /// Measures the host time of small calls, through the kernels crate and through Burn.
    Host(host::Options),
    /// Times attention of one sequence over several GPUs, beside one.
    #[cfg(feature = "cuda")]
    Ranks(ranks::Options),
    /// Draws results as a page with charts.
    Report {
        /// Names of results; by default all.
        names: Vec<String>,
        /// Directory of the results.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
        directory: PathBuf,
        /// File of the page.
        #[arg(long, default_value = "report.html")]
        out: PathBuf,
        /// Directory for charts in files of their own.
        #[arg(long)]
        pictures: Option<PathBuf>,
        /// Also draws charts that mix rows of ours from several commits.
        #[arg(long)]
        mixed: bool,
    },
    /// Measures everything that documents show; can be interrupted and repeated. Exits with code 3 while some of it is left.
    Publish(publish::Options),
    /// Replaces existing results by those that `publish` measured.
    Replace(replace::Options),
    /// Redraws the charts of documents.
    Pictures {
        /// Directory of the results.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
        directory: PathBuf,
        /// Directory of the documents.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs"))]
        documents: PathBuf,
        /// Writes nothing, and fails if a chart is not current.
        #[arg(long)]
        check: bool,
    },
    /// Writes tables of results between their markers in a document.
    Tables {
        /// The document.
        #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/benchmark.md"))]
        document: PathBuf,
        /// Directory of the results.
        #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
        directory: PathBuf,
        /// Writes nothing, and fails if the tables are not current.
        #[arg(long)]
        check: bool,
    },
    /// Runs one job for `run`.
    #[command(hide = true)]
    Worker,
}

/// Exit code if something requested is left to do.
const LEFT: i32 = 3;

/// Runs the command line. Exits with code 2 and one sentence if that fails.
pub fn main() {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        None => run::run(&arguments.run),
        Some(Command::Sweep(options)) => sweep::run(&options),
        Some(Command::Tune(options)) => tune::run(&options),
        Some(Command::Memory(options)) => memory::run(&options),
        Some(Command::Host(options)) => host::run(&options),
        #[cfg(feature = "cuda")]
        Some(Command::Ranks(options)) => ranks::run(&options),
        Some(Command::Report { names, directory, out, pictures, mixed }) => {
            let allow = if mixed { report::Allow::Any } else { report::Allow::OneCommit };
            report::write(&directory, &names, &out, pictures.as_deref(), allow).map(say)
        }
        Some(Command::Publish(options)) => publish::run(&options).map(|done| {
            if !done {
                std::process::exit(LEFT);
            }
        }),
        Some(Command::Replace(options)) => replace::run(&options),
        Some(Command::Pictures { directory, documents, check }) => {
            report::pictures(&directory, &documents, check).map(say)
        }
        Some(Command::Tables { document, directory, check }) => report::write_tables(&directory, &document, check),
        Some(Command::Worker) => worker::run(),
    };
    if let Err(error) = result {
        eprintln!("{error}");
        std::process::exit(2);
    }
}

fn say(written: Vec<PathBuf>) {
    written.iter().for_each(|path| println!("written: {}", path.display()));
}
