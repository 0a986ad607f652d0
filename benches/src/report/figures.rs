//! Figures of the report, with their titles and notes.

use super::bars::{self, Bar, Row};
use super::chart::{Chart, Scale};
use super::commits::Commits;
use super::model::{Machine, Problem, Results, Roofs, Who, by_who, distinct, latest, passes, timed_by};
use super::numbers::{bytes, length, number};
use super::studies::{self, Study};
use super::{lines, tiles};
use crate::results::{COPY, Call, Moved, TileTiming, Timing};

/// A chart in one or more views.
#[derive(Default)]
pub struct Figure {
    /// Title.
    pub title: String,
    /// Device and runtime, if the title does not name them.
    pub machine: String,
    /// Views; the reader can choose if there are several.
    pub views: Vec<Chart>,
    /// Measurements without a value, and the reasons.
    pub missing: Vec<String>,
    /// What the rates are compared with.
    pub roof: &'static str,
    /// Rows of a map of tiles.
    pub tiles: Vec<TileTiming>,
    /// Commits of the rows of ours.
    pub commits: Commits,
}

impl Figure {
    /// Lines above each chart.
    pub fn heading(&self) -> Vec<String> {
        let lines = [self.title.clone(), self.machine.clone(), self.commits.text()];
        lines.into_iter().filter(|line| !line.is_empty()).collect()
    }
}

/// A quantity that is drawn along an axis.
struct Measure {
    class: &'static str,
    label: &'static str,
    scale: Scale,
    of: fn(&Timing, &Roofs) -> Option<f64>,
    text: fn(f64) -> String,
    /// The same of a copy in the row's run, drawn as a line of its own.
    copy: fn(&Timing, &Roofs) -> Option<f64>,
}

const RATE: Measure = Measure {
    class: "rate",
    label: "TFLOP/s",
    scale: Scale::Linear,
    of: |row, _| row.tflops,
    text: number,
    copy: |_, _| None,
};
const TIME: Measure =
    Measure { class: "time", label: "milliseconds, median", scale: Scale::Log, of: |row, _| row.median_ms, ..RATE };
const FRACTION: Measure = Measure {
    class: "fraction",
    label: "percent of the matmul's TFLOP/s",
    of: |row, roofs| Some(100.0 * roofs.part_of_product(row)?),
    text: |percent| format!("{percent:.1}%"),
    ..RATE
};
const BANDWIDTH: Measure =
    Measure { label: "GB/s", of: |row, _| row.gigabytes_per_second(), copy: |row, roofs| roofs.copy(&row.run), ..RATE };
const PART_OF_COPY: Measure = Measure {
    class: "fraction",
    label: "percent of the copy's GB/s",
    of: |row, roofs| Some(100.0 * roofs.part_of_copy(row)?),
    ..FRACTION
};
const PEAK: Measure = Measure {
    class: "peak",
    label: "peak memory in use",
    scale: Scale::Bytes,
    of: |row, _| row.peak_bytes.map(|size| size as f64),
    text: bytes,
    ..RATE
};

/// Time, rate and fraction of the roofline over sequence length.
pub fn sequences(results: &Results, machine: &Machine, roofs: &Roofs) -> Vec<Figure> {
    let studies = studies::sequences(machine);
    studies.iter().filter_map(|study| lines_of(results, machine, study, roofs, measures(study))).collect()
}

/// Bandwidth, time and fraction of the copy's bandwidth for decoding steps; rate, time and fraction of the roofline for all else.
fn measures(study: &Study) -> &'static [Measure] {
    if decodes(study) { &[BANDWIDTH, TIME, PART_OF_COPY] } else { &[RATE, TIME, FRACTION] }
}

fn decodes(study: &Study) -> bool {
    study.rows.iter().all(|row| row.is_decoding())
}

