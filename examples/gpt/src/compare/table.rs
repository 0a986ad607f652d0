//! Results as a Markdown table and as CSV.

use super::measure::Answer;
use crate::config::{AttentionKind, Config};
use crate::error::Error;
use crate::files::write_atomically;
use serde::Serialize;
use std::io;
use std::path::Path;

/// One measurement. Fields that were not measured are empty, and `note` gives the reason.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Row {
    pub device: String,
    pub burn: String,
    pub dtype: &'static str,
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub vocabulary: usize,
    pub seed: u32,
    pub warmup: usize,
    pub steps: usize,
    pub context: usize,
    pub batch: usize,
    pub checkpointing: bool,
    pub attention: String,
    /// Description of the kernels that compute attention.
    pub plan: String,
    /// Loss of the last step, whose batch the model has not been updated with. In nats per token.
    pub loss: Option<f32>,
    /// The implementation that losses are compared with.
    pub reference: Option<String>,
    /// Largest difference of the losses over all steps, in nats per token.
    pub loss_difference: Option<f32>,
    pub first_step_ms: Option<f64>,
    pub step_ms: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub peak_bytes: Option<u64>,
    pub reserved_bytes: Option<u64>,
    pub note: String,
}

/// Values common to all rows.
#[derive(Clone, Debug)]
pub struct Common {
    /// The device with its name.
    pub device: String,
    /// Burn's version.
    pub burn: String,
    /// Number of warm-up steps.
    pub warmup: usize,
}

/// The rows of one context, from each implementation's run and its result.
///
/// Losses are compared with the composed implementation's, which is the simplest; if it failed, with those of the first implementation that
/// did not.
pub fn rows(common: &Common, measured: &[(Config, String, Result<Answer, String>)]) -> Vec<Row> {
    let answers = || measured.iter().filter_map(|(config, _, answer)| Some((config.attention, answer.as_ref().ok()?)));
    let reference = answers().find(|(kind, _)| *kind == AttentionKind::Composed).or_else(|| answers().next());
    measured.iter().map(|(config, plan, answer)| row(common, config, plan, answer, reference)).collect()
}

fn row(
    common: &Common,
    config: &Config,
    plan: &str,
    answer: &Result<Answer, String>,
    reference: Option<(AttentionKind, &Answer)>,
) -> Row {
    let measured = answer.as_ref().ok();
    let peak = measured.and_then(|answer| answer.peak);
    Row {
        device: common.device.clone(),
        burn: common.burn.clone(),
        dtype: config.dtype.name(),
        layers: config.layers,
        heads: config.heads,
        width: config.width,
        vocabulary: config.vocabulary,
        seed: config.seed,
        warmup: common.warmup,
        steps: config.steps - common.warmup,
        context: config.context,
        batch: config.batch,
        checkpointing: config.checkpointing,
        attention: config.attention.name().to_string(),
        plan: plan.to_string(),
        loss: measured.and_then(|answer| answer.losses.last().copied()),
        reference: reference.map(|(kind, _)| kind.name().to_string()),
        loss_difference: measured.zip(reference).map(|(answer, (_, reference))| difference(answer, reference)),
        first_step_ms: measured.map(|answer| rounded(answer.first_step * 1e3)),
        step_ms: measured.map(|answer| rounded(answer.step * 1e3)),
        tokens_per_second: measured.map(|answer| rounded((config.batch * config.context) as f64 / answer.step)),
        peak_bytes: peak.map(|peak| peak.bytes),
        reserved_bytes: peak.and_then(|peak| peak.reserved),
        note: answer.as_ref().err().cloned().unwrap_or_default(),
    }
}

/// Rounds to thousandths, which is more precise than a measurement.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Largest absolute difference of the losses over all steps.
fn difference(answer: &Answer, reference: &Answer) -> f32 {
    let pairs = answer.losses.iter().zip(&reference.losses);
    pairs.map(|(loss, expected)| (loss - expected).abs()).fold(0.0, f32::max)
}

/// Titles of the printed columns, padded to the width of the column.
const TITLES: [&str; 9] =
    ["context", "batch", "attention", "   loss", "difference", "  step, ms", "  tokens/s", "peak memory, MiB", "note"];

/// Columns of text. All others contain numbers, which are right-aligned.
const WORDS: [&str; 2] = ["attention", "note"];

/// The first two lines of the table.
pub fn head() -> String {
    let rule = |title: &str| match WORDS.contains(&title) {
        true => "-".repeat(title.len()),
        false => "-".repeat(title.len() - 1) + ":",
    };
    format!("{}\n{}", line(TITLES.map(str::to_string)), line(TITLES.map(rule)))
}

/// Explains the columns, with the unit of losses and the meaning of memory.
pub fn legend(unit: &str, memory: &str) -> String {
    format!(
        "loss: after all steps, in nats per {unit}; difference: the largest of any step to the reference's;\n\
         step: the median; peak memory: {memory}"
    )
}

/// A row as a line of the table. A failed measurement has a note with the reason instead of numbers.
pub fn body(row: &Row) -> String {
    let show = |value: Option<f64>, digits: usize| value.map_or("-".to_string(), |value| format!("{value:.digits$}"));
    let is_reference = row.reference.as_ref() == Some(&row.attention);
    let difference = match row.loss_difference {
        Some(_) if is_reference => "reference".to_string(),
        Some(0.0) => "0".to_string(),
        Some(difference) => format!("{difference:.1e}"),
        None => "-".to_string(),
    };
    line([
        row.context.to_string(),
        row.batch.to_string(),
        row.attention.clone(),
        show(row.loss.map(f64::from), 4),
        difference,
        show(row.step_ms, 2),
        show(row.tokens_per_second, 0),
        show(row.peak_bytes.map(|bytes| bytes as f64 / (1 << 20) as f64), 1),
        // A bar would start another cell.
        row.note.replace('|', "/"),
    ])
}

fn line(cells: [String; TITLES.len()]) -> String {
    let padded = cells.iter().zip(TITLES).map(|(cell, title)| match WORDS.contains(&title) {
        true => format!("{cell:<width$}", width = title.len()),
        false => format!("{cell:>width$}", width = title.len()),
    });
    format!("| {} |", padded.collect::<Vec<_>>().join(" | "))
}

/// Writes all rows.
///
/// # Errors
///
/// If the file cannot be written.
pub fn write(path: &Path, rows: &[Row]) -> Result<(), Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row).map_err(|error| Error::io(path)(io::Error::other(error)))?;
    }
    let bytes = writer.into_inner().map_err(|error| Error::io(path)(error.into_error()))?;
    write_atomically(path, &[&bytes])
}
