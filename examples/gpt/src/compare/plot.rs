//! Plot of a comparison: speed and memory over the context, with a line for each implementation of attention.

use super::table::Row;
use crate::error::Error;
use crate::files::write_atomically;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::error::Error as StdError;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Colours that colour-blind readers can distinguish, too (Okabe and Ito).
const COLOURS: [RGBColor; 3] = [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115)];

/// One diagram.
struct Panel {
    caption: String,
    value: fn(&Row) -> Option<f64>,
    label: fn(&f64) -> String,
    /// Position of the legend, where few lines pass.
    legend: SeriesLabelPosition,
}

/// Plots tokens/s and peak memory over the context, below a heading. Failed measurements are left out.
///
/// # Errors
///
/// If the file cannot be written.
pub fn plot(path: &Path, heading: &str, rows: &[Row]) -> Result<(), Error> {
    let svg = draw(heading, rows).map_err(|error| Error::io(path)(io::Error::other(error.to_string())))?;
    write_atomically(path, &[svg.as_bytes()])
}

fn draw(heading: &str, rows: &[Row]) -> Result<String, Box<dyn StdError>> {
    let speed = Panel {
        caption: "training, tokens/s".to_string(),
        value: |row| row.tokens_per_second,
        label: |value| format!("{value}"),
        legend: SeriesLabelPosition::LowerLeft,
    };
    let memory = Panel {
        caption: "peak memory".to_string(),
        value: |row| row.peak_bytes.map(|bytes| bytes as f64 / (1 << 20) as f64),
        label: |mib| if *mib < 1024.0 { format!("{mib} MiB") } else { format!("{} GiB", mib / 1024.0) },
        legend: SeriesLabelPosition::UpperLeft,
    };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (1000, 420)).into_drawing_area();
        root.fill(&WHITE)?;
        let areas = root.titled(heading, ("sans-serif", 14))?.split_evenly((1, 2));
        for (area, panel) in areas.iter().zip([speed, memory]) {
            panel.draw(area, rows)?;
        }
        root.present()?;
    }
    Ok(svg)
}

impl Panel {
    fn draw(&self, area: &DrawingArea<SVGBackend, Shift>, rows: &[Row]) -> Result<(), Box<dyn StdError>> {
        let contexts = powers_of_two(rows.iter().map(|row| row.context as f64));
        let values = powers_of_two(rows.iter().filter_map(self.value));
        let mut chart = ChartBuilder::on(area)
            .margin(20)
            .caption(&self.caption, ("sans-serif", 20))
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(contexts.log_scale().base(2.0), values.log_scale().base(2.0))?;
        let label = self.label;
        chart
            .configure_mesh()
            .x_desc("context, tokens")
            .x_labels(8)
            .y_labels(8)
            .x_label_formatter(&|context| format!("{context}"))
            .y_label_formatter(&label)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (kind, colour) in kinds(rows).into_iter().zip(COLOURS) {
            let of_kind = rows.iter().filter(|row| row.attention == kind);
            let mut points: Vec<_> = of_kind.filter_map(|row| Some((row.context as f64, (self.value)(row)?))).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
                .label(kind)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(self.legend.clone())
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
        Ok(())
    }
}

/// The implementations of attention, each once, in their order.
fn kinds(rows: &[Row]) -> Vec<&str> {
    let mut kinds = Vec::new();
    for row in rows {
        if !kinds.contains(&row.attention.as_str()) {
            kinds.push(&row.attention);
        }
    }
    kinds
}

/// The smallest range between powers of two that contains all values.
fn powers_of_two(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let low = values.clone().fold(f64::MAX, f64::min).log2().floor();
    let high = values.fold(f64::MIN_POSITIVE, f64::max).log2().ceil();
    match low < high {
        true => low.exp2()..high.exp2(),
        // All values are one power of two, or there is no value.
        false if low == high => (low - 1.0).exp2()..(high + 1.0).exp2(),
        false => 1.0..2.0,
    }
}
