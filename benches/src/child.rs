//! Worker processes: started with a job, and waited for. If a worker ends without an answer, the reason is reported.

use crate::error::Error;
use crate::worker::{Answer, Job};
use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use wait_timeout::ChildExt;

/// Status of a process that ends in time. Otherwise the process is killed.
pub(crate) fn wait(child: &mut Child, until: Option<Instant>) -> io::Result<Option<ExitStatus>> {
    let Some(until) = until else { return child.wait().map(Some) };
    let status = child.wait_timeout(until.saturating_duration_since(Instant::now()))?;
    if status.is_none() {
        child.kill().and_then(|()| child.wait())?;
    }
    Ok(status)
}

/// A worker's answer, or the reason why it has none. `None` if the session's time ended before the worker's.
pub(crate) fn answer(
    job: &Job,
    device: &str,
    limit: Duration,
    until: Option<Instant>,
) -> Result<Option<Answer>, Error> {
    let failed = |what: &str, error: io::Error| Error::Other(format!("a worker process could not be {what}: {error}"));
    let program = std::env::current_exe().map_err(|error| failed("found", error))?;
    let mut child = Command::new(program)
        .arg("worker")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed("started", error))?;
    let text = serde_json::to_string(job)
        .map_err(|error| Error::Other(format!("the job of a worker cannot be written as JSON: {error}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(text.as_bytes()).map_err(|error| failed("given its job", error))?;
    }
    let (output, complaint) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let end = Instant::now() + limit;
    let first = until.map_or(end, |until| until.min(end));
    let ended = wait(&mut child, Some(first)).map_err(|error| failed("waited for", error))?;
    if ended.is_none() && first < end {
        return Ok(None);
    }
    let why = ended.is_none().then(|| format!("over {} s", limit.as_secs()));
    let (output, complaint) = (output.join().unwrap_or_default(), complaint.join().unwrap_or_default());
    // Libraries may print other lines.
    let found = output.lines().filter_map(|line| serde_json::from_str(line).ok()).next_back();
    let mut answer: Answer = found.unwrap_or_else(|| Answer {
        note: why.unwrap_or_else(|| reason(&complaint)),
        device: device.into(),
        ..Default::default()
    });
    if is_out_of_memory(&answer.note) {
        answer.note = OUT_OF_MEMORY.into();
    }
    answer.note = answer.note.lines().next().unwrap_or_default().into();
    Ok(Some(answer))
}

/// Reads everything from a pipe.
fn drain(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // If the pipe breaks, what was read so far is used.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Note of a call that did not fit into the device's memory.
pub const OUT_OF_MEMORY: &str = "out of memory";

fn is_out_of_memory(text: &str) -> bool {
    let text = text.to_lowercase();
    ["out of memory", "outofmemory", "out_of_memory", "buffertoobig", "can't allocate buffer"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// Reason of a worker's failure, in one line.
fn reason(complaint: &str) -> String {
    if is_out_of_memory(complaint) {
        return OUT_OF_MEMORY.into();
    }
    let lines = || complaint.lines().map(str::trim).filter(|line| !line.is_empty());
    // The message is the line after "panicked at".
    let message = lines().skip_while(|line| !line.contains("panicked at")).nth(1).or_else(|| lines().next_back());
    let cause = lines().skip_while(|line| !line.contains("Caused by")).nth(1).map(|cause| format!(", {cause}"));
    format!("failed: {}{}", message.unwrap_or("without a message"), cause.unwrap_or_default())
}
