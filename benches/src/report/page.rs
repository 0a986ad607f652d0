//! The report page: figures and tables in order, in one self-contained file.

use super::commits::{Allow, Commits};
use super::figures::{self, Figure};
use super::model::{Machine, Problem, Results, Roofs, distinct, latest};
use super::numbers::{bytes, number, thousands};
use crate::error::Error;
use crate::results::{Accuracy, Memory, TileTiming, Timing, path};
use std::fmt::Write;
use std::path::Path;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

const SEQUENCE: &str = "Device time of one call once warm, median of the samples. TFLOP/s are operations as the field \
    counts them over that time: 4 · b · h · s² · d forward, half of it where causal, 2.5 times the forward's for the \
    backward, 3.5 for both. The third view divides them by those of the fastest product of matrices of the same type in \
    the same run. [b, h, s, d] are batch, heads, sequence length and head_dim; a letter is what varies.";
const DECODING: &str = "A forward of few queries over many keys, which reads its cache once: the bytes of q, k, v and o, each number once, \
    over the time of a call that a graph repeats, without its launches. The third view divides them by the bytes that a copy within the \
    device's memory reads and writes in that time, in the same run; what only reads can be faster.";
const SCALING: &str = "The same, where one other axis varies and all else stays.";
const MEMORY: &str = "The largest number of bytes in use after any allocation of the call, inputs included; both axes \
    logarithmic. At one batch the matrix of scores grows with s², all else with s.";
const VARIANTS: &str = "Rates of one problem with what else may be asked of its scores. Under a window, and where blocks are sparse \
    (so many of a hundred), only pairs that see each other count. A function is written by the user, and counts as the option of its \
    name.";
const CALLS: &str = "A dot for each problem, a bar to their median; logarithmic. The first call runs until the device has \
    finished, compilation and autotuning included. Host time is from the call's entry to its return, once warm.";
const TILES: &str = "The best shape for each size of tiles, the fuller its color the faster, outlined where <code>tiling.rs</code> \
    chooses a shape of that size. The table has all shapes with their registers and shared memory.";
const MOVED: &str = "Bytes of one launch that the profiler counted, beside the IO model of FlashAttention (\
    <a href=\"https://arxiv.org/abs/2205.14135\">arXiv:2205.14135</a>, theorem 2): each query block reads all the keys \
    and values that it sees. What L2 serves again does not reach the device's memory.";

const ERRORS: &str = "Of each result, against f64, in blocks of up to 64 rows of the first and the last head: the largest relative \
    error in the norm (of lse relative to 1 + |lse|).";

const BEYOND: &str = "The most bytes in use at any launch of a call in a process of its own, less those of the inputs, beside \
    what must be held: the output, lse, the gradients and two f32 a row, and for an order of the backward that is not fixed \
    dq in f32. What the runtime reserves includes what it keeps for later.";

/// A chart in its own file: its name, its SVG text, and the commits of its rows of ours.
pub struct Alone {
    pub name: String,
    pub text: String,
    pub commits: Commits,
}

