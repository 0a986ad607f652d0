//! Lines over a logarithmic axis.

use super::model::{Who, distinct};
use super::svg::{self, Panel, Range, Scale, Svg, TITLE, WIDTH, escape};
use std::fmt::Write;

const LEFT: f64 = 62.0;
const HEIGHT: f64 = 216.0;
/// Distance of the first and last value from the frame.
const INSET: f64 = 16.0;

/// A value measured at a place, or the lack of one.
pub struct Point {
    /// Where.
    pub x: usize,
    /// How much.
    pub y: Option<f64>,
    /// What is said when it is pointed at.
    pub title: String,
}

/// The points of one line, in order.
pub struct Line {
    /// Whose.
    pub who: Who,
    /// Where they are.
    pub points: Vec<Point>,
}

/// One chart of several that share both axes.
#[derive(Default)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// Its lines.
    pub lines: Vec<Line>,
    /// Where a line ends for a reason: the place, its class and the reason.
    pub ends: Vec<(usize, &'static str, String)>,
}

/// Charts beside each other; nothing where no point has a value.
pub fn draw(class: &'static str, x_label: &str, y_label: &str, scale: Scale, plots: &[Plot]) -> Option<Svg> {
    let lines = || plots.iter().flat_map(|plot| &plot.lines);
    let range = scale.range(lines().flat_map(|line| &line.points).filter_map(|point| point.y))?;
    let ends = plots.iter().flat_map(|plot| plot.ends.iter().map(|end| end.0));
    let mut places = distinct(lines().flat_map(|line| line.points.iter().map(|point| point.x)).chain(ends));
    places.sort();
    let shown = plots.iter().filter(|plot| plot.lines.iter().any(|line| line.points.iter().any(|p| p.y.is_some())));
    let panels: Vec<Panel> = shown.map(|plot| panel(plot, x_label, y_label, &range, &places)).collect();
    Some(svg::figure(class, &panels, lines().map(|line| line.who.clone())))
}

fn panel(plot: &Plot, x_label: &str, y_label: &str, range: &Range, places: &[usize]) -> Panel {
    let (bottom, right) = (TITLE + 16.0 + HEIGHT, WIDTH - 8.0);
    let log = |place: usize| (place.max(1) as f64).log2();
    let (first, last) = (log(places[0]), log(places[places.len() - 1]));
    let x_of = |place: usize| {
        let part = if last > first { (log(place) - first) / (last - first) } else { 0.5 };
        LEFT + INSET + part * (right - LEFT - 2.0 * INSET)
    };
    let y_of = |value: f64| bottom - range.at(value) * HEIGHT;
    let mut body = svg::title(&plot.title);
    let _ = write!(body, r#"<text x="0" y="{}">{}</text>"#, TITLE + 4.0, escape(y_label));
    for tick in range.ticks() {
        let (y, name) = (y_of(tick), range.scale.name(tick));
        let _ = write!(body, r#"<path class="grid" d="M{LEFT} {y:.1}H{right}"/>"#);
        let _ = write!(body, r#"<text class="end" x="{}" y="{:.1}">{name}</text>"#, LEFT - 8.0, y + 4.0);
    }
    let mut free = 0.0;
    for place in places {
        let x = x_of(*place);
        let _ = write!(body, r#"<path class="tick" d="M{x:.1} {bottom}v5"/>"#);
        if x > free {
            let name = svg::length(*place);
            let _ = write!(body, r#"<text class="middle" x="{x:.1}" y="{}">{name}</text>"#, bottom + 18.0);
            free = x + 7.0 * name.len() as f64 + 8.0;
        }
    }
    let _ = write!(body, r#"<path class="axis" d="M{LEFT} {bottom}H{right}"/>"#);
    let middle = (LEFT + right) / 2.0;
    let _ = write!(body, r#"<text class="middle" x="{middle}" y="{}">{}</text>"#, bottom + 36.0, escape(x_label));
    for (place, class, reason) in &plot.ends {
        let x = x_of(*place);
        let _ = write!(body, r#"<g class="stop {class}"><path d="M{x:.1} {}V{bottom}"/>"#, TITLE + 10.0);
        let anchor = if x > middle { "end" } else { "start" };
        let _ = write!(body, r#"<text class="{anchor}" x="{x:.1}" y="{}">{}</text></g>"#, TITLE + 4.0, escape(reason));
    }
    // The first is drawn last, over the others.
    for line in plot.lines.iter().rev() {
        let (mut path, mut circles, mut pen) = (String::new(), String::new(), 'M');
        for point in &line.points {
            // A line stops where there is no value: what lies beyond was not measured.
            let Some(value) = point.y else {
                pen = 'M';
                continue;
            };
            let (x, y) = (x_of(point.x), y_of(value));
            let _ = write!(path, "{pen}{x:.1} {y:.1}");
            let name = escape(&point.title);
            let _ = write!(circles, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.5"><title>{name}</title></circle>"#);
            pen = 'L';
        }
        let (class, dash, label) = (line.who.class, line.who.dash % 4, escape(&line.who.label));
        let _ =
            write!(body, r#"<g class="line {class} dash{dash}" data-label="{label}"><path d="{path}"/>{circles}</g>"#);
    }
    Panel { body, height: bottom + 40.0 }
}
