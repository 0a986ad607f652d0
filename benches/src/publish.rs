//! Measures everything that documents show, from one clean commit. May be interrupted and called again: existing measurements are not
//! repeated.

use crate::child;
use crate::device::DeviceName;
use crate::error::Error;
use crate::memory;
use crate::published::{Program, SCRIPTS, Step, TRIAL, What, steps};
use crate::results::{self, Memory, Record, Timing};
use crate::run::commit;
use crate::session::{Done, Output, Session, key_of};
use clap::builder::PossibleValuesParser;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Directory of the results of programs.
pub(crate) const PROGRAMS: &str = "gpt";

/// What to measure, where to write it, and for how long.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Directory of the results, which also keeps progress between calls.
    #[arg(long)]
    directory: PathBuf,
    /// Minutes after which nothing more is started, and running measurements are stopped.
    #[arg(long)]
    minutes: Option<f64>,
    /// Results to measure; by default all for which this binary has the device.
    #[arg(long, value_delimiter = ',', value_parser = names())]
    only: Vec<String>,
    /// Measures nothing; lists what there is to measure and how much of it is done.
    #[arg(long)]
    list: bool,
    /// Measures although this binary was built from a tree that differs from its commit. Documents refuse such rows.
    #[arg(long)]
    unclean: bool,
    /// Path of the program gpt; by default in the directory of this program, if it is there.
    #[arg(long)]
    gpt: Option<PathBuf>,
    /// Text that gpt trains on; by default tinyshakespeare.txt in the directory of this program.
    #[arg(long)]
    text: Option<PathBuf>,
}

/// Names of all steps, without duplicates.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(steps().iter().map(|step| step.name).collect::<BTreeSet<_>>())
}

/// Measures what is not done yet, and returns whether all is done.
pub fn run(options: &Options) -> Result<bool, Error> {
    let commit = commit();
    let wanted = choose(&options.only);
    if (commit.ends_with('+') || commit == "unknown") && !options.unclean && !options.list {
        return Err(Error::Unclean { commit: commit.into() });
    }
    let until = options.minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(60.0 * minutes.max(0.0)));
    let mut lefts = Vec::new();
    // Devices share a GPU, so their sessions run one after the other.
    let mut session: Option<Session> = None;
    for step in &wanted {
        let left = if options.list {
            remaining(options, step, commit)?
        } else {
            if session.as_ref().is_none_or(|session| session.device != step.device) {
                drop(session.take());
                session = Some(Session::new(step.device, until)?);
            }
            let Some(session) = &mut session else { continue };
            let left = measure(options, step, commit, session)?;
            if session.found_no_peers() {
                return Err(Error::Other("python3 has no PyTorch, which must be timed beside ours; install it".into()));
            }
            left
        };
        lefts.push(left);
    }
    println!("\n{:<28} {:<7} {commit}", "results", "device");
    for (step, left) in wanted.iter().zip(&lefts) {
        let text = match left {
            0 => "done".into(),
            left => format!("{left} left"),
        };
        println!("{:<28} {:<7} {text}", format!("{}{}", step.name, kind(step)), step.device.name());
        if let (What::Program(program), true) = (&step.what, *left > 0) {
            println!("{:<28} {}", "", program.command);
        }
    }
    Ok(lefts.iter().all(|left| *left == 0))
}

fn kind(step: &Step) -> &'static str {
    if matches!(step.what, What::Memory(_)) { Memory::SUFFIX } else { "" }
}

/// The steps of these names, or all for which this binary has the device.
fn choose(only: &[String]) -> Vec<Step> {
    let built_for = |device| match device {
        DeviceName::Cuda => cfg!(feature = "cuda"),
        DeviceName::Vulkan => cfg!(feature = "vulkan"),
        // A binary with the feature `vulkan` uses SPIR-V instead.
        DeviceName::Wgpu => !cfg!(feature = "vulkan"),
    };
    let mut steps = steps();
    let shown = |step: &Step| built_for(step.device) && step.name != TRIAL;
    steps.retain(|step| if only.is_empty() { shown(step) } else { only.iter().any(|only| only == step.name) });
    steps
}

/// Keys of the rows that this commit has measured already.
fn done<R: Record>(file: &Path, about: impl Fn(&R) -> Option<String>) -> Result<Done, Error> {
    if !file.exists() {
        return Ok(Done::new());
    }
    Ok(results::read::<R>(file)?.iter().filter_map(about).collect())
}

fn done_times(options: &Options, name: &str, commit: &str) -> Result<Done, Error> {
    let of = |row: &Timing| (row.commit == commit).then(|| key_of!(row));
    done(&results::path::<Timing>(&options.directory, name), of)
}

fn done_memory(options: &Options, name: &str, commit: &str) -> Result<Done, Error> {
    let of = |row: &Memory| (row.commit == commit).then(|| key_of!(row));
    done(&results::path::<Memory>(&options.directory, name), of)
}