/// Returns the page and the charts for files of their own.
///
/// # Errors
///
/// If a chart would show rows of ours that are not allowed.
pub fn page(directory: &Path, all: &[Results], roofs: &Roofs, allow: Allow) -> Result<(String, Vec<Alone>), Error> {
    let (mut html, mut pictures) = (String::new(), Vec::new());
    for results in all {
        let _ = write!(html, "<section id=\"{0}\"><h2>{0}</h2>", escape(&results.name));
        let machines = results.machines();
        let file = path::<Timing>(directory, &results.name);
        for machine in &machines {
            let alone = machines.len() == 1;
            let of_machine = || format!("{} {} {}", results.name, machine.device, machine.runtime);
            let place = if alone { results.name.clone() } else { of_machine() };
            let _ = write!(html, "<h3>{}</h3>{}", escape(&machine.title()), best(machine));
            for (heading, about, figures, keep) in [
                ("Sequence length", SEQUENCE, figures::sequences(results, machine, roofs), true),
                ("Decoding", DECODING, figures::decoding(results, machine, roofs), true),
                ("Scaling", SCALING, figures::scaling(results, machine, roofs), false),
                ("Memory", MEMORY, figures::memory(results, machine, roofs), true),
                ("Variants", VARIANTS, figures::variants(results, machine), true),
                ("Calls", CALLS, figures::calls(results, machine), false),
            ] {
                check(&figures, heading, &file, allow)?;
                html += &section(heading, about, &figures)?;
                if keep {
                    save(&mut pictures, &place, &figures)?;
                }
            }
        }
        let tiles = figures::tiles(&results.tiles);
        check(&tiles, "tiles", &path::<TileTiming>(directory, &results.name), allow)?;
        let memory = latest_memory(&results.memory);
        let file = path::<Memory>(directory, &results.name);
        Commits::of_memory(memory.iter().copied()).check(&file, "the table of memory beyond the inputs", allow)?;
        for (heading, about, figures) in
            [("Tiles", TILES, tiles), ("Bytes moved", MOVED, figures::moved(&results.moved))]
        {
            html += &section(heading, about, &figures)?;
            save(&mut pictures, &results.name, &figures)?;
        }
        html += &(beyond(&memory) + &errors(&results.errors) + "</section>");
    }
    let links: String = all.iter().map(|results| format!("<a href=\"#{0}\">{0}</a>", escape(&results.name))).collect();
    let views = [("rate", "TFLOP/s", " checked"), ("time", "time", ""), ("fraction", "of matmul or copy", "")].map(
        |(id, name, checked)| {
            format!("<label><input type=\"radio\" name=\"view\" id=\"view-{id}\"{checked}>{name}</label>")
        },
    );
    let page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
        <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
        <title>FlashAttention in CubeCL, measured</title><style>\n{STYLE}</style></head><body>\
        <h1>FlashAttention in CubeCL, measured</h1>\
        <p class=\"lead\">Time, memory and traffic of attention kernels for Burn, beside those of others. Charts never \
        join what was measured on different devices or with different runtimes.</p>{}\
        <nav>{links}<a href=\"#rows\">all rows</a><fieldset aria-label=\"What charts over an axis show\">{}</fieldset></nav>\
        {html}{}<script>\n{SCRIPT}</script></body></html>\n",
        runs(all),
        views.concat(),
        rows(all, roofs)
    );
    Ok((page, pictures))
}

/// Refuses figures that show rows of a file that are not allowed.
fn check(figures: &[Figure], heading: &str, file: &Path, allow: Allow) -> Result<(), Error> {
    figures.iter().try_for_each(|figure| {
        let names = [heading, &figure.title, &figure.machine].into_iter().filter(|name| !name.is_empty());
        figure.commits.check(file, &format!("the chart of {},", names.collect::<Vec<_>>().join(", ")), allow)
    })
}

/// Adds the first view of each figure as a chart in its own file.
fn save(pictures: &mut Vec<Alone>, place: &str, figures: &[Figure]) -> Result<(), Error> {
    for (figure, view) in figures.iter().filter_map(|figure| Some((figure, figure.views.first()?))) {
        let name = format!("{}-{}.svg", figures::slug(&format!("{place} {}", figure.title)), view.class);
        pictures.push(Alone { name, text: view.svg(&figure.heading())?, commits: figure.commits.clone() });
    }
    Ok(())
}

fn section(heading: &str, about: &str, figures: &[Figure]) -> Result<String, Error> {
    let body = figures.iter().map(show).collect::<Result<String, _>>()?;
    Ok(if body.is_empty() { body } else { format!("<h4>{heading}</h4><p>{about}</p>{body}") })
}

fn show(figure: &Figure) -> Result<String, Error> {
    let mut html = format!("<figure aria-label=\"{}\">", escape(&figure.title));
    for view in &figure.views {
        let values = list(&view.values);
        let values =
            if values.is_empty() { values } else { format!("<details><summary>Values</summary>{values}</details>") };
        let _ = write!(html, "<div class=\"view {}\">{}{values}</div>", view.class, view.svg(&figure.heading())?);
    }
    // The choice of views applies to the whole page, so a figure without the chosen view must say so.
    if figure.views.iter().any(|view| ["rate", "time"].contains(&view.class)) {
        let lacks = |class: &&str| figure.views.iter().all(|view| view.class != *class);
        for class in ["rate", "time", "fraction"].iter().filter(|class| lacks(class)) {
            let why = match *class {
                "fraction" => format!("No {} was timed in this run.", figure.roof),
                _ => "Not measured.".into(),
            };
            let _ = write!(html, "<p class=\"view {class} empty\">{why}</p>");
        }
    }
    Ok(html + &list(&figure.missing) + &tile_table(&figure.tiles) + "</figure>")
}

