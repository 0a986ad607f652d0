//! One measurement in a separate process. A process that runs out of memory or hangs does not affect others, its first step includes
//! compilation, and its memory usage is its own.
//!
//! The job is sent as JSON on standard input; the answer is a line of JSON on standard output.

use crate::config::Config;
use crate::data::Text;
use crate::device::{self, AtRest};
use crate::error::Error;
use crate::model::Gpt;
use crate::optimizer::AdamW;
use crate::replica::Replica;
use burn::tensor::{Device, Tensor};
use example_support::memory::{Peak, peak};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Hidden command of the program that runs a job.
const WORKER: &str = "compare-worker";

/// A measurement to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The run, with the path of a text. All of its steps are run, and one more to measure memory.
    pub config: Config,
    /// Number of steps for warm-up, which compile and tune.
    pub warmup: usize,
}

/// Results of a measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Loss of each step's batch before its update, in nats per token.
    pub losses: Vec<f32>,
    /// Time of the first step, including compilation and tuning, in seconds.
    pub first_step: f64,
    /// Median time of a step after the warm-up, in seconds.
    pub step: f64,
    /// Peak memory, if it can be measured.
    pub peak: Option<Peak>,
}

/// Reads a job, runs it and prints the answer.
///
/// # Errors
///
/// If the job is invalid, the run cannot start, or a loss is not finite.
pub fn work() -> Result<(), Error> {
    let wrong = |problem| Error::Job { problem };
    let job: Job = serde_json::from_reader(io::stdin()).map_err(|error| wrong(error.to_string()))?;
    let config = &job.config;
    let device = device::choose(&config.device)?.device.autodiff();
    let _at_rest = AtRest(vec![device.clone()]);
    let path = config.data.as_ref().ok_or_else(|| wrong("its configuration names no text".to_string()))?;
    let text = Text::read(path, config.tokenizer, config.context)?;
    let answer = train(&job, &text, &device)?;
    let line = serde_json::to_string(&answer).expect("an answer is plain values");
    println!("{line}");
    Ok(())
}

fn train(job: &Job, text: &Text, device: &Device) -> Result<Answer, Error> {
    let config = &job.config;
    let model = Gpt::new(config, device);
    let mut replica = Replica::new(model, AdamW::new(config), config, text, device);
    // The loss is read after the time has been taken.
    let read = |step: usize, loss: Tensor<1>| match loss.try_into_scalar::<f32>() {
        Ok(loss) if loss.is_finite() => Ok(loss),
        Ok(loss) => Err(Error::Diverged { step, loss }),
        Err(error) => Err(Error::device(&error)),
    };

    let (mut losses, mut times) = (Vec::new(), Vec::new());
    wait(device)?;
    for step in 0..config.steps {
        let begun = Instant::now();
        let loss = replica.step(step)?;
        wait(device)?;
        times.push(begun.elapsed().as_secs_f64());
        losses.push(read(step, loss)?);
    }

    // Memory is measured in an extra step, because measuring it takes time.
    let mut last = Ok(None);
    let peak = peak(device, || {
        let loss = replica.step(config.steps);
        last = loss.and_then(|loss| wait(device).map(|()| Some(loss)));
    });
    if let Some(loss) = last? {
        losses.push(read(config.steps, loss)?);
    }
    Ok(Answer { losses, first_step: times[0], step: median(&mut times[job.warmup..]), peak })
}

/// Waits until the device has finished all work.
fn wait(device: &Device) -> Result<(), Error> {
    device.sync().map_err(|error| Error::device(&error))
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    match times.len() % 2 {
        0 => (times[middle - 1] + times[middle]) / 2.0,
        _ => times[middle],
    }
}

/// Runs a job in another process. If there is no answer, returns a short reason, and writes all output of the process to `log`.
pub fn measure(job: &Job, limit: Duration, log: &Path) -> Result<Answer, String> {
    let mut child = start(job).map_err(|error| format!("its process cannot be started: {error}"))?;
    let (output, complaint) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let (output, is_late) = match output.recv_timeout(limit) {
        Ok(output) => (output, false),
        Err(_) => {
            // The process may have ended in the meantime, which is fine.
            let _ = child.kill();
            (output.recv().unwrap_or_default(), true)
        }
    };
    let complaint = complaint.recv().unwrap_or_default();
    let status = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());

    // Libraries may print other lines.
    let answer = output.lines().filter_map(|line| serde_json::from_str(line).ok()).next_back();
    if answer.is_none() && !complaint.is_empty() {
        // The reason is in the table as well.
        let _ = fs::write(log, &complaint);
    }
    answer.ok_or_else(|| if is_late { format!("over {} s", limit.as_secs()) } else { reason(&complaint, &status) })
}

fn start(job: &Job) -> io::Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(WORKER)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A process that ends before it has read its job reports the reason itself.
        let _ = stdin.write_all(&serde_json::to_vec(job)?);
    }
    Ok(child)
}

/// Reads everything from a pipe until it is closed.
fn drain(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // If the pipe breaks, what was read so far is used.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// Reason of a process's failure, in one line.
fn reason(complaint: &str, status: &str) -> String {
    let lower = complaint.to_lowercase();
    // Messages of CUDA, CubeCL, wgpu and Rust.
    let signs = [
        "out of memory",
        "out of device memory",
        "outofmemory",
        "out_of_memory",
        "buffertoobig",
        "memory allocation of",
    ];
    if signs.iter().any(|sign| lower.contains(sign)) {
        return "out of memory".to_string();
    }
    let lines = || complaint.lines().map(str::trim).filter(|line| !line.is_empty());
    // The message is the line after "panicked at".
    let message = lines().skip_while(|line| !line.contains("panicked at")).nth(1).or_else(|| lines().next_back());
    let cause =
        lines().skip_while(|line| !line.contains("Caused by")).nth(1).map_or(String::new(), |it| format!(": {it}"));
    message.map_or_else(|| status.to_string(), |line| format!("{}{cause}", line.trim_start_matches("error: ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_died_of_is_one_line() {
        let panic =
            "some driver's line\nthread 'main' panicked at src/a.rs:1:2:\nthe buffer is gone\nnote: backtrace\n";
        assert_eq!(reason(panic, "exit status: 101"), "the buffer is gone");
        assert_eq!(reason("error: the loss is NaN\n", "exit status: 2"), "the loss is NaN");
        assert_eq!(reason("x\nCUDA_ERROR_OUT_OF_MEMORY, and then some\ny", "exit status: 101"), "out of memory");
        assert_eq!(reason("memory allocation of 99 bytes failed", "signal: 6 (SIGABRT)"), "out of memory");
        let deep = "panicked at a.rs:1:2:\nit failed\nCaused by:\n  an IO error\nCaused by:\n  out of device memory allocating 6443499520 bytes\n";
        assert_eq!(reason(deep, "exit status: 101"), "out of memory");
        let caused = "thread 'main' panicked at src/a.rs:1:2:\nit went wrong\nCaused by:\n  a fault\n";
        assert_eq!(reason(caused, "exit status: 101"), "it went wrong: a fault");
        assert_eq!(reason("\n", "signal: 9 (SIGKILL)"), "signal: 9 (SIGKILL)");
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
