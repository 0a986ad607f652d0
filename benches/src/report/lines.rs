//! Line charts over a logarithmic axis.

use super::chart::{self, Area, Axis, Chart, Drawn, FOOT, HEAD, INK, Scale, TEXT, colour, plain, stroke, width};
use super::model::{Who, distinct};
use super::numbers::length;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A measured value, or a missing one.
pub struct Point {
    /// Position on the x axis.
    pub x: usize,
    /// Value.
    pub y: Option<f64>,
    /// Value as text.
    pub text: String,
}

/// The points of one line, in order.
pub struct Line {
    /// Whose line it is.
    pub who: Who,
    /// Points.
    pub points: Vec<Point>,
}

/// One of several charts that share both axes.
pub struct Plot {
    /// Title.
    pub title: String,
    /// Lines.
    pub lines: Vec<Line>,
    /// Mark where a line ends: its position, its class and the reason.
    pub end: Option<(usize, &'static str, String)>,
}

impl Plot {
    fn values(&self) -> impl Iterator<Item = f64> {
        self.lines.iter().flat_map(|line| &line.points).filter_map(|point| point.y)
    }

    fn texts(&self) -> impl Iterator<Item = String> {
        let of = |point: &Point| point.y.map(|_| format!("{} at {}", point.text, length(point.x)));
        self.lines.iter().filter_map(move |line| chart::text(&self.title, &line.who, line.points.iter().filter_map(of)))
    }
}

/// Charts next to each other with these axis labels; `None` if no point has a value.
pub fn chart(class: &'static str, labels: [&'static str; 2], scale: Scale, mut plots: Vec<Plot>) -> Option<Chart> {
    let lines = || plots.iter().flat_map(|plot| &plot.lines);
    let y_axis = Axis::holding(plots.iter().flat_map(Plot::values), labels[1], scale)?;
    let ends = plots.iter().filter_map(|plot| plot.end.as_ref().map(|end| end.0));
    let mut places = distinct(lines().flat_map(|line| line.points.iter().map(|point| point.x)).chain(ends));
    places.sort();
    let x_axis = places_axis(&places, labels[0]);
    let legend = distinct(lines().map(|line| line.who.clone()));
    let values = plots.iter().flat_map(Plot::texts).collect();
    plots.retain(|plot| plot.values().next().is_some());
    let (panels, height) = (plots.len(), HEAD + 216 + FOOT);
    let draw = Box::new(move |n: usize, area: &Area| draw(&plots[n], [&x_axis, &y_axis], area));
    Some(Chart { class, values, legend, panels, height, draw })
}

/// A logarithmic axis with a tick at each position, and names where they fit.
fn places_axis(places: &[usize], label: &'static str) -> Axis {
    let (first, last) = (places[0] as f64, places[places.len() - 1] as f64);
    // Margin between the frame and the outermost points.
    let room = if last > first { (last / first).powf(0.05) } else { 2.0 };
    let range = first / room..last * room;
    let mut free = f64::MIN;
    let name = |place: &usize| {
        let (at, name) = (*place as f64, length(*place));
        let pixels = 400.0 * (at / range.start).ln() / (range.end / range.start).ln();
        if pixels < free {
            return (at, String::new());
        }
        free = pixels + f64::from(width(&name, TEXT)) + 8.0;
        (at, name)
    };
    let names = places.iter().map(name).collect();
    Axis { label, scale: Scale::Log, range, names }
}

fn draw(plot: &Plot, axes: [&Axis; 2], area: &Area) -> Drawn {
    let mut chart = chart::panel(area, &plot.title, [78, 18], axes)?;
    let [across, up] = axes.map(|axis| axis.range.clone());
    if let Some((place, class, reason)) = &plot.end {
        let x = *place as f64;
        let ends = [(x, up.start), (x, up.end)];
        chart.draw_series(DashedLineSeries::new(ends, 3, 3, colour(class).stroke_width(1)))?;
        // On the side with more space.
        let side = if x * x > across.start * across.end { HPos::Right } else { HPos::Left };
        let style = plain(INK).pos(Pos::new(side, VPos::Bottom));
        chart.plotting_area().draw(&Text::new(reason.as_str(), (x, up.end), style))?;
    }
    // The first line is drawn last, on top of the others.
    for line in plot.lines.iter().rev() {
        // A line stops at a missing value.
        for run in line.points.split(|point| point.y.is_none()) {
            let run: Vec<_> = run.iter().filter_map(|point| Some((point.x as f64, point.y?))).collect();
            chart.draw_series([stroke(run.clone(), &line.who)])?;
            chart.draw_series(run.iter().map(|at| Circle::new(*at, 4, colour(line.who.class).filled())))?;
        }
    }
    Ok(())
}