/// The same for decoding steps over their keys, with a panel for each batch.
pub fn decoding(results: &Results, machine: &Machine, roofs: &Roofs) -> Vec<Figure> {
    let of_study = |study: &Study| {
        let mut batches = distinct(study.rows.iter().map(|row| row.batch));
        batches.sort();
        let panel = |batch: &usize| {
            let rows: Vec<&Timing> = study.rows.iter().copied().filter(|row| row.batch == *batch).collect();
            Panel {
                title: format!("batch {batch}"),
                rows: by_who(&rows, &rows, |row| [&row.r#impl, "", "", ""]),
                end: None,
            }
        };
        figure(results, machine, study, roofs, measures(study), batches.iter().map(panel).collect())
    };
    studies::decoding(machine).iter().filter_map(of_study).collect()
}

/// Time, rate and fraction of the roofline over every other axis.
pub fn scaling(results: &Results, machine: &Machine, roofs: &Roofs) -> Vec<Figure> {
    let studies = studies::scaling(machine);
    studies.iter().filter_map(|study| lines_of(results, machine, study, roofs, measures(study))).collect()
}

/// Memory over sequence length.
pub fn memory(results: &Results, machine: &Machine, roofs: &Roofs) -> Vec<Figure> {
    let studies = studies::sequences(machine);
    studies.iter().filter_map(|study| lines_of(results, machine, study, roofs, &[PEAK])).collect()
}

/// A panel of a figure: the rows of each implementation, and the mark where a line ends.
struct Panel<'a> {
    title: String,
    rows: Vec<(Who, Vec<&'a Timing>)>,
    end: Option<(usize, &'static str, String)>,
}

/// A failure: the implementation, its place on the axis, and the reason.
type Failure<'a> = (String, String, &'a str);

/// A figure with a panel for each pass.
fn lines_of(
    results: &Results,
    machine: &Machine,
    study: &Study,
    roofs: &Roofs,
    measures: &[Measure],
) -> Option<Figure> {
    let panel = |pass: &str| Panel {
        title: pass.into(),
        rows: by_who(&rows_of_pass(&study.rows, pass), &study.rows, timed_by),
        end: composed_end(results, study, pass),
    };
    let panels = passes(study.rows.iter().map(|row| row.pass.as_str())).into_iter().map(panel).collect();
    figure(results, machine, study, roofs, measures, panels)
}

fn figure(
    results: &Results,
    machine: &Machine,
    study: &Study,
    roofs: &Roofs,
    measures: &[Measure],
    panels: Vec<Panel>,
) -> Option<Figure> {
    let view = |measure: &Measure| {
        let line = |(who, rows): &(Who, Vec<&Timing>)| {
            let mut points: Vec<lines::Point> = rows.iter().map(|row| point(measure, study, row, roofs)).collect();
            points.sort_by_key(|point| point.x);
            lines::Line { who: who.clone(), points }
        };
        let plot = |panel: &Panel| lines::Plot {
            title: panel.title.clone(),
            lines: panel.rows.iter().map(line).chain(copy_line(measure, study, panel, roofs)).collect(),
            end: panel.end.clone(),
        };
        let plots = panels.iter().map(plot).collect();
        lines::chart(measure.class, [study.axis.label, measure.label], measure.scale, plots)
    };
    let views: Vec<_> = measures.iter().filter_map(view).collect();
    let mut failures: Vec<(Failure, Vec<&str>)> = Vec::new();
    for panel in &panels {
        for (who, rows) in &panel.rows {
            let failed = || rows.iter().filter(|row| row.median_ms.is_none());
            for reason in distinct(failed().map(|row| results.reason(row))) {
                let places = failed().filter(|row| results.reason(row) == reason);
                let places: Vec<String> = places.map(|row| length((study.axis.of)(row))).collect();
                let failure = (who.label.clone(), places.join(", "), reason);
                match failures.iter_mut().find(|(other, _)| *other == failure) {
                    Some((_, titles)) => titles.push(&panel.title),
                    None => failures.push((failure, vec![&panel.title])),
                }
            }
        }
    }
    let missing = failures.iter().map(|((who, places, reason), titles)| {
        format!("{who}, {}, at {} {places}: {reason}", titles.join(", "), study.axis.label)
    });
    let missing = missing.collect();
    let title = study.fixed.to_string();
    let commits = Commits::of(study.rows.iter().copied());
    let roof = if decodes(study) { "copy" } else { "product of matrices" };
    let figure = Figure { title, machine: machine.title(), views, missing, roof, commits, ..Default::default() };
    Some(figure).filter(|figure| !figure.views.is_empty())
}

fn point(measure: &Measure, study: &Study, row: &Timing, roofs: &Roofs) -> lines::Point {
    let y = (measure.of)(row, roofs);
    let spread = match (measure.class, row.p20_ms, row.p80_ms) {
        ("time", Some(p20), Some(p80)) => format!(" (p20 {}, p80 {})", number(p20), number(p80)),
        _ => String::new(),
    };
    lines::Point { x: (study.axis.of)(row), y, text: y.map_or(String::new(), measure.text) + &spread }
}

/// The copies in the runs of a panel's rows, if the measure is also one of a copy.
fn copy_line(measure: &Measure, study: &Study, panel: &Panel, roofs: &Roofs) -> Option<lines::Line> {
    let rows = || panel.rows.iter().flat_map(|(_, rows)| rows);
    let mut places = distinct(rows().map(|row| (study.axis.of)(row)));
    places.sort();
    let point = |place: usize| {
        let y = rows().filter(|row| (study.axis.of)(row) == place).find_map(|row| (measure.copy)(row, roofs));
        lines::Point { x: place, y, text: y.map_or(String::new(), measure.text) }
    };
    let points: Vec<lines::Point> = places.into_iter().map(point).collect();
    let who = Who { label: "copy, read and written".into(), class: COPY, dash: 1 };
    points.iter().any(|point| point.y.is_some()).then_some(lines::Line { who, points })
}

/// Length from which the composed implementation no longer fits into memory.
fn composed_end(results: &Results, study: &Study, pass: &str) -> Option<(usize, &'static str, String)> {
    let failed = |row: &&&Timing| {
        (row.r#impl.as_str(), row.pass.as_str()) == ("composed", pass)
            && row.median_ms.is_none()
            && results.reason(row).starts_with("out of memory")
    };
    let place = study.rows.iter().filter(failed).map(|row| (study.axis.of)(row)).min()?;
    Some((place, "composed", "composed: out of memory".into()))
}

fn rows_of_pass<'a>(rows: &[&'a Timing], pass: &str) -> Vec<&'a Timing> {
    rows.iter().copied().filter(|row| row.pass == pass).collect()
}

