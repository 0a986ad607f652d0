//! `cargo run --release -p gpt` trains a GPT with flash attention and shows that it learns.
//!
//! [`model`] is the model and [`train`] the loop; the rest is what a run needs around them.

mod checkpoint;
mod config;
mod data;
mod device;
mod error;
mod losses;
mod model;
mod optimizer;
mod plot;
mod run;
mod sample;
mod train;

use burn::module::Module;
use checkpoint::{Checkpoint, write_atomically};
use clap::Parser;
use config::{Args, Config};
use data::{Stream, Text};
use error::Error;
use model::Gpt;
use run::Run;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use train::Outcome;

fn main() -> ExitCode {
    match start() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn start() -> Result<ExitCode, Error> {
    let args = parse()?;

    // -- the run: what it is, where it computes, what it reads
    let resumed = match args.resume {
        true => {
            let run = Run::find(args.name.as_deref())?;
            let checkpoint = Checkpoint::load(&run.latest())?;
            Some((checkpoint.header.config.clone().resume(&args, &run.directory)?, run, checkpoint))
        }
        false => None,
    };
    let request = resumed.as_ref().map(|(config, ..)| &config.device).or(args.device.as_ref());
    let found = device::choose(request.map_or("auto", String::as_str))?;
    println!("device     {found}");
    let (config, run, text, checkpoint) = match resumed {
        Some((config, run, checkpoint)) => {
            let text = Text::read(&config.data.clone().unwrap_or(run.text()), config.context)?;
            checkpoint.check_text(text.hash())?;
            (config, run, text, Some(checkpoint))
        }
        None => {
            let config = Config::new(&args, &found)?;
            let (run, text) = match &config.data {
                Some(path) => {
                    let text = Text::read(path, config.context)?;
                    (Run::create(args.name.as_deref())?, text)
                }
                None => {
                    let text = Text::new(data::own_sources()?, ".".as_ref(), config.context)?;
                    let run = Run::create(args.name.as_deref())?;
                    write_atomically(&run.text(), &[&text.bytes])?;
                    (run, text)
                }
            };
            (config, run, text, None)
        }
    };
    let device = found.device.clone();
    if !device.supports_dtype(config.dtype.float()) {
        return Err(Error::Dtype { dtype: config.dtype.name(), device: found.to_string() });
    }
    let toml = toml::to_string(&config).expect("a configuration is a table of plain values");
    write_atomically(&run.config(), &[toml.as_bytes()])?;

    println!("attention  {}", model::attention_plan(&config, &device)?);
    println!(
        "model      {} layers, {} heads, width {}, context {}, {}",
        config.layers,
        config.heads,
        config.width,
        config.context,
        config.dtype.name()
    );
    println!("text       {} bytes to train on, {} to validate with", text.train().len(), text.validation().len());
    println!("run        {}", run.directory.display());
    if let Some(checkpoint) = &checkpoint {
        println!("resume     at step {} of {}", checkpoint.header.step, config.steps);
    }

    // -- training
    let stop = stop_on_signal();
    let outcome = train::train(&config, &text, &run, checkpoint, &device.clone().autodiff(), &stop)?;
    if let Outcome::Interrupted(step) = outcome {
        println!("stopped at step {step} with a checkpoint; go on with --resume");
        return Ok(ExitCode::from(130));
    }

    // -- what came of it: the best model's loss, and what it writes
    let best = Checkpoint::load(&run.best())?;
    let step = best.header.step;
    let (model, _) = best.restore(Gpt::new(&config, &device.clone().autodiff()))?;
    let model = model.valid();
    // Not the batches that chose it, which flatter it.
    let loss = train::evaluate(&model, &text, &config, Stream::FinalBatch, &device);
    println!("best validation loss {loss:.4} nats per byte, over {} batches, at step {step}", config.eval_batches);
    println!("see {} and {}", run.picture().display(), run.losses().display());
    if config.sample_bytes > 0 {
        println!("\nit writes:\n{}", sample::sample(&model, &config, &device));
    }
    Ok(ExitCode::SUCCESS)
}

/// The command line. What is wrong with it is one sentence, as any other error is.
fn parse() -> Result<Args, Error> {
    Args::try_parse().map_err(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        let message = error.to_string();
        let first = message.lines().next().unwrap_or_default();
        Error::Arguments(first.trim_start_matches("error: ").to_string())
    })
}

/// A first Ctrl-C asks the loop to save and stop; a second one ends the program.
fn stop_on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    let handler = move || {
        if asked.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    // Without a handler Ctrl-C still ends the program, and the latest checkpoint is there.
    let _ = ctrlc::set_handler(handler);
    stop
}
