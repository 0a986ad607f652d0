//! Maps of times over tile sizes.

use super::chart::{self, Area, Axis, Chart, Drawn, FOOT, HEAD, INK, RULE, Scale, TEXT, bold, colour, plain};
use super::model::distinct;
use super::numbers::number;
use crate::results::TileTiming;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

const ROW: u32 = 44;

/// Tile sizes and rows of one kernel.
struct Plot {
    kernel: String,
    tile_q: Vec<usize>,
    tile_k: Vec<usize>,
    rows: Vec<TileTiming>,
}

/// A map for each kernel.
pub fn chart(rows: &[&TileTiming]) -> Chart {
    let plot = |kernel: &str| {
        let rows: Vec<TileTiming> = rows.iter().filter(|row| row.kernel == kernel).map(|row| (*row).clone()).collect();
        let sizes = |of: fn(&TileTiming) -> usize| {
            let mut sizes = distinct(rows.iter().map(of));
            sizes.sort();
            sizes
        };
        Plot { kernel: kernel.into(), tile_q: sizes(|row| row.tile_q), tile_k: sizes(|row| row.tile_k), rows }
    };
    let plots: Vec<Plot> = distinct(rows.iter().map(|row| row.kernel.as_str())).into_iter().map(plot).collect();
    let rows = plots.iter().map(|plot| plot.tile_q.len()).max().unwrap_or(0) as u32;
    let (panels, height) = (plots.len(), HEAD + ROW * rows + FOOT);
    let draw = Box::new(move |n: usize, area: &Area| draw(&plots[n], rows, area));
    Chart { class: "tiles", values: Vec::new(), legend: Vec::new(), panels, height, draw }
}

/// An axis with the names of sizes, each at the middle of its cells.
fn axis(sizes: &[usize], label: &'static str, range: Range<f64>) -> Axis {
    let names = sizes.iter().enumerate().map(|(n, size)| (n as f64 + 0.5, size.to_string())).collect();
    Axis { label, scale: Scale::Linear, range, names }
}

fn draw(plot: &Plot, rows: u32, area: &Area) -> Drawn {
    let x_axis = axis(&plot.tile_k, "keys of a tile", 0.0..plot.tile_k.len() as f64);
    let y_axis = axis(&plot.tile_q, "queries of a tile", f64::from(rows)..0.0);
    let chart = chart::panel(area, &plot.kernel, [62, 18], [&x_axis, &y_axis])?;
    let plotted = chart.plotting_area();
    let best = plot.rows.iter().filter_map(|row| row.median_ms).fold(f64::MAX, f64::min);
    for (y, tile_q) in plot.tile_q.iter().enumerate() {
        for (x, tile_k) in plot.tile_k.iter().enumerate() {
            let same = |row: &&TileTiming| (row.tile_q, row.tile_k) == (*tile_q, *tile_k);
            let cell = || plot.rows.iter().filter(same);
            let time = |row: &TileTiming| row.median_ms.unwrap_or(f64::MAX);
            let Some(row) = cell().min_by(|a, b| time(a).total_cmp(&time(b))) else { continue };
            let (x, y) = (x as f64, y as f64);
            let (left, right, top, bottom) = (x + 0.01, x + 0.99, y + 0.02, y + 0.98);
            // Squared, to make small differences visible.
            let fill = row.median_ms.map_or(0.0, |time| 0.05 + 0.75 * (best / time).powi(2));
            plotted.draw(&Rectangle::new([(left, top), (right, bottom)], colour("ours-tf32").mix(fill).filled()))?;
            let edge = if cell().any(|row| row.chosen) { INK.stroke_width(3) } else { RULE.stroke_width(1) };
            let corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
            plotted.draw(&PathElement::new(corners, edge))?;
            let time = row.median_ms.map_or("–".into(), |time| format!("{} ms", number(time)));
            let rate = row.tflops.map(|rate| format!("{} TFLOP/s", number(rate)));
            let lines = [(0.34, Some(time), bold(TEXT)), (0.7, rate, plain(INK))];
            for (down, text, style) in lines {
                let style = style.pos(Pos::new(HPos::Center, VPos::Center));
                plotted.draw(&Text::new(text.unwrap_or_default(), (x + 0.5, y + down), style))?;
            }
        }
    }
    Ok(())
}
