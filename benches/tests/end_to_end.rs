//! Runs the program from end to end on the default wgpu adapter, and checks its errors for invalid arguments.

use attention_bench::results::{self, Accuracy, Call, Memory, Timing};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn bench(arguments: &[&str], directory: &Path) -> Output {
    let program = env!("CARGO_BIN_EXE_attention-bench");
    Command::new(program).args(arguments).arg("--directory").arg(directory).output().unwrap()
}

/// Asserts exit code 2 and one line of error with these words.
fn refused(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    let sentence: Vec<_> = said.lines().filter(|line| !line.contains("XDG_RUNTIME_DIR")).collect();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(sentence.len(), 1, "{said}");
    assert!(words.iter().all(|word| sentence[0].contains(word)), "{said}");
}

/// Whether there is an adapter. With `REQUIRE_WGPU=1`, fails if there is none.
fn has_adapter() -> bool {
    let there = cubecl::Device::wgpu(cubecl::device::WgpuDeviceKind::DefaultDevice).is_ok();
    assert!(there || std::env::var("REQUIRE_WGPU").as_deref() != Ok("1"), "REQUIRE_WGPU=1, but there is no adapter");
    if !there {
        eprintln!("skipped: there is no adapter");
    }
    there
}

#[test]
fn a_tiny_set_is_timed_and_reported() {
    if !has_adapter() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let few = ["--device", "wgpu", "--set", "tiny", "--impl", "ours,composed", "--variant", "none,bias"];
    let few = [&few[..], &["--heads-kv", "2", "--seq-q", "64", "--pass", "forward,backward,autodiff"]].concat();
    let output = bench(&few, directory.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let timings: Vec<Timing> = results::read_if_there(directory.path(), "tiny-wgpu").unwrap();
    let calls: Vec<Call> = results::read_if_there(directory.path(), "tiny-wgpu").unwrap();
    // Two problems, each with three passes of ours and two of the composed operations, which have no separate backward.
    assert_eq!((timings.len(), calls.len()), (10, 10));
    for (timing, call) in timings.iter().zip(&calls) {
        assert_eq!(call.note, "", "{timing:?}");
        assert!(call.error.unwrap() < 1e-5, "{call:?}");
        assert!(timing.p20_ms.unwrap() <= timing.median_ms.unwrap(), "{timing:?}");
        assert!(timing.median_ms.unwrap() <= timing.p80_ms.unwrap(), "{timing:?}");
        assert!(timing.median_ms.unwrap() > 0.0 && call.host_us.unwrap() > 0.0 && call.first_call_ms.unwrap() > 0.0);
        assert!(!timing.device.is_empty() && timing.runtime == "wgpu", "{timing:?}");
    }
    // Each result has its own error: dbias if there is a bias, lse if kernels are called directly.
    let errors: Vec<Accuracy> = results::read_if_there(directory.path(), "tiny-wgpu").unwrap();
    assert_eq!(errors.len(), 10);
    for error in &errors {
        assert_eq!(error.dbias.is_some(), error.variant == "bias" && error.pass != "forward", "{error:?}");
        assert_eq!(error.lse.is_some(), error.pass != "autodiff" && error.r#impl == "ours", "{error:?}");
        assert_eq!(error.dq.is_some(), error.pass != "forward", "{error:?}");
    }
    // q, k, v and o have 4,096 floats, lse has 128. The runtime keeps a little memory for a launch.
    let forward = &timings[0];
    assert_eq!((forward.r#impl.as_str(), forward.pass.as_str()), ("ours", "forward"));
    // A software adapter runs `rows`.
    assert!(["portable", "rows"].contains(&forward.kernel.as_str()), "{forward:?}");
    let tensors = 4 * (4 * 4096 + 128);
    assert!((tensors..tensors + 4096).contains(&forward.peak_bytes.unwrap()), "{forward:?}");

    let page = directory.path().join("report.html");
    let program = env!("CARGO_BIN_EXE_attention-bench");
    let report =
        Command::new(program).args(["report", "--directory"]).arg(directory.path()).arg("--out").arg(&page).output();
    assert!(report.unwrap().status.success());
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains(&forward.device), "{page}");
}

#[test]
fn memory_beyond_the_inputs() {
    if !has_adapter() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["memory", "--device", "wgpu", "--set", "tiny", "--impl", "ours", "--variant", "none"];
    let output = bench(&[&arguments[..], &["--heads-kv", "2", "--seq-q", "128"]].concat(), directory.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Memory> = results::read_if_there(directory.path(), "tiny-wgpu").unwrap();
    // Kernels called directly, and autodiff. The runtime keeps a little memory for a launch.
    assert_eq!(rows.iter().map(|row| row.pass.as_str()).collect::<Vec<_>>(), ["both", "autodiff"]);
    for row in &rows {
        let beyond = row.beyond().unwrap();
        assert!((row.linear_bytes..row.linear_bytes + 4096).contains(&beyond), "{row:?}");
        assert!(row.reserved_bytes >= row.peak_bytes, "{row:?}");
    }
}

#[test]
fn tiles_are_swept() {
    if !has_adapter() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["sweep", "--device", "wgpu", "--head-dim", "16", "--seq", "48", "--heads", "1", "--only", "32x32"];
    let output = bench(&arguments, directory.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tiles: Vec<results::TileTiming> = results::read_if_there(directory.path(), "sweep-wgpu").unwrap();
    assert_eq!(tiles.len(), 9);
    assert!(tiles.iter().all(|tile| tile.median_ms.is_some() && tile.shared_bytes.is_some()), "{tiles:?}");
}

#[test]
fn invalid_arguments_get_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let of = |arguments: &[&str]| bench(arguments, directory.path());
    refused(&of(&["--set", "h200", "--head-dim", "65"]), &["--head-dim is 65", "h200", "128, 64, 256"]);
    refused(&of(&["--set", "quick", "--variant", "none,windy"]), &["--variant is windy", "window 128"]);
    if !cfg!(feature = "cuda") {
        refused(&of(&["--device", "cuda"]), &["--device cuda"]);
    }
    refused(&of(&["--shape", "1,2,64,300"]), &["300"]);
    // For arguments with a fixed set of values, clap lists the values.
    for (arguments, known) in [
        (&["publish", "--only", "everything"][..], "h200-cuda"),
        (&["sweep", "--only", "63x64"], "64x64"),
        (&["--kernel", "magic"], "portable"),
        (&["--dtype", "f64"], "bf16"),
        (&["tune", "--try", "1/x"], "invalid digit"),
    ] {
        let unknown = Command::new(env!("CARGO_BIN_EXE_attention-bench")).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&unknown.stderr);
        assert_eq!(unknown.status.code(), Some(2), "{said}");
        assert!(said.contains("invalid value") && said.contains(known), "{said}");
    }

    let foreign = directory.path().join("foreign.csv");
    fs::write(&foreign, "date,temperature\n2026-01-01,3\n").unwrap();
    let before = fs::read(&foreign).unwrap();
    let program = env!("CARGO_BIN_EXE_attention-bench");
    if has_adapter() {
        if !cfg!(feature = "cuda") {
            let tune = Command::new(program).args(["tune", "--set", "tiny", "--kernel", "portable"]).output();
            refused(&tune.unwrap(), &["no kernel with tiles"]);
        }
        let device = ["--device", "wgpu", "--set", "tiny", "--name", "foreign"];
        refused(&of(&device), &["foreign.csv", "is not a file of results"]);
        assert_eq!(fs::read(&foreign).unwrap(), before);
    }
    let report = Command::new(program).args(["report", "foreign", "--directory"]).arg(directory.path()).output();
    refused(&report.unwrap(), &["foreign.csv", "is not a file of results"]);
}

#[test]
fn documents_show_the_committed_results() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let current =
        attention_bench::report::write_tables(&here.join("results"), &here.join("../docs/benchmark.md"), true);
    assert!(current.is_ok(), "{}", current.unwrap_err());
    let current = attention_bench::report::pictures(&here.join("results"), &here.join("../docs"), true);
    assert!(current.is_ok(), "{}", current.unwrap_err());
}

#[test]
fn shapes_of_the_user_s_own_are_timed() {
    if !has_adapter() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let arguments =
        ["--device", "wgpu", "--shape", "1,4/2,32,16", "--shape", "2,2,1x64,16", "--causal", "--impl", "ours"];
    let output = bench(&[&arguments[..], &["--pass", "forward"]].concat(), directory.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Timing> = results::read_if_there(directory.path(), "shapes-wgpu").unwrap();
    let sizes: Vec<_> =
        rows.iter().map(|row| [row.heads_q, row.heads_kv, row.seq_q, row.seq_k, row.head_dim]).collect();
    assert_eq!(sizes, [[4, 2, 32, 32, 16], [2, 2, 1, 64, 16]]);
    assert!(rows.iter().all(|row| row.causal && row.dtype == "f32" && row.median_ms.is_some()), "{rows:?}");
    // The second shape is a decoding step, which is timed without launches.
    let calls: Vec<Call> = results::read_if_there(directory.path(), "shapes-wgpu").unwrap();
    assert_eq!(calls.iter().map(|call| call.note.as_str()).collect::<Vec<_>>(), ["", ""]);
    assert_eq!(rows.iter().map(|row| row.gigabytes_per_second().is_some()).collect::<Vec<_>>(), [false, true]);
    assert_eq!((said.matches(" TFLOP/s").count(), said.matches(" GB/s").count()), (1, 1), "{said}");
}

/// Rows of a file in order, as pass and problem.
fn measured(directory: &Path) -> Vec<String> {
    let rows: Vec<Timing> = results::read_if_there(directory, "trial-wgpu").unwrap();
    rows.iter().map(|row| format!("{} {} {} {}", row.pass, row.heads_kv, row.seq_q, row.variant)).collect()
}

#[test]
fn publish_resumes_and_replace_installs_its_rows() {
    if !has_adapter() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let publish = |more: &[&str]| {
        bench(&[&["publish", "--only", "trial-wgpu", "--unclean"][..], more].concat(), directory.path())
    };
    // With a time limit of 0 everything is left and nothing is written.
    let output = publish(&["--minutes", "0"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("5 left") && measured(directory.path()).is_empty(), "{said}");
    let list = publish(&["--list"]);
    assert_eq!(list.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&list.stdout).contains("5 left"));

    let output = publish(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let all = measured(directory.path());
    assert_eq!(all.len(), 5);

    // A file as a kill leaves it: the last rows are missing and the one before is truncated.
    let file = directory.path().join("trial-wgpu.csv");
    let text = fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    fs::write(&file, format!("{}\n{}", lines[..3].join("\n"), &lines[3][..20])).unwrap();
    let output = publish(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(measured(directory.path()), all);
    let again: Vec<Timing> = results::read_if_there(directory.path(), "trial-wgpu").unwrap();
    assert_eq!(again[0].run, again[1].run, "complete rows must stay");
    assert_ne!(again[1].run, again[2].run);
    // Nothing is left.
    let before = fs::read(&file).unwrap();
    assert!(publish(&[]).status.success());
    assert_eq!(fs::read(&file).unwrap(), before);

    // `replace` removes rows of other commits.
    let commit = &again[0].commit;
    let old = tempfile::tempdir().unwrap();
    let stale: Vec<Timing> = again.iter().map(|row| Timing { commit: "0123456789".into(), ..row.clone() }).collect();
    results::append(&results::path::<Timing>(old.path(), "trial-wgpu"), &stale).unwrap();
    results::append(&results::path::<Timing>(old.path(), "other-wgpu"), &stale).unwrap();
    let from = directory.path().to_str().unwrap();
    let replaced = bench(&["replace", "--from", from, "--unclean"], old.path());
    assert!(replaced.status.success(), "{}", String::from_utf8_lossy(&replaced.stderr));
    let rows: Vec<Timing> = results::read_if_there(old.path(), "trial-wgpu").unwrap();
    assert_eq!(rows, again);
    let calls: Vec<Call> = results::read_if_there(old.path(), "trial-wgpu").unwrap();
    let errors: Vec<Accuracy> = results::read_if_there(old.path(), "trial-wgpu").unwrap();
    assert_eq!((calls.len(), errors.len()), (5, 5));
    // Files that were not measured stay.
    assert_eq!(results::read_if_there::<Timing>(old.path(), "other-wgpu").unwrap(), stale);
    if commit.ends_with('+') {
        refused(&bench(&["replace", "--from", from], old.path()), &[commit, "one clean commit"]);
        let publish = bench(&["publish", "--only", "trial-wgpu"], directory.path());
        refused(&publish, &[commit, "one clean commit"]);
    }
}
