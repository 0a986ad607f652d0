//! A timing session: workers and peers, problem by problem, with results written as they come. A session can have a time limit, and can
//! continue an earlier session.

use crate::case::{Case, Pass};
use crate::child;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Implementation;
use crate::peers::{Peers, Reply, Request, Roof};
use crate::results::{self, Accuracy, Call, Timing};
use crate::run::{Rows, Run, rows};
use crate::worker::Job;
use flash_attention_kernels::Kernel;
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What to time.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub cases: Vec<Case>,
    pub implementations: Vec<Implementation>,
    pub passes: Vec<Pass>,
    /// Kernel to use instead of the planned one.
    pub kernel: Option<Kernel>,
    /// PyTorch's implementations to time as well: these, or all if none is named.
    pub peers: Option<Vec<String>>,
    /// Time limit of one pass of one implementation over one problem.
    pub limit: Duration,
}

impl Work {
    /// Calls of this process's implementations for a problem.
    pub fn calls(&self, case: &Case) -> Vec<(Implementation, Pass)> {
        let all = self.implementations.iter().flat_map(|of| self.passes.iter().map(|pass| (*of, *pass)));
        all.filter(|(implementation, pass)| implementation.has(case, *pass)).collect()
    }

    /// Requests to PyTorch's implementations for a problem.
    fn asked(&self, case: &Case) -> Vec<(&'static str, Pass)> {
        let Some(only) = &self.peers else { return Vec::new() };
        let names = Peers::names(case, only).into_iter();
        let all = names.flat_map(|name| self.passes.iter().map(move |pass| (name, *pass)));
        all.filter(|(name, pass)| Peers::has(name, case, *pass)).collect()
    }

    /// Keys of all its rows.
    pub fn keys(&self) -> Vec<String> {
        let of_case = |case: &Case| {
            let ours = self.calls(case).into_iter().map(|(of, pass)| key(of.name(), pass, case));
            let peers = self.asked(case).into_iter().map(|(name, pass)| key(name, pass, case));
            ours.chain(peers).collect::<Vec<_>>()
        };
        self.cases.iter().flat_map(of_case).collect()
    }
}

/// Keys of the rows that are already measured.
pub(crate) type Done = HashSet<String>;

/// Key of a row: the implementation, the pass and the problem.
pub(crate) fn key(implementation: &str, pass: Pass, case: &Case) -> String {
    let Case { batch, heads_q, heads_kv, seq_q, seq_k, head_dim, causal, .. } = case;
    let sizes = [batch, heads_q, heads_kv, seq_q, seq_k, head_dim].map(|size| size.to_string()).join(" ");
    let (pass, dtype, variant) = (pass.name(), case.dtype.name(), case.variant_name());
    format!("{implementation} {pass} {dtype} {sizes} {causal} {variant}")
}

