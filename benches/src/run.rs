//! The benchmark itself: a worker for each problem and implementation, peers beside them, results as they come.

use crate::case::{Case, Filters, Pass, Set};
use crate::data::Errors;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Implementation;
use crate::peers;
use crate::results::{self, Accuracy, Call, Timing};
use crate::worker::{Answer, Job};
use flash_attention_kernels::Kernel;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What to time, and where to write it.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The set of problems.
    #[arg(long, value_enum, default_value = "quick")]
    pub set: Set,
    #[command(flatten)]
    pub filters: Filters,
    /// Implementations.
    #[arg(long = "impl", value_enum, value_delimiter = ',', default_value = "ours,burn,composed")]
    pub implementations: Vec<Implementation>,
    /// Passes.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "forward,backward,both,autodiff")]
    pub pass: Vec<Pass>,
    /// A kernel of ours, in place of the planned one.
    #[arg(long, value_parser = kernel)]
    pub kernel: Option<Kernel>,
    /// The device, which needs the feature of that name; by default the best that was compiled in.
    #[arg(long, value_enum)]
    pub device: Option<DeviceName>,
    /// PyTorch's implementations too, on the first CUDA device, if python3 has PyTorch.
    #[arg(long, value_delimiter = ',', num_args = 0.., require_equals = true)]
    pub peers: Option<Vec<String>>,
    /// Seconds that one pass of one implementation over one problem may take, compilation and autotuning included.
    #[arg(long, default_value_t = 300)]
    pub limit: u64,
    /// Results are added to NAME.csv; by default the set and the device.
    #[arg(long)]
    pub name: Option<String>,
    /// Where results are kept.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    pub directory: PathBuf,
}

/// A kernel by its name on the command line.
pub(crate) fn kernel(name: &str) -> Result<Kernel, String> {
    let all = Kernel::ALL;
    let found = all.into_iter().find(|kernel| kernel.name() == name);
    found.ok_or_else(|| format!("there is no such kernel; there are: {}", all.map(Kernel::name).join(", ")))
}

/// What rows of one run share.
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
        // What this binary was built from; a tree that differs from its commit says so.
        let commit = env!("ATTENTION_BENCH_COMMIT").to_string();
        let date = now.format("%Y-%m-%d").to_string();
        Run { id: now.format("%Y%m%dT%H%M%SZ").to_string(), date, commit, runtime: runtime.into() }
    }
}

/// One line of the table, and of each file that has something to say.
pub(crate) struct Rows {
    timing: Timing,
    call: Call,
    accuracy: Option<Accuracy>,
}

