//! One pass of one implementation over one problem, in a separate process. A process that runs out of memory, hangs or corrupts its device
//! does not affect others, its first call includes compilation, and its memory usage is its own.
//!
//! The job is sent as JSON on standard input; the answer is a line of JSON on standard output.

use crate::case::{Case, Pass};
use crate::data::Data;
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::{Implementation, Prepared, input_sets, prepare};
use crate::judge::{self, Verdict};
use crate::oracle::{Errors, Oracle};
use crate::timing::{Samples, WITH_LAUNCHES, Work, device_time, host_time, once, replayed_time};
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use flash_attention_kernels::{Kernel, Precision};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Job of a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Device.
    pub device: DeviceName,
    /// Problem.
    pub case: Case,
    /// Implementation.
    pub implementation: Implementation,
    /// Kernel; `None` for the planned one.
    pub kernel: Option<Kernel>,
    /// Pass.
    pub pass: Pass,
    /// Whether to measure time, in addition to memory and errors.
    pub timed: bool,
    /// Directory where oracle results are cached for other workers.
    pub oracles: Option<PathBuf>,
}

/// Result of a worker. Fields that were not measured are empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Name of the device.
    pub device: String,
    /// The kernel that ran.
    pub kernel: String,
    /// Median, 20th and 80th percentile of the device time, in milliseconds.
    pub time_ms: Option<[f64; 3]>,
    /// Operations divided by the median, if it is not attention; otherwise they follow from case and pass.
    pub tflops: Option<f64>,
    /// Peak of the bytes in use, over all launches.
    pub peak_bytes: Option<u64>,
    /// Peak of the bytes reserved by the runtime, including free memory.
    pub reserved_bytes: Option<u64>,
    /// Time of the first call, in milliseconds.
    pub first_call_ms: Option<f64>,
    /// Host time of a warm call, in microseconds.
    pub host_us: Option<f64>,
    /// Largest error against the oracle.
    pub error: Option<f64>,
    /// Error of each result.
    pub errors: Errors,
    /// Why there is no time, or why there is one although the error exceeds its bound.
    pub note: String,
}

/// Reads a job, runs it and prints the answer.
pub fn run() -> Result<(), Error> {
    let job: Job = serde_json::from_reader(io::stdin()).map_err(|error| {
        Error::Other(format!(
            "a worker has no valid job on its standard input, because only attention-bench starts workers: {error}"
        ))
    })?;
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
    let line =
        line.map_err(|error| Error::Other(format!("the answer of a worker cannot be written as JSON: {error}")))?;
    println!("{line}");
    Ok(())
}

/// Inputs for this seed, with the options of the implementation.
fn inputs(job: &Job, seed: u64) -> Result<Data, Error> {
    let (order, precision) = (job.implementation.backward_order(), job.implementation.precision());
    Ok(Data::new(job.case, seed)?.with_backward_order(order).with_precision(precision))
}

/// Oracle results for these inputs.
fn oracle(job: &Job, data: &Data, seed: u64) -> Oracle {
    Oracle::cached(data, seed, job.pass != Pass::Forward, job.oracles.as_deref())
}

/// Whether f32 products of this implementation may be rounded to tf32, as Burn's own are on CUDA.
fn may_round(job: &Job, implementation: Implementation) -> bool {
    let ours = implementation.is_ours() && implementation.precision() == Precision::Full;
    job.device == DeviceName::Cuda && !ours
}

/// Verdict on a result of another implementation that is wrong for the first seed, and the reason.
///
/// It tests a second seed, and requires this repository's kernels to be right for both.
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
    // Kernels called directly, which does not involve Burn's autodiff.
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

    // -- the first call with its results and memory, with one set of inputs
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

    // -- time, with all sets of inputs
    let mut prepared = if data.len() == 1 {
        alone
    } else {
        drop(alone);
        start(data)?
    };
    let samples = if job.pass == Pass::Forward && job.case.is_decoding() {
        let (samples, note) = step_time(job, &mut *prepared, data)?;
        let notes = [std::mem::take(&mut answer.note), note.unwrap_or_default()];
        answer.note = notes.into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ");
        samples
    } else {
        device_time(&mut *prepared)?
    };
    answer.host_us = Some(host_time(&mut *prepared, samples.median())?);
    answer.time_ms = Some([samples.median(), samples.quantile(0.2), samples.quantile(0.8)]);
    Ok(answer)
}

/// Time of a decoding step without launches, whose result must be right again; or with launches and the reason, if it cannot be recorded.
fn step_time(job: &Job, work: &mut dyn Prepared, data: &[Data]) -> Result<(Samples, Option<String>), Error> {
    let replayed = replayed_time(work, data.len()).and_then(|samples| {
        let errors = oracle(job, &data[0], 0).errors(&work.results()?);
        let right = errors.are_right(job.case.dtype, may_round(job, job.implementation));
        right
            .then_some(samples)
            .ok_or_else(|| Error::Other(format!("a graph's relative error is {:.1e}", errors.worst())))
    });
    match replayed {
        Ok(samples) => Ok((samples, None)),
        Err(why) => Ok((device_time(work)?, Some(format!("{WITH_LAUNCHES}: {why}")))),
    }
}

/// Peaks of the bytes in use and of the bytes reserved, over all launches of this call.
///
/// Allocations are made for launches, so the peak over all launches is the peak over all allocations.
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
