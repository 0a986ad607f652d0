//! Memory that attention takes in addition to its inputs, compared with what it may hold.

use crate::case::{Case, Pass};
use crate::device::DeviceName;
use crate::error::Error;
use crate::implementations::Implementation;
use crate::problems::Problems;
use crate::results::{self, Memory};
use crate::run::Run;
use crate::session::{Done, Session, Work, key};
use crate::worker::{Answer, Job};
use flash_attention_kernels::{AttentionProblem, Dtype};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What to measure, and where to write the results.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    #[command(flatten)]
    problems: Problems,
    /// Implementations.
    #[arg(long = "impl", value_enum, value_delimiter = ',', default_value = "ours,ours-fast")]
    implementations: Vec<Implementation>,
    /// Passes: kernels called directly, and through Burn's autodiff.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "both,autodiff")]
    pass: Vec<Pass>,
    /// Device, whose feature must be enabled; by default the best one compiled in.
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// Time limit of one problem in seconds, including compilation and autotuning.
    #[arg(long, default_value_t = 300)]
    limit: u64,
    /// Results are appended to NAME-memory.csv; by default the set, or `shapes`, and the device.
    #[arg(long)]
    name: Option<String>,
    /// Directory of the results.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    directory: PathBuf,
}

/// Bytes that a pass reads: `q`, `k`, `v`, bias, mask, tensors of functions and block masks (four bytes for each block), and `dout` if
/// there is a backward.
fn input_bytes(p: &AttentionProblem, pass: Pass) -> u64 {
    let len = |shape: [usize; 4]| shape.iter().product::<usize>();
    let dout = if pass == Pass::Forward { 0 } else { len(p.o_shape()) };
    let elements = len(p.q_shape()) + len(p.k_shape()) + len(p.v_shape()) + dout + p.bias.map_or(0, len);
    let tables =
        p.score_tensors.into_iter().chain(p.mask_tensors).chain([p.mask, p.block_mask.map(|mask| mask.blocks)]);
    (elements * p.dtype.size() + 4 * tables.flatten().map(len).sum::<usize>()) as u64
}

/// Bytes that a pass may hold in addition: the output, one number for each row for `lse`, and, if there is a backward, the gradients and
/// two more numbers for each row, which are `lse` and delta as its kernels read them. Through CUDA, kernels in half precision may
/// accumulate `dq` in f32. All of them are linear in the sequence, except for the gradient of a bias.
fn linear_bytes(p: &AttentionProblem, pass: Pass, cuda: bool) -> u64 {
    let len = |shape: [usize; 4]| shape.iter().product::<usize>();
    let forward = len(p.o_shape()) * p.dtype.size() + 4 * p.rows();
    let gradients = len(p.q_shape()) + len(p.k_shape()) + len(p.v_shape()) + p.bias.map_or(0, len);
    let sums = if cuda && p.dtype != Dtype::F32 { 4 * len(p.q_shape()) } else { 0 };
    let backward = gradients * p.dtype.size() + 8 * p.rows() + sums;
    (if pass == Pass::Forward { forward } else { forward + backward }) as u64
}

/// Runs all requested measurements.
pub fn run(options: &Options) -> Result<(), Error> {
    let device = options.device.unwrap_or_else(DeviceName::best);
    let work = Work {
        cases: options.problems.cases(device)?,
        implementations: options.implementations.clone(),
        passes: options.pass.clone(),
        kernel: None,
        peers: None,
        limit: Duration::from_secs(options.limit),
    };
    let name = options.name.clone().unwrap_or_else(|| options.problems.name(device));
    let file = results::path::<Memory>(&options.directory, &name);
    measure(&mut Session::new(device, None)?, &work, &file, &Done::new())?;
    println!("written: {}", file.display());
    Ok(())
}

