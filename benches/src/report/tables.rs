//! Tables in documents, which a test keeps current.

use super::commits::{Allow, Commits};
use super::model::{Machine, OURS, PRODUCTS, Problem, Results, Roofs, by_who, distinct, passes};
use super::numbers::number;
use crate::error::Error;
use crate::results::{self, MATMUL, Timing};
use crate::timing::WITH_LAUNCHES;
use std::fmt::Write;
use std::fs;
use std::path::Path;

const OPEN: &str = "<!-- results:";
const CLOSE: &str = "<!-- /results -->";

/// In a marker: the table's rows of ours are not from one clean commit, and are to be measured again.
const STALE: &str = " stale";

/// Rewrites the tables between `<!-- results:NAME -->` and `<!-- /results -->`. With `check`, only reports whether they are current.
///
/// # Errors
///
/// If a table's rows of ours are not from one clean commit, unless its marker is `<!-- results:NAME stale -->`; and if a table with such a
/// marker has rows from one clean commit.
pub fn write_tables(directory: &Path, document: &Path, check: bool) -> Result<(), Error> {
    let old = fs::read_to_string(document).map_err(|source| Error::io(document, source))?;
    let markers = |why: String| Error::Markers { file: document.into(), why };
    let (mut new, mut rest) = (String::new(), old.as_str());
    while let Some(start) = rest.find(OPEN) {
        let (before, after) = rest.split_at(start);
        let (name, body) = after[OPEN.len()..]
            .split_once("-->")
            .ok_or_else(|| markers("a marker <!-- results: has no --> after it".into()))?;
        let marked = name.trim();
        let name = marked.strip_suffix(STALE).unwrap_or(marked);
        let allow = if name == marked { Allow::Clean } else { Allow::Stale };
        let end = body.find(CLOSE).filter(|end| !body[..*end].contains(OPEN));
        let end = end.ok_or_else(|| markers(format!("{OPEN}{marked} --> has no {CLOSE} after it")))?;
        let tables = tables(directory, &Results::read(directory, name)?, allow)?;
        let _ = write!(new, "{before}{OPEN}{marked} -->\n{tables}{CLOSE}");
        rest = &body[end + CLOSE.len()..];
    }
    if new.is_empty() {
        return Err(markers(format!("it has no marker {OPEN}NAME --> for a table")));
    }
    new += rest;
    match new == old {
        true => Ok(()),
        false if check => Err(Error::NotCurrent { file: document.into() }),
        false => fs::write(document, new).map_err(|source| Error::io(document, source)),
    }
}