/// Number of rows of a step that are not done.
fn remaining(options: &Options, step: &Step, commit: &str) -> Result<usize, Error> {
    let left = |wanted: Vec<String>, done: Done| wanted.iter().filter(|key| !done.contains(*key)).count();
    Ok(match &step.what {
        What::Time(work) => left(work.keys(), done_times(options, step.name, commit)?),
        What::Memory(work) => left(work.keys(), done_memory(options, step.name, commit)?),
        What::Program(_) => usize::from(!is_done(options, step, commit)),
    })
}

/// Measures what is not done of a step, and returns the number of rows for which no time was left.
fn measure(options: &Options, step: &Step, commit: &str, session: &mut Session) -> Result<usize, Error> {
    match &step.what {
        What::Time(work) => {
            let file = results::path::<Timing>(&options.directory, step.name);
            results::repair_all(&options.directory, step.name)?;
            let done = done_times(options, step.name, commit)?;
            if work.keys().iter().all(|key| done.contains(key)) {
                return Ok(0);
            }
            println!("\n{}", file.display());
            let mut out = Output::new(&options.directory, step.name, work)?;
            let left = session.time(work, &mut out, &done)?;
            out.bar.finish_and_clear();
            Ok(left)
        }
        What::Memory(work) => {
            let file = results::path::<Memory>(&options.directory, step.name);
            results::repair_all(&options.directory, step.name)?;
            let done = done_memory(options, step.name, commit)?;
            if work.keys().iter().all(|key| done.contains(key)) {
                return Ok(0);
            }
            println!("\n{}", file.display());
            memory::measure(session, work, &file, &done)
        }
        What::Program(_) if is_done(options, step, commit) => Ok(0),
        What::Program(program) => {
            session.rest();
            Ok(usize::from(!run_program(options, step, program, commit, session)?))
        }
    }
}

/// File that records the commit of a program's results.
fn stamp(options: &Options, step: &Step) -> PathBuf {
    options.directory.join(PROGRAMS).join(format!("{}.commit", step.name))
}

fn is_done(options: &Options, step: &Step, commit: &str) -> bool {
    fs::read_to_string(stamp(options, step)).is_ok_and(|of| of.trim() == commit)
}

/// A file in the directory of this program, if it exists.
fn beside(name: &str) -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.join(name)).filter(|path| path.exists())
}

/// Runs a program to its end and keeps its results. Returns false if the program gpt, its text or a GPU is missing, or time is up.
fn run_program(
    options: &Options,
    step: &Step,
    program: &Program,
    commit: &str,
    session: &Session,
) -> Result<bool, Error> {
    let found = [options.gpt.clone().or(beside("gpt")), options.text.clone().or(beside("tinyshakespeare.txt"))];
    let [Some(gpt), Some(text)] = found else {
        println!(
            "\n{}: skipped: gpt or its text is not in the directory of this program; name them with --gpt and --text",
            step.name
        );
        return Ok(false);
    };
    if let Err(why) = cubecl::Device::cuda(program.gpus.saturating_sub(1)) {
        println!("\n{}: skipped: it needs {} GPUs: {why}", step.name, program.gpus);
        return Ok(false);
    }
    let left = session.until().map(|until| until.saturating_duration_since(Instant::now()));
    if left.is_some_and(|left| left < Duration::from_secs(program.seconds)) {
        return Ok(false);
    }
    let absolute = |path: &Path| fs::canonicalize(path).map_err(|source| Error::io(path, source));
    let (gpt, text) = (absolute(&gpt)?, absolute(&text)?);
    let results = options.directory.join(PROGRAMS);
    // One directory for each commit, so that an older commit's run is not resumed.
    let folder = results.join(commit);
    fs::create_dir_all(&folder).map_err(|source| Error::io(&folder, source))?;
    let folder = absolute(&folder)?;
    let write = |name: &str, content: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, content).map_err(|source| Error::io(&path, source)).map(|()| path)
    };
    for (name, script) in SCRIPTS {
        write(name, script.as_bytes())?;
    }
    let texts = write("three.txt", &fs::read(&text).map_err(|source| Error::io(&text, source))?.repeat(3))?;
    let line = match program.resume {
        Some((again, sign)) if folder.join(sign).exists() => again,
        _ => program.command,
    };
    println!("\n{line}");
    let mut words = line.split_whitespace().map(|word| match word {
        "GPT" => gpt.as_os_str(),
        "TEXT" => text.as_os_str(),
        "TEXTS" => texts.as_os_str(),
        other => OsStr::new(other),
    });
    let executable = words.next().unwrap_or_default();
    let failed = |source: std::io::Error| Error::io(Path::new(executable), source);
    let mut command = Command::new(executable);
    let mut child = command.args(words).current_dir(&folder).stdin(Stdio::null()).spawn().map_err(failed)?;
    let Some(status) = child::wait(&mut child, session.until()).map_err(failed)? else { return Ok(false) };
    if !status.success() {
        return Err(Error::Other(format!("the command ended with {status}: {line}")));
    }
    for (from, to, _) in program.writes {
        let (from, to) = (folder.join(from), results.join(to));
        fs::copy(&from, &to).map_err(|source| Error::io(&from, source))?;
    }
    let stamp = stamp(options, step);
    fs::write(&stamp, commit).map_err(|source| Error::io(&stamp, source))?;
    Ok(true)
}
