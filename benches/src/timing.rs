//! Device time: warm, in batches, as the median of several samples; of decoding steps, without launches.

use crate::error::Error;
use cubecl::client::{Client, Graph};
use cubecl::server::ServerError;
use std::time::{Duration, Instant};

/// Target length of a sample, long compared with the few microseconds that opening and closing one costs.
const SAMPLE: Duration = Duration::from_millis(20);
/// Warm-up time.
const WARM_UP: Duration = Duration::from_millis(200);
/// Largest number of calls in a batch, unless there are more inputs; and of repetitions of a graph in a sample.
const MOST_CALLS: usize = 200;
/// Number of samples, unless they would take longer than [`BUDGET`].
const SAMPLES: usize = 20;
/// Minimum number of samples.
const LEAST: usize = 3;
/// A call that takes longer than this is sampled once, since the overhead is negligible.
const VERY_SLOW: Duration = Duration::from_secs(5);
/// A call that takes longer than this is made as rarely as possible.
const SLOW: Duration = Duration::from_secs(1);
/// Total time for the samples of one pass.
const BUDGET: Duration = Duration::from_millis(1500);

/// Samples of the device time of one call, in milliseconds, sorted.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Quantile of the samples.
    pub fn quantile(&self, fraction: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * fraction).round() as usize]
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

/// Work to time.
pub trait Work {
    /// Starts the work, on the inputs with this number.
    fn call(&mut self, turn: usize) -> Result<(), Error>;
    /// Waits until all started work is done.
    fn finish(&self) -> Result<(), Error>;
    /// The client on whose stream the work runs, if it runs on one; the device's clock can then be read. Burn's tensors choose their
    /// streams themselves.
    fn stream(&self) -> Option<&Client>;
    /// Overwrites the results for the first inputs, where there is memory for them, so that only another call computes them.
    fn forget(&mut self) {}
}

/// Waits for the device.
pub fn sync(client: &Client) -> Result<(), Error> {
    cubecl::future::block_on(client.sync()).map_err(|error| failed(&error))
}

fn failed(error: &impl std::fmt::Debug) -> Error {
    Error::Other(format!("the device failed: {error:?}"))
}