fn tables(directory: &Path, results: &Results, allow: Allow) -> Result<String, Error> {
    // Peers that were timed without an implementation of this repository appear on the report page only.
    let ours = |machine: &&Machine| machine.attention().any(|row| OURS.contains(&row.r#impl.as_str()));
    let file = results::path::<Timing>(directory, &results.name);
    results.machines().iter().filter(ours).map(|machine| table(results, machine, &file, allow)).collect()
}

fn table(results: &Results, machine: &Machine, file: &Path, allow: Allow) -> Result<String, Error> {
    let rows: Vec<&Timing> = machine.attention().collect();
    // Passes timed as a whole have a table of their own results.
    let all = passes(rows.iter().map(|row| row.pass.as_str()));
    let parts: Vec<&str> = all.iter().copied().filter(|pass| ["forward", "backward"].contains(pass)).collect();
    let passes = if parts.is_empty() { all } else { parts };
    let rows: Vec<&Timing> = rows.into_iter().filter(|row| passes.contains(&row.pass.as_str())).collect();
    let columns = by_who(&rows, &rows, |row| [&row.r#impl, "", "", ""]);
    let of_ours = Commits::of(rows.iter().copied());
    of_ours.check(file, &format!("the table of {}", machine.title()), allow)?;
    let stale = match allow {
        Allow::Stale => {
            format!(" **To be measured again**, as rows of ours are not of one clean commit ({}).", of_ours.text())
        }
        _ => String::new(),
    };
    let decodes = rows.iter().any(|row| row.gigabytes_per_second().is_some());
    let mut roofs = Roofs::default();
    roofs.add(machine.rows.iter().copied());
    let mut bandwidth = String::new();
    if decodes {
        bandwidth += " Of up to 16 queries GB/s: the bytes of q, k, v and o, each number once";
        let copies = distinct(machine.rows.iter().filter_map(|row| roofs.copy(&row.run)).map(number));
        bandwidth += &match copies.is_empty() {
            true => ".".into(),
            false => {
                let rates = copies.join(" and ");
                format!("; and percent of the rate of a copy of 2 GiB in the same run, {rates} GB/s read and written.")
            }
        };
    }
    let dates = distinct(rows.iter().map(|row| row.date.as_str())).join(", ");
    let commits = distinct(rows.iter().map(|row| row.commit.as_str())).join(", ");
    let roof = machine.rows.iter().filter(|row| row.r#impl == MATMUL).find_map(|row| row.tflops);
    let mut text = format!(
        "\n{}; commit {commits}, {dates}.{stale} TFLOP/s, {}; causal counts half the operations, the backward 2.5 times the \
        forward's.{bandwidth}{}\n\n",
        cell(&machine.title()),
        passes.join(" / "),
        roof.map_or(String::new(), |roof| format!(" A product of matrices reaches {}.", number(roof)))
    );
    let names: String = columns.iter().map(|(who, _)| format!(" {} |", cell(&who.label))).collect();
    // Ours are compared with other implementations, not with each other.
    let others = columns.iter().any(|(who, _)| !OURS.contains(&who.class));
    let compared: Vec<&str> =
        columns.iter().map(|(who, _)| who.class).filter(|name| others && OURS.contains(name)).collect();
    let ratios: String = compared.iter().map(|name| format!(" {name} ÷ best other |")).collect();
    let _ = writeln!(text, "| [batch, heads, sequence, head_dim] |{names}{ratios}");
    let _ = writeln!(text, "|---|{}", "--:|".repeat(columns.len() + compared.len()));
    for problem in distinct(rows.iter().map(|row| Problem::from(*row))) {
        let of = |pass: &str, rows: &[&Timing]| fastest(rows, pass, &problem).map(|row| reached(results, &roofs, row));
        let _ = write!(text, "| {} |", cell(&problem.to_string()));
        for (_, rows) in &columns {
            let parts = passes.iter().map(|pass| of(pass, rows).unwrap_or("–".into()));
            let _ = write!(text, " {} |", distinct_or_joined(parts.collect()));
        }
        for name in &compared {
            let ratio = |pass: &&str| {
                let rate = |wanted: &dyn Fn(&str) -> bool| {
                    let rows: Vec<&Timing> = rows.iter().copied().filter(|row| wanted(&row.r#impl)).collect();
                    fastest(&rows, pass, &problem)?.tflops
                };
                let (ours, other) = (rate(&|of| of == *name), rate(&|of| !OURS.contains(&of) && of != PRODUCTS));
                ours.zip(other).map_or("–".into(), |(ours, other)| format!("{:.2}×", ours / other))
            };
            let _ = write!(text, " {} |", distinct_or_joined(passes.iter().map(ratio).collect()));
        }
        text.push('\n');
    }
    Ok(text + "\n")
}

/// The row of the fastest kernel, or one that failed.
fn fastest<'a>(rows: &[&'a Timing], pass: &str, problem: &Problem) -> Option<&'a Timing> {
    let same = rows.iter().copied().filter(|row| row.pass == pass && Problem::from(*row) == *problem);
    same.max_by(|a, b| a.tflops.unwrap_or(-1.0).total_cmp(&b.tflops.unwrap_or(-1.0)))
}

/// The rate, with the part of a copy's if it is one of decoding, or a dash with the kind of failure.
fn reached(results: &Results, roofs: &Roofs, row: &Timing) -> String {
    let reason = || results.reason(row).split(':').next().unwrap_or_default();
    if let Some(rate) = row.gigabytes_per_second() {
        let part = roofs.part_of_copy(row).map_or(String::new(), |part| format!(", {:.0}%", 100.0 * part));
        let launches =
            if results.reason(row).contains(WITH_LAUNCHES) { format!(" ({WITH_LAUNCHES})") } else { String::new() };
        return format!("{} GB/s{part}{launches}", number(rate));
    }
    row.tflops.map_or_else(|| format!("– ({})", cell(reason())), number)
}

/// `a / b`, or a single dash if all parts are the same dash.
fn distinct_or_joined(parts: Vec<String>) -> String {
    match distinct(parts.iter()).as_slice() {
        [only] if only.starts_with('–') => only.to_string(),
        _ => parts.join(" / "),
    }
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;")
}
