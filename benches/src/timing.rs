//! Time on the device, honestly: warm, in batches, several samples, the median.

use crate::error::Error;
use cubecl::client::Client;
use std::time::{Duration, Instant};

/// Aim of a sample's length: long beside the few microseconds that opening and closing one costs.
const SAMPLE: Duration = Duration::from_millis(20);
/// Time to warm up.
const WARM_UP: Duration = Duration::from_millis(200);
/// Samples, unless they would take longer than [`BUDGET`].
const SAMPLES: usize = 20;
/// The fewest samples.
const LEAST: usize = 3;
/// A call that takes longer than this, beside which all else is nothing, is sampled once.
const VERY_SLOW: Duration = Duration::from_secs(5);
/// A call that takes longer than this is made no oftener than it must be.
const SLOW: Duration = Duration::from_secs(1);
/// Time that samples of one pass may take together.
const BUDGET: Duration = Duration::from_millis(1500);

/// Samples of one call's time on the device, in milliseconds, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// The value that this fraction of the samples lies below.
    pub fn quantile(&self, fraction: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * fraction).round() as usize]
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

/// Something to be timed.
pub trait Work {
    /// Starts it, on the inputs whose turn it is.
    fn call(&mut self, turn: usize) -> Result<(), Error>;
    /// Waits until everything started is done.
    fn finish(&self) -> Result<(), Error>;
    /// The client on whose stream it runs, if it runs on one: there the device's own clock can be read. Burn's tensors
    /// choose their streams themselves.
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

/// Times calls that take turns over the inputs.
///
/// A sample is a batch of calls, waited for at its end: the device is not idle within it unless the host cannot keep up.
/// It is read from the device's clock, or, where work chooses its streams itself, from the host's, which adds the few
/// microseconds of one wait to each batch.
pub fn device_time(work: &mut (impl Work + ?Sized)) -> Result<Samples, Error> {
    // The second of these has everything compiled and cached, which what takes seconds does not need: that is little of
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

/// Milliseconds that these calls take.
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
    let ticks = ticks.ok_or_else(|| Error::Other("the device lost a time mark".into()))?;
    Ok(ticks.duration().as_secs_f64() * 1e3)
}

/// Median host time of one call once warm, from its entry to its return, in microseconds. The device takes `call_ms` for it.
pub fn host_time(work: &mut (impl Work + ?Sized), call_ms: f64) -> Result<f64, Error> {
    let mut times = Vec::new();
    let begin = Instant::now();
    for n in 0..((BUDGET.as_secs_f64() * 1e3 / call_ms) as usize).clamp(1, 40) {
        // A full queue would make the host wait for the device.
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
