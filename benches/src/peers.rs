//! PyTorch's attentions, timed by `peers.py` in a process of its own.

use crate::case::{Case, Pass};
use crate::error::Error;
use crate::run::{Rows, Run, rows};
use crate::worker::Answer;
use serde::Deserialize;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// The script, which the binary brings along to machines that have no repository.
const SCRIPT: &str = include_str!("../peers.py");

/// What a line of the script's says.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Versions { version: String, cudnn: u64 },
    Result { r#impl: String, case: Option<usize>, pass: Pass, answer: Box<Answer> },
}

/// Times the cases with every implementation of PyTorch's that has their mathematics, or with `only` these, if any are named. Where python3 has no PyTorch, or
/// PyTorch no GPU, says so and does nothing.
pub(crate) fn run(
    cases: &[Case],
    passes: &[Pass],
    only: &[String],
    run: &Run,
    mut add: impl FnMut(Rows, Option<&Case>) -> Result<(), Error>,
) -> Result<(), Error> {
    let other = |what: String| Error::Other(format!("the peers: {what}"));
    let script = std::env::temp_dir().join(format!("attention-bench-peers-{}.py", std::process::id()));
    std::fs::write(&script, SCRIPT).map_err(|source| Error::io(&script, source))?;
    let job = serde_json::json!({ "cases": cases, "passes": passes, "only": only }).to_string();
    let child = Command::new("python3").arg(&script).arg(job).stdout(Stdio::piped()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            eprintln!("no peers: python3 could not be started ({error})");
            return Ok(());
        }
    };
    let mut run = run.clone();
    let lines = child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines().map_while(Result::ok));
    for line in lines {
        match serde_json::from_str(&line) {
            Ok(Line::Versions { version, cudnn }) => run.runtime = format!("torch {version}, cuDNN {cudnn}"),
            Ok(Line::Result { r#impl, case, pass, answer }) => {
                let matmul = Case::new(flash_attention_kernels::Dtype::BF16, [1, 1, 8192, 8192], false);
                let case = case.and_then(|index| cases.get(index));
                add(rows(&run, &r#impl, case.unwrap_or(&matmul), pass, &answer)?, case)?;
            }
            // Libraries may print lines of their own.
            Err(_) => {}
        }
    }
    let status = child.wait().map_err(|error| other(error.to_string()))?;
    let _ = std::fs::remove_file(&script);
    match status.code() {
        Some(0) => Ok(()),
        // It has said why.
        Some(3) => {
            eprintln!("no peers");
            Ok(())
        }
        _ => Err(other(format!("python3 ended with {status}"))),
    }
}
