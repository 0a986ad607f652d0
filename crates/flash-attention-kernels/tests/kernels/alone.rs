//! Tests that need a process of their own, because they measure state of the whole process or make the device fail.

use std::process::Command;

/// Environment variable that is set in such a process.
const ALONE: &str = "FLASH_TEST_ALONE";

/// Returns true in the test's own process. In any other process, runs the test in a process of its own with these environment variables,
/// asserts that it passes, and returns false.
pub fn alone(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var(ALONE).is_ok() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().expect("the path of the test program"));
    child.args(["--exact", test, "--nocapture"]).env(ALONE, "1").envs(variables.iter().copied());
    let output = child.output().expect("the test program can be started again");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    println!("{said}");
    assert!(output.status.success() && said.contains("1 passed"), "{test} failed in its own process");
    false
}