/// Milliseconds of host time of one call, until the device has finished.
pub fn once(work: &mut (impl Work + ?Sized)) -> Result<f64, Error> {
    work.finish()?;
    let start = Instant::now();
    work.call(0)?;
    work.finish()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Times calls that alternate between the inputs.
///
/// A sample is a batch of calls with a wait at its end: the device is not idle during the batch unless the host cannot keep up. The time is
/// read from the device's clock, or from the host's if the work chooses its streams itself. The latter adds the few microseconds of one
/// wait to each batch.
pub fn device_time(work: &mut (impl Work + ?Sized)) -> Result<Samples, Error> {
    let (last, batch) = warm_up(work)?;
    let mut turns = 0..;
    samples(last, || Ok(sample(work, turns.by_ref().take(batch))? / batch as f64))
}

/// Word with which the note of a decoding step begins that [`replayed_time`] could not measure.
pub const WITH_LAUNCHES: &str = "with launches";

/// Like [`device_time`], of calls that a graph repeats: the host launches the graph, and none of the calls in it. (On CUDA it is a CUDA
/// graph; on wgpu, recorded dispatches.) The calls of a graph alternate between all `sets` of inputs equally often.
///
/// # Errors
///
/// If the work chooses its streams itself, or the device cannot record it. [`device_time`] can still be called then.
pub fn replayed_time(work: &mut (impl Work + ?Sized), sets: usize) -> Result<Samples, Error> {
    let client = work.stream().cloned();
    let client = client.ok_or_else(|| Error::Other("Burn's tensors choose their streams themselves".into()))?;
    let (_, batch) = warm_up(work)?;
    let calls = batch.next_multiple_of(sets.max(1));
    let graph = record(work, &client, calls)?;
    // SAFETY: `work` holds the tensors of all recorded calls and outlives the graph, this client's stream alone uses them, and results are
    // read on the same stream.
    let replay = || unsafe { graph.replay() }.map_err(|error| failed(&error));
    // Results that the caller reads afterwards are the graph's.
    work.forget();
    replay()?;
    let once = elapsed(&client, replay)?;
    let replays = ((SAMPLE.as_secs_f64() * 1e3 / once) as usize).clamp(1, MOST_CALLS);
    let all = (replays * calls) as f64;
    samples(once, || Ok(elapsed(&client, || (0..replays).try_for_each(|_| replay()))? / all))
}

/// A graph of the first `calls` calls.
fn record(work: &mut (impl Work + ?Sized), client: &Client, calls: usize) -> Result<Graph, Error> {
    // The message without a backtrace, in one line.
    let refused = |error: ServerError| {
        let text = error.to_string();
        let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Backtrace"));
        Error::Other(format!("no graph: {}", lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")))
    };
    // The same calls leave the memory that they need in the pools: nothing is allocated while they are recorded.
    client.graph_prepare().map_err(refused)?;
    (0..calls).try_for_each(|turn| work.call(turn))?;
    work.finish()?;
    client.start_capture().map_err(refused)?;
    let called = (0..calls).try_for_each(|turn| work.call(turn));
    // A stream that records must stop, whatever it has recorded.
    let graph = client.stop_capture().map_err(refused);
    called.and(graph)
}

/// Calls until everything is compiled and cached, and the clocks are high. Returns the milliseconds of a call, and the number of calls of a
/// batch.
fn warm_up(work: &mut (impl Work + ?Sized)) -> Result<(f64, usize), Error> {
    // In the second call, everything is compiled and cached. Calls that take seconds do not need it, because compilation is a small part of
    // them. An idle device lowers its clocks, and takes a while to raise them.
    let start = Instant::now();
    let mut last = once(work)?;
    if last < SLOW.as_secs_f64() * 1e3 {
        last = once(work)?;
    }
    let batch = ((SAMPLE.as_secs_f64() * 1e3 / last) as usize).clamp(1, MOST_CALLS);
    while start.elapsed() < WARM_UP {
        (0..batch).try_for_each(|turn| work.call(turn))?;
        work.finish()?;
    }
    Ok((last, batch))
}

/// Samples of a measurement, which takes about `last` milliseconds or is a batch of calls that do.
fn samples(last: f64, mut sample: impl FnMut() -> Result<f64, Error>) -> Result<Samples, Error> {
    let least = if last < VERY_SLOW.as_secs_f64() * 1e3 { LEAST } else { 1 };
    let mut samples = Vec::new();
    let start = Instant::now();
    while samples.len() < least || samples.len() < SAMPLES && start.elapsed() < BUDGET {
        samples.push(sample()?);
    }
    samples.sort_by(f64::total_cmp);
    Ok(Samples(samples))
}

/// Milliseconds that these calls take together.
fn sample(work: &mut (impl Work + ?Sized), mut turns: impl Iterator<Item = usize>) -> Result<f64, Error> {
    let Some(client) = work.stream().cloned() else {
        let start = Instant::now();
        turns.try_for_each(|turn| work.call(turn))?;
        work.finish()?;
        return Ok(start.elapsed().as_secs_f64() * 1e3);
    };
    elapsed(&client, || turns.try_for_each(|turn| work.call(turn)))
}

/// Milliseconds of the device's clock for what `start` starts on this client's stream.
fn elapsed(client: &Client, start: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let window = client.profile_start().map_err(|error| failed(&error))?;
    if let Err(error) = start() {
        client.profile_abandon(window);
        return Err(error);
    }
    let profile = client.profile_end(window).map_err(|error| failed(&error))?;
    let ticks = cubecl::future::block_on(profile.resolve());
    let ticks = ticks.ok_or_else(|| Error::Other("the device returned no duration of a batch of calls".into()))?;
    Ok(ticks.duration().as_secs_f64() * 1e3)
}

/// Median host time of a warm call, from its start to its return, in microseconds. `call_ms` is its device time.
pub fn host_time(work: &mut (impl Work + ?Sized), call_ms: f64) -> Result<f64, Error> {
    let mut times = Vec::new();
    let begin = Instant::now();
    for n in 0..((BUDGET.as_secs_f64() * 1e3 / call_ms) as usize).clamp(1, 40) {
        // With a full queue, the host would wait for the device.
        if n % 4 == 0 {
            work.finish()?;
        }
        let start = Instant::now();
        work.call(0)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
        if begin.elapsed() > BUDGET {
            break;
        }
    }
    work.finish()?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
