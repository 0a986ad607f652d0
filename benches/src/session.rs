//! What is timed together: workers and peers, problem by problem, into files as it comes; up to a time, and on from where an
//! earlier session stopped.

use crate::case::{Case, Pass};
use crate::child;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Implementation;
use crate::peers::{Peers, Reply, Request};
use crate::results::{self, Accuracy, Call, Timing};
use crate::run::{Rows, Run, rows};
use crate::worker::Job;
use flash_attention_kernels::{Dtype, Kernel};
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
    /// In place of the planned one.
    pub kernel: Option<Kernel>,
    /// PyTorch's too: these, or all if none is named.
    pub peers: Option<Vec<String>>,
    /// For one pass of one implementation over one problem.
    pub limit: Duration,
}

impl Work {
    /// What is called of this process's implementations for a problem.
    pub fn calls(&self, case: &Case) -> Vec<(Implementation, Pass)> {
        let all = self.implementations.iter().flat_map(|of| self.passes.iter().map(|pass| (*of, *pass)));
        all.filter(|(implementation, pass)| implementation.has(case, *pass)).collect()
    }

    /// What PyTorch's implementations are asked for a problem.
    fn asked(&self, case: &Case) -> Vec<(&'static str, Pass)> {
        let Some(only) = &self.peers else { return Vec::new() };
        let names = Peers::names(case, only).into_iter();
        let all = names.flat_map(|name| self.passes.iter().map(move |pass| (name, *pass)));
        all.filter(|(name, pass)| Peers::has(name, case, *pass)).collect()
    }

    /// What all of its rows are about.
    pub fn keys(&self) -> Vec<String> {
        let of_case = |case: &Case| {
            let ours = self.calls(case).into_iter().map(|(of, pass)| key(of.name(), pass, case));
            let peers = self.asked(case).into_iter().map(|(name, pass)| key(name, pass, case));
            ours.chain(peers).collect::<Vec<_>>()
        };
        self.cases.iter().flat_map(of_case).collect()
    }
}

/// What is there already: what a row is about.
pub(crate) type Done = HashSet<String>;

/// What a row is about: who did which pass of which problem.
pub(crate) fn key(implementation: &str, pass: Pass, case: &Case) -> String {
    let Case { batch, heads_q, heads_kv, seq_q, seq_k, head_dim, causal, .. } = case;
    let sizes = [batch, heads_q, heads_kv, seq_q, seq_k, head_dim].map(|size| size.to_string()).join(" ");
    let (pass, dtype, variant) = (pass.name(), case.dtype.name(), case.variant_name());
    format!("{implementation} {pass} {dtype} {sizes} {causal} {variant}")
}

