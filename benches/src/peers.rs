//! PyTorch's implementations of attention, timed by `peers.py` in a separate process, one request at a time.

use crate::case::{Case, Pass, Variant};
use crate::error::Error;
use crate::results::{COPY, MATMUL};
use crate::worker::Answer;
use flash_attention_kernels::Dtype;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The scripts, embedded for machines without the repository.
const SCRIPTS: [(&str, &str); 2] =
    [("peers.py", include_str!("../peers.py")), ("judge.py", include_str!("../judge.py"))];

/// Names of PyTorch's implementations.
pub const NAMES: [&str; 5] = ["cudnn", "flash2", "flash2-deterministic", "memeff", "flex"];

/// A measurement of the device itself, with which rates of attention are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Roof {
    /// A product of two bf16 matrices of 8192 × 8192.
    Matmul,
    /// A copy of 2 GiB within the device's memory.
    Copy,
}

impl Roof {
    /// Roofs for these problems: a copy for decoding steps, a product of matrices for all others.
    pub fn of(cases: &[Case]) -> Vec<Roof> {
        let roof = |case: &Case| if case.is_decoding() { Roof::Copy } else { Roof::Matmul };
        let roofs: Vec<Roof> = cases.iter().map(roof).collect();
        [Roof::Matmul, Roof::Copy].into_iter().filter(|roof| roofs.contains(roof)).collect()
    }

    /// Name in results.
    pub fn name(self) -> &'static str {
        match self {
            Roof::Matmul => MATMUL,
            Roof::Copy => COPY,
        }
    }

    /// Sizes in results: the matrices, or the tensor that is copied.
    pub fn case(self) -> Case {
        match self {
            Roof::Matmul => Case::new(Dtype::BF16, [1, 1, 8192, 8192], false),
            Roof::Copy => Case::new(Dtype::BF16, [1, 1, 1 << 23, 128], false),
        }
    }
}

/// A request to the process, as a line of JSON.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Request<'a> {
    /// A measurement of the device itself.
    Roof(Roof),
    /// One pass of one implementation over one problem.
    Attention { r#impl: &'a str, case: &'a Case, pass: Pass },
}

/// A line from the process.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Versions {
        version: String,
        cudnn: u64,
    },
    Result {
        answer: Option<Box<Answer>>,
        /// Whether the GPU is unusable afterwards.
        last: bool,
    },
}

/// Reply to a request.
pub(crate) enum Reply {
    /// A time, or the reason why there is none.
    Timed(Box<Answer>),
    /// The implementation does not support the problem.
    None,
    /// The time was up first.
    TimeUp,
}

/// The process.
pub(crate) struct Peers {
    child: Child,
    lines: Receiver<String>,
    /// `torch` and its version, and cuDNN's.
    pub runtime: String,
    gone: bool,
    _scripts: TempDir,
}

/// Time that PyTorch may take to start.
const START: Duration = Duration::from_secs(180);