/// Measures what is not done yet, and returns the number of measurements for which no time was left.
pub(crate) fn measure(session: &mut Session, work: &Work, file: &Path, done: &Done) -> Result<usize, Error> {
    results::append::<Memory>(file, &[])?;
    session.next_step();
    println!(
        "{:<44} {:<9} {:<9} {:>12} {:>12} {:>12} {:>12} {:>7} {:>12}",
        "problem", "impl", "pass", "inputs", "peak", "beyond", "may hold", "ratio", "reserved, MiB"
    );
    let mut left = 0;
    for case in &work.cases {
        for (implementation, pass) in work.calls(case) {
            if done.contains(&key(implementation.name(), pass, case)) {
                continue;
            }
            let start = Instant::now();
            let job = Job { timed: false, ..session.job(*case, implementation, pass) };
            let answer = if session.has_time() { session.answer(&job, work.limit)? } else { None };
            let Some(answer) = answer else {
                left += 1;
                continue;
            };
            let problem = case.problem()?;
            let row = row(&session.run, implementation, case, &problem, pass, &answer);
            println!("{}", line(case, &row));
            results::append(file, &[row])?;
            session.took(start);
        }
    }
    Ok(left)
}

fn row(
    run: &Run,
    implementation: Implementation,
    case: &Case,
    problem: &AttentionProblem,
    pass: Pass,
    answer: &Answer,
) -> Memory {
    Memory {
        run: run.id.clone(),
        date: run.date.clone(),
        commit: run.commit.clone(),
        device: answer.device.clone(),
        runtime: run.runtime.clone(),
        r#impl: implementation.name().into(),
        kernel: answer.kernel.clone(),
        pass: pass.name().into(),
        dtype: case.dtype.name().into(),
        batch: case.batch,
        heads_q: case.heads_q,
        heads_kv: case.heads_kv,
        seq_q: case.seq_q,
        seq_k: case.seq_k,
        head_dim: case.head_dim,
        causal: case.causal,
        variant: case.variant_name(),
        input_bytes: input_bytes(problem, pass),
        linear_bytes: linear_bytes(problem, pass, run.runtime == DeviceName::Cuda.name()),
        peak_bytes: answer.peak_bytes,
        reserved_bytes: answer.reserved_bytes,
        note: answer.note.clone(),
    }
}

fn line(case: &Case, row: &Memory) -> String {
    let mib = |bytes: u64| format!("{:.2}", bytes as f64 / (1 << 20) as f64);
    let beyond = row.beyond();
    let show = |bytes: Option<u64>| bytes.map_or("–".into(), mib);
    format!(
        "{:<44} {:<9} {:<9} {:>12} {:>12} {:>12} {:>12} {:>7} {:>12} {}",
        case.to_string(),
        row.r#impl,
        row.pass,
        mib(row.input_bytes),
        show(row.peak_bytes),
        show(beyond),
        mib(row.linear_bytes),
        beyond.map_or("–".into(), |bytes| format!("{:.3}", bytes as f64 / row.linear_bytes.max(1) as f64)),
        show(row.reserved_bytes),
        row.note,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Variant;

    #[test]
    fn what_may_be_held_is_linear_but_for_a_bias() {
        let bytes = |seq: usize, cuda: bool| {
            let p = Case::new(Dtype::BF16, [2, 4, seq, 64], true).problem().unwrap();
            [Pass::Forward, Pass::Both].map(|pass| (input_bytes(&p, pass), linear_bytes(&p, pass, cuda)))
        };
        let (rows, elements) = (2 * 4 * 100, 2 * 4 * 100 * 64);
        let [forward, both] = bytes(100, false);
        assert_eq!(forward, (3 * 2 * elements, 2 * elements + 4 * rows));
        // The output and three gradients, and three numbers for each row.
        assert_eq!(both, (4 * 2 * elements, 4 * 2 * elements + 12 * rows));
        assert_eq!(bytes(100, true)[1].1, both.1 + 4 * elements);
        assert_eq!(bytes(200, false)[1].1, 2 * both.1);

        let biased = Case::new(Dtype::BF16, [2, 4, 100, 64], true).with(Variant::Bias).problem().unwrap();
        assert_eq!(linear_bytes(&biased, Pass::Both, false), both.1 + 2 * 4 * 100 * 100);
    }
}