fn list(texts: &[String]) -> String {
    let items: String = texts.iter().map(|text| format!("<li>{}</li>", escape(text))).collect();
    if items.is_empty() { items } else { format!("<ul class=\"list\">{items}</ul>") }
}

/// Escapes text for an element or a quoted attribute.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Our highest rates, in large type.
fn best(machine: &Machine) -> String {
    let best = |pass: &str| {
        // Hidden scores count as if they were computed, so rates of variants are left out.
        let ours = |row: &&Timing| (&*row.r#impl, &*row.pass, &*row.variant) == ("ours", pass, "none");
        let ours = machine.attention().filter(ours).filter(|row| row.tflops.is_some());
        let row = ours.max_by(|a, b| a.tflops.unwrap_or(0.0).total_cmp(&b.tflops.unwrap_or(0.0)))?;
        let (rate, problem) = (number(row.tflops?), escape(&Problem::from(row).to_string()));
        Some(format!("<div><dt>our best {pass}, {problem}</dt><dd>{rate} <small>TFLOP/s</small></dd></div>"))
    };
    let items: String = ["forward", "backward"].into_iter().filter_map(best).collect();
    if items.is_empty() { items } else { format!("<dl class=\"best\">{items}</dl>") }
}

/// A table. Each cell has a class, an optional sort key that replaces its text, and its text.
fn table(
    columns: &[&str],
    rows: impl Iterator<Item = (&'static str, Vec<(&'static str, Option<f64>, String)>)>,
) -> String {
    let head: String = columns.iter().map(|name| format!("<th>{name}</th>")).collect();
    let mut html = format!("<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>");
    for (class, cells) in rows {
        let _ = write!(html, "<tr class=\"{class}\">");
        for (class, value, text) in cells {
            let value = value.map_or(String::new(), |value| format!(" data-value=\"{value}\""));
            let _ = write!(html, "<td class=\"{class}\"{value}>{}</td>", escape(&text));
        }
        html += "</tr>";
    }
    html + "</tbody></table></div>"
}

fn text(text: impl ToString) -> (&'static str, Option<f64>, String) {
    ("", None, text.to_string())
}

fn measured(value: Option<f64>, name: fn(f64) -> String) -> (&'static str, Option<f64>, String) {
    ("number", value, value.map_or("–".into(), name))
}

fn runs(all: &[Results]) -> String {
    let of = |row: &Timing| [&row.run, &row.date, &row.commit, &row.device, &row.runtime].map(String::clone);
    let of_tiles = |row: &TileTiming| [&row.run, &row.date, &row.commit, &row.device, &row.runtime].map(String::clone);
    let each = all.iter().flat_map(|r| r.timings.iter().map(of).chain(r.tiles.iter().map(of_tiles)));
    let all = distinct(each);
    let count = all.len();
    let rows = all.into_iter().map(|row| ("", row.into_iter().map(text).collect()));
    let table = table(&["run", "date", "commit", "device", "runtime"], rows);
    format!("<details><summary>{count} runs</summary>{table}</details>")
}

