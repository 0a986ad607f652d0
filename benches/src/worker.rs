//! One pass of one implementation over one problem, in a process of its own: what runs out of memory, hangs or poisons
//! its device takes nothing else along, a first call is a first call, and the memory in use is its own.
//!
//! The job comes as JSON on standard input; the answer is a line of JSON on standard output.

use crate::case::{Case, Pass};
use crate::data::Data;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::{Implementation, input_sets, prepare};
use crate::judge::{self, Verdict};
use crate::oracle::{Errors, Oracle};
use crate::timing::{Work, device_time, host_time, once};
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use flash_attention_kernels::{Kernel, Precision};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a worker is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Where.
    pub device: DeviceName,
    /// On what.
    pub case: Case,
    /// With what.
    pub implementation: Implementation,
    /// With this kernel, or as planned.
    pub kernel: Option<Kernel>,
    /// This.
    pub pass: Pass,
    /// Whether time is wanted, beside memory and errors.
    pub timed: bool,
    /// A folder that keeps what oracles said, for workers that ask the same.
    pub oracles: Option<PathBuf>,
}

/// What a worker found out; what is left out was not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// The device's own name.
    pub device: String,
    /// The kernel that ran.
    pub kernel: String,
    /// Median, first and last fifth of the device's time, in milliseconds.
    pub time_ms: Option<[f64; 3]>,
    /// Operations by the median, of what is no attention; the rest follows from case and pass.
    pub tflops: Option<f64>,
    /// The largest number of bytes in use at any launch.
    pub peak_bytes: Option<u64>,
    /// The largest number that the runtime held for that, what it keeps for later included.
    pub reserved_bytes: Option<u64>,
    /// The first call, in milliseconds.
    pub first_call_ms: Option<f64>,
    /// Host time of a warm call, in microseconds.
    pub host_us: Option<f64>,
    /// The largest error against the oracle.
    pub error: Option<f64>,
    /// Each result's.
    pub errors: Errors,
    /// Why there is no time, or why there is one in spite of an error.
    pub note: String,
}

/// Reads a job, does it, answers.
pub fn run() -> Result<(), Error> {
    let job: Job = serde_json::from_reader(io::stdin()).map_err(|error| Error::Other(format!("the job: {error}")))?;
    let device = job.device.open()?;
    let client = device.client();
    let name = client.properties().identity.name.clone();
    let sets = if job.timed { input_sets(&job.case) } else { 1 };
    let data = (0..sets as u64).map(|seed| inputs(&job, seed)).collect::<Result<Vec<_>, Error>>()?;
    let answer = match one(&device, &job, &data) {
        Ok(answer) => answer,
        Err(error) => Answer { note: error.to_string(), ..Default::default() },
    };
    let line = serde_json::to_string(&Answer { device: name, ..answer });
    let line = line.map_err(|error| Error::Other(format!("the answer: {error}")))?;
    println!("{line}");
    Ok(())
}

/// Inputs of a seed, for what is to be asked of the implementation.
fn inputs(job: &Job, seed: u64) -> Result<Data, Error> {
    let (order, precision) = (job.implementation.backward_order(), job.implementation.precision());
    Ok(Data::new(job.case, seed)?.with_backward_order(order).with_precision(precision))
}

/// What the oracle says of these inputs' results.
fn oracle(job: &Job, data: &Data, seed: u64) -> Oracle {
    Oracle::cached(data, seed, job.pass != Pass::Forward, job.oracles.as_deref())
}

/// Whether its products of f32 may be rounded to tf32, as Burn's own are on CUDA.
fn may_round(job: &Job, implementation: Implementation) -> bool {
    let ours = implementation.is_ours() && implementation.precision() == Precision::Full;
    job.device == DeviceName::Cuda && !ours
}