/// What a worker or a peer found out, as rows.
pub(crate) fn rows(run: &Run, implementation: &str, case: &Case, pass: Pass, answer: &Answer) -> Result<Rows, Error> {
    let tflops = match (answer.tflops, answer.time_ms) {
        (None, Some([median, ..])) => Some(case.flops(pass)? / median / 1e9),
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

/// Four significant digits, which is more than a measurement holds.
pub(crate) fn round(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

/// Times everything that was asked for.
pub fn run(options: &Options) -> Result<(), Error> {
    let cases = options.filters.apply(options.set)?;
    let device = options.device.unwrap_or_else(DeviceName::best);
    let device_name = device.open()?.client().properties().identity.name.clone();
    let name = options.name.clone().unwrap_or_else(|| format!("{}-{}", options.set.name(), device.name()));
    let run = Run::new(device.name());
    let mut out = Output::new(options, &name, cases.iter().map(|case| calls(options, case).count() as u64).sum())?;
    for case in &cases {
        for (implementation, pass) in calls(options, case) {
            out.bar.set_message(format!("{} {} {case}", implementation.name(), pass.name()));
            let job = Job { device, case: *case, implementation, kernel: options.kernel, pass, timed: true };
            let answer = answer(&job, &device_name, Duration::from_secs(options.limit))?;
            out.add(rows(&run, implementation.name(), case, pass, &answer)?, Some(case))?;
            out.bar.inc(1);
        }
    }
    if let Some(only) = &options.peers {
        out.bar.set_message("peers");
        peers::run(&cases, &options.pass, only, &run, |rows, case| out.add(rows, case))?;
    }
    out.bar.finish_and_clear();
    println!("written: {}", results::path::<Timing>(&options.directory, &name).display());
    Ok(())
}

/// What is called for a problem.
fn calls<'a>(options: &'a Options, case: &'a Case) -> impl Iterator<Item = (Implementation, Pass)> + 'a {
    let passes = |implementation| options.pass.iter().copied().map(move |pass| (implementation, pass));
    let all = options.implementations.iter().copied().flat_map(passes);
    all.filter(|(implementation, pass)| implementation.has(case, *pass))
}

/// The table in the terminal, and the files.
struct Output {
    bar: ProgressBar,
    timings: PathBuf,
    calls: PathBuf,
    errors: PathBuf,
}

impl Output {
    fn new(options: &Options, name: &str, length: u64) -> Result<Self, Error> {
        let timings = results::path::<Timing>(&options.directory, name);
        let calls = results::path::<Call>(&options.directory, name);
        let errors = results::path::<Accuracy>(&options.directory, name);
        // A file that is not ours is refused now, not after an hour.
        results::append::<Timing>(&timings, &[])?;
        results::append::<Call>(&calls, &[])?;
        results::append::<Accuracy>(&errors, &[])?;
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
        let bar = ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.println(format!(
            "{:<54} {:<9} {:<9} {:>10} {:>17} {:>8} {:>9} {:>9} {:>8} {:>8}",
            "problem", "impl", "pass", "median ms", "p20–p80", "TFLOP/s", "peak MiB", "first ms", "host µs", "error"
        ));
        Ok(Output { bar, timings, calls, errors })
    }

    fn add(&mut self, Rows { timing, call, accuracy }: Rows, case: Option<&Case>) -> Result<(), Error> {
        let show = |x: Option<f64>, digits: usize| x.map_or("–".into(), |x| format!("{x:.digits$}"));
        let problem = case.map_or_else(|| timing.kernel.clone(), Case::to_string);
        let spread = format!("{}–{}", show(timing.p20_ms, 3), show(timing.p80_ms, 3));
        let line = format!(
            "{problem:<54} {:<9} {:<9} {:>10} {spread:>17} {:>8} {:>9} {:>9} {:>8} {:>8} {}",
            timing.r#impl,
            timing.pass,
            show(timing.median_ms, 3),
            show(timing.tflops, 2),
            show(timing.peak_bytes.map(|bytes| bytes as f64 / (1 << 20) as f64), 1),
            show(call.first_call_ms, 0),
            show(call.host_us, 1),
            call.error.map_or("–".into(), |error| format!("{error:.0e}")),
            call.note,
        );
        // Without a terminal the bar says nothing.
        if self.bar.is_hidden() {
            println!("{line}")
        } else {
            self.bar.println(line)
        }
        results::append(&self.timings, &[timing])?;
        results::append(&self.errors, accuracy.as_slice())?;
        results::append(&self.calls, &[call])
    }
}

/// What a worker answers; if it did not live to answer, why.
pub(crate) fn answer(job: &Job, device: &str, limit: Duration) -> Result<Answer, Error> {
    let failed = |what: &str, error: std::io::Error| Error::Other(format!("a worker could not be {what}: {error}"));
    let program = std::env::current_exe().map_err(|error| failed("found", error))?;
    let mut child = Command::new(program)
        .arg("worker")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed("started", error))?;
    let text = serde_json::to_string(job).map_err(|error| Error::Other(format!("the job: {error}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(text.as_bytes()).map_err(|error| failed("told its job", error))?;
    }
    let (output, complaint) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let end = Instant::now() + limit;
    let mut why = None;
    while child.try_wait().map_err(|error| failed("waited for", error))?.is_none() {
        if Instant::now() > end {
            why = Some(format!("over {} s", limit.as_secs()));
            child.kill().and_then(|()| child.wait()).map_err(|error| failed("stopped", error))?;
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let (output, complaint) = (output.join().unwrap_or_default(), complaint.join().unwrap_or_default());
    // Libraries may print lines of their own.
    let found = output.lines().filter_map(|line| serde_json::from_str(line).ok()).next_back();
    let mut answer: Answer = found.unwrap_or_else(|| Answer {
        note: why.unwrap_or_else(|| reason(&complaint)),
        device: device.into(),
        ..Default::default()
    });
    if is_out_of_memory(&answer.note) {
        answer.note = OUT_OF_MEMORY.into();
    }
    answer.note = answer.note.lines().next().unwrap_or_default().into();
    Ok(answer)
}

/// Everything that comes out of a pipe.
fn drain(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before the pipe broke is what there is.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The note of a call that did not fit the device.
pub const OUT_OF_MEMORY: &str = "out of memory";

fn is_out_of_memory(text: &str) -> bool {
    let text = text.to_lowercase();
    ["out of memory", "outofmemory", "out_of_memory", "buffertoobig", "can't allocate buffer"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// What a worker died of, in one line.
fn reason(complaint: &str) -> String {
    if is_out_of_memory(complaint) {
        return OUT_OF_MEMORY.into();
    }
    let lines = || complaint.lines().map(str::trim).filter(|line| !line.is_empty());
    // The line after "panicked at" is the message.
    let message = lines().skip_while(|line| !line.contains("panicked at")).nth(1).or_else(|| lines().next_back());
    let cause = lines().skip_while(|line| !line.contains("Caused by")).nth(1).map(|cause| format!(", {cause}"));
    format!("failed: {}{}", message.unwrap_or("without a word"), cause.unwrap_or_default())
}
