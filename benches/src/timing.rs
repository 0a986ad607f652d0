//! Device time: warm, in batches, as the median of several samples.

use crate::error::Error;
use cubecl::client::Client;
use std::time::{Duration, Instant};

/// Target length of a sample, long compared with the few microseconds that opening and closing one costs.
const SAMPLE: Duration = Duration::from_millis(20);
/// Warm-up time.
const WARM_UP: Duration = Duration::from_millis(200);
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
    // In the second call, everything is compiled and cached. Calls that take seconds do not need it, because compilation is a small part of
    // them. An idle device lowers its clocks, and takes a while to raise them.
    let start = Instant::now();
    let mut last = once(work)?;
    if last < SLOW.as_secs_f64() * 1e3 {
        last = once(work)?;
    }
    let batch = ((SAMPLE.as_secs_f64() * 1e3 / last) as usize).clamp(1, 200);
    while start.elapsed() < WARM_UP {
        (0..batch).try_for_each(|turn| work.call(turn))?;
        work.finish()?;
    }
    let least = if last < VERY_SLOW.as_secs_f64() * 1e3 { LEAST } else { 1 };
    let mut turns = 0..;
    let mut samples = Vec::new();
    let start = Instant::now();
    while samples.len() < least || samples.len() < SAMPLES && start.elapsed() < BUDGET {
        let turns = turns.by_ref().take(batch);
        samples.push(sample(work, turns)? / batch as f64);
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
    let window = client.profile_start().map_err(|error| failed(&error))?;
    if let Err(error) = turns.try_for_each(|turn| work.call(turn)) {
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
