//! `cargo run --release -p encoder` trains a classifier of texts on packed batches; `-- --kind padded` trains it with burn-nn's encoder.
//! `-- --compare` measures both, each in a process of its own.

use burn::tensor::Tensor;
use clap::Parser;
use encoder::compare::{Answer, Job, Kind};
use encoder::data::Data;
use encoder::packed::Packed;
use encoder::padded::Padded;
use encoder::train::{Classifier, Sizes, Trainer};
use example_support::device::{self, Found, Kind as DeviceKind};
use std::error::Error;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// Trains a classifier of texts. Defaults of sizes depend on the device.
#[derive(Clone, Parser)]
#[command(version)]
struct Args {
    /// The model: packed, or padded as before.
    #[arg(long, default_value = "packed")]
    kind: Kind,
    /// Measure time and memory of both instead.
    #[arg(long)]
    compare: bool,
    /// Where to compute: auto, or flex, wgpu, vulkan, metal, cuda, rocm as compiled in, with :N for the N-th.
    #[arg(long, default_value = "auto")]
    device: String,
    /// A folder with a folder of texts for each class [default: files of this workspace].
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Most tokens of a text.
    #[arg(long)]
    max_len: Option<usize>,
    /// Texts of a batch.
    #[arg(long)]
    batch: Option<usize>,
    /// Number of steps.
    #[arg(long)]
    steps: Option<u64>,
    /// Size of a token's vector.
    #[arg(long)]
    d_model: Option<usize>,
    /// Number of attention heads.
    #[arg(long)]
    n_heads: Option<usize>,
    /// Number of layers.
    #[arg(long)]
    n_layers: Option<usize>,
    /// Learning rate.
    #[arg(long, default_value_t = 1e-3)]
    learning_rate: f64,
    /// Measures the job on standard input: how `--compare` starts itself.
    #[arg(long, hide = true)]
    worker: bool,
}

fn main() -> ExitCode {
    let Err(error) = run(&Args::parse()) else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    ExitCode::from(2)
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let found = device::choose(&args.device)?;
    let large = matches!(found.kind, DeviceKind::Discrete | DeviceKind::Integrated);
    let default = |of_gpu, of_cpu| if large { of_gpu } else { of_cpu };
    let max_len = args.max_len.unwrap_or(default(1024, 192));
    let data = Data::read(args.data.as_deref(), max_len)?;
    if args.worker {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        let answer = serde_json::from_str::<Job>(&text)?.run(&data, &found.device.autodiff());
        println!("{}", serde_json::to_string(&answer)?);
        return Ok(());
    }
    let sizes = Sizes {
        d_model: args.d_model.unwrap_or(default(512, 96)),
        n_heads: args.n_heads.unwrap_or(default(8, 4)),
        n_layers: args.n_layers.unwrap_or(default(6, 2)),
        max_len,
        classes: data.names.len(),
    };
    if sizes.n_heads == 0 || !sizes.d_model.is_multiple_of(sizes.n_heads) {
        return Err(format!("--n-heads is {}; it must divide --d-model {}", sizes.n_heads, sizes.d_model).into());
    }
    let batch = args.batch.unwrap_or(default(64, 12));
    let steps = args.steps.unwrap_or(if large { 400 } else { 120 });
    for (name, value) in [("--batch", batch as u64), ("--steps", steps), ("--n-layers", sizes.n_layers as u64)] {
        if value == 0 {
            return Err(format!("{name} is 0; it must be at least 1").into());
        }
    }
    println!("device   {}", found.id);
    println!("classes  {}", data.names.join(", "));
    let warmup = if large { 20 } else { 3 };
    let job = Job { kind: args.kind, sizes, batch, steps, warmup, learning_rate: args.learning_rate };
    match (args.compare, args.kind) {
        (true, _) => compare(args, job, max_len),
        (false, Kind::Padded) => train::<Padded>(&job, &data, found),
        (false, Kind::Packed) => train::<Packed>(&job, &data, found),
    }
}

/// Trains, and prints the falling loss and the accuracy on texts for validation.
fn train<C: Classifier>(job: &Job, data: &Data, found: Found) -> Result<(), Box<dyn Error>> {
    let device = found.device.autodiff();
    device.seed(1);
    let mut trainer = Trainer::new(C::new(&job.sizes, &device), job.learning_rate, device.clone());
    let every = (job.steps / 10).max(1);
    let mut losses = Vec::new();
    for step in 0..job.steps {
        losses.push(trainer.step(&data.batch(job.batch, step, false)));
        if (step + 1) % every == 0 {
            let mean = Tensor::cat(std::mem::take(&mut losses), 0).mean().into_scalar::<f32>();
            println!("step {:>5}  loss {mean:.3}", step + 1);
        }
    }
    println!(
        "accuracy {:.1}%, by chance {:.1}%",
        100.0 * trainer.accuracy(data, job.batch, 8),
        100.0 / data.names.len() as f32
    );
    Ok(device.sync()?)
}

/// Measures both kinds and prints a table.
fn compare(args: &Args, job: Job, max_len: usize) -> Result<(), Box<dyn Error>> {
    let mut all = Vec::new();
    println!("\n| | step | tokens/s | positions computed a token | peak memory | first and last loss |");
    println!("|---|--:|--:|--:|--:|--:|");
    for kind in [Kind::Padded, Kind::Packed] {
        let Answer { losses, step, tokens_per_second, positions_per_token, peak } =
            measure(args, Job { kind, ..job }, max_len)?;
        let memory =
            peak.map_or("not known".into(), |peak| format!("{:.2} GiB", peak.bytes as f64 / f64::from(1 << 30)));
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        let name = if kind == Kind::Padded { "burn-nn, padded" } else { "flash attention, packed" };
        println!(
            "| {name} | {:.1} ms | {tokens_per_second:.0} | {positions_per_token:.2} | {memory} | {first:.4}, {last:.4} |",
            1e3 * step
        );
        all.push((tokens_per_second, peak));
    }
    let [(before, peak_before), (after, peak_after)] = all[..] else { return Ok(()) };
    println!("\n{:.2} times the tokens a second", after / before);
    if let (Some(before), Some(after)) = (peak_before, peak_after) {
        println!("{:.2} times the memory", after.bytes as f64 / before.bytes as f64);
    }
    Ok(())
}

/// The answer of a process of its own, whose memory is its own.
fn measure(args: &Args, job: Job, max_len: usize) -> Result<Answer, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--worker", "--device", &args.device, "--max-len", &max_len.to_string()]);
    if let Some(folder) = &args.data {
        command.arg("--data").arg(folder);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        serde_json::to_writer(&mut stdin, &job)?;
    }
    let output = child.wait_with_output()?;
    // Libraries may print other lines.
    let lines = String::from_utf8_lossy(&output.stdout);
    let answer = lines.lines().find_map(|line| serde_json::from_str(line).ok());
    answer.ok_or_else(|| format!("the {:?} model was not measured: {}", job.kind, output.status).into())
}