impl Peers {
    /// Names of the implementations for a problem, or those of `only` among them.
    pub fn names(case: &Case, only: &[String]) -> Vec<&'static str> {
        let of_dtype = |name: &&str| case.dtype != Dtype::F32 || ["memeff", "flex"].contains(name);
        let wanted = |name: &&str| only.is_empty() || only.iter().any(|only| only == name);
        NAMES.into_iter().filter(of_dtype).filter(wanted).collect()
    }

    /// Whether an implementation supports this problem and pass. Autodiff is Burn's, and no forward depends on the order of the backward.
    pub fn has(name: &str, case: &Case, pass: Pass) -> bool {
        use Variant::{Alibi, Bias, Documents, Dropout, Lengths, Mask, Packed, Sinks, Softcap, Sparse, Window};
        let has_pass = match pass {
            Pass::Forward | Pass::Both => name != "flash2-deterministic",
            Pass::Backward => true,
            Pass::Autodiff => false,
        };
        let has_variant = match case.variant.option() {
            _ if case.variant.is_direct() => false,
            Dropout | Lengths if name == "flex" => false,
            _ if name == "flex" => true,
            Softcap | Window(_) | Alibi | Sinks | Packed(_) | Documents | Lengths | Sparse(_) => false,
            Mask | Bias => !case.causal && !name.starts_with("flash2"),
            _ => true,
        };
        // Its causality is aligned to the first key, except for FlexAttention, where a function defines it.
        has_pass && has_variant && (name == "flex" || !case.causal || case.seq_q == case.seq_k)
    }

    /// Starts the process. Prints a message and returns `None` if python3 has no PyTorch, or PyTorch has no GPU.
    pub fn start() -> Result<Option<Self>, Error> {
        let folder = tempfile::tempdir().map_err(|source| Error::io(&std::env::temp_dir(), source))?;
        for (name, text) in SCRIPTS {
            let file = folder.path().join(name);
            std::fs::write(&file, text).map_err(|source| Error::io(&file, source))?;
        }
        let child = Command::new("python3")
            .arg(folder.path().join("peers.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                eprintln!("no peers are timed: python3 cannot be started ({error})");
                return Ok(None);
            }
        };
        let (sender, lines) = channel();
        if let Some(out) = child.stdout.take() {
            std::thread::spawn(move || {
                let lines = BufReader::new(out).lines().map_while(Result::ok);
                // Stop when the receiver is gone.
                lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
            });
        }
        let mut peers = Peers { child, lines, runtime: String::new(), gone: false, _scripts: folder };
        match peers.line(Some(Instant::now() + START)) {
            Heard::Line(Line::Versions { version, cudnn }) => {
                peers.runtime = format!("torch {version}, cuDNN {cudnn}");
                Ok(Some(peers))
            }
            Heard::Gone => match peers.child.wait().ok().and_then(|status| status.code()) {
                // The process has printed the reason.
                Some(3) => {
                    eprintln!("no peers are timed");
                    Ok(None)
                }
                code => Err(Error::Other(format!("peers.py, which times the peers, ended with {code:?} at its start"))),
            },
            _ => Err(Error::Other(format!(
                "peers.py, which times the peers, did not start PyTorch within {} s",
                START.as_secs()
            ))),
        }
    }

    /// The reply within the limit, or the reason why there is none; [`Reply::TimeUp`] if `until` comes first.
    pub fn ask(&mut self, request: &Request, limit: Duration, until: Option<Instant>) -> Result<Reply, Error> {
        let text = serde_json::to_string(request)
            .map_err(|error| Error::Other(format!("the job of peers.py cannot be written as JSON: {error}")))?;
        let sent = self.child.stdin.as_mut().map(|stdin| writeln!(stdin, "{text}").and_then(|()| stdin.flush()));
        let end = Instant::now() + limit;
        let first = until.map_or(end, |until| until.min(end));
        let heard = if matches!(sent, Some(Ok(()))) { self.line(Some(first)) } else { Heard::Gone };
        let failed = |note: String| Reply::Timed(Box::new(Answer { note, ..Default::default() }));
        match heard {
            Heard::Line(Line::Result { answer, last }) => {
                self.gone = last;
                Ok(answer.map_or(Reply::None, Reply::Timed))
            }
            Heard::Line(Line::Versions { .. }) => {
                Err(Error::Other("peers.py, which times the peers, answered without a question".into()))
            }
            Heard::Nothing => {
                self.gone = true;
                let _ = self.child.kill();
                Ok(if first < end { Reply::TimeUp } else { failed(format!("over {} s", limit.as_secs())) })
            }
            Heard::Gone => {
                self.gone = true;
                let code = self.child.wait().ok().and_then(|status| status.code());
                let code = code.map_or("a signal".into(), |code| format!("code {code}"));
                Ok(failed(format!("failed: python3 ended with {code}")))
            }
        }
    }

    /// Whether the process has ended, and another one must be started.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    fn line(&mut self, until: Option<Instant>) -> Heard {
        loop {
            let left = until.map_or(START, |until| until.saturating_duration_since(Instant::now()));
            match self.lines.recv_timeout(left) {
                // Libraries may print other lines.
                Ok(text) => match serde_json::from_str(&text) {
                    Ok(line) => return Heard::Line(line),
                    Err(_) => continue,
                },
                Err(RecvTimeoutError::Timeout) => return Heard::Nothing,
                Err(RecvTimeoutError::Disconnected) => return Heard::Gone,
            }
        }
    }
}