/// Rates with each variant of a problem.
pub fn variants(results: &Results, machine: &Machine) -> Vec<Figure> {
    let bare = |row: &Timing| Problem { variant: String::new(), ..Problem::from(row) };
    let varied = distinct(machine.attention().filter(|row| row.variant != "none").map(bare));
    let figure = |problem: Problem| {
        let rows: Vec<&Timing> = machine.attention().filter(|row| bare(row) == problem).collect();
        let mut variants = distinct(rows.iter().map(|row| row.variant.as_str()));
        variants.sort_by_key(|variant| *variant != "none");
        let bar = |(who, rows): (Who, Vec<&Timing>)| {
            let row = rows.first()?;
            let value = row.tflops.ok_or_else(|| results.reason(row).to_string());
            Some(Row::Bar(Bar { who, value, points: Vec::new() }))
        };
        let plot = |pass: &str| {
            let of_pass = rows_of_pass(&rows, pass);
            let group = |variant: &&str| {
                let of_variant: Vec<&Timing> = of_pass.iter().copied().filter(|row| row.variant == *variant).collect();
                let heading = (!of_variant.is_empty()).then(|| Row::Heading(variant.to_string()));
                heading.into_iter().chain(by_who(&of_variant, &rows, timed_by).into_iter().filter_map(bar))
            };
            let rows = variants.iter().flat_map(|variant| group(variant).collect::<Vec<_>>()).collect();
            bars::Plot { title: pass.into(), rows }
        };
        let plots = passes(rows.iter().map(|row| row.pass.as_str())).into_iter().map(plot).collect();
        let views = vec![bars::chart("variants", "TFLOP/s", Scale::Linear, plots)?];
        let (title, machine) = (problem.to_string(), machine.title());
        Some(Figure { title, machine, views, commits: Commits::of(rows), ..Default::default() })
    };
    varied.into_iter().filter_map(figure).collect()
}

