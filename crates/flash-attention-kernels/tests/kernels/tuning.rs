//! The tuner: its candidates are correct, and its choice is persisted and reported.

use crate::common::*;
use crate::plans::{problem, smallest};
use cubecl::client::Client;
use flash_attention_kernels::tiling::{Device, Stage, backward_candidates, forward_candidates, shared_memory};
use flash_attention_kernels::tuning::{CANDIDATES, Tuned, forget, forward_tuned, tuned};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, BackwardOrder, Dtype, Forward, Gradient, Inputs,
    PortableForward, TensorView, plan,
};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable of a child process: the directory in which CubeCL persists the tuner's choices.
const ROOT: &str = "FLASH_TEST_TUNING_ROOT";

/// Prefix of lines that a child process prints for its parent.
const REPORTED: &str = "reported: ";

/// Child processes run one at a time, because on a busy machine calls may be too slow to be timed.
static ONE: Mutex<()> = Mutex::new(());

/// Runs a test in a child process that persists choices in `root`. Returns the lines that it reports.
fn process(test: &str, root: &Path) -> Vec<String> {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(ROOT, root).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test}: {out}{err}");
    eprint!("{err}");
    out.lines().filter_map(|line| Some(line.split_once(REPORTED)?.1.to_string())).collect()
}

/// In a child process without any persisted choice, returns the client. In the parent, runs the test in such a child and returns `None`.
fn alone(test: &str) -> Option<Client> {
    let Ok(root) = std::env::var(ROOT) else {
        process(test, tempfile::tempdir().unwrap().path());
        return None;
    };
    log::set_logger(&COUNTER).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let client = client();
    // The first use of CubeCL has already read its configuration, which has another directory.
    cubecl::environment::set_root(root);
    client
}

/// Counts how often the tuner runs, by its log messages.
struct Counter(AtomicUsize);

static COUNTER: Counter = Counter(AtomicUsize::new(0));

