//! A process that runs cases, so that a device which is lost, a process which ends and a wait which never does fail one case and not all.
//!
//! It reads cases, a line each, and answers each with a line: what it ran, why it skipped it, or what is wrong. `FUZZ_PLANT=dv` has it multiply that
//! gradient by 1.05, which must be noticed.

use crate::common::{Case, Results, client, lanes};
use crate::line::Line;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, UIntKind};
use flash_attention_kernels::{AttentionError, Dtype, MaskStorage, tiling::Device};
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use wait_timeout::ChildExt;

/// What became of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It is right, by this kernel.
    Ran(String),
    /// The device cannot, or the kernel asked for.
    Skipped(String),
    /// What is wrong.
    Failed(String),
}

/// What a device can, as far as drawing depends on it.
#[derive(Clone, Debug)]
pub struct Abilities {
    pub dtypes: Vec<String>,
    pub bytes: bool,
    /// Elements that the beginnings of views are multiples of.
    pub offset: usize,
}

/// The factor on the rounding errors that bounds allow a drawn case; other cases have 1. Of 27,000 drawn cases in which nothing was wrong 25
/// exceeded the bounds at 1 by up to 1.5 times, which would fail one run in ten.
pub const SLACK: f64 = 2.0;

/// Before each answer, among what else is written.
const MARK: &str = "fuzz answers: ";

/// Messages of panics, on whatever thread, the first of them first.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Runs the check, a panic in which is a failure.
pub fn caught(check: impl FnOnce() -> Outcome) -> Outcome {
    let panics = || PANICS.lock().unwrap_or_else(PoisonError::into_inner);
    std::panic::set_hook(Box::new(|info| {
        PANICS.lock().unwrap_or_else(PoisonError::into_inner).push(info.to_string());
    }));
    panics().clear();
    let outcome = catch_unwind(AssertUnwindSafe(check));
    drop(std::panic::take_hook());
    outcome.unwrap_or_else(|_| Outcome::Failed(panics().first().cloned().unwrap_or_default()))
}

