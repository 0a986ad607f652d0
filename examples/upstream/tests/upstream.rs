//! Runs the program as its users do, on the CPU.

use std::process::{Command, Output};

fn upstream(arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_upstream")).args(arguments).output().unwrap();
    (status.code(), [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat())
}

#[test]
fn a_fault_that_does_not_show_is_success() {
    let (code, said) = upstream(&["--device", "flex", "bf16-product", "causal-gradients", "field-alias"]);
    let lines: Vec<_> = said.lines().collect();
    assert_eq!((code, lines.len()), (Some(0), 3), "{said}");
    assert!(lines[0].starts_with("bf16-product        does not show   x · x is off by "), "{said}");
    assert!(lines[1].starts_with("causal-gradients    does not show   "), "{said}");
    assert!(lines[2].starts_with("field-alias         not applicable  "), "{said}");
}

#[test]
fn a_timeout_is_no_answer() {
    let (code, said) = upstream(&["--device", "flex", "--limit", "0", "repeated-bits"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.starts_with("repeated-bits       no answer       over 0 s"), "{said}");
}

#[test]
fn bad_input_is_named() {
    let (code, said) = upstream(&["bf17-product"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("invalid value 'bf17-product'") && said.contains("it must be one of bf16-product, "),
        "{said}"
    );
}