impl log::Log for Counter {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Info
    }

    fn log(&self, record: &log::Record) {
        if record.args().to_string().starts_with("Tuning AttentionProblem") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

fn times_tuned() -> usize {
    COUNTER.0.load(Ordering::Relaxed)
}

fn case() -> Case {
    let options = AttentionOptions { causal: true, ..Default::default() };
    Case { tuned: true, ..Case::new([1, 2, 1, 100, 130, 40, 40], Dtype::F32, options) }
}

/// Candidates of the forward and of the backward.
fn candidates(client: &Client, problem: &AttentionProblem) -> (usize, usize) {
    let device = Device::of(client);
    let forwards = forward_candidates(&device, problem, CANDIDATES).unwrap();
    (forwards.len(), backward_candidates(&device, problem, CANDIDATES).unwrap().len())
}

#[test]
fn the_choice_is_correct_reported_and_reused() {
    let Some(client) = alone("tuning::the_choice_is_correct_reported_and_reused") else { return };
    let problem = case().problem;
    assert_eq!(tuned(&client, &problem).unwrap(), Tuned::default());
    let several = candidates(&client, &problem);

    let start = Instant::now();
    let first = case().check(&client);
    let took = start.elapsed();
    eprintln!("{several:?} candidates, forward and backward tuned and checked in {took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    // On a busy machine the tuner may have timed nothing.
    let choice = tuned(&client, &problem).unwrap();
    let times = usize::from(choice.forward.is_some()) + usize::from(choice.backward.is_some());
    assert_eq!(times_tuned(), times);
    assert!(choice.forward.is_none() || several.0 > 1, "{choice:?}");
    assert!(choice.backward.is_none() || several.1 > 1, "{choice:?}");
    let planned = plan(&client, &problem).unwrap();
    assert_eq!(choice.forward.unwrap_or(planned.forward), first.forward);
    assert_eq!(choice.backward.unwrap_or(planned.backward), first.backward);
    let device = Device::of(&client);
    assert!(forward_candidates(&device, &problem, CANDIDATES).unwrap().contains(&first.forward));
    assert!(backward_candidates(&device, &problem, CANDIDATES).unwrap().contains(&first.backward));

    // The same choice gives the same bits. Problems of similar sizes reuse the choice.
    let again = case().run(&client).unwrap();
    assert_eq!((again.forward, again.backward), (first.forward, first.backward));
    assert_eq!([&again.o, &again.lse], [&first.o, &first.lse]);
    assert_eq!([&again.dq, &again.dk, &again.dv], [&first.dq, &first.dk, &first.dv]);
    let options = case().problem.options;
    Case { tuned: true, ..Case::new([1, 2, 1, 90, 200, 40, 40], Dtype::F32, options) }.check(&client);
    assert_eq!(times_tuned(), times);
}

/// The child process of [`known`]: reports the choice before a call and after it, and how often the tuner ran. If the root has a directory
/// `forget`, the choice is forgotten first.
#[test]
fn report_the_choice() {
    let Ok(root) = std::env::var(ROOT) else { return };
    let Some(client) = alone("") else { return };
    if Path::new(&root).join("forget").exists() {
        forget(&client);
    }
    let before = tuned(&client, &case().problem).unwrap();
    case().check(&client);
    let after = tuned(&client, &case().problem).unwrap();
    println!("{REPORTED}{}", serde_json::to_string(&[before.forward, after.forward]).unwrap());
    println!("{REPORTED}{}", serde_json::to_string(&[before.backward, after.backward]).unwrap());
    println!("{REPORTED}{}", times_tuned());
}

/// Reported choices of forward and backward, each before and after a call, and how often the tuner ran.
fn known(root: &Path) -> Option<([[serde_json::Value; 2]; 2], usize)> {
    let reported = process("tuning::report_the_choice", root);
    let [forward, backward, times] = &reported[..] else { return None };
    let pair = |line: &str| serde_json::from_str(line).unwrap();
    Some(([pair(forward), pair(backward)], times.parse().unwrap()))
}

#[test]
fn the_choice_persists_until_it_is_forgotten() {
    let root = tempfile::tempdir().unwrap();
    let Some((first, times)) = known(root.path()) else { return };
    assert!(first.iter().all(|[before, _]| before.is_null()));
    let timed = |of: &[[serde_json::Value; 2]; 2]| of.iter().filter(|[before, after]| before != after).count();
    assert_eq!(timed(&first), times);

    let (second, times) = known(root.path()).unwrap();
    for ([_, found], [before, after]) in first.iter().zip(&second) {
        assert_eq!(found, before);
        assert!(found.is_null() || before == after, "{before} became {after}");
    }
    assert_eq!(timed(&second), times);

    std::fs::create_dir(root.path().join("forget")).unwrap();
    let (third, _) = known(root.path()).unwrap();
    assert!(third.iter().all(|[before, _]| before.is_null()));
}

#[test]
fn slow_problems_are_not_timed() {
    let Some(client) = alone("tuning::slow_problems_are_not_timed") else { return };
    // A fast device times this problem.
    if thorough() {
        return;
    }
    let case = Case { tuned: true, ..Case::new([1, 4, 4, 1024, 1024, 64, 64], Dtype::F32, Default::default()) };
    let start = Instant::now();
    let results = case.run(&client).unwrap();
    eprintln!("not tuned in {:?}", start.elapsed());
    assert_eq!(results.forward, plan(&client, &case.problem).unwrap().forward);
    assert_eq!((times_tuned(), tuned(&client, &case.problem).unwrap()), (0, Tuned::default()));
}

#[test]
fn a_bad_call_is_a_typed_error_and_tunes_nothing() {
    let Some(client) = alone("tuning::a_bad_call_is_a_typed_error_and_tunes_nothing") else { return };
    let p = case().problem;
    let zeros = |shape: [usize; 4]| {
        TensorView::contiguous(client.create_from_slice(&vec![0; 4 * shape.iter().product::<usize>()]), shape)
    };
    let inputs = Inputs::new(zeros(p.q_shape()), zeros(p.k_shape()), zeros(p.v_shape()));
    let lse = TensorView::contiguous(client.empty(4 * p.rows()), p.lse_shape());
    let short = zeros([1, 2, 99, 40]);
    let error = forward_tuned(&client, &p, &inputs, &short, &lse).unwrap_err();
    assert!(matches!(error, AttentionError::Dimension { argument: "o", value: 99, expected: 100, .. }), "{error}");
    let small = Inputs { k: TensorView { handle: client.empty(16), ..inputs.k.clone() }, ..inputs.clone() };
    let error = forward_tuned(&client, &p, &small, &zeros(p.o_shape()), &lse).unwrap_err();
    assert!(matches!(error, AttentionError::Buffer { argument: "k", .. }), "{error}");
    let mut half = p;
    half.dtype = Dtype::F16;
    if !supports(&client, Dtype::F16) {
        assert!(matches!(tuned(&client, &half), Err(AttentionError::DtypeUnsupported { dtype: "f16", .. })));
    }
    assert_eq!(times_tuned(), 0);
    forward_tuned(&client, &p, &inputs, &zeros(p.o_shape()), &lse).unwrap();
    let choice = tuned(&client, &p).unwrap();
    assert_eq!(times_tuned(), usize::from(choice.forward.is_some()));
}

/// Made-up devices.
fn devices() -> Vec<Device> {
    let sizes = [16, 32, 48, 99, 163, 227].map(|kib| Device { shared_memory: kib << 10, units: 1024, ..smallest() });
    let half = |device: &Device| Device { dtypes: vec![Dtype::F32, Dtype::F16], ..device.clone() };
    let matrices = sizes.each_ref().map(|device| Device {
        plane: 32,
        bindings: 32,
        matrices: vec![(Dtype::F16, [16; 3])],
        ..half(device)
    });
    let mma = sizes.each_ref().map(|device| Device { mma: vec![Dtype::F16], bindings: 32, ..half(device) });
    let hopper = Device { wgmma: true, multiprocessors: 132, bindings: 32, ..half(&sizes[5]) };
    sizes.into_iter().chain(matrices).chain(mma).chain([hopper]).collect()
}

fn problems(order: BackwardOrder) -> Vec<AttentionProblem> {
    let of = |dtype, head_dim, causal| {
        let mut of = problem([1, 2, 4096, head_dim]);
        of.dtype = dtype;
        of.options = AttentionOptions { causal, backward_order: order, ..Default::default() };
        of
    };
    let plain = [64, 128, 192, 256].into_iter().flat_map(|d| {
        [Dtype::F32, Dtype::F16].into_iter().flat_map(move |dtype| [true, false].map(|causal| of(dtype, d, causal)))
    });
    let plain: Vec<_> = plain.collect();
    let biased = plain.iter().map(|p| p.with_bias(&[1, 1, 4096, 4096]).unwrap());
    let masked = plain.iter().map(|p| p.with_mask(&[1, 1, 1, 4096]).unwrap());
    plain.iter().copied().chain(biased).chain(masked).collect()
}

#[test]
fn candidates_fit_the_device_and_start_with_the_planned_one() {
    let mut several = [0; 2];
    for device in devices() {
        for problem in problems(BackwardOrder::Deterministic) {
            let planned = flash_attention_kernels::tiling::plan_on(&device, &problem);
            let Ok(planned) = planned else { continue };
            let forwards = forward_candidates(&device, &problem, CANDIDATES).unwrap();
            let backwards = backward_candidates(&device, &problem, CANDIDATES).unwrap();
            assert_eq!((forwards[0], backwards[0]), (planned.forward, planned.backward));
            assert!(forwards.len() <= CANDIDATES && backwards.len() <= CANDIDATES);
            several[0] += usize::from(forwards.len() > 1);
            several[1] += usize::from(backwards.len() > 1);
            for (n, forward) in forwards.iter().enumerate() {
                assert!(!forwards[..n].contains(forward), "{forwards:?}");
                assert_eq!(forward.kernel(), planned.forward.kernel());
                if let Forward::Portable(PortableForward::Tiles(tile)) = forward {
                    assert!(shared_memory(tile, Stage::Forward) <= device.shared_memory);
                }
            }
            for (n, backward) in backwards.iter().enumerate() {
                assert!(!backwards[..n].contains(backward), "{backwards:?}");
                assert_eq!(backward.dq.kernel(), planned.backward.dq.kernel());
                assert_eq!(backward.dkdv.kernel(), planned.backward.dkdv.kernel());
                if let Gradient::Portable(tile) = backward.dq {
                    assert!(shared_memory(&tile, Stage::Backward) <= device.shared_memory);
                }
            }
        }
    }
    assert!(several.iter().all(|several| *several > 0), "some problem must have several candidates");
}

/// One kernel for all three gradients is among the candidates where there is one: on Hopper.
#[test]
fn candidates_have_fused_kernels_in_both_orders() {
    let fused = |order| {
        let pairs =
            devices().into_iter().flat_map(|device| problems(order).into_iter().map(move |p| (device.clone(), p)));
        let all =
            pairs.filter_map(|(device, problem)| backward_candidates(&device, &problem, usize::MAX).ok()).flatten();
        all.filter(|candidate| candidate.fused.is_some()).count()
    };
    for order in [BackwardOrder::Deterministic, BackwardOrder::Fast] {
        assert_eq!(fused(order) > 0, cfg!(feature = "cuda"), "{order:?}");
    }
}