/// What the worker does: answers until there is nothing more to read.
pub fn work() {
    let Some(client) = client() else {
        println!("{MARK}none");
        return;
    };
    let device = Device::of(&client);
    // Asserts that the device has what the table of lanes says.
    let all = [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().filter(|dtype| lanes::supports(&client, *dtype));
    let dtypes: Vec<&str> = all.map(Dtype::name).collect();
    println!("{MARK}{} {} {} {}", dtypes.join(","), stores_bytes(&client), offset(&client, &device), device.name);
    for line in std::io::stdin().lines() {
        let line = line.expect("the parent writes lines");
        let outcome = caught(|| check(&client, &line).unwrap_or_else(Outcome::Failed));
        let (is, what) = match outcome {
            Outcome::Ran(kernel) => ("ran", kernel),
            Outcome::Skipped(why) => ("skipped", why),
            Outcome::Failed(why) => ("failed", why),
        };
        println!("{MARK}{is} {}", what.split_whitespace().collect::<Vec<_>>().join(" "));
    }
}

fn stores_bytes(client: &Client) -> bool {
    client.properties().type_usage(ElemType::UInt(UIntKind::U8)).contains(TypeUsage::Buffer)
}

/// CUDA reads at any element. WebGPU binds buffers at multiples of what the adapter says.
fn offset(client: &Client, device: &Device) -> usize {
    if device.name == "cuda" { 1 } else { client.properties().memory.alignment as usize }
}

/// `line`: how many times as much roundings count, and the case.
fn check(client: &Client, line: &str) -> Result<Outcome, String> {
    let (slack, line) = line.split_once(' ').ok_or("a number and a case are expected")?;
    let slack = slack.parse().map_err(|error| format!("{slack}: {error}"))?;
    let line: Line = line.parse()?;
    let case = line.case()?;
    let device = Device::of(client);
    let aligned = |offset: &usize| offset.is_multiple_of(self::offset(client, &device));
    if !device.dtypes.contains(&case.problem.dtype) {
        return Ok(Outcome::Skipped("dtype".into()));
    }
    if case.mask.is_some() && case.mask_storage == MaskStorage::U8 && !stores_bytes(client) {
        return Ok(Outcome::Skipped("8-bit storage".into()));
    }
    if !case.offsets.iter().all(aligned) {
        return Ok(Outcome::Skipped("offsets".into()));
    }
    match case.plan(client).map(|_| case.run(client)) {
        Ok(Ok(results)) => Ok(judged(client, &case, results, slack)),
        Ok(Err(error)) | Err(error) => Ok(unavailable(error)),
    }
}

/// A kernel asked for by name, or the device, may not have this. Any other error is a failure: lines state what is valid.
fn unavailable(error: AttentionError) -> Outcome {
    match error {
        AttentionError::KernelUnavailable { why, .. } => Outcome::Skipped(format!("kernel: {why}")),
        AttentionError::Bindings { .. } => Outcome::Skipped("bindings".into()),
        error => Outcome::Failed(error.to_string()),
    }
}

fn judged(client: &Client, case: &Case, mut results: Results, slack: f64) -> Outcome {
    plant(&mut results);
    case.judge_within(&results, slack);
    let mut again = case.run(client).expect("it ran before");
    plant(&mut again);
    // Where blocks of keys add to dq in whatever order they come, only its last bits may differ, which have been judged.
    let any_order = results.backward.fused.is_some();
    for ((name, first), (_, second)) in all(&results).into_iter().zip(all(&again)) {
        if any_order && name == "dq" {
            continue;
        }
        let differs = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
        if let Some(at) = first.iter().zip(second).position(differs) {
            let (first, second) = (first[at], second[at]);
            return Outcome::Failed(format!("{name}: element {at} is {first}, and {second} in a second run"));
        }
    }
    Outcome::Ran(results.forward.kernel().name().into())
}

/// Multiplies the gradient that `FUZZ_PLANT` names.
pub fn plant(results: &mut Results) {
    let Ok(name) = std::env::var("FUZZ_PLANT") else { return };
    let gradients = [("dq", &mut results.dq), ("dk", &mut results.dk), ("dv", &mut results.dv)];
    for (_, gradient) in gradients.into_iter().filter(|(of, _)| *of == name) {
        gradient.iter_mut().flatten().for_each(|x| *x *= 1.05);
    }
}

fn all(results: &Results) -> Vec<(&'static str, &[f64])> {
    let Results { o, lse, dq, dk, dv, dbias, dalibi_slopes, dsinks, dscore_tensors: [a, b], .. } = results;
    let gradients = [
        ("dq", dq),
        ("dk", dk),
        ("dv", dv),
        ("dbias", dbias),
        ("dalibi_slopes", dalibi_slopes),
        ("dsinks", dsinks),
        ("dscore_tensors[0]", a),
        ("dscore_tensors[1]", b),
    ];
    let gradients = gradients.into_iter().filter_map(|(name, gradient)| Some((name, &gradient.as_ref()?[..])));
    [("o", &o[..]), ("lse", &lse[..])].into_iter().chain(gradients).collect()
}

/// The worker as its parent sees it: started when there is a case, and anew after each failure, which the device may not survive.
pub struct Worker {
    environment: Vec<(&'static str, String)>,
    timeout: Duration,
    running: Option<Running>,
}

struct Running {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    pub fn new(environment: Vec<(&'static str, String)>, timeout: Duration) -> Self {
        Worker { environment, timeout, running: None }
    }

    /// Starts it and asks what the device can; `None` if there is no device.
    ///
    /// # Panics
    ///
    /// If it does not answer, as where a device was required.
    pub fn abilities(&mut self) -> Option<Abilities> {
        let running = self.start();
        let hello = running.answers.recv_timeout(Duration::from_secs(600)).expect("the worker starts");
        let words: Vec<&str> = hello.split_whitespace().collect();
        let &[dtypes, bytes, offset, ..] = &words[..] else { return None };
        let dtypes = dtypes.split(',').map(String::from).collect();
        let offset = offset.parse().expect("a number");
        self.running = Some(running);
        Some(Abilities { dtypes, bytes: bytes == "true", offset })
    }

    /// How a case does where roundings count `slack` times as much as in other tests.
    pub fn run(&mut self, line: &Line, slack: f64) -> Outcome {
        if self.running.is_none() {
            assert!(self.abilities().is_some(), "the device is gone");
        }
        let mut running = self.running.take().expect("it has just been started");
        // Where it has ended, there is no answer.
        let _ = writeln!(running.stdin, "{slack} {line}");
        let answer = running.answers.recv_timeout(self.timeout);
        let answered = answer.as_deref().ok().and_then(|answer| answer.split_once(' ').or(Some((answer, ""))));
        let outcome = match answered {
            Some(("ran", kernel)) => Outcome::Ran(kernel.into()),
            Some(("skipped", why)) => Outcome::Skipped(why.into()),
            Some((_, why)) => Outcome::Failed(why.into()),
            None => {
                // A process that ends closes its output before there is a status.
                let ended = running.child.wait_timeout(Duration::from_secs(1)).ok().flatten();
                let _ = running.child.kill();
                Outcome::Failed(
                    ended.map_or("no answer in time".into(), |status| format!("the process ended: {status}")),
                )
            }
        };
        match outcome {
            Outcome::Failed(_) => running.end(),
            _ => self.running = Some(running),
        }
        outcome
    }

    fn start(&self) -> Running {
        let program = std::env::current_exe().expect("the path of this program");
        let mut command = Command::new(program);
        command.arg("--worker").envs(self.environment.iter().map(|(name, value)| (name, value)));
        // A line says of which element type it is.
        command.env_remove("FLASH_TEST_DTYPE").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program starts");
        let (stdin, stdout) = child.stdin.take().zip(child.stdout.take()).expect("both are pipes");
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix(MARK)
                    && send.send(answer.to_string()).is_err()
                {
                    return;
                }
            }
        });
        Running { child, stdin, answers }
    }
}

impl Running {
    fn end(mut self) {
        drop(self.stdin);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.end();
        }
    }
}
