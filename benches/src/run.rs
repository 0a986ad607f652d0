//! The benchmark itself: a worker for each problem and implementation, peers for comparison, and results written as they come.

use crate::case::{Case, Pass};
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Implementation;
use crate::oracle::Errors;
use crate::problems::{Problems, named};
use crate::results::{self, Accuracy, COPY, Call, Timing};
use crate::session::{Done, Output, Session, Work};
use crate::worker::Answer;
use flash_attention_kernels::Kernel;
use std::path::PathBuf;
use std::time::Duration;

/// What to time, and where to write the results.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    problems: Problems,
    /// Implementations.
    #[arg(long = "impl", value_enum, value_delimiter = ',', default_value = "ours,burn,composed")]
    implementations: Vec<Implementation>,
    /// Passes.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "forward,backward,both,autodiff")]
    pass: Vec<Pass>,
    /// Kernel of ours to use instead of the planned one.
    #[arg(long, value_parser = named(Kernel::ALL, Kernel::name))]
    kernel: Option<Kernel>,
    /// Device, whose feature must be enabled; by default the best one compiled in.
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// Also times PyTorch's implementations on the first CUDA device, if python3 has PyTorch: cudnn, flash2, flash2-deterministic, memeff,
    /// flex, or all if none is named.
    #[arg(long, value_delimiter = ',', num_args = 0.., require_equals = true, value_parser = crate::peers::NAMES)]
    peers: Option<Vec<String>>,
    /// Time limit of one pass of one implementation over one problem in seconds, including compilation and autotuning.
    #[arg(long, default_value_t = 300)]
    limit: u64,
    /// Results are appended to NAME.csv; by default the set, or `shapes`, and the device.
    #[arg(long)]
    name: Option<String>,
    /// Directory of the results.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    directory: PathBuf,
}

/// Commit that this binary was built from, with a `+` if the tree differed from it.
pub(crate) fn commit() -> &'static str {
    env!("ATTENTION_BENCH_COMMIT")
}

/// Values common to all rows of a run.
#[derive(Clone)]
pub(crate) struct Run {
    pub id: String,
    pub date: String,
    pub commit: String,
    pub runtime: String,
}

impl Run {
    /// A run that starts now.
    pub(crate) fn new(runtime: &str) -> Self {
        let now = chrono::Utc::now();
        let commit = commit().to_string();
        let date = now.format("%Y-%m-%d").to_string();
        Run { id: now.format("%Y%m%dT%H%M%SZ").to_string(), date, commit, runtime: runtime.into() }
    }
}

/// One line of the table, and the rows for each file.
pub(crate) struct Rows {
    pub timing: Timing,
    pub call: Call,
    pub accuracy: Option<Accuracy>,
}

/// Converts the result of a worker or a peer to rows.
pub(crate) fn rows(run: &Run, implementation: &str, case: &Case, pass: Pass, answer: &Answer) -> Result<Rows, Error> {
    let tflops = match (answer.tflops, answer.time_ms) {
        (None, Some([median, ..])) if implementation != COPY => Some(case.flops(pass)? / median / 1e9),
        (given, _) => given,
    };
    let timing = Timing {
        run: run.id.clone(),
        date: run.date.clone(),
        commit: run.commit.clone(),
        device: answer.device.clone(),
        runtime: run.runtime.clone(),
        r#impl: implementation.into(),
        kernel: answer.kernel.clone(),
        pass: pass.name().into(),
        dtype: case.dtype.name().into(),
        batch: case.batch,
        heads_q: case.heads_q,
        heads_kv: case.heads_kv,
        seq_q: case.seq_q,
        seq_k: case.seq_k,
        head_dim: case.head_dim,
        causal: case.causal,
        variant: case.variant_name(),
        median_ms: answer.time_ms.map(|[median, ..]| round(median)),
        p20_ms: answer.time_ms.map(|[_, p20, _]| round(p20)),
        p80_ms: answer.time_ms.map(|[.., p80]| round(p80)),
        tflops: tflops.map(round),
        peak_bytes: answer.peak_bytes,
    };
    let Timing { run, r#impl, kernel, pass, dtype, variant, .. } = timing.clone();
    let call = Call {
        run,
        r#impl,
        kernel,
        pass,
        dtype,
        batch: case.batch,
        heads_q: case.heads_q,
        heads_kv: case.heads_kv,
        seq_q: case.seq_q,
        seq_k: case.seq_k,
        head_dim: case.head_dim,
        causal: case.causal,
        variant,
        first_call_ms: answer.first_call_ms.map(round),
        host_us: answer.host_us.map(round),
        error: answer.error.map(round),
        note: answer.note.clone(),
    };
    let Errors { o, lse, dq, dk, dv, dbias } = answer.errors;
    let [o, lse, dq, dk, dv, dbias] = [o, lse, dq, dk, dv, dbias].map(|error| error.map(round));
    let Call { run, r#impl, kernel, pass, dtype, variant, .. } = call.clone();
    let accuracy = Accuracy {
        run,
        r#impl,
        kernel,
        pass,
        dtype,
        batch: case.batch,
        heads_q: case.heads_q,
        heads_kv: case.heads_kv,
        seq_q: case.seq_q,
        seq_k: case.seq_k,
        head_dim: case.head_dim,
        causal: case.causal,
        variant,
        o,
        lse,
        dq,
        dk,
        dv,
        dbias,
    };
    Ok(Rows { timing, call, accuracy: (answer.errors != Errors::default()).then_some(accuracy) })
}

/// Rounds to four significant digits, which is more precise than a measurement.
pub(crate) fn round(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

/// Runs all requested timings.
pub fn run(options: &Options) -> Result<(), Error> {
    let device = options.device.unwrap_or_else(DeviceName::best);
    let work = Work {
        cases: options.problems.cases(device)?,
        implementations: options.implementations.clone(),
        passes: options.pass.clone(),
        kernel: options.kernel,
        peers: options.peers.clone(),
        limit: Duration::from_secs(options.limit),
    };
    let mut session = Session::new(device, None)?;
    let name = options.name.clone().unwrap_or_else(|| options.problems.name(device));
    let mut out = Output::new(&options.directory, &name, &work)?;
    session.time(&work, &mut out, &Done::new())?;
    out.bar.finish_and_clear();
    println!("written: {}", results::path::<Timing>(&options.directory, &name).display());
    Ok(())
}
