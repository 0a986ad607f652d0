//! Times over tiles of queries and keys.

use super::model::distinct;
use super::svg::{self, Panel, TITLE, WIDTH, escape};
use crate::results::TileTiming;
use std::fmt::Write;

const LEFT: f64 = 62.0;
const ROW: f64 = 44.0;
const COLUMN: f64 = 96.0;

/// The time of the best shape for each size of tiles.
pub fn panel(title: &str, rows: &[&TileTiming]) -> Panel {
    let sizes = |of: fn(&TileTiming) -> usize| {
        let mut sizes = distinct(rows.iter().map(|row| of(row)));
        sizes.sort();
        sizes
    };
    let (heights, widths) = (sizes(|row| row.tile_q), sizes(|row| row.tile_k));
    let column = COLUMN.min((WIDTH - LEFT) / widths.len().max(1) as f64);
    let best = rows.iter().filter_map(|row| row.median_ms).fold(f64::MAX, f64::min);
    let mut body = svg::title(title);
    let _ = write!(body, r#"<text x="0" y="{}">queries of a tile</text>"#, TITLE + 4.0);
    let top = TITLE + 14.0;
    let bottom = top + ROW * heights.len() as f64;
    let mut outline = String::new();
    for (n, tile_q) in heights.iter().enumerate() {
        let y = top + n as f64 * ROW;
        let _ = write!(body, r#"<text class="end" x="{}" y="{}">{tile_q}</text>"#, LEFT - 8.0, y + ROW / 2.0 + 4.0);
        for (n, tile_k) in widths.iter().enumerate() {
            let x = LEFT + n as f64 * column;
            let of_cell = |row: &&&TileTiming| (row.tile_q, row.tile_k) == (*tile_q, *tile_k);
            let cell: Vec<&TileTiming> = rows.iter().filter(of_cell).copied().collect();
            body += &self::cell(&cell, best, [x, y, column]);
            if cell.iter().any(|row| row.chosen) {
                let (width, height) = (column - 2.0, ROW - 2.0);
                outline = format!(r#"<rect class="chosen" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>"#);
            }
        }
    }
    body += &outline;
    for (n, tile_k) in widths.iter().enumerate() {
        let x = LEFT + (n as f64 + 0.5) * column - 1.0;
        let _ = write!(body, r#"<text class="middle" x="{x}" y="{}">{tile_k}</text>"#, bottom + 16.0);
    }
    let middle = LEFT + widths.len() as f64 * column / 2.0;
    let _ = write!(body, r#"<text class="middle" x="{middle}" y="{}">keys of a tile</text>"#, bottom + 34.0);
    Panel { body, height: bottom + 38.0 }
}

/// The best of the shapes of one cell; all of them are said when it is pointed at.
fn cell(rows: &[&TileTiming], best: f64, [x, y, width]: [f64; 3]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut rows = rows.to_vec();
    rows.sort_by(|a, b| a.median_ms.unwrap_or(f64::MAX).total_cmp(&b.median_ms.unwrap_or(f64::MAX)));
    let shapes: Vec<String> = rows.iter().map(|row| describe(row)).collect();
    let title = escape(&shapes.join("\n"));
    // Squared, so that small differences show.
    let fill = rows[0].median_ms.map_or(0.0, |time| 0.05 + 0.75 * (best / time).powi(2));
    let (middle, center, height) = (x + width / 2.0 - 1.0, y + ROW / 2.0, ROW - 2.0);
    let frame =
        format!(r#"<rect x="{x}" y="{y}" width="{}" height="{height}" rx="4" fill-opacity="{fill:.3}"/>"#, width - 2.0);
    let text = |class: &str, y: f64, text: &str| format!(r#"<text class="{class}" x="{middle}" y="{y}">{text}</text>"#);
    let text = match (rows[0].median_ms, rows[0].tflops) {
        (None, _) => text("middle", center + 4.0, "–"),
        (Some(time), None) => text("middle strong", center + 4.0, &format!("{} ms", svg::number(time))),
        (Some(time), Some(rate)) => {
            text("middle strong", center - 2.0, &format!("{} ms", svg::number(time)))
                + &text("middle", center + 13.0, &format!("{} TFLOP/s", svg::number(rate)))
        }
    };
    format!(r#"<g class="cell"><title>{title}</title>{frame}{text}</g>"#)
}

fn describe(row: &TileTiming) -> String {
    let time = row.median_ms.map_or(format!("– {}", row.note), |time| format!("{} ms", svg::number(time)));
    let registers = row.registers.map_or(String::new(), |count| format!(", {count} registers"));
    let shared = row.shared_bytes.map_or(String::new(), |size| format!(", {} shared", svg::bytes(size as f64)));
    let chosen = if row.chosen { " (chosen)" } else { "" };
    format!("{} × {}, {}: {time}{registers}{shared}{chosen}", row.tile_q, row.tile_k, row.shape)
}
