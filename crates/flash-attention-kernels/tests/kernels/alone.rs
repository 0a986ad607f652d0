//! Tests that need a process of their own: what they measure is the process's, or they end the device.

use std::process::Command;

/// Set in such a process.
const ALONE: &str = "FLASH_TEST_ALONE";

/// Whether this process is the one that a test runs in by itself. If it is not, runs the test there, with these variables, and asserts that
/// it passes.
pub fn alone(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var(ALONE).is_ok() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().expect("the tests have a path"));
    child.args(["--exact", test, "--nocapture"]).env(ALONE, "1").envs(variables.iter().copied());
    let output = child.output().expect("the tests can be started again");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    println!("{said}");
    assert!(output.status.success() && said.contains("1 passed"), "{test} failed in a process of its own");
    false
}
