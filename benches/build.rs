//! Tells the binary which commit it was built from: it may run where there is no repository.

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok().map(|text| text.trim().to_string())
    };
    let commit = git(&["rev-parse", "--short=10", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let differs = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    println!("cargo::rustc-env=ATTENTION_BENCH_COMMIT={commit}{}", if differs { "+" } else { "" });
    // A commit appends to the log of HEAD; a change of what is measured recompiles its crate.
    for path in ["../.git/logs/HEAD", "../crates", "src"] {
        if Path::new(path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}
