//! The judge of results in Rust and in Python (for PyTorch's results), tested with the same numbers; and the times that Python takes.

use attention_bench::judge::{self, Verdict};
use flash_attention_kernels::Dtype;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

fn numbers() -> Value {
    serde_json::from_str(include_str!("judge.json")).unwrap()
}

/// A number, or NaN for any other value, because JSON has no NaN.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

fn list(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn ranges(value: &Value) -> Vec<std::ops::Range<usize>> {
    let end = |block: &Value, nth: usize| block[nth].as_u64().unwrap() as usize;
    value.as_array().unwrap().iter().map(|block| end(block, 0)..end(block, 1)).collect()
}

fn size(case: &Value, name: &str) -> usize {
    case[name].as_u64().unwrap() as usize
}

#[test]
fn errors_of_blocks() {
    let numbers = numbers();
    for case in numbers["errors"].as_array().unwrap() {
        let error = judge::error_of_block(&list(&case["found"]), &list(&case["right"]));
        let right = number(&case["error"]);
        assert!((error - right).abs() < 1e-12 || error.is_nan() && right.is_nan(), "{}: {error}", case["name"]);
        for (dtype, name) in [(Dtype::BF16, "bf16"), (Dtype::F16, "f16")] {
            let bound = judge::bound(dtype, false);
            assert_eq!(bound, number(&numbers["bounds"][name]));
            let is_right = case["right_in"].as_array().unwrap().iter().any(|of| of == name);
            let wanted = if is_right { Verdict::Right } else { Verdict::Wrong };
            assert_eq!(judge::verdict(&[error, error], true, bound), wanted, "{} in {name}", case["name"]);
        }
    }
}

#[test]
fn blocks_and_samples() {
    let numbers = numbers();
    for case in numbers["blocks"].as_array().unwrap() {
        assert_eq!(judge::blocks(size(case, "length"), judge::BLOCKS), ranges(&case["blocks"]), "{case}");
    }
    for case in numbers["sampled"].as_array().unwrap() {
        let [group, seq_q, seq_k] = ["group", "seq_q", "seq_k"].map(|name| size(case, name));
        let sampled = judge::sampled(group, seq_q, seq_k, case["causal"].as_bool().unwrap());
        assert_eq!(sampled.heads, size(case, "heads"), "{case}");
        assert_eq!((sampled.queries, sampled.keys), (ranges(&case["queries"]), ranges(&case["keys"])), "{case}");
    }
}

#[test]
fn verdicts() {
    let numbers = numbers();
    for case in numbers["verdicts"].as_array().unwrap() {
        let bound = number(&numbers["verdict_bound"]);
        let verdict = judge::verdict(&list(&case["errors"]), case["confirmed"].as_bool().unwrap(), bound);
        assert_eq!(format!("{verdict:?}").to_lowercase(), case["verdict"].as_str().unwrap(), "{case}");
    }
}

/// Runs a script with this number of tests. Without python3 it is skipped. With `REQUIRE_PYTHON=1` that fails.
fn python(script: &str, tests: usize) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    match Command::new("python3").arg(&script).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.contains(&format!("Ran {tests} tests")), "{said}");
        }
        Err(error) => {
            assert!(
                std::env::var("REQUIRE_PYTHON").as_deref() != Ok("1"),
                "REQUIRE_PYTHON=1, but python3 does not start: {error}"
            );
            eprintln!("skipped: there is no python3 to run {}", script.display());
        }
    }
}

#[test]
fn python_gives_the_same_verdicts() {
    python("judge_test.py", 5);
}

#[test]
fn peers_are_timed_with_launches_or_without() {
    python("peers_test.py", 3);
}