fn rows(all: &[Results], roofs: &Roofs) -> String {
    let columns = [
        "results",
        "device",
        "runtime",
        "impl",
        "kernel",
        "pass",
        "problem",
        "ms",
        "p20–p80",
        "TFLOP/s",
        "of matmul",
        "GB/s",
        "of copy",
        "peak memory",
        "run",
    ];
    let row = |results: &Results, row: &Timing| {
        let spread = match (row.median_ms, row.p20_ms, row.p80_ms) {
            (None, ..) => ("reason", None, results.reason(row).to_string()),
            (_, Some(p20), Some(p80)) => text(format!("{}–{}", number(p20), number(p80))),
            _ => text("–"),
        };
        let percent = |part: f64| format!("{:.1}%", part * 100.0);
        let cells = vec![
            text(&results.name),
            text(&row.device),
            text(&row.runtime),
            text(&row.r#impl),
            text(&row.kernel),
            text(&row.pass),
            text(Problem::from(row)),
            measured(row.median_ms, number),
            spread,
            measured(row.tflops, number),
            measured(roofs.part_of_product(row), percent),
            measured(row.gigabytes_per_second(), number),
            measured(roofs.part_of_copy(row), percent),
            measured(row.peak_bytes.map(|size| size as f64), bytes),
            text(&row.run),
        ];
        ("", cells)
    };
    let rows = all.iter().flat_map(|results| results.timings.iter().map(move |timing| row(results, timing)));
    let count = thousands(all.iter().map(|results| results.timings.len() as u64).sum());
    format!(
        "<section id=\"rows\"><h2>All rows</h2><p>{count} in all, repeated measurements included.</p>\
        <input id=\"filter\" type=\"search\" placeholder=\"filter: ours backward causal …\" aria-label=\"Filter\" hidden>{}</section>",
        table(&columns, rows)
    )
}

/// The last of repeated measurements.
fn latest_memory(rows: &[Memory]) -> Vec<&Memory> {
    let what = |row: &Memory| {
        let place = (row.device.clone(), row.runtime.clone());
        (place, Problem::from(row), row.pass.clone(), row.r#impl.clone())
    };
    latest(rows, what)
}

/// Memory in addition to the inputs.
fn beyond(rows: &[&Memory]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let row = |row: &&Memory| {
        let size = |size: Option<u64>| measured(size.map(|size| size as f64), bytes);
        let ratio = row.beyond().map(|size| size as f64 / row.linear_bytes.max(1) as f64);
        let mut cells = [&row.device, &row.runtime].map(text).to_vec();
        cells.extend([Problem::from(*row).to_string(), row.r#impl.clone(), row.pass.clone()].map(text));
        cells.extend([Some(row.input_bytes), row.beyond(), Some(row.linear_bytes)].map(size));
        cells.extend([measured(ratio, |ratio| format!("{ratio:.3}")), size(row.reserved_bytes), text(&row.note)]);
        ("", cells)
    };
    let columns =
        ["device", "runtime", "problem", "impl", "pass", "inputs", "beyond them", "may hold", "ratio", "reserved", ""];
    format!("<h4>Memory beyond the inputs</h4><p>{BEYOND}</p>{}", table(&columns, rows.iter().map(row)))
}

/// Errors of each result, for all implementations side by side.
fn errors(rows: &[Accuracy]) -> String {
    let what = |row: &Accuracy| (Problem::from(row), row.pass.clone(), row.r#impl.clone(), row.kernel.clone());
    let mut rows = latest(rows, what);
    rows.sort_by_key(|row| (Problem::from(*row), row.pass.clone()));
    if rows.is_empty() {
        return String::new();
    }
    let row = |row: &&Accuracy| {
        let Accuracy { o, lse, dq, dk, dv, dbias, .. } = **row;
        let names = [Problem::from(*row).to_string(), row.pass.clone(), row.r#impl.clone(), row.kernel.clone()];
        let errors = [o, lse, dq, dk, dv, dbias].map(|error| measured(error, |error| format!("{error:.1e}")));
        ("", names.map(text).into_iter().chain(errors).collect())
    };
    let columns = ["problem", "pass", "impl", "kernel", "o", "lse", "dq", "dk", "dv", "dbias"];
    format!("<h4>Errors</h4><p>{ERRORS}</p>{}", table(&columns, rows.iter().map(row)))
}

fn tile_table(rows: &[TileTiming]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let row = |row: &TileTiming| {
        let time = match row.median_ms {
            Some(_) => measured(row.median_ms, number),
            None => ("reason", None, format!("– {}", row.note)),
        };
        let cells = vec![
            text(&row.kernel),
            text(format!("{} × {}", row.tile_q, row.tile_k)),
            text(&row.shape),
            time,
            measured(row.tflops, number),
            measured(row.registers.map(f64::from), number),
            measured(row.shared_bytes.map(|size| size as f64), bytes),
            text(if row.chosen { "chosen" } else { "" }),
        ];
        (if row.chosen { "chosen" } else { "" }, cells)
    };
    let columns = ["kernel", "queries × keys", "shape", "ms", "TFLOP/s", "registers", "shared memory", ""];
    format!("<details><summary>All {} shapes</summary>{}</details>", rows.len(), table(&columns, rows.iter().map(row)))
}