/// Time of the first call, and host time of each launch.
pub fn calls(results: &Results, machine: &Machine) -> Vec<Figure> {
    let runs = distinct(machine.rows.iter().map(|row| row.run.as_str()));
    let calls: Vec<&Call> = results.calls.iter().filter(|call| runs.contains(&call.run.as_str())).collect();
    let figure = |title: &str, label: &'static str, of: fn(&Call) -> Option<f64>| {
        let bar = |(who, calls): (Who, Vec<&Call>)| {
            let point = |call: &&Call| Some((of(call)?, Problem::from(*call).to_string()));
            let mut points: Vec<_> = calls.iter().filter_map(point).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let value = points.get(points.len() / 2)?.0;
            Some(Row::Bar(Bar { who, value: Ok(value), points }))
        };
        let plot = |pass: &str| {
            let rows: Vec<&Call> = calls.iter().copied().filter(|call| call.pass == pass).collect();
            let who = by_who(&rows, &calls, |call| [&call.r#impl, &call.kernel, "", &call.pass]);
            let rows: Vec<Row> = who.into_iter().filter_map(bar).collect();
            (!rows.is_empty()).then(|| bars::Plot { title: pass.into(), rows })
        };
        let passes = passes(calls.iter().map(|call| call.pass.as_str()));
        let plots = passes.into_iter().filter_map(plot).collect();
        let views = vec![bars::chart("calls", label, Scale::Log, plots)?];
        let commits = Commits::of(machine.rows.iter().copied().filter(|row| row.pass == title));
        Some(Figure { title: title.into(), machine: machine.title(), views, commits, ..Default::default() })
    };
    let first = figure("First call", "milliseconds", |call| call.first_call_ms);
    let host = figure("Host time of a launch", "microseconds", |call| call.host_us);
    first.into_iter().chain(host).collect()
}

/// Tile sweeps: a map for each kernel, and a figure for each problem.
pub fn tiles(rows: &[TileTiming]) -> Vec<Figure> {
    let problem = |row: &TileTiming| {
        let TileTiming { batch, heads_q, seq_q, head_dim, .. } = row;
        let causal = if row.causal { "causal" } else { "full" };
        format!("{}, {}: {} [{batch}, {heads_q}, {seq_q}, {head_dim}] {causal}", row.device, row.runtime, row.dtype)
    };
    let rows = latest(rows, |row| (problem(row), row.kernel.clone(), row.tile_q, row.tile_k, row.shape.clone()));
    let figure = |title: String| {
        let rows: Vec<&TileTiming> = rows.iter().copied().filter(|row| problem(row) == title).collect();
        let (views, commits) = (vec![tiles::chart(&rows)], Commits::of_tiles(rows.iter().copied()));
        Figure { title, views, tiles: rows.into_iter().cloned().collect(), commits, ..Default::default() }
    };
    distinct(rows.iter().map(|row| problem(row))).into_iter().map(figure).collect()
}

/// Bytes moved compared with the IO model's, over the tile and over the length.
pub fn moved(rows: &[Moved]) -> Vec<Figure> {
    type Field = fn(&Moved) -> usize;
    let axes: [(&'static str, Field, Field, &str); 2] = [
        ("queries of a tile", |row| row.tile_q, |row| row.seq_q, "sequence"),
        ("sequence length", |row| row.seq_q, |row| row.tile_q, "tile_q"),
    ];
    let key = |row: &Moved| {
        let Moved { batch, heads_q, head_dim, .. } = row;
        let causal = if row.causal { "causal" } else { "full" };
        format!("{}: {} [{batch}, {heads_q}, s, {head_dim}] {causal}", row.device, row.dtype)
    };
    let rows = latest(rows, |row| (key(row), row.kernel.clone(), row.tile_q, row.seq_q));
    let mut figures = Vec::new();
    for (label, x, other, name) in axes {
        let title = |row: &Moved| format!("{}, {name} {}", key(row), other(row));
        for title_of in distinct(rows.iter().map(|row| title(row))) {
            let rows: Vec<&Moved> = rows.iter().copied().filter(|row| title(row) == title_of).collect();
            let plot = |kernel: &str| {
                let mut rows: Vec<&Moved> = rows.iter().copied().filter(|row| row.kernel == kernel).collect();
                rows.sort_by_key(|row| x(row));
                (rows.len() > 1).then(|| moved_plot(kernel, &rows, x))
            };
            let kernels = distinct(rows.iter().map(|row| row.kernel.as_str()));
            let plots = kernels.into_iter().filter_map(plot).collect();
            let view = lines::chart("moved", [label, "bytes of one launch"], Scale::Bytes, plots);
            figures.extend(view.map(|view| Figure { title: title_of, views: vec![view], ..Default::default() }));
        }
    }
    figures
}

fn moved_plot(kernel: &str, rows: &[&Moved], x: fn(&Moved) -> usize) -> lines::Plot {
    type Field = fn(&Moved) -> u64;
    let kinds: [(&str, &'static str, usize, Field); 3] = [
        ("device memory, measured", "dram", 0, |row| row.dram_bytes),
        ("L2, measured", "l2", 0, |row| row.l2_bytes),
        ("IO model", "model", 1, |row| row.model_bytes),
    ];
    let line = |(label, class, dash, of): (&str, &'static str, usize, Field)| {
        let point = |row: &&Moved| {
            let value = of(row) as f64;
            let of_model = value / row.model_bytes.max(1) as f64;
            let text = format!("{} ({} of the model's)", bytes(value), number(of_model));
            lines::Point { x: x(row), y: Some(value), text }
        };
        let who = Who { label: label.into(), class, dash };
        lines::Line { who, points: rows.iter().map(point).collect() }
    };
    lines::Plot { title: kernel.into(), lines: kinds.into_iter().map(line).collect(), end: None }
}

/// A title as part of a file name.
pub fn slug(title: &str) -> String {
    let words = title.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}