/// What is to be said of a result of somebody else's that is not right for the first seed: the verdict, and the reason.
///
/// It takes a second seed, and this repository's kernels to be right for both.
fn verdict(device: &cubecl::Device, job: &Job, data: &Data, first: f64) -> Result<(Verdict, String), Error> {
    let second = inputs(job, 1)?;
    let oracles = [oracle(job, data, 0), oracle(job, &second, 1)];
    let errors_of = |implementation, pass, nth: usize| -> Result<Errors, Error> {
        let data = if nth == 0 { data } else { &second };
        let mut prepared = prepare(device, implementation, None, pass, std::slice::from_ref(data))?;
        once(&mut *prepared)?;
        Ok(oracles[nth].errors(&prepared.results()?))
    };
    let bound = judge::bound(job.case.dtype, may_round(job, job.implementation));
    let errors = [first, errors_of(job.implementation, job.pass, 1)?.worst()];
    // Kernels called directly, which is another way than through Burn's autodiff.
    let pass = if job.pass == Pass::Autodiff { Pass::Both } else { job.pass };
    let right = |nth| {
        let errors = errors_of(Implementation::Ours, pass, nth);
        errors.is_ok_and(|errors| errors.are_right(job.case.dtype, may_round(job, Implementation::Ours)))
    };
    let confirmed = right(0) && right(1);
    let said = format!("relative errors {:.1e} and {:.1e} with two seeds", errors[0], errors[1]);
    Ok(match judge::verdict(&errors, confirmed, bound) {
        Verdict::Wrong => (Verdict::Wrong, format!("wrong result: {said}, where ours is right")),
        other => (other, format!("not confirmed to be wrong: {said}")),
    })
}

fn one(device: &cubecl::Device, job: &Job, data: &[Data]) -> Result<Answer, Error> {
    let client = device.client();
    let start = |data| prepare(device, job.implementation, job.kernel, job.pass, data);
    let mut answer = Answer::default();

    // -- the first call, what it computed, and what memory it takes: with one set of inputs
    let mut alone = start(&data[..1])?;
    answer.kernel = alone.kernel();
    answer.first_call_ms = Some(once(&mut *alone)?);
    answer.errors = oracle(job, &data[0], 0).errors(&alone.results()?);
    let error = answer.errors.worst();
    answer.error = Some(error);
    if !answer.errors.are_right(job.case.dtype, may_round(job, job.implementation)) {
        if job.implementation.is_ours() {
            answer.note = format!("wrong result: relative error {error:.1e}");
            return Ok(answer);
        }
        drop(alone);
        let (verdict, note) = verdict(device, job, &data[0], error)?;
        answer.note = note;
        if verdict == Verdict::Wrong {
            return Ok(answer);
        }
        alone = start(&data[..1])?;
        once(&mut *alone)?;
    }
    let [in_use, reserved] = peak(&client, &mut *alone)?;
    (answer.peak_bytes, answer.reserved_bytes) = (Some(in_use), Some(reserved));
    if !job.timed {
        return Ok(answer);
    }

    // -- time: with all of them
    let mut prepared = if data.len() == 1 {
        alone
    } else {
        drop(alone);
        start(data)?
    };
    let samples = device_time(&mut *prepared)?;
    answer.host_us = Some(host_time(&mut *prepared, samples.median())?);
    answer.time_ms = Some([samples.median(), samples.quantile(0.2), samples.quantile(0.8)]);
    Ok(answer)
}

/// The largest numbers of bytes in use and of bytes reserved at any launch of this call.
///
/// Whatever is allocated is there for a launch: the most in use at a launch is the most in use after any allocation.
fn peak(client: &Client, work: &mut (impl Work + ?Sized)) -> Result<[u64; 2], Error> {
    struct Watch(Client, AtomicU64, AtomicU64);
    impl LaunchObserver for Watch {
        fn launched(&self, _kernel: &'static str) {
            let usage = self.0.memory_report(MemoryScope::Device).usage();
            self.1.fetch_max(usage.bytes_in_use, Ordering::Relaxed);
            self.2.fetch_max(usage.bytes_reserved, Ordering::Relaxed);
        }
    }
    work.finish()?;
    let watch = Arc::new(Watch(client.clone(), AtomicU64::new(0), AtomicU64::new(0)));
    let observation = LaunchObservation::new(watch.clone());
    work.call(0)?;
    work.finish()?;
    drop(observation);
    Ok([&watch.1, &watch.2].map(|most| most.load(Ordering::Relaxed)))
}