/// What was read from the process.
enum Heard {
    Line(Line),
    Nothing,
    Gone,
}

impl Drop for Peers {
    fn drop(&mut self) {
        // The process would end by itself when its input is closed, but it may be busy.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_what_the_script_reads() {
        let case = Case { heads_kv: 2, ..Case::new(Dtype::BF16, [1, 8, 64, 32], true) };
        let request = Request::Attention { r#impl: "flex", case: &case, pass: Pass::Both };
        let text: serde_json::Value = serde_json::to_value(&request).unwrap();
        assert_eq!((text["impl"].as_str(), text["pass"].as_str()), (Some("flex"), Some("both")));
        assert_eq!((text["case"]["heads_kv"].as_u64(), text["case"]["variant"].as_str()), (Some(2), Some("none")));
        assert_eq!(serde_json::to_value(Request::Roof(Roof::Copy)).unwrap(), "copy");
    }

    #[test]
    fn roofs_are_those_of_the_problems() {
        let all = Case::new(Dtype::BF16, [1, 8, 64, 32], true);
        let step = Case { seq_q: 1, causal: false, ..all };
        assert_eq!(Roof::of(&[step, step]), [Roof::Copy]);
        assert_eq!(Roof::of(&[step, all]), [Roof::Matmul, Roof::Copy]);
        assert_eq!(Roof::of(&[]), []);
        // What peers.py copies.
        assert_eq!(Roof::Copy.case().bytes(), 4 << 31);
    }

    #[test]
    fn answers_are_what_the_script_says() {
        let line = |text: &str| serde_json::from_str::<Line>(text);
        // Lines printed by libraries are not accepted.
        assert!(line("{}").is_err() && line("[W123] warning").is_err());
        assert!(matches!(line(r#"{"version": "2.11.0", "cudnn": 91900}"#), Ok(Line::Versions { .. })));
        assert!(matches!(line(r#"{"answer": null, "last": true}"#), Ok(Line::Result { answer: None, last: true })));
        let text = r#"{"answer": {"device": "Chip", "kernel": "", "note": "", "time_ms": [1.0, 0.9, 1.1], "errors": {"o": null, "dq": 2e-3}}, "last": false}"#;
        let Ok(Line::Result { answer: Some(answer), last: false }) = line(text) else { panic!("{text}") };
        assert_eq!((answer.errors.o, answer.errors.dq, answer.time_ms), (None, Some(2e-3), Some([1.0, 0.9, 1.1])));
    }

    #[test]
    fn who_has_what() {
        let case = Case::new(Dtype::F32, [1, 8, 64, 32], true);
        assert_eq!(Peers::names(&case, &[]), ["memeff", "flex"]);
        let half = Case { dtype: Dtype::F16, ..case };
        assert_eq!(Peers::names(&half, &["flash2".into(), "flex".into()]), ["flash2", "flex"]);
        assert_eq!(Peers::names(&half, &[]).len(), 5);
        let has = |name, variant, pass| Peers::has(name, &half.with(variant), pass);
        assert!(!has("flash2-deterministic", Variant::None, Pass::Forward));
        assert!(has("flash2-deterministic", Variant::None, Pass::Backward));
        assert!(!has("flex", Variant::None, Pass::Autodiff) && !has("cudnn", Variant::Mask, Pass::Forward));
        assert!(has("flex", Variant::AlibiFunction, Pass::Both) && !has("cudnn", Variant::AlibiFunction, Pass::Both));
        let full = Case { causal: false, ..half };
        assert!(Peers::has("cudnn", &full.with(Variant::Bias), Pass::Forward));
        assert!(!Peers::has("flash2", &full.with(Variant::Bias), Pass::Forward));
        let decode = Case { seq_q: 1, ..half };
        assert!(!Peers::has("flash2", &decode, Pass::Forward) && Peers::has("flex", &decode, Pass::Forward));
    }
}
