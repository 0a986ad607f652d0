//! Comparison of implementations of attention: the same model, with the same weights and batches, at several contexts.

mod measure;
mod memory;
mod plot;
mod settings;
mod table;

pub use measure::work;
pub use settings::Args;

use crate::config::Config;
use crate::data::{self, Text};
use crate::device::{self, Found};
use crate::error::Error;
use crate::files::write_atomically;
use crate::model::attention_plan;
use burn::tensor::Device;
use indicatif::{ProgressBar, ProgressStyle};
use measure::{Job, measure};
use settings::Settings;
use std::fs;
use std::path::Path;
use std::time::Duration;
use table::{Common, Row};

/// A run, and a description of the kernels that will compute its attention.
type Planned = (Config, String);

/// Runs all measurements, prints the results and writes them to the directory.
///
/// A measurement that fails becomes a row with the reason.
///
/// # Errors
///
/// If an argument is wrong, before anything is measured, or a file cannot be written.
pub fn run(args: &Args) -> Result<(), Error> {
    let found = device::choose(&args.device)?;
    let settings = Settings::new(&args.settings, &found)?;
    let planned = prepare(args, &settings, &found)?;

    let common = Common { device: found.to_string(), burn: burn_version(), warmup: settings.warmup };
    let heading = heading(&common, args, &settings);
    println!("{heading}\n\n{}", table::head());
    let bar = ProgressBar::new((settings.contexts.len() * args.attention.len()) as u64).with_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}").expect("the template is well-formed"),
    );
    let limit = Duration::from_secs(args.limit);
    let (results, picture) = (args.out.join("compare.csv"), args.out.join("compare.svg"));
    let mut rows = Vec::new();
    for kinds in planned {
        let added = measure_kinds(kinds, &common, limit, &args.out, &bar);
        bar.suspend(|| added.iter().for_each(|row| println!("{}", table::body(row))));
        rows.extend(added);
        table::write(&results, &rows)?;
        plot::plot(&picture, &heading, &rows)?;
    }
    bar.finish_and_clear();
    println!("\n{}", table::legend(settings.tokenizer.unit(), memory::meaning(found.strength)));
    println!("see {} and {}", picture.display(), results.display());
    Ok(())
}

/// Checks all runs, then writes the text. Returns, for each context, the run of each implementation and a description of its kernels.
fn prepare(args: &Args, settings: &Settings, found: &Found) -> Result<Vec<Vec<Planned>>, Error> {
    let own_text = args.out.join("text.txt");
    let configs = args.configs(settings, found, args.data.as_ref().unwrap_or(&own_text))?;
    let text = text(args, settings)?;
    let planned = plan(configs, &found.device)?;
    fs::create_dir_all(&args.out).map_err(Error::io(&args.out))?;
    if args.data.is_none() {
        // A copy, because the sources may change during the comparison.
        write_atomically(&own_text, &[&text.bytes])?;
    }
    Ok(planned)
}

/// Measures each implementation at one context. The output of failed processes is written to files in `out`.
fn measure_kinds(kinds: Vec<Planned>, common: &Common, limit: Duration, out: &Path, bar: &ProgressBar) -> Vec<Row> {
    let measured = kinds.into_iter().map(|(config, plan)| {
        let kind = format!("{:?}", config.attention).to_lowercase();
        bar.set_message(format!("{kind} at {} tokens", config.context));
        let log = out.join(format!("{kind}-{}.log", config.context));
        let answer = measure(&Job { config: config.clone(), warmup: common.warmup }, limit, &log);
        bar.inc(1);
        (config, plan, answer)
    });
    table::rows(common, &measured.collect::<Vec<_>>())
}

/// The training text, long enough for every context.
fn text(args: &Args, settings: &Settings) -> Result<Text, Error> {
    let longest = settings.contexts.iter().copied().max().unwrap_or_default();
    match &args.data {
        Some(path) => Text::read(path, settings.tokenizer, longest),
        None => Text::new(data::own_sources()?, Path::new("."), settings.tokenizer, longest),
    }
}

/// Adds to each run a description of the kernels that will compute its attention.
fn plan(configs: Vec<Vec<Config>>, device: &Device) -> Result<Vec<Vec<Planned>>, Error> {
    let with_plan = |config: Config| {
        let plan = attention_plan(&config, device)?;
        Ok((config, plan))
    };
    let of_context = |kinds: Vec<Config>| kinds.into_iter().map(with_plan).collect();
    let planned = configs.into_iter().map(of_context).collect::<Result<_, Error>>()?;
    // Other processes run the measurements, so this one frees its memory.
    device.memory_cleanup();
    Ok(planned)
}

fn heading(common: &Common, args: &Args, settings: &Settings) -> String {
    let Settings { layers, heads, width, warmup, steps, .. } = settings;
    let blocks = if args.checkpointing { "gradient checkpointing, " } else { "" };
    format!(
        "{}, {}, {layers} layers, {heads} heads, width {width}, vocabulary {}, {blocks}Burn {}, {steps} steps after {warmup} to warm up",
        common.device,
        settings.dtype.name(),
        settings.tokenizer.vocabulary(),
        common.burn,
    )
}

/// Burn's version, which the workspace pins.
fn burn_version() -> String {
    let manifest: toml::Table = include_str!("../../../../Cargo.toml").parse().expect("the manifest was read by Cargo");
    let version = manifest["workspace"]["dependencies"]["burn"]["version"].as_str();
    version.unwrap_or_default().trim_start_matches('=').to_string()
}
