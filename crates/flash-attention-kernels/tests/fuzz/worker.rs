//! The worker process, which runs cases. A lost device, a crash or an endless wait therefore fails one case and not the whole run.
//!
//! The worker reads one case per line and answers with one line: the kernel that ran, the reason for skipping, or the failure.
//! `FUZZ_PLANT=dv` multiplies this gradient by 1.05, which must be noticed.

use crate::common::{Case, Results, client, lanes};
use crate::line::Line;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, UIntKind};
use flash_attention_kernels::{AttentionError, BackwardOrder, Dtype, MaskStorage, tiling::Device};
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use wait_timeout::ChildExt;

/// The outcome of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Passed, with this kernel.
    Ran(String),
    /// Not run, because the device or the requested kernel does not support it, for this reason.
    Skipped(String),
    /// Failed, for this reason.
    Failed(String),
}

/// Abilities of a device that limit the drawn cases.
#[derive(Clone, Debug)]
pub struct Abilities {
    pub dtypes: Vec<String>,
    pub bytes: bool,
    /// Alignment of start offsets, in elements.
    pub offset: usize,
}

/// Factor of the rounding errors in the bounds of drawn cases; other cases have 1. With 1, 25 of 27,000 correct drawn cases exceeded their
/// bound by up to 1.5 times, which would fail one run in ten.
pub const SLACK: f64 = 2.0;

/// Prefix of answers, to tell them from other output.
const MARK: &str = "fuzz answers: ";

/// Messages of panics on any thread, in order.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Runs the check. A panic in it is a failure. A panic of another thread is printed at once, because a read may wait for it forever.
pub fn caught(check: impl FnOnce() -> Outcome) -> Outcome {
    let panics = || PANICS.lock().unwrap_or_else(PoisonError::into_inner);
    let checks = std::thread::current().id();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() != checks {
            eprintln!("{info}");
        }
        PANICS.lock().unwrap_or_else(PoisonError::into_inner).push(info.to_string());
    }));
    panics().clear();
    let outcome = catch_unwind(AssertUnwindSafe(check));
    drop(std::panic::take_hook());
    outcome.unwrap_or_else(|_| Outcome::Failed(panics().first().cloned().unwrap_or_default()))
}

/// Main function of the worker: answers cases until the end of its input.
pub fn work() {
    let Some(client) = client() else {
        println!("{MARK}none");
        return;
    };
    let device = Device::of(&client);
    // `supports` asserts that the device has the element types in the table of lanes.
    let all = [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().filter(|dtype| lanes::supports(&client, *dtype));
    let dtypes: Vec<&str> = all.map(Dtype::name).collect();
    println!("{MARK}{} {} {} {}", dtypes.join(","), stores_bytes(&client), offset(&client, &device), device.name);
    for line in std::io::stdin().lines() {
        let line = line.expect("the parent must write lines of text");
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

/// CUDA takes any offset. WebGPU binds buffers at multiples of the adapter's alignment.
fn offset(client: &Client, device: &Device) -> usize {
    if device.name == "cuda" { 1 } else { client.properties().memory.alignment as usize }
}

/// Runs a request: the factor of rounding errors and the case.
fn check(client: &Client, line: &str) -> Result<Outcome, String> {
    let (slack, line) = line.split_once(' ').ok_or("a request must be a number and a case")?;
    let slack = slack.parse().map_err(|error| format!("{slack}: {error}"))?;
    let line: Line = line.parse()?;
    let case = line.case()?;
    let device = Device::of(client);
    let aligned = |offset: &usize| offset.is_multiple_of(self::offset(client, &device));
    if !device.dtypes.contains(&case.problem.dtype) {
        return Ok(Outcome::Skipped("dtype".into()));
    }
    if case.tensors.mask.is_some() && case.mask_storage == MaskStorage::U8 && !stores_bytes(client) {
        return Ok(Outcome::Skipped("the device has no 8-bit storage".into()));
    }
    if !case.offsets.iter().all(aligned) {
        return Ok(Outcome::Skipped("offsets".into()));
    }
    match case.plan(client).map(|_| case.run(client)) {
        Ok(Ok(results)) => Ok(judged(client, &case, results, slack)),
        Ok(Err(error)) | Err(error) => Ok(unavailable(error)),
    }
}

/// The requested kernel or the device may not support a case. Any other error is a failure, because lines are valid problems.
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
    let mut again = case.run(client).expect("the second run must not be refused");
    plant(&mut again);
    // If dq is summed in any order, its last bits may differ between runs. Its error has been judged.
    let any_order = results.backward.fused.is_some() && case.problem.options.backward_order == BackwardOrder::Fast;
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

/// The parent's handle of the worker. The worker is started for the first case, and again after each failure, which may break the device.
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

    /// Starts the worker and asks for the device's abilities; `None` if there is no device.
    ///
    /// # Panics
    ///
    /// If the worker does not answer, for example because a device is required and there is none.
    pub fn abilities(&mut self) -> Option<Abilities> {
        let running = self.start();
        let hello = running
            .answers
            .recv_timeout(Duration::from_secs(600))
            .expect("the worker must answer within 600 s of its start");
        let words: Vec<&str> = hello.split_whitespace().collect();
        let &[dtypes, bytes, offset, ..] = &words[..] else { return None };
        let dtypes = dtypes.split(',').map(String::from).collect();
        let offset = offset.parse().expect("the offset must be a number");
        self.running = Some(running);
        Some(Abilities { dtypes, bytes: bytes == "true", offset })
    }

    /// Runs a case, with rounding errors multiplied by `slack` in its bounds.
    pub fn run(&mut self, line: &Line, slack: f64) -> Outcome {
        if self.running.is_none() {
            assert!(self.abilities().is_some(), "the worker no longer finds a device");
        }
        let mut running = self.running.take().expect("`abilities` started the worker");
        // If the worker has ended, writing fails and there is no answer.
        let _ = writeln!(running.stdin, "{slack} {line}");
        let answer = running.answers.recv_timeout(self.timeout);
        let answered = answer.as_deref().ok().and_then(|answer| answer.split_once(' ').or(Some((answer, ""))));
        let outcome = match answered {
            Some(("ran", kernel)) => Outcome::Ran(kernel.into()),
            Some(("skipped", why)) => Outcome::Skipped(why.into()),
            Some((_, why)) => Outcome::Failed(why.into()),
            None => {
                // A process closes its output before its exit status is available.
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
        // Each line has its own element type.
        command.env_remove("FLASH_TEST_DTYPE").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program must start again");
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
