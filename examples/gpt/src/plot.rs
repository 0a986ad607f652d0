//! Plot of a run's losses.

use crate::error::Error;
use crate::files::write_atomically;
use crate::losses::Row;
use plotters::prelude::*;
use std::error::Error as StdError;
use std::io;
use std::path::Path;

/// Plots training and validation loss over the steps.
pub fn plot(path: &Path, rows: &[Row], steps: usize, unit: &str) -> Result<(), Error> {
    let svg = draw(rows, steps, unit).map_err(|error| Error::io(path)(io::Error::other(error.to_string())))?;
    write_atomically(path, &[svg.as_bytes()])
}

fn draw(rows: &[Row], steps: usize, unit: &str) -> Result<String, Box<dyn StdError>> {
    let curve = |loss: fn(&Row) -> Option<f32>| rows.iter().filter_map(move |row| Some((row.step, loss(row)?)));
    let train: Vec<_> = curve(|row| row.train_loss).collect();
    let validation: Vec<_> = curve(|row| row.validation_loss).collect();
    let losses = || train.iter().chain(&validation).map(|(_, loss)| *loss);
    let (low, high) = (losses().fold(f32::MAX, f32::min), losses().fold(f32::MIN, f32::max));

    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (800, 500)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(20)
            .caption("loss", ("sans-serif", 20))
            .x_label_area_size(40)
            .y_label_area_size(50)
            .build_cartesian_2d(0..steps.max(1), (low - 0.1).max(0.0)..high + 0.1)?;
        chart.configure_mesh().x_desc("step").y_desc(format!("nats per {unit}")).light_line_style(WHITE).draw()?;
        chart
            .draw_series(LineSeries::new(train, BLUE.mix(0.5)))?
            .label("training")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLUE.mix(0.5)));
        chart
            .draw_series(LineSeries::new(validation, RED.stroke_width(2)))?
            .label("validation")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], RED.stroke_width(2)));
        chart.configure_series_labels().background_style(WHITE).border_style(BLACK.mix(0.3)).draw()?;
        root.present()?;
    }
    Ok(svg)
}