/// Key of a row of results.
macro_rules! key_of {
    ($row:expr) => {{
        let row = $row;
        let sizes = [row.batch, row.heads_q, row.heads_kv, row.seq_q, row.seq_k, row.head_dim];
        let sizes = sizes.map(|size| size.to_string()).join(" ");
        format!("{} {} {} {sizes} {} {}", row.r#impl, row.pass, row.dtype, row.causal, row.variant)
    }};
}
pub(crate) use key_of;

/// A device, the processes that share it, and the time limit.
pub(crate) struct Session {
    pub run: Run,
    pub device: DeviceName,
    device_name: String,
    oracles: TempDir,
    peers: Option<Peers>,
    /// Whether PyTorch was looked for and not found.
    no_peers: bool,
    until: Option<Instant>,
    /// Longest time of recent measurements, as an estimate for the next one.
    slowest: Duration,
}

/// Estimated time of a measurement before any was made.
const FIRST: Duration = Duration::from_secs(20);

impl Session {
    /// Starts a session on a device, with an optional end.
    pub fn new(device: DeviceName, until: Option<Instant>) -> Result<Self, Error> {
        let device_name = device.open()?.client().properties().identity.name.clone();
        let oracles = tempfile::tempdir().map_err(|source| Error::io(&std::env::temp_dir(), source))?;
        let run = Run::new(device.name());
        let (peers, no_peers, slowest) = (None, false, FIRST);
        Ok(Session { run, device, device_name, oracles, peers, no_peers, until, slowest })
    }

    /// Frees the device for another program.
    pub fn rest(&mut self) {
        self.peers = None;
    }

    /// End of the session.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether there is time for another measurement.
    pub fn has_time(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() + self.slowest < until)
    }

    /// Records the time of a measurement that started at `start`.
    pub fn took(&mut self, start: Instant) {
        self.slowest = self.slowest.max(start.elapsed());
    }

    /// Forgets the times of earlier measurements.
    pub fn next_step(&mut self) {
        self.slowest = FIRST;
    }

    /// A worker's answer, unless time is up.
    pub fn answer(&self, job: &Job, limit: Duration) -> Result<Option<crate::worker::Answer>, Error> {
        child::answer(job, &self.device_name, limit, self.until)
    }

    /// A job for a worker on this device.
    pub fn job(&self, case: Case, implementation: Implementation, pass: Pass) -> Job {
        let oracles = Some(self.oracles.path().to_path_buf());
        Job { device: self.device, case, implementation, kernel: None, pass, timed: true, oracles }
    }

    /// Times what is not done yet, and returns the number of rows for which no time was left.
    pub fn time(&mut self, work: &Work, out: &mut Output, done: &Done) -> Result<usize, Error> {
        let (mut left, mut roofs) = (0, Roof::of(&work.cases));
        self.next_step();
        for case in &work.cases {
            for (implementation, pass) in work.calls(case) {
                if !done.contains(&key(implementation.name(), pass, case)) {
                    left += usize::from(!self.time_ours(work, implementation, pass, case, out)?);
                }
                out.bar.inc(1);
            }
            left += self.time_peers(work, case, out, done, &mut roofs)?;
            out.bar.inc(u64::from(work.peers.is_some()));
        }
        Ok(left)
    }

    /// Returns whether there was time for it.
    fn time_ours(
        &mut self,
        work: &Work,
        implementation: Implementation,
        pass: Pass,
        case: &Case,
        out: &mut Output,
    ) -> Result<bool, Error> {
        if !self.has_time() {
            return Ok(false);
        }
        out.bar.set_message(format!("{} {} {case}", implementation.name(), pass.name()));
        let start = Instant::now();
        let job = Job { kernel: work.kernel, ..self.job(*case, implementation, pass) };
        let Some(answer) = self.answer(&job, work.limit)? else { return Ok(false) };
        out.add(rows(&self.run, implementation.name(), case, pass, &answer)?, Some(case))?;
        self.took(start);
        Ok(true)
    }

    /// Times PyTorch's rows of a problem that are not done yet, and returns the number for which no time was left. The first rows of a
    /// session are their rooflines.
    fn time_peers(
        &mut self,
        work: &Work,
        case: &Case,
        out: &mut Output,
        done: &Done,
        roofs: &mut Vec<Roof>,
    ) -> Result<usize, Error> {
        let mut items = work.asked(case);
        items.retain(|(name, pass)| !done.contains(&key(name, *pass, case)));
        while let Some((name, pass)) = items.first().copied() {
            if self.no_peers || !self.has_time() {
                return Ok(items.len());
            }
            out.bar.set_message(format!("{name} {} {case}", pass.name()));
            let start = Instant::now();
            let peers = match &mut self.peers {
                Some(peers) => peers,
                none => match Peers::start()? {
                    Some(peers) => none.insert(peers),
                    None => {
                        self.no_peers = true;
                        continue;
                    }
                },
            };
            let run = Run { runtime: peers.runtime.clone(), ..self.run.clone() };
            let roof = roofs.first().copied();
            let request = roof.map_or(Request::Attention { r#impl: name, case, pass }, Request::Roof);
            let reply = peers.ask(&request, work.limit, self.until)?;
            if peers.is_gone() {
                self.peers = None;
            }
            match reply {
                Reply::TimeUp => return Ok(items.len()),
                Reply::None => {}
                Reply::Timed(answer) => match roof {
                    None => out.add(rows(&run, name, case, pass, &answer)?, Some(case))?,
                    Some(roof) => out.add(rows(&run, roof.name(), &roof.case(), Pass::Forward, &answer)?, None)?,
                },
            }
            self.took(start);
            // Rooflines come first.
            match roof {
                Some(_) => drop(roofs.remove(0)),
                None => drop(items.remove(0)),
            }
        }
        Ok(0)
    }

    /// Whether PyTorch was looked for and not found.
    pub fn found_no_peers(&self) -> bool {
        self.no_peers
    }
}

/// The table in the terminal, and the result files.
pub(crate) struct Output {
    pub bar: ProgressBar,
    timings: PathBuf,
    calls: PathBuf,
    errors: PathBuf,
}

impl Output {
    /// Opens the output for the results of a name, and counts the problems and passes to come.
    pub fn new(directory: &Path, name: &str, work: &Work) -> Result<Self, Error> {
        let timings = results::path::<Timing>(directory, name);
        let calls = results::path::<Call>(directory, name);
        let errors = results::path::<Accuracy>(directory, name);
        // A file of another kind is refused now, not after an hour.
        results::append::<Timing>(&timings, &[])?;
        results::append::<Call>(&calls, &[])?;
        results::append::<Accuracy>(&errors, &[])?;
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
        let calls_of = |case| work.calls(case).len() + usize::from(work.peers.is_some());
        let length = work.cases.iter().map(calls_of).sum::<usize>() as u64;
        let bar = ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.println(format!(
            "{:<54} {:<9} {:<9} {:>10} {:>17} {:>13} {:>9} {:>9} {:>8} {:>8}",
            "problem", "impl", "pass", "median ms", "p20–p80", "rate", "peak MiB", "first ms", "host µs", "error"
        ));
        Ok(Output { bar, timings, calls, errors })
    }

    /// Prints a row and appends it to the files.
    pub fn add(&mut self, Rows { timing, call, accuracy }: Rows, case: Option<&Case>) -> Result<(), Error> {
        let show = |x: Option<f64>, digits: usize| x.map_or("–".into(), |x| format!("{x:.digits$}"));
        let problem = case.map_or_else(|| timing.kernel.clone(), Case::to_string);
        let spread = format!("{}–{}", show(timing.p20_ms, 3), show(timing.p80_ms, 3));
        let rate = match timing.gigabytes_per_second() {
            Some(rate) => format!("{rate:.0} GB/s"),
            None => timing.tflops.map_or("–".into(), |rate| format!("{rate:.2} TFLOP/s")),
        };
        let line = format!(
            "{problem:<54} {:<9} {:<9} {:>10} {spread:>17} {:>13} {:>9} {:>9} {:>8} {:>8} {}",
            timing.r#impl,
            timing.pass,
            show(timing.median_ms, 3),
            rate,
            show(timing.peak_bytes.map(|bytes| bytes as f64 / (1 << 20) as f64), 1),
            show(call.first_call_ms, 0),
            show(call.host_us, 1),
            call.error.map_or("–".into(), |error| format!("{error:.0e}")),
            call.note,
        );
        // Without a terminal, the progress bar prints nothing.
        if self.bar.is_hidden() {
            println!("{line}")
        } else {
            self.bar.println(line)
        }
        // The timing is written last: if a timing exists, its other rows do, wherever the process ends.
        results::append(&self.errors, accuracy.as_slice())?;
        results::append(&self.calls, &[call])?;
        results::append(&self.timings, &[timing])
    }
}