/// That of a row of results.
macro_rules! key_of {
    ($row:expr) => {{
        let row = $row;
        let sizes = [row.batch, row.heads_q, row.heads_kv, row.seq_q, row.seq_k, row.head_dim];
        let sizes = sizes.map(|size| size.to_string()).join(" ");
        format!("{} {} {} {sizes} {} {}", row.r#impl, row.pass, row.dtype, row.causal, row.variant)
    }};
}
pub(crate) use key_of;

/// A device, the processes that it is shared with, and when all must be done.
pub(crate) struct Session {
    pub run: Run,
    pub device: DeviceName,
    device_name: String,
    oracles: TempDir,
    peers: Option<Peers>,
    /// Whether PyTorch was looked for and not found.
    no_peers: bool,
    until: Option<Instant>,
    /// The slowest of what was done lately, as what comes next may take as long.
    slowest: Duration,
}

/// Time that anything may take before any was measured.
const FIRST: Duration = Duration::from_secs(20);

impl Session {
    /// On a device, until a time.
    pub fn new(device: DeviceName, until: Option<Instant>) -> Result<Self, Error> {
        let device_name = device.open()?.client().properties().identity.name.clone();
        let oracles = tempfile::tempdir().map_err(|source| Error::io(&std::env::temp_dir(), source))?;
        let run = Run::new(device.name());
        let (peers, no_peers, slowest) = (None, false, FIRST);
        Ok(Session { run, device, device_name, oracles, peers, no_peers, until, slowest })
    }

    /// Leaves the device to another program.
    pub fn rest(&mut self) {
        self.peers = None;
    }

    /// When all must be done.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether there is time for one more.
    pub fn has_time(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() + self.slowest < until)
    }

    /// Counts what was started then as one that others may take as long as.
    pub fn took(&mut self, start: Instant) {
        self.slowest = self.slowest.max(start.elapsed());
    }

    /// Forgets how long others took.
    pub fn next_step(&mut self) {
        self.slowest = FIRST;
    }

    /// What a worker answers, unless time is up.
    pub fn answer(&self, job: &Job, limit: Duration) -> Result<Option<crate::worker::Answer>, Error> {
        child::answer(job, &self.device_name, limit, self.until)
    }

    /// A job for a worker on this device.
    pub fn job(&self, case: Case, implementation: Implementation, pass: Pass) -> Job {
        let oracles = Some(self.oracles.path().to_path_buf());
        Job { device: self.device, case, implementation, kernel: None, pass, timed: true, oracles }
    }

    /// Times what is not done yet, and gives how much there was no time for.
    pub fn time(&mut self, work: &Work, out: &mut Output, done: &Done) -> Result<usize, Error> {
        let (mut left, mut roof) = (0, false);
        self.next_step();
        for case in &work.cases {
            for (implementation, pass) in work.calls(case) {
                if !done.contains(&key(implementation.name(), pass, case)) {
                    left += usize::from(!self.time_ours(work, implementation, pass, case, out)?);
                }
                out.bar.inc(1);
            }
            left += self.time_peers(work, case, out, done, &mut roof)?;
            out.bar.inc(u64::from(work.peers.is_some()));
        }
        Ok(left)
    }

    /// Whether there was time for it.
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

    /// PyTorch's rows of a problem that are not done yet; gives how many there was no time for. The first of a session's is
    /// the product of matrices that is their roofline.
    fn time_peers(
        &mut self,
        work: &Work,
        case: &Case,
        out: &mut Output,
        done: &Done,
        roof: &mut bool,
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
            let (what, of) = if *roof { (name, Some(case)) } else { ("matmul", None) };
            let request = if *roof { Request::Attention { r#impl: name, case, pass } } else { Request::Matmul };
            let reply = peers.ask(&request, work.limit, self.until)?;
            if peers.is_gone() {
                self.peers = None;
            }
            match reply {
                Reply::TimeUp => return Ok(items.len()),
                Reply::None => {}
                Reply::Timed(answer) => {
                    let matmul = Case::new(Dtype::BF16, [1, 1, 8192, 8192], false);
                    let pass = if of.is_some() { pass } else { Pass::Forward };
                    out.add(rows(&run, what, of.unwrap_or(&matmul), pass, &answer)?, of)?;
                }
            }
            self.took(start);
            if std::mem::replace(roof, true) {
                items.remove(0);
            }
        }
        Ok(0)
    }

    /// Whether PyTorch was looked for in vain.
    pub fn found_no_peers(&self) -> bool {
        self.no_peers
    }
}

/// The table in the terminal, and the files.
pub(crate) struct Output {
    pub bar: ProgressBar,
    timings: PathBuf,
    calls: PathBuf,
    errors: PathBuf,
}

impl Output {
    /// For the results of a name, of which so many problems and passes are to come.
    pub fn new(directory: &Path, name: &str, work: &Work) -> Result<Self, Error> {
        let timings = results::path::<Timing>(directory, name);
        let calls = results::path::<Call>(directory, name);
        let errors = results::path::<Accuracy>(directory, name);
        // A file that is not ours is refused now, not after an hour.
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

    /// Shows one row and adds it to the files.
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
        // Without a terminal the bar says nothing.
        if self.bar.is_hidden() {
            println!("{line}")
        } else {
            self.bar.println(line)
        }
        // The time comes last: a row that is there is there in all files, wherever the process ends.
        results::append(&self.errors, accuracy.as_slice())?;
        results::append(&self.calls, &[call])?;
        results::append(&self.timings, &[timing])
    }
}
